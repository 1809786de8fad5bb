"""The cards of what verbs return: a sync, a move between device states, an export, what a trainer stands at."""

from __future__ import annotations

from typing import Any

from rlbench.data.record.metrics import Metrics
from rlbench.notebook.base.markup import chip_text
from rlbench.notebook.cards.card import WARNING, Card, Cell, Grid, Pair
from rlbench.notebook.cards.views import metrics_card
from rlbench.units import format_bytes, format_number

FILES_SHOWN, OPTIONS_SHOWN = 8, 12


def synced_card(synced: Any) -> Card:
    """Which weights the replicas hold now, and how that is known."""
    waits = synced.gap is None
    proof = "waits for the KV cache"
    if not waits:
        proof = f"log-probs differ by {synced.gap:.1g} nats at most ({synced.allowed:g} allowed)"
    rows: tuple[tuple[Cell, ...], ...] = (
        ("proof", proof),
        ("sent", f"{format_bytes(synced.bytes)} in {format_number(synced.tensors)} tensors by {synced.transport}"),
    )
    notes = [f"{WARNING}session.onload('inference') brings the KV cache back and proves the weights"] if waits else []
    version = "" if synced.version is None else f"v{synced.version}"
    return Card("weights synced", (version,), [Grid(rows, labels=True)], notes)


def moved_card(moved: Any) -> Card:
    """Where an engine's parts are now, and what that freed or took."""
    rows: list[tuple[Cell, ...]] = [("state", " · ".join(chip_text(*part) for part in moved.states.items()))]
    sizes = [f"{word} {format_bytes(size)}" for word, size in (("freed", moved.freed), ("took", moved.taken)) if size]
    rows.append(("memory", " · ".join(sizes) or "as it was"))
    if moved.source:
        rows.append(("read again", f"weights from {moved.source}"))
    notes = [f"{WARNING}lost: {', '.join(moved.lost)}"] if moved.lost else []
    version = "" if moved.version is None else f"v{moved.version}"
    return Card(moved.engine, (version,), [Grid(tuple(rows), labels=True)], notes)


def exported_model_card(exported: Any) -> Card:
    """The folder that was written, and what loads it."""
    more = len(exported.files) - FILES_SHOWN
    files = ", ".join(exported.files[:FILES_SHOWN]) + (f" and {more} more" if more > 0 else "")
    rows: tuple[tuple[Cell, ...], ...] = (
        ("path", exported.path),
        ("size", format_bytes(exported.bytes)),
        ("files", files),
    )
    return Card("model", (), [Grid(rows, labels=True)], ["transformers, vLLM and rb.Session(path) load it"])


def done_card(done: Any) -> Card:
    """What is so now."""
    return Card(done.now, (done.mend,))


def names_card(names: Any) -> Card:
    """What happened to which."""
    return Card(names.what, (", ".join(names) or "nothing",))


def redefined_card(redefined: Any) -> Card:
    """What runs on the ranks from now on."""
    facts = ["redefined" if redefined.changed else "as it was", redefined.hash[:4]]
    if redefined.modules > 1:
        facts.append(f"in {format_number(redefined.modules)} modules")
    return Card(redefined.name, facts, notes=[f"{WARNING}{note}" for note in redefined.notes])


def place_card(place: Any) -> Card:
    """How far a trainer's run is."""
    facts = (f"{format_number(place.iterations)} iterations", f"{format_number(place.optimizer_steps)} optimizer steps")
    rows: tuple[tuple[Cell, ...], ...] = (
        ("KL coefficient", format_number(place.kl_coef)),
        ("generate calls", format_number(place.generate_calls)),
    )
    return Card("trainer", facts, [Grid(rows, labels=True)])


def trainer_card(trainer: Any) -> Card:
    """A trainer: its method, the options that were asked for, its last iteration."""
    done = len(trainer.history)
    facts = (trainer.method, f"{format_number(done)} iteration{'' if done == 1 else 's'}")
    asked = [Pair(name, format_number(value)) for name, value in trainer.chosen.items()]
    options = Grid((("options", *asked[:OPTIONS_SHOWN]),), labels=True) if asked else Grid(())
    if not done:
        return Card("trainer", facts, [options], ["trainer.fit(iterations) trains; trainer.step() is one iteration"])
    last = metrics_card(Metrics(trainer.history[-1]))
    return Card("trainer", facts, [options, *last.grids], last.notes)

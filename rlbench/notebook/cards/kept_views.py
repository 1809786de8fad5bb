"""The cards of what a session keeps: snapshots, checkpoints, and what an evaluation found."""

from __future__ import annotations

import time
from typing import Any

from rlbench.notebook.cards.card import WARNING, Card, Cell, Grid
from rlbench.units import format_age, format_bytes, format_number, format_share


def snapshots_card(snapshots: Any) -> Card:
    """All snapshots of a session, oldest first, with what they cost."""
    kept = list(snapshots)
    if not kept:
        return Card("no snapshots yet", notes=["session.snapshot() keeps where the session stands"])
    rows = tuple(
        (s.label, str(s.step), f"v{s.version}", format_bytes(s.bytes), format_bytes(s.fresh), _place(s), _when(s.time))
        for s in kept
    )
    grid = Grid(rows, ("label", "step", "version", "size", "its own", "where", "kept"), frozenset({1, 2, 3, 4}))
    count = f"{len(kept)} snapshot{'' if len(kept) == 1 else 's'}"
    notes = ["session.restore(label) goes back to one, bit for bit; later steps leave the history"]
    last = next((s for s in kept if s.id == snapshots.undo_to), None)
    if last is not None:
        notes.append(f"session.undo() goes back to {last.label!r}: step {last.step}")
    return Card(count, (f"{format_bytes(sum(s.fresh for s in kept))} in all",), [grid], notes)


def snapshot_card(snapshot: Any) -> Card:
    """One snapshot, and what going back to it does."""
    rows: tuple[tuple[Cell, ...], ...] = (
        ("size", f"{format_bytes(snapshot.bytes)}, {format_bytes(snapshot.fresh)} not shared with an earlier one"),
        ("where", _place(snapshot)),
        ("kept", _when(snapshot.time)),
    )
    notes = [
        f"session.restore({snapshot.label!r}): back to step {snapshot.step} and rollout {snapshot.rollouts}, under a "
        "version of its own; the replicas follow",
        "gone when the session closes: session.save(path) is what stays",
    ]
    place = (f"step {snapshot.step}", f"v{snapshot.version}")
    return Card(f"snapshot {snapshot.label}", place, [Grid(rows, labels=True)], notes)


def saved_card(saved: Any) -> Card:
    """A checkpoint that was written, and how to go on from it."""
    rows: list[tuple[Cell, ...]] = [("path", saved.path), ("size", format_bytes(saved.bytes))]
    if saved.removed:
        rows.append(("made way", ", ".join(path.rpartition("/")[2] for path in saved.removed)))
    hint = f"rb.Session.load({saved.path!r}) goes on from it"
    return Card("checkpoint", (), [Grid(tuple(rows), labels=True)], [hint])


def evaluation_card(evaluation: Any) -> Card:
    """The mean reward, how sure it is, and what the answers were like."""
    rollouts = evaluation.rollouts
    rewards = rollouts.rewards[evaluation.counted]
    count = len(rewards)
    error = float(rewards.std()) / max(1, count) ** 0.5
    right = format_share(int((rewards > 0).sum()), count)
    rows: tuple[tuple[Cell, ...], ...] = (
        ("reward", f"{format_number(evaluation.reward)} ± {format_number(error)} (standard error)"),
        ("above 0", f"{right} of {format_number(count)} completions"),
        *((("left out", evaluation.left_out()),) if evaluation.left_out() else ()),
        ("lengths", rollouts.lengths.described()),
    )
    versions = "/".join(f"v{version}" for version in sorted(set(rollouts.versions.tolist())))
    facts = (f"{format_number(len(rollouts))} prompts", versions)
    notes = [*(f"{WARNING}{note}" for note in rollouts.notes), "evaluation.rollouts holds the answers"]
    return Card("evaluation", facts, [Grid(rows, labels=True)], notes)


def healed_card(healed: Any) -> Card:
    """Which engines were built again, and from what they go on."""
    if not healed.engines:
        return Card("nothing to heal", ("every worker lives",))
    return Card("healed", (f"step {healed.step}", f"v{healed.version}"), [Grid(tuple(healed.engines.items()))])


def _place(snapshot: Any) -> str:
    return "disk" if snapshot.disk else "host memory"


def _when(moment: float) -> str:
    now = time.time()
    clock = "%H:%M:%S" if now - moment < 12 * 3600 else "%Y-%m-%d %H:%M"
    return f"{time.strftime(clock, time.localtime(moment))}, {format_age(max(0.0, now - moment))} ago"

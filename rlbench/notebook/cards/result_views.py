"""The cards of what verbs return and of what a session keeps."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from rlbench.data.record.metrics import Metrics
from rlbench.notebook.cards.card import WARNING, Card, Cell, Grid, Pair, counted
from rlbench.notebook.cards.record_views import metrics_card
from rlbench.notebook.cards.session_views import chip_texts, shortened_list
from rlbench.units import format_age, format_bytes, format_number, format_share

FILES_SHOWN, OPTIONS_SHOWN, EVALUATIONS_SHOWN = 8, 12, 20


def done_card(done: Any) -> Card:
    """What is so now."""
    return Card(done.now, (done.mend,))


def names_card(names: Any) -> Card:
    """What happened to which."""
    return Card(names.what, (", ".join(names) or "nothing",))


def synced_card(synced: Any) -> Card:
    """Which weights the replicas hold now, and how that is known."""
    proof, notes = "waits for the KV cache", [f"{WARNING}session.onload('inference') brings it back, and proves them"]
    if synced.gap is not None:
        proof, notes = f"log-probs differ by {synced.gap:.1g} nats at most ({synced.allowed:g} allowed)", []
    return _listed("weights synced", (_version(synced),), {"proof": proof, "sent": synced.sent}, notes)


def moved_card(moved: Any) -> Card:
    """Where an engine's parts are now, and what that freed or took."""
    sizes = [f"{word} {format_bytes(size)}" for word, size in (("freed", moved.freed), ("took", moved.taken)) if size]
    rows = {
        "state": " · ".join(chip_texts(moved.states)),
        "memory": " · ".join(sizes) or "as it was",
        "read again": f"weights from {moved.source}" if moved.source else "",
    }
    notes = [f"{WARNING}lost: {', '.join(moved.lost)}"] if moved.lost else []
    return _listed(moved.engine, (_version(moved),), rows, notes)


def redefined_card(redefined: Any) -> Card:
    """What runs on the ranks from now on."""
    facts = ["redefined" if redefined.changed else "as it was", redefined.hash[:4]]
    if redefined.modules > 1:
        facts.append(f"in {format_number(redefined.modules)} modules")
    return Card(redefined.name, facts, notes=[f"{WARNING}{note}" for note in redefined.notes])


def exported_model_card(exported: Any) -> Card:
    """The folder that was written, and what loads it."""
    files = shortened_list(exported.files, FILES_SHOWN)
    rows = {"path": exported.path, "size": format_bytes(exported.bytes), "files": files}
    alone = "adapter_config.json" in exported.files
    loads = "peft and vLLM load it over its base" if alone else "transformers, vLLM and rb.Session load it"
    if exported.scores:
        loads = "transformers (as a sequence classifier) and rb.RewardModel load it; a trainer's reward= takes it"
    return _listed("adapter" if alone else "reward model" if exported.scores else "model", (), rows, [loads])


def place_card(place: Any) -> Card:
    """How far a trainer's run is."""
    facts = (f"{format_number(place.iterations)} iterations", f"{format_number(place.optimizer_steps)} optimizer steps")
    rows = {"KL coefficient": format_number(place.kl_coef), "generate calls": format_number(place.generate_calls)}
    return _listed("trainer", facts, rows)


def trainer_card(trainer: Any) -> Card:
    """A trainer: its method, the options that were asked for, its last iteration."""
    facts = (trainer.method, counted(len(trainer.history), "iteration"))
    asked = [Pair(name, format_number(value)) for name, value in trainer.chosen.items()]
    options = Grid([("options", *asked[:OPTIONS_SHOWN])] if asked else [], labels=True)
    if not len(trainer.history):
        return Card("trainer", facts, [options], ["trainer.fit(iterations) trains; trainer.step() is one iteration"])
    last = metrics_card(Metrics(trainer.history[-1]))
    return Card("trainer", facts, [options, *last.grids], last.notes)


def evaluation_card(evaluation: Any) -> Card:
    """The mean reward, how sure it is, and what the answers were like."""
    rollouts = evaluation.rollouts
    rewards = rollouts.rewards[evaluation.counted]
    low, high = map(format_number, evaluation.interval)
    sure = f" · 95 % over prompts: {low} to {high}" if len(evaluation.items) > 1 else ""
    right = format_share(int((rewards > 0).sum()), len(rewards))
    rows = {
        "reward": f"{format_number(evaluation.reward)}{sure}",
        "above 0": f"{right} of {format_number(len(rewards))} completions",
        "left out": evaluation.left_out(),
        "lengths": rollouts.lengths.described(),
    }
    versions = "/".join(f"v{version}" for version in sorted(set(rollouts.versions.tolist())))
    hint = "evaluation.rollouts holds the answers; evaluation.table() has a row per prompt"
    notes = [*(f"{WARNING}{note}" for note in rollouts.notes), hint]
    facts = (evaluation.name, f"{format_number(len(rollouts))} prompts", versions)
    return _listed("evaluation", facts, rows | _tries(evaluation), notes)


def evaluations_card(evaluations: Any) -> Card:
    """One row per set: mean reward, how sure it is, what several tries or votes would give."""
    found = [(one, _tries(one)) for one in evaluations.values()]
    tries = list(dict.fromkeys(name for _, more in found for name in more))
    rows = []
    for one, more in found:
        counts = format_number(len(one.items)), format_number(int(one.counted.sum()))
        rewards = format_number(one.reward), _interval(*one.interval)
        rows.append((one.name, *rewards, *(more.get(name, "") for name in tries), *counts))
    head = ("set", "reward", "95 % over prompts", *tries, "prompts", "completions")
    notes = [f"{WARNING}{one.name}: left out {one.left_out()}" for one, _ in found if one.left_out()]
    hint = "evaluations[name] is one of them; before.compare(after) pairs two of the same prompts"
    versions = dict.fromkeys(_held(one) for one, _ in found)
    return Card("evaluations", tuple(versions), [Grid(rows, head, frozenset(range(1, len(head))))], [*notes, hint])


def compared_card(compared: Any) -> Card:
    """What changed between two evaluations, by chance or not, and on how many prompts."""
    paired, before, after = compared.paired, compared.before, compared.after
    rows = {
        "reward": f"{format_number(before.reward)} → {format_number(after.reward)}",
        "difference": f"{paired.difference:+.3g} · 95 %: {paired.low:+.3g} to {paired.high:+.3g}",
        "by chance": f"p = {paired.p_value:.2g}, a paired test",
        "better": counted(len(compared.gained), "prompt"),
        "worse": counted(len(compared.lost), "prompt"),
    }
    hint = "compared.rollouts() shows those that changed, compared.rollouts(compared.lost, after=False) as they were"
    return _listed("compared", (after.name, f"{_held(before)} → {_held(after)}"), rows, [hint])


def past_evaluations_card(evaluations: Any) -> Card:
    """The evaluations of a session, and whether their weights still lead to those it has."""
    if not len(evaluations):
        return Card("no evaluations yet", notes=["session.evaluate(prompts, reward) makes one"])
    rows = [
        (
            one["set"] or "–",
            str(one["step"]),
            "several" if one["version"] is None else f"v{one['version']}",
            format_number(one["reward"]),
            _interval(one["low"], one["high"]),
            format_number(one["completions"]),
            f"{WARNING}undone" if one["state"] == "undone" else one["state"],
            _when(one["time"]),
        )
        for one in evaluations.records[-EVALUATIONS_SHOWN:]
    ]
    head = ("set", "step", "version", "reward", "95 %", "completions", "weights", "made")
    left = len(evaluations) - len(rows)
    notes = [f"{left} earlier ones are not shown"] if left else []
    hint = "session.evaluations.at(version, set) gives one again, to compare with another"
    return Card(counted(len(evaluations), "evaluation"), (), [Grid(rows, head, frozenset({1, 3, 5}))], [*notes, hint])


def _held(evaluation: Any) -> str:
    return "several versions" if evaluation.version is None else f"v{evaluation.version}"


def _tries(evaluation: Any) -> dict[str, str]:
    """What several tries of a prompt, or a vote among them, would give."""
    found = {name.rpartition("/")[2]: value for name, value in evaluation.metrics().items()}
    return {name: format_number(value) for name, value in found.items() if name != "reward"}


def _interval(low: float, high: float) -> str:
    """An interval; empty where one prompt gives none."""
    return "" if low != low else f"{format_number(low)} to {format_number(high)}"


def pair_evaluation_card(evaluation: Any) -> Card:
    """How often the better response scores higher, how sure that is, and whether confidence and accuracy agree."""
    low, high = evaluation.interval
    count = format_number(len(evaluation.right))
    counted_as = "verdicts" if evaluation.heads else "pairs"
    rows = {
        "accuracy": f"{evaluation.accuracy:.3f} · 95 %: {low:.3f} to {high:.3f}",
        "margin": f"{format_number(evaluation.margin)} · log loss {format_number(evaluation.log_loss)} nats",
        "calibration error": f"{evaluation.calibration_error:.3f} · mean distance of confidence and accuracy",
        "heads": " · ".join(f"{name} {own.accuracy:.3f}" for name, own in evaluation.heads.items()),
        "ties": f"{int(evaluation.tied.sum())}, neither right nor wrong" if evaluation.tied.any() else "",
    }
    card = _listed("reward model, evaluation", (f"{count} {counted_as}", _version(evaluation)), rows)
    return replace(card, chart=evaluation.plot())


def healed_card(healed: Any) -> Card:
    """Which engines were built again, and from what they go on."""
    if not healed.engines:
        return Card("nothing to heal", ("every worker lives",))
    return Card("healed", (f"step {healed.step}", f"v{healed.version}"), [Grid(tuple(healed.engines.items()))])


def snapshots_card(snapshots: Any) -> Card:
    """All snapshots of a session, oldest first, with what they cost."""
    kept = list(snapshots)
    if not kept:
        return Card("no snapshots yet", notes=["session.snapshot() keeps where the session stands"])
    rows = [
        (s.label, str(s.step), f"v{s.version}", format_bytes(s.bytes), format_bytes(s.fresh), _place(s), _when(s.time))
        for s in kept
    ]
    grid = Grid(rows, ("label", "step", "version", "size", "its own", "where", "kept"), frozenset({1, 2, 3, 4}))
    notes = ["session.restore(label) goes back to one, bit for bit; later steps leave the history"]
    notes += [f"session.undo() goes back to {s.label!r}: step {s.step}" for s in kept if s.id == snapshots.undo_to]
    size = f"{format_bytes(sum(s.fresh for s in kept))} in all"
    return Card(counted(len(kept), "snapshot"), (size,), [grid], notes)


def snapshot_card(snapshot: Any) -> Card:
    """One snapshot, and what going back to it does."""
    size = f"{format_bytes(snapshot.bytes)}, {format_bytes(snapshot.fresh)} not shared with an earlier one"
    rows = {"size": size, "where": _place(snapshot), "kept": _when(snapshot.time)}
    notes = [
        f"session.restore({snapshot.label!r}): back to step {snapshot.step} and rollout {snapshot.rollouts}, under a "
        "version of its own; the replicas follow",
        "gone when the session closes: session.save(path) is what stays",
    ]
    return _listed(f"snapshot {snapshot.label}", (f"step {snapshot.step}", f"v{snapshot.version}"), rows, notes)


def saved_card(saved: Any) -> Card:
    """A checkpoint that was written, and how to go on from it."""
    removed = ", ".join(path.rpartition("/")[2] for path in saved.removed)
    rows = {"path": saved.path, "size": format_bytes(saved.bytes), "made way": removed}
    return _listed("checkpoint", (), rows, [f"rb.Session.load({saved.path!r}) goes on from it"])


def preflight_card(result: Any) -> Card:
    """Verdict, checks, and where it did not pass the probable cause and the tokens that differ most."""
    checks = [(c.name, "✓ ok" if c.passed else "✕ failed", c.seen, c.allowed) for c in result.checks]
    grids = [Grid(checks, ("", "", "seen", "allowed"), frozenset({2, 3}))]
    if not result.passed:
        rows = []
        for t in result.worst:
            place, logprobs = map(str, (t.prompt, t.sequence, t.position)), (f"{t.sampler:.4f}", f"{t.trainer:.4f}")
            rows.append((*place, repr(t.text), *logprobs, f"{t.gap:+.2g}"))
        head = ("prompt", "sequence", "token", "", "sampler", "trainer", "difference")
        grids.append(Grid(rows, head, frozenset({0, 1, 2, 4, 5, 6}), labels=True))
    return Card(result.headline, (), grids, [f"{WARNING}{result.cause}"] if result.cause else [])


def rehearsal_card(result: Any) -> Card:
    """One row per engine: highest memory, what there is, what is left."""
    rows = []
    for e in result.engines:
        room = format_bytes(e.headroom) if e.headroom >= 0 else f"{WARNING}−{format_bytes(-e.headroom)}"
        rows.append((e.name, e.what, format_bytes(e.peak), format_bytes(e.limit), room, e.note))
    grid = Grid(rows, ("", "", "peak", "limit", "head-room", ""), frozenset({2, 3, 4}))
    return Card(result.headline, (), [grid], result.notes)


def _listed(title: str, facts: tuple[str, ...], rows: dict[str, str], notes: list[str] | None = None) -> Card:
    """A card of named values; those that are empty are left out."""
    listed: list[tuple[Cell, ...]] = [(name, value) for name, value in rows.items() if value]
    return Card(title, facts, [Grid(listed, labels=True)], notes or [])


def _version(value: Any) -> str:
    return "" if value.version is None else f"v{value.version}"


def _place(snapshot: Any) -> str:
    return "disk" if snapshot.disk else "host memory"


def _when(moment: float) -> str:
    now = time.time()
    clock = "%H:%M:%S" if now - moment < 12 * 3600 else "%Y-%m-%d %H:%M"
    return f"{time.strftime(clock, time.localtime(moment))}, {format_age(max(0.0, now - moment))} ago"

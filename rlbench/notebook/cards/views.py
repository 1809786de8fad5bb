"""The cards of a session, its engines, a batch, a step's metrics and the history. Numbers first, units always."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlbench.data import TrainBatch
from rlbench.data.base.column import Column
from rlbench.data.prompts.sampling import reshaped_notes
from rlbench.data.record.history import History, is_number
from rlbench.data.record.metrics import Metrics
from rlbench.errors import SessionError
from rlbench.notebook.base.markup import chip_text
from rlbench.notebook.base.sparkline import blocks, sparkline
from rlbench.notebook.base.units import is_share, labelled, with_unit
from rlbench.notebook.cards.card import WARNING, Card, Cell, Grid, Pair
from rlbench.notebook.cards.engine_facts import EngineFacts, engine_facts
from rlbench.units import (
    format_age,
    format_bytes,
    format_number,
    format_percent,
    format_share,
)

STEPS_SHOWN, BINS_SHOWN, METHODS_SHOWN, PAIRS_SHOWN, COURSE_WIDTH = 12, 24, 12, 4, 40


# -- session and engines


def session_card(facts: Mapping[str, Any]) -> Card:
    """The card at the end of a cell; `facts` as `SessionCore.facts()` gives them."""
    idle = facts.get("idle_s")
    doing = facts["phase"] or ("" if idle is None else f"idle {format_age(idle)}")
    branch = "" if facts.get("branch", "main") == "main" else f"branch {facts['branch']}"
    parts = max((len(engine.state) for engine in facts["engines"]), default=0)
    rows = tuple(_engine_row(engine, parts) for engine in facts["engines"])
    return Card(
        f"rlbench · {facts['name']}",
        (
            facts["model"],
            f"step {facts['step']}",
            f"v{facts['version']}",
            f"seed {facts['seed']}",
            branch,
            doing,
            facts["lease"],
        ),
        [Grid(rows, numeric=frozenset({2 + parts}))],
    )


def engine_card(engine: Any) -> Card:
    """One engine, as its session's monitor knows it: no worker is asked, so a busy or dead one does not matter."""
    if not engine.built:
        return Card(engine.name, ("not built",), notes=[f"{engine.name}.build(…) starts its workers"])
    try:
        state, samples = engine.link.state("engines", "version"), engine.link.samples()
    except SessionError as gone:
        return Card(engine.name, (), notes=[f"{WARNING}{gone}"])
    record = state["engines"].get(engine.name)
    if record is None:
        return Card(engine.name, (), notes=[f"{WARNING}its session has no engine {engine.name!r} any more"])
    facts = engine_facts(engine.name, record, state["version"], samples[-1] if samples else None)
    methods = [str(method["name"]) for method in record.get("methods", [])]
    return engine_facts_card(facts, methods)


def engine_facts_card(facts: EngineFacts, methods: list[str]) -> Card:
    """The card of one engine; `methods` are those of the user's module."""
    rows: list[tuple[Cell, ...]] = [("state", " · ".join(chip_text(*part) for part in facts.state.items()))]
    memory = f"{format_bytes(facts.bytes)} resident" if facts.bytes else "not sampled yet"
    owners = " · ".join(f"{owner.replace('_', ' ')} {format_bytes(held)}" for owner, held in facts.owners.items())
    rows += [("memory", memory + (f": {owners}" if owners else "")), *facts.about]
    if methods:
        more = len(methods) - METHODS_SHOWN
        rows.append(("methods", ", ".join(methods[:METHODS_SHOWN]) + (f" and {more} more" if more > 0 else "")))
    notes = [f"{WARNING}{facts.note}"] if facts.note else []
    role = "" if facts.role == facts.name else facts.role
    return Card(facts.name, (role, facts.kind, facts.version), [Grid(tuple(rows), labels=True)], notes)


def sessions_card(records: Sequence[Mapping[str, Any]]) -> Card:
    """The sessions on a cluster."""
    if not records:
        return Card("no sessions yet", notes=['rb.Session("tiny") starts one'])
    rows = tuple((str(r["name"]), str(r.get("pid", "")), f"rb.attach({r['name']!r})") for r in records)
    count = f"{len(rows)} session{'' if len(rows) == 1 else 's'}"
    return Card(count, grids=[Grid(rows, ("name", "monitor's pid", "drive it from here"), frozenset({1}))])


def _engine_row(engine: EngineFacts, parts: int) -> tuple[Cell, ...]:
    chips = [chip_text(*part) for part in engine.state.items()]
    note = f"{WARNING}{engine.note}" if engine.note else ""
    return (
        engine.name,
        engine.kind,
        *chips,
        *[""] * (parts - len(chips)),
        format_bytes(engine.bytes) if engine.bytes else "",
        engine.version,
        note,
    )


# -- a batch


def batch_card(batch: TrainBatch) -> Card:
    """What a step would train on."""
    trained = int(batch.mask.sum())
    facts = [
        f"{format_number(len(batch))} sequences",
        f"{format_number(batch.tokens)} response tokens",
        f"{format_number(trained)} trained ({format_share(trained, batch.tokens)})",
    ]
    if not len(batch):
        return Card("batch", facts, notes=["nothing to train on: rollouts.score(reward_fn).batch(advantage=…)"])
    lengths = Column.of(batch.response_lengths, "lengths", "tokens", batch.truncated)
    versions = np.unique(batch.weight_version)
    known = [name for name in ("old_logprobs", "ref_logprobs") if getattr(batch, name) is not None]
    rows: list[tuple[Cell, ...]] = [
        ("lengths", f"{blocks(_heights(lengths), floor=0)}  {_spread(lengths)}"),
        ("prompts", _spread(Column.of(batch.prompts.lengths, "prompts"))),
        *([] if batch.rewards is None else [("reward", _values(batch.rewards))]),
        ("advantage", _advantage(batch)),
        (
            "sampled by",
            ", ".join(f"v{version}" for version in versions[:8])
            + (" …" if len(versions) > 8 else "")
            + f", temperature {format_number(batch.temperature)}",
        ),
        *([("log-probs known", ", ".join(["sampler", *(name.removesuffix("_logprobs") for name in known)]))]),
    ]
    notes = []
    silent = _silent(batch)
    if silent:
        notes.append(f"{silent} of {len(batch)} sequences have advantage 0 throughout: no policy gradient from them")
    notes += [f"{WARNING}{note}" for note in reshaped_notes(batch.reshaped_by)]
    return Card("batch", facts, [Grid(tuple(rows), labels=True)], notes)


def _advantage(batch: TrainBatch) -> str:
    own = batch.advantages[batch.mask]
    return _values(own) if len(own) else "no trained token"


def _values(values: np.ndarray) -> str:
    low, mean, high = float(values.min()), float(values.mean()), float(values.max())
    spread = f"mean {format_number(mean)} ± {format_number(float(values.std()))}"
    return f"{spread} · from {format_number(low)} to {format_number(high)}"


def _spread(column: Column) -> str:
    found = column.summary()
    shown = " · ".join(f"{name} {format_number(round(found[name]))}" for name in ("min", "p50", "p90", "max"))
    cut = f" · {format_percent(found['truncated'])} truncated" if "truncated" in found else ""
    return f"{shown} tokens{cut}"


def _heights(column: Column) -> np.ndarray:
    """Counts in a few equal bins, for a row of blocks."""
    bins = min(BINS_SHOWN, int(column.max() - column.min()) + 1)
    return np.histogram(np.asarray(column), bins)[0]


def _silent(batch: TrainBatch) -> int:
    """Sequences without any advantage to learn from."""
    told = batch.responses.with_values((batch.advantages != 0) & batch.mask)
    sums = np.add.reduceat(np.append(told.values, False).astype(np.int64), told.offsets[:-1])
    return int(((sums == 0) | (told.lengths == 0)).sum())


# -- metrics

RESULT = ("loss", "reward", "reward_std")
POLICY = ("kl", "ref_kl", "entropy", "clip_fraction", "ratio", "clip_fraction_low", "clip_fraction_high", "ppo_kl")
SAMPLER = ("logprob_gap", "logprob_gap_max", "mismatch/kl", "mismatch/ess")
GRADIENT = ("grad_norm", "lr")
SIZE = ("sequences", "tokens", "tokens_per_s", "length", "length_max", "truncated")
GROUPS = (("result", RESULT), ("policy", POLICY), ("sampler", SAMPLER), ("gradient", GRADIENT), ("size", SIZE))
CODE = tuple(f"{what}_{part}" for what in ("loss", "reward", "advantage") for part in ("name", "hash", "source"))
_ELSEWHERE = ("step", "version", "data_version", "skipped", "seconds", "aggregation", "head", *CODE)


def metrics_card(metrics: Metrics) -> Card:
    """What a training verb found, by what it is about; each number under the name it is called by."""
    rows = [row for title, names in GROUPS for row in _pair_rows(title, metrics, names)]
    known = {name for _, names in GROUPS for name in names} | set(_ELSEWHERE)
    others = [name for name in metrics if name not in known and not name.startswith("mismatch/")]
    rows += _pair_rows("others", metrics, others)
    seconds = metrics.get("seconds")
    notes = [time_split(seconds)] if isinstance(seconds, Mapping) and seconds else []
    if metrics.get("skipped"):
        notes.append(f"{WARNING}step skipped: {metrics['skipped']}")
    told = [
        ("step", "step {}"),
        ("version", "v{}"),
        ("data_version", "data of v{}"),
        ("loss_name", "{}"),
        ("aggregation", "{}"),
        ("head", "head {}"),
    ]
    facts = [text.format(metrics[name]) for name, text in told if metrics.get(name) is not None]
    return Card("metrics", facts, [Grid(tuple(rows))], notes)


def time_split(seconds: Mapping[str, Any]) -> str:
    """`0.13 s = forward_backward 0.0739 · optimizer 0.00282 · …`, the longest part first."""
    parts = {name: value for name, value in seconds.items() if name != "total"}
    ranked = sorted(parts.items(), key=lambda part: -part[1] if is_number(part[1]) else 0.0)
    shown = " · ".join(f"{name} {_seconds(value)}" for name, value in ranked)
    if "total" not in seconds:
        return f"{shown} s"
    return f"{_seconds(seconds['total'])} s" + (f" = {shown}" if shown else "")


def _pair_rows(title: str, metrics: Metrics, names: Sequence[str]) -> list[tuple[Cell, ...]]:
    """The metrics of one group that are there, a few to a line."""
    pairs = [Pair(name, with_unit(name, metrics[name])) for name in names if metrics.get(name) is not None]
    lines = [pairs[i : i + PAIRS_SHOWN] for i in range(0, len(pairs), PAIRS_SHOWN)]
    return [(title if i == 0 else "", *line) for i, line in enumerate(lines)]


# -- history


def history_card(history: History) -> Card:
    """The last steps as a table, with the course of the reward and the loss over all of them."""
    records = history.records
    if not records:
        return Card("history", ("no steps yet",), notes=["session.train_step(batch) makes the first"])
    wanted = ("step", "reward", "loss", "kl", "entropy", "clip_fraction", "grad_norm", "length", "loss_name")
    names = [name for name in wanted if any(r.get(name) is not None for r in records)]
    rows = [tuple(_shown(name, r.get(name)) for name in names) for r in records[-STEPS_SHOWN:]]
    courses = [
        (name, sparkline(found, COURSE_WIDTH))
        for name in ("reward", "loss")
        if len(found := [float(r[name]) for r in records if is_number(r.get(name))]) > 1
    ]
    count = f"{format_number(len(records))} step{'' if len(records) == 1 else 's'}"
    shown = f"the last {len(rows)}" if len(rows) < len(records) else ""
    numeric = frozenset(i for i, name in enumerate(names) if name != "loss_name")
    steps = Grid(tuple(rows), tuple(map(labelled, names)), numeric, shown, labels=True)
    hint = "history.plot() draws them · history.to_pandas() is a table"
    return Card("history", (count,), [Grid(tuple(courses), labels=True), steps], [hint])


def _shown(name: str, value: Any) -> str:
    if value is None:
        return ""
    return with_unit(name, value) if is_share(name) else format_number(value)


def _seconds(value: Any) -> str:
    return format_number(float(value)) if is_number(value) else str(value)

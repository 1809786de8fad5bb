"""The cards of a session's record: a step's metrics, the history, the verbs and the script made of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rlbench.data.record.history import History, given_text, is_number
from rlbench.data.record.metric_names import is_evaluated_reward
from rlbench.data.record.metrics import NO_SIGNAL, Metrics
from rlbench.notebook.base.figures import is_share, labelled, sparkline, with_unit
from rlbench.notebook.cards.card import WARNING, Card, Cell, Grid, Pair, counted
from rlbench.units import format_number, format_seconds

STEPS_SHOWN, VERBS_SHOWN, PAIRS_SHOWN, LEFT_OUT_SHOWN, COURSE_WIDTH = 12, 20, 4, 8, 40
GROUPS = {
    "result": ("loss", "reward", "reward_std", "no_signal"),
    "policy": (
        "kl",
        "ref_kl",
        "entropy",
        "clip_fraction",
        "ratio",
        "clip_fraction_low",
        "clip_fraction_high",
        "ppo_kl",
    ),
    "sampler": ("logprob_gap", "logprob_gap_max", "mismatch/kl", "mismatch/ess", "staleness", "staleness_max"),
    "gradient": ("grad_norm", "lr"),
    "size": ("sequences", "tokens", "tokens_per_s", "length", "length_max", "truncated"),
}
FACTS = {
    "step": "step {}",
    "version": "v{}",
    "data_version": "data of v{}",
    "loss_name": "{}",
    "aggregation": "{}",
    "head": "head {}",
}
CODE = tuple(f"{what}_{part}" for what in ("loss", "reward", "advantage") for part in ("name", "hash", "source"))
ELSEWHERE = {*FACTS, "skipped", "seconds", *CODE, *(name for names in GROUPS.values() for name in names)}
COLUMNS = ("step", "reward", "loss", "kl", "entropy", "clip_fraction", "grad_norm", "length", "loss_name")
VERB_METRICS = ("loss", "reward", "kl", "grad_norm")


def metrics_card(metrics: Metrics) -> Card:
    """What a training verb found, by what it is about; each number under the name it is called by."""
    others = [name for name in metrics if name not in ELSEWHERE and not name.startswith("mismatch/")]
    rows: list[tuple[Cell, ...]] = []
    for title, names in [*GROUPS.items(), ("others", others)]:
        pairs = [Pair(name, with_unit(name, metrics[name])) for name in names if metrics.get(name) is not None]
        for i in range(0, len(pairs), PAIRS_SHOWN):
            rows.append(("" if i else title, *pairs[i : i + PAIRS_SHOWN]))
    seconds = metrics.get("seconds")
    notes = [time_split(seconds)] if isinstance(seconds, Mapping) and seconds else []
    if metrics.get("no_signal") == 1:
        notes.append(f"{WARNING}{NO_SIGNAL}")
    if metrics.get("skipped"):
        notes.append(f"{WARNING}step skipped: {metrics['skipped']}")
    facts = [text.format(metrics[name]) for name, text in FACTS.items() if metrics.get(name) is not None]
    return Card("metrics", facts, [Grid(rows)], notes)


def time_split(seconds: Mapping[str, Any]) -> str:
    """`0.13 s = forward_backward 0.0739 · optimizer 0.00282 · …`, the longest part first."""
    parts = {name: value for name, value in seconds.items() if name != "total"}
    ranked = sorted(parts.items(), key=lambda part: -part[1] if is_number(part[1]) else 0.0)
    shown = " · ".join(f"{name} {format_number(value)}" for name, value in ranked)
    if "total" not in seconds:
        return f"{shown} s"
    return f"{format_number(seconds['total'])} s" + (f" = {shown}" if shown else "")


def history_card(history: History) -> Card:
    """The last steps as a table, with the course of the reward and the loss over all of them."""
    records = history.records
    if not records:
        return Card("history", ("no steps yet",), notes=["session.train_step(batch) makes the first"])
    evaluated = dict.fromkeys(name for record in records for name in record if is_evaluated_reward(name))
    names = [name for name in (*COLUMNS, *evaluated) if any(r.get(name) is not None for r in records)]
    rows = [[_value(name, r.get(name)) for name in names] for r in records[-STEPS_SHOWN:]]
    courses = []
    for name in ("reward", "loss"):
        values = [float(r[name]) for r in records if is_number(r.get(name))]
        if len(values) > 1:
            courses.append((name, sparkline(values, COURSE_WIDTH)))
    caption = f"the last {len(rows)}" if len(rows) < len(records) else ""
    numeric = frozenset(i for i, name in enumerate(names) if name != "loss_name")
    steps = Grid(rows, tuple(map(labelled, names)), numeric, caption, labels=True)
    hint = "history.plot() draws them · history.to_pandas() is a table"
    return Card("history", (counted(len(records), "step"),), [Grid(courses, labels=True), steps], [hint])


def verbs_card(verbs: Any) -> Card:
    """The last verbs of a session: with what, how long, what came of it."""
    if not len(verbs):
        return Card("no verbs yet")
    rows = [_verb_row(one) for one in verbs.records[-VERBS_SHOWN:]]
    grid = Grid(rows, ("verb", "at", "took", "with", "what came of it"), frozenset({2}))
    left = len(verbs) - len(rows)
    hint = "verbs.source(verbs[-1]) is its code; verbs.to_pandas() a table; session.export_script(path) a script"
    notes = [*([f"{left} earlier verbs are not shown"] if left else []), hint]
    return Card(counted(len(verbs), "verb"), (), [grid], notes)


def exported_card(exported: Any) -> Card:
    """The script that was written, how to run it, and what is not in it."""
    left = exported.left_out
    lines = [*left[:LEFT_OUT_SHOWN]]
    if len(left) > LEFT_OUT_SHOWN:
        lines.append(f"and {len(left) - LEFT_OUT_SHOWN} more, named in the script")
    rows = [("path", str(exported.path)), ("run it", f"python {exported.path.name}")]
    rows += [("" if i else "left out", line) for i, line in enumerate(lines)]
    note = "at its end it prints its numbers beside those seen here"
    return Card("script", (counted(exported.cells, "cell"),), [Grid(rows, labels=True)], [note])


def _verb_row(one: dict[str, Any]) -> tuple[Cell, ...]:
    clock = time.strftime("%H:%M:%S", time.localtime(one["time"]))
    told = (name for name in one["metrics"] if name in VERB_METRICS or is_evaluated_reward(name))
    metrics = [f"{name} {format_number(one['metrics'][name])}" for name in told]
    came = " · ".join(metrics) if one["outcome"] == "done" else f"{WARNING}{one['outcome']}: {one['said']}"
    return one["verb"], clock, format_seconds(one["seconds"]), given_text(one["args"]), came


def _value(name: str, value: Any) -> str:
    if value is None:
        return ""
    return with_unit(name, value) if is_share(name) else format_number(value)

"""The static views: session card, rollouts, metrics, history. Numbers first; every one also reads as plain text."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlbench.data import Rollout, Rollouts, TrainBatch
from rlbench.data.history import History
from rlbench.data.metrics import SHOWN, Metrics, format_number
from rlbench.notebook.markup import box, chip, escape, gib, table

GROUPS_SHOWN, SAMPLES_SHOWN, TEXT_SHOWN = 4, 4, 400


def session_card(facts: dict[str, Any]) -> str:
    """The card at the end of a cell; `facts` as `Session.facts()` gives them."""
    head = (
        f"<b>rlbench</b> · {escape(facts['name'])} <span class=q>{escape(facts['model'])}</span> &nbsp; "
        f"step {facts['step']} · "
        f"v{facts['version']} · seed {facts['seed']} · <span class=q>{escape(facts['lease'])}</span>"
        + (f" · {escape(facts['phase'])}" if facts["phase"] else "")
    )
    rows = []
    for engine in facts["engines"]:
        chips = " &nbsp; ".join(chip(part, state) for part, state in engine["state"].items())
        note = (
            f"<span class=w>⚠ {escape(engine['note'])}</span>"
            if engine["note"]
            else escape(engine["version"])
        )
        rows.append(
            [f"<b>{escape(engine['name'])}</b>", escape(engine["kind"]), chips, gib(engine["bytes"]), note]
        )
    return box(f"<div>{head}</div>", table(["", "", "", "memory", ""], rows, numeric=[3]))


def rollouts_view(rollouts: Rollouts) -> str:
    """Summary and the most telling groups: mixed rewards first, then the longest spread."""
    parts = [f"<div>{escape(repr(rollouts))}</div>"]
    for p in _telling_groups(rollouts):
        group = rollouts[int(p)]
        rewards = [o.reward for o in group.outputs if o.reward is not None]
        right = f" · reward {np.mean(rewards):.3g} ± {np.std(rewards):.2g}" if rewards else ""
        shown = _telling_samples(group.outputs)
        more = len(group.outputs) - len(shown)
        parts.append(
            f"<div class=g><div>prompt {int(p)}: <code>{escape(_short(group.source.text))}</code>"
            f"<span class=q>{right}</span></div>"
            + table([], map(_row, shown), numeric=[2])
            + (f"<span class=q>… {more} more</span>" if more else "") + "</div>"
        )  # fmt: skip
    hidden = len(rollouts) - min(len(rollouts), GROUPS_SHOWN)
    if hidden:
        parts.append(f"<div class=q>… {hidden} more prompts</div>")
    return box(*parts)


def metrics_view(metrics: Metrics) -> str:
    """One row of numbers."""
    names = [n for n in SHOWN if metrics.get(n) is not None]
    split = metrics.get("seconds")
    parts = [table(names, [[format_number(metrics[n]) for n in names]], numeric=range(len(names)))]
    if isinstance(split, dict):
        parts.append(
            "<div class=q>" + " · ".join(f"{escape(k)} {v:.2f} s" for k, v in split.items()) + "</div>"
        )
    if metrics.get("skipped"):
        parts.append(f"<div class=w>⚠ step skipped: {escape(metrics['skipped'])}</div>")
    return box(*parts)


def history_view(history: History) -> str:
    """The last records as a table, with the reward as a sparkline."""
    records = history.records
    if not records:
        return box("<span class=q>No steps yet. <code>session.train_step(batch)</code></span>")
    names = [n for n in ("step", "reward", "loss", "kl", "entropy", "clip_fraction", "grad_norm", "length", "loss_name")
             if any(r.get(n) is not None for r in records)]  # fmt: skip
    rows = [[escape(format_number(r.get(n, ""))) for n in names] for r in records[-12:]]
    rewards = [r["reward"] for r in records if r.get("reward") is not None]
    line = f"<div>reward {sparkline(rewards)}</div>" if len(rewards) > 1 else ""
    return box(line, table(names, rows, numeric=range(len(names) - 1)))


def batch_view(batch: TrainBatch) -> str:
    """Summary of a batch."""
    return box(f"<div>{escape(repr(batch))}</div>")


def sparkline(values: list[float], width: int = 60) -> str:
    """Values as block characters, with the first and the last in figures."""
    kept = (
        values
        if len(values) <= width
        else [values[i] for i in np.linspace(0, len(values) - 1, width).astype(int)]
    )
    low, high = min(kept), max(kept)
    blocks = "▁▂▃▄▅▆▇█"
    marks = "".join(blocks[round((v - low) / (high - low) * 7) if high > low else 0] for v in kept)
    return f"{values[0]:.3g} {marks} {values[-1]:.3g}"


def _telling_groups(rollouts: Rollouts) -> np.ndarray:
    count = len(rollouts)
    samples = np.bincount(rollouts.group, minlength=count)
    values = rollouts.rewards if rollouts.rewards is not None else rollouts.lengths.astype(float)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.bincount(rollouts.group, values, count) / samples
        spread = np.bincount(rollouts.group, values**2, count) / samples - mean**2
    order = np.argsort(-np.nan_to_num(spread, nan=-1.0), kind="stable")
    return order[samples[order] > 0][:GROUPS_SHOWN]


def _telling_samples(outputs: list[Any]) -> list[Any]:
    ranked = sorted(outputs, key=lambda o: (-(o.reward or 0.0), len(o)))
    if len(ranked) <= SAMPLES_SHOWN:
        return ranked
    half = SAMPLES_SHOWN // 2
    return ranked[:half] + ranked[-half:]


def _row(rollout: Rollout) -> list[str]:
    text = f"<code>{escape(_short(rollout.text))}</code>"
    return [_reward(rollout.reward), text, f"{len(rollout)} tok", escape(rollout.finish_reason)]


def _reward(value: float | None) -> str:
    if value is None:
        return ""
    kind = "pos" if value > 0 else "neg" if value < 0 else ""
    return f'<span class="{kind}">{value:+.2f}</span>'


def _short(text: str) -> str:
    return text if len(text) <= TEXT_SHOWN else text[:TEXT_SHOWN] + "…"

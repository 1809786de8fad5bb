"""Some of the completions of a batch, or of an evaluation, as a table that trackers can show beside the numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlbench.data import Rollouts, TrainBatch
from rlbench.data.base.drawing import needed
from rlbench.units import format_number

ROWS, TEXT_SHOWN = 16, 2000
"""Of a table, and characters of a text in it, of which the end is kept: an answer stands there."""
Cell = str | float | None
Decode = Callable[[Any], str]


@dataclass(frozen=True)
class SampleTable:
    """Rows of one table, spread evenly over what they were taken of."""

    name: str
    columns: tuple[str, ...]
    rows: list[list[Cell]]

    @classmethod
    def of_batch(cls, batch: TrainBatch, decode: Decode) -> SampleTable:
        """What was trained on: prompt, completion, reward where there is one, mean advantage, tokens, version."""
        rows: list[list[Cell]] = []
        for i in _spread(len(batch)):
            at = slice(*batch.responses.offsets[i : i + 2].tolist())
            trained = batch.advantages[at][batch.mask[at]]
            rows.append(
                [
                    _cut(decode(batch.prompts[i])),
                    _cut(decode(batch.responses[i])),
                    None if batch.rewards is None else _number(batch.rewards[i]),
                    float(trained.mean()) if len(trained) else None,
                    float(batch.response_lengths[i]),
                    float(batch.weight_version[i]),
                ]
            )
        return cls("samples", ("prompt", "completion", "reward", "advantage", "tokens", "version"), rows)

    @classmethod
    def of_rollouts(cls, name: str, rollouts: Rollouts) -> SampleTable:
        """What a policy answered: prompt, label, completion, reward, how it ended, tokens."""
        rows: list[list[Cell]] = []
        flat = list(rollouts.flat)
        for i in _spread(len(flat)):
            one, label = flat[i], "" if flat[i].label is None else str(flat[i].label)
            texts = [_cut(text) for text in (one.source.text, label, one.text)]
            rows.append([*texts, one.reward, one.finish_reason, float(len(one))])
        return cls(name, ("prompt", "label", "completion", "reward", "ended by", "tokens"), rows)

    def markdown(self) -> str:
        """The table for a tracker that shows text."""
        lines = [self.columns, tuple("---" for _ in self.columns), *(map(_shown, row) for row in self.rows)]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def sender(tracker: Any) -> Callable[[SampleTable, int], None] | None:
    """Return what sends a table to one of accelerate's trackers at a step; None where it has no tables."""
    if tracker.name == "tensorboard":
        return lambda samples, step: tracker.tracker.add_text(samples.name, samples.markdown(), global_step=step)
    if tracker.name == "trackio":
        trackio, frame = needed("trackio", "session.track('trackio')"), needed("pandas", "its tables").DataFrame
        return lambda samples, step: tracker.log(
            {samples.name: trackio.Table(dataframe=frame(samples.rows, columns=samples.columns))}, step=step
        )
    if callable(getattr(tracker, "log_table", None)):
        return lambda samples, step: tracker.log_table(samples.name, list(samples.columns), samples.rows, step=step)
    return None


def _spread(count: int) -> list[int]:
    return np.unique(np.linspace(0, count - 1, min(ROWS, count)).round().astype(int)).tolist() if count else []


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_SHOWN else f"…{text[-TEXT_SHOWN:]}"


def _number(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)


def _shown(cell: Cell) -> str:
    """A cell of a Markdown table: inert, on one line."""
    if cell is None:
        return ""
    if not isinstance(cell, str):
        return format_number(cell)
    plain = cell.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("`", "&#96;")
    return "<br>".join(plain.split("\n"))

"""What a training verb returns: numbers to read, a record to keep, and the per-token channels behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rlbench.errors import NoSuchAttribute, nearest
from rlbench.units import format_number

SHOWN = ("loss", "reward", "grad_norm", "kl", "entropy", "clip_fraction", "logprob_gap", "tokens_per_s")
NO_SIGNAL = "no signal: all advantages are 0"
LOSSES = ("loss", "policy_loss")


class Metrics(Mapping[str, Any]):
    """Metrics of one verb, by name; also as attributes.

    `tokens`: per-token channels of the batch, flat float32 in the order of `batch.responses.values`: `logprobs`,
    `entropy`, `old_logprobs`, `ref_logprobs` where there is one, and what the loss's own metrics say per token.
    """

    def __init__(self, values: Mapping[str, Any], tokens: Mapping[str, np.ndarray] | None = None) -> None:
        self._values = dict(values)
        self.tokens = dict(tokens or {})

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name not in values:
            raise NoSuchAttribute(f"no metric {name!r}{nearest(name, values)}; there are {', '.join(values)}")
        return values[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def __repr__(self) -> str:
        numbers = [k for k, v in self._values.items() if isinstance(v, int | float | np.number)]
        names = [k for k in SHOWN if self._values.get(k) is not None] or numbers[: len(SHOWN)]
        shown = [shown_metric(k, self._values) for k in names]
        if self._values.get("staleness"):
            shown.append(f"staleness {format_number(self._values['staleness'])}")
        if (usual := self._values.get("lr_usual")) is not None:
            shown.append(f"lr {format_number(self._values['lr'])} for this step (usually {format_number(usual)})")
        if self._values.get("no_signal") == 1:
            shown.append(NO_SIGNAL)
        head = f"step {self._values['step']}" if "step" in self._values else "metrics"
        skipped = [f"step skipped: {self._values['skipped']}"] if self._values.get("skipped") else []
        return f"{head}: " + " · ".join([*shown, *skipped])


def shown_metric(name: str, values: Mapping[str, Any]) -> str:
    """A metric for a line; behind a loss stands how its tokens became one number, which other systems do otherwise."""
    text = f"{name} {format_number(values[name])}"
    return f"{text} ({values['aggregation']})" if name in LOSSES and values.get("aggregation") else text

"""The gradients that wait for an optimizer step, looked at: by parameter, module, layer and token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlbench.data.base.drawing import needed
from rlbench.errors import DataError, Suggesting, nearest
from rlbench.units import format_number

COLUMNS = ("squares", "largest", "zeros", "nonfinite", "sizes", "weight_squares")


@dataclass(frozen=True, eq=False)
class TokenGradients(Suggesting):
    """What the backward of one batch gave each response token, flat float32 in the order of `batch.responses.values`.

    `coefficient`: ∂L/∂log-prob; negative: a step makes the token more likely. `entropy_coefficient`: ∂L/∂entropy.
    `hidden`: 2-norm of ∂L/∂h, h the hidden state that predicts the token, as it enters the output layer: what the
    token's own terms of the loss send into the network; None where the model does not say which its output layer is.
    `offsets`: (B + 1,) where each response begins.
    """

    coefficient: np.ndarray
    entropy_coefficient: np.ndarray
    hidden: np.ndarray | None
    offsets: np.ndarray

    def by_position(self) -> np.ndarray:
        """Mean of `hidden`, or where there is none of |`coefficient`|, over the responses, by place in the response."""
        values = np.abs(self.coefficient) if self.hidden is None else self.hidden
        place = np.arange(len(values)) - np.repeat(self.offsets[:-1], np.diff(self.offsets))
        return np.asarray(np.bincount(place, weights=values) / np.maximum(np.bincount(place), 1))


@dataclass(frozen=True, eq=False, repr=False)
class Gradients(Suggesting):
    """Rows of numbers about gradients before clipping, of all ranks together; `session.gradients()` gives one row per
    trainable parameter, `by_layer()` and `by_module()` the same with fewer rows.

    Each (R,): `squares`, `weight_squares`: sums of the squares of gradient and weights; `largest` absolute value of a
    finite entry; `zeros`, `nonfinite`: entries that are exactly 0, that are NaN or infinite; `sizes`: entries.
    `tokens`: one for each batch whose gradients wait; none after a method of your own made them.
    """

    names: tuple[str, ...]
    squares: np.ndarray
    largest: np.ndarray
    zeros: np.ndarray
    nonfinite: np.ndarray
    sizes: np.ndarray
    weight_squares: np.ndarray
    tokens: tuple[TokenGradients, ...] = ()

    @property
    def norms(self) -> np.ndarray:
        """(R,) 2-norm of each row; NaN or infinite where an entry is."""
        return np.asarray(np.sqrt(self.squares))

    @property
    def norm(self) -> float:
        """Of all together: what clipping compares with `max_norm`."""
        return float(np.sqrt(self.squares.sum()))

    @property
    def relative(self) -> np.ndarray:
        """(R,) norm of the gradient over that of the weights; NaN where the weights are 0."""
        weights = np.sqrt(self.weight_squares)
        return np.divide(self.norms, weights, out=np.full(len(weights), np.nan), where=weights > 0)

    @property
    def zero_share(self) -> np.ndarray:
        """(R,) share of the entries that are exactly 0."""
        return np.asarray(self.zeros / np.maximum(self.sizes, 1))

    @property
    def broken(self) -> list[str]:
        """Names of the rows with NaN or infinite entries: a step with them is skipped."""
        return [name for name, count in zip(self.names, self.nonfinite, strict=True) if count]

    def by_module(self, depth: int | None = None) -> Gradients:
        """One row per module; `depth`: leading parts of the name that count, None for each parameter's own module."""
        if depth is not None and depth < 1:
            raise DataError(f"by_module({depth!r}): a depth of 1 or more, or None for each parameter's own module")
        return self._grouped(module_of(name, depth) for name in self.names)

    def by_layer(self) -> Gradients:
        """One row per numbered layer (`model.layers.3`) and one per module outside of them."""
        return self._grouped(map(layer_of, self.names))

    def table(self) -> Any:
        """A DataFrame: `norm`, `relative` (to the weights' norm), `largest`, `zeros` (share), `nonfinite`, `size`."""
        columns = {
            "norm": self.norms,
            "relative": self.relative,
            "largest": self.largest,
            "zeros": self.zero_share,
            "nonfinite": self.nonfinite.astype(np.int64),
            "size": self.sizes.astype(np.int64),
        }
        return needed("pandas", "gradients.table()").DataFrame(columns, index=list(self.names))

    def channels(self, batch: int = -1) -> dict[str, np.ndarray]:
        """The tokens' numbers of one waiting batch (the last) as channels of the rollout viewer:
        `rollouts.with_channels(**gradients.channels())`, for the rollouts in the batch's own order."""
        if not self.tokens:
            raise DataError("no batch's tokens are known: the gradients come from a method of the module's own")
        one = self.tokens[batch]
        hidden = {} if one.hidden is None else {"hidden_gradient": one.hidden}
        return {"coefficient": one.coefficient, **hidden}

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, name: str) -> float:
        """Norm of one row."""
        if name not in self.names:
            raise DataError(f"no gradient of {name!r}{nearest(name, self.names)}; see gradients.names")
        return float(self.norms[self.names.index(name)])

    def __repr__(self) -> str:
        broken = f", {len(self.broken)} not finite" if self.broken else ""
        most = self.names[int(np.nan_to_num(self.norms, nan=np.inf).argmax())] if self.names else ""
        return f"Gradients(norm {format_number(self.norm)} over {len(self)} rows, largest in {most}{broken})"

    def _grouped(self, keys: Iterable[str]) -> Gradients:
        keys = list(keys)
        names = tuple(dict.fromkeys(keys))
        at = np.array([names.index(key) for key in keys], np.int64)
        summed: dict[str, Any] = {
            column: np.bincount(at, getattr(self, column), len(names)) for column in COLUMNS if column != "largest"
        }
        largest = np.zeros(len(names))
        np.maximum.at(largest, at, self.largest)
        return replace(self, names=names, largest=largest, **summed)


def module_of(name: str, depth: int | None = None) -> str:
    """The module of a parameter by its name, or the leading `depth` parts of that; "(root)" for the module itself."""
    parts = name.split(".")[:-1]
    return ".".join(parts if depth is None else parts[:depth]) or "(root)"


def layer_of(name: str) -> str:
    """The numbered layer a parameter lies in, by its name; else its module."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return module_of(name)

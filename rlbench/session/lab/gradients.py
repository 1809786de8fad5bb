"""The losses of a lab by the gradients they give the parameters, before clipping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlbench.data.base.optional import needed
from rlbench.data.record.gradients import layer_of, module_of
from rlbench.errors import LossError, nearest
from rlbench.units import format_number


@dataclass(frozen=True, eq=False, repr=False)
class ParameterGradients:
    """Dot products of the gradients of K losses.

    Attributes:
        losses: their names, in the lab's order.
        names: of the P trainable parameters.
        gram: (P, K, K) float64; `gram[p, i, j]` is the dot product of what losses i and j give parameter p.
    """

    losses: tuple[str, ...]
    names: tuple[str, ...]
    gram: np.ndarray

    @property
    def norms(self) -> np.ndarray:
        """(K,) 2-norm of each loss's whole gradient."""
        return np.asarray(np.sqrt(np.diagonal(self.gram.sum(0))))

    @property
    def cosines(self) -> np.ndarray:
        """(K, K) of every two whole gradients; NaN where one is 0 throughout."""
        return _cosines(self.gram.sum(0))

    @property
    def norm_ratios(self) -> np.ndarray:
        """(K, K) norm of the row's gradient over that of the column's."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(self.norms[:, None] / self.norms)

    def of(self, loss: str) -> int:
        """The place of a loss."""
        if loss not in self.losses:
            raise LossError(f"no gradient of {loss!r}{nearest(loss, self.losses)}; there are {', '.join(self.losses)}.")
        return self.losses.index(loss)

    def by_layer(self, to: str | None = None) -> Any:
        """Norms of every loss's gradient by layer, and their cosines to the loss `to` (the first); a DataFrame."""
        return self._table(layer_of, to)

    def by_module(self, depth: int | None = None, to: str | None = None) -> Any:
        """The same by module; `depth` leading parts of the name count, None: each parameter's own module."""
        return self._table(lambda name: module_of(name, depth), to)

    def _table(self, key: Callable[[str], str], to: str | None) -> Any:
        pandas = needed("pandas", "by_layer()")
        first = 0 if to is None else self.of(to)
        keys = list(map(key, self.names))
        groups = list(dict.fromkeys(keys))
        rows = []
        for group in groups:
            gram = self.gram[[one == group for one in keys]].sum(0)
            norms, cosines = np.sqrt(np.diagonal(gram)), _cosines(gram)[:, first]
            rows.append(
                {f"norm {loss}": norms[i] for i, loss in enumerate(self.losses)}
                | {f"cos {loss}": cosines[i] for i, loss in enumerate(self.losses) if i != first}
            )
        return pandas.DataFrame(rows, index=groups)

    def __repr__(self) -> str:
        return (
            "ParameterGradients("
            + ", ".join(
                f"{loss} |grad| {format_number(norm)}" for loss, norm in zip(self.losses, self.norms, strict=True)
            )
            + ")"
        )


def _cosines(gram: np.ndarray) -> np.ndarray:
    norms = np.sqrt(np.diagonal(gram))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray((gram / (norms[:, None] * norms)).clip(-1.0, 1.0))

"""Gradients looked at: those that wait for a step, and those that the losses of a lab give the parameters."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlbench.data.base.drawing import needed
from rlbench.data.base.ragged import rows_in_order
from rlbench.data.record.gradients import COLUMNS, Gradients, TokenGradients, layer_of, module_of
from rlbench.dispatch.chain import ChainStep
from rlbench.session.core import SessionCore
from rlbench.units import format_number


def gradients(core: SessionCore) -> Generator[ChainStep, Any, Gradients]:
    """Look at the gradients that wait for a step, before clipping; nothing is changed.

    By parameter (`.names`, `.norms`, `.largest`, `.zero_share`, `.relative` to the weights, `.broken`), by layer
    and module (`.by_layer()`, `.by_module(depth)`, the same numbers with fewer rows), and by token of each batch
    that waits (`.tokens`: ∂L/∂log-prob, and the norm of ∂L/∂hidden; `.channels()` for the rollout viewer).
    """
    return gradients_of((yield core.train.call_all("gradient_facts", what="gradients")))


def gradients_of(parts: list[dict[str, Any]]) -> Gradients:
    """Join what the ranks said: numbers of parameters are equal on all of them, tokens are each rank's own."""
    first = parts[0]
    batches = [[part["batches"][i] for part in parts] for i in range(len(first["batches"]))]
    columns = {name: np.asarray(first[name], np.float64) for name in COLUMNS}
    return Gradients(tuple(first["names"]), **columns, tokens=tuple(map(_tokens, batches)))


def _tokens(ranks: list[dict[str, Any]]) -> TokenGradients:
    rows = rows_in_order(ranks)
    coefficient, hidden = rows["coefficient"], rows.get("hidden_gradient")
    on_hidden = None if hidden is None else hidden.values
    return TokenGradients(coefficient.values, rows["entropy_coefficient"].values, on_hidden, coefficient.offsets)


@dataclass(frozen=True, eq=False, repr=False)
class ParameterGradients:
    """Dot products of the gradients that K losses of a lab give the parameters, before clipping.

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
        norms = self.norms
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray((self.gram.sum(0) / (norms[:, None] * norms)).clip(-1.0, 1.0))

    @property
    def norm_ratios(self) -> np.ndarray:
        """(K, K) norm of the row's gradient over that of the column's."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(self.norms[:, None] / self.norms)

    def by_layer(self) -> Any:
        """Norms of every loss's gradient by layer, and their cosines to the first loss; a DataFrame."""
        return self._table(layer_of)

    def by_module(self, depth: int | None = None) -> Any:
        """The same by module; `depth` leading parts of the name count, None: each parameter's own module."""
        return self._table(lambda name: module_of(name, depth))

    def _table(self, key: Callable[[str], str]) -> Any:
        pandas = needed("pandas", "by_layer()")
        keys = list(map(key, self.names))
        rows: dict[str, dict[str, float]] = {}
        for group in dict.fromkeys(keys):
            part = replace(self, gram=self.gram[[one == group for one in keys]])
            rows[group] = {f"norm {loss}": norm for loss, norm in zip(self.losses, part.norms, strict=True)}
            to_first = part.cosines[:, 0]
            rows[group] |= {f"cos {loss}": to_first[i] for i, loss in enumerate(self.losses) if i}
        return pandas.DataFrame.from_dict(rows, orient="index")

    def __repr__(self) -> str:
        norms = zip(self.losses, self.norms, strict=True)
        return f"ParameterGradients({', '.join(f'{loss} |grad| {format_number(norm)}' for loss, norm in norms)})"

"""Looking between backward and step: what the gradients that wait are like."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data import Ragged
from rlbench.data.record.gradients import COLUMNS, Gradients, TokenGradients
from rlbench.dispatch.chain import Steps
from rlbench.engines.sync import rows_in_order

if TYPE_CHECKING:
    from rlbench.session.core import SessionCore


def gradient_steps(session: SessionCore) -> Steps:
    """Ask the ranks; returns `Gradients`."""
    parts = yield session.train.call_all("gradient_facts", what="gradients")
    return gradients_of(parts)


def gradients_of(parts: list[dict[str, Any]]) -> Gradients:
    """What all ranks said as one value: numbers of parameters are equal on all of them, tokens are each rank's own."""
    first = parts[0]
    batches = [[part["batches"][i] for part in parts] for i in range(len(first["batches"]))]
    return Gradients(
        tuple(first["names"]),
        **{name: np.asarray(first[name], np.float64) for name in COLUMNS},
        tokens=tuple(map(_tokens, batches)),
    )


def _tokens(ranks: list[dict[str, Any]]) -> TokenGradients:
    rows = {name: Ragged.from_rows(found, np.float32) for name, found in rows_in_order(ranks).items()}
    coefficient, hidden = rows["coefficient"], rows.get("hidden_gradient")
    return TokenGradients(
        coefficient.values,
        rows["entropy_coefficient"].values,
        None if hidden is None else hidden.values,
        coefficient.offsets,
    )

"""How evenly the routers of a mixture of experts spread the tokens of each sequence over its experts, as a loss.

It is the load balancing loss of Fedus et al. 2021 (Switch Transformers, https://arxiv.org/abs/2101.03961), as
transformers' `load_balancing_loss_func` gives it of one sequence: experts · Σ_e f_e P_e, of the share f_e of choices
that fell on expert e and its mean probability P_e, over all tokens and layers; where they are spread evenly it is the
number of experts that a token takes. Of each sequence by itself, because the product over a micro-batch, or over packed
rows, would be another with each way to split a step (DeepSeek-V3, https://arxiv.org/abs/2412.19437, balances by
sequence, too).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rlbench.options import OptionError
from rlbench.trainers.passes.routing import ROUTERS, routers_of

BALANCE = "router/balance"


@dataclass(frozen=True)
class Balance:
    """Of one micro-batch: `row_of` (tokens,) int64, to which of its `rows` each flat token belongs, `rows` itself where
    it is padding; `layers`: logits (tokens, experts) of each router and the experts chosen (tokens, top_k), after a
    forward."""

    row_of: Tensor
    rows: int
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def of_rows(self) -> Tensor:
        """Return the loss of each row (rows,) float32, with a gradient."""
        given = list(self.layers.values())
        experts = given[0][0].shape[-1]
        chosen = torch.zeros(self.rows + 1, experts, device=self.row_of.device)
        likely = torch.zeros_like(chosen)
        for logits, taken in given:
            counts = torch.zeros_like(logits, dtype=torch.float32).scatter_(1, taken, 1.0)
            chosen = chosen.index_add(0, self.row_of, counts)
            likely = likely.index_add(0, self.row_of, torch.softmax(logits, dim=-1, dtype=torch.float32))
        tokens = torch.bincount(self.row_of, minlength=self.rows + 1) * len(given)
        return ((chosen * likely).sum(dim=-1) / tokens.clamp(min=1) ** 2 * experts)[: self.rows]


def rows_of(lengths: Sequence[int], shape: tuple[int, int], device: torch.device) -> Tensor:
    """Return to which row each flat token of a layout belongs, (tokens,) int64; padding to one more than there are.

    `shape`: of the layout's input ids; one row of it holds all sequences where it is packed.
    """
    sizes = torch.tensor(lengths, device=device)
    if shape[0] == 1:
        return torch.arange(len(lengths), device=device).repeat_interleave(sizes)
    held = torch.arange(shape[1], device=device) < sizes[:, None]
    return torch.where(held, torch.arange(len(lengths), device=device)[:, None], len(lengths)).flatten()


@contextmanager
def balanced(module: nn.Module, balance: Balance | None) -> Iterator[None]:
    """Have each router tell `balance` what it chose; run the backward inside the context.

    What activations that are computed again in the backward would tell is what was told before.
    """
    with ExitStack() as hooks:
        if balance is not None:
            for layer, router in routers_of(module).items():
                hooks.callback(router.register_forward_hook(_hook(balance, layer)).remove)
        yield


def check_balanced(module: nn.Module, coef: float, ranks: int) -> None:
    """Refuse a weight of the loss for a model without routers, or whose sequences `ranks` split between them."""
    if coef and not routers_of(module):
        raise OptionError(
            f"aux_loss_coef={coef:g} would have no effect: {type(module).__name__} has no router whose choices can be "
            f"balanced; there are {', '.join(ROUTERS)}, of transformers. Leave it out."
        )
    if coef and ranks > 1:
        raise OptionError(
            f"aux_loss_coef={coef:g} and sequence_parallel={ranks} cannot be honoured together: a sequence is balanced "
            "as a whole, and a rank has a slice of it. Leave one of them out."
        )


def _hook(balance: Balance, layer: int) -> Any:
    def told(router: nn.Module, _: Sequence[Any], output: tuple[Tensor, Tensor, Tensor]) -> None:
        if layer not in balance.layers:
            balance.layers[layer] = (output[0], output[2])

    return told

"""Mixtures of experts that take the experts which the sampler's routers chose (rollout routing replay, R3, arXiv
2510.11370), and how often the trainer's own routers would choose others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlbench.data.base.ragged import Ragged, offsets_of
from rlbench.data.base.routing import UNKNOWN
from rlbench.data.batches.batch import TrainBatch
from rlbench.errors import BuildError, DataError

ROUTERS = ("MixtralTopKRouter", "OlmoeTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter")
"""transformers' routers that give (logits, weights of the experts chosen, their numbers): a softmax, then its top k."""
DISAGREEMENT = "router/disagreement"
LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True)
class Routing:
    """Of one micro-batch: `experts` (tokens, layers, top_k) int16, below 0 where not known, beside its flat tokens.

    `counts`: by layer, in how many of the tokens whose experts are known the trainer's routers would choose another set
    of them, and how many these are, each () int64; after a forward.
    """

    experts: Tensor
    counts: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def disagreement(self) -> tuple[float, float]:
        """Return the sums of `counts` over the layers."""
        if not self.counts:
            return 0.0, 0.0
        layers = torch.stack([torch.stack(one) for one in self.counts.values()])
        different, known = layers.sum(dim=0).tolist()
        return float(different), float(known)


def routers_of(module: nn.Module) -> dict[int, nn.Module]:
    """Return the routers of `ROUTERS` in a model by the number of their layer."""
    found = {}
    for name, part in module.named_modules():
        if type(part).__name__ in ROUTERS and (layer := LAYER.search(name)):
            found[int(layer[1])] = part
    return found


def check_replayed(module: nn.Module) -> None:
    """Refuse a model whose routers cannot be given experts."""
    if not routers_of(module):
        raise BuildError(
            f"router_replay=True: {type(module).__name__} has no router that can be given experts; there are "
            f"{', '.join(ROUTERS)}, of transformers. Leave it out"
        )


def check_experts(module: nn.Module, batch: TrainBatch) -> None:
    """Refuse experts of another model."""
    if batch.routing is None:
        return
    routers: dict[int, Any] = routers_of(module)
    if not routers:
        return
    layers, chosen = batch.routing.values.shape[1:]
    here, top_k = max(routers) + 1, {router.top_k for router in routers.values()}
    experts = min(router.num_experts for router in routers.values())
    highest = int(batch.routing.values.max(initial=UNKNOWN))
    if layers < here or top_k != {chosen} or highest >= experts:
        raise DataError(
            f"routing: the batch has {chosen} experts up to number {highest} in each of {layers} layers, and "
            f"{type(module).__name__} chooses {', '.join(map(str, sorted(top_k)))} of {experts} in {here} layers: it "
            "was sampled by another model."
        )


def with_any_experts(module: nn.Module, batch: TrainBatch) -> TrainBatch:
    """Return a batch of made-up tokens with experts: the first ones, in every layer."""
    routers: dict[int, Any] = routers_of(module)
    chosen = np.arange(next(iter(routers.values())).top_k, dtype=np.int16)
    values = np.broadcast_to(chosen, (int(batch.lengths.sum()), max(routers) + 1, len(chosen)))
    return batch.replace(routing=Ragged(values, offsets_of(batch.lengths)))


def check_routed(batch: TrainBatch) -> None:
    """Refuse sequences whose trained tokens were sampled by experts that are not known."""
    trained = batch.responses.with_values(batch.mask & ~np.isnan(batch.sampler_logprobs))
    lasts = [int(np.flatnonzero(own)[-1]) if own.any() else None for own in trained]
    lacking = [row for row, last in enumerate(lasts) if last is not None and not _known(batch, row, last)]
    if lacking:
        raise DataError(
            f"router_replay=True: {len(lacking)} of {len(batch)} sequences (the first: {lacking[0]}) were sampled by "
            "experts that are not known: roll out with rb.Inference(return_routed_experts=True), or leave the option "
            "out."
        )


def _known(batch: TrainBatch, row: int, last: int) -> bool:
    """Whether the experts of all tokens of a row are known that response token `last` follows."""
    if batch.routing is None:
        return False
    before = int(batch.prompts.lengths[row]) + last
    return bool((batch.routing[row][:before, :, 0] != UNKNOWN).all())


@contextmanager
def routed(module: nn.Module, routing: Routing | None, replay: bool) -> Iterator[None]:
    """Have each router count where it would choose otherwise than `routing` says and, with `replay`, take those
    experts, with weights by its own logits; where they are not known its own. Run the backward inside the context."""
    with ExitStack() as hooks:
        if routing is not None:
            for layer, router in routers_of(module).items():
                hooks.callback(router.register_forward_hook(_hook(routing, layer, replay)).remove)
        yield


def _hook(routing: Routing, layer: int, replay: bool) -> Any:
    def given(router: nn.Module, _: Sequence[Any], output: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits, weights, own = output
        recorded = routing.experts[:, layer].to(own.dtype)
        known = recorded[:, :1] >= 0
        other = (recorded.sort(dim=-1).values != own.sort(dim=-1).values).any(dim=-1, keepdim=True)
        routing.counts[layer] = (other & known).sum(), known.sum()
        if not replay:
            return None
        taken = torch.where(known, recorded, own)
        chosen = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, taken)
        if getattr(router, "norm_topk_prob", True):
            chosen = chosen / chosen.sum(dim=-1, keepdim=True)
        return logits, chosen.to(weights.dtype), taken

    return given

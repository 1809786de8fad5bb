"""Tiny mixtures of experts with weights spread widely, experts at random, and plain transformers forced to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlbench.data.base.ragged import Ragged, offsets_of
from rlbench.data.base.routing import UNKNOWN
from rlbench.data.batches.batch import TrainBatch

CHOSEN = 2


def mixture(family: str, experts: int = 4, **changes: Any) -> Any:
    """A model of a family, with `changes` of its config; its routers are sure enough of their choice that no rounding
    changes it."""
    from transformers import AutoModelForCausalLM

    from tests.families.shapes import small_config

    torch.manual_seed(0)
    config = small_config(family)
    changes["num_local_experts" if family == "mixtral" else "num_experts"] = experts
    for name, value in changes.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.08)
    return model.eval()


def save_mixture(folder: Path, family: str = "qwen3_moe", **changes: Any) -> str:
    """A checkpoint of `mixture` with its tokenizer."""
    from tests.workers.tiny_checkpoint import byte_tokenizer

    mixture(family, **changes).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def random_experts(batch: TrainBatch, layers: int, experts: int, seed: int = 0) -> TrainBatch:
    """The batch with experts at random, not known of each row's last token."""
    rng = np.random.default_rng(seed)
    total = int(batch.lengths.sum())
    values = rng.random((total, layers, experts)).argsort(axis=-1)[..., :CHOSEN].astype(np.int16)
    offsets = offsets_of(batch.lengths)
    values[offsets[1:] - 1] = UNKNOWN
    return batch.replace(routing=Ragged(values, offsets))


def routers(model: nn.Module) -> list[Any]:
    """Its routers, layer by layer."""
    return [part for part in model.modules() if type(part).__name__.endswith("TopKRouter")]


def own_experts(model: nn.Module, ids: Any) -> np.ndarray:
    """The experts that plain transformers takes for one sequence, sorted, (tokens, layers, top_k)."""
    found: list[Tensor] = []
    hooks = [router.register_forward_hook(lambda *given: found.append(given[2][2])) for router in routers(model)]
    with torch.no_grad():
        model(torch.as_tensor(np.asarray(ids, np.int64))[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).sort(-1).values.numpy()


@contextmanager
def forced(model: nn.Module, experts: np.ndarray) -> Iterator[None]:
    """Plain transformers whose routers take these experts, (tokens, layers, top_k), for the one sequence that it runs;
    their own where below 0."""
    for layer, router in enumerate(routers(model)):
        router.forward = _forced(router, torch.from_numpy(experts[:, layer].astype(np.int64)))
    try:
        yield
    finally:
        for router in routers(model):
            del router.forward


def _forced(router: Any, wanted: Tensor) -> Any:
    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden_states.reshape(-1, router.hidden_dim) @ router.weight.T
        probabilities = logits.softmax(-1)
        rows = [
            row if row[0] >= 0 else one.topk(CHOSEN).indices for row, one in zip(wanted, probabilities, strict=True)
        ]
        weights = torch.stack([one[row] for one, row in zip(probabilities, rows, strict=True)])
        if getattr(router, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, torch.stack(rows)

    return forward


def forced_logprobs(model: Any, batch: TrainBatch) -> Tensor:
    """Log-probs of the responses, one sequence at a time, under the experts that the batch brings."""
    assert batch.routing is not None
    found = []
    for prompt, response, experts in zip(batch.prompts, batch.responses, batch.routing, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        with forced(model, experts):
            logp = model(ids[None]).logits[0].log_softmax(-1)
        found.append(logp[torch.arange(len(prompt) - 1, len(ids) - 1), ids[len(prompt) :]])
    return torch.cat(found)

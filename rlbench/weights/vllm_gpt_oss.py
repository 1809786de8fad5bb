"""gpt-oss by the loaders that an update goes through: vLLM's own copies its experts and sinks straight into parameters,
which are without memory while an update is under way, and so keeps the old ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

ARCHITECTURE = "GptOssForCausalLM"
EXPERTS, SINKS = ".mlp.experts.", ".self_attn.sinks"


Weights: TypeAlias = Iterator[tuple[str, torch.Tensor]]


def by_loaders(model: torch.nn.Module, weights: Weights) -> Weights:
    """Yield what `model.load_weights` takes by loaders: stacked experts (experts, …) one at a time, by the names that
    vLLM has for those; sinks (heads,) are loaded here, this worker's part of them."""
    rank, workers = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    for name, tensor in weights:
        if EXPERTS in name:
            stack, projection = name.rsplit(".", 1)
            for expert, of_one in enumerate(tensor):
                yield f"{stack}.{expert}.{projection}", of_one
        elif name.endswith(SINKS):
            sinks = model.get_parameter(name.replace(SINKS, ".attn.sinks"))
            sinks.weight_loader(sinks, tensor.chunk(workers)[rank])  # type: ignore[operator]
        else:
            yield name, tensor

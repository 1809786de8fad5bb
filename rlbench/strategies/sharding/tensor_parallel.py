"""Tensor parallelism: a layer's heads and inner width split over ranks, as the model's own plan says.

A plan names for each layer a style of transformers: `"colwise"` splits what a linear layer gives, `"rowwise"` what it
takes, so that one sum over the ranks ends each attention and each MLP (Shoeybi et al., 2019, arXiv:1909.08053). All
else (norms, embedding) every rank computes whole, on the same rows; the output layer too: it gives log-probs itself.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from rlbench.errors import BuildError
from rlbench.nn.lora import NAME
from rlbench.nn.quantised import QuantisedLinear

TENSOR = "tensor"  # the dimension of a mesh of ranks over which layers are split
HEAD_DIMENSION = 2  # of (rows, tokens, heads, width), which norms of queries and keys take
STYLES: Mapping[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=HEAD_DIMENSION, use_local_output=True),
}
"""What the styles of a plan are in torch; the last is of a norm that is whole on a rank and sees that one's heads."""
ADAPTERS = {"colwise": "lora_B", "rowwise": "lora_A"}
"""Which half of a layer's adapter is split as the layer is; the other is whole."""


def split_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the layers of a model's `tp_plan` over the ranks of `mesh`, in place; parameters may be on meta."""
    plan = _plan(model, mesh.size())
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # gathering takes two steps
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    parallelize_module(model, mesh, {name: STYLES[style] for name, style in plan.items()}, src_data_rank=None)
    for name, parameter in model.named_parameters():  # torch trains whatever it replicates
        parameter.requires_grad_(name not in frozen)


def split_over(model: nn.Module) -> int:
    """Return over how many ranks the layers of a model are split."""
    meshes = [parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)]
    return max((mesh[TENSOR].size() for mesh in meshes if TENSOR in (mesh.mesh_dim_names or ())), default=1)


def split_parameters(model: nn.Module, ranks: int) -> frozenset[str]:
    """Return the names of the parameters that `split_layers` would split; BuildError where it could not."""
    plan = _plan(model, ranks)
    whole = {f"{name}.bias" for name, style in plan.items() if style.startswith("rowwise")}
    split = {f"{name}.{end}" for name, style in plan.items() if "wise" in style for end in ("weight", "bias")}
    return frozenset(split - whole)


def _plan(model: nn.Module, ranks: int) -> dict[str, str]:
    """Return the style of each layer to split, by name; BuildError where the model cannot be split over so many."""
    what = f"tensor_parallel={ranks} cannot be honoured for {type(model).__name__}"
    patterns: Mapping[str, str] = getattr(model, "tp_plan", None) or {}
    if not patterns:
        raise BuildError(
            f"{what}: it has no tp_plan, which says how its layers are split. Define one, as "
            '{"layers.*.up": "colwise", "layers.*.down": "rowwise"}, or split its parameters by shards= instead'
        )
    embeddings = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    plan: dict[str, str] = {}
    for name, part in model.named_modules():
        style = next((style for pattern, style in patterns.items() if _matches(pattern, name)), None)
        if style is None or any(part is whole for whole in embeddings):
            continue
        if style not in STYLES:
            raise BuildError(f"{what}: its plan splits {name} as {style!r}; known are {', '.join(STYLES)}")
        if isinstance(part, QuantisedLinear) or any(isinstance(child, QuantisedLinear) for child in part.children()):
            raise BuildError(f"{what}: {name} is quantised; leave lora base= or tensor_parallel= out")
        _check_width(what, name, part, style, ranks)
        if not hasattr(part, "base_layer"):
            plan[name] = style
        elif style not in ADAPTERS:
            raise BuildError(f"{what}: {name} has an adapter, which is not split as {style!r}; leave lora= out")
        else:
            plan |= {f"{name}.base_layer": style, f"{name}.{ADAPTERS[style]}.{NAME}": style}
    if not plan:
        raise BuildError(f"{what}: no layer has a name of its tp_plan ({', '.join(patterns)})")
    _check_heads(what, getattr(model, "config", None), ranks)
    return plan


def _matches(pattern: str, name: str) -> bool:
    """Whether a layer has a name of a plan, where `*` stands for a number."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None


def _check_width(what: str, name: str, part: nn.Module, style: str, ranks: int) -> None:
    width = getattr(part, "out_features" if style.startswith("colwise") else "in_features", 0)
    if width % ranks:
        raise BuildError(f"{what}: {name} is {width} wide, which {ranks} ranks cannot share evenly; take a divisor")


def _check_heads(what: str, config: Any, ranks: int) -> None:
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None) or 0
        if heads % ranks:
            raise BuildError(f"{what}: {name}={heads}, which {ranks} ranks cannot share evenly; take a divisor")

"""The critic: the value of the state before each response token, from a causal checkpoint's backbone and a head.

A critic of the user's own is read as `own_critic` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlbench.data.batches.batch import TrainBatch
from rlbench.errors import EngineError
from rlbench.trainers.models.own_critic import gives_each_token, is_classifier, own_values, reading_each_token
from rlbench.trainers.models.scalar_model import HEAD, ScalarHeadModel, make_scalar
from rlbench.trainers.passes.attention import packed_attention
from rlbench.trainers.passes.forward import CHECK_TOKENS, CHECK_TOLERANCE, HALF_TOLERANCE, as_batch, evaluating
from rlbench.trainers.passes.packing import ModelInputs, model_inputs
from rlbench.user_code import user_code


class CriticModel(ScalarHeadModel):
    """A critic; `make_critic` makes one. `critic(input_ids, …)` gives the value after each token, float32."""


def make_critic(
    path: str,
    *,
    dtype: str | torch.dtype | None = None,
    value_head_prefix: str = HEAD,
    gradient_checkpointing: bool = False,
    seed: int = 42,
    revision: str | None = None,
) -> Any:
    """Make a critic on meta, with or without `strategy.init_model_context`; `strategy.prepare_model(critic,
    is_training=True)` shards it and loads its weights, `strategy.load_ckpt` those of a checkpoint.

    The head is the checkpoint's, where it holds one (of a critic or a reward model), else drawn N(0, 1/(h + 1)), the
    deviation; h is the width of the hidden states.

    Args:
        path: folder or hub id of a causal language model, a critic or a reward model.
        dtype: of the weights; None: the checkpoint's. Half precision is trained in float32 unless `use_mp_opt` is set.
        value_head_prefix: what the head is called in the checkpoint.
        gradient_checkpointing: recompute activations in the backward.
        seed: of a drawn head; the same on any number of ranks.
    """
    critic = make_scalar(CriticModel, path, dtype, value_head_prefix, seed, revision)
    if gradient_checkpointing:
        critic.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        critic.train()
    return critic


def values_of(critic: nn.Module, batch: TrainBatch, device: torch.device, packed: bool) -> Tensor:
    """Return the value of the state before each response token, (R,) float32, with gradient where gradients are on;
    collective.

    Packed or padded the values are equal; a module that is not transformers' is given padded rows in any case.
    """
    checkpointing = getattr(critic, "is_gradient_checkpointing", False) and critic.training
    if packed and checkpointing and torch.is_grad_enabled():
        raise EngineError(
            "a packed critic with gradient checkpointing runs its layers again in the backward: run it inside "
            "`with valued(critic, batch, device, packed=True) as (values, inputs):`."
        )
    with valued(critic, batch, device, packed) as (values, _):
        return values


@contextmanager
def valued(
    critic: nn.Module, batch: TrainBatch, device: torch.device, packed: bool
) -> Iterator[tuple[Tensor, ModelInputs]]:
    """Give `values_of` with the layout they came from; run the backward inside the context."""
    scalar = isinstance(critic, CriticModel) or is_classifier(critic)
    packed = packed and scalar
    if not scalar:
        check_critic(critic, device)
    if packed:
        prove_packing(critic, device)
    with ExitStack() as within:
        with user_code():
            inputs = model_inputs(batch, device, packed)
            if packed:
                within.enter_context(packed_attention(critic, inputs.lengths))
            values = _values(critic, inputs) if scalar else own_values(critic, batch, inputs, device)
        yield values, inputs


def check_critic(critic: nn.Module, device: torch.device) -> None:
    """Refuse a module that gives no values, naming the shapes that are wanted; collective."""
    if not isinstance(critic, CriticModel) and not is_classifier(critic):
        with user_code():
            gives_each_token(critic, device)


@torch.no_grad()
def prove_packing(critic: Any, device: torch.device) -> None:
    """Compare packed and padded values once, on two short sequences, the same on all ranks; collective."""
    if getattr(critic, "packing_proved", False):
        return
    tokens = np.arange(2 * CHECK_TOKENS) % int(critic.config.get_text_config().vocab_size)
    probe = as_batch([tokens[:CHECK_TOKENS], tokens[CHECK_TOKENS // 2 : 2 * CHECK_TOKENS - 5]])
    found = []
    with evaluating(critic):
        for packed in (True, False):
            inputs = model_inputs(probe, device, packed)
            with packed_attention(critic, inputs.lengths) if packed else nullcontext():
                found.append(_values(critic, inputs))
    gap = float((found[0] - found[1]).abs().mean() / found[1].abs().mean().clamp(min=1e-12))
    if not gap <= (HALF_TOLERANCE if critic.in_half else CHECK_TOLERANCE):
        raise EngineError(
            f"{type(critic).__name__} computes something else when sequences are packed (values differ by {gap:.2g} of "
            "their size): its layers look across sequences; pass packed=False."
        )
    critic.packing_proved = True


def _values(critic: nn.Module, inputs: ModelInputs) -> Tensor:
    with nullcontext() if isinstance(critic, CriticModel) else reading_each_token(critic):
        return critic(  # type: ignore[no-any-return]
            inputs.input_ids,
            attention_mask=inputs.attention_mask,
            position_ids=inputs.position_ids,
            positions=inputs.predictors,
        )

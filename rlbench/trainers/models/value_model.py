"""The critic: the value of the state before each response token, from a causal checkpoint's backbone and a head.

| a critic of the user's own | values |
|---|---|
| a sequence classifier of transformers with one label | its `score` at each token; what it pools needs a pad token |
| a module that gives (B, T) or (B, T, 1) | of the token before |
| a module that gives (B,) or (B, 1) | it sees prompts alone, and its value stands at each token of the response |

One number of a sequence that held the response would know what it judges, and bias the policy's gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlbench.data.batches.batch import TrainBatch
from rlbench.errors import BuildError, DataError, EngineError
from rlbench.rewards.shaped_head import ATTENTION
from rlbench.strategies.ranks.sequence import ALONE, SequenceGroup
from rlbench.trainers.models.scalar_model import HEAD, ScalarHeadModel, heads_of, make_scalar, shaped_head
from rlbench.trainers.passes.balancing import balanced
from rlbench.trainers.passes.forward import as_batch, differs, evaluating, probe_of, taken_by, vocabulary_of
from rlbench.trainers.passes.packing import ModelInputs, model_inputs
from rlbench.trainers.passes.sharing import shared
from rlbench.trainers.passes.sounds import Reader, SoundReader
from rlbench.trainers.passes.sounds import media_reader as reader_of
from rlbench.user_code import user_code

PROBE = ([0, 1, 0, 1, 1, 0, 1], [1, 0, 0, 1])
"""Token ids that every vocabulary has."""
WANTED = "(sequences, tokens), (sequences, tokens, 1) or, one value for a whole sequence, (sequences,)"

_per_token: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


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
    """Make a critic on meta from a causal language model, a critic or a reward model, a folder or hub id.

    `strategy.prepare_model(critic, is_training=True)` shards it and loads its weights, `strategy.load_ckpt` those of a
    checkpoint. The head, called `value_head_prefix` there, is the checkpoint's where it holds one, else drawn from
    N(0, 1/(h + 1)), the deviation; h is the width of the hidden states. Half precision is trained in float32 unless
    `use_mp_opt` is set; None: the checkpoint's.
    """
    critic = make_scalar(CriticModel, path, dtype, value_head_prefix, seed, revision)
    if heads := heads_of(critic):
        raise BuildError(
            f"{path!r} has the heads {', '.join(heads)}, and a critic gives one value: begin from the language model, "
            "or from a reward model of one head"
        )
    if gradient_checkpointing:
        critic.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        critic.train()
    return critic


def values_of(
    critic: nn.Module, batch: TrainBatch, device: torch.device, packed: bool, ranks: SequenceGroup = ALONE
) -> Tensor:
    """Return the value of the state before each response token, (R,) float32; collective.

    Packed or padded the values are equal; a module that is not transformers' is given padded rows in any case.
    """
    checkpointing = getattr(critic, "is_gradient_checkpointing", False) and critic.training
    if packed and checkpointing and torch.is_grad_enabled():
        raise EngineError("a packed critic with gradient checkpointing runs its backward inside `with valued(…)`.")
    with valued(critic, batch, device, packed, ranks=ranks) as (values, _):
        return values


@contextmanager
def valued(
    critic: nn.Module,
    batch: TrainBatch,
    device: torch.device,
    packed: bool,
    after: int = 0,
    ranks: SequenceGroup = ALONE,
    balance: bool = False,
) -> Iterator[tuple[Tensor, ModelInputs]]:
    """Give `values_of` with the layout they came from; run the backward inside the context.

    `after=1`: of the state after each response token, which knows it, as a reward model's scores do; `ranks`: that
    split the sequences, and are given the same ones; `balance`: have routers tell how evenly they spread each
    row's tokens.
    """
    if "videos" in batch.media:
        raise DataError("prompts have videos, and critics watch none: take an estimator without a critic")
    scalar = isinstance(critic, ScalarHeadModel) or is_classifier(critic)
    if "sounds" in batch.media and not (scalar and isinstance(media_reader(critic), SoundReader)):
        name = type(critic).__name__
        raise DataError(f"prompts have sounds, and the critic {name} hears none: make_critic of a model that does")
    packed = packed and scalar
    if not scalar:
        if ranks.size > 1:
            raise EngineError(
                f"{type(critic).__name__} cannot be split over ranks, being no classifier of transformers: make_critic "
                "makes a critic that can; or pass sequence_parallel=1."
            )
        check_critic(critic, device)
    if packed or ranks.size > 1:
        prove_packing(critic, device, ranks)
    with ExitStack() as within:
        with user_code():
            inputs = model_inputs(batch, device, packed)
            inputs = inputs.weighed() if balance else inputs
            within.enter_context(balanced(critic, inputs.balance))
            if scalar:
                if (reader := media_reader(critic)) is not None:
                    inputs = reader.placed(inputs, batch, packed)  # on all ranks alike: a blank one where none is
                    within.enter_context(reader.placing(inputs))
                asked = replace(inputs, predictors=inputs.predictors + after)
                share = within.enter_context(shared(critic, asked, packed, ranks))
                values = share.joined(values_at(critic, share.inputs))
            else:
                values = own_values(critic, batch, inputs, device)
        yield values, inputs


def check_critic(critic: nn.Module, device: torch.device) -> None:
    """Refuse a module that gives no values, naming the shapes that are wanted; collective."""
    if not isinstance(critic, CriticModel) and not is_classifier(critic):
        with user_code():
            gives_each_token(critic, device)


@torch.no_grad()
def prove_packing(critic: Any, device: torch.device, ranks: SequenceGroup = ALONE) -> None:
    """Compare packed and padded values once, on two short sequences, the same on all ranks; where these split them,
    with those of one rank; collective."""
    if getattr(critic, "packing_proved", False):
        return
    if why := why_unpacked(critic, device, ranks):
        raise EngineError(f"{why}; pass {'packed=False' if ranks.size == 1 else 'sequence_parallel=1'}.")


@torch.no_grad()
def why_unpacked(critic: Any, device: torch.device, ranks: SequenceGroup = ALONE) -> str:
    """Return why the values of two short sequences are others packed, or split; "" where they are the same, which the
    critic then knows; collective."""
    if ranks.size > 1 and pools(critic):
        return f"{type(critic).__name__} pools whole sequences by attention, of which such ranks hold parts"
    probe = probe_of(np.arange(int(vocabulary_of(critic) or 1)))
    found = []
    with evaluating(critic):
        for packed, those in ((True, ranks), (False, ALONE)):
            with shared(critic, model_inputs(probe, device, packed), packed, those) as share:
                found.append(share.joined(values_at(critic, share.inputs)))
    gap = float((found[0] - found[1]).abs().mean() / found[1].abs().mean().clamp(min=1e-12))
    if differs(gap, critic.in_half):
        how = "packed" if ranks.size == 1 else "split over ranks"
        said = f"{type(critic).__name__} computes something else when sequences are {how} (values differ by {gap:.2g})"
        return f"{said}: its layers look across sequences"
    critic.packing_proved = True
    return ""


def pools(critic: nn.Module) -> bool:
    """Tell whether its head reads all tokens up to one."""
    head = shaped_head(critic)
    return head is not None and head.shape.pooling == ATTENTION


def values_at(critic: nn.Module, inputs: ModelInputs) -> Tensor:
    """Return the numbers (P,), of several heads (P, heads), of a critic or reward model at the layout's `predictors`;
    collective."""
    with nullcontext() if isinstance(critic, ScalarHeadModel) else reading_each_token(critic):
        return critic(  # type: ignore[no-any-return]
            inputs.input_ids,
            attention_mask=inputs.attention_mask,
            position_ids=inputs.position_ids,
            positions=inputs.predictors,
            **inputs.media,
        )


def media_reader(critic: nn.Module) -> Reader | None:
    """Return what reads images or sounds for a critic or reward model, which keeps what it computes with; None of one
    of text."""
    if "media_reader" not in vars(critic):
        critic.media_reader = reader_of(critic)  # type: ignore[assignment]
    return vars(critic)["media_reader"]  # type: ignore[no-any-return]


def is_classifier(critic: nn.Module) -> bool:
    """Tell whether it is transformers' sequence classifier of one label over a causal model, read at each token."""
    from transformers import PreTrainedModel

    head = getattr(critic, HEAD, None)
    if not isinstance(critic, PreTrainedModel) or not isinstance(head, nn.Linear):
        return False
    if head.out_features != 1 or head.bias is not None:
        raise EngineError(f"{type(critic).__name__} has {head.out_features} labels: make it with num_labels=1.")
    return True


@contextmanager
def reading_each_token(critic: Any) -> Iterator[None]:
    """Have a sequence classifier give the numbers of chosen tokens, as `ScalarHeadModel` does."""
    own = vars(critic).get("forward")
    critic.forward = MethodType(ScalarHeadModel.forward, critic)
    try:
        yield
    finally:
        del critic.forward
        if own is not None:
            critic.forward = own


def own_values(critic: nn.Module, batch: TrainBatch, inputs: ModelInputs, device: torch.device) -> Tensor:
    """Return (R,) float32 beside the response tokens of `batch`, whose padded layout is `inputs`; collective."""
    if gives_each_token(critic, device):
        values = _asked(critic, inputs)
        _check_shape(critic, inputs, values)
        return values.reshape(-1)[inputs.predictors].float()
    prompts = model_inputs(as_batch(list(batch.prompts)), device, packed=False)
    values = _asked(critic, prompts)
    if values.numel() != len(batch):
        raise _unfit(critic, prompts, values)
    return values.reshape(-1)[inputs.grid.rows].float()


@torch.no_grad()
def gives_each_token(critic: nn.Module, device: torch.device) -> bool:
    """Tell whether a module gives a value of each token or one of each sequence; asked once, collective."""
    if critic not in _per_token:
        inputs = model_inputs(as_batch([np.array(row) for row in PROBE]), device, packed=False)
        with evaluating(critic):
            values = _asked(critic, inputs)
        if values.shape in ((len(PROBE),), (len(PROBE), 1)):
            if not taken_by(critic.forward, {"attention_mask": True}):
                name = type(critic).__name__
                raise EngineError(f"the critic {name} values a whole sequence: let its forward take attention_mask.")
            _per_token[critic] = False
        else:
            _check_shape(critic, inputs, values)
            _per_token[critic] = True
    return _per_token[critic]


def _asked(critic: nn.Module, inputs: ModelInputs) -> Tensor:
    offered = {"attention_mask": inputs.attention_mask, "position_ids": inputs.position_ids, "use_cache": False}
    found = critic(inputs.input_ids, **taken_by(critic.forward, offered))
    values = getattr(found, "logits", found)
    if not isinstance(values, Tensor):
        raise EngineError(f"the critic {type(critic).__name__} returned {type(found).__name__}; wanted {WANTED}.")
    return values


def _check_shape(critic: nn.Module, inputs: ModelInputs, values: Tensor) -> None:
    """Raise unless there is one value of each token."""
    rows = tuple(inputs.input_ids.shape)
    if values.shape not in (rows, (*rows, 1)):
        raise _unfit(critic, inputs, values)


def _unfit(critic: nn.Module, inputs: ModelInputs, values: Tensor) -> EngineError:
    return EngineError(
        f"the critic {type(critic).__name__} returned values of shape {tuple(values.shape)} for input ids of shape "
        f"{tuple(inputs.input_ids.shape)}; wanted {WANTED}. make_critic(path) makes one from a checkpoint."
    )

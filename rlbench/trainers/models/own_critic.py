"""A critic that the user made: how values of the state before each response token are read from it.

| critic | values |
|---|---|
| a sequence classifier of transformers with one label | its `score` at each token; what it pools needs a pad token |
| a module that gives (B, T) or (B, T, 1) | of the token before |
| a module that gives (B,) or (B, 1) | it sees prompts alone, and its value stands at each token of the response |

One number of a sequence that held the response would know what it judges, and bias the policy's gradient.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from rlbench.data.batches.batch import TrainBatch
from rlbench.errors import EngineError
from rlbench.trainers.models.scalar_model import HEAD, ScalarHeadModel
from rlbench.trainers.passes.forward import as_batch, evaluating
from rlbench.trainers.passes.packing import ModelInputs, model_inputs

PROBE = ([0, 1, 0, 1, 1, 0, 1], [1, 0, 0, 1])
"""Token ids that every vocabulary has."""
WANTED = "(sequences, tokens), (sequences, tokens, 1) or, one value for a whole sequence, (sequences,)"

_per_token: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def is_classifier(critic: nn.Module) -> bool:
    """Tell whether it is transformers' sequence classifier of one label over a causal model, read at each token."""
    from transformers import PreTrainedModel

    head = getattr(critic, HEAD, None)
    if not isinstance(critic, PreTrainedModel) or not isinstance(head, nn.Linear):
        return False
    if head.out_features != 1 or head.bias is not None:
        raise EngineError(
            f"the critic {type(critic).__name__} has a head of {head.out_features} labels; a value is one number: make "
            "it with num_labels=1, or by make_critic(path)."
        )
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
        inputs = model_inputs(as_batch([torch.tensor(row).numpy() for row in PROBE]), device, packed=False)
        with evaluating(critic):
            values = _asked(critic, inputs)
        if values.shape in ((len(PROBE),), (len(PROBE), 1)):
            if "attention_mask" not in _taken(critic):
                raise EngineError(
                    f"the critic {type(critic).__name__} gives one value for a whole sequence and takes no "
                    "attention_mask, so that it would value the padding, too: let its forward take one."
                )
            _per_token[critic] = False
        else:
            _check_shape(critic, inputs, values)
            _per_token[critic] = True
    return _per_token[critic]


def _asked(critic: nn.Module, inputs: ModelInputs) -> Tensor:
    offered = {"attention_mask": inputs.attention_mask, "position_ids": inputs.position_ids, "use_cache": False}
    taken = _taken(critic)
    found = critic(inputs.input_ids, **{name: value for name, value in offered.items() if name in taken})
    values = getattr(found, "logits", found)
    if not isinstance(values, Tensor):
        raise EngineError(
            f"the critic {type(critic).__name__} returned {type(found).__name__}; wanted a tensor of values {WANTED}, "
            "or an output with .logits of that shape."
        )
    return values


def _taken(critic: nn.Module) -> set[str]:
    return set(inspect.signature(critic.forward).parameters)


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

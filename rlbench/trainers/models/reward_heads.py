"""Reward models on the ranks: one score for each sequence, at its last token."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlbench.data.batches.batch import as_batch
from rlbench.data.prompts.encoded import EncodedMedia
from rlbench.errors import DataError, EngineError
from rlbench.rewards.last_tokens import padded, padding_for, padding_is
from rlbench.strategies.base import StrategyBase
from rlbench.strategies.sharding.tensor_parallel import split_over
from rlbench.trainers.models.policy_module import TrainedPolicy, as_trained
from rlbench.trainers.models.policy_spec import RewardSpec
from rlbench.trainers.models.scalar_model import HEAD, ScalarHeadModel, heads_of, in_all, make_scalar
from rlbench.trainers.models.value_model import media_reader, values_at
from rlbench.trainers.passes.forward import check_token_ids, evaluating
from rlbench.trainers.passes.packing import model_inputs
from rlbench.trainers.passes.sounds import Reader
from rlbench.user_code import user_code
from rlbench.weights.names import transformers_class

FILL = [0, 0]
"""What a rank without a sequence computes, so that its peers' collectives complete."""


class RewardModel(ScalarHeadModel):
    """A frozen scorer; `make_reward_model` makes one. `model(input_ids, …)` gives the score after each token."""


def make_reward_model(
    path: str,
    *,
    dtype: str | torch.dtype | None = None,
    value_head_prefix: str = HEAD,
    seed: int | None = None,
    revision: str | None = None,
) -> Any:
    """Make a frozen reward model on meta; `strategy.prepare_model(model)` shards it and loads its weights.

    `path` is a folder or hub id of a sequence classification model with one label, or of any causal checkpoint with
    such a head, called `value_head_prefix` there; of a model that sees or hears, what `rb.RewardModel` saved. `seed`
    draws a head that the checkpoint lacks, to train it.
    """
    return make_scalar(RewardModel, path, dtype, value_head_prefix, seed, revision).requires_grad_(False)


class TrainedReward(RewardModel, TrainedPolicy):
    """A reward model with an optimizer; of LoRA its head is trained whole."""


def make_trained_reward(spec: RewardSpec) -> Any:
    """Make the module of `spec` on meta; it is saved as the sequence classifier of transformers that it is."""
    shape = spec.shape()
    module = make_scalar(TrainedReward, spec.path, spec.dtype, HEAD, spec.head_seed, spec.revision, shape)
    module.spec = spec
    module.config.architectures = [transformers_class(module).__name__]  # type: ignore[union-attr]
    _choose_padding(module.config, spec)
    as_trained(module, spec, whole=_linear_parts(module))
    return module


def _linear_parts(module: Any) -> tuple[str, ...]:
    """Name the head and the linear layers in it."""
    head = module.get_submodule(module.head_name)
    return tuple(f"{module.head_name}.{name}".rstrip(".") for name, _ in head.named_modules())


def _choose_padding(config: Any, spec: RewardSpec) -> None:
    """Name a padding token that ends no text: transformers reads the score at the last token that is none of it.

    Where there is none apart from the end token none is named, and transformers takes one sequence at a time.
    """
    from transformers import AutoTokenizer

    config = config.get_text_config()
    padding, end = getattr(config, "pad_token_id", None), getattr(config, "eos_token_id", None)
    if not Path(spec.path).is_dir() or any(Path(spec.path).glob("tokenizer*")):
        tokenizer = AutoTokenizer.from_pretrained(spec.path, revision=spec.revision)
        padding, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    config.pad_token_id = None if padding in (end if isinstance(end, list) else [end]) else padding


def scores_of(
    model: nn.Module,
    sequences: Sequence[Sequence[int]],
    strategy: StrategyBase,
    batch_size: int = 8,
    media: Sequence[Sequence[EncodedMedia]] = (),
) -> Tensor:
    """The score (B,) float32, on the host, of each of this rank's sequences at its last token, of several heads their
    weighted sum; collective. Arguments as of `head_scores_of`."""
    found = head_scores_of(model, sequences, strategy, batch_size, media)
    return in_all(model, found) if heads_of(model) else found[:, 0]


@torch.no_grad()
def head_scores_of(
    model: nn.Module,
    sequences: Sequence[Sequence[int]],
    strategy: StrategyBase,
    batch_size: int = 8,
    media: Sequence[Sequence[EncodedMedia]] = (),
) -> Tensor:
    """The score of each head, (B, heads) float32, on the host; (B, 1) of one. Of this rank's sequences; collective.

    `model` is a `RewardModel`, a sequence classification model of transformers (whatever its padding token), or any
    module that gives (B,), (B, 1), or `.logits` of that shape for ids and an attention mask padded on the right.
    `media`: images or sounds of each sequence, whose placeholders stand in it, expanded; for a `RewardModel` that sees,
    or hears.
    """
    control, reader = strategy.control, media_reader(model) if isinstance(model, ScalarHeadModel) else None
    rows = list(zip(sequences, media or [()] * len(sequences), strict=True))

    def check() -> None:
        if batch_size < 1 or any(len(ids) == 0 for ids in sequences):
            raise DataError(f"batch_size={batch_size} of sequences without a token: both are 1 at least.")
        check_token_ids(model, "the reward model", *sequences)
        if not any(media):
            return
        batch = as_batch(sequences, media)
        for held in batch.media:
            if reader is None or held not in reader.takes or held == "videos":  # which no reward model watches
                does = {"images": "sees", "videos": "watches", "sounds": "hears"}[held]
                raise DataError(
                    f"prompts have {held}, and the reward model {type(model).__name__} {does} none: take one that "
                    "does, or give it a tokenizer of its own (model.tokenizer), with which it reads the texts."
                )
        assert reader is not None
        reader.check(batch)

    control.together("checking the sequences to score", check)
    together, first = strategy.rows.shared(rows) if split_over(model) > 1 else (rows, 0)
    by_length = sorted(range(len(together)), key=lambda row: (-len(together[row][0]), row))
    batches = [by_length[start : start + batch_size] for start in range(0, len(by_length), batch_size)]
    scores = torch.zeros(len(together), len(heads_of(model)) or 1)
    with evaluating(model), user_code():
        for step in range(max(control.gather(len(batches)))):
            places = batches[step] if step < len(batches) else []
            part = [together[place] for place in places] or [(FILL, ())]
            seen = reader is not None and any(control.gather(any(own for _, own in part)))
            found = _scored(model, part, strategy.device.device, reader if seen else None)
            scores[places] = found[: len(places)]
    return scores[first : first + len(sequences)]


def _scored(
    model: nn.Module,
    rows: Sequence[tuple[Sequence[int], Sequence[EncodedMedia]]],
    device: torch.device,
    reader: Reader | None,
) -> Tensor:
    """One forward; (B, heads) float32 on the host. `reader`: of images or sounds, where any rank's rows have some."""
    sequences = [ids for ids, _ in rows]
    if isinstance(model, ScalarHeadModel):
        if reader is not None and max(map(len, sequences)) < len(FILL):  # no room for a blank sound behind the rows
            rows, sequences = [*rows, (FILL, ())], [*sequences, FILL]
        batch = as_batch(sequences, [media for _, media in rows])
        inputs = model_inputs(batch, device, packed=False)
        last = [row * inputs.input_ids.shape[1] + length - 1 for row, length in enumerate(inputs.lengths)]
        inputs = replace(inputs, predictors=torch.tensor(last, device=device))
        with ExitStack() as within:
            if reader is not None:
                inputs = reader.placed(inputs, batch, packed=False)
                within.enter_context(reader.placing(inputs))
            given: Any = values_at(model, inputs)
    else:
        padding = padding_for(sequences)
        ids, mask = (tensor.to(device) for tensor in padded(sequences, padding))
        with padding_is(model, padding):
            given = model(ids, attention_mask=mask)
    found = getattr(given, "logits", given)
    count = len(heads_of(model)) or 1
    if not isinstance(found, Tensor) or found.shape not in ((len(rows),), (len(rows), count)):
        seen = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise EngineError(f"{type(model).__name__} gave {seen} for {len(rows)} sequences; wanted one number for each.")
    return found.reshape(-1, count).float().cpu()

"""A trainer of texts described: its batches read, its loss tried, its reference found, before a rank hears of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data import Mixture, PromptSet, PromptStream, TextStream, TrainBatch, demonstrations, labelled, pairs
from rlbench.data.batches.batch import NOT_SAMPLED
from rlbench.errors import DataError, LossError, SessionError
from rlbench.options import OptionError
from rlbench.session.core import SessionCore
from rlbench.session.options import SessionOptions
from rlbench.session.training import trainer_places
from rlbench.session.training.loss_check import ship
from rlbench.trainers.options.methods import LOSSES, REWARD, TEXTS

if TYPE_CHECKING:
    from rlbench.trainers.options.specs import TextSpec

MAKERS = {"demonstrations": demonstrations, "pairs": pairs, "labelled": labelled}


def text_spec(
    core: SessionCore,
    method: str,
    data: Any,
    eval_data: Any,
    reference: str | bool | None,
    loss: Any,
    schedule_steps: int | None,
    given: dict[str, Any],
    writing: dict[str, Any],
) -> TextSpec:
    """Describe the trainer of `method`; arguments as of `session.trainer`, `given` its options by our names, `writing`
    those by which rows become chats."""
    from rlbench.rl import resolve
    from rlbench.trainers.options.specs import TextSpec

    if data is None:
        raise SessionError(f"session.trainer: which texts? trainer({method!r}, data=rows)")
    loss = loss or LOSSES.get(method, method)
    texts = texts_of(method, data, core, **writing)
    held_out = None if eval_data is None else as_texts(method, eval_data, core, **writing)
    batch = texts.batch if isinstance(texts, TextStream) else texts
    has_own = batch.ref_logprobs is not None and (held_out is None or held_out.ref_logprobs is not None)
    declared = getattr(resolve(loss), "needs_reference", False)
    asked = (declared or core.has_reference) if reference is None else bool(reference)
    shipped, *_ = (
        ship(loss, one, has_reference=asked or has_own, scored=not core.samples)
        for one in (batch, held_out)
        if one is not None
    )
    if reference and not shipped.needs_reference:
        raise OptionError(f"reference={reference!r} has no effect: {shipped.name} compares with none. Leave it out.")
    wanted = shipped.needs_reference and not has_own
    options = core.options.of_trainers | given
    lr = options.pop("lr", None)
    return TextSpec(
        core.options.path,
        shipped.blob,
        texts,
        held_out,
        trainer_places.folders_here(options, "ckpt_path", "save_path"),
        _reference(core, reference) if wanted else None,
        lr,
        schedule_steps,
    )


def as_texts(method: str, data: Any, tokenizer: Any, **reading: Any) -> TrainBatch:
    """Return a batch as it is, or what the maker of a method's batches makes of rows, a file or a dataset."""
    if not isinstance(data, TrainBatch):
        made = MAKERS[TEXTS[method]](data, tokenizer, **reading)
        return compared(made, "trainer", heads_known(tokenizer)) if method == REWARD else made
    if reading:
        raise OptionError(f"{next(iter(reading))} has no effect on a batch that is read already. Leave it out.")
    if not data.mask.any():
        raise DataError("the batch has no token to train on: its mask is all False")
    return compared(data, "trainer", heads_known(tokenizer)) if method == REWARD else data


def texts_of(method: str, data: Any, tokenizer: Any, **reading: Any) -> TrainBatch | TextStream:
    """Return what a trainer takes: a stream goes on from where it stands."""
    if not isinstance(data, TextStream):
        return as_texts(method, data, tokenizer, **reading)
    if reading:
        raise OptionError(f"{next(iter(reading))} has no effect on a stream that is read already. Leave it out.")
    if method == REWARD:
        data = data.copy()
        data.batch = compared(data.batch, "trainer", heads_known(tokenizer))
    return data


def pretraining_of(data: Any, tokenizer: Any) -> Any:
    """Return texts to be trained on beside a reward: plain ones as they are, all else as demonstrations."""
    plain = isinstance(data, list | tuple) and all(isinstance(one, str) for one in data)
    if plain or isinstance(data, TrainBatch | TextStream | PromptSet | PromptStream | Mixture):
        return data
    return demonstrations(data, tokenizer)


def _reference(core: SessionCore, given: str | bool | None) -> Any:
    found = trainer_places.reference_here(core, True if given is None else given, any_model=given is None)
    return trainer_places.model_here("reference", found) if isinstance(found, str) else found


def heads_known(core: Any) -> tuple[str, ...] | None:
    """Return the heads of a reward model's session, none of one without names; None: it is no reward model's."""
    options = getattr(core, "options", None)
    return tuple(options.heads or ()) if isinstance(options, SessionOptions) and options.kind == REWARD else None


def compared(pairs: Any, verb: str, heads: Sequence[str] | None = None) -> TrainBatch:
    """Return pairs as a reward model of these `heads` takes them: where the tokens came from, and how they were drawn,
    is no matter. None: its heads are not known yet."""
    if not isinstance(pairs, TrainBatch) or not len(pairs):
        raise DataError(f"{verb} wants pairs, got {told(pairs)}: rb.data.pairs(rows, rm), or rollouts.pairs()")
    if pairs.pair is None:
        raise LossError(f"{verb}: the batch has no pairs to compare: rb.data.pairs(rows, rm), or rollouts.pairs()")
    said = pairs.verdicts if pairs.verdicts is None or heads is None else pairs.verdicts.of_heads(heads)
    return pairs.replace(
        verdicts=said,
        sampler_logprobs=np.full(pairs.tokens, np.nan, np.float32),
        old_logprobs=None,
        ref_logprobs=None,
        weight_version=np.full(len(pairs), NOT_SAMPLED, np.int64),
        temperature=1.0,
        reshaped_by=(),
    )


def told(given: Any) -> str:
    """Return what was given in the place of a batch with sequences, in words."""
    return "one without sequences" if isinstance(given, TrainBatch) else f"a {type(given).__name__}"

"""The verbs that train a reward model, from pairs, and that ask it for scores."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from rlbench.data import TrainBatch
from rlbench.data.base.ragged import Ragged, rows_in_order
from rlbench.data.batches.batch import to_score
from rlbench.data.prompts.encoded import EncodedMedia
from rlbench.data.prompts.images import PlacedImage, counted_from
from rlbench.data.prompts.placing import by_kind
from rlbench.data.record.metrics import Metrics
from rlbench.dispatch.chain import ChainStep
from rlbench.dispatch.pending import Pending
from rlbench.errors import DataError, nearest
from rlbench.options import OptionError
from rlbench.results import ExportedModel
from rlbench.session.core import SessionCore
from rlbench.session.state.checkpoints import start_export
from rlbench.session.training import steps
from rlbench.session.training.make_trainer import text_trainer
from rlbench.session.training.session_trainer import TextTrainer
from rlbench.session.training.text_data import compared, heads_known, told
from rlbench.trainers.options.methods import REWARD
from rlbench.trainers.update.options import PolicyOptions


def train_step(
    core: SessionCore,
    pairs: TrainBatch,
    loss: Any = "bradley_terry",
    *,
    aggregation: Any = None,
    token_budget: int | None = None,
    packing: bool | None = None,
    lr: float | None = None,
) -> Generator[ChainStep, Any, Metrics]:
    """Exactly one optimizer step of the reward model on pairs.

    Args:
        pairs: of `rb.data.pairs(rows, rm)`, or of `rollouts.pairs(by=…)`. Where they judge heads, each head is trained
            by the pairs that say something of it; other pairs train the weighted sum.
        loss: `rb.rl.bradley_terry(centering=0.01)`, `"log_exp"`, `rb.rl.hps(…)`; or a function `(LossInputs) ->
            (per_token, metrics)` of `inputs.chosen.scores` and `inputs.rejected.scores`, or of `inputs.scores`; of
            pairs that judge heads, of `head_scores` and `verdicts` there.
        aggregation, token_budget, packing, lr: as of `Session.train_step`.

    Returns:
        `Metrics`: `loss`, `reward_accuracy`, `reward_margin`, …; per token `scores`. An interrupt raises `rb.Stopped`:
        gradients are cleared and the optimizer is untouched.
    """
    given = {"aggregation": aggregation, "token_budget": token_budget, "packing": packing, "lr": lr}
    return (yield from steps.train_step(core, compared(pairs, "train_step", heads_known(core)), loss, **given))


def forward_backward(
    core: SessionCore,
    pairs: TrainBatch,
    loss: Any = "bradley_terry",
    *,
    aggregation: Any = None,
    token_budget: int | None = None,
    packing: bool | None = None,
) -> Generator[ChainStep, Any, Metrics]:
    """Accumulate the gradient of `loss` on pairs; `optim_step()` uses it, `zero_grad()` drops it."""
    given = {"aggregation": aggregation, "token_budget": token_budget, "packing": packing}
    return (
        yield from steps.forward_backward(core, compared(pairs, "forward_backward", heads_known(core)), loss, **given)
    )


def trainer(
    core: SessionCore,
    method: str = REWARD,
    *,
    data: Any = None,
    eval_data: Any = None,
    loss: Any = None,
    lr: float | None = None,
    schedule_steps: int | None = None,
    **options: Any,
) -> TextTrainer:
    """Make a trainer of this reward model: an iteration is one optimizer step, the curve that of `train_step`.

        trainer = rm.trainer(data="pairs.jsonl", eval_data=unseen, train_batch_size=64, eval_steps=10)
        trainer.fit(epochs=1)

    Args:
        method: "reward"; there is no other.
        data: pairs, as `rb.data.pairs` reads them: rows, a file, a dataset; a batch of them (also `rollouts.pairs()`),
            or a stream of one. The trainer keeps the place.
        eval_data: pairs that are held out, likewise: of `trainer.evaluate()` and `eval_steps`.
        loss: in the place of `rb.rl.bradley_terry()`: `rb.rl.log_exp(centering=0.01)`, or a function of your own.
        lr, schedule_steps: as of `Session.trainer`.
        options: of `TextConfig`, see docs/options.md.
    """
    if method != REWARD:
        raise OptionError(f"a reward model is trained by {REWARD!r}, not by {method!r}, which is of a policy.")
    given = {"data": data, "eval_data": eval_data, "loss": loss, "lr": lr, "schedule_steps": schedule_steps}
    return text_trainer(core, method, None, **given, **options)


def scores(core: SessionCore, batch: TrainBatch, head: str | None = None) -> Generator[ChainStep, Any, np.ndarray]:
    """The score of each sequence of a batch after its last trained token, (B,) float32; `head`: that of one alone."""
    heads = list(core.options.heads or ())
    if head is not None and head not in heads:
        has = f"it has {', '.join(heads)}" if heads else "it has one, without a name"
        raise DataError(f"scores: the reward model has no head {head!r}{nearest(str(head), heads)}; {has}")
    if not isinstance(batch, TrainBatch) or not len(batch):
        raise DataError(f"scores wants a TrainBatch with sequences, got {told(batch)}: rb.data.pairs(rows, rm)")
    found = yield ask_scores(core, *up_to_the_end(batch))
    return np.asarray(found.values if head is None else found.heads[:, heads.index(head)], np.float32)


def save(core: SessionCore, path: str, dtype: str | None = None) -> Generator[ChainStep, Any, ExportedModel]:
    """Write the reward model, adapters merged, as a sequence classifier that transformers loads, with its tokenizer.

    `rb.RewardModel(path)` goes on from it, `rb.rewards.model(path, as_sampled=True)` and a trainer's `reward=path` use
    it. Where the tokenizer has no padding token apart from its end token, transformers scores one sequence at a time.

    Args:
        path: must not be there, or be empty.
        dtype: of the weights (`"bfloat16"`, …); None: that of the model's config.
    """
    return replace((yield start_export(core, path, dtype, False, core.options.path)), scores=True)


def ask_scores(core: SessionCore, rows: Sequence[Any], media: Sequence[Sequence[EncodedMedia]]) -> Pending:
    """Ask the ranks for the score after the last token of rows of token ids, two each at least, and the images or
    sounds of each that they have placeholders for, places counted from its first token; gives `Scores`."""
    short = [i for i, row in enumerate(rows) if len(row) < 2]
    if short:
        raise DataError(f"sequence {short[0]} has {len(rows[short[0]])} tokens: a prompt and a response are 2 at least")
    batch = to_score([row[:-1] for row in rows], [row[-1:] for row in rows])
    held = [by_kind(own) for own in media]
    if any(own["images"] for own in held):
        seen = zip(held, rows, strict=True)
        batch = batch.replace(images=tuple(counted_from(own["images"], len(row) - 1) for own, row in seen))
    if any(own["sounds"] for own in held):
        batch = batch.replace(sounds=tuple(own["sounds"] for own in held))
    return core.train.call_all("policy_forward", batch, PolicyOptions(), finish=_scores, what="score")


class Scores(NamedTuple):
    """What a reward model says of B sequences: `values` (B,) float32, of several heads also theirs, `heads` (B, H)."""

    values: np.ndarray
    heads: np.ndarray | None

    @property
    def parts(self) -> list[list[float]]:
        """What each head says of each sequence, or the one."""
        found = self.values[:, None] if self.heads is None else self.heads
        return np.asarray(found, np.float64).tolist()  # type: ignore[no-any-return]


def _scores(parts: list[dict[str, Any]]) -> Scores:
    found = rows_in_order(parts)
    by_head = found.get("head_scores")
    return Scores(np.asarray(found["scores"].values), None if by_head is None else np.asarray(by_head.values))


def up_to_the_end(batch: TrainBatch) -> tuple[list[np.ndarray], list[tuple[EncodedMedia, ...]]]:
    """Return each sequence's token ids up to its last trained token, behind which it is scored, and the images that
    stand there, places counted from its first token, or its prompt's sounds."""
    if "videos" in batch.media:
        raise DataError("the sequences have videos, and reward models watch none: leave them out by batch.select")
    rows, media = [], list[tuple[EncodedMedia, ...]]()
    sounds = batch.sounds or [()] * len(batch)
    masks: Ragged = batch.responses.with_values(batch.mask)
    held = batch.images or [()] * len(batch)
    for i, (prompt, response, mask, own) in enumerate(zip(batch.prompts, batch.responses, masks, held, strict=True)):
        trained = np.flatnonzero(mask)
        if not len(trained):
            raise DataError(f"sequence {i} has no trained token, so no end to be scored at: its mask is all False")
        rows.append(np.concatenate([prompt, response[: trained[-1] + 1]]))
        before = [image for image in own if not isinstance(image, PlacedImage) or image.at < trained[-1]]
        media.append(counted_from(before, -len(prompt)) or sounds[i])
    return rows, media

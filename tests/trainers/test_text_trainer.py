"""A trainer of texts on a rank: its steps are those of a plain loop, it evaluates, goes on where it was, refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from rlbench.data.batches.batch import TrainBatch, of_texts
from rlbench.data.texts.preferences import of_pairs
from rlbench.dispatch import context
from rlbench.errors import CheckpointError, DataError, LossError, StateError, Stopped
from rlbench.rl import dpo
from rlbench.strategies import OptionError, get_fake_strategy
from rlbench.strategies.optim.optimizer_set import cosine_schedule
from rlbench.trainers import SPMDTextTrainer
from tests.modules import VOCAB
from tests.trainers.making import qwen_of
from tests.trainers.small_trainer import Saved, first_weight

pytestmark = pytest.mark.slow

SIZE = 3


def texts(count: int = 8, seed: int = 0) -> TrainBatch:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB, int(rng.integers(2, 6))) for _ in range(count)]
    responses = [rng.integers(0, VOCAB, int(rng.integers(2, 9))) for _ in range(count)]
    return of_texts(prompts, responses, [np.arange(len(row)) != 1 for row in responses])


def pairs(count: int = 5) -> TrainBatch:
    made = texts(2 * count)
    prompts = [made.prompts[i - i % 2] for i in range(2 * count)]
    return of_pairs(prompts, list(made.responses), list(made.responses.with_values(made.mask)))


def trainer_of(qwen: str, loss: Any = "sft", data: Any = None, **given: Any) -> SPMDTextTrainer:
    strategy: Any = get_fake_strategy({"train_batch_size": SIZE, "bf16": False, **given.pop("strategy", {})})
    actor = qwen_of(qwen)
    optimizer = strategy.create_optimizer(actor, lr=1e-3, weight_decay=0.0)
    steps = given.pop("schedule_steps", None)
    schedule = None if steps is None else cosine_schedule(optimizer, steps, 0.2)
    return SPMDTextTrainer(
        strategy, actor, optimizer, loss, texts() if data is None else data, actor_scheduler=schedule, **given
    )


def logprobs(model: Any, prompt: Any, response: Any) -> torch.Tensor:
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
    every = torch.log_softmax(model(ids[None]).logits[0, :-1], -1)[torch.arange(len(ids) - 1), ids[1:]]
    return every[len(prompt) - 1 :]


def by_row(model: Any, batch: TrainBatch) -> list[torch.Tensor]:
    masks = batch.responses.with_values(batch.mask)
    rows = zip(batch.prompts, batch.responses, masks, strict=True)
    return [logprobs(model, prompt, response)[torch.from_numpy(mask)] for prompt, response, mask in rows]


def plain_sft(model: Any, batch: TrainBatch, _: Any) -> torch.Tensor:
    return -torch.cat(by_row(model, batch)).mean()


def plain_dpo(model: Any, batch: TrainBatch, reference: Any) -> torch.Tensor:
    own = torch.stack([row.sum() for row in by_row(model, batch)])
    with torch.no_grad():
        base = torch.stack([row.sum() for row in by_row(reference, batch)])
    own = own - base
    return -logsigmoid(0.1 * (own[0::2] - own[1::2])).mean()


@pytest.mark.parametrize(("loss", "plain"), [("sft", plain_sft), (dpo(), plain_dpo)], ids=["sft", "dpo"])
@pytest.mark.parametrize(("budget", "passes"), [(None, {}), (12, {}), (None, {"packing": True, "share_prompts": True})])
def test_its_curve_is_that_of_a_plain_loop_however_the_texts_are_packed(
    qwen: str, loss: Any, plain: Any, budget: int | None, passes: dict[str, Any]
) -> None:
    data, reference = (texts(), None) if plain is plain_sft else (pairs(), qwen_of(qwen))
    trainer = trainer_of(qwen, loss, data, reference=reference, token_budget=budget, strategy=passes)
    model, stream = qwen_of(qwen), data.stream(seed=trainer.strategy.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, betas=(0.9, 0.95))
    for _ in range(5):
        expected = plain(model, stream.take(SIZE), qwen_of(qwen))
        expected.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        metrics = trainer.iterate()
        assert metrics["loss"] == pytest.approx(float(expected.detach()), rel=1e-3, abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-2)
    assert trainer.texts.taken == 15 and metrics["micro_batches"] > (1 if budget else 0)
    assert (metrics["shared"] > 0) == bool(passes and reference is not None)  # the two of a pair


def test_what_is_held_out_is_measured_as_a_step_would_and_trains_nothing(qwen: str) -> None:
    unseen = texts(4, seed=9)
    trainer = trainer_of(qwen, eval_texts=unseen, eval_steps=2)
    expected = float(plain_sft(trainer.actor, unseen, None).detach())
    before = first_weight(trainer.actor)
    assert trainer.evaluate()["eval/loss"] == pytest.approx(expected, rel=1e-4)
    assert torch.equal(first_weight(trainer.actor), before) and trainer.optimizer_steps == 0
    assert ["eval/loss" in trainer.iterate() for _ in range(4)] == [False, True, False, True]
    judged = trainer_of(qwen, dpo(), pairs(), reference=qwen_of(qwen), eval_texts=pairs(3))
    judged.iterate()
    found = judged.evaluate()
    assert 0 <= found["eval/reward_accuracy"] <= 1 and found["eval/reward_margin"] != 0


def test_it_goes_on_from_a_checkpoint_as_if_nothing_had_been(qwen: str, tmp_path: Path) -> None:
    trainer = trainer_of(qwen, schedule_steps=6, save_steps=2, ckpt_path=str(tmp_path), tokenizer=Saved())
    straight = [trainer.iterate() for _ in range(4)]
    again = trainer_of(qwen, schedule_steps=6, ckpt_path=str(tmp_path))
    assert again.files.load(str(tmp_path / "global_step2"))["iterations"] == 2 and again.unsent
    for one, other in zip(straight[2:], [again.iterate() for _ in range(2)], strict=True):
        assert [one[n] for n in ("loss", "grad_norm", "lr", "epoch")] == [
            other[n] for n in ("loss", "grad_norm", "lr", "epoch")
        ]
    with pytest.raises(DataError, match="other texts"):
        trainer_of(qwen, data=texts(5), schedule_steps=6).files.load(str(tmp_path))


def test_a_stop_or_a_failing_loss_leaves_the_weights_and_the_place(qwen: str) -> None:
    trainer = trainer_of(qwen)
    trainer.iterate()
    before, place = first_weight(trainer.actor), trainer.texts.state()
    context.set_current(context.CallContext(worker="here"))
    try:
        context.current().request_stop()
        with pytest.raises(Stopped):
            trainer.iterate()
    finally:
        context.set_current(None)
    assert torch.equal(first_weight(trainer.actor), before) and trainer.texts.state() == place
    assert not trainer.unsent and trainer.iterate()["loss"] > 0

    def broken(inputs: Any) -> Any:
        return inputs.logprobs / 0, {}

    failing = trainer_of(qwen, broken)
    place = failing.texts.state()
    with pytest.raises(LossError, match=r"not finite|nan|inf"):
        failing.iterate()
    assert failing.texts.state() == place and failing.optimizer_steps == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"n": 4}, "n has no effect on texts"),
        ({"micro_train_batch_size": 2}, "token_budget"),
        ({"rollout_batch_size": 2}, "no option 'rollout_batch_size'"),
        ({"train_batch_size": 5}, "the strategy was made with 3"),
        ({"eval_steps": 2}, "eval_steps has no effect"),
        ({"token_budget": 0}, "token_budget=0"),
    ],
)
def test_an_option_without_effect_is_refused(qwen: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        trainer_of(qwen, **given)


def test_what_is_missing_is_named(qwen: str, tmp_path: Path) -> None:
    with pytest.raises(LossError, match="ref_logprobs"):
        trainer_of(qwen, dpo(), pairs()).iterate()
    with pytest.raises(StateError, match="nothing to evaluate on"):
        trainer_of(qwen).evaluate()
    with pytest.raises(CheckpointError):
        trainer_of(qwen).files.load(str(tmp_path))
    ended = trainer_of(qwen, data=texts(3).stream(epochs=1))
    ended.iterate()
    with pytest.raises(DataError, match="the texts have ended, after 3"):
        ended.iterate()

"""What a trainer owes to a user whom something interrupts: nothing lost, nothing trained on twice, nothing ignored."""

from __future__ import annotations

import argparse
import copy
from typing import Any

import pytest
import torch

from rlbench.checkpoint.rank_state import State
from rlbench.data import PromptSet, PromptStream
from rlbench.errors import CheckpointError, DataError, Stopped
from rlbench.rl import dapo
from rlbench.strategies import OptionError
from rlbench.strategies.optim.optimizer_set import cosine_schedule
from rlbench.trainers.ppo.building import set_rate
from tests.trainers.making import asked, last_token, qwen_of
from tests.trainers.small_trainer import Digits, first_weight, trainer_of, with_critic

pytestmark = pytest.mark.slow

LETTERS = {"tokenizer": Digits(), "ptx_coef": 1.0, "pretrain_prompts": [f"{i} {i + 1} {i + 2}" for i in range(40)]}


def stop_once(trainer: Any, owner: Any, name: str, at: int = 1) -> None:
    """The `at`-th call of a method ends in a stop, and does nothing."""
    kept, calls = getattr(owner, name), []

    def stopped(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            raise Stopped("stopped")
        return kept(*args, **kwargs)

    setattr(owner, name, stopped)


def test_weights_that_a_stop_kept_from_the_engine_are_sent_with_the_next_call(qwen: str) -> None:
    trainer = trainer_of(qwen)
    synced: Any = trainer.strategy.update_engine_weights
    stop_once(trainer, trainer.strategy, "update_engine_weights")
    with pytest.raises(Stopped):
        trainer.iterate()
    assert trainer.optimizer_steps == 1 and not len(synced) and trainer.iterations == 0
    metrics = trainer.iterate()
    assert trainer.iterations == 1 and trainer.optimizer_steps == 1, "the same iteration, which was trained already"
    assert torch.equal(synced[0], first_weight(trainer.actor))
    assert metrics["train_steps"] == 1 and "policy_loss" in metrics


def test_weights_of_a_checkpoint_are_sent_before_anything_is_drawn(qwen: str, tmp_path: Any) -> None:
    trainer = trainer_of(qwen)
    trainer.files.save(tmp_path)
    trainer.fit(max_steps=1)
    synced: Any = trainer.strategy.update_engine_weights
    stop_once(trainer, trainer.strategy, "update_engine_weights")
    with pytest.raises(Stopped):
        trainer.files.load(tmp_path)
    trainer.make_experience()
    assert torch.equal(synced[-1], first_weight(trainer.actor)) and len(synced) == 2


def test_steps_before_a_stop_reach_the_engine_where_the_rest_makes_no_whole_step(qwen: str) -> None:
    """16 sequences, 12 to a step: the second part is accumulated and waits."""
    trainer = trainer_of(qwen, options={"train_batch_size": 12})
    synced: Any = trainer.strategy.update_engine_weights
    trainer.make_experience()
    stop_once(trainer, trainer.policy_update, "accumulate", at=2)
    with pytest.raises(Stopped):
        trainer.ppo_train()
    assert trainer.optimizer_steps == 1
    trainer.ppo_train()
    assert trainer.optimizer_steps == 1 and len(synced) == 1


def test_what_cannot_be_logged_ends_no_iteration_half_done(qwen: str, tmp_path: Any) -> None:
    trainer = trainer_of(
        qwen,
        save_trajectories=True,
        save_path=str(tmp_path),
        tokenizer=Digits(),
        prompts=PromptSet.of(asked(8, meta={"reference": object()})).stream(seed=1),
    )
    trainer.make_experience()
    with pytest.raises(DataError, match="reference answer"):
        trainer.ppo_train()
    assert len(trainer.strategy.update_engine_weights) == 1  # type: ignore[arg-type]
    assert len(trainer.replay_buffer) == 0, "it was trained on, and is not again"


def test_an_evaluation_changes_no_sample_of_the_training(qwen: str) -> None:
    trainer = trainer_of(qwen, eval_prompts=asked(3, seed=9))
    engine = trainer.strategy.gather_and_generate

    def counting(*args: Any, **kwargs: Any) -> Any:
        trainer.strategy.generate_calls += 1
        return engine(*args, **kwargs)

    trainer.strategy.gather_and_generate = counting  # type: ignore[method-assign]
    trainer.make_experience()
    trainer.evaluate()
    assert trainer.strategy.generate_calls == 1, "seeds derive from it"


def test_experience_that_was_not_made_is_drawn_again_with_the_same_seeds(qwen: str) -> None:
    failing = [True]

    def reward(rollout: Any) -> float:
        if failing.pop() if failing else False:
            raise ValueError("the judge is out")
        return last_token(rollout)

    trainer = trainer_of(qwen, reward=reward, reward_failures=0.0)
    engine = trainer.strategy.gather_and_generate

    def counting(*args: Any, **kwargs: Any) -> Any:
        trainer.strategy.generate_calls += 1
        return engine(*args, **kwargs)

    trainer.strategy.gather_and_generate = counting  # type: ignore[method-assign]
    with pytest.raises(DataError, match="judge"):
        trainer.make_experience()
    assert trainer.strategy.generate_calls == 0


def test_an_evaluation_that_fails_leaves_the_iteration_saved(qwen: str, tmp_path: Any) -> None:
    files = {"ckpt_path": str(tmp_path), "save_steps": 1}
    trainer = trainer_of(qwen, eval_prompts=asked(3, seed=9), eval_steps=1, **files)
    stop_once(trainer, trainer.experience_maker, "evaluate")
    with pytest.raises(Stopped):
        trainer.iterate()
    trainer.finish()
    resumed = trainer_of(qwen, load_checkpoint=True, **files)
    resumed.files.load_newest()
    assert resumed.iterations == 1


def test_a_checkpoint_is_loaded_over_a_stopped_update_without_anything_left_of_it(qwen: str, tmp_path: Any) -> None:
    """Neither the place among the sequences nor gradients that waited."""
    fresh = trainer_of(qwen, options={"train_batch_size": 12})
    fresh.files.save(tmp_path / "begin")
    fresh.make_experience()
    fresh.ppo_train()
    used = trainer_of(qwen, options={"train_batch_size": 12})
    used.make_experience()
    used.ppo_train()
    assert used.policy_update.waiting
    used.files.load(tmp_path / "begin")
    assert not used.policy_update.waiting
    used.make_experience()
    used.ppo_train()
    torch.testing.assert_close(first_weight(used.actor), first_weight(fresh.actor), rtol=0, atol=0)
    used.make_experience()
    stop_once(used, used.policy_update, "finish", at=1)
    with pytest.raises(Stopped):
        used.ppo_train()
    used.files.load(tmp_path / "begin")
    used.make_experience()
    assert used.ppo_train()["train_steps"] == 1
    torch.testing.assert_close(first_weight(used.actor), first_weight(fresh.actor), rtol=0, atol=0)


def test_a_checkpoint_without_a_part_is_refused_before_anything_changes(qwen: str, tmp_path: Any) -> None:
    alone = trainer_of(qwen)
    alone.fit(max_steps=1)
    alone.files.save(tmp_path)
    trainer = with_critic(qwen)
    before = first_weight(trainer.actor)
    with pytest.raises(CheckpointError, match="critic"):
        trainer.files.load(tmp_path)
    assert torch.equal(before, first_weight(trainer.actor)) and trainer.iterations == 0


def test_a_checkpoint_of_other_prompts_is_refused_before_anything_changes(qwen: str, tmp_path: Any) -> None:
    other = trainer_of(qwen, prompts=PromptSet.of(asked(12, seed=8)).stream(seed=3))
    other.fit(max_steps=1)
    other.files.save(tmp_path)
    trainer = trainer_of(qwen)
    before = first_weight(trainer.actor)
    with pytest.raises(DataError, match="restore: the state"):
        trainer.files.load(tmp_path)
    assert torch.equal(before, first_weight(trainer.actor)) and trainer.iterations == 0


def test_a_save_that_broke_off_between_actor_and_critic_is_no_mixture(
    qwen: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = with_critic(qwen)
    trainer.fit(max_steps=1)
    trainer.files.save(tmp_path)
    actor, critic = first_weight(trainer.actor), first_weight(trainer.critic)
    trainer.fit(max_steps=2)
    values = State.values

    def of_the_actor_alone(state: State) -> Any:
        if state.module is trainer.critic:
            raise Stopped("stopped")
        return values(state)

    with monkeypatch.context() as patch:
        patch.setattr(State, "values", of_the_actor_alone)
        with pytest.raises(Stopped):
            trainer.files.save(tmp_path)
    resumed = with_critic(qwen)
    resumed.files.load(tmp_path)
    assert resumed.iterations == 1
    assert torch.equal(first_weight(resumed.actor), actor) and torch.equal(first_weight(resumed.critic), critic)


def test_a_resumed_run_goes_on_with_the_next_texts_and_the_kl_as_it_had_adapted(qwen: str, tmp_path: Any) -> None:
    def made(**given: Any) -> Any:
        return trainer_of(
            qwen,
            reference=copy.deepcopy(trainer_of(qwen).actor),
            kl_coef=0.1,
            kl_target=1e-6,
            kl_horizon=20,
            options={"use_kl_loss": True, "kl_estimator": "k3"},
            **LETTERS,
            **given,
        )

    whole = made()
    with torch.no_grad():
        next(iter(whole.actor.parameters())).mul_(1.1)
    whole.fit(max_steps=1)
    whole.files.save(tmp_path)
    resumed = made()
    resumed.files.load(tmp_path)
    assert resumed.policy_update.loss.kl_coef == whole.policy_update.loss.kl_coef > 0.1
    for trainer in (whole, resumed):
        trainer.fit(max_steps=2)
    torch.testing.assert_close(first_weight(resumed.actor), first_weight(whole.actor), rtol=0, atol=0)


def test_gradients_that_others_left_on_the_actor_are_not_trained_on(qwen: str) -> None:
    """Those of a trainer that was replaced while its step waited."""

    def norm(left: bool) -> float:
        actor = qwen_of(qwen)
        if left:
            before = trainer_of(qwen, actor=actor, options={"train_batch_size": 32})
            before.make_experience()
            before.ppo_train()
        trainer = trainer_of(qwen, actor=actor)
        trainer.make_experience()
        return trainer.ppo_train()["actor_grad_norm"]

    assert norm(True) == norm(False)


def test_gradients_that_somebody_cleared_while_they_waited_are_not_counted(qwen: str) -> None:
    """`zero_grad` in a cell: the step begins anew, and is of as many sequences as any."""

    def norm(cleared: bool) -> float:
        trainer = trainer_of(qwen, options={"train_batch_size": 32})
        trainer.make_experience()
        if cleared:
            trainer.ppo_train()
            trainer.actor.zero_grad(set_to_none=True)
        else:
            trainer.replay_buffer.clear()
        trainer.make_experience()
        assert trainer.ppo_train()["train_steps"] == 0
        trainer.make_experience()
        return trainer.ppo_train()["actor_grad_norm"]

    assert norm(True) == pytest.approx(norm(False), rel=1e-6)


def test_a_stopped_step_gives_its_texts_back(qwen: str) -> None:
    trainer = trainer_of(qwen, **LETTERS)
    trainer.make_experience()
    stop_once(trainer, trainer.policy_update, "finish")
    with pytest.raises(Stopped):
        trainer.ppo_train()
    stream = trainer.pretraining.stream
    assert isinstance(stream, PromptStream) and stream.taken == 0


def test_texts_given_to_fit_are_trained_on(qwen: str) -> None:
    trainer = trainer_of(qwen, **LETTERS)
    mine = PromptSet.of([f"7 8 {i}" for i in range(20)]).stream(seed=1)
    trainer.fit(pretrain_dataloader=mine, max_steps=1)
    assert mine.taken == 16


def test_an_evaluation_takes_the_names_of_the_trainer_s_options(qwen: str) -> None:
    trainer = trainer_of(qwen, eval_prompts=asked(2))
    trainer.evaluate(max_new_tokens=3)
    engine: Any = trainer.strategy.gather_and_generate
    assert engine.calls[-1]["sampling"]["max_tokens"] == 3


def test_episodes_given_to_fit_count_over_those_of_a_script(qwen: str) -> None:
    trainer = trainer_of(qwen, prompts=PromptSet.of(asked(8)).stream(seed=3))
    assert len(trainer.fit(argparse.Namespace(num_episodes=5), num_episodes=1)) == 2


def test_a_loss_of_ones_own_is_aggregated_as_it_is_meant(qwen: str) -> None:
    assert trainer_of(qwen, loss=dapo()).aggregation.mode == "token-mean"
    assert trainer_of(qwen, loss=dapo(), loss_agg_mode="prompt-mean").aggregation.mode == "prompt-mean"


@pytest.mark.parametrize("given", [{"entropy_coef": 0.1}, {"high_entropy_token_ratio": 0.2}, {"mismatch": "icepop"}])
def test_options_of_a_loss_that_is_not_taken_are_refused(qwen: str, given: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="would have no effect"):
        trainer_of(qwen, loss="ppo", **given)


def test_actor_steps_cannot_be_frozen_without_a_critic_to_train(qwen: str) -> None:
    with pytest.raises(OptionError, match="freezing_actor_steps"):
        trainer_of(qwen, freezing_actor_steps=2)


def test_a_schedule_falls_to_a_tenth_of_its_own_rate_whatever_the_optimizer_was_made_with() -> None:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-6)
    set_rate(optimizer, 1e-3)
    schedule, rates = cosine_schedule(optimizer, 20, 0.1), []
    for _ in range(21):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert max(rates) == pytest.approx(1e-3) and rates[-1] == pytest.approx(1e-4)


def test_a_line_that_rank_0_cannot_write_ends_the_call_on_all(qwen: str, tmp_path: Any, monkeypatch: Any) -> None:
    """Defect absent: rank 0 raised alone, and the others waited for it in the next collective."""
    trainer = trainer_of(qwen, log_dir=str(tmp_path), plot_every=0)
    shared: list[Any] = []
    together = trainer.strategy.control.raise_together

    def seen(doing: str, failure: Exception | None) -> None:
        shared.append(failure)
        together(doing, failure)

    monkeypatch.setattr(trainer.strategy.control, "raise_together", seen)

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(trainer.log._lengths, "_write", full)
    with pytest.raises(OSError, match="no space"):
        trainer.make_experience()
    assert isinstance(shared[-1], OSError), "the other ranks heard of it"

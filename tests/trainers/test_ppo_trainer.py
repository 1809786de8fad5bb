"""A trainer on one rank, with an engine that draws from a table: steps, epochs, what waits, what is kept."""

from __future__ import annotations

import argparse
import copy
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlbench.dispatch import context
from rlbench.errors import DataError, StateError, Stopped
from rlbench.strategies import OptionError, get_fake_strategy
from rlbench.trainers import SPMDPPOTrainer, make_critic
from rlbench.trainers.options.trainer_options import read_options
from rlbench.trainers.ppo.trainer import PPOTrainer
from tests.trainers.making import TableEngine, asked, last_token, qwen_of
from tests.trainers.small_trainer import OPTIONS, Digits, first_weight, trainer_of

pytestmark = pytest.mark.slow


def test_an_iteration_steps_once_for_each_train_batch_and_then_syncs(qwen: str) -> None:
    trainer = trainer_of(qwen)
    before = first_weight(trainer.actor)
    rollout = trainer.make_experience()
    assert len(trainer.replay_buffer) == 16 and "reward" in rollout
    metrics = trainer.ppo_train()
    assert metrics["train_steps"] == 1 and {"policy_loss", "actor_lr", "actor_grad_norm", "reward"} <= metrics.keys()
    assert not torch.equal(before, first_weight(trainer.actor))
    (sent,) = trainer.strategy.update_engine_weights  # type: ignore[misc]
    assert torch.equal(sent, first_weight(trainer.actor)), "the engine has the weights of after the step"
    assert len(trainer.replay_buffer) == 0
    with pytest.raises(StateError, match="make_experience"):
        trainer.ppo_train()


def test_smaller_train_batches_step_more_often_and_epochs_go_over_all_again(qwen: str) -> None:
    trainer = trainer_of(qwen, options={"train_batch_size": 8}, max_epochs=3)
    trainer.make_experience()
    assert trainer.ppo_train()["train_steps"] == 6 and trainer.optimizer_steps == 6


def test_a_train_batch_larger_than_the_experience_waits_and_equals_one_step_on_all(qwen: str) -> None:
    """Two iterations of 16 sequences to one step of 32 end with the weights of one iteration of 32."""
    waits = trainer_of(qwen, options={"train_batch_size": 32})
    waits.make_experience()
    first = waits.ppo_train()
    assert first["train_steps"] == 0
    assert first["policy_loss"] == pytest.approx(loss_of_one_step(qwen), abs=1e-6), "of the sequences that wait"
    assert len(waits.strategy.update_engine_weights) == 0, "nothing changed, so nothing is sent"  # type: ignore[arg-type]
    waits.make_experience()
    assert waits.ppo_train()["train_steps"] == 1
    whole = trainer_of(qwen, options={"train_batch_size": 32}, rollout_batch_size=8)
    whole.make_experience()
    whole.ppo_train()
    torch.testing.assert_close(first_weight(waits.actor), first_weight(whole.actor), rtol=0, atol=2e-6)


def loss_of_one_step(qwen: str) -> float:
    trainer = trainer_of(qwen)
    trainer.make_experience()
    return trainer.ppo_train()["policy_loss"]


def test_the_documents_metrics_are_there_where_nothing_was_computed_too(qwen: str) -> None:
    """A loss with a plan computes nothing before its step is whole."""
    strategy = get_fake_strategy(OPTIONS)
    critic = strategy.prepare_model(make_critic(qwen), is_training=True)
    trainer = trainer_of(
        qwen,
        options={"advantage_estimator": "gae", "train_batch_size": 32},
        high_entropy_token_ratio=0.5,
        critic=critic,
        critic_optim=strategy.create_optimizer(critic, lr=1e-3),
    )
    trainer.make_experience()
    first = trainer.ppo_train()
    assert math.isnan(first["policy_loss"]) and first["critic_loss"] > 0
    trainer.make_experience()
    assert math.isfinite(trainer.ppo_train()["policy_loss"])


def test_a_micro_batch_is_at_most_a_ranks_share_of_a_step(qwen: str) -> None:
    """As the documents' example asks for micro-batches of 16, whatever the step has."""
    whole, large = trainer_of(qwen, micro_train_batch_size=16), trainer_of(qwen, micro_train_batch_size=64)
    for trainer in (whole, large):
        trainer.make_experience()
        assert trainer.ppo_train()["train_steps"] == 1
    assert torch.equal(first_weight(whole.actor), first_weight(large.actor))


def test_neither_micro_batches_nor_packing_nor_the_fused_head_change_the_step(qwen: str) -> None:
    def weights(**options: Any) -> torch.Tensor:
        trainer = trainer_of(qwen, options=options)
        trainer.make_experience()
        trainer.ppo_train()
        return first_weight(trainer.actor)

    plain = weights()
    for options in (
        {"micro_train_batch_size": 16},
        {"packing": True},
        {"head": "chunked", "chunk_size": 3},
        {"micro_rollout_batch_size": 3},
    ):
        # Adam's first step is lr times a sign, so rounding of a gradient near 0 shows; a wrong one moves by 1e-3
        torch.testing.assert_close(weights(**options), plain, rtol=0, atol=5e-5)


def test_a_critic_learns_beside_the_policy_and_alone_while_the_actor_is_frozen(qwen: str) -> None:
    strategy = get_fake_strategy(OPTIONS)
    critic = strategy.prepare_model(make_critic(qwen), is_training=True)
    again = trainer_of(
        qwen,
        options={"advantage_estimator": "gae"},
        critic=critic,
        freezing_actor_steps=1,
        critic_optim=strategy.create_optimizer(critic, lr=1e-3),
    )
    actor, head = first_weight(again.actor), first_weight(critic)
    again.make_experience()
    frozen = again.ppo_train(0)
    assert math.isnan(frozen["policy_loss"]) and {"critic_loss", "values", "critic_lr"} <= frozen.keys()
    assert torch.equal(actor, first_weight(again.actor)) and not torch.equal(head, first_weight(critic))
    again.make_experience()
    both = again.ppo_train(1)
    assert {"policy_loss", "critic_loss"} <= both.keys() and not torch.equal(actor, first_weight(again.actor))


def test_the_average_follows_the_actor_after_each_step(qwen: str) -> None:
    ema = qwen_of(qwen)
    before = first_weight(ema)
    trainer = trainer_of(qwen, ema=ema, ema_beta=0.75)
    trainer.make_experience()
    trainer.ppo_train()
    torch.testing.assert_close(first_weight(ema), 0.75 * before + 0.25 * first_weight(trainer.actor))


def test_a_stop_keeps_the_steps_that_are_done_and_the_next_call_goes_on(qwen: str) -> None:
    def run(stop_after: int | None) -> tuple[torch.Tensor, int]:
        trainer = trainer_of(qwen, options={"train_batch_size": 4}, max_epochs=2)
        trainer.make_experience()
        call, steps = context.CallContext(), []
        context.set_current(call)
        try:
            finish = trainer.policy_update.finish

            def counted() -> Any:
                steps.append(1)
                if len(steps) == stop_after:
                    call.request_stop()
                return finish()

            trainer.policy_update.finish = counted  # type: ignore[method-assign]
            if stop_after is not None:
                with pytest.raises(Stopped):
                    trainer.ppo_train()
                assert trainer.optimizer_steps == stop_after - 1, "the step at which it was stopped was not taken"
                context.set_current(context.CallContext())
            trainer.ppo_train()
        finally:
            context.set_current(None)
        return first_weight(trainer.actor), trainer.optimizer_steps

    assert run(None)[1] == run(3)[1] == 8
    torch.testing.assert_close(run(3)[0], run(None)[0], rtol=0, atol=0)


def test_a_failing_reward_gives_the_prompts_back(qwen: str) -> None:
    failing = [True]

    def reward(rollout: Any) -> float:
        if failing[0]:
            raise ValueError("the judge is out")
        return last_token(rollout)

    trainer = trainer_of(qwen, reward=reward)
    place = trainer.prompts.state()  # type: ignore[union-attr]
    with pytest.raises(DataError, match="the judge is out"):
        trainer.make_experience()
    assert trainer.prompts.state() == place and len(trainer.replay_buffer) == 0  # type: ignore[union-attr]
    failing[0] = False
    trainer.make_experience()
    assert trainer.prompts.taken == 4  # type: ignore[union-attr]


def test_users_override_making_and_training(qwen: str) -> None:
    class Mine(SPMDPPOTrainer):
        def make_experience(self, prompts: Any = None) -> Any:
            found = super().make_experience(prompts)
            self.seen = len(self.replay_buffer)
            return found

        def ppo_train(self, global_steps: int = 0) -> Any:
            return super().ppo_train(global_steps) | {"mine": 1.0}

    trainer = trainer_of(qwen, kind=Mine)
    done = trainer.fit(max_steps=2)
    assert trainer.seen == 16 and [one["mine"] for one in done] == [1.0, 1.0]  # type: ignore[attr-defined]


def test_fit_goes_on_where_it_was_from_a_checkpoint(qwen: str, tmp_path: Any) -> None:
    """Defect absent: a resumed run took its data from the start, without its optimizer."""
    files = {"ckpt_path": str(tmp_path / "ckpt"), "save_steps": 2}
    whole = trainer_of(qwen)
    expected = whole.fit(max_steps=4)
    trainer_of(qwen, **files).fit(max_steps=2)
    resumed = trainer_of(qwen, load_checkpoint=True, **files)
    found = resumed.fit(max_steps=4)
    assert len(found) == 2 and resumed.prompts.taken == 16  # type: ignore[union-attr]
    for ours, theirs in zip(found, expected[2:], strict=True):
        assert ours["reward"] == theirs["reward"]
        assert ours["policy_loss"] == pytest.approx(theirs["policy_loss"], abs=1e-7)
    torch.testing.assert_close(first_weight(resumed.actor), first_weight(whole.actor))


def test_pretraining_text_pulls_the_policy_towards_it(qwen: str) -> None:
    class Letters:
        def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
            return {"input_ids": [[ord(letter) % 50 for letter in text] for text in texts]}

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [chr(token) for token in ids]

    trainer = trainer_of(
        qwen, ptx_coef=5.0, pretrain_prompts=["some text to keep"] * 32, tokenizer=Letters(), max_epochs=4
    )
    losses = []
    for _ in range(3):
        trainer.make_experience()
        losses.append(trainer.ppo_train()["ptx_loss"])
    assert losses[-1] < losses[0] - 0.1
    for wrong in ({"ptx_coef": 1.0}, {"pretrain_prompts": ["text"]}):
        with pytest.raises(OptionError, match="belong together"):
            trainer_of(qwen, **wrong)


def test_the_weight_of_the_kl_adapts_and_the_loss_follows_it(qwen: str) -> None:
    reference = qwen_of(qwen)
    for use_kl_loss in (False, True):
        trainer = trainer_of(
            qwen,
            reference=copy.deepcopy(reference),
            kl_coef=0.1,
            kl_target=1e-6,
            kl_horizon=20,
            options={"use_kl_loss": use_kl_loss, "kl_estimator": "k3"},
            max_epochs=2,
        )
        with torch.no_grad():
            next(iter(trainer.actor.parameters())).mul_(1.1)  # away from the reference
        trainer.make_experience()
        assert trainer.rollout_metrics["rollout_ref_kl_per_sequence"] > 0
        trainer.ppo_train()
        assert trainer.kl_ctl.coef > 0.1
        assert getattr(trainer.policy_update.loss, "kl_coef", 0) == (trainer.kl_ctl.coef if use_kl_loss else 0)


def test_lengths_trajectories_and_tensorboard_are_written_where_the_options_say(qwen: str, tmp_path: Any) -> None:
    trainer = trainer_of(
        qwen,
        log_dir=str(tmp_path / "lengths"),
        plot_every=2,
        use_tensorboard=str(tmp_path / "board"),
        save_trajectories=True,
        num_trajectories_to_save=3,
        save_path=str(tmp_path / "saved"),
        tokenizer=Digits(),
    )
    trainer.fit(max_steps=3)
    plots = sorted(path.name for path in (tmp_path / "lengths").glob("*.svg"))
    assert plots == ["gen_len_step_0.svg", "gen_len_step_2.svg"]
    saved = json.loads((tmp_path / "saved" / "trajectories" / "trajectories_step_2.json").read_text())
    assert len(saved) == 3 and {"generated_text", "advantages", "return"} <= saved[0].keys()
    assert list((tmp_path / "board").glob("events*"))


class Interrupted(TableEngine):
    """Every other of its samples was cut."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        drawn = super().__call__(*args, **kwargs)
        return [replace(one, finish_reason="abort") if i % 2 else one for i, one in enumerate(drawn)]


def test_responses_that_were_cut_move_neither_the_step_nor_the_kl_nor_the_lengths_that_are_drawn(
    qwen: str, tmp_path: Any
) -> None:
    """8 of 16: one step is that of the other 8 alone."""
    adapting: dict[str, Any] = {"kl_coef": 0.1, "kl_target": 1e-6, "kl_horizon": 20}
    trainer = trainer_of(qwen, reference=qwen_of(qwen), log_dir=str(tmp_path), plot_every=0, **adapting)
    trainer.strategy.gather_and_generate = Interrupted()  # type: ignore[method-assign]
    other = trainer_of(qwen, reference=qwen_of(qwen), options={"train_batch_size": 8}, **adapting)
    for one in (trainer, other):
        with torch.no_grad():
            next(iter(one.actor.parameters())).mul_(1.1)  # away from the reference
    trainer.make_experience()
    kept = [part.rows(np.flatnonzero(part.trained)) for part in trainer.replay_buffer.items]
    for part in kept:
        other.replay_buffer.append(part)
    assert len(other.replay_buffer) == 8 and trainer.ppo_train()["train_steps"] == 1
    other.ppo_train()
    torch.testing.assert_close(first_weight(trainer.actor), first_weight(other.actor), rtol=0, atol=1e-6)
    assert trainer.kl_ctl.coef == pytest.approx(0.1 * (1 + 0.2 * 8 / 20))
    told = json.loads((tmp_path / "gen_len.jsonl").read_text())
    assert told["mean_length"] == np.mean([n for part in kept for n in part.batch.response_lengths])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rolout_batch_size": 3}, "no option 'rolout_batch_size'; nearest: rollout_batch_size"),
        ({"VLM": True}, "sees no images"),
        ({"kl_coef": 0.1}, "needs a reference"),
        ({"reference": torch.nn.Linear(1, 1)}, "initial_model would have no effect"),
        ({"options": {"use_kl_loss": True}}, "use_kl_loss"),
        ({"options": {"advantage_estimator": "gae"}}, "needs a critic"),
        ({"do_sample": False}, "do_sample=False cannot be honoured"),
        ({"options": {"train_batch_size": 10}}, "train_batch_size must be divisible"),
        ({"buffer_cpu_offload": False}, "buffer_cpu_offload"),
        ({"temperature": 0.0}, "temperature above 0"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_reason(qwen: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        trainer_of(qwen, **given)


def test_an_engine_of_no_ranks_is_an_assertion_error(qwen: str) -> None:
    strategy = get_fake_strategy(OPTIONS)
    object.__setattr__(strategy.config, "engine_tp_size", 0)  # a config refuses it itself
    with pytest.raises(AssertionError, match="engine_tp_size=0"):
        SPMDPPOTrainer(strategy, qwen_of(qwen))


def test_options_of_the_strategy_count_unless_the_trainer_has_its_own(qwen: str) -> None:
    config = get_fake_strategy(OPTIONS).config
    options = read_options(config, {"micro_train_batch_size": 8, "max_new_tokens": 5, "stop": ["x"], "top_k": 3})
    assert options.strategy.micro_train_batch_size == 8 and config.micro_train_batch_size == 4
    assert options.ppo.max_tokens == 5
    assert (options.ppo.top_k, options.sampling) == (3, {"stop": ["x"]})


def test_evaluation_is_greedy_and_leaves_the_training_alone(qwen: str) -> None:
    """Defect absent: an evaluation moved the running moments of rewards."""
    trainer = trainer_of(qwen, options={"reward_running_norm": True}, eval_prompts=asked(6, seed=9))
    trainer.make_experience()
    state = trainer.files.state()
    found = trainer.evaluate()
    engine: Any = trainer.strategy.gather_and_generate
    assert engine.calls[-1]["sampling"]["temperature"] == 0.0 and len(engine.calls[-1]["prompts"]) == 6
    assert "eval/reward" in found and trainer.files.state() == state and len(trainer.replay_buffer) == 16


def test_arguments_of_a_script_say_how_long_a_fit_is(qwen: str) -> None:
    whole = argparse.Namespace(num_episodes=1, max_steps=None)
    assert len(trainer_of(qwen).fit(whole)) == 10, "40 prompts, 4 at a time"
    assert len(trainer_of(qwen).fit(argparse.Namespace(max_steps=2))) == 2
    trainer = trainer_of(qwen)
    trainer.fit(prompts_dataloader=asked(12, seed=5), consumed_samples=4, num_update_steps_per_episodes=2)
    assert trainer.iterations == 2 and trainer.prompts.taken == 12  # type: ignore[union-attr]


def test_the_base_alone_does_not_train(qwen: str) -> None:
    trainer = trainer_of(qwen, kind=PPOTrainer)
    with pytest.raises(NotImplementedError, match=r"defines no ppo_train\(global_steps\)"):
        trainer.ppo_train()

"""Options of a trainer that act around its steps: rates, memory, files, evaluations, what is printed and drawn."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM

from rlbench.strategies import OptionError, get_fake_strategy
from rlbench.trainers import make_critic
from tests.trainers.making import asked, last_token
from tests.trainers.small_trainer import OPTIONS, Saved, first_weight, trainer_of

pytestmark = pytest.mark.slow


def test_the_schedule_of_the_critic_moves_its_rate_and_no_other(qwen: str) -> None:
    strategy = get_fake_strategy(OPTIONS)
    critic = strategy.prepare_model(make_critic(qwen), is_training=True)
    optimizer = strategy.create_optimizer(critic, lr=1e-2)
    trainer = trainer_of(
        qwen,
        options={"advantage_estimator": "gae"},
        critic=critic,
        critic_optim=optimizer,
        critic_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    )
    rates = [(one["critic_lr"], one["actor_lr"]) for one in trainer.fit(max_steps=3)]
    assert rates == [pytest.approx((1e-2 / n, 1e-3)) for n in (1, 2, 3)]


def test_recomputed_activations_change_no_step(qwen: str) -> None:
    """Each layer runs twice for each of the four micro-batches of the step: forward, and again in the backward."""

    def trained(**given: Any) -> tuple[int, torch.Tensor]:
        trainer, runs = trainer_of(qwen, **given), []
        trainer.make_experience()
        layer: Any = trainer.actor.model.layers[0].self_attn
        layer.register_forward_hook(lambda *_: runs.append(torch.is_grad_enabled()))
        trainer.ppo_train()
        return len(runs), first_weight(trainer.actor)

    (once, plain), (twice, recomputed) = trained(), trained(gradient_checkpointing=True)
    assert (once, twice) == (4, 8)
    torch.testing.assert_close(recomputed, plain, rtol=0, atol=1e-6)


def test_a_critic_recomputes_too_and_a_model_that_cannot_says_so(qwen: str) -> None:
    strategy = get_fake_strategy(OPTIONS)
    critic = strategy.prepare_model(make_critic(qwen), is_training=True)
    trainer_of(
        qwen,
        options={"advantage_estimator": "gae"},
        critic=critic,
        gradient_checkpointing=True,
        critic_optim=strategy.create_optimizer(critic, lr=1e-3),
    )
    assert critic.is_gradient_checkpointing
    with pytest.raises(OptionError, match="gradient_checkpointing: Linear does not offer it"):
        trainer_of(qwen, actor=torch.nn.Linear(2, 2), gradient_checkpointing=True)


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("global_step*"))


def test_as_many_checkpoints_are_kept_as_the_options_allow(qwen: str, tmp_path: Path) -> None:
    def fitted(name: str, steps: int, **given: Any) -> list[str]:
        trainer_of(qwen, save_steps=1, ckpt_path=str(tmp_path / name), **given).fit(max_steps=steps)
        return kept(tmp_path / name)

    assert fitted("three", 4) == ["global_step2", "global_step3", "global_step4"]
    assert fitted("number", 3, max_ckpt_num=2) == ["global_step2", "global_step3"]
    one = sum(path.stat().st_size for path in (tmp_path / "three/global_step4").rglob("*") if path.is_file())
    assert fitted("memory", 3, max_ckpt_num=9, max_ckpt_mem=2.5 * one / 1e9) == ["global_step2", "global_step3"]


def test_a_checkpoint_comes_with_a_model_for_transformers_where_that_is_asked_for(qwen: str, tmp_path: Path) -> None:
    def fitted(name: str, **given: Any) -> Any:
        folders = {"ckpt_path": str(tmp_path / name), "save_path": str(tmp_path / name / "models")}
        trainer = trainer_of(qwen, tokenizer=Saved(), save_steps=2, **folders, **given)
        trainer.fit(max_steps=3)
        return trainer

    fitted("without")
    assert not (tmp_path / "without" / "models").exists()
    trainer = fitted("with", save_hf_ckpt=True)
    saved = tmp_path / "with" / "models"
    assert sorted(path.name for path in saved.iterdir()) == ["global_step2_hf", "global_step3_hf"]
    loaded = Qwen2ForCausalLM.from_pretrained(saved / "global_step3_hf")
    for name, value in trainer.actor.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name].float(), value.float())
    assert (saved / "global_step3_hf" / "digits.txt").is_file()


def test_every_so_many_iterations_are_evaluated(qwen: str) -> None:
    def evaluated(every: int) -> list[int]:
        done = trainer_of(qwen, eval_prompts=asked(4, seed=9), eval_steps=every).fit(max_steps=5)
        return [number for number, metrics in enumerate(done, 1) if "eval/reward" in metrics]

    assert (evaluated(2), evaluated(1), evaluated(-1)) == ([2, 4], [1, 2, 3, 4, 5], [])


def test_an_iteration_is_one_line_and_no_batch_and_no_memory_is_printed(
    qwen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Defect absent: whole batches and a summary of memory were printed at every step."""
    trainer = trainer_of(qwen)
    capsys.readouterr()
    trainer.fit(max_steps=3)
    printed = "".join(capsys.readouterr())
    lines = printed.splitlines()
    assert re.findall(r"iteration \d(?=: reward)", printed) == ["iteration 1", "iteration 2", "iteration 3"]
    assert len(lines) == 3 and all(len(line) < 200 for line in lines)


def test_lines_and_curves_are_as_often_as_logging_steps_says(
    qwen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer_of(qwen, logging_steps=2, use_tensorboard=str(tmp_path), plot_every=99).fit(max_steps=5)
    assert re.findall(r"iteration (\d)", capsys.readouterr().out) == ["2", "4"]
    board = board_of(tmp_path)
    assert [event.step for event in board.Scalars("rollout/reward")] == [2, 4]
    assert {"train/policy_loss", "perf/sync_s"} <= set(board.Tags()["scalars"])


def board_of(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    board = EventAccumulator(str(folder), size_guidance={"histograms": 0})
    board.Reload()
    return board


def test_tensorboard_alone_gets_the_histogram_of_lengths(qwen: str, tmp_path: Path) -> None:
    trainer_of(qwen, use_tensorboard=str(tmp_path), plot_every=2).fit(max_steps=3)
    board = board_of(tmp_path)
    (tag,) = board.Tags()["histograms"]
    events = board.Histograms(tag)
    assert [event.step for event in events] == [0, 2] and events[0].histogram_value.num == 16
    assert not list(tmp_path.glob("*.png"))


def test_the_tokens_marked_in_trajectories_are_the_share_that_keeps_its_loss(qwen: str, tmp_path: Path) -> None:
    def share(**given: Any) -> float:
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        trainer = trainer_of(
            qwen,
            tokenizer=Saved(),
            save_path=str(place),
            save_trajectories=True,
            num_trajectories_to_save=16,
            mark_high_entropy_tokens=True,
            **given,
        )
        trainer.fit(max_steps=1)
        saved = json.loads((place / "trajectories" / "trajectories_step_0.json").read_text())
        long = [one["generated_tokens"] for one in saved if len(one["generated_tokens"]) >= 10]
        assert long
        return float(np.mean([token["high_entropy"] for tokens in long for token in tokens]))

    assert share() < 0.25 < share(high_entropy_token_ratio=0.5) < 0.6


def test_entropies_that_nobody_computes_cannot_be_marked(qwen: str) -> None:
    with pytest.raises(OptionError, match="mark_high_entropy_tokens needs the actor's entropies"):
        trainer_of(qwen, mark_high_entropy_tokens=True, save_trajectories=True, old_logprobs="sampler")


def test_advantages_are_as_large_as_the_rewards_unless_a_clip_is_asked_for(qwen: str) -> None:
    """Defect absent: advantages were always clamped to 10."""

    def largest(**options: Any) -> np.ndarray:
        trainer = trainer_of(
            qwen,
            reward=lambda rollout: 1000 * last_token(rollout) - 4000,
            options={"advantage_estimator": "reinforce", **options},
        )
        trainer.make_experience()
        found = [experience.batch for experience in trainer.replay_buffer.items]
        rewards = np.concatenate([np.repeat(np.asarray(b.rewards), b.response_lengths) for b in found])
        if not options:
            np.testing.assert_allclose(np.concatenate([batch.advantages for batch in found]), rewards)
        return np.array([max(batch.advantages.max() for batch in found), min(b.advantages.min() for b in found)])

    assert largest()[0] > 1000 and largest()[1] < -1000
    np.testing.assert_array_equal(largest(advantage_clip=7.0), [7, -7])

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
from tests.modules import batch_of
from tests.trainers.making import LONGEST, asked, last_token, qwen_of
from tests.trainers.small_trainer import OPTIONS, Digits, Saved, first_weight, trainer_of

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


def test_a_step_shares_prompts_where_that_is_asked_for(qwen: str) -> None:
    def trained(**given: Any) -> tuple[int, torch.Tensor]:
        trainer, tokens = trainer_of(qwen, packing=True, **given), []
        trainer.make_experience()

        def watch(_: Any, args: Any, kwargs: Any) -> None:
            if torch.is_grad_enabled():  # proofs have none
                tokens.append(kwargs["input_ids"].numel())

        trainer.actor.model.register_forward_pre_hook(watch, with_kwargs=True)
        trainer.ppo_train()
        return sum(tokens), first_weight(trainer.actor)

    (every, plain), (once, shared) = trained(), trained(share_prompts=True)
    assert 0 < once < every
    torch.testing.assert_close(shared, plain, rtol=0, atol=1e-6)


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


def test_reentrant_checkpoints_change_no_step_and_pass_frozen_embeddings(
    qwen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's reentrant checkpoints give a layer no gradient where nothing that enters it has one."""
    passed: list[bool] = []
    own = torch.utils.checkpoint.CheckpointFunction.apply
    monkeypatch.setattr(
        torch.utils.checkpoint.CheckpointFunction, "apply", lambda *given: (passed.append(True), own(*given))[1]
    )

    def trained(**given: Any) -> dict[str, torch.Tensor]:
        actor = qwen_of(qwen)
        actor.model.embed_tokens.requires_grad_(False)
        trainer = trainer_of(qwen, actor=actor, **given)
        trainer.make_experience()
        trainer.ppo_train()
        return {name: value.detach().clone() for name, value in trainer.actor.named_parameters()}

    plain, kept = trained(), trained(gradient_checkpointing=True)
    assert not passed
    recomputed = trained(gradient_checkpointing=True, gradient_checkpointing_use_reentrant=True)
    assert len(passed) == 2 * 4  # layers, micro-batches
    assert (plain["model.norm.weight"] - qwen_of(qwen).model.norm.weight).abs().max() > 1e-4
    for name, value in plain.items():
        torch.testing.assert_close(recomputed[name], value, rtol=0, atol=1e-6)
        torch.testing.assert_close(kept[name], value, rtol=0, atol=1e-6)
    with pytest.raises(OptionError, match="aux_loss_coef and gradient_checkpointing_use_reentrant"):
        trained(gradient_checkpointing=True, use_reentrant=True, aux_loss_coef=0.1)


def test_the_critic_is_saved_at_the_end_where_that_is_asked_for(qwen: str, tmp_path: Path) -> None:
    def fitted(name: str, **given: Any) -> Any:
        strategy = get_fake_strategy(OPTIONS)
        critic = strategy.prepare_model(make_critic(qwen), is_training=True)
        more = {"critic": critic, "critic_optim": strategy.create_optimizer(critic, lr=1e-3), "tokenizer": Saved()}
        more |= {"save_path": str(tmp_path / name), "options": {"advantage_estimator": "gae"}}
        trainer_of(qwen, **more, **given).fit(max_steps=1)
        return critic

    fitted("without")
    assert not list(tmp_path.glob("without*"))
    critic = fitted("with", save_value_network=True)
    read = get_fake_strategy(OPTIONS).prepare_model(make_critic(str(tmp_path / "with_critic"), seed=9))
    for name, value in critic.state_dict().items():
        torch.testing.assert_close(read.state_dict()[name].float(), value.float())


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
    fitted("alone", save_hf_ckpt=True, disable_ds_ckpt=True)
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["models"]
    assert len(list((tmp_path / "alone" / "models").iterdir())) == 2
    with pytest.raises(OptionError, match="disable_ds_ckpt leaves nothing to save without save_hf_ckpt"):
        fitted("nothing", disable_ds_ckpt=True)


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


def test_the_spread_of_an_iterations_numbers_follows_its_line_where_that_is_asked_for(
    qwen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    [plain] = trainer_of(qwen).fit(max_steps=1)
    assert " ± " not in capsys.readouterr().out
    [found] = trainer_of(qwen, print_replay_buffer_stats=True).fit(max_steps=1)
    printed = capsys.readouterr().out.splitlines()
    spread = f"{found['step_reward_mean']:.4g} ± {found['step_reward_std']:.4g}"
    ends = f", {found['step_reward_min']:.4g} to {found['step_reward_max']:.4g}"
    assert f"  step_reward: {spread}{ends}" in printed
    assert {line.split(":")[0].strip() for line in printed} >= {"advantages", "returns", "response_length"}
    assert plain["step_reward_mean"] == found["step_reward_mean"]


def test_what_trajectories_hold_is_told_as_metrics_where_that_is_asked_for(qwen: str, tmp_path: Path) -> None:
    files = {"save_trajectories": True, "save_path": str(tmp_path), "num_trajectories_to_save": 5}
    [plain] = trainer_of(qwen, tokenizer=Saved(), **files).fit(max_steps=1)
    [found] = trainer_of(qwen, tokenizer=Saved(), trajectory_analysis=True, **files).fit(max_steps=1)
    [path] = (tmp_path / "trajectories").iterdir()
    samples = json.loads(path.read_text())
    assert len(samples) == 5
    for name in ("repeat_score", "reflection_pattern_score", "policy_entropy", "response_token_count"):
        mean = sum(one[name] for one in samples) / 5
        assert found[f"trajectory/{name}_mean"] == pytest.approx(mean), name
        assert f"trajectory/{name}_mean" not in plain


def test_pretraining_texts_are_as_long_as_pretrain_max_len_says(qwen: str) -> None:
    def lengths(**given: Any) -> set[int]:
        trainer = trainer_of(qwen, ptx_coef=0.1, pretrain_prompts=["5 " * 40] * 8, tokenizer=Digits(), **given)
        return {len(row) for batch in trainer.pretraining.texts(4) for row in batch}

    assert (lengths(), lengths(pretrain_max_len=7), lengths(max_len=33)) == ({16 + LONGEST}, {7}, {33})
    demonstrations = batch_of([(3, 5), (4, 9)])
    with pytest.raises(OptionError, match=r"pretrain_max_len=12: the longest demonstration .* has 13 tokens"):
        trainer_of(qwen, ptx_coef=0.1, pretrain_prompts=demonstrations, pretrain_max_len=12)
    trainer_of(qwen, ptx_coef=0.1, pretrain_prompts=demonstrations, pretrain_max_len=13)


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

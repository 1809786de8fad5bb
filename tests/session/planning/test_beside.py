"""What a plan says of a trainer's critic and reward models: whose bytes, in which phase, on which side, and why not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rlbench as rb
from rlbench.cli import main
from rlbench.errors import BuildError
from rlbench.session.options import REWARD, Inference, SessionOptions, Train
from rlbench.session.planning import check
from rlbench.session.planning.devices import Devices
from rlbench.session.planning.plan import planned
from rlbench.session.planning.request import CRITIC, SCORER
from rlbench.session.planning.uses import (
    ALL_PHASES,
    AVERAGE,
    CRITIC_STEP,
    FIRST,
    PHASES,
    RANK,
    REPLICA,
    REWARDS,
    ROLLOUT,
    SCORE,
    STEP,
    SYNC,
    VALUES,
)
from rlbench.trainers.options.specs import TextSpec, TrainerSpec
from rlbench.units import GIB
from tests.modules import save_qwen
from tests.session.planning.test_pictures import ONE_QUICK
from tests.session.planning.test_plan import config_of
from tests.trainers.seeing import save_eyes

ON_GPU: dict[str, Any] = {"gpus": "1x24GiB", "lengths": 256, "token_budget": 2048}
ON_HOST = {**ON_GPU, "gpus": "0x24GiB"}
SCORES = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "score"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return config_of(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return scorer_of(tmp_path_factory.mktemp("scorer"))


def scorer_of(folder: Path, **sizes: Any) -> str:
    return config_of(folder, **{**SCORES, **sizes})


def phases_of(plan: Any, role: str, owner: str, host: bool = False) -> set[str]:
    uses = [use for use in (plan.host if host else plan.device) if (use.role, use.owner) == (role, owner)]
    return {phase for use in uses for phase, nbytes in use.phases.items() if nbytes and phase in plan.phases}


def test_a_critic_trains_whole_in_float32_after_the_policy(model: str) -> None:
    alone, plan = rb.plan(model, **ON_GPU), rb.plan(model, critic=True, **ON_GPU)
    assert alone.phases == PHASES and plan.phases == (ROLLOUT, SCORE, VALUES, STEP, CRITIC_STEP, SYNC)
    count = plan.of(CRITIC, "weights") // 4
    assert count == plan.parameters + 256, "the head in the place of a tied output layer, of the policy's width"
    assert plan.of(CRITIC, "gradients") == 4 * count and plan.of(CRITIC, "optimizer") == 8 * count
    assert phases_of(plan, CRITIC, "weights") == set(plan.phases)
    assert phases_of(plan, CRITIC, "gradients") == {CRITIC_STEP}
    assert phases_of(plan, RANK, "gradients") == {STEP, CRITIC_STEP}, "the policy's wait until the critic's are there"
    assert phases_of(plan, CRITIC, "activations") == {VALUES, CRITIC_STEP}
    assert phases_of(plan, RANK, "activations") == {SCORE, STEP}
    assert plan.least == alone.least + 4 * count, "as they are built"
    small = rb.plan(model, critic=True, inference={"kv_cache_bytes": 8 << 20}, **ON_GPU)
    assert small.least == 16 * (count + plan.parameters), "what a step of both needs"


def test_adapters_and_recomputed_activations_are_the_policys_alone(model: str) -> None:
    how = {"gradient_checkpointing": True, "lora": rb.Lora(rank=8)}
    whole, adapted = (rb.plan(model, critic=True, train=train, **ON_GPU) for train in (None, how))
    for owner in ("weights", "gradients", "optimizer", "activations"):
        assert adapted.of(CRITIC, owner) == whole.of(CRITIC, owner)
        assert adapted.of(RANK, owner) < whole.of(RANK, owner)


def test_it_is_split_over_all_ranks_where_the_policy_is_not(model: str) -> None:
    copies = rb.plan(model, critic=True, train={"shards": 1, "data_parallel_size": 2}, **{**ON_GPU, "gpus": "2x24GiB"})
    alone = rb.plan(model, critic=True, **ON_GPU)
    assert copies.of(RANK, "weights") == alone.of(RANK, "weights")
    assert copies.of(CRITIC, "optimizer") == pytest.approx(alone.of(CRITIC, "optimizer") / 2, rel=0.01)
    kept = rb.plan(model, critic=True, train={"fsdp_cpu_offload": True}, **ON_GPU)
    assert phases_of(kept, CRITIC, "weights", host=True) and not phases_of(kept, CRITIC, "weights")


def test_copies_to_undo_an_iteration_hold_the_critic(model: str) -> None:
    alone, plan = rb.plan(model, **ON_GPU), rb.plan(model, critic=True, **ON_GPU)
    copies = [next(use for use in one.host if use.owner.startswith("undo")).most for one in (alone, plan)]
    assert copies[1] - copies[0] == 3 * 12 * (plan.of(CRITIC, "weights") // 4)


def test_replicas_of_a_trainer_sleep_while_its_ranks_compute(model: str, scorer: str) -> None:
    for beside in ({"critic": True}, {"rewards": [scorer]}):
        plan = rb.plan(model, **beside, **ON_GPU)
        assert phases_of(plan, REPLICA, "KV cache") == {ROLLOUT, SYNC} | ({FIRST} & set(plan.phases))
    assert phases_of(rb.plan(model, **ON_GPU), REPLICA, "KV cache") == set(PHASES)


def test_optimizers_that_are_sent_away_are_there_for_both_steps(model: str) -> None:
    plan = rb.plan(model, critic=True, offload=["optimizer"], **ON_GPU)
    for role in (RANK, CRITIC):
        assert phases_of(plan, role, "optimizer") == {STEP, CRITIC_STEP}
        assert phases_of(plan, role, "optimizer, offloaded", host=True) == {ROLLOUT, SCORE, VALUES, SYNC}


def test_a_reward_model_is_on_a_gpu_until_it_has_scored_once_and_then_while_it_scores(model: str, scorer: str) -> None:
    plan = rb.plan(model, rewards=[scorer], **ON_GPU)
    assert plan.phases == (FIRST, ROLLOUT, REWARDS, SCORE, STEP, SYNC)
    assert plan.of(SCORER, "gradients") == plan.of(SCORER, "optimizer") == 0
    assert phases_of(plan, SCORER, "weights") == {FIRST, REWARDS}
    assert phases_of(plan, SCORER, "weights, offloaded", host=True) == {ROLLOUT, SCORE, STEP, SYNC}
    assert phases_of(plan, SCORER, "activations") == {REWARDS}
    assert plan.of(SCORER, "weights") == 2 * (plan.parameters + 256), "as the checkpoint holds them, in bfloat16"
    assert phases_of(plan, RANK, "optimizer") == set(plan.phases) - {FIRST}, "nothing has stepped by then"


def test_of_several_reward_models_the_largest_counts_while_they_score(model: str, scorer: str, tmp_path: Path) -> None:
    wide = scorer_of(tmp_path / "wide", hidden_size=512, intermediate_size=1024)
    one, two = rb.plan(model, rewards=[wide], **ON_GPU), rb.plan(model, rewards=[scorer, wide], **ON_GPU)
    second = f"{SCORER} 2"
    assert two.total(REWARDS) == one.total(REWARDS)
    assert two.total(FIRST) == one.total(FIRST) + two.of(SCORER, "weights")
    assert phases_of(two, SCORER, "weights") == {FIRST} and phases_of(two, second, "weights") == {FIRST, REWARDS}
    assert REWARDS in phases_of(two, SCORER, "weights, offloaded", host=True)
    assert any("one after the other" in note for note in two.notes)


def test_a_reward_model_that_each_rank_loads_stays_whole_where_it_is(model: str, scorer: str) -> None:
    how = {**ON_GPU, "gpus": "2x24GiB", "train": {"shards": 2}}
    plan = rb.plan(model, rewards=[rb.rewards.model(scorer, batch_size=2)], **how)
    assert plan.of(SCORER, "weights") == 4 * (plan.parameters + 256), "in float32, whatever the checkpoint's dtype"
    assert phases_of(plan, SCORER, "weights") == set(plan.phases) - {FIRST}, "it is loaded when it first scores"
    assert phases_of(plan, SCORER, "activations") == {REWARDS}
    assert any("whole on each rank in float32; 2 completions at a time" in note for note in plan.notes)
    half = rb.plan(model, rewards=[rb.rewards.model(scorer, batch_size=4, dtype="bfloat16")], **how)
    assert half.of(SCORER, "weights") == plan.of(SCORER, "weights") / 2
    assert half.of(SCORER, "activations") == pytest.approx(plan.of(SCORER, "activations"), rel=0.01)
    aside = rb.plan(model, rewards=[rb.rewards.model(scorer, device="cpu")], **how)
    assert phases_of(aside, SCORER, "weights", host=True) and not phases_of(aside, SCORER, "weights")
    assert phases_of(aside, SCORER, "activations", host=True) == {REWARDS}


def test_beside_ones_that_leave_it_counts_while_they_score_too(model: str, scorer: str) -> None:
    loaded = rb.rewards.model(scorer, dtype="bfloat16")
    split, both = (rb.plan(model, rewards=rewards, **ON_GPU) for rewards in ([scorer], [loaded, scorer]))
    assert both.of(f"{SCORER} 2", "weights") == split.of(SCORER, "weights") == both.of(SCORER, "weights")
    assert both.total(SYNC) == split.total(SYNC) + both.of(SCORER, "weights")
    assert both.total(FIRST) == split.total(FIRST)


def test_one_that_reads_what_was_sampled_is_split_where_it_has_the_policys_vocabulary(
    tmp_path: Path, tiny_path: Path
) -> None:
    from transformers import AutoTokenizer

    config = json.loads((tiny_path / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    how = {**ON_GPU, "gpus": "2x24GiB", "train": {"shards": 2}}
    weights = {}
    for name in ("same", "none", "other"):
        folder = tmp_path / name
        scorer_of(folder, **{key: value for key, value in config.items() if key != "architectures"})
        if name == "other":
            tokenizer.add_tokens(["<another>"])
        if name != "none":
            tokenizer.save_pretrained(folder)
        reward = rb.rewards.model(folder, as_sampled=True)
        weights[name] = rb.plan(str(tiny_path), rewards=[reward], **how).of(SCORER, "weights")
    assert weights["same"] == weights["none"] == pytest.approx(weights["other"] / 2, rel=0.02)


def test_on_a_host_the_largest_pass_of_a_ranks_process_counts(model: str, scorer: str, tmp_path: Path) -> None:
    plan = rb.plan(model, critic=True, rewards=[scorer], **ON_HOST)
    assert FIRST not in plan.phases and phases_of(plan, SCORER, "weights") == set(plan.phases)
    assert plan.of(RANK, "activations") > 0 == plan.of(CRITIC, "activations") == plan.of(SCORER, "activations")
    wide = config_of(tmp_path / "wide", hidden_size=1024, intermediate_size=4096)
    other = rb.plan(model, critic=wide, **ON_HOST)
    assert other.of(CRITIC, "activations") > 0 == other.of(RANK, "activations")
    assert any("of the critic" in note for note in other.notes)
    processes = [next(use for use in one.device if use.owner == "processes").most for one in (plan, other)]
    assert processes[0] == processes[1], "they are in the ranks' own processes"


def test_notes_say_which_trainer_it_is(model: str) -> None:
    notes = rb.plan(model, critic=True, **ON_GPU).notes
    assert any("micro_train_batch_size=8" in note and "packing=True" in note for note in notes)
    assert not any("estimate: " in note for note in notes), "the pass of the critic was run on meta"


def test_the_pass_of_a_reward_model_that_trains_is_run_on_meta_too(model: str) -> None:
    request = rb.plan(model, **ON_GPU).request
    plan = planned(replace(request, kind=REWARD))
    assert plan.of(RANK, "activations") > 0 == plan.of(RANK, "logits")
    assert not any("estimate: " in note for note in plan.notes)


@pytest.mark.parametrize("family", ONE_QUICK)
def test_a_critic_that_sees_is_planned_with_its_pictures(family: str, tmp_path: Path) -> None:
    eyes = save_eyes(tmp_path, family)
    how = {**ON_GPU, "lengths": 128, "token_budget": 256}
    blind, shown = (rb.plan(eyes, critic=True, images=text, **how) for text in (None, "112x112"))
    assert shown.of(CRITIC, "activations") > blind.of(CRITIC, "activations")
    assert not any("estimate: " in note for note in shown.notes)
    assert phases_of(shown, CRITIC, "pixels", host=True) == set(shown.phases)
    with pytest.raises(BuildError, match=r"critic .* sees none"):
        rb.plan(eyes, critic=save_qwen(tmp_path / "text"), images="112x112", **how)


def test_the_smallest_change_that_fits_is_proved_with_the_critic_in_it(model: str) -> None:
    full = rb.plan(model, critic=True, **{**ON_HOST, "token_budget": 16384})
    tight = rb.plan(
        model, critic=True, **{**ON_HOST, "token_budget": 16384, "gpus": f"0x{full.peak * 0.9 / GIB:.3f}GiB"}
    )
    assert not tight.fits and tight.change.plan.fits and tight.change.plan.request.critic == tight.request.critic
    assert tight.change.plan.of(CRITIC, "weights") == tight.of(CRITIC, "weights")
    assert not any("offload" in what for what in tight.change.what), "replicas sleep already"


def test_a_critic_too_large_for_the_gpu_is_left_out_last(model: str, tmp_path: Path) -> None:
    giant = config_of(tmp_path / "giant", hidden_size=4096, intermediate_size=16384, num_hidden_layers=8)
    plan = rb.plan(model, critic=giant, undo=0, **{**ON_GPU, "gpus": "1x12GiB"})
    assert not plan.fits and plan.change.plan.fits
    moved = rb.plan(model, critic=giant, undo=0, train={"fsdp_cpu_offload": True}, **{**ON_GPU, "gpus": "1x12GiB"})
    assert ("fsdp_cpu_offload" in plan.change.what[-1]) == moved.fits
    host = rb.plan(model, critic=giant, undo=0, **{**ON_HOST, "gpus": "0x6GiB"})
    assert "no critic" in str(host.change) and host.change.plan.request.critic is None


def test_fewer_tokens_are_told_as_a_trainers_sequences(model: str) -> None:
    how: dict[str, Any] = {"critic": True, "undo": 0, "inference": {"kv_cache_bytes": 64 << 20}}
    full = rb.plan(model, **how, **{**ON_HOST, "token_budget": 16384})
    tight = {**ON_HOST, "token_budget": 16384, "gpus": f"0x{full.peak * 0.9 / GIB:.3f}GiB"}
    change = rb.plan(model, **how, **tight).change
    assert change.what == ("micro-batches of 32 sequences (micro_train_batch_size=32; here token_budget=8192)",)


@pytest.mark.parametrize("option", ["critic", "rewards"])
def test_a_model_that_is_none_is_refused_with_the_option(model: str, tmp_path: Path, option: str) -> None:
    for path, why in ((str(tmp_path / "no" / "where"), "no model folder"), (str(tmp_path), "no config.json")):
        with pytest.raises(BuildError, match=f"(?s){option}=.*{why}"):
            rb.plan(model, **{option: path if option == "critic" else [path]}, **ON_HOST)
    with pytest.raises(BuildError, match=f"{option}= takes the name of a model"):
        rb.plan(model, **{option: 3 if option == "critic" else [3]}, **ON_HOST)


def test_models_of_another_kind_are_refused_with_what_to_give(model: str, tmp_path: Path) -> None:
    bert = config_of(tmp_path / "bert", architectures=["BertForMaskedLM"], model_type="bert")
    with pytest.raises(BuildError, match=r"no critic can be planned of .*'bert'.* no scalar head"):
        rb.plan(model, critic=bert, **ON_HOST)
    with pytest.raises(BuildError, match=r"no reward model can be planned .*'bert'"):
        rb.plan(model, rewards=[bert], **ON_HOST)
    with pytest.raises(BuildError, match=r"causal language model .* without a scalar head: give a sequence classifier"):
        rb.plan(model, rewards=[model], **ON_HOST)
    several = scorer_of(tmp_path / "several", id2label={"0": "a", "1": "b", "2": "c"})
    with pytest.raises(BuildError, match="gives 3 numbers"):
        rb.plan(model, rewards=[several], **ON_HOST)
    assert rb.plan(model, rewards=[rb.rewards.model(several, output=1)], **ON_HOST).of(SCORER, "weights") > 0
    with pytest.raises(BuildError, match=r"rewards=\["):
        rb.plan(model, rewards=model, **ON_HOST)


def test_a_causal_checkpoint_that_holds_a_head_is_a_reward_model(model: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    folder = config_of(tmp_path / "with-a-head")
    save_file({"score.weight": torch.zeros(1, 256)}, tmp_path / "with-a-head" / "model.safetensors")
    assert rb.plan(model, rewards=[folder], **ON_HOST).of(SCORER, "weights") > 0


def test_text_and_command_line_have_them(model: str, scorer: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", model, "--gpus", "1x24GiB", "--lengths", "256"]
    assert main([*asked, "--critic"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in (CRITIC, VALUES, CRITIC_STEP)) and REWARDS not in shown
    assert main([*asked, "--critic", model, "--reward", scorer, "--reward", scorer]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in (*ALL_PHASES, f"{SCORER} 2"))
    assert main([*asked, "--critic", "/no/where"]) == 1
    assert "critic=" in capsys.readouterr().err


def test_an_average_is_the_policy_in_float32_over_all_ranks_and_in_the_copies(model: str) -> None:
    how = {"train": {"bf16": True, "masters": False, "shards": 1, "data_parallel_size": 2}, "gpus": "2x24GiB"}
    alone, plan = (rb.plan(model, ema=ema, **{**ON_GPU, **how}) for ema in (False, True))
    assert plan.of(RANK, "weights") == 2 * plan.parameters
    assert plan.of(RANK, AVERAGE) == pytest.approx(4 * plan.parameters / 2, rel=0.01)
    assert plan.least == alone.least + plan.of(RANK, AVERAGE)
    copies = [next(use for use in one.host if use.owner.startswith("undo")).most for one in (alone, plan)]
    assert copies[1] - copies[0] == 3 * 4 * plan.parameters
    with pytest.raises(BuildError, match="ema=True averages all weights"):
        rb.plan(model, ema=True, lora=rb.Lora(rank=8))


@pytest.mark.parametrize(
    "asked",
    [
        {"critic": True},
        {"reward": "scorer"},
        {"reference": True},
        {"ema": True},
        {"reward": {"as_sampled": True}},
        {"reward": {}},
    ],
)
def test_a_trainers_models_that_do_not_fit_beside_the_sessions_are_refused_with_the_plan(
    asked: dict[str, Any], model: str, scorer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = dict(asked)
    if "reward" in given:
        given["reward"] = [scorer if given["reward"] == "scorer" else rb.rewards.model(scorer, **given["reward"])]
    options = SessionOptions(model, model, 0, Train(shards=1), Inference(kv_cache_bytes=256 << 20))
    alone = rb.plan(model, train=options.train, inference=options.inference, undo=0, gpus="0x1GiB").least
    monkeypatch.setattr(check, "_memory", lambda: (Devices(0, alone), alone))
    check.need_room(options)
    check.need_trainer_room(options, TrainerSpec(model, reward=len))
    specs: list[Any] = [TrainerSpec(model, **given)]
    if "reference" in given:
        specs.append(TextSpec(model, b"", SimpleNamespace(), **given))  # type: ignore[arg-type]
    for spec in specs:
        with pytest.raises(BuildError, match=r"the trainer cannot fit(?s:.*)train rank"):
            check.need_trainer_room(options, spec)

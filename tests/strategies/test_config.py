"""Options: where they come from, what is refused, and that each says who honours it."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlbench.errors import BuildError
from rlbench.option_names import LIGHTRFT
from rlbench.options import options_in
from rlbench.session.options import Train
from rlbench.strategies import (
    FakeStrategy,
    FSDPV2Strategy,
    OptionError,
    StrategyConfig,
    add_arguments,
    factory,
    get_strategy,
)
from rlbench.strategies.options.config import accumulation_steps, default, need_groups
from rlbench.trainers.options.methods import our_names

REFERENCE = {
    "seed": 42,
    "max_norm": 1.0,
    "micro_train_batch_size": 1,
    "train_batch_size": 128,
    "bf16": True,
    "zero_stage": 2,
    "fsdp": False,
    "fsdp_cpu_offload": False,
    "adam_offload": False,
    "zpg": 1,
    "grad_accum_dtype": None,
    "overlap_comm": False,
    "engine_type": "vllm",
    "engine_tp_size": 1,
    "local_rank": -1,
    "sp_size": 1,
    "actor_learning_rate": 1e-5,
    "critic_learning_rate": 1e-5,
    "adam_betas": (0.9, 0.95),
    "l2": 0.0,
    "lr_warmup_ratio": 0.03,
    "critic_pretrain": False,
    "remote_rm_url": None,
    "reward_running_norm": False,
    "reward_running_norm_minus_mean": False,
    "advantages_norm": False,
    "advantage_clip": 0.0,
    "reward_clip": 0.0,
    "micro_rollout_batch_size": 2,
    "n_samples_per_prompt": 8,
    "overlong_buffer": False,
    "overlong_buffer_len": 1024,
    "overlong_buffer_penalty_factor": 1.0,
    "dynamic_sampling": False,
    "use_kl_loss": False,
    "kl_estimator": "k3",
    "mixed_mm_data": False,
    "use_mp_opt": False,
}
DOCUMENTED = {
    "enable_engine_sleep": True,
    "chunk_size": 4096,
    "plot_every": 10,
    "log_dir": None,
    "engine_mem_util": 0.5,
}


LIGHTRFT_NAMES = {meant: name for name, meant in reversed(LIGHTRFT.items()) if name != "disable_engine_sleep"}


def parsed(*line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(line)


def test_defaults_are_the_reference_systems_and_where_it_contradicts_itself_its_documents() -> None:
    config = parsed()
    assert {name: getattr(config, name) for name in REFERENCE} == REFERENCE
    assert {name: getattr(config, name) for name in DOCUMENTED} == DOCUMENTED


def test_the_command_line_has_lightrfts_names_with_the_same_defaults() -> None:
    line = vars(parsed())
    assert {name: line[name] for name in {**REFERENCE, **DOCUMENTED}} == {**REFERENCE, **DOCUMENTED}
    assert set(line) == set(REFERENCE) | {LIGHTRFT_NAMES.get(name, name) for name in options_in(StrategyConfig)} | {
        *StrategyConfig.NEUTRAL
    }
    assert StrategyConfig.of(parsed()).overridden() == {}


def test_the_guides_command_lines_are_read() -> None:
    config = StrategyConfig.of(
        parsed(
            *"--fsdp --fsdp_cpu_offload --use_mp_opt --engine_tp_size 2 --engine_mem_util 0.85 --enable_engine_sleep "
            "--micro_train_batch_size 1 --train_batch_size 64 --bf16 --adam_betas 0.8 0.9 --packing_samples".split()
        )
    )
    assert config.overridden() == {
        "train_batch_size": 64,
        "fsdp": True,
        "fsdp_cpu_offload": True,
        "use_mp_opt": True,
        "engine_tp_size": 2,
        "gpu_memory_utilization": 0.85,
        "betas": (0.8, 0.9),
        "packing": True,
    }
    assert config.adam_betas == (0.8, 0.9)  # as a script of LightRFT reads it
    assert not StrategyConfig.of(parsed("--disable_engine_sleep", "--no-bf16")).enable_engine_sleep
    assert not parsed("--no-bf16").bf16


@pytest.mark.parametrize("first", [True, False])
def test_a_scripts_own_flag_counts_whether_it_comes_before_or_after_ours(first: bool) -> None:
    parser = argparse.ArgumentParser()
    if first:
        parser.add_argument("--seed", type=int, default=7)
    add_arguments(parser)
    if not first:
        parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--pretrain", default="a/model")
    config = StrategyConfig.of(parser.parse_args([]))
    assert (config.seed, config.extra_args) == (7, {"pretrain": "a/model"})


def test_a_scripts_own_option_that_is_called_like_ours_stays_the_scripts() -> None:
    config = StrategyConfig.of(argparse.Namespace(actor_learning_rate=1e-6, lr=3, beta=0.5))
    assert (config.lr, config.extra_args) == (1e-6, {"lr": 3, "beta": 0.5})


def test_yaml_mappings_and_the_command_line_agree(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("fsdp: true\nactor_learning_rate: 1e-6\nadam_betas: [0.8, 0.9]\nlog_dir: logs\n")
    given = {"fsdp": True, "actor_learning_rate": 1e-6, "adam_betas": (0.8, 0.9), "log_dir": "logs"}
    line = "--fsdp --actor_learning_rate 1e-6 --adam_betas 0.8 0.9 --log_dir logs".split()
    assert StrategyConfig.of(tmp_path / "c.yaml") == StrategyConfig.of(given) == StrategyConfig.of(parsed(*line))
    (tmp_path / "empty.yaml").write_text("")
    assert StrategyConfig.of(tmp_path / "empty.yaml") == StrategyConfig.of(None)
    (tmp_path / "list.yaml").write_text("- fsdp\n")
    for bad, said in (("list.yaml", "list"), ("none.yaml", "YAML")):
        with pytest.raises(OptionError, match=said):
            StrategyConfig.of(tmp_path / bad)


@pytest.mark.parametrize("given", [{"adam_ofload": True}, argparse.Namespace(adam_ofload=True)])
def test_a_misspelt_option_is_refused_with_the_nearest_name(given: Any) -> None:
    with pytest.raises(OptionError, match="no option 'adam_ofload'; nearest: adam_offload"):
        StrategyConfig.of(given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", "many"),
        ("seed", 1.5),
        ("bf16", 1),
        ("max_norm", None),
        ("betas", (0.9,)),
        ("log_dir", 3),
        ("engine_type", None),
        ("engine_type", "hf"),
        ("max_norm", float("nan")),
        ("train_batch_size", 0),
        ("weight_decay", True),
    ],
)
def test_a_value_of_another_kind_is_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name):
        StrategyConfig.of({name: value})


@pytest.mark.parametrize(("name", "value"), [("mixed_mm_data", 2), ("rm_use_engine", 2), ("rm_engine_cudagraph", 2)])
def test_what_is_not_here_raises_when_it_is_set_and_is_taken_when_it_asks_for_nothing(name: str, value: Any) -> None:
    """Defect absent: inert flags."""
    for given in ({"fsdp": True, name: value}, parsed("--fsdp", f"--{name}", str(value))):
        with pytest.raises(OptionError, match=f"{name}={value!r} cannot be honoured"):
            StrategyConfig.of(given)
    assert StrategyConfig.of({name: StrategyConfig.NEUTRAL[name]}) == StrategyConfig()


@pytest.mark.parametrize("name", StrategyConfig.WITHOUT_EFFECT)
def test_what_does_nothing_there_is_taken_and_warned_of(name: str) -> None:
    for given in ({"fsdp": True, name: True}, parsed("--fsdp", f"--{name}")):
        with pytest.warns(UserWarning, match=f"{name} has no effect: LightRFT's own code does nothing with it"):
            assert StrategyConfig.of(given) == StrategyConfig(fsdp=True)


@pytest.mark.parametrize(
    ("name", "value"), [("zero_stage", 3), ("zpg", 8), ("grad_accum_dtype", "fp32"), ("overlap_comm", True)]
)
def test_an_option_of_deepspeeds_is_refused_with_fsdp2_and_taken_when_it_asks_for_nothing(
    name: str, value: Any
) -> None:
    line = ["--fsdp", f"--{name}", *([] if value is True else [str(value)])]
    for given in ({"fsdp": True, name: value}, parsed(*line)):
        with pytest.raises(OptionError, match=f"{name}={value!r} cannot be honoured with FSDP2"):
            StrategyConfig.of(given)
    with pytest.raises(OptionError, match=f"{name}={value!r} cannot be honoured with FSDP2"):
        FSDPV2Strategy(args={name: value})  # before it looks for ranks
    assert StrategyConfig.of({name: value}).overridden() == {name: value}
    assert StrategyConfig.of({"fsdp": True, name: default(name)}) == StrategyConfig(fsdp=True)
    if name != "zero_stage":  # which a session refuses whatever it is
        assert our_names({name: default(name), "seed": 1}) == {"seed": 1}
        with pytest.raises(OptionError, match=f"{name}={value!r} cannot be honoured"):
            our_names({name: value})


def test_without_fsdp_it_is_deepspeeds_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(factory, "DeepspeedStrategy", lambda **given: made.append("zero") or FakeStrategy(**given))
    monkeypatch.setattr(factory, "FSDPV2Strategy", lambda **given: made.append("fsdp") or FakeStrategy(**given))
    for given in ({}, {"zero_stage": 3}, parsed(), {"fsdp": True}, parsed("--fsdp", "--zero_stage", "2")):
        get_strategy(given)
    assert made == ["zero", "zero", "zero", "fsdp", "fsdp"]
    for given in ({"fsdp": True, "zero_stage": 3}, parsed("--fsdp", "--zero_stage", "3"), {"zero_stage": 0}):
        with pytest.raises(OptionError, match="zero_stage"):
            get_strategy(given)


def test_a_process_that_is_no_rank_is_told_where_strategies_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(BuildError, match=r"no rank .*%%ranks.*torchrun.*get_fake_strategy"):
        get_strategy({"fsdp": True})


def test_the_summary_marks_what_was_set() -> None:
    lines = StrategyConfig.of(argparse.Namespace(fsdp=True, pretrain="x")).summary().splitlines()
    assert (
        "  fsdp: True (Overridden)" in lines
        and "  seed: 42 (Default)" in lines
        and "  pretrain: x (the script's)" in lines
    )
    assert sum("(Overridden)" in line for line in lines) == 1
    assert sum(line.endswith(("(Default)", "(Overridden)")) for line in lines) == len(options_in(StrategyConfig))


def test_the_batch_rule_has_the_references_words_and_numbers() -> None:
    assert accumulation_steps(128, 4, 8) == 4
    with pytest.raises(ValueError, match=r"Required: 100 % \(3 \* 8\) == 0"):
        accumulation_steps(100, 3, 8)


def test_cpu_offload_overrides_adam_offload() -> None:
    assert not StrategyConfig.of({"fsdp_cpu_offload": True, "adam_offload": True}).adam_offload


def test_options_and_their_flags_need_no_torch() -> None:
    code = (
        "import sys, argparse; from rlbench.strategies import StrategyConfig, add_arguments; "
        "add_arguments(argparse.ArgumentParser()); StrategyConfig(); "
        "assert not {'torch', 'ray', 'vllm'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there() -> None:
    import rlbench.strategies as room

    public = [name for name in dir(room) if name[0].isupper() or name.startswith("get_")]
    assert {"StrategyBase", "FSDPV2Strategy", "get_strategy", "GenLenAnalyser"} <= set(public)
    assert all(getattr(room, name) is not None for name in public)
    with pytest.raises(AttributeError, match="no attribute 'get_strategie'"):
        room.get_strategie  # noqa: B018


def test_prompts_are_shared_of_packed_sequences_that_ranks_have_whole() -> None:
    with pytest.raises(OptionError, match="share_prompts=True has no effect without packing=True"):
        StrategyConfig(share_prompts=True)
    with pytest.raises(OptionError, match="share_prompts=True and sequence_parallel=2 cannot be honoured together"):
        StrategyConfig(share_prompts=True, packing=True, sequence_parallel=2)


@pytest.mark.parametrize("kind", [StrategyConfig, Train])
def test_ranks_share_layers_or_tokens_but_not_both(kind: Any) -> None:
    with pytest.raises(OptionError, match="tensor_parallel and sequence_parallel cannot be honoured together"):
        kind(tensor_parallel=2, sequence_parallel=2)
    for name in ("tensor_parallel", "sequence_parallel"):
        need_groups(kind(**{name: 2}), 4)
        with pytest.raises(OptionError, match=f"{name}=2 does not divide 3 ranks"):
            need_groups(kind(**{name: 2}), 3)

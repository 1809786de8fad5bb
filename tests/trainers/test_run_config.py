"""A run's options: where they come from and which counts, what is refused and why, and the reference's flags, all of
them."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from rlbench.strategies.config import OPTIONS, OptionError, StrategyConfig
from rlbench.trainers.methods import METHODS, method_options, with_method
from rlbench.trainers.ppo_config import PPOConfig
from rlbench.trainers.reference_flags import ALIASES, AS_ASKED, NEGATED, REFUSED
from rlbench.trainers.run_config import RunConfig, parse, read_yaml
from rlbench.trainers.run_options import (
    ALL_OPTIONS,
    NEEDS,
    PPO_OPTIONS,
    RUN_OPTIONS,
    RunOptions,
    defaults,
    typed,
)

REFERENCE_FLAGS = """
engine_tp_size engine_mem_util enable_engine_sleep disable_engine_sleep packing_samples sp_size fsdp use_mp_opt
fsdp_cpu_offload log_dir plot_every rm_use_engine rm_engine_cudagraph mixed_mm_data fused_linear_logprob chunk_size
engine_type text_only save_path save_steps save_hf_ckpt disable_ds_ckpt save_trajectories num_trajectories_to_save
mark_high_entropy_tokens trajectory_analysis print_replay_buffer_stats logging_steps eval_steps ckpt_path max_ckpt_num
max_ckpt_mem load_checkpoint dynamic_sampling overlong_buffer overlong_buffer_len overlong_buffer_penalty_factor
num_episodes rollout_batch_size micro_rollout_batch_size max_epochs prompt_max_len generate_max_len max_len max_samples
max_norm l2 ptx_coef eps_clip loss_agg_mode use_gspo normalize_advantages use_sequence_rewards value_clip lambd gamma
micro_train_batch_size train_batch_size normalize_reward_for_critic top_p temperature use_fire first_token_temperature
freeze_prefix freezing_actor_steps n_samples_per_prompt save_value_network actor_lr critic_lr actor_learning_rate
critic_learning_rate lr_warmup_ratio kl_target init_kl_coef kl_estimator adam_betas reward_running_norm
reward_running_norm_minus_mean reward_clip advantages_norm advantage_clip seed zero_stage gradient_checkpointing
gradient_checkpointing_use_reentrant bf16 enable_ema zpg adam_offload flash_attn aux_loss_coef grad_accum_dtype
overlap_comm disable_fast_tokenizer disable_logprobs_flashattn no_shard_vit meta_init initial_model_shard_size
advantage_estimator use_kl_loss load_in_4bit lora_rank lora_alpha target_modules lora_dropout pretrain reward_pretrain
remote_rm_url critic_pretrain value_head_prefix prompt_data prompt_data_probs prompt_split eval_data eval_split
max_eval_samples pretrain_data pretrain_data_probs pretrain_split input_key images_key reference_key label_key
input_template apply_chat_template system_prompt use_wandb wandb_org wandb_group wandb_project wandb_run_name
use_tensorboard use_ms limit_mm_image_per_prompt use_cpg_loss high_entropy_token_ratio local_rank
""".split()

OTHER_VALUES: dict[str, str] = {
    "pretrain": "a/model --prompt_data p.jsonl --reward math",
    "advantage_estimator": "rloo",
    "kl_estimator": "k2",
    "old_logprobs": "sampler",
    "prompt_data_probs": "1.0 --prompt_data tiny",
    "lr_schedule": "constant",
    "max_steps": "3",
    "ranks": "2",
    "kv_cache_bytes": "1000",
    "kl_target": "0.5",
    "eps_clip_high": "0.3",
    "adam_betas": "0.5 0.6",
    "top_p": "0.5",
    "gamma": "0.5",
    "lambd": "0.5",
    "ema_beta": "0.5",
    "high_entropy_token_ratio": "0.5",
    "remote_rm_url": "http://reward.example",
    "critic_pretrain": "a/critic --advantage_estimator gae",
    "use_kl_loss": " --init_kl_coef 0.1",
    "ptx_coef": "0.1 --pretrain_data t.jsonl",
    "n_samples_per_prompt": "5",
    "adam_offload": "",
    "engine_mem_util": "0.7",
    "train_batch_size": "256",
    "seed": "7",
    "eval_steps": "3",
}
REFUSED_WHEN_SET = {name for name, option in OPTIONS.items() if option.by == "nobody yet"} | {
    "fsdp",
    "engine_type",
    "buffer_cpu_offload",
    "local_rank",
}


def run(*line: str, method: str = "grpo") -> RunConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return parse([method, *line])


def words(name: str) -> list[str]:
    """A command line on which the option has another value than its default."""
    held = defaults()[name]
    if name in OTHER_VALUES:
        return f"--{name} {OTHER_VALUES[name]}".split()
    if isinstance(held, bool):
        return [f"--no-{name}" if held else f"--{name}"]
    return [f"--{name}", str(held + 1) if isinstance(held, int | float) else "other"]


def test_every_option_of_the_three_classes_is_in_one_table_and_in_no_other() -> None:
    for kind, table in ((RunOptions, RUN_OPTIONS), (PPOConfig, PPO_OPTIONS), (StrategyConfig, OPTIONS)):
        assert set(table) == {f.name for f in fields(kind)} - {"extra_args"}
    assert len(ALL_OPTIONS) == len(RUN_OPTIONS) + len(PPO_OPTIONS) + len(OPTIONS)


@pytest.mark.parametrize("name", sorted(set(ALL_OPTIONS) - REFUSED_WHEN_SET))
def test_the_command_line_and_a_file_set_every_option_alike(name: str, tmp_path: Path) -> None:
    line = words(name)
    config = run(*line)
    assert name in config.overridden()
    rows = []
    for flag in " ".join(line).split("--")[1:]:
        key, *values = flag.split()
        no = key.startswith("no-")
        value = str(not no).lower() if not values else values[0] if len(values) == 1 else f"[{', '.join(values)}]"
        rows.append(f"{key.removeprefix('no-')}: {value}")
    (tmp_path / "c.yaml").write_text("\n".join(rows))
    same = run(str(tmp_path / "c.yaml"))
    assert {n: same.value(n) for n in ALL_OPTIONS} == {n: config.value(n) for n in ALL_OPTIONS}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--no-fsdp", "DeepSpeed"),
        ("--engine_type sglang", "vllm"),
        ("--no-buffer_cpu_offload", "lies on the host"),
        ("--sp_size 2", "sp_size=2 cannot"),
        ("--zero_stage 2", "zero_stage=2 cannot"),
        ("--zpg 2", "zpg=2 cannot"),
        ("--grad_accum_dtype fp32", "grad_accum_dtype"),
        ("--overlap_comm", "overlap_comm"),
        ("--mixed_mm_data", "mixed_mm_data"),
        ("--rm_use_engine", "rm_use_engine"),
        ("--rm_engine_cudagraph", "rm_engine_cudagraph"),
        ("--local_rank 0", "local_rank=0 cannot"),
    ],
)
def test_options_that_cannot_be_honoured_yet_say_so(line: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        run(*line.split())
    assert line.split()[0].removeprefix("--").removeprefix("no-") in REFUSED_WHEN_SET


def test_each_flag_of_the_reference_is_an_option_another_name_of_one_or_refused_with_a_reason() -> None:
    """Defect absent: flags that are read by nobody."""
    for flag in REFERENCE_FLAGS:
        places = [flag in ALL_OPTIONS, flag in ALIASES, flag in NEGATED, flag in REFUSED]
        assert sum(places) == 1, f"{flag} is in {sum(places)} places"
    assert len(REFERENCE_FLAGS) == len(set(REFERENCE_FLAGS)) > 135


@pytest.mark.parametrize("flag", sorted(REFUSED))
def test_a_refused_flag_raises_with_its_reason_from_a_file_and_a_line(flag: str, tmp_path: Path) -> None:
    value = "elsewhere" if flag in AS_ASKED else "4"
    (tmp_path / "c.yaml").write_text(f"{flag}: {value}\n")
    for line in ([f"--{flag}", value], [str(tmp_path / "c.yaml")]):
        with pytest.raises(OptionError, match=rf"^{flag}=.* cannot be honoured: ") as caught:
            run(*line)
        assert REFUSED[flag] in str(caught.value)
    assert 12 < len(REFUSED[flag]) < 110


@pytest.mark.parametrize("line", ["--lora_rank 0", "--text_only", "--value_head_prefix score", "--meta_init"])
def test_a_refused_flag_may_ask_for_what_happens_anyway(line: str) -> None:
    assert run(*line.split()).given == run().given


@pytest.mark.parametrize("line", ["--use_fire", "--flash_attn", "--lora_rank 8", "--text_only false", "--wandb_org me"])
def test_a_refused_flag_that_asks_for_something_raises(line: str) -> None:
    with pytest.raises(OptionError, match="cannot be honoured"):
        run(*line.split())


def test_the_command_line_counts_over_the_file_that_over_the_method_that_over_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("eps_clip_high: 0.4\nactor_lr: 1e-6\nseed: 3\n")
    assert (run().ppo.eps_clip_high, run(method="dapo").ppo.eps_clip_high) == (None, 0.28)
    from_file = run(str(tmp_path / "c.yaml"), method="dapo")
    assert (from_file.ppo.eps_clip_high, from_file.strategy.actor_learning_rate) == (0.4, 1e-6)
    line = run(str(tmp_path / "c.yaml"), "--eps_clip_high", "0.5", "--actor_learning_rate", "1e-7", method="dapo")
    assert (line.ppo.eps_clip_high, line.strategy.actor_learning_rate, line.strategy.seed) == (0.5, 1e-7, 3)


@pytest.mark.parametrize(("alias", "name"), sorted(ALIASES.items()))
def test_other_names_mean_the_same_and_both_at_once_are_refused(alias: str, name: str) -> None:
    assert run(f"--{alias}", "7").value(name) == run(f"--{name}", "7").value(name) == 7
    with pytest.raises(OptionError, match=f"{name} is given twice"):
        RunConfig.load("grpo", None, {alias: 7, name: 7})


def test_the_engine_sleeps_unless_it_is_disabled(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("disable_engine_sleep: true\n")
    assert run().strategy.enable_engine_sleep and run("--enable_engine_sleep").strategy.enable_engine_sleep
    for line in (["--disable_engine_sleep"], ["--no-enable_engine_sleep"], [str(tmp_path / "c.yaml")]):
        assert not run(*line).strategy.enable_engine_sleep


def test_numbers_that_yaml_1_1_reads_as_text_are_numbers(tmp_path: Path) -> None:
    text = "actor_learning_rate: 1e-5\ninit_kl_coef: 1e-3\nkl_horizon: 1e4\nrollout_batch_size: 64.0\n"
    (tmp_path / "c.yaml").write_text(text)
    config = run(str(tmp_path / "c.yaml"))
    assert config.strategy.actor_learning_rate == 1e-5 and config.ppo.init_kl_coef == 1e-3
    assert config.ppo.kl_horizon == 10000 and type(config.ppo.kl_horizon) is int
    assert config.ppo.rollout_batch_size == 64


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("max_steps", "many", "a whole number"),
        ("max_steps", 1.5, "a whole number"),
        ("temperature", True, "a number"),
        ("use_gspo", "yes", "true or false"),
        ("pretrain", 3, "text"),
        ("reward_pretrain", [1], "text"),
        ("num_episodes", float("inf"), "a whole number"),
        ("seed", None, "a whole number"),
        ("adam_betas", [0.9], "adam_betas"),
        ("num_episodes", 0, "from 1 on"),
        ("replicas", 0, "from 1 on"),
        ("top_p", 1.5, "between 0 and 1"),
        ("prompt_data_probs", "0.5,0.5", "one number above 0 for each"),
        ("disable_engine_sleep", 3, "true or false"),
    ],
)
def test_a_value_of_another_kind_is_refused(name: str, value: Any, said: str) -> None:
    with pytest.raises(OptionError, match=said) as caught:
        RunConfig.load("grpo", None, {name: value})
    assert name in str(caught.value)


def test_shares_belong_to_sources() -> None:
    config = run("--prompt_data", "a.jsonl, b.jsonl", "--prompt_data_probs", "0.7,0.3")
    assert (config.run.sources, config.run.prompt_data_probs) == (["a.jsonl", "b.jsonl"], (0.7, 0.3))
    assert run("--prompt_data", "a,b", "--prompt_data_probs", "0.7", "0.3").run.prompt_data_probs == (0.7, 0.3)
    assert run("--prompt_data", "a.jsonl").run.prompt_data_probs == ()
    for bad in ("0.5", "1,0", "1,inf", "1,x"):
        with pytest.raises(OptionError, match=r"one number above 0 for each of the 2 sources|must be a number"):
            run("--prompt_data", "a,b", "--prompt_data_probs", bad)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sead: 3", "no option 'sead'; nearest: seed"),
        ("- seed", "holds list"),
        ("strategy:\n  seed: 3", "options of its own"),
        ("seed: 3\nseed: 4", "seed stands there twice"),
        ("seed: [", "cannot be read as YAML"),
    ],
)
def test_a_file_that_means_nothing_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(OptionError, match=said):
        run(str(tmp_path / "c.yaml"))


def test_a_missing_file_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        run(str(tmp_path / "none.yaml"))
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert read_yaml(tmp_path / "empty.yaml") == {} and run(str(tmp_path / "empty.yaml")) == run()


def test_a_misspelt_flag_or_method_is_refused_with_the_nearest() -> None:
    with pytest.raises(OptionError, match=r"no option '--max_step'; nearest: max_steps"):
        run("--max_step", "3")
    with pytest.raises(OptionError, match=r"no method 'gropo'; nearest: grpo"):
        run(method="gropo")


def test_a_run_without_gae_has_no_critic_and_one_with_it_has_the_policys() -> None:
    assert run().strategy.critic_pretrain is False
    assert run(method="ppo").strategy.critic_pretrain is True  # of the policy's own checkpoint
    assert run("--critic_pretrain", method="ppo").strategy.critic_pretrain is True
    assert run("--critic_pretrain", "a/critic", method="ppo").strategy.critic_pretrain == "a/critic"
    with pytest.raises(OptionError, match="critic_pretrain='a/critic' has no effect with advantage_est"):
        run("--critic_pretrain", "a/critic")
    with pytest.raises(OptionError, match="needs a critic"):
        RunConfig.load("ppo", None, {"critic_pretrain": False})


@pytest.mark.parametrize("estimator", ["group_norm", "rloo", "reinforce_baseline", "cpgd"])
def test_estimators_that_compare_samples_need_more_than_one(estimator: str) -> None:
    with pytest.raises(OptionError, match="n_samples_per_prompt must be greater than 1, and is 1"):
        run("--advantage_estimator", estimator, "--n_samples_per_prompt", "1")
    assert run("--n_samples_per_prompt", "1", method="ppo").strategy.n_samples_per_prompt == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--init_kl_coef 0.1 --kl_estimator k3", "kl_estimator=k3 in the reward"),
        ("--use_kl_loss --init_kl_coef 0.1 --advantage_estimator gae", "which has the KL in the reward"),
        ("--use_kl_loss --init_kl_coef 0.1 --advantage_estimator cpgd", "which has the KL in the reward"),
        ("--num_trajectories_to_save 3", "no effect without save_trajectories"),
        ("--kl_target 0.1", "kl_target has no effect without init_kl_coef"),
        ("--chunk_size 64", "no effect without fused_linear_logprob"),
    ],
)
def test_options_that_hardly_act_as_they_are_meant_are_warned_of(line: str, said: str) -> None:
    with pytest.warns(UserWarning, match=said):
        parse(["grpo", *line.split()])


@pytest.mark.parametrize("method", sorted(METHODS))
def test_methods_as_they_are_warn_of_nothing_and_set_whether_there_is_a_kl(method: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = parse([method])
    assert "init_kl_coef" in METHODS[method] and config.overridden() != []
    assert set(METHODS[method]) <= set(ALL_OPTIONS)


def test_what_an_option_needs_exists_and_is_off_by_that_value() -> None:
    for name, (other, off) in NEEDS.items():
        assert name in ALL_OPTIONS and other in ALL_OPTIONS
        assert defaults()[other] == off or other == "init_kl_coef"


def test_what_has_no_effect_at_all_is_refused() -> None:
    for line, said in (
        ("--use_kl_loss", "init_kl_coef=0"),
        ("--ptx_coef 0.1", "without pretrain_data"),
        ("--use_kl_loss --init_kl_coef 0.1 --kl_estimator k1", "only add noise"),
    ):
        with pytest.raises(OptionError, match=said):
            run(*line.split())


def test_the_built_in_model_brings_its_task_and_another_model_needs_one() -> None:
    tiny = run("--eval_steps", "5")
    assert (tiny.run.prompt_data, tiny.run.reward, tiny.run.eval_data) == ("tiny", "tiny", "tiny")
    assert run("--remote_rm_url", "http://reward.example").run.reward is None
    given = ["--pretrain", "a/model"]
    for missing, mend in (("prompt_data", "p.jsonl"), ("reward", "math"), ("eval_data", "e.jsonl")):
        with pytest.raises(OptionError, match=f"{missing} is missing"):
            run(*given, "--eval_steps", "5")
        given += [f"--{missing}", mend]
    assert run(*given, "--eval_steps", "5").run.eval_data == "e.jsonl"


def test_several_reward_models_and_services_are_lists_and_one_is_one() -> None:
    config = run("--reward_pretrain", "a", "b", "--remote_rm_url", "http://a.example", "http://b.example")
    assert config.run.reward_pretrain == ("a", "b")
    assert config.strategy.remote_rm_url == ["http://a.example", "http://b.example"]
    assert run("--reward_pretrain", "a").run.reward_pretrain == ("a",)
    assert typed("reward_pretrain", "a") == ("a",) and typed("remote_rm_url", "u") == "u"


def test_batches_that_ranks_cannot_share_are_refused_with_the_numbers() -> None:
    config = run("--train_batch_size", "96", "--micro_train_batch_size", "2", "--rollout_batch_size", "30")
    config.check_batches(3)
    with pytest.raises(OptionError, match=r"96 % \(2 \* 5\) == 0"):
        config.check_batches(5)
    with pytest.raises(OptionError, match=r"rollout_batch_size:  30\n.*world_size:          4\n.*30 % 4 == 0"):
        config.check_batches(4)
    with pytest.raises(OptionError, match=r"30 % 4 == 0"):
        run("--train_batch_size", "96", "--micro_train_batch_size", "2", "--rollout_batch_size", "30", "--ranks", "4")


def test_the_summary_shows_every_option_once_by_section_with_its_mark() -> None:
    config = run("--seed", "3", method="dapo")
    lines = config.summary().splitlines()
    assert "RunConfig: dapo" in lines
    for name in ALL_OPTIONS:
        (shown,) = (line for line in lines if line.startswith(f"  {name}: "))
        changed = config.value(name) != defaults()[name]
        assert shown == f"  {name}: {config.value(name)} ({'Overridden' if changed else 'Default'})"
    assert "  seed: 3 (Overridden)" in lines and "  eps_clip_high: 0.28 (Overridden)" in lines


def test_the_overlong_penalty_of_dapo_fits_the_length_of_a_response() -> None:
    assert run("--generate_max_len", "50", method="dapo").strategy.overlong_buffer_len == 10
    assert run("--overlong_buffer_len", "7", method="dapo").strategy.overlong_buffer_len == 7
    assert "overlong_buffer_len" not in with_method("dapo", {"overlong_buffer": False})


def test_a_sessions_trainer_takes_a_methods_options_under_any_name_and_none_of_a_run() -> None:
    found = method_options("gspo", {"actor_lr": 1e-6, "max_new_tokens": 12, "min_tokens": 1})
    assert found == {**METHODS["gspo"], "actor_learning_rate": 1e-6, "generate_max_len": 12, "min_tokens": 1}
    assert method_options("grpo", {"use_gspo": True})["use_gspo"] is True
    for name, said in (("num_episodes", "of `rlbench train`"), ("lora_rank", "adapter"), ("seeed", "nearest: seed")):
        with pytest.raises(OptionError, match=said):
            method_options("grpo", {name: 3})


def test_what_a_trainer_is_given_is_what_was_set_and_concerns_it() -> None:
    config = run("--seed", "3", "--max_steps", "5", "--loss_agg_mode", "token-mean")
    assert config.trainer_options == {**METHODS["grpo"], "seed": 3, "loss_agg_mode": "token-mean"}


def test_help_names_every_option_and_none_that_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    shown = capsys.readouterr().out
    assert all(f"--{name}" in shown for name in ALL_OPTIONS)
    assert not any(f"--{name} " in shown for name in REFUSED if not any(n.startswith(name) for n in ALL_OPTIONS))


def test_a_run_is_read_without_torch() -> None:
    code = (
        "import sys; from rlbench.trainers.run_config import parse; parse(['grpo', '--seed', '3']).summary(); "
        "assert not {'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

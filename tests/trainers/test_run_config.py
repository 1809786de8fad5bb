"""A run's options: where they come from and which counts, what is refused and why, and the reference's flags, all of
them."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from rlbench.option_names import ALIASES, SWITCHES
from rlbench.options import OptionError, options_in, read_yaml, typed
from rlbench.rl import cpgd, gspo, resolve
from rlbench.strategies.options.config import StrategyConfig
from rlbench.trainers.models.lora import BASES
from rlbench.trainers.options.methods import METHODS, TEXTS, method_options, with_method
from rlbench.trainers.options.ppo_config import PPOConfig
from rlbench.trainers.options.run_config import CLASSES, DEFAULTS, HOMES, RunConfig, parse
from rlbench.trainers.options.run_options import RunOptions
from tests.trainers.command_lines import OF_REWARDS, REFUSED_WHEN_SET, method_of, run, words

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


def test_no_two_classes_have_an_option_of_one_name_and_each_has_its_help() -> None:
    assert len(HOMES) == sum(len(options_in(cls)) for cls in CLASSES)
    assert all(info.help and info.section for info in options_in(*CLASSES).values())


@pytest.mark.parametrize("name", sorted(set(HOMES) - REFUSED_WHEN_SET))
def test_the_command_line_and_a_file_set_every_option_alike(name: str, tmp_path: Path) -> None:
    line = words(name)
    config = run(*line, method=method_of(name))
    assert name in config.overridden()
    rows = []
    for flag in " ".join(line).split("--")[1:]:
        key, *values = flag.split()
        no = key.startswith("no-")
        value = str(not no).lower() if not values else values[0] if len(values) == 1 else f"[{', '.join(values)}]"
        rows.append(f"{key.removeprefix('no-')}: {value}")
    (tmp_path / "c.yaml").write_text("\n".join(rows))
    same = run(str(tmp_path / "c.yaml"), method=method_of(name))
    assert {n: same.value(n) for n in HOMES} == {n: config.value(n) for n in HOMES}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--no-fsdp", "DeepSpeed"),
        ("--engine_type hf", "sglang"),
        ("--zero_stage 2", "zero_stage"),
        ("--local_rank 0", "local_rank=0 cannot"),
    ],
)
def test_options_that_cannot_be_honoured_yet_say_so(line: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        run(*line.split())


def test_each_flag_that_cannot_be_honoured_has_its_reason_and_the_page_has_a_row_of_each() -> None:
    page = (Path(__file__).parents[2] / "docs/reference-trainers.md").read_text(encoding="utf-8")
    for cls in (RunOptions, StrategyConfig, PPOConfig):
        assert set(cls.REASONS) | set(cls.IN_ANY_CASE) >= set(cls.NEUTRAL)
        assert not [name for name in cls.NEUTRAL if f"`{name}`" not in page and f"`--{name}`" not in page]


@pytest.mark.parametrize("flag", ["normalize_advantages", "use_sequence_rewards"])
def test_what_is_always_so_cannot_be_switched_off(flag: str) -> None:
    for given in ({flag: True}, {}):
        RunConfig.load("gspo", None, given)
    with pytest.raises(OptionError, match=f"{flag}=False cannot be honoured: it has no effect in LightRFT"):
        RunConfig.load("gspo", None, {flag: False})


def test_a_quantised_base_needs_adapters_beside_it() -> None:
    assert options_in(RunOptions)["lora_base"].choices == BASES
    assert run("--lora_rank", "4", "--load_in_4bit").run.lora_base == "nf4"
    assert RunConfig.load("grpo", None, {"lora_rank": 4, "load_in_4bit": False}).run.lora_base is None
    for line in (["--load_in_4bit"], ["--lora_base", "int8"]):
        with pytest.raises(OptionError, match=r"\(load_in_4bit\) without lora_rank: quantised weights take no step"):
            run(*line)


def test_the_key_of_a_tracker_is_in_no_summary() -> None:
    config = run("--use_wandb", "s3cret", "--track", "wandb", "tensorboard")
    assert config.run.use_wandb == "s3cret" and config.run.trackers == ["wandb", "tensorboard"]
    assert "s3cret" not in config.summary() + repr(config) and "use_wandb: (not shown) (Overridden)" in config.summary()
    assert run("--use_wandb").run.trackers == ["wandb"] and run().run.trackers == []


def test_shares_of_pretraining_texts_belong_to_their_sources() -> None:
    two = ["--ptx_coef", "0.1", "--pretrain_data", "a.jsonl,b.jsonl"]
    assert run(*two, "--pretrain_data_probs", "0.7,0.3").run.pretrain_data_probs == (0.7, 0.3)
    with pytest.raises(OptionError, match=r"pretrain_data_probs=.*one number above 0 for each of the 2 sources"):
        run(*two, "--pretrain_data_probs", "1.0")
    with pytest.warns(UserWarning, match="pretrain_data_probs has no effect without pretrain_data"):
        RunConfig.load("grpo", None, {"pretrain_data_probs": "1.0"})


def test_each_flag_of_the_reference_is_an_option_another_name_of_one_or_taken_where_it_asks_for_nothing() -> None:
    """Defect absent: flags that are read by nobody."""
    neutral = {**RunOptions.NEUTRAL, **StrategyConfig.NEUTRAL, **PPOConfig.NEUTRAL}
    for flag in REFERENCE_FLAGS:
        assert sum([flag in HOMES, flag in ALIASES, flag in neutral]) == 1, flag
    assert len(REFERENCE_FLAGS) == len(set(REFERENCE_FLAGS)) > 135


@pytest.mark.parametrize("flag", sorted(RunOptions.NEUTRAL))
def test_a_flag_of_the_reference_that_asks_for_what_is_not_here_raises(flag: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"{flag}: 4\n")
    for line in ([f"--{flag}", "4"], [str(tmp_path / "c.yaml")]):
        with pytest.raises(OptionError, match=rf"^{flag}=4 cannot be honoured"):
            run(*line)


@pytest.mark.parametrize("flag", RunOptions.WITHOUT_EFFECT)
def test_a_flag_of_the_reference_that_does_nothing_there_is_taken_and_warned_of(flag: str) -> None:
    with pytest.warns(UserWarning, match=rf"^{flag} has no effect: .*LightRFT|^{flag} has no effect: transformers 5"):
        assert RunConfig.load("grpo", None, {flag: True}).given == RunConfig.load("grpo").given


@pytest.mark.parametrize(
    "line",
    [
        "--no_shard_vit 0",
        "--text_only",
        "--flash_attn",
        "--disable_logprobs_flashattn",
        "--normalize_advantages",
        "--meta_init",
    ],
)
def test_it_may_ask_for_nothing(line: str) -> None:
    assert run(*line.split()).given == run().given


def test_the_command_line_counts_over_the_file_that_over_the_method_that_over_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("eps_clip_high: 0.4\nactor_lr: 1e-6\nseed: 3\n")
    assert (run().ppo.clip_high, run(method="dapo").ppo.clip_high) == (None, 0.28)
    from_file = run(str(tmp_path / "c.yaml"), method="dapo")
    assert (from_file.ppo.clip_high, from_file.strategy.lr) == (0.4, 1e-6)
    line = run(str(tmp_path / "c.yaml"), "--eps_clip_high", "0.5", "--actor_learning_rate", "1e-7", method="dapo")
    assert (line.ppo.clip_high, line.strategy.lr, line.strategy.seed) == (0.5, 1e-7, 3)


@pytest.mark.parametrize(("alias", "name"), sorted(item for item in ALIASES.items() if item[1] in HOMES))
def test_other_names_mean_the_same_and_both_at_once_are_refused(alias: str, name: str) -> None:
    if alias in SWITCHES:
        line, value = [f"--{alias}"], True
    elif name == "template":
        line, value = [f"--{alias}", '{"mood": "!"}'], {"mood": "!"}
    else:
        value = {"shards": 2, "aggregation": "token-mean", "betas": (0.5, 0.5), "packing": True, "lora_targets": ("k",)}
        value |= {"gradient_checkpointing_use_reentrant": True, "heads": ("quality", "style"), "share_prompts": True}
        value = value.get(name, 7)
        line = [f"--{alias}", *(map(str, value) if isinstance(value, tuple) else [] if value is True else [str(value)])]
    if name == "lora_base":
        line += ["--lora_rank", "4"]
    if name == "share_prompts":
        line += ["--packing"]
    method = "reward" if name in OF_REWARDS else "grpo"
    held = run(*line, method=method).value(name)
    assert held == SWITCHES.get(alias, {True: value})[True] != DEFAULTS[name]
    with pytest.raises(OptionError, match=f"{name} is given twice"):
        RunConfig.load(method, None, {alias: value, name: held})


def test_the_engine_sleeps_unless_it_is_disabled(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("disable_engine_sleep: true\n")
    assert run().strategy.enable_engine_sleep and run("--enable_engine_sleep").strategy.enable_engine_sleep
    for line in (["--disable_engine_sleep"], ["--no-enable_engine_sleep"], [str(tmp_path / "c.yaml")]):
        assert not run(*line).strategy.enable_engine_sleep


def test_numbers_that_yaml_1_1_reads_as_text_are_numbers(tmp_path: Path) -> None:
    text = "actor_learning_rate: 1e-5\ninit_kl_coef: 1e-3\nkl_horizon: 1e4\nrollout_batch_size: 64.0\n"
    (tmp_path / "c.yaml").write_text(text)
    config = run(str(tmp_path / "c.yaml"))
    assert config.strategy.lr == 1e-5 and config.ppo.kl_coef == 1e-3
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
        ("betas", [0.9], "betas"),
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
    with pytest.raises(OptionError, match="critic has no effect"):
        run("--critic_pretrain", "a/critic")
    with pytest.raises(OptionError, match="needs a critic"):
        RunConfig.load("ppo", None, {"critic_pretrain": False})


@pytest.mark.parametrize("estimator", ["group_norm", "rloo", "reinforce_baseline", "cpgd"])
def test_estimators_that_compare_samples_need_more_than_one(estimator: str) -> None:
    with pytest.raises(OptionError, match="n is 2 or more"):
        run("--advantage_estimator", estimator, "--n_samples_per_prompt", "1")
    assert run("--n_samples_per_prompt", "1", method="ppo").strategy.n_samples_per_prompt == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--kl_coef 0.1 --kl_estimator k3", "kl_estimator=k3 in the reward"),
        ("--use_kl_loss --kl_coef 0.1 --advantage_estimator gae", "which has the KL in the reward"),
        ("--use_kl_loss --kl_coef 0.1 --advantage_estimator cpgd", "which has the KL in the reward"),
        ("--num_trajectories_to_save 3", "no effect without save_trajectories"),
        ("--kl_target 0.1", "kl_target has no effect without kl_coef"),
        ("--chunk_size 64", "no effect without head"),
    ],
)
def test_options_that_hardly_act_as_they_are_meant_are_warned_of(line: str, said: str) -> None:
    with pytest.warns(UserWarning, match=said):
        parse(["grpo", *line.split()])


@pytest.mark.parametrize("method", sorted(METHODS))
def test_methods_as_they_are_warn_of_nothing_and_set_whether_there_is_a_kl(method: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = parse([method, *(["--teacher", "a/model"] if method == "distill" else [])])
    assert ("kl_coef" in METHODS[method]) == (method not in TEXTS) and config.overridden() != []
    assert set(METHODS[method]) <= set(HOMES)


OWN_LOSS = {"rloo": "ppo", "reinforce++": "ppo", "reinforce_baseline": "ppo", "distill": "ppo"}


@pytest.mark.parametrize("method", sorted(METHODS.keys() - TEXTS))
def test_a_method_aggregates_as_the_loss_is_meant_that_it_trains_with(method: str) -> None:
    """`train_step(loss="ppo")` meant "token-mean", `trainer("ppo")` "seq-mean-token-mean"."""
    assert with_method(method, {})["aggregation"] == resolve(OWN_LOSS.get(method, method)).aggregation
    assert "aggregation" not in with_method(method, {}, own_loss=True)
    assert with_method(method, {"aggregation": "token-sum"}, own_loss=True)["aggregation"] == "token-sum"
    config = parse([method, "--loss", "dr_grpo", *(["--teacher", "a/model"] if method == "distill" else [])])
    assert config.ppo.aggregation is None


def test_an_option_that_chooses_another_loss_chooses_its_aggregation() -> None:
    assert with_method("ppo", {"use_gspo": True})["aggregation"] == gspo().aggregation
    assert with_method("ppo", {"use_cpg_loss": True})["aggregation"] == cpgd().aggregation


def test_a_method_on_texts_takes_what_acts_on_texts_and_no_other_takes_that() -> None:
    found = run(
        "--data", "d.jsonl", "--token_budget", "64", "--num_episodes", "2", "--logging_steps", "5", method="dpo"
    )
    assert found.trainer_options == {**METHODS["dpo"], "token_budget": 64, "logging_steps": 5}
    assert (run(method="sft").run.data, run("--eval_steps", "2", method="kto").run.eval_data) == ("tiny", "tiny")
    assert run("--share_prompts", method="dpo").strategy.share_prompts
    for method, line, said in (
        ("sft", "--n 4", "n has no effect on texts"),
        ("dpo", "--reward math", "reward has no effect on texts"),
        ("sft", "--micro_train_batch_size 2", "by token_budget"),
        ("sft", "--pretrain a/model", "data is missing: which texts"),
        ("grpo", "--token_budget 64", "token_budget has no effect with grpo"),
        ("grpo", "--data d.jsonl", "data has no effect with grpo"),
        ("reward", "--replicas 2", "replicas has no effect with reward"),
        ("sft", "--pooling attention", "pooling has no effect with sft: it is of reward"),
        ("grpo", "--probing_layer 3", "probing_layer has no effect with grpo: it is of reward"),
        ("reward", "--head plain", "no vocabulary"),
        ("reward", "--share_prompts", "share_prompts cannot be honoured with reward"),
        ("sft", "--teacher a/model", "teacher has no effect with sft"),
        ("grpo", "--teacher a/model", "teacher has no effect with grpo"),
        ("distill", "--teacher a/model --kl_coef 0", "leaves nothing of the teacher"),
        ("distill", "--prompt_data p.jsonl", "teacher is missing"),
        ("distill", "--teacher a/model --pretrain a/model", "prompt_data is missing"),
    ):
        with pytest.raises(OptionError, match=said):
            run(*line.split(), method=method)


def test_what_an_option_needs_exists_and_is_off_by_that_value() -> None:
    for info in options_in(*CLASSES).values():
        for other, off in info.needs.items():
            assert DEFAULTS[other] == off or other == "kl_coef"


def test_what_has_no_effect_at_all_is_refused() -> None:
    for line, said in (
        ("--use_kl_loss", "kl_coef=0"),
        ("--ptx_coef 0.1", "without pretrain_data"),
        ("--use_kl_loss --kl_coef 0.1 --kl_estimator k1", "only add noise"),
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
    assert typed(RunOptions, "reward_pretrain", "a") == ("a",) and typed(StrategyConfig, "remote_rm_url", "u") == "u"


def test_batches_that_ranks_cannot_share_are_refused_with_the_numbers() -> None:
    config = run("--train_batch_size", "96", "--micro_train_batch_size", "2", "--rollout_batch_size", "30")
    config.check_batches(3)
    with pytest.raises(OptionError, match=r"96 % \(2 \* 5\) == 0"):
        config.check_batches(5)
    with pytest.raises(OptionError, match=r"rollout_batch_size=30 .* 4 ranks"):
        config.check_batches(4)
    with pytest.raises(OptionError, match="rollout_batch_size=30"):
        run("--train_batch_size", "96", "--micro_train_batch_size", "2", "--rollout_batch_size", "30", "--ranks", "4")


def test_the_summary_shows_every_option_once_by_section_with_its_mark() -> None:
    config = run("--seed", "3", method="dapo")
    lines = config.summary().splitlines()
    assert "RunConfig: dapo" in lines
    for name in HOMES:
        (shown,) = (line for line in lines if line.startswith(f"  {name}: "))
        changed = config.value(name) != DEFAULTS[name]
        assert shown == f"  {name}: {config.value(name)} ({'Overridden' if changed else 'Default'})"
    assert "  seed: 3 (Overridden)" in lines and "  clip_high: 0.28 (Overridden)" in lines


def test_the_overlong_penalty_of_dapo_fits_the_length_of_a_response() -> None:
    assert run("--generate_max_len", "50", method="dapo").strategy.overlong_buffer_len == 10
    assert run("--overlong_buffer_len", "7", method="dapo").strategy.overlong_buffer_len == 7
    assert "overlong_buffer_len" not in with_method("dapo", {"overlong_buffer": False})


def test_a_sessions_trainer_takes_a_methods_options_under_any_name_and_none_of_a_run() -> None:
    found = method_options("gspo", {"actor_lr": 1e-6, "max_new_tokens": 12, "min_tokens": 1})
    assert found == {**with_method("gspo", {}), "lr": 1e-6, "max_tokens": 12, "min_tokens": 1}
    assert method_options("grpo", {"use_gspo": True})["use_gspo"] is True
    for name, said in (
        ("num_episodes", "of `rlbench train`"),
        ("load_in_4bit", "load_in_4bit"),
        ("seeed", "nearest: seed"),
    ):
        with pytest.raises(OptionError, match=said):
            method_options("grpo", {name: 3})


def test_what_a_trainer_is_given_is_what_was_set_and_concerns_it() -> None:
    config = run("--seed", "3", "--max_steps", "5", "--loss_agg_mode", "token-mean")
    assert config.trainer_options == {**METHODS["grpo"], "seed": 3, "aggregation": "token-mean"}


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    shown = capsys.readouterr().out
    assert all(f"--{name}" in shown for name in HOMES) and "--no_shard_vit" not in shown


def test_a_run_is_read_without_torch() -> None:
    code = (
        "import sys; from rlbench.trainers.options.run_config import parse; parse(['grpo', '--seed', '3']).summary(); "
        "assert not {'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

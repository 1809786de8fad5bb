"""Methods of a run by name: each a set of options, over which those that are given count."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from rlbench.data.prompts.chat import CHAT_OPTIONS
from rlbench.errors import nearest
from rlbench.options import OptionError, canonical, defaults, options_in
from rlbench.strategies.options.config import OF_DEEPSPEED, StrategyConfig, need_no_deepspeed
from rlbench.trainers.options.ppo_config import PPOConfig
from rlbench.trainers.options.run_options import RunOptions
from rlbench.trainers.options.text_config import TextConfig, check_of_texts
from rlbench.trainers.options.trainer_options import NOT_OF_TRAINERS, doubts

TOKENS, SEQUENCES = {"aggregation": "token-mean"}, {"aggregation": "seq-mean-token-mean"}
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage_estimator": "group_norm", "kl_coef": 0.0} | SEQUENCES,
    "ppo": {"advantage_estimator": "gae", "kl_coef": 0.001, "kl_estimator": "k1", "advantages_norm": True} | TOKENS,
    "dapo": {
        "advantage_estimator": "group_norm",
        "kl_coef": 0.0,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dynamic_sampling": True,
        "overlong_buffer": True,  # from a fifth of max_tokens before the limit on, unless overlong_buffer_len is given
    }
    | TOKENS,
    "gspo": {"advantage_estimator": "group_norm", "kl_coef": 0.0, "use_gspo": True},
    "rloo": {"advantage_estimator": "rloo", "kl_coef": 0.0} | TOKENS,
    "reinforce++": {"advantage_estimator": "reinforce++", "kl_coef": 0.0} | TOKENS,
    "reinforce_baseline": {"advantage_estimator": "reinforce_baseline", "kl_coef": 0.0} | TOKENS,
    "cpgd": {"advantage_estimator": "cpgd", "kl_coef": 0.0, "use_cpg_loss": True},
    # each token's advantage is log q - log p, of the teacher in the reference's place: rb.rl.on_policy_distillation
    "distill": {"advantage_estimator": "reinforce", "kl_coef": 1.0, "kl_estimator": "k1", "gamma": 0.0} | TOKENS,
}
"""Losses of tokens become one as the loss of `rb.rl` is meant that the method trains with."""
DISTILL, REWARD = "distill", "reward"
TEXTS = {
    "sft": "demonstrations",
    "dpo": "pairs",
    "ipo": "pairs",
    "simpo": "pairs",
    "orpo": "pairs",
    "kto": "labelled",
    REWARD: "pairs",
}
"""Methods that train on texts, each with the loss of its name, and what makes a batch of their rows: `rb.data.…`."""
LOSSES = {REWARD: "bradley_terry"}
"""The loss of those that have another."""
METHODS |= {name: {"packing": True, "head": "auto"} for name in TEXTS}  # as `session.train_step`
METHODS[REWARD] = {"packing": True}  # there is no vocabulary
OVERLONG_SHARE = 5
OF_TEXT_RUNS = ("data", "max_length")
"""Options of `rlbench train` that have an effect with methods on texts alone."""
OF_REWARD_RUNS = ("pooling", "probing_layer", "heads")
"""And of a reward model's head, or heads."""
OF_ALL_RUNS = (
    *("pretrain", "lora_rank", "lora_alpha", "lora_targets", "lora_dropout", "shards", "replicas", "kv_cache_bytes"),
    *("eval_data", "eval_split", "max_eval_samples", "prompt_split", "max_samples", "apply_chat_template"),
    *("template", "tools", "system_prompt", "num_episodes", "max_steps", "lr_schedule", "loss", "metrics_file"),
    *("logging_steps", "betas", "weight_decay", "gpu_memory_utilization", "engine_tp_size", "lora_base", "track"),
    *("use_wandb", "wandb_project", "wandb_org", "wandb_group", "wandb_run_name"),
)
"""And those that have one with every method."""
OF_REPLICAS = ("head", "replicas", "kv_cache_bytes", "gpu_memory_utilization", "engine_tp_size")
"""Options of a vocabulary and of replicas, of which a reward model has none."""
OF_OTHER_RANKS = ("zero_stage", "local_rank")
"""Options that ranks of a session refuse whatever their value is: zero_stage=2, the default, asks for DeepSpeed."""


def of_writing(options: dict[str, Any]) -> dict[str, Any]:
    """Take the options that say how texts are written as chats out of those of a trainer on texts."""
    return {name: options.pop(name) for name in CHAT_OPTIONS if name in options}


def with_method(method: str, given: Mapping[str, Any], own_loss: bool = False) -> dict[str, Any]:
    """Return the options of a method, then those given by our names, which count.

    `own_loss`: another loss than the method's is trained with, and says itself how it is aggregated.
    """
    if method not in METHODS:
        raise OptionError(f"there is no method {method!r}{nearest(method, METHODS)}. Methods: {', '.join(METHODS)}.")
    chosen = METHODS[method] | dict(given)
    if own_loss and "aggregation" not in given:
        chosen.pop("aggregation", None)
    elif (chosen.get("use_gspo") or chosen.get("use_cpg_loss")) and "aggregation" not in given:
        chosen |= SEQUENCES
    if method == "dapo" and chosen["overlong_buffer"] and "overlong_buffer_len" not in given:
        longest = chosen.get("max_tokens", defaults(PPOConfig)["max_tokens"])
        chosen["overlong_buffer_len"] = max(1, int(longest) // OVERLONG_SHARE)
    return chosen


def method_options(method: str, given: Mapping[str, Any], own_loss: bool = False) -> dict[str, Any]:
    """Return what a trainer of a session is made with: the method's options, then those given by name or alias."""
    ours = our_names(given, also=NOT_OF_TRAINERS)
    for name in ours:
        if name in options_in(RunOptions):
            raise OptionError(f"{name} is an option of `rlbench train`, not of a trainer. Leave it out.")
    chosen = with_method(method, ours, own_loss)
    check_of_method(method, ours)
    return chosen


def check_of_method(method: str, given: Mapping[str, Any], run: bool = False) -> None:
    """Refuse options, by our names, that have no effect with a method; of a `run` those of `rlbench train` have one."""
    if "teacher" in given and method != DISTILL:
        raise OptionError(f"teacher has no effect with {method}: it is of {DISTILL}.")
    if method == DISTILL and not given.get("kl_coef", 1.0):
        raise OptionError("kl_coef=0 leaves nothing of the teacher: it weighs what the policy learns from it.")
    if method == REWARD and (idle := [name for name in given if name in OF_REPLICAS]):
        raise OptionError(f"{idle[0]} has no effect with {REWARD}: a reward model has no vocabulary and no replicas.")
    if method == REWARD and given.get("share_prompts"):
        raise OptionError(f"share_prompts cannot be honoured with {REWARD}: it reads each sequence as a whole.")
    if method != REWARD and (idle := [name for name in given if name in OF_REWARD_RUNS]):
        raise OptionError(f"{idle[0]} has no effect with {method}: it is of {REWARD}.")
    if method in TEXTS:
        check_of_texts(given, also=(*OF_ALL_RUNS, *OF_TEXT_RUNS, *OF_REWARD_RUNS) if run else ())
    elif idle := [name for name in given if name in {*options_in(TextConfig), *OF_TEXT_RUNS}]:
        raise OptionError(f"{idle[0]} has no effect with {method}: it is of methods on texts ({', '.join(TEXTS)}).")


def our_names(given: Mapping[str, Any], also: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return options of a run by our names; refuse those that act on ranks that are not a session's, and leave out
    DeepSpeed's where they ask for nothing."""
    for name in OF_OTHER_RANKS:
        if given.get(name) is not None:
            raise OptionError(f"{name}={given[name]} cannot be honoured by a session's ranks. Leave it out.")
    named = canonical(given, RunOptions, TextConfig, PPOConfig, StrategyConfig, also=also)
    of_deepspeed = {name: value for name in OF_DEEPSPEED if (value := named.pop(name, None)) is not None}
    need_no_deepspeed(StrategyConfig(**of_deepspeed))
    return named


def warn_of(chosen: Mapping[str, Any], critic: bool, ema: bool) -> None:
    """Warn in the kernel of a trainer's options that have no effect; the ranks' own warnings are in their logs."""
    ppo = PPOConfig(**{name: value for name, value in chosen.items() if name in options_in(PPOConfig)})
    own = {name: value for name, value in chosen.items() if name in options_in(StrategyConfig)}
    for text in doubts(StrategyConfig(**own), ppo, chosen, critic, ema):
        warnings.warn(text, stacklevel=4)

"""Options of a whole run beside those of strategy and trainer, and what each option of the trainer does, for readers.

`rlbench train` reads a run from the defaults, the method, a YAML file and the command line (`run_config.py`).
Importable without torch.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from rlbench.strategies.config import OPTIONS, Option, OptionError, StrategyConfig, options_of
from rlbench.trainers.ppo_config import PPOConfig

RUN, TRAINER = "run", "trainer"


@dataclass(frozen=True)
class RunOptions:
    """What a run needs to know that neither strategy nor trainer does; `RUN_OPTIONS` says what each does."""

    pretrain: str = "tiny"
    reward_pretrain: tuple[str, ...] = ()
    reward: str | None = None
    reward_fn: str | None = None
    enable_ema: bool = False
    loss_agg_mode: str = "seq-mean-token-mean"
    use_gspo: bool = False
    prompt_data: str | None = None
    prompt_data_probs: tuple[float, ...] = ()
    prompt_split: str = "train"
    eval_data: str | None = None
    eval_split: str = "test"
    max_eval_samples: int = 500
    input_key: str = "input"
    label_key: str = "label"
    reference_key: str = "reference"
    input_template: str | None = None
    apply_chat_template: bool = False
    system_prompt: str | None = None
    max_samples: int = 1_000_000
    num_episodes: int = 1
    max_steps: int | None = None
    lr_schedule: str = "cosine"
    ranks: int = 0
    replicas: int = 1
    kv_cache_bytes: int | None = None
    metrics_file: str | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("max_eval_samples", 1),
            ("max_samples", 1),
            ("num_episodes", 1),
            ("max_steps", 1),
            ("ranks", 0),
            ("replicas", 1),
            ("kv_cache_bytes", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise OptionError(f"{name}={value!r}: it is a number from {least} on.")
        if self.lr_schedule not in ("cosine", "constant"):
            raise OptionError(f"lr_schedule={self.lr_schedule!r}: it is 'cosine' or 'constant'.")
        shares = self.prompt_data_probs
        if shares and (len(shares) != len(self.sources) or not all(0 < share < math.inf for share in shares)):
            raise OptionError(
                f"prompt_data_probs={shares!r}: it is one number above 0 for each of the {len(self.sources)} sources "
                "of prompt_data."
            )

    @property
    def sources(self) -> list[str]:
        """The sources of `prompt_data`, in their order."""
        return [] if self.prompt_data is None else [part.strip() for part in self.prompt_data.split(",")]

    @property
    def shares(self) -> list[float] | None:
        """The share of each source; None: in proportion to their sizes."""
        return list(self.prompt_data_probs) or None


RUN_OPTIONS: dict[str, Option] = {
    **options_of(
        "Models",
        RUN,
        pretrain="the policy: a folder, a hub id, or tiny",
        reward_pretrain="folders of reward models with a scalar head",
        reward="what scores a response: module:function, file.py:function, math, or tiny for the built-in task",
        reward_fn="module:function that makes one reward of several models'",
        enable_ema="keep a moving average of the policy",
    ),
    **options_of(
        "Data",
        RUN,
        prompt_data="sources of prompts, with commas between: files, folders, hub ids, or tiny",
        prompt_data_probs="share of each source; without it in proportion to their sizes",
        prompt_split="which split of them; a file is one",
        eval_data="source of the prompts of an evaluation",
        eval_split="which split of it",
        max_eval_samples="its prompts at most",
        input_key="column of the prompt, and of a text of pretrain_data",
        label_key="column of the label, where the data has one",
        reference_key="column of the reference answer where the label says what kind of task it is",
        input_template='makes the prompt from a row\'s columns: "{question}\\nAnswer:"',
        apply_chat_template="texts become a user message, put through the model's chat template",
        system_prompt="a system message before each prompt",
        max_samples="prompts read at most",
    ),
    **options_of(
        "Run",
        RUN,
        num_episodes="passes over the prompts",
        lr_schedule="cosine: the rates warm up and fall to a tenth over the run; constant: they stay",
        max_steps="iterations; without it as many as the episodes have, with num_episodes the fewer of both",
        ranks="training ranks; 0: one per GPU, without a GPU one",
        replicas="inference engines",
        kv_cache_bytes="memory of an engine's KV cache",
        metrics_file="file that gets all metrics of each iteration, a line of JSON each",
    ),
    **options_of(
        "Policy loss",
        RUN,
        loss_agg_mode="how the losses of tokens become one",
        use_gspo="ratios of whole responses (GSPO) instead of tokens",
    ),
}

PPO_OPTIONS: dict[str, Option] = {
    **options_of(
        "Rollout",
        TRAINER,
        rollout_batch_size="prompts of one iteration, over all ranks",
        prompt_max_len="tokens of a prompt at most; longer ones are refused",
        generate_max_len="tokens of a response at most",
        temperature="of sampling",
        top_p="sample from the likeliest tokens that make up this share",
        top_k="sample from so many likeliest tokens; -1: all",
        buffer_limit="newest sequences the replay buffer keeps; 0: all",
        buffer_cpu_offload="experience lies on the host",
    ),
    **options_of(
        "Policy loss",
        TRAINER,
        max_epochs="passes over the experience of an iteration",
        eps_clip="lower clip of the ratio, and upper unless eps_clip_high says otherwise",
        eps_clip_high="upper clip of the ratio",
        entropy_coef="weight of an entropy bonus",
        high_entropy_token_ratio="share of tokens, those of the highest entropy, that keep their loss; 0: all",
        use_cpg_loss="CPGD's loss in the place of PPO's",
        old_logprobs="recompute: by the actor before the first update; sampler: the engine's",
        mismatch="correction for the sampler: token_tis, sequence_tis or icepop",
        ptx_coef="weight of a language loss on pretrain_data; 0: none",
        gradient_checkpointing="recompute activations in the backward",
    ),
    **options_of(
        "KL to the reference",
        TRAINER,
        init_kl_coef="weight, in the reward or with use_kl_loss in the loss; 0: no reference model",
        kl_target="the weight adapts to this KL",
        kl_horizon="over so many sequences",
    ),
    **options_of(
        "Critic and returns",
        TRAINER,
        value_clip="bound on the change of a value; 0: none",
        gamma="discount",
        lambd="lambda of GAE",
        freezing_actor_steps="first iterations in which the critic alone trains; -1: none",
        ema_beta="share of the old average in each update of the moving average",
    ),
    **options_of(
        "Files",
        TRAINER,
        save_path="folder of the saved model and of trajectories",
        save_steps="iterations between checkpoints; -1: at the end alone, 0: none",
        ckpt_path="folder of checkpoints",
        max_ckpt_num="checkpoints kept",
        max_ckpt_mem="gigabytes of checkpoints kept",
        load_checkpoint="go on from the newest checkpoint",
        save_hf_ckpt="save the model for transformers beside each checkpoint",
        eval_steps="iterations between evaluations; -1: none",
        logging_steps="iterations between printed lines",
        save_trajectories="write the most telling samples of each iteration as JSON",
        num_trajectories_to_save="how many",
        mark_high_entropy_tokens="mark their tokens of high entropy",
    ),
}

ALL_OPTIONS: Mapping[str, Option] = {**RUN_OPTIONS, **PPO_OPTIONS, **OPTIONS}
"""Every option of a run, by name."""

NEEDS: Mapping[str, tuple[str, Any]] = {
    "num_trajectories_to_save": ("save_trajectories", False),
    "mark_high_entropy_tokens": ("save_trajectories", False),
    "kl_horizon": ("kl_target", None),
    "chunk_size": ("fused_linear_logprob", False),
    "overlong_buffer_len": ("overlong_buffer", False),
    "overlong_buffer_penalty_factor": ("overlong_buffer", False),
    "dynamic_sampling_metric": ("dynamic_sampling", False),
    "max_num_gen_batches": ("dynamic_sampling", False),
    "ema_beta": ("enable_ema", False),
    "kl_target": ("init_kl_coef", 0.0),
    "eval_split": ("eval_data", None),
    "max_eval_samples": ("eval_data", None),
    "critic_learning_rate": ("critic_pretrain", False),
    "value_clip": ("critic_pretrain", False),
    "lambd": ("critic_pretrain", False),
}
"""Options that act with another one alone: option -> the other, and its value without which this one has no effect."""

RUN_DEFAULTS = {"fsdp": True}
"""Where a run has another default than the class: its ranks are a session's, which FSDP2 shards."""


@cache
def defaults() -> Mapping[str, Any]:
    """The default of every option of a run."""
    found = {f.name: f.default for kind in (RunOptions, PPOConfig, StrategyConfig) for f in fields(kind)}
    return {name: RUN_DEFAULTS.get(name, found[name]) for name in ALL_OPTIONS}


@cache
def kinds() -> Mapping[str, Any]:
    """The declared type of every option of a run."""
    found: dict[str, Any] = {}
    for kind in (RunOptions, PPOConfig, StrategyConfig):
        found |= typing.get_type_hints(kind)
    return {name: found[name] for name in ALL_OPTIONS}


def plain_kind(name: str) -> type:
    """What one value of an option is read as: bool, int, float or str; of a tuple what it holds."""
    alternatives = _alternatives(kinds()[name])
    for kind in (bool, int, float):
        if kind in alternatives and not (kind is bool and str in alternatives):
            return kind
    if any(typing.get_args(kind)[:1] == (float,) for kind in alternatives):
        return float
    return str


def typed(name: str, value: Any) -> Any:
    """A value of the command line or of YAML as its option's type: text that is a number as a number (YAML 1.1 reads
    1e-5 as text), a text with commas as a list.

    Raises:
        OptionError: it is of another kind.
    """
    alternatives = _alternatives(kinds()[name])
    kind = plain_kind(name)
    if value is None and type(None) in alternatives:
        return None
    if any(typing.get_origin(one) is tuple for one in alternatives):
        return tuple(_one(name, part, kind) for part in _parts(value))
    if isinstance(value, list | tuple) and list[str] in alternatives:
        return [_one(name, part, str) for part in value]
    if isinstance(value, bool) and bool in alternatives:
        return value
    return _one(name, value, kind)


def _parts(value: Any) -> list[Any]:
    """What a list holds, or a text with commas, or a list of such."""
    if isinstance(value, list | tuple):
        return [part for held in value for part in _parts(held)]
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else [value]


def _one(name: str, value: Any, kind: type) -> Any:
    try:
        if kind is bool:
            if isinstance(value, bool):
                return value
        elif kind is str:
            if isinstance(value, str):
                return value
        elif not isinstance(value, bool) and kind(float(value)) == float(value):
            return kind(float(value))
    except (TypeError, ValueError, OverflowError):
        pass
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]
    raise OptionError(f"{name}={value!r}: it must be {wanted}.")


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)

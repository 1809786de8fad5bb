"""Options of a strategy and of what is built on it: one dataclass, from a namespace, YAML or the command line.

Names and defaults are the reference system's; where its documents and its code disagree the documents count
(`enable_engine_sleep` is on, `plot_every` is 10). Its class says advantage_estimator "group_norm", with which a critic
has no effect, and its command line "gae": None, the default here, follows from whether there is a critic. `OPTIONS`
says of each who honours it. What nobody honours yet raises when it is set, so that no option is without effect.
Importable without torch.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rlbench.errors import BuildError, nearest

STRATEGY, TRAINER, NOBODY = "strategy", "trainer", "nobody yet"
TYPO = 0.9  # so alike are a misspelt name and the one that was meant; a script's own options are less


class OptionError(BuildError, ValueError):
    """An option that does not exist, has no such value, cannot be honoured yet, or contradicts another one."""


@dataclass(frozen=True)
class Option:
    """Where an option stands in the summary, who honours it, and what it does (or why it raises)."""

    section: str
    by: str
    does: str


def options_of(section: str, by: str, **does: str) -> dict[str, Option]:
    """Options of one section, honoured by the same."""
    return {name: Option(section, by, text) for name, text in does.items()}


OPTIONS: dict[str, Option] = {
    **options_of(
        "Training",
        STRATEGY,
        seed="of set_seed and of initialisers",
        max_norm="global gradient norm to clip to; 0: no clipping",
        micro_train_batch_size="sequences one rank takes through one backward",
        train_batch_size="sequences of one optimizer step over all ranks",
        bf16="compute in bfloat16; weights and optimizer stay float32 unless use_mp_opt",
        adam_betas="of prepare_models_and_optimizers",
        l2="weight decay of prepare_models_and_optimizers",
        actor_learning_rate="peak rate of the actor in prepare_models_and_optimizers",
        critic_learning_rate="peak rate of the critic in prepare_models_and_optimizers",
        lr_warmup_ratio="share of the steps over which the rate rises",
        critic_pretrain="a critic is trained; the path it came from, or true",
    ),
    **options_of(
        "Sharding",
        STRATEGY,
        fsdp="train with FSDP2; without it the reference takes DeepSpeed, which is not here yet",
        fsdp_cpu_offload="trained weights, gradients and optimizer live in host memory; overrides adam_offload",
        adam_offload="maybe_offload_optimizer moves optimizer state to the host",
        use_mp_opt="half-precision weights with float32 copies in the optimizer (FSDPadaptOptimizer)",
        local_rank="which GPU of its node a rank takes; -1: LOCAL_RANK, else the rank",
    ),
    **options_of(
        "Sharding",
        NOBODY,
        zero_stage="stages are DeepSpeed's, which is not here yet; fsdp=True shards as stage 3 does",
        zpg="hierarchical partitioning is DeepSpeed's; prepare_model(shard_size=n) shards within n ranks",
        grad_accum_dtype="gradients accumulate in the dtype of the weights: float32, or half precision with use_mp_opt",
        overlap_comm="DeepSpeed's; FSDP2 always overlaps gathering with computation",
        sp_size="attention over split sequences is not here yet; shorten sequences or lower micro_train_batch_size",
        mixed_mm_data="vision-language models are not here yet",
    ),
    **options_of(
        "Inference engine",
        STRATEGY,
        engine_type="the engine that generates: vllm",
        engine_tp_size="ranks that share one engine",
        engine_mem_util="share of the GPU's memory the engine may take; on a host without one, of the free memory for "
        "its KV cache, which has 1 GiB there where this is not set",
        enable_engine_sleep="the engine gives its memory back while ranks train",
    ),
    **options_of(
        "Inference engine",
        TRAINER,
        log_dir="folder of length plots and logs",
        plot_every="steps between two plots of generated lengths",
    ),
    **options_of(
        "Inference engine",
        NOBODY,
        rm_use_engine="reward models run on the ranks",
        rm_engine_cudagraph="reward models run on the ranks",
    ),
    **options_of(
        "Rewards and advantages",
        TRAINER,
        remote_rm_url="a reward service instead of reward models; prepare_models_and_optimizers then shards none",
        reward_running_norm="divide rewards by their running deviation",
        reward_running_norm_minus_mean="subtract their running mean too",
        reward_clip="clamp rewards to this magnitude; 0: not",
        advantages_norm="whiten advantages",
        advantage_clip="clamp advantages to this magnitude; 0: not",
        advantage_estimator="how advantages come from rewards; unless it is said gae with a critic, else group_norm",
        use_kl_loss="KL to the reference as a loss, not in the reward",
        kl_estimator="k1, k2 or k3",
        pretrain_data="text for a language loss beside the policy's",
    ),
    **options_of(
        "Experience",
        TRAINER,
        micro_rollout_batch_size="prompts of one forward while experience is made",
        n_samples_per_prompt="completions of one prompt",
        overlong_buffer="penalise completions that near the limit",
        overlong_buffer_len="tokens before the limit where that begins",
        overlong_buffer_penalty_factor="penalty at the limit",
        dynamic_sampling="replace groups whose rewards are all equal",
        dynamic_sampling_metric="what is compared in a group: reward or acc",
        max_num_gen_batches="generations after which dynamic sampling gives up; 0: never",
        packing_samples="pack sequences without padding",
        fused_linear_logprob="log-probs straight from the output layer, without logits",
        chunk_size="rows the fused log-prob computes at once",
        use_tensorboard="folder of a TensorBoard log",
    ),
}


@dataclass
class StrategyConfig:
    """Every option by name; `OPTIONS` says what each does and who honours it.

    `extra_args`: what a script's namespace holds beside them, kept for the script.
    """

    seed: int = 42
    max_norm: float = 1.0
    micro_train_batch_size: int = 1
    train_batch_size: int = 128
    bf16: bool = True
    zero_stage: int = 2
    fsdp: bool = False
    fsdp_cpu_offload: bool = False
    adam_offload: bool = False
    zpg: int = 1
    grad_accum_dtype: str | None = None
    overlap_comm: bool = False
    use_mp_opt: bool = False
    mixed_mm_data: bool = False
    local_rank: int = -1
    sp_size: int = 1
    engine_type: str = "vllm"
    engine_tp_size: int = 1
    engine_mem_util: float = 0.5
    enable_engine_sleep: bool = True
    rm_use_engine: bool = False
    rm_engine_cudagraph: bool = False
    actor_learning_rate: float = 1e-5
    critic_learning_rate: float = 1e-5
    adam_betas: tuple[float, float] = (0.9, 0.95)
    l2: float = 0.0
    lr_warmup_ratio: float = 0.03
    critic_pretrain: str | bool = False
    remote_rm_url: str | list[str] | None = None
    pretrain_data: str | None = None
    packing_samples: bool = False
    fused_linear_logprob: bool = False
    chunk_size: int = 4096
    reward_running_norm: bool = False
    reward_running_norm_minus_mean: bool = False
    advantages_norm: bool = False
    advantage_clip: float = 0.0
    reward_clip: float = 0.0
    micro_rollout_batch_size: int = 2
    n_samples_per_prompt: int = 8
    overlong_buffer: bool = False
    overlong_buffer_len: int = 1024
    overlong_buffer_penalty_factor: float = 1.0
    dynamic_sampling: bool = False
    dynamic_sampling_metric: str = "reward"
    max_num_gen_batches: int = 10
    advantage_estimator: str | None = None
    use_kl_loss: bool = False
    kl_estimator: str = "k3"
    plot_every: int = 10
    log_dir: str | None = None
    use_tensorboard: str | None = None
    extra_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in names():
            setattr(self, name, _typed(name, getattr(self, name)))
        for name in self.overridden():
            option = OPTIONS[name]
            if option.by == NOBODY and not (name == "zero_stage" and not self.fsdp):
                raise OptionError(f"{name}={getattr(self, name)!r} cannot be honoured: {option.does}. Leave it out.")
        if self.engine_type != "vllm":
            raise OptionError(
                f"engine_type={self.engine_type!r} cannot be honoured: the engine on the ranks is 'vllm'."
            )
        for name in ("micro_train_batch_size", "train_batch_size", "engine_tp_size"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)}: it is a number from 1 on.")
        if self.fsdp_cpu_offload:  # the optimizer lives beside the weights then; there is nothing to move
            self.adam_offload = False

    @classmethod
    def of(cls, args: Any) -> StrategyConfig:
        """From None, a config, a mapping, the path of a YAML file, or a namespace.

        Raises:
            OptionError: an unknown name in a mapping or a file. A namespace may hold options of its script (they
                become `extra_args`), but none that looks like a misspelt one of ours.
        """
        if args is None:
            return cls()
        if isinstance(args, cls):
            return args
        if isinstance(args, str | Path):
            return cls.from_yaml(args)
        if isinstance(args, Mapping):
            for name in args:
                if name not in names():
                    raise OptionError(f"there is no option {name!r}{nearest(str(name), names())}.")
            return cls(**args)
        return cls._from_namespace(vars(args))

    @classmethod
    def from_args(cls, args: Any) -> StrategyConfig:
        """The reference's name of `of`."""
        return cls.of(args)

    @classmethod
    def from_yaml(cls, path: str | Path) -> StrategyConfig:
        """From a YAML file with one option a line.

        Raises:
            OptionError: no such file, not a mapping, an unknown name or a value of another type.
        """
        import yaml  # type: ignore[import-untyped]

        try:
            found = yaml.safe_load(Path(path).read_text())
        except (OSError, yaml.YAMLError) as error:
            raise OptionError(f"{path} cannot be read as YAML ({error}).") from error
        if not isinstance(found, dict | None):
            raise OptionError(f"{path} holds {type(found).__name__}; it must be `option: value`, one a line.")
        return cls.of(found or {})

    @classmethod
    def _from_namespace(cls, given: Mapping[str, Any]) -> StrategyConfig:
        own = {name: value for name, value in given.items() if name in names()}
        extra = {name: value for name, value in given.items() if name not in own}
        for name in extra:
            if meant := difflib.get_close_matches(name, names(), n=1, cutoff=TYPO):
                raise OptionError(f"there is no option {name!r}; nearest: {meant[0]}.")
        return cls(**own, extra_args=extra)

    def overridden(self) -> list[str]:
        """The options that do not have their default, in the order of the fields."""
        return [f.name for f in fields(self) if f.name in OPTIONS and getattr(self, f.name) != default(f.name)]

    def summary(self) -> str:
        """All options by section, each marked "(Overridden)" or "(Default)"."""
        changed = set(self.overridden())
        lines = ["=" * 60, "StrategyConfig"]
        for section in dict.fromkeys(option.section for option in OPTIONS.values()):
            lines += ["-" * 60, f"{section}:"]
            for name in (n for n in OPTIONS if OPTIONS[n].section == section):
                mark = "Overridden" if name in changed else "Default"
                lines.append(f"  {name}: {getattr(self, name)} ({mark})")
        if self.extra_args:
            lines += ["-" * 60, "Extra (not the strategy's):"]
            lines += [f"  {name}: {value}" for name, value in self.extra_args.items()]
        return "\n".join([*lines, "=" * 60])


def names() -> list[str]:
    """The names of all options."""
    return list(OPTIONS)


def default(name: str) -> Any:
    """The default of an option."""
    return next(f.default for f in fields(StrategyConfig) if f.name == name)


def need_fsdp(config: StrategyConfig) -> None:
    """Refuse what the reference system trains with DeepSpeed.

    Raises:
        OptionError: `fsdp` is not set.
    """
    if not config.fsdp:
        raise OptionError(
            f"fsdp=False cannot be honoured: the strategy would be DeepSpeed's (zero_stage={config.zero_stage}), which "
            "is not here yet; set --fsdp (fsdp=True) for FSDP2."
        )


def accumulation_steps(train_batch_size: int, micro_train_batch_size: int, world_size: int) -> int:
    """Backward calls per optimizer step and rank.

    Raises:
        OptionError: the sequences of a step cannot be shared out evenly.
    """
    if train_batch_size % (micro_train_batch_size * world_size):
        raise OptionError(
            "train_batch_size must be divisible by (micro_train_batch_size * world_size), and is not a multiple:\n"
            f"  train_batch_size:        {train_batch_size}\n"
            f"  micro_train_batch_size:  {micro_train_batch_size}\n"
            f"  world_size:              {world_size}\n"
            f"  Required: {train_batch_size} % ({micro_train_batch_size} * {world_size}) == 0; change one of them."
        )
    return train_batch_size // (micro_train_batch_size * world_size)


def flag_type(name: str) -> type:
    """What one value of an option is read as on the command line."""
    held = default(name)
    return float if isinstance(held, tuple) else str if held is None else type(held)


def _typed(name: str, value: Any) -> Any:
    """The value as the option's type; a whole number passes as a float, a text that is a number as a number.

    YAML 1.1 reads 1e-5 as text, which is why.
    """
    held = default(name)
    if name == "critic_pretrain":
        return bool(value) if value is None or isinstance(value, bool) else str(value)
    try:
        if isinstance(held, bool):
            if isinstance(value, bool):
                return value
        elif isinstance(held, tuple):
            pair = tuple(float(part) for part in value)
            if len(pair) == len(held):
                return pair
        elif held is None or isinstance(held, str):
            if isinstance(value, str) or (value is None and held is None):
                return value
            if name == "remote_rm_url" and isinstance(value, list | tuple):
                return [str(part) for part in value]
        elif not isinstance(value, bool) and float(value) == type(held)(float(value)):
            return type(held)(float(value))
    except (TypeError, ValueError, OverflowError):
        pass
    wanted = "text" if held is None or isinstance(held, str) else f"like its default {held!r}"
    raise OptionError(f"{name}={value!r}: it must be {wanted}.")


def namespace_of(config: StrategyConfig) -> argparse.Namespace:
    """The options and what came beside them as attributes, as a script of the reference system reads them."""
    return argparse.Namespace(**{name: getattr(config, name) for name in names()}, **config.extra_args)

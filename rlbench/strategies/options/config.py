"""Options of a strategy and of what is built on it: one class, from keywords, a mapping, YAML, a namespace or flags.

Defaults are the reference system's; where its documents and its code disagree the documents count
(`enable_engine_sleep` is on, `plot_every` is 10). Its class says advantage_estimator "group_norm", with which a critic
has no effect, and its command line "gae": None, the default here, follows from whether there is a critic.
Importable without torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar, Self

from rlbench import options
from rlbench.options import ALIASES, LIGHTRFT, Options, defaults, options_in, section
from rlbench.options import OptionError as OptionError

TYPO = 0.9  # so alike are a misspelt name and the one that was meant; a script's own options are less

steps, training, sharding, engine = map(section, ("Steps", "Training", "Sharding", "Inference engine"))
rewards, experience, lengths = map(section, ("Rewards and advantages", "Experience", "Lengths"))
PER_TRAINER = ("Steps", "Rewards and advantages", "Experience", "Lengths")
"""Sections whose options a trainer may have otherwise than its strategy; all others acted when that was made."""


class HeldOptions(Options):
    """How ranks hold a module that trains."""

    use_mp_opt: bool = sharding(False, "half-precision weights with float32 copies in the optimizer")
    fsdp_cpu_offload: bool = sharding(
        False,
        "trained weights, gradients and optimizer live in host memory, a layer's weights come to the device when "
        "it computes; overrides adam_offload",
    )


class StrategyConfig(HeldOptions):
    """The options of a strategy and of what its trainers share.

    `extra_args`: what a script's namespace holds beside them, kept for the script.
    """

    NEUTRAL: ClassVar[Mapping[str, Any]] = {
        "zero_stage": 2,
        "zpg": 1,
        "grad_accum_dtype": None,
        "overlap_comm": False,
        "sp_size": 1,
        "mixed_mm_data": False,
        "rm_use_engine": False,
        "rm_engine_cudagraph": False,
    }

    max_norm: float = steps(1.0, "global gradient norm to clip to; 0: no clipping")
    micro_train_batch_size: int = steps(1, "sequences one rank takes through one backward", least=1)
    train_batch_size: int = steps(128, "sequences of one optimizer step over all ranks", least=1)
    seed: int = training(42, "of random states and initialisers")
    bf16: bool = training(True, "compute in bfloat16; weights and optimizer stay float32 unless use_mp_opt")
    lr: float = training(1e-5, "peak learning rate of the policy")
    critic_lr: float = training(1e-5, "peak learning rate of the critic", needs={"critic_pretrain": False})
    betas: tuple[float, float] = training((0.9, 0.95), "of AdamW")
    weight_decay: float = training(0.0, "of AdamW")
    lr_warmup_ratio: float = training(0.03, "share of the steps over which the rates rise")
    critic_pretrain: str | bool = training(False, "a critic is trained; the path it came from, or true")
    fsdp: bool = sharding(False, "train with FSDP2; the reference's other choice, DeepSpeed, is not here")
    adam_offload: bool = sharding(False, "maybe_offload_optimizer moves optimizer state to the host")
    local_rank: int = sharding(-1, "which GPU of its node a rank takes; -1: LOCAL_RANK, else the rank")
    engine_type: str = engine("vllm", "the engine that generates")
    engine_tp_size: int = engine(1, "ranks that share one engine", least=1)
    gpu_memory_utilization: float = engine(
        0.5,
        "share of the GPU's memory the engine may take; on a host without one, of the free memory for its KV "
        "cache, which has 1 GiB there where this is not set",
    )
    enable_engine_sleep: bool = engine(True, "the engine gives its memory back while ranks train")
    remote_rm_url: str | list[str] | None = rewards(None, "reward services instead of reward models")
    reward_running_norm: bool = rewards(False, "divide rewards by their running deviation")
    reward_running_norm_minus_mean: bool = rewards(False, "subtract their running mean too")
    reward_clip: float = rewards(0.0, "clamp rewards to this magnitude; 0: not")
    advantages_norm: bool = rewards(False, "whiten advantages")
    advantage_clip: float = rewards(0.0, "clamp advantages to this magnitude; 0: not")
    advantage_estimator: str | None = rewards(
        None, "how advantages come from rewards; None: gae with a critic, else group_norm"
    )
    use_kl_loss: bool = rewards(False, "KL to the reference as a loss, not in the reward")
    kl_estimator: str = rewards("k3", "k1, k2 or k3")
    pretrain_data: str | None = rewards(None, "text for a language loss beside the policy's")
    micro_rollout_batch_size: int = experience(2, "prompts of one forward while experience is made")
    n: int = experience(8, "completions of one prompt")
    overlong_buffer: bool = experience(False, "penalise completions that near the limit")
    overlong_buffer_len: int = experience(
        1024, "tokens before the limit where that begins", needs={"overlong_buffer": False}
    )
    overlong_buffer_penalty_factor: float = experience(1.0, "penalty at the limit", needs={"overlong_buffer": False})
    dynamic_sampling: bool = experience(False, "replace groups whose rewards are all equal")
    dynamic_sampling_metric: str = experience(
        "reward", "what is compared in a group: reward or acc", needs={"dynamic_sampling": False}
    )
    max_num_gen_batches: int = experience(
        10, "generations after which dynamic sampling gives up; 0: never", needs={"dynamic_sampling": False}
    )
    packing: bool = experience(False, "pack sequences without padding")
    head: str = experience(
        "plain", "log-probs from the logits, or straight from the output layer", choices=("plain", "chunked")
    )
    chunk_size: int = experience(4096, "rows that head='chunked' computes at once", needs={"head": "plain"})
    log_dir: str | None = lengths(None, "folder of length plots and logs")
    plot_every: int = lengths(
        10, "steps between two plots of generated lengths", needs={"log_dir": None, "use_tensorboard": None}
    )
    use_tensorboard: str | None = lengths(None, "folder of a TensorBoard log")
    extra_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engine_type != "vllm":
            raise OptionError(
                f"engine_type={self.engine_type!r} cannot be honoured: the engine on the ranks is 'vllm'."
            )
        if self.fsdp_cpu_offload:  # the optimizer lives beside the weights then; there is nothing to move
            object.__setattr__(self, "adam_offload", False)

    @classmethod
    def of(cls, given: Any) -> Self:
        """Read None, a config, a mapping, the path of a YAML file, or a namespace.

        Raises:
            OptionError: an unknown name. A namespace may hold options of its script (they become `extra_args`), but
                none that looks like a misspelt one of ours; where it has the reference's name of an option and ours,
                ours is the script's.
        """
        if given is None or isinstance(given, Options | Mapping | str) or not hasattr(given, "__dict__"):
            return super().of(given)
        held = vars(given)
        known = {
            *options_in(cls),
            *cls.NEUTRAL,
            *(name for name, meant in LIGHTRFT.items() if meant in options_in(cls)),
        }
        elsewhere = {ALIASES[name] for name in held if name in LIGHTRFT and name in known}
        own = {name: value for name, value in held.items() if name in known and name not in elsewhere}
        extra = {name: value for name, value in held.items() if name not in own}
        for name in extra:
            if name not in known and (meant := difflib.get_close_matches(name, known, n=1, cutoff=TYPO)):
                raise OptionError(f"there is no option {name!r}; nearest: {meant[0]}.")
        return cls(**own, extra_args=extra)

    from_args = from_yaml = of  # the reference's names

    def summary(self) -> str:
        """Write all options by section, each marked "(Overridden)" or "(Default)"."""
        text = options.summary("StrategyConfig", lambda name: getattr(self, name), type(self))
        return "\n".join([text, *(f"  {name}: {value} (the script's)" for name, value in self.extra_args.items())])


def default(name: str) -> Any:
    """Return the default of an option."""
    return defaults(StrategyConfig)[name]


def need_fsdp(config: StrategyConfig) -> None:
    """Refuse what the reference system trains with DeepSpeed.

    Raises:
        OptionError: `fsdp` is not set.
    """
    if not config.fsdp:
        raise OptionError(
            "fsdp=False cannot be honoured: it asks for DeepSpeed, which is not here; set --fsdp (fsdp=True)."
        )


def accumulation_steps(train_batch_size: int, micro_train_batch_size: int, world_size: int) -> int:
    """Return backward calls per optimizer step and rank.

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

"""Options of a strategy and of what is built on it: one class, from keywords, a mapping, YAML, a namespace or flags.

Defaults are the reference system's; where its documents and its code disagree the documents count. Importable without
torch.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar, Self

from rlbench import options
from rlbench.flags import add_flags
from rlbench.option_names import ALIASES, LIGHTRFT
from rlbench.options import OptionError as OptionError
from rlbench.options import Options, defaults, options_in, refuse, section

TYPO = 0.9  # so alike are a misspelt name and the one that was meant; a script's own options are less

steps, training, sharding, engine = map(section, ("Steps", "Training", "Sharding", "Inference engine"))
rewards, experience, lengths = map(section, ("Rewards and advantages", "Experience", "Lengths"))
OVERLONG, DYNAMIC = {"overlong_buffer": False}, {"dynamic_sampling": False}
LOGS = {"log_dir": None, "use_tensorboard": None}
ESTIMATORS = ("gae", "reinforce", "rloo", "reinforce_baseline", "reinforce++", "group_norm", "grpo", "cpgd")
ROW_SHARING = ("tensor_parallel", "sequence_parallel")
"""Options by which neighbouring ranks see the same rows."""
OF_DEEPSPEED: Mapping[str, str] = {
    "zero_stage": "it is DeepSpeed's, FSDP2 splits all as its stage 3 does",
    "zpg": "it is ZeRO++'s second copy of the weights on each node; FSDP2 shards within a node and replicates over "
    "nodes by prepare_model(shard_size=…), in a session by rb.Train(shards=…, data_parallel_size=…)",
    "grad_accum_dtype": "it is DeepSpeed's, FSDP2 adds gradients up in what it holds the parameters in",
    "overlap_comm": "it is DeepSpeed's, FSDP2 overlaps its collectives with what is computed in any case",
}
"""Options that act with DeepSpeed alone, and why FSDP2 has none such."""
KEEPS_GATHERED = (
    "reshard_after_forward=False cannot be honoured with FSDP1: after an optimizer step it would compute with what it "
    "gathered before. Leave it out, or inherit from FSDP2's bases"
)
PER_TRAINER = ("Steps", "Rewards and advantages", "Experience", "Lengths")
"""Sections whose options a trainer may have otherwise than its strategy; all others acted when that was made."""


class HeldOptions(Options):
    """How ranks hold a module that trains."""

    use_mp_opt: bool = sharding(False, "half-precision weights with float32 copies in the optimizer")
    fsdp_cpu_offload: bool = sharding(
        False, "weights, gradients and optimizer live in host memory while they train; overrides adam_offload"
    )
    tensor_parallel: int = sharding(
        1,
        "ranks that compute each layer together, on the same rows: its heads and inner width are split over them, as "
        "the model's tp_plan says; beside the sharding",
        least=1,
    )
    sequence_parallel: int = sharding(
        1, "ranks that split the tokens of each sequence between them; a divisor of the ranks", least=1
    )
    fp16: bool = training(
        False,
        "compute in float16 over float32 weights, the loss scaled; in the place of bf16. A session on a GPU without "
        "bfloat16 (compute capability below 8.0) does so by itself",
    )

    @classmethod
    def check_given(cls, given: Mapping[str, Any]) -> None:
        """Refuse another half precision beside float16, and two ways to share rows."""
        refuse(
            (
                all(isinstance(size := given.get(name), int) and size > 1 for name in ROW_SHARING),
                "tensor_parallel and sequence_parallel cannot be honoured together: a rank's slice of the tokens would "
                "be attended with the heads of other ranks; leave one of them out",
            ),
        )
        if given.get("fp16") is True:
            refuse(
                (
                    given.get("bf16") is True,
                    "bf16=True and fp16=True cannot be honoured together: a model computes in one; leave the other out",
                ),
                (
                    given.get("use_mp_opt") is True,
                    "use_mp_opt=True holds the weights in bfloat16, which fp16=True would not compute in (and a "
                    "float16 checkpoint's scale their loss themselves): leave one of them out",
                ),
            )


class StrategyConfig(HeldOptions):
    """The options of a strategy and of what its trainers share.

    `extra_args`: what a script's namespace holds beside them, kept for the script.
    """

    NEUTRAL: ClassVar[Mapping[str, Any]] = {
        "mixed_mm_data": False,
        "rm_use_engine": False,
        "rm_engine_cudagraph": False,
    }
    REASONS: ClassVar[Mapping[str, str]] = {
        "rm_use_engine": "LightRFT's own code does nothing with it; scalar reward models run on the ranks, packed. An "
        "engine of your own scores behind remote_rm_url, and one that writes its judgement as a function of the sample",
        "rm_engine_cudagraph": "LightRFT's own code does nothing with it, and reward models run in no engine here",
    }
    WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = ("rm_use_engine", "rm_engine_cudagraph")
    IN_ANY_CASE: ClassVar[tuple[str, ...]] = ("mixed_mm_data",)  # batches with images and without mix

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
    fsdp: bool = sharding(False, "train with FSDP2; without it with DeepSpeed, as the reference; a session: FSDP2")
    zero_stage: int = sharding(
        2,
        "of DeepSpeed: the ranks split the optimizer (1), gradients too (2), parameters too (3)",
        least=1,
        most=3,
        needs={"fsdp": True},
    )
    zpg: int = sharding(
        1,
        "of DeepSpeed, zero_stage 3: neighbouring ranks, those of a node, that keep a second copy of the weights "
        "between them, from which a backward gathers (ZeRO++'s hpZ); a divisor of the ranks, 1: none",
        least=1,
    )
    grad_accum_dtype: str | None = sharding(
        None,
        "of DeepSpeed: in what the gradients of a step's backward calls are added up; None: in what the model computes "
        "in, with bf16 and many calls a coarse sum",
        choices=("fp32", "bf16", "fp16"),
    )
    overlap_comm: bool = sharding(
        False,
        "of DeepSpeed, zero_stage 2 and 3: gradients are reduced on a stream of their own while the backward goes on; "
        "on a host without a GPU there is none, and a warning says so",
    )
    adam_offload: bool = sharding(False, "maybe_offload_optimizer moves optimizer state to the host")
    local_rank: int = sharding(-1, "which GPU of its node a rank takes; -1: LOCAL_RANK, else the rank")
    engine_type: str = engine("vllm", "what generates; sglang where installed", choices=("vllm", "sglang"))
    engine_tp_size: int = engine(1, "ranks that share one engine", least=1)
    gpu_memory_utilization: float = engine(
        0.5, "share of the GPU's memory for the engine; without one, of free memory for its KV cache (default: 1 GiB)"
    )
    enable_engine_sleep: bool = engine(True, "the engine gives its memory back while ranks train")
    limit_mm_image_per_prompt: int = engine(
        -1, "pictures of a prompt at most, for which the engine keeps room; -1: as many as it takes by itself", least=-1
    )
    remote_rm_url: str | list[str] | None = rewards(None, "reward services instead of reward models")
    reward_running_norm: bool = rewards(False, "divide rewards by their running deviation")
    reward_running_norm_minus_mean: bool = rewards(False, "subtract their running mean too")
    reward_clip: float = rewards(0.0, "clamp rewards to this magnitude; 0: not", least=0)
    advantages_norm: bool = rewards(False, "whiten advantages")
    advantage_clip: float = rewards(0.0, "clamp advantages to this magnitude; 0: not", least=0)
    advantage_estimator: str | None = rewards(
        None, "of advantages; None: gae with a critic, else group_norm", choices=ESTIMATORS
    )
    use_kl_loss: bool = rewards(False, "KL to the reference as a loss, not in the reward")
    kl_estimator: str = rewards("k3", "of the KL to the reference", choices=("k1", "k2", "k3"))
    pretrain_data: str | None = rewards(None, "text for a language loss beside the policy's")
    micro_rollout_batch_size: int = experience(2, "prompts of one forward while experience is made", least=1)
    n: int = experience(8, "completions of one prompt", least=1)
    overlong_buffer: bool = experience(False, "penalise completions that near the limit")
    overlong_buffer_len: int = experience(1024, "tokens before the limit where it begins", needs=OVERLONG)
    overlong_buffer_penalty_factor: float = experience(1.0, "penalty at the limit", least=0, needs=OVERLONG)
    dynamic_sampling: bool = experience(False, "replace groups whose rewards are all equal")
    dynamic_sampling_metric: str = experience("reward", "what is compared in a group: reward or acc", needs=DYNAMIC)
    max_num_gen_batches: int = experience(
        10, "generations until dynamic sampling gives up; 0: never", least=0, needs=DYNAMIC
    )
    packing: bool = experience(False, "pack sequences without padding")
    share_prompts: bool = experience(
        False,
        "compute a prompt once for its samples that packing puts into one micro-batch; numbers are equal to rounding",
    )
    head: str = experience(
        "plain",
        "log-probs from the logits, straight from the output layer, or auto: from that where the model allows it",
        choices=("plain", "chunked", "auto"),
    )
    chunk_size: int = experience(4096, "rows that head='chunked' computes at once", least=1, needs={"head": "plain"})
    log_dir: str | None = lengths(None, "folder of length plots and logs")
    plot_every: int = lengths(10, "steps between two plots of generated lengths", needs=LOGS)
    use_tensorboard: str | None = lengths(None, "folder of a TensorBoard log")
    extra_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fsdp:
            need_no_deepspeed(self)
        refuse(
            (
                self.limit_mm_image_per_prompt >= 0 and self.engine_type != "vllm",
                f"limit_mm_image_per_prompt cannot be honoured with engine_type={self.engine_type!r}: it is vLLM's",
            ),
            (
                self.share_prompts and not self.packing,
                "share_prompts=True has no effect without packing=True: a padded row has a prompt of its own",
            ),
            (
                self.share_prompts and self.sequence_parallel > 1,
                f"share_prompts=True and sequence_parallel={self.sequence_parallel} cannot be honoured together: a "
                "rank has a slice of each sequence. Leave one of them out",
            ),
        )
        if self.fp16:
            object.__setattr__(self, "bf16", False)
        if self.fsdp_cpu_offload:  # the optimizer lives beside the weights then; there is nothing to move
            object.__setattr__(self, "adam_offload", False)

    @classmethod
    def of(cls, given: Any) -> Self:
        """Read None, a config, a mapping, the path of a YAML file, or a namespace: that may hold options of its script
        (they become `extra_args`), but none that looks like a misspelt one of ours; where it has the reference's name
        of an option and ours, ours is the script's."""
        if given is None or isinstance(given, Options | Mapping | str) or not hasattr(given, "__dict__"):
            return super().of(given)
        values, options = vars(given), options_in(cls)
        known = {*options, *cls.NEUTRAL, *(name for name, meant in LIGHTRFT.items() if meant in options)}
        elsewhere = {ALIASES[name] for name in values if name in LIGHTRFT and name in known}
        own = {name: value for name, value in values.items() if name in known and name not in elsewhere}
        if own.get("fp16") is True:  # a namespace has defaults too, so nobody need have asked for the other one
            own.pop("bf16", None)
        extra = {name: value for name, value in values.items() if name not in own}
        for name in extra:
            if name not in known and (meant := difflib.get_close_matches(name, known, n=1, cutoff=TYPO)):
                raise OptionError(f"there is no option {name!r}; nearest: {meant[0]}.")
        return cls(**own, extra_args=extra)

    @property
    def engine_kwargs(self) -> dict[str, Any]:
        """Further arguments of the engine that an option asks for."""
        most = self.limit_mm_image_per_prompt
        return {"limit_mm_per_prompt": {"image": most}} if most >= 0 else {}

    from_args = from_yaml = of  # the reference's names

    def summary(self) -> str:
        """Write all options by section, each marked "(Overridden)" or "(Default)"."""
        text = options.summary("StrategyConfig", lambda name: getattr(self, name), type(self))
        return "\n".join([text, *(f"  {name}: {value} (the script's)" for name, value in self.extra_args.items())])


def default(name: str) -> Any:
    """Return the default of an option."""
    return defaults(StrategyConfig)[name]


def need_fsdp(config: StrategyConfig) -> None:
    """Refuse DeepSpeed for the ranks of a session, whose engine is FSDP2's."""
    if not config.fsdp:
        raise OptionError(
            "fsdp=False cannot be honoured: a session's ranks train with FSDP2. DeepSpeed trains where a script makes "
            "its strategy itself (get_strategy); leave it out, or set fsdp=True."
        )


def need_no_deepspeed(config: StrategyConfig) -> None:
    """Refuse options of DeepSpeed that ask for something, for ranks that FSDP2 shards."""
    for name, why in OF_DEEPSPEED.items():
        asked = f"{name}={getattr(config, name)!r} cannot be honoured with FSDP2 (fsdp=True): {why}. Leave it out"
        refuse((getattr(config, name) != default(name), asked))


def need_what_fsdp1_has(given: Mapping[str, Any]) -> None:
    """Refuse options that FSDP1 does not honour."""
    refuse(
        *(
            (
                (value := given.get(name, default(name))) != default(name),
                f"{name}={value!r} cannot be honoured with FSDP1: it is FSDP2's. Leave it out, or inherit from "
                "Fsdp2TrainModule, or HuggingFaceFsdp2TrainModule",
            )
            for name in ("use_mp_opt", "fsdp_cpu_offload", "fp16", *ROW_SHARING)
        ),
        (given.get("reshard_after_forward") is False, KEEPS_GATHERED),
    )


def need_groups(options: HeldOptions, ranks: int) -> None:
    """Refuse ranks that cannot be grouped by as many as are to see the same rows."""
    for name in ROW_SHARING:
        if ranks % (size := getattr(options, name)):
            raise OptionError(
                f"{name}={size} does not divide {ranks} ranks, and so many are to see the same rows. Build more ranks "
                "(rb.Train(shards=…)), or choose a divisor."
            )


def accumulation_steps(train_batch_size: int, micro_train_batch_size: int, world_size: int) -> int:
    """Return backward calls per optimizer step and rank; refuse sequences that cannot be shared out evenly."""
    if train_batch_size % (micro_train_batch_size * world_size):
        raise OptionError(
            "train_batch_size must be divisible by (micro_train_batch_size * world_size). Required: "
            f"{train_batch_size} % ({micro_train_batch_size} * {world_size}) == 0; change one of them."
        )
    return train_batch_size // (micro_train_batch_size * world_size)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every option of `StrategyConfig`, by LightRFT's names and ours, with its default; a script may
    define some of them itself, before or after: its definition counts."""
    add_flags(parser, StrategyConfig, reference=True)
    for container in (parser, parser._optionals):
        container.conflict_handler = "resolve"  # a flag that the script defines later replaces ours

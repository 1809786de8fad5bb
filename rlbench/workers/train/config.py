"""Options of a training rank; a plain value, importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlbench.options import refuse, section
from rlbench.strategies.options.config import ROW_SHARING, HeldOptions, need_what_fsdp1_has

ranks = section("Ranks")
EXECUTORS = ("fsdp2", "fsdp1")
OPTIMIZER, SCHEDULE, FROZEN = "optimizer", "schedule", "frozen"  # the parts of a setup, see `TrainingSetup`
ID_LENGTH = 8  # of a snapshot: hexadecimal digits at the end of its folder's name


class RankOptions(HeldOptions):
    """How a rank holds and computes a module, whoever made it; what `rb.Train` takes as well."""

    device: str = ranks("auto", "auto (a GPU where there is one), cpu or cuda")
    bf16: bool | None = ranks(
        None,
        "compute in bfloat16, reduce gradients in float32; None: on a GPU that has it, and without one for a module in "
        "bfloat16; False: as the weights are held",
    )
    masters: bool | None = ranks(None, "hold half-precision parameters in float32; None: where the module trains")
    reshard_after_forward: bool = ranks(True, "free gathered layers after their forward; False trades memory for time")
    local_ranks: int | None = ranks(None, "ranks that share this host's cores; None: all")
    threads: int | None = ranks(None, "compute threads of a rank; None: cores / local_ranks")
    router_replay: bool = ranks(
        False,
        "the routers of a mixture of experts take the experts that the sampler's chose, as rollouts bring them (R3, "
        "docs/models.md); a reference keeps its own",
    )
    host: str = ranks(
        "127.0.0.1", "address rank 0 listens on for its peers; loopback gives way to rb.init(network_interface=…)"
    )
    timeout_s: float = ranks(1800.0, "seconds after which a collective that waits for a peer fails")

    @classmethod
    def check_given(cls, given: Mapping[str, Any]) -> None:
        """Refuse float16 over weights that are not float32, too, and to replay what is split."""
        super().check_given(given)
        split = [name for name in ROW_SHARING if isinstance(size := given.get(name), int) and size > 1]
        refuse(
            (
                given.get("router_replay") is True and split,
                f"router_replay=True and {', '.join(split)} cannot be honoured together: experts are given to tokens "
                "and layers that are whole on a rank; leave one of them out",
            ),
            (
                given.get("fp16") is True and given.get("masters") is False,
                "fp16=True and masters=False cannot be honoured together: small gradients would vanish in weights "
                "of half precision; leave masters out",
            ),
        )


class TrainConfig(RankOptions):
    """How one engine's ranks are built; equal on all of them."""

    executor: str = ranks("fsdp2", "what holds the module; TrainEngine asks its base", choices=EXECUTORS)
    shard_size: int = ranks(-1, "ranks the parameters are sharded over (a divisor of the ranks); -1: all")
    seed: int = ranks(42, "of the ranks' random state and of initialisers")
    max_norm: float = ranks(0.0, "global gradient norm to clip to; 0: no clipping")
    micro_train_batch_size: int = ranks(1, "sequences of one backward, for `strategy.optimizer_step`")
    train_batch_size: int = ranks(1, "sequences of one step over all ranks")
    adam_offload: bool = ranks(False, "`strategy.maybe_offload_optimizer` moves optimizer state to the host")

    @classmethod
    def check_given(cls, given: Mapping[str, Any]) -> None:
        """Refuse what FSDP1 does not honour, too."""
        super().check_given(given)
        if given.get("executor") == "fsdp1":
            need_what_fsdp1_has(given)


@dataclass(frozen=True)
class AroundStep:
    """The folders of the snapshots `before` and `after` an optimizer step, of the one `earlier` to share with, and of
    those that no record names any more, whose memory is `spare`."""

    before: str
    after: str
    earlier: str | None
    spare: list[str]

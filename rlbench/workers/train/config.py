"""Options of a training rank; a plain value, importable without torch."""

from __future__ import annotations

from rlbench.options import section
from rlbench.strategies.options.config import HeldOptions

ranks = section("Ranks")


class RankOptions(HeldOptions):
    """How a rank holds and computes a module, whoever made it; what `rb.Train` takes as well."""

    device: str = ranks("auto", "auto (a GPU where there is one), cpu or cuda")
    bf16: bool | None = ranks(
        None, "compute in bfloat16, reduce gradients in float32; None: on a GPU, and for a module in bfloat16"
    )
    masters: bool | None = ranks(
        None, "hold half-precision parameters in float32; None: where the module trains (`on_weights_materialized`)"
    )
    reshard_after_forward: bool = ranks(True, "free gathered layers after their forward; False trades memory for time")
    local_ranks: int | None = ranks(None, "ranks that share this host's cores; None: all")
    threads: int | None = ranks(None, "compute threads of a rank; None: cores / local_ranks")
    host: str = ranks(
        "127.0.0.1", "address rank 0 listens on for its peers; loopback gives way to rb.init(network_interface=…)"
    )
    timeout_s: float = ranks(1800.0, "seconds after which a collective that waits for a peer fails")


class TrainConfig(RankOptions):
    """How one engine's ranks are built; equal on all of them."""

    shard_size: int = ranks(-1, "ranks the parameters are sharded over (a divisor of the ranks); -1: all")
    seed: int = ranks(42, "of the ranks' random state and of initialisers")
    max_norm: float = ranks(0.0, "global gradient norm to clip to; 0: no clipping")
    micro_train_batch_size: int = ranks(1, "sequences of one backward, for `strategy.optimizer_step`")
    train_batch_size: int = ranks(1, "sequences of one step over all ranks")
    adam_offload: bool = ranks(False, "`strategy.maybe_offload_optimizer` moves optimizer state to the host")

"""Options of a training rank; a plain value, importable without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainConfig:
    """How one engine's ranks are built; equal on all of them.

    Attributes:
        shard_size: ranks the parameters are sharded over (a divisor of the ranks); -1: all.
        device: "auto" (a GPU where there is one), "cpu" or "cuda".
        seed: of the ranks' random state and of initialisers.
        max_norm: global gradient norm to clip to; 0: no clipping.
        bf16: compute in bfloat16, reduce gradients in float32; None: on a GPU, and for a module in bfloat16.
        masters: hold half-precision parameters in float32; None: if the module defines
            `on_weights_materialized`, that is, if it trains.
        reshard_after_forward: free gathered layers after their forward; False trades memory for time.
        micro_train_batch_size, train_batch_size: their quotient per rank is the accumulation of
            `strategy.optimizer_step`.
        adam_offload: `strategy.maybe_offload_optimizer` moves optimizer state to the host.
        use_mp_opt: a module that trains is held in half precision (bfloat16, unless it is float16 already), with
            float32 copies in the optimizer that `strategy.create_optimizer` makes.
        fsdp_cpu_offload: the weights, gradients and optimizer of a module that trains live in host memory; each layer's
            weights come to the device when it computes.
        local_ranks: ranks that share this host's cores; None: all.
        threads: compute threads of a rank; None: cores / local_ranks.
        host: address rank 0 listens on for its peers; loopback gives way to `rb.init(network_interface=…)`.
        timeout_s: after this long a collective that waits for a peer fails.
    """

    shard_size: int = -1
    device: str = "auto"
    seed: int = 42
    max_norm: float = 0.0
    bf16: bool | None = None
    masters: bool | None = None
    reshard_after_forward: bool = True
    micro_train_batch_size: int = 1
    train_batch_size: int = 1
    adam_offload: bool = False
    use_mp_opt: bool = False
    fsdp_cpu_offload: bool = False
    local_ranks: int | None = None
    threads: int | None = None
    host: str = "127.0.0.1"
    timeout_s: float = 1800.0

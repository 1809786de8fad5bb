"""DeepSpeed's configuration from our options, and which of these it cannot honour."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from rlbench.options import refuse
from rlbench.strategies.options.config import StrategyConfig


def settings(config: StrategyConfig, half: torch.dtype | None, offload: str, pin: bool) -> dict[str, Any]:
    """Return DeepSpeed's configuration.

    Args:
        half: what models compute in; None: float32.
        offload: what lives in host memory: "", "optimizer" or "parameters".
        pin: hold it in page-locked memory.
    """
    zero: dict[str, Any] = {"stage": config.zero_stage, "overlap_comm": config.overlap_comm}
    if config.zpg > 1:
        zero["zero_hpz_partition_size"] = config.zpg
    host = {"device": "cpu", "pin_memory": pin}
    if offload:
        zero["offload_optimizer"] = host
    if offload == "parameters":
        zero["offload_param"] = host
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # it counts by it, and nothing else
        "managed_gradient_accumulation": False,  # whoever steps says where a step ends
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW, which needs no compiler, also on the host
        "zero_allow_untested_optimizer": True,
        "communication_data_type": "fp32",
    }
    if half == torch.bfloat16:
        made["bf16"] = {"enabled": True}
    if half == torch.float16:
        made["fp16"] = {"enabled": True, "loss_scale": 1.0}  # its own would not be halved at once: `Zero.backward`
    if config.grad_accum_dtype is not None:
        made["data_types"] = {"grad_accum_dtype": config.grad_accum_dtype}
    return made


def check(config: StrategyConfig) -> None:
    """Refuse options that DeepSpeed has no counterpart of here."""
    refuse(
        (
            config.tensor_parallel > 1,
            f"tensor_parallel={config.tensor_parallel} cannot be honoured with DeepSpeed: train with FSDP2 (--fsdp)",
        ),
        (
            config.use_mp_opt and not config.bf16,
            "use_mp_opt=True cannot be honoured with DeepSpeed and bf16=False: half-precision weights with float32 "
            "copies in the optimizer are what bf16=True is there; take that, or leave use_mp_opt out",
        ),
        (
            config.fsdp_cpu_offload and config.zero_stage < 3,
            f"fsdp_cpu_offload=True cannot be honoured with zero_stage={config.zero_stage}, where each rank computes "
            "with whole parameters: take zero_stage=3, or adam_offload=True for the optimizer alone",
        ),
        (
            config.zpg > 1 and config.zero_stage < 3,
            f"zpg={config.zpg} cannot be honoured with zero_stage={config.zero_stage}, where each rank holds all "
            "weights and gathers none: take zero_stage=3",
        ),
        (
            config.overlap_comm and config.zero_stage < 2,
            "overlap_comm=True cannot be honoured with zero_stage=1, which reduces gradients once, before the step, "
            "with no backward beside it: take zero_stage=2 or 3",
        ),
    )
    _check_sums(config)


def check_copies(config: StrategyConfig, ranks: int) -> None:
    """Refuse ranks that cannot be grouped by as many as are to keep a copy of the weights between them."""
    refuse(
        (
            ranks % config.zpg,
            f"zpg={config.zpg} does not divide {ranks} ranks, and so many are to keep a copy of the weights between "
            "them: choose a divisor, the ranks of one node",
        )
    )


def warn_of_hosts(config: StrategyConfig) -> None:
    """Say which options have no effect on ranks without a GPU."""
    if config.overlap_comm:
        warnings.warn(
            "overlap_comm has no effect on ranks without a GPU: a host has no streams, each reduction ends before the "
            "backward goes on. Results are the same.",
            stacklevel=2,
        )


def _check_sums(config: StrategyConfig) -> None:
    """Refuse sums of gradients in a dtype that DeepSpeed would not take, or has an optimizer of its own for."""
    asked, held = config.grad_accum_dtype, "bf16" if config.bf16 else "fp16" if config.fp16 else "fp32"
    if asked in (None, held):
        return
    refused = f"grad_accum_dtype={asked!r} cannot be honoured with zero_stage={config.zero_stage}"
    refuse(
        (
            config.zero_stage == 1 and (held, asked) == ("bf16", "fp32") and not config.adam_offload,
            f"{refused} and bf16, for which DeepSpeed takes an optimizer without ZeRO's states: take zero_stage=2 or 3",
        ),
        (
            config.zero_stage == 2 and asked != "fp32",
            f"{refused}, which adds gradients up in what weights are held in ({held}) or in fp32: take zero_stage=1 "
            "or 3, or leave it out",
        ),
    )

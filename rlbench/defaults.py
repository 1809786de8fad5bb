"""What is chosen where nobody said: by the device and by the memory there is, each with the reason that a card shows.

Nothing is asked of a device here: who has it gives what it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rlbench.options import OptionError
from rlbench.units import GIB, format_bytes

KV_BYTES = GIB
"""Of a KV cache in host memory; unasked, vLLM would take 0.92 of the machine's."""
MOST_UNDONE, UNDO_SHARE = 4, 0.5
BFLOAT16_FROM = (8, 0)
"""Compute capability of the first NVIDIA GPUs that multiply bfloat16; older ones emulate it, far below float16."""


class Default(NamedTuple):
    """An `option` by its name, what it was set to, as text, and why."""

    option: str
    value: str
    reason: str


def eager(on_gpu: bool) -> Default:
    """Choose whether a replica computes without compiling and CUDA graphs."""
    if on_gpu:
        return Default("enforce_eager", "False", "on a GPU captured graphs are most of the speed")
    return Default("enforce_eager", "True", "on a CPU compiling takes longer than it gains")


NO_PREFIXES = Default(
    "enable_prefix_caching",
    "False",
    "recurrent layers keep prefixes by splitting prefills, which a replica on a CPU cannot: its samples have seeds",
)
"""Of hybrids of attention and recurrent layers, in a replica on a CPU."""


def cache_size(on_gpu: bool, share: float) -> Default:
    """Choose the size of a replica's KV cache."""
    if on_gpu:
        reason = "the replica's share of the GPU, weights included; the rest is the trainer's"
        return Default("gpu_memory_utilization", f"{share:g}", reason)
    return Default("kv_cache_bytes", format_bytes(KV_BYTES), "on a host the rest is the trainer's and the copies'")


def undo_depth(copy_bytes: int, room_bytes: int) -> tuple[int, Default]:
    """Choose how many last steps can be undone: their copies, and the one after the last step, take half of the room
    in host memory at most.

    Args:
        copy_bytes: of one copy of what trains, with its optimizer.
        room_bytes: free in host memory, once the engines are there.
    """
    copies = int(UNDO_SHARE * room_bytes // max(1, copy_bytes))
    depth = max(0, min(MOST_UNDONE, copies - 1))
    reason = f"a copy takes {format_bytes(copy_bytes)}, and {format_bytes(room_bytes)} of host memory are free"
    return depth, Default("undo", str(depth), reason)


@dataclass(frozen=True)
class Precision:
    """`half`: "float16", "bfloat16", or None: as the weights are held; `why` in plain words."""

    half: str | None
    why: str

    def dtype(self, held: str) -> str:
        """Return what is computed in, where weights are held in `held`."""
        return self.half or held


def precision(
    gpu: tuple[int, int] | None,
    checkpoint: str,
    *,
    bf16: bool | None = None,
    fp16: bool = False,
    in_optimizer: bool = False,
) -> Precision:
    """Choose what a model computes in.

    Args:
        gpu: compute capability of its GPU; None: it computes on the host.
        checkpoint: dtype of its weights as they come.
        bf16, fp16: as of the options; where neither says anything the device decides.
        in_optimizer: half-precision weights with float32 copies in the optimizer (`use_mp_opt`).

    Raises:
        OptionError: bfloat16 on a GPU that has none.
    """
    without = gpu is not None and gpu < BFLOAT16_FROM
    if fp16:
        return Precision("float16", "fp16=True")
    if bf16 is False:
        return Precision(None, "bf16=False")
    if bf16 or in_optimizer:
        asked = "bf16=True" if bf16 else "use_mp_opt=True"
        if without:
            raise _no_bfloat16(asked, gpu)
        return Precision("bfloat16", asked)
    if without:
        return Precision("float16", f"{_named(gpu)} has no bfloat16")
    if gpu is not None:
        return Precision("bfloat16", f"{_named(gpu)} has bfloat16")
    if checkpoint == "bfloat16":
        return Precision("bfloat16", "the checkpoint is in bfloat16")
    return Precision(None, "no GPU, and the checkpoint is not in bfloat16")


def _named(gpu: tuple[int, int] | None) -> str:
    assert gpu is not None
    return f"a GPU of compute capability {gpu[0]}.{gpu[1]}"


def _no_bfloat16(asked: str, gpu: tuple[int, int] | None) -> OptionError:
    mend = "take fp16=True, or bf16=False for float32" if asked.startswith("bf16") else "leave use_mp_opt out"
    return OptionError(f"{asked} cannot be honoured: {_named(gpu)} has no bfloat16; {mend}.")

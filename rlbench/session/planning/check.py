"""Before a session builds anything: refuse what cannot fit, whatever its batches are. Cheap where that is plain to see,
by the size of the files; else the plan is made, which imports torch and transformers into this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import psutil

from rlbench.defaults import KV_BYTES
from rlbench.errors import BuildError
from rlbench.runtime import cluster
from rlbench.session.options import POLICY, SessionOptions
from rlbench.session.planning.devices import Devices
from rlbench.session.planning.request import Request
from rlbench.units import format_bytes

WEIGHTS = ("*.safetensors", "*.bin")
MOST_TIMES = 12
"""By how much a session's parts can exceed the files of its model: 16 bytes of a parameter that is stored in 2, a
replica in float32 beside it, a reference."""


def need_room(options: SessionOptions) -> None:
    """Raise BuildError, with the plan, for a session whose weights alone, or the state of whose step, exceed a device.

    What a session's batches decide is not counted, nor what a step can do without (copies to undo it), nor anything
    estimated: what is refused here could not have run.
    """
    joined = cluster.current()
    if not joined.ours:  # its nodes' memory is not this machine's
        return
    here = Devices.of(None)
    if joined.gpus and not here.gpus:  # this process does not see them
        return
    devices = replace(here, gpus=min(here.gpus, joined.gpus)) if joined.gpus else Devices(0, here.host or here.nbytes)
    limit = devices.nbytes if devices.gpus else devices.nbytes + int(psutil.swap_memory().total)
    if _plainly_fits(options, limit):
        return
    from rlbench.session.planning.plan import planned

    plan = planned(
        Request(
            options.path,
            devices,
            options.train,
            options.inference,
            options.reference,
            options.undo or 0,
            teachers=tuple(options.teachers.values()),
            kind=options.kind,
        )
    )
    if plan.least > limit:
        other = f", or sample without training: rb.InferenceEngine({options.model!r})" if options.kind == POLICY else ""
        raise BuildError(
            f"{options.model!r} cannot fit: its engines as they are built, or the weights, gradients and optimizer of "
            f"a step alone, take {format_bytes(plan.least)} of {format_bytes(limit)}, before any activation. Nothing "
            f"was started; change what the plan says below{other}.\n{plan!r}"
        )


def _plainly_fits(options: SessionOptions, limit: int) -> bool:
    models = (options.path, options.reference, *options.teachers.values())
    sizes = [_stored(path) for path in models if path is not None]
    cache = options.inference.kv_cache_bytes or KV_BYTES
    ranks = max(1, options.train.data_parallel_size) * max(1, options.inference.data_parallel_size)
    return None not in sizes and MOST_TIMES * ranks * sum(n for n in sizes if n) + cache <= limit


def _stored(path: str) -> int | None:
    """Bytes of a model's files, in a folder or in the hub's cache; None where they are not here."""
    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        held = try_to_load_from_cache(path, "config.json")
        if not isinstance(held, str):
            return None
        folder = Path(held).parent
    return sum(file.stat().st_size for pattern in WEIGHTS for file in folder.glob(pattern)) or None

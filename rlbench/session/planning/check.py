"""Before a session, or a trainer in it, builds anything: refuse what cannot fit, whatever its batches are. Cheap where
that is plain to see, by the size of the files; else the plan is made, which imports torch and transformers here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from rlbench.defaults import KV_BYTES
from rlbench.errors import BuildError
from rlbench.runtime import cluster
from rlbench.session.options import POLICY, SessionOptions
from rlbench.session.planning.devices import Devices
from rlbench.session.planning.request import Request
from rlbench.session.planning.reward_models import planned_reward, reward_models
from rlbench.units import format_bytes

if TYPE_CHECKING:
    from rlbench.session.planning.plan import Plan
    from rlbench.trainers.options.specs import TextSpec, TrainerSpec

WEIGHTS = ("*.safetensors", "*.bin")
MOST_TIMES = 12
"""By how much a session's parts can exceed the files of its model: 16 bytes of a parameter that is stored in 2, a
replica in float32 beside it, a reference."""


def need_room(options: SessionOptions) -> None:
    """Raise BuildError, with the plan, for a session whose weights alone, or the state of whose step, exceed a device.

    What a session's batches decide is not counted, nor what a step can do without (copies to undo it), nor anything
    estimated: what is refused here could not have run.
    """
    there = _memory()
    if there is None or _plainly_fits(options, [], there[1]):
        return
    plan = _plan(_request(options, there[0]))
    if plan.least > there[1]:
        other = f", or sample without training: rb.InferenceEngine({options.model!r})" if options.kind == POLICY else ""
        raise BuildError(
            f"{options.model!r} cannot fit: its engines as they are built, or the weights, gradients and optimizer of "
            f"a step alone, take {format_bytes(plan.least)} of {format_bytes(there[1])}, before any activation. "
            f"Nothing was started; change what the plan says below{other}.\n{plan!r}"
        )


def need_trainer_room(options: SessionOptions, spec: TrainerSpec | TextSpec) -> None:
    """Raise BuildError, with the plan, for a trainer whose critic, reward models, reference or average exceed a device
    beside what the session has there; counted as by `need_room`."""
    from rlbench.trainers.options.specs import SessionEngine, TrainerSpec

    asked_critic, scorers, ema = None, [], False
    if isinstance(spec, TrainerSpec):  # one on texts has a reference alone
        asked_critic, scorers, ema = spec.critic, list(reward_models(spec.reward)), spec.ema
    critic, reference = (
        None if not asked or isinstance(asked, SessionEngine) else options.path if asked is True else str(asked)
        for asked in (asked_critic, spec.reference)
    )
    if critic is None and reference is None and not scorers and not ema:
        return
    beside = [path for path in (critic, reference, options.path if ema else None) if path is not None]
    there = _memory()
    if there is None or _plainly_fits(options, [*beside, *(str(scorer.path) for scorer in scorers)], there[1]):
        return
    planned = tuple(planned_reward(scorer, options.path) for scorer in scorers)
    request = replace(_request(options, there[0]), critic=critic, rewards=planned, ema=ema)
    if request.reference is None:
        request = replace(request, reference=reference)
    elif reference is not None:  # one more, whose weights the ranks hold as those of a teacher
        request = replace(request, teachers=(*request.teachers, reference))
    plan = _plan(request)
    if plan.least > there[1]:
        raise BuildError(
            f"the trainer cannot fit: with what it makes beside the session's models they take "
            f"{format_bytes(plan.least)} of {format_bytes(there[1])}, as they are built or for a step, before any "
            f"activation. Nothing was made; change what the plan says below.\n{plan!r}"
        )


def _memory() -> tuple[Devices, int] | None:
    """Return the devices of this machine's cluster and the bytes that one has, a host's swap included; None where they
    cannot be seen from here."""
    joined = cluster.current()
    if not joined.ours:  # its nodes' memory is not this machine's
        return None
    here = Devices.of(None)
    if joined.gpus and not here.gpus:  # this process does not see them
        return None
    devices = replace(here, gpus=min(here.gpus, joined.gpus)) if joined.gpus else Devices(0, here.host or here.nbytes)
    return devices, devices.nbytes if devices.gpus else devices.nbytes + int(psutil.swap_memory().total)


def _request(options: SessionOptions, devices: Devices) -> Request:
    return Request(
        options.path,
        devices,
        options.train,
        options.inference,
        options.reference,
        options.undo or 0,
        teachers=tuple(options.teachers.values()),
        kind=options.kind,
    )


def _plan(request: Request) -> Plan:
    from rlbench.session.planning.plan import planned

    return planned(request)


def _plainly_fits(options: SessionOptions, beside: list[str], limit: int) -> bool:
    models = (options.path, options.reference, *options.teachers.values(), *beside)
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

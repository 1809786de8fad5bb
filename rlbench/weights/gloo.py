"""One gloo device for all process groups of a process.

A device has a thread that looks for work a hundred times a second for as long as it is there, and torch makes one for
each group: two in a training rank, thirteen in a replica, which took 2 % of a core where nothing happened.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_devices: dict[tuple[int, str], Any] = {}
"""By process, as a fork has none of its parent's threads, and by the interface that the device is bound to."""


def share_devices() -> None:
    """Have torch's gloo groups that are made from now on take this process's devices, not new ones. A script's own
    groups too: they differ in nothing else."""
    dist.distributed_c10d.ProcessGroupGloo = SharingGroup  # type: ignore[misc]


class SharingGroup(dist.ProcessGroupGloo):
    """torch's group, with the devices that torch would choose for it."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
        options._devices = [_device_on(name) for name in interfaces.split(",")]
        options._threads = 2 * len(options._devices)
        super().__init__(store, rank, size, options)


def _device_on(interface: str) -> Any:
    """Return this process's device on an interface; "": the one that torch takes by default."""
    key = (os.getpid(), interface)
    if key not in _devices:
        gloo = dist.ProcessGroupGloo
        _devices[key] = gloo.create_device(interface=interface) if interface else gloo.create_default_device()
    return _devices[key]

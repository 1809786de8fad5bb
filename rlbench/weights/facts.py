"""What a process tells about where it is, for the choice of a transport."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from rlbench.errors import ClusterError

if TYPE_CHECKING:
    import torch

LOOPBACK = "127.0.0.1"
INTERFACE = "RLBENCH_NETWORK_INTERFACE"  # of the environment: what the user named for process groups
NODE_ADDRESS = "RLBENCH_NODE_ADDRESS"  # the same: by which Ray's nodes know this one


def node() -> str:
    """Name what processes that see one /dev/shm share: host name, boot, and the mount itself (as containers differ)."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}/{os.stat('/dev/shm').st_dev}"


def address() -> str:
    """Return the address of the interface the user named, else the one by which other nodes know this one, else that of
    the interface by which a packet to another node would leave."""
    if (interface := os.environ.get(INTERFACE)) is not None:
        for one in psutil.net_if_addrs().get(interface, ()):
            if one.family == socket.AF_INET:
                return str(one.address)
        raise ClusterError(
            f"network_interface={interface!r}: node {socket.gethostname()} has no such interface with an IPv4 address; "
            f"it has {', '.join(psutil.net_if_addrs())}"
        )
    if (known := os.environ.get(NODE_ADDRESS)) is not None:
        return known
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(OSError):  # no route to anywhere: a host by itself
            probe.connect(("192.0.2.1", 9))  # a reserved address; connecting a datagram socket sends nothing
            return str(probe.getsockname()[0])
    return LOOPBACK


def keep_gloo_on(host: str) -> None:
    """Bind this process's gloo to the interface that has address `host`, where one has, not to the machine's name,
    unless the environment names one."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    for interface, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = interface


def gpu_uuid(device: torch.device) -> str:
    """Return an identity of a GPU that all processes share; empty for a CPU."""
    if device.type != "cuda":
        return ""
    import torch  # here, since a replica asks for its node before it may load torch

    return str(torch.cuda.get_device_properties(device).uuid)

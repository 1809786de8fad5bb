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
INTERFACE = "RLBENCH_NETWORK_INTERFACE"
"""Of the environment: the network interface the user named for process groups."""


def node() -> str:
    """Equal for processes that see one /dev/shm: host name, boot, and the mount itself (containers share the rest)."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    booted = boot.read_text().strip() if boot.exists() else ""
    return f"{socket.gethostname()}/{booted}/{os.stat('/dev/shm').st_dev}"


def address() -> str:
    """The address by which other nodes reach this one: that of the interface the user named, else of the one a packet
    would leave by."""
    if INTERFACE in os.environ:
        return address_of(os.environ[INTERFACE])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(OSError):  # no route to anywhere: a host by itself
            probe.connect(("192.0.2.1", 9))  # a reserved address; connecting a datagram socket sends nothing
            return str(probe.getsockname()[0])
    return LOOPBACK


def keep_gloo_on(host: str) -> None:
    """Bind this process's gloo to the interface of `host`, a loopback address, unless the environment says otherwise.

    Gloo would take the address that the machine's name stands for, which is often the outer one.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or not host.startswith("127."):
        return
    with contextlib.suppress(OSError):  # no list of interfaces: gloo chooses by the host's name
        for interface, addresses in psutil.net_if_addrs().items():
            if any(address.address == host for address in addresses):
                os.environ["GLOO_SOCKET_IFNAME"] = interface


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface of this node.

    Raises:
        ClusterError: it has none.
    """
    for one in psutil.net_if_addrs().get(interface, ()):
        if one.family == socket.AF_INET:
            return str(one.address)
    raise ClusterError(
        f"network_interface={interface!r}: node {socket.gethostname()} has no such interface with an IPv4 address; it "
        f"has {', '.join(psutil.net_if_addrs())}"
    )


def gpu_uuid(device: torch.device) -> str:
    """Identity of a GPU that does not depend on which GPUs a process sees; empty for a CPU."""
    if device.type != "cuda":
        return ""
    import torch  # here, since a replica asks for its node before it may load torch

    return str(torch.cuda.get_device_properties(device).uuid)

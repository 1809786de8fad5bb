"""An image with the Python that runs the tests, made without a registry: its standard library and what it links to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

NAME = f"rlbench-test-python:{os.getpid()}"
"""Of this process: another one removes its own."""
BUILDING = Path(sysconfig.get_config_var("LIBPL")).name  # a static library, larger than all the rest
LEFT_OUT = ("site-packages", "test", "__pycache__", "idlelib", "ensurepip", "lib2to3", "tkinter", BUILDING)
PODMAN = '[engine]\nruntime = "{runtime}"\n[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]\n'
"""A machine of CI may not raise its limits, nor have cgroups that Podman's first choice knows."""


def configuration(folder: Path) -> Path:
    """Write what Podman is to run with here, for CONTAINERS_CONF."""
    runtime = "runc" if any(Path(place, "runc").exists() for place in os.get_exec_path()) else "crun"
    path = folder / "containers.conf"
    path.write_text(PODMAN.format(runtime=runtime))
    return path


def make(client: str) -> str:
    """Make the image by a client's `import`; return its name."""
    command = [client, "import", "-", NAME]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        with tarfile.open(fileobj=process.stdin, mode="w|") as image:
            _fill(image)
    assert process.returncode == 0
    return NAME


def _fill(image: tarfile.TarFile) -> None:
    library, python = Path(sysconfig.get_path("stdlib")), Path(os.path.realpath(sys.executable))
    for name, mode in (("tmp", 0o1777), ("proc", 0o755), ("sys", 0o755), ("dev", 0o755), ("etc", 0o755)):
        folder = tarfile.TarInfo(name)
        folder.type, folder.mode = tarfile.DIRTYPE, mode
        image.addfile(folder)
    image.add(library, str(library), filter=lambda part: None if Path(part.name).name in LEFT_OUT else part)
    image.add(python, str(python))
    modules = list(library.glob("lib-dynload/*.so"))
    for place in sorted({place for one in (python, *modules) for place in _linked(one)}):
        image.add(os.path.realpath(place), place)
    link = tarfile.TarInfo("usr/bin/python3")
    link.type, link.linkname = tarfile.SYMTYPE, str(python)
    image.addfile(link)


def _linked(binary: Path) -> list[str]:
    said = subprocess.run(["ldd", str(binary)], env={}, capture_output=True, text=True, check=False).stdout
    return re.findall(r"(/\S+)", said)

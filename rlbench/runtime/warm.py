"""The warm process of a cluster: it has imported what workers need, and every worker is a fork of it.

Importing torch and vLLM takes ten seconds of processor time, a fork milliseconds. What forks may have neither threads
nor a device open, so this process does nothing but import.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from rlbench.runtime.worker_start import RAYS_OWN, SOCKET

PRELOADED = "rlbench.workers.preload"


def main(address: str) -> None:
    """Listen at `address`, import, then fork a worker for each that asks, until ended."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        Path(address).with_suffix(".pid").write_text(str(os.getpid()))
        listening.listen(64)
        set_by_imports = preload()
        if reason := why_not():
            print(f"rlbench: workers start without the warm process: {reason}", flush=True)
            os._exit(1)  # also where a thread runs
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what it forked
        while True:
            asking, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                become_worker(asking, set_by_imports)
            asking.close()


def preload() -> dict[str, str]:
    """Import what workers need; return what that changed in the environment."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # else numpy's import starts threads
    before = dict(os.environ)
    sys.modules["ray"] = None  # type: ignore[assignment]  # not yet: its import reads a worker's job from the environment
    gc.disable()  # a third of the time would go to looking for garbage, of which imports make little
    importlib.import_module(PRELOADED)
    del sys.modules["ray"]
    gc.collect()
    gc.freeze()  # what is collected is written to, and so copied into each worker
    gc.enable()
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def why_not() -> str | None:
    """Return what forbids a fork of this process."""
    threads = len(os.listdir("/proc/self/task"))
    files = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    devices = [file for file in files if file.startswith("/dev/nvidia")]
    if threads > 1:
        return f"an import started {threads - 1} threads"
    return f"an import opened {devices[0]}" if devices else None


def become_worker(asking: socket.socket, set_by_imports: dict[str, str]) -> NoReturn:
    """Be, in a fork, Ray's worker in the place of the process that asks: with its arguments, environment and files."""
    status = 1
    try:
        _, files, _, _ = socket.recv_fds(asking, 1, 3)
        with asking.makefile("rb") as request:
            process = json.load(request)
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        asking.sendall(b"\1")
        asking.close()
        os.environ.clear()
        os.environ.update(set_by_imports | process["environment"])
        os.chdir(process["folder"])
        for number, action in ((signal.SIGCHLD, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
            signal.signal(number, action)
        random.seed()
        own = os.environ[RAYS_OWN]
        sys.argv, sys.path[0] = [own, *process["argv"]], str(Path(own).parent)
        runpy.run_path(own, run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(os.environ[SOCKET])

"""The warm process of a cluster: it has imported what workers need, and workers are forks of its forks.

Importing torch and vLLM takes ten seconds of processor time, a fork milliseconds. What forks may have neither threads
nor a device open, so this process does nothing but import. Ray reads a worker's job from the environment as it is
loaded: a fork for each job, its nursery, loads it, and that job's workers are forks of the nursery.
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
from typing import Any, NoReturn

from rlbench.runtime import allocator, openmp
from rlbench.runtime.worker_start import JOB_BYTES, RAYS_OWN, SOCKET

PRELOADED = ("rlbench.workers.preload",)
PRELOADED_BY_JOB = (
    "ray._private.worker",
    "ray._private.node",
    "ray._private.arrow_serialization",
    "ray._common.pydantic_compat",
    "ray._common.usage.usage_lib",
    "rlbench.dispatch.host",
    "rlbench.monitor.actor",
)
REQUEST_S = 10.0  # whoever asks has said what it is by then; the others wait meanwhile


def main(address: str) -> None:
    """Listen at `address`, import, then have a worker forked for each that asks, until ended."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        Path(address).with_suffix(".pid").write_text(str(os.getpid()))
        listening.listen(64)
        if not allocator.environment():
            print(f"rlbench: workers keep the C library's allocator: {allocator.WHY_NOT}", flush=True)
        set_by_imports = preload()
        if reason := why_not():
            print(f"rlbench: workers start without the warm process: {reason}", flush=True)
            os._exit(1)  # also where a thread runs
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what it forked
        nursery: Nursery | None = None
        while True:
            asking, _ = listening.accept()
            with asking:
                if (request := requested_job(asking)) is None:
                    continue
                job, files = request
                if nursery is None or nursery.job != job or not nursery.alive:
                    if nursery is not None:
                        nursery.close()
                    nursery = Nursery(job, [listening.fileno(), asking.fileno(), *files], set_by_imports)
                nursery.fork_worker(asking, files)
            close(files)


def requested_job(asking: socket.socket) -> tuple[bytes, list[int]] | None:
    """Return the job of the process that asks and its first three files; None if it has gone, or does not say."""
    asking.settimeout(REQUEST_S)
    try:
        job, files, _, _ = socket.recv_fds(asking, JOB_BYTES, 3)
    except OSError as error:
        print(f"rlbench: a worker that was to start did not say for which job: {error}", flush=True)
        return None
    if len(job) == JOB_BYTES and len(files) == 3:
        return job, files
    close(files)
    return None


class Nursery:
    """The fork for one job's workers, seen from the warm process, which keeps that of the job that asked last."""

    def __init__(self, job: bytes, open_files: list[int], set_by_imports: dict[str, str]) -> None:
        self.job = job
        self._socket, theirs = socket.socketpair()
        if os.fork() == 0:
            close(open_files)  # or who waits for the other end of one waits for as long as the nursery lives
            self._socket.close()
            serve_job(theirs, set_by_imports)
        theirs.close()

    @property
    def alive(self) -> bool:
        """Whether it still listens; it says nothing by itself."""
        try:
            return self._socket.recv(1, socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def fork_worker(self, asking: socket.socket, files: list[int]) -> None:
        """Hand over whoever asks, and its first three files; it starts by itself where nobody answers it."""
        try:
            socket.send_fds(self._socket, [b"\0"], [asking.fileno(), *files])
        except OSError as error:
            print(f"rlbench: the process that forks a job's workers has ended ({error})", flush=True)

    def close(self) -> None:
        """Let it end, once it has forked what it was asked for."""
        self._socket.close()


def serve_job(warm: socket.socket, set_by_imports: dict[str, str]) -> NoReturn:
    """Be a nursery: import, under the environment of the first that asks, what reads its job there; fork a worker for
    each that the warm process hands over, until that closes the connection."""
    ready, folder = False, sys.path[0]
    try:
        while True:
            message, files, _, _ = socket.recv_fds(warm, 1, 4)
            if not message:
                os._exit(0)
            with socket.socket(fileno=files.pop(0)) as asking:
                process = requested_process(asking)
                if process is not None and not ready:
                    set_by_imports |= preload_by_job(set_by_imports | process["environment"])
                    ready = True
                if process is not None and os.fork() == 0:
                    warm.close()
                    sys.path[sys.path.index(folder)] = str(Path(process["environment"][RAYS_OWN]).parent)
                    become_worker(asking, files, process, set_by_imports)
            close(files)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def close(files: list[int]) -> None:
    """Close this process's ends of what it has handed on."""
    for file in files:
        os.close(file)


def requested_process(asking: socket.socket) -> dict[str, Any] | None:
    """Return arguments, environment and folder of the process that asks; None if it has gone, or does not say."""
    asking.settimeout(REQUEST_S)
    try:
        chunks = iter(lambda: asking.recv(1 << 16), b"")
        request: dict[str, Any] = json.loads(b"".join(chunks))
    except (OSError, ValueError) as error:
        print(f"rlbench: a worker that was to start did not say as what: {error}", flush=True)
        return None
    return request


def preload() -> dict[str, str]:
    """Import what workers need; return what that changed in the environment."""
    # else the imports of numpy and pyarrow start threads
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
    openmp.load()
    sys.modules["ray"] = None  # type: ignore[assignment]  # not yet: its import reads a worker's job from the environment
    gc.disable()  # a third of the time would go to looking for garbage, of which imports make little
    changed = _imported(PRELOADED)
    del sys.modules["ray"]
    gc.enable()
    openmp.leave_no_notes()
    return changed


def preload_by_job(environment: dict[str, str]) -> dict[str, str]:
    """Import what reads a worker's job from this `environment` of one; return what that changed in it.

    Raises:
        RuntimeError: what it imported forbids a fork.
    """
    os.environ.clear()
    os.environ.update(environment)
    changed = _imported(PRELOADED_BY_JOB)
    if reason := why_not():
        raise RuntimeError(f"workers start without a nursery: {reason}")
    return changed


def _imported(modules: tuple[str, ...]) -> dict[str, str]:
    before = dict(os.environ)
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what is collected is written to, and so copied into each worker
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def why_not() -> str | None:
    """Return what forbids a fork of this process."""
    threads = len(os.listdir("/proc/self/task"))
    files = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    devices = [file for file in files if file.startswith("/dev/nvidia")]
    if threads > 1:
        return f"an import started {threads - 1} threads"
    return f"an import opened {devices[0]}" if devices else None


def become_worker(
    asking: socket.socket, files: list[int], process: dict[str, Any], set_by_imports: dict[str, str]
) -> NoReturn:
    """Be, in a fork, Ray's worker in the place of the process that asks: with its arguments, environment and files."""
    status = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
        close(files)
        asking.sendall(b"\1")
        asking.close()
        os.environ.clear()
        os.environ.update(set_by_imports | process["environment"])
        os.chdir(process["folder"])
        for number, action in ((signal.SIGCHLD, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
            signal.signal(number, action)
        random.seed()
        own = os.environ[RAYS_OWN]
        sys.argv = [own, *process["argv"]]
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

"""The SGLang server of one replica: a child process on a loopback port with a key of its own, and requests to it.

It is started by `python -m sglang.launch_server` of this environment, and ended as a group of processes.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import psutil

from rlbench.dispatch.context import current
from rlbench.errors import BuildError, EngineError, nearest
from rlbench.setup.plan import has_nvidia_gpu
from rlbench.units import format_seconds
from rlbench.weights.facts import LOOPBACK
from rlbench.workers.replica.config import ReplicaConfig, compute_dtype, runs_eagerly

ENDS_WITH_US = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.executable, sys.argv[1:])"
"""Run by the child first: SIGKILL for it when this process's thread ends (PR_SET_PDEATHSIG), whatever ends it."""
START_S, CALL_S, END_S = 1200.0, 600.0, 10.0
TOKENS_AT_A_TIME = 8
LOG_LINES = 12


def launch_options(config: ReplicaConfig) -> dict[str, Any]:
    """Return the server's arguments by SGLang's names; True stands for a flag."""
    on_gpu = has_nvidia_gpu()
    chosen: dict[str, Any] = {
        "model_path": config.path,
        "dtype": compute_dtype(config, _capability() if on_gpu else None),
        "tp_size": config.tensor_parallel_size,
        "context_length": config.max_model_len,
        "max_running_requests": config.max_num_seqs,
        "random_seed": config.seed & 0x7FFF_FFFF,
        "trust_remote_code": config.trust_remote_code,
        "enable_deterministic_inference": True,  # else a sample's own seed has no effect
        "incremental_streaming_output": True,
        "skip_server_warmup": True,
        "log_level": "error",
        "device": "cuda" if on_gpu else "cpu",
    }
    if on_gpu:
        chosen |= {
            "mem_fraction_static": config.gpu_memory_utilization,
            "enable_memory_saver": True,
            "enable_weights_cpu_backup": True,
        }
        if runs_eagerly(config, on_gpu):
            chosen |= {"cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled"}
    for name in config.engine_kwargs:
        if name in chosen and name != "device":
            raise BuildError(f"engine_kwargs: {name!r} is set by the replica; use the replica's own option for it")
    return {name: value for name, value in (chosen | config.engine_kwargs).items() if value not in (None, False)}


def command(options: Mapping[str, Any]) -> list[str]:
    """Return the command line that starts a server with these arguments."""
    parts = [sys.executable, "-c", ENDS_WITH_US, sys.executable, "-m", "sglang.launch_server"]
    for name, value in options.items():
        parts += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return parts


class SglangServer:
    """A server of our own. `post` and `stream` may be called from several threads."""

    def __init__(self, config: ReplicaConfig) -> None:
        if importlib.util.find_spec("sglang") is None:
            raise BuildError(
                'executor="sglang": SGLang is not installed in this environment. Install it where the replicas run '
                '(pip install sglang, which needs a GPU), or use executor="vllm"'
            )
        self.key = secrets.token_urlsafe(24)
        self.port = _free_port()
        options = {**launch_options(config), "host": LOOPBACK, "port": self.port, "api_key": self.key}
        self._log = tempfile.TemporaryFile(prefix="rlbench-sglang-")
        environment = {**os.environ, "OMP_NUM_THREADS": str(config.threads or len(os.sched_getaffinity(0)))}
        self.process = subprocess.Popen(
            command(options), stdout=self._log, stderr=subprocess.STDOUT, env=environment, process_group=0
        )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The server's processes; empty once it ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            server = psutil.Process(self.process.pid)
            return [server.pid, *(child.pid for child in server.children(recursive=True))]
        return []

    def get(self, path: str) -> Any:
        """Return what a GET answers."""
        with self._answer("GET", path, None, CALL_S) as answer:
            return _read(answer)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return what a POST answers; EngineError with SGLang's words where it refuses."""
        with self._answer("POST", path, body, CALL_S) as answer:
            return _read(answer)

    def stream(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield what `/generate` streams: new tokens of one request."""
        with self._answer("POST", "/generate", {**body, "stream": True}, CALL_S) as answer:
            for line in answer:
                if not line.startswith(b"data:") or (text := line[5:].strip()) == b"[DONE]":
                    continue
                event = json.loads(text)
                if "error" in event:
                    raise EngineError(f"SGLang refuses this request: {_words(event)}")
                yield event

    def close(self) -> None:
        """End the server and all of its processes."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what is left of its group
        self.process.wait()
        self._log.close()

    @contextlib.contextmanager
    def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=timeout_s)
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status >= 400:
                raise EngineError(f"SGLang, {path}: {_words(_read(answer))} (HTTP {answer.status})")
            yield answer
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"SGLang's server does not answer {path}: {error!r}{self._tail()}") from error
        finally:
            connection.close()

    def _wait(self) -> None:
        """Wait until it can generate."""
        deadline = time.monotonic() + START_S
        while self.process.poll() is None and time.monotonic() < deadline:
            if current().stop_requested():
                raise BuildError("the start of SGLang's server was stopped")
            with contextlib.suppress(EngineError), self._answer("GET", "/health_generate", None, END_S):
                return
            time.sleep(0.2)
        ended = self.process.poll()
        seen = f"did not answer within {format_seconds(START_S)}" if ended is None else f"ended with status {ended}"
        raise BuildError(f"SGLang's server {seen}{self._tail()}")

    def _tail(self) -> str:
        """Return the last lines of its log, for an error."""
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), 1 << 14, max(0, size - (1 << 14))).decode(errors="replace")
        lines = text.strip().splitlines()[-LOG_LINES:]
        return "".join(f"\n  {line}" for line in lines)


def check_engine_kwargs(names: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuse arguments that SGLang's own `server_info` does not list."""
    for name in names:
        if name not in known:
            raise BuildError(f"engine_kwargs: SGLang has no server argument {name!r}{nearest(name, known)}")


def _read(answer: http.client.HTTPResponse) -> Any:
    text = answer.read()
    try:
        return json.loads(text)
    except ValueError:
        return text.decode(errors="replace")


def _words(answer: Any) -> str:
    """Return the message of an error, in whichever of its forms SGLang gives it."""
    while isinstance(answer, dict) and (inner := answer.get("error", answer.get("message"))) is not None:
        answer = inner
    return str(answer)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _capability() -> tuple[int, int]:
    """Return the compute capability of the first visible GPU, without starting CUDA in this process."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    asked = ["nvidia-smi", "-i", first, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        major, minor = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip().split(".")
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise BuildError(
            f"the GPU's compute capability is not known ({error}); say what to compute in: rb.Inference(dtype=…)"
        ) from error
    return int(major), int(minor)

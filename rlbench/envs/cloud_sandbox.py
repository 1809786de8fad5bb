"""Programs that the policy writes, each in a new sandbox of E2B's cloud, by E2B's own Python package."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shlex
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from rlbench.data.base.drawing import needed
from rlbench.envs.container import KILLED, LATE
from rlbench.envs.tools import LONGEST_RESULT, ToolUnavailable
from rlbench.errors import DataError

Value = TypeVar("Value")
KEY = "E2B_API_KEY"
CALL = "sandbox('e2b')"
FOLDER = "/tmp/rlbench"
"""Where a program runs."""
START_S = 30.0
"""What one request to E2B may take, and a command to start and end beside the program."""
RETRIES = 10
"""Of what E2B refuses for now, such as one sandbox more than the account may have at a time; within START_S."""
FILE_BYTES, PRINTED_BYTES = 64 << 20, 4 * LONGEST_RESULT
"""Of each file of a program's, and of what it printed, which are at least LONGEST_RESULT characters."""
BY_SIGNAL = -1
"""The status that E2B gives a command which a signal ended."""
WHERE = "before the first session starts the cluster, whose processes keep that environment (`rlbench stop` ends one)"
FIRST_PROCESS = f"""
import os, resource, subprocess, sys, tempfile
resource.setrlimit(resource.RLIMIT_FSIZE, ({FILE_BYTES}, {FILE_BYTES}))
with tempfile.TemporaryFile() as printed:
    program = subprocess.Popen(
        [sys.executable, "-I", "main.py"], stdin=subprocess.DEVNULL, stdout=printed, stderr=printed
    )
    try:
        status = program.wait(float(sys.argv[1]))
    except subprocess.TimeoutExpired:
        program.kill()
        status = {LATE}
    sys.stdout.buffer.write(os.pread(printed.fileno(), {PRINTED_BYTES}, 0))
sys.exit(status if status >= 0 else 128 - status)
"""
"""Ends the program in time, counted where it runs, and sends the beginning of what it printed; what it started and left
behind would hold a pipe open."""


@dataclass(frozen=True)
class CloudSandbox:
    """What runs a program in a new sandbox of E2B's; see `rlbench.envs.sandbox` for what that keeps from it.

    The process that calls it reads the key, and where E2B is, from its own environment: nothing of them is held here.
    """

    template: str | None
    timeout_s: float
    network: bool

    def __call__(self, code: str) -> str:
        """Return what the program printed, to both streams, and how it ended where that was not well; ToolUnavailable
        where E2B did not run it. An interrupt kills its sandbox."""
        library, made = package(), list[Any]()
        try:
            text, status = _beside(lambda: self._run(library, made, code.encode("utf-8", "replace")))
        except Exception as error:
            seen = f"{type(error).__name__}: {error}".replace(os.environ.get(KEY, "").strip() or KEY, KEY)
            mend = self._mend(library, error)
            raise ToolUnavailable(f"{CALL}: {seen[:500]}; {mend}") from None  # its own text may have the key
        except BaseException:
            _kill(made)
            raise
        ended = self._ended(status)
        return "\n".join(filter(None, (text[: LONGEST_RESULT - len(ended) - 1].rstrip("\n"), ended)))

    def _run(self, library: Any, made: list[Any], program: bytes) -> tuple[str, int | None]:
        """Run a program in a sandbox, which is added to `made`; return what it printed, and its exit status, None where
        there is none: it hindered its first process, and had to be killed."""
        sandbox = library.Sandbox.create(
            template=self.template,
            timeout=math.ceil(self.timeout_s + 4 * START_S),  # it ends by itself then, whatever becomes of this process
            allow_internet_access=self.network,
            request_timeout=START_S,
            retries=RETRIES,
            idempotency_key=secrets.token_hex(16),
        )
        made.append(sandbox)
        try:
            sandbox.files.write(f"{FOLDER}/main.py", program)
            return self._output(library, sandbox)
        finally:
            _kill(made)

    def _output(self, library: Any, sandbox: Any) -> tuple[str, int | None]:
        """Run the program that lies there; return as `_run` does."""
        command, text = shlex.join(["python3", "-I", "-c", FIRST_PROCESS, f"{self.timeout_s:g}"]), ""
        limit_s = self.timeout_s + START_S
        try:
            handle = sandbox.commands.run(command, background=True, retain_output=False, cwd=FOLDER, timeout=limit_s)
            for out, err, _ in handle:
                text += out or err or ""
                if len(text) > PRINTED_BYTES:
                    return text, None
            return text, handle.wait().exit_code
        except library.CommandExitException as ended:
            return text, ended.exit_code
        except library.TimeoutException as late:
            if type(late) is not library.TimeoutException or not sandbox.is_running():
                raise  # it is E2B that is gone or silent, not the program that holds out
            return text, None

    def _ended(self, status: int | None) -> str:
        if status is None:
            return "(it hindered the process that watches it, and was killed)"
        if status == LATE:
            return f"(it was not over within {self.timeout_s:g} s and was killed)"
        if status in (KILLED, BY_SIGNAL):
            return "(it was killed, as what takes more memory than its sandbox has is)"
        return f"(it ended with status {status})" if status else ""

    def _mend(self, library: Any, error: Exception) -> str:
        if isinstance(error, library.AuthenticationException):
            return f"set {KEY} to a key of yours {WHERE}"
        if isinstance(error, library.RateLimitException | library.ServiceBusyException):
            return "run fewer programs at a time, with fewer samples or replicas, or ask E2B for more"
        if getattr(error, "status_code", None) in (400, 403, 404):
            return (
                f"template={self.template!r} and timeout_s={self.timeout_s:g} have to be what the key's account may use"
            )
        if isinstance(error, library.SandboxException):
            return "E2B itself failed: roll out again"
        where = os.environ.get("E2B_API_URL") or os.environ.get("E2B_DOMAIN") or "e2b.app"
        return f"see whether {where} is reached from here; E2B_DOMAIN names an E2B of your own"


def package() -> Any:
    """Import E2B's package; ToolUnavailable where it is missing."""
    try:
        return needed("e2b", CALL)
    except DataError as missing:
        raise ToolUnavailable(f"{missing}, or pip install 'rlbench[e2b]'") from missing


def _kill(made: list[Any]) -> None:
    for sandbox in made:
        with contextlib.suppress(Exception):  # what cannot be reached ends by itself
            sandbox.kill()


def _beside(call: Callable[[], Value]) -> Value:
    """Make a call on a thread of its own and wait for it: an interrupt ends that, but none of the package's calls."""
    answer: Future[Value] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True, name="cloud sandbox").start()
    return answer.result()

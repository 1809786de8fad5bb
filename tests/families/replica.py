"""A vLLM replica in a process of its own, without Ray: started once, built for one checkpoint after the other.

It is a fork of what the ranks are forks of, and imports vLLM alone.
"""

from __future__ import annotations

import gc
import os
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from tests import garbage
from tests.ranks import forks

ANSWER_S = 300.0


class ReplicaFailure(Exception):
    """What the replica raised, as text; or that its process ended."""


def _serve(pipe: Connection) -> None:
    """The process: makes a replica, runs its verbs, sends results back."""
    os.environ["OMP_WAIT_POLICY"] = "passive"
    gc.disable()  # while it imports: there is little garbage then
    from rlbench.workers.replica.vllm import VllmReplica
    from tests.workers.ending import end_here

    garbage.let_nobody_undo_it()
    garbage.set_aside()
    gc.enable()

    target: Any = None
    while True:
        name, blob = pipe.recv()
        if name == "exit":
            return
        args = cloudpickle.loads(blob)
        try:
            if name == "new":
                target, value = VllmReplica(*args), None
            elif name == "close":  # others are built in this process after it
                value = target = end_here(target)
                garbage.set_aside()
            else:
                value = getattr(target, name)(*args)
            pipe.send((True, cloudpickle.dumps(value)))
        except Exception as error:  # the test decides what to make of it
            pipe.send((False, cloudpickle.dumps(f"{type(error).__name__}: {error}")))


class ReplicaProcess:
    """The process and its verbs; another one is started where it ended."""

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Any = None

    def call(self, name: str, *args: Any) -> Any:
        """Run a verb of `VllmReplica`; "new" makes one. Raises ReplicaFailure."""
        if self._process is None or not self._process.is_alive():
            self._start()
        try:
            self._pipe.send((name, cloudpickle.dumps(args)))
            if not self._pipe.poll(ANSWER_S):
                raise TimeoutError(f"no answer within {ANSWER_S:.0f} s")
            good, blob = self._pipe.recv()
        except (EOFError, OSError) as error:
            self.end()
            raise ReplicaFailure(f"the replica's process ended in {name}: {error!r}") from error
        if not good:
            raise ReplicaFailure(cloudpickle.loads(blob))
        return cloudpickle.loads(blob)

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join(10)
            self._process = None

    def _start(self) -> None:
        context = forks()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

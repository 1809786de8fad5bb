"""Training ranks in processes of their own, without Ray: started once, rebuilt for each test."""

from __future__ import annotations

import atexit
import functools
import multiprocessing as mp
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from rlbench.errors import Stopped
from rlbench.workers.train_config import TrainConfig

MOST_RANKS = 2
ANSWER_S = 60.0


class RankFailure(Exception):
    """What one rank raised; `error` is the exception itself."""

    def __init__(self, error: BaseException, text: str) -> None:
        super().__init__(text)
        self.error = error


def _serve(pipe: Connection) -> None:
    """A rank's process: makes a TrainRank, runs its verbs, sends results back."""
    from rlbench.dispatch import context
    from rlbench.workers.train_rank import TrainRank

    target: Any = None
    while True:
        name, blob, stopping = pipe.recv()
        if name == "exit":
            return
        args = cloudpickle.loads(blob)
        call = context.CallContext()
        context.set_current(call)
        if stopping:
            call.request_stop()
        try:
            if name == "new":
                target, value = TrainRank(*args), None
            else:
                value = getattr(target, name)(*args)
            pipe.send((True, cloudpickle.dumps(value)))
        except (Exception, Stopped) as error:  # the test decides what to make of it
            pipe.send((False, cloudpickle.dumps((error, traceback.format_exc()))))
        finally:
            context.set_current(None)


class Ranks:
    """The ranks of one engine; each verb runs on all of them and gives one result per rank."""

    def __init__(self, pipes: list[Connection], config: TrainConfig) -> None:
        self.pipes = pipes
        self.world_size = len(pipes)
        self.call_each("new", [(rank, self.world_size, config) for rank in range(self.world_size)])

    def build(self, module: Any) -> list[dict[str, Any]]:
        master = self.outcomes("rendezvous", [() for _ in self.pipes])[0]
        return self.call("build", cloudpickle.dumps(module), master)

    def call(self, name: str, *args: Any) -> list[Any]:
        return self.call_each(name, [args] * self.world_size)

    def call_each(self, name: str, args: list[tuple[Any, ...]]) -> list[Any]:
        found = self.outcomes(name, args)
        for value in found:
            if isinstance(value, RankFailure):
                raise value.error
        return found

    def outcomes(
        self, name: str, args: list[tuple[Any, ...]] | None = None, stopping: tuple[int, ...] = ()
    ) -> list[Any]:
        """Results or RankFailures, so that a test sees what each rank said; `stopping` ranks are asked to
        stop."""
        for rank, own in enumerate(args or [()] * self.world_size):
            self.pipes[rank].send((name, cloudpickle.dumps(own), rank in stopping))
        found = []
        for pipe in self.pipes:
            if not pipe.poll(ANSWER_S):
                raise TimeoutError(f"a rank did not answer {name} within {ANSWER_S} s")
            good, blob = pipe.recv()
            value = cloudpickle.loads(blob)
            found.append(value if good else RankFailure(*value))
        return found

    def method(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self.call("call_method", name, args, kwargs)

    def run(self, fn: Any, *args: Any) -> list[Any]:
        return self.call("run", cloudpickle.dumps(fn), args, {})


@functools.cache
def _pipes() -> list[Connection]:
    context = mp.get_context("spawn")
    pipes, processes = [], []
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for _ in range(MOST_RANKS):
        mine, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        pipes.append(mine)
        processes.append(process)

    def end() -> None:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(("exit", b"", False))
            process.join(5)
            if process.is_alive():
                process.kill()

    atexit.register(end)
    return pipes


@contextmanager
def ranks(world_size: int, module: Any = None, **config: Any) -> Iterator[Ranks]:
    """Ranks for a test; built around `module` if one is given."""
    engine = Ranks(_pipes()[:world_size], TrainConfig(threads=1, device="cpu", **config))
    try:
        if module is not None:
            engine.build(module)
        yield engine
    finally:
        for closed in engine.outcomes("close"):
            assert not isinstance(closed, RankFailure), closed

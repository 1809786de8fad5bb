"""Training ranks in processes of their own, without Ray: started once, rebuilt for each test."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import io
import itertools
import multiprocessing as mp
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle

from rlbench.errors import Stopped
from rlbench.workers.train.config import TrainConfig

ANSWER_S = 300.0  # the first verb imports torch; only a failure waits for as long


class RankFailure(Exception):
    """What one rank raised; `error` is the exception itself."""

    def __init__(self, error: BaseException, text: str) -> None:
        super().__init__(text)
        self.error = error


def _serve(pipe: Connection, said: str) -> None:
    """A rank's process: makes a TrainRank, runs its verbs, sends results back; `said`: where its last words go."""
    with open(said, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 2)  # what C++ says before it aborts
    faulthandler.enable()
    from rlbench.dispatch import context
    from rlbench.workers.train.rank import TrainRank

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
        if name == "close":  # groups in cycles keep a thread each that wakes a hundred times a second
            target = value = None
        _look_for_garbage_after(name)


MANY_OBJECTS = 20_000  # as DeepSpeed imports, or keeps of its engines: to look through them each time takes longer


def _look_for_garbage_after(name: str) -> None:
    """Set aside what a closed engine has left, and what a test's function has, if much: imports, most of all.

    FSDP, DeepSpeed and the loading of a checkpoint look for garbage, too, through all that is not set aside. What is,
    an engine also, stays to the end of the process: to look through it again takes half a second, and a copy of all
    that the fork shared.
    """
    if name == "close" or (name == "run" and len(gc.get_objects()) > MANY_OBJECTS):
        gc.collect()
        gc.freeze()


@dataclass(frozen=True)
class _Rank:
    pipe: Connection
    process: Any
    said: str


class Ranks:
    """The ranks of one engine; each verb runs on all of them and gives one result per rank."""

    def __init__(self, started: list[_Rank], config: TrainConfig) -> None:
        self.started = started
        self.pipes = [rank.pipe for rank in started]
        self.world_size = len(started)
        self.call_each("new", [(rank, self.world_size, config) for rank in range(self.world_size)])

    @property
    def alive(self) -> bool:
        """Whether all processes live; where one has ended, all were."""
        return all(rank.process.is_alive() for rank in self.started)

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
        found = []
        try:
            for rank, own in enumerate(args or [()] * self.world_size):
                self.pipes[rank].send((name, cloudpickle.dumps(own), rank in stopping))
            for pipe in self.pipes:
                if not pipe.poll(ANSWER_S):
                    raise TimeoutError(f"a rank did not answer {name} within {ANSWER_S} s")
                good, blob = pipe.recv()
                value = cloudpickle.loads(blob)
                found.append(value if good else RankFailure(*value))
        except (EOFError, OSError) as error:
            what = f"{error}" if isinstance(error, TimeoutError) else f"a rank's process ended in {name}"
            raise RuntimeError(f"{what}: {_last_words(self.started)}") from error
        return found

    def method(self, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        return self.call("call_method", name, args, kwargs)

    def run(self, fn: Any, *args: Any) -> list[Any]:
        return self.call("run", cloudpickle.dumps(fn), args, {})


_taken: set[int] = set()
"""The first rank of each two processes that an engine has."""


def forks() -> Any:
    """Return the context whose processes are forks of one that imports what ranks need, once."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.ranks_imports"])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # else numpy's import starts threads, which no fork has
    return context


def said_by_fork(script: str) -> str:
    """Return what a script prints in a fork of its own, in which nothing has run; what it raises is the failure."""
    mine, theirs = forks().Pipe()
    process = forks().Process(target=_execute, args=(theirs, script), daemon=True)
    process.start()
    theirs.close()
    try:
        assert mine.poll(ANSWER_S), "the fork said nothing"
        said, failure = mine.recv()
        assert failure is None, f"{failure}\n{said}"
        return str(said)
    finally:
        process.kill()
        process.join(5)


def _execute(pipe: Connection, script: str) -> None:
    """A fork's process: run a script and send back what it printed."""
    said, failure = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(said):
            exec(script, {"__name__": "__main__"})
    except BaseException:  # the test's failure
        failure = traceback.format_exc()
    pipe.send((said.getvalue(), failure))


@functools.cache
def _started(first: int) -> list[_Rank]:
    """Two processes, ranks `first` on, for all tests; after the end of one the next test starts others."""
    context = forks()
    folder = tempfile.mkdtemp(prefix="rlb-test-ranks-")
    started = []
    for rank in range(first, first + 2):
        mine, theirs = context.Pipe()
        said = f"{folder}/rank-{rank}.txt"
        process = context.Process(target=_serve, args=(theirs, said), daemon=True)
        process.start()
        theirs.close()  # else its end would not show here
        started.append(_Rank(mine, process, said))

    def end() -> None:
        for rank in started:
            with contextlib.suppress(OSError):
                rank.pipe.send(("exit", b"", False))
            rank.process.join(5)
            if rank.process.is_alive():
                rank.process.kill()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    return started


def _last_words(started: list[_Rank]) -> str:
    """How the processes ended and what they said; those that live are ended with them."""
    _started.cache_clear()
    found = []
    for number, rank in enumerate(started):
        rank.process.join(2)
        found.append(f"rank {number}: exit code {rank.process.exitcode}")
        if rank.process.exitcode not in (None, 0):
            found[-1] += "\n" + Path(rank.said).read_text(errors="replace")[-4000:]
        rank.process.kill()
        rank.process.join(5)
    return "\n".join(found)


@contextmanager
def ranks(world_size: int, module: Any = None, **config: Any) -> Iterator[Ranks]:
    """Ranks for a test, in processes that no other engine has; built around `module` if one is given."""
    given = TrainConfig(**{"threads": 1, "device": "cpu", **config})
    free = (first for first in itertools.count(0, 2) if first not in _taken)
    firsts = list(itertools.islice(free, -(-world_size // 2)))
    engine = Ranks([rank for first in firsts for rank in _started(first)][:world_size], given)
    _taken.update(firsts)
    try:
        if module is not None:
            engine.build(module)
        yield engine
    finally:
        _taken.difference_update(firsts)
        for closed in engine.outcomes("close") if engine.alive else ():
            assert not isinstance(closed, RankFailure), closed


class SameRanks:
    """Ranks around one module, by their number: built for the first test that asks, and set back after each.

    For tests that train, stop and spoil what a snapshot has: parameters, optimizer, random states, gradients that wait.
    """

    def __init__(self, make: Callable[[], Any], **config: Any) -> None:
        self._make, self._config = make, config
        self._built: dict[int, tuple[contextlib.ExitStack, Ranks, str]] = {}  # and the snapshot they go back to

    @contextmanager
    def __call__(self, world_size: int) -> Iterator[Ranks]:
        if world_size not in self._built:
            stack = contextlib.ExitStack()
            kept = stack.enter_context(tempfile.TemporaryDirectory(prefix="rlb-test-kept-")) + "/kept"
            made = stack.enter_context(ranks(world_size, self._make(), **self._config))
            self._built[world_size] = stack, made, kept
            made.call("write_snapshot", kept)
        _, made, kept = self._built[world_size]
        try:
            yield made
            made.call("read_snapshot", kept)
        except BaseException:  # a test that failed leaves nothing to the next
            self._built.pop(world_size)[0].close()
            raise

    def close(self) -> None:
        for stack, *_ in self._built.values():
            stack.close()
        self._built = {}


@contextmanager
def same_ranks(make: Callable[[], Any], **config: Any) -> Iterator[SameRanks]:
    """Give a fixture ranks that tests share; `make` makes their module, on meta."""
    made = SameRanks(make, **config)
    try:
        yield made
    finally:
        made.close()

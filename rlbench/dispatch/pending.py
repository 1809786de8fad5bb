"""A call under way: wait for it, watch it, stop it.

The waiting thread only polls: `ray.wait` with a short timeout, so that Ctrl-C is felt, output appears while the call
runs, and a dead worker ends the wait instead of hanging it.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlbench.dispatch.failures import remote_error
from rlbench.dispatch.peers import Peers
from rlbench.dispatch.protocol import Failure, Progress, Reply
from rlbench.dispatch.waiting import Outcome, Waiting
from rlbench.errors import (
    CallDropped,
    EngineError,
    RLBenchError,
    SessionError,
    StaleEpoch,
    Stopped,
    WorkerDied,
)
from rlbench.traces import remember

POLL_S = 0.2

Observer = Callable[[list[Progress]], None]
Again = Callable[[Sequence[int]], list[Any] | None]
"""Sends a call once more to these workers; None: not yet."""
Answer = Reply | BaseException
"""What a worker said, or why it says nothing any more."""


class Pending(Waiting):
    """A submitted call on all workers of one engine. `.result()`, `.stop()`, `.done`, and awaitable.

    `finish` turns the workers' values (one per rank) into the result, and a stopped call's values into its partial.
    `again` sends the call once more to workers that refused it because a control verb had raised the epoch.
    """

    def __init__(
        self,
        what: str,
        labels: Sequence[str],
        actors: Sequence[Any],
        refs: Sequence[Any],
        call_id: str,
        finish: Callable[[list[Any]], Any],
        observer: Observer | None = None,
        on_death: Callable[[int, BaseException], BaseException] | None = None,
        on_end: Callable[[], None] | None = None,
        collective: bool = True,
        again: Again | None = None,
    ) -> None:
        super().__init__(what)
        self.call_id = call_id
        self._labels, self._actors, self._refs = list(labels), list(actors), list(refs)
        self._finish, self._observer, self._on_death, self._on_end = finish, observer, on_death, on_end
        self._cursors = [0] * len(self._refs)
        self._collective = collective
        self._first_failed: list[int] | None = None
        self._peers = Peers(self._actors, self.call_id)
        self._again, self._stop_wanted = again, False
        self._lock = threading.RLock()  # whoever waits holds it

    @property
    def done(self) -> bool:
        """True once every worker has answered (or died)."""
        if self._outcome is not None:
            return True
        if not self._lock.acquire(blocking=False):
            return self._outcome is not None  # another thread waits for it
        try:
            return self._settled(0.0) is not None
        finally:
            self._lock.release()

    def stop(self) -> None:
        """Ask the call to stop; returns at once. `result()` then raises `Stopped` with what there is."""
        self._stop_wanted = True
        for actor in self._actors:
            actor.stop.remote(self.call_id)

    def result(self, timeout: float | None = None) -> Any:
        """Wait and return the result.

        Raises:
            TimeoutError: not done after `timeout` seconds; the call goes on.
            Stopped: it was stopped; `.partial` holds what there is.
            RemoteError, EngineError: the user's code, or ours, raised on a worker.
            WorkerDied: a worker process ended.
        """
        outcome = self._wait(timeout)
        if outcome is None:
            raise TimeoutError(f"{self.what} is still running after {timeout:g} s")
        value, error = outcome
        if error is not None:
            raise error.with_traceback(None)
        return value

    def _wait(self, timeout: float | None = None) -> Outcome | None:
        """Value and error, one of them None; None after `timeout` seconds."""
        begin = time.monotonic()
        if not self._lock.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            return self._outcome  # another thread waits for it
        try:
            if self._outcome is None:
                answers = self._settled(None if timeout is None else timeout - (time.monotonic() - begin))
                if answers is None:
                    return None
                self._end(self._collect(answers))
            return self._outcome
        finally:
            self._lock.release()

    def _end(self, outcome: Outcome) -> None:
        self._again = None  # it held the arguments
        if outcome[1] is not None:
            self._close_view()
        if self._on_end is not None:
            self._on_end()
        self._tell(outcome)

    def _close_view(self) -> None:
        """The call failed or was stopped: progress that stands still would look as if it went on."""
        close = getattr(self._observer, "close", None)
        if close is not None:
            close(None)

    def _settled(self, timeout: float | None) -> list[Answer] | None:
        """All workers' answers; None after `timeout` seconds. Sends again what an epoch's end kept from running."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._waited(deadline):
            answers = [_answer(ref) for ref in self._refs]
            refused = self._refused(answers)
            if not refused or self._again is None:
                return answers
            try:
                sent = self._again(refused)
            except SessionError as error:
                return [Reply(failure=Failure("SessionError", str(error), "", error))] * len(answers)
            if sent is not None:
                self._first_failed, self._peers = None, Peers(self._actors, self.call_id)
                for i, ref in zip(refused, sent, strict=True):
                    self._refs[i] = ref
                continue
            if self._stop_wanted and len(refused) == len(answers):
                return [Reply(stopped=True)] * len(answers)
            if deadline is not None and time.monotonic() > deadline:
                return None
            time.sleep(POLL_S)  # a control verb runs: after it
        return None

    def _refused(self, answers: Sequence[Answer]) -> list[int]:
        """Workers that did not run the call only because its epoch was over when it came, or for want of such a one."""
        errors = [a.failure.error if isinstance(a, Reply) and a.failure is not None else None for a in answers]
        if not any(isinstance(error, StaleEpoch) for error in errors):
            return []
        return [i for i, error in enumerate(errors) if isinstance(error, StaleEpoch | CallDropped)]

    def _waited(self, deadline: float | None) -> bool:
        """Wait until all have answered; False at the deadline."""
        import ray

        while True:
            left = POLL_S if deadline is None else min(POLL_S, max(0.0, deadline - time.monotonic()))
            ready, waiting = ray.wait(self._refs, num_returns=len(self._refs), timeout=left)
            if not waiting:
                return True
            early = [i for i, ref in enumerate(self._refs) if ref in ready and _failed(ref)]
            over = deadline is not None and time.monotonic() >= deadline
            if early or not over:
                self._look(waiting)
            if early:
                self._first_failed = early if self._first_failed is None else self._first_failed
                self._after_failure(early)
            if over:
                return False

    def _look(self, waiting: list[Any]) -> None:
        """Print what the running workers printed since the last look, and show their progress."""
        import ray

        running = [i for i, ref in enumerate(self._refs) if ref in waiting]
        polls = [self._actors[i].poll.remote(self.call_id, self._cursors[i]) for i in running]
        ready, _ = ray.wait(polls, num_returns=len(polls), timeout=1.0)
        seen: list[Progress] = []
        for i, poll in zip(running, polls, strict=True):
            if poll not in ready:
                continue
            with contextlib.suppress(ray.exceptions.RayActorError):  # its death shows on the call itself
                progress: Progress = ray.get(poll)
                if progress.output:
                    self._print(i, progress.output)
                    self._cursors[i] = progress.cursor
                self._peers.issued[i] = progress.issued
                seen.append(progress)
        if self._observer is not None and seen:
            self._observer(seen)

    def _after_failure(self, failed: Sequence[int]) -> None:
        """See to the others; where that takes long, show what failed meanwhile."""
        level = min(_issued(self._refs[i]) for i in failed) if self._collective else None
        if self._peers.go_on(failed, level):
            answer = _answer(self._refs[failed[0]])
            if isinstance(answer, Reply) and answer.failure is not None:
                said = f"{answer.failure.kind}: {answer.failure.message}"
                self._print(failed[0], f"{said}\n(it failed; the others were asked to stop, and are waited for)\n")

    def _collect(self, answers: Sequence[Answer]) -> Outcome:
        replies: list[tuple[int, Reply]] = []
        dead: list[tuple[int, BaseException]] = []
        for i, reply in enumerate(answers):
            if not isinstance(reply, Reply):
                dead.append((i, reply))
                continue
            if len(reply.output) > self._cursors[i]:
                self._print(i, reply.output[self._cursors[i] :])
                self._cursors[i] = len(reply.output)
            replies.append((i, reply))
        first = self._first_failed
        died = [(i, cause) for i, cause in dead if first is None or i in first or self._by_itself(cause)]
        if died:  # peers that fail for want of a dead rank are not the cause, also where they are heard of sooner
            return None, self._death(*died[0])
        failed = [(i, r.failure) for i, r in replies if r.failure is not None]
        if failed:
            causes = [f for f in failed if first is None or f[0] in first] or failed
            found = self._remote_error([f for f in causes if not _secondary(f[1])] or causes)
            apart = [i for i, failure in failed if getattr(failure.error, "ends_rank", False)]
            if apart and not self._peers.released:
                self._peers.end(apart)
                return None, self._ended_error(found, apart[0], "ended, as it holds another state than the others")
            return None, self._released_error(found) if self._peers.released else found
        if dead:
            return None, self._death(*dead[0])
        values = [r.value for _, r in replies]
        stopped = any(r.stopped for _, r in replies)
        if stopped and all(value is None for value in values):
            return None, Stopped(f"{self.what} stopped")
        try:
            value = self._finish(values)
        except (Exception, Stopped) as error:
            return None, error
        if stopped:
            return None, Stopped(f"{self.what} stopped", value)
        return value, None

    def _released_error(self, cause: BaseException) -> BaseException:
        """The failed rank was ended, so the engine lost it: say both."""
        first = self._first_failed[0] if self._first_failed else 0
        return self._ended_error(cause, first, "ended to release the others from a collective that it never joins")

    def _ended_error(self, cause: BaseException, rank: int, why: str) -> BaseException:
        lost = self._death(rank, EngineError(why))
        error = type(lost)(f"{cause}\n  {lost}")
        if isinstance(cause, RLBenchError) and isinstance(error, RLBenchError):
            error.user_line, error.full_traceback = cause.user_line, remember(cause.full_traceback)
        return error

    def _by_itself(self, cause: BaseException) -> bool:
        """Whether a worker died that we did not end for the others."""
        from ray.exceptions import ActorDiedError

        return isinstance(cause, ActorDiedError) and not self._peers.released

    def _death(self, rank: int, cause: BaseException) -> BaseException:
        if self._on_death is not None:
            return self._on_death(rank, cause)
        return WorkerDied(f"{self._labels[rank]} died: {cause}")

    def _remote_error(self, failed: list[tuple[int, Failure]]) -> BaseException:
        return remote_error([(self._labels[i], failure) for i, failure in failed])

    def _print(self, i: int, text: str) -> None:
        lines = text.splitlines(keepends=True)
        sys.stdout.write("".join(f"[{self._labels[i]}] {line}" for line in lines))
        if lines and not lines[-1].endswith("\n"):
            sys.stdout.write("\n")
        sys.stdout.flush()


@contextlib.contextmanager
def sigint_held() -> Iterator[None]:
    """Deliver Ctrl-C only after the block: a call must reach all ranks or none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if arrived:
        raise KeyboardInterrupt


def _answer(ref: Any) -> Answer:
    import ray

    try:
        reply: Reply = ray.get(ref)
        return reply
    except ray.exceptions.RayTaskError as error:  # the worker lives: its answer could not be sent
        return Reply(failure=Failure(type(error.cause).__name__, f"{error.cause}", str(error)))
    except ray.exceptions.RayError as error:
        return error  # type: ignore[no-any-return]


def _failed(ref: Any) -> bool:
    """Whether a worker failed in the call. One that refused it never began, so no peer waits for it in a collective."""
    import ray

    try:
        failure = ray.get(ref).failure
    except ray.exceptions.RayError:
        return True
    return failure is not None and not isinstance(failure.error, CallDropped | StaleEpoch)


def _issued(ref: Any) -> int:
    """Collectives that a worker which failed had issued; 0 of one that died. One out of reach may live, and issue those
    that its peers wait for: no number of theirs is more."""
    answer = _answer(ref)
    if isinstance(answer, Reply):
        return answer.issued
    return sys.maxsize if _out_of_reach(answer) else 0


def _out_of_reach(answer: BaseException) -> bool:
    from ray.exceptions import ActorUnavailableError

    return isinstance(answer, ActorUnavailableError)


def _secondary(failure: Failure) -> bool:
    """True where a rank gave up only because a peer had failed."""
    return bool(getattr(failure.error, "secondary", False))

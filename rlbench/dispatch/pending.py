"""A call under way: wait for it, watch it, stop it. The waiting thread only polls, so that Ctrl-C is felt, output
appears while the call runs, and a dead worker ends the wait."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlbench.dispatch.chain import Outcome, Waiting
from rlbench.dispatch.failures import remote_error
from rlbench.dispatch.peers import Peers
from rlbench.dispatch.protocol import Failure, Progress, Reply
from rlbench.errors import CallDropped, EngineError, RLBenchError, SessionError, StaleEpoch, Stopped
from rlbench.traces import remember

POLL_S = 0.2

Observer = Callable[[list[Progress]], None]
Again = Callable[[Sequence[int]], list[Any] | None]
"""Sends a call once more to these workers; None: not yet."""
Answer = Reply | BaseException
"""What a worker said, or why it says nothing any more."""


class Pending(Waiting):
    """A submitted call on all workers of one engine. `finish` turns the workers' values into the result, and a stopped
    call's into its partial; `again` sends the call once more to workers that refused it for a control verb's epoch."""

    def __init__(
        self,
        what: str,
        labels: Sequence[str],
        actors: Sequence[Any],
        refs: Sequence[Any],
        call_id: str,
        finish: Callable[[list[Any]], Any],
        observer: Observer | None,
        on_death: Callable[[int, BaseException], BaseException],
        collective: bool,
        again: Again,
    ) -> None:
        super().__init__(what)
        self._call_id = call_id
        self._labels, self._actors, self._refs = list(labels), list(actors), list(refs)
        self._finish, self._observer, self._on_death = finish, observer, on_death
        self._cursors = [0] * len(self._refs)
        self._collective = collective
        self._first_failed: list[int] | None = None
        self._peers = Peers(self._actors, call_id)
        self._again: Again | None = again
        self._lock = threading.RLock()  # whoever waits holds it

    @property
    def done(self) -> bool:
        if self._outcome is not None or not self._lock.acquire(blocking=False):  # another thread waits for it
            return self._outcome is not None
        try:
            return self._settled(0.0) is not None
        finally:
            self._lock.release()

    def stop(self) -> None:
        self._stop_wanted = True
        for actor in self._actors:
            actor.stop.remote(self._call_id)

    def _wait(self, timeout: float | None = None) -> Outcome | None:
        begin = time.monotonic()
        if not self._lock.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            return self._outcome  # another thread waits for it
        try:
            if self._outcome is None:
                answers = self._settled(None if timeout is None else timeout - (time.monotonic() - begin))
                if answers is None:
                    return None
                self._end(*self._collect(answers))
            return self._outcome
        finally:
            self._lock.release()

    def _end(self, value: Any, error: BaseException | None) -> None:
        self._again = None  # it held the arguments
        if error is not None:
            error = error.with_traceback(None)
            close = getattr(self._observer, "close", None)
            if close is not None:  # progress that stands still would look as if it went on
                close(None)
        self._tell((value, error))

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
                self._first_failed, self._peers = None, Peers(self._actors, self._call_id)
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
        import ray

        while True:
            left = POLL_S if deadline is None else min(POLL_S, max(0.0, deadline - time.monotonic()))
            ready, waiting = ray.wait(self._refs, num_returns=len(self._refs), timeout=left)
            if not waiting:
                return True
            early = [i for i, ref in enumerate(self._refs) if ref in ready and _failed(_answer(ref))]
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
        polls = [self._actors[i].poll.remote(self._call_id, self._cursors[i]) for i in running]
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
        level = min(_issued(self._refs[i]) for i in failed) if self._collective else None
        if self._peers.go_on(failed, level):
            answer = _answer(self._refs[failed[0]])
            if isinstance(answer, Reply) and answer.failure is not None:
                text = f"{answer.failure.kind}: {answer.failure.message}"
                self._print(failed[0], f"{text}\n(it failed; the others were asked to stop, and are waited for)\n")

    def _collect(self, answers: Sequence[Answer]) -> Outcome:
        from ray.exceptions import ActorDiedError

        replies = [(i, answer) for i, answer in enumerate(answers) if isinstance(answer, Reply)]
        dead = [(i, answer) for i, answer in enumerate(answers) if not isinstance(answer, Reply)]
        for i, reply in replies:
            if len(reply.output) > self._cursors[i]:
                self._print(i, reply.output[self._cursors[i] :])
                self._cursors[i] = len(reply.output)
        first, ours = self._first_failed, self._peers.released  # whether we ended workers for the others
        died = [(i, e) for i, e in dead if first is None or i in first or (isinstance(e, ActorDiedError) and not ours)]
        if died:  # peers that fail for want of a dead rank are not the cause, also where they are heard of sooner
            return None, self._on_death(*died[0])
        stopped = any(reply.stopped for _, reply in replies)
        failed = [(i, r.failure) for i, r in replies if r.failure is not None]
        if stopped:  # before all ranks had it: who hears of the stop later was told that the call is dropped
            failed = [(i, failure) for i, failure in failed if not isinstance(failure.error, CallDropped)]
        if failed:
            return None, self._failure(failed)
        if dead:
            return None, self._on_death(*dead[0])
        values = [reply.value for _, reply in replies]
        if stopped and all(value is None for value in values):
            return None, Stopped(f"{self.what} stopped")
        try:
            value = self._finish(values)
        except (Exception, Stopped) as error:
            return None, error
        return (None, Stopped(f"{self.what} stopped", value)) if stopped else (value, None)

    def _failure(self, failed: list[tuple[int, Failure]]) -> BaseException:
        """Name the cause, not the peers that gave up for it, and the rank that was ended for it."""
        first = self._first_failed or []
        causes = [one for one in failed if not getattr(one[1].error, "secondary", False)] or failed
        causes = [one for one in causes if one[0] in first] or causes
        cause = remote_error([(self._labels[i], failure) for i, failure in causes])
        apart = [i for i, failure in failed if getattr(failure.error, "ends_rank", False)]
        if self._peers.released:
            rank, why = (first or [0])[0], "ended to release the others from a collective that it never joins"
        elif apart:
            self._peers.end(apart)
            rank, why = apart[0], "ended, as it holds another state than the others"
        else:
            return cause
        lost = self._on_death(rank, EngineError(why))
        error = type(lost)(f"{cause}\n  {lost}")
        if isinstance(cause, RLBenchError) and isinstance(error, RLBenchError):
            error.user_line, error.full_traceback = cause.user_line, remember(cause.full_traceback)
        return error

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
        return Reply.received(ray.get(ref))
    except ray.exceptions.RayTaskError as error:  # the worker lives: its answer could not be sent
        return Reply(failure=Failure(type(error.cause).__name__, f"{error.cause}", str(error)))
    except ray.exceptions.RayError as error:
        return error


def _failed(answer: Answer) -> bool:
    """Whether a worker failed in the call. One that refused it never began, so no peer waits for it in a collective."""
    if not isinstance(answer, Reply):
        return True
    return answer.failure is not None and not isinstance(answer.failure.error, CallDropped | StaleEpoch)


def _issued(ref: Any) -> int:
    """Collectives that a failed worker had issued; 0 of a dead one, all of one out of reach, which may live."""
    from ray.exceptions import ActorUnavailableError

    answer = _answer(ref)
    if isinstance(answer, Reply):
        return answer.issued
    return sys.maxsize if isinstance(answer, ActorUnavailableError) else 0

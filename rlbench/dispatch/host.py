"""The actor around every worker: the *compute* lane runs one call at a time on one thread, the *control* lane answers
while it is busy. What the worker does is a plain object, the target, which knows nothing of Ray."""

from __future__ import annotations

import collections
import contextlib
import io
import itertools
import os
import pkgutil
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, TextIO

import ray

from rlbench.dispatch import context
from rlbench.dispatch.protocol import Failure, Progress, Reply, Ticket
from rlbench.errors import CallDropped, EngineError, RLBenchError, StaleEpoch, Stopped
from rlbench.traces import calling_line, user_line
from rlbench.units import format_bytes
from rlbench.user_code import user_code

REGISTER_LIMIT_S = 60.0  # a busy machine delivers late; a driver that died while it called reached some ranks alone
CLAIM_LIMIT_S = 300.0  # the first worker may be slow; one that died raises at once
KEPT_OUTPUT = 1 << 20
KEPT_MESSAGE = 4000
KEPT_QUEUES = 8
KEPT_CALLS = 64
ORPHAN_CHECKS = 6
ORPHAN_INTERVAL_S = 10.0
NO_GPU = ": there is no GPU here; name no device but the rank's own, `device` in a cell and `self.device` in a module"
_end_process = os._exit


class Host:
    """One worker process, on `cluster`. `target` names a class as `module:Class`; `args` go to its constructor."""

    def __init__(
        self, name: str, monitor: str, env: dict[str, str], target: str, args: tuple[Any, ...], cluster: str = ""
    ) -> None:
        os.environ.update(env)  # before torch is imported: thread counts are read once
        self._name, self._monitor, self._cluster = name, monitor, cluster
        self._epoch = 0
        self._context: context.CallContext | None = None
        self._stopped_ids: set[str] = set()
        self._ended_ids: collections.deque[str] = collections.deque(maxlen=KEPT_CALLS)
        self._queues: dict[str, Iterator[int]] = {}
        self._lock = threading.Lock()
        self._output = _Output(sys.stdout)
        sys.stdout = self._output
        sys.argv = [name]  # a parser in a user's code must not read Ray's
        _tell_who_exits()
        self._target = pkgutil.resolve_name(target)(*args)
        threading.Thread(target=self._end_when_orphaned, daemon=True).start()

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def call(self, sent: bytes, *beside: Any) -> Reply | bytes:
        """Run what a ticket asks for, with the arguments `beside` it; never raises for the target. Returns the reply as
        it travels."""
        ticket, name, args, kwargs = Ticket.received(sent, beside)
        try:
            self._admit(ticket)
        except Stopped:
            reply = Reply(stopped=True)
            self._forget(ticket)
        except Exception as error:
            reply = Reply(failure=_failure(error))
        else:
            reply = self._run(ticket, name, args, kwargs)
        self._tell_end(ticket, reply)
        return reply.sent()

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def control(self, name: str, *args: Any) -> Any:
        """Call one of the target's control methods, which never block."""
        if name not in self._target.CONTROL:
            raise EngineError(f"{name} is not a control method of {type(self._target).__name__}")
        self._settle()
        with user_code():  # a property that is looked at, say
            return getattr(self._target, name)(*args)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def poll(self, call_id: str, cursor: int) -> Progress:
        """Return what call `call_id` printed from `cursor` on, and the progress it reports, while it runs."""
        running = self._context
        if running is None or running.call_id != call_id:
            return Progress()
        text, end = self._output.since(cursor)
        return Progress(text, end, dict(running.progress), self._issued_in(running))

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def stop(self, call_id: str) -> None:
        """Ask call `call_id`, running or still queued, to stop; a late stop hits nothing."""
        with self._lock:
            if call_id in self._ended_ids:
                return
            self._stopped_ids.add(call_id)
            if self._context is not None and self._context.call_id == call_id:
                self._context.request_stop()

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def running(self) -> str | None:
        """Name of the method that the compute lane executes now; None where it is idle."""
        running = self._context
        return None if running is None else running.name

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def claim(self, call_id: str, total: int, count: int) -> list[int]:
        """Hand out the next indices of a call's shared work; the first worker of an engine serves all of them."""
        with self._lock:
            claimed = list(itertools.islice(self._queues.setdefault(call_id, iter(range(total))), count))
            while len(self._queues) > KEPT_QUEUES:  # calls of two drivers may reach the replicas in different orders
                del self._queues[next(iter(self._queues))]
            return claimed

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def adopt(self, epoch: int) -> None:
        """Refuse every driver older than `epoch` from now on."""
        self._epoch = max(self._epoch, epoch)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def pid(self) -> int:
        """This process."""
        return os.getpid()

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def leave(self) -> None:
        """End this process at once: peers that wait for it in a collective are released by its exit alone."""
        threading.Timer(0.05, _end_process, (1,)).start()

    def _admit(self, ticket: Ticket) -> None:
        if ticket.epoch < self._epoch:
            raise StaleEpoch("another notebook drives this session now; take over with rb.attach(name, take_over=True)")
        self._epoch = ticket.epoch
        register = getattr(self._target, "register", None)
        if ticket.world == 1 or register is None:
            return
        stopped = lambda: ticket.call_id in self._stopped_ids  # noqa: E731 - by a person, or as another rank has died
        if not register(ticket.epoch, ticket.seq, REGISTER_LIMIT_S, stopped):
            if stopped():
                raise Stopped(f"{ticket.call_id} was stopped before all ranks had it, so none ran it")
            raise CallDropped(
                f"not all {ticket.world} ranks received the call within {REGISTER_LIMIT_S:g} s, so none ran it; "
                "call again (a rank that is still busy with an earlier call shows in the session's card)"
            )

    def _run(self, ticket: Ticket, name: str, args: Iterable[Any], kwargs: dict[str, Any]) -> Reply:
        mine = context.CallContext(ticket.call_id, ticket.epoch, self._claimer(ticket), name=name)
        mine.worker, mine.cluster = self._name, self._cluster
        mine.issued_before = self._issued() if ticket.world > 1 else None
        with self._lock:
            if ticket.call_id in self._stopped_ids:
                mine.request_stop()
            self._context = mine
        self._output.begin()
        context.set_current(mine)
        value, failure, stopped = None, None, False
        begins = getattr(self._target, "begins", None)
        try:
            if begins is not None:
                begins(name)
            with user_code():
                value = getattr(self._target, name)(*args, **kwargs)
        except Stopped as error:
            stopped, value = True, error.partial
        except Exception as error:
            failure = _failure(error)
        finally:
            context.set_current(None)
            with self._lock:
                self._context = None
            self._forget(ticket)
        return Reply(value, failure, stopped, self._output.end(), self._issued_in(mine))

    def _forget(self, ticket: Ticket) -> None:
        """A stop that comes now hits nothing."""
        with self._lock:
            self._stopped_ids.discard(ticket.call_id)
            self._ended_ids.append(ticket.call_id)

    def _settle(self) -> None:
        """Have the target do what calls left for later, where none runs; none begins meanwhile."""
        settle = getattr(self._target, "settle", None)
        if settle is None:
            return
        with self._lock:
            if self._context is None:
                settle()

    def _issued(self) -> int:
        """Collectives the worker has issued so far, of targets that have peers."""
        count = getattr(self._target, "issued_collectives", None)
        return 0 if count is None else int(count())

    def _issued_in(self, call: context.CallContext) -> int:
        """Collectives the worker has issued in a call; 0 of one that no peer runs as well."""
        return 0 if call.issued_before is None else self._issued() - call.issued_before

    def _claimer(self, ticket: Ticket) -> Any:
        if not ticket.queue:
            return None
        if ticket.queue == self._name:
            return lambda count: Host.claim(self, ticket.call_id, ticket.queue_total, count)
        server = ray.get_actor(ticket.queue)
        return lambda count: ray.get(
            server.claim.remote(ticket.call_id, ticket.queue_total, count), timeout=CLAIM_LIMIT_S
        )

    def _tell_end(self, ticket: Ticket, reply: Reply) -> None:
        """The driver may be dead by now, so it is the worker that says that a call is over, and how."""
        if not ticket.tracked:
            return
        cause = None
        if reply.failure is not None and not isinstance(reply.failure.error, StaleEpoch):
            cause = {"kind": reply.failure.kind, "message": reply.failure.message[:KEPT_MESSAGE]}
        with contextlib.suppress(ValueError):  # no monitor: the session is ending, nobody shows its calls
            ray.get_actor(self._monitor).end.remote(ticket.call_id, ticket.epoch, cause)

    def _end_when_orphaned(self) -> None:
        """End this process once the cluster says, again and again, that the session's monitor is gone for good."""
        missing = 0
        while missing < ORPHAN_CHECKS:
            time.sleep(ORPHAN_INTERVAL_S)
            try:
                ray.get_actor(self._monitor)
                missing = 0
            except ValueError:
                missing += 1
        close = getattr(self._target, "close", None)
        if close is not None:
            close()
        _end_process(0)


class _Output(io.TextIOBase):
    """Standard output of the worker: what a call prints is kept for its cell, and goes to the log as well."""

    def __init__(self, log: TextIO) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._text: str | None = None

    def isatty(self) -> bool:
        """Return False, also where user code has closed it."""
        return False

    def write(self, text: str) -> int:
        with self._lock:
            if self._text is not None and len(self._text) < KEPT_OUTPUT:
                self._text += text
                if len(self._text) >= KEPT_OUTPUT:
                    self._text += (
                        f"\n… more than {format_bytes(KEPT_OUTPUT)} printed; the rest is in the worker's log\n"
                    )
        return self._log.write(text)

    def flush(self) -> None:
        self._log.flush()

    def begin(self) -> None:
        """Start keeping what is written."""
        with self._lock:
            self._text = ""

    def since(self, cursor: int) -> tuple[str, int]:
        """Return what was written from `cursor` on, and the cursor behind it."""
        with self._lock:
            text = self._text or ""
            return text[cursor:], len(text)

    def end(self) -> str:
        """Stop keeping; return all of it."""
        with self._lock:
            text, self._text = self._text or "", None
            return text


def _tell_who_exits() -> None:
    """Have `os._exit` say by its last words which line called it: nothing else tells how a process ended."""
    own = os.getpid()

    def end(status: int) -> NoReturn:
        if os.getpid() == own:  # no child that was forked
            line = calling_line()
            where = "" if line is None else f" in {line.function} at {line.file}:{line.line}"
            print(f"os._exit({status}) was called{where}", file=sys.stderr, flush=True)
        _end_process(status)

    os._exit = end


def _failure(error: BaseException) -> Failure:
    own = error if isinstance(error, RLBenchError) else None
    message = str(error) + (NO_GPU if own is None and "not compiled with CUDA" in str(error) else "")
    return Failure(type(error).__name__, message, "".join(traceback.format_exception(error)), own, user_line(error))

"""The actor around every worker: two lanes, one total order of calls, captured output, results kept until acknowledged.

The *compute* lane runs one call at a time on one thread; the *control* lane answers while it is busy. What the worker
does is a plain object, the target, which knows nothing of Ray.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from typing import Any, NoReturn, TextIO

import ray

from rlbench.dispatch import context
from rlbench.dispatch.protocol import Failure, Progress, Reply, Ticket
from rlbench.errors import CallDropped, EngineError, RLBenchError, StaleEpoch, Stopped
from rlbench.traces import calling_line, user_line
from rlbench.units import format_bytes
from rlbench.user_code import user_code

REGISTER_LIMIT_S = 5.0
KEPT_OUTPUT = 1 << 20
KEPT_MESSAGE = 4000
KEPT_QUEUES = 8
ORPHAN_CHECKS = 6
ORPHAN_INTERVAL_S = 10.0
WITHOUT_CUDA = "not compiled with CUDA"
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
        self._kept: dict[str, Reply] = {}
        self._queues: dict[str, _Queue] = {}
        self._lock = threading.Lock()
        self._output = _Output(sys.stdout)
        sys.stdout = self._output
        sys.argv = [name]  # a parser in a user's code must not read Ray's
        _tell_who_exits()
        module, _, attribute = target.partition(":")
        self._target = getattr(importlib.import_module(module), attribute)(*args)
        threading.Thread(target=self._end_when_orphaned, args=(monitor,), daemon=True).start()

    @ray.method(concurrency_group="compute")  # type: ignore[untyped-decorator]
    def call(self, ticket: Ticket, name: str, keywords: tuple[str, ...], *values: Any) -> Reply:
        """Run `target.name(*values)`, the last `len(keywords)` values by keyword; never raises for the target."""
        self._forget(ticket.acknowledged)
        try:
            self._admit(ticket)
        except Exception as error:
            reply = Reply(failure=_failure(error))
            self._tell_end(ticket, reply)
            return reply
        split = len(values) - len(keywords)
        reply = self._run(ticket, name, values[:split], dict(zip(keywords, values[split:], strict=True)))
        with self._lock:
            self._kept[ticket.call_id] = reply
        self._tell_end(ticket, reply)
        return reply

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def control(self, name: str, *args: Any) -> Any:
        """Call one of the target's control methods, which never block."""
        if name not in self._target.CONTROL:
            raise EngineError(f"{name} is not a control method of {type(self._target).__name__}")
        with user_code():  # a property that is looked at, say
            return getattr(self._target, name)(*args)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def poll(self, call_id: str, cursor: int) -> Progress:
        """What call `call_id` printed from `cursor` on, and the progress it reports, while it runs."""
        running = self._context
        if running is None or running.call_id != call_id:
            return Progress(known=call_id in self._kept)
        text, end = self._output.since(cursor)
        return Progress(True, text, end, dict(running.progress), self._issued() - running.issued_before)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def stop(self, call_id: str) -> bool:
        """Ask call `call_id`, running or still queued, to stop; a late stop hits nothing. True if it was running."""
        with self._lock:
            if call_id in self._kept:
                return False
            self._stopped_ids.add(call_id)
            running = self._context
            if running is None or running.call_id != call_id:
                return False
            running.request_stop()
            return True

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def running(self) -> str | None:
        """Name of the method that the compute lane executes now; None where it is idle."""
        running = self._context
        return None if running is None else running.name

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def claim(self, call_id: str, total: int, count: int) -> list[int]:
        """Hand out the next indices of a call's shared work; the first worker of an engine serves all of them."""
        with self._lock:
            queue = self._queues.setdefault(call_id, _Queue(total))
            taken = queue.take(count)
            while len(self._queues) > KEPT_QUEUES:  # calls of two drivers may reach the replicas in different orders
                del self._queues[next(iter(self._queues))]
            return taken

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def adopt(self, epoch: int) -> None:
        """Refuse every driver older than `epoch` from now on."""
        self._epoch = max(self._epoch, epoch)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def result(self, call_id: str) -> Reply | None:
        """The kept result of a finished call, for a driver that comes back; None while it runs or once superseded."""
        return self._kept.get(call_id)

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
        if ticket.world > 1 and register is not None and not register(ticket.epoch, ticket.seq, REGISTER_LIMIT_S):
            raise CallDropped(
                f"not all {ticket.world} ranks received the call within {REGISTER_LIMIT_S:g} s, so none ran it; "
                "call again (a rank that is still busy with an earlier call shows in the session's card)"
            )

    def _run(self, ticket: Ticket, name: str, args: Iterable[Any], kwargs: dict[str, Any]) -> Reply:
        mine = context.CallContext(
            ticket.call_id,
            ticket.epoch,
            ticket.seq,
            self._claimer(ticket),
            name=name,
            worker=self._name,
            cluster=self._cluster,
            issued_before=self._issued(),
        )
        with self._lock:
            if ticket.call_id in self._stopped_ids:
                mine.request_stop()
            self._context = mine
        self._output.begin()
        context.set_current(mine)
        begin = time.perf_counter()
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
                self._stopped_ids.discard(ticket.call_id)
        issued = self._issued() - mine.issued_before
        return Reply(value, failure, stopped, self._output.end(), time.perf_counter() - begin, issued)

    def _issued(self) -> int:
        """Collectives the worker has issued so far, of targets that have peers."""
        count = getattr(self._target, "issued_collectives", None)
        return 0 if count is None else int(count())

    def _claimer(self, ticket: Ticket) -> Any:
        if not ticket.queue:
            return None
        if ticket.queue == self._name:
            return lambda count: Host.claim(self, ticket.call_id, ticket.queue_total, count)
        server = ray.get_actor(ticket.queue)
        return lambda count: ray.get(server.claim.remote(ticket.call_id, ticket.queue_total, count), timeout=60)

    def _tell_end(self, ticket: Ticket, reply: Reply) -> None:
        """The driver may be dead by now, so it is the worker that says that a call is over, and how."""
        if not ticket.tracked:
            return
        failure = reply.failure
        said = (
            None
            if failure is None or isinstance(failure.error, StaleEpoch)
            else {"kind": failure.kind, "message": failure.message[:KEPT_MESSAGE]}
        )
        try:
            ray.get_actor(self._monitor).end.remote(ticket.call_id, ticket.epoch, said)
        except ValueError:
            return  # no monitor: the session is ending, nobody shows its calls

    def _forget(self, acknowledged: str) -> None:
        with self._lock:
            self._kept.pop(acknowledged, None)
            while len(self._kept) > 1:  # superseded: nobody will fetch more than the last
                self._kept.pop(next(iter(self._kept)))

    def _end_when_orphaned(self, monitor: str) -> None:
        """End this process once the cluster says, again and again, that the session's monitor is gone for good."""
        missing = 0
        while missing < ORPHAN_CHECKS:
            time.sleep(ORPHAN_INTERVAL_S)
            try:
                ray.get_actor(monitor)
                missing = 0
            except ValueError:
                missing += 1
        close = getattr(self._target, "close", None)
        if close is not None:
            close()
        _end_process(0)


class _Queue:
    def __init__(self, total: int) -> None:
        self._next, self._total = 0, total

    def take(self, count: int) -> list[int]:
        first, self._next = self._next, min(self._next + count, self._total)
        return list(range(first, self._next))


class _Output(io.TextIOBase):
    """Standard output of the worker: what a call prints is kept for its cell, and goes to the log as well."""

    def __init__(self, log: TextIO) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._text: str | None = None

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

    def isatty(self) -> bool:
        return False

    def begin(self) -> None:
        """Start keeping what is written."""
        with self._lock:
            self._text = ""

    def since(self, cursor: int) -> tuple[str, int]:
        """What was written from `cursor` on, and the cursor behind it."""
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

    def told(status: int) -> NoReturn:
        if os.getpid() == own:  # no child that was forked
            line = calling_line()
            where = "" if line is None else f" in {line.function} at {line.file}:{line.line}"
            print(f"os._exit({status}) was called{where}", file=sys.stderr, flush=True)
        _end_process(status)

    os._exit = told


def _failure(error: BaseException) -> Failure:
    text = "".join(traceback.format_exception(error))
    own = error if isinstance(error, RLBenchError) else None
    message = str(error) + (NO_GPU if WITHOUT_CUDA in str(error) and own is None else "")
    return Failure(type(error).__name__, message, text, own, user_line(error))

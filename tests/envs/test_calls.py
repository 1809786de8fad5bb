"""Calls beside the generating thread: bounded, timed, and never waited for once given up."""

import asyncio
import threading

import pytest

from rlbench.envs.calls import EnvCalls
from tests.clock import LIMIT_S, until


@pytest.fixture
def made():
    running = []

    def make(**options):
        running.append(EnvCalls(**options))
        return running[-1]

    yield make
    for calls in running:
        calls.close()


def until_done(calls, count):
    over = []

    def all_over():
        over.extend(calls.finished(0.05))
        return len(over) >= count

    until(all_over, what=lambda: [call.key for call in over])
    return {call.key: call for call in over}


def test_plain_and_async_calls_give_their_value_or_their_error(made):
    calls = made()

    async def value():
        await asyncio.sleep(0.01)
        return 3

    async def fault():
        raise LookupError("x")

    calls.start("plain", lambda: 2)
    calls.start("async", value)
    calls.start("bad", lambda: 1 / 0)
    calls.start("async bad", fault)
    calls.start("exit", lambda: (_ for _ in ()).throw(SystemExit(3)))
    found = until_done(calls, 5)
    assert (found["plain"].value, found["async"].value) == (2, 3)
    kinds = {key: type(call.error).__name__ for key, call in found.items() if call.error is not None}
    assert kinds == {"bad": "ZeroDivisionError", "async bad": "LookupError", "exit": "SystemExit"}
    assert calls.pending == 0


def test_at_most_so_many_threads_and_any_number_of_awaitables(made):
    calls, now, most, lock = made(threads=3), [0], [0], threading.Lock()

    def work():
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        until(lambda: most[0] == 3)  # as many as may be at the same time
        with lock:
            now[0] -= 1

    for key in range(12):
        calls.start(key, work)
    assert len(until_done(calls, 12)) == 12 and most[0] == 3

    together = []

    async def meet():
        together.append(1)
        while len(together) < 20:
            await asyncio.sleep(0.005)

    for key in range(20):
        calls.start(key, meet)
    assert len(until_done(calls, 20)) == 20  # none could end before all had begun


@pytest.mark.slow
def test_a_call_that_takes_too_long_is_given_up_and_makes_room(made):
    calls, free, late = made(timeout_s=3, threads=1), threading.Event(), []
    calls.start("hangs", free.wait, late=lambda: late.append("closed"))
    calls.start("next", lambda: 1)
    found = until_done(calls, 2)
    assert isinstance(found["hangs"].error, TimeoutError) and found["hangs"].given_up and found["next"].value == 1
    assert late == []  # it still runs: its environment is closed when it is out of it
    free.set()
    until(lambda: late)
    assert late == ["closed"] and calls.finished() == []


def test_what_is_given_up_is_never_handed_out(made, capfd):
    calls, late = made(threads=1), []
    awaits, runs, free = threading.Event(), threading.Event(), threading.Event()

    async def sleep():
        awaits.set()
        await asyncio.sleep(600)

    calls.start("async", sleep, late=lambda: late.append("async"))
    assert awaits.wait(LIMIT_S)
    calls.start("runs", lambda: runs.set() or free.wait(), late=lambda: 1 / 0)
    calls.start("waits", lambda: late.append("never"))
    assert runs.wait(LIMIT_S)
    assert sorted(calls.give_up(lambda key: False)) == ["async", "runs"]
    calls.close()
    free.set()
    printed = []
    until(lambda: printed.append(capfd.readouterr().out) or "given up raised ZeroDivisionError" in "".join(printed))
    until(lambda: late)
    assert late == ["async"] and calls.finished() == []

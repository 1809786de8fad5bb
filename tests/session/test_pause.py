"""Pausing generation: nothing is lost, nothing computed meanwhile, and what comes out is what would have come out."""

import os
import threading
import time
from pathlib import Path

import pytest

from rlbench.dispatch.context import CallContext
from rlbench.errors import Stopped
from rlbench.monitor import client
from rlbench.tiny import tasks
from rlbench.workers.replica.state import Gate
from tests.clock import until

# -- the gate


def test_an_open_gate_lets_through_what_was_not_asked_to_stop():
    gate, context = Gate(), CallContext()
    assert gate.passes(context) and not gate.closed and context.progress == {}
    context.request_stop()
    assert not gate.passes(context)


@pytest.mark.parametrize("stop", [False, True])
def test_a_closed_gate_holds_until_it_opens_or_the_call_is_to_stop(stop):
    gate, context, passed = Gate(), CallContext(), []
    gate.close()
    thread = threading.Thread(target=lambda: passed.append(gate.passes(context)), daemon=True)
    thread.start()
    until(lambda: context.progress == {"paused": True})
    assert passed == [] and gate.closed
    (context.request_stop if stop else gate.open)()
    thread.join(120)
    assert passed == [not stop] and context.progress == {"paused": False}


# -- in a session


@pytest.fixture(autouse=True)
def resumed(request):
    """No test leaves a session paused."""
    yield
    if "session" in request.fixturenames:
        request.getfixturevalue("session").resume()


def progress(session):
    """What the one replica reports of the running rollout."""
    running = client.ask(client.find(session.name), "/state")["running"]
    return next((told for call in running for told in call["progress"]), {})


def status(session):
    return session.inference.control("status")[0]


def cpu_ticks(pid):
    """User and system time a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def paused_midway(session, begin):
    """Begin rollouts until one is seen under way, and pause it: on a busy machine one may end between two looks."""
    pending = begin()
    until(lambda: pending.done or progress(session).get("tokens", 0) > 0)
    session.pause()
    until(lambda: pending.done or progress(session).get("paused"))
    if not pending.done:
        return pending
    session.resume()
    return paused_midway(session, begin)


GREEDY = {"temperature": 0.0, "max_tokens": 600, "ignore_eos": True, "progress": False}


@pytest.mark.engine
def test_a_paused_rollout_goes_on_with_the_very_same_tokens(session):
    prompts = tasks.prompts(6, seed=3)
    uninterrupted = session.rollout(prompts, n=2, **GREEDY)
    pending = paused_midway(session, lambda: session.rollout(prompts, n=2, block=False, **GREEDY))
    assert session.paused and status(session)["paused"]
    held = progress(session)["tokens"]
    assert not pending.done and "paused" in repr(session)
    assert client.ask(client.find(session.name), "/state")["paused"]
    before, begin = cpu_ticks(session.inference.info["pid"]), time.monotonic()
    time.sleep(2.0)  # what it may use in that time is a share of it
    used = (cpu_ticks(session.inference.info["pid"]) - before) / os.sysconf("SC_CLK_TCK")
    assert used < 0.5 * (time.monotonic() - begin), "a paused replica sleeps"
    assert progress(session)["tokens"] == held and not pending.done
    session.resume()
    assert pending.result(timeout=600).texts == uninterrupted.texts and not session.paused
    assert not status(session)["paused"]


@pytest.mark.engine
def test_a_stop_while_paused_gives_what_there_is(session):
    long = GREEDY | {"max_tokens": 1500}
    pending = paused_midway(session, lambda: session.rollout(tasks.prompts(8), n=1, block=False, **long))
    session.stop()
    with pytest.raises(Stopped) as stopped:
        pending.result(timeout=120)
    assert stopped.value.partial.aborted.any() and int(stopped.value.partial.lengths.sum()) > 0
    assert session.paused, "a stop does not resume"


@pytest.mark.engine
def test_pausing_while_nothing_runs_holds_the_next_rollout(session):
    session.pause()
    pending = session.rollout(["sort 312"], block=False, max_tokens=4, progress=False)
    until(lambda: progress(session).get("paused"))
    with pytest.raises(TimeoutError):
        pending.result(timeout=0.5)
    assert client.command(client.find(session.name), "resume")["result"] == {"paused": False}
    assert pending.result(timeout=120).samples == 1

"""An interrupt that meets a call which has just finished still ends the cell: nobody may think it was not heard."""

import pytest

from rlbench.dispatch.chain import Chain
from rlbench.dispatch.pending import Pending
from rlbench.errors import Stopped


def interrupted_once(value):
    """`result` as it behaves where Ctrl-C comes while the call ends: first the interrupt, then the whole result."""
    waits = []

    def result(timeout=None):
        waits.append(timeout)
        if len(waits) == 1:
            raise KeyboardInterrupt
        return value

    return result


def test_of_one_call(monkeypatch):
    pending = Pending("step", ["rank 0"], [], [], "id", list, None, lambda i, error: error, True, lambda ranks: None)
    monkeypatch.setattr(pending, "result", interrupted_once("all of it"))
    with pytest.raises(Stopped, match="step was done as it was stopped") as stopped:
        pending.blocking_result()
    assert stopped.value.partial == "all of it"


def test_of_a_verb_of_several_calls(monkeypatch):
    def steps():
        return "all of it"
        yield

    chain = Chain("verb", steps())
    assert chain.result(timeout=120) == "all of it"
    monkeypatch.setattr(chain, "result", interrupted_once("all of it"))
    with pytest.raises(Stopped, match="verb was done as it was stopped") as stopped:
        chain.blocking_result()
    assert stopped.value.partial == "all of it"

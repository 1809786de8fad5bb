"""What cannot be sent to another process is named: the function, and the variable it holds."""

import functools
import threading

import pytest

from rlbench.dispatch import by_value
from rlbench.errors import DataError

lock = threading.Lock()


def helper(text):
    with lock:
        return len(text)


def reward(rollout):
    return helper(rollout.text)


class Held:
    def __init__(self):
        self.guard = threading.Lock()

    def step(self, turn): ...


class Uses:
    def step(self, turn):
        return helper(turn)


class Handle:
    """Stands where a session does: what rlbench itself makes is named, and not looked into."""

    def __init__(self):
        self.inner = threading.Lock()


Handle.__module__ = "rlbench.session.session"


def closing_over(value):
    return lambda rollout: value


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (reward, "`reward` cannot be sent to the ranks: it uses `helper` → `lock`, a _thread.lock,"),
        (functools.partial(reward, 1), "it uses `reward` → `helper` → `lock`, a _thread.lock,"),
        (Held(), "`Held` cannot be sent to the ranks: it uses `guard`, a _thread.lock,"),
        (Held().step, "it uses `guard`, a _thread.lock,"),
        (Uses, "`Uses` cannot be sent to the ranks: it uses `step` → `helper` → `lock`, a _thread.lock,"),
        (closing_over(Handle()), "it uses `value`, a Handle,"),
        ({"by name": [reward]}, "it uses `reward` → `helper` → `lock`, a _thread.lock,"),
        (lock, "it is a _thread.lock,"),
    ],
)
def test_the_variable_that_cannot_go_is_named(value, said):
    with pytest.raises(DataError) as refused:
        by_value.dumps(value, "reward", refusal=DataError)
    assert str(refused.value).startswith("reward") and said in str(refused.value)

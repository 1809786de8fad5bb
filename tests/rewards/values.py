"""Completions to score, and what a scoring must leave behind: nothing."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager

import psutil

from rlbench.data import Prompt
from tests.data.written import written


def answers(*texts, label="7", meta=None, prompt="what is 3 + 4?"):
    """One prompt with these completions."""
    return written([Prompt(prompt, label, meta or {})], [list(texts)])


def one(text, label="7", meta=None, prompt="what is 3 + 4?"):
    """A single `Rollout`."""
    return next(answers(text, label=label, meta=meta, prompt=prompt).flat)


@contextmanager
def nothing_left():
    """Neither a process nor a thread of the scoring outlives it."""
    processes = {p.pid for p in psutil.Process().children(recursive=True)}
    yield
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in processes]
    assert not left, left
    assert not [t for t in threading.enumerate() if t.name.startswith("rlbench-re")]


def interrupting(at, otherwise=1.0):
    """A reward for processes of their own that presses Ctrl-C in this one when it comes to completion `at`.

    The one before may be on its way back then: known or not.
    """
    here = os.getpid()

    def reward(rollout):
        if rollout.index == at:
            import os
            import signal
            import time

            os.kill(here, signal.SIGINT)
            time.sleep(60)
        return otherwise

    return reward

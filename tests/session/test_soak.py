"""A thousand steps of one session: nothing that lives as long as it grows with the steps."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

import rlbench as rb
from rlbench.monitor import client
from rlbench.notebook.dashboard.feed import Feed
from rlbench.tiny import tasks
from tests.growth import MOST, Sample, growing, held_by, shm_held, table

STEPS, SETTLED, EVERY = 1000, 200, 20
PROMPTS, SAMPLES, TOKENS = 4, 2, 4
LOOKS = 10
"""How often somebody looks at the session, in steps: its report as the panel asks for it, and the history."""


def references() -> int:
    """Count the Ray objects that this process refers to."""
    from ray._private.worker import global_worker

    return len(global_worker.core_worker.get_all_reference_counts())


def sampled(session: Any, step: int) -> Sample:
    """Read what every process of the session holds.

    Ray takes a moment to hear what was let go. This process has large old generations, torch's among them, so that its
    collector looks at all of it seldom: what waits for that is not kept.
    """
    gc.collect()
    time.sleep(0.05)
    state = session.core.link.state("engines")["engines"]
    pids = {"kernel": os.getpid(), "monitor": client.find(session.name)["pid"]}
    pids |= {name.split("/", 2)[2]: pid for engine in state.values() for name, pid in engine["pids"].items()}
    held = {f"{name} {kind}": value for name, pid in pids.items() for kind, value in held_by(pid).items()}
    held |= {f"shm {kind}": value for kind, value in shm_held(client.find(session.name)["shm"]).items()}
    return Sample(step, held | {"kernel references": references()})


def step(session: Any, prompts: Iterator[Any], looks: bool) -> None:
    """One step as a notebook takes it."""
    asked = [tasks.message(next(prompts)) for _ in range(PROMPTS)]
    rollouts = session.rollout(asked, n=SAMPLES, max_tokens=TOKENS, progress=False).score(tasks.reward)
    metrics = session.train_step(rollouts.batch(advantage=rb.rl.group_normalized()))
    session.sync_weights()
    if looks:
        Feed.of(session.name).look()
        assert session.history[-1]["step"] == metrics["step"] and repr(rollouts) and repr(session)


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_nothing_grows_over_a_thousand_steps(cluster: Any, tiny_path: Any) -> None:
    samples: list[Sample] = []
    with rb.Session("tiny", name="soak", train={"lr": 1e-6}, inference={"max_model_len": 128}) as session:
        prompts = tasks.stream("train", 0)
        for number in range(1, STEPS + 1):
            step(session, prompts, looks=number % LOOKS == 0)
            if number >= SETTLED and number % EVERY == 0:
                samples.append(sampled(session, number))
    print(table(samples))
    assert growing(samples, MOST) == []

"""docs/ideas.md: every cell trains, is taken back bit for bit, and is there again after a rank was killed."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlbench as rb
from rlbench.tiny import tasks

pytestmark = [pytest.mark.engine, pytest.mark.curve]
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "ideas.md").read_text(encoding="utf-8")
CELLS = dict(re.findall(r"^## (.*?)\n\n```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def session(request: pytest.FixtureRequest, cluster: Any) -> Iterator[Any]:
    small = {"max_model_len": 64, "kv_cache_bytes": 1 << 26}
    with rb.Session(
        "tiny", train=rb.Train(lr=1e-4, shards=request.param), inference=small, reference=True, undo=3
    ) as made:
        yield made


@pytest.fixture(scope="module")
def rollouts(session: Any) -> Any:
    drawn = session.rollout(tasks.prompts(4, seed=3), n=4, max_tokens=10, progress=False)
    return drawn.score(lambda rollout: rollout.index % 2)  # a signal in every group, whatever was drawn


def sums(session: Any) -> Any:
    reference = session.reference.call_all("state_checksum").result()[0]
    return session.train.call_all("training_checksums").result(), reference


def names_of(session: Any, rollouts: Any) -> dict[str, Any]:
    import torch

    batch = rollouts.batch(rb.rl.group_normalized())
    return {"session": session, "rollouts": rollouts, "batch": batch, "rb": rb, "torch": torch, "random": random}


def test_the_table_has_every_cell() -> None:
    rows = re.findall(r"^\| \[\d{4}\.\d{5}\]", PAGE, re.MULTILINE)
    assert len(rows) == len(CELLS) >= 10
    assert all(len([line for line in cell.splitlines() if line.strip()]) <= 15 for cell in CELLS.values())


@pytest.mark.parametrize("title", CELLS)
def test_a_cell_trains_and_goes_back_and_outlives_a_rank(session: Any, rollouts: Any, title: str) -> None:
    before, step = sums(session), session.step
    kept = session.snapshot()
    exec(compile(CELLS[title], f"docs/ideas.md, {title}", "exec"), names_of(session, rollouts))
    assert session.step > step and sums(session)[0][0]["weights"] != before[0][0]["weights"]
    after = sums(session)
    os.kill(session.train.run(os.getpid)[-1], signal.SIGKILL)
    with pytest.raises(rb.RLBenchError):
        session.train.run(os.getpid)
    session.heal()
    assert sums(session) == after
    session.undo()
    changed = session.core.link.state("setup", "reference")
    if changed == {"setup": {}, "reference": None}:
        assert sums(session) == before
    session.restore(kept)
    assert sums(session) == before
    session.drop(kept)

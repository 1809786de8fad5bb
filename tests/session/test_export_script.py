"""What was done in a session is on record, and the script of its cells does it again."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell

import rlbench as rb
from rlbench.errors import SessionError
from tests.clock import until
from tests.session.looking import state

pytestmark = pytest.mark.engine

MADE = """
import numpy as np
import pytest
import rlbench as rb
from rlbench.errors import LossError
from rlbench.tiny import tasks
session = rb.Session("tiny", train={"lr": 1e-3}, seed=5)
"""
DEFINED = """
SCALE = 0.5

def graded(rollout):
    return SCALE * (sum(rollout.token_ids) % 5)

def loss(inputs):
    return -(inputs.logprobs - inputs.old_logprobs).exp() * inputs.advantages, {}

def broken(inputs):
    raise ZeroDivisionError("no such loss")

def remembered(value):
    global kept
    kept = value * SCALE
"""
DRAWN = """
rollouts = session.rollout(tasks.prompts(4), n=4, max_tokens=12, temperature=1.5, progress=False)
batch = rollouts.score(graded).batch(advantage=rb.rl.group_normalized())
metrics = session.train_step(batch, loss=loss)
session.undo()
"""
EDITED = """
def loss(inputs):
    return -2 * inputs.logprobs * inputs.advantages, {"twice": inputs.logprobs.detach().mean() * 2}

session.train_step(batch, loss=loss, lr=2e-3)
session.sync_weights()
"""
MORE = """
more = session.rollout(["sort 4 2 :", "sort 9 1 3 :"], n=4, max_tokens=12, temperature=1.5, progress=False)
scored = more.score(lambda r: float(len(r.token_ids) + sum(r.token_ids) % 7))
session.train_step(scored.select(scored.lengths > 0).batch(advantage=rb.rl.rloo()), loss="dapo")
by_hand = batch.replace(advantages=np.where(batch.advantages > 0, 1, 0).astype(np.float32))
session.forward_backward(by_hand, loss=rb.rl.grpo(clip_high=0.4))
session.optim_step()
session.train.run(remembered, 3)
"""
FAILED = """
label = "before"
session.train_step(batch, loss=broken)
label = "never"
"""
MAGIC = """%time session.train.run_cell("kept += 1")
"""
AWAITED = """
late = await session.rollout(tasks.prompts(2), n=2, max_tokens=8, block=False)
session.evaluate(tasks.prompts(8), graded, max_tokens=8, progress=False)
"""
PIPED = """
asked = tasks.prompts(8)
by_two = [asked[i : i + 2] for i in range(0, 8, 2)]
with session.pipeline(by_two, n=4, reward=graded, max_tokens=8, progress=False) as steps:
    for i, ahead in enumerate(steps):
        session.train_step(ahead.batch(advantage=rb.rl.group_normalized()), loss="decoupled_ppo")
        if i == 1:
            break
"""
VERBS = (
    "rollout train_step undo train_step sync_weights rollout train_step forward_backward optim_step train.run "
    "train_step train.run_cell rollout evaluate pipeline sync_weights rollout rollout train_step sync_weights "
    "rollout train_step"
).split()


@pytest.fixture(scope="module")
def shell():
    from rlbench import notebook

    main, made = sys.modules["__main__"], InteractiveShell.instance()
    notebook.install()
    yield made
    InteractiveShell.clear_instance()
    sys.modules["__main__"] = main


def cell(shell, text, fails=False):
    result = shell.run_cell(text, store_history=True)
    if not fails:
        result.raise_error()
    return result.result


@pytest.fixture(scope="module")
def worked(cluster, tiny_path, shell):
    """A notebook in which something was drawn, learnt, undone, learnt otherwise and got wrong."""
    for text in (MADE, DEFINED, DRAWN, EDITED, MORE):
        cell(shell, text)
    cell(shell, FAILED, fails=True)
    cell(shell, MAGIC)
    cell(shell, AWAITED)
    cell(shell, PIPED)
    session = shell.user_ns["session"]
    yield session
    session.close()


def run(script, returncode=0):
    """What the script prints, run as a user would."""
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=script.parent,
        text=True,
        capture_output=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == returncode, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def test_every_verb_is_on_record_with_what_came_of_it(worked):
    verbs = worked.history.verbs
    assert [one["verb"] for one in verbs] == VERBS
    [failed] = [one for one in verbs if one["outcome"] == "failed"]
    assert "ZeroDivisionError: no such loss" in failed["said"] and failed["args"]["loss"] == "broken"
    steps = [one for one in verbs if one["verb"] == "train_step" and one["outcome"] == "done"]
    assert len({one["hashes"]["loss"] for one in steps}) == 4
    assert "inputs.old_logprobs" in verbs.source(steps[0]) and "twice" in verbs.source(steps[1])
    assert "SCALE * (sum" in verbs.source(steps[0])  # the reward that made the batch
    assert "session.undo()" in verbs.source(steps[0]) and "cell 3" in steps[0]["where"]
    assert steps[1]["metrics"]["lr"] == 2e-3 and steps[1]["step"] == 1 and steps[0]["seconds"] > 0
    assert verbs[0]["seed"] == 5 and verbs[0]["number"] == 1 and verbs[0]["digest"]
    table = verbs.to_pandas()
    assert list(table.verb) == VERBS and np.isfinite(table["metrics/reward"].iloc[-1])
    assert "failed: LossError" in repr(verbs)


@pytest.mark.curve
def test_the_script_gives_the_same_numbers(worked, shell, tmp_path):
    script = tmp_path / "again.py"
    made = cell(shell, f"told = 'in the script'\nsession.export_script({str(script)!r})")
    text = script.read_text()
    assert all(part.strip() in text for part in (DEFINED, DRAWN, EDITED, MORE, MAGIC))
    assert "told = 'in the script'" in text and "export_script" not in text
    assert "label = 'before'" in text.replace('"', "'") and "label = 'never'" not in text.replace('"', "'")
    assert len(made.left_out) == 1 and "LossError" in made.left_out[0]
    out = run(script)
    assert "DIFFERS" not in out and len(re.findall(r"seed: 5 \(seen 5\)", out)) == 5
    pairs = re.findall(r"train_step (\w+): (\S+) \(seen ([^)]+)\)", out)
    assert len(pairs) >= 9 and [float(then) > 0.1 for name, _, then in pairs if name == "grad_norm"] == [True] * 5
    for name, now, then in pairs:
        assert float(now) == pytest.approx(float(then), rel=1e-5, abs=1e-7), name
    wrong = script.with_name("other.py")
    wrong.write_text(text.replace("lr=2e-3", "lr=5e-3"))
    out = run(wrong, returncode=1)
    assert "DIFFERS" in out and "differ from those seen" in out


def test_a_kernel_that_attaches_goes_on_with_the_record(worked, shell, tmp_path):
    before = len(worked.history.verbs)
    InteractiveShell.clear_instance()
    try:
        other = InteractiveShell.instance()
        cell(other, f"import rlbench as rb\nsession = rb.attach({worked.name!r}, take_over=True)")
        cell(other, "label = session.snapshot('late').label")
        assert len(other.user_ns["session"].history.verbs) == before + 1
        cell(other, f"session.export_script({str(tmp_path / 'later.py')!r})")
    finally:
        InteractiveShell.clear_instance()
    text = (tmp_path / "later.py").read_text()
    assert text.index("rb.Session(") < text.index("def graded") < text.index("rb.attach(") < text.index("'late'")


def test_a_verb_that_does_not_wait_is_on_record_when_it_has_ended(session):
    before = len(session.history.verbs)
    pending = session.rollout("sort 3 1 :", n=2, max_tokens=4, block=False)
    begun = session.history.verbs
    assert len(begun) == before + 1 and begun[-1]["outcome"] == "running"
    rollouts = pending.result()
    last = session.history.verbs[-1]
    assert len(session.history.verbs) == before + 1 and last["outcome"] == "done"
    assert last["verb"] == "rollout" and last["number"] == rollouts.number and "block" not in last["args"]
    session.sync_weights(block=False).result()
    assert session.history.verbs[-1]["verb"] == "sync_weights"


def test_what_was_stopped_is_named_and_arrays_are_not_written_to_disk(session):
    from rlbench.tiny import tasks

    pending = session.rollout(tasks.prompts(64), n=16, max_tokens=64, ignore_eos=True, block=False, progress=False)
    until(lambda: any(told.get("tokens") for call in state(session)["running"] for told in call["progress"]))
    assert session.core.link.stop_running()
    with pytest.raises(rb.Stopped):
        pending.result()
    assert session.history.verbs[-1]["outcome"] == "stopped"
    session.train.run(len, np.zeros(1 << 16))
    record = session.history.verbs[-1]
    assert record["args"]["1"] == "array float64 (65536,)" and len(record["hashes"]["1"]) == 12
    assert not list(session.core.recorder.folder.rglob("*.npy"))


def test_a_record_that_cannot_be_written_changes_nothing(session, monkeypatch):
    from rlbench.session.record import recording

    def broken(self, name, line):
        raise OSError("the disk is full")

    session.core.recorder._warned = False
    monkeypatch.setattr(recording.Recorder, "_append", broken)
    before = len(session.history.verbs)
    with pytest.warns(UserWarning, match="rollout .*OSError"):
        rollouts = session.rollout("sort 3 1 :", n=2, max_tokens=4, progress=False)
    assert rollouts.samples == 2 and len(session.history.verbs) == before


def test_a_plain_script_is_named_as_its_own(session, tmp_path, monkeypatch):
    from rlbench.session.record import cells

    monkeypatch.setattr(cells, "kernel", lambda: None)
    monkeypatch.setattr(session.core.recorder, "cells", list)
    session.rollout("sort 3 1 :", n=1, max_tokens=2, progress=False)
    assert "test_export_script.py, line " in session.history.verbs[-1]["where"]
    with pytest.raises(SessionError, match="test_export_script"):
        session.export_script(tmp_path / "no.py")
    with pytest.raises(SessionError, match=r"\.py"):
        session.export_script(tmp_path / "no.txt")

"""What was done in a session is on record, and the script made of it does it again."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

import rlbench as rb
from rlbench.errors import LossError, SessionError
from tests.session.test_operator import state, until

pytestmark = pytest.mark.engine
SCALE = 0.5


def graded(rollout):
    return SCALE * (sum(rollout.token_ids) % 5)


def first(inputs):
    return -(inputs.logprobs - inputs.old_logprobs).exp() * inputs.advantages, {}


def first_loss(inputs):
    return -3 * inputs.logprobs * inputs.advantages, {}


def second(inputs):
    return -2 * inputs.logprobs * inputs.advantages, {"twice": inputs.logprobs.detach().mean() * 2}


def remembered(value):
    global kept
    kept = value * SCALE


def broken(inputs):
    raise ZeroDivisionError("no such loss")


@pytest.fixture(scope="module")
def worked(cluster, tiny_path):
    """A session in which something was drawn, learnt, undone, learnt otherwise and got wrong."""
    from rlbench.tiny import tasks

    session = rb.Session("tiny", train={"lr": 1e-3}, seed=5)
    rollouts = session.rollout(tasks.prompts(4), n=4, max_tokens=12, temperature=1.5)
    batch = rollouts.score(graded).batch(advantage=rb.rl.group_normalized())
    session.train_step(batch, loss=first)
    session.undo()
    with pytest.raises(LossError):
        session.train_step(batch, loss=broken)
    session.train_step(batch, loss=second, lr=2e-3)
    session.sync_weights()
    more = session.rollout(["sort 4 2 :", "sort 9 1 3 :"], n=4, max_tokens=12, temperature=1.5)
    scored = more.score(lambda r: float(len(r.token_ids) + sum(r.token_ids) % 7))
    session.train_step(scored.select(scored.lengths > 0).batch(advantage=rb.rl.rloo()), loss="dapo")
    by_hand = batch.replace(advantages=np.where(batch.advantages > 0, 1, 0).astype(np.float32))
    session.forward_backward(by_hand, loss=rb.rl.grpo(clip_high=0.4))
    session.optim_step()
    session.train.run(remembered, 3)
    session.train.run_cell("kept += 1\nkept")
    session.evaluate(tasks.prompts(8), graded, max_tokens=8)
    yield session
    session.close()


def run(script, tmp_path):
    """What the script prints, run as a user would."""
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=script.parent,
        text=True,
        capture_output=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_verb_is_on_record_with_what_came_of_it(worked):
    verbs = worked.history.verbs
    assert [one["verb"] for one in verbs] == [
        "rollout",
        "train_step",
        "undo",
        "train_step",
        "train_step",
        "sync_weights",
        "rollout",
        "train_step",
        "forward_backward",
        "optim_step",
        "train.run",
        "train.run_cell",
        "evaluate",
    ]
    assert [one["outcome"] for one in verbs].count("failed") == 1
    failed = next(one for one in verbs if one["outcome"] == "failed")
    assert "ZeroDivisionError: no such loss" in failed["said"] and failed["args"]["loss"] == "broken"
    steps = [one for one in verbs if one["verb"] == "train_step" and one["outcome"] == "done"]
    assert len({one["hashes"]["loss"] for one in steps}) == 3
    assert "inputs.old_logprobs" in verbs.source(steps[0]) and "twice" in verbs.source(steps[1])
    assert "SCALE = 0.5" in verbs.source(steps[0])  # the reward that made the batch, with what it refers to
    assert steps[1]["metrics"]["lr"] == 2e-3 and steps[1]["step"] == 1 and steps[0]["seconds"] > 0
    table = verbs.to_pandas()
    assert list(table.verb) == [one["verb"] for one in verbs] and np.isfinite(table["metrics/reward"].iloc[-1])
    assert "failed: LossError" in repr(verbs)


def test_the_script_gives_the_same_numbers(worked, tmp_path):
    script = tmp_path / "again.py"
    made = worked.export_script(script)
    text = script.read_text()
    assert "def first" not in text and "def broken" not in text and "def second" in text
    assert "left out, it was taken back" in text and "it failed: LossError" in text
    assert made.statements == 10 and str(tmp_path) not in text
    assert "session.train.run(remembered, 3)" in text and "session.train.run_cell('kept += 1\\nkept')" in text
    out = run(script, tmp_path)
    assert len(set(re.findall(r"^step \d", out, re.MULTILINE))) == 3 and "DIFFERS" not in out
    pairs = re.findall(r"(\w+): (\S+) \(seen ([^)]+)\)", out)
    assert len(pairs) >= 12 and "nan" not in out and {"1", "2", "evaluation"} <= {name for name, _, _ in pairs}
    assert [float(then) > 0.1 for name, _, then in pairs if name == "grad_norm"] == [True] * 3
    for name, now, then in pairs:
        assert float(now) == pytest.approx(float(then), rel=1e-5, abs=1e-7), name


def test_with_what_was_undone_the_script_undoes_it_too(worked, tmp_path):
    made = worked.export_script(tmp_path / "all.py", undone=True)
    text = (tmp_path / "all.py").read_text()
    assert "def first" in text and "session.undo()" in text and made.statements == 12
    assert text.index("def first") < text.index("session.undo()") < text.index("def second")


def test_a_kernel_that_attaches_goes_on_with_the_record(worked, tmp_path):
    before = len(worked.history.verbs)
    again = rb.attach(worked.name, take_over=True)
    assert again.last.number == 2
    batch = again.last.score(graded).batch(advantage=rb.rl.group_normalized())
    again.train_step(batch, loss="grpo")
    assert len(again.history.verbs) == before + 1
    again.export_script(tmp_path / "later.py")
    text = (tmp_path / "later.py").read_text()
    assert "= rollouts_2.score(graded)" in text and "batch_4 = scored_" in text
    again.undo()


def test_a_verb_that_does_not_wait_is_on_record_when_it_has_ended(session):
    before = len(session.history.verbs)
    pending = session.rollout("sort 3 1 :", n=2, max_tokens=4, block=False)
    begun = session.history.verbs
    assert len(begun) == before + 1 and begun[-1]["outcome"] == "running"
    rollouts = pending.result()
    last = session.history.verbs[-1]
    assert len(session.history.verbs) == before + 1 and last["outcome"] == "done"
    assert last["verb"] == "rollout" and last["number"] == rollouts.number and "block" not in last["code"]
    chain = session.sync_weights(block=False)
    chain.result()
    assert session.history.verbs[-1]["verb"] == "sync_weights"


def test_odd_ways_to_work_give_the_same_numbers_too(cluster, tiny_path, tmp_path):
    """Backwards that an undo drops, a rollout that overlaps a step, steps taken back with rollouts, changed data."""
    from rlbench.tiny import tasks

    def graded_twice(rollouts):
        return rollouts.score(graded).batch(advantage=rb.rl.group_normalized())

    asked, options = tasks.prompts(4), {"n": 4, "max_tokens": 12, "temperature": 1.5, "progress": False}
    with rb.Session("tiny", train={"lr": 1e-3}, seed=9) as session, rb.Session("tiny", seed=9) as other:
        foreign = graded_twice(other.rollout(asked, **options))
        first = session.rollout((prompt for prompt in asked), **options)
        batch = graded_twice(first)
        session.forward_backward(batch, loss=first_loss)
        session.optim_step()
        session.undo()
        session.forward_backward(batch, loss=second)
        session.optim_step()
        pending = session.rollout(asked, block=False, **options)
        session.train_step(batch, loss=second)
        session.sync_weights()
        late = pending.result()
        session.train_step(graded_twice(late), loss="grpo")
        kept = session.snapshot("here")
        session.train_step(graded_twice(session.rollout(asked, **options)))
        session.restore(kept)
        session.train_step(foreign, loss="grpo")
        batch.advantages[:] *= 3
        session.train_step(batch, loss="grpo")
        session.rollout(asked, block=False, **options)  # nobody asks what came of it
        session.inference.control("status")
        made = session.export_script(tmp_path / "odd.py")
    assert "its result was never asked for" in " ".join(made.left_out)
    out = run(tmp_path / "odd.py", tmp_path)
    assert "DIFFERS" not in out and len(re.findall(r"grad_norm: ", out)) == 5
    assert [float(then) > 0 for then in re.findall(r"grad_norm: .* \(seen ([^)]+)\)", out)] == [True] * 5


def test_a_rollout_that_was_cut_is_kept_as_it_was_and_the_next_has_its_own_number(cluster, tiny_path, tmp_path):
    from rlbench.tiny import tasks

    with rb.Session("tiny", train={"lr": 1e-3}, seed=3) as session:
        pending = session.rollout(tasks.prompts(64), n=16, max_tokens=64, ignore_eos=True, block=False, progress=False)
        until(lambda: any(told.get("tokens") for call in state(session)["running"] for told in call["progress"]))
        assert session.link.stop_running()
        with pytest.raises(rb.Stopped) as stopped:
            pending.result()
        part = stopped.value.partial
        session.train_step(part.score(graded).batch(advantage=rb.rl.rloo(), drop_aborted=False))
        last = session.rollout(tasks.prompts(2), n=4, max_tokens=6, progress=False)
        assert last.number == 2
        session.export_script(tmp_path / "cut.py")
    text = (tmp_path / "cut.py").read_text()
    assert "from_parquet" in text and "drawn until it was stopped" in text
    assert "DIFFERS" not in run(tmp_path / "cut.py", tmp_path)


def test_a_script_whose_numbers_differ_says_so_and_fails(worked, tmp_path):
    worked.export_script(tmp_path / "other.py")
    text = (tmp_path / "other.py").read_text().replace("lr=0.002", "lr=0.005")
    (tmp_path / "other.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "other.py"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == 1 and "DIFFERS" in done.stdout and "differ from those seen" in done.stderr


def test_a_record_that_cannot_be_written_changes_nothing(session, monkeypatch):
    from rlbench.session import recording

    def broken(self, entry):
        raise OSError("the disk is full")

    session.recorder._warned = False
    monkeypatch.setattr(recording.Recorder, "_append", broken)
    before = len(session.history.verbs)
    with pytest.warns(UserWarning, match="rollout could not be put on record: OSError: the disk is full"):
        rollouts = session.rollout("sort 3 1 :", n=2, max_tokens=4, progress=False)
    assert rollouts.samples == 2 and len(session.history.verbs) == before


def test_what_cannot_be_written_down_is_refused_by_name(worked, tmp_path):
    import threading

    lock = threading.Lock()

    def guarded(rollout):
        with lock:
            return float(len(rollout))

    session = rb.attach(worked.name, take_over=True)  # a test before this one took it over, too
    session.evaluate(["sort 3 1 :"], guarded, max_tokens=4)  # the last of this session: no script is made of it now
    with pytest.raises(SessionError, match=r"1 verbs cannot be written as a script; the first: evaluate: .*lock"):
        session.export_script(tmp_path / "no.py")
    assert not (tmp_path / "no.py").exists()
    with pytest.raises(SessionError, match=r"ends in \.py"):
        session.export_script(tmp_path / "no.txt")
    session.close()

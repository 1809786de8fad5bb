"""In a real JupyterLab: a session outlives its kernel, Interrupt gives the prompt back, one notebook drives."""

from __future__ import annotations

import json
import re

import pytest

from tests.browser.lab import Notebook
from tests.clock import LIMIT_S

pytestmark = pytest.mark.engine

START = """
import rlbench as rb
from rlbench.tiny import tasks
session = rb.Session("tiny", name="survivor", train={"lr": 1e-4})
"""
ATTACH = """
import rlbench as rb
from rlbench.tiny import tasks
session = rb.attach("survivor")
"""
STEP = """
rollouts = session.rollout(tasks.prompts(8), n=4, max_tokens=12)
batch = rollouts.score(tasks.reward).batch(advantage=rb.rl.group_normalized())
metrics = session.train_step(batch)
print("STEPPED", metrics.step, session.sync_weights()["version"])
"""
# weights, optimizer and random state as checksums; what was counted and recorded; the samples that were kept
STATE = """
import hashlib, json
samples = hashlib.sha256(session.last.responses.values.tobytes() + session.last.logprobs.tobytes())
print("STATE", json.dumps({
    "checksums": session.train.call_all("training_checksums").result(),
    "step": session.step, "version": session.version, "served": session.inference.control("status")[0]["version"],
    "history": [[row["step"], row["loss_name"], row["loss"]] for row in session.history],
    "last": [session.last.number, samples.hexdigest()],
}))
"""
ENDLESS_ROLLOUT = "session.rollout(tasks.prompts(64), n=64, max_tokens=1800, ignore_eos=True)"
LONG_STEP = """
alternating = session.last.score([i % 2 for i in range(session.last.samples)])
session.train_step(alternating.batch(advantage=rb.rl.group_normalized()), token_budget=96)
"""
SHORT_STEP = """
alternating = session.last[:4].score([i % 2 for i in range(session.last[:4].samples)])
session.train_step(alternating.batch(advantage=rb.rl.group_normalized()))
"""
BROKEN_LOSS = """
def picky(inputs):
    if len(inputs.logprobs) > 2:  # the trial in the kernel has two
        raise ValueError("more than <b>two</b> rows")  # mine
    return -inputs.logprobs * inputs.advantages, {}

session.train_step(batch, loss=picky)
"""
PLUMBING = ("Traceback", "site-packages", "/rlbench/", "rlbench/session", "dispatch", "ipykernel", "RayTaskError")


@pytest.fixture(scope="module")
def notebook(lab, browser):
    """A notebook that holds the session of all tests here; each may find it in a kernel that has to attach again."""
    with Notebook(lab, browser) as opened:
        yield opened
        opened.do("session.close()")


@pytest.fixture
def driving(notebook):
    """The notebook once its `session` drives: running the first cell again makes the session, or attaches to it."""
    done(notebook, START, timeout=120)
    return notebook


def done(notebook, source, timeout=LIMIT_S):
    """Run a cell that has to end well; returns its output."""
    index = notebook.do(source, timeout=timeout)
    assert notebook.error(index) == ""
    return notebook.output(index)


def state(notebook):
    """What the session holds now, as the notebook's kernel finds it."""
    shown = done(notebook, STATE)
    return json.loads(shown.partition("STATE ")[2])


def steps_on(notebook, before):
    """A further rollout, step and sync do what they always do."""
    shown = done(notebook, STEP)
    assert f"STEPPED {before['step'] + 1} {before['version'] + 1}" in shown, shown
    after = state(notebook)
    assert after["checksums"] != before["checksums"] and after["served"] == after["version"] == before["version"] + 1
    assert after["last"][0] > before["last"][0] and len(after["history"]) == len(before["history"]) + 1


def running(lab):
    """What runs in the session, as the server extension tells a page, whatever the kernel does."""
    return [call["what"] for call in lab.ask("rlbench/api/sessions/survivor/state")["running"]]


def wait_until_running(lab, notebook, index, what):
    """Wait until the session runs `what`, which cell `index` began."""
    notebook.until(
        lambda: what in running(lab),
        what=lambda: f"{what} never ran; the session runs {running(lab)}, the cell shows\n{notebook.output(index)}",
    )


def kill_kernel(notebook):
    """Until the next one is there."""
    pid = notebook.kill_kernel()
    assert "It will restart automatically" in notebook.accept_dialog("appears to have died")
    notebook.wait_for_kernel(not_pid=pid)


def test_a_kernel_killed_in_the_middle_of_a_rollout_loses_nothing(driving):
    done(driving, STEP)
    before = state(driving)
    busy = driving.do(ENDLESS_ROLLOUT, wait=False)
    driving.wait_text(busy, re.compile(r"[1-9][\d,]* tokens"))
    assert driving.prompt(busy) == "[*]:"
    kill_kernel(driving)

    done(driving, ATTACH)
    assert state(driving) == before, "the orphaned rollout changes nothing"
    assert done(driving, "print(session.stop())") == f"stopping: rollout {before['last'][0] + 1}"
    steps_on(driving, before)


@pytest.mark.parametrize("lose_kernel", [Notebook.restart_kernel, kill_kernel])
def test_losing_the_kernel_in_the_middle_of_a_train_step_loses_nothing(driving, lab, lose_kernel):
    done(driving, "long = session.rollout(tasks.prompts(64), n=8, max_tokens=64, ignore_eos=True)")
    done(driving, "kept = session.snapshot()")
    done(driving, SHORT_STEP)
    undisturbed = state(driving)
    done(driving, "session.restore(kept)")
    before = state(driving)
    step = driving.do(LONG_STEP, wait=False)
    wait_until_running(lab, driving, step, "train_step")
    lose_kernel(driving)
    assert driving.prompt(step) == "[ ]:", "the cell did not end"

    done(driving, ATTACH)
    assert state(driving) == before, "half a step is none, also where nobody stopped it"
    done(driving, SHORT_STEP)
    assert state(driving)["checksums"] == undisturbed["checksums"], "nor does it leave a gradient behind"
    steps_on(driving, state(driving))


def test_interrupt_gives_one_line_and_the_prompt_back(driving):
    busy = driving.do(ENDLESS_ROLLOUT, wait=False)
    driving.wait_text(busy, re.compile(r"[1-9][\d,]* tokens"))
    driving.interrupt()
    driving.wait(busy)
    lines = driving.output(busy).splitlines()
    stopped = [line for line in lines if line.startswith("Stopped: ")]
    assert stopped == lines[-1:] and ".partial" in stopped[0], lines
    assert not [word for word in PLUMBING if word in driving.output(busy)]
    assert re.fullmatch(r"\[\d+\]:", driving.prompt(busy))
    after = driving.do("print(session.last.aborted.sum() > 0, session.rollout(tasks.prompts(2), max_tokens=4).samples)")
    assert "True 2" in driving.output(after)


def test_an_error_in_the_users_loss_shows_its_line_once_and_nothing_of_the_plumbing(driving):
    done(driving, STEP)
    failed = driving.do(BROKEN_LOSS)
    shown = driving.output(failed)
    number = driving.prompt(failed).strip("[]:")
    assert shown.count(f"picky, cell {number}, line 3:   raise ValueError(") == 1
    assert shown.count("raise ValueError(") == 1 and "ValueError: more than <b>two</b> rows" in shown
    assert not [word for word in PLUMBING if word in shown] and len(shown.splitlines()) <= 8, shown


def test_the_notebook_that_does_not_drive_is_told_who_does_and_can_take_over(driving, open_notebook):
    second = open_notebook()
    refused = second.output(second.do(ATTACH))
    assert f"SessionError: session 'survivor' is driven by pid {driving.kernel_pid()} (notebook)" in refused
    assert "take_over=True" in refused and not [word for word in PLUMBING if word in refused]

    done(second, 'session = rb.attach("survivor", take_over=True)')
    assert "STEPPED" in done(second, STEP)
    told = driving.output(driving.do("session.rollout(tasks.prompts(2), max_tokens=4)"))
    assert "SessionError: another notebook drives session 'survivor' now" in told
    assert not [word for word in PLUMBING if word in told]

    done(driving, 'session = rb.attach("survivor", take_over=True)')
    steps_on(driving, state(driving))

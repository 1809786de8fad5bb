"""What Tab shows of a session, what its verbs return, and that both are known before anything ran."""

import inspect
import subprocess
import sys
import typing
from pathlib import Path

import jedi
import pytest

import rlbench as rb
from rlbench.notebook.dashboard.dashboard import Dashboard
from rlbench.session.core import ALONE

SURFACE = """
branch branches chat close collect core dashboard drop endpoint evaluate evaluations export export_script follow
forward_backward freeze gradients heal history inference last last_trainer load log logprobs loss_lab lr method name
offload onload optim_step optimizer options park pause paused pipeline policy preflight push_to_hub redefine reference
rehearse resize restore resume rollout save schedule set_lr snapshot snapshots step stop sync_weights teacher tokenizer
traces track train train_step trainer undo unfreeze untrack update_reference version zero_grad
""".split()
COMPLETED = {
    "rollout(prompts)": "score",
    "rollout(prompts).score(reward)": "batch",
    "train_step(batch)": "tokens",
    "pipeline(batches)": "unfinished",
    "evaluate(prompts)": "counted",
    "sync_weights()": "gap",
    "loss_lab(batch, [])": "sweep",
    "snapshot()": "label",
    "gradients()": "by_layer",
    "trainer('grpo').fit(3)": "plot",
    "history": "plot",
    "evaluations": "at",
    "evaluate({'a': prompts})": "compare",
}


@pytest.fixture
def session():
    session = rb.Session.__new__(rb.Session)
    session.core = None
    return session


def verbs():
    found = {name: inspect.getattr_static(rb.Session, name) for name in SURFACE if hasattr(rb.Session, name)}
    return {name: fn for name, fn in found.items() if inspect.isfunction(fn)}


def test_tab_shows_what_a_user_needs_and_nothing_else(session):
    assert [name for name in dir(session) if not name.startswith("_")] == SURFACE


def test_every_verb_says_what_it_returns_and_has_a_docstring_and_a_signature():
    assert len(verbs()) > 30
    for name, fn in verbs().items():
        hints = typing.get_type_hints(fn, localns={"Dashboard": Dashboard})
        assert hints["return"] is not typing.Any, name
        assert fn.__doc__ and "core" not in inspect.signature(fn).parameters and fn.__name__ == name
    assert inspect.signature(rb.Session.train_step).parameters["block"].default is True
    assert "block" not in inspect.signature(rb.Session.pause).parameters


@pytest.mark.parametrize("cls", [rb.Session, rb.RewardModel])
def test_each_verb_that_can_be_left_running_excludes_others_or_is_known_to_change_nothing(cls):
    known = {**vars(cls.__base__), **vars(cls)}
    left = {name for name, fn in known.items() if "block" in getattr(fn, "__annotations__", ())}
    assert left - ALONE == (
        {"rollout", "evaluate", "logprobs", "export"} if cls is rb.Session else {"evaluate", "scores"}
    )


@pytest.mark.parametrize(("call", "name"), COMPLETED.items())
def test_a_result_completes_before_the_verb_ran(session, call, name):
    completed = jedi.Interpreter(f"session.{call}.", [{"session": session}]).complete()
    assert name in [one.name for one in completed]


def test_a_type_checker_of_a_users_code_knows_the_results(tmp_path, repository):
    assert (Path(rb.__file__).parent / "py.typed").exists()
    (tmp_path / "mine.py").write_text(
        "import rlbench as rb\n"
        "def use(session: rb.Session, batch: rb.TrainBatch) -> None:\n"
        "    reveal_type(session.train_step(batch))\n"
        "    reveal_type(session.train_step(batch, block=False).result())\n"
        "    session.train_step(batch, los='grpo')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", str(tmp_path / "mine.py")],
        cwd=repository,
        capture_output=True,
        text=True,
    )
    assert done.stdout.count('"rlbench.data.record.metrics.Metrics"') == 2, done.stdout
    assert "error: " in done.stdout and "mine.py:5" in done.stdout

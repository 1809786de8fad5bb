"""A session that is left goes to disk whole, and comes back as it was: by its verb, at the end of its lease, from the
command line; where its files or its model are not as they were, it stays parked and nothing runs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import rlbench as rb
from rlbench import cli
from rlbench.dispatch.link import Link, shm_prefix
from rlbench.errors import CheckpointError, SessionError, StateError
from rlbench.monitor import client
from rlbench.runtime import processes, registry
from rlbench.tiny import tasks
from tests.clock import until
from tests.session.looking import state
from tests.session.test_trainer_back import assert_same, inside, ppo

pytestmark = pytest.mark.engine
NAME = "parks"
OF_ITS_TIME = {"seconds", "version", "data_version", "tokens_per_s", "peak_bytes"}


def stream():
    return rb.data.PromptSet.of(tasks.prompts(64, seed=3)).stream(seed=3)


def trained(session, prompts):
    rollouts = session.rollout(prompts, n=4, max_tokens=8, progress=False)
    scored = rollouts.score([i % 2 for i in range(rollouts.samples)])
    return session.train_step(scored.batch(advantage=rb.rl.group_normalized()))


def sums(session):
    """Weights, optimizer and random states of every rank."""
    return session.train.call_all("training_checksums").result()


def measured(metrics):
    return {name: value for name, value in metrics.items() if name not in OF_ITS_TIME}


def left_in_memory(name):
    return [path.name for path in Path("/dev/shm").glob(f"{shm_prefix(name)}*")]


def idle(session):
    until(lambda: not state(session)["running"] and not state(session)["verbs"])


@pytest.fixture(scope="module")
def kept(cluster, tiny_path):
    """A session of two ranks that stands on a branch, and what the step it takes next gives; parked."""
    session = rb.Session("tiny", name=NAME, train={"lr": 1e-3, "shards": 2}, inference={"max_model_len": 512}, seed=5)
    data = session.follow(stream())
    trained(session, data.take(4))
    session.snapshot("mine")
    session.branch("other")
    session.lr = 2e-3
    trained(session, data.take(4))
    here = session.snapshot("here", disk=True)
    session.sync_weights()
    following = measured(trained(session, data.take(4))), sums(session)
    session.restore(here)  # bit for bit: what follows is the same step
    session.evaluate({"one": ["sort 21"]}, lambda rollout: 0.5, max_tokens=2, progress=False)
    told = {
        "following": following,
        "sums": sums(session),
        "history": session.history.records,
        "verbs": len(session.history.verbs),
        "place": (session.step, session.version, session.core.link.state("rollouts", "cursor")),
        "workers": list(client.find(NAME)["workers"].values()),
    }
    return told | {"session": session, "parked": session.park()}


def test_what_is_parked_has_ended_and_is_listed_with_its_size_and_how_it_comes_back(kept, capsys):
    parked, session = kept["parked"], kept["session"]
    until(lambda: not any(processes.is_same(*worker) for worker in kept["workers"]))
    assert left_in_memory(NAME) == [] and not registry.session_file(NAME).exists()
    (row,) = [row for row in rb.sessions() if row["name"] == NAME]
    assert (row["state"], row["step"], row["bytes"]) == ("parked", 2, parked.bytes) and parked.lost == ()
    for shown in (repr(rb.sessions()), repr(session), repr(parked)):
        assert "parked" in shown and "rb.attach('parks')" in shown
    with pytest.raises(SessionError, match=r"is parked.*rb\.attach\('parks'\) brings it back"):
        session.rollout(["sort 1"])
    with pytest.raises(SessionError, match="is parked"):
        rb.Session.load(f"{parked.path}/policy", name=NAME)
    assert cli.main(["park", "--list"]) == 0
    assert "parks" in (said := capsys.readouterr().out) and "in all" in said
    assert cli.main(["ps"]) == 0 and "parked" in capsys.readouterr().out
    assert cli.main(["stop", NAME]) == 1 and "brings it back" in capsys.readouterr().err


def test_a_session_like_another_is_not_made_of_a_parked_one(kept):
    with pytest.raises(SessionError, match="is parked, and seed is 5, not 6"):
        rb.Session("tiny", name=NAME, train={"lr": 1e-3, "shards": 2}, inference={"max_model_len": 512}, seed=6)
    assert registry.parked(NAME) is not None


@pytest.mark.parametrize(
    "part", ["policy/*/rank-1/0.bin", "snapshots/*/rank-0/0.bin", "state.json", "about.json", "MANIFEST.json"]
)
def test_a_damaged_one_stays_parked_and_says_what_mends_it(kept, part):
    file = sorted(Path(kept["parked"].path).glob(part))[0]
    whole = file.read_bytes()
    file.unlink()  # it may have other names
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        with pytest.raises(SessionError, match=rf"damaged: {file.name if '/' not in part else '.*' + file.name}.*load"):
            rb.attach(NAME)
        assert not Link.exists(NAME) and registry.parked(NAME)["name"] == NAME
    finally:
        file.write_bytes(whole)


def test_it_comes_back_to_the_bit_and_its_next_step_is_the_one_it_would_have_taken(kept):
    session = rb.Session("tiny", name=NAME, train={"lr": 1e-3, "shards": 2}, inference={"max_model_len": 512}, seed=5)
    assert sums(session) == kept["sums"]
    assert session.history.records == kept["history"] and len(session.history.verbs) >= kept["verbs"]
    assert [(one["set"], one["reward"], one["state"]) for one in session.evaluations] == [("one", 0.5, "now")]
    assert session.evaluations.at(session.version).table()["reward"].tolist() == [0.5]
    assert (session.step, session.version, session.core.link.state("rollouts", "cursor")) == kept["place"]
    assert session.inference.weight_versions() == [session.version] and session.lr == 2e-3
    data = session.follow(stream())
    assert measured(trained(session, data.take(4))) == kept["following"][0]
    assert sums(session) == kept["following"][1]
    assert session.undo().step == 2 and sums(session) == kept["sums"]
    assert list(session.branches) == ["other", "main"] and session.restore("mine").step == 1
    session.branch("main")
    assert session.step == 1 and session.restore("here").step == 2
    assert registry.parked(NAME) is None and not registry.parked_folder(NAME).exists()


def test_what_cannot_be_kept_is_a_reason_not_to_park_and_the_session_lives_on(kept, monkeypatch, capsys):
    session = rb.attach(NAME)
    rollouts = session.rollout(tasks.prompts(4), n=4, max_tokens=8, progress=False)
    session.forward_backward(rollouts.score([i % 2 for i in range(16)]).batch(advantage=rb.rl.group_normalized()))
    idle(session)
    assert cli.main(["park", NAME]) == 1
    assert "gradients wait for a step" in (said := capsys.readouterr().err) and "--drop-gradients" in said
    with pytest.raises(StateError, match=r"zero_grad\(\) first"):
        session.park()
    session.zero_grad()
    monkeypatch.setattr("rlbench.session.core.TOLD_S", 0.0)
    running = session.rollout(tasks.prompts(64), n=16, max_tokens=400, ignore_eos=True, progress=False, block=False)
    with pytest.raises(StateError, match=r"while rollout .* runs"):  # also where the monitor has not heard of it yet
        session.park()
    session.stop()
    with pytest.raises(rb.Stopped):
        running.result(timeout=120)
    monkeypatch.undo()
    monkeypatch.setenv("RLBENCH_PARK_GB", "0.001")
    with pytest.raises(CheckpointError, match=r"RLBENCH_PARK_GB allows more"):
        session.park()
    assert registry.parked(NAME) is None and not registry.parked_root(NAME).exists() and session.step == 2


def test_the_command_line_parks_a_trainer_with_what_it_holds(kept, capsys):
    session = rb.attach(NAME)
    trainer = ppo(session)
    trainer.step()
    here = session.snapshot("with a trainer")
    expected, where, after = trainer.step(), trainer.where(), sums(session)
    session.restore(here)
    before, held = sums(session), inside(session)
    old = registry.parked_folder("old")
    old.mkdir(parents=True)
    (old / registry.ABOUT).write_text(json.dumps({"time": time.time() - 40 * 86400, "bytes": 1}))
    idle(session)
    assert cli.main(["park", NAME]) == 0
    assert "old: forgotten for its age" in capsys.readouterr().out and registry.parked("old") is None
    again = rb.attach(NAME)
    assert sums(again) == before and inside(again) == held
    assert_same(again.last_trainer.step(), expected)
    assert again.last_trainer.where() == where and sums(again) == after
    assert again.snapshots["with a trainer"].step == here.step


def test_a_model_folder_that_is_gone_is_named_and_the_checkpoint_goes_on_from_another(kept, tiny_path, tmp_path):
    rb.attach(NAME).close()
    model, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    shutil.copytree(tiny_path, model)
    with rb.Session(str(model), name=NAME, undo=0) as session:
        trained(session, tasks.prompts(2))
        parked = session.park()
    model.rename(elsewhere)
    with pytest.raises(SessionError, match=rf"its model is not at {model} any more.*rb\.Session\.load"):
        rb.attach(NAME)
    assert not Link.exists(NAME) and registry.parked(NAME) is not None
    with rb.Session.load(f"{parked.path}/policy", model=str(elsewhere)) as other:
        assert other.step == 1
    elsewhere.rename(model)
    cli.main(["park", "--drop", NAME, "--yes"])
    assert registry.parked(NAME) is None


KERNEL = """
import os, sys
import rlbench as rb
import rlbench.session.core
from rlbench.dispatch import link
from rlbench.tiny import tasks
link.driver_mode = rlbench.session.core.driver_mode = lambda: "notebook"
session = rb.Session("tiny", name="left", train=rb.Train(lr=1e-2, lora=rb.Lora(rank=8)), inference={"adapters": 2},
                     reference=True, seed=3, lease_s=1)

def batch(prompts):
    rollouts = session.rollout(prompts, n=4, max_tokens=8, progress=False)
    return rollouts.score([i % 2 for i in range(rollouts.samples)]).batch(advantage=rb.rl.group_normalized())

session.train_step(batch(tasks.prompts(4)))
session.sync_weights()
session.branch("other")
session.train_step(batch(tasks.prompts(4)))
session.sync_weights()
sums = session.train.call_all("training_checksums").result()
tokens = {name: session.rollout(["sort 52"], temperature=0, max_tokens=8, adapter=name).responses.values.tolist()
          for name in ("main", "other")}
session.forward_backward(batch(tasks.prompts(4)))
import json
print("TOLD" + json.dumps([sums, tokens]), flush=True)
sys.stdin.read()  # it lives, and calls nothing
"""


def test_the_session_of_a_notebook_that_is_gone_is_parked_at_the_end_of_its_lease_with_its_adapters(cluster, tiny_path):
    kernel = subprocess.Popen([sys.executable, "-c", KERNEL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    line = next((line for line in kernel.stdout if line.startswith("TOLD")), None)
    assert line is not None, "the kernel ended before it trained"
    before, tokens = json.loads(line.removeprefix("TOLD"))
    record = client.find("left")
    time.sleep(2.5)  # more than its lease, while it lives and says so
    assert registry.parked("left") is None, "while its kernel lives it is not idle"
    assert client.ask(record, "/state")["lease"] | {"silent_s": 0} == {
        "seconds": 1.0,
        "silent_s": 0,
        "left_s": None,
        "parks": True,
    }
    os.kill(kernel.pid, signal.SIGKILL)
    kernel.wait()
    until(lambda: registry.parked("left") is not None)
    assert registry.parked("left")["lost"] == ["gradients that waited for optim_step()"]

    session = rb.attach("left")
    assert left_in_memory("left") and json.loads(json.dumps(sums(session))) == before
    assert (session.step, session.version, list(session.branches)) == (2, 2, ["other", "main"])
    again = {
        name: session.rollout(["sort 52"], temperature=0, max_tokens=8, adapter=name).responses.values.tolist()
        for name in ("main", "other")
    }
    assert again == tokens
    assert np.isfinite(trained(session, tasks.prompts(4)).loss)
    session.close()
    assert registry.parked("left") is None, "closed is not parked"

"""Teachers of a session: held by the ranks or served over HTTP, equal to transformers; refused, gone, closed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlbench as rb
from rlbench.errors import BuildError, DataError, EngineError, LossError, SessionError, StateError
from rlbench.options import OptionError
from rlbench.session.teachers.server import requests_of
from rlbench.tiny import tasks
from tests.clock import until
from tests.session.session_trainers import OPTIONS, prompts
from tests.session.teacher_server import TeacherService

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def other(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A teacher: the tiny model with other weights."""
    folder = tmp_path_factory.mktemp("teacher")
    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_path).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def rollouts(session: Any) -> Any:
    return session.rollout(tasks.prompts(6), n=2, max_tokens=8, progress=False)


@pytest.fixture
def taught(session: Any, other: str) -> Any:
    """The teacher on the ranks, built where none is held."""
    return session.teacher(other)


@pytest.fixture
def none_held(session: Any, other: str) -> None:
    """No teacher on the ranks, whichever tests came before."""
    if "teacher" in session.core.engines:
        session.teacher(other).close()


@pytest.fixture(scope="module", autouse=True)
def none_left(session: Any, other: str) -> Iterator[None]:
    """Other files begin on a session without teachers."""
    yield
    if "teacher" in session.core.engines:
        session.teacher(other).close()


def logprobs_of(path: str, batch: Any, temperature: float = 1.0) -> torch.Tensor:
    """(tokens, V) of the response tokens, row by row."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found = []
    for prompt, response in zip(batch.prompts, batch.responses, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(prompt) - 1 : -1]
        found.append(torch.log_softmax(logits / temperature, -1))
    return torch.cat(found)


def sampled(logp: torch.Tensor, batch: Any) -> np.ndarray:
    return logp[torch.arange(len(logp)), torch.from_numpy(batch.responses.values.astype(np.int64))].numpy()


def check_scored(found: Any, path: str, k: int, atol: float = 2e-4) -> None:
    logp = logprobs_of(path, found)
    np.testing.assert_allclose(found.columns["teacher_logprobs"], sampled(logp, found), atol=atol)
    top = logp.topk(k)
    np.testing.assert_allclose(found.columns["teacher_top_logprobs"], top.values.numpy(), atol=atol)
    assert (found.columns["teacher_ids"] == top.indices.numpy()).mean() > 0.99, "but for ties"


def test_a_teacher_on_the_ranks_scores_rollouts_and_batches_as_transformers_does(session, rollouts, taught, other):
    seen = taught.score(rollouts)
    batch = seen.batch()
    np.testing.assert_array_equal(seen.channels["teacher_logprob"], batch.columns["teacher_logprobs"])
    np.testing.assert_allclose(batch.columns["teacher_logprobs"], sampled(logprobs_of(other, batch), batch), atol=2e-4)
    check_scored(taught.score(batch, top_k=5), other, 5)
    wide, same = taught.score(rollouts, top_k=5)[2:5].batch(), taught.score(rollouts[2:5].batch(), top_k=5)
    assert wide.columns.keys() == same.columns.keys()
    for name, values in same.columns.items():
        np.testing.assert_allclose(wide.columns[name], values, atol=2e-5)
    cooler = taught.score(batch, temperature=0.5).columns["teacher_logprobs"]
    np.testing.assert_allclose(cooler, sampled(logprobs_of(other, batch, 0.5), batch), atol=3e-4)
    assert "held as 'teacher' on the ranks" in repr(taught) and session.teacher(other).where == taught.where
    assert "teacher_logprob" in rollouts.with_batch(batch).channels


@pytest.mark.usefixtures("put_back")
def test_its_losses_step_and_are_compared_undone_and_rehearsed(session, rollouts, taught):
    batch = taught.score(rollouts.batch(), top_k=8)
    gkd = rb.rl.gkd(beta=0.3)
    first = session.train_step(batch, loss=gkd, lr=1e-4)
    assert {"teacher_kl", "teacher_mass"} <= set(first) and "teacher_kl" in first.tokens
    again = [session.train_step(batch, loss=gkd, lr=1e-4)["loss"] for _ in range(2)]
    assert again[-1] < first["loss"]
    session.undo()
    assert session.train_step(batch, loss=gkd, lr=1e-4)["loss"] == pytest.approx(again[-1], rel=1e-5)
    three = {"gkd": gkd, "sampled": "sampled_kl", "grpo": "grpo"}
    assert "without an advantage" in str(session.loss_lab(batch, three).failed["grpo"])
    weighed = batch.replace(advantages=np.ones_like(batch.advantages))
    lab = session.loss_lab(weighed, three, parameter_gradients=True)
    assert list(lab) == ["gkd", "sampled", "grpo"] and not lab.failed
    assert lab["gkd"].norm == 0 and lab["sampled"].norm > 0 and lab.parameters.norms[0] > 0
    session.forward_backward(batch, loss=gkd)
    assert lab["gkd"].value == pytest.approx(session.forward_backward(batch, loss=gkd)["loss"], rel=1e-4)
    assert session.gradients().tokens[0].hidden.max() > 0
    session.zero_grad()
    assert session.rehearse(32, 64, loss=gkd, top_k=8, seconds=1)
    mixed = rb.data.join(batch.replace(truncated=None), taught.score(answers(session), top_k=8))
    assert np.isfinite(session.train_step(mixed, loss=gkd)["loss"])


@pytest.mark.usefixtures("put_back")
def test_a_trainer_distils_on_policy_as_the_advantage_by_hand_does(session, other):
    trainer = session.trainer("distill", prompts(), teacher=other, **{**OPTIONS, "train_batch_size": 16, "n": 2})
    teacher = session.teacher(other)
    assert {"advantage_estimator", "kl_coef", "gamma"} <= trainer.chosen.keys()
    made = trainer.make_experience()
    parts = session.train.run(waiting)
    batch = rb.data.join(*(part for rank in parts for part in rank))
    of_teacher = teacher.score(batch).columns["teacher_logprobs"]
    by_hand = np.where(batch.mask, of_teacher - session.logprobs(batch), 0.0)
    np.testing.assert_allclose(batch.advantages, by_hand, atol=1e-4)
    assert made["rollout_ref_kl"] == pytest.approx(-by_hand[batch.mask].mean(), abs=1e-4)
    batch = batch.replace(advantages=by_hand, old_logprobs=None, ref_logprobs=None)
    aggregation = session.forward_backward(batch, loss="importance_sampling")  # as the loss is meant, at both doors
    norm = session.optim_step().grad_norm
    session.undo()
    assert aggregation["aggregation"] == "token-mean"
    done = trainer.ppo_train()
    assert done["grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert session.history[-1]["teacher_kl"] == done["teacher_kl"] == made["rollout_ref_kl"]
    for told, given, error in (
        ("which teacher", {}, SessionError),
        ("reference=True has no effect", {"teacher": other, "reference": True}, OptionError),
        ("kl_coef=0 leaves nothing", {"teacher": other, "kl_coef": 0.0}, OptionError),
    ):
        with pytest.raises(error, match=told):
            session.trainer("distill", prompts(), **given)
    with pytest.raises(SessionError, match="teacher has no effect with 'grpo'"):
        session.trainer("grpo", prompts(), tasks.reward, teacher=other)
    teacher.close()
    with pytest.raises(StateError, match="engine 'teacher' is gone"):
        trainer.step()


@pytest.mark.usefixtures("put_back")
def test_a_trainer_of_texts_learns_from_what_a_teacher_said_of_them(session, taught):
    texts = taught.score(answers(session), top_k=8)
    given = {"loss": rb.rl.gkd(beta=0.3), "lr": 1e-4, "train_batch_size": 4}
    trainer = session.trainer("sft", data=texts, eval_data=texts, **given)
    before, steps = trainer.evaluate(), trainer.fit(3)
    assert before["eval/loss"] == pytest.approx(steps[0]["loss"], rel=1e-4) and before["eval/teacher_mass"] > 0.5
    assert trainer.evaluate()["eval/loss"] < before["eval/loss"]


def waiting():
    return [part.batch for part in globals()["trainer"].replay_buffer.items]


def answers(session):
    rows = [{"prompt": p, "completion": tasks.answer(p)} for p in tasks.prompts(4, seed=5)]
    return rb.data.demonstrations(rows, session)


@pytest.mark.usefixtures("put_back")
def test_its_log_probs_are_an_advantage_too(session, rollouts, taught):
    batch = taught.score(rollouts).batch(rb.rl.on_policy_distillation())
    gap = batch.columns["teacher_logprobs"] - batch.sampler_logprobs
    np.testing.assert_allclose(batch.advantages[batch.mask], gap[batch.mask], atol=1e-5)
    assert np.isfinite(session.train_step(batch, loss="importance_sampling")["loss"])


@pytest.mark.usefixtures("put_back")
def test_a_function_written_in_a_cell_sees_hidden_states_logits_and_columns(session, rollouts):
    batch = rollouts.batch().with_columns(weight=np.linspace(0, 1, rollouts.samples))

    def mine(x):
        assert x.hidden_states.shape[:2] == x.logits.shape[:2] == x.mask.shape
        entropy = torch.distributions.Categorical(logits=x.logits).entropy()
        return x.channels["weight"] * x.hidden_states.pow(2).mean(-1) - 0.01 * entropy, {"exact": entropy}

    mine.needs = ("hidden_states", "logits")
    metrics = session.train_step(batch, loss=mine)
    np.testing.assert_allclose(metrics.tokens["exact"], metrics.tokens["entropy"], atol=1e-4)
    lab = session.loss_lab(batch, {"mine": mine})
    assert not lab.failed and lab["mine"].norm == 0

    def unsound(x):
        return x.hidden_states.mean(-1).detach(), {}

    unsound.needs = ("hidden_states",)
    with pytest.raises(LossError, match="no gradient"):
        session.train_step(batch, loss=unsound)


class Baseline:
    """A loss with a state."""

    def __init__(self):
        self.state = {"mean": torch.zeros(())}

    def __call__(self, x):
        return (x.entropy.detach() - self.state["mean"]) * x.logprobs, {"seen": x.entropy.detach()}

    def update(self, metrics):
        self.state = {"mean": torch.as_tensor(metrics["seen"])}


class Mistyped(Baseline):
    def update(self, metrics):
        self.state = {"mean": metrics["sen"]}


@pytest.mark.usefixtures("put_back")
def test_a_losses_state_is_undone_and_seen_by_the_lab(session, rollouts):
    batch = rollouts.batch()

    def held():
        return session.train.call_all("loss_states").result()[0]

    seen = session.train_step(batch, loss=Baseline())["seen"]
    assert float(held()["Baseline"]["mean"]) == pytest.approx(seen, rel=1e-5)
    lab = session.loss_lab(batch, {"mine": Baseline()})
    before = session.forward_backward(batch, loss=Baseline())["loss"]
    assert lab["mine"].value == pytest.approx(before, rel=1e-4)
    session.zero_grad()
    session.undo()
    assert held() == {}
    with pytest.raises(LossError, match=r"update of `.*Mistyped.*` raised KeyError"):
        session.train_step(batch, loss=Mistyped())


@pytest.mark.usefixtures("none_held")
def test_what_cannot_teach_is_refused_and_the_session_stays_usable(session, rollouts, tiny_path, tmp_path):
    strange = tmp_path / "strange"
    shutil.copytree(tiny_path, strange)
    changed = AutoTokenizer.from_pretrained(tiny_path)
    changed.add_tokens(["zebra"])
    changed.save_pretrained(strange)
    bare = tmp_path / "bare"
    shutil.copytree(tiny_path, bare, ignore=shutil.ignore_patterns("tokenizer*", "special_tokens*", "vocab*"))
    for model, options, said in (
        (str(strange), {}, "another tokenizer.*zebra"),
        (str(bare), {}, "another tokenizer.*1 and 262 tokens"),
        (str(tmp_path / "nowhere"), {}, "nowhere"),
        ("http://127.0.0.1:9/v1", {"timeout_s": 1.0}, "127.0.0.1:9 could not be asked"),
        ("http://127.0.0.1:9/v1?key=1", {}, "token_env"),
    ):
        with pytest.raises(BuildError, match=said):
            session.teacher(model, **options)
    with pytest.raises(SessionError, match="served would have no effect"):
        session.teacher(str(tiny_path), served="x")
    with pytest.raises(SessionError, match="an engine 'actor'"):
        session.teacher(str(strange), name="actor")
    assert set(session.core.engines) == {"actor", "inference", "reference"}
    batch = rollouts.batch()
    with pytest.raises(LossError, match=r"session\.teacher\(model\)\.score"):
        session.train_step(batch, loss="gkd")
    same = session.teacher(str(tiny_path))
    assert "held as the reference" in repr(same)
    for given, options, said in (
        (batch, {"top_k": -1}, "top_k=-1"),
        (batch, {"top_k": 10_000}, "the model has"),
        (None, {}, "rollouts or a TrainBatch"),
    ):
        with pytest.raises(DataError, match=said):
            same.score(given, **options)
    with pytest.raises(LossError, match="top_k=4 is of a loss that needs a teacher"):
        session.rehearse(32, 64, loss="grpo", top_k=4)
    assert same.score(batch).columns


@pytest.mark.usefixtures("none_held")
def test_a_closed_teacher_says_so_and_the_session_knows_those_that_are_held(session, rollouts, other, tmp_path):
    teacher = session.teacher(other, name="second")
    third = tmp_path / "third"
    shutil.copytree(other, third)
    with pytest.raises(SessionError, match="'second' is"):
        session.teacher(str(third), name="second")
    assert session.core.link.state("config")["config"]["teachers"] == {"second": other}
    teacher.close()
    teacher.close()
    with pytest.raises(StateError, match="was closed"):
        teacher.score(rollouts)
    assert "second" not in session.core.engines


def test_a_teacher_whose_rank_died_is_built_again_as_it_was(session, rollouts, taught):
    before = taught.score(rollouts).channels["teacher_logprob"]
    for pid in session.core.engines["teacher"]._pids.values():
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="teacher died"):
        taught.score(rollouts)
    assert "frozen as before" in repr(session.heal())
    np.testing.assert_array_equal(taught.score(rollouts).channels["teacher_logprob"], before)


# -- over HTTP


@pytest.fixture
def service(other: str):
    made = TeacherService(other)
    yield made
    made.close()


def test_a_served_teacher_says_what_the_model_says(session, rollouts, service, other):
    teacher = session.teacher(f"{service.url}/v1", concurrency=2)
    assert "served at 127.0.0.1" in repr(teacher)
    batch = rollouts.batch()
    check_scored(teacher.score(batch, top_k=4), other, 4)
    np.testing.assert_allclose(
        teacher.score(rollouts).channels["teacher_logprob"], sampled(logprobs_of(other, batch), batch), atol=2e-4
    )


def test_requests_hold_no_more_sequences_and_numbers_than_an_answer_should():
    batch = rb.data.join(
        [rb.data.datum(list(range(n)), mask=[False] + [True] * (n - 1)) for n in (4, 9, 3, 200, 5)] * 5
    )
    assert [len(rows) for rows in requests_of(batch, 0)] == [8, 8, 8, 1]
    many = requests_of(batch, 999)
    assert [i for rows in many for i in rows] == list(range(25))
    sizes = [int(batch.lengths[list(rows)].sum()) * 1000 for rows in many]
    assert all(size <= 200_000 or len(rows) == 1 for size, rows in zip(sizes, many, strict=True)) and len(many) > 8


def test_one_that_echoes_tells_the_sampled_tokens_alone(session, rollouts, other):
    service = TeacherService(other, knows="echo", tokenizes=False)
    try:
        with pytest.raises(BuildError, match=r"tokenizer=folder or hub id"):
            session.teacher(service.url)
        teacher = session.teacher(service.url, tokenizer=other)
        batch = rollouts.batch()
        found = teacher.score(batch).columns["teacher_logprobs"]
        np.testing.assert_allclose(found, sampled(logprobs_of(other, batch), batch), atol=2e-4)
        with pytest.raises(DataError, match="prompt_logprobs"):
            teacher.score(batch, top_k=2)
    finally:
        service.close()


def test_one_with_another_tokenizer_or_temperature_is_refused(session, rollouts, service):
    service.shift = 1
    with pytest.raises(BuildError, match="another tokenizer"):
        session.teacher(service.url)
    service.shift = 0
    with pytest.raises(BuildError, match="serves served, not 'other'"):
        session.teacher(service.url, served="other")
    teacher = session.teacher(service.url, served="served")
    cold = rollouts.batch().replace(temperature=0.5)
    with pytest.raises(DataError, match="scores at temperature 1"):
        teacher.score(cold)
    assert teacher.score(cold, temperature=1.0).columns


def test_a_stop_is_felt_while_a_served_teacher_thinks(session, rollouts, service):
    teacher = session.teacher(service.url)
    service.thinks_s = 5.0
    asked = teacher.score(rollouts, block=False)
    begin = time.monotonic()
    asked.stop()
    with pytest.raises(rb.Stopped, match="nothing of it is kept"):
        asked.result()
    assert time.monotonic() - begin < 2
    service.thinks_s = 0.0


def test_one_that_goes_away_in_the_middle_costs_one_sentence(session, rollouts, service):
    teacher = session.teacher(service.url, concurrency=1)
    many = rb.data.join(rollouts.batch(), rollouts.batch())
    service.gone_after = service.answered + 1
    with pytest.raises(EngineError, match=r"the teacher at 127.0.0.1:\d+ could not be asked.*1 of 3 requests") as gone:
        teacher.score(many)
    assert "\n" not in str(gone.value)
    service.gone_after = 10_000
    assert teacher.score(many).columns and session.logprobs(rollouts.batch()).size


@pytest.mark.long
def test_vllms_own_server_is_a_teacher(session, rollouts, other, tmp_path):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", other, "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "128", "--enforce-eager"]
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with (tmp_path / "server.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
    try:

        def answering():
            assert server.poll() is None, (tmp_path / "server.log").read_text()[-2000:]
            try:
                return session.teacher(f"http://127.0.0.1:{port}/v1", timeout_s=30.0)
            except BuildError:  # it is not there yet
                return None

        teacher = until(answering, 300.0, what=lambda: (tmp_path / "server.log").read_text()[-2000:])
        check_scored(teacher.score(rollouts.batch(), top_k=8), other, 8)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)
    with pytest.raises(EngineError, match="could not be asked"):
        teacher.score(rollouts)

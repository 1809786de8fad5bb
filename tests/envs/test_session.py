"""Environments through a session: by value to the replica, rewards and mask to the trainer, errors to the cell."""

import asyncio
import functools
import threading
import uuid

import numpy as np
import pytest

import rlbench as rb
from rlbench.envs import Env, Step, from_hook, tools
from rlbench.errors import DataError, Stopped
from rlbench.tiny import tasks
from tests.clock import LIMIT_S, until
from tests.envs.making import post_generation_hook
from tests.envs.trl_guess import ASKED, GuessEnv

pytestmark = pytest.mark.engine

PROMPTS = [{"prompt": p, "label": tasks.answer(p)} for p in tasks.prompts(6, seed=3)]


class Retry(Env):
    """Says what was wrong, and pays for each turn."""

    def step(self, turn):
        right = turn.text == turn.prompt.label
        return Step(f"wrong: {turn.text[:3]} é", 1.0 if right else -0.25, right, {"said": turn.text})


@pytest.fixture(scope="module")
def rollouts(session):
    session.sync_weights()
    return session.rollout(PROMPTS, n=4, env=Retry, max_turns=3, max_tokens=10)


def test_the_environments_rewards_are_the_rollouts(rollouts):
    assert rollouts.samples == 24 and not rollouts.env_errors and rollouts.infos[0]["turns"] >= 1
    for i, info in enumerate(rollouts.infos):
        right = info["steps"][-1]["said"] == PROMPTS[rollouts.group[i]]["label"]
        wanted = -0.25 * (info["turns"] - right) + right
        assert rollouts.rewards[i] == pytest.approx(wanted) and len(rollouts.turn_rewards[i]) == info["turns"]
    assert not rollouts.mask.all() and rollouts.turns.max() == 2


def test_trainer_and_sampler_agree_on_every_sampled_token_of_every_turn(session, rollouts):
    """What the replica saw, turn by turn, is what the trainer computes on, in one sequence."""
    batch = rollouts.batch(advantage=rb.rl.group_normalized())
    gap = np.abs(session.logprobs(batch) - batch.sampler_logprobs)
    assert batch.mask.sum() > 200 and gap[batch.mask].max() <= 1e-4 and gap[~batch.mask].max() > 1e-2


def test_what_an_environment_said_trains_nothing(session, rollouts):
    batch = rollouts.batch(advantage=rb.rl.group_normalized())
    noise = np.where(batch.mask, 0, 7).astype(np.float32)
    other = batch.replace(advantages=batch.advantages + noise, sampler_logprobs=batch.sampler_logprobs - noise)
    found = []
    for one in (batch, other):
        found.append(session.forward_backward(one))
        session.zero_grad()
    assert found[0].loss == pytest.approx(found[1].loss, abs=1e-6)
    step = session.train_step(batch)
    assert np.isfinite([step.loss, step.grad_norm, step.kl]).all()
    assert step["logprob_gap_max"] <= 1e-3  # only over what was sampled
    seen = rollouts.with_batch(batch, step)
    assert np.isnan(seen.channels["difference"][~rollouts.mask]).all()
    session.undo()


def test_a_hook_and_tools_run_on_the_replica(session):
    texts = session.inference.generate(["sort 21"], {"max_tokens": 4}, n=2, env=from_hook(post_generation_hook))
    assert [info["turns"] for info in texts.infos] == [2, 2] and texts.rewards is None

    def any_call(text):
        return [rb.envs.ToolCall("length", text)]

    env = tools({"length": lambda text: len(text)}, parser=any_call)
    called = session.rollout(PROMPTS[:1], env=env, max_turns=2, max_tokens=5)
    assert called.infos[0]["steps"][0]["tool_calls"][0]["name"] == "length"
    assert called.infos[0]["messages"][1]["role"] == "tool"


def calls_guess(text):
    return [rb.envs.ToolCall("guess", {"number": len(text) % 10})]


ROWS = [{"prompt": ASKED, "secret": secret} for secret in (3, 8)]


def test_an_environment_of_trls_runs_as_it_is(session):
    """Its rows reach `reset`, its methods are called, and its reward is read where the instance is."""
    env = rb.envs.from_trl(GuessEnv, reward=lambda env: env.reward - len(env.guesses), parser=calls_guess)
    rollouts = session.rollout(ROWS, n=3, env=env, max_turns=4, max_tokens=9)
    assert rollouts.samples == 6 and not rollouts.env_errors
    for i, info in enumerate(rollouts.infos):
        assert info["asked"] == {"role": "user", "content": "Guess. It is below 10."}
        said = [message for message in info["messages"] if message["role"] == "tool"]
        assert {message["name"] for message in said} == {"guess"}
        right = [message["content"] for message in said].count("right")
        counted = sum(message["content"].startswith(("too", "right")) for message in said)
        assert rollouts.rewards[i] == pytest.approx(-counted + right / counted)
    assert not rollouts.mask.all() and len(rollouts.batch(advantage=rb.rl.group_normalized())) == 6
    tree = rollouts.fork(0, at=2, n=2, max_tokens=4)
    assert [info["asked"] for info in tree.infos if "fork" in info] == [rollouts.infos[0]["asked"]] * 2
    assert float(session.evaluate(ROWS, env=env, max_turns=2, max_tokens=4)) <= 0
    assert session.rollout(ROWS, env=env, max_turns=9, max_tokens=4, max_total_tokens=60).env_rewards.max() < 0
    with pytest.raises(DataError, match=r"prompt 0: GuessEnv.reset takes secret"):
        session.rollout([ASKED], env=env, max_tokens=4)


def test_tools_are_named_to_templates_that_read_them_those_of_several_environments_by_prompt(session, monkeypatch):
    jobs = []

    def seen(verb, job, **options):
        jobs.append(job)
        raise Stopped("seen")

    monkeypatch.setattr(session.inference, "_info", session.inference._info | {"names_tools": True})
    monkeypatch.setattr(session.inference, "call_all", seen)
    one, several = rb.envs.from_trl(GuessEnv), rb.envs.from_trl({"a": GuessEnv, "b": GuessEnv})
    rows = [row | {"environment": name} for row, name in zip(ROWS, "ab", strict=True)]
    for env in (one, several):
        with pytest.raises(Stopped, match="seen"):
            session.inference.submit_generate(rows, {"max_tokens": 4}, env=env, progress=False)
    assert jobs[0].chat == {"tools": one.schemas()} and not jobs[0].tools
    assert not jobs[1].chat and [len(tools) for tools in jobs[1].tools] == [2, 2]


class Faulty(Env):
    def __init__(self, some):
        self.some = some

    def step(self, turn):
        if not self.some or turn.prompt.label == PROMPTS[0]["label"]:
            raise ValueError("out of order")
        return Step(reward=1.0, done=True)


def test_an_error_is_told_with_its_line_and_ends_its_sample_alone(session):
    with pytest.warns(UserWarning, match=r"^2 of 4 completions were ended .* rollouts\.env_errors") as told:
        some = session.rollout(PROMPTS[:2], n=2, env=Faulty(True), max_tokens=4)
    assert len(told) == 1 and [e.sample for e in some.env_errors] == [0, 1] and some.env_errors[0].ended
    assert some.env_errors[0].line.endswith('raise ValueError("out of order")')
    assert "test_session" in some.env_errors[0].line and "ValueError: out of order" in rb.last_traceback()
    assert some.aborted.tolist() == [True, True, False, False]
    assert len(some.batch(lambda rewards, group: rewards)) == 2
    with pytest.raises(DataError, match=r"failed for all 4 completions.*out of order") as failed:
        session.rollout(PROMPTS[:2], n=2, env=Faulty(False), max_tokens=4)
    assert "raise ValueError" in failed.value.user_line and "out of order" in failed.value.full_traceback


class Judging(Env):
    role = "judge"

    def step(self, turn):
        raise AssertionError("asked with a turn")


def test_a_role_that_the_chat_template_refuses_is_said_before_anything_is_sampled(session):
    chats = [[{"role": "user", "content": "sort 21"}]] * 2
    with pytest.raises(DataError, match=r"failed for all 2 completions: reset raised.*unknown role judge"):
        session.rollout(chats, env=Judging, max_tokens=4)
    with pytest.raises(DataError, match="asked with a turn"):  # of one turn alone it has nothing to say
        session.rollout(chats, env=Judging, max_tokens=4, max_turns=1)


class Together(Env):
    """Waits until as many samples as there are to be are in this very step."""

    count = 0
    whole = asyncio.Event()

    def __init__(self, wanted):
        self.wanted = wanted

    async def step(self, turn):
        type(self).count += 1
        if type(self).count == self.wanted:
            self.whole.set()
        await self.whole.wait()
        return Step(reward=1.0, done=True)


def test_thousands_of_async_steps_are_in_flight_at_once_beside_the_engine(session):
    env = functools.partial(Together, 2048)
    rollouts = session.rollout(["sort 21"] * 32, n=64, env=env, max_tokens=2, progress=False, env_timeout_s=LIMIT_S)
    assert rollouts.samples == 2048 and not rollouts.env_errors and rollouts.rewards.sum() == 2048


class Hanging(Env):
    """Says by a file in `folder` that a sample is in its second turn, and hangs there until there is `go`."""

    def __init__(self, folder):
        self.folder = folder

    def step(self, turn):
        if turn.number:
            (self.folder / f"in-{uuid.uuid4()}").touch()
            until((self.folder / "go").exists)
        return Step("again", reward=0.5)


def test_a_stop_is_heard_and_the_control_lane_answers_while_an_environment_hangs(session, tmp_path):
    env = functools.partial(Hanging, tmp_path)
    pending = session.rollout(PROMPTS[:2], n=2, env=env, max_turns=5, max_tokens=4, block=False)
    try:
        until(lambda: len(list(tmp_path.glob("in-*"))) == 4)
        assert session.inference.status()["weights"] == "cuda"
        pending.stop()
        with pytest.raises(Stopped) as stopped:
            pending.result(timeout=LIMIT_S)
    finally:
        (tmp_path / "go").touch()
    kept = stopped.value.partial
    assert kept.samples == 4 and kept.aborted.all() and not kept.env_errors
    assert [len(r) for r in kept.turn_rewards] == [2] * 4 and np.allclose(kept.env_rewards, 0.5)


def test_evaluate_takes_the_environments_rewards(session):
    found = session.evaluate(PROMPTS, env=Retry(), max_turns=2, max_tokens=10)
    assert float(found) == pytest.approx(found.rollouts.env_rewards.mean())
    assert "6 completions" in repr(found)
    with pytest.raises(DataError, match="needs a reward"):
        session.evaluate(PROMPTS)


def test_what_would_have_no_effect_is_refused(session):
    with pytest.raises(DataError, match="max_turns would have no effect"):
        session.rollout(PROMPTS, max_turns=3)
    with pytest.raises(DataError, match=r"no step\(turn\)"):
        session.rollout(PROMPTS, env=3)
    with pytest.raises(DataError, match="max_turns=0"):
        session.rollout(PROMPTS, env=Retry, max_turns=0)
    made = Retry()
    made.lock = threading.Lock()
    with pytest.raises(DataError, match=r"cannot be sent.*lock"):
        session.rollout(PROMPTS, env=made)


def test_a_later_kernel_finds_the_turns(session, rollouts):
    session.rollout(PROMPTS[:1], n=2, env=Retry(), max_turns=2, max_tokens=6)
    again = session.inference.last_rollout()
    assert again.samples == 2 and again.mask is not None and again.infos[0]["turns"] >= 1

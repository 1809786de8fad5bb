"""Samples of several turns on a real vLLM engine: tokens go in as they came out, and environments do not hold it up."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlbench.data import Prompt, Ragged
from rlbench.data.rollouts.jobs import GenerateJob
from rlbench.engines.draws import tools_by_prompt
from rlbench.envs import Env, Step, from_trl
from tests.clock import LIMIT_S, until

from .tiny_checkpoint import hf_logprobs
from .turns import CHAT, IM_END, UNCUT, Echo, job

pytestmark = pytest.mark.engine


class Done(Env):
    def step(self, turn):
        return Step(done=True)


def test_an_env_that_is_done_at_once_changes_nothing(turn_replica, turn_lane):
    prompts = ["hello", CHAT, [5, 6, 7]]
    plain = turn_lane(turn_replica.generate, job(prompts, n=3))
    met = turn_lane(turn_replica.generate, job(prompts, Done(), n=3))
    key = np.lexsort(plain.keys.T[::-1]), np.lexsort(met.keys.T[::-1])
    for name in ("token_ids", "logprobs"):
        rows = [Ragged(getattr(a, name), a.offsets).take(k).values for a, k in zip((plain, met), key, strict=True)]
        np.testing.assert_allclose(*rows, atol=1e-6)
    assert met.mask.all() and not met.turns.any() and plain.mask is None
    assert met.prompt_token_ids == plain.prompt_token_ids
    assert [plain.texts[i] for i in key[0]] == [met.texts[i] for i in key[1]]


@pytest.mark.parametrize("prompt", ["hello", CHAT])
def test_token_in_token_out(draw, turn_folder, prompt):
    """Under the model, every sampled token has the log-prob it was drawn with, given all before it: nothing that was
    sampled was encoded again, and what the policy saw is what the arrays hold."""
    found = draw(job([prompt], Echo("ok \u00e9"), n=4))
    model = AutoModelForCausalLM.from_pretrained(turn_folder, dtype=torch.float32)
    start = len(found.arrays.prompt_token_ids[0])
    for key in found.keys:
        tokens, mask = found.of("token_ids", key), np.array(found.of("mask", key))
        reference = hf_logprobs(model, found.arrays.prompt_token_ids[0] + tokens)[start - 1 :]
        logprobs = np.array(found.of("logprobs", key))
        np.testing.assert_allclose(logprobs[mask], reference[mask], atol=1e-4)
        assert not logprobs[~mask].any() and 0 < mask.sum() <= 18
        assert found.of("turns", key) == sorted(found.of("turns", key)) and max(found.of("turns", key)) == 2
        assert found.info(key)["turns"] == 3 and found.info(key)["max_turns"] is True
    assert found.arrays.turn_rewards == [[0.0, 1.0, 2.0]] * 4


def test_a_chats_bridge_is_what_the_template_puts_there(turn_replica, draw):
    """Cut at its length, a turn is ended by the template's own tokens; ended by the model, nothing is doubled."""
    tokenizer = turn_replica._tokenizer
    wanted = tokenizer("<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    cut = draw(job([CHAT], Echo(), max_turns=2, **UNCUT))
    tokens, mask = cut.of("token_ids"), cut.of("mask")
    assert mask == [True] * 4 + [False] * len(wanted) + [True] * 4 and tokens[4:-4] == wanted
    unthinking = draw(replace(job([CHAT], Echo(), max_turns=2, **UNCUT), chat={"enable_thinking": False}))
    assert unthinking.of("token_ids")[4:-4] == [*wanted, *tokenizer("<think></think>")["input_ids"]]
    ended = draw(job([CHAT], Echo(), max_turns=2, max_tokens=4, allowed_token_ids=[IM_END]))
    assert ended.of("token_ids") == [IM_END, *wanted[1:], IM_END]
    assert ended.of("mask") == [True, *[False] * (len(wanted) - 1), True] and ended.finish() == "stop"
    a = tokenizer("a")["input_ids"]
    by_string = {"stop": ["aa"], "allowed_token_ids": a, "max_turns": 2}  # the last "a" ends no message
    stopped = draw(job([CHAT], Echo("a"), **by_string))
    assert stopped.of("token_ids") == [
        *a * 2,
        *tokenizer("<|im_end|>\n<|im_start|>user\na<|im_end|>\n")["input_ids"],
        *tokenizer("<|im_start|>assistant\n")["input_ids"],
        *a * 2,
    ]
    on = draw(job([CHAT], Echo(None), **by_string))
    assert on.of("token_ids") == a * 4  # nothing to say: it goes on inside its message
    inside = draw(job([CHAT], Echo("=3", role=None), max_turns=2, **UNCUT))
    assert inside.of("token_ids")[4:6] == tokenizer("=3")["input_ids"]
    assert inside.of("mask") == [True] * 4 + [False] * 2 + [True] * 4
    said = [m["role"] for m in cut.info()["messages"]]
    assert said == ["assistant", "user", "assistant"]


def test_observations_may_be_messages_token_ids_or_nothing(turn_replica, draw):
    tokenizer = turn_replica._tokenizer
    messages = [{"role": "tool", "content": "a"}, {"role": "user", "content": "b"}]
    found = draw(job([CHAT], Echo(messages), max_turns=2, max_tokens=3, ignore_eos=True))
    said = tokenizer.decode([t for t, own in zip(found.of("token_ids"), found.of("mask"), strict=True) if not own])
    assert said == "<|im_end|>\n<|im_start|>tool\na<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    ids = draw(job([CHAT], Echo([9, 8, 7]), max_turns=2, max_tokens=3, ignore_eos=True))
    assert ids.of("token_ids")[3:6] == [9, 8, 7] and ids.of("mask")[3:6] == [False] * 3
    on = draw(job([[1, 2, 3]], Echo(None), max_turns=3, max_tokens=2, ignore_eos=True))
    assert on.of("mask") == [True] * 6 and on.of("turns") == [0, 0, 1, 1, 2, 2]


class Opening(Env):
    """Puts something behind the prompt, another for each sample."""

    made = 0
    said: Any = ("one", "two and more")

    def reset(self, prompt):
        Opening.made += 1
        self.number = int(prompt.label is not None)
        return self.said[(Opening.made - 1) % len(self.said)]

    def step(self, turn):
        return Step(done=True, info={"context": turn.context, "messages": len(turn.messages)})


@pytest.mark.parametrize("prompt", ["start:", CHAT])
def test_what_reset_observes_stands_before_the_first_turn_untrained(turn_replica, draw, prompt):
    found = draw(job([prompt], Opening, n=2, max_tokens=4))
    tokenizer, texts = turn_replica._tokenizer, set()
    for key in found.keys:
        whole = found.arrays.prompt_token_ids[0] + found.of("token_ids", key)
        assert found.info(key)["steps"][0]["context"] == whole
        sampled = sum(found.of("mask", key))
        texts.add(tokenizer.decode(whole[: len(whole) - sampled]))
        assert found.of("mask", key) == [False] * (len(found.of("mask", key)) - sampled) + [True] * sampled
    if prompt == CHAT:
        head = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>user\n"
        assert texts == {f"{head}{said}<|im_end|>\n<|im_start|>assistant\n" for said in Opening.said}
    else:
        assert texts == {"start:one", "start:two and more"}


class AtTheEnd(Echo):
    def end_reward(self):
        if self.said == "fail":
            raise ValueError("no reward")
        return 10.0


def test_a_reward_at_the_end_is_asked_for_however_the_sample_ended(draw):
    whole = draw(job([CHAT], AtTheEnd("x"), max_turns=2, **UNCUT))
    assert whole.arrays.turn_rewards == [[0.0, 11.0]]
    cut = draw(job([CHAT], AtTheEnd("x" * 30), total=20, **UNCUT))
    assert cut.finish() == "length" and "no_room" in cut.info() and cut.arrays.turn_rewards == [[10.0]]
    failed = draw(job([CHAT], AtTheEnd("fail"), max_turns=1, **UNCUT))
    (error,) = failed.info()["errors"]
    assert failed.finish() == "abort" and error["where"] == "end_reward" and error["ended"]


class DoorEnv:
    """Environments as TRL has them."""

    def reset(self, **columns):
        return f"It is {columns['colour']}."

    def open(self) -> str:
        """Open."""
        return "open"


class RoomEnv:
    def reset(self, **columns): ...

    def wait(self) -> str:
        """Wait."""
        return "waited"


def test_each_prompt_names_the_tools_of_the_environment_it_meets(turn_replica, draw):
    """The template sees their tools, and what `reset` returned in the prompt's last message."""
    env = from_trl({"door": DoorEnv, "room": RoomEnv})
    prompts = [Prompt(CHAT, meta={"colour": "red", "environment": name}) for name in ("door", "room", "door")]
    asked = replace(job([CHAT] * 3, env, max_turns=1, max_tokens=4), asked=tuple(prompts))
    found = draw(replace(asked, tools=tools_by_prompt(env, prompts, True)))
    for index, (name, said) in enumerate([("open", "It is red."), ("wait", ""), ("open", "It is red.")]):
        system, user = turn_replica._tokenizer.decode(found.arrays.prompt_token_ids[index]).split("<|im_end|>\n", 1)
        tools = json.loads(system.removeprefix("<|im_start|>system\n"))
        assert [tool["function"]["name"] for tool in tools] == [name]
        assert user == f"<|im_start|>user\nhi{said}<|im_end|>\n<|im_start|>assistant\n"


TURNS: dict[int, int] = {}


def others_are_far() -> bool:
    return all(TURNS.get(prompt, 0) >= 7 for prompt in (1, 2, 3))


class Slow(Env):
    """One sample's environment answers its first turn only when the others are in their seventh."""

    def step(self, turn):
        TURNS[turn.prompt.label] = turn.number + 1
        if turn.prompt.label == 0 and turn.number == 0:
            until(others_are_far, what=lambda: TURNS)
        return Step("x")


class SlowAsync(Env):
    async def step(self, turn):
        TURNS[turn.prompt.label] = turn.number + 1
        async with asyncio.timeout(LIMIT_S):
            while turn.prompt.label == 0 and turn.number == 0 and not others_are_far():
                await asyncio.sleep(0.01)
        return Step("x")


@pytest.mark.parametrize("env", [Slow(), SlowAsync()])
def test_a_slow_environment_holds_up_nobody_else(draw, env):
    TURNS.clear()
    found = draw(job(["a", "b", "c", "d"], env, max_turns=8, **UNCUT))
    assert [found.info((prompt, 0)).get("errors") for prompt in range(4)] == [None] * 4
    assert [found.info((prompt, 0))["turns"] for prompt in range(4)] == [8] * 4


def test_a_sample_depends_on_its_seed_alone_in_every_turn(draw):
    prompts = ["a", CHAT, [7] * 20]
    whole = job(prompts, Echo(), n=4)
    found = draw(whole)
    everything = {key: found.of("token_ids", key) for key in found.keys}
    assert len({tuple(t) for t in everything.values()}) == 12
    seeds = whole.seeds[1:2, 2:3].copy()
    alone = GenerateJob([CHAT], 1, whole.sampling, seeds, asked=(Prompt(CHAT, 1),), env=whole.env)
    assert draw(alone).of("token_ids") == everything[1, 2]


@pytest.mark.parametrize("more", [{}, {"first_token_temperature": 9.0}], ids=["plain", "FIRE"])
def test_a_turn_is_what_a_plain_request_draws_on_the_same_tokens_with_the_turns_seed(draw, more):
    from rlbench.workers.replica.turns import turn_seed

    met = job([[1, 2, 3]], Echo([9]), **UNCUT, **more)
    found = draw(met).of("token_ids")
    for turn in range(3):
        plain = job([[1, 2, 3, *found[: 5 * turn]]], **UNCUT, **more)
        plain.seeds[0, 0] = turn_seed(int(met.seeds[0, 0]), turn)
        assert draw(plain).of("token_ids") == found[5 * turn :][:4]


def test_the_seeds_of_turns_differ_and_the_first_is_the_samples_own():
    from rlbench.workers.replica.turns import turn_seed

    seeds = {(seed, turn): turn_seed(seed, turn) for seed in (0, 1, 2**63 - 1, 12345) for turn in range(50)}
    assert len(set(seeds.values())) == 200 and all(0 <= one < 2**63 for one in seeds.values())
    assert [seeds[seed, 0] for seed in (0, 1, 12345)] == [0, 1, 12345]


def test_room_ends_a_sample_and_an_observation_is_never_cut(draw):
    budget = draw(job([[1, 2, 3]], Echo([9] * 5), max_turns=9, total=14, **UNCUT))
    assert budget.of("mask") == [True] * 4 + [False] * 5 + [True] * 4  # one token is left, the observation has five
    assert budget.finish() == "length"
    assert budget.info()["no_room"] == {"after": "step", "observation_tokens": 5, "room": 1}
    exact = draw(job([[1, 2, 3]], Echo([9] * 5), max_turns=9, total=11, **UNCUT))
    assert exact.of("mask") == [True] * 4 + [False] * 5 + [True] * 2 and exact.finish() == "length"
    long = draw(job(["hi"], Echo("w" * 600), **UNCUT))
    assert long.of("mask") == [True] * 4 and long.info()["no_room"]["observation_tokens"] == 600
    full = draw(job([[1] * 508], Echo([2]), max_turns=9, max_tokens=2, ignore_eos=True))
    assert full.of("mask") == [True, True, False, True] and full.finish() == "length"


def test_the_prefix_of_a_turn_is_not_computed_again(turn_replica, turn_lane):
    """The prefix cache is on: a later turn's request finds the earlier blocks."""
    from rlbench.workers.replica import vllm_requests

    hits: list[int] = []
    real = vllm_requests.EngineRequests.step

    def seen(self):
        for known_as, output in real(self):
            hits.append(output.num_cached_tokens or 0)
            yield known_as, output

    vllm_requests.EngineRequests.step = seen
    try:
        turn_lane(turn_replica.generate, job([[1] * 300], Echo([2]), max_turns=3, max_tokens=3, ignore_eos=True))
    finally:
        vllm_requests.EngineRequests.step = real
    assert max(hits) >= 128


@pytest.mark.parametrize("env", [None, Echo("w" * 40)])
def test_more_prompt_tokens_than_one_step_takes_are_served_all_the_same(draw, env):
    """2048 is a step's budget; a seeded prompt's prefill that is cut there fails in vLLM on a CPU."""
    prompts = [[(7 * i + j) % 250 for j in range(100)] for i in range(60)]
    found = draw(job(prompts, env, max_turns=2))
    assert len(found.keys) == 60
    alone = job(prompts[20:21], env, max_turns=2)
    alone.seeds[0, 0] = job(prompts).seeds[20, 0]
    assert draw(alone).of("token_ids") == found.of("token_ids", (20, 0))


def test_a_shared_job_is_claimed_in_shares_and_draws_the_same(draw, called):
    prompts = [[i + 1, i + 2] for i in range(12)]
    whole = job(prompts, Echo(), n=2)
    left, shares = list(range(12)), []

    def claim(count):
        taken, left[:] = left[:count], left[count:]
        shares.append(len(taken))
        return taken

    called.claimer = claim
    mine = GenerateJob(whole.prompts, 2, whole.sampling, whole.seeds, True, asked=whole.asked, env=whole.env)
    shared, own = (draw(one) for one in (mine, whole))
    assert sorted(shared.keys) == sorted(own.keys) and len([s for s in shares if s]) > 2
    assert all(shared.of("token_ids", key) == own.of("token_ids", key) for key in own.keys)

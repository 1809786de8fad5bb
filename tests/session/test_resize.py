"""Ranks and replicas come and go in a session that goes on: state stays, what cannot be is refused before anything
changes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest

import rlbench as rb
from rlbench.errors import BuildError, RLBenchError, StateError
from rlbench.tiny import tasks
from tests.clock import until

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def elastic(cluster: Any, tiny_path: Any) -> Iterator[Any]:
    made = rb.Session("tiny", name="elastic", train={"lr": 1e-3, "masters": True}, seed=3, undo=2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def batch(elastic: Any) -> Any:
    rollouts = elastic.rollout(tasks.prompts(8, seed=3), n=4, max_tokens=12, progress=False)
    return rollouts.score(tasks.reward).batch(advantage=rb.rl.group_normalized())


def pids(session: Any) -> dict[str, Any]:
    return {name: record["pids"] for name, record in session.core.link.state("engines")["engines"].items()}


def greedy(session: Any) -> list[str]:
    said = session.rollout(tasks.prompts(6, seed=1), temperature=0.0, max_tokens=8, progress=False)
    assert said.weight_version == session.version
    return list(said.texts)


def test_more_ranks_and_replicas_go_on_as_the_fewer_would_have(elastic: Any, batch: Any) -> None:
    for _ in range(2):
        elastic.train_step(batch)
    elastic.sync_weights()
    expected = elastic.train_step(batch)
    after = elastic.logprobs(batch)
    elastic.undo()
    said, step, history = greedy(elastic), elastic.step, len(elastic.history)
    replica = pids(elastic)["inference"]
    resized = elastic.resize(train=2, inference=2)
    assert (resized.train, resized.inference, resized.step) == (2, 2, step) == (elastic.train.world_size, 2, 2)
    assert replica.items() <= pids(elastic)["inference"].items(), "the replica that was there goes on"
    assert len(elastic.history) == history and greedy(elastic) == said
    assert elastic.inference.weight_versions() == [elastic.version] * 2
    assert elastic.train_step(batch).grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    assert np.allclose(elastic.logprobs(batch), after, atol=1e-4), "the optimizer's moments came along"


def test_steps_of_before_can_be_undone_and_a_death_heals_at_the_new_size(elastic: Any, batch: Any) -> None:
    step = elastic.step
    elastic.undo()
    elastic.undo()
    assert elastic.step == step - 2, "the second one was kept by another number of ranks"
    elastic.train_step(batch)
    sums = elastic.train.call_all("state_checksum").result()
    os.kill(pids(elastic)["actor"]["rlbench/elastic/actor/1"], signal.SIGKILL)
    until(lambda: "rank 1 died" in repr(elastic))
    assert list(elastic.heal().engines) == ["actor"] and elastic.train.world_size == 2
    assert elastic.train.call_all("state_checksum").result() == sums


def test_what_cannot_be_is_refused_and_nothing_changes(
    elastic: Any, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = pids(elastic)
    for sizes, error, token in (
        ({}, StateError, "train=, inference="),
        ({"train": 0}, StateError, "from 1 on"),
        ({"inference": True}, StateError, "whole number"),
        ({"train": 5}, BuildError, "5 devices"),
        ({"inference": 9}, BuildError, "9 devices"),
    ):
        with pytest.raises(error, match=token):
            elastic.resize(**sizes)
    in_pairs = replace(elastic.core.options, train=replace(elastic.core.options.train, sequence_parallel=2))
    with monkeypatch.context() as patch:
        patch.setattr(elastic.core, "options", in_pairs)
        with pytest.raises(RLBenchError, match="does not divide 3 ranks"):
            elastic.resize(train=3)
    elastic.forward_backward(batch)
    with pytest.raises(StateError, match="gradients wait"):
        elastic.resize(train=1)
    elastic.zero_grad()
    elastic.offload("train")
    with pytest.raises(StateError, match=r"session\.onload"):
        elastic.resize(inference=3)
    elastic.onload("train")
    elastic.trainer("grpo", tasks.prompts(4), tasks.reward, n_samples_per_prompt=2, max_tokens=4)
    with pytest.raises(StateError, match="drop_trainer=True"):
        elastic.resize(train=1)
    assert pids(elastic) == before and elastic.train.world_size == 2


def test_fewer_go_on_too_and_a_kernel_that_comes_back_finds_them(elastic: Any, batch: Any) -> None:
    elastic.sync_weights(transport="broadcast")
    said, kept = greedy(elastic), elastic.logprobs(batch)
    elastic.resize(train=1, inference=1, drop_trainer=True)
    assert greedy(elastic) == said and np.allclose(elastic.logprobs(batch), kept, atol=1e-5)
    elastic.sync_weights(transport="broadcast")  # by a group of fewer members
    elastic.resize(inference=2)
    again = rb.attach("elastic")
    assert (again.options.train.shards, again.options.inference.data_parallel_size) == (1, 2)
    assert greedy(again) == said
    step = again.step
    assert again.train_step(batch).step == step + 1
    elastic.__dict__.update(again.__dict__)  # the fixture's handle drives again


def test_all_replicas_serve_clients_behind_one_address(elastic: Any) -> None:
    """New conversations are spread; later calls go where the earlier ones are, by name or by what was said."""
    elastic.resize(inference=1)
    endpoint = elastic.endpoint()
    assert len(endpoint.urls) == 1
    elastic.resize(inference=2)
    endpoint = elastic.endpoint()
    assert len(endpoint.urls) == 2
    client = openai.OpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0, timeout=60)

    def say(messages: Any, **options: Any) -> Any:
        return client.chat.completions.create(model="policy", messages=messages, max_tokens=8, **options)

    chats = [[{"role": "user", "content": f"sort {number}"}] for number in range(21, 29)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(say, chats))
    for chat, answer in zip(chats, answers, strict=True):
        chat += [{"role": "assistant", "content": answer.choices[0].message.content.strip()}]
        chunks = list(say([*chat, {"role": "user", "content": "again"}], stream=True))
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    traces = elastic.traces()
    assert len(traces) == 8 and {len(run.calls) for run in traces} == {2}
    assert all(run.calls[1].parent is not None for run in traces)
    assert {run.calls[0].server for run in traces} == {"0", "1"}  # how many each depends on when an answer is there

    for number in range(8):
        say(chats[0][:1], extra_headers={"X-Rlbench-Run": f"named-{number}"})
        with openai.OpenAI(base_url=endpoint.run(f"named-{number}"), api_key=endpoint.key) as direct:
            direct.chat.completions.create(model="policy", messages=chats[1][:1], max_tokens=4)
    named = elastic.traces("named-*")
    assert [len(run.calls) for run in named] == [2] * 8
    assert {len({call.server for call in run.calls}) for run in named} == {1}
    assert {call.server for run in named for call in run.calls} == {"0", "1"}


def test_a_client_that_goes_away_is_gone_for_the_replica_behind_the_first_too(elastic: Any) -> None:
    endpoint = elastic.endpoint()
    name = next(name for name in map(str, range(99)) if endpoint.run(name).startswith(endpoint.urls[1]))
    body = {"model": "policy", "messages": [{"role": "user", "content": "sort 1"}], "max_tokens": 1500, "stream": True}
    body |= {"ignore_eos": True}
    headers = {"Authorization": f"Bearer {endpoint.key}:{name}"}
    with httpx.stream("POST", f"{endpoint.url}/chat/completions", json=body, headers=headers, timeout=60) as answer:
        assert answer.status_code == 200
        until(lambda: [one["open"] for one in elastic.inference.control("endpoint")] == [0, 1])
    until(lambda: [one["open"] for one in elastic.inference.control("endpoint")] == [0, 0])
    refused = httpx.post(f"{endpoint.url}/chat/completions", json=body, headers={"Authorization": f"Bearer x:{name}"})
    assert refused.status_code == 401
    wrong = httpx.post(f"{endpoint.url}/chat/completions", json=body | {"model": "none"}, headers=headers)
    assert wrong.status_code == 404 and "none" in wrong.json()["error"]["message"]

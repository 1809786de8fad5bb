"""The live policy behind a URL: what clients get, what is kept of it, what trains on it, and who is refused."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

import rlbench as rb
from rlbench.session.endpoint.endpoint import Endpoint
from tests.clock import interrupt_once, until

pytestmark = pytest.mark.engine

SORT = [{"role": "user", "content": "sort 52143"}]
picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}]}
nested = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": {"type": "url"}}]}
names = (f"test-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def endpoint(session: Any) -> Iterator[Endpoint]:
    opened = session.endpoint(tool_parser="hermes")
    yield opened
    opened.close()


@pytest.fixture
def run() -> str:
    return next(names)


@pytest.fixture
def client(endpoint: Endpoint, run: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=endpoint.run(run), api_key=endpoint.key, max_retries=0, timeout=120)


@pytest.fixture
def ask(client: openai.OpenAI) -> Callable[..., Any]:
    def ask(messages: Any = SORT, **options: Any) -> Any:
        return client.chat.completions.create(model="policy", messages=messages, **({"max_tokens": 16} | options))

    return ask


def said(answer: Any, choice: int = 0) -> dict[str, str]:
    return {"role": "assistant", "content": answer.choices[choice].message.content}


def sampled(rollouts: Any) -> list[list[int]]:
    """Token ids that are trained on, by row."""
    return [
        row[mask].tolist()
        for row, mask in zip(rollouts.responses, rollouts.responses.with_values(rollouts.mask), strict=True)
    ]


def test_a_client_gets_what_the_policy_samples_and_what_is_kept_are_the_samplers_tokens_and_log_probs(
    session: Any, ask: Any, run: str
) -> None:
    answer = ask(seed=3, logprobs=True, top_logprobs=0)
    (call,) = session.traces(run)[0].calls
    (choice,) = call.choices
    assert session.tokenizer.decode(choice.ids, skip_special_tokens=True) == answer.choices[0].message.content
    told = [one.logprob for one in answer.choices[0].logprobs.content]
    assert choice.logprobs == pytest.approx(told, abs=1e-6)
    (scored,) = session.inference.logprobs([call.whole(0)])
    assert choice.logprobs == pytest.approx(scored[len(call.prompt) - 1 :].tolist(), abs=1e-4)
    assert choice.versions == [(0, session.version)]
    assert ask(seed=3).choices[0].message.content == answer.choices[0].message.content


def test_it_streams_stops_draws_several_and_completes_texts(session: Any, client: Any, ask: Any, run: str) -> None:
    streamed = [chunk.choices[0].delta.content or "" for chunk in ask(stream=True, temperature=0)]
    assert "".join(streamed) == ask(temperature=0).choices[0].message.content and len(streamed) > 3
    several = ask(n=3, seed=1)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    stopped = ask(temperature=0, stop=["4"])
    assert "4" not in stopped.choices[0].message.content and stopped.choices[0].finish_reason == "stop"
    text = client.completions.create(model="policy", prompt="abc", max_tokens=4, temperature=0)
    calls = session.traces(run)[0].calls
    assert [len(call.choices) for call in calls] == [1, 1, 3, 1, 1]
    assert session.tokenizer.decode(calls[-1].choices[0].ids) == text.choices[0].text
    assert ord("4") in calls[3].choices[0].ids  # what was sampled, also where the client is not told of it


def test_tools_are_called_as_vllms_parser_reads_them_and_what_reshapes_is_told(
    session: Any, ask: Any, run: str
) -> None:
    parameters = {"type": "object", "properties": {"x": {"enum": ["a", "b"]}}, "required": ["x"]}
    tool = {"type": "function", "function": {"name": "look", "strict": True, "parameters": parameters}}
    answer = ask(tools=[tool], tool_choice="required", max_tokens=400, seed=1)
    assert answer.choices[0].message.tool_calls, answer
    for used in answer.choices[0].message.tool_calls:  # one or more, as the policy samples
        assert used.function.name == "look" and json.loads(used.function.arguments)["x"] in ("a", "b")
    rollouts = session.traces(run).rollouts
    assert session.traces(run)[0].calls[0].request["tools"] == [tool]
    assert any("structured_outputs" in note for note in rollouts.notes)


def test_a_later_call_is_sampled_behind_the_very_tokens_of_the_earlier_one(session: Any, ask: Any, run: str) -> None:
    first = ask(seed=1)
    more = [*SORT, {"role": "assistant", "content": f"\n {said(first)['content']}  "}, {"role": "user", "content": "b"}]
    ask(more)
    one, two = session.traces(run)[0].calls
    assert two.parent == (one.number, 0) and two.prompt[: two.ahead] == one.whole(0)
    assert session.tokenizer.decode(two.prompt[two.ahead :]) == "<|user|>b<|end|><|assistant|>"
    assert two.differs is not None and two.differs["given"].startswith("\n ")
    (rollout,) = session.traces(run).rollouts.flat
    assert rollout.info["turns"] == 2 and rollout.info["messages"][1] == {"role": "user", "content": "b"}
    assert sampled(session.traces(run).rollouts) == [[*one.choices[0].ids, *two.choices[0].ids]]


def test_branches_are_a_tree_of_which_every_sampled_token_is_trained_once(session: Any, ask: Any, run: str) -> None:
    first = ask(n=2, seed=1)
    for again in ("x", "y"):
        ask([*SORT, said(first, 0), {"role": "user", "content": again}])
    ask([*SORT, {"role": "assistant", "content": "something else"}, {"role": "user", "content": "z"}])
    rollouts = session.traces(run).score(lambda rollout: float(len(rollout.info["messages"])))
    calls = session.traces(run)[0].calls
    assert [call.parent for call in calls][:3] == [None, (calls[0].number, 0), (calls[0].number, 0)]
    assert calls[3].parent is None  # what the policy never said
    assert sorted(t for row in sampled(rollouts) for t in row) == sorted(
        t for call in calls for c in call.choices for t in c.ids
    )
    assert rollouts.samples == 4 and len(rollouts) == 2
    batch = rollouts.batch(advantage=rb.rl.group_normalized())
    assert int(np.asarray(batch.mask).sum()) == sum(call.tokens for call in calls)


def test_runs_are_told_apart_by_header_and_key_and_conversations_without_one_by_themselves(
    session: Any, endpoint: Endpoint, run: str
) -> None:
    by_key = openai.OpenAI(base_url=endpoint.url, api_key=f"{endpoint.key}:{run}")
    by_header = openai.OpenAI(base_url=endpoint.url, api_key=endpoint.key, default_headers={"X-Rlbench-Run": run})
    unnamed = openai.OpenAI(base_url=endpoint.url, api_key=endpoint.key)
    before = {one.name for one in session.traces("~*")}
    for client in (by_key, by_header, unnamed, unnamed):
        client.chat.completions.create(model="policy", messages=SORT, max_tokens=4)
    assert len(session.traces(run)[0].calls) == 2
    assert len({one.name for one in session.traces("~*")} - before) == 2


def test_it_serves_current_weights_while_verbs_run_and_a_sync_waits_for_open_calls(
    session: Any, endpoint: Endpoint, ask: Any, run: str
) -> None:
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(ask(max_tokens=200, stop=[], extra_body={"ignore_eos": True})))
        for _ in range(4)
    ]
    rollouts = session.rollout(["sort 1"] * 8, n=4, max_tokens=64, ignore_eos=True, seed=5, block=False)
    for thread in threads:
        thread.start()
    alone = rollouts.result()
    batch = session.rollout([SORT], n=4, max_tokens=8).score(lambda r: len(r)).batch(advantage=rb.rl.group_normalized())
    session.train_step(batch)
    session.sync_weights()
    for thread in threads:
        thread.join()
    assert len(answers) == 4 and endpoint.counts["open"] == 0
    again = session.rollout(["sort 1"] * 8, n=4, max_tokens=64, ignore_eos=True, seed=5)
    assert alone.responses.values.shape == again.responses.values.shape
    ask()
    versions = [one.choices[0].versions for one in session.traces(run)[0].calls]
    assert all(len(spans) == 1 for spans in versions) and versions[-1] == [(0, session.version)]


def test_calls_go_on_across_a_sync_where_that_is_chosen_and_each_token_has_its_version(
    session: Any, endpoint: Endpoint, run: str
) -> None:
    drawn = session.rollout([SORT], n=8, max_tokens=8, temperature=2.0).score(lambda r: float(len(set(r.token_ids))))
    batch = drawn.batch(advantage=rb.rl.group_normalized())
    opened = session.endpoint(across_syncs=True)
    client = openai.OpenAI(base_url=opened.run(run), api_key=opened.key, max_retries=0, timeout=120)
    options: dict[str, Any] = {"max_tokens": 1900, "extra_body": {"ignore_eos": True}, "stream": True}
    stream = client.completions.create(model="policy", prompt="sort 52143", n=2, **options)
    begun = [next(stream) for _ in range(40)]
    before = session.inference.weight_versions()[0]
    session.train_step(batch, lr=5e-2)
    assert session.sync_weights().gap <= 1e-4 and opened.counts["open"] == 1
    after = session.inference.weight_versions()[0]
    assert begun and list(stream)
    session.endpoint(across_syncs=False)
    (call,) = session.traces(run)[0].calls
    for number, choice in enumerate(call.choices):
        (begin, first), (change, second) = choice.versions
        assert (begin, first, second) == (0, before, after) and 0 < change < len(choice.ids) == 1900
        (scored,) = session.inference.logprobs([call.whole(number)])
        gaps = np.abs(scored[len(call.prompt) - 1 :] - choice.logprobs)
        assert gaps[change:].max() < 1e-3 < gaps[:change].max(), "what was computed before is computed again"
    rollouts = session.traces(run).rollouts
    assert {int(version) for version in rollouts.channels["weight_version"]} == {before, after}


def test_paused_generation_holds_calls_and_released_memory_too(session: Any, endpoint: Endpoint, ask: Any) -> None:
    session.offload("inference", "kv_cache")
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(ask()))
    thread.start()
    until(lambda: endpoint.counts["open"] == 1)
    assert "wait" in repr(endpoint)
    session.onload("inference", "kv_cache")
    thread.join(120)
    assert answers


def test_traces_are_ordinary_rollouts_that_train_export_and_are_undone(
    session: Any, ask: Any, run: str, tmp_path: Any, put_back: None
) -> None:
    ask(n=4, temperature=1.0)
    rollouts = session.traces(run).score({run: 1.0})
    assert rollouts.rewards.tolist() == [1.0] * 4
    batch = session.traces(run).score(lambda rollout: float(rollout.text.count("5"))).batch(rb.rl.group_normalized())
    before = session.version
    metrics = session.train_step(batch)
    assert metrics["tokens"] == len(rollouts.logprobs)
    session.undo()
    assert session.step >= 0 and session.version > before
    tree = session.traces(run).rollouts.fork(0, at=1, n=2, max_tokens=3)
    assert tree.samples == 6 and tree.branches[0].at == 1
    assert rollouts.with_batch(batch).channels["weight_version"].shape == rollouts.logprobs.shape


@pytest.mark.parametrize(
    ("change", "status", "token"),
    [
        ({"content": b"{bad"}, 400, "JSON"),
        ({"content": b"[" * 100_000}, 400, "nested"),
        ({"content": b" " * (9 << 20)}, 413, "8 MiB"),
        ({"headers": {"Authorization": "Bearer wrong"}}, 401, "API key"),
        ({"headers": {}}, 401, "API key"),
        ({"json": {"model": "nope", "messages": SORT}}, 404, "nope"),
        ({"json": {"model": "policy", "messages": [{"role": "user", "content": "x" * 5000}]}}, 400, "context length"),
        ({"json": {"model": "policy", "messages": [{"role": "wizard", "content": "x"}]}}, 400, "unknown role"),
        ({"json": {"model": "policy", "messages": SORT, "temperature": -1}}, 400, "temperature"),
        ({"json": {"model": "policy", "messages": SORT, "use_beam_search": True}}, 400, "use_beam_search"),
        ({"json": {"model": "policy", "messages": [picture]}}, 400, "image_url"),
        ({"json": {"model": "policy", "messages": [{"role": "user", "content": [nested]}]}}, 400, "image"),
        ({"json": {"model": "policy", "messages": SORT, "chat_template": "{{ 7 }}"}}, 400, "template"),
        ({"json": {"model": "policy", "messages": SORT, "n": 10**9}}, 400, "n must be"),
        ({"path": "/docs"}, 404, "/docs"),
        ({"path": "/run/a%20b/v1/chat/completions"}, 400, "run's name"),
        ({"method": "GET"}, 405, "POST"),
    ],
)
def test_who_asks_wrongly_is_told_as_openai_would_and_leaves_nothing(
    endpoint: Endpoint, change: dict[str, Any], status: int, token: str
) -> None:
    before = endpoint.counts
    request = {"headers": {"Authorization": f"Bearer {endpoint.key}", "Content-Type": "application/json"}} | change
    path, method = request.pop("path", "/v1/chat/completions"), request.pop("method", "POST")
    answer = httpx.request(method, endpoint.url.removesuffix("/v1") + path, **request)
    assert answer.status_code == status and token in answer.json()["error"]["message"]
    assert endpoint.counts == before


def test_a_client_that_goes_away_leaves_no_request_behind(session: Any, endpoint: Endpoint, run: str) -> None:
    headers = {"Authorization": f"Bearer {endpoint.key}"}
    long = {"model": "policy", "messages": SORT, "max_tokens": 1500, "ignore_eos": True}
    url = f"{endpoint.run(run)}/chat/completions"
    with httpx.stream("POST", url, json=long | {"stream": True}, headers=headers, timeout=120) as answer:
        next(answer.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json=long | {"n": 3}, headers=headers, timeout=0.3)
    until(lambda: endpoint.counts["open"] == 0)
    until(lambda: session.inference.status()["running"] == 0)
    session.sync_weights()  # what asks that no request is in the engine
    assert all(one.choices[0].finish == "abort" for one in session.traces(run)[0].calls)


def test_an_interrupt_of_what_waits_for_open_calls_loses_none(
    session: Any, endpoint: Endpoint, ask: Any, run: str
) -> None:
    import ray  # after the cluster was found

    answers: list[Any] = []
    long = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    threads = [threading.Thread(target=lambda: answers.append(ask(**long))) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: session.inference.status()["running"] == 2)  # a sync waits for what is in the engine
    (replica,) = session.inference._actors
    interrupt_once(lambda: ray.get(replica.running.remote()) == "apply_weights")
    with pytest.raises(rb.Stopped):
        session.sync_weights()
    session.sync_weights()
    for thread in threads:
        thread.join()
    assert [answer.choices[0].finish_reason for answer in answers] == ["length"] * 2
    assert [len(one.choices[0].ids) for one in session.traces(run)[0].calls] == [1500] * 2


def test_it_is_where_it_was_when_asked_again_and_for_another_kernel(session: Any, endpoint: Endpoint) -> None:
    again = session.endpoint()
    assert (again.url, again.key) == (endpoint.url, endpoint.key)
    assert endpoint.key in repr(endpoint) and endpoint.url in endpoint.curl and endpoint.key in endpoint.python
    assert json.loads(endpoint.curl.split("-d '")[1][:-1])["model"] in endpoint.models
    assert session.endpoint(template={"some": 1}).url == endpoint.url  # changed in place
    with pytest.raises(rb.errors.DataError, match="tool_parser"):
        session.endpoint(tool_parser="hermess")
    assert httpx.get(f"{endpoint.url}/models", headers={"x-api-key": endpoint.key}).status_code == 200


def first(text: str) -> int:
    return int(text[0]) if text[:1].isdigit() else -1


class Duel(rb.envs.Env):
    """Its rival is whatever has an `answer`."""

    def __init__(self, rival: Any) -> None:
        self.rival = rival

    def step(self, turn: Any) -> rb.envs.Step:
        chat = turn.prompt.content
        said = [self.rival.answer(chat, max_tokens=2, temperature=0.0) for _ in range(2)]
        return rb.envs.Step(reward=float(first(turn.text) > first(said[0])), done=True, info={"said": said})


def test_an_environment_asks_a_policy_while_that_computes_the_other_samples(session: Any, endpoint: Endpoint) -> None:
    kept = len(session.traces())
    rival, counts = session.policy(), endpoint.counts
    assert endpoint.key not in repr(rival)
    rollouts = session.rollout([SORT] * 3, n=4, env=Duel(rival), max_tokens=2, progress=False)
    greedy = session.rollout([SORT], temperature=0.0, max_tokens=2, progress=False).texts[0]
    answers = [info["steps"][0]["said"] for info in rollouts.infos]
    assert answers == [[greedy, greedy]] * 12, "of the weights there are, and not continued from each other"
    assert [*rollouts.rewards] == [float(first(text) > first(greedy)) for text in rollouts.texts]
    assert len(session.traces()) == kept and endpoint.counts == counts, "calls of environments are no traces"
    assert rival.answer([7, 8], max_tokens=1, seed=1) == rival.answer([7, 8], max_tokens=1, seed=1)


def test_an_environment_asks_the_policy_of_another_session_whose_weights_move(session: Any) -> None:
    with rb.Session("tiny", name="rival", train={"lr": 1e-2}, seed=3, undo=0) as other:
        rival = Duel(other.policy())

        def answers() -> set[str]:
            rollouts = session.rollout([SORT] * 2, n=2, env=rival, max_tokens=2, progress=False)
            return {text for info in rollouts.infos for text in info["steps"][0]["said"]}

        def greedy() -> set[str]:
            return set(other.rollout([SORT], temperature=0.0, max_tokens=2, progress=False).texts)

        begun = greedy()
        assert answers() == begun
        words = [{"messages": [*SORT, {"role": "assistant", "content": "zz"}]}]
        for _ in range(8):
            other.train_step(rb.data.demonstrations(words, other), "sft")
        assert answers() == begun, "weights that were not synced answer nobody"
        other.sync_weights()
        assert answers() == greedy() != begun
    with pytest.raises(rb.RLBenchError, match=r"'rival'.*does not answer"):
        answers()


def test_a_session_inside_an_environment_is_refused_with_what_can_be_sent(session: Any, endpoint: Endpoint) -> None:
    with pytest.raises(rb.errors.DataError, match=r"`rival`, a Session.*session\.policy\(\)"):
        session.rollout([SORT], env=Duel(session), max_tokens=2, progress=False)
    with pytest.raises(rb.errors.EngineError, match=r"refused.*context length"):
        session.policy().answer([5] * 5000)
    with pytest.raises(rb.errors.SessionError, match="adapters=2"):
        session.policy("old")
    gone = rb.envs.Policy("gone", "policy", ("http://127.0.0.1:9",), "key")
    with pytest.raises(rb.errors.EngineError, match=r"'gone'.*does not answer"):
        gone.answer("hello")

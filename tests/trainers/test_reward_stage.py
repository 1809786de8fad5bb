"""Rewards of all kinds reach the samples they belong to; several become one as a function or a recipe says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rlbench import rewards
from rlbench.data.rollouts.rollouts import Rollouts
from rlbench.errors import DataError, StateError
from rlbench.strategies import get_fake_strategy
from rlbench.strategies.options.config import OptionError
from rlbench.trainers.experience.model_stage import ModelStage
from rlbench.trainers.experience.reward_stage import RewardStage
from rlbench.trainers.experience.samples import prompts_of, rollouts_of
from tests.modules import VOCAB
from tests.trainers.making import TableEngine, asked

SAMPLING = {"n": 2, "max_tokens": 9, "temperature": 1.0}


class SumModel(nn.Module):
    """A scalar head whose score anybody can say again: the weighted sum of the tokens."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 1)
        with torch.no_grad():
            self.embed.weight[:, 0] = torch.arange(VOCAB) * scale
        self.seen: list[int] = []

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(input_ids))
        return (self.embed(input_ids)[..., 0] * attention_mask).sum(1)


def rollouts(labels: list[Any] | None = None, references: list[Any] | None = None, count: int = 3) -> Rollouts:
    prompts = prompts_of(asked(count), labels, references)
    outputs = TableEngine()(SAMPLING, prompts)
    return rollouts_of(prompts, [list(p.content) for p in prompts], outputs, SAMPLING)


def scored(given: Rollouts, *args: Any, **kwargs: Any) -> Rollouts:
    strategy = get_fake_strategy({"bf16": False})
    names = ("reward_model", "remote_rm_url", "reward_fn", "reward_recipe", "label_map")
    asked_for = {**dict.fromkeys(names), **dict(zip(names, args, strict=False)), **kwargs}
    return RewardStage(**asked_for).score(given, ModelStage(strategy, 2, False, None), None, strategy.control)


def sums(given: Rollouts) -> np.ndarray:
    """Of the tokens of prompt and response."""
    both = zip(given.group, given.responses, strict=True)
    return np.array([float(given.prompt_ids[int(g)].sum() + r.sum()) for g, r in both])


def length(rollout: Any) -> float:
    return float(len(rollout))


@pytest.fixture
def service() -> Iterator[tuple[str, list[Any]]]:
    """A judge that pays by the length of the response, and what it was sent."""
    seen: list[Any] = []

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(given)
            body = json.dumps({"rewards": [float(len(r.split())) for r in given["responses"]]}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Judge)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/score", seen
    server.shutdown()
    thread.join()
    server.server_close()


# -- one reward -----------------------------------------------------------------------------------------------------


def test_one_reward_is_the_score_as_it_is_with_its_components() -> None:
    given = rollouts()
    found = scored(given, lambda r: {"reward": 0.5 * len(r), "short": float(len(r) < 4)})
    np.testing.assert_array_equal(found.rewards, 0.5 * given.lengths)
    np.testing.assert_array_equal(found.components["short"], given.lengths < 4)
    np.testing.assert_array_equal(found.components["rule_reward"], found.rewards)


def test_a_model_on_the_ranks_reads_prompt_and_response_and_is_sent_away_afterwards() -> None:
    given, model = rollouts(), SumModel()
    found = scored(given, model)
    np.testing.assert_allclose(found.rewards, sums(given))
    np.testing.assert_array_equal(found.components["model_reward"], found.rewards)
    assert max(model.seen) == 2
    with pytest.raises(StateError, match="offloaded"):
        model(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))


def test_a_model_with_a_tokenizer_of_its_own_reads_texts() -> None:
    model = SumModel()
    model.tokenizer = lambda texts, verbose: {"input_ids": [[len(text) % VOCAB] for text in texts]}
    given = rollouts_of(*_texts(), SAMPLING)
    found = scored(given, model)
    texts = [given.prompts[int(g)].text + t for g, t in zip(given.group, given.texts, strict=True)]
    np.testing.assert_allclose(found.rewards, [len(text) % VOCAB for text in texts])


def _texts() -> tuple[Any, Any, Any]:
    prompts = prompts_of(["two words", "three of them"], None, None)
    outputs = TableEngine()(SAMPLING, asked(2))
    return prompts, [list(o.prompt_token_ids) for o in outputs[::2]], outputs


def test_a_service_is_asked_with_labels_and_references(service: Any) -> None:
    """Defect absent: the label was dropped from what a service was sent."""
    url, seen = service
    given = rollouts(["math"] * 3, ["1", "2", "3"])
    found = scored(given, None, url)
    np.testing.assert_array_equal(found.rewards, given.lengths)
    assert "model_reward" in found.components
    sent = {name: [v for one in seen for v in one[name]] for name in seen[0]}
    assert sent["labels"] == ["math"] * 6 and sorted(sent["references"]) == ["1", "1", "2", "2", "3", "3"]


def test_a_file_is_given_the_completions_and_not_the_prompts(tmp_path: Path) -> None:
    """Defect absent: the queries held the prompt, whose example of a format paid for any answer."""
    path = tmp_path / "judge.py"
    path.write_text(
        "def reward_func(queries, prompts, labels):\n"
        "    assert all(p not in q for q, p in zip(queries, prompts))\n"
        "    return [len(q.split()) + 100 * (l == 'b') for q, l in zip(queries, labels)]\n"
    )
    given = rollouts(["a", "b", "a"])
    found = scored(given, None, str(path))
    np.testing.assert_array_equal(found.rewards, given.lengths + 100 * (given.group == 1))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = 1", "no function reward_func"),
        ("1/0", "ZeroDivisionError"),
        ("def reward_func(query): 0", "wants 'query'"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_when_the_stage_is_made(tmp_path: Path, source: str, said: str) -> None:
    path = tmp_path / "judge.py"
    path.write_text(source)
    with pytest.raises(OptionError, match=said):
        scored(rollouts(), None, str(path))
    with pytest.raises(OptionError, match="cannot be run"):
        scored(rollouts(), None, str(tmp_path / "absent.py"))


def test_a_file_that_gives_too_few_numbers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "judge.py"
    path.write_text("def reward_func(queries):\n    return [1.0]\n")
    with pytest.raises(DataError, match="completion 0"):
        scored(rollouts(), None, str(path))


def test_a_model_that_gives_no_number_is_refused() -> None:
    with pytest.raises(DataError, match="is nan for sample 0"):
        scored(rollouts(), SumModel(float("nan")))


# -- several --------------------------------------------------------------------------------------------------------


def test_a_function_makes_one_reward_of_several_and_its_metrics_are_components() -> None:
    given = rollouts(["a", "b", "c"], [1, 2, 3])
    seen: list[Any] = []

    def combine(models: Any, labels: Any, queries: Any, refs: Any, label_map: Any) -> Any:
        seen.append((labels, queries, refs, label_map))
        return models[0] + 10 * models[1], {"format_reward": models[1] * 0 + 0.25, "level": 3.0}

    found = scored(given, [SumModel(), length], None, combine, label_map={"value": 0, "size": 1})
    np.testing.assert_allclose(found.rewards, sums(given) + 10 * given.lengths, rtol=1e-6)
    np.testing.assert_allclose(found.components["value"], sums(given))
    np.testing.assert_array_equal(found.components["size"], given.lengths)
    np.testing.assert_array_equal(found.components["model_reward"], found.components["value"])
    np.testing.assert_array_equal(found.components["rule_reward"], found.components["size"])
    assert (found.components["format_reward"] == 0.25).all() and (found.components["level"] == 3).all()
    labels, queries, refs, label_map = seen[0]
    assert (labels, refs) == (["a", "a", "b", "b", "c", "c"], [1, 1, 2, 2, 3, 3])
    assert queries == list(given.texts) and label_map == {"value": 0, "size": 1}


def test_a_function_alone_is_a_rule() -> None:
    given = rollouts()
    found = scored(given, None, None, lambda m, labels, queries, *_: torch.tensor([float(len(q)) for q in queries]))
    np.testing.assert_array_equal(found.rewards, [len(text) for text in given.texts])
    np.testing.assert_array_equal(found.components["rule_reward"], found.rewards)


def test_models_are_on_the_device_one_at_a_time() -> None:
    strategy = get_fake_strategy({"bf16": False})
    order: list[str] = []
    models = [SumModel(), SumModel(2.0)]
    strategy.reload_model = lambda m: order.append(f"in {models.index(m)}")  # type: ignore[method-assign]
    strategy.offload_model = lambda m: order.append(f"out {models.index(m)}")  # type: ignore[method-assign]
    stage = RewardStage(models, None, lambda m, *_: m[0] + m[1], None, None)
    stage.score(rollouts(), ModelStage(strategy, 2, False, None), None, strategy.control)
    assert order == ["in 0", "out 0", "in 1", "out 1"]


RECIPE = {
    "math": [("rule", None, 1.0), ("model", "value", 0.5)],
    "chat": [("model", "value", 1.0), ("rule", "size", -0.1)],
    "plain": [("rule", None, 2.0)],
}
LABEL_MAP = {"value": 0, "size": 1}


def test_a_recipe_weighs_by_label_and_asks_each_reward_for_its_own_samples_alone() -> None:
    given, model, asked_for = rollouts(["math", "chat", "plain"]), SumModel(), []

    def size(rollout: Any) -> float:
        asked_for.append(rollout.group)
        return length(rollout)

    def rule(models: Any, labels: Any, queries: Any, refs: Any, label_map: Any) -> Any:
        return [float(len(q)) for q in queries]

    found = scored(given, [model, size], None, rule, RECIPE, LABEL_MAP)
    texts, group = np.array([len(t) for t in given.texts]), given.group
    expected = np.select(
        [group == 0, group == 1], [texts + 0.5 * sums(given), sums(given) - 0.1 * given.lengths], 2.0 * texts
    )
    np.testing.assert_allclose(found.rewards, expected, rtol=1e-6)
    assert asked_for == [1, 1] and sum(model.seen) == 4
    assert np.isnan(found.components["value"]).tolist() == (group == 2).tolist()
    assert np.isnan(found.components["size"]).tolist() == (group != 1).tolist()


def test_a_label_that_the_recipe_lacks_is_named() -> None:
    with pytest.raises(DataError, match=r"label 'mth'.*nearest: math"):
        scored(rollouts(["math", "mth", "plain"]), [SumModel(), length], None, lambda *_: [0.0] * 6, RECIPE, LABEL_MAP)


def two(*_: Any) -> float:
    return 2.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "nothing scores the samples"),
        ({"reward_model": [length, two]}, "2 rewards"),
        ({"reward_model": 3}, "a reward is a module"),
        ({"remote_rm_url": "judge.example/score"}, "a reward is a module"),
        ({"reward_model": length, "label_map": {"a": 0}}, "no effect without reward_fn"),
        ({"reward_model": length, "reward_fn": two, "label_map": {"a": 1}}, "'a' is source 1"),
        ({"reward_model": length, "reward_recipe": {"a": [("rul", "k", 1.0)]}}, "neither 'model' nor 'rule'"),
        ({"reward_model": length, "reward_recipe": {"a": [("rule", None, 1.0)]}}, "needs reward_fn"),
        ({"reward_model": length, "reward_recipe": {"a": [("rule", "k", 1.0)]}}, "reward_fn_label_map"),
        (
            {"reward_model": length, "reward_recipe": {"a": [("model", "k", 1.0)]}, "label_map": {"k": 0}},
            "'k' is a 'rule', not a 'model'",
        ),
        (
            {"reward_model": [length, two], "reward_recipe": {"a": [("rule", "k", 1.0)]}, "label_map": {"k": 0}},
            "rule_1 would have no effect",
        ),
        (
            {
                "reward_model": length,
                "reward_fn": two,
                "reward_recipe": {"a": [("rule", "k", 1.0)]},
                "label_map": {"k": 0},
            },
            "reward_fn would have no effect",
        ),
    ],
)
def test_rewards_that_say_nothing_or_would_have_no_effect_are_refused(given: Any, said: str) -> None:
    """Defect absent: flags and recipes that did nothing gave false confidence."""
    with pytest.raises(OptionError, match=said):
        scored(rollouts(), **given)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([1.0], r"rewards have shape \(1,\); wanted \(6,\)"),
        (["good"] * 6, "rewards are no numbers"),
        ([float("nan")] * 6, "the reward of sample 0 is not finite"),
        (([1.0] * 6, {"acc": [1.0]}), r"the metric 'acc' have shape \(1,\)"),
    ],
)
def test_what_a_function_must_not_give_is_said(answer: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        scored(rollouts(), length, None, lambda *_: answer)


def test_an_error_in_a_function_shows_its_line() -> None:
    def combine(*_: Any) -> Any:
        return [][0]  # my own mistake

    with pytest.raises(DataError, match="reward_fn raised IndexError") as caught:
        scored(rollouts(), length, None, combine)
    assert "my own mistake" in str(caught.value)


def test_components_of_one_name_are_kept_apart() -> None:
    both = [lambda r: {"reward": 1.0, "format": 1.0}, lambda r: {"reward": 2.0, "format": 0.0}]
    found = scored(rollouts(), both, None, lambda m, *_: m[0] + m[1])
    assert (found.components["format"] == 1).all() and (found.components["rule_1_format"] == 0).all()
    assert (found.components["rule_reward"] == 1.5).all()


def test_a_rank_without_samples_scores_nothing() -> None:
    empty = rollouts().select(np.zeros(6, bool))
    found = scored(empty, [length, rewards.contains("x")], None, lambda *_: pytest.fail("asked for nothing"))
    assert len(found.rewards) == 0

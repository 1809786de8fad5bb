"""An advantage function gets rewards and groups, and by name what it asks for; nothing is dropped in silence."""

from typing import Any

import numpy as np
import pytest
import torch

from rlbench.errors import DataError
from tests.data.comparing import cut_short
from tests.data.values import rollouts


def seen_by(names: str, source: Any = None, **columns: Any) -> dict[str, Any]:
    """What a function with these keyword-only parameters is called with."""
    seen: dict[str, Any] = {}
    space: dict[str, Any] = {"seen": seen}
    exec(f"def mine(rewards, group, *, {names}):\n    seen.update(locals())\n    return rewards", space)
    (source or rollouts().score(range(6))).batch(space["mine"], **columns)
    return seen


def test_what_the_rollouts_know_arrives_by_name_padded_to_the_longest():
    seen = seen_by("mask, lengths, truncated, logprobs")
    assert seen["lengths"].tolist() == [1, 2, 3, 4, 5, 6]
    assert seen["mask"].shape == (6, 6) and seen["mask"].dtype == torch.bool
    assert seen["mask"].sum(1).tolist() == [1, 2, 3, 4, 5, 6]
    assert seen["truncated"].tolist() == [False] * 5 + [True]
    assert seen["logprobs"][2].tolist() == pytest.approx([0, -0.01, -0.02, 0, 0, 0])


def test_what_a_prompt_carries_the_weights_it_was_drawn_with_and_a_channel_arrive_by_name():
    source = rollouts().score(range(6))
    source = source.with_channels(entropy=np.arange(21, dtype=np.float32))
    seen = seen_by("labels, meta, versions, rollouts, entropy", source)
    assert seen["labels"] == ["12", "12", "123", "123", "4", "4"] and seen["meta"] == [{}] * 6
    assert seen["versions"].tolist() == [0] * 6 and seen["rollouts"].samples == 6
    assert seen["entropy"][1].tolist() == [1, 2, 0, 0, 0, 0]


@pytest.mark.parametrize("advantage", ["grpo", 3.0, type("mine", (), {})])
def test_what_is_no_advantage_is_refused_with_what_would_be_one(advantage):
    with pytest.raises(DataError, match=r"rb\.rl\.group_normalized|made by calling it"):
        rollouts().score(range(6)).batch(advantage)


def test_what_is_given_arrives_in_rows_whether_flat_or_by_completion():
    flat = np.arange(21, dtype=np.float32)
    by_row = [flat[i * (i + 1) // 2 :][: i + 1] for i in range(6)]
    for given in (flat, by_row):
        seen = seen_by("values", values=given)
        assert seen["values"].shape == (6, 6)
        assert [row[: i + 1].tolist() for i, row in enumerate(seen["values"])] == [r.tolist() for r in by_row]


def test_columns_follow_the_completions_that_stay():
    seen = seen_by(
        "components, baseline_rewards, turns",
        cut_short(),
        components={"format": [1, 2, 3, 4]},
        baseline_rewards=[5, 6, 7, 8],
        turns=np.array([1, 1, 2, 3]),
    )
    assert seen["components"]["format"].tolist() == [1, 3] and seen["baseline_rewards"].tolist() == [5, 7]
    assert seen["turns"].tolist() == [[1, 1], [3, 0]]


def test_one_advantage_per_token_may_come_padded():
    wide = torch.arange(36.0).reshape(6, 6)
    batch = rollouts().score(range(6)).batch(lambda rewards, group: wide)
    assert [r.tolist() for r in batch.responses.with_values(batch.advantages)] == [
        wide[i, : i + 1].tolist() for i in range(6)
    ]


def test_nobody_asks_for_the_name_of_one_that_works():
    class Nameless:
        def __call__(self, rewards, group):
            return rewards

        def __repr__(self):
            raise RuntimeError("a million numbers")

    assert len(rollouts().score(range(6)).batch(Nameless())) == 6


def test_a_class_and_a_function_that_takes_anything_are_asked_too():
    class Mine:
        def __call__(self, rewards, group, *, lengths):
            return lengths.double()

    batch = rollouts().score(range(6)).batch(Mine())
    assert batch.advantages[-1] == 6

    def anything(rewards, group, **known):
        own = {"mask", "lengths", "truncated", "logprobs", "nodes", "versions", "labels", "meta", "rollouts"}
        assert set(known) == own | {"values"}
        return rewards

    rollouts().score(range(6)).batch(anything, values=np.zeros(21, np.float32))


@pytest.mark.parametrize(
    ("names", "columns", "said"),
    [
        ("lengths", {"values": np.zeros(21)}, "values would have no effect: mine does not take it"),
        ("entropies", {}, "mine asks for 'entropies'; nearest.* by name mask, lengths"),
        ("values", {}, r"mine needs values: give it as batch\(advantage=…, values=…\)"),
        ("values", {"valeus": np.zeros(21)}, "unknown 'valeus'.*values"),
        ("values", {"values": np.zeros(20)}, r"values has shape \(20,\); wanted \(21,\)"),
        ("values", {"values": [[0.0]] * 6}, "values: its rows"),
        ("baseline_rewards", {"baseline_rewards": [1.0]}, r"shape \(1,\); wanted \(6,\)"),
        ("components", {"components": [1.0] * 6}, "components: wanted {name: rewards}, got list"),
        ("components", {"components": {"a": [1.0]}}, r"components\['a'\] has shape \(1,\)"),
    ],
)
def test_what_cannot_be_meant_is_refused(names, columns, said):
    with pytest.raises(DataError, match=said):
        seen_by(names, **columns)


def test_an_optional_name_that_nobody_gave_keeps_its_default():
    assert seen_by("values=None")["values"] is None

"""Completions whose context was written anew: a batch has a sequence for each, everything else sees one completion."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rlbench as rb
from rlbench.data import Prompt, Rollouts
from rlbench.data.record.metrics import Metrics
from rlbench.data.rollouts.contexts import context_before, sequences
from rlbench.errors import DataError
from tests.data.comparing import same
from tests.data.values import generated

# Behind prompt 10: 1, 2, 3; the conversation anew as 20, 21, 22: 4, 5; anew as 23, 24: 6, then 25 is seen: 7.
IDS = [1, 2, 3, 20, 21, 22, 4, 5, 23, 24, 6, 25, 7]
MASK = [1, 1, 1, 0, 0, 0, 1, 1, 0, 0, 1, 0, 1]
TURNS = [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3]


@pytest.fixture
def rollouts() -> Rollouts:
    arrays = generated([(0, 0, [8, 9], "stop"), (0, 1, IDS, "length"), (1, 0, [11], "stop")])
    mask = np.array([1, 1, *MASK, 1], bool)
    made = replace(
        arrays,
        mask=mask,
        logprobs=np.where(mask, arrays.logprobs, np.float32(0)),
        turns=np.array([0, 0, *TURNS, 0], np.int32),
        turn_rewards=[[0.0], [0.0, 0.0, 0.0, 2.0], [1.0]],
        infos=[{"turns": 1}, {"turns": 4, "contexts": [3, 8]}, {"turns": 1}],
        routing=rb.data.Ragged(  # by the place in prompt and response; two prompts of one and two tokens
            np.concatenate([np.arange(n, dtype=np.int16) for n in (3, 14, 3)]).reshape(-1, 1, 1),
            np.array([0, 3, 17, 20]),
        ),
    )
    return Rollouts.merge([Prompt("p0"), Prompt("p1")], [made], {"temperature": 1.0})


def test_each_context_is_a_sequence_behind_what_it_was_sampled_behind(rollouts: Rollouts) -> None:
    batch = rollouts.batch(advantage=lambda rewards, group: rewards - 1)
    assert [row.tolist() for row in batch.prompts] == [[10], [10], [20, 21, 22], [23, 24], [11, 11]]
    assert [row.tolist() for row in batch.responses] == [[8, 9], [1, 2, 3], [4, 5], [6, 25, 7], [11]]
    assert batch.group.tolist() == [0, 0, 0, 0, 1] and batch.rewards.tolist() == [0, 2, 2, 2, 1]
    assert batch.truncated.tolist() == [False, True, True, True, False]
    assert batch.advantages.tolist() == [-1, -1, 1, 1, 1, 1, 1, 1, 1, 1, 0]
    assert batch.mask.sum() == rollouts.mask.sum()  # each sampled token is trained once
    experts = [row.ravel().tolist() for row in batch.routing]
    assert experts == [[0, 1, 2], [0, 1, 2, 3], [*range(4, 9)], [*range(9, 14)], [0, 1, 2]]


def test_an_advantage_sees_one_completion_whose_turns_follow_each_other(rollouts: Rollouts) -> None:
    def by_turn(rewards: Any, group: Any, *, turns: Any, mask: Any) -> Any:
        assert rewards.shape == (3,) and turns.shape == mask.shape == (3, 13)
        return turns * mask

    assert rollouts.batch(advantage=by_turn).advantages.tolist() == [0, 0, 0, 0, 0, 1, 1, 2, 0, 3, 0]


def test_what_a_step_said_stands_beside_the_tokens_it_is_of(rollouts: Rollouts) -> None:
    batch = rollouts.batch(advantage=lambda rewards, group: rewards).rows(np.array([3, 1]))
    seen = rollouts.with_batch(batch, Metrics({}, {"logprobs": batch.responses.values.astype(np.float32)}))
    told = seen.channels["trainer_logprob"]
    known = np.isfinite(told)
    assert told[known].tolist() == rollouts.responses.values[known].tolist() == [1, 2, 3, 6, 25, 7]


def test_a_fork_goes_on_in_the_context_of_its_token(rollouts: Rollouts) -> None:
    asked: list[list[int]] = []

    class Sampler:
        def continued(self, prompts: Any, n: int, sampling: Any, number: int, under: Any) -> Rollouts:
            asked.extend(prompt.content for prompt in prompts)
            drawn = generated([(i, 0, [30, 31], "stop") for i in range(len(prompts))])
            return Rollouts.merge(prompts, [drawn], {"temperature": 1.0})

        def encoded(self, text: str) -> list[int]:
            return [ord(letter) for letter in text]

        def decoded(self, ids: Any) -> str:
            return " ".join(map(str, ids))

    from rlbench.data.forking import fork

    tree = fork(rollouts, [1, 1, 1], [1, 7, 12], 1, None, None, {"max_tokens": 9}, Sampler())
    assert asked == [[10, 1], [20, 21, 22, 4], [23, 24, 6, 25]]
    born = [info for info in tree.infos if "fork" in info]
    assert [info.get("contexts") for info in born] == [None, [3], [3, 8]]
    parts = sequences(tree)
    rows = [(prompt.tolist(), row.tolist()) for prompt, row in zip(parts.prompts, parts.responses, strict=True)]
    assert rows[4:7] == [([10], [1, 30, 31]), ([20, 21, 22, 4], [30, 31]), ([23, 24, 6, 25], [30, 31])]


def test_a_place_is_of_the_context_that_it_was_sampled_behind(rollouts: Rollouts) -> None:
    assert [context_before(rollouts, 1, at) for at in (0, 3, 4, 8, 9, 13)] == [None, None, 3, 3, 8, 8]
    assert context_before(rollouts, 0, 1) is None


def test_contexts_stay_with_their_completion(rollouts: Rollouts, tmp_path: Any) -> None:
    read = Rollouts.from_parquet(rollouts.to_parquet(tmp_path / "r.parquet"))
    assert same(read, rollouts)
    joined = rb.data.join(rollouts[1:], rollouts).select([2, 1])
    assert [info.get("contexts") for info in joined.infos] == [[3, 8], None]
    assert len(joined.batch()) == 4


def test_imitation_takes_all_sequences_and_pairs_are_refused(rollouts: Rollouts) -> None:
    best = rollouts.demonstrations(best_of=2)
    assert [row.tolist() for row in best.responses] == [[1, 2, 3], [4, 5], [6, 25, 7]]
    with pytest.raises(DataError, match=r"pairs.*thoughts='keep'"):
        rollouts.pairs()

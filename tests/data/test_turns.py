"""Rollouts of several turns: merged, taken, batched, exported and read back without losing what was observed."""

import json
import re
from dataclasses import replace

import numpy as np
import pandas
import pytest

import rlbench as rb
from rlbench.data import Prompt, Rollouts
from rlbench.data.record.metrics import Metrics
from rlbench.data.rollouts.channels import all_channels
from rlbench.errors import DataError
from rlbench.notebook.rollouts.static import rollouts_view
from tests.data.comparing import same
from tests.data.values import generated

ERROR = {
    "where": "step",
    "kind": "ValueError",
    "message": "bad <b>",
    "line": ["env.py", 3, "step", "raise"],
    "turn": 1,
    "ended": True,
    "traceback": "…",
}


def part(samples):
    """`samples`: (prompt, sample, ids, finish, mask, turns, rewards, info)."""
    arrays = generated([s[:4] for s in samples])
    mask = np.concatenate([np.array(s[4], bool) for s in samples])
    return replace(
        arrays,
        mask=mask,
        logprobs=np.where(mask, arrays.logprobs, np.float32(0)),
        turns=np.concatenate([np.array(s[5], np.int32) for s in samples]),
        turn_rewards=[s[6] for s in samples],
        infos=[s[7] for s in samples],
    )


NAN = float("nan")
SAID = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}, {"role": "assistant", "content": "cd"}]
FIRST = (0, 0, [1, 2, 3, 4], "stop", [1, 0, 1, 1], [0, 0, 1, 1], [0.5, 1.0], {"turns": 2, "messages": SAID})
SECOND = (0, 1, [5, 6], "stop", [1, 1], [0, 0], [NAN], {"turns": 1})
THIRD = (1, 0, [7, 8, 9], "abort", [1, 0, 1], [0, 0, 1], [-1.0, NAN], {"turns": 2, "errors": [ERROR]})
FOURTH = (1, 1, [1, 1], "stop", [0, 1], [0, 0], [2.0], {"turns": 1})


@pytest.fixture
def turned():
    prompts = [Prompt("p0", "x"), Prompt("p1", "y")]
    return Rollouts.merge(prompts, [part([FOURTH, FIRST]), part([THIRD, SECOND])], {"temperature": 1.0})


def test_replicas_are_merged_in_prompt_order(turned):
    assert turned.responses.values.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 1]
    assert turned.mask.astype(int).tolist() == [1, 0, 1, 1, 1, 1, 1, 0, 1, 0, 1]
    assert turned.turns.tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 1, 0, 0]
    np.testing.assert_array_equal(turned.env_rewards, [1.5, NAN, -1.0, 2.0])
    np.testing.assert_array_equal(np.asarray(turned.rewards), turned.env_rewards)
    assert [info["turns"] for info in turned.infos] == [2, 1, 2, 1]
    (error,) = turned.env_errors
    assert (error.sample, error.turn, error.ended) == (2, 1, True) and "env.py, line 3" in str(error)


def test_a_batch_trains_on_what_was_sampled_and_an_advantage_gets_the_turns(turned):
    kept = turned.select(np.array([True, False, True, True]))
    seen = {}

    def mine(rewards, group, *, mask, turns, token_rewards, lengths):
        seen.update(mask=mask, turns=turns, token_rewards=token_rewards, lengths=lengths)
        return rewards

    batch = kept.batch(mine)
    assert batch.mask.astype(int).tolist() == [1, 0, 1, 1, 0, 1] and np.isfinite(batch.sampler_logprobs).all()
    assert seen["turns"].tolist() == [[0, 0, 1, 1], [0, 0, 0, 0]] and seen["lengths"].tolist() == [3, 1]
    assert seen["token_rewards"].tolist() == [[0.5, 0, 0, 1.0], [0, 2.0, 0, 0]]
    given = np.zeros(len(kept.logprobs), np.float32)  # what is given counts
    assert kept.batch(mine, token_rewards=given).tokens == 6 and not seen["token_rewards"].any()
    with pytest.raises(DataError, match="token_rewards"):  # scored since: the environment's are not these rewards
        kept.score([1, 2, 3]).batch(mine)
    with pytest.raises(DataError, match="token_rewards"):  # without an environment nobody gives them
        replace(kept, turns=None, turn_rewards=None).batch(mine)


def test_an_advantage_by_turns_of_the_library_takes_them(turned):
    kept = turned.select(np.array([True, False, False, True]))
    batch = kept.batch(rb.rl.process_normalized(std="none"))
    assert np.isfinite(batch.advantages).all() and batch.advantages[:4].any()
    assert not batch.advantages[~batch.mask].any()


def test_a_sample_without_a_reward_is_not_trained_on_in_silence(turned):
    with pytest.raises(DataError):
        turned.batch(lambda rewards, group: rewards)
    scored = turned.score([1, 2, 3, 4])  # scoring overrides the environment's, which stay beside
    assert scored.rewards.tolist() == [1, 2, 3, 4] and scored.env_rewards[0] == 1.5
    assert len(scored.batch(lambda rewards, group: rewards)) == 3


def test_samples_and_prompts_are_taken_with_their_turns(turned):
    last = turned[1:]
    assert last.mask.astype(int).tolist() == [1, 0, 1, 0, 1] and last.turns.tolist() == [0, 0, 1, 0, 0]
    assert last.turn_rewards.lengths.tolist() == [2, 1] and [i["turns"] for i in last.infos] == [2, 1]
    assert last[0].outputs[0].info["errors"] == [ERROR]


def test_channels_show_what_was_observed_and_know_no_log_prob_there(turned):
    shown = all_channels(turned)
    assert list(shown) == ["sampler_logprob", "mask", "turn"]
    assert np.isnan(shown["sampler_logprob"]).tolist() == (~turned.mask).tolist()
    assert shown["turn"].tolist() == turned.turns.tolist()
    batch = turned.score([1, 2, 3, 4]).batch(lambda rewards, group: rewards)
    seen = turned.with_batch(batch, Metrics({}, tokens={"logprobs": np.full(batch.tokens, -2.0, np.float32)}))
    known = turned.mask & ~np.repeat(turned.aborted, turned.lengths)
    assert np.isfinite(seen.channels["difference"]).tolist() == known.tolist()


def test_parquet_gives_the_same_back(turned, tmp_path):
    assert same(turned, Rollouts.from_parquet(turned.to_parquet(tmp_path / "r.parquet")))
    table = pandas.read_parquet(tmp_path / "r.parquet")
    assert table["turn"][0].tolist() == [0, 0, 1, 1] and json.loads(table["info_json"][0]) == FIRST[7]
    frame = turned.to_pandas()
    assert frame["env_reward"][0] == 1.5 and frame["mask"][0].tolist() == [1, 0, 1, 1]


def test_trajectories_have_the_turns_as_messages(turned, tmp_path):
    found = json.loads(turned.to_json(tmp_path / "t.json").read_text())["trajectories"]
    assert [m["role"] for m in found[0]["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert found[0]["mask"] == [1, 0, 1, 1] and found[0]["turn_rewards"] == [0.5, 1.0]
    assert found[0]["channels"]["sampler_logprob"][1] is None and found[2]["info"]["errors"] == [ERROR]
    assert found[1]["messages"][-1]["role"] == "assistant" and found[1]["reward"] is None


def test_the_viewer_marks_what_was_observed(turned, tiny_path):
    static = rollouts_view(replace(turned, tokenizer=str(tiny_path)))
    rows = [re.findall(r"<span class=(\w+) title", row) for row in re.findall("<td class=t>.*?</td>", static)]
    marked = [[name == "off" for name in row] for row in rows]
    wanted = [row.tolist() for row in turned.responses.with_values(~turned.mask)]
    assert sorted(marked) == sorted(wanted)  # the most telling group comes first

"""A step's record knows the reward and the advantage its batch was made with."""

import numpy as np

import rlbench as rb
from rlbench.session.record.sources import of_batch
from tests.data.values import rollouts


def length(rollout):
    return float(len(rollout))


def centred(rewards, group):
    return rewards - rewards.mean()


def test_reward_and_advantage_are_named_with_their_text():
    found = of_batch(rollouts().score(length).batch(advantage=centred)[:2])
    assert (found["reward_name"], found["advantage_name"]) == ("length", "centred")
    assert "float(len(rollout))" in found["reward_source"] and "rewards.mean()" in found["advantage_source"]
    assert len(found["reward_hash"]) == len(found["advantage_hash"]) == 12 != found["reward_hash"]
    preset = of_batch(rollouts().score(length).batch(rb.rl.group_normalized(ddof=0)))
    assert preset["advantage_source"].startswith("group_normalized(") and preset["advantage_name"]


def test_what_was_made_by_hand_has_no_source():
    batch = rollouts().score([1, 2, 3, 4, 5, 6]).batch(advantage=centred)
    assert "reward_name" not in of_batch(batch) and of_batch(batch)["advantage_name"] == "centred"
    bare = rb.TrainBatch(**{name: getattr(batch, name) for name in batch.__dataclass_fields__})
    assert of_batch(bare) == {}


def test_the_last_reward_counts():
    batch = rollouts().score(length).score(lambda r: 1.0).batch(advantage=lambda rewards, group: rewards)
    assert of_batch(batch)["reward_name"] == "<lambda>"
    assert np.all(batch.rewards == 1)


def test_what_a_reward_uses_may_be_edited_after_its_batch_was_seen():
    bonus = {"of": 1.0}
    batch = rollouts().score(lambda rollout: bonus["of"]).batch(advantage=centred)
    first = of_batch(batch)
    bonus["of"] = 2.0
    assert of_batch(batch) == first

"""The reward and the advantage that a value was made with are known beside it, weakly."""

import gc
import pickle

import rlbench as rb
from rlbench.data.record.origin import _makers, makers
from tests.data.values import rollouts


def reward(rollout):
    return float(len(rollout))


def test_makers_go_along_with_what_is_made_of_a_value():
    advantage = rb.rl.group_normalized(ddof=0)
    scored = rollouts().score(reward)
    batch = scored.select(scored.lengths > 1).batch(advantage=advantage)
    made = {"reward": reward, "advantage": advantage}
    for value in (batch, batch[1:3], batch.replace(temperature=0.5), batch + batch, batch.select(batch.rewards > -1)):
        assert makers(value) == made
    for value in (scored[:1], scored.with_batch(batch), scored + scored):
        assert makers(value) == {"reward": reward}
    assert makers(scored.score([0.0] * scored.samples)) == {}
    assert makers(pickle.loads(pickle.dumps(batch))) == {}


def test_nothing_is_kept_of_a_value_that_is_gone():
    gc.collect()
    before = len(_makers)
    rollouts().score(reward)
    gc.collect()
    assert len(_makers) == before

"""Where a value came from is known of values made by rlbench's own calls, and of no others."""

import dataclasses
import gc
import pickle
import weakref

import numpy as np

import rlbench as rb
from rlbench.data.origin import Origin, origin, remember
from tests.data.values import rollouts


def reward(rollout):
    return float(len(rollout))


def drawn():
    value = rollouts()
    return remember(value, Origin("drawn"))


def test_calls_are_chained_back_to_the_rollout():
    start = drawn()
    batch = start.score(reward).select(start.lengths > 1).batch(advantage=rb.rl.group_normalized(ddof=0))
    made = origin(batch[1:3])
    assert made.call == "__getitem__" and made.args == (slice(1, 3),)
    assert (made.of.call, made.of.kwargs) == ("batch", {"advantage": rb.rl.group_normalized(ddof=0)})
    assert [made.of.of.call, made.of.of.of.call, made.of.of.of.args] == ["select", "score", (reward,)]
    assert made.of.of.of.of is origin(start)


def test_a_value_changed_by_hand_has_no_origin():
    scored = drawn().score(reward)
    assert origin(dataclasses.replace(scored, rewards=np.zeros(6))) is None
    assert origin(pickle.loads(pickle.dumps(scored))) is None
    batch = scored.batch(advantage=rb.rl.group_normalized())
    assert origin(dataclasses.replace(batch, advantages=batch.advantages * 2)) is None


def test_what_is_only_looked_at_keeps_the_origin():
    start = drawn()
    seen = start.with_channels(mine=np.zeros(len(start.logprobs)))
    assert origin(seen) is origin(start)
    assert origin(rollouts().with_channels(mine=np.zeros(21))) is None


def test_joined_values_know_all_their_parts():
    one, two = drawn(), drawn()
    made = origin(one + two)
    assert made.call == "__add__" and made.of is origin(one) and made.args == (origin(two),)
    made = origin(rb.data.join([one, two], same_prompts=True))
    assert (made.call, made.of, made.args) == ("rlbench.data.joining.join", None, ([origin(one), origin(two)],))
    assert made.kwargs == {"same_prompts": True}


def test_an_origin_keeps_no_value_alive():
    start = drawn()
    scored = start.score(reward)
    gone = weakref.ref(start)
    del start
    gc.collect()
    assert gone() is None and origin(scored).of.call == "drawn"

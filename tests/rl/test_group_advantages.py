"""Several rewards, rewards of steps, the best of k, a baseline per token: by hand and against loops."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlbench.errors import LossError
from rlbench.rl.advantages import group_normalized, reinforce_plus_plus_baseline
from rlbench.rl.group_advantages import (
    branch_values,
    gdpo,
    optimal_token_baseline,
    pass_at_k,
    pass_at_k_normalized,
    process_normalized,
)
from tests.rl import advantage_reference as reference
from tests.rl.advantage_reference import EXAMPLES, batches, near, tensors


def test_pass_at_k_by_hand():
    rewards, group = torch.tensor([3.0, 1.0, 0.0]), torch.tensor([0, 0, 0])
    near(pass_at_k(std="none")(rewards, group), [2.0, 0.0, 0.0])  # the lead over the second
    near(pass_at_k(k=2, std="none")(rewards, group), [(2 + 3) / 2, 1 / 2, 0.0])  # over the pairs it is in
    near(pass_at_k()(rewards, group), [2.0 / statistics.stdev([3.0, 1.0, 0.0]), 0.0, 0.0], 1e-5)


def test_pass_at_k_training_equals_the_papers_closed_form():
    n, wrong, k = 8, 5, 3
    rewards = torch.tensor([0.0] * wrong + [1.0] * (n - wrong), dtype=torch.float64)
    mean = 1 - math.comb(wrong, k) / math.comb(n, k)
    deviation = math.sqrt(mean * (1 - mean))
    negative = (1 - mean - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)) / deviation
    got = pass_at_k_normalized(k=k, eps=0.0)(rewards, torch.zeros(n, dtype=torch.long))
    near(got, [negative] * wrong + [(1 - mean) / deviation] * (n - wrong), 1e-12)


def test_subsets_that_are_all_equally_good_teach_nothing():
    for rewards, k in (([0.1, 0.7, 0.7, 0.7], 3), ([0.1, 0.7, 0.3], 3)):
        values = torch.tensor(rewards, dtype=torch.float64)
        got = pass_at_k_normalized(k=k, eps=0.0)(values, torch.zeros(len(values), dtype=torch.long))
        assert (got == 0).all()


def test_pass_at_k_of_binary_rewards_has_the_unbiased_gradient():
    """Summed over all outcomes of n draws with p = 0.3, k/n sum_i A_i dlog p_i is the slope of pass@k."""
    n, k, p = 4, 2, 0.3
    slope = 0.0
    for outcome in range(2**n):
        drawn = [(outcome >> i) & 1 for i in range(n)]
        chance = math.prod(p if own else 1 - p for own in drawn)
        rewards = torch.tensor(drawn, dtype=torch.float64)
        advantages = pass_at_k(k=k, std="none")(rewards, torch.zeros(n, dtype=torch.long))
        score = torch.tensor([1 / p if own else -1 / (1 - p) for own in drawn], dtype=torch.float64)
        slope += chance * k / n * float((advantages * score).sum())
    assert slope == pytest.approx(k * (1 - p) ** (k - 1), rel=1e-12)


def test_gdpo_keeps_mixtures_apart_that_a_sum_would_confuse():
    parts = {"right": torch.tensor([1.0, 0.0, 0.0, 0.0]), "form": torch.tensor([0.0, 1.0, 1.0, 0.0])}
    total, group = parts["right"] + parts["form"], torch.zeros(4, dtype=torch.long)
    assert group_normalized()(total, group)[0] == group_normalized()(total, group)[1]
    got = gdpo(whiten="none")(total, group, components=parts)
    near(got, [1.5 - 0.8660, -0.5 + 0.8660, -0.5 + 0.8660, -0.5 - 0.8660], 1e-4)
    weighed = gdpo(weights={"right": 2.0, "form": 0.5}, whiten="none")(total, group, components=parts)
    near(weighed, [3.0 - 0.4330, -1.0 + 0.4330, -1.0 + 0.4330, -1.0 - 0.4330], 1e-4)


def test_process_supervision_by_hand():
    """Two responses of two steps and one of one; rewards 1, 0 | 0, 1 | 0 over the whole group."""
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 0], [1, 0, 0, 0]]).bool()
    turns = torch.tensor([[0, 0, 9, 1], [0, 9, 1, 9], [0, 9, 9, 9]])
    token_rewards = torch.tensor([[0.0, 1.0, 7.0, 0.0], [0.0, math.nan, 1.0, 3.0], [0.0, 0.0, 0.0, 0.0]])
    got = process_normalized(std="none")(
        torch.zeros(3), torch.zeros(3, dtype=torch.long), mask=mask, token_rewards=token_rewards, turns=turns
    )
    near(got, [[0.2, 0.2, 0.0, -0.4], [0.2, 0.0, 0.6, 0.0], [-0.4, 0.0, 0.0, 0.0]])


def test_values_of_branches_by_hand():
    """Rows 0 and 1 are of the root (1), row 0 goes through place 2, where rows 2 and 3 were forked, and row 2 goes on
    through place 3, where row 4 was; row 5 stands behind a text of its own (4), and no value comes from it."""
    nodes = torch.tensor([[1, 1, 2, 2], [1, 1, 1, 0], [0, 0, 2, 3], [0, 0, 2, 2], [0, 0, 0, 3], [0, 0, 4, 4]])
    mask = nodes > 0
    mask[0, 1] = False  # observed
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.5, 3.0])
    got = branch_values()(rewards, torch.zeros(6, dtype=torch.long), nodes=nodes, mask=mask)
    three = (1.0 + 0.5) / 2
    two = (1.0 + three + 0.0) / 3
    root = (two + 0.0) / 2
    wanted = [[two - root, 0, 1 - two, 1 - two], [-root] * 3 + [0], [0, 0, three - two, 1 - three]]
    near(got, [*wanted, [0, 0, -two, -two], [0, 0, 0, 0.5 - three], [0, 0, 0, 0]])
    whole = torch.ones(6, 2, dtype=torch.bool)
    plain = branch_values()(rewards, torch.zeros(6, dtype=torch.long), nodes=whole.long(), mask=whole)
    near(plain[:, 0], (rewards - rewards.mean()).tolist())
    near(plain[:, 1], (rewards - rewards.mean()).tolist())


def test_the_token_baseline_by_hand():
    """p = 1/2 of two outcomes: 1 - 1 + 1/2 per token, so W is half the position."""
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    half = torch.full((2, 3), 0.5).log()
    squared = torch.full((2, 3), 0.5)
    rewards = torch.tensor([[0.0, 0.0, 1.0], [2.0, 0.0, 0.0]])  # to go: 1 1 1 | 2 0
    got = optimal_token_baseline(rewards, torch.tensor([3, 3]), mask, half, squared, singleton="raw")
    near(got, [[-0.5, 0.5, 1.0], [0.5, -0.5, 0.0]])
    weights = torch.tensor([[1.0, 1.0, 1.0], [2.0, 2.0, 0.0]])  # squared: the second weighs four times
    got = optimal_token_baseline(rewards, torch.tensor([3, 3]), mask, half, squared, weights)
    near(got, [[1 - 1.8, 1 - 0.2, 0.0], [0.2, -0.2, 0.0]])


# -- against the loops, on any batch --------------------------------------------------------------------------


@EXAMPLES
@given(batches(), st.integers(1, 5))
def test_pass_at_k_equals_the_loop_over_all_subsets(batch, k):
    rewards, group, _ = batch
    r, g, _ = tensors(batch)
    near(pass_at_k(std="none")(r, g), reference.pass_at_k(rewards, group, None, "none"), 1e-9)
    near(pass_at_k()(r, g), reference.pass_at_k(rewards, group, None), 1e-9)
    if max(group.count(n) for n in group) < k:
        with pytest.raises(LossError, match="largest group"):
            pass_at_k_normalized(k=k)(r, g)
        return
    near(
        pass_at_k_normalized(k=k, eps=1e-3)(r, g),
        reference.pass_at_k_normalized(rewards, group, k, 1e-3),
        1e-7,
    )
    if k > 1:
        near(pass_at_k(k=k)(r, g), reference.pass_at_k(rewards, group, k), 1e-9)


@EXAMPLES
@given(batches(), st.randoms(use_true_random=False))
def test_one_per_token_equals_the_loop(batch, random):
    rewards, group, mask = batch
    r, g, m = tensors(batch)
    other = [random.choice([0.0, 1.0, 5.0]) for _ in rewards]
    summed = [
        a - 2 * b for a, b in zip(reference.normalized(rewards, group), reference.normalized(other, group), strict=True)
    ]
    parts = {"a": r, "b": torch.tensor(other)}
    weights = {"a": 1.0, "b": -2.0}
    near(
        gdpo(weights)(r, g, components=parts, mask=m),
        reference.whitened(reference.spread(summed, mask), mask),
        1e-7,
    )
    near(gdpo(weights, whiten="none")(r, g, components=parts), summed, 1e-9)
    near(
        gdpo(weights, whiten="sequences")(r, g, components=parts),
        reference.whitened([summed], [[True] * len(summed)])[0],
        1e-7,
    )

    baseline = reference.spread(reference.centred(rewards, group), mask)
    near(reinforce_plus_plus_baseline()(r, g, mask=m), reference.whitened(baseline, mask), 1e-7)
    near(reinforce_plus_plus_baseline(whiten=False)(r, g, mask=m), baseline, 1e-9)

    def anywhere(choices):
        return [[random.choice(choices) if own else math.nan for own in row] for row in mask]

    scores, logs, squared, weight = (
        anywhere(c) for c in ([0.0, 0.0, 1.0, -0.5], [-0.1, -1.0, -50.0, 0.0], [0.2, 1.0], [0.0, 0.5, 2.0])
    )
    turns = [[random.choice([0, 1, 4]) if own else -7 for own in row] for row in mask]
    for std in ("group", "none"):
        got = process_normalized(std)(r, g, mask=m, token_rewards=torch.tensor(scores), turns=torch.tensor(turns))
        near(got, reference.process(scores, group, mask, turns, std), 1e-6)
    clean = [[0.0 if math.isnan(v) else v for v in row] for row in scores]
    for singleton in ("zero", "raw"):
        got = optimal_token_baseline(
            *(torch.tensor(v, dtype=torch.float64) for v in (scores,)),
            g,
            m,
            *(torch.tensor(v, dtype=torch.float64) for v in (logs, squared, weight)),
            singleton=singleton,
        )
        near(got, reference.token_baseline(clean, group, mask, logs, squared, weight, singleton), 1e-7)

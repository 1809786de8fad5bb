"""Clip-Cov and KL-Cov: which tokens they choose, and that a step's split does not matter."""

import dataclasses

import numpy as np
import pytest
import torch

from rlbench.errors import LossError
from rlbench.rl.clipped import ppo
from rlbench.rl.covariance import clip_cov, covariance, kl_cov
from rlbench.rl.policy import PolicyLoss
from tests.rl import reference
from tests.rl.reference import make_inputs

LENGTHS = (9, 4, 0, 7, 12, 6)
CLIP_COV = clip_cov(fraction=0.1, low=0.0, high=2.0)


def dropped(loss: PolicyLoss, x) -> torch.Tensor:
    return loss.plan(x)["clip_cov/dropped"]


def test_covariance_by_hand():
    x = make_inputs(0, lengths=(2,), holes=False, per_token=True, outside=0.0)
    x = dataclasses.replace(x, logprobs=torch.tensor([[-1.0, -3.0]]), advantages=torch.tensor([[2.0, -4.0]]))
    assert covariance(x).tolist() == [[3.0, 3.0]]


@pytest.mark.parametrize("seed", range(4))
def test_clip_cov_drops_the_right_number_of_eligible_tokens_and_is_ppo_elsewhere(seed):
    x = make_inputs(seed, LENGTHS, per_token=True)
    eligible, count = reference.chosen_by_covariance(CLIP_COV, reference.values(x))
    chosen = dropped(CLIP_COV, x)
    assert int(eligible.sum()) > count > 1  # there is something to choose
    assert int(chosen.sum()) == count
    assert not (chosen.numpy() & ~eligible).any()
    per_token, metrics = CLIP_COV(x)
    expected = np.where(chosen.numpy(), 0.0, reference.surrogate(CLIP_COV, x))
    np.testing.assert_allclose(per_token.detach().numpy(), expected, atol=1e-12)
    assert torch.equal(metrics["cov_dropped"] > 0, chosen)
    (gradient,) = torch.autograd.grad(per_token.sum(), x.logprobs)
    assert (gradient[chosen] == 0).all()


def test_clip_cov_takes_all_where_few_are_eligible_and_none_where_none_is():
    x = make_inputs(1, LENGTHS, per_token=True)
    few = clip_cov(fraction=1.0, low=0.5, high=2.0)
    eligible, _ = reference.chosen_by_covariance(few, reference.values(x))
    assert eligible.any() and np.array_equal(dropped(few, x).numpy(), eligible)
    assert not dropped(clip_cov(fraction=1.0, low=500.0, high=501.0), x).any()
    torch.testing.assert_close(clip_cov(fraction=0.0)(x)[0], ppo()(x)[0])
    one = dropped(clip_cov(low=0.0), x)  # 2e-4 of a few tokens is still one
    assert int(one.sum()) == 1


def test_the_choice_follows_the_seed_and_spreads_over_the_eligible():
    x = make_inputs(2, LENGTHS, per_token=True)
    choices = [dropped(dataclasses.replace(CLIP_COV, seed=seed), x) for seed in range(60)]
    assert torch.equal(choices[0], dropped(CLIP_COV, x))
    often = torch.stack(choices).sum(0)
    eligible, count = reference.chosen_by_covariance(CLIP_COV, reference.values(x))
    mean = 60 * count / eligible.sum()
    assert (often.numpy()[eligible] > 0.2 * mean).all()
    assert often.max() < 3 * mean


def test_the_choice_does_not_depend_on_recomputed_logprobs_in_their_last_bits():
    x = make_inputs(2, LENGTHS, per_token=True)
    again = dataclasses.replace(x, logprobs=x.logprobs.detach() * (1 + 1e-6))
    assert torch.equal(dropped(CLIP_COV, x), dropped(CLIP_COV, again))


def test_kl_cov_pulls_the_largest_covariances():
    x = make_inputs(3, LENGTHS, per_token=True)
    loss = kl_cov(fraction=0.2)
    wanted, count = reference.chosen_by_covariance(loss, reference.values(x))
    pulled = loss.plan(x)["kl_cov/pulled"]
    assert int(pulled.sum()) == count > 1
    assert np.array_equal(pulled.numpy(), wanted)


def test_kl_cov_breaks_ties_the_same_way_in_any_order():
    x = make_inputs(3, LENGTHS)
    x = dataclasses.replace(x, advantages=torch.zeros_like(x.advantages))  # all covariances are 0
    loss, order = kl_cov(fraction=0.2), [4, 0, 5, 3, 2, 1]
    pulled = loss.plan(x)["kl_cov/pulled"]
    assert torch.equal(loss.plan(reference.rows_of(x, order))["kl_cov/pulled"], pulled[order])


@pytest.mark.parametrize("loss", [CLIP_COV, kl_cov(fraction=0.2)], ids=repr)
def test_the_gradient_does_not_depend_on_the_split_into_micro_batches(loss):
    x = make_inputs(4, LENGTHS, per_token=True)
    planned = dataclasses.replace(x, channels=loss.plan(x))
    (whole,) = torch.autograd.grad(loss(planned)[0].sum(), x.logprobs)
    for parts in ([[0], [1, 2], [3, 4, 5]], [[5, 0, 3], [4, 2, 1]]):
        sums = []
        for rows in parts:
            width = max(LENGTHS[row] for row in rows)  # each part is padded to its own longest
            sums.append(loss(reference.rows_of(planned, rows, width))[0].sum())
        (gradient,) = torch.autograd.grad(sum(sums), x.logprobs)
        torch.testing.assert_close(gradient, whole, rtol=1e-12, atol=1e-12)
    alone = [loss(reference.rows_of(x, rows))[0].sum() for rows in ([0, 1], [2, 3], [4, 5])]
    (each_for_itself,) = torch.autograd.grad(sum(alone), x.logprobs)
    assert not torch.allclose(each_for_itself, whole)  # which is why there is a plan


def test_a_plan_is_needed_pure_and_without_gradient():
    x = make_inputs(5, LENGTHS)
    for loss in (clip_cov(), kl_cov()):
        assert loss.needs_plan
        first, second = loss.plan(x), loss.plan(x)
        assert first.keys() == second.keys()
        for name, channel in first.items():
            assert name.startswith(loss.name + "/")
            assert channel.dtype == torch.bool and channel.shape == x.mask.shape
            assert torch.equal(channel, second[name]) and not channel[~x.mask].any()


def test_channels_of_another_loss_are_refused():
    x = make_inputs(5, LENGTHS)
    with pytest.raises(LossError, match=r"channels\['clip_cov/dropped'\]"):
        clip_cov()(dataclasses.replace(x, channels=kl_cov().plan(x)))


@pytest.mark.parametrize("kind", [clip_cov, kl_cov])
def test_a_step_without_trained_tokens_has_nothing_to_choose(kind):
    x = make_inputs(0, lengths=(0, 0))
    (channel,) = kind().plan(x).values()
    assert not channel.any()
    assert (kind()(x)[0] == 0).all()

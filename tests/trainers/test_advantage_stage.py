"""Advantages by estimator equal loops written by hand; they are whitened once, and nothing makes NaN."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from rlbench.data.base.ragged import Ragged
from rlbench.options import options_in
from rlbench.strategies.fake import SoloGroup
from rlbench.strategies.options.config import OptionError, StrategyConfig
from rlbench.trainers.experience.advantage_stage import Samples, estimated
from rlbench.trainers.options.ppo_config import PPOConfig
from rlbench.trainers.options.trainer_options import COMPARING, check_together

ESTIMATORS = options_in(StrategyConfig)["advantage_estimator"].choices
SOLO = SoloGroup()
KL_COEF = 0.05


def samples(seed: int = 0, reference: bool = True, masked: tuple[int, ...] = ()) -> Samples:
    """Three prompts of four samples; some tokens, and the rows of `masked`, are not trained."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, 12)
    layout = Ragged.from_rows([rng.integers(0, 90, n) for n in lengths], np.int32)
    total = len(layout.values)
    mask = rng.random(total) > 0.2
    ends = layout.offsets[1:] - 1
    mask[ends] = True
    for row in masked:
        mask[layout.offsets[row] : layout.offsets[row + 1]] = False
    near = lambda: (-3 + 0.4 * rng.normal(size=total)).astype(np.float32)  # noqa: E731
    return Samples(
        layout,
        mask,
        rng.integers(0, 3, 12).astype(np.float64) / 2,
        np.repeat(np.arange(3), 4),
        near(),
        near() if reference else None,
        rng.normal(size=total).astype(np.float32),
    )


def k_of(name: str, d: float) -> float:
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[name]


def by_hand(given: Samples, name: str, gamma: float, lambd: float, options: dict[str, Any]) -> list[np.ndarray]:
    """Advantages of each sequence by plain loops, without whitening and clipping."""
    rewards = given.rewards.copy()
    for number in np.unique(given.group):
        rows = np.flatnonzero(given.group == number)
        own = given.rewards[rows]
        for i, row in enumerate(rows):
            others = np.delete(own, i)
            if name == "rloo":
                rewards[row] = own[i] - others.mean()
            elif name == "reinforce_baseline":
                rewards[row] = own[i] - own.mean()
            elif name == "group_norm":
                rewards[row] = 0.0 if np.ptp(own) == 0 else (own[i] - own.mean()) / (own.std(ddof=1) + 1e-9)
    kind, in_loss = options.get("kl_estimator", "k3"), options.get("use_kl_loss", False)
    token_rewards, found = [], []
    for row in range(len(rewards)):
        at = range(given.layout.offsets[row], given.layout.offsets[row + 1])
        trained = [t for t in at if given.mask[t]]
        own_rewards = dict.fromkeys(trained, 0.0)
        for t in trained:
            if given.ref_logprobs is not None and not in_loss:
                own_rewards[t] -= KL_COEF * k_of(kind, float(given.logprobs[t]) - float(given.ref_logprobs[t]))
        if trained:
            own_rewards[trained[-1]] += rewards[row]
        token_rewards.append(own_rewards)
    sums = np.array([sum(own.values()) for own in token_rewards])
    for row, own in enumerate(token_rewards):
        advantages = np.zeros(given.layout.lengths[row])
        start = given.layout.offsets[row]
        total, after = 0.0, 0.0
        group = sums[given.group == given.group[row]]
        for t in reversed(own):
            if name == "gae":
                value = float(given.values[t])
                total = own[t] + gamma * after - value + gamma * lambd * total
                after = value
            elif name == "cpgd":
                total = (sums[row] - group.mean()) / (group.std() + 1e-6)
            else:
                total = own[t] + gamma * total
            advantages[t - start] = total
        found.append(advantages)
    return found


def made(given: Samples, gamma: float = 1.0, lambd: float = 0.95, control: Any = SOLO, **options: Any) -> Any:
    return estimated(given, StrategyConfig(**options), KL_COEF, gamma, lambd, control)


@pytest.mark.parametrize("kl", [{}, {"kl_estimator": "k1"}, {"kl_estimator": "k2"}, {"use_kl_loss": True}])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("name", ["gae", "reinforce", "rloo", "group_norm", "cpgd"])
def test_each_estimator_is_what_loops_over_tokens_give(name: str, gamma: float, kl: dict[str, Any]) -> None:
    """Defects absent: gamma was lost after the first micro-batch; CPGD's advantages were all 0."""
    if name == "cpgd":
        gamma = 1.0
    given = samples(1)
    found = made(given, gamma, 0.7, advantage_estimator=name, **kl)
    expected = np.concatenate(by_hand(given, name, gamma, 0.7, kl))
    np.testing.assert_allclose(found.advantages, expected, atol=2e-5)
    assert np.abs(found.advantages).max() > 0.1


@pytest.mark.parametrize("name", ["reinforce_baseline", "reinforce++"])
def test_estimators_that_whiten_do_so_once_whatever_advantages_norm_says(name: str) -> None:
    given = samples(2)
    raw = np.concatenate(by_hand(given, name, 1.0, 0.95, {}))
    kept = raw[given.mask]
    expected = np.where(given.mask, (raw - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8), 0.0)
    for norm in (False, True):
        found = made(given, advantage_estimator=name, advantages_norm=norm)
        np.testing.assert_allclose(found.advantages, expected, atol=2e-5)


@pytest.mark.parametrize("name", ["gae", "reinforce", "rloo", "group_norm", "grpo", "cpgd"])
def test_advantages_norm_whitens_every_estimator_and_its_alias_over_trained_tokens(name: str) -> None:
    """Defect absent: the trainer whitened a second time, all but the literal name "group_norm"."""
    given = samples(3)
    plain = made(given, advantage_estimator=name)
    found = made(given, advantage_estimator=name, advantages_norm=True)
    kept = plain.advantages[given.mask].astype(np.float64)
    np.testing.assert_allclose(
        found.advantages[given.mask], (kept - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8), atol=2e-5
    )
    assert (found.advantages[~given.mask] == 0).all()
    np.testing.assert_array_equal(found.returns, plain.returns)


def test_grpo_is_another_name_of_group_norm() -> None:
    given = samples(4)
    for norm in (False, True):
        one, other = (made(given, advantage_estimator=n, advantages_norm=norm) for n in ("grpo", "group_norm"))
        np.testing.assert_array_equal(one.advantages, other.advantages)


def test_group_norm_of_a_known_group() -> None:
    """(1, 0, 1, 0) has an unbiased deviation of 0.577: advantages of 0.866."""
    layout = Ragged.from_rows([[1], [2, 3], [4], [5]], np.int32)
    given = Samples(layout, np.ones(5, bool), np.array([1.0, 0, 1, 0]), np.zeros(4, np.int64), np.zeros(5, np.float32))
    found = made(given, advantage_estimator="group_norm")
    np.testing.assert_allclose(found.advantages, [0.8660254, -0.8660254, -0.8660254, 0.8660254, -0.8660254], atol=1e-6)


def test_gae_of_a_known_response() -> None:
    layout = Ragged.from_rows([[1, 2, 3]], np.int32)
    given = Samples(
        layout,
        np.ones(3, bool),
        np.array([1.0]),
        np.zeros(1, np.int64),
        np.zeros(3, np.float32),
        values=np.array([0.5, 0.4, 0.3], np.float32),
    )
    found = made(given, advantage_estimator="gae")
    np.testing.assert_allclose(found.advantages, [0.43675, 0.565, 0.7], atol=1e-6)
    np.testing.assert_allclose(found.returns, [0.93675, 0.965, 1.0], atol=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_sequence_that_trains_nothing_gives_zeros_and_moves_no_other(name: str) -> None:
    """Defect absent: a fully masked row made the loss NaN."""
    given = samples(5, masked=(2,))
    found = made(given, advantage_estimator=name, advantages_norm=True, advantage_clip=2.0)
    for values in (found.advantages, found.returns, found.token_rewards, found.kl):
        assert np.isfinite(values).all()
        assert (values[given.layout.offsets[2] : given.layout.offsets[3]] == 0).all()


def test_when_nothing_is_trained_nothing_is_nan() -> None:
    given = samples(5, masked=tuple(range(12)))
    found = made(given, advantage_estimator="reinforce", advantages_norm=True)
    assert (found.advantages == 0).all() and (found.returns == 0).all()


def test_equal_rewards_are_whitened_to_zero() -> None:
    layout = Ragged.from_rows([[1], [2]], np.int32)
    given = Samples(layout, np.ones(2, bool), np.array([0.7, 0.7]), np.arange(2), np.zeros(2, np.float32))
    assert (made(given, advantage_estimator="reinforce++").advantages == 0).all()


def test_what_stands_outside_the_clip_is_counted_before_it_is_clamped() -> None:
    """Defect absent: GAE counted after clamping, so that the share was always 0."""
    given = samples(6)
    free = made(given, advantage_estimator="gae")
    found = made(given, advantage_estimator="gae", advantage_clip=0.5)
    outside = given.mask & (np.abs(free.advantages) > 0.5)
    assert 0 < outside.sum() < given.mask.sum()
    np.testing.assert_array_equal(found.clipped, outside)
    np.testing.assert_allclose(found.advantages, np.clip(free.advantages, -0.5, 0.5), atol=1e-6)


def test_the_kl_stands_in_the_reward_or_in_the_loss_never_in_both() -> None:
    given = samples(7)
    in_reward = made(given, advantage_estimator="reinforce")
    in_loss = made(given, advantage_estimator="reinforce", use_kl_loss=True)
    np.testing.assert_array_equal(in_reward.kl, in_loss.kl)
    sums = lambda e: np.add.reduceat(e.token_rewards, given.layout.offsets[:-1])  # noqa: E731
    np.testing.assert_allclose(sums(in_loss), given.rewards, atol=1e-6)
    assert (np.abs(sums(in_reward) - given.rewards) > 1e-4).any()


@pytest.mark.parametrize(
    ("options", "gamma", "critic", "said"),
    [
        ({"advantage_estimator": "grop"}, 1.0, False, "nearest: grpo"),
        ({"kl_estimator": "k4"}, 1.0, False, "kl_estimator='k4'"),
        ({"advantage_estimator": "gae"}, 1.0, False, "critic"),
        ({"advantage_estimator": "rloo"}, 1.0, True, "critic"),
        ({"advantage_estimator": "reinforce_baseline"}, 0.9, False, "gamma"),
        ({"advantage_estimator": "cpgd"}, 0.9, False, "gamma"),
        *(({"advantage_estimator": n, "n": 1}, 1.0, False, "2 or more") for n in COMPARING),
    ],
)
def test_options_that_an_estimator_cannot_honour_are_refused(
    options: dict[str, Any], gamma: float, critic: bool, said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        check_together(StrategyConfig(**options), PPOConfig(gamma=gamma), critic)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_named_is_there(name: str) -> None:
    """Defect absent: "reinforce++" was offered and then rejected."""
    check_together(StrategyConfig(advantage_estimator=name), PPOConfig(), name == "gae")
    assert made(samples(8), advantage_estimator=name).advantages.any()

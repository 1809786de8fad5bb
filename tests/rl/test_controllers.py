"""Controllers: the formula by hand, and where they end up when the world answers."""

import dataclasses
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbench.errors import LossError
from rlbench.rl.controllers import AdaptiveEntropy, AdaptiveKL, FixedKL


def test_fixed_stays():
    fixed = FixedKL(0.05)
    assert fixed.update(1e9, 100) is fixed
    assert fixed.coef == 0.05


@pytest.mark.parametrize(
    ("observed", "error"),
    [(6.0, 0.0), (6.6, 0.1), (5.7, -0.05), (60.0, 0.2), (0.0, -0.2), (-3.0, -0.2)],
)
def test_adaptive_kl_by_hand(observed, error):
    before = AdaptiveKL(target=6.0, horizon=1000.0, coef=0.5)
    after = before.update(observed, 100)
    assert after.coef == pytest.approx(0.5 * (1 + error * 100 / 1000), rel=1e-12)
    assert before.coef == 0.5
    assert after == dataclasses.replace(before, coef=after.coef)


def test_adaptive_kl_finds_the_coefficient_that_gives_the_target():
    """A policy whose KL is 3 / coef holds 6 nats at 0.5."""
    controller = AdaptiveKL(target=6.0, horizon=1000.0, coef=0.01)
    for _ in range(2000):
        controller = controller.update(3.0 / controller.coef, 64)
    assert controller.coef == pytest.approx(0.5, rel=1e-3)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 4.9))
@settings(max_examples=60, derandomize=True)
def test_adaptive_kl_stays_positive_and_bounded(observed, share):
    controller = AdaptiveKL(target=1.0, horizon=100.0, coef=1.0)
    for own in observed:
        after = controller.update(own, int(share * 100))
        assert 0 < after.coef <= controller.coef * 2
        controller = after


def test_adaptive_entropy_acts_only_below_its_target():
    controller = AdaptiveEntropy(target=0.5, delta=0.01, high=0.02, level=0.0)
    coefs = []
    for entropy in (0.4, 0.5, 0.3, 0.6, 0.7, 0.8, 0.4):
        controller = controller.update(entropy)
        coefs.append((round(controller.level, 6), round(controller.coef, 6)))
    assert coefs == [
        (0.01, 0.01),
        (0.02, 0.02),
        (0.02, 0.02),  # rises to its bound at or below the target
        (0.01, 0.0),
        (0.0, 0.0),
        (0.0, 0.0),  # falls above it, and the bonus rests
        (0.01, 0.01),
    ]


def test_adaptive_entropy_uses_its_first_level_before_it_has_seen_anything():
    assert AdaptiveEntropy(level=0.1).coef == 0.1


def test_controllers_are_values():
    for controller in (FixedKL(), AdaptiveKL(), AdaptiveEntropy().update(0.1)):
        assert pickle.loads(pickle.dumps(controller)) == controller
        with pytest.raises(dataclasses.FrozenInstanceError):
            controller.coef = 3.0


def test_what_cannot_be_used_is_refused():
    for call, pattern in (
        (lambda: FixedKL(-0.1), "coef=-0.1"),
        (lambda: AdaptiveKL(target=0.0), "target=0.0"),
        (lambda: AdaptiveKL(horizon=-1.0), "horizon"),
        (lambda: AdaptiveKL(coef=math.inf), "coef=inf"),
        (lambda: AdaptiveKL().update(math.nan, 1), "not finite"),
        (lambda: AdaptiveKL().update(1.0, -1), "samples=-1"),
        (lambda: AdaptiveKL(horizon=10.0).update(1.0, 50), "fewer than 50"),
        (lambda: AdaptiveEntropy(target=-1.0), "target"),
        (lambda: AdaptiveEntropy(low=2.0, high=1.0), "high"),
        (lambda: AdaptiveEntropy(level=3.0), "level"),
        (lambda: AdaptiveEntropy(delta=-0.1), "delta"),
        (lambda: AdaptiveEntropy().update(math.inf), "not finite"),
    ):
        with pytest.raises(LossError, match=pattern):
            call()

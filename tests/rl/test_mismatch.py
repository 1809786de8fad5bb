"""Weights against loops written out by hand; what is dropped still counts; the step's split does not matter."""

import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbench.errors import LossError
from rlbench.rl.aggregate import Aggregation, BatchTotals
from rlbench.rl.mismatch import (
    chain,
    geometric_mask,
    icepop,
    off_policy_sequence_mask,
    reject,
    sequence_mask,
    sequence_tis,
    token_tis,
)
from rlbench.rl.policy import PolicyLoss
from rlbench.rl.types import LossInputs

NAN = float("nan")


def inputs(x, mask=None, advantages=None, logprobs=None) -> LossInputs:
    """Tokens with the log-weights `x`, garbage outside the mask."""
    x = torch.as_tensor(x, dtype=torch.float64)
    mask = torch.ones(x.shape, dtype=torch.bool) if mask is None else torch.as_tensor(mask).bool()
    sampler = torch.full_like(x, -1.25)
    advantages = torch.ones_like(x) if advantages is None else torch.as_tensor(advantages, dtype=torch.float64)

    def garbage(values):
        return torch.where(mask, values, NAN)

    return LossInputs(
        logprobs=garbage(sampler + x if logprobs is None else torch.as_tensor(logprobs, dtype=torch.float64)),
        old_logprobs=garbage(sampler + x),
        sampler_logprobs=garbage(sampler),
        ref_logprobs=None,
        advantages=garbage(advantages.expand(x.shape)),
        mask=mask,
        entropy=torch.zeros_like(x),
    )


@dataclasses.dataclass(frozen=True)
class plain(PolicyLoss):
    """The simplest policy loss there is."""

    def surrogate(self, x):
        return -x.advantages * x.logprobs, {}


# -- the slow reference --------------------------------------------------------------------------------------


def slow_weights(correction, x: LossInputs) -> np.ndarray:
    """The weight of each token, one at a time, in plain floats."""
    if isinstance(correction, chain):
        return np.prod([slow_weights(part, x) for part in correction.parts], axis=0)
    out = np.zeros(x.mask.shape)
    for i in range(x.mask.shape[0]):
        tokens = [t for t in range(x.mask.shape[1]) if x.mask[i, t]]
        xs = {t: x.old_logprobs[i, t].item() - x.sampler_logprobs[i, t].item() for t in tokens}
        for t in tokens:
            out[i, t] = slow_weight(correction, x, i, t, xs)
    if getattr(correction, "normalise", False):
        rows = [i for i in range(len(out)) if x.mask[i].any()]
        if correction.per_sequence:
            counted = [max(out[i]) for i in rows]
        else:
            counted = [out[i, t] for i in rows for t in range(out.shape[1]) if x.mask[i, t]]
        mean = sum(counted) / max(len(counted), 1)
        out = out / mean if mean > 0 else out
    return out


def slow_weight(correction, x: LossInputs, i: int, t: int, xs: dict[int, float]) -> float:
    def bounded_exp(value):
        return math.exp(min(max(value, -20.0), 20.0))

    name = correction.name
    if name in ("token_tis", "sequence_tis"):
        w = bounded_exp(xs[t] if name == "token_tis" else sum(xs.values()))
        return min(max(w, correction.floor), correction.cap)
    if name in ("icepop", "sequence_mask"):
        w = bounded_exp(xs[t] if name == "icepop" else sum(xs.values()))
        return w if correction.low <= w <= correction.high else 0.0
    if name == "geometric_mask":
        return float(correction.low <= math.exp(sum(xs.values()) / len(xs)) <= correction.high)
    if name == "off_policy_sequence_mask":
        behaviour = x.sampler_logprobs if correction.against == "sampler" else x.old_logprobs
        far = sum(behaviour[i, u].item() - x.logprobs[i, u].item() for u in xs) / len(xs)
        return float(not (x.advantages[i, t] < 0 and far > correction.delta))
    assert name == "reject"
    estimates = {
        u: {"k1": -v, "k2": v * v / 2, "k3": bounded_exp(v) - 1 - min(max(v, -20.0), 20.0)}[correction.estimator]
        for u, v in xs.items()
    }
    low = -correction.high if correction.low is None else correction.low
    looked_at = {
        "token": [estimates[t]],
        "seq_sum": [sum(estimates.values())],
        "seq_mean": [sum(estimates.values()) / len(estimates)],
        "seq_max": list(estimates.values()),
    }[correction.level]
    return float(all(low <= value <= correction.high for value in looked_at))


CORRECTIONS = [
    token_tis(),
    token_tis(cap=5.0, floor=0.5),
    token_tis(cap=math.inf),
    token_tis(normalise=True),
    sequence_tis(cap=5.0),
    sequence_tis(cap=5.0, floor=0.2, normalise=True),
    icepop(),
    icepop(normalise=True),
    sequence_mask(),
    sequence_mask(high=3.0, low=0.3, normalise=True),
    geometric_mask(0.7, 1.3),
    *(
        reject(0.2, estimator=estimator, level=level)
        for estimator in ("k1", "k2", "k3")
        for level in ("token", "seq_sum", "seq_mean", "seq_max")
    ),
    reject(0.3, estimator="k1", level="token", low=-0.9),
    reject(2.0, estimator="k1", level="seq_max", low=0.1),
    off_policy_sequence_mask(0.1),
    off_policy_sequence_mask(0.1, against="old"),
    token_tis() + reject(0.5, estimator="k2", level="seq_max") + geometric_mask(0.5, 2.0),
    token_tis(normalise=True) + reject(0.5, estimator="k1", level="token"),
]


def random_inputs(seed: int, rows: int, width: int, scale: float) -> LossInputs:
    random = np.random.default_rng(seed)
    mask = random.random((rows, width)) < 0.7
    if seed % 3 == 0:
        mask[0] = False
    return inputs(
        random.normal(size=(rows, width)) * scale,
        mask,
        advantages=random.normal(size=(rows, 1)),
        logprobs=random.normal(size=(rows, width)) * scale - 1.25,
    )


@pytest.mark.parametrize("correction", CORRECTIONS, ids=repr)
@settings(derandomize=True, max_examples=12)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 4),
    width=st.integers(1, 6),
    scale=st.sampled_from([0.05, 0.5, 50.0]),
)
def test_weights_equal_the_loop(correction, seed, rows, width, scale):
    x = random_inputs(seed, rows, width, scale)
    weights, metrics = correction(x)
    np.testing.assert_allclose(weights.numpy(), slow_weights(correction, x), rtol=1e-9, atol=1e-12)
    assert not weights.requires_grad
    for value in (weights, *metrics.values()):
        assert tuple(value.shape) == tuple(x.mask.shape)
        assert (value[~x.mask] == 0).all()
    dropped = metrics["rejected"].bool()
    assert (weights[dropped] == 0).all()
    assert (weights[x.mask & ~dropped] > 0).all()


# -- by hand -------------------------------------------------------------------------------------------------

X = [[math.log(3.0), math.log(0.25)], [math.log(1.5), 0.0]]


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (token_tis(cap=2.0), [[2.0, 0.25], [1.5, 1.0]]),
        (token_tis(cap=2.0, floor=0.5), [[2.0, 0.5], [1.5, 1.0]]),
        (token_tis(cap=2.0, normalise=True), [[2 / 1.1875, 0.25 / 1.1875], [1.5 / 1.1875, 1 / 1.1875]]),
        (sequence_tis(cap=1.2), [[0.75, 0.75], [1.2, 1.2]]),
        (sequence_tis(cap=1.25, normalise=True), [[0.75, 0.75], [1.25, 1.25]]),
        (icepop(), [[3.0, 0.0], [1.5, 1.0]]),
        (sequence_mask(high=1.4), [[0.75, 0.75], [0.0, 0.0]]),
        (sequence_mask(low=0.8), [[0.0, 0.0], [1.5, 1.5]]),
        (geometric_mask(0.9, 1.3), [[0.0, 0.0], [1.0, 1.0]]),
        (reject(math.log(2.0), estimator="k1", level="token"), [[0.0, 0.0], [1.0, 1.0]]),
        (reject(math.log(5.0), estimator="k1", level="token", low=-1.0), [[0.0, 1.0], [1.0, 1.0]]),
        (reject(0.5, estimator="k2", level="seq_max"), [[0.0, 0.0], [1.0, 1.0]]),
        (reject(0.75, estimator="k2", level="token"), [[1.0, 0.0], [1.0, 1.0]]),
        (reject(0.05, estimator="k3", level="seq_mean"), [[0.0, 0.0], [1.0, 1.0]]),
        (icepop() + geometric_mask(0.5, 1.1), [[3.0, 0.0], [0.0, 0.0]]),
    ],
    ids=repr,
)
def test_weights_by_hand(correction, expected):
    weights, _ = correction(inputs(X))
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))


def test_metrics_by_hand():
    _, metrics = token_tis(normalise=True)(inputs(X))
    assert metrics["is_weight"].tolist() == [[2.0, pytest.approx(0.25)], [pytest.approx(1.5), 1.0]]
    assert metrics["is_truncated"].tolist() == [[1, 0], [0, 0]]
    assert metrics["rejected"].sum() == 0
    _, metrics = (icepop() + geometric_mask(0.5, 1.1))(inputs(X))
    assert metrics["rejected"].tolist() == [[0, 1], [1, 1]], "dropped by any part"


def test_off_policy_sequences_are_dropped_only_where_they_did_badly():
    logprobs = [[-2.25, -2.25], [-2.25, -2.25], [-1.3, -1.3]]  # the sampler's are all -1.25
    x = inputs(torch.zeros(3, 2), advantages=[[-1.0], [1.0], [-1.0]], logprobs=logprobs)
    weights, metrics = off_policy_sequence_mask(0.5)(x)
    assert weights.tolist() == [[0, 0], [1, 1], [1, 1]]
    assert metrics["rejected"].tolist() == [[1, 1], [0, 0], [0, 0]]
    drifted = inputs(torch.full((1, 2), -0.6), advantages=[[-1.0]], logprobs=[[-1.85, -1.85]])
    assert off_policy_sequence_mask(0.5)(drifted)[0].sum() == 0, "the sampler's distance includes the mismatch"
    assert off_policy_sequence_mask(0.5, against="old")(drifted)[0].sum() == 2


def test_openrlhf_seq_mask_tis_is_a_sum_of_two():
    both = token_tis(cap=math.inf) + geometric_mask(0.5, 5.0)
    weights, _ = both(inputs([[3.0, -2.0], [-2.0, 0.0]]))
    torch.testing.assert_close(weights[0], torch.tensor([3.0, -2.0], dtype=torch.float64).exp())
    assert weights[1].sum() == 0


def test_one_absurd_token_cannot_make_a_weight_infinite():
    x = inputs([[5000.0, -5000.0, 0.0]])
    for correction in CORRECTIONS:
        weights, metrics = correction(x)
        assert torch.isfinite(weights).all()
        assert all(torch.isfinite(value).all() for value in metrics.values())


# -- within a policy loss ------------------------------------------------------------------------------------


def test_dropped_tokens_still_count_in_the_normaliser():
    x = inputs([[0.0, 3.0], [0.0, 0.0]], advantages=[[1.0], [2.0]])
    per_token, _ = plain(mismatch=icepop())(x)
    mean = (per_token * Aggregation("token-mean").weights(x.mask, BatchTotals.of(x.mask))).sum()
    assert mean.item() == pytest.approx((1.25 + 0.0 + 2 * 1.25 + 2 * 1.25) / 4), "divided by 4, not by the 3 kept"


@pytest.mark.parametrize("correction", CORRECTIONS, ids=repr)
def test_the_weight_has_no_gradient_and_the_loss_has_the_right_one(correction):
    x = random_inputs(7, 3, 4, 0.5)
    leaf = torch.where(x.mask, x.logprobs, 0.0).requires_grad_()

    def loss(logprobs):
        return plain(mismatch=correction)(dataclasses.replace(x, logprobs=logprobs))[0].sum()

    if not isinstance(correction, off_policy_sequence_mask):  # whose decision jumps with the policy
        assert torch.autograd.gradcheck(loss, [leaf])
    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    expected = -torch.where(x.mask, x.advantages, 0.0) * correction(dataclasses.replace(x, logprobs=leaf))[0]
    torch.testing.assert_close(gradient, expected)
    assert (gradient[~x.mask] == 0).all()


def test_no_gradient_even_where_old_logprobs_carry_one():
    x = inputs(X)
    x = dataclasses.replace(x, old_logprobs=x.old_logprobs.clone().requires_grad_())
    x = dataclasses.replace(x, sampler_logprobs=x.sampler_logprobs.clone().requires_grad_())
    for correction in CORRECTIONS:
        weights, metrics = correction(x)
        assert not weights.requires_grad
        assert not any(value.requires_grad for value in metrics.values())


@pytest.mark.parametrize("correction", CORRECTIONS, ids=repr)
def test_the_result_does_not_depend_on_the_split_the_order_or_the_padding(correction):
    x = random_inputs(5, 4, 5, 0.5)
    whole, _ = correction(x)
    channels = correction.plan(x)
    assert bool(channels) == correction.needs_plan

    def picked(rows, extra=0):
        def cut(value):
            return torch.cat([value[rows], torch.full((len(rows), extra), NAN, dtype=value.dtype)], dim=1)

        names = ("logprobs", "old_logprobs", "sampler_logprobs", "advantages", "entropy")
        padded = torch.cat([x.mask[rows], torch.zeros(len(rows), extra, dtype=torch.bool)], dim=1)
        return dataclasses.replace(
            x,
            mask=padded,
            channels={n: cut(c) for n, c in channels.items()},
            **{name: cut(getattr(x, name)) for name in names},
        )

    for rows in ([0], [1, 2], [3]):
        torch.testing.assert_close(correction(picked(rows))[0], whole[rows])
    order = [2, 0, 3, 1]
    moved = dataclasses.replace(picked(order, extra=2), channels={})
    torch.testing.assert_close(correction(moved)[0][:, :-2], whole[order])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_inputs_are_computed_in_float32(dtype):
    x = random_inputs(1, 3, 4, 0.5)
    rounded = dataclasses.replace(
        x, old_logprobs=x.old_logprobs.to(dtype), sampler_logprobs=x.sampler_logprobs.to(dtype)
    )
    wide = dataclasses.replace(
        x, old_logprobs=rounded.old_logprobs.double(), sampler_logprobs=rounded.sampler_logprobs.double()
    )
    for correction in (token_tis(normalise=True), sequence_tis(), sequence_mask()):
        got, _ = correction(rounded)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), correction(wide)[0], rtol=1e-5, atol=1e-6)


# -- values and refusals -------------------------------------------------------------------------------------


def test_corrections_are_values():
    both = token_tis(cap=3.0) + reject(0.1)
    assert both == chain((token_tis(cap=3.0), reject(0.1)))
    assert both + geometric_mask() == chain((token_tis(cap=3.0), reject(0.1), geometric_mask()))
    assert pickle.loads(pickle.dumps(both)) == both
    assert hash(both) == hash(token_tis(3.0) + reject(0.1))
    assert repr(token_tis()) == "token_tis(normalise=False, cap=2.0, floor=0.0)"
    assert not both.needs_plan
    assert (token_tis(normalise=True) + reject(0.1)).needs_plan


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: token_tis(cap=-1.0), r"cap=-1\.0"),
        (lambda: token_tis(cap=2.0, floor=3.0), "floor"),
        (lambda: sequence_tis(cap=0.0), "cap"),
        (lambda: icepop(low=-0.5), "low"),
        (lambda: sequence_mask(high=NAN), "high"),
        (lambda: geometric_mask(1.2, 1.1), "high"),
        (lambda: reject(0.1, estimator="k4"), "nearest: k"),
        (lambda: reject(0.1, level="seq_men"), "nearest: seq_mean"),
        (lambda: reject(-0.1), "high"),
        (lambda: reject(0.1, low=0.0), "k1"),
        (lambda: off_policy_sequence_mask(-1.0), "delta"),
        (lambda: off_policy_sequence_mask(0.1, against="samples"), "nearest: sampler"),
        (lambda: token_tis() + icepop(), "importance weights"),
        (lambda: chain(()), "chain"),
    ],
)
def test_bad_values_are_refused_by_name(make, said):
    with pytest.raises(ValueError, match=said) as caught:
        make()
    assert isinstance(caught.value, LossError)


def test_only_corrections_can_be_added():
    with pytest.raises(TypeError):
        token_tis() + 2

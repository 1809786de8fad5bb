"""Statistics by hand and against loops; sums of parts are the sums of the whole."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbench.errors import LossError
from rlbench.rl.diagnostics import MismatchMoments, mismatch_diagnostics

NAN = float("nan")


def slow_statistics(old: np.ndarray, sampler: np.ndarray, mask: np.ndarray) -> dict[str, float]:
    """Each statistic from its definition, over lists of plain floats."""

    def bounded(value):
        return min(max(value, -20.0), 20.0)

    rows = [[(old[i, t], sampler[i, t]) for t in range(mask.shape[1]) if mask[i, t]] for i in range(len(mask))]
    rows = [row for row in rows if row]
    pairs = [pair for row in rows for pair in row]
    xs = [o - s for o, s in pairs]
    w = [math.exp(bounded(x)) for x in xs]
    mean_w = np.mean(w)

    def over_rows(function):
        return np.mean([function(row) for row in rows])

    return {
        "kl": np.mean([-x for x in xs]),
        "k3_kl": np.mean([math.exp(bounded(x)) - 1 - bounded(x) for x in xs]),
        "sampler_ppl": over_rows(lambda row: math.exp(-np.mean([s for _, s in row]))),
        "trainer_ppl": over_rows(lambda row: math.exp(-np.mean([o for o, _ in row]))),
        "ppl_ratio": over_rows(lambda row: math.exp(np.mean([s - o for o, s in row]))),
        "chi2_token": np.mean([v * v for v in w]) - 1,
        "chi2_seq": over_rows(lambda row: math.exp(2 * bounded(sum(o - s for o, s in row)))) - 1,
        "ess": 1 / np.mean([(v / mean_w) ** 2 for v in w]),
        "max_gap": max(abs(x) for x in xs),
        "prob_gap_mean": np.mean([abs(math.exp(o) - math.exp(s)) for o, s in pairs]),
        "prob_gap_max": max(abs(math.exp(o) - math.exp(s)) for o, s in pairs),
    }


def random_batch(seed: int, rows: int, width: int, scale: float):
    random = np.random.default_rng(seed)
    mask = random.random((rows, width)) < 0.6
    mask[-1, 0] = True
    sampler = -random.random((rows, width)) * 3
    old = sampler + scale * random.normal(size=(rows, width))
    return (
        torch.tensor(np.where(mask, old, NAN)),
        torch.tensor(np.where(mask, sampler, NAN)),
        torch.tensor(mask),
    )


@settings(derandomize=True, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 5),
    width=st.integers(1, 6),
    scale=st.sampled_from([0.0, 0.01, 1.0, 30.0]),
    cut=st.integers(0, 5),
)
def test_statistics_equal_the_loop_also_when_added_from_parts(seed, rows, width, scale, cut):
    old, sampler, mask = random_batch(seed, rows, width, scale)
    expected = slow_statistics(old.numpy(), sampler.numpy(), mask.numpy())
    got = mismatch_diagnostics(old, sampler, mask)
    assert got == pytest.approx(expected, rel=1e-8, abs=1e-10)
    assert 0 < got["ess"] <= 1
    parts = MismatchMoments()
    for part in (slice(0, cut), slice(cut, None)):
        if len(mask[part]):
            parts = parts + MismatchMoments.of(old[part], sampler[part], mask[part])
    assert parts.result() == pytest.approx(got, rel=1e-12, abs=1e-14)


def test_a_nan_in_any_part_is_in_the_whole():
    old = torch.zeros(1, 2)
    mask = torch.ones(1, 2, dtype=torch.bool)
    good, bad = (MismatchMoments.of(old, old.new_tensor([[0.0, x]]), mask) for x in (1.0, NAN))
    assert math.isnan((good + bad).max_gap) and math.isnan((bad + good).max_gap)


def test_by_hand():
    """Two sequences: weights 2 and 1/2, and a weight of 1."""
    sampler = torch.log(torch.tensor([[0.25, 0.5], [0.5, NAN]], dtype=torch.float64))
    old = torch.log(torch.tensor([[0.5, 0.25], [0.5, NAN]], dtype=torch.float64))
    got = mismatch_diagnostics(old, sampler, torch.tensor([[True, True], [True, False]]))
    eighth = math.sqrt(1 / 8)
    assert got == pytest.approx(
        {
            "kl": 0.0,
            "k3_kl": 0.5 / 3,  # (2 - 1 - ln 2) + (1/2 - 1 + ln 2)
            "sampler_ppl": (1 / eighth + 2) / 2,
            "trainer_ppl": (1 / eighth + 2) / 2,
            "ppl_ratio": 1.0,
            "chi2_token": (4 + 0.25 + 1) / 3 - 1,
            "chi2_seq": 0.0,
            "ess": 3.5**2 / (3 * 5.25),
            "max_gap": math.log(2),
            "prob_gap_mean": 0.5 / 3,
            "prob_gap_max": 0.25,
        },
        abs=1e-12,
    )


def test_equal_engines_show_no_mismatch():
    logprobs = -torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    got = mismatch_diagnostics(logprobs, logprobs, torch.ones(3, 4, dtype=torch.bool))
    for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "max_gap", "prob_gap_mean", "prob_gap_max"):
        assert got[name] == 0
    assert got["ess"] == got["ppl_ratio"] == 1
    assert got["sampler_ppl"] == got["trainer_ppl"] > 1


def test_the_kl_is_the_one_of_the_sampler_against_the_trainer():
    p = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)  # the sampler, each token as often as it samples it
    q = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    counts = torch.tensor([1, 2, 7])
    sampler, old = p.log().repeat_interleave(counts)[None], q.log().repeat_interleave(counts)[None]
    got = mismatch_diagnostics(old, sampler, torch.ones(1, 10, dtype=torch.bool))
    exact = (p * (p / q).log()).sum().item()
    assert got["kl"] == pytest.approx(exact)
    assert got["k3_kl"] == pytest.approx(exact)
    assert got["chi2_token"] == pytest.approx((q * q / p).sum().item() - 1)


def test_neither_the_order_nor_the_padding_matters():
    old, sampler, mask = random_batch(4, 4, 5, 0.5)
    pad = torch.full((4, 2), NAN, dtype=torch.float64)
    order = [2, 0, 3, 1]
    moved = mismatch_diagnostics(
        torch.cat([old, pad], dim=1)[order],
        torch.cat([sampler, pad], dim=1)[order],
        torch.cat([mask, torch.zeros(4, 2, dtype=torch.bool)], dim=1)[order],
    )
    assert moved == pytest.approx(mismatch_diagnostics(old, sampler, mask), rel=1e-12)


def test_an_all_masked_micro_batch_adds_nothing():
    old, sampler, mask = random_batch(1, 3, 4, 0.5)
    nothing = MismatchMoments.of(old, sampler, torch.zeros_like(mask))
    assert nothing == MismatchMoments()
    assert nothing + MismatchMoments.of(old, sampler, mask) == MismatchMoments.of(old, sampler, mask)
    with pytest.raises(LossError, match="no trained token"):
        nothing.result()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_inputs_are_summed_in_float64(dtype):
    old, sampler, mask = (
        value.to(dtype) if value.is_floating_point() else value for value in random_batch(2, 3, 5, 0.3)
    )
    wide = mismatch_diagnostics(old.double(), sampler.double(), mask)
    assert mismatch_diagnostics(old, sampler, mask) == wide


def test_bad_shapes_are_refused():
    old, sampler, mask = random_batch(0, 2, 3, 0.1)
    with pytest.raises(ValueError, match=r"sampler_logprobs has shape \(2, 2\); wanted \(2, 3\)"):
        mismatch_diagnostics(old, sampler[:, :2], mask)
    with pytest.raises(LossError, match="mask"):
        mismatch_diagnostics(old, sampler, mask.float())
    with pytest.raises(LossError, match="empty"):
        mismatch_diagnostics(old[:0], sampler[:0], mask[:0])

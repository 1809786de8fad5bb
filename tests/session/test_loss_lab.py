"""The loss lab from the per-token arrays of one forward: what it says of each loss, and of each token. No engine."""

import pickle

import numpy as np
import pytest
import torch

from rlbench import rl
from rlbench.data.base.ragged import Ragged
from rlbench.dispatch.by_value import identity
from rlbench.errors import DataError, LossError
from rlbench.rl.lab import coefficients
from rlbench.session.lab.loss_lab import RATIOS
from tests.data.values import rollouts
from tests.labs import loss_lab

LOSSES = {"grpo": "grpo", "dapo": rl.dapo(), "plain": "reinforce"}
CENTRED = np.arange(6) - 2.4


def batch_of(mask=None):
    made = rollouts().score(range(6)).batch(lambda rewards, group: CENTRED)
    return made if mask is None else made.replace(mask=mask)


def tokens_of(batch, spread=0.4, seed=0):
    random = np.random.default_rng(seed)
    old = batch.sampler_logprobs - 1
    return {
        "old_logprobs": old,
        "ref_logprobs": old - 0.1,
        "logprobs": (old + spread * random.normal(size=batch.tokens)).astype(np.float32),
        "entropy": random.random(batch.tokens).astype(np.float32),
    }


def mine(x, beta=1.0):
    return beta * x.advantages * x.logprobs, {}


@pytest.fixture
def lab():
    batch = batch_of()
    return loss_lab(batch, tokens_of(batch), {**LOSSES, "mine": mine})


# -- numbers


def test_coefficients_lie_flat_in_the_order_of_the_batchs_tokens(lab):
    batch, tokens = lab.batch, tokens_of(lab.batch)
    ratio = np.exp(tokens["logprobs"] - tokens["old_logprobs"])
    out = ((ratio > 1.28) & (batch.advantages > 0)) | ((ratio < 0.8) & (batch.advantages < 0))
    expected = np.where(out, 0, -batch.advantages * ratio / batch.tokens)
    assert out.any() and not out.all()
    np.testing.assert_allclose(lab["dapo"].coefficients, expected, rtol=1e-5)
    assert lab["dapo"].zeros == lab["dapo"].clip_fraction == pytest.approx(out.mean())
    np.testing.assert_allclose(lab["mine"].coefficients, batch.advantages / batch.tokens, rtol=1e-5)


def test_each_loss_is_aggregated_as_it_is_meant_unless_all_are_told():
    batch = batch_of()
    own = loss_lab(batch, tokens_of(batch), LOSSES)
    assert [own[name].aggregation for name in own] == ["seq-mean-token-mean", "token-mean", "token-mean"]
    told = loss_lab(batch, tokens_of(batch), LOSSES, aggregation="token-sum")
    assert {told[name].aggregation for name in told} == {"token-sum"}
    np.testing.assert_allclose(told["dapo"].coefficients, own["dapo"].coefficients * batch.tokens, rtol=1e-5)


def test_the_table_says_of_every_loss_what_its_coefficients_do(lab):
    table = lab.table()
    assert list(table.index) == ["grpo", "dapo", "plain", "mine"]
    assert table.loc["grpo", ["cos", "norm_ratio", "signs_differ"]].tolist() == pytest.approx([1, 1, 0])
    assert table.loc["mine", "clip_fraction"] is None or np.isnan(table.loc["mine", "clip_fraction"])
    for name, row in table.iterrows():
        c = lab[name].coefficients.astype(float)
        first, up = lab["grpo"].coefficients.astype(float), lab.batch.advantages > 0
        assert row["coef_norm"] == pytest.approx(np.sqrt((c**2).sum()))
        assert row["share_positive"] == pytest.approx(np.abs(c[up]).sum() / np.abs(c).sum())
        assert row["share_positive"] + row["share_negative"] == pytest.approx(1.0)
        assert row["cos"] == pytest.approx(c @ first / np.linalg.norm(c) / np.linalg.norm(first))
        assert row["norm_ratio"] == pytest.approx(np.linalg.norm(c) / np.linalg.norm(first))
    assert table.loc["plain", "cos"] > 0 > table.loc["mine", "cos"]
    assert lab.cosines[2, 3] == pytest.approx(-1.0)


def test_signs_differ_on_the_tokens_where_one_pulls_up_and_the_other_down(lab):
    assert lab.signs_differ("mine", "plain").all() and not lab.signs_differ("dapo").any()
    moving = lab["grpo"].coefficients != 0
    assert np.array_equal(lab.signs_differ("mine"), moving) and lab.disagreement("mine") == moving.mean()


def test_shares_by_length_show_what_an_aggregation_favours(lab):
    by = lab.by("length")
    lengths = np.repeat(lab.batch.response_lengths, lab.batch.response_lengths)
    assert list(by.index) == ["1–2", "3", "4", "5–6"]
    np.testing.assert_allclose(by["trained tokens"], [3 / 21, 3 / 21, 4 / 21, 11 / 21])
    size = np.abs(lab["dapo"].coefficients.astype(float))
    assert by.loc["5–6", "dapo"] == pytest.approx(size[lengths >= 5].sum() / size.sum())
    assert by.loc["1–2", "grpo"] > by.loc["1–2", "dapo"]
    assert lab.by("advantage").loc["+", "plain"] == lab.table().loc["plain", "share_positive"]
    with pytest.raises(LossError, match="nearest: length"):
        lab.by("lenght")


def test_turns_are_runs_of_trained_tokens():
    batch = batch_of()
    mask = np.ones(batch.tokens, bool)
    mask[-4:-2] = False  # the last response, of 6 tokens: two trained, two of a tool, two trained
    batch = batch.replace(mask=mask)
    found = loss_lab(batch, tokens_of(batch), {"plain": "reinforce"})
    by, size = found.by("turn"), np.abs(found["plain"].coefficients.astype(float))
    assert list(by.index) == ["turn 0", "turn 1"] and (size[-4:-2] == 0).all()
    assert by.loc["turn 1", "plain"] == pytest.approx(size[-2:].sum() / size.sum())


def test_untrained_tokens_have_no_coefficient_whatever_the_forward_said_of_them():
    batch = batch_of()
    mask = np.arange(batch.tokens) % 3 > 0
    batch, tokens = batch.replace(mask=mask), tokens_of(batch)
    clean = loss_lab(batch, tokens, LOSSES)
    dirty = loss_lab(batch, {name: np.where(mask, v, np.nan) for name, v in tokens.items()}, LOSSES)
    for name in LOSSES:
        assert (clean[name].coefficients[~mask] == 0).all() and clean[name].coefficients[mask].any()
        assert np.array_equal(clean[name].coefficients, dirty[name].coefficients)


def test_a_loss_that_looks_at_the_whole_batch_gets_it():
    batch = batch_of()
    tokens = tokens_of(batch)
    loss = rl.reinforce(tokens=rl.high_entropy(fraction=0.25))
    found = loss_lab(batch, tokens, {"top": loss})["top"]
    assert np.array_equal(found.coefficients != 0, tokens["entropy"] >= np.sort(tokens["entropy"])[-5])
    assert found.zeros == pytest.approx(16 / 21)


def test_the_order_of_the_batchs_rows_does_not_matter():
    batch = batch_of()
    order = np.array([4, 1, 5, 0, 3, 2])
    tokens = tokens_of(batch)
    turned = {name: batch.responses.with_values(v).take(order).values for name, v in tokens.items()}
    one, other = loss_lab(batch, tokens, LOSSES), loss_lab(batch.rows(order), turned, LOSSES)
    for name in LOSSES:
        moved = batch.responses.with_values(one[name].coefficients).take(order).values
        np.testing.assert_allclose(other[name].coefficients, moved, rtol=1e-6)
        assert other[name].value == pytest.approx(one[name].value, rel=1e-5)


# -- what it takes


def test_without_old_log_probs_it_is_the_batchs_first_step():
    batch = batch_of()
    tokens = tokens_of(batch)
    first = loss_lab(batch, {name: tokens[name] for name in ("logprobs", "entropy")}, LOSSES)
    assert first.scored.on_policy and first["dapo"].zeros == 0
    np.testing.assert_allclose(first["dapo"].coefficients, first["plain"].coefficients, rtol=1e-5)
    assert not loss_lab(batch, tokens, LOSSES).scored.on_policy
    kept = batch.replace(old_logprobs=tokens["old_logprobs"])  # the batch's own are taken, too
    again = loss_lab(kept, {name: tokens[name] for name in ("logprobs", "entropy")}, LOSSES)
    assert not again.scored.on_policy
    assert np.array_equal(again["dapo"].coefficients, loss_lab(batch, tokens, LOSSES)["dapo"].coefficients)


def test_a_reference_is_used_where_there_is_one_and_missed_by_name_where_not():
    batch = batch_of()
    tokens = tokens_of(batch)
    pulled = {"kl": rl.reinforce(kl_coef=0.5, kl_estimator="k2"), "plain": "reinforce"}
    found = loss_lab(batch, tokens, pulled)
    gap = tokens["logprobs"] - tokens["ref_logprobs"]
    np.testing.assert_allclose(
        found["kl"].coefficients - found["plain"].coefficients, 0.5 * gap / batch.tokens, rtol=1e-4, atol=1e-6
    )
    without = loss_lab(batch, {k: v for k, v in tokens.items() if k != "ref_logprobs"}, pulled)
    assert list(without) == ["plain"]
    assert "needs ref_logprobs" in str(without.failed["kl"])


def test_a_failed_loss_is_named_with_its_line_and_the_others_are_there():
    def broken(x):
        return x.adventages, {}

    batch = batch_of()
    lab = loss_lab(batch, tokens_of(batch), {"broken": broken, "typo": "gprpo", "grpo": "grpo"})
    assert list(lab) == ["grpo"] and set(lab.failed) == {"broken", "typo"} and "broken" not in lab
    assert "return x.adventages, {}" in lab.failed["broken"].user_line
    assert repr(lab) == "LossLab(6 sequences: grpo; without numbers: typo, broken)"
    with pytest.raises(LossError, match="`broken` raised AttributeError"):
        lab["broken"]
    with pytest.raises(LossError, match="no loss 'gprro'; nearest: grpo"):
        lab["gprro"]
    none = loss_lab(batch, tokens_of(batch), {"typo": "gprpo"})
    assert not len(none) and none.cosines.shape == (0, 0) and len(none.table()) == 0


def test_a_list_of_losses_is_called_by_their_own_names():
    batch = batch_of()
    assert list(loss_lab(batch, tokens_of(batch), ["grpo", mine, rl.dapo(clip_high=0.3)])) == [
        "grpo",
        "mine",
        "dapo(clip_high=0.3)",
    ]
    assert list(loss_lab(batch, tokens_of(batch), "grpo")) == ["grpo"]
    for losses, said in ((["grpo", "grpo"], "same name"), ({}, "no losses"), ([], "no losses")):
        with pytest.raises(LossError, match=said):
            loss_lab(batch, tokens_of(batch), losses)


def test_what_is_not_finite_on_trained_tokens_is_refused():
    batch = batch_of()
    tokens = tokens_of(batch)
    with pytest.raises(DataError, match="entropy is not finite"):
        loss_lab(batch, tokens | {"entropy": np.where(tokens["entropy"] > 0.5, np.nan, 0)}, LOSSES)


# -- other losses on the same forward


def test_more_losses_need_no_other_forward_and_the_lab_stays_as_it_was(lab):
    more = lab.also({"strong": rl.grpo(clip_high=1.0), "mine": rl.gspo()})
    assert list(more) == [*lab, "strong"] and list(lab) == [*LOSSES, "mine"]
    assert more.scored is lab.scored and more["mine"].loss == rl.gspo() and lab["mine"].loss is mine


def test_hashes_go_with_the_loss_they_are_of():
    batch = batch_of()
    lab = loss_lab(batch, tokens_of(batch), LOSSES)
    assert (lab["grpo"].hash, lab["dapo"].hash) == (identity(rl.grpo()), identity(rl.dapo()))
    more = lab.also({"grpo": rl.grpo(clip_high=0.5)})
    assert more["grpo"].hash == identity(rl.grpo(clip_high=0.5)) and more["dapo"].hash == lab["dapo"].hash


def test_a_sweep_shows_the_loss_as_it_is_and_at_each_value(lab):
    swept = lab.sweep("dapo", "clip_high", [0.01, 10.0, -1])
    assert list(swept) == ["dapo", "clip_high=0.01", "clip_high=10.0"]
    assert list(swept.failed) == ["clip_high=-1"]
    assert swept["clip_high=0.01"].zeros > swept["dapo"].zeros > swept["clip_high=10.0"].zeros
    doubled = lab.sweep("mine", "beta", [2.0])
    np.testing.assert_allclose(doubled["beta=2.0"].coefficients, 2 * lab["mine"].coefficients, rtol=1e-6)
    assert doubled.table().loc["beta=2.0", "norm_ratio"] == pytest.approx(2.0)
    with pytest.raises(LossError, match="nearest: clip_high"):
        lab.sweep("dapo", "clip_hihg", [1])


# -- what if


def test_curves_start_from_the_batchs_typical_token(lab):
    curves, failed = lab.curves()
    assert not failed and list(curves) == list(lab)
    np.testing.assert_allclose(curves["dapo"].coefficient[0], np.where(RATIOS > 1.28, 0, -RATIOS), rtol=1e-5)
    old, entropy = lab.typical_token()
    assert old == pytest.approx(min(np.median(lab.batch.old_logprobs), -np.log(3) - 0.1))
    assert entropy == pytest.approx(np.median(lab.scored.entropy))


def test_a_loss_that_cannot_be_had_of_one_token_has_no_curve_and_prints_nothing(lab, capsys):
    def talks(x):
        print("here", x.mask.shape)
        return -x.advantages * x.logprobs / (len(x.mask) - 1), {}

    more = lab.also({"talks": talks})
    assert "here" in capsys.readouterr().out
    curves, failed = more.curves()
    assert list(curves) == list(lab) and "not finite" in str(failed["talks"])
    assert capsys.readouterr().out == ""


# -- tokens


def test_coefficients_are_channels_of_the_rollouts(lab):
    seen = rollouts().with_channels(**lab.channels())
    assert np.array_equal(seen.channels["coef dapo"], lab["dapo"].coefficients)
    assert np.array_equal(seen.channels["differs mine"], lab.signs_differ("mine"))
    assert "differs grpo" not in seen.channels


def test_a_batch_in_another_order_finds_its_rollouts():
    order = np.array([4, 1, 5, 0])
    batch = batch_of().rows(order)
    lab = loss_lab(batch, tokens_of(batch), LOSSES)
    seen = lab.on(rollouts())
    by_row = Ragged(seen.channels["coef grpo"], rollouts().responses.offsets)
    for b, row in enumerate(order):
        own = batch.responses.with_values(lab["grpo"].coefficients)[b]
        np.testing.assert_array_equal(by_row[row], own)
    assert np.isnan(by_row[2]).all() and {"advantage", "ratio", "entropy"} <= set(seen.channels)


# -- as a value


def test_a_lab_is_a_value_that_can_be_kept(lab):
    kept = pickle.loads(pickle.dumps(lab.also({"mine": rl.cispo()})))
    assert list(kept) == list(lab) and np.array_equal(kept["grpo"].coefficients, lab["grpo"].coefficients)
    with pytest.raises(AttributeError):
        lab.entries = {}


def test_it_says_what_the_mathematics_says_of_the_same_inputs(lab):
    found = coefficients(rl.grpo(), lab.scored.inputs)
    rows = torch.arange(found.logprobs.shape[1])[None] < torch.from_numpy(lab.batch.response_lengths)[:, None]
    assert np.array_equal(found.logprobs[rows].numpy(), lab["grpo"].coefficients)
    assert lab["grpo"].value == found.value

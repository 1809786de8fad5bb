"""Numbers beside tokens: they follow the samples, come from a batch whatever its order, and from no other's."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbench.data import Rollouts
from rlbench.data.record.metrics import Metrics
from rlbench.data.rollouts.channels import KNOWN, all_channels, kind_of
from rlbench.errors import DataError
from rlbench.rl import k3
from tests.data.comparing import cut_short
from tests.data.values import rollouts
from tests.data.written import sorting, stepped, written

FLAT = np.arange(21, dtype=np.float32)


def rows(value: Rollouts, name: str):
    return [row.tolist() for row in value.responses.with_values(value.channels[name])]


def scored():
    return rollouts().score(range(6))


def test_columns_of_a_teacher_follow_the_samples_to_a_batch_a_join_and_a_file(tmp_path):
    top = np.arange(42, dtype=np.float32).reshape(21, 2)
    value = replace(scored(), columns={"teacher_top_logprobs": top}).with_channels(teacher_logprob=FLAT)
    batch = value.select(value.group > 0).batch()
    assert batch.columns["teacher_top_logprobs"].tolist() == top[3:].tolist()
    assert batch.columns["teacher_logprobs"].tolist() == FLAT[3:].tolist()
    assert (value + value).columns["teacher_top_logprobs"].tolist() == [*top.tolist(), *top.tolist()]
    with pytest.raises(DataError, match="not in all"):
        value + scored()
    read = Rollouts.from_parquet(value.to_parquet(tmp_path / "r.parquet"))
    np.testing.assert_array_equal(read.columns["teacher_top_logprobs"], top)


# -- given by a user


@pytest.mark.parametrize(
    "given",
    [FLAT, FLAT.tolist(), torch.as_tensor(FLAT), [FLAT[i * (i + 1) // 2 :][: i + 1] for i in range(6)]],
    ids=["array", "list", "tensor", "rows"],
)
def test_a_channel_may_come_flat_or_in_rows(given):
    value = rollouts().with_channels(mine=given)
    assert value.channels["mine"].dtype == np.float32 and value.channels["mine"].tolist() == FLAT.tolist()
    assert not rollouts().channels  # a new value: the old one has none


@settings(max_examples=30)
@given(st.lists(st.booleans(), min_size=6, max_size=6))
def test_channels_follow_the_completions_that_are_kept(kept):
    value = rollouts().with_channels(mine=FLAT)
    assert rows(value.select(kept), "mine") == [r for r, keep in zip(rows(value, "mine"), kept, strict=True) if keep]


def test_channels_follow_the_prompts_of_a_slice_and_stay_when_scored():
    value = rollouts().with_channels(mine=FLAT)
    assert rows(value[1:], "mine") == rows(value, "mine")[2:]
    assert rows(value[::-1], "mine") == [rows(value, "mine")[i] for i in (4, 5, 2, 3, 0, 1)]
    assert value.score(range(6)).channels["mine"].tolist() == FLAT.tolist()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mine": np.zeros(20)}, r"channel mine has shape \(20,\); wanted \(21,\)"),
        ({"mine": [[0.0]] * 6}, "its rows are not as long as the completions"),
        ({"mine": ["a"] * 21}, "channel mine: wanted numbers"),
        ({"sampler_logprob": FLAT}, "cannot be replaced"),
    ],
)
def test_a_channel_that_does_not_fit_is_refused(given, said):
    with pytest.raises(DataError, match=said):
        rollouts().with_channels(**given)


# -- from a batch


def test_a_batch_gives_advantage_and_mask_at_the_tokens_they_are_of():
    value = scored()
    batch = value.batch(lambda rewards, group: rewards * 2)
    mask = batch.mask.copy()
    mask[-1] = False
    seen = value.with_batch(batch.replace(mask=mask, ref_logprobs=-FLAT))
    assert rows(seen, "advantage") == [[2.0 * i] * (i + 1) for i in range(6)]
    assert rows(seen, "mask")[-1] == [1, 1, 1, 1, 1, 0]
    assert seen.channels["ref_logprob"].tolist() == (-FLAT).tolist() and "old_logprob" not in seen.channels


@settings(max_examples=30)
@given(st.permutations(range(6)), st.integers(1, 6))
def test_a_batch_in_any_order_and_of_some_samples_is_found_again(order, count):
    value = scored()
    batch = value.batch(lambda rewards, group: FLAT)[list(order)[:count]]
    seen = rows(value.with_batch(batch), "advantage")
    whole = rows(value.with_channels(advantage=FLAT), "advantage")
    for i in range(6):
        if i in order[:count]:
            assert seen[i] == whole[i]
        else:
            assert np.isnan(seen[i]).all()


def test_completions_that_an_interrupt_cut_have_no_numbers():
    value = cut_short()
    seen = value.with_batch(value.batch(lambda rewards, group: rewards))
    assert [np.isnan(row).any() for row in rows(seen, "advantage")] == value.aborted.tolist()


def test_the_same_answer_drawn_twice_keeps_its_own_advantage():
    value = written(["a", "a"], [["12", "12"], ["12"]]).score([1, 2, 3])
    value = Rollouts(
        **{**value.__dict__, "logprobs": np.zeros(9, np.float32), "prompt_ids": value.prompt_ids.take([0, 0])}
    )
    seen = value.with_batch(value.batch(lambda rewards, group: rewards)[[2, 0, 1]])
    assert [row[0] for row in rows(seen, "advantage")] == [1, 2, 3]


def test_a_batch_of_other_rollouts_is_refused():
    value = scored()
    batch = value.batch(lambda rewards, group: rewards)
    with pytest.raises(DataError, match=r"sequence 4 of the batch .* is none of these 4 completions"):
        value[:2].with_batch(batch)
    with pytest.raises(DataError, match="sequence 0"):
        value.with_batch(batch.replace(sampler_logprobs=batch.sampler_logprobs - 1))
    with pytest.raises(DataError, match=r"metrics.tokens\['entropy'\] has shape \(3,\) for 21 response tokens"):
        value.with_batch(batch, Metrics({}, {"entropy": np.zeros(3)}))


# -- from a step


def test_a_step_gives_what_follows_from_the_trainers_logprobs():
    value = scored()
    batch = value.batch(lambda rewards, group: rewards)
    rng = np.random.default_rng(0)
    trainer, old, ref = (batch.sampler_logprobs + rng.normal(0, 0.3, 21).astype(np.float32) for _ in range(3))
    step = {"logprobs": trainer, "entropy": FLAT, "old_logprobs": old, "ref_logprobs": ref, "own": FLAT * 2}
    found = value.with_batch(batch, Metrics({}, step)).channels
    np.testing.assert_allclose(found["difference"], trainer - value.logprobs, atol=1e-6)
    np.testing.assert_allclose(found["ratio"], np.exp(trainer - old), rtol=1e-6)
    np.testing.assert_allclose(found["ref_kl"], k3(torch.as_tensor(trainer), torch.as_tensor(ref)), atol=1e-6)
    assert found["trainer_logprob"].tolist() == trainer.tolist() and found["own"].tolist() == (FLAT * 2).tolist()
    assert all(values.dtype == np.float32 for values in found.values())


def test_without_old_logprobs_the_ratio_is_to_the_sampler_and_without_a_reference_there_is_no_kl():
    value = scored()
    batch = value.batch(lambda rewards, group: rewards)
    found = value.with_batch(batch, Metrics({}, {"logprobs": batch.sampler_logprobs + 0.5})).channels
    np.testing.assert_allclose(found["ratio"], np.exp(0.5), rtol=1e-5)
    assert "ref_kl" not in found and "clipped" not in found


def test_a_huge_difference_overflows_neither_ratio_nor_kl():
    value = scored()
    batch = value.batch(lambda rewards, group: rewards)
    step = {"logprobs": batch.sampler_logprobs, "ref_logprobs": batch.sampler_logprobs + 500}
    found = value.with_batch(batch, Metrics({}, step)).channels
    assert np.isfinite(found["ref_kl"]).all()


def test_what_the_loss_clipped_is_a_channel():
    assert stepped(sorting()).channels["clipped"].sum() > 0


# -- reading them


def test_standard_channels_come_first_in_their_order_then_own_ones():
    names = list(all_channels(stepped(sorting()).with_channels(zeta=np.zeros(len(sorting().logprobs)))))
    assert names[-1] == "zeta" and names[:-1] == [n for n in KNOWN if n in names] and names[0] == "sampler_logprob"


def test_an_own_channel_is_signed_when_its_values_are():
    assert (
        kind_of("x", np.array([-1.0, 2.0, np.nan])).scale == "signed"
        and kind_of("x", np.array([0.0, 2.0])).scale == "size"
    )
    assert kind_of("x", np.array([np.nan])).scale == "size" and kind_of("ratio", np.array([1.0])).scale == "ratio"

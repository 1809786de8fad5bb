"""A training batch is a value: rows are chosen, fields replaced, and its tokens give it an identity."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlbench.errors import DataError
from tests.data.values import rollouts
from tests.modules import batch_of


def make():
    return rollouts().score(range(6)).batch(lambda rewards, group: np.arange(21))


def rows_of(batch):
    """Each row with all that belongs to it."""
    return [
        {
            "prompt": batch.prompts[i].tolist(),
            "response": batch.responses[i].tolist(),
            "reward": batch.rewards[i],
            "group": batch.group[i],
            "truncated": batch.truncated[i],
            **{
                name: batch.responses.with_values(getattr(batch, name))[i].tolist()
                for name in ("mask", "advantages", "sampler_logprobs", "ref_logprobs")
            },
        }
        for i in range(len(batch))
    ]


@given(st.lists(st.integers(0, 5), max_size=8))
def test_rows_carry_everything_of_the_sequences_asked_for(chosen):
    batch = make()
    batch = batch.replace(ref_logprobs=batch.sampler_logprobs * 2)
    part = batch.rows(chosen)
    assert rows_of(part) == [rows_of(batch)[i] for i in chosen]
    assert part.old_logprobs is None and part.tokens == part.response_lengths.sum()


@pytest.mark.parametrize(
    ("index", "wanted"),
    [(slice(1, 3), [1, 2]), (-1, [5]), ([4, 0], [4, 0]), (np.arange(6) % 3 == 0, [0, 3])],
    ids=["slice", "integer", "list", "mask"],
)
def test_a_slice_a_row_a_list_or_a_mask_gives_a_batch(index, wanted):
    assert rows_of_rewards(make()[index]) == wanted


def rows_of_rewards(batch):
    return batch.rewards.astype(int).tolist()


def test_lengths_are_those_of_prompt_and_response():
    batch = make()
    assert batch.response_lengths.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.lengths.tolist() == [2, 3, 5, 6, 8, 9] and batch.tokens == 21


def test_the_key_stays_whatever_the_advantages_mask_and_rewards_are():
    batch = make()
    other = batch.replace(
        advantages=batch.advantages * 2, mask=~batch.mask, rewards=batch.rewards + 1, old_logprobs=batch.advantages
    )
    assert make().key == batch.key == other.key


@pytest.mark.parametrize("change", ["tokens", "logprobs", "order", "prompt"])
def test_the_key_changes_with_the_sampled_tokens(change):
    batch = make()
    values = batch.responses.values.copy()
    values[3] += 1
    prompt = batch.prompts.values.copy()
    prompt[0] += 1
    other = {
        "tokens": lambda: batch.replace(responses=batch.responses.with_values(values)),
        "logprobs": lambda: batch.replace(sampler_logprobs=batch.sampler_logprobs - 0.5),
        "order": lambda: batch[::-1],
        "prompt": lambda: batch.replace(prompts=batch.prompts.with_values(prompt)),
    }[change]()
    assert other.key != batch.key


@pytest.mark.parametrize("name", ["mask", "advantages", "sampler_logprobs", "old_logprobs", "ref_logprobs"])
def test_a_channel_of_another_length_is_refused_by_its_name(name):
    with pytest.raises(DataError, match=f"{name} has .*20.* for 21 response tokens"):
        make().replace(**{name: np.zeros(20)})


@pytest.mark.parametrize("name", ["rewards", "group", "weight_version", "truncated"])
def test_a_column_of_another_length_is_refused_by_its_name(name):
    with pytest.raises(DataError, match=f"{name} has .*5.* for 6 sequences"):
        make().replace(**{name: np.zeros(5)})


def test_prompts_and_responses_of_different_number_are_refused():
    batch = make()
    with pytest.raises(DataError, match="5 prompts but 6 responses"):
        batch.replace(prompts=batch.prompts.take(range(5)))


def test_its_text_tells_size_and_reward():
    batch = make()
    assert repr(batch) == "TrainBatch(6 sequences, 21 response tokens, 21 trained, reward 2.5)"
    assert repr(batch.rows([])) == "TrainBatch(0 sequences, 0 response tokens, 0 trained)"


# -- columns


def with_all_columns(batch):
    tokens, rows = batch.tokens, len(batch)
    return batch.with_columns(
        flat=np.arange(tokens),
        per_row=np.arange(rows, dtype=np.float64),
        ragged=[[float(i)] * n for i, n in enumerate(batch.response_lengths)],
        wide=np.arange(tokens * 3, dtype=np.float32).reshape(tokens, 3),
    )


def test_columns_follow_their_tokens_through_rows_joins_and_files(tmp_path):
    batch = batch_of([(2, 3), (1, 2), (4, 5)])
    own = with_all_columns(batch)
    assert own.columns["flat"].dtype == np.int64 and own.columns["per_row"].dtype == np.float32
    np.testing.assert_array_equal(own.columns["per_row"], own.columns["ragged"])
    np.testing.assert_array_equal(own.columns["per_row"], np.repeat([0, 1, 2], [3, 2, 5]))
    taken = own.rows([2, 0])
    np.testing.assert_array_equal(taken.columns["flat"], [5, 6, 7, 8, 9, 0, 1, 2])
    np.testing.assert_array_equal(taken.columns["wide"][:, 0], 3 * taken.columns["flat"])
    assert len(own.select(lambda row: row.per_row[0] > 0)) == 2
    joined = own + taken
    np.testing.assert_array_equal(joined.columns["wide"], np.concatenate([own.columns["wide"], taken.columns["wide"]]))
    partly = own.with_columns(wide=None) + batch
    assert np.isnan(partly.columns["flat"][-batch.tokens :]).all()
    back = type(own).from_parquet(own.to_parquet(tmp_path / "batch.parquet"))
    for name, values in own.columns.items():
        np.testing.assert_array_equal(back.columns[name], values)
        assert back.columns[name].dtype == values.dtype
    assert own.key == batch.key and not batch.columns
    assert "wide" not in own.with_columns(wide=None).columns


def test_padded_columns_and_tensors_are_taken_and_others_refused():
    import torch

    batch = batch_of([(2, 3), (1, 2)])
    padded = torch.tensor([[1, 2, 3], [4, 5, 9]], dtype=torch.bfloat16, requires_grad=True)
    np.testing.assert_array_equal(batch.with_columns(x=padded).columns["x"], [1, 2, 3, 4, 5])
    for wrong, said in (
        ({"x": np.zeros(4)}, r"shape \(4,\)"),
        ({"x": [[1.0], [1.0]]}, "not as long"),
        ({"x": ["a", "b"]}, "numbers"),
        ({"advantages": np.zeros(5)}, r"batch\.replace"),
    ):
        with pytest.raises(DataError, match=said):
            batch.with_columns(**wrong)
    with pytest.raises(DataError, match="not in all"):
        with_all_columns(batch) + batch


def test_sequences_are_rows_of_a_table_too():
    batch = make()
    frame = batch.to_pandas()
    assert len(frame) == len(batch) == 6 and frame["reward"].tolist() == batch.rewards.tolist()
    assert [row.tolist() for row in frame["response"]] == [row.tolist() for row in batch.responses]
    assert batch.filter([1, 0]).key == batch[[1, 0]].key

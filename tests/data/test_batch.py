"""A training batch is a value: rows are chosen, fields replaced, and its tokens give it an identity."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbench.errors import DataError
from tests.data.values import rollouts


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


@settings(deadline=None)
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

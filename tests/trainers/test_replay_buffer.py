"""The buffer keeps sequences as they came, the newest where it has a limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlbench.data.prompts.prompt import Prompt
from rlbench.errors import DataError, StateError
from rlbench.strategies import get_fake_strategy
from rlbench.strategies.options.config import OptionError
from rlbench.trainers.experience.replay_buffer import NaiveReplayBuffer
from rlbench.trainers.experience.values import Experience
from tests.modules import batch_of


def experience(lengths: list[tuple[int, int]], seed: int = 0, **fields: Any) -> Experience:
    batch = batch_of(lengths, seed)
    rng = np.random.default_rng(seed)
    count = len(batch)
    return Experience(
        batch,
        tuple(Prompt([seed, i]) for i in range(count)),
        tuple(f"{seed} {i}" for i in range(count)),
        rng.normal(size=batch.tokens).astype(np.float32),
        info={"reward": rng.normal(size=count)},
        **fields,
    )


THREE = [(2, 3), (1, 4), (3, 2)]


def filled(limit: int = 0, parts: int = 3, **own: Any) -> NaiveReplayBuffer:
    buffer = NaiveReplayBuffer(2, limit, **own)
    for seed in range(parts):
        buffer.append(experience(THREE, seed))
    return buffer


def texts(of: Any) -> list[str]:
    return [text for part in of for text in part.texts]


def test_it_counts_sequences_and_gives_each_as_it_came() -> None:
    buffer = filled()
    assert len(buffer) == 9 and len(buffer.items) == 3
    one = buffer[4]
    assert one.texts == ("1 1",)
    np.testing.assert_array_equal(one.batch.responses.values, experience(THREE, 1).rows([1]).batch.responses.values)
    assert buffer[-1].texts == ("2 2",)
    with pytest.raises(IndexError):
        buffer[9]
    buffer.clear()
    assert len(buffer) == 0 and buffer.items == []


@pytest.mark.parametrize(("limit", "kept"), [(0, 9), (20, 9), (6, 6), (4, 4), (1, 1)])
def test_the_limit_keeps_the_newest_sequences(limit: int, kept: int) -> None:
    every = [f"{seed} {i}" for seed in range(3) for i in range(3)]
    buffer = filled(limit)
    assert texts(buffer.items) == every[-kept:] and len(buffer) == kept


def test_iterating_goes_over_all_in_order() -> None:
    parts = list(filled())
    assert [len(part) for part in parts] == [2, 2, 2, 2, 1]
    assert texts(parts) == texts(filled().items)


def test_collating_joins_without_padding() -> None:
    parts = [experience(THREE, 0), experience([(5, 1)], 1)]
    joined = NaiveReplayBuffer.collate_fn(parts)
    assert joined.batch.response_lengths.tolist() == [3, 4, 2, 1] and joined.texts[3] == "1 0"


def test_a_component_that_some_lack_is_not_known_of_them() -> None:
    """Samples that were all cut are scored by nobody; they wait beside others that are trained on."""
    parts = [experience([(2, 3)], 0), experience(THREE, 1, components={"acc": np.array([1.0, 0.0, 1.0])})]
    joined = NaiveReplayBuffer.collate_fn(parts)
    np.testing.assert_array_equal(joined.components["acc"], [np.nan, 1.0, 0.0, 1.0])
    assert joined.rows([0, 2]).components["acc"].dtype == np.float64
    with_kl = replace(parts[1], kl=parts[1].token_rewards)
    with pytest.raises(DataError, match="part 0 has no kl"):
        NaiveReplayBuffer.collate_fn([parts[0], with_kl])


@pytest.mark.parametrize("given", [{"cpu_offload": False}, {"sample_batch_size": 0}, {"limit": -1}])
def test_options_that_cannot_be_honoured_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        NaiveReplayBuffer(**{"sample_batch_size": 1, **given})


def test_sampling_from_too_few_is_refused() -> None:
    with pytest.raises(StateError, match="drawn"):
        NaiveReplayBuffer(2).sample()


def test_normalize_whitens_over_the_trained_tokens_of_all_sequences() -> None:
    buffer = filled()
    before = [part.batch for part in buffer.items]
    values = np.concatenate([b.advantages[b.mask] for b in before]).astype(np.float64)
    buffer.normalize("advantages", get_fake_strategy({"bf16": False}))
    found = np.concatenate([part.batch.advantages[part.batch.mask] for part in buffer.items])
    np.testing.assert_allclose(found, (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8), atol=1e-5)
    for part, old in zip(buffer.items, before, strict=True):
        assert (part.batch.advantages[~old.mask] == 0).all()
        np.testing.assert_array_equal(part.batch.responses.values, old.responses.values)


def test_normalize_of_a_column_beside_the_batch() -> None:
    buffer = filled()
    values = np.concatenate([p.token_rewards[p.batch.mask] for p in buffer.items]).astype(np.float64)
    buffer.normalize("token_rewards", get_fake_strategy({"bf16": False}))
    found = np.concatenate([p.token_rewards[p.batch.mask] for p in buffer.items])
    np.testing.assert_allclose(found, (values - values.mean()) / values.std(ddof=1), atol=1e-5)


def test_an_empty_buffer_and_equal_values_are_whitened_without_nan() -> None:
    strategy = get_fake_strategy({"bf16": False})
    NaiveReplayBuffer(1).normalize("advantages", strategy)
    buffer = filled(parts=1)
    buffer.items = [
        Experience(
            buffer.items[0].batch.replace(advantages=np.full(9, 0.3, np.float32)),
            buffer.items[0].prompts,
            buffer.items[0].texts,
            buffer.items[0].token_rewards,
        )
    ]
    buffer.normalize("advantages", strategy)
    assert (buffer.items[0].batch.advantages == 0).all()


def test_sampling_draws_different_sequences_by_its_seed() -> None:
    drawn, again = ([buffer.sample().texts for _ in range(20)] for buffer in (filled(seed=3), filled(seed=3)))
    assert drawn == again and all(len(set(pair)) == 2 for pair in drawn)
    assert len({text for pair in drawn for text in pair}) == 9


@pytest.mark.parametrize("name", ["advantage", "values"])
def test_what_is_not_there_cannot_be_whitened(name: str) -> None:
    with pytest.raises(DataError, match=name):
        filled().normalize(name, get_fake_strategy({"bf16": False}))


def test_the_references_names_are_padded_views() -> None:
    part = experience(THREE, 0)
    batch = part.batch
    width = int(batch.response_lengths.max())
    assert part.sequences.shape == part.attention_mask.shape and part.action_mask.shape == (3, width)
    for row, mask, prompt, response in zip(
        part.sequences, part.attention_mask, batch.prompts, batch.responses, strict=True
    ):
        assert row[mask.bool()].tolist() == [*prompt.tolist(), *response.tolist()]
    assert part.advantages[part.action_mask].tolist() == batch.advantages[batch.mask].tolist()
    assert part.labels == [prompt.label for prompt in part.prompts]

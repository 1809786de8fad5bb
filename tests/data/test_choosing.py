"""Pairs and demonstrations out of what was sampled."""

import numpy as np
import pytest

from rlbench.data.batches.pairing import check_pairs
from rlbench.errors import DataError
from tests.data.values import rollouts


def rows_of(batch):
    return [row.tolist() for row in batch.responses]


def test_the_best_completion_is_paired_with_the_worst():
    made = rollouts().score([1, 2, 5, 3, 0, 0])
    with pytest.warns(UserWarning, match=r"pairs: 1 of 3 prompts have equal scores throughout: left out"):
        batch = made.pairs()
    check_pairs(batch)
    flat = [r.tolist() for r in made.responses]
    assert rows_of(batch) == [flat[1], flat[0], flat[2], flat[3]]
    assert batch.rewards.tolist() == [2, 1, 5, 3] and batch.group.tolist() == [0, 0, 1, 1]
    assert batch.pair.tolist() == [0, 0, 1, 1] and batch.preference.tolist() == [1, -1, 1, -1]
    assert batch.sampled and batch.advantages.tolist() == np.repeat([1.0, -1, 1, -1], batch.response_lengths).tolist()


def test_pairs_by_a_component_by_numbers_and_by_a_function():
    made = rollouts().score(lambda r: {"reward": 0.0, "length": len(r)})
    by_length = made.pairs(by="length")
    assert rows_of(made.pairs(by=[0, 1, 0, 1, 0, 1])) == rows_of(by_length) == rows_of(made.pairs(by=lambda r: len(r)))
    assert by_length.response_lengths.tolist() == [2, 1, 4, 3, 6, 5]
    with pytest.raises(DataError, match=r"pairs: 3 of 3 prompts have equal scores.*no pair is left"):
        made.pairs()
    with pytest.raises(DataError, match=r"pairs: by= asks for 'lenght'.*nearest: length"):
        made.pairs(by="lenght")
    with pytest.raises(DataError, match="not scored yet"):
        rollouts().pairs()


def test_what_was_cut_or_has_no_score_is_in_no_pair():
    made = rollouts().score(range(6))
    made.finish[3] = 2  # aborted
    with pytest.warns(UserWarning, match="0 of 3 prompts .*, 1 fewer than two finished"):
        assert len(made.pairs()) == 4


def test_the_best_of_each_few_completions_is_a_demonstration():
    made = rollouts().score([1, 2, 5, 3, 0, 0])
    flat = [r.tolist() for r in made.responses]
    assert rows_of(made.demonstrations()) == [flat[1], flat[2], flat[4]]
    assert rows_of(made.demonstrations(best_of=1, at_least=3)) == [flat[2], flat[3]]
    assert rows_of(made.demonstrations(best_of=2, at_least=2)) == [flat[1], flat[2]]
    assert set(made.demonstrations().advantages.tolist()) == {1.0}
    with pytest.raises(DataError, match="no prompt has 3 finished completions"):
        made.demonstrations(best_of=3)
    with pytest.raises(DataError, match="or none scores 9 or more"):
        made.demonstrations(at_least=9)
    with pytest.raises(DataError, match="best_of=0"):
        made.demonstrations(best_of=0)

"""Request seeds depend on session seed, rollout, prompt and sample, and on nothing else."""

import numpy as np

from rlbench.data.prompts.sampling import request_seeds


def test_a_samples_seed_does_not_depend_on_how_many_are_drawn():
    few, many = request_seeds(1, 2, 3, 4), request_seeds(1, 2, 30, 40)
    assert (many[:3, :4] == few).all()


def test_seeds_are_distinct_and_non_negative():
    seeds = np.concatenate([request_seeds(s, r, 50, 8).ravel() for s in range(3) for r in range(3)])
    assert len(np.unique(seeds)) == len(seeds) and (seeds >= 0).all() and seeds.dtype == np.int64


def test_session_and_rollout_change_all_seeds():
    base = request_seeds(0, 1, 8, 8)
    for other in (request_seeds(1, 1, 8, 8), request_seeds(0, 2, 8, 8)):
        assert not np.isin(other, base).any()

"""What a sync is proved by: log-probs of a probe, of the trainer and of every replica."""

import numpy as np
import pytest

from rlbench.errors import WeightSyncError
from rlbench.weights.sync import check_proof

PROOF = {"expected": [np.array([-1.0, -2.0]), np.array([-3.0])], "dtype": "float32"}


def rows(third):
    return [np.array([-1.0, -2.0]), np.array([third])]


def test_the_largest_gap_of_any_replica_counts():
    assert check_proof(PROOF, [rows(-3.0), rows(-3.00001)]) == pytest.approx(1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -3.5])
@pytest.mark.parametrize("place", [0, 1])
def test_no_replica_passes_that_computes_something_else(bad, place):
    replicas = [rows(-3.0), rows(-3.0)]
    replicas[place] = rows(bad)
    with pytest.raises(WeightSyncError, match="refuses to generate"):
        check_proof(PROOF, replicas)

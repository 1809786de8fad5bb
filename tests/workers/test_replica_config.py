"""How a replica is run where nobody says; what it computes in: `tests/strategies/test_precision.py`."""

import os

import pytest

from rlbench.options import OptionError
from rlbench.workers.replica.config import ReplicaConfig, runs_eagerly


def test_a_replica_compiles_on_a_gpu_unless_it_is_told_otherwise() -> None:
    unsaid = ReplicaConfig("folder")
    assert (runs_eagerly(unsaid, on_gpu=True), runs_eagerly(unsaid, on_gpu=False)) == (False, True)
    assert runs_eagerly(ReplicaConfig("folder", enforce_eager=True), on_gpu=True)
    assert not runs_eagerly(ReplicaConfig("folder", enforce_eager=False), on_gpu=False)


def test_classes_of_ones_own_are_named_so_that_every_replica_finds_them() -> None:
    """That a model trains and rolls out by one: tests/examples, `own_model`."""
    places = ReplicaConfig("folder", models={"Mine": "mine.py:Mine", "Other": "package.other:Other"}).models
    assert places == {"Mine": f"{os.path.abspath('mine.py')}:Mine", "Other": "package.other:Other"}
    with pytest.raises(OptionError, match=r"file\.py:Class"):
        ReplicaConfig("folder", models={"Mine": "mine.py"})
    with pytest.raises(OptionError, match="tensor_parallel_size=2"):
        ReplicaConfig("folder", models={"Mine": "mine.py:Mine"}, tensor_parallel_size=2)

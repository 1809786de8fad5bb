"""The real tiny model for all tests of this room, from the cache that all rooms share."""

from pathlib import Path

import pytest

from rlbench import tiny


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return tiny.ensure()

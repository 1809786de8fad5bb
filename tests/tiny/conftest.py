"""One real tiny model for all tests of this room, built once per session into a folder of its own."""

from pathlib import Path

import pytest

from rlbench import tiny


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    return tiny.ensure(cache_dir=tmp_path_factory.mktemp("tiny"))

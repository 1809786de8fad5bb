"""What the tests of trainers share: a tiny model on disk."""

from __future__ import annotations

import pytest

from tests.modules import save_qwen


@pytest.fixture(scope="session")
def qwen_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a Qwen2 of 40 k parameters, its embedding tied."""
    return save_qwen(tmp_path_factory.mktemp("qwen"))

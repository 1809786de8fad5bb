"""What tests of steps in the kernel share, where no engine runs."""

import sys
from types import SimpleNamespace

import pytest


@pytest.fixture
def no_ray(monkeypatch):
    """Not the real ray: imported before the cluster of other tests starts, it would not know that one's token."""
    fake = SimpleNamespace(exceptions=SimpleNamespace(RayActorError=ConnectionError))
    monkeypatch.setitem(sys.modules, "ray", fake)

"""The seeds' script on real engines: two training ranks, one vLLM replica, a sync that closes the log-prob gap."""

import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine


@pytest.mark.curve
def test_the_script_runs_and_the_sync_closes_the_gap(repository, tiny_path, tmp_path):
    done = subprocess.run(
        [sys.executable, "examples/quick_start.py"],
        cwd=repository,
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},  # a cluster of its own
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = (float(re.search(rf"gap {when} the sync: +(\S+)", done.stdout)[1]) for when in ("before", "after"))
    assert before > 1e-2 and after <= 1e-4
    assert done.stdout.count("loss on each rank") == 4 and not (tmp_path / "rlbench" / "cluster.json").exists()

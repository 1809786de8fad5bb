"""The check of the soak finds a leak that is there, of each kind, and nothing where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.growth import MOST, SHARED, Growth, Sample, growing, held_by, shm_held, slope

STEPS, EVERY = 120, 6
CHILD = """
import os, sys, threading
kept, leak, prefix = [], *sys.argv[1:]
for step, _ in enumerate(sys.stdin):
    work = [bytearray(os.urandom(1 << 16)) for _ in range(2)]
    if leak == "bytes":
        kept.append(os.urandom(16 << 10))
    if step % 3 == 0 and leak == "files":
        kept.append(open(os.devnull))
    if step % 8 == 0 and leak == "threads":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    if step % 3 == 0 and leak == "shm":
        with open(f"/dev/shm/{prefix}{step}", "wb") as file:
            file.write(bytes(4096))
    print(step, flush=True)
"""


@contextmanager
def child(leak: str, prefix: str) -> Iterator[Any]:
    """A process that takes a step for each line it is given, and leaks one thing."""
    command = [sys.executable, "-c", CHILD, leak, prefix]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        for entry in SHARED.glob(f"{prefix}*"):
            entry.unlink()


def watched(leak: str) -> list[Growth]:
    """What the soak's check says of a process that leaks so."""
    prefix, samples = f"rlb-growth-{os.getpid()}-{leak}-", []
    with child(leak, prefix) as process:
        for step in range(STEPS):
            process.stdin.write("\n")
            process.stdout.readline()
            if step >= STEPS // 5 and step % EVERY == 0:
                held = {f"kernel {kind}": value for kind, value in held_by(process.pid).items()}
                held |= {f"shm {kind}": value for kind, value in shm_held(prefix).items()}
                samples.append(Sample(step, held))
    return growing(samples, MOST)


@pytest.mark.parametrize(
    ("leak", "names"),
    [
        ("nothing", set()),
        ("bytes", {"kernel bytes"}),
        ("files", {"kernel files"}),
        ("threads", {"kernel threads"}),
        ("shm", {"shm entries", "shm bytes"}),
    ],
)
def test_a_leak_on_purpose_is_found_by_the_check_of_the_soak(leak: str, names: set[str]) -> None:
    found = {growth.what for growth in watched(leak)}
    assert found - {"kernel bytes"} == names - {"kernel bytes"}  # a thread's stack and a file's buffer are memory too
    assert names <= found
    assert leak != "nothing" or not found


def test_one_late_jump_is_no_growth_and_a_little_in_each_step_is() -> None:
    jump = [Sample(i, {"kernel bytes": 1e6 + (5e6 if i > 80 else 0)}) for i in range(0, 100, 5)]
    steady = [Sample(i, {"kernel bytes": 1e6 + 20000.0 * i}) for i in range(0, 100, 5)]
    assert slope(jump, "kernel bytes") == 0 and growing(jump, MOST) == []
    (found,) = growing(steady, MOST)
    assert found.what == "kernel bytes" and found.per_step == pytest.approx(20000.0)
    assert found.per_step > found.most and (found.first, found.last) == (1e6, 1e6 + 20000.0 * 95)

"""Processes that may be killed: answers by number, timeouts, and an end with whoever started them."""

import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest

from rlbench.rewards.lanes import Lost, answers
from rlbench.runtime import processes
from tests.clock import until
from tests.rewards.values import nothing_left


def test_every_payload_has_its_answer_whatever_the_order():
    with nothing_left():
        found = {k: answer for k, answer, _ in answers(lambda x: [x * 2], range(50), 50, lanes=3)}
    assert found == {k: [2 * k] for k in range(50)}


def test_of_no_payloads_no_process_is_started():
    with nothing_left():
        assert list(answers(lambda x: x, [], 0)) == []


def test_answers_larger_than_a_pipe_and_payloads_too_arrive_whole():
    with nothing_left():
        (found,) = answers(lambda text: text + "!", ["ü" * 1_000_000], 1, timeout_s=60)
    assert found[1] == "ü" * 1_000_000 + "!"


@pytest.mark.slow
def test_the_clock_of_a_payload_does_not_count_the_start():
    class Slow:
        def prepare(self):
            import time

            time.sleep(4.0)  # more than a payload may take, which is far more than these take
            self.prepared = True

        def __call__(self, x):
            return [x, self.prepared]

    found = [a for _, a, _ in answers(Slow(), [1, 2], 2, lanes=1, timeout_s=3)]
    assert found == [[1, True], [2, True]]


@pytest.mark.slow
def test_what_takes_too_long_is_lost_and_the_process_replaced():
    def job(x):
        import time

        time.sleep(60 if x == 1 else 0)
        return x

    with nothing_left():
        found = {k: answer for k, answer, _ in answers(job, range(3), 3, lanes=1, timeout_s=3)}
    assert found == {0: 0, 1: Lost("took longer than 3 s", timeout=True), 2: 2}


def test_closed_half_way_all_processes_end():
    with nothing_left():
        found = answers(lambda x: x, range(100), 100, lanes=2)
        with contextlib.closing(found):
            next(found)


def test_a_job_neither_reads_our_input_nor_writes_into_our_answers():
    def job(x):
        import os
        import sys

        os.write(1, b"\x00\xff" * 100)
        print("hello", file=sys.stderr)
        return sys.stdin.read()

    assert [a for _, a, _ in answers(job, [1], 1, timeout_s=20)] == [""]


PARENT = """

from rlbench.rewards.lanes import answers
def job(x):
    import os, time
    open({path!r}, "w").write(str(os.getpid()))
    time.sleep(600)
list(answers(job, [1], 1, lanes=1))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_when_the_parent_is_killed_they_die_with_it(tmp_path, how):
    path = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", PARENT.format(path=str(path))], cwd=os.getcwd())
    pid = int(until(lambda: path.exists() and path.read_text()))
    assert psutil.pid_exists(pid)
    parent.send_signal(how)
    parent.wait()
    until(lambda: processes.start_time(pid) is None)

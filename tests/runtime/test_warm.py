"""Workers as forks of one process: what they are given, what they share, and what happens where it cannot be."""

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from rlbench.runtime import head, warm, worker_start
from tests.clock import LIMIT_S, until

REPORT = """
import json, os, random, sys
print(json.dumps({"argv": sys.argv, "folder": os.getcwd(), "mine": os.environ["MINE"], "parent": os.getppid(),
                  "loaded": "colorsys" in sys.modules, "random": random.random(), "path": sys.path[0]}))
raise SystemExit(int(os.environ["STATUS"]))
"""
SERVE = "import sys\nfrom rlbench.runtime import warm\nwarm.PRELOADED = sys.argv[2]\nwarm.main(sys.argv[1])"


@pytest.fixture
def ask(tmp_path):
    """Start a worker as Ray does: what it printed, said of errors, and its status."""
    own = tmp_path / "own.py"
    own.write_text(REPORT)
    (tmp_path / "folder").mkdir()
    (tmp_path / "socket.first").touch()

    def asked(status=0):
        environment = os.environ | {
            worker_start.SOCKET: str(tmp_path / "socket"),
            worker_start.RAYS_OWN: str(own),
            "MINE": "of the one that asked",
            "STATUS": str(status),
        }
        with subprocess.Popen(
            [sys.executable, worker_start.__file__, "--one", "two"],
            env=environment,
            cwd=tmp_path / "folder",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            said, _ = process.communicate(timeout=LIMIT_S)  # until the fork, too, has closed it
        return said, process.returncode

    return asked


@pytest.fixture
def serve(tmp_path):
    """Start a warm process that imports this module."""
    started = []

    def serving(module, ends=False):
        command = [sys.executable, "-c", SERVE, str(tmp_path / "socket"), module]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        if not ends:
            until(lambda: (tmp_path / "socket").exists() or started[-1].poll() is not None)
            assert started[-1].poll() is None
        return started[-1]

    yield serving
    for process in started:
        process.kill()
        process.communicate()


def test_a_fork_has_arguments_environment_folder_and_output_of_the_process_that_asked(serve, ask, tmp_path):
    import json

    process = serve("colorsys")
    first, second = (json.loads(ask()[0]) for _ in range(2))
    assert first["argv"] == [str(tmp_path / "own.py"), "--one", "two"]
    assert (first["folder"], first["path"]) == (str(tmp_path / "folder"), str(tmp_path))
    assert first["mine"] == "of the one that asked" and first["loaded"] and first["parent"] == process.pid
    assert first["random"] != second["random"]


def test_the_first_worker_of_a_cluster_waits_for_no_imports(serve, ask, tmp_path):
    serve("colorsys")
    (tmp_path / "socket.first").unlink()
    assert '"loaded": false' in ask()[0] and '"loaded": true' in ask()[0]


def test_without_a_warm_process_the_worker_says_so_and_starts_by_itself(ask, tmp_path):
    said, status = ask(status=3)
    assert "no warm process" in said and '"loaded": false' in said and status == 3
    assert str(tmp_path / "own.py") in said


def test_where_the_warm_process_ends_while_it_is_asked_the_worker_says_so_and_starts_by_itself(ask, tmp_path):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        listening.listen()
        accepting = threading.Thread(target=lambda: listening.accept()[0].close())
        accepting.start()
        said, status = ask(status=3)
        accepting.join()
    assert "no warm process" in said and '"loaded": false' in said and status == 3


def test_a_process_whose_imports_start_threads_forks_nobody(serve, ask, tmp_path, monkeypatch):
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    process = serve("threaded", ends=True)
    assert "1 threads" in process.communicate(timeout=LIMIT_S)[0] and process.returncode == 1
    assert "no warm process" in ask()[0]


def test_a_thread_forbids_a_fork():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert "thread" in warm.why_not()
    finally:
        stop.set()
        thread.join()


def test_threads_of_forks_sleep_while_they_wait_unless_said_otherwise(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert head.environment(tmp_path)["OMP_WAIT_POLICY"] == "passive"
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert head.environment(tmp_path)["OMP_WAIT_POLICY"] == "active"


@pytest.mark.engine
def test_workers_of_a_session_are_forks_at_normal_priority_that_know_ctrl_c(cluster):
    import ray

    @ray.remote(num_cpus=0)
    class Process:
        def facts(self):
            with open(f"/proc/{os.getppid()}/cmdline") as command:
                parent = command.read()
            return parent, os.nice(0), signal.getsignal(signal.SIGINT), "vllm" in sys.modules

    processes = [Process.remote() for _ in range(2)]  # of which one may be the cluster's first
    parent, nice, handler, loaded = ray.get([process.facts.remote() for process in processes])[1]
    assert warm.__name__ in parent and nice == 0 and handler is signal.default_int_handler and loaded


@pytest.mark.engine
def test_a_fork_finds_vllms_kernels_replaced_and_torch_as_it_is(cluster):
    import ray

    @ray.remote(num_cpus=0)
    class Process:
        def facts(self):
            import torch
            from vllm.platforms import current_platform
            from vllm.triton_utils import dispatcher

            replaced = dict(dispatcher._registry)
            current_platform.register_triton_kernel_overrides()  # as a replica's worker does
            return bool(replaced), replaced == dispatcher._registry, torch.cuda.Event.__module__

    processes = [Process.remote() for _ in range(2)]  # of which one may be the cluster's first
    replaced, once, events = ray.get([process.facts.remote() for process in processes])[1]
    assert replaced and once and events.startswith("torch.")


@pytest.mark.gpu
def test_what_is_imported_opens_no_device():
    code = "from rlbench.runtime import warm\nwarm.preload()\nassert warm.why_not() is None, warm.why_not()"
    subprocess.run([sys.executable, "-c", code], check=True)

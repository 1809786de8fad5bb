"""Workers as forks of one process: what they are given, what they share, and what happens where it cannot be."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rlbench.runtime import warm, worker_start
from tests.clock import LIMIT_S, until

REPORT = """
import json, os, random, sys
job = sys.modules.get("reads_job")
print(json.dumps({"argv": sys.argv, "folder": os.getcwd(), "mine": os.environ["MINE"], "parent": os.getppid(),
                  "loaded": "colorsys" in sys.modules, "random": random.random(), "path": sys.path[:2],
                  "job": job and job.JOB, "loaded_by": job and job.PROCESS}))
raise SystemExit(int(os.environ["STATUS"]))
"""
READS_JOB = """
import os, sys
JOB, PROCESS = os.environ["RAY_JOB"], os.getpid()
os.environ["MINE"] = "of the import"
sys.path.insert(0, "a folder of the import's")
"""
SERVE = """
import sys
from rlbench.runtime import warm
warm.PRELOADED, warm.PRELOADED_BY_JOB, warm.REQUEST_S = (sys.argv[2],), tuple(sys.argv[3:]), 3.0
warm.main(sys.argv[1])
"""


@pytest.fixture
def ask(tmp_path):
    """Start a worker as Ray does: what it printed, said of errors, and its status."""
    own = tmp_path / "own.py"
    own.write_text(REPORT)
    (tmp_path / "folder").mkdir()
    (tmp_path / "socket.first").touch()

    def asked(status=0, job="a"):
        environment = os.environ | {
            worker_start.SOCKET: str(tmp_path / "socket"),
            worker_start.RAYS_OWN: str(own),
            "MINE": "of the one that asked",
            "RAY_JOB": job,
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
def serve(tmp_path, monkeypatch):
    """Start a warm process that imports this module, and others for each job."""
    started = []
    (tmp_path / "reads_job.py").write_text(READS_JOB)
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))

    def serving(module, *by_job, ends=False):
        command = [sys.executable, "-c", SERVE, str(tmp_path / "socket"), module, *by_job]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        if not ends:
            until(lambda: (tmp_path / "socket").exists() or started[-1].poll() is not None)
            assert started[-1].poll() is None
        return started[-1]

    yield serving
    for process in started:
        process.kill()
        process.communicate()


def parent_of(pid):
    """The process that started a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_fork_has_arguments_environment_folder_and_output_of_the_process_that_asked(serve, ask, tmp_path):
    process = serve("colorsys")
    first, second = (json.loads(ask()[0]) for _ in range(2))
    assert first["argv"] == [str(tmp_path / "own.py"), "--one", "two"]
    assert (first["folder"], first["path"][0]) == (str(tmp_path / "folder"), str(tmp_path))
    assert first["mine"] == "of the one that asked" and first["loaded"]
    assert first["parent"] == second["parent"] and parent_of(first["parent"]) == process.pid
    assert first["random"] != second["random"]


def test_what_reads_a_workers_job_is_imported_once_for_each_job(serve, ask, tmp_path):
    serve("colorsys", "reads_job")
    first, second, other = (json.loads(ask(job=job)[0]) for job in "aab")
    assert (first["job"], second["job"], other["job"]) == ("a", "a", "b")
    assert first["loaded_by"] == second["loaded_by"] == first["parent"] and other["loaded_by"] == other["parent"]
    assert first["parent"] != other["parent"] and first["mine"] == "of the one that asked"
    assert first["path"] == ["a folder of the import's", str(tmp_path)]
    until(lambda: not os.path.exists(f"/proc/{first['parent']}"))  # its job asks no more


def test_a_nursery_that_ended_is_replaced(serve, ask):
    serve("colorsys", "reads_job")
    first = json.loads(ask()[0])["parent"]
    os.kill(first, signal.SIGKILL)
    until(lambda: not os.path.exists(f"/proc/{first}"))
    second = json.loads(ask()[0])
    assert second["job"] == "a" and second["parent"] != first


def test_whoever_asks_and_goes_or_stays_silent_stops_nobody_else(serve, ask, tmp_path):
    serve("colorsys", "reads_job")
    parent = json.loads(ask()[0])["parent"]
    for said in (b"", b"a", b"1234"):
        with socket.socket(socket.AF_UNIX) as leaving:
            leaving.connect(str(tmp_path / "socket"))
            leaving.sendall(said)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(tmp_path / "socket"))
        assert json.loads(ask()[0])["parent"] == parent
    with socket.socket(socket.AF_UNIX) as handed, open(os.devnull) as file:  # to a nursery, and silent there
        handed.connect(str(tmp_path / "socket"))
        socket.send_fds(handed, [b"1234"], [file.fileno()] * 3)
        assert json.loads(ask()[0])["job"] == "a"


def test_where_a_jobs_imports_start_a_thread_workers_start_by_themselves(serve, ask):
    serve("colorsys", "threaded")
    said, status = ask(status=3)
    assert "no warm process" in said and '"loaded": false' in said and status == 3


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


def test_a_process_whose_imports_start_threads_forks_nobody(serve, ask):
    process = serve("threaded", ends=True)
    assert "1 threads" in process.communicate(timeout=LIMIT_S)[0] and process.returncode == 1
    assert "no warm process" in ask()[0]


def test_it_says_where_ray_has_no_allocator_for_workers(serve, tmp_path):
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/__init__.py").touch()
    said = serve("threaded", ends=True).communicate(timeout=LIMIT_S)[0]
    assert "workers keep the C library's allocator: Ray has no core/libjemalloc.so" in said


def test_a_thread_forbids_a_fork():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert "thread" in warm.why_not()
    finally:
        stop.set()
        thread.join()


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

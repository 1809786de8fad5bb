"""The allocator of workers' host memory: who is started with which, and that what is freed goes back when asked for."""

import json
import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from rlbench.runtime import allocator, head

here = sys.platform == "linux" and mmap.PAGESIZE <= allocator.PAGE_BYTES and not set(" :") & set(sys.prefix)
needs_library = pytest.mark.skipif(
    not here, reason="workers keep their own allocator on this machine, or in this folder"
)
FREED_MIB = 512
FREE = f"""
import json, torch
from rlbench.weights.memory import keep_freed_pages, return_free_memory

def private():
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) for line in rollup if line.startswith("Anonymous:")) / 1024

keep_freed_pages()
made = [torch.ones(256, 1024) for _ in range({FREED_MIB})]
full = private()
made.clear()
kept = private()
return_free_memory()
left = private()
print(json.dumps({{"kept": full - kept, "returned": kept - left}}))
"""


@pytest.fixture
def own(monkeypatch):
    """An environment in which nobody chose an allocator."""
    for name in ("LD_PRELOAD", *allocator.SETTINGS):
        monkeypatch.delenv(name, raising=False)


@needs_library
def test_what_the_environment_has_already_stands_before_it(own, monkeypatch):
    assert allocator.environment() == {"LD_PRELOAD": str(allocator.library()), **allocator.SETTINGS}
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libtcmalloc.so.4")
    monkeypatch.setenv("MALLOC_CONF", "narenas:4")
    said = allocator.environment()
    assert said == {"LD_PRELOAD": f"/usr/lib/libtcmalloc.so.4:{allocator.library()}", "MALLOC_CONF": "narenas:4"}


@pytest.mark.parametrize("folder", ["without one", "a folder", "a:folder"])
def test_where_it_cannot_be_loaded_workers_keep_their_own(own, folder, tmp_path, monkeypatch):
    package = tmp_path / folder / "ray"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    if folder != "without one":  # the dynamic linker takes a path apart at blanks and colons
        (package / allocator.LIBRARY).parent.mkdir()
        (package / allocator.LIBRARY).touch()
    monkeypatch.setattr(sys, "path", [str(package.parent), *sys.path])
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert allocator.library() is None and allocator.environment() == {}
    assert not any("PRELOAD" in word for word in head.command(1, tmp_path, 1, 0))


@pytest.mark.parametrize(
    "by",
    ["glibc", *(pytest.param(by, marks=needs_library) for by in ("jemalloc", "jemalloc without caches of threads"))],
)
def test_freed_pages_stay_until_they_are_given_back(own, by):
    started_with = allocator.environment() if by != "glibc" else {}
    if "without" in by:
        started_with["MALLOC_CONF"] += ",tcache:false"
    said = subprocess.run(
        ["env", *(f"{name}={value}" for name, value in started_with.items()), sys.executable, "-c", FREE],
        capture_output=True,
        text=True,
        check=True,
    )
    sizes = json.loads(said.stdout)
    assert abs(sizes["kept"]) < 0.02 * FREED_MIB and sizes["returned"] > 0.95 * FREED_MIB, sizes


@needs_library
@pytest.mark.engine
def test_workers_allocate_by_it_and_what_they_start_does_not(cluster):
    import ray

    @ray.remote(num_cpus=0)
    class Process:
        def facts(self):
            maps = ("/proc/self/maps", subprocess.check_output(["cat", "/proc/self/maps"], text=True))
            return "jemalloc" in Path(maps[0]).read_text(), "jemalloc" in maps[1]

    processes = [Process.remote() for _ in range(2)]  # of which one may be the cluster's first
    assert (True, False) in ray.get([process.facts.remote() for process in processes])

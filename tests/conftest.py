"""Shared engines and folders: one cluster, one state folder and a few sessions for the whole run."""

from __future__ import annotations

import atexit
import gc
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from rlbench.runtime.cluster import prepare_ray
from tests import garbage
from tests.scheduling import (
    TAKES_RANKS,
    in_order_of_run,
    pytest_xdist_make_scheduler,  # noqa: F401  # a hook
    users_from,
)

WORKER = "PYTEST_XDIST_WORKER" in os.environ
"""Whether this is one of several processes that share the tests."""


def _end() -> None:
    """End this process without freeing, one by one, the million objects that its imports and tests hold."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if WORKER:
    atexit.register(_end)  # before all others: it runs after them
    garbage.let_nobody_undo_it()
_STATE = tempfile.mkdtemp(prefix="rlb-test-state-")
atexit.register(shutil.rmtree, _STATE, ignore_errors=True)
os.environ["XDG_STATE_HOME"] = _STATE  # before anything looks for a cluster: tests have one of their own
# vLLM in a test's process imports Ray, which reads this then, before a test of the same process asks for the cluster
prepare_ray()
os.environ["RAY_AUTH_MODE"] = "token"
# a run that a shell started in the background has SIGINT ignored: tests of Ctrl-C would wait for ever
signal.signal(signal.SIGINT, signal.default_int_handler)
# no example has a limit of time; in CI the examples are the same in every run
hypothesis.settings.register_profile("rlbench", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("rlbench")
# before torch: tests share the cores, and engines in one process take turns: no thread may spin
os.environ |= {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}

NONE_OF = r"not \w+( and not \w+)*"
MARK = r"pytest\.mark\.(\w+)"
ENDS = pytest.StashKey[dict[str, Callable[[], None]]]()
"""How the cluster and the shared session end, by the fixture, where a test of this process asked for them."""


def pytest_configure(config: pytest.Config) -> None:
    """Look for no garbage in the process that hands out tests to others: it keeps what it hears to the end."""
    if not WORKER and getattr(config.option, "numprocesses", None):
        gc.disable()


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Our own Ray cluster with four device slots; ended, with everything on it, behind the last test that uses it."""
    import rlbench as rb
    from rlbench.runtime import cluster as clusters
    from rlbench.runtime import registry

    def end() -> None:
        record = registry.read_cluster()
        rb.shutdown()
        if record is not None and clusters.guard_alive(record):
            clusters.stop_cluster(record)

    made = rb.init(devices=4)
    request.session.stash.setdefault(ENDS, {})["cluster"] = end
    yield made
    end()
    shutil.rmtree(_STATE, ignore_errors=True)


@pytest.fixture(scope="session")
def tiny_path() -> Path:
    """The embedded default model, made once and cached like a user's."""
    from rlbench import tiny

    return Path(tiny.ensure())


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a Qwen2 of 40 k parameters, its embedding tied."""
    from tests.modules import save_qwen

    return save_qwen(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def trained(qwen: str) -> Iterator[Any]:
    """Ranks around that Qwen2, by their number (`SameRanks`): built once for a file, set back after each test."""
    from tests.modules import qwen_on_meta
    from tests.ranks import same_ranks

    with same_ranks(lambda: qwen_on_meta(qwen)) as made:
        yield made


@pytest.fixture(scope="session")
def shared_session(request: pytest.FixtureRequest, cluster: Any, tiny_path: Path) -> Iterator[Any]:
    """What `session` is, made once."""
    import rlbench as rb

    made = rb.Session("tiny", name="shared", train={"lr": 1e-5, "shards": 2}, reference=True, seed=7, undo=1)
    request.session.stash.setdefault(ENDS, {})["shared_session"] = made.close
    yield made
    made.close()


@pytest.fixture(scope="session")
def session(shared_session: Any) -> Any:
    """A session on the tiny model that files share: each file finds it as it was made, up to its version."""
    return shared_session


@pytest.fixture(scope="module", autouse=True)
def session_as_before(request: pytest.FixtureRequest) -> Iterator[None]:
    """Put the shared session back after each file that uses it: policy, optimizer, step and history.

    Which files came before is a matter of timing where two processes share them. The first file behind all that use it
    ends it, and the first behind those of the cluster that: idle they cost four percent of a core, and one.
    """
    path, ends = request.node.path, request.session.stash.get(ENDS, {})
    users = {name: users_from(path, request.session.items, name) for name in ("shared_session", "cluster")}
    for name, files in users.items():
        if not files and name in ends:
            ends.pop(name)()
    if path not in users["shared_session"]:
        yield
        return
    from rlbench.session.state.healing import lost_engines

    session = request.getfixturevalue("shared_session")
    kept = session.snapshot(f"before {request.node.nodeid}", disk=True)
    yield
    if lost_engines(session.core):  # a worker that crashed fails the tests of its file, and none of the next
        session.heal()
    session.zero_grad()
    session.restore(kept)
    session.drop(*(snapshot.id for snapshot in session.snapshots))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Fail the test that pressed Ctrl-C too late: in one of two processes it would end the phase, other tests unrun."""
    try:
        return (yield)
    except KeyboardInterrupt:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            raise
        pytest.fail("a Ctrl-C met nothing that takes it")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Iterator[None]:
    """Report with a failure what `rb.last_traceback()` would give: of a worker that died, its last words."""
    report = (yield).get_result()
    whole = call.excinfo is not None and getattr(call.excinfo.value, "full_traceback", "")
    if report.failed and whole:
        report.sections.append(("rb.last_traceback()", whole))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Collect without looking for garbage: there is little, and what tests are made of is kept to the end."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        if WORKER:
            garbage.set_aside()
        if enabled:
            gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Look for garbage once: pytest does five times more, at the end of each process, over all that was imported."""
    if WORKER:  # which frees nothing at its end, see `_end`
        gc.collect()
        garbage.set_aside()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Look for garbage at the end of a file, and never again among what it has left: imports, most of all."""
    try:
        return (yield)
    finally:
        if WORKER and (nextitem is None or nextitem.path != item.path):
            gc.collect()
            garbage.set_aside()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files all of whose tests the marks asked for exclude: to import them takes seconds in each process."""
    if not collection_path.name.startswith("test_") or collection_path in {_file(each) for each in config.args}:
        return None
    return True if excluded_marks(config.option.markexpr) & file_marks(collection_path.read_text()) else None


def _file(argument: str) -> Path:
    return Path(argument.split("::")[0]).resolve()


def excluded_marks(expression: str) -> set[str]:
    """Return the marks that no test may have; none where the expression is more than `not … and not …`."""
    return set(re.findall(r"not (\w+)", expression)) if re.fullmatch(NONE_OF, expression.strip()) else set()


def file_marks(source: str) -> set[str]:
    """Return the marks that a file gives to all of its tests."""
    given = {mark for line in re.findall(r"^pytestmark = .*", source, re.M) for mark in re.findall(MARK, line)}
    return given | ({"slow"} if TAKES_RANKS.search(source) else set())


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark tests before they are chosen by their marks; where several processes share them, put in order what is left.

    Files that take ranks in processes of their own are `slow`, and tests that take the cluster are `engine`: the quick
    tests start neither. What is marked `gpu` is skipped where there is none, with the reason.
    """
    _mark(items)
    yield
    if WORKER:
        items[:] = in_order_of_run(items, config.rootpath)


def _mark(items: list[pytest.Item]) -> None:
    from rlbench.setup.plan import has_nvidia_gpu

    for item in items:
        names = vars(item.module).values() if isinstance(item, pytest.Function) else ()
        if any(getattr(value, "__module__", None) == "tests.ranks" for value in names):
            item.add_marker(pytest.mark.slow)
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.engine)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not has_nvidia_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, this machine has none"))


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return Path(__file__).parent.parent

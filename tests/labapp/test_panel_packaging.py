"""The side panel as it is shipped: in wheel and source archive, with and without node, gone when uninstalled."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from rlbench._version import __version__
from rlbench.notebook.base import palette
from scripts import panel

ROOT = Path(__file__).parents[2]
EXTENSION = ROOT / "extension"
PLACE = "share/jupyter/labextensions/rlbench-lab"
IN_WHEEL = f"rlbench-{__version__}.data/data/{PLACE}"


def require_panel() -> None:
    """Have this checkout's panel built; skips where it is not and there is no node."""
    if not panel.is_built(ROOT):
        if missing := panel.why_no_node():
            pytest.skip(f"no side panel: {missing}")
        panel.build(ROOT)


def without_node(**more: str) -> Mapping[str, str]:
    """An environment in which no node is found."""
    return {**os.environ, "PATH": str(Path(sys.executable).parent), **more}


def hatchling(tree: Path, target: str, out: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Build `tree` without an environment of its own: nothing is downloaded."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)


def wheel_names(folder: Path) -> set[str]:
    return set(zipfile.ZipFile(next(folder.glob("*.whl"))).namelist())


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    """The source archive of this checkout, panel included."""
    require_panel()
    folder = tmp_path_factory.mktemp("sdist")
    done = hatchling(ROOT, "sdist", folder, os.environ)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.tar.gz"))


@pytest.fixture
def unpacked(archive, tmp_path) -> Path:
    """What somebody has who got the source archive."""
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    return tmp_path / f"rlbench-{__version__}"


@pytest.mark.slow
def test_the_archive_holds_the_sources_the_lock_and_the_built_panel_and_is_small(archive, unpacked):
    assert archive.stat().st_size < 2.5 * 2**20
    assert (unpacked / "extension" / "yarn.lock").is_file() and panel.is_built(unpacked)
    assert not [name for name in ("node_modules", "lib", ".yarn") if (unpacked / "extension" / name).exists()]


@pytest.mark.slow
def test_from_the_archive_the_wheel_has_the_panel_without_any_node(unpacked, tmp_path):
    done = hatchling(unpacked, "wheel", tmp_path / "dist", without_node(RLB_LABEXT="require"))
    assert done.returncode == 0, done.stderr
    names = wheel_names(tmp_path / "dist")
    assert {f"{IN_WHEEL}/package.json", f"{IN_WHEEL}/install.json"} <= names
    assert [name for name in names if name.startswith(f"{IN_WHEEL}/static/remoteEntry.")]
    assert f"{IN_WHEEL}/schemas/rlbench-lab/panel.json" in names
    assert not [name for name in names if name.startswith(("rlbench/labextension", "extension"))], "it is there twice"


@pytest.mark.slow
def test_without_node_and_without_a_built_panel_the_rest_is_built_and_one_line_says_so(unpacked, tmp_path):
    shutil.rmtree(unpacked / "rlbench" / "labextension")
    done = hatchling(unpacked, "wheel", tmp_path / "dist", without_node())
    assert done.returncode == 0, done.stderr
    said = [line for line in (done.stdout + done.stderr).splitlines() if "panel" in line]
    assert said == ["rlbench: without the JupyterLab side panel: node was not found; all else is there"]
    names = wheel_names(tmp_path / "dist")
    assert "rlbench/labapp/handlers.py" in names and not [name for name in names if "labextensions" in name]

    done = hatchling(unpacked, "wheel", tmp_path / "required", without_node(RLB_LABEXT="require"))
    assert done.returncode != 0 and "was not built (RLB_LABEXT=require): node was not found" in done.stderr


@pytest.mark.slow
def test_a_panel_of_other_sources_is_not_taken_for_theirs(unpacked, tmp_path):
    (unpacked / "extension" / "src" / "index.ts").write_text("// changed")
    assert not panel.is_built(unpacked)
    done = hatchling(unpacked, "wheel", tmp_path / "dist", without_node())
    assert "without the JupyterLab side panel" in done.stdout + done.stderr
    assert not [name for name in wheel_names(tmp_path / "dist") if "labextensions" in name]


@pytest.mark.slow
def test_uninstalling_leaves_nothing(unpacked, tmp_path):
    assert hatchling(unpacked, "wheel", tmp_path / "dist", without_node()).returncode == 0
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)

    def pip(*arguments: str) -> None:
        own = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "-q"]
        subprocess.run([*own, "--disable-pip-version-check", *arguments], check=True)

    def files() -> set[Path]:
        return {path for path in venv.rglob("*") if "__pycache__" not in path.parts}

    before = files()
    pip("install", "--no-deps", "--no-index", str(next((tmp_path / "dist").glob("*.whl"))))
    added = files() - before
    assert venv / PLACE / "package.json" in added
    assert venv / "etc/jupyter/jupyter_server_config.d/rlbench.json" in added
    pip("uninstall", "-y", "rlbench")
    assert {path.relative_to(venv) for path in files() - before} - FOLDERS_OF_OTHERS == set()


FOLDERS_OF_OTHERS = {
    Path(path)
    for path in (
        "etc",
        "etc/jupyter",
        "etc/jupyter/jupyter_server_config.d",
        "share",
        "share/jupyter",
        "share/jupyter/labextensions",
    )
}
"""Empty folders of Jupyter's own, which pip leaves."""


def test_a_checkouts_panel_is_found_by_its_environment_and_replaces_an_older_one(tmp_path):
    root, prefix = tmp_path / "root", tmp_path / "prefix"
    (root / "rlbench" / "labextension").mkdir(parents=True)
    older = prefix / PLACE
    older.mkdir(parents=True)
    (older / "package.json").write_text("{}")
    for _ in range(2):
        panel.link(root, prefix)
        assert older.resolve() == root / "rlbench" / "labextension"
    older.unlink()
    older.symlink_to(tmp_path / "gone")
    panel.link(root, prefix)
    assert older.resolve() == root / "rlbench" / "labextension"


def test_an_old_node_is_named(tmp_path, monkeypatch):
    node = tmp_path / "node"
    node.write_text("#!/bin/sh\necho v18.19.0\n")
    node.chmod(0o755)
    monkeypatch.setattr(panel, "PATH", str(tmp_path))
    assert panel.why_no_node() == "node v18.19.0 is older than 20.19"
    node.write_text("#!/bin/sh\necho v22.1.0\n")
    assert panel.why_no_node() == ""
    node.unlink()
    assert panel.why_no_node() == "node was not found"


def test_without_node_make_goes_on_after_one_line(tmp_path):
    code = (
        "import sys; from pathlib import Path; from scripts import panel;"
        "panel.is_built = lambda root: False; sys.exit(panel.main(sys.argv[1:]))"
    )
    for arguments in ([], ["lint"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], env=without_node(), capture_output=True, text=True
        )
        assert done.returncode == 0
        assert done.stderr == "rlbench: node was not found: no side panel in JupyterLab, everything else works\n"


def test_the_lint_runs_again_only_after_a_change_to_what_decides_it(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(panel, "_run", lambda root, task: ran.append(task))
    for name in ("src/index.ts", "src/index.test.ts", "eslint.config.mjs", ".prettierrc.json", "node_modules/a.js"):
        path = tmp_path / "extension" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    (tmp_path / panel.WIDGETS).mkdir(parents=True)
    for name, again in {
        "src/index.ts": True,
        "src/index.test.ts": True,
        "src/more.ts": True,
        "eslint.config.mjs": True,
        ".prettierrc.json": True,
        "../rlbench/notebook/static/page.js": True,
        "node_modules/a.js": False,
        "lib": False,
    }.items():
        panel.lint(tmp_path)
        (tmp_path / "extension" / name).write_text("2")
        ran.clear()
        panel.lint(tmp_path)
        panel.lint(tmp_path)
        assert ran == ["lint"] * again, name


def test_a_lint_that_failed_runs_again(tmp_path, monkeypatch):
    (tmp_path / "extension").mkdir()

    def fail(root: Path, task: str) -> None:
        raise panel.SetupError("jlpm check failed")

    monkeypatch.setattr(panel, "_run", fail)
    for _ in range(2):
        with pytest.raises(panel.SetupError, match="check failed"):
            panel.lint(tmp_path)


def test_it_has_the_version_of_the_package():
    assert json.loads((EXTENSION / "package.json").read_text())["version"] == __version__


def test_its_colours_are_those_of_the_views_in_cells():
    written = (EXTENSION / "style" / "palette.css").read_text()
    assert written.partition("\n")[2].strip() == palette.css(".rlb-Panel").strip()


def test_the_compiler_is_strict():
    options = json.loads((EXTENSION / "tsconfig.json").read_text())["compilerOptions"]
    assert options["strict"] and options["noUncheckedIndexedAccess"] and options["noUnusedLocals"]


@pytest.mark.slow
def test_the_tests_beside_the_typescript_pass():
    if missing := panel.why_no_node():
        pytest.skip(f"TypeScript cannot be run: {missing}")
    command = [sys.executable, "scripts/panel.py", "test"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]

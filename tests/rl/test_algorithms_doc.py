"""docs/algorithms.md lists what the code has, with its defaults: the list cannot drift."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from rlbench import rl


@pytest.fixture(scope="module")
def algorithms(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("algorithms", repository / "scripts" / "algorithms.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_as_the_code_has_it(algorithms: ModuleType) -> None:
    assert algorithms.problems(algorithms.PAGE.read_text()) == []


def row(name: str, defaults: str, paper: str = "–") -> str:
    return f"| `{name}` | x | {paper} | {defaults} | – | – | – |\n"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda t: "\n".join(x for x in t.splitlines() if not x.startswith("| `gspo`")),
            "gspo is public and has no row",
        ),
        (lambda t: t + row("gspoo", "–"), "gspoo has a row and is not in"),
        (lambda t: t + row("k1", "–"), "k1 has 2 rows"),
        (
            lambda t: t.replace("clip_high=0.28", "clip_high=0.27"),
            "dapo: the page says .*0.27.*the code .*0.28",
        ),
        (lambda t: t.replace("2507.18071", "2507.99999"), "gspo: 2507.99999 is not in its docstring"),
    ],
)
def test_drift_is_found(algorithms: ModuleType, change, said: str) -> None:  # type: ignore[no-untyped-def]
    found = "\n".join(algorithms.problems(change(algorithms.PAGE.read_text())))
    import re

    assert re.search(said, found), found


def test_defaults_are_written_from_the_code(algorithms: ModuleType) -> None:
    page = algorithms.PAGE.read_text()
    assert algorithms.rewritten(page.replace("clip_high=0.28", "clip_high=0.27")) == algorithms.rewritten(page)


def test_everything_public_is_there_and_documented() -> None:
    for name in rl.__all__:
        value = getattr(rl, name)
        assert name in ("AdvantageFunction", "Loss") or (value.__doc__ or "").strip(), name

"""docs/reference-trainers.md against the code: names, defaults, options, and the tests it names."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rlbench.strategies.config import StrategyConfig
from rlbench.trainers.ppo_config import PPOConfig
from rlbench.trainers.reference_flags import REFUSED
from rlbench.trainers.run_options import RunOptions

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "reference-trainers.md"
NAMES, FLAGS, DEFECTS = ("name", "default", "here", "test"), ("flag", "why"), ("defect", "absent: test")
CLASSES = {
    "rlbench.strategies:StrategyConfig": StrategyConfig,
    "rlbench.trainers.ppo_config:PPOConfig": PPOConfig,
    "rlbench.trainers.run_options:RunOptions": RunOptions,
}
PLACE = re.compile(r"([\w.]+):([\w.]+)(?:\((\w+)\))?")


class Name(NamedTuple):
    """A row of a table of names."""

    name: str
    default: str
    here: str
    tests: tuple[str, ...]


def rows(header: tuple[str, ...], text: str | None = None) -> list[list[str]]:
    """The rows of all tables with this header."""
    found, inside = [], False
    for line in (DOCUMENT.read_text() if text is None else text).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("| ") else None
        if cells == list(header):
            inside = True
        elif cells is None:
            inside = inside and line.startswith("|--")
        elif inside:
            assert len(cells) == len(header), f"{len(cells)} cells instead of {len(header)}: {line}"
            found.append(cells)
    return found


def plain(cell: str) -> str:
    return cell.strip("`")


def named_in(cell: str) -> tuple[str, ...]:
    return tuple(plain(part) for part in cell.split("<br>"))


def names() -> list[Name]:
    return [Name(plain(n), plain(d), plain(h), named_in(t)) for n, d, h, t in rows(NAMES)]


def defects() -> list[tuple[str, tuple[str, ...]]]:
    return [(text, named_in(cell)) for text, cell in rows(DEFECTS)]


@cache
def functions_of(path: Path) -> dict[str, str]:
    """The test functions of a file, with their docstrings."""
    walked = ast.walk(ast.parse(path.read_text()))
    return {node.name: ast.get_docstring(node) or "" for node in walked if isinstance(node, ast.FunctionDef)}


def said_default(place: str) -> Any:
    """The default of what a place names: of a parameter, or the value of an attribute.

    Raises:
        AttributeError, KeyError, ModuleNotFoundError: it is not there.
    """
    match = PLACE.fullmatch(place)
    assert match is not None, f"{place!r} is no module:name or module:name(parameter)"
    module, path, parameter = match.groups()
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found if parameter is None else inspect.signature(found).parameters[parameter].default


def named_tests() -> Iterator[tuple[str, str]]:
    """Each row's first cell, with each of its tests."""
    for name in names():
        yield from ((name.name, test) for test in name.tests)
    for text, tests in defects():
        yield from ((text, test) for test in tests)


def test_the_tables_are_read() -> None:
    assert len(names()) > 150 and len(defects()) > 50 and len(rows(FLAGS)) == len(REFUSED)
    text = "| name | default | here | test |\n|---|---|---|---|\n| a | 1 | m:n | t |\n\n| b | 1 | m:n | t |\n"
    assert rows(NAMES, text) == [["a", "1", "m:n", "t"]]
    with pytest.raises(AssertionError, match="3 cells instead of 4"):
        rows(NAMES, text.replace("| a | 1 |", "| a |"))


@pytest.mark.parametrize("name", names(), ids=lambda name: name.name)
def test_every_name_is_where_the_table_says_with_the_default_it_says(name: Name) -> None:
    found = said_default(name.here)
    if name.default:
        expected = ast.literal_eval(name.default)
        assert type(found) is type(expected) and found == expected


def test_a_name_that_is_not_there_and_another_default_are_noticed() -> None:
    for place in ("rlbench.strategies:FSDPV3Strategy", "rlbench.strategies:StrategyConfig.sead", "rlbench.nowhere:x"):
        with pytest.raises((AttributeError, ModuleNotFoundError)):
            said_default(place)
    with pytest.raises(KeyError):
        said_default("rlbench.strategies:FSDPV2Strategy.save_ckpt(max_number)")
    assert said_default("rlbench.strategies:FSDPV2Strategy.save_ckpt(max_num)") == 3


@pytest.mark.parametrize("place", list(CLASSES))
def test_every_option_has_one_row_with_its_default(place: str) -> None:
    wanted = [f.name for f in fields(CLASSES[place]) if f.name != "extra_args"]
    found = [name for name in names() if name.here.startswith(f"{place}.") and name.default]
    assert sorted(name.name for name in found) == sorted(wanted)
    assert all(name.here == f"{place}.{name.name}" for name in found)


def test_every_refused_flag_has_a_row_with_its_reason() -> None:
    assert {plain(flag).removeprefix("--"): why for flag, why in rows(FLAGS)} == REFUSED


def test_every_test_that_a_row_names_exists() -> None:
    absent = []
    for what, test in named_tests():
        path, _, function = test.partition("::")
        if not function.startswith("test_") or not (ROOT / path).is_file() or function not in functions_of(ROOT / path):
            absent.append(f"{what}: {test}")
    assert not absent, "\n".join(absent)


def test_every_test_that_says_a_defect_is_absent_stands_in_the_table_of_defects() -> None:
    listed = {test for _, tests in defects() for test in tests}
    unlisted = [
        f"{path.relative_to(ROOT)}::{function}"
        for folder in ("strategies", "trainers")
        for path in sorted((ROOT / "tests" / folder).glob("test_*.py"))
        for function, said in functions_of(path).items()
        if function.startswith("test_") and re.match("Defects? absent", said)
    ]
    assert sorted(set(unlisted) - listed) == []

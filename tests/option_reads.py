"""Which options were read by what acts on them, and which fields of a class the package's code reads at all."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1] / "rlbench"
PASSED_ON = {
    "replace",
    "_replace",
    "overridden",
    "__getitem__",
    "<lambda>",
    "summary",
    "value",
    "doubts",
    "_with_own",
    "with_estimator",
    "_settled",
    "get_strategy",
    "get_fake_strategy",
    "<listcomp>",
    "<dictcomp>",
    "<genexpr>",
}
"""Functions of the option classes' own modules that hand values on: a read of theirs has no effect yet."""
OWN_MODULES = {
    "config.py",
    "options.py",
    "ppo_config.py",
    "run_config.py",
    "run_options.py",
    "trainer_options.py",
    "base.py",
    "factory.py",
    "fake.py",
    "dataclasses.py",
}


@contextmanager
def reads(*classes: type) -> Iterator[dict[int, set[str]]]:
    """Note which attributes of which object (by `id`) are read, but by what hands them on or checks them alone."""
    found: dict[int, set[str]] = defaultdict(set)
    seen: dict[int, Any] = {}  # so that no other object gets the id of one that is gone

    def noted(self: Any, name: str) -> Any:
        code = sys._getframe(1).f_code
        hands_on = Path(code.co_filename).name in OWN_MODULES and code.co_name in PASSED_ON
        hands_on = hands_on or code.co_filename == "<string>"  # what dataclasses makes: compares and shows
        checks = code.co_name == "__post_init__" or code.co_name.removeprefix("_").startswith("check")
        if not hands_on and not checks:
            seen[id(self)] = self
            found[id(self)].add(name)
        return object.__getattribute__(self, name)

    for cls in classes:
        cls.__getattribute__ = noted  # type: ignore[method-assign,assignment]
    try:
        yield found
    finally:
        for cls in classes:
            del cls.__getattribute__


HOLDERS = {"config", "_options", "_config", "spec", "options", "given", "self", "run"}


@cache
def loaded_fields(*rooms: str) -> frozenset[str]:
    """Names of attributes that code of these rooms reads from something that is called like options."""
    names = set()
    for room in rooms:
        for file in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    holder = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
                    if holder in HOLDERS:
                        names.add(node.attr)
    return frozenset(names)

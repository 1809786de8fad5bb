"""docs/coming-from.md and docs/evaluation.md: their cells run, their table of names is the code's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlbench.option_names import TRL, VERL
from scripts import coming_from

CELL = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_the_table_of_names_is_as_the_code_has_it() -> None:
    page = coming_from.PAGE.read_text(encoding="utf-8")
    assert page == coming_from.written(page), "python scripts/coming_from.py --write"


@pytest.mark.parametrize(("aliases", "column"), [(TRL, 2), (VERL, 3)])
def test_every_name_that_options_take_is_in_the_table(aliases: dict[str, str], column: int) -> None:
    table = coming_from.rows(coming_from.PAGE.read_text(encoding="utf-8"))
    for name, ours in aliases.items():
        assert any(f"{name}`**" in row[column] for row in table if row[1].startswith(f"`{ours}`")), name


@pytest.mark.engine
def test_the_cells_run_one_after_the_other(
    cluster: Any, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(repository / "examples")
    names: dict[str, Any] = {}
    try:
        for page in ("coming-from", "evaluation"):
            cells = CELL.findall((repository / "docs" / f"{page}.md").read_text(encoding="utf-8"))
            assert len(cells) >= 4
            for number, cell in enumerate(cells, 1):
                exec(compile(cell, f"docs/{page}.md, cell {number}", "exec"), names)
    finally:
        if "session" in names:
            names["session"].close()
    assert names["found"]["unseen"].metrics().keys() == {"eval/unseen/reward"}
    assert names["changed"].after is names["after"]["long"]

"""One format for bytes, tokens, seconds and shares, and one place that writes it."""

import re

import numpy as np
import pytest

from rlbench import units
from rlbench.notebook.base.figures import FIGURE, POINT, aligned
from rlbench.notebook.cards.card import Grid

STRAYS = re.compile(
    r"\}\s?(MiB|GiB|KiB|MB|GB|tok/s)\b"  # bytes and rates put together by hand …
    r"|:[^{}\"']*\.\d[fg]\} (s|ms|min|h|%)"  # … seconds and shares with digits of their own
    r"|:\.\d%\}|>> (20|30)\}|/ (2\*\*[23]0|1e9)"
)
EXEMPT = {
    "rlbench/setup/install.py",
    "rlbench/strategies/memory/peak.py",
    "rlbench/strategies/base.py",
    "rlbench/tiny/vision_model.py",
    "rlbench/tiny/warmup.py",
}
"""Runs before anything is installed; says a constant in ms; its line has the reference's form; their text is part of
the cached model's key."""


def test_no_other_file_formats_numbers_with_units(repository):
    found = [
        f"{path.relative_to(repository)}:{number}: {line.strip()}"
        for path in sorted((repository / "rlbench").rglob("*.py"))
        if path.name != "units.py" and str(path.relative_to(repository)) not in EXEMPT
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if STRAYS.search(line)
    ]
    assert not found, "rlbench.units formats these:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (units.format_number(0.012345), "0.0123"),
        (units.format_number(12345.6), "12,346"),
        (units.format_number(7), "7"),
        (units.format_number(np.float32(0.5)), "0.5"),
        (units.format_number(np.int64(1234)), "1,234"),
        (units.format_number(True), "True"),
        (units.format_number("grpo"), "grpo"),
        (units.format_bytes(0), "0 B"),
        (units.format_bytes(640), "640 B"),
        (units.format_bytes(12_595), "12.3 KiB"),
        (units.format_bytes(900 << 20), "900 MiB"),
        (units.format_bytes(1000 << 20), "0.977 GiB"),
        (units.format_bytes(-3 << 30), "-3 GiB"),
        (units.format_seconds(0.01234), "0.0123 s"),
        (units.format_seconds(41.26), "41.3 s"),
        (units.format_seconds(1000), "16.7 min"),
        (units.format_seconds(9000), "2.5 h"),
        (units.format_rate(0), "0 tok/s"),
        (units.format_rate(512.4), "512 tok/s"),
        (units.format_rate(999.7), "1k tok/s"),
        (units.format_rate(3111), "3.11k tok/s"),
        (units.format_rate(2.5e6), "2.5M tok/s"),
        (units.format_percent(0.03125), "3.12 %"),
        (units.format_share(3, 4), "75 %"),
        (units.format_share(0, 0), "0 %"),
    ],
)
def test_numbers_for_a_reader(said, wanted):
    assert said == wanted


def test_decimal_points_meet():
    assert aligned(["1,024", "0.5", "−12.25", "~3"]) == ["1,024   ", "0.5 ", "−12.25", "~3   "]
    assert aligned(["", "–", "no number", "2"]) == ["", "–", "no number", "2"]
    assert aligned(["2 s", "1.5 min"]) == ["2 s    ", "1.5 min"]
    assert aligned(["1.5 GiB", "900 MiB"], html=True) == ["1.5 GiB", f"900 MiB{POINT}{FIGURE}"]


def test_tables_are_aligned_as_text_and_as_html():
    grid = Grid((("a", "1.5 GiB", "x"), ("b", "900 MiB", "y")), numeric=frozenset({1}))
    assert grid.text() == "a    1.5 GiB  x\nb  900 MiB    y"
    assert f"900 MiB{POINT}{FIGURE}" in grid.html()

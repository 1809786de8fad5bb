"""The colours: scales, and that both themes tell owners of memory apart for every reader."""

import itertools
import re
from pathlib import Path

import pytest

from rlbench.notebook.base import palette


def rgb(hue):
    return [int(hue[i : i + 2], 16) for i in (1, 3, 5)]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_owners_differ_from_each_other(theme):
    hues = [rgb(getattr(hue, theme)) for hue in palette.OWNERS.values()]
    for a, b in itertools.combinations(hues, 2):
        assert sum(abs(x - y) for x, y in zip(a, b, strict=True)) > 80, (a, b)


def test_every_colour_is_a_variable_in_both_themes():
    light, dark = palette.css(".x").split("\n")
    assert light.startswith(".x{") and 'body[data-jp-theme-light="false"] .x' in dark
    for owner, hue in palette.OWNERS.items():
        name = f"--rlb-{owner.replace('_', '-')}:"
        assert f"{name}{hue.light};" in light and f"{name}{hue.dark};" in dark


@pytest.mark.parametrize(("sheet", "root"), [("dashboard", ".rlb-dashboard"), ("rollout_viewer", ".rlbv")])
def test_a_views_style_sheet_reaches_nothing_else_in_the_page(sheet, root):
    text = (Path(palette.__file__).parents[1] / "static" / f"{sheet}.css").read_text()
    heads = re.findall(r"([^{}]+)\{", re.sub(r"/\*.*?\*/|@container[^{]*\{", "", text, flags=re.DOTALL))
    selectors = [one.strip() for head in heads for one in head.split(",")]
    assert len(selectors) > 40 and [one for one in selectors if not one.startswith(root)] == []

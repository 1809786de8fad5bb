"""Curves over steps: one SVG for the notebook, the same as text for a terminal or a diff."""

import re
from xml.etree import ElementTree

import pytest

from rlbench.notebook.charts.chart import Curves
from rlbench.notebook.charts.svg import BOTTOM, LEFT, RIGHT, TOP, WIDE_HEIGHT, WIDTH


def svg(curves):
    return ElementTree.fromstring(re.sub(r' xmlns="[^"]+"', "", curves.svg))


def points(element):
    return [tuple(map(float, p.split(","))) for p in element.get("points").split()]


def texts(root):
    return [e.text for e in root.iter("text")]


def test_each_series_is_a_line_with_its_name_and_a_look_of_its_own():
    root = svg(Curves({"train": [0.1, 0.5, 0.9], "eval": [(1, 0.2), (3, 0.4)]}, y="reward"))
    lines = list(root.iter("polyline"))[:2]
    assert [len(points(line)) for line in lines] == [3, 2]
    assert len({(line.get("stroke"), line.get("stroke-dasharray")) for line in lines}) == 2
    assert {"train", "eval", "reward", "step"} <= set(texts(root))


def test_higher_values_are_drawn_higher_and_all_within_the_frame():
    (line,) = svg(Curves({"a": [0.0, 10.0, 5.0]})).iter("polyline")
    (x0, y0), (x1, y1), (x2, y2) = points(line)
    assert x0 < x1 < x2 and y1 < y2 < y0
    assert all(LEFT <= x <= WIDTH - RIGHT and TOP <= y <= WIDE_HEIGHT - BOTTOM for x, y in points(line))


def test_bounds_are_kept_and_values_beyond_them_clipped():
    root = svg(Curves({"a": [0.5, 7.0]}, bounds=(0.0, 1.0)))
    (line,) = root.iter("polyline")
    assert points(line)[1][1] == TOP and {"0", "1"} <= set(texts(root))


@pytest.mark.parametrize(
    "series",
    [{}, {"a": []}, {"a": [1.0]}, {"a": [2.0, 2.0]}, {"a": [None, 1.0, float("nan"), 2.0]}, {"a": [None]}],
    ids=str,
)
def test_few_equal_or_missing_values_still_draw(series):
    curves = Curves(series, y="reward")
    assert repr(curves).startswith("reward over step")
    bundle = curves._repr_mimebundle_()
    assert "text/html" in bundle and "nan" not in str(bundle)


def test_what_is_missing_leaves_a_gap_and_moves_nothing():
    curves = Curves({"a": [None, 1.0, float("nan"), 2.0]})
    (line,) = curves.panels[0].lines
    assert (line.x.tolist(), line.y.tolist()) == ([2.0, 4.0], [1.0, 2.0])


def test_the_text_shows_each_series_with_its_first_and_last_value():
    assert repr(Curves({"train": [0.0, 1.0], "eval": [0.25, 0.5]}, y="reward")) == (
        "reward over step\ntrain  0 ▁█ 1\neval   0.25 ▁█ 0.5"
    )


def test_the_drawing_has_the_text_as_its_label():
    curves = Curves({"a <b>": [1.0, 2.0]}, y="reward")
    assert svg(curves).get("aria-label") == repr(curves).replace("\n", "; ")

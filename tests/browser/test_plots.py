"""Plots and cards in a real page: interactive where plotly is, a drawing where a notebook is only read; legible."""

from __future__ import annotations

import copy
import json

import pytest

from tests.browser.layout import CONTRAST

START = """
import sys; sys.path.insert(0, {root!r})
import numpy as np
from rlbench.data.record.history import History
from rlbench.data.record.metrics import Metrics
from rlbench.notebook import install
from tests.data.values import rollouts
install()
random = np.random.default_rng(0)
def run(steps, gain):
    return History([
        {{"step": i + 1, "reward": float(gain * i / steps + random.normal() / 20), "loss": float(random.normal()),
          "kl": float(i / 1e4), "entropy": 2 - i / steps, "clip_fraction": 0.02, "grad_norm": 1.0}}
        for i in range(steps)
    ])
"""
PLOT = 'run(3000, 1).plot("reward", "entropy", compare={"lr <b>1e-5</b>": run(2000, 0.5)}, smooth=20)'
HISTOGRAM = 'rollouts().lengths.plot(compare={"step 1": [1, 1, 2]})'
PLOTLY = ".jp-RenderedPlotly .main-svg"


@pytest.fixture
def open_cells(take):
    """`open_cells(cell, …)`: a notebook with these cells after one that imports, all run."""

    def open_all(*cells, theme="light"):
        notebook = take(theme)
        assert [notebook.add(cell) for cell in cells] == [*range(1, len(cells) + 1)]
        for i in range(1, len(cells) + 1):
            notebook.run(i)
        return notebook

    return open_all


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_plot_is_interactive_and_legible_on_either_ground(open_cells, theme, repository):
    notebook = open_cells(PLOT, HISTOGRAM, theme=theme)
    for index, title in ((1, "reward"), (2, "share, %")):
        drawing = notebook.cell(index).locator(PLOTLY).first
        drawing.wait_for()
        label = notebook.cell(index).locator(".jp-RenderedPlotly text", has_text=title).first
        assert label.evaluate(CONTRAST) >= 3.5, theme
        ground = notebook.cell(index).locator(".jp-RenderedPlotly .bg").first
        assert "0)" in ground.evaluate("node => getComputedStyle(node).fill + getComputedStyle(node).fillOpacity + ')'")
        notebook.screenshot(repository / "build" / "browser" / f"plot-{index}-{theme}.png", index)
    key = notebook.cell(2).locator(".jp-RenderedPlotly .legendtext").all_text_contents()
    assert key == ["lengths", "step 1"]
    said = notebook.cell(1).locator(".jp-RenderedPlotly .legend").text_content()
    assert "lr ‹b›1e-5‹/b›" in said  # plotly would draw "<b>" bold
    said = notebook.cell(1).locator(".jp-RenderedPlotly .annotation").all_text_contents()
    assert "reward" in said and any("moving average over 20 steps" in one for one in said)
    assert notebook.cell(1).locator(".rlb").count() == 0  # one form of it, not two


def test_a_plot_that_is_drawn_out_of_view_is_whole_when_it_comes_into_view(open_cells):
    notebook = open_cells("print('line\\n' * 200)", PLOT, "print('line\\n' * 200)")  # errors in the page fail it
    drawing = notebook.cell(2).locator(PLOTLY).first
    drawing.scroll_into_view_if_needed()
    box = drawing.bounding_box()
    assert box["width"] > 600 and box["height"] > 200
    assert notebook.cell(2).locator(".jp-RenderedPlotly path.js-line").count() >= 1


def test_a_saved_plot_is_small_and_shows_again_without_a_kernel(open_cells):
    notebook = open_cells(PLOT)
    notebook.cell(1).locator(PLOTLY).first.wait_for()
    has_picture = "return cells[1].model.outputs.toJSON().some(output => output.data?.['image/png']);"
    notebook.until(lambda: notebook._js(has_picture), what="plotly puts a picture of what it drew into the output")
    saved = notebook.save()
    (output,) = saved.cells[1].outputs
    assert {"application/vnd.plotly.v1+json", "text/html", "text/plain"} <= set(output.data)
    assert len(json.dumps(output)) < 200_000
    plain = copy.deepcopy(saved.cells[1])
    plain.id = "plain"
    del plain.outputs[0].data["application/vnd.plotly.v1+json"]
    plain.outputs[0].data.pop("image/png", None)
    saved.cells.append(plain)
    with notebook.reading(saved):
        notebook.cell(1).locator(".jp-RenderedPlotly").first.wait_for()
        drawing = notebook.cell(2).locator(".rlb img")  # of a front end without plotly, where it does not trust
        drawing.wait_for()
        assert drawing.evaluate("image => image.complete && image.naturalWidth") == 680
        assert "lr <b>1e-5</b>" in drawing.get_attribute("alt") and "moving average" in notebook.output(2)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_cards_are_legible_on_either_ground(open_cells, theme, repository):
    card = 'Metrics({"step": 3, "loss": 0.25, "kl": 0.01, "skipped": "<script>window.hacked = 1</script>"})'
    notebook = open_cells(card, "run(30, 1)", theme=theme)
    for index in (1, 2):
        for node in notebook.cell(index).locator(".rlb b, .rlb th, .rlb td, .rlb .q, .rlb .w").all():
            assert node.evaluate(CONTRAST) >= 4.0, node.text_content()
        notebook.screenshot(repository / "build" / "browser" / f"card-{index}-{theme}.png", index)
    assert "<script>window.hacked = 1</script>" in notebook.output(1)
    assert notebook.page.evaluate("window.hacked") is None

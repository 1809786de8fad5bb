"""Every view narrow and wide, light and dark, with long names, two ranks and warnings: no text lies over another."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.lab import Notebook
from tests.browser.layout import CONTRAST, faults
from tests.browser.panels import Panel, built, scripted
from tests.notebook.gallery import SESSION, VIEWS
from tests.scripted_monitor import crowded

START = "import sys; sys.path.insert(0, {root!r})\nfrom tests.notebook.gallery import show"
WIDTHS = (280, 600, 1000, 1600)
LIVE = {
    "rollouts": ".rlbv .row .t",
    "viewer": ".rlbv .row .t",
    "dashboard": ".rlb-live .rlb-panel-memory polygon",
    "plot": ".jp-RenderedPlotly .main-svg",
    "histogram": ".jp-RenderedPlotly .main-svg",
}
TEXTS = (
    ".rlb-Session .rlb-name",
    ".rlb-Engine .rlb-warns",
    ".rlb-head b",
    ".rlb-engine-note .rlb-w",
    ".rlbv .prompt",
    ".rlb th[scope=row]",
    ".rlb .w",
)
SETTLED_MS = 600
"""Longer than the drawings wait before they follow a new width."""


@pytest.fixture(scope="module")
def stage(lab, browser, repository) -> Any:
    """A page with every view in a notebook, and the panel beside it, all of a session that has trouble."""
    built()
    script = scripted(lab, SESSION, crowded)
    cells = [START.format(root=str(repository)), *(f"show({name!r})" for name in VIEWS)]
    with Notebook(lab, browser, cells) as notebook:
        notebook.page.set_viewport_size({"width": 3600, "height": 7000})
        panel = Panel(notebook).open()
        for i in range(len(cells)):
            notebook.run(i)
        for i, name in enumerate(VIEWS, 1):
            if name in LIVE:
                notebook.cell(i).locator(LIVE[name]).first.wait_for()
        panel.wait(SESSION, "versions behind")
        yield notebook, panel
    script.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_text_lies_over_another_nor_beyond_its_edge(stage, theme, repository):
    notebook, panel = stage
    notebook.theme(theme)  # changes while all of it is open
    for text in TEXTS:
        assert notebook.page.locator(text).first.evaluate(CONTRAST) >= 4.5, text
    found: list[str] = []
    for width in WIDTHS:
        panel.widen(width)
        cells = {
            name: notebook.cell(i).locator(".jp-OutputArea-output:visible").last for i, name in enumerate(VIEWS, 1)
        }
        for cell in cells.values():
            cell.evaluate("(node, width) => { node.style.flex = `0 0 ${width}px`; }", width)
        notebook.page.wait_for_timeout(SETTLED_MS)
        notebook.screenshot(repository / "build" / "browser" / "layout" / f"{width}-{theme}.png")
        for name, view in ({"panel": panel.node} | cells).items():
            assert abs(view.bounding_box()["width"] - width) < 3, name
            found += [f"{name} at {width}: {fault}" for fault in faults(view)]
    assert not found, "\n".join(found)

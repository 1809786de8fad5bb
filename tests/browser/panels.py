"""The side panel in a test's JupyterLab: built, shown, and looked into as a person does."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator

from scripts import panel as building
from tests.browser.lab import Notebook
from tests.browser.server import Lab
from tests.clock import LIMIT_S, until
from tests.scripted_monitor import Script, played

ROOT = Path(__file__).parents[2]


WIDEN = """width => {
    const split = window.jupyterapp.shell._hsplitPanel;
    const sizes = split.widgets.map(widget => widget.isVisible ? widget.node.offsetWidth : 0);
    const change = width - document.querySelector('.rlb-Panel').offsetWidth;
    sizes[sizes.length - 1] += change;
    sizes[sizes.length - 2] -= change;
    split.setRelativeSizes(sizes);
}"""


def built() -> None:
    """Have the panel of this checkout in this environment's JupyterLab; skips where there is no node to build it."""
    missing = building.why_no_node()
    if missing and not building.is_built(ROOT):
        pytest.skip(f"no side panel to test: {missing}")
    if not building.is_built(ROOT):
        building.build(ROOT)
    building.link(ROOT, Path(sys.prefix))


def scripted(lab: Lab, name: str, make: Callable[..., Script] = played) -> Script:
    """A session behind a real endpoint, where the server of `lab` looks for sessions."""
    folder = lab.state / "rlbench" / "sessions"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return make(name, folder / f"{name}.json")


class Panel:
    """The panel in a notebook's page, open."""

    def __init__(self, notebook: Notebook) -> None:
        self.notebook, self.page = notebook, notebook.page
        self.node = self.page.locator(".rlb-Panel")
        self.status = self.page.locator(".rlb-StatusItem")

    def open(self) -> Panel:
        """Show it, as the palette's command does."""
        self.command("open-panel")
        self.node.locator(".rlb-Overview").wait_for()
        return self

    def command(self, verb: str, /, **arguments: Any) -> None:
        """Begin a command of the panel; not awaited, since some ask a question first."""
        self.page.evaluate(
            "([id, args]) => { window.jupyterapp.commands.execute(id, args); }",
            [f"rlbench:{verb}", arguments],
        )

    def set(self, **settings: float) -> None:
        """The panel's settings, and that it looks twice a second: a test waits for many of its looks."""
        self.page.evaluate(
            "value => window.jupyterapp.serviceManager.settings.save('rlbench-lab:panel', value)",
            json.dumps({"refresh": 0.5} | settings),
        )

    def widen(self, width: float) -> None:
        """Draw the border beside it to where the panel is `width` pixels wide."""

        def drawn() -> bool:
            """Also again: what it takes from its neighbour, that gives when it was drawn."""
            self.page.evaluate(WIDEN, width)
            return abs(self.node.bounding_box()["width"] - width) < 2  # type: ignore[index]

        self.until(drawn)

    def session(self, name: str) -> Locator:
        """The block of one session."""
        return self.node.locator(f"[data-session={json.dumps(name)}]")

    def names(self) -> list[str]:
        """The sessions in the order they stand there."""
        return list(self.node.locator(".rlb-Session").evaluate_all("all => all.map(one => one.dataset.session)"))

    def wait(self, name: str, text: str | re.Pattern[str], seconds: float = LIMIT_S) -> None:
        """Wait until the block of a session says `text`."""
        wanted = text if isinstance(text, re.Pattern) else re.compile(re.escape(text))
        self.until(lambda: wanted.search(self.said(name)), seconds)

    def said(self, name: str) -> str:
        """What the block of a session says; empty where there is none."""
        texts = self.session(name).evaluate_all("all => all.map(one => one.innerText)")
        return " ".join(" ".join(texts).split())

    def press(self, name: str, verb: str) -> None:
        """Press one of a session's buttons once it can be pressed."""
        button = self.session(name).locator(f".rlb-Toolbar [data-verb={verb}][aria-disabled=false]")
        button.click()

    def until(self, true: Callable[[], object], seconds: float = LIMIT_S) -> None:
        """Wait until something is true, while the page goes on."""
        until(true, seconds, self.node.inner_text, lambda seconds: self.page.wait_for_timeout(1000 * seconds))


def sources(notebook: Notebook) -> list[str]:
    """The text of the notebook's cells."""
    return list(notebook._js("return cells.map(cell => cell.model.sharedModel.getSource());"))

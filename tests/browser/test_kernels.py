"""When a widget's button acts that is pressed while a cell runs: what each ipykernel release does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.browser import kernels
from tests.browser.lab import Notebook

pytestmark = pytest.mark.long

BUTTON = """
import asyncio, json, os, threading, time
import ipykernel, ipywidgets
clicks = []
button = ipywidgets.Button(description="press")
def clicked(_):
    clicks.append((time.monotonic(), threading.current_thread().name))
    open(acted, "w").close()
button.on_click(clicked)
display(button)
print("ipykernel", ipykernel.__version__)
"""
# a cell that is busy in one way or another until it is let go, and says when that was
BUSY = {
    "sleeping": "while not os.path.exists(free): time.sleep(0.05)",
    "computing": "while not os.path.exists(free): sum(range(1000))",
    "awaiting": "while not os.path.exists(free): await asyncio.sleep(0.05)",
}
CELL = "clicks.clear(); acted, free = {acted!r}, {free!r}; print('begun')\n{busy}\nended = time.monotonic()"
CLICKED = """
print("CLICK", json.dumps([{"during": at < ended, "thread": name.split("-")[0]} for at, name in clicks]))
"""
# During the cell or after it, and on which thread. Version 7.4 goes by the shell that last published: the cell's own.
AFTER, DURING, AT_ONCE = (False, "MainThread"), (True, "MainThread"), (True, "subshell")
WHEN = {
    "6.31.0": {"sleeping": AFTER, "computing": AFTER, "awaiting": AFTER},
    "7.3.0": {"sleeping": AT_ONCE, "computing": AT_ONCE, "awaiting": AT_ONCE},
    "7.4.0": {"sleeping": AFTER, "computing": AFTER, "awaiting": DURING},
}


@pytest.fixture(scope="module", params=kernels.VERSIONS)
def release(request, lab, kernel_names, browser):
    """A version of ipykernel, and a notebook on it with a button in its first cell."""
    with Notebook(lab, browser, [BUTTON], kernel=kernel_names[request.param]) as notebook:
        notebook.run(0)
        assert notebook.wait_text(0, "ipykernel").endswith(f"ipykernel {request.param}")
        yield request.param, notebook


@pytest.mark.parametrize("busy", list(BUSY))
def test_when_a_button_acts_that_is_pressed_while_a_cell_runs(release, busy, tmp_path: Path):
    version, notebook = release
    acted, free = tmp_path / "acted", tmp_path / "free"
    index = notebook.do(CELL.format(busy=BUSY[busy], acted=str(acted), free=str(free)), wait=False)
    notebook.wait_text(index, "begun")
    notebook.cell(0).get_by_role("button", name="press").click()
    assert notebook.prompt(index) == "[*]:"
    if WHEN[version][busy] == AFTER:
        notebook.page.wait_for_timeout(1000)  # for what must not happen there is no event
    else:
        notebook.until(acted.exists)
    free.touch()
    notebook.wait(index)
    told = notebook.do(CLICKED)
    notebook.wait_text(told, "CLICK")
    (click,) = json.loads(notebook.output(told).removeprefix("CLICK "))
    assert (click["during"], click["thread"]) == WHEN[version][busy]

"""The dashboard in a real JupyterLab: it moves and acts while a cell runs, and says so where it cannot."""

from __future__ import annotations

import copy
import json
import re
import time

import pytest

from tests.browser import kernels
from tests.browser.conftest import FAILED
from tests.browser.lab import Notebook
from tests.scripted_monitor import MIB, Script, played

SHOW = """
import time
import rlbench.notebook
from rlbench.notebook.dashboard.dashboard import Dashboard
Dashboard({name!r})
"""
HELD_UP = "time.sleep(600)"  # it is interrupted behind the test
HELD_UP_BY = "import os\nwhile not os.path.exists({file!r}): time.sleep(0.05)"


def scripted(lab, name: str) -> Script:
    """A session behind a real endpoint, beside the kernel: it outlives that, and the server's extension knows it."""
    folder = lab.state / "rlbench" / "sessions"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return played(name, folder / f"{name}.json")


class Stage:
    """A session, and a notebook that shows it in its first cell: the tests share them until one fails."""

    def __init__(self, lab, browser) -> None:
        self.lab, self.browser = lab, browser
        self.script = scripted(lab, "shown")
        self.state = copy.deepcopy(self.script.state)
        self.notebook: Notebook | None = None

    def open(self) -> Notebook:
        """The notebook, made where there is none."""
        if self.notebook is None:
            self.notebook = Notebook(self.lab, self.browser, [SHOW.format(name="shown")])
            self.notebook.run(0)
            live(self.notebook)
        return self.notebook

    def close(self) -> None:
        """Close the notebook; what is wrong in it by now is its last test's."""
        made, self.notebook = self.notebook, None
        if made is not None:
            made.close(check=False)


@pytest.fixture(scope="module")
def stage(lab, browser):
    """What the tests share, opened by the first."""
    made = Stage(lab, browser)
    yield made
    made.close()
    made.script.close()


@pytest.fixture
def script(stage):
    """The session as it was at first: a rollout runs."""
    made = stage.script
    made.state, made.slow_s = copy.deepcopy(stage.state), 0.0
    made.done.clear()
    return made


@pytest.fixture
def notebook(request, stage, script):
    """The notebook, showing that; what a test left running in it is interrupted, and after a failure it is anew."""
    opened = stage.open()
    opened.wait_text(0, "28/64 samples")
    yield opened
    if request.node.stash.get(FAILED, False):
        stage.close()
        return
    last = int(opened._js("return cells.length - 1;"))
    if opened.runs(last):
        opened.interrupt()
        opened.wait(last)
    try:
        opened.check()
    except AssertionError:
        stage.close()
        raise


def live(notebook: Notebook) -> None:
    """Wait until the live view stands there, with its memory drawn."""
    notebook.cell(0).locator(".rlb-live .rlb-panel-memory polygon").first.wait_for()


def grow(script: Script) -> str:
    """Memory goes up by 1 GiB per process, as a new sample; returns what `actor 0` then has, as it is shown."""
    last = script.memory[-1]
    resident = {name: size + 1024 * MIB for name, size in last["resident"].items()}
    script.memory.append(last | {"time": time.time(), "resident": resident, "owners": {}})
    return f"{resident[f'rlbench/{script.name}/actor/0'] / 1024 / MIB:.3g} GiB"


def control(notebook: Notebook, name: str, cell: int = 0):
    return notebook.cell(cell).get_by_role("button", name=re.compile(name))


def status(notebook: Notebook) -> str:
    return notebook.cell(0).locator(".rlb-status").inner_text()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_panel_is_drawn_in_both_themes(notebook, theme, pytestconfig):
    notebook.theme(theme)
    for said in (
        "step 42 · v42",
        "rollout 43 · 28/64 samples",
        "v41, 1 version behind",
        "actor 0",
        "✕ OOM",
        "p90",
        "truncated",
        "entropy",
        "grad norm",
        "3.1k tok/s",
        "cell total",
    ):
        notebook.wait_text(0, said)
    assert notebook.cell(0).get_by_role("img", name=re.compile("^memory: actor 0 2.02")).count() == 1
    assert notebook.cell(0).get_by_role("img", name=re.compile("^histogram of lengths of 64 samples")).count() == 1
    assert control(notebook, "optimizer of actor").get_attribute("aria-pressed") == "true"
    assert control(notebook, "^sync$").is_disabled()
    assert "rollout 43 runs" in control(notebook, "^sync$").get_attribute("title")
    assert notebook.cell(0).locator(".rlb-still").is_hidden(), "the numbers of a saved notebook show beside it"
    title = notebook.cell(0).locator(".rlb-head b").evaluate("node => getComputedStyle(node).color")
    bright = sum(map(int, re.findall(r"\d+", title)[:3])) / 3
    assert (bright > 170) == (theme == "dark"), title
    notebook.screenshot(pytestconfig.rootpath / "build" / "browser" / f"dashboard-{theme}.png", 0)


def test_it_moves_while_a_cell_runs(notebook, script):
    busy = notebook.do(HELD_UP, wait=False)
    script.state["running"][0]["progress"][0]["finished"] = 61
    grown = grow(script)
    notebook.wait_text(0, "61/64 samples")
    notebook.wait_text(0, grown)
    assert notebook.runs(busy)


def test_a_press_acts_while_a_cell_runs(notebook, script):
    busy = notebook.do(HELD_UP, wait=False)
    control(notebook, "pause").click()
    notebook.until(lambda: ("pause", {}) in script.done)
    notebook.wait_text(0, re.compile(r"pause: done · \d"))
    control(notebook, "resume").wait_for()
    control(notebook, "stop").click()
    notebook.until(lambda: ("stop", {}) in script.done)
    notebook.wait_text(0, "stop: rollout 43")
    assert notebook.runs(busy)


def test_without_the_servers_handlers_a_press_goes_to_the_kernel(notebook, script):
    notebook.page.route("**/rlbench/api/**", lambda route: route.fulfill(status=404, json={}))
    notebook.reload()
    live(notebook)
    control(notebook, "pause").click()
    notebook.until(lambda: ("pause", {}) in script.done)
    notebook.wait_text(0, "pause: done")
    busy = notebook.do(HELD_UP, wait=False)
    control(notebook, "resume").click()
    notebook.until(lambda: ("resume", {}) in script.done)  # a subshell hears it: ipykernel 7
    assert notebook.runs(busy)
    notebook.page.unroute("**/rlbench/api/**")
    notebook.errors[:] = [error for error in notebook.errors if "404" not in error]


def test_a_toggle_shows_what_was_measured_not_what_was_wished(notebook, script):
    script.state["running"], script.slow_s = [], 2.0
    toggle = control(notebook, "optimizer of actor")
    notebook.until(toggle.is_enabled)
    assert toggle.get_attribute("title") == "Offload optimizer of actor to host: frees 1.2 GiB"
    toggle.click()
    notebook.wait_text(0, "offload optimizer of actor …")
    assert toggle.get_attribute("aria-pressed") == "true" and "resident" in toggle.inner_text()
    notebook.until(lambda: toggle.get_attribute("aria-pressed") == "false")
    assert toggle.inner_text() == "optimizer ○ host" and "mod-active" not in toggle.get_attribute("class")
    notebook.wait_text(0, "optimizer of actor: now cpu")  # comes apart from the frame that shows it
    assert toggle.get_attribute("title") == "Make optimizer of actor resident again"


def test_what_others_wrote_stays_text(notebook, script):
    hostile = "<img src=x onerror='window.pwned=1'><script>window.pwned=1</script>\x1b[31m\u202e$x^2$"
    script.state["running"][0]["what"] = hostile
    script.state["engines"][0]["broken"] = hostile
    script.state["last_error"] = {"what": "train_step", "kind": "ValueError", "message": hostile, "time": 1.0}
    script.state["lengths"][-1]["rollout"] = hostile
    script.marks.append(
        {"time": script.memory[-1]["time"], "seconds": None, "what": "other", "label": hostile, "engine": ""}
    )
    grow(script)
    notebook.wait_text(0, "▶ <img src=x onerror=")
    notebook.wait_text(0, "⚠ <img src=x onerror=")
    notebook.wait_text(0, "train_step: ValueError: <img src=x onerror=")
    notebook.wait_text(0, "rollout <img src=x onerror=")
    assert notebook.cell(0).locator("img[src=x], script").count() == 0
    assert notebook.page.evaluate("window.pwned") is None


def test_what_the_monitor_refuses_is_said(notebook, script):
    script.state["running"] = []
    sync = control(notebook, "^sync$")
    notebook.until(sync.is_enabled)
    script.state["running"] = [{"id": "b", "what": "rollout 44", "engine": "inference", "since": 0, "progress": []}]
    notebook.cell(0).locator(".rlb-head").evaluate("""head => {
        const sync = [...head.closest('.rlb-dashboard').querySelectorAll('button')].find(b => /sync/.test(b.innerText));
        sync.disabled = false; sync.click();
    }""")
    notebook.wait_text(0, re.compile("rollout 44 runs; stop it first"))
    notebook.errors[:] = [error for error in notebook.errors if "409" not in error]


def test_after_a_reload_of_the_page_it_shows_again_and_moves(notebook, script):
    before = notebook.cell(0).locator(".rlb-panel-memory polygon").count()
    notebook.reload()
    live(notebook)
    assert notebook.cell(0).locator(".rlb-panel-memory polygon").count() == before, "the minutes before are drawn too"
    script.state["running"][0]["progress"][0]["finished"] = 50
    notebook.wait_text(0, "50/64 samples")


def test_a_saved_notebook_without_a_kernel_shows_the_numbers(notebook):
    saved = notebook.save()
    size = len(json.dumps([saved.cells[0].outputs, saved.metadata]))
    assert size < 200_000, f"a view adds {size} bytes"
    with notebook.reading(saved):
        for said in (
            "v41, 1 version behind",
            "optimizer ● resident",
            "truncated 6.25 %",
            "step 1.9 s = rollout 0.9",
        ):
            notebook.wait_text(0, said)
        assert notebook.cell(0).locator(".rlb-dashboard").count() == 0


def test_a_monitor_that_does_not_answer_makes_the_numbers_stale(notebook, script):
    script.stop()
    notebook.wait_text(0, re.compile(r"stale \d+ s: the monitor of session"))
    script.start()
    notebook.until(lambda: "stale" not in status(notebook))


def test_a_closed_session_leaves_its_last_numbers(notebook, lab):
    other = scripted(lab, "closing")
    index = notebook.do(SHOW.format(name="closing"))
    notebook.wait_text(index, "28/64 samples")
    other.close()
    notebook.wait_text(index, "session closing is closed: these are its last numbers")
    assert control(notebook, "stop", index).is_disabled() and "step 42" in notebook.output(index)
    assert "is closed" in control(notebook, "pause", index).get_attribute("title")


def test_a_kernel_that_died_is_noticed_and_presses_go_on_through_the_server(notebook, script):
    notebook.kill_kernel()
    notebook.accept_dialog("appears to have died")
    notebook.wait_text(0, re.compile(r"stale \d+ s: the kernel says nothing"))
    assert "28/64" in notebook.output(0), "the last numbers stay"
    control(notebook, "pause").click()
    notebook.until(lambda: ("pause", {}) in script.done)
    notebook.wait_text(0, "pause: done")


@pytest.mark.long
@pytest.mark.parametrize("version", kernels.VERSIONS)
def test_each_ipykernel_moves_during_a_cell_and_acts_or_says_when(open_notebook, lab, kernel_names, version, tmp_path):
    script = scripted(lab, f"matrix-{version}")
    notebook = open_notebook([SHOW.format(name=script.name)], kernel=kernel_names[version])
    notebook.page.route("**/rlbench/api/**", lambda route: route.fulfill(status=404, json={}))
    notebook.run(0)
    live(notebook)
    busy = notebook.do(HELD_UP_BY.format(file=str(tmp_path / "free")), wait=False)
    script.state["running"][0]["progress"][0]["finished"] = 61
    notebook.wait_text(0, "61/64 samples")
    pause = control(notebook, "pause")
    if version.startswith("6."):
        assert "takes effect when the cell ends" in pause.get_attribute("title")
        pause.click()
        notebook.wait_text(0, "pause: the kernel is busy; takes effect when the cell ends")
        assert notebook.runs(busy) and script.done == []
    else:
        pause.click()
        notebook.until(lambda: script.done)
        assert notebook.runs(busy)
    (tmp_path / "free").touch()
    notebook.wait(busy)
    notebook.wait_text(0, "pause: done")
    script.close()
    notebook.errors[:] = [error for error in notebook.errors if "404" not in error]

"""The side panel in a real JupyterLab: it answers whatever the kernel is doing, and never shows old numbers as new."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import time
from urllib.parse import parse_qs, urlsplit

import pytest

from rlbench.runtime import processes
from tests.browser.lab import Notebook
from tests.browser.panels import Panel, built, scripted, sources
from tests.scripted_monitor import MIB, Script

BUSY = {"sleeping": "import time; time.sleep(600)", "spinning": "while True: pass"}
HOSTILE = "<img src=x onerror='window.pwned=1'><script>window.pwned=1<;script>\x1b[31m\u202e$x^2$"


@pytest.fixture(scope="module")
def stage(lab, browser):
    """A session in the middle of its work, and a page with the panel open; the tests share them."""
    built()
    made = scripted(lab, "shown")
    with Notebook(lab, browser) as notebook:
        panel = Panel(notebook).open()
        panel.set()
        panel.wait("shown", "28/64 samples")
        yield made, panel, copy.deepcopy(made.state)
        # JupyterLab's own debugger, whose kernel was killed while it asked
        notebook.errors[:] = [error for error in notebook.errors if "debugger state" not in error]
    made.close()


@pytest.fixture
def script(stage):
    """The session as it was at first: a rollout runs."""
    made, _, state = stage
    made.state, made.slow_s = copy.deepcopy(state), 0.0
    made.done.clear()
    if made._endpoint is None:  # a test that failed left it silent
        made.start()
    return made


@pytest.fixture
def panel(stage, script):
    """The panel, showing that; what a test left running in the notebook is interrupted."""
    shown = stage[1]
    shown.wait("shown", "28/64 samples")
    yield shown
    notebook = shown.notebook
    last = int(notebook._js("return cells.length - 1;"))
    if last >= 0 and notebook.runs(last):
        notebook.interrupt()
        notebook.wait(last)


def grow(script: Script) -> str:
    """Memory goes up by 1 GiB per process; returns what the inference engine then has, as it is shown."""
    for engine in script.state["engines"]:
        for worker in engine["workers"]:
            worker["resident"] += 1024 * MIB
    return f"{script.state['engines'][-1]['workers'][0]['resident'] / 1024 / MIB:.3g} GiB"


def advance(script: Script, finished: int) -> None:
    script.state["running"][0]["progress"][0]["finished"] = finished


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_shows_a_session_in_both_themes(panel, theme, pytestconfig):
    panel.notebook.theme(theme)
    for said in (
        "running",
        "step 42 · v42",
        "rollout 43 · 28/64 samples · 5,120 tokens",
        "left",
        "actor fsdp2 ×2",
        "1.76 GiB",
        "optimizer ● resident",
        "v41, 1 version behind",
        "reward 0.",
        "length 118 tok",
    ):
        panel.wait("shown", said)
    block = panel.session("shown")
    assert block.get_by_role("img", name=re.compile("weights 800 MiB, .*optimizer")).count() == 1
    assert block.locator("polygon").count() > 4 and block.locator(".rlb-Curve polyline").count() == 2
    assert block.locator("progress").evaluate("node => node.value") == 28 / 64
    assert re.fullmatch(r"host\s.*GiB / .*GiB .*%", panel.node.locator(".rlb-Device").inner_text(), re.DOTALL)
    assert panel.node.get_by_role("meter", name=re.compile("^host")).count() == 1
    assert re.search(r"RL .*GiB · rollout 43 · 44 %", panel.status.inner_text())
    name = block.locator("header .rlb-name").evaluate("node => getComputedStyle(node).color")
    bright = sum(map(int, re.findall(r"\d+", name)[:3])) / 3
    assert (bright > 170) == (theme == "dark"), name
    panel.notebook.screenshot(pytestconfig.rootpath / "build" / "browser" / f"panel-{theme}.png")


@pytest.mark.parametrize("busy", BUSY)
def test_it_moves_and_acts_while_the_kernel_is_busy(panel, script, busy):
    cell = panel.notebook.do(BUSY[busy], wait=False)
    panel.until(lambda: panel.notebook.prompt(cell) == "[*]:")
    advance(script, 61)
    panel.wait("shown", "61/64 samples")
    panel.wait("shown", grow(script))
    panel.press("shown", "pause")
    panel.wait("shown", "paused")
    panel.press("shown", "resume")
    panel.wait("shown", "running")
    panel.press("shown", "stop")
    panel.wait("shown", "stop: done")
    panel.wait("shown", "idle")
    assert [verb for verb, _ in script.done] == ["pause", "resume", "stop"]
    assert panel.notebook.runs(cell)


def test_it_is_there_after_a_reload_of_the_page_in_the_middle_of_a_cell(panel, script, lab):
    notebook = panel.notebook
    notebook.do(BUSY["spinning"], wait=False)
    panel.until(lambda: "rlbench-sessions" in json.dumps(lab.ask(f"lab/api/workspaces/{notebook.name}")))
    notebook.reload()
    assert panel.node.is_visible(), "the layout was not restored"
    panel.wait("shown", "28/64 samples")
    advance(script, 50)
    panel.wait("shown", "50/64 samples")
    pid = notebook.kernel_pid()
    os.kill(pid, signal.SIGINT)


def test_it_goes_on_while_the_kernel_restarts_and_after_it_died(panel, script):
    panel.notebook.restart_kernel()
    advance(script, 51)
    panel.wait("shown", "51/64 samples")
    panel.notebook.kill_kernel()
    script.state["driver"]["alive"] = False
    advance(script, 52)
    panel.wait("shown", "52/64 samples")
    panel.wait("shown", "kernel gone")
    panel.notebook.accept_dialog("appears to have died")
    panel.press("shown", "stop")
    panel.until(lambda: ("stop", {}) in script.done)


def test_a_session_that_nobody_drives_comes_first(panel, lab):
    other = scripted(lab, "zzz-orphan")
    panel.until(lambda: panel.names() == ["shown", "zzz-orphan"])
    other.state["driver"]["alive"] = False
    panel.until(lambda: panel.names() == ["zzz-orphan", "shown"])
    other.close()
    panel.until(lambda: panel.names() == ["shown"])


def test_numbers_that_are_old_say_how_old(panel, script):
    script.stop()
    panel.wait("shown", re.compile(r"stale \d+ s"))
    panel.wait("shown", "the monitor of session 'shown' does not answer")
    assert "28/64" in panel.said("shown")
    panel.until(lambda: "stale" in panel.status.inner_text())
    faded = panel.session("shown").locator(".rlb-numbers").first
    assert float(faded.evaluate("node => getComputedStyle(node).opacity")) < 1
    script.start()
    trouble = panel.session("shown").locator(".rlb-Trouble")
    panel.until(lambda: "stale" not in panel.said("shown") and trouble.count() == 0)


def test_numbers_are_old_too_where_the_server_does_not_answer(panel):
    panel.page.route("**/rlbench/api/**", lambda route: route.abort())
    try:
        panel.wait("shown", re.compile(r"stale \d+ s"))
        assert "the Jupyter server does not answer, last heard" in panel.node.inner_text()
    finally:
        panel.page.unroute("**/rlbench/api/**")
    panel.until(lambda: "stale" not in panel.node.inner_text())
    panel.notebook.errors[:] = [error for error in panel.notebook.errors if "ERR_FAILED" not in error]


def test_a_session_whose_monitor_ended_is_gone_and_can_be_killed(panel, lab):
    lost = scripted(lab, "lost")
    panel.wait("lost", "28/64 samples")
    lost.stop()
    record = json.loads(lost.file.read_text())
    lost.file.write_text(json.dumps(record | {"pid": 2**22 - 1}))
    panel.wait("lost", "session gone")
    assert panel.names()[0] == "lost"
    panel.press("lost", "kill")
    cancel = panel.page.locator(".jp-Dialog", has_text="Kill session lost?")
    cancel.locator("button", has_text="Cancel").click()
    assert lost.file.exists()
    panel.press("lost", "kill")
    panel.notebook.accept_dialog("Kill session lost?")
    panel.until(lambda: not lost.file.exists())
    panel.until(lambda: panel.names() == ["shown"])


def test_no_session_teaches_how_to_begin_one(panel, script):
    script.close()
    panel.until(lambda: "No session" in panel.node.inner_text())
    assert 'rb.Session("tiny")' in panel.node.inner_text()
    panel.until(lambda: panel.status.inner_text() == "")
    script.start()
    panel.wait("shown", "28/64 samples")


@pytest.fixture
def hostile_file(lab):
    """A session's file that somebody gave a name which is markup."""
    file = lab.state / "rlbench" / "sessions" / f"{HOSTILE}.json"
    file.write_text(
        json.dumps(
            {
                "name": HOSTILE,
                "cluster": HOSTILE,
                "pid": os.getpid(),
                "boot": processes.boot_id(),
                "started": processes.start_time(os.getpid()),
                "url": "http://127.0.0.1:9",
                "token": "t",
            }
        )
    )
    yield file
    file.unlink()


def test_what_others_wrote_stays_text(panel, script, hostile_file):
    script.state["model"] = script.state["running"][0]["what"] = HOSTILE
    script.state["engines"][0] |= {"name": HOSTILE, "executor": HOSTILE, "broken": HOSTILE}
    script.state["last_error"] = {"what": HOSTILE, "kind": "ValueError", "message": HOSTILE, "time": 1.0}
    for said in ("⚠ <img src=x onerror=", "▶ <img src=x onerror=", "ValueError: <img src=x onerror="):
        panel.wait("shown", said)
    panel.until(lambda: panel.node.locator(".rlb-Session").count() == 2)
    panel.until(lambda: "<img src=x" in panel.status.inner_text())
    panel.command("attach", name=HOSTILE)
    panel.until(lambda: [source for source in sources(panel.notebook) if "<img" in source])
    cell = next(source for source in sources(panel.notebook) if "<img" in source)
    assert HOSTILE in compile(cell, "cell", "exec").co_consts
    assert panel.page.locator("img[src=x]").count() == 0
    assert panel.page.evaluate("window.pwned") is None


def test_a_chip_moves_a_part_and_shows_what_was_measured(panel, script):
    script.state["running"] = []
    chip = panel.session("shown").get_by_role("button", name=re.compile(r"^optimizer: resident.*of actor"))
    panel.until(lambda: chip.get_attribute("aria-disabled") == "false")
    assert chip.get_attribute("title") == "Offload optimizer of actor to host: frees 1.2 GiB"
    chip.click()
    panel.until(lambda: script.done == [("offload", {"engine": "actor", "parts": ["optimizer"]})])
    panel.wait("shown", "optimizer ○ host")
    panel.wait("shown", "offload optimizer of actor: done")


def test_what_the_monitor_refuses_is_said(panel, script):
    panel.command("sync", name="shown")
    panel.wait("shown", re.compile(r"sync: .*rollout 43"))
    panel.notebook.errors[:] = [error for error in panel.notebook.errors if "409" not in error]


def test_the_keyboard_alone_stops_a_rollout(panel, script):
    panel.command("open-panel")
    panel.until(lambda: panel.page.evaluate("document.activeElement.dataset.session") == "shown")
    panel.page.keyboard.press("Tab")
    assert panel.page.evaluate("document.activeElement.dataset.verb") == "stop"
    panel.page.keyboard.press("ArrowRight")
    assert panel.page.evaluate("document.activeElement.dataset.verb") == "pause"
    panel.page.keyboard.press("ArrowLeft")
    panel.page.keyboard.press("Enter")
    panel.until(lambda: ("stop", {}) in script.done)


def test_the_commands_are_in_the_palette_and_its_settings_in_the_settings(panel, script):
    labels = panel.page.evaluate(
        "[...window.jupyterapp.commands.listCommands()].filter(id => id.startsWith('rlbench:'))"
        ".map(id => window.jupyterapp.commands.label(id))"
    )
    assert "Show RL Sessions" in labels and "New RL session" in labels and len(labels) == 14 and all(labels)
    panel.page.evaluate("window.jupyterapp.commands.execute('apputils:activate-command-palette')")
    panel.page.keyboard.type("RL Sessions")
    palette = panel.page.locator(".lm-CommandPalette-itemLabel", has_text="Show RL Sessions")
    palette.first.wait_for()
    panel.page.keyboard.press("Escape")

    asked: list[str] = []
    panel.page.on("request", lambda request: asked.append(request.url) if "/look?" in request.url else None)
    panel.set(history=0.5)
    panel.notebook.reload()  # until JupyterLab has opened the page's notebook, which takes the front when it does
    panel.wait("shown", "28/64 samples")
    panel.until(lambda: any("since" in url for url in asked))
    since = next(float(parse_qs(urlsplit(url).query)["since"][0]) for url in asked if "since" in url)
    assert time.time() - since < 120, "half a minute was asked for, not three"
    panel.set()


def test_attach_inserts_the_cell_that_attaches(panel):
    notebook = panel.notebook
    notebook._js("panel.activate(); panel.content.activeCellIndex = 0;")
    notebook.add("1 + 1")
    panel.press("shown", "attach")
    panel.until(lambda: any('session = rb.attach("shown")' in source for source in sources(notebook)))


def test_the_attached_cell_comes_to_the_front_once_and_takes_it_from_nobody_later(panel):
    """What the panel itself brings to the front counts: JupyterLab brings things there in its own time."""
    panel.notebook._js("panel.activate();")
    attached = lambda: sum('session = rb.attach("shown")' in source for source in sources(panel.notebook))  # noqa: E731
    before = attached()
    panel.notebook._js(
        "const shell = window.jupyterapp.shell, activate = shell.activateById.bind(shell); window.fronts = [];"
        "const attached = () => panel.content.widgets"
        ".filter(cell => cell.model.sharedModel.getSource().includes('session = rb.attach(\"shown\")')).length;"
        "shell.activateById = id => { window.fronts.push([attached(), new Error().stack]); return activate(id); };"
    )
    panel.press("shown", "attach")
    panel.until(lambda: attached() > before)
    panel.page.evaluate("() => window.jupyterapp.commands.execute('launcher:create').then(() => {})")
    try:
        panel.page.locator(".jp-Launcher").wait_for()
        panel.page.wait_for_timeout(1500)  # for what must not happen there is no event
        fronts = panel.page.evaluate("() => window.fronts")
        cells = [count for count, stack in fronts if "/lab/extensions/rlbench-lab/" in stack]
        assert cells == [before], "once, and before the cell was there"
    finally:
        launchers = "[...window.jupyterapp.shell.widgets('main')].filter(w => w.id.startsWith('launcher'))"
        panel.page.evaluate(f"() => {launchers}.forEach(w => w.close())")


def test_the_launchers_card_opens_the_starter_notebook(panel, lab):
    panel.page.evaluate("() => { window.jupyterapp.commands.execute('launcher:create'); }")
    panel.page.locator(".lm-TabBar-tabLabel", has_text="Launcher").click()
    panel.page.locator(".jp-LauncherCard", has_text="New RL session").first.click()
    panel.page.locator(".lm-TabBar-tabLabel", has_text="rl-session.ipynb").wait_for()
    written = json.loads((lab.root / "rl-session.ipynb").read_text())
    code = ["".join(cell["source"]) for cell in written["cells"] if cell["cell_type"] == "code"]
    for source in code:
        compile(source, "cell", "exec")
    assert any("rb.Session(" in source for source in code)
    panel.command("new-session")
    panel.page.locator(".lm-TabBar-tabLabel", has_text="rl-session-1.ipynb").wait_for()

"""The side panel as on a JupyterHub, below a user's base url: with real engines, and in another language."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.request

import nbformat
import pytest

from tests.browser import language_pack
from tests.browser.panels import ROOT, Panel, built, scripted, sources
from tests.browser.server import Lab

BASE = "/user/ada/"
ENDLESS = "session.rollout(tasks.prompts(64), n=64, max_tokens=1800, ignore_eos=True)"


@pytest.fixture(scope="module")
def lab(lab, tmp_path_factory):
    """A server as a JupyterHub starts it, with a language pack; its kernels' cluster is that of the other one."""
    folder = tmp_path_factory.mktemp("hub")
    language_pack.write(folder / "site", ROOT / "extension")
    server = Lab(folder, base_url=BASE, state=lab.state, PYTHONPATH=str(folder / "site"))
    yield server
    server.close()


def status_of(url, **request):
    """The status with which a request is answered."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, **request), timeout=120) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        return refused.code


def test_below_a_users_base_url_it_acts_for_who_is_logged_in_alone(lab, open_notebook):
    built()
    script = scripted(lab, "shown")
    notebook = open_notebook(start_kernel=False)
    panel = Panel(notebook).open()
    asked = []
    panel.page.on("request", lambda request: asked.append(request.url) if "/rlbench/" in request.url else None)
    panel.wait("shown", "28/64 samples")
    panel.press("shown", "stop")
    panel.wait("shown", "stop: done")
    assert script.done == [("stop", {})]
    assert asked and all(url.startswith(f"{lab.url}rlbench/api/") for url in asked) and BASE in lab.url

    command = f"{lab.url}rlbench/api/sessions/shown/command"
    assert status_of(command, data=b'{"verb": "pause"}') == 403
    assert status_of(f"{lab.url}rlbench/api/sessions") == 403
    pause = "url => fetch(url, {method: 'POST', body: '{\"verb\": \"pause\"}'}).then(answer => answer.status)"
    assert panel.page.evaluate(pause, command) == 403, "a page that does not send the XSRF token"
    notebook.errors[:] = [error for error in notebook.errors if "403" not in error]
    assert script.done == [("stop", {})]
    script.close()


@pytest.fixture
def translated(lab):
    """The server's language is another one; afterwards the default again."""
    plugin = "lab/api/settings/@jupyterlab/translation-extension:plugin"
    for locale in (language_pack.LOCALE, "default"):
        lab.ask(plugin, method="PUT", body={"raw": json.dumps({"locale": locale})})
        if locale != "default":
            yield


def test_it_speaks_the_language_of_a_language_pack(lab, open_notebook, translated):
    built()
    scripts = [scripted(lab, name) for name in ("one", "three", "five")]
    for script, behind in zip(scripts, (1, 3, 5), strict=True):
        script.state["engines"][-1]["state"]["version"] = script.state["version"] - behind
    panel = Panel(open_notebook(start_kernel=False)).open()
    panel.wait("one", "⚠ «one v41, 1 version behind»")
    panel.wait("three", "⚠ «few v39, 3 versions behind»")
    panel.wait("five", "⚠ «many v37, 5 versions behind»")
    for said in ("«running»", "«28/64 samples · 5,120 tokens»", "«optimizer» ● «resident»", "«reward» 0."):
        panel.wait("one", said)
    assert panel.status.inner_text().startswith("«RL «few 3 sessions» · ")
    tooltip = panel.session("one").locator("[data-verb=stop]").get_attribute("title")
    assert tooltip == "«Stop rollout 43: what is finished is kept»"
    panel.page.locator("[role=tab][title='«RL sessions»']").wait_for()

    panel.page.evaluate("() => { window.jupyterapp.commands.execute('launcher:create'); }")
    section = panel.page.locator(".jp-Launcher-section", has_text=language_pack.OF_LAB["Notebook"])
    section.locator(".jp-LauncherCard", has_text="«New RL session»").wait_for()
    schema = lab.ask("lab/api/settings/rlbench-lab:panel")["schema"]
    assert (schema["title"], schema["properties"]["refresh"]["title"]) == ("«RL sessions»", "«Refresh»")
    for script in scripts:
        script.close()


@pytest.mark.engine
def test_a_real_session_from_the_starter_notebook_to_its_end(lab, open_notebook, pytestconfig):
    built()
    starter = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in starter_code()])
    notebook = open_notebook(notebook=starter)
    panel = Panel(notebook).open()
    others = set(panel.names())
    for index in range(len(starter.cells)):
        notebook.run(index, timeout=200)
        assert notebook.error(index) == "", notebook.output(index)
    panel.until(lambda: set(panel.names()) - others)
    (name,) = set(panel.names()) - others
    panel.wait(name, "step 1 · v")
    panel.wait(name, re.compile(r"inference vllm.×1 v\d.*MiB|inference vllm.×1 v\d.*GiB"))
    panel.wait(name, "reward 0")

    busy = notebook.do(ENDLESS, wait=False)
    panel.wait(name, re.compile(r"rollout \d+ · 0/4,?096 samples · [1-9]"))
    panel.until(lambda: panel.session(name).locator("polygon").count() > 2)
    notebook.screenshot(pytestconfig.rootpath / "build" / "browser" / "panel-session.png")
    panel.press(name, "stop")
    notebook.wait(busy, 60)
    assert "Stopped" in notebook.output(busy)
    panel.wait(name, "idle")

    chip = panel.session(name).get_by_role("button", name=re.compile("^KV cache: resident"))
    panel.until(lambda: chip.get_attribute("aria-disabled") == "false")
    chip.click()
    panel.wait(name, "KV cache ◌ released", 60)
    panel.session(name).get_by_role("button", name=re.compile("^KV cache: released")).click()
    panel.wait(name, "KV cache ● resident", 60)

    spinning = notebook.do("while True: pass", wait=False)
    panel.until(lambda: notebook.prompt(spinning) == "[*]:")
    notebook.kill_kernel()
    panel.wait(name, "kernel gone")
    notebook.accept_dialog("appears to have died")
    notebook.wait_for_kernel()
    notebook._js("panel.content.activeCellIndex = cells.length - 1;")
    panel.press(name, "attach")
    panel.until(lambda: "rb.attach" in sources(notebook)[-1])
    notebook.run(len(sources(notebook)) - 1)
    panel.wait(name, "idle")

    panel.press(name, "close")
    notebook.accept_dialog(f"Close session {name}?")
    panel.until(lambda: name not in panel.names(), 60)


def starter_code() -> list[str]:
    """The starter notebook's code, as the launcher's card writes it."""
    built()
    command = [
        "node",
        "--input-type=module",
        "-e",
        (
            "import('./lib/starter.js').then(({starterNotebook}) => "
            "console.log(JSON.stringify(starterNotebook({__: text => text}))))"
        ),
    ]
    done = subprocess.run(command, cwd=ROOT / "extension", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [cell["source"] for cell in json.loads(done.stdout)["cells"] if cell["cell_type"] == "code"]

"""The side panel as on a JupyterHub, below a user's base url: for who is logged in, and in another language."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest

from tests.browser import language_pack
from tests.browser.conftest import HUB_URL
from tests.browser.panels import Panel, built, scripted


@pytest.fixture(scope="module")
def server(hub):
    """Notebooks open there."""
    return hub


def status_of(url, **request):
    """The status with which a request is answered."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, **request), timeout=120) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        return refused.code


def test_below_a_users_base_url_it_acts_for_who_is_logged_in_alone(hub, open_notebook):
    built()
    script = scripted(hub, "shown")
    notebook = open_notebook(start_kernel=False)
    panel = Panel(notebook).open()
    asked = []
    panel.page.on("request", lambda request: asked.append(request.url) if "/rlbench/" in request.url else None)
    panel.wait("shown", "28/64 samples")
    panel.press("shown", "stop")
    panel.wait("shown", "stop: done")
    assert script.done == [("stop", {})]
    assert asked and all(url.startswith(f"{hub.url}rlbench/api/") for url in asked) and HUB_URL in hub.url

    command = f"{hub.url}rlbench/api/sessions/shown/command"
    assert status_of(command, data=b'{"verb": "pause"}') == 403
    assert status_of(f"{hub.url}rlbench/api/sessions") == 403
    pause = "url => fetch(url, {method: 'POST', body: '{\"verb\": \"pause\"}'}).then(answer => answer.status)"
    assert panel.page.evaluate(pause, command) == 403, "a page that does not send the XSRF token"
    notebook.errors[:] = [error for error in notebook.errors if "403" not in error]
    assert script.done == [("stop", {})]
    script.close()


@pytest.fixture
def translated(hub):
    """The server's language is another one; afterwards the default again."""
    plugin = "lab/api/settings/@jupyterlab/translation-extension:plugin"
    for locale in (language_pack.LOCALE, "default"):
        hub.ask(plugin, method="PUT", body={"raw": json.dumps({"locale": locale})})
        if locale != "default":
            yield


def test_it_speaks_the_language_of_a_language_pack(hub, open_notebook, translated):
    built()
    scripts = [scripted(hub, name) for name in ("one", "three", "five")]
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
    schema = hub.ask("lab/api/settings/rlbench-lab:panel")["schema"]
    assert (schema["title"], schema["properties"]["refresh"]["title"]) == ("«RL sessions»", "«Refresh»")
    for script in scripts:
        script.close()

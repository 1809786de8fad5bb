"""Views of real sessions in a real page, as on a JupyterHub: the dashboard, forks, chats, an endpoint, the panel.

They share a page, its kernel and the cluster that this starts: to import and start these takes as long as a test. Each
has a session of its own.
"""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from rlbench.notebook.live.live_view import works_while_busy
from tests.browser.layout import faults
from tests.browser.panels import ROOT, Panel, built, sources

pytestmark = pytest.mark.engine
START = """
import sys; sys.path.insert(0, {root!r})
import rlbench as rb
from rlbench.tiny import tasks
"""
SESSION = 'session = rb.Session("tiny", name={name!r}, train={{"lr": 1e-4}})'
STEP = """
rollouts = session.rollout(tasks.prompts(8), n=4, max_tokens=12)
session.train_step(rollouts.score(tasks.reward).batch(advantage=rb.rl.group_normalized()))
_ = session.sync_weights()
"""
SAMPLED = """
rollouts = session.rollout(tasks.prompts(3), n=3, max_tokens=12, ignore_eos=True, temperature=2.0, progress=False)
rollouts = rollouts.score(lambda rollout: float(rollout.text.count("1")))
rollouts
"""
ENDLESS = "session.rollout(tasks.prompts(64), n=64, max_tokens=1800, ignore_eos=True)"
HELD_UP = "import time\nprint('begun')\nwhile True: time.sleep(0.05)"


@pytest.fixture(scope="module")
def server(hub):
    """Notebooks open there."""
    return hub


@pytest.fixture
def notebook(take):
    """The notebook that these tests share."""
    return take()


def begin(notebook, name):
    """Make the session of a test."""
    index = notebook.do(SESSION.format(name=name), timeout=200)
    assert notebook.error(index) == ""


def press(notebook, *keys):
    for key in keys:
        notebook.page.keyboard.press(key)


def test_the_dashboard_follows_a_session_acts_on_it_and_sees_it_close(notebook, pytestconfig):
    begin(notebook, "seen")
    shown = notebook.do("session.dashboard()")
    notebook.wait_text(shown, "No steps yet")
    notebook.do(STEP * 3)
    notebook.wait_text(shown, "step 3 · v3")
    notebook.wait_text(shown, re.compile(r"reward\s+0"))

    toggle = notebook.cell(shown).get_by_role("button", name=re.compile("optimizer of actor"))
    notebook.until(toggle.is_enabled)
    toggle.click()
    notebook.until(lambda: toggle.inner_text() == "optimizer ○ host")
    toggle.click()
    notebook.until(lambda: toggle.inner_text() == "optimizer ● resident")

    endless = notebook.do(ENDLESS, wait=False)
    notebook.wait_text(shown, re.compile(r"rollout \d+ · 0/4096 samples · [1-9]"))
    notebook.screenshot(pytestconfig.rootpath / "build" / "browser" / "dashboard-session.png", shown)
    notebook.cell(shown).get_by_role("button", name=re.compile("stop")).click()
    notebook.wait(endless)
    assert "Stopped" in notebook.output(endless)
    notebook.wait_text(shown, re.compile(r"stop: .*done"))  # nothing is asked any more of the monitor that ends next
    notebook.do("session.close()")
    notebook.wait_text(shown, "session seen is closed: these are its last numbers")


def test_a_click_on_a_token_continues_from_it_and_the_continuations_stand_below(notebook, repository):
    begin(notebook, "forks")
    made = notebook.do(SAMPLED)
    cell, said = notebook.cell(made), notebook.cell(made).locator(".forksaid")
    cell.locator(".rlbv .row .t").first.wait_for()

    def waited(pattern):
        notebook.until(lambda: re.search(pattern, said.inner_text()), what=lambda: said.inner_text())

    form, row = cell.locator(".rlbv .fork"), cell.locator(".rlbv .row").first
    before = cell.locator(".rlbv").bounding_box()
    number = int(row.get_attribute("data-i"))
    row.locator("[data-t='4']").click()
    cell.get_by_text(re.compile(r"Continue from token 4 of completion \d of prompt \d")).wait_for()
    notebook.until(lambda: form.locator(".call").inner_text() == f"rollouts.fork({number}, at=4, n=16)")
    assert cell.locator(".rlbv").bounding_box() == before, "the page moved"
    form.get_by_label("n", exact=True).fill("4")
    form.get_by_role("button", name="continue").click()
    branch = cell.locator(".rlbv .branch")
    branch.wait_for()
    waited(r"4 continuations · value \S+ ± \S+ · in a cell: rollouts\.tree")
    assert re.search(r"↳\s*from token 4 of completion \d\s+4 continuations\s+value", branch.inner_text())
    assert row.locator(".t.forked").get_attribute("data-t") == "4" and row.locator(".t.cursor").count() == 1
    assert cell.locator(".rlbv .item").nth(2).get_attribute("class").startswith("item branch")
    below = cell.locator(".rlbv .row[aria-level='4']")
    assert below.count() == 4 and below.first.locator(".t.shared").count() == 4
    notebook.screenshot(repository / "build" / "browser" / "fork-light.png", made)
    notebook.theme("dark")
    notebook.screenshot(repository / "build" / "browser" / "fork-dark.png", made)
    same = notebook.do(f"print(rollouts.tree.texts == rollouts.fork({number}, at=4, n=4).texts, rollouts.tree.samples)")
    assert "True 13" in notebook.output(same)

    # by the keyboard, with a text, in what was continued, while a cell runs
    busy = notebook.do(HELD_UP, wait=False)
    notebook.wait_text(busy, "begun")
    cell.locator(".rlbv .list").focus()
    press(notebook, "Home", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight", "Tab")
    press(notebook, "ControlOrMeta+a", "3", "Tab", "9", "9", "Enter")
    if not works_while_busy():
        notebook.interrupt()
    notebook.until(lambda: branch.count() == 2)
    waited("3 continuations")
    assert '"99"' in branch.nth(1).inner_text() and cell.locator(".rlbv .row[aria-level='6']").count() == 3
    if works_while_busy():
        assert notebook.runs(busy)
        notebook.interrupt()
    notebook.wait(busy)
    notebook.screenshot(repository / "build" / "browser" / "fork-deeper-dark.png", made)

    # stopped, refused, and in the saved notebook
    form.get_by_label("text").fill("")
    row.locator("[data-t='2']").click()
    form.get_by_label("n", exact=True).fill("20000")
    form.get_by_role("button", name="continue").click()
    form.get_by_role("button", name="stop").click()
    waited("^stopped")
    notebook.do("session.close()")
    form.get_by_label("n", exact=True).fill("2")
    form.get_by_role("button", name="continue").click()
    waited("session 'forks' is closed")
    assert cell.locator(".forksaid.bad").count() == 1
    assert "↳ from token" in str(notebook.save().cells[made].outputs)


def test_a_chat_goes_on_in_the_page_and_a_cell_takes_what_came_of_it(notebook, repository):
    begin(notebook, "chats")
    made = notebook.do("chat = session.chat(n=2, max_tokens=10, ignore_eos=True, temperature=2.0)\nchat")
    cell = notebook.cell(made)
    field, said = cell.locator(".rlbc textarea"), cell.locator(".rlbc .said")
    answers = cell.locator(".rlbc .answer:not(.growing)")
    field.fill("sort 52143")
    field.press("Enter")
    notebook.until(lambda: answers.count() == 2, what=lambda: said.inner_text())
    notebook.until(lambda: cell.locator(".rlbc .facts").inner_text() == "1 turn")
    first, second = (answers.nth(i).bounding_box() for i in (0, 1))
    assert first["y"] == second["y"] and second["x"] >= first["x"] + first["width"], "side by side"
    assert field.input_value() == ""

    # preferred, and what a cell does with it
    answers.nth(1).get_by_role("button", name="prefer").click()
    notebook.until(lambda: cell.locator(".rlbc .answer.chosen").count() == 1)
    code = cell.locator(".rlbc .code").inner_text()
    assert code.startswith("session.train_step(rb.data.pairs(chat.now.pairs, session.tokenizer)")
    stepped = notebook.do(f"done = {code}\nprint(done['grad_norm'] > 0, session.sync_weights().version)")
    assert "True 1" in notebook.output(stepped)
    cell.get_by_role("button", name="again").click()
    notebook.until(lambda: answers.count() == 4)
    assert re.findall(r"policy v\d", " ".join(answers.locator(".head").all_inner_texts())) == [
        *["policy v0"] * 2,
        *["policy v1"] * 2,
    ]
    for theme in ("light", "dark"):
        notebook.theme(theme)
        notebook.screenshot(repository / "build" / "browser" / f"chat-{theme}.png", made)
        assert faults(cell.locator(".rlbc")) == [], theme

    # its tokens, forked below
    answers.nth(2).get_by_role("button", name="tokens").click()
    cell.locator(".rlbv .row .t").first.wait_for()
    cell.locator(".rlbv .row").first.locator("[data-t='4']").click()
    cell.locator(".rlbv .fork").get_by_label("n", exact=True).fill("3")
    cell.locator(".rlbv .fork").get_by_role("button", name="continue").click()
    notebook.until(lambda: "3 continuations" in cell.locator(".rlbv .forksaid").inner_text())
    notebook.screenshot(repository / "build" / "browser" / "chat-tokens-dark.png", made)
    answers.nth(2).get_by_role("button", name="tokens").click()
    cell.locator(".rlbv").wait_for(state="detached")

    # beside a running cell, in reply to another answer; stopped; in the saved notebook
    busy = notebook.do(HELD_UP, wait=False)
    notebook.wait_text(busy, "begun")
    answers.nth(0).get_by_role("button", name="reply").click()
    assert field.get_attribute("placeholder") == "say something to answer 0"
    field.fill("and <b>871</b>?")
    field.press("Enter")
    if not works_while_busy():
        notebook.interrupt()
    notebook.until(lambda: cell.locator(".rlbc .facts").inner_text().startswith("2 turns · "))
    if works_while_busy():
        assert notebook.runs(busy)
        notebook.interrupt()
    notebook.wait(busy)
    same = notebook.do("print(len(chat.now.messages), len(chat.now.answers), len(chat.messages))")
    assert "3 2 0" in notebook.output(same)
    assert "and &lt;b&gt;871&lt;/b&gt;?" in str(notebook.save().cells[made].outputs)
    notebook.do("session.close()")
    cell.get_by_role("button", name="again").click()
    notebook.until(lambda: "session 'chats' is closed" in said.inner_text(), what=lambda: said.inner_text())


def test_the_counts_of_an_endpoint_are_told_where_its_card_stands(notebook, repository):
    begin(notebook, "asked")
    card = notebook.do("import openai\nendpoint = session.endpoint()\nendpoint")
    notebook.wait_text(card, "0 calls")
    notebook.do(
        "client = openai.OpenAI(base_url=endpoint.run('a'), api_key=endpoint.key)\n"
        "for _ in range(2):\n"
        "    chat = [{'role': 'user', 'content': 'sort 21'}]\n"
        "    client.chat.completions.create(model='policy', messages=chat, max_tokens=4)"
    )
    notebook.wait_text(card, "2 calls")
    notebook.screenshot(repository / "build" / "browser" / "endpoint.png", card)
    notebook.do("endpoint.close()")
    notebook.wait_text(card, "session.endpoint() opens it again")
    notebook.do("session.close()")


def test_a_real_session_from_the_starter_notebook_to_its_end(notebook, pytestconfig):
    built()
    panel = Panel(notebook).open()
    others = set(panel.names())
    for code in starter_code():
        index = notebook.do(code, timeout=200)
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

"""A chat in a real page: said, watched, preferred, forked, beside running cells, and read in the saved notebook."""

from __future__ import annotations

import re

import pytest

from rlbench.notebook.live.live_view import works_while_busy
from tests.browser.lab import Notebook
from tests.browser.layout import faults

pytestmark = pytest.mark.engine
ENGINE = """
import sys; sys.path.insert(0, {root!r})
import rlbench as rb
session = rb.Session("tiny", name="chats")
"""


def test_a_chat_goes_on_in_the_page_and_a_cell_takes_what_came_of_it(lab, browser, repository):
    with Notebook(lab, browser, [ENGINE.format(root=str(repository))]) as notebook:
        notebook.run(0)
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
        busy = notebook.do("import time\nprint('begun')\nwhile True: time.sleep(0.05)", wait=False)
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
        notebook.check()


def test_the_counts_of_an_endpoint_are_told_where_its_card_stands(lab, browser, repository):
    with Notebook(lab, browser, [ENGINE.format(root=str(repository))]) as notebook:
        notebook.run(0)
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

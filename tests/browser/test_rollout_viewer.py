"""The rollout viewer in a real page: it draws in both themes, its controls and keys act, hostile text stays text."""

from __future__ import annotations

import os
import re
import signal

import pytest

from rlbench.notebook.live.live_view import works_while_busy
from tests.data.written import sorting, spelling, stepped, written

START = """
import sys; sys.path.insert(0, {root!r})
import numpy as np
from rlbench import tiny
from rlbench.data import Prompt, Rollouts
from rlbench.notebook import install, viewer
from tests.data.written import sorting, stepped, written
install()
TINY = tiny.ensure()
"""
HOSTILE = [
    "<script>window.hacked = 1</script>",
    "</script><img src=x onerror='window.hacked = 2'>",
    b"broken \xff\xe6\xbc utf-8 \xe6",
    "\x1b[31mred\x1b[0m and \x07 a bell",
    "right \u202egnp.exe\u202c to left \u2067\u05d0\u05d1",
    "x" * 1_000_000,
]


@pytest.fixture
def open_viewer(take):
    """`open_viewer(cell, …)`: a notebook whose second and last cell shows a viewer, run and drawn."""

    def open_one(cell="stepped(sorting(TINY))", theme="light"):
        notebook = take(theme)
        assert notebook.do(cell) == 1
        notebook.cell(1).locator(".rlbv .row .t").first.wait_for()
        return notebook

    return open_one


def rows(notebook):
    """Each completion in view as one text."""
    listed = "all => all.map(row => row.innerText.replaceAll('\\n', ' '))"
    return notebook.cell(1).locator(".rlbv .row").evaluate_all(listed)


def choose(notebook, label, option):
    box = notebook.cell(1).locator(".widget-dropdown", has_text=label).locator("select")
    box.select_option(label=option)


def wait_rows(notebook, fits):
    notebook.until(lambda: fits(rows(notebook)), what=lambda: rows(notebook))
    return rows(notebook)


def readout(notebook):
    return notebook.cell(1).locator(".rlbv .readout").inner_text()


def focus_list(notebook):
    notebook.cell(1).locator(".rlbv .list").focus()


def press(notebook, *keys):
    for key in keys:
        notebook.page.keyboard.press(key)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_draws_in_both_themes_with_legible_colours(open_viewer, theme, repository):
    notebook = open_viewer(theme=theme)
    cell = notebook.cell(1)
    assert "16 rollouts · 4 prompts × 4 · v41 · reward 0.5 ± 0.5 · 18.8 % truncated" in notebook.output(1)
    head = cell.locator(".head").first.inner_text().replace("\n", " ")
    assert re.match(r"▾ prompt 1 sort 53254 : 2/4 right +spread 0\.50", head)  # mixed rewards first
    colour = cell.locator(".rlbv").evaluate("node => Number(getComputedStyle(node).color.match(/[\\d.]+/)[0])")
    assert (colour > 128) == (theme == "dark")
    token = cell.locator(".row .t").first
    assert token.evaluate("t => getComputedStyle(t).backgroundColor") != "rgba(0, 0, 0, 0)"
    assert cell.locator(".t.clip").count() and cell.locator(".pill").first.inner_text() == "<|end|>"
    notebook.screenshot(repository / "build" / "browser" / f"rollout-viewer-{theme}.png", 1)


def test_controls_order_filter_search_and_colour(open_viewer):
    notebook = open_viewer()
    cell = notebook.cell(1)
    assert rows(notebook)[0].startswith("✓ +1.00 1234") is False
    choose(notebook, "show", "wrong · 8")
    assert all(row.startswith("✗ 0.00") for row in wait_rows(notebook, lambda seen: seen and "✓" not in "".join(seen)))
    choose(notebook, "show", "all · 16")
    choose(notebook, "sort", "reward ↓")
    wait_rows(notebook, lambda seen: seen[:1] and seen[0].startswith("✓ +1.00 12345"))
    cell.get_by_placeholder("search").fill("54365")
    wait_rows(notebook, lambda seen: len(seen) == 4 and all("54365" in row or "34556" in row for row in seen))
    cell.get_by_placeholder("search").fill("nowhere to be found")
    cell.locator(".rlbv.nothing").wait_for()
    cell.get_by_placeholder("search").fill("")
    wait_rows(notebook, lambda seen: len(seen) > 4)
    token = cell.locator(".row .t").first
    before = token.evaluate("t => t.style.background")
    choose(notebook, "colour", "entropy")
    cell.locator(".legend", has_text="entropy (nats)").wait_for()
    assert token.evaluate("t => t.style.background") != before
    assert cell.locator(".legend .figure").all_inner_texts() == ["0.2", "1"]  # the real least and largest


def test_columns_and_white_space(open_viewer):
    notebook = open_viewer()
    cell = notebook.cell(1)
    assert not cell.locator(".t", has_text="·").count()
    cell.get_by_role("button", name="¶").click()
    cell.locator(".t", has_text="·").first.wait_for()
    cell.get_by_role("button", name="side by side").click()
    cards = cell.locator(".cards").first.locator(".card")
    cards.first.wait_for()
    first, second = (cards.nth(k).bounding_box() for k in (0, 1))
    assert first["y"] == second["y"] and second["x"] >= first["x"] + first["width"]


def test_a_token_says_its_numbers_under_the_pointer(open_viewer):
    notebook = open_viewer()
    wanted = r"token 2 +'[0-9]' +id \d+ +sampler −[01]\S* +adv .*trainer .*ratio 1\.11 +H 0\.2 .*not clipped"

    def told():  # again: the page may still be moving under the pointer
        notebook.page.mouse.move(0, 0)
        notebook.cell(1).locator(".row .t").nth(2).hover()
        return re.match(wanted, readout(notebook))

    notebook.until(told, what=lambda: readout(notebook))


def test_the_keyboard_opens_prompts_and_walks_tokens(open_viewer):
    notebook = open_viewer()
    cell = notebook.cell(1)
    focus_list(notebook)
    count, prompt = len(rows(notebook)), notebook.prompt(1)
    press(notebook, "ArrowLeft")  # closes the first prompt
    wait_rows(notebook, lambda seen: len(seen) == count - 4)
    assert cell.locator(".head").first.get_attribute("aria-expanded") == "false"
    press(notebook, "ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight")  # opens, first row, tokens 0 and 1
    wait_rows(notebook, lambda seen: len(seen) == count)
    assert readout(notebook).startswith("token 1 ")
    press(notebook, "End")
    said = readout(notebook)
    assert "'<|end|>'" in said and "id 257" in said and "special token" in said
    active = cell.locator(".list").get_attribute("aria-activedescendant")
    assert "completion" in notebook.page.locator(f"[id='{active}']").get_attribute("aria-label")
    press(notebook, "Escape", "ArrowDown", "ArrowRight")
    assert readout(notebook).startswith("token 0 ")
    assert notebook.prompt(1) == prompt != "[ ]:", "JupyterLab's own keys acted"


def test_hostile_text_stays_text(open_viewer):
    prompts = [text if isinstance(text, str) and len(text) < 100 else "as hostile" for text in HOSTILE]
    long = '["x" * 1_000_000]'
    answers = ", ".join([*(f"[{text!r}]" for text in HOSTILE[:-1]), long])
    notebook = open_viewer(f"written({prompts!r}, [{answers}], tokenizer=TINY)")
    cell = notebook.cell(1)
    text = " ".join(wait_rows(notebook, lambda seen: len(seen) == 6))
    for shown in (*HOSTILE[:2], "broken \ufffd", "␛[31mred␛[0m", "␇", "‹U+202E›gnp.exe"):
        assert shown in text, shown
    assert "1,000,001 tok" in text and len(text) < 5000
    assert notebook.page.evaluate("window.hacked") is None and not cell.locator(".rlbv script, .rlbv img").count()
    cell.locator(".row", has_text="1,000,001").locator(".meta").click()
    cell.get_by_role("button", name="next 2,000 of 1,000,001 tokens").wait_for()
    assert cell.locator(".row", has_text="1,000,001").locator(".t").count() == 2000
    cell.get_by_role("button", name="next 2,000 of 1,000,001 tokens").click()
    notebook.page.wait_for_function("document.querySelectorAll('.rlbv .tokens.full .t').length === 4000")


def test_hostile_tokens_and_texts_without_a_tokenizer_stay_text(open_viewer, tmp_path):
    marks = ["<script>window.hacked = 1</script>", "<img src=x onerror='window.hacked = 2'>", "</span></div>"]
    special = "<svg onload='window.hacked = 3'>"
    folder = spelling(tmp_path, marks, special)
    notebook = open_viewer(f"written([{marks[1]!r}], [[bytes([0, 1, 2, 3])]], tokenizer={folder!r})")
    tokens = notebook.cell(1).locator(".row .t")
    assert tokens.all_text_contents()[:4] == [*marks, special]
    focus_list(notebook)
    press(notebook, "ArrowDown", "ArrowRight", "ArrowRight")
    assert readout(notebook).startswith(f"token 1  '{marks[1]}'")
    plain = notebook.do(f"written([{special!r}], [[{marks[0]!r}]])")
    notebook.cell(plain).locator(".plain", has_text="window.hacked").wait_for()
    for index in (1, plain):
        drawn = notebook.cell(index).locator(".rlbv")
        assert not drawn.locator("script, img, svg").count()
        drawn.locator(".head").first.click()
    assert notebook.page.evaluate("window.hacked") is None


def test_only_what_is_in_view_is_drawn_and_a_scroll_is_quick(open_viewer):
    notebook = open_viewer("stepped(sorting(TINY, prompts=500, samples=8))")
    cell = notebook.cell(1)
    assert cell.locator(".item").count() < 80
    seconds = cell.locator(".list").evaluate("""async list => {
        const frame = () => new Promise(requestAnimationFrame);
        const times = [];
        for (let k = 1; k <= 10; k++) {
            list.scrollTop = k * 400;
            const begin = performance.now();
            await frame(); await frame();
            times.push(performance.now() - begin);
        }
        return times.sort((a, b) => a - b)[5] / 1000;
    }""")
    print(f"scroll repaint: {seconds * 1000:.0f} ms (median of 10)")
    focus_list(notebook)
    press(notebook, "End")
    last = cell.locator(".head", has_text="prompt 499")
    last.wait_for()
    last.get_by_text("sort 606532 :").wait_for()  # its line was asked for and came
    assert cell.locator(".item").count() < 80


def test_images_are_drawn_with_their_tokens_and_larger_by_a_click(open_viewer, repository):
    notebook = open_viewer("""
from dataclasses import replace
from PIL import Image
from tempfile import mkdtemp
from rlbench.data import EncodedImage, Ragged
from rlbench.data.prompts.images import PlacedImage
from tests.data.written import spelling
SEES = spelling(mkdtemp(), ["a", "b", "c", "d", "e"], "<|image_pad|>")
pixels = [Image.new("RGB", size, (200, 30, 30)) for size in ((640, 400), (56, 56))]
chat = [{"role": "user", "content": [
    {"type": "image", "image": pixels[0]}, {"type": "image", "image": pixels[1]},
    {"type": "text", "text": "What colour is this?<script>window.hacked = 1</script>"}]}]
shown = written([Prompt(chat), Prompt("no picture")], [["red", "blue"], ["a", "b"]], tokenizer=SEES)
seen = Ragged.from_rows([[0, 1, *[5] * 40, 2], [3], [4], [0]], np.int32)  # an environment showed the first one more
picture = PlacedImage.of(EncodedImage.from_any(pixels[0]), 2)
replace(shown, prompt_ids=Ragged.from_rows([[1, *[5] * 9, 2, *[5] * 4, 3], [4]], np.int32), responses=seen,
        logprobs=np.zeros(46, np.float32), observed_images=((picture,), (), (), ()))
""")
    fetched = []
    notebook.page.on("request", lambda request: fetched.append(request.url))
    cell = notebook.cell(1)
    images = cell.locator(".head img")
    images.first.wait_for()
    assert images.count() == 2 and images.first.evaluate("i => [i.naturalWidth, i.naturalHeight]") == [160, 100]
    assert cell.locator(".head .chip").all_inner_texts() == ["image ×9", "image ×4"]
    images.first.click()  # opens the whole prompt
    whole = cell.locator(".whole")
    whole.get_by_text("What colour is this?").wait_for()
    picture = whole.locator("img").first
    assert "user" in whole.inner_text() and picture.evaluate("i => i.naturalWidth") == 640
    small = picture.bounding_box()["width"]
    picture.click()
    notebook.page.wait_for_function("document.querySelector('.whole .large img').getBoundingClientRect().width > 330")
    notebook.page.wait_for_function(  # the rows below make room for it
        "document.querySelector('.whole').getBoundingClientRect().bottom"
        " <= document.querySelector('.rlbv .row').getBoundingClientRect().top"
    )
    picture.click()
    notebook.page.wait_for_function("!document.querySelector('.whole .large')")
    assert picture.bounding_box()["width"] == small <= 322
    answer = cell.locator(".row .tokens").first
    assert answer.locator(".t").all_inner_texts() == ["a", "b", "image ×40", "c"]
    answer.locator("img").click()  # opens the completion
    cell.locator(".tokens.full img").wait_for()
    notebook.page.wait_for_function("document.querySelector('.tokens.full img').naturalWidth === 640")
    notebook.page.screenshot(path=repository / "build" / "browser" / "observed-image.png")
    cell.locator(".tokens.full img").click()
    notebook.page.wait_for_function("document.querySelector('.large img').getBoundingClientRect().width > 330")
    assert not [url for url in fetched if not url.startswith(("http://127.0.0.1", "http://localhost", "data:"))]
    assert notebook.page.evaluate("window.hacked") is None


def test_while_a_cell_runs_colours_change_and_where_there_are_subshells_it_scrolls_on(open_viewer, tmp_path):
    notebook = open_viewer("stepped(sorting(TINY, prompts=60))")
    cell = notebook.cell(1)
    free = tmp_path / "free"
    held_up = f"import os, time\nprint('begun')\nwhile not os.path.exists({str(free)!r}): time.sleep(0.05)"
    busy = notebook.do(held_up, wait=False)
    notebook.wait_text(busy, "begun")
    choose(notebook, "colour", "entropy")
    cell.locator(".legend", has_text="entropy (nats)").wait_for()
    choose(notebook, "sort", "prompt")
    if works_while_busy():
        cell.locator(".head", has_text="prompt 0").wait_for()
    else:
        cell.locator(".notice", has_text="waiting for the kernel (busy)").wait_for()
    assert notebook.runs(busy)
    free.touch()
    notebook.wait(busy)
    cell.locator(".head", has_text="prompt 0").wait_for()
    assert cell.locator(".notice").inner_text() == ""


def test_a_kernel_that_does_not_answer_is_named_until_it_does(open_viewer):
    notebook = open_viewer("stepped(sorting(TINY, prompts=60))")
    cell = notebook.cell(1)
    kernel = notebook.kernel_pid()
    os.kill(kernel, signal.SIGSTOP)
    try:
        choose(notebook, "sort", "prompt")
        choose(notebook, "colour", "entropy")  # needs no kernel
        cell.locator(".legend", has_text="entropy (nats)").wait_for()
        cell.locator(".notice", has_text="waiting for the kernel (busy)").wait_for()
        assert rows(notebook)  # what was sent stays
    finally:
        os.kill(kernel, signal.SIGCONT)
    cell.locator(".head", has_text="prompt 0").wait_for()
    assert cell.locator(".notice").inner_text() == ""


def test_a_reload_shows_it_again_and_it_still_answers(open_viewer):
    notebook = open_viewer()
    notebook.reload()
    notebook.cell(1).locator(".rlbv .row .t").first.wait_for()
    choose(notebook, "show", "wrong · 8")
    wait_rows(notebook, lambda seen: seen and "✓" not in "".join(seen))


def test_a_saved_notebook_without_a_kernel_shows_the_static_view(open_viewer):
    notebook = open_viewer()
    saved = notebook.save()
    grown = len(str(saved.cells[1].outputs))
    assert grown < 200_000, grown
    saved.metadata = {}  # by the language alone JupyterLab would find it a kernel
    with notebook.reading(saved):
        text = notebook.wait_text(1, "16 rollouts · 4 prompts × 4")
        assert "2/4 right · spread 0.50" in text and "✓ +1.00" in text
        assert notebook.cell(1).locator("table td span").count() > 10


@pytest.mark.parametrize("script", [True, False], ids=["script", "no script"])
def test_the_exported_page_reads_filters_and_recolours(browser, tmp_path, tiny_path, repository, script):
    value = stepped(sorting(tiny_path))
    context = browser.new_context(java_script_enabled=script, color_scheme="dark" if script else "light")
    page = context.new_page()
    errors, fetched = [], []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: fetched.append(request.url))
    page.goto(value.to_html(tmp_path / "page.html").as_uri())
    assert page.locator("tr").count() == 16 and page.get_by_text("sort 53254 :").is_visible()
    token = page.locator("tr[data-i='15'] i").first
    assert token.evaluate("t => getComputedStyle(t).backgroundColor") != "rgba(0, 0, 0, 0)" if script else True
    assert page.locator("#controls").is_visible() == script
    if script:
        page.screenshot(path=repository / "build" / "browser" / "rollout-page-dark.png")
        before = token.evaluate("t => t.style.background")
        page.get_by_label("colour").select_option(label="entropy")
        assert token.evaluate("t => t.style.background") != before
        assert "entropy (nats)" in page.locator("#legend").inner_text()
        token.hover()
        assert re.match(r"token 0 +'5' +id 53 +sampler .*ratio 1\.65", page.locator("#readout").inner_text())
        page.get_by_label("show").select_option("wrong")
        assert page.locator("tr:visible").count() == 8
        page.get_by_label("search").fill("55476")
        assert page.locator("tr:visible").count() == 4 and page.locator(".g:visible").count() == 1
    assert not errors and len(fetched) == 1
    context.close()


def test_the_exported_page_is_read_by_keyboard(browser, tmp_path, tiny_path):
    page = browser.new_page()
    page.goto(stepped(sorting(tiny_path)).to_html(tmp_path / "page.html").as_uri())
    said = page.locator("#readout")
    page.get_by_label("search").focus()
    page.keyboard.press("Tab")
    first = page.evaluate("document.activeElement.closest('[data-i]').dataset.i")
    assert "completion" in page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert said.inner_text().startswith("token 0 ")
    page.keyboard.press("ArrowRight")
    assert said.inner_text().startswith("token 1 ") and page.locator("i.at").count() == 1
    page.keyboard.press("End")
    last = page.locator(f"tr[data-i='{first}'] i").count() - 1
    assert said.inner_text().startswith(f"token {last} ")
    page.keyboard.press("ArrowRight")  # nothing behind the last one
    assert said.inner_text().startswith(f"token {last} ")
    page.get_by_label("show").select_option("wrong")
    shown = page.locator("tr[data-i]:visible")
    page.locator("tr[data-i]:visible .t").first.focus()
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.closest('[data-i]').dataset.i") == shown.nth(1).get_attribute("data-i")
    page.close()


def test_hostile_text_in_the_exported_page_stays_text(browser, tmp_path, tiny_path):
    texts = ["</script><script>window.hacked = 1</script>", "<img src=x onerror='window.hacked = 2'>", "\x1b[31m"]
    page = browser.new_page()
    page.goto(written(texts, [[t] for t in texts], tokenizer=tiny_path).to_html(tmp_path / "page.html").as_uri())
    assert page.evaluate("window.hacked") is None and not page.locator("img").count()
    assert texts[0] in page.locator("body").inner_text() and "␛[31m" in page.locator("body").inner_text()
    # even markup that came in another way could not act: the page allows its own script alone
    script = "Object.assign(document.createElement('script'), {textContent: 'window.hacked = 3'})"
    page.evaluate(f"document.body.append({script})")
    assert page.evaluate("window.hacked") is None
    page.close()


def test_a_sound_is_played_in_the_whole_prompt(open_viewer, repository):
    cell = """
tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(24_000) / 16_000)
chat = [{"role": "user", "content": [{"type": "audio", "audio": (tone, 16_000)}, {"type": "text", "text": "what?"}]}]
written([Prompt(chat), Prompt("no sound")], [["bell", "horn"], ["a", "b"]])
"""
    notebook = open_viewer(cell)
    shown = notebook.cell(1)
    shown.locator(".head .spell").first.click()
    player = shown.locator(".whole audio")
    player.wait_for()
    known = "p => new Promise(done => p.readyState ? done(p.duration) : p.onloadedmetadata = () => done(p.duration))"
    assert 1.4 < player.evaluate(known) < 1.7
    assert "[sound, 1.5 s at 16000 Hz]" in shown.locator(".whole").inner_text()
    notebook.page.screenshot(path=repository / "build" / "browser" / "sound.png")

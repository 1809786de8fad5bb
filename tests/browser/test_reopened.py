"""A notebook opened again the next day, without its kernel: every view stands there in its static form."""

from __future__ import annotations

import nbformat
import pytest
from nbconvert import HTMLExporter

from tests.browser.lab import Notebook
from tests.browser.panels import scripted
from tests.notebook.gallery import VIEWS
from tests.notebook.reading import Columns, stripped

START = "import sys; sys.path.insert(0, {root!r})\nfrom tests.notebook.gallery import show"
SAID = {
    "session": "one version behind",
    "rollouts": "16 rollouts · 4 prompts × 4",
    "viewer": "colour: entropy (nats)",
    "dashboard": "step 1.9 s = rollout 0.9",
    "metrics": "the gradient is infinite",
    "history": "60 steps",
    "lab": "share of |coef| by length",
    "gradients": "layers.7",
    "comparison": "reward comparison",
    "batch": "6 sequences",
    "line": "48.2 MiB",
    "fit": "fit 3/3 iterations",
}
"""What the static form of each view says; plots are pictures."""
DOLLARS = "it costs $x^2$ and $y_1$"
WRITTEN = f"""from dataclasses import replace
from IPython.display import HTML
from rlbench.data import Prompt, Rollouts
from tests.data.values import generated
made = replace(generated([(0, 0, [1, 2], "stop")]), texts=[{DOLLARS!r}])
display(HTML("<p>a formula: $z^2$</p>"))
display(Rollouts.merge([Prompt("how much?")], [made], {{"temperature": 1.0}}))"""
LIVE = ("rollouts", "viewer", "dashboard")
NEAREST = """() => {
    const extent = cell => {
        const range = document.createRange();
        range.selectNodeContents(cell);
        return range.getBoundingClientRect();
    };
    const gaps = [...document.querySelectorAll('tr')].flatMap(row => {
        const cells = [...row.children].filter(cell => cell.innerText.trim()).map(extent);
        return cells.slice(1).map((cell, i) => cell.left - cells[i].right);
    });
    return Math.min(...gaps);
}"""


@pytest.fixture(scope="module")
def saved(lab, browser, repository) -> nbformat.NotebookNode:
    """A notebook with every view, seen live, saved by JupyterLab; its kernel is shut down. The server trusts it."""
    script = scripted(lab, "reopened")
    cells = [START.format(root=str(repository)), *(f"show({name!r}, 'reopened')" for name in VIEWS), WRITTEN]
    with Notebook(lab, browser, cells, name="reopened") as notebook:
        for i in range(len(cells)):
            notebook.run(i)
        for i, name in enumerate(VIEWS, 1):
            if name in LIVE:
                cell = notebook.cell(i)
                cell.locator(".rlb-live").first.wait_for()
                assert cell.locator(".rlb-still").is_hidden(), f"{name}: both forms are seen"
        made = notebook.save()
    script.close()
    return made


@pytest.fixture(scope="module", params=["lab/workspaces/again/tree/", "notebooks/"], ids=["JupyterLab", "Notebook 7"])
def page(saved, lab, browser, request):
    """The file, opened anew; tests only look at it."""
    context = browser.new_context(viewport={"width": 1280, "height": 6000})  # all cells are in view
    opened = context.new_page()
    opened.goto(f"{lab.url}{request.param}reopened.ipynb?reset&token={lab.token}")
    opened.locator(".jp-Cell").first.wait_for()
    yield opened
    context.close()
    for session in lab.ask("api/sessions"):
        lab.ask(f"api/sessions/{session['id']}", method="DELETE")


def test_every_view_shows_its_static_form(page, repository, request):
    for i, name in enumerate(VIEWS, 1):
        area = page.locator(f".jp-Notebook .jp-Cell[data-windowed-list-index='{i}'] .jp-OutputArea")
        if name in SAID:
            area.get_by_text(SAID[name]).first.wait_for()
        else:
            area.locator("img, .jp-RenderedPlotly").first.wait_for()
        if name in LIVE:
            message = area.get_by_text("Error displaying widget: model not found")
            message.wait_for(state="attached")
            assert message.is_hidden() and area.locator(".rlb-live").count() == 0
        assert "widget" not in area.inner_text(), f"{name}: {area.inner_text()[:200]}"
    page.screenshot(path=repository / "build" / "browser" / f"reopened-{request.node.callspec.id}.png")


def test_dollars_of_a_completion_stay_dollars(page):
    """Defect absent: `$x^2$` of a completion was typeset as a formula."""
    area = page.locator(f".jp-Notebook .jp-Cell[data-windowed-list-index='{len(VIEWS) + 1}'] .jp-OutputArea")
    area.locator("mjx-container").first.wait_for()  # of the formula that is one
    area.get_by_text(DOLLARS).first.wait_for()
    assert area.locator("mjx-container").count() == 1


def test_an_export_to_html_shows_it_too(saved, browser, tmp_path, repository):
    file = tmp_path / "reopened.html"
    file.write_text(HTMLExporter(embed_images=True).from_notebook_node(saved)[0])
    context = browser.new_context(viewport={"width": 1280, "height": 6000}, offline=True)
    page = context.new_page()
    page.goto(file.as_uri())
    text = page.locator("body").inner_text()
    assert [name for name, said in SAID.items() if said not in text] == []
    assert "widget" not in text
    page.screenshot(path=repository / "build" / "browser" / "reopened-nbconvert.png")
    context.close()


def test_a_page_that_takes_styles_out_keeps_the_columns_apart(saved, browser, repository):
    htmls = [
        output.data["text/html"] for cell in saved.cells[1:-1] for output in cell.outputs if "text/html" in output.data
    ]
    assert len(htmls) == len(VIEWS) + len(LIVE)
    assert [Columns(html).joined for html in htmls] == [[]] * len(htmls)
    page = browser.new_page(viewport={"width": 1280, "height": 6000})
    page.set_content("<hr>".join(map(stripped, htmls)))
    assert page.locator("style, [style], [class]").count() == 0
    assert page.evaluate(NEAREST) >= 8, "pixels between the texts of two cells"
    page.screenshot(path=repository / "build" / "browser" / "reopened-stripped.png")
    page.close()

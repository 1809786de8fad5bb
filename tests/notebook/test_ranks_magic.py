"""`%%ranks` in a real kernel, and what it says of its own line."""

import os

import nbformat
import pytest
from nbclient import NotebookClient

from rlbench.errors import EngineError
from rlbench.notebook import ranks_magic

COMPLETE = """
from IPython.core.completer import provisionalcompleter
text = '%%ranks actor\\n{}'
with provisionalcompleter():
    found = list(get_ipython().Completer.completions(text, len(text)))
[text[:c.start] + c.text + text[c.end:] for c in found]
"""
CELLS = [
    'import rlbench as rb\nsession = rb.Session("tiny", name="magic", undo=0,\n'
    '                     train={"shards": 2})',
    "%%ranks\nweight = sum(p.numel() for p in module.parameters())\nprint('has', weight > 0)\nworld_size",
    "%%ranks actor --rank 1\nrank * 7",
    "%%ranks actor\nvalue = 1\nvalue / 0",
    "%%ranks actr\nrank",
    COMPLETE.format("weig"),
    COMPLETE.format("for name, p in module.named_par"),
    "session.close()",
]


@pytest.fixture(scope="module")
def executed(cluster, tiny_path, tmp_path_factory):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    where = {"metadata": {"path": str(tmp_path_factory.mktemp("magic"))}}
    client = NotebookClient(notebook, timeout=240, allow_errors=True, resources=where)
    client.execute(env=os.environ | {"RLBENCH_LEASE_S": "120"})
    assert not error(notebook.cells[0])
    return notebook.cells


def said(cell):
    return "".join(o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in cell.outputs)


def error(cell):
    return "\n".join(line for o in cell.outputs if o.output_type == "error" for line in o.traceback)


@pytest.mark.engine
def test_values_and_output_are_labelled_by_rank(executed):
    lines = said(executed[1]).splitlines()
    assert sorted(lines) == ["[rank 0] 2", "[rank 0] has True", "[rank 1] 2", "[rank 1] has True"]
    assert said(executed[2]) == "[rank 1] 7\n"


@pytest.mark.engine
def test_an_error_shows_once_with_the_line_of_the_cell(executed):
    text = error(executed[3])
    assert text.count("ZeroDivisionError") == 1 and "line 2:   value / 0" in text and "rank 0 (and 1 more)" in text
    assert len(text.splitlines()) <= 4
    assert "no train engine 'actr'; nearest: actor" in error(executed[4])


@pytest.mark.engine
def test_names_of_the_rank_are_completed(executed):
    assert "weight'" in said(executed[5])
    assert "module.named_parameters'" in said(executed[6])


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("", (None, None, None, [])),
        ("actor", ("actor", None, None, [])),
        ("--rank 3 critic", ("critic", 3, None, [])),
        ("actor --session a --rank 0", ("actor", 0, "a", [])),
        ("""--args "--fsdp --name 'a b'" actor""", ("actor", None, None, ["--fsdp", "--name", "a b"])),
    ],
)
def test_options_in_any_order(line, wanted):
    asked = ranks_magic.parsed(line)
    assert (asked.engine, asked.rank, asked.session, asked.args) == wanted


def test_a_script_ends_the_line_and_what_follows_is_its_own():
    asked = ranks_magic.parsed("critic --rank 1 code/train.py --rank 7 'a b' x.py", "%ranks")
    assert (asked.engine, asked.rank, asked.script) == ("critic", 1, "code/train.py")
    assert asked.args == ["--rank", "7", "a b", "x.py"]
    with pytest.raises(EngineError, match="which script"):
        ranks_magic.parsed("actor", "%ranks")


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("a b", "unrecognized arguments: b"),
        ("--rnk 1", "--rnk.*; nearest: --rank"),
        ("--rank", "--rank: expected one argument"),
        ("--rank x", "--rank: invalid int value: 'x'"),
        ("--args 'a", "No closing quotation"),
    ],
)
def test_a_wrong_line_is_refused(line, match):
    with pytest.raises(EngineError, match=match):
        ranks_magic.parsed(line)

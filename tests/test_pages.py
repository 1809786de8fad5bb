"""README.md and docs: links lead somewhere, blocks of Python name what is there and can be copied in their order."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import shlex
from pathlib import Path

import pytest

from rlbench.cli import main
from rlbench.data.joining import ONLY_LENGTH
from rlbench.data.prompts.sampling import NEUTRAL
from rlbench.engines.turns import TURN_OPTIONS
from rlbench.option_names import ALIASES

from .pages import FENCED, SPAN, UNKNOWN, Reader, blocks, names_made, names_missing, spans, usual_names

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
IDS = [page.stem for page in PAGES]
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"(?<![\w/.])(?:tests|examples|benchmarks|scripts|notebooks|docs)/[\w/.-]*\w")
COMMAND = re.compile(r"^rlbench ([a-z][^\n#…]*)", re.MULTILINE)
OPTION = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)
THEIRS = {"coming-from": ["trainer"]}
"""Names that a page's text has of other libraries."""
SAID_TO_BE_REFUSED = {"parallelism": ["rb.Train(…) takes no executor="]}


def anchors(page: Path) -> set[str]:
    """Give the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def options() -> frozenset[str]:
    """Give what `**options` take: those of docs/options.md, their other names, those of sampling and of turns."""
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    return frozenset([*OPTION.findall(page), *ALIASES, *NEUTRAL, *ONLY_LENGTH, *TURN_OPTIONS])


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    for link in LINK.findall(text):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
    for path in PATH.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / path).exists(), path


@functools.cache
def help_of(*command: str) -> str:
    """Give what `rlbench` says of itself, or of a command that it has."""
    with contextlib.redirect_stdout(io.StringIO()) as output, pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert not end.value.code, command
    return output.getvalue()


def test_commands_take_the_flags_that_pages_give_them() -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    code = "\n".join(part for text in texts for part in FENCED.findall(text) + SPAN.findall(FENCED.sub("", text)))
    commands = [shlex.split(command) for command in COMMAND.findall(code)]
    assert len(commands) > 20
    for name, *words in commands:
        assert re.search(rf"^    {name} ", help_of(), re.MULTILINE), name
        for flag in [word.removeprefix("--") for word in words if word.startswith("--")]:
            option = flag in options() if name == "train" else re.search(rf"--{flag}[^\w-]", help_of(name))
            assert option, (name, flag)


def test_every_test_that_a_page_names_is_there() -> None:
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for page in PAGES:
        for name in re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8")):
            assert f"def {name}(" in tests, f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_code_names_what_is_there(page: Path) -> None:
    reader = Reader(usual_names(), options())
    for _, tree in blocks(page):
        reader.read(tree)
    reader.names |= dict.fromkeys(THEIRS.get(page.stem, []), UNKNOWN)
    for tree in spans(page):
        reader.value(tree)
    assert sorted(set(reader.wrong)) == SAID_TO_BE_REFUSED.get(page.stem, [])


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_a_block_reads_no_name_that_the_page_does_not_make_or_tell_of(page: Path) -> None:
    in_text = set(SPAN.findall(FENCED.sub("", page.read_text(encoding="utf-8"))))
    known = in_text | usual_names().keys()
    for line, tree in blocks(page):
        assert names_missing(tree, known) == [], f"{page.name}, line {line}"
        known |= names_made(tree)


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("rb.Sesion('tiny')", "rb.Sesion: rlbench has no 'Sesion'"),
        ("rb.rl.dapo(clip_hi=0.3)", "rb.rl.dapo(…) takes no clip_hi="),
        ("session.train_step(batch, los='sft')", "session.train_step(…) takes no los="),
        ("session.rollout(prompts, max_token=8)", "session.rollout(…) takes no max_token="),
        ("scored = rollouts.score(reward)\nscored.bach()", "scored.bach: Rollouts has no 'bach'"),
        ("rm = rb.RewardModel('tiny')\nrm.train_step(batch, loss=rb.rl.bradly_terry())", "rb.rl.bradly_terry: "),
        ("def agent(run):\n    rb.Train(rate=1)", "rb.Train(…) takes no rate="),
        ("from rlbench.tiny import task", "rlbench.tiny:task: rlbench.tiny has no 'task'"),
    ],
)
def test_what_is_not_there_is_found(code: str, wrong: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```python\n{code}\n```\n", encoding="utf-8")
    reader = Reader(usual_names(), options())
    for _, tree in blocks(page):
        reader.read(tree)
    assert len(reader.wrong) == 1 and reader.wrong[0].startswith(wrong)

"""How a viewer shows completions that were continued from others, without an engine to continue them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlbench.data import Rollouts
from rlbench.data.rollouts.branches import branches, origin
from rlbench.notebook import viewer
from rlbench.notebook.rollouts.continuing import call_text
from rlbench.notebook.rollouts.order import Summary
from rlbench.notebook.rollouts.rows import PREVIEW_TOKENS, Shown, headline
from rlbench.notebook.rollouts.static import rollouts_view
from tests.data.values import rollouts
from tests.data.written import sorting, written
from tests.notebook.reading import HOSTILE, read

ANSWERS = [["123x", "124", "12345", "12366"], ["9"]]
FORKS: tuple[dict[str, Any], ...] = ({}, {}, {"at": 3, "of": 0}, {"at": 3, "of": 0, "under": "base"}, {})


def tree(forks: Any = FORKS, rewards: Any = (1, 0, 0.5, 0, 1)) -> Rollouts:
    """Two continuations of completion 0, behind its third token; the second by another adapter."""
    made = replace(written(["sort", "say"], ANSWERS), infos=tuple({"fork": f} if f else {} for f in forks))
    return made if rewards is None else made.score(list(rewards))


def test_a_prompt_is_told_of_by_its_own_completions_and_its_place_in_the_list_stays() -> None:
    shown = Shown(tree())
    head = shown.head(0)
    assert (head["n"], head["continuations"], head["right"], head["mean"]) == (2, 2, 1, 0.5)
    assert shown.head(1)["continuations"] == 0 and Summary(tree()).mean.tolist() == [0.5, 1]
    assert headline(tree()).startswith("3 rollouts · 2 prompts · v41") and headline(tree()).endswith("2 continuations")
    alone = tree().select([False, False, True, True, False])
    assert Shown(alone).head(0)["n"] == 2 and Summary(alone).mean[0] == 0.25
    assert "2 rollouts" in headline(alone), "where there are no others"


def test_branches_say_what_they_continue_with_their_value_or_why_there_is_none() -> None:
    own, base = viewer(tree()).drawing.tree
    assert (own["of"], own["kept"], own["samples"], own["under"]) == (0, 3, [2], "") and base["under"] == "base"
    assert own["said"] == "value 0.5" and own["key"] != base["key"]
    assert viewer(tree(rewards=None)).drawing.tree[0]["said"] == "not scored"
    failing = replace(tree(), rewards=np.array([1, 0, np.nan, 0, 1]))
    assert viewer(failing).drawing.tree[0]["said"] == "no value: scoring failed for 1 of 1"
    hostile = ({}, {}, {"at": 3, "of": 0, "text": HOSTILE + "\u202e"}, {}, {})
    assert "\u202e" not in viewer(tree(hostile)).drawing.tree[0]["text"]


def test_what_a_continuation_is_of_is_found_by_its_tokens_where_numbers_moved() -> None:
    def places(value: Rollouts) -> list[tuple[int, int]]:
        return [origin(value, branch) for branch in branches(value)]

    assert places(tree()) == [(0, 3), (0, 3)]
    assert places(tree().select([True, False, True, True, True])) == [(0, 3), (0, 3)]
    assert places(tree().select([False, True, True, True, True])) == [(-1, 3), (-1, 3)]
    moved = ({}, {}, {"at": 3, "of": 4}, {"at": 3, "of": 99}, {})
    assert places(tree(moved)) == [(0, 3)], "both continue the same place"
    text = ({}, {}, {"at": 3, "of": 1, "text": "3"}, {}, {})
    assert places(tree(text)) == [(1, 2)]


def test_a_preview_shows_what_a_continuation_sampled_itself_however_late_that_begins() -> None:
    long = "a" * 3000
    made = replace(written(["p"], [[long, long + "b"]]), infos=({}, {"fork": {"at": 3000, "of": 0}}))
    row, span = Shown(made).row(1)
    assert (row["born"], row["n"]) == (3000, 3002) and len(row["pieces"]) == 3002 == span.stop - span.start
    assert len(Shown(made).row(0)[0]["pieces"]) <= PREVIEW_TOKENS


def test_the_static_view_says_where_a_continuation_begins() -> None:
    text = read(rollouts_view(tree())).text
    assert text.count("↳ from token 3") == 2 and "2 continuations" in text


@pytest.mark.parametrize("value", [sorting(), rollouts()])
def test_rollouts_of_no_engine_here_offer_no_form_and_say_why(value: Rollouts) -> None:
    shown = viewer(value)
    assert "no engine of this kernel drew these" in shown.drawing.fork["why"]
    content, _ = shown.drawing.answer({"id": "v.1", "kind": "fork", "sample": 0, "at": 1, "n": 2})
    assert content == {"id": "v.1", "kind": "fork"} and not shown.drawing.fork["busy"]
    assert shown.rollouts is value is value.tree


def test_numbers_of_completions_that_stand_together_are_sent_as_the_page_needs_them() -> None:
    shown = viewer(tree().select([True, True, False, False, True]))
    drawing = shown.drawing
    drawing.grow(Shown(tree()), 0, colour=0, sort=0, filter=0)
    assert drawing.grown == {"after": 2, "by": 2, "key": drawing.tree[1]["key"], "times": 1}
    assert {row["p"] for row in drawing.first["rows"]} == {0} and len(drawing.first["heads"]) == 1
    assert np.frombuffer(drawing.order["samples"], np.int32).size == 5


def test_the_call_that_does_the_same_is_python() -> None:
    said = call_text(3, 17, 16, 'a "b"', "base")
    assert said == ".fork(3, at=17, n=16, text='a \"b\"', under='base')"
    assert call_text(3, 17, 16, None, None) == ".fork(3, at=17, n=16)"

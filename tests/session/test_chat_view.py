"""The live view of a chat: what its page asks for becomes another chat, and whatever goes wrong is said in it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from rlbench.errors import Stopped
from rlbench.notebook.chat.view import ChatView, chat_view
from tests.clock import until

pytestmark = pytest.mark.engine
HOSTILE = "<b>\x1b[31m\u202e"


@pytest.fixture
def view(session: Any) -> Iterator[ChatView]:
    shown = chat_view(session.chat(n=2, max_tokens=8, ignore_eos=True, temperature=2.0))
    yield shown
    shown.release()


def ask(view: ChatView, kind: str, **fields: Any) -> Any:
    """Ask as the page does, and wait for the end of it."""
    drawing = view.children[0]
    view._hear(drawing, {"kind": kind, **fields}, [])
    until(lambda: not drawing.busy)
    return drawing


def test_what_is_said_in_the_page_is_what_a_cell_would_have_said(session: Any, view: ChatView) -> None:
    source = view.chat
    drawing = ask(view, "say", text="sort 52143")
    same = session.chat(n=2, max_tokens=8, ignore_eos=True, temperature=2.0).say("sort 52143")
    assert [one["text"] for one in drawing.answers] == [one.text for one in same.answers]
    assert [one["head"] for one in drawing.answers] == [one.speaker for one in same.answers]
    assert drawing.answers[0]["note"] == "8 tok · cut by max_tokens" and drawing.facts == "1 turn"
    ask(view, "say", text="and 871?", after=1)
    assert source.now.messages == same.say("and 871?", after=1).messages
    assert source.messages == () and source.now is view.chat
    assert drawing.turns[-1] == {"role": "user", "text": "and 871?"}
    ask(view, "again")
    assert len(drawing.answers) == 4 and view.chat.answers[2].text == source.now.answers[2].text


def test_a_preference_can_be_changed_and_taken_back_until_something_else_is_said(view: ChatView) -> None:
    drawing = ask(view, "say", text="sort 52143")
    texts = [one.text for one in view.chat.answers]
    ask(view, "prefer", answer=0)
    ask(view, "prefer", answer=1)
    (pair,) = view.chat.pairs
    assert (pair["chosen"], pair["rejected"]) == (texts[1], texts[0]) and drawing.chosen == 1
    assert drawing.code == "session.train_step(rb.data.pairs(chat.now.pairs, session.tokenizer), loss='dpo')"
    ask(view, "prefer", answer=1)
    assert drawing.chosen is None and not view.chat.pairs and drawing.code == "chat.now"
    ask(view, "prefer", answer=1)
    ask(view, "again")
    ask(view, "prefer", answer=0)
    assert {pair["rejected"] for pair in view.chat.pairs} == {one.text for one in view.chat.answers[1:]} - {texts[0]}
    kept = len(view.chat.pairs)
    ask(view, "say", text="more")
    ask(view, "prefer", answer=0)
    ask(view, "prefer", answer=0)
    assert len(view.chat.pairs) == kept, "of the turns before"


def test_answers_are_seen_as_they_grow_and_a_stop_keeps_what_is_drawn(session: Any) -> None:
    shown = chat_view(session.chat(n=2, max_tokens=1000, ignore_eos=True))
    drawing, seen = shown.children[0], []
    drawing.observe(lambda change: seen.append(change["new"]), "answers")
    shown._hear(drawing, {"kind": "say", "text": "go on"}, [])
    until(lambda: seen and all(one["text"] for one in seen[-1]))
    assert [one["text"] for one in seen[0]] == ["", ""] and all(one["growing"] for one in seen[-1])
    shown._hear(drawing, {"kind": "stop"}, [])
    until(lambda: not drawing.busy)
    assert drawing.said == "stopped" and [one["note"][-7:] for one in drawing.answers] == ["stopped"] * 2
    assert drawing.answers[0]["text"].startswith(seen[-2][0]["text"]) and len(shown.chat.answers) == 2
    talking = shown._talking
    shown._hear(drawing, {"kind": "again"}, [])
    until(lambda: all(one["text"] for one in drawing.answers[2:]) and drawing.answers[2:])
    shown.release()
    until(lambda: talking.chat.answers[2:])
    assert {int(one.rollouts.finish[one.sample]) for one in talking.chat.answers[2:]} == {2}, "let go, stopped"


def test_ctrl_c_in_a_cell_leaves_the_chat_in_partial(session: Any) -> None:
    class Cut:
        def continued(self, *_: Any) -> Any:
            raise Stopped("stopped", session.rollout(["sort 31"], n=2, max_tokens=4, progress=False))

    with pytest.raises(Stopped) as caught:
        session.chat(n=2).asked("sort 31").answered(Cut())
    assert len(caught.value.partial.answers) == 2 and caught.value.partial.messages[-1]["content"] == "sort 31"


def test_an_answers_tokens_open_below_and_are_continued_there(view: ChatView) -> None:
    drawing = ask(view, "say", text="sort 52143")
    ask(view, "tokens", answer=1)
    assert drawing.opened == 1 and view.children[1].rollouts is view.chat.answers[1].rollouts
    form = view.children[1].drawing
    form._hear(form, {"id": "v.1", "kind": "fork", "sample": 1, "at": 3, "n": 3, "text": "", "under": ""}, [])
    until(lambda: not form.fork["busy"])
    assert view.chat.answers[1].rollouts.tree.samples == 5
    ask(view, "tokens", answer=0)
    assert view.children[1].rollouts.samples == 5, "with what was continued"
    assert view.children[1].drawing.fork["name"] == "chat.now.answers[0].rollouts.tree"
    form = view.children[1].drawing
    form._hear(form, {"id": "v.2", "kind": "fork", "sample": 0, "at": 2, "n": 1, "text": "", "under": ""}, [])
    until(lambda: not form.fork["busy"])
    assert view.chat.answers[1].rollouts.tree.samples == 6
    ask(view, "tokens", answer=0)
    assert drawing.opened is None and len(view.children) == 1
    ask(view, "tokens", answer=1)
    ask(view, "say", text="more")
    assert drawing.opened is None and len(view.children) == 1


def test_what_goes_wrong_is_said_and_the_view_lives_on(session: Any, view: ChatView) -> None:
    drawing = ask(view, "again")
    assert drawing.bad and "nothing was said" in drawing.said and drawing.turns == []
    ask(view, "say", text="x" * 100_000)
    assert drawing.bad and "max_model_len" in drawing.said and "left out" not in drawing.said
    assert drawing.turns[-1]["text"].endswith("characters)") and not drawing.answers
    ask(view, "say", text=HOSTILE)
    assert drawing.turns[-1]["text"] == "<b>␛[31m‹U+202E›" and drawing.bad


def test_a_view_that_was_let_go_says_so_and_holds_nothing(session: Any) -> None:
    shown = chat_view(session.chat(n=2, max_tokens=4).say("sort 31"))
    shown.release()
    shown.release()
    gc.collect()
    assert shown.chat is None
    shown._hear(None, {"kind": "say", "text": "x"}, [])

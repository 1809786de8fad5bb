"""What a chat's view is asked for: one thing at a time, on a thread of its own, so that cells run on beside it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlbench.data import FINISH_REASONS, Prompt, Rollouts
from rlbench.data.record.origin import grown_into
from rlbench.errors import RLBenchError, Stopped
from rlbench.notebook.base.markup import cut, visible
from rlbench.notebook.cards.card import counted
from rlbench.notebook.live.draw import Draw, Texts, beside, name_in_cells

SHOWN_CHARACTERS = 20_000
"""Of one message or answer."""
DRAWS = ("say", "again")
NOTES = {"stop": "", "length": "cut by max_tokens", "abort": "stopped"}
"""What is said of an answer's end, by its finish reason."""

log = logging.getLogger(__name__)


class Answering(Draw):
    """The draw of one turn's answers, speaker by speaker; `show` hears those there are so far, as the page draws
    them, behind those that were there `before`."""

    def __init__(
        self,
        chat: Any,
        before: Sequence[dict[str, Any]],
        tell: Callable[[str], None],
        show: Callable[[list[dict[str, Any]]], None],
    ) -> None:
        super().__init__(chat.core.inference, chat.n * len(chat.under), "answers", tell, self._grown)
        self._n, self._waiting, self._shown = chat.n, list(chat.under), list(before)
        self._answers_shown = show

    def continued(
        self, prompts: Sequence[Prompt], n: int, sampling: dict[str, Any], number: int, under: str | None
    ) -> Rollouts:
        """See `rlbench.data.forking.Sampler`."""
        self._grown({})
        drawn = super().continued(prompts, n, sampling, number, under)
        self._shown += [_growing(under, text) for text in drawn.texts]
        self._waiting.pop(0)
        return drawn

    def _grown(self, texts: Texts) -> None:
        """Show what is drawn of the speaker whose turn it is, and a place for each answer that is to come."""
        coming = [
            _growing(under, texts.get((0, k), "") if place == 0 else "")
            for place, under in enumerate(self._waiting)
            for k in range(self._n)
        ]
        self._answers_shown([*self._shown, *coming])


class Talking:
    """A chat as its view goes on with it; `chat` is the value of now.

    `tell` is given what has changed of what the page draws: `turns` (role and text of each), `answers` to the last,
    which of them is `chosen`, whether they are `busy` coming, what is `said` of the last press, `facts` in words, and
    the `code` that does something with it in a cell.
    """

    def __init__(self, chat: Any, tell: Callable[[dict[str, Any]], None]) -> None:
        self._source = self.chat = chat
        self._unchosen = replace(chat, chosen=None)
        """As the chat is without what was preferred here of the last turn."""
        self._tell, self._lock = tell, threading.Lock()
        self._draw: Answering | None = None

    def state(self) -> dict[str, Any]:
        """Return all that the page draws."""
        return {**self._conversation(), "busy": False, "said": "", "bad": False}

    def hear(self, asked: Mapping[str, Any]) -> None:
        """Do what the page asks for: `kind` is "say" (`text`, `after`), "again", "prefer" (`answer`) or "stop"."""
        draw = self._draw
        if asked["kind"] == "stop" and draw is not None:
            draw.stop()
            self._tell({"said": "stopping"})
        elif asked["kind"] in DRAWS:
            self._begin(asked)
        elif asked["kind"] == "prefer" and draw is None:
            self._prefer(int(asked["answer"]))

    def _begin(self, asked: Mapping[str, Any]) -> None:
        """Have the last turn, or one that is said now, answered on a thread of its own."""
        chat = self.chat
        before = [] if asked["kind"] == "say" else _answers(chat)
        draw = Answering(chat, before, lambda said: self._tell({"said": said}), self._show)
        with self._lock:
            if self._draw is not None:
                return
            self._draw = draw
        self._tell({"busy": True, "said": "", "bad": False})
        beside(self._answer, draw, asked)

    def _show(self, answers: list[dict[str, Any]]) -> None:
        self._tell({"answers": answers})

    def _answer(self, draw: Answering, asked: Mapping[str, Any]) -> None:
        """Draw the answers and show them; whatever is raised is said: the view lives on."""
        said, bad, chat = "", False, self.chat
        try:
            if asked["kind"] == "say":
                chat = self.chat = chat.asked(str(asked["text"]), asked.get("after"))
                self._tell({"turns": _turns(chat), "chosen": None})
            chat = chat.answered(draw)
        except Stopped as error:
            chat, said = error.partial, "stopped"
        except RLBenchError as error:
            said, bad = str(error), True
        except Exception as error:
            log.exception("rlbench: an answer in a chat's view failed")
            said, bad = f"{type(error).__name__}: {error}", True
        pairs = chat.pairs if asked["kind"] == "say" else self._unchosen.pairs
        self._unchosen = replace(chat, chosen=None, pairs=pairs)
        with self._lock:
            self._draw = None
        self._take(chat, busy=False, said=said, bad=bad)

    def _prefer(self, answer: int) -> None:
        """Prefer an answer in place of the one that was; the same again: none."""
        if answer < len(self.chat.answers):
            none = answer == self.chat.chosen
            self._take(self._unchosen if none else self._unchosen.prefer(answer), said="", bad=False)

    def _take(self, chat: Any, **changes: Any) -> None:
        self.chat = chat
        grown_into(self._source, chat)
        self._tell({**self._conversation(), **changes})

    def _conversation(self) -> dict[str, Any]:
        chat = self.chat
        facts = [counted(sum(one["role"] == "user" for one in chat.messages), "turn")]
        facts += [counted(len(chat.pairs), "preference pair")] if chat.pairs else []
        shown = {"turns": _turns(chat), "answers": _answers(chat), "chosen": chat.chosen}
        return {**shown, "facts": " · ".join(facts), "code": self._code()}

    @property
    def name(self) -> str:
        """What the chat is in a cell."""
        return name_in_cells(self._source, "chat") + ("" if self.chat is self._source else ".now")

    def _code(self) -> str:
        """Return what the chat is in a cell; where answers were preferred, the step on them."""
        name, core = self.name, self.chat.core
        if not self.chat.pairs:
            return name
        session, loss = name_in_cells(core.handle, "session"), "dpo" if core.has_reference else "simpo"
        return f"{session}.train_step(rb.data.pairs({name}.pairs, {session}.tokenizer), loss={loss!r})"


def _turns(chat: Any) -> list[dict[str, str]]:
    return [{"role": str(one["role"]), "text": _shown(str(one["content"]))} for one in chat.messages]


def _answers(chat: Any) -> list[dict[str, Any]]:
    shown = []
    for one in chat.answers:
        tokens, end = int(one.rollouts.lengths[one.sample]), FINISH_REASONS[one.rollouts.finish[one.sample]]
        note = " · ".join(part for part in (f"{tokens} tok", NOTES[end]) if part)
        shown.append({"head": one.speaker, "text": _shown(one.text), "note": note, "growing": False})
    return shown


def _growing(under: str | None, text: str) -> dict[str, Any]:
    return {"head": under or "policy", "text": _shown(text), "note": "", "growing": True}


def _shown(text: str) -> str:
    return visible(cut(text, SHOWN_CHARACTERS))

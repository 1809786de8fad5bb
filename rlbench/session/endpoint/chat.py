"""`session.chat()`: talk to the policy, answers side by side; a value that each turn makes anew."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlbench.data.forking import Named, Sampler, name_of
from rlbench.data.prompts.prompt import Message, Prompt
from rlbench.data.record.origin import latest
from rlbench.data.rollouts.rollouts import Rollouts
from rlbench.engines.under import whose
from rlbench.errors import DataError, StateError, Stopped, Suggesting
from rlbench.notebook.cards.card import Card, Cell, Grid, counted
from rlbench.session.core import SessionCore

MAX_TOKENS = 256
CHOSEN = "✓ "


@dataclass(frozen=True, eq=False)
class Answer(Suggesting):
    """What was said to the last turn: completion `sample` of `rollouts`, of weights `version`, drawn `under` an
    adapter's or a kept version's (None: the policy's)."""

    rollouts: Rollouts = field(repr=False)
    sample: int
    under: str | None

    @property
    def text(self) -> str:
        """The text, without special tokens."""
        return self.rollouts.texts[self.sample]

    @property
    def version(self) -> int:
        """The version of the weights it was sampled from."""
        return int(self.rollouts.versions[self.sample])

    @property
    def speaker(self) -> str:
        """`policy v3`, `base v0`."""
        return f"{self.under or 'policy'} v{self.version}"


@dataclass(frozen=True, eq=False)
class Chat(Suggesting):
    """A conversation with the policy, and the answers to its last turn side by side: `chat = chat.say("sort 52143")`.

    A value: `say`, `again` and `prefer` return another and leave this one, so that any of them can be gone on with.
    `messages`: those that the answers follow; `chosen`: the answer that was preferred; `pairs`: what was preferred so
    far, as rows of `rb.data.pairs`. At the end of a cell it is live: say, prefer and fork there, and `chat.now` is what
    came of it.
    """

    core: SessionCore = field(repr=False)
    under: tuple[str | None, ...]
    n: int
    sampling: Mapping[str, Any]
    messages: tuple[Message, ...] = ()
    answers: tuple[Answer, ...] = ()
    chosen: int | None = None
    pairs: tuple[Mapping[str, Any], ...] = ()

    @property
    def now(self) -> Chat:
        """What its view in the notebook has made of it by now; itself where it made nothing."""
        return latest(self)

    def say(self, text: str, after: int | None = None) -> Chat:
        """Say something; every speaker answers `n` times. Ctrl-C raises `Stopped`, with the chat in `.partial`.

        Args:
            after: number of the answer that this is said to; None: the preferred one, else the first.
        """
        return self.asked(text, after).answered()

    def again(self) -> Chat:
        """Have the last turn answered once more, by the weights there are now, beside the answers there are."""
        return self.answered()

    def asked(self, text: str, after: int | None = None) -> Chat:
        """Say something, as `say`, and have nobody answer yet."""
        number = self._number(after if after is not None else self.chosen or 0) if self.answers else None
        said = () if number is None else ({"role": "assistant", "content": self.answers[number].text},)
        messages = (*self.messages, *said, {"role": "user", "content": text})
        return replace(self, messages=messages, answers=(), chosen=None)

    def answered(self, by: Sampler | None = None) -> Chat:
        """Have every speaker answer the last turn, drawn `by` another sampler than the session's engine; the same
        words, asked again, are drawn otherwise."""
        if not self.messages or self.messages[-1]["role"] != "user":
            raise StateError("chat: nothing was said yet that could be answered: chat.say('…')")
        prompt, sampler = Prompt(list(self.messages)), self.core.inference if by is None else by
        number = zlib.crc32(json.dumps([self.messages, len(self.answers)], default=str).encode())
        answers = list(self.answers)
        for under in self.under:
            try:
                drawn, stopped = sampler.continued([prompt], self.n, dict(self.sampling), number, under), None
            except Stopped as error:
                drawn, stopped = error.partial, error
            answers += [Answer(drawn, i, under) for i in range(drawn.samples)] if drawn is not None else []
            if stopped is not None:
                raise Stopped(f"chat: {stopped}", replace(self, answers=tuple(answers)))
        return replace(self, answers=tuple(answers))

    def prefer(self, answer: int, over: int | None = None) -> Chat:
        """Prefer an answer, to go on behind it, and note a pair of it and each other one that differs.

        `over`: the one answer that it is better than; None: all others.
        """
        best = self._number(answer)
        others = range(len(self.answers)) if over is None else [self._number(over)]
        worse = dict.fromkeys(t for i in others if (t := self.answers[i].text) != self.answers[best].text)
        if over is not None and not worse:
            raise DataError(f"answers {answer} and {over} are the same: there is nothing to prefer")
        prompt, chosen = list(self.messages), self.answers[best].text
        pairs = ({"prompt": prompt, "chosen": chosen, "rejected": rejected} for rejected in worse)
        return replace(self, chosen=best, pairs=(*self.pairs, *pairs))

    def fork(self, answer: int, at: int, n: int = 16, **options: Any) -> Rollouts:
        """Continue an answer from its token `at`: `rollouts.fork` of the completions it is among; see there."""
        one = self.answers[self._number(answer)]
        return one.rollouts.fork(one.sample, at, n, **({"under": one.under} | options))

    def _number(self, answer: int) -> int:
        if not 0 <= answer < len(self.answers):
            there = f"there are {len(self.answers)}, from 0" if self.answers else "there is none yet: chat.say('…')"
            raise DataError(f"no answer {answer!r}: {there}")
        return answer

    def _card(self) -> Card:
        facts = [counted(sum(one["role"] == "user" for one in self.messages), "turn")]
        facts += [counted(len(self.pairs), "preference pair")] if self.pairs else []
        said = Grid([(str(one["role"]), str(one["content"])) for one in self.messages], labels=True)
        marks = [CHOSEN if i == self.chosen else "" for i in range(len(self.answers))]
        heads = (f"{mark}{i} · {one.speaker}" for i, (mark, one) in enumerate(zip(marks, self.answers, strict=True)))
        texts: list[Cell] = [one.text for one in self.answers]
        beside = Grid([("answers", *texts)], ("", *heads), labels=True)
        hint = "chat = chat.say('…') · chat.prefer(0) · chat.again() · chat.fork(0, at=5)"
        return Card("chat", facts, [said, *([beside] if texts else [])], [hint])

    def __repr__(self) -> str:
        return self._card().text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return self._card().bundle()


def chat(
    core: SessionCore,
    under: Named | str | Sequence[Named | str | None] | None = None,
    n: int = 2,
    *,
    system: str | None = None,
    **sampling: Any,
) -> Chat:
    """Talk to the policy: answers side by side, one of which can be preferred, forked, or gone on with.

        chat = session.chat().say("sort 52143")
        chat = chat.prefer(1).say("and 871?")
        session.train_step(rb.data.pairs(chat.pairs, session.tokenizer), loss=rb.rl.dpo(beta=0.1))

    What is drawn is no rollout: `session.last` stays, and later rollouts draw what they would have drawn. After a
    step and a sync `chat.again()` has the new weights answer beside the old ones.

    Args:
        under: who answers: None the policy, a snapshot (or its label) the weights of then, `"base"` or a branch its
            adapter (of a session with `rb.Inference(adapters=2)`); several answer side by side:
            `[None, "before step 3"]`.
        n: answers of each.
        system: what the first message says, with the role system.
        sampling: as of `rollout`: `temperature`, `max_tokens` (256 where not given), `template`, `tools`, ….
    """
    speakers = tuple(map(name_of, under if isinstance(under, Sequence) and not isinstance(under, str) else (under,)))
    if not speakers:
        raise DataError("chat(under=[]): nobody answers: None is the policy")
    for one in speakers:
        whose(core.inference, one)
    messages = () if system is None else ({"role": "system", "content": system},)
    return Chat(core, speakers, n, {"max_tokens": MAX_TOKENS} | sampling, messages)

"""What a policy thinks, `<think>…</think>`, and a conversation in which its earlier turns are without it.

With `thoughts="strip"` a turn that had thoughts is followed by the whole conversation, written anew by the chat
template without them: what comes next is sampled behind other tokens than those that were sampled before, so such a
sample has several contexts, each of them a sequence of its own to train on (`rlbench.data.rollouts.contexts`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlbench.data.prompts.lengths import answered, chat_ids
from rlbench.envs.protocol import Message, Observation
from rlbench.errors import DataError

Thoughts = Literal["keep", "strip"]
THOUGHTS: tuple[Thoughts, ...] = ("keep", "strip")
THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


def without_thoughts(text: str) -> str:
    """Return a text without its `<think>…</think>`; one that is not closed ends with the text, and where the prompt
    opened one it begins with the text."""
    head, closed, rest = text.partition("</think>")
    return THOUGHT.sub("", rest if closed and "<think>" not in head else text)


@dataclass(eq=False)
class StrippedChat:
    """A conversation as the policy is shown it: `messages` so far, without what it thought in them."""

    tokenizer: Any
    messages: list[Message]
    _begun: str = ""  # of a message that the policy was let go on with

    def followed(self, said: str, observed: Sequence[Message], ended: bool) -> list[int] | None:
        """Take a turn and what was observed behind it; return the token ids of the whole conversation where the turn
        had thoughts, None where what follows goes behind the tokens there are. `ended`: the policy ended its message.
        """
        text = self._begun + said
        if not observed and not ended:  # it goes on with the same message
            self._begun = text
            return None
        kept, self._begun = without_thoughts(text), ""
        thought = kept != text
        answer = {"role": "assistant", "content": kept.lstrip() if thought else text}
        self.messages = [*answered(self.messages, answer), *observed]
        return [int(token) for token in chat_ids(self.tokenizer, self.messages)] if thought else None


def check_strippable(chat: Sequence[Message] | None, role: str | None, media: bool) -> None:
    """Refuse a sample whose earlier turns cannot be written anew."""
    wrong = ""
    if chat is None:
        wrong = "the prompt is no chat: ask with messages"
    elif role is None:
        wrong = "the environment's role is None, so that what it says stands inside the assistant's message: give one"
    elif media:
        wrong = "the conversation has images, videos or sounds"
    if wrong:
        raise DataError(f"thoughts='strip' writes earlier turns anew, but {wrong}; or thoughts='keep'")


def check_messages(observation: Observation) -> None:
    """Refuse an observation of token ids, which no chat template writes."""
    if isinstance(observation, list | tuple) and observation and isinstance(observation[0], int):
        raise DataError(
            "thoughts='strip' writes earlier turns anew by the chat template, but the observation is token ids: give a "
            "text or messages, or thoughts='keep'"
        )

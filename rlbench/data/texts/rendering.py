"""A chat or a text as tokens, with the tokens that are the assistant's: those a loss is taken on.

Where a chat template marks them (`{% generation %}`), its marks count. Elsewhere a turn is what the template writes
after the header of an answer: the tokens between the rendering of the messages before it, with that header, and the
rendering with it. Both have to begin the whole; a template that writes earlier turns differently once more follow is
refused, as the policy would be trained on a text it never sees.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlbench.data.prompts.chat import check_read
from rlbench.data.prompts.encoded import EncodedMedia
from rlbench.data.prompts.lengths import GO_ON, answered, open_tokenizer, text_ids
from rlbench.data.prompts.prompt import Message, is_chat, message_text, plain_content
from rlbench.data.prompts.sounds import EncodedSound
from rlbench.data.texts.image_tokens import ImageTokens
from rlbench.data.texts.media_tokens import MediaTokens
from rlbench.data.texts.sound_tokens import SoundTokens
from rlbench.errors import DataError, nearest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, eq=False)
class Rendered:
    """One sequence: `tokens` (T,) int32; `trained` (T,) bool, the assistant's own; `media`, its images or its
    sounds, in the order of their tokens."""

    tokens: np.ndarray
    trained: np.ndarray
    media: tuple[EncodedMedia, ...] = ()

    @property
    def start(self) -> int:
        """Where the response begins: at the first trained token."""
        return int(self.trained.argmax())


@dataclass(frozen=True, eq=False)
class Renderer:
    """A tokenizer and a chat template (None: the tokenizer's own), called with `options`. Its refusals are DataErrors
    without the row."""

    tokenizer: Any
    template: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Any, template: str | None = None, options: Mapping[str, Any] | None = None) -> Renderer:
        """Make one of a tokenizer, its folder or hub id, or what has a `tokenizer` (a session, rollouts)."""
        if tokenizer is None:
            raise DataError(
                "whose tokens? Give the session, a tokenizer or its folder behind the rows: (rows, session). "
                "A trainer takes rows as they are: session.trainer(…, data=rows)"
            )
        if not isinstance(tokenizer, str) and not hasattr(tokenizer, "apply_chat_template"):
            tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        tokenizer = open_tokenizer(tokenizer)
        if options:
            check_read(tokenizer, options, template)
        return cls(tokenizer, template, dict(options or {}))

    @property
    def context(self) -> int | None:
        """Tokens of the model's context, as far as the tokenizer knows it."""
        known = getattr(self.tokenizer, "model_max_length", None)
        return known if isinstance(known, int) and known < 10**9 else None

    def media_tokens(self, media: Sequence[EncodedMedia]) -> MediaTokens[Any]:
        """Return how the tokenizer's own model takes such media, of one kind; DataError where it takes none."""
        kind = SoundTokens if isinstance(media[0], EncodedSound) else ImageTokens
        return kind.of(str(self.tokenizer.name_or_path))

    def text(self, prompt: str, completion: str, media: Sequence[EncodedMedia] = ()) -> Rendered:
        """Encode both by themselves, as a sampler's tokens follow a prompt's, and end with the end token. The prompt
        holds the model's own placeholders of its media."""
        if not completion.strip():
            raise DataError("its completion is empty")
        (first,) = text_ids([prompt], self.tokenizer) if prompt else ([],)
        if not first:
            raise DataError("its prompt is empty")
        rest = list(self.tokenizer(completion, add_special_tokens=False)["input_ids"])
        end = self.tokenizer.eos_token_id
        rest += [end] if end is not None and rest[-1:] != [end] else []
        return self._with_media(_rendered([*first, *rest], range(len(first), len(first) + len(rest))), media)

    def chat(
        self, messages: Sequence[Message], before: int = 0, tools: Any = None, media: Sequence[EncodedMedia] = ()
    ) -> Rendered:
        """Render messages; the first `before` of them are the prompt, where nothing is trained. `media`: those of the
        messages' placeholders, see `rlbench.data.prompts.placing.placed_as`."""
        self._check_takes(media)
        check_messages(messages, before)
        try:
            marked = MARKED.search(str(self.tokenizer.get_chat_template(self.template, tools=tools))) is not None
        except ValueError as error:
            raise DataError(f"its messages need a chat template: {str(error).split('.')[0]}; give template=") from error
        whole = self._apply(messages, tools, marked=marked)
        tokens = list(whole["input_ids"])
        if marked:
            trained = [i for i, own in enumerate(whole["assistant_masks"]) if own]
            if any(message["role"] == "assistant" for message in messages[:before]):
                start = self._border(messages[:before], tokens, tools, header=False)
                trained = [i for i in trained if i >= start]
        else:
            trained = self._turns(messages, tokens, before, tools)
        if not trained:
            raise DataError("the template writes no token of the assistant's")
        return self._with_media(_rendered(tokens, trained), media)

    def going_on(
        self,
        asked: Sequence[Message],
        said: Sequence[Message],
        tools: Any = None,
        media: Sequence[EncodedMedia] = (),
    ) -> Rendered:
        """Render an answer that goes on in the last message of its prompt; its own tokens stand behind those that the
        policy is asked with, as in a rollout."""
        self._check_takes(media)
        check_messages([*asked, *said], len(asked))
        if len(said) > 1:
            raise DataError("its prompt ends with the beginning of an answer, and more than the rest of it follows")
        texts = {"tokenize": False, "return_dict": False}
        first = str(self._apply(asked, tools, **texts, **{GO_ON: True}))
        whole = str(self._apply(answered(asked, said[0]), tools, **texts))
        if not whole.startswith(first):
            raise DataError("the template writes the beginning of its answer differently once the rest follows")
        begin, rest = (
            list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (first, whole[len(first) :])
        )
        ends = [i for i, token in enumerate(rest) if token == self.tokenizer.eos_token_id]
        rest = rest[: ends[-1] + 1] if ends else rest
        return self._with_media(_rendered([*begin, *rest], range(len(begin), len(begin) + len(rest))), media)

    def _check_takes(self, media: Sequence[EncodedMedia]) -> None:
        """Refuse media that the tokenizer's own model cannot take, before its template meets them."""
        if media:
            self.media_tokens(media)

    def _with_media(self, rendered: Rendered, media: Sequence[EncodedMedia]) -> Rendered:
        """Make room for media as the tokenizer's own model wants it."""
        return self.media_tokens(media).expanded(rendered, media) if media else rendered

    def _turns(self, messages: Sequence[Message], tokens: list[int], before: int, tools: Any) -> list[int]:
        """Return where the assistant's tokens are, by rendering what stands before and with each of its turns."""
        trained: list[int] = []
        for k, message in enumerate(messages):
            if k < before or message["role"] != "assistant":
                continue
            begin = self._border(messages[:k], tokens, tools, header=True)
            end = self._border(messages[: k + 1], tokens, tools, header=False)
            stop = self.tokenizer.eos_token_id
            ends = [i for i in range(begin, end) if tokens[i] == stop]
            # what the template writes behind the end token, as a newline, is not the policy's: it has stopped
            trained += range(begin, ends[-1] + 1 if ends else end)
        return trained

    def _border(self, messages: Sequence[Message], tokens: list[int], tools: Any, header: bool) -> int:
        """Return how many tokens these messages are; they have to begin the whole."""
        if not messages and not header:
            return 0
        part = list(self._apply(messages, tools, header=header)["input_ids"])
        if tokens[: len(part)] != part:
            raise DataError(
                f"the template writes its first {len(messages)} messages{' and the header' if header else ''} "
                "differently when more follow, so the border of a turn is not known: give template=, one that marks "
                "the assistant's part with {% generation %}, or a row per turn"
            )
        return len(part)

    def _apply(
        self, messages: Sequence[Message], tools: Any, header: bool = False, marked: bool = False, **options: Any
    ) -> Any:
        options = {"tokenize": True, "return_dict": True, **self.options, **options}
        options |= {"return_assistant_tokens_mask": True} if marked else {}
        if self.template is not None:
            options["chat_template"] = self.template
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=tools, add_generation_prompt=header, **options
            )
        except Exception as error:  # a template is a program of its own and raises what it likes
            raise DataError(f"the chat template refused: {type(error).__name__}: {error}") from error


def check_messages(messages: Sequence[Message], before: int = 0) -> None:
    """Refuse roles that nobody knows, an answer that says nothing, and messages without an answer to learn."""
    for k, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            known = ", ".join(ROLES)
            raise DataError(f"message {k} has the unknown role {role!r}{nearest(str(role), ROLES)}; known: {known}")
        said = message_text(message).strip() or message.get("tool_calls")
        if k >= before and role == "assistant" and not said:
            raise DataError(f"message {k} is an empty answer of the assistant's")
    if not any(message["role"] == "assistant" for message in messages[before:]):
        raise DataError("it has no assistant's message to learn")


def as_messages(value: Any, role: str, name: str) -> list[Message]:
    """A text as one message of `role`, a chat as it is, with the standard keys."""
    value = plain_content(value)
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, Mapping) and "role" in value:
        value = [value]
    if not is_chat(value) or not all(isinstance(message, Mapping) for message in value):
        shown = "empty" if isinstance(value, list) and not value else f"a {type(value).__name__}"
        raise DataError(f"its {name} is {shown}: wanted a text, or messages [{{'role': …, 'content': …}}]")
    return list(value)


def _rendered(tokens: Sequence[int], trained: Sequence[int]) -> Rendered:
    mask = np.zeros(len(tokens), bool)
    mask[list(trained)] = True
    if mask[0]:
        raise DataError("its first token would be trained, and nothing stands before it to predict it from")
    return Rendered(np.asarray(tokens, np.int32), mask)

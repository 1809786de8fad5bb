"""What is asked: a text, chat messages or token ids, with the reference answer a reward may need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeGuard

from rlbench.data.prompts.cells import check_name, check_text, frame_rows, is_frame, is_missing, without_nulls
from rlbench.data.prompts.encoded import EncodedMedia
from rlbench.data.prompts.images import EncodedImage
from rlbench.data.prompts.placing import KINDS, MediaKind, check_together, listed, placed_by_kind
from rlbench.data.prompts.sounds import EncodedSound
from rlbench.data.prompts.videos import EncodedVideo
from rlbench.errors import DataError, Suggesting

Message: TypeAlias = dict[str, Any]
PromptContent: TypeAlias = str | list[Message] | list[int]
OTHER_INPUTS = ("mm_processor_kwargs", "multi_modal_uuids", "prompt_embeds")
"""Inputs that vLLM's prompts may have beside text, tokens and `multi_modal_data`."""
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True)
class Prompt(Suggesting):
    """One prompt. `content`: text, chat messages (`[{"role": …, "content": …}]`) or token ids.

    `label` is the reference answer, passed on untouched to rewards; `meta` holds anything else of its row. `images`, in
    the order in which they stand: whatever `EncodedImage.from_any` takes, given here or inside of the messages, which
    keep a placeholder `{"type": "image"}` for each; likewise `sounds`, by `EncodedSound.from_any` and
    `{"type": "audio"}`, and `videos`, by `EncodedVideo.from_any` and `{"type": "video"}`. A text or token ids hold the
    model's own placeholders.
    """

    content: PromptContent
    label: Any = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[EncodedImage, ...] = ()
    sounds: tuple[EncodedSound, ...] = ()
    videos: tuple[EncodedVideo, ...] = ()

    def __post_init__(self) -> None:
        content, held = placed_by_kind(plain_content(self.content), {name: getattr(self, name) for name in KINDS})
        check_together(held)
        for name, value in {"content": content, **held}.items():
            object.__setattr__(self, name, value)
        if is_missing(self.label):
            object.__setattr__(self, "label", None)

    @property
    def media(self) -> tuple[EncodedMedia, ...]:
        """Its images and videos, or its sounds."""
        return (*self.images, *self.videos, *self.sounds)

    @property
    def text(self) -> str:
        """The prompt for a reader: the text, the last message's content, or the token ids in brackets.

        Images and what else is no text in a message are named in brackets: `[image] What is this?`.
        """
        if isinstance(self.content, str):
            return self.content
        return message_text(self.content[-1]) if is_chat(self.content) else str(list(self.content))


def message_text(message: Mapping[str, Any]) -> str:
    """A message's text; its content may be a text, a list of parts (text, image, …) or missing."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        return " ".join(map(part_text, content))
    return "" if content is None else str(content)


def part_text(part: Any) -> str:
    """One part of a message: its text, or its kind in brackets (`[image]`)."""
    if not isinstance(part, Mapping):
        return str(part)
    kind = str(part.get("type", "part"))
    return str(part["text"]) if "text" in part and kind in ("text", "part") else f"[{kind.removesuffix('_url')}]"


def is_chat(content: Any) -> TypeGuard[list[Message]]:
    """Whether a prompt's content is chat messages."""
    return isinstance(content, list) and bool(content) and isinstance(content[0], Mapping)


def as_prompts(prompts: Any) -> list[Prompt]:
    """Accept what people hold: one prompt or many; strings, messages, token ids, `Prompt`s, or rows (dicts, a data
    frame's too) with a `prompt`, or vLLM's `prompt_token_ids`, and perhaps a `label`, and `images`, `videos` or
    `audios` (or `image`, `video`, `audio`, or vLLM's `multi_modal_data`); a `PromptSet`.

    Raises DataError for an empty list and for anything else, naming the index.
    """
    if is_frame(prompts):
        prompts = frame_rows(prompts)  # iterating a data frame would give the names of its columns
    elif hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if isinstance(prompts, str | Prompt | Mapping) or is_chat_or_tokens(prompts):
        prompts = [prompts]
    if not isinstance(prompts, Iterable):
        mend = ": take some of it, .take(n)" if hasattr(prompts, "take") else ""
        raise DataError(f"prompts: wanted a list of texts, chats or token ids, got {type(prompts).__name__}{mend}")
    listed = [as_prompt(value, i) for i, value in enumerate(prompts)]
    if not listed:
        raise DataError("the prompt list is empty: give at least one prompt")
    return listed


def as_prompt(value: Any, index: int, **media: Sequence[Any]) -> Prompt:
    """One prompt of `as_prompts`, with `images`, `videos` or `sounds` that came beside it; `index` names it where it is
    none (DataError)."""
    beside: dict[str, Any] = {name: tuple(own) for name, own in media.items()}
    if isinstance(value, Prompt):
        with _naming(index):
            check_text(value.content)
            more = {name: own for name, own in beside.items() if own}
            return replace(value, **more) if more else value
    if isinstance(value, Mapping) and ("prompt" in value or "prompt_token_ids" in value):
        return _of_row(value, index)
    with _naming(index):
        value = plain_content(value)
        check_text(value)
    if isinstance(value, str):
        if not value:
            raise DataError(f"prompt {index} is an empty text")
        return _with_media(value, index, beside)
    if is_chat_or_tokens(value):
        return _with_media(list(value), index, beside)
    shown = repr(value)
    raise DataError(
        f"prompt {index}: wanted a text, chat messages ([{{'role': …, 'content': …}}]), token ids or a row with "
        f"'prompt'; got {type(value).__name__} {shown[:60]}{'…' if len(shown) > 60 else ''}"
    )


def _of_row(row: Mapping[str, Any], index: int) -> Prompt:
    """A dict with what is asked; of vLLM's, the token ids count before the text."""
    other = [name for name in OTHER_INPUTS if row.get(name) is not None]
    if other:
        raise DataError(
            f"prompt {index} has {other[0]}: only text, chats, token ids, images, videos and sounds are generated from"
        )
    asked = "prompt_token_ids" if row.get("prompt_token_ids") is not None else "prompt"
    media = row.get("multi_modal_data") or {}
    if not isinstance(media, Mapping) or set(media) - {kind.place for kind in KINDS.values()}:
        seen = ", ".join(map(str, media))
        wanted = ", ".join(f"{{{kind.place!r}: …}}" for kind in KINDS.values())
        raise DataError(f"prompt {index} has multi_modal_data of {seen}: wanted {wanted}")
    with _naming(index):
        for name in ("label", *(column for kind in KINDS.values() for column in kind.columns)):
            check_name(row, name)
    columns = {kind: media_column(row, kind) or "" for kind in KINDS.values()}
    used = ("prompt", "prompt_token_ids", "label", "multi_modal_data", *columns.values(), *OTHER_INPUTS)
    rest = {name: value for name, value in row.items() if name not in used}
    beside = {k.field: listed(media.get(k.place), k) + listed(row.get(name), k) for k, name in columns.items()}
    return replace(as_prompt(row[asked], index, **beside), label=row.get("label"), meta=rest)


def media_column(row: Mapping[str, Any], kind: MediaKind[Any]) -> str | None:
    """Return the column of a row that holds what is of this kind; None where it has none."""
    return next((name for name in kind.columns if name in row), None)


def _with_media(content: PromptContent, index: int, beside: Mapping[str, Any]) -> Prompt:
    with _naming(index):
        return Prompt(content, **beside)


@contextlib.contextmanager
def _naming(index: int) -> Iterator[None]:
    """Say which prompt it is that something is wrong with."""
    try:
        yield
    except DataError as error:
        raise DataError(f"prompt {index}: {error}") from error


def is_chat_or_tokens(value: Any) -> bool:
    """Whether a value is chat messages or token ids, as they are or as an array."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list | tuple) or not value:
        return False
    return is_token_ids(value) or all(isinstance(m, Mapping) and "role" in m and "prompt" not in m for m in value)


def is_token_ids(value: Any) -> bool:
    """Whether a value is a list of token ids, and not an empty one."""
    some = isinstance(value, list | tuple) and len(value) > 0
    return some and all(isinstance(token, int) and not isinstance(token, bool) for token in value)


# -- a dataset's cells


def plain_content(value: Any) -> Any:
    """What a cell of a table holds, as a prompt's content.

    Arrays become lists. Messages lose the keys that Arrow filled in with null because other rows have them, at every
    depth; those of ShareGPT (`{"from": "human", "value": …}`) get the standard names. All else comes back as it is.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple) and value and all(isinstance(message, Mapping) for message in value):
        return [_message(message) for message in value]
    return value


def as_chat(content: PromptContent, system: str | None = None) -> list[Message]:
    """A text becomes a user message, a chat stays; with `system`, a system message comes before."""
    if isinstance(content, str):
        content = [{"role": "user", "content": content}]
    if not is_chat(content):
        raise DataError("it is token ids, which cannot become a chat: give its text, or leave out system= and chat=")
    if system is None:
        return list(content)
    if content[0]["role"] == "system":
        raise DataError(
            f"its chat begins with a system message already ({str(content[0].get('content'))[:40]!r}): leave out "
            "system=, or drop that message: prompt=lambda row: row['messages'][1:]"
        )
    return [{"role": "system", "content": system}, *content]


def _message(message: Mapping[str, Any]) -> Message:
    if "role" not in message and {"from", "value"} <= set(message):
        sender = message["from"]
        if sender not in SHAREGPT_ROLES:
            known = ", ".join(SHAREGPT_ROLES)
            raise DataError(f"a message is from {sender!r}; known: {known}. Give prompt= a function of the row")
        message = {"role": SHAREGPT_ROLES[sender], "content": message["value"]}
    plain: Message = without_nulls(message)
    return {key: plain.get(key) for key in message if key in plain or key == "content"}

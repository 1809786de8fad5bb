"""Rows of a table as sequences: read, rendered row by row, and refused where they would be cut."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

import numpy as np

from rlbench.data.prompts.cells import check_name, check_text, without_nulls
from rlbench.data.prompts.chat import chat_options, check_read, schemas
from rlbench.data.prompts.encoded import EncodedMedia
from rlbench.data.prompts.lengths import continues
from rlbench.data.prompts.loading import OnError, check_on_error, chosen_rows, made_rows
from rlbench.data.prompts.placing import (
    IMAGE,
    KINDS,
    SOUND,
    VIDEO,
    MediaKind,
    by_kind,
    check_together,
    listed,
    media_parts,
    placed_as,
)
from rlbench.data.prompts.prompt import as_chat, plain_content
from rlbench.data.prompts.sources import Row, as_encoded, open_source
from rlbench.data.texts.rendering import Rendered, Renderer, as_messages
from rlbench.errors import DataError, nearest

OnLong = Literal["raise", "report"]
READ = ("prompt", "completion", "messages", "chosen", "rejected")
"""Columns of texts or messages."""
MEDIA_COLUMNS = tuple(name for kind in KINDS.values() for name in kind.columns)
MAY_HAVE = ("tools", "margin", "heads", *MEDIA_COLUMNS)
"""Columns that rows need not have."""
Made = TypeVar("Made")
Maker = TypeVar("Maker", bound=Callable[..., Any])


@dataclass(frozen=True)
class Reading:
    """Where rows come from and how they are written: the options that all makers of texts share.

    `split`, `config`, `revision`, `limit` and `shuffle_seed` are those of `rb.data.load`; `chat`: a prompt that is a
    text becomes a user's message; `system`: and this one stands before it; `template`: a chat template in place of the
    tokenizer's own, or options of it as in `rollout`, which are `chat_template_kwargs` too; `tools`: those of rows that
    have none of their own; `max_length`: the most tokens of a sequence, by default the tokenizer's context; `on_long`:
    "raise" refuses longer ones, "report" leaves them out and warns with their number; `on_error`: likewise of rows that
    cannot be read; `fetch_images`: read images and sounds at http addresses, which are refused otherwise. Nothing is
    ever cut.
    """

    split: str | None = None
    config: str | None = None
    revision: str | None = None
    limit: int | None = None
    shuffle_seed: int | None = None
    chat: bool = False
    system: str | None = None
    template: str | Mapping[str, Any] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    tools: Sequence[Any] | None = None
    max_length: int | None = None
    on_long: OnLong = "raise"
    on_error: OnError = "raise"
    fetch_images: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any], maker: str) -> Reading:
        """Make one of keyword arguments, and refuse those that mean nothing."""
        known = list(cls.__dataclass_fields__)
        for name in options:
            if name not in known:
                raise DataError(f"{maker}: unknown option {name!r}{nearest(name, known)}; known: {', '.join(known)}")
        given = dict(options)
        if isinstance(given.get("template"), Mapping):
            if given.get("chat_template_kwargs") is not None:
                raise DataError(f"{maker}: template and chat_template_kwargs are one option: give one of them")
            given["chat_template_kwargs"] = given.pop("template")
        if given.get("tools") is not None:
            given["tools"] = schemas(given["tools"])
        reading = cls(**given)
        if reading.on_long not in ("raise", "report"):
            raise DataError(f"{maker}: on_long={reading.on_long!r}: wanted 'raise' or 'report'")
        check_on_error(reading.on_error)
        for name in ("limit", "max_length"):
            value = getattr(reading, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise DataError(f"{maker}: {name}={value!r}: wanted a whole number, at least one")
        return reading

    def made(self, source: Any, make: Callable[[Row], Made]) -> tuple[list[int], list[Made]]:
        """Read the rows, and make something of each; a DataError names its row. Returns the rows' indices too."""
        name, table = open_source(source, self.split, self.config, self.revision)
        chosen, rows = chosen_rows(as_encoded(table, MEDIA_COLUMNS), self.limit, self.shuffle_seed)

        def one(row: Row, index: int) -> Made:
            try:
                if not isinstance(row, Mapping):
                    raise DataError(f"it is a {type(row).__name__}, not a dict of columns")
                check_text({name: row[name] for name in READ if name in row})
                for name in MAY_HAVE:
                    check_name(row, name)
                return make(row)
            except DataError as error:
                raise DataError(f"row {index}: {error}") from error

        indices, made = made_rows(chosen, rows, one, self.on_error, name or "the source")
        if not made:
            raise DataError("the source has no rows")
        return indices, made

    def fitting(self, lengths: Sequence[int], rows: Sequence[int], renderer: Renderer) -> list[int]:
        """Return which sequences are short enough; what to do about the others is `on_long`."""
        limit = self.max_length or renderer.context
        long = [i for i, length in enumerate(lengths) if limit is not None and length > limit]
        if not long:
            return list(range(len(lengths)))
        worst = max(long, key=lambda i: lengths[i])
        said = (
            f"{len(long)} of {len(lengths)} rows would be cut: they have more than max_length={limit} tokens; the "
            f"longest has {lengths[worst]} (row {rows[worst]})"
        )
        if self.on_long == "raise" or len(long) == len(lengths):
            raise DataError(f'{said}. Raise max_length, shorten them, or leave them out: on_long="report"')
        warnings.warn(f"{said}. Left out", stacklevel=3)
        return [i for i in range(len(lengths)) if i not in set(long)]

    def renderer(self, tokenizer: Any) -> Renderer:
        """Return what writes the rows."""
        template = self.template if isinstance(self.template, str) else None
        renderer = Renderer.of(tokenizer, template, chat_options(self.chat_template_kwargs))
        if self.tools:
            check_read(renderer.tokenizer, {"tools": self.tools}, template)
        return renderer

    def tools_of(self, row: Row) -> list[dict[str, Any]] | None:
        """Return the tools that a row names, else those of all rows; as JSON, or as a table's nested column."""
        given = row.get("tools")
        if isinstance(given, str) and given.strip():
            try:
                given = json.loads(given)
            except ValueError as error:
                raise DataError(f"its tools are no JSON: {error}") from None
        given = without_nulls(given)
        return schemas(given) if given else self.tools  # type: ignore[return-value]

    def prompt_of(self, row: Row) -> tuple[Any, tuple[EncodedMedia, ...]]:
        """Return the row's prompt, a text or messages with placeholders of images or sounds, and those."""
        prompt = plain_content(column(row, "prompt"))
        if isinstance(prompt, str) and not prompt:
            raise DataError("its prompt is empty")
        if self.chat or self.system is not None:
            prompt = as_chat(prompt, self.system)
        return self.placed(prompt, row)

    def placed(self, content: Any, row: Row) -> tuple[Any, tuple[EncodedMedia, ...]]:
        """Return a prompt or a chat of the row with placeholders, and its images or sounds in their order: those in the
        chat's parts, and those of the row's columns `images` or `image`, `audios` or `audio`."""
        watched = isinstance(content, list) and next(media_parts(content, VIDEO), None) is not None
        if watched or any(row.get(name) is not None for name in VIDEO.columns):
            raise DataError(
                "it has a video, and texts are trained with images and sounds alone: leave its part or column out"
            )
        seen, heard = (self._placed_as(kind, content, row) for kind in (IMAGE, SOUND))
        check_together({IMAGE.field: seen[1], VIDEO.field: (), SOUND.field: heard[1]})
        return heard if heard[1] else seen

    def _placed_as(self, kind: MediaKind[Any], content: Any, row: Row) -> tuple[Any, tuple[EncodedMedia, ...]]:
        beside = next((row[name] for name in kind.columns if row.get(name) is not None), None)
        return placed_as(kind, content, listed(beside, kind), self.fetch_images)

    def continued(
        self,
        renderer: Renderer,
        prompt: Any,
        completion: Any,
        name: str,
        tools: Any,
        media: Sequence[EncodedMedia] = (),
    ) -> Rendered:
        """Render a completion, a text or messages, after its prompt, which alone has images or sounds."""
        completion = plain_content(completion)
        for kind in KINDS.values() if isinstance(completion, list) else ():
            if next(media_parts(completion, kind), None):
                raise DataError(f"its {name} shows {kind.one}, which a prompt alone may: write the row as `messages`")
        if isinstance(prompt, str) and isinstance(completion, str):
            if idle := renderer.options or tools:
                named = ", ".join(renderer.options) if renderer.options else f"tools ({len(idle)})"
                raise DataError(f"{named} would have no effect: it is a text, no chat; chat=True makes it one")
            return renderer.text(prompt, completion, media)
        asked, said = as_messages(prompt, "user", "prompt"), as_messages(completion, "assistant", name)
        if asked and continues(asked) and said[0]["role"] == "assistant":
            return renderer.going_on(asked, said, tools, media)
        return renderer.chat([*asked, *said], len(asked), tools, media)


def shows_options(maker: Maker) -> Maker:
    """Let Shift-Tab and Tab show the fields of `Reading` in place of `**options`."""
    signature = inspect.signature(maker)
    own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    more = [
        inspect.Parameter(f.name, own[0].KEYWORD_ONLY, default=f.default, annotation=f.type) for f in fields(Reading)
    ]
    maker.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
    return maker


def column(row: Row, name: str) -> Any:
    """A row's value, which must be there."""
    if row.get(name) is None:
        columns = ", ".join(map(str, row)) or "nothing"
        near = nearest(name, [str(key) for key in row if key != name])
        raise DataError(f"it has no column {name!r}, or null in it; it has {columns}{near}")
    return row[name]


def media_in(rendered: Sequence[Rendered]) -> dict[str, Any]:
    """Return the images and the sounds of each sequence, by a batch's fields; None where none has any."""
    found = [by_kind(one.media) for one in rendered]
    return {name: _unless_none(tuple(one[name] for one in found)) for name in KINDS}


def _unless_none(media: tuple[tuple[Any, ...], ...]) -> tuple[tuple[Any, ...], ...] | None:
    return media if any(media) else None


def split_at_response(rendered: Sequence[Rendered]) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Return prompts, responses and the responses' masks."""
    return (
        [one.tokens[: one.start] for one in rendered],
        [one.tokens[one.start :] for one in rendered],
        [one.trained[one.start :] for one in rendered],
    )

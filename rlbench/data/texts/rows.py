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
from rlbench.data.prompts.images import EncodedImage
from rlbench.data.prompts.lengths import continues
from rlbench.data.prompts.loading import OnError, check_on_error, chosen_rows, made_rows
from rlbench.data.prompts.placing import IMAGE_COLUMNS, SOUND, VIDEO, listed, media_parts, placed
from rlbench.data.prompts.prompt import as_chat, plain_content
from rlbench.data.prompts.sources import Row, as_encoded, open_source
from rlbench.data.texts.rendering import Rendered, Renderer, as_messages
from rlbench.errors import DataError, nearest

OnLong = Literal["raise", "report"]
READ = ("prompt", "completion", "messages", "chosen", "rejected")
"""Columns of texts or messages."""
MAY_HAVE = ("tools", "margin", "heads", *IMAGE_COLUMNS)
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
    cannot be read; `fetch_images`: read images at http addresses, which are refused otherwise. Nothing is ever cut.
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
        chosen, rows = chosen_rows(as_encoded(table, IMAGE_COLUMNS), self.limit, self.shuffle_seed)

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

    def prompt_of(self, row: Row) -> tuple[Any, tuple[EncodedImage, ...]]:
        """Return the row's prompt, a text or messages with placeholders of images, and those images."""
        prompt = plain_content(column(row, "prompt"))
        if isinstance(prompt, str) and not prompt:
            raise DataError("its prompt is empty")
        if self.chat or self.system is not None:
            prompt = as_chat(prompt, self.system)
        return self.placed(prompt, row)

    def placed(self, content: Any, row: Row) -> tuple[Any, tuple[EncodedImage, ...]]:
        """Return a prompt or a chat of the row with placeholders of images, and the images in their order: those in the
        chat's parts, and those of the row's column `images` or `image`."""
        for kind in (SOUND, VIDEO):
            held = isinstance(content, list) and next(media_parts(content, kind), None) is not None
            if held or any(row.get(name) is not None for name in kind.columns):
                raise DataError(
                    f"it has a {kind.name}, and texts are trained with images alone: leave its part or column out"
                )
        beside = next((row[name] for name in IMAGE_COLUMNS if row.get(name) is not None), None)
        return placed(content, listed(beside), self.fetch_images)

    def continued(
        self,
        renderer: Renderer,
        prompt: Any,
        completion: Any,
        name: str,
        tools: Any,
        images: Sequence[EncodedImage] = (),
    ) -> Rendered:
        """Render a completion, a text or messages, after its prompt, which alone has images."""
        completion = plain_content(completion)
        if isinstance(completion, list) and next(media_parts(completion), None):
            raise DataError(f"its {name} shows an image, which a prompt alone may: write the row as `messages`")
        if isinstance(prompt, str) and isinstance(completion, str):
            if idle := renderer.options or tools:
                named = ", ".join(renderer.options) if renderer.options else f"tools ({len(idle)})"
                raise DataError(f"{named} would have no effect: it is a text, no chat; chat=True makes it one")
            return renderer.text(prompt, completion, images)
        asked, said = as_messages(prompt, "user", "prompt"), as_messages(completion, "assistant", name)
        if asked and continues(asked) and said[0]["role"] == "assistant":
            return renderer.going_on(asked, said, tools, images)
        return renderer.chat([*asked, *said], len(asked), tools, images)


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


def images_in(rendered: Sequence[Rendered]) -> tuple[tuple[EncodedImage, ...], ...] | None:
    """Return the images of each sequence; None where none has any."""
    images = tuple(one.images for one in rendered)
    return images if any(images) else None


def split_at_response(rendered: Sequence[Rendered]) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Return prompts, responses and the responses' masks."""
    return (
        [one.tokens[: one.start] for one in rendered],
        [one.tokens[one.start :] for one in rendered],
        [one.trained[one.start :] for one in rendered],
    )

"""Rows of a table as sequences: read, rendered row by row, and refused where they would be cut."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

import numpy as np

from rlbench.data.prompts.loading import chosen_rows
from rlbench.data.prompts.prompt import as_chat, plain_content
from rlbench.data.prompts.sources import Row, open_source
from rlbench.data.texts.rendering import Rendered, Renderer, as_messages
from rlbench.errors import DataError, nearest

OnLong = Literal["raise", "report"]
Made = TypeVar("Made")
Maker = TypeVar("Maker", bound=Callable[..., Any])


@dataclass(frozen=True)
class Reading:
    """Where rows come from and how they are written: the options that all makers of texts share.

    `split`, `config`, `revision`, `limit` and `shuffle_seed` are those of `rb.data.load`; `chat`: a prompt that is a
    text becomes a user's message; `system`: and this one stands before it; `template`: a chat template in place of the
    tokenizer's own; `max_length`: the most tokens of a sequence, by default the tokenizer's context; `on_long`: "raise"
    refuses longer ones, "report" leaves them out and warns with their number. Nothing is ever cut.
    """

    split: str | None = None
    config: str | None = None
    revision: str | None = None
    limit: int | None = None
    shuffle_seed: int | None = None
    chat: bool = False
    system: str | None = None
    template: str | None = None
    max_length: int | None = None
    on_long: OnLong = "raise"

    @classmethod
    def of(cls, options: Mapping[str, Any], maker: str) -> Reading:
        """Make one of keyword arguments, and refuse those that mean nothing."""
        known = list(cls.__dataclass_fields__)
        for name in options:
            if name not in known:
                raise DataError(f"{maker}: unknown option {name!r}{nearest(name, known)}; known: {', '.join(known)}")
        reading = cls(**options)
        if reading.on_long not in ("raise", "report"):
            raise DataError(f"{maker}: on_long={reading.on_long!r}: wanted 'raise' or 'report'")
        for name in ("limit", "max_length"):
            value = getattr(reading, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise DataError(f"{maker}: {name}={value!r}: wanted a whole number, at least one")
        return reading

    def made(self, source: Any, make: Callable[[Row], Made]) -> tuple[list[int], list[Made]]:
        """Read the rows, and make something of each; a DataError names its row. Returns the rows' indices too."""
        indices, rows = chosen_rows(open_source(source, self.split, self.config, self.revision)[1], *self._chosen)
        made = []
        for index, row in zip(indices, rows, strict=True):
            try:
                if not isinstance(row, Mapping):
                    raise DataError(f"it is a {type(row).__name__}, not a dict of columns")
                made.append(make(row))
            except DataError as error:
                raise DataError(f"row {index}: {error}") from error
        if not made:
            raise DataError("the source has no rows")
        return indices, made

    @property
    def _chosen(self) -> tuple[int | None, int | None]:
        return self.limit, self.shuffle_seed

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

    def prompt_of(self, row: Row) -> Any:
        """The row's prompt: a text, or messages."""
        prompt = plain_content(column(row, "prompt"))
        if isinstance(prompt, str) and not prompt:
            raise DataError("its prompt is empty")
        if self.chat or self.system is not None:
            prompt = as_chat(prompt, self.system)
        return prompt

    def continued(self, renderer: Renderer, prompt: Any, completion: Any, name: str, tools: Any) -> Rendered:
        """A completion, a text or messages, after its prompt."""
        completion = plain_content(completion)
        if isinstance(prompt, str) and isinstance(completion, str):
            return renderer.text(prompt, completion)
        asked, said = as_messages(prompt, "user", "prompt"), as_messages(completion, "assistant", name)
        return renderer.chat([*asked, *said], len(asked), tools)


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


def split_at_response(rendered: Sequence[Rendered]) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Return prompts, responses and the responses' masks."""
    return (
        [one.tokens[: one.start] for one in rendered],
        [one.tokens[one.start :] for one in rendered],
        [one.trained[one.start :] for one in rendered],
    )

"""`rb.data.load`: rows of any source as prompts, with what is too long told instead of cut."""

from __future__ import annotations

import string
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from rlbench.data.prompts.cells import check_name, is_missing
from rlbench.data.prompts.chat import Templated, chat_options
from rlbench.data.prompts.lengths import LongPrompt, open_note, open_tokenizer, token_counts
from rlbench.data.prompts.placing import KINDS, MediaKind, listed, placed_by_kind
from rlbench.data.prompts.prompt import Prompt, as_chat, as_prompt, is_chat, media_column, plain_content
from rlbench.data.prompts.set import PromptSet
from rlbench.data.prompts.sources import Row, as_encoded, open_source
from rlbench.data.prompts.stream import permutation
from rlbench.errors import DataError, nearest
from rlbench.traces import user_error, user_stacklevel
from rlbench.user_code import user_code

FromRow: TypeAlias = str | Callable[[Row], Any]
OnLong = Literal["report", "raise", "keep"]
OnError = Literal["raise", "report"]
Made = TypeVar("Made")
PROBLEMS = (("question", "answer"), ("problem", "answer"), ("problem", "solution"))
"""Columns of a problem and its answer, in GSM8K, MATH-500 and MATH: of rows without a `prompt`, where none is named."""
HEAD = 60
"""Characters of a prompt in a message."""


def load(
    source: Any,
    *,
    prompt: FromRow = "prompt",
    label: FromRow | None = "label",
    images: FromRow | None = "images",
    sounds: FromRow | None = "audios",
    videos: FromRow | None = "videos",
    fetch_images: bool = False,
    split: str | None = None,
    system: str | None = None,
    template: FromRow | Mapping[str, Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Any] | None = None,
    chat: bool = False,
    tokenizer: Any = None,
    max_prompt_tokens: int | None = None,
    on_long: OnLong = "report",
    on_error: OnError = "raise",
    limit: int | None = None,
    shuffle_seed: int | None = None,
    meta: Sequence[str] | None = None,
    name: str | None = None,
    config: str | None = None,
    revision: str | None = None,
) -> PromptSet:
    r"""Read prompts, with their reference answers, from what people hold.

        train = rb.data.load("openai/gsm8k", config="main", split="train", prompt="question", label="answer",
                             system="Reason step by step.", tokenizer=path, max_prompt_tokens=512)
        held = rb.data.load("tasks/*.jsonl", template="{question}\nAnswer:", label=lambda row: row["answer"][-1])

    Args:
        source: a dataset of the `datasets` library (one split, a dict of splits, or a stream), a hub id, a folder that
            `datasets` reads, a file (`.parquet`, `.jsonl`, `.json`, `.csv`, `.tsv`) or a pattern of files
            ("data/*.csv"), a pandas frame, or a list of texts, chats, token ids, dicts or `Prompt`s.
        prompt: the column of the prompt (a text, chat messages or token ids), or a function of the row that gives it.
            Messages in ShareGPT's form are brought into the standard one.
        label: likewise for the reference answer, which rewards get; None, or no column "label", for no labels. Where
            neither is named and rows have no `prompt`, the columns of GSM8K (`question`, `answer`) and of MATH
            (`problem` with `answer`, else `solution`) are read.
        images: likewise for the images, one or a list (PIL, path, bytes, data URL, or an image column of `datasets`);
            None, or no column "images" or "image", for those in the messages alone. They stand where the chat has
            `{"type": "image"}` or `<image>`, else before the text of its first user message; a text needs chat=True,
            or the model's own placeholders. A token count has one for each placeholder, as the template writes it.
        sounds: likewise for the sounds (paths, bytes, data URLs, `(array, rate)`, or an audio column of `datasets`), by
            columns "audios" or "audio", `{"type": "audio"}` and `<audio>`.
        videos: likewise for the videos (paths, bytes, data URLs, `(frames, fps)`, or a video column of `datasets`), by
            columns "videos" or "video", `{"type": "video"}` and `<video>`.
        fetch_images: read images, videos and sounds at http addresses, which are refused otherwise.
        split: which split, where there are several: "test", or for a hub id or folder "train[:10%]" too.
        system: a system message put before each prompt; a text becomes a chat then.
        template: makes the prompt from the row's columns: "{question}\nAnswer:", or a function of the row. Or options
            of the chat template, as `chat_template_kwargs`.
        chat_template_kwargs, tools: what chats are counted with, as `template` and `tools` of `rollout`, which is given
            the same.
        chat: texts become a user message, so that the engine puts them through its chat template.
        tokenizer: a folder, hub id or tokenizer of `transformers`: the prompts' `lengths` are counted, as the engines
            will encode them.
        max_prompt_tokens: more than so many tokens is too long. Nothing is ever cut.
        on_long: what becomes of too long prompts, which `.too_long` lists in any case: "report" leaves them out and
            warns with their number and the longest, "raise" refuses them, "keep" keeps them.
        on_error: what becomes of a row that gives no prompt (none in it, text that is no Unicode, …): "raise" refuses
            it, "report" leaves it out and warns with the number of such and the first.
        limit: rows to read at most; a stream needs it.
        shuffle_seed: shuffles the rows, before the limit; of a stream, the rows that were read.
        meta: the columns to keep in each prompt's `meta`; None keeps all that are neither prompt nor label.
        name: what the set is called in mixtures and messages; default: after the source.
        config, revision: of a hub id; `config` also of a folder.
    """
    if on_long not in ("report", "raise", "keep"):
        raise DataError(f"on_long={on_long!r}: wanted 'report', 'raise' or 'keep'")
    check_on_error(on_error)
    if isinstance(template, Mapping):
        if chat_template_kwargs is not None:
            raise DataError("template and chat_template_kwargs are options of the chat template both: give one of them")
        template, chat_template_kwargs = None, template
    chat_with = chat_options(chat_template_kwargs, tools)
    if chat_with and tokenizer is None:
        raise DataError(f"{', '.join(chat_with)} would have no effect: chats are counted with it, by tokenizer=…")
    if template is not None and prompt != "prompt":
        raise DataError("give prompt= or template=, not both: a template makes the prompt from the whole row")
    for option, value in (("max_prompt_tokens", max_prompt_tokens), ("limit", limit)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise DataError(f"{option}={value!r}: wanted a whole number, at least one")
    source_name, table = open_source(source, split, config, revision)
    name = source_name if name is None else name
    media = {"images": images, "videos": videos, "sounds": sounds}
    named_all = [column for field, wanted in media.items() for column in named_columns(wanted, KINDS[field])]
    indices, rows = chosen_rows(as_encoded(table, named_all), limit, shuffle_seed)
    as_asked = _PromptMaker(prompt, label, media, fetch_images, template, system, chat, meta)
    what = name or "the source"
    indices, prompts = made_rows(indices, rows, as_asked, on_error, what)
    whole = PromptSet(tuple(prompts), name)
    if not len(whole):
        raise DataError(f"{what} has no rows")
    if note := open_note(whole, what):
        mend = "if that is the answer, leave it out: prompt=lambda row: row['messages'][:-1]"
        warnings.warn(f"{note}: {mend}", stacklevel=2)
    if tokenizer is None and max_prompt_tokens is None:
        return whole
    tokenizer = None if tokenizer is None else open_tokenizer(tokenizer)
    if chat_with:
        if not any(is_chat(prompt.content) for prompt in whole):
            raise DataError(f"{', '.join(chat_with)} would have no effect: {what} has no chats (messages)")
        tokenizer = Templated(tokenizer, chat_with)
    counts = token_counts(whole.prompts, indices, tokenizer)
    whole = replace(whole, lengths=counts, max_prompt_tokens=max_prompt_tokens)
    return whole if max_prompt_tokens is None else _without_long(whole, indices, counts, max_prompt_tokens, on_long)


def named_columns(wanted: FromRow | None, kind: MediaKind[Any]) -> tuple[Any, ...]:
    """The columns that may hold what is of this kind: those that rows usually have, or the one that is asked for."""
    return kind.columns if wanted == kind.columns[0] else (wanted,)


@dataclass(frozen=True)
class _PromptMaker:
    """How a row becomes a prompt; the fields are arguments of `load`, `media` those of each kind."""

    prompt: FromRow
    label: FromRow | None
    media: Mapping[str, FromRow | None]
    fetch_images: bool
    template: FromRow | None
    system: str | None
    chat: bool
    meta: Sequence[str] | None

    def __call__(self, row: Row, index: int) -> Prompt:
        """The prompt of row `index`. Raises DataError naming the row."""
        if not isinstance(row, Mapping):
            raise DataError(f"row {index} is a {type(row).__name__}: wanted a dict of columns")
        prompt, named = self._columns(row)
        if self.template is None or callable(self.template):
            content = _value(row, self.template or prompt, "template" if self.template else "prompt", index)
        else:
            content = _formatted(self.template, row, index)
        beside, columns = {}, set()
        for name, wanted in self.media.items():
            column, beside[name] = self._held(row, index, wanted, KINDS[name])
            columns.add(column)
        try:
            if isinstance(content, Prompt | Mapping):
                raise DataError(f"its prompt is a {type(content).__name__}: wanted a text, a chat or token ids")
            content = plain_content(content)
            if self.system is not None or self.chat:
                content = as_chat(content, self.system)
            if is_chat(content):
                content, beside = placed_by_kind(content, beside, self.fetch_images)
            asked = as_prompt(content, index, **beside)
        except DataError as error:
            raise DataError(f"row {index}: {str(error).replace(f'prompt {index}', 'its prompt', 1)}") from None
        if named == "label":
            self._need_name(row, "label", index)
        unlabelled = named is None or (named == "label" and "label" not in row)
        label = None if unlabelled else _value(row, named or "label", "label", index)
        if self.meta is not None:
            return replace(asked, label=label, meta={name: _value(row, name, "meta", index) for name in self.meta})
        used = {named, prompt if self.template is None else None, *columns}
        return replace(asked, label=label, meta={name: value for name, value in row.items() if name not in used})

    def _held(
        self, row: Row, index: int, wanted: FromRow | None, kind: MediaKind[Any]
    ) -> tuple[FromRow | None, tuple[Any, ...]]:
        """What the images, or what else of this kind, come from, None where the row has none beside its prompt, and
        those."""
        column = wanted
        if wanted == kind.columns[0]:
            for name in kind.columns:
                self._need_name(row, name, index)
            column = media_column(row, kind)
        return column, () if column is None else listed(_value(row, column, f"{kind.name}s", index), kind)

    @staticmethod
    def _need_name(row: Row, name: str, index: int) -> None:
        """Refuse a row that has the column of this name under one that differs by spaces or capitals alone."""
        try:
            check_name(row, name)
        except DataError as error:
            raise DataError(f"row {index}: {error}, or say which is meant: {name}=…") from None

    def _columns(self, row: Row) -> tuple[FromRow, FromRow | None]:
        """The columns of prompt and label; of a row of a known form, where none are named, those of that."""
        if self.template is None and (self.prompt, self.label) == ("prompt", "label") and "prompt" not in row:
            known = (columns for columns in PROBLEMS if row.keys() >= set(columns))
            return next(known, ("prompt", "label"))
        return self.prompt, self.label


def chosen_rows(table: Any, limit: int | None, seed: int | None) -> tuple[list[int], Iterable[Row]]:
    """Indices of the rows that are read, in the order wanted, and the rows; of a stream, of the first `limit` rows."""
    if not hasattr(table, "__len__"):
        if limit is None:
            raise DataError("this is a stream without a length: give limit=, the number of rows to read")
        table = list(islice(table, limit))
    order = range(len(table)) if seed is None else permutation(len(table), seed).tolist()
    indices = list(order[:limit])
    if hasattr(table, "select"):  # a Dataset: one pass over Arrow instead of a read per row
        return indices, table.select(indices)
    return indices, (table[i] for i in indices)


def made_rows(
    indices: Sequence[int], rows: Iterable[Row], make: Callable[[Row, int], Made], on_error: OnError, what: str
) -> tuple[list[int], list[Made]]:
    """Make something of each row, and return the rows' indices too; of a DataError see `on_error` of `load`."""
    kept, made, errors = [], [], []
    for index, row in zip(indices, rows, strict=True):
        try:
            made.append(make(row, index))
            kept.append(index)
        except DataError as error:
            if on_error == "raise":
                raise
            errors.append(error)
    if errors and not made:
        raise errors[0]
    if errors:
        said = f"{what}: {len(errors)} of {len(indices)} rows cannot be read and are left out. The first: {errors[0]}"
        warnings.warn(said, stacklevel=user_stacklevel())
    return kept, made


def check_on_error(on_error: str) -> None:
    """Refuse another word for what becomes of rows that cannot be read."""
    if on_error not in ("raise", "report"):
        raise DataError(f"on_error={on_error!r}: wanted 'raise' or 'report'")


def _without_long(whole: PromptSet, rows: Sequence[int], counts: np.ndarray, limit: int, on_long: OnLong) -> PromptSet:
    over = np.flatnonzero(counts > limit).tolist()
    long = tuple(LongPrompt(whole.name, rows[i], int(counts[i]), whole.prompts[i].text[:HEAD]) for i in over)
    listed = replace(whole, too_long=long)
    if not long or on_long == "keep":
        return listed
    longest = max(long, key=lambda one: one.tokens)
    report = (
        f"{whole.name or 'the source'}: {len(long)} of {len(whole)} prompts {'has' if len(long) == 1 else 'have'} more "
        f"than {limit} tokens; the longest has {longest.tokens} (row {longest.row}: {longest.text!r})"
    )
    if on_long == "raise" or len(long) == len(whole):
        raise DataError(f"{report}: raise max_prompt_tokens, or shorten them")
    warnings.warn(f"{report}. Left out; .too_long lists them", stacklevel=3)
    return listed[counts <= limit]


def _value(row: Row, wanted: FromRow, option: str, index: int) -> Any:
    if not callable(wanted):
        _check_column(wanted, row, option, index)
        return row[wanted]
    try:
        with user_code():
            return wanted(row)
    except Exception as error:
        raise user_error(DataError, f"row {index}: {option}= raised {type(error).__name__}: {error}", error) from error


def _formatted(template: str, row: Row, index: int) -> str:
    formatter = string.Formatter()
    try:
        for _, field, _, _ in formatter.parse(template):
            if field is not None:
                _check_column(field.partition(".")[0].partition("[")[0], row, "template", index)
                if is_missing(formatter.get_field(field, (), row)[0]):
                    raise DataError(f"row {index}: template {template[:40]!r}: its column {field!r} holds no value")
        return template.format_map(row)
    except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}; {{{{ and }}}} are braces"
        raise DataError(f"row {index}: template {template[:40]!r}: {reason}") from error


def _check_column(column: str, row: Row, option: str, index: int) -> None:
    if column not in row:
        columns = ", ".join(map(str, row)) or "nothing"
        near = nearest(column, map(str, row))
        raise DataError(f"row {index} has no column {column!r} for {option}=; it has {columns}{near}")

"""`rb.data.load`: rows of any source as prompts, with what is too long told instead of cut."""

from __future__ import annotations

import string
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from rlbench.data.prompts.lengths import described, open_tokenizer, token_counts, too_long
from rlbench.data.prompts.messages import as_chat, ends_with_answer, plain_content
from rlbench.data.prompts.prompt import Prompt, as_prompt
from rlbench.data.prompts.set import PromptSet
from rlbench.data.prompts.sources import Row, Rows, open_source
from rlbench.data.prompts.stream import permutation
from rlbench.errors import DataError, nearest
from rlbench.traces import user_error
from rlbench.user_code import user_code

FromRow: TypeAlias = str | Callable[[Row], Any]
OnLong = Literal["report", "raise", "keep"]


def load(
    source: Any,
    *,
    prompt: FromRow = "prompt",
    label: FromRow | None = "label",
    split: str | None = None,
    system: str | None = None,
    template: FromRow | None = None,
    chat: bool = False,
    tokenizer: Any = None,
    max_prompt_tokens: int | None = None,
    on_long: OnLong = "report",
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
            ("data/*.csv"), a pandas frame, or a list of texts, chats, token ids, dicts or `Prompt`s. Values of a CSV
            file are text.
        prompt: the column of the prompt (a text, chat messages or token ids), or a function of the row that gives it.
            Messages in ShareGPT's form are brought into the standard one.
        label: likewise for the reference answer, which rewards get; None for no labels. Where the rows have no column
            "label" and none is named, there are none.
        split: which split, where there are several: "test", or for a hub id or folder "train[:10%]" too.
        system: a system message put before each prompt; a text becomes a chat then.
        template: makes the prompt from the row's columns: "{question}\nAnswer:", or a function of the row.
        chat: texts become a user message, so that the engine puts them through its chat template.
        tokenizer: a folder, hub id or tokenizer of `transformers`: the prompts' `lengths` are counted, as the engines
            will encode them.
        max_prompt_tokens: more than so many tokens is too long. Nothing is ever cut.
        on_long: what becomes of too long prompts, which `.too_long` lists in any case: "report" leaves them out and
            warns with their number and the longest, "raise" refuses them, "keep" keeps them.
        limit: rows to read at most; a stream needs it.
        shuffle_seed: shuffles the rows, before the limit; of a stream, the rows that were read.
        meta: the columns to keep in each prompt's `meta`; None keeps all that are neither prompt nor label.
        name: what the set is called in mixtures and messages; default: after the source.
        config, revision: of a hub id; `config` also of a folder.

    Returns:
        A `PromptSet`.
    """
    _check(prompt, template, max_prompt_tokens, on_long, limit)
    rows = open_source(source, split, config, revision)
    if name is not None:
        rows = replace(rows, name=name)
    shape = _Shape(prompt, label, template, system, chat, None if meta is None else tuple(meta))
    indices, prompts = _read(rows, shape, limit, shuffle_seed)
    what = rows.name or "the source"
    if not prompts:
        raise DataError(f"{what} has no rows")
    answered = sum(ends_with_answer(p.content) for p in prompts)
    if answered:
        warnings.warn(
            f"{what}: {answered} of {len(prompts)} chats end with an assistant's message, which the policy would "
            "see: if that is the answer, leave it out: prompt=lambda row: row['messages'][:-1]",
            stacklevel=2,
        )
    whole = PromptSet(tuple(prompts), rows.name)
    if tokenizer is None and max_prompt_tokens is None:
        return whole
    counts = token_counts(prompts, indices, None if tokenizer is None else open_tokenizer(tokenizer))
    whole = replace(whole, lengths=counts, max_prompt_tokens=max_prompt_tokens)
    return whole if max_prompt_tokens is None else _without_long(whole, indices, max_prompt_tokens, on_long)


@dataclass(frozen=True)
class _Shape:
    """How a row becomes a prompt; the fields are arguments of `load`."""

    prompt: FromRow
    label: FromRow | None
    template: FromRow | None
    system: str | None
    chat: bool
    meta: tuple[str, ...] | None

    def __call__(self, row: Row, index: int) -> Prompt:
        """The prompt of row `index`. Raises DataError naming the row."""
        if not isinstance(row, Mapping):
            raise DataError(f"row {index} is a {type(row).__name__}: wanted a dict of columns")
        content = self._content(row, index)
        try:
            if isinstance(content, Prompt | Mapping):
                raise DataError(f"its prompt is a {type(content).__name__}: wanted a text, a chat or token ids")
            content = as_prompt(plain_content(content), index).content
            if self.system is not None or self.chat:
                content = as_chat(content, self.system)
        except DataError as error:
            raise DataError(f"row {index}: {str(error).replace(f'prompt {index}', 'its prompt', 1)}") from None
        return Prompt(content, self._label(row, index), self._meta(row, index))

    def _content(self, row: Row, index: int) -> Any:
        if self.template is None:
            return _value(row, self.prompt, "prompt", index)
        if callable(self.template):
            return _value(row, self.template, "template", index)
        return _formatted(self.template, row, index)

    def _label(self, row: Row, index: int) -> Any:
        if self.label is None or (self.label == "label" and "label" not in row):
            return None
        return _value(row, self.label, "label", index)

    def _meta(self, row: Row, index: int) -> dict[str, Any]:
        if self.meta is not None:
            return {column: _value(row, column, "meta", index) for column in self.meta}
        used = {self.label, self.prompt if self.template is None else None}
        return {column: value for column, value in row.items() if column not in used}


def _read(rows: Rows, shape: _Shape, limit: int | None, shuffle_seed: int | None) -> tuple[list[int], list[Prompt]]:
    """Indices of the rows that are read, in the order wanted, and their prompts."""
    if not rows.counted:
        if limit is None:
            len(rows)  # says that a stream has no length
        prompts = [shape(row, i) for i, row in enumerate(rows.first(limit or 0))]
        order = range(len(prompts)) if shuffle_seed is None else permutation(len(prompts), shuffle_seed).tolist()
        return list(order), [prompts[i] for i in order]
    count = len(rows)
    indices = list(range(count)) if shuffle_seed is None else permutation(count, shuffle_seed).tolist()
    indices = indices[:limit]
    chosen: Iterable[Row] = rows.picked(None if len(indices) == count and shuffle_seed is None else indices)
    return indices, [shape(row, i) for i, row in zip(indices, chosen, strict=True)]


def _without_long(whole: PromptSet, rows: Sequence[int], limit: int, on_long: OnLong) -> PromptSet:
    counts = np.asarray(whole.lengths)
    long = too_long(whole.prompts, rows, counts, limit, whole.name)
    found = replace(whole, too_long=long)
    if not long or on_long == "keep":
        return found
    said = f"{whole.name or 'the source'}: {described(long, len(whole), limit)}"
    if on_long == "raise" or len(long) == len(whole):
        raise DataError(f"{said}: raise max_prompt_tokens, or shorten them")
    warnings.warn(f"{said}. Left out; .too_long lists them", stacklevel=3)
    return found[counts <= limit]


def _value(row: Row, wanted: FromRow, option: str, index: int) -> Any:
    if callable(wanted):
        try:
            with user_code():
                return wanted(row)
        except Exception as error:
            said = f"row {index}: {option}= raised {type(error).__name__}: {error}"
            raise user_error(DataError, said, error) from error
    if wanted not in row:
        raise DataError(_no_column(wanted, row, option, index))
    return row[wanted]


def _formatted(template: str, row: Row, index: int) -> str:
    fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    for field in fields:
        column = field.partition(".")[0].partition("[")[0]
        if column not in row:
            raise DataError(_no_column(column, row, "template", index))
    try:
        return template.format_map(row)
    except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise DataError(f"row {index}: template {template[:40]!r}: {type(error).__name__}: {error}") from error


def _no_column(column: str, row: Row, option: str, index: int) -> str:
    columns = ", ".join(str(name) for name in row) or "nothing"
    return f"row {index} has no column {column!r} for {option}=; it has {columns}{nearest(column, map(str, row))}"


def _check(
    prompt: FromRow, template: FromRow | None, max_prompt_tokens: int | None, on_long: str, limit: int | None
) -> None:
    if on_long not in ("report", "raise", "keep"):
        raise DataError(f"on_long={on_long!r}: wanted 'report', 'raise' or 'keep'")
    if template is not None and prompt != "prompt":
        raise DataError("give prompt= or template=, not both: a template makes the prompt from the whole row")
    for option, value in (("max_prompt_tokens", max_prompt_tokens), ("limit", limit)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise DataError(f"{option}={value!r}: wanted a whole number, at least one")
    if template is not None and isinstance(template, str):
        try:
            list(string.Formatter().parse(template))
        except ValueError as error:
            raise DataError(f"template {template[:40]!r}: {error}; write {{{{ and }}}} for braces") from None

"""Responses that were compared or judged, as a batch: `rb.data.pairs`, `rb.data.labelled`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlbench.data.batches.batch import TrainBatch, of_texts
from rlbench.data.batches.verdicts import Verdicts, verdicts_of
from rlbench.data.prompts.cells import without_nulls
from rlbench.data.prompts.prompt import is_chat, plain_content
from rlbench.data.prompts.sources import Row
from rlbench.data.texts.rendering import Rendered, Renderer
from rlbench.data.texts.rows import Made, Reading, column, media_in, shows_options, split_at_response
from rlbench.errors import DataError

Pair = tuple[Rendered, Rendered, float | None, dict[str, float] | None]


@shows_options
def pairs(rows: Any, tokenizer: Any = None, **options: Any) -> TrainBatch:
    """Read pairs of a better and a worse response: `session.train_step(batch[:64], loss=rb.rl.dpo(beta=0.1))`.

    A row has `prompt`, `chosen` and `rejected`, texts or messages; where `chosen` and `rejected` are whole chats, what
    they begin with alike is the prompt, and none needs to be given. `margin`, a number, says how much better the chosen
    one is: all rows have one, or none. `heads` says for a reward model of several heads which response is the better
    one in each respect, in all rows or none: {"quality": "chosen", "brevity": "rejected", "style": "tie"}; what it does
    not name it says nothing of. The arguments are those of `rb.data.demonstrations`.

    Returns:
        Two sequences per row, chosen, rejected, chosen, …: cut it between pairs. Both go through one micro-batch.
    """
    reading = Reading.of(options, "pairs")
    renderer = reading.renderer(tokenizer)
    indices, made = reading.made(rows, lambda row: _pair(row, reading, renderer))
    kept = reading.fitting([max(len(c.tokens), len(r.tokens)) for c, r, *_ in made], indices, renderer)
    rows_kept = [indices[i] for i in kept]
    margins = _of_all("margin", [made[i][2] for i in kept], rows_kept)
    said = _of_all("heads", [made[i][3] for i in kept], rows_kept)
    both = [one for i in kept for one in made[i][:2]]
    verdicts = None if said is None else Verdicts.of(said)
    return of_pairs(*split_at_response(both), margins=margins, verdicts=verdicts, **media_in(both))


def of_pairs(
    prompts: Sequence[Any],
    responses: Sequence[Any],
    masks: Sequence[Any],
    margins: Sequence[float] | None = None,
    **fields: Any,
) -> TrainBatch:
    """Make a batch of pairs from rows that are chosen, rejected, chosen, …; advantages are 1 and -1."""
    numbers = np.repeat(np.arange(len(responses) // 2, dtype=np.int32), 2)
    preference = np.tile(np.array([1, -1], np.int8), len(responses) // 2)
    made: dict[str, Any] = {
        "advantages": np.repeat(preference, [len(row) for row in responses]).astype(np.float32),
        "group": numbers,
        "pair": numbers,
        "preference": preference,
        "margin": None if margins is None else np.repeat(np.asarray(margins, np.float32), 2),
    }
    return of_texts(prompts, responses, masks, **(made | fields))


@shows_options
def labelled(rows: Any, tokenizer: Any = None, reference_point: bool = True, **options: Any) -> TrainBatch:
    """Read responses that are good or bad, each by itself: `session.train_step(batch[:64], loss="kto")`.

    A row has `prompt`, `completion` and `label`, a truth value. The arguments are those of `rb.data.demonstrations`.

    Args:
        reference_point: behind each sequence stands its response after the next row's prompt, of which nothing is
            trained (preference 0): KTO measures there how far the policy is from the reference.
    """
    reading = Reading.of(options, "labelled")
    renderer = reading.renderer(tokenizer)
    indices, made = reading.made(rows, lambda row: _judged(row, reading, renderer))
    kept = reading.fitting([len(one.tokens) for one, _ in made], indices, renderer)
    rendered = [made[i][0] for i in kept]
    prompts, responses, masks = split_at_response(rendered)
    media = media_in(rendered)
    preference = [1 if made[i][1] else -1 for i in kept]
    group = list(range(len(kept)))
    if reference_point:
        following = _other_prompts(rendered)
        others = [prompts[i] for i in following]
        for name, held in media.items():
            if held is not None:
                media[name] = tuple(_alternating(held, [held[i] for i in following]))
        ends = [int((~mask).argmax()) or len(mask) for mask in masks]  # an answer's first turn alone
        firsts = [response[:end] for response, end in zip(responses, ends, strict=True)]
        limit = reading.max_length or renderer.context
        if limit is not None:  # nothing of it is trained, so its end may go
            firsts = [row[: max(1, limit - len(asked))] for row, asked in zip(firsts, others, strict=True)]
        prompts, responses = _alternating(prompts, others), _alternating(responses, firsts)
        masks = _alternating(masks, [np.zeros(len(row), bool) for row in firsts])
        preference = _alternating(preference, [0] * len(kept))
        group = _alternating(group, group)
    judged = np.asarray(preference, np.int8)
    advantages = np.repeat(judged, [len(row) for row in responses]).astype(np.float32)
    columns: dict[str, Any] = {"preference": judged, "advantages": advantages, "group": np.asarray(group, np.int32)}
    return of_texts(prompts, responses, masks, **columns, **media)


def _pair(row: Row, reading: Reading, renderer: Renderer) -> Pair:
    tools, chosen, rejected = reading.tools_of(row), *(plain_content(column(row, n)) for n in ("chosen", "rejected"))
    if row.get("prompt") is not None:
        prompt, media = reading.prompt_of(row)
    elif is_chat(chosen) and is_chat(rejected):
        (chosen, media), (rejected, others) = (reading.placed(chat, row) for chat in (chosen, rejected))
        if media != others:
            raise DataError("its chosen and rejected chats have different images or sounds")
        alike = _alike(chosen, rejected)
        prompt, chosen, rejected = chosen[:alike], chosen[alike:], rejected[alike:]
    else:
        prompt = column(row, "prompt")
    if not prompt:
        raise DataError("its prompt is empty, or its chosen and rejected chats begin differently")
    one = reading.continued(renderer, prompt, chosen, "chosen", tools, media)
    other = reading.continued(renderer, prompt, rejected, "rejected", tools, media)
    if np.array_equal(one.tokens, other.tokens):
        raise DataError("its chosen and rejected responses are the same")
    return one, other, _margin(row), verdicts_of(without_nulls(row.get("heads")))


def _of_all(name: str, values: Sequence[Made | None], rows: Sequence[int]) -> list[Made] | None:
    """Return what all rows have; None where none has it. Raises DataError where only some do."""
    known = [value for value in values if value is not None]
    if known and len(known) < len(values):
        lacking = rows[[value is None for value in values].index(True)]
        raise DataError(f"row {lacking}: it has no {name}, and others have: give all one, or none")
    return known or None


def _alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many messages both chats begin with; the last of each is its answer."""
    most = min(len(one), len(other)) - 1
    return next((k for k in range(most) if one[k] != other[k]), most)


def _margin(row: Row) -> float | None:
    if (margin := row.get("margin")) is None:
        return None
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise DataError(f"its margin is {margin!r}: wanted a finite number")
    return float(margin)


def _judged(row: Row, reading: Reading, renderer: Renderer) -> tuple[Rendered, bool]:
    label = column(row, "label")
    label = label.item() if hasattr(label, "item") else label
    if label not in (True, False):
        raise DataError(f"its label is {label!r}: wanted True (good) or False")
    tools = reading.tools_of(row)
    prompt, media = reading.prompt_of(row)
    completion = column(row, "completion")
    return reading.continued(renderer, prompt, completion, "completion", tools, media), bool(label)


def _other_prompts(rendered: Sequence[Rendered]) -> list[int]:
    """Return for each row the next one with another prompt, or other images or sounds; the last rows look on from the
    first."""
    keys = [(one.tokens[: one.start].tobytes(), one.media) for one in rendered]
    count = len(keys)
    if len(set(keys)) < 2:
        raise DataError("all rows have the same prompt, and KTO's reference point needs another: reference_point=False")
    found, following = list(range(count)), 0
    for i in range(2 * count - 1, -1, -1):
        if keys[i % count] != keys[(i + 1) % count]:
            following = (i + 1) % count
        found[i % count] = following
    return found


def _alternating(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    return [one for both in zip(first, second, strict=True) for one in both]

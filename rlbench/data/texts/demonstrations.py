"""Texts to imitate, as a batch: `rb.data.demonstrations`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlbench.data.batches.batch import TrainBatch, of_texts
from rlbench.data.prompts.prompt import is_chat
from rlbench.data.prompts.sources import Row
from rlbench.data.texts.rendering import Rendered, Renderer, as_messages
from rlbench.data.texts.rows import Reading, column, media_in, shows_options, split_at_response


@shows_options
def demonstrations(rows: Any, tokenizer: Any = None, **options: Any) -> TrainBatch:
    """Read demonstrations as a batch: `session.train_step(batch[i : i + 64], loss="sft")`.

    A row has `messages`, or `prompt` and `completion` (texts or messages each); perhaps `tools`, for the template. The
    loss is on the assistant's tokens alone, in all turns of `messages`, and in the completion where there is a prompt:
    by the marks of the chat template (`{% generation %}`), else exactly between the borders of turns. A text after a
    text is encoded by itself, as a sampler's tokens follow a prompt's, and ends with the end token. Images, and
    sounds, stand in the parts of a chat or in a column `images`, or `audios`, as in prompts (`rb.data.load`).

    Args:
        rows: a list of rows or of chats, a file (JSON lines, Parquet, JSON, CSV), a dataset or its hub id, a data
            frame; all that `rb.data.load` reads.
        tokenizer: the session, or a tokenizer, its folder or hub id.
        options: `split`, `config`, `revision`, `limit`, `shuffle_seed`, `chat`, `system`, `template`,
            `chat_template_kwargs`, `tools`, `max_length`, `on_long`, `on_error`, `fetch_images`: see
            `rlbench.data.texts.rows.Reading`.

    Returns:
        One sequence per row, in order. A row that is no demonstration, and what would be cut, raises DataError with
        its number.
    """
    reading = Reading.of(options, "demonstrations")
    renderer = reading.renderer(tokenizer)
    indices, rendered = reading.made(rows, lambda row: _demonstration(row, reading, renderer))
    kept = reading.fitting([len(one.tokens) for one in rendered], indices, renderer)
    chosen = [rendered[i] for i in kept]
    return of_texts(*split_at_response(chosen), **media_in(chosen))


def is_demonstration(row: Any) -> bool:
    """Whether a row has what `demonstrations` reads: messages, or a completion after its prompt."""
    return isinstance(row, Mapping) and (row.get("messages") is not None or row.get("completion") is not None)


def _demonstration(row: Row, reading: Reading, renderer: Renderer) -> Rendered:
    tools = reading.tools_of(row)
    if row.get("messages") is None and row.get("completion") is None and is_chat(row.get("prompt")):
        row = {**row, "messages": row["prompt"]}  # a list of chats
    if row.get("messages") is None and ("prompt" in row or "completion" in row):
        prompt, media = reading.prompt_of(row)
        return reading.continued(renderer, prompt, column(row, "completion"), "completion", tools, media)
    messages, media = reading.placed(as_messages(column(row, "messages"), "user", "messages"), row)
    if reading.system is not None:
        messages = [{"role": "system", "content": reading.system}, *messages]
    return renderer.chat(messages, tools=tools, media=media)

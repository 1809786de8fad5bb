"""What stands between two turns, as token ids; nothing is encoded twice. In a chat: what the template puts behind a
placeholder for what the assistant said."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from rlbench.data.prompts.lengths import chat_ids, continues
from rlbench.data.prompts.placing import is_image_part
from rlbench.data.prompts.prompt import Prompt, is_chat, is_token_ids, message_text
from rlbench.envs.protocol import Message, Observation
from rlbench.errors import DataError

PLACEHOLDERS = ("yes", "no")  # no letter in common at either end, so what is common is not theirs


def opened(
    tokenizer: Any, prompt: Prompt, ids: list[int], observation: Observation, role: str | None
) -> tuple[list[int], list[Message]]:
    """Return the first request's token ids, those of the prompt first, and the messages that `reset` put behind it."""
    messages = _as_messages(tokenizer, observation, role)
    inside = observation is None or is_token_ids(observation) or (isinstance(observation, str) and role is None)
    if is_chat(prompt.content) and not inside:
        return _asked(tokenizer, [*prompt.content, *messages]), messages
    return [*ids, *_ids_of(tokenizer, observation)], messages


def bridged(
    tokenizer: Any, chat: Sequence[Message] | None, observation: Observation, role: str | None, ended: bool, last: int
) -> tuple[list[int], list[Message]]:
    """Return the token ids that go behind a turn's sampled ones, and the messages they are.

    `chat`: the messages so far, None without a chat. `ended`: the `last` token sampled was an end token, which the
    template's own end of a turn does not repeat.
    """
    messages = _as_messages(tokenizer, observation, role)
    if chat is None or is_token_ids(observation) or (isinstance(observation, str) and role is None):
        return _ids_of(tokenizer, observation), messages
    if observation is None and not ended:
        return [], []
    ids = _behind_placeholder(tokenizer, chat, messages)
    return (ids[1:] if ended and ids and ids[0] == last else ids), messages


def _as_messages(tokenizer: Any, observation: Observation, role: str | None) -> list[Message]:
    if observation is None:
        return []
    if is_token_ids(observation):
        text = "" if tokenizer is None else str(tokenizer.decode(list(observation), skip_special_tokens=True))
        return [{"role": role or "user", "content": text}]
    if isinstance(observation, str):
        return [{"role": role or "user", "content": observation}]
    if isinstance(observation, list | tuple) and all(isinstance(m, dict) and "role" in m for m in observation):
        messages = [dict(m) for m in observation if isinstance(m, dict)]
        if any(is_image_part(part) for m in messages if isinstance(m.get("content"), list) for part in m["content"]):
            raise DataError("the observation has images, which a prompt alone may have: describe them in text")
        return messages
    raise DataError(
        f"the observation is {type(observation).__name__} {observation!r:.60}: wanted a text, messages "
        "([{'role': …, 'content': …}]), token ids or None"
    )


def _ids_of(tokenizer: Any, observation: Any) -> list[int]:
    """Return token ids as they are, or those of a text that stands in the middle of a sequence."""
    if not observation or is_token_ids(observation):
        return list(observation or ())
    if not isinstance(observation, str):
        raise DataError("the observation is messages, but the prompt is no chat: give a text, or ask with messages")
    if tokenizer is None:
        raise DataError("the observation is text, but the engine was built without a tokenizer: give token ids")
    return [int(t) for t in tokenizer(observation, add_special_tokens=False)["input_ids"]]


def _asked(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Return a chat as an engine is asked with it."""
    with _refusals(messages):
        return [int(token) for token in chat_ids(tokenizer, messages)]


@contextlib.contextmanager
def _refusals(messages: Sequence[Message]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever a template raises: it is the checkpoint's code
        roles = ", ".join(str(m.get("role")) for m in messages)
        raise DataError(
            f"the chat template refuses messages of the roles {roles} ({error}); give the environment a role that it "
            "knows"
        ) from error


def _rendered(tokenizer: Any, messages: Sequence[Message], generate: bool) -> list[int]:
    options = {"tokenize": True, "add_generation_prompt": generate, "return_dict": False}
    with _refusals(messages):
        return [int(token) for token in tokenizer.apply_chat_template(list(messages), **options)]


def _behind_placeholder(tokenizer: Any, chat: Sequence[Message], messages: Sequence[Message]) -> list[int]:
    """Return what the template puts behind the assistant's message: its end, `messages`, and the generation prompt."""
    chat, begun = (chat[:-1], message_text(chat[-1])) if chat and continues(chat) else (chat, "")  # of its answer
    before = _rendered(tokenizer, chat, False)
    one, two = (
        _rendered(tokenizer, [*chat, {"role": "assistant", "content": begun + said}, *messages], True)
        for said in PLACEHOLDERS
    )
    ahead = common(one, two)
    behind = common(one[::-1], two[::-1])
    between = [tokenizer.decode(ids[ahead : len(ids) - behind]).strip() for ids in (one, two)]
    if one[: len(before)] != before or between != list(PLACEHOLDERS):
        raise DataError(
            "the chat template writes the earlier messages differently once others follow, so a conversation cannot be "
            "continued token by token: set a chat template that only appends, give observations as token ids, or let "
            "the environment's role be None (text inside the assistant's message)"
        )
    return one[len(one) - behind :]


def common(one: Sequence[int] | str, two: Sequence[int] | str) -> int:
    """Return the length of the common beginning of two sequences."""
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))

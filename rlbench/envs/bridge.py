"""What stands between two turns, as token ids. Sampled ids stay as they were sampled; nothing is encoded twice.

In a chat that is the end of the assistant's message, the observation's messages and the next generation prompt. They
are taken from the template itself: a conversation with a placeholder for what the assistant said is rendered, and what
comes behind the placeholder is the bridge.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlbench.data.prompts.prompt import Prompt
from rlbench.envs.protocol import Message, Observation
from rlbench.errors import DataError

PLACEHOLDERS = ("yes", "no")  # no letter in common at either end, so what is common is not theirs


def is_chat(prompt: Prompt) -> bool:
    """True for a prompt of messages."""
    content = prompt.content
    return not isinstance(content, str) and len(content) > 0 and isinstance(content[0], dict)


def opened(
    tokenizer: Any, prompt: Prompt, ids: list[int], observation: Observation, role: str | None
) -> tuple[list[int], list[Message]]:
    """Return the first request's token ids, and the messages that `reset` put behind the prompt.

    `ids` are the prompt's, with the generation prompt; `tokenizer` is None where only token ids go in.
    """
    if observation is None:
        return ids, []
    if is_token_ids(observation):
        return [*ids, *observation], [{"role": role or "user", "content": _decoded(tokenizer, observation)}]  # type: ignore[list-item]
    messages = as_messages(observation, role)
    if is_chat(prompt) and not (isinstance(observation, str) and role is None):
        return rendered(tokenizer, [*prompt.content, *messages], True), messages  # type: ignore[list-item]
    return [*ids, *text_ids(tokenizer, observation)], messages


def bridged(
    tokenizer: Any, chat: Sequence[Message] | None, observation: Observation, role: str | None, ended: bool, last: int
) -> tuple[list[int], list[Message]]:
    """Return the token ids that go behind a turn's sampled ones, and the messages they are.

    `chat` holds the prompt's messages with those of `reset`, None where the prompt is text or token ids. `ended`: the
    turn ended with an end token. `last`: the last token sampled; a template's own end of a turn is not repeated.
    """
    if is_token_ids(observation):
        return list(observation), [{"role": role or "user", "content": _decoded(tokenizer, observation)}]  # type: ignore[arg-type]
    messages = as_messages(observation, role)
    inside = isinstance(observation, str) and role is None
    if chat is None or inside:
        return text_ids(tokenizer, observation), messages
    if observation is None and not ended:
        return [], []
    ids = _behind_placeholder(tokenizer, chat, messages)
    return (ids[1:] if ended and ids and ids[0] == last else ids), messages


def as_messages(observation: Observation, role: str | None) -> list[Message]:
    """An observation as messages. Raises DataError where it is none."""
    if observation is None:
        return []
    if isinstance(observation, str):
        return [{"role": role or "user", "content": observation}]
    if isinstance(observation, list | tuple) and all(isinstance(m, dict) and "role" in m for m in observation):
        return [dict(m) for m in observation if isinstance(m, dict)]
    raise DataError(
        f"the observation is {type(observation).__name__} {observation!r:.60}: wanted a text, messages "
        "([{'role': …, 'content': …}]), token ids or None"
    )


def is_token_ids(observation: Any) -> bool:
    """True for a sequence of integers."""
    return (
        isinstance(observation, list | tuple)
        and len(observation) > 0
        and all(isinstance(t, int) and not isinstance(t, bool) for t in observation)
    )


def text_ids(tokenizer: Any, observation: Any) -> list[int]:
    """Token ids of a text that stands in the middle of a sequence."""
    if not observation:
        return []
    if not isinstance(observation, str):
        raise DataError("the observation is messages, but the prompt is no chat: give a text, or ask with messages")
    if tokenizer is None:
        raise DataError("the observation is text, but the engine was built without a tokenizer: give token ids")
    return [int(t) for t in tokenizer(observation, add_special_tokens=False)["input_ids"]]


def rendered(tokenizer: Any, messages: Sequence[Message], generate: bool) -> list[int]:
    """Token ids of a conversation. Raises DataError in the template's words where it refuses."""
    try:
        ids = tokenizer.apply_chat_template(
            list(messages), tokenize=True, add_generation_prompt=generate, return_dict=False
        )
    except Exception as error:  # whatever a template raises: it is the checkpoint's code
        roles = ", ".join(str(m.get("role")) for m in messages)
        raise DataError(
            f"the chat template refuses messages of the roles {roles} ({error}); give the environment a role that it "
            "knows"
        ) from error
    return [int(token) for token in ids]


def _behind_placeholder(tokenizer: Any, chat: Sequence[Message], messages: Sequence[Message]) -> list[int]:
    """What the template puts behind the assistant's message: its end, `messages`, and the next generation prompt."""
    before = rendered(tokenizer, chat, False)
    one, two = (
        rendered(tokenizer, [*chat, {"role": "assistant", "content": said}, *messages], True) for said in PLACEHOLDERS
    )
    ahead = common(one, two)
    behind = common(one[::-1], two[::-1])
    found = [tokenizer.decode(ids[ahead : len(ids) - behind]).strip() for ids in (one, two)]
    if one[: len(before)] != before or found != list(PLACEHOLDERS):
        raise DataError(
            "the chat template writes the earlier messages differently once others follow, so a conversation cannot be "
            "continued token by token: set a chat template that only appends, give observations as token ids, or let "
            "the environment's role be None (text inside the assistant's message)"
        )
    return one[len(one) - behind :]


def common(one: Sequence[int], two: Sequence[int]) -> int:
    """Length of the common beginning of two sequences."""
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def _decoded(tokenizer: Any, ids: Any) -> str:
    return "" if tokenizer is None else str(tokenizer.decode(list(ids), skip_special_tokens=True))

"""What stands between two turns, as token ids; nothing is encoded twice. In a chat: what the template puts behind a
placeholder for what the assistant said."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rlbench.data.prompts.images import EncodedImage
from rlbench.data.prompts.lengths import chat_ids, continues
from rlbench.data.prompts.placing import SOUND, VIDEO, media_parts, placed
from rlbench.data.prompts.prompt import Prompt, is_chat, is_token_ids, message_text
from rlbench.envs.protocol import Appended, Message, Observation
from rlbench.errors import DataError

PLACEHOLDERS = ("yes", "no")  # no letter in common at either end, so what is common is not theirs


class Observed(NamedTuple):
    """What an environment said: `ids` go behind the others, with one placeholder for each of `images`; `messages` are
    the same to read. `whole`: the ids are a whole chat, and begin with one placeholder for each image of the prompt.
    `asked`: the prompt's last message, where it goes on."""

    ids: list[int]
    messages: list[Message]
    images: tuple[EncodedImage, ...] = ()
    whole: bool = False
    asked: Message | None = None


def opened(
    tokenizer: Any, prompt: Prompt, ids: list[int], observation: Observation | Appended, role: str | None
) -> Observed:
    """Return the first request's token ids, those of the prompt first, and the messages that `reset` put behind it."""
    if isinstance(observation, Appended):
        return _gone_on(tokenizer, prompt, ids, observation.content)
    messages, images = _as_messages(tokenizer, observation, role)
    inside = observation is None or is_token_ids(observation) or (isinstance(observation, str) and role is None)
    if is_chat(prompt.content) and not inside:
        return Observed(_asked(tokenizer, [*prompt.content, *messages]), messages, images, whole=True)
    return Observed([*ids, *_ids_of(tokenizer, observation)], messages)


def _gone_on(tokenizer: Any, prompt: Prompt, ids: list[int], more: Any) -> Observed:
    """Return a chat whose last message goes on with a text or parts; a text with more behind it."""
    if not isinstance(more, str) and not (isinstance(more, list) and all(map(_is_part, more))):
        raise DataError(
            f"what goes on in the prompt is {type(more).__name__} {more!r:.60}: wanted a text, or parts of a message "
            "([{'type': 'text', 'text': …}, …])"
        )
    if not is_chat(prompt.content):
        return Observed([*ids, *_ids_of(tokenizer, more)], [{"role": "user", "content": more}])
    last = prompt.content[-1]
    (added,), images = placed([{**last, "content": more}])
    asked = {**last, "content": _joined(last.get("content") or "", added["content"])}
    return Observed(_asked(tokenizer, [*prompt.content[:-1], asked]), [], images, whole=True, asked=asked)


def _joined(content: Any, more: Any) -> Any:
    """Return two contents of a message as one: a text where both are."""
    if isinstance(content, str) and isinstance(more, str):
        return content + more
    texts = [[{"type": "text", "text": one}] if isinstance(one, str) else list(one) for one in (content, more) if one]
    return [part for parts in texts for part in parts]


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) and "type" in value and "role" not in value


def bridged(
    tokenizer: Any, chat: Sequence[Message] | None, observation: Observation, role: str | None, ended: bool, last: int
) -> Observed:
    """Return the token ids that go behind a turn's sampled ones, and the messages they are.

    `chat`: the messages so far, None without a chat. `ended`: the `last` token sampled was an end token, which the
    template's own end of a turn does not repeat.
    """
    messages, images = _as_messages(tokenizer, observation, role)
    if chat is None or is_token_ids(observation) or (isinstance(observation, str) and role is None):
        return Observed(_ids_of(tokenizer, observation), messages)
    if observation is None and not ended:
        return Observed([], [])
    ids = _behind_placeholder(tokenizer, chat, messages)
    return Observed(ids[1:] if ended and ids and ids[0] == last else ids, messages, images)


def check_role(tokenizer: Any, chat: Sequence[Message], role: str) -> None:
    """Refuse a role that the chat template does not know, before there is anything to say by it."""
    answered = [*chat, {"role": "assistant", "content": PLACEHOLDERS[0]}]
    _rendered(tokenizer, [*answered, {"role": role, "content": "…"}], True)


def _as_messages(
    tokenizer: Any, observation: Observation, role: str | None
) -> tuple[list[Message], tuple[EncodedImage, ...]]:
    """Return an observation as messages, with placeholders for its images, and those."""
    if observation is None:
        return [], ()
    if is_token_ids(observation):
        text = "" if tokenizer is None else str(tokenizer.decode(list(observation), skip_special_tokens=True))
        return [{"role": role or "user", "content": text}], ()
    if isinstance(observation, str):
        return [{"role": role or "user", "content": observation}], ()
    parts = [part for part in observation if isinstance(part, dict)] if isinstance(observation, list | tuple) else []
    for kind in (SOUND, VIDEO):
        if any(map(kind.is_part, parts)) or next(media_parts(parts, kind), None):
            raise DataError(
                f"the observation has a {kind.name}, and environments show texts and images alone: {kind.field} stand "
                "in prompts"
            )
    if isinstance(observation, list | tuple) and len(parts) == len(observation):
        if all("role" in part for part in parts):
            return placed(list(map(dict, parts)))
        if all(map(_is_part, parts)):
            return placed([{"role": role or "user", "content": parts}])
    raise DataError(
        f"the observation is {type(observation).__name__} {observation!r:.60}: wanted a text, messages "
        "([{'role': …, 'content': …}]), parts of one ([{'type': 'image', 'image': …}, …]), token ids or None"
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

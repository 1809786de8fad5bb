"""Where the images of a prompt stand: a chat keeps a placeholder `{"type": "image"}` for each, in their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlbench.data.prompts.images import EncodedImage
from rlbench.errors import DataError

IMAGE_KINDS = ("image", "image_url", "input_image")
"""Types of a part that is an image: of transformers' templates, OpenAI's chats and its responses."""
IMAGE_COLUMNS = ("images", "image")
MARK = "<image>"
"""What stands for an image in the text of a chat, in the data sets of verl and LLaMA-Factory."""


def is_image_part(part: Any) -> bool:
    """Whether a part of a message is an image or its placeholder."""
    return isinstance(part, Mapping) and part.get("type") in IMAGE_KINDS


def listed(value: Any) -> tuple[Any, ...]:
    """Return the images that a cell of a row holds: none, one or several."""
    if value is None:
        return ()
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.tolist()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def placed(content: Any, images: Sequence[Any] = (), fetch: bool = False) -> tuple[Any, tuple[EncodedImage, ...]]:
    """Return a prompt's content with placeholders alone, and its images in their order.

    Args:
        content: a text, a chat or token ids. Images in parts of a chat are taken out. A chat without a place for its
            `images` gets one where `<image>` stands in its texts, or all before the text of its first user message.
        images: those of the placeholders, as `EncodedImage.from_any` takes them.
        fetch: read http addresses too.

    Raises DataError where there are more or fewer images than places, and for what is no image.
    """
    inside = list(image_parts(content)) if isinstance(content, list) else []
    if not inside and not images:
        return content, ()
    if not isinstance(content, list) or not isinstance(content[0], Mapping):
        return content, _read(images, fetch)  # the model's own placeholders stand in it; a replica counts them
    if not inside:
        content = _with_places(content, len(images))
        inside = list(image_parts(content))
    held = [held_image(part) for part in inside]
    if sum(one is None for one in held) != len(images):
        raise DataError(
            f"the chat has {sum(one is None for one in held)} placeholders for images and {len(images)} images "
            "beside it: give one for each"
        )
    beside = iter(images)
    encoded = _read([next(beside) if one is None else one for one in held], fetch)
    return [_cleared(message) for message in content], encoded


def image_parts(content: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the image parts of a chat, in order."""
    for message in content:
        told = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(told, list | tuple):
            yield from filter(is_image_part, told)


def held_image(part: Mapping[str, Any]) -> Any:
    """What an image part holds; None for a placeholder. Of Anthropic's `source` its address, or its bytes as one."""
    source = part.get("source")
    if isinstance(source, Mapping):
        return source.get("url") if "url" in source else f"data:{source.get('media_type')};base64,{source.get('data')}"
    return next((part[name] for name in ("image", "image_url", "url", "path") if part.get(name) is not None), None)


def without_images(content: Any) -> Any:
    """Return messages, or parts of one, with placeholders for images; anything else as it is."""
    if not isinstance(content, list | tuple) or not all(isinstance(one, Mapping) for one in content):
        return content
    return [{"type": "image"} if is_image_part(one) else _cleared(one) for one in content]


def _read(images: Sequence[Any], fetch: bool) -> tuple[EncodedImage, ...]:
    return tuple(EncodedImage.from_any(one, f"image {i}", fetch) for i, one in enumerate(images))


def _cleared(message: Mapping[str, Any]) -> dict[str, Any]:
    told = message.get("content")
    if not isinstance(told, list | tuple) or not any(map(is_image_part, told)):
        return dict(message)
    return {**message, "content": [{"type": "image"} if is_image_part(part) else part for part in told]}


def _with_places(chat: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """Give a chat of texts places for images: at its marks, or before the first user message."""
    marks = sum(m["content"].count(MARK) for m in chat if isinstance(m.get("content"), str))
    if marks == count:
        return [_split(message) for message in chat]
    user = next((i for i, message in enumerate(chat) if message.get("role") == "user"), None)
    if marks or user is None:
        where = f"{marks} marks {MARK}" if marks else "no user message"
        raise DataError(f"the chat has {where} for {count} images: write {{'type': 'image'}} where each belongs")
    told = chat[user].get("content") or ""
    texts = [{"type": "text", "text": told}] if isinstance(told, str) else list(told)
    first = {**chat[user], "content": [*({"type": "image"} for _ in range(count)), *texts]}
    return [first if i == user else dict(message) for i, message in enumerate(chat)]


def _split(message: Mapping[str, Any]) -> dict[str, Any]:
    """Make parts of a text with marks."""
    told = message.get("content")
    if not isinstance(told, str) or MARK not in told:
        return dict(message)
    parts: list[dict[str, Any]] = []
    for i, text in enumerate(told.split(MARK)):
        parts += [{"type": "image"}] if i else []
        parts += [{"type": "text", "text": text}] if text else []
    return {**message, "content": parts}

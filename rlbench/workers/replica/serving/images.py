"""The images of a client's request: read and checked before vLLM sees them, which gets bytes alone."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any

from rlbench.data.prompts.images import EncodedImage
from rlbench.data.prompts.placing import held_media
from rlbench.errors import DataError
from rlbench.workers.replica.serving.refusal import Refusal

TEXT_PARTS = "text input_text output_text refusal thinking redacted_thinking tool_use tool_result".split()
IMAGE_PARTS = ("image_url", "image")
"""OpenAI's and Anthropic's."""
SET_BY_MODEL = ("mm_processor_kwargs", "media_io_kwargs")


def media_parts(asked: Mapping[str, Any], most: int) -> list[dict[str, Any]]:
    """Return the parts of a request's messages that are images. Refusal of what is neither text nor one of these, of
    more than `most` (0: a model of text alone), and of options by which an image is read otherwise than in training."""
    parts = [part for part in _parts(asked.get("messages")) if part.get("type") not in TEXT_PARTS]
    strange = [part.get("type") for part in parts if part.get("type") not in IMAGE_PARTS]
    if strange or (parts and not most):
        kind = strange[0] if strange else parts[0].get("type")
        takes = "text and images" if most else "text"
        raise Refusal(400, "BadRequestError", f"a message has a part {kind!r:.40}: this endpoint takes {takes}")
    if len(parts) > most:
        raise Refusal(400, "BadRequestError", f"the messages have {len(parts)} images: the model takes {most}")
    if unread := [name for name in SET_BY_MODEL if asked.get(name)]:
        raise Refusal(400, "BadRequestError", f"{unread[0]}: images are read as the policy is trained on them")
    return parts


def checked(parts: list[dict[str, Any]], fetch: bool) -> tuple[str, ...]:
    """Put the bytes of images in the place of what names them, and of all else that their parts say; return their
    digests. Refusal of what is no image, and of addresses unless `fetch`."""
    digests = []
    for number, part in enumerate(parts):
        try:
            image = EncodedImage.from_any(_source(part, fetch), f"image {number}", fetch)
        except DataError as error:
            raise Refusal(400, "BadRequestError", str(error)) from None
        kind = part["type"]
        part.clear()
        part |= {"type": kind} | _sent(kind, image)
        digests.append(image.digest)
    return tuple(digests)


def _sent(kind: str, image: EncodedImage) -> dict[str, Any]:
    """What a part of this kind holds."""
    if kind == "image_url":
        return {"image_url": {"url": image.data_url}}
    data = base64.b64encode(image.data).decode()
    return {"source": {"type": "base64", "media_type": image.media_type, "data": data}}


def _source(part: Mapping[str, Any], fetch: bool) -> str:
    """Return the address an image part names: a client's are data URLs, or http where that is allowed, and no paths."""
    held = held_media(part)
    held = held.get("url") if isinstance(held, Mapping) else held
    if not isinstance(held, str) or not held.startswith(("data:", "http://", "https://")):
        raise DataError("its address is none: wanted a data URL, data:image/png;base64,…")
    if not held.startswith("data:") and not fetch:
        raise DataError(
            "it is at a remote address, which this endpoint does not read: session.endpoint(fetch_images=True)"
        )
    return held


def _parts(messages: Any) -> Iterator[dict[str, Any]]:
    """All parts of messages, in their order, those inside of others too."""
    for holder in messages if isinstance(messages, list) else ():
        content = holder.get("content") if isinstance(holder, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict):
                yield part
                yield from _parts([part])

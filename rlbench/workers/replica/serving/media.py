"""The images or sounds of a client's request: read and checked before vLLM sees them, which gets bytes alone."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlbench.data.prompts.encoded import EncodedMedia
from rlbench.data.prompts.images import EncodedImage
from rlbench.data.prompts.placing import IMAGE, SOUND, MediaKind, held_media
from rlbench.data.prompts.sounds import EncodedSound
from rlbench.data.texts.sound_features import decoded_sound
from rlbench.errors import DataError
from rlbench.workers.replica.serving.refusal import Refusal

TEXT_PARTS = "text input_text output_text refusal thinking redacted_thinking tool_use tool_result".split()
PARTS = {IMAGE.place: ("image_url", "image"), SOUND.place: ("input_audio",)}
"""OpenAI's and Anthropic's of images, OpenAI's of sounds."""
SET_BY_MODEL = ("mm_processor_kwargs", "media_io_kwargs")


@dataclass(frozen=True)
class TakenMedia:
    """What an endpoint takes beside text: `most` of a `kind` in a request; 0: its model is one of text alone.
    `extractor`: of a model that hears, its feature extractor."""

    kind: MediaKind[Any]
    most: int
    extractor: Any = None

    def parts_of(self, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the parts of a request's messages that are images, or sounds. Refusal of what is neither text nor one
        of these, of more than `most`, and of options by which one is read otherwise than in training."""
        parts = [part for part in _parts(asked.get("messages")) if part.get("type") not in TEXT_PARTS]
        strange = [part.get("type") for part in parts if part.get("type") not in PARTS[self.kind.place]]
        if strange or (parts and not self.most):
            kind = strange[0] if strange else parts[0].get("type")
            takes = f"text and {self.kind.name}s" if self.most else "text"
            raise Refusal(400, "BadRequestError", f"a message has a part {kind!r:.40}: this endpoint takes {takes}")
        if len(parts) > self.most:
            said = f"the messages have {len(parts)} {self.kind.name}s: the model takes {self.most}"
            raise Refusal(400, "BadRequestError", said)
        if unread := [name for name in SET_BY_MODEL if asked.get(name)]:
            said = f"{unread[0]}: {self.kind.name}s are read as the policy is trained on them"
            raise Refusal(400, "BadRequestError", said)
        return parts

    def checked(self, parts: list[dict[str, Any]], fetch: bool) -> tuple[str, ...]:
        """Put the bytes of images, or sounds, in the place of what names them, and of all else that their parts say;
        return their digests. Refusal of what is none, and of addresses unless `fetch`."""
        digests = []
        for number, part in enumerate(parts):
            what = f"{self.kind.name} {number}"
            try:
                one = self._heard(part, what) if self.kind is SOUND else _seen(part, what, fetch)
            except DataError as error:
                raise Refusal(400, "BadRequestError", str(error)) from None
            kind = part["type"]
            part.clear()
            part |= {"type": kind} | _sent(kind, one)
            digests.append(one.digest)
        return tuple(digests)

    def _heard(self, part: Mapping[str, Any], what: str) -> EncodedSound:
        """Return a part's sound as the model hears it, of one channel at its rate: vLLM resamples by another rule."""
        held = part.get("input_audio")
        data = held.get("data") if isinstance(held, Mapping) else None
        if not isinstance(data, str):
            wanted = "{'input_audio': {'data': base64, 'format': 'wav'}}"
            raise DataError(f"{what}: its part holds none: wanted {wanted}")
        samples = decoded_sound(EncodedSound.from_any({"data": data}, what), self.extractor)
        return EncodedSound.from_any((samples, int(self.extractor.sampling_rate)), what)


def _seen(part: Mapping[str, Any], what: str, fetch: bool) -> EncodedImage:
    return EncodedImage.from_any(_source(part, fetch), what, fetch)


def _sent(kind: str, one: EncodedMedia) -> dict[str, Any]:
    """What a part of this kind holds."""
    data = base64.b64encode(one.data).decode()
    if isinstance(one, EncodedSound):
        return {"input_audio": {"data": data, "format": "wav"}}
    assert isinstance(one, EncodedImage)
    if kind == "image_url":
        return {"image_url": {"url": one.data_url}}
    return {"source": {"type": "base64", "media_type": one.media_type, "data": data}}


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

"""Where the images, videos or sounds of a prompt stand: a chat keeps a placeholder for each, `{"type": "image"}`,
`{"type": "video"}` or `{"type": "audio"}`, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from rlbench.data.prompts.encoded import EncodedMedia
from rlbench.data.prompts.images import EncodedImage
from rlbench.data.prompts.sounds import EncodedSound
from rlbench.data.prompts.videos import OPTIONS, EncodedVideo, is_frames, is_timed
from rlbench.errors import DataError

Media = TypeVar("Media", bound=EncodedMedia)


@dataclass(frozen=True)
class MediaKind(Generic[Media]):
    """What stands in a prompt beside its text.

    `name`: in messages to people; `place`: type of its placeholder, and what it is to vLLM; `parts`: types of a part
    that holds one, of transformers' templates, OpenAI's chats and its responses; `columns`: of a row; `keys`: of a
    part, that hold it; `mark`: what stands for one in the text of a chat, in the data sets of verl and LLaMA-Factory;
    `read`: makes one of what people hold; `options`: of a part, beside what it holds; `alone`: whether a value that is
    a list or an array is one, and not several.
    """

    name: str
    place: str
    parts: tuple[str, ...]
    columns: tuple[str, ...]
    keys: tuple[str, ...]
    mark: str
    read: Callable[[Any, str, bool], Media]
    options: tuple[str, ...] = ()
    alone: Callable[[Any], bool] = lambda value: False

    def is_part(self, part: Any) -> bool:
        """Whether a part of a message is one, or its placeholder."""
        return isinstance(part, Mapping) and part.get("type") in self.parts

    @property
    def field(self) -> str:
        """Its name among the fields of prompts and batches, and in messages about several."""
        return f"{self.name}s"

    @property
    def one(self) -> str:
        """It with its article."""
        return f"{'an' if self.name[0] in 'aeiou' else 'a'} {self.name}"

    @property
    def placeholder(self) -> dict[str, Any]:
        """The part that is left in a chat for one."""
        return {"type": self.place}


def _is_timed(value: Any) -> bool:
    """Whether a value is samples with their rate, (array, rate), and no two sounds; or samples alone, which are refused
    as such."""
    rated = isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[1], int | float | np.number)
    return isinstance(value, np.ndarray) or (rated and not isinstance(value[1], bool))


IMAGE = MediaKind(
    "image",
    "image",
    ("image", "image_url", "input_image"),
    ("images", "image"),
    ("image", "image_url", "url", "path"),
    "<image>",
    EncodedImage.from_any,
)
SOUND = MediaKind(
    "sound",
    "audio",
    ("audio", "audio_url", "input_audio"),
    ("audios", "audio"),
    ("audio", "audio_url", "input_audio", "url", "path"),
    "<audio>",
    EncodedSound.from_any,
    alone=_is_timed,
)
VIDEO = MediaKind(
    "video",
    "video",
    ("video", "video_url", "input_video"),
    ("videos", "video"),
    ("video", "video_url", "frames", "url", "path"),
    "<video>",
    EncodedVideo.from_any,
    OPTIONS,
    lambda value: is_frames(value) or is_timed(value),
)
IMAGE_COLUMNS = IMAGE.columns
KINDS: dict[str, MediaKind[Any]] = {kind.field: kind for kind in (IMAGE, VIDEO, SOUND)}
"""By the names of a prompt's fields, in the order in which a prompt's are told."""


def kind_of(one: Any) -> MediaKind[Any]:
    """Return what a value is; of what is read by none yet, WAV files are sounds, all else images."""
    wave = isinstance(one, bytes) and one[:4] == b"RIFF" and one[8:12] == b"WAVE"
    if isinstance(one, EncodedVideo):
        return VIDEO
    return SOUND if wave or isinstance(one, EncodedSound) else IMAGE


def by_kind(media: Sequence[Any]) -> dict[str, tuple[Any, ...]]:
    """Return images, videos and sounds apart, by the names of a prompt's fields."""
    return {
        name: tuple(kind.read(one, f"the {kind.name}", False) for one in media if kind_of(one) is kind)
        for name, kind in KINDS.items()
    }


def check_together(held: Mapping[str, Sequence[Any]]) -> None:
    """Refuse sounds beside images or videos; `held`: what there is by field."""
    if held["sounds"] and (other := next((name for name in ("images", "videos") if held[name]), None)):
        raise DataError(f"it has {other} and sounds, and no model here takes both: leave one out")


def media_of_rows(count: int, **given: Sequence[Sequence[Any]]) -> list[tuple[EncodedMedia, ...]]:
    """Return the media of each of so many rows of token ids, those `given` for each row by the names of `KINDS`; none
    of none."""
    for name, rows in given.items():
        if rows and len(rows) != count:
            raise DataError(f"{name} for {len(rows)} sequences of {count} were given: give () for one without")
    if not any(given.values()):
        return []
    media = []
    for row in range(count):
        own = {name: _read(given[name][row], False, kind) if given[name] else () for name, kind in KINDS.items()}
        check_together(own)
        media.append(sum(own.values(), ()))
    return media


def listed(value: Any, kind: MediaKind[Any] = IMAGE) -> tuple[Any, ...]:
    """Return the images, videos or sounds that a cell of a row holds: none, one or several."""
    if value is None:
        return ()
    if kind.alone(value):
        return (value,)
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.tolist()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def placed(content: Any, images: Sequence[Any] = (), fetch: bool = False) -> tuple[Any, tuple[EncodedImage, ...]]:
    """Return a prompt's content with placeholders alone, and its images in their order; see `placed_as`."""
    return placed_as(IMAGE, content, images, fetch)


def placed_as(
    kind: MediaKind[Media], content: Any, media: Sequence[Any] = (), fetch: bool = False
) -> tuple[Any, tuple[Media, ...]]:
    """Return a prompt's content with placeholders alone, and its images, or what is of another kind, in their order.

    Args:
        content: a text, a chat or token ids. Those in parts of a chat are taken out. A chat without a place for its
            `media` gets one where `<image>`, `<video>` or `<audio>` stands in its texts, or all before the text of its
            first user message.
        media: those of the placeholders, as `from_any` of `EncodedImage`, `EncodedVideo` or `EncodedSound` takes
            them.
        fetch: read http addresses too.

    Raises DataError where there are more or fewer images than places, and for what is none.
    """
    inside = list(media_parts(content, kind)) if isinstance(content, list) else []
    if not inside and not media:
        return content, ()
    if not isinstance(content, list) or not isinstance(content[0], Mapping):
        return content, _read(media, fetch, kind)  # the model's own placeholders stand in it; a replica counts them
    if not inside:
        content = _with_places(content, len(media), kind)
        inside = list(media_parts(content, kind))
    held = [held_media(part, kind) for part in inside]
    if sum(one is None for one in held) != len(media):
        raise DataError(
            f"the chat has {sum(one is None for one in held)} placeholders for {kind.name}s and {len(media)} "
            f"{kind.name}s beside it: give one for each"
        )
    beside = iter(media)
    encoded = _read([next(beside) if one is None else one for one in held], fetch, kind)
    return [_cleared(message, kind) for message in content], encoded


def placed_by_kind(
    content: Any, media: Mapping[str, Sequence[Any]], fetch: bool = False
) -> tuple[Any, dict[str, tuple[Any, ...]]]:
    """Return what `placed_as` does of all kinds, one after another; `media` by the names of `KINDS`, as what is
    returned."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, kind in KINDS.items():
        content, found[name] = placed_as(kind, content, media.get(name, ()), fetch)
    return content, found


def media_parts(content: Sequence[Any], kind: MediaKind[Any] = IMAGE) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a chat that are images, or of another kind, in order."""
    for message in content:
        told = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(told, list | tuple):
            yield from filter(kind.is_part, told)


def held_media(part: Mapping[str, Any], kind: MediaKind[Any] = IMAGE) -> Any:
    """What a part holds that is an image, or of another kind; None for a placeholder. Of Anthropic's `source` its
    address, or its bytes as one."""
    source = part.get("source")
    if isinstance(source, Mapping):
        return source.get("url") if "url" in source else f"data:{source.get('media_type')};base64,{source.get('data')}"
    held = next((part[name] for name in kind.keys if part.get(name) is not None), None)
    options = {name: part[name] for name in kind.options if part.get(name) is not None}
    return held if held is None or not options else {kind.place: held, **options}


def without_images(content: Any) -> Any:
    """Return messages, or parts of one, with placeholders for images; anything else as it is."""
    if not isinstance(content, list | tuple) or not all(isinstance(one, Mapping) for one in content):
        return content
    return [IMAGE.placeholder if IMAGE.is_part(one) else _cleared(one, IMAGE) for one in content]


def _read(values: Sequence[Any], fetch: bool, kind: MediaKind[Media]) -> tuple[Media, ...]:
    return tuple(kind.read(one, f"{kind.name} {i}", fetch) for i, one in enumerate(values))


def _cleared(message: Mapping[str, Any], kind: MediaKind[Any]) -> dict[str, Any]:
    told = message.get("content")
    if not isinstance(told, list | tuple) or not any(map(kind.is_part, told)):
        return dict(message)
    return {**message, "content": [kind.placeholder if kind.is_part(part) else part for part in told]}


def _with_places(chat: Sequence[Mapping[str, Any]], count: int, kind: MediaKind[Any]) -> list[dict[str, Any]]:
    """Give a chat of texts places for images: at its marks, or before the first user message."""
    marks = sum(m["content"].count(kind.mark) for m in chat if isinstance(m.get("content"), str))
    if marks == count:
        return [_split(message, kind) for message in chat]
    user = next((i for i, message in enumerate(chat) if message.get("role") == "user"), None)
    if marks or user is None:
        where = f"{marks} marks {kind.mark}" if marks else "no user message"
        raise DataError(f"the chat has {where} for {count} {kind.name}s: write {kind.placeholder} where each belongs")
    told = chat[user].get("content") or ""
    texts = [{"type": "text", "text": told}] if isinstance(told, str) else list(told)
    first = {**chat[user], "content": [*(kind.placeholder for _ in range(count)), *texts]}
    return [first if i == user else dict(message) for i, message in enumerate(chat)]


def _split(message: Mapping[str, Any], kind: MediaKind[Any]) -> dict[str, Any]:
    """Make parts of a text with marks."""
    told = message.get("content")
    if not isinstance(told, str) or kind.mark not in told:
        return dict(message)
    parts: list[dict[str, Any]] = []
    for i, text in enumerate(told.split(kind.mark)):
        parts += [kind.placeholder] if i else []
        parts += [{"type": "text", "text": text}] if text else []
    return {**message, "content": parts}

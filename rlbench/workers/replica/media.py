"""Images and sounds of prompts as vLLM takes them: processed once for each prompt, which its samples share."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlbench.data.prompts.encoded import EncodedMedia
from rlbench.data.prompts.images import EncodedImage, PlacedImage
from rlbench.data.prompts.placing import IMAGE, SOUND, MediaKind, by_kind
from rlbench.data.prompts.sounds import EncodedSound
from rlbench.data.texts.sound_features import decoded_sound
from rlbench.errors import DataError
from rlbench.weights.probe import probe_picture, probe_sound

if TYPE_CHECKING:
    from vllm.inputs.engine import MultiModalInput
    from vllm.v1.engine.llm_engine import LLMEngine


HEARING = ("qwen2_audio",)
"""Families whose sounds are read here as on the ranks; of others that hear, text alone."""


class PromptMedia:
    """The images or sounds of a call, by prompt. `rows`: token ids of its prompts, in which those of images are
    expanded in place once they are asked for, one token for each that the model sees; `limit`: tokens a row may have
    then. Raises DataError where the model takes no such thing, or less of it."""

    def __init__(
        self,
        engine: LLMEngine,
        media: Sequence[Sequence[Any]],
        rows: list[list[int]],
        limit: int,
        what: str = "prompt",
    ) -> None:
        self._engine, self._rows, self._limit, self._what = engine, rows, limit, what
        self._media: list[tuple[EncodedMedia, ...]] = [sum(by_kind(own).values(), ()) for own in media]
        self.place = place_token(engine) if engine.model_config.is_multimodal_model else -1
        for index, own in enumerate(self._media):
            kind = kind_of(own)
            if len(own) > (most := media_limit(engine, kind)):
                seen = f"{len(own)} {kind.name}{'s' * (len(own) != 1)}"
                raise DataError(f"{what} {index} has {seen}, but {takes(engine, most, kind)}")

    def __getitem__(self, index: int) -> MultiModalInput | None:
        """Return the model's input of one prompt, its token ids expanded; None where it has neither. DataError for an
        image that cannot be decoded or processed, and for token ids that have other places than there are images."""
        if not self._media or not self._media[index]:
            if self._what == "prompt" and self.place in self._rows[index]:
                one = "a sound" if model_kind(self._engine) is SOUND else "an image"
                raise DataError(f"{self._what} {index} holds the model's token for {one}, and has none")
            return None
        held, ids, what = self._media[index], self._rows[index], f"{self._what} {index}"
        bare = collapsed(ids, self.place)
        try:
            made = processed(self._engine, bare, held)
        except DataError as error:
            raise DataError(f"{what}: {error}") from error
        expanded = list(made["prompt_token_ids"])
        if len(ids) > len(bare) and expanded != ids:  # they came expanded
            raise DataError(f"{what}: its token ids have places for {kind_of(held).name}s of other sizes than it has")
        if len(expanded) > self._limit:
            raise DataError(
                f"{what} has {len(expanded)} tokens with its {kind_of(held).name}s, and there is room for "
                f"{self._limit}: make them smaller, or build the engine with a larger max_model_len if the model "
                "allows it"
            )
        self._rows[index] = expanded
        return made

    def of_sample(self, index: int, media: MultiModalInput | None) -> SampleMedia:
        """Return the images of a sample that has begun; `media`: its prompt's, which all samples of it share."""
        return SampleMedia(self._engine, self.place, len(self._media[index]) if self._media else 0, media)


class SampleMedia:
    """The images of one sample that meets an environment: its prompt's, then those that the environment shows; or its
    prompt's sounds. `media`: the model's input of all of them, at their places; None where there is none."""

    def __init__(self, engine: LLMEngine, place: int, count: int, media: MultiModalInput | None) -> None:
        self._engine, self._place, self._count = engine, place, count
        self.media = media

    def opened(self, ids: Sequence[int], images: Sequence[EncodedImage]) -> tuple[list[int], list[PlacedImage]]:
        """Return the token ids of a chat that begins with the prompt's messages, expanded, and where in them the images
        stand that the environment showed behind those. `ids`: with one token for each image, the prompt's first."""
        more = self._processed(images)
        if more is not None:
            self._join(more, () if self.media is None else self.media["prompt_token_ids"])
        if self.media is None:
            return list(ids), []
        self.media = expanded(self.media, ids, self._place)
        return list(self.media["prompt_token_ids"]), self._latest(images)

    def observed(
        self, ids: Sequence[int], images: Sequence[EncodedImage], context: Sequence[int]
    ) -> tuple[list[int], list[PlacedImage]]:
        """Return the same of token ids that go behind the `context`, all of the sample's so far."""
        more = self._processed(images)
        if more is None:
            return list(ids), []
        more = expanded(more, ids, self._place)
        self._join(more, context)
        return list(more["prompt_token_ids"]), self._latest(images)

    def _processed(self, images: Sequence[EncodedImage]) -> MultiModalInput | None:
        """Return the model's input of images alone, None of none. DataError where the model takes less."""
        if not images:
            return None
        self._count += len(images)
        most = media_limit(self._engine, IMAGE)
        if self._count > most:
            images_now = f"{self._count} image{'s' * (self._count > 1)}"
            raise DataError(
                f"with this observation the sample has {images_now}, but {takes(self._engine, most, IMAGE)}"
            )
        return processed(self._engine, [self._place] * len(images), images)

    def _join(self, more: MultiModalInput, context: Sequence[int]) -> None:
        """Put images behind those there are, and the token ids in which they stand behind a context."""
        own: Any = self.media or {name: {"image": []} for name in ("mm_kwargs", "mm_hashes", "mm_placeholders")}
        spans = [replace(span, offset=span.offset + len(context)) for span in more["mm_placeholders"]["image"]]
        items = [*own["mm_kwargs"]["image"], *more["mm_kwargs"]["image"]]
        self.media = {
            **more,
            "prompt_token_ids": [*context, *more["prompt_token_ids"]],
            "mm_kwargs": type(more["mm_kwargs"])({"image": items}),
            "mm_hashes": {"image": [*own["mm_hashes"]["image"], *more["mm_hashes"]["image"]]},
            "mm_placeholders": {"image": [*own["mm_placeholders"]["image"], *spans]},
        }

    def _latest(self, images: Sequence[EncodedImage]) -> list[PlacedImage]:
        """Return the images that came last, with their places."""
        spans = self.media["mm_placeholders"][IMAGE.place] if images and self.media is not None else []
        latest = spans[len(spans) - len(images) :]
        return [PlacedImage.of(image, span.offset) for image, span in zip(images, latest, strict=True)]


def processed(engine: LLMEngine, ids: Sequence[int], media: Sequence[EncodedMedia]) -> MultiModalInput:
    """Decode and process images or sounds; return the model's input, in which each is a run of tokens at its one place
    in `ids`. DataError where one is broken, and where the model's processor refuses them."""
    kind = kind_of(media)
    prompt = {
        "prompt_token_ids": list(ids),
        "multi_modal_data": {kind.place: [_decoded(engine, one) for one in media]},
        "multi_modal_uuids": {kind.place: [one.digest for one in media]},
    }
    try:
        return engine.renderer.process_for_engine(prompt, time.time())  # type: ignore[arg-type,return-value]
    except Exception as error:  # the family's own processor, whatever it has against an image
        cause = error.__cause__ or error
        raise DataError(
            f"{ids.count(place_token(engine))} places for its {len(media)} {kind.name}s {', '.join(map(str, media))}; "
            f"the model's processor refuses them: {type(cause).__name__}: {str(cause)[:300]}"
        ) from error


def expanded(media: MultiModalInput, ids: Sequence[int], place: int) -> MultiModalInput:
    """Return a model's input for token ids that have one token for each of its images, which become runs there."""
    (place_name,) = media["mm_placeholders"]
    name = SOUND.name if place_name == SOUND.place else IMAGE.name
    spans = media["mm_placeholders"][place_name]
    if (count := list(ids).count(place)) != len(spans):
        raise DataError(
            f"the messages have {count} of the model's tokens for an image or a sound, and there are {len(spans)} "
            f"{name}s: a text of theirs holds such a token"
        )
    before = media["prompt_token_ids"]
    runs = iter([before[span.offset : span.offset + span.length] for span in spans])
    whole: list[int] = []
    places: list[int] = []
    for token in ids:
        run = next(runs) if token == place else [token]
        places += [len(whole)] if token == place else []
        whole += run
    placeholders = [replace(span, offset=offset) for span, offset in zip(spans, places, strict=True)]
    return {**media, "prompt_token_ids": whole, "mm_placeholders": {place_name: placeholders}}


def probe_row(engine: LLMEngine, limit: int) -> list[int] | None:
    """Return the token ids of a sequence that holds the probe's picture, or its sound; None for a model of text
    alone."""
    if media_limit(engine) == 0:
        return None
    rows = [[0, 1, 2, place_token(engine), *range(3, 8), *range(3)]]
    probe = probe_sound() if model_kind(engine) is SOUND else probe_picture()
    PromptMedia(engine, [(probe,)], rows, limit, "the probe")[0]
    if engine.renderer.mm_processor_cache is not None:
        engine.reset_mm_cache()  # which takes what was processed for sent
    return rows[0]


def model_kind(engine: LLMEngine) -> MediaKind[Any]:
    """Return what a model takes beside text: sounds, or images; images of one that takes text alone."""
    return SOUND if engine.model_config.hf_config.model_type in HEARING else IMAGE


def kind_of(media: Sequence[EncodedMedia]) -> MediaKind[Any]:
    """Return what these are."""
    return SOUND if media and isinstance(media[0], EncodedSound) else IMAGE


def media_limit(engine: LLMEngine, kind: MediaKind[Any] | None = None) -> int:
    """Return how many images, or sounds, a prompt may have; 0 of what the model does not take."""
    if not engine.model_config.is_multimodal_model or (kind or model_kind(engine)) is not model_kind(engine):
        return 0
    limits = engine.renderer.get_mm_processor().info.allowed_mm_limits
    return int(limits.get(model_kind(engine).place, 0))


def takes(engine: LLMEngine, most: int, kind: MediaKind[Any]) -> str:
    """Say what a model takes."""
    config = engine.model_config
    name = f"{', '.join(config.architectures)} ({config.model})"
    if most:
        return f"{name} takes {most} here: engine_kwargs={{'limit_mm_per_prompt': {{{kind.place!r}: …}}}}"
    other = model_kind(engine).name if media_limit(engine) else ""
    what = f"text and {other}s" if other else "text alone"
    wanted = "a vision-language model" if kind is IMAGE else "an audio-language model"
    return f"{name} takes {what}: leave the {kind.name}s out, or build the engine of {wanted}"


def _decoded(engine: LLMEngine, one: EncodedMedia) -> Any:
    """Return a picture, or samples with the rate that the model's own feature extractor takes."""
    if isinstance(one, EncodedSound):
        extractor = engine.renderer.get_mm_processor().info.get_feature_extractor()  # type: ignore[attr-defined]
        return decoded_sound(one, extractor), int(extractor.sampling_rate)
    assert isinstance(one, EncodedImage)
    return one.pil()


def moved(media: MultiModalInput, ids: Sequence[int]) -> MultiModalInput:
    """Return a model's input for other token ids, in which the same images stand, in the same order."""
    before, places, at = media["prompt_token_ids"], [], 0
    for span in media["mm_placeholders"]["image"]:
        run = before[span.offset : span.offset + span.length]
        while list(ids[at : at + span.length]) != run:
            at += 1
            if at + span.length > len(ids):
                raise DataError("the run's earlier tokens have not the places for its images that its messages have")
        places.append(replace(span, offset=at))
        at += span.length
    return {**media, "prompt_token_ids": list(ids), "mm_placeholders": {"image": places}}


def place_token(engine: LLMEngine) -> int:
    """Return the token that chat templates write for an image, or for a sound."""
    config, name = engine.model_config.hf_config, model_kind(engine).place
    return int(getattr(config, f"{name}_token_id", getattr(config, f"{name}_token_index", -1)))


def collapsed(ids: Sequence[int], place: int) -> list[int]:
    """Return token ids with one token for each image: those of a prompt that was expanded before have a run of them."""
    runs = itertools.groupby(ids, key=lambda token: token == place)
    return [token for is_place, run in runs for token in ([place] if is_place else run)]

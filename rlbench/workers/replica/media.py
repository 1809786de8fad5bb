"""Images of prompts as vLLM takes them: decoded and processed once for each prompt, which its samples share."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlbench.data.prompts.images import EncodedImage, PlacedImage
from rlbench.errors import DataError
from rlbench.weights.probe import probe_picture

if TYPE_CHECKING:
    from vllm.inputs.engine import MultiModalInput
    from vllm.v1.engine.llm_engine import LLMEngine


class PromptMedia:
    """The images of a call, by prompt. `rows`: token ids of its prompts, in which those of images are expanded in place
    once they are asked for, one token for each that the model sees; `limit`: tokens a row may have then. Raises
    DataError where the model takes no images, or less."""

    def __init__(
        self,
        engine: LLMEngine,
        images: Sequence[Sequence[Any]],
        rows: list[list[int]],
        limit: int,
        what: str = "prompt",
    ) -> None:
        self._engine, self._rows, self._limit, self._what = engine, rows, limit, what
        self._images = [tuple(map(EncodedImage.from_any, own)) for own in images]
        self.place = place_token(engine) if engine.model_config.is_multimodal_model else -1
        most = image_limit(engine) if images else 0
        for index, own in enumerate(images):
            if len(own) > most:
                raise DataError(
                    f"{what} {index} has {len(own)} image{'s' * (len(own) != 1)}, but {takes(engine, most)}"
                )

    def __getitem__(self, index: int) -> MultiModalInput | None:
        """Return the model's input of one prompt, its token ids expanded; None where it has no image. DataError for an
        image that cannot be decoded or processed, and for token ids that have other places than there are images."""
        if not self._images or not self._images[index]:
            if self._what == "prompt" and self.place in self._rows[index]:
                raise DataError(f"{self._what} {index} holds the model's token for an image, and has none")
            return None
        images, ids, what = self._images[index], self._rows[index], f"{self._what} {index}"
        bare = collapsed(ids, self.place)
        try:
            made = processed(self._engine, bare, images)
        except DataError as error:
            raise DataError(f"{what}: {error}") from error
        expanded = list(made["prompt_token_ids"])
        if len(ids) > len(bare) and expanded != ids:  # they came expanded
            raise DataError(f"{what}: its token ids have places for images of other sizes than it has")
        if len(expanded) > self._limit:
            raise DataError(
                f"{what} has {len(expanded)} tokens with its images, and there is room for {self._limit}: make the "
                "images smaller, or build the engine with a larger max_model_len if the model allows it"
            )
        self._rows[index] = expanded
        return made

    def of_sample(self, index: int, media: MultiModalInput | None) -> SampleMedia:
        """Return the images of a sample that has begun; `media`: its prompt's, which all samples of it share."""
        return SampleMedia(self._engine, self.place, len(self._images[index]) if self._images else 0, media)


class SampleMedia:
    """The images of one sample that meets an environment: its prompt's, then those that the environment shows. `media`:
    the model's input of all of them, at their places; None where there is none."""

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
        most = image_limit(self._engine)
        if self._count > most:
            images_now = f"{self._count} image{'s' * (self._count > 1)}"
            raise DataError(f"with this observation the sample has {images_now}, but {takes(self._engine, most)}")
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
        spans = [] if self.media is None else self.media["mm_placeholders"]["image"]
        latest = spans[len(spans) - len(images) :]
        return [PlacedImage.of(image, span.offset) for image, span in zip(images, latest, strict=True)]


def processed(engine: LLMEngine, ids: Sequence[int], images: Sequence[EncodedImage]) -> MultiModalInput:
    """Decode and process images; return the model's input, in which each is a run of tokens at its one place in `ids`.
    DataError where an image is broken, and where the model's processor refuses them."""
    prompt = {
        "prompt_token_ids": list(ids),
        "multi_modal_data": {"image": [image.pil() for image in images]},
        "multi_modal_uuids": {"image": [image.digest for image in images]},
    }
    try:
        return engine.renderer.process_for_engine(prompt, time.time())  # type: ignore[arg-type,return-value]
    except Exception as error:  # the family's own processor, whatever it has against an image
        cause = error.__cause__ or error
        raise DataError(
            f"{ids.count(place_token(engine))} places for its {len(images)} images {', '.join(map(str, images))}; "
            f"the model's processor refuses them: {type(cause).__name__}: {str(cause)[:300]}"
        ) from error


def expanded(media: MultiModalInput, ids: Sequence[int], place: int) -> MultiModalInput:
    """Return a model's input for token ids that have one token for each of its images, which become runs there."""
    spans = media["mm_placeholders"]["image"]
    if (count := list(ids).count(place)) != len(spans):
        raise DataError(
            f"the messages have {count} of the model's tokens for an image, and there are {len(spans)} images: a text "
            "of theirs holds such a token"
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
    return {**media, "prompt_token_ids": whole, "mm_placeholders": {"image": placeholders}}


def probe_row(engine: LLMEngine, limit: int) -> list[int] | None:
    """Return the token ids of a sequence that holds the probe's picture; None for a model of text alone."""
    if image_limit(engine) == 0:
        return None
    rows = [[0, 1, 2, place_token(engine), *range(3, 8), *range(3)]]
    PromptMedia(engine, [(EncodedImage.from_any(probe_picture()),)], rows, limit, "the probe")[0]
    if engine.renderer.mm_processor_cache is not None:
        engine.reset_mm_cache()  # which takes what was processed for sent
    return rows[0]


def image_limit(engine: LLMEngine) -> int:
    """Return how many images a prompt may have; 0 for a model of text alone."""
    if not engine.model_config.is_multimodal_model:
        return 0
    return int(engine.renderer.get_mm_processor().info.allowed_mm_limits.get("image", 0))


def takes(engine: LLMEngine, most: int) -> str:
    """Say what a model takes."""
    config = engine.model_config
    name = f"{', '.join(config.architectures)} ({config.model})"
    if not most:
        return f"{name} takes text alone: leave the images out, or build the engine of a vision-language model"
    return f"{name} takes {most} here: engine_kwargs={{'limit_mm_per_prompt': {{'image': …}}}}"


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
    """Return the token that chat templates write for an image."""
    config = engine.model_config.hf_config
    return int(getattr(config, "image_token_id", getattr(config, "image_token_index", -1)))


def collapsed(ids: Sequence[int], place: int) -> list[int]:
    """Return token ids with one token for each image: those of a prompt that was expanded before have a run of them."""
    runs = itertools.groupby(ids, key=lambda token: token == place)
    return [token for is_place, run in runs for token in ([place] if is_place else run)]

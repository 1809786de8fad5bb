"""Images of prompts as vLLM takes them: decoded and processed once for each prompt, which its samples share."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlbench.data.prompts.images import EncodedImage
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
            pixels = [image.pil() for image in images]
        except DataError as error:
            raise DataError(f"{what}: {error}") from error
        prompt = {
            "prompt_token_ids": bare,
            "multi_modal_data": {"image": pixels},
            "multi_modal_uuids": {"image": [image.digest for image in images]},
        }
        try:
            made: Any = self._engine.renderer.process_for_engine(prompt, time.time())  # type: ignore[arg-type]
        except Exception as error:  # the family's own processor, whatever it has against an image
            cause = error.__cause__ or error
            raise DataError(
                f"{what}: {bare.count(self.place)} places for its {len(images)} images "
                f"{', '.join(map(str, images))}; the model's processor refuses them: {type(cause).__name__}: "
                f"{str(cause)[:300]}"
            ) from error
        expanded = list(made["prompt_token_ids"])
        if len(ids) > len(bare) and expanded != ids:  # they came expanded
            raise DataError(f"{what}: its token ids have places for images of other sizes than it has")
        if len(expanded) > self._limit:
            raise DataError(
                f"{what} has {len(expanded)} tokens with its images, and there is room for {self._limit}: make the "
                "images smaller, or build the engine with a larger max_model_len if the model allows it"
            )
        self._rows[index] = expanded
        return made  # type: ignore[no-any-return]


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


class Expanding:
    """A tokenizer for conversations that begin with a prompt with images: its chat template writes each of them as the
    tokens that the model sees. `media`: of that prompt."""

    def __init__(self, tokenizer: Any, media: MultiModalInput, place: int) -> None:
        self._tokenizer, self._place = tokenizer, place
        ids = media["prompt_token_ids"]
        spans = media["mm_placeholders"]["image"]
        self._runs = [ids[span.offset : span.offset + span.length] for span in spans]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Encode texts."""
        return self._tokenizer(*args, **kwargs)

    def apply_chat_template(self, messages: Any, **options: Any) -> list[int]:
        """Return the token ids of a chat."""
        runs = iter(self._runs)
        ids = self._tokenizer.apply_chat_template(messages, **options)
        return [one for token in ids for one in (next(runs) if token == self._place else (token,))]


def place_token(engine: LLMEngine) -> int:
    """Return the token that chat templates write for an image."""
    config = engine.model_config.hf_config
    return int(getattr(config, "image_token_id", getattr(config, "image_token_index", -1)))


def collapsed(ids: Sequence[int], place: int) -> list[int]:
    """Return token ids with one token for each image: those of a prompt that was expanded before have a run of them."""
    runs = itertools.groupby(ids, key=lambda token: token == place)
    return [token for is_place, run in runs for token in ([place] if is_place else run)]

"""Images, videos and sounds of prompts as vLLM takes them: processed once for each prompt, which its samples share."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rlbench.data.prompts.encoded import EncodedMedia
from rlbench.data.prompts.images import EncodedImage, PlacedImage
from rlbench.data.prompts.placing import IMAGE, KINDS, SOUND, VIDEO, MediaKind, by_kind
from rlbench.data.prompts.sounds import EncodedSound
from rlbench.data.prompts.videos import EncodedVideo
from rlbench.data.texts.sound_features import decoded_sound
from rlbench.data.texts.video_frames import NO_MORE_SAMPLING, WATCHING, SampledFrames, sampled_frames
from rlbench.errors import DataError
from rlbench.weights.probe import probe_picture, probe_sound

if TYPE_CHECKING:
    from vllm.inputs.engine import MultiModalInput
    from vllm.v1.engine.llm_engine import LLMEngine


HEARING = ("qwen2_audio",)
"""Families whose sounds are read here as on the ranks; of others that hear, text alone."""
MODELS = {
    IMAGE: "a vision-language model",
    VIDEO: f"a model that watches ({', '.join(WATCHING)})",
    SOUND: "an audio-language model",
}


class PromptMedia:
    """The images, videos or sounds of a call, by prompt. `rows`: token ids of its prompts, in which those of images are
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
        self._media = [by_kind(own) for own in media]
        self.places = place_tokens(engine)
        for index, own in enumerate(self._media):
            for name, held in own.items():
                if len(held) > (most := media_limit(engine, KINDS[name])):
                    seen = f"{len(held)} {KINDS[name].name}{'s' * (len(held) != 1)}"
                    raise DataError(f"{what} {index} has {seen}, but {takes(engine, most, KINDS[name])}")

    def __getitem__(self, index: int) -> MultiModalInput | None:
        """Return the model's input of one prompt, its token ids expanded; None where it has none. DataError for an
        image that cannot be decoded or processed, and for token ids that have other places than there are images."""
        ids, what = self._rows[index], f"{self._what} {index}"
        held = {name: own for name, own in self._media[index].items() if own} if self._media else {}
        if self._what == "prompt":
            for kind, token in self.places.items():
                if token in ids and kind.field not in held:
                    raise DataError(f"{what} holds the model's token for {kind.one}, and has none")
        if not held:
            return None
        bare, names = collapsed(ids, tuple(self.places.values())), " and ".join(held)
        try:
            made = processed(self._engine, bare, sum(held.values(), ()))
        except DataError as error:
            raise DataError(f"{what}: {error}") from error
        expanded = list(made["prompt_token_ids"])
        if len(ids) > len(bare) and expanded != ids:  # they came expanded
            raise DataError(f"{what}: its token ids have places for {names} of other sizes than it has")
        if len(expanded) > self._limit:
            raise DataError(
                f"{what} has {len(expanded)} tokens with its {names}, and there is room for "
                f"{self._limit}: make them smaller, or build the engine with a larger max_model_len if the model "
                "allows it"
            )
        self._rows[index] = expanded
        return made

    def of_sample(self, index: int, media: MultiModalInput | None) -> SampleMedia:
        """Return the images of a sample that has begun; `media`: its prompt's, which all samples of it share."""
        count = len(self._media[index]["images"]) if self._media else 0
        return SampleMedia(self._engine, self.places, count, media)


class SampleMedia:
    """The images of one sample that meets an environment: its prompt's, then those that the environment shows; beside
    its prompt's videos, or its sounds. `media`: the model's input of all of them, at their places; None where there is
    none."""

    def __init__(
        self, engine: LLMEngine, places: Mapping[MediaKind[Any], int], count: int, media: MultiModalInput | None
    ) -> None:
        self._engine, self._places, self._count = engine, places, count
        self.media = media

    def opened(self, ids: Sequence[int], images: Sequence[EncodedImage]) -> tuple[list[int], list[PlacedImage]]:
        """Return the token ids of a chat that begins with the prompt's messages, expanded, and where in them the images
        stand that the environment showed behind those. `ids`: with one token for each image, the prompt's first."""
        more = self._processed(images)
        if more is not None:
            self._join(more, () if self.media is None else self.media["prompt_token_ids"])
        if self.media is None:
            return list(ids), []
        self.media = expanded(self.media, ids, self._places)
        return list(self.media["prompt_token_ids"]), self._latest(images)

    def observed(
        self, ids: Sequence[int], images: Sequence[EncodedImage], context: Sequence[int]
    ) -> tuple[list[int], list[PlacedImage]]:
        """Return the same of token ids that go behind the `context`, all of the sample's so far."""
        more = self._processed(images)
        if more is None:
            return list(ids), []
        more = expanded(more, ids, self._places)
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
        return processed(self._engine, [self._places[IMAGE]] * len(images), images)

    def _join(self, more: MultiModalInput, context: Sequence[int]) -> None:
        """Put images behind those there are, and the token ids in which they stand behind a context."""
        own: Any = self.media or {name: {} for name in ("mm_kwargs", "mm_hashes", "mm_placeholders")}
        spans = [replace(span, offset=span.offset + len(context)) for span in more["mm_placeholders"]["image"]]
        given = {name: more[name]["image"] for name in ("mm_kwargs", "mm_hashes")} | {"mm_placeholders": spans}
        joined: Any = {n: {**own[n], "image": [*own[n].get("image", ()), *found]} for n, found in given.items()}
        joined["mm_kwargs"] = type(more["mm_kwargs"])(joined["mm_kwargs"])
        self.media = {**more, **joined, "prompt_token_ids": [*context, *more["prompt_token_ids"]]}

    def _latest(self, images: Sequence[EncodedImage]) -> list[PlacedImage]:
        """Return the images that came last, with their places."""
        spans = self.media["mm_placeholders"][IMAGE.place] if images and self.media is not None else []
        latest = spans[len(spans) - len(images) :]
        return [PlacedImage.of(image, span.offset) for image, span in zip(images, latest, strict=True)]


def processed(engine: LLMEngine, ids: Sequence[int], media: Sequence[EncodedMedia]) -> MultiModalInput:
    """Decode and process images, videos or sounds; return the model's input, in which each is a run of tokens at its
    one place in `ids`. DataError where one is broken, and where the model's processor refuses them."""
    held = {KINDS[name]: own for name, own in by_kind(media).items() if own}
    data = {kind.place: [_decoded(engine, one) for one in own] for kind, own in held.items() if kind is not VIDEO}
    shown = [_sampled(engine, video) for video in held.get(VIDEO, ())]
    if shown:
        data[VIDEO.place] = [(own.pixels, own.told) for own in shown]
    prompt = {
        "prompt_token_ids": list(ids),
        "multi_modal_data": data,
        "multi_modal_uuids": {kind.place: [one.digest for one in own] for kind, own in held.items()},
        **({"mm_processor_kwargs": NO_MORE_SAMPLING} if shown else {}),
    }
    try:
        made = engine.renderer.process_for_engine(prompt, time.time())  # type: ignore[arg-type]
    except Exception as error:  # the family's own processor, whatever it has against an image
        cause, places = error.__cause__ or error, place_tokens(engine)
        seen = [
            f"{ids.count(places[kind])} places for its {len(own)} {kind.field} {', '.join(map(str, own))}"
            for kind, own in held.items()
        ]
        raise DataError(
            f"{' and '.join(seen)}; the model's processor refuses them: {type(cause).__name__}: {str(cause)[:300]}"
        ) from error
    for item, own in zip(made["mm_kwargs"]["video"] if shown else (), shown, strict=True):  # type: ignore[typeddict-item]
        item["second_per_grid_ts"].data = torch.tensor(own.seconds, dtype=torch.float64)  # see `SampledFrames`
    return made  # type: ignore[return-value]


def expanded(media: MultiModalInput, ids: Sequence[int], places: Mapping[MediaKind[Any], int]) -> MultiModalInput:
    """Return a model's input for token ids that have one token for each of its images, which become runs there;
    `places`: those tokens."""
    before, runs = media["prompt_token_ids"], {}
    for kind, token in places.items():
        spans = media["mm_placeholders"].get(kind.place, ())
        if spans and (count := list(ids).count(token)) != len(spans):
            raise DataError(
                f"the messages have {count} of the model's tokens for {kind.one}, and there are {len(spans)} "
                f"{kind.field}: a text of theirs holds such a token"
            )
        if spans:
            runs[token] = kind, iter(spans)
    whole: list[int] = []
    placed: dict[str, list[Any]] = {kind.place: [] for kind, _ in runs.values()}
    for token in ids:
        if token not in runs:
            whole.append(token)
            continue
        kind, own = runs[token]
        span = next(own)
        placed[kind.place].append(replace(span, offset=len(whole)))
        whole += before[span.offset : span.offset + span.length]
    return {**media, "prompt_token_ids": whole, "mm_placeholders": placed}


def probe_row(engine: LLMEngine, limit: int) -> list[int] | None:
    """Return the token ids of a sequence that holds the probe's picture, or its sound; None for a model of text
    alone."""
    kind = model_kind(engine)
    if media_limit(engine, kind) == 0:
        return None
    rows = [[0, 1, 2, place_tokens(engine)[kind], *range(3, 8), *range(3)]]
    probe = probe_sound() if kind is SOUND else probe_picture()
    PromptMedia(engine, [(probe,)], rows, limit, "the probe")[0]
    if engine.renderer.mm_processor_cache is not None:
        engine.reset_mm_cache()  # which takes what was processed for sent
    return rows[0]


def model_kind(engine: LLMEngine) -> MediaKind[Any]:
    """Return what a model takes beside text, and its probe holds: sounds, or images; images of one that takes text
    alone."""
    return SOUND if engine.model_config.hf_config.model_type in HEARING else IMAGE


def place_tokens(engine: LLMEngine) -> dict[MediaKind[Any], int]:
    """Return the tokens that chat templates write for what a model takes beside text, by its kinds; none of one that
    takes text alone."""
    if not engine.model_config.is_multimodal_model:
        return {}
    config = engine.model_config.hf_config
    taken = [model_kind(engine), *([VIDEO] if config.model_type in WATCHING else [])]
    names = {kind: (f"{kind.place}_token_id", f"{kind.place}_token_index") for kind in taken}
    return {kind: int(getattr(config, one, getattr(config, other, -1))) for kind, (one, other) in names.items()}


def media_limit(engine: LLMEngine, kind: MediaKind[Any]) -> int:
    """Return how many images, videos or sounds a prompt may have; 0 of what the model does not take."""
    if kind not in place_tokens(engine):
        return 0
    return int(engine.renderer.get_mm_processor().info.allowed_mm_limits.get(kind.place, 0))


def takes(engine: LLMEngine, most: int, kind: MediaKind[Any]) -> str:
    """Say what a model takes."""
    config = engine.model_config
    name = f"{', '.join(config.architectures)} ({config.model})"
    if most:
        return f"{name} takes {most} here: engine_kwargs={{'limit_mm_per_prompt': {{{kind.place!r}: …}}}}"
    others = [other.field for other in place_tokens(engine) if media_limit(engine, other)]
    what = " and ".join(["text", *others]) if others else "text alone"
    return f"{name} takes {what}: leave the {kind.field} out, or build the engine of {MODELS[kind]}"


def _decoded(engine: LLMEngine, one: EncodedMedia) -> Any:
    """Return a picture, or samples with the rate that the model's own feature extractor takes."""
    if isinstance(one, EncodedSound):
        extractor = feature_extractor(engine)
        return decoded_sound(one, extractor), int(extractor.sampling_rate)
    assert isinstance(one, EncodedImage)
    return one.pil()


def feature_extractor(engine: LLMEngine) -> Any:
    """Return that of a model that hears."""
    return engine.renderer.get_mm_processor().info.get_feature_extractor()  # type: ignore[attr-defined]


def _sampled(engine: LLMEngine, video: EncodedVideo) -> SampledFrames:
    """Return the frames of a video that the model's own processor chooses."""
    return sampled_frames(video, engine.renderer.get_mm_processor().info.get_hf_processor().video_processor)


def moved(media: MultiModalInput, ids: Sequence[int]) -> MultiModalInput:
    """Return a model's input for other token ids, in which the same images, or sounds, stand, in the same order."""
    (kind,) = media["mm_placeholders"]
    before, places, at = media["prompt_token_ids"], [], 0
    for span in media["mm_placeholders"][kind]:
        run = before[span.offset : span.offset + span.length]
        while list(ids[at : at + span.length]) != run:
            at += 1
            if at + span.length > len(ids):
                raise DataError(f"the run's earlier tokens have not the places for its {kind}s that its messages have")
        places.append(replace(span, offset=at))
        at += span.length
    return {**media, "prompt_token_ids": list(ids), "mm_placeholders": {kind: places}}


def collapsed(ids: Sequence[int], places: Collection[int]) -> list[int]:
    """Return token ids with one token for each image: those of a prompt that was expanded before have a run of them;
    `places`: what such runs are of."""
    return [token for token, run in itertools.groupby(ids) for token in ([token] if token in places else run)]

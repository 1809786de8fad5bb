"""A training batch: sequences of prompt and response, with what a loss needs per response token."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.base.drawing import needed
from rlbench.data.base.ragged import Ragged, chosen_rows
from rlbench.data.batches.columns import as_column
from rlbench.data.batches.verdicts import Verdicts
from rlbench.data.prompts.encoded import EncodedMedia
from rlbench.data.prompts.images import EncodedImage, counted_from
from rlbench.data.prompts.placing import KINDS, by_kind
from rlbench.data.prompts.sounds import EncodedSound
from rlbench.data.prompts.videos import EncodedVideo
from rlbench.data.record.origin import keeps_makers
from rlbench.errors import DataError, Suggesting
from rlbench.units import format_number

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollouts import Rollouts
    from rlbench.data.texts.stream import TextStream


@dataclass(frozen=True, eq=False)
class TrainBatch(Suggesting):
    """B sequences as ragged arrays; a value: every change gives a new batch.

    `prompts`, `responses`: token ids, int32. Over response tokens: `mask` bool (True where trained), `advantages`,
    `sampler_logprobs` and, where known, `old_logprobs`, `ref_logprobs`, all float32, flat in the order of
    `responses.values`; `sampler_logprobs` are NaN where no policy sampled the token, as of texts. Per sequence:
    `rewards` float64 or None, `group` int32, `weight_version` int64, -1 where no policy of the session sampled it.
    Where responses were compared: `preference` int8, 1 the better one, -1 the other, 0 one that is judged neither way;
    `pair` int32, one number for the two of a pair, which go through one micro-batch, -1 for none; `margin` float32;
    `verdicts`: what pairs say of each head of a reward model, in place of which one is better; None: of none.
    `temperature` is the sampler's: the trainer divides its logits by it, so that both speak of one distribution.
    `reshaped_by`: other sampling options, as `top_p=0.9`, that make `sampler_logprobs` those of another distribution.
    `images`: of each sequence, in order: those that stand at its first placeholder tokens, as a prompt's do, then each
    `PlacedImage` at its place in the response; None: no image. `videos`, `sounds`: of each sequence's prompt, likewise.
    `routing`: the experts that the sampler chose for each token of prompt and response (`data.base.routing`), or None.
    `columns`: more by name, (tokens, …) beside the response tokens, for losses that ask for them: `with_columns`.
    """

    prompts: Ragged
    responses: Ragged
    mask: np.ndarray
    advantages: np.ndarray
    sampler_logprobs: np.ndarray
    group: np.ndarray
    weight_version: np.ndarray
    rewards: np.ndarray | None = None
    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    truncated: np.ndarray | None = None
    preference: np.ndarray | None = None
    pair: np.ndarray | None = None
    margin: np.ndarray | None = None
    verdicts: Verdicts | None = None
    temperature: float = 1.0
    reshaped_by: tuple[str, ...] = ()
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    images: tuple[tuple[EncodedImage, ...], ...] | None = None
    sounds: tuple[tuple[EncodedSound, ...], ...] | None = None
    routing: Ragged | None = None
    videos: tuple[tuple[EncodedVideo, ...], ...] | None = None

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.responses):
            raise DataError(f"{len(self.prompts)} prompts but {len(self.responses)} responses")
        for names, count, what in ((PER_TOKEN, self.tokens, "response tokens"), (PER_ROW, len(self), "sequences")):
            for name in names:
                if (value := getattr(self, name)) is not None and value.shape != (count,):
                    raise DataError(f"{name} has shape {value.shape} for {count} {what}")
        for name in (*KINDS, "verdicts"):
            if (held := getattr(self, name)) is not None and len(held) != len(self):
                raise DataError(f"{name} of {len(held)} sequences for {len(self)}")
        if self.routing is not None and not np.array_equal(self.routing.lengths, self.lengths):
            raise DataError("routing: its rows are not as long as the sequences, prompt and response")
        for name, value in self.columns.items():
            if value.shape[:1] != (self.tokens,):
                raise DataError(f"column {name!r} has shape {value.shape} for {self.tokens} response tokens")

    def __len__(self) -> int:
        return len(self.responses)

    def __repr__(self) -> str:
        reward = ""
        if self.rewards is not None and len(self):
            reward = f", reward {format_number(float(self.rewards.mean()))}"
        trained = int(self.mask.sum())
        pairs = "" if self.pair is None else f", {len(np.unique(self.pair[self.pair >= 0]))} pairs"
        return f"TrainBatch({len(self)} sequences, {self.tokens} response tokens, {trained} trained{reward}{pairs})"

    @property
    def tokens(self) -> int:
        """Response tokens in all."""
        return len(self.responses.values)

    @property
    def response_lengths(self) -> np.ndarray:
        """(B,) int64."""
        return self.responses.lengths

    @property
    def lengths(self) -> np.ndarray:
        """Prompt plus response, (B,) int64."""
        return self.prompts.lengths + self.responses.lengths

    @property
    def media(self) -> tuple[str, ...]:
        """What its sequences have beside tokens: "images", "videos" or "sounds", in this order."""
        return tuple(name for name in KINDS if any(getattr(self, name) or ()))

    def media_rows(self) -> list[tuple[EncodedMedia, ...]]:
        """Return all that each sequence has beside tokens, by the order of `media`; none where no sequence has any."""
        held = [getattr(self, name) for name in self.media]
        return [sum(own, ()) for own in zip(*held, strict=True)]

    @property
    def sampled(self) -> bool:
        """Whether all trained tokens have a sampler's log-prob."""
        return not np.isnan(self.sampler_logprobs[self.mask]).any()

    @property
    def no_signal(self) -> float:
        """Share of the sequences with trained tokens whose advantages are 0 on all of them."""
        counts = [np.add.accumulate(np.append(0, flags)) for flags in (self.mask, self.mask & (self.advantages != 0))]
        trained, weighed = (count[self.responses.offsets[1:]] - count[self.responses.offsets[:-1]] for count in counts)
        return float((weighed == 0)[trained > 0].mean()) if trained.any() else 0.0

    @cached_property
    def key(self) -> str:
        """Identity of the sampled tokens: what old log-probs belong to, whatever the advantages or the mask."""
        digest = hashlib.sha256()
        rows = (self.prompts.offsets, self.prompts.values, self.responses.offsets, self.responses.values)
        for part in (*rows, self.sampler_logprobs):
            digest.update(np.ascontiguousarray(part).tobytes())
        for one in (one for name in ("images", "sounds", "videos") for own in getattr(self, name) or () for one in own):
            digest.update(one.digest.encode() + str(getattr(one, "at", "")).encode())
        return digest.hexdigest()[:16]

    @keeps_makers
    def rows(self, indices: np.ndarray | list[int]) -> TrainBatch:
        """The given sequences, in the given order."""
        rows = np.asarray(indices, np.int64)
        chosen: dict[str, Any] = {name: self.responses.pick(getattr(self, name), rows) for name in PER_TOKEN}
        chosen |= {name: value[rows] for name in PER_ROW if (value := getattr(self, name)) is not None}
        for name in KINDS:
            held = getattr(self, name)
            chosen[name] = None if held is None else tuple(held[row] for row in rows.tolist())
        chosen["verdicts"] = None if self.verdicts is None else self.verdicts.rows(rows)
        chosen["routing"] = None if self.routing is None else self.routing.take(rows)
        chosen["columns"] = {name: self.responses.pick(value, rows) for name, value in self.columns.items()}
        return replace(self, prompts=self.prompts.take(rows), responses=self.responses.take(rows), **chosen)

    def __getitem__(self, index: Any) -> TrainBatch:
        """A slice, a boolean mask or a list of rows gives a batch of those sequences."""
        return self.rows(np.atleast_1d(np.arange(len(self))[index]))

    def select(self, keep: np.ndarray | Sequence[int] | Callable[[SimpleNamespace], Any]) -> TrainBatch:
        """Return the sequences for which `keep` holds: (B,) booleans, a function of one sequence, or their numbers.

        `lambda row: row.reward > 0 and len(row.response) < 512`: `index`, `prompt`, `response`, `group`,
        `weight_version`, `reward`, `truncated`, `preference`, `pair`, `margin`, `verdicts` by head, and the per-token
        fields and columns over the response.
        """
        return self.rows(chosen_rows(keep, len(self), lambda: map(self._row, range(len(self)))))

    filter = select

    def to_pandas(self) -> Any:
        """A DataFrame with one row per sequence; what is per token as one array per row."""
        return needed("pandas", "batch.to_pandas()").DataFrame([vars(self._row(i)) for i in range(len(self))])

    def _row(self, i: int) -> SimpleNamespace:
        span = slice(*self.responses.offsets[i : i + 2].tolist())
        fields: dict[str, Any] = {name: value[span] for name, value in self.columns.items()}
        fields |= {name: None if (held := getattr(self, name)) is None else held[span] for name in PER_TOKEN}
        fields |= {name: None if (held := getattr(self, name)) is None else held[i].item() for name in PER_ROW}
        fields["verdicts"] = None if self.verdicts is None else self.verdicts.said(i)
        return SimpleNamespace(
            index=i, prompt=self.prompts[i], response=self.responses[i], reward=fields.pop("rewards"), **fields
        )

    def stream(self, seed: int = 0, shuffle: bool = True, epochs: int | None = None) -> TextStream:
        """Return a cursor over the sequences, as for demonstrations and pairs (which stay whole): `take(64)`.

        `seed`: of the order of each epoch; `epochs`: it ends after so many; None: it goes on for ever.
        """
        from rlbench.data.texts.stream import TextStream

        return TextStream(self, seed, shuffle, epochs)

    def to_parquet(self, path: str | Path) -> Path:
        """Write a Parquet file that any tool reads, and `from_parquet` to the last bit."""
        from rlbench.data.batches.file import write_batch

        return write_batch(self, path)

    @classmethod
    def from_parquet(cls, path: str | Path) -> TrainBatch:
        """Read what `to_parquet` wrote."""
        from rlbench.data.batches.file import read_batch

        return read_batch(path)

    @keeps_makers
    def replace(self, **fields: Any) -> TrainBatch:
        """A new batch with other fields, e.g. `batch.replace(advantages=…)`."""
        return replace(self, **fields)

    @keeps_makers
    def with_columns(self, **columns: Any) -> TrainBatch:
        """The same batch with numbers of your own, which a loss finds as `inputs.channels[name]`, (S, T).

        By name: flat over all response tokens, one row per sequence, padded (sequences, longest), or one number per
        sequence, given to each of its tokens; dimensions behind the tokens' stay. None takes one away.
        """
        known = [name for name in columns if name in (*PER_TOKEN, *PER_ROW)]
        if known:
            raise DataError(f"with_columns: every batch has {known[0]}: batch.replace({known[0]}=…)")
        kept = {name: value for name, value in self.columns.items() if name not in columns}
        new = {n: as_column(n, value, self.responses) for n, value in columns.items() if value is not None}
        return replace(self, columns=kept | new)

    @keeps_makers
    def __add__(self, other: TrainBatch) -> TrainBatch:
        """Both, groups apart; see `rlbench.data.join`."""
        from rlbench.data.joining import join

        return join(self, other) if isinstance(other, TrainBatch) else NotImplemented


def images_of(rollouts: Rollouts) -> tuple[tuple[EncodedImage, ...], ...] | None:
    """Return the images of each completion: its prompt's, then those that an environment showed. None: none has any."""
    observed = rollouts.observed_images or ((),) * rollouts.samples
    groups = rollouts.group.tolist()
    images = tuple((*rollouts.prompts[p].images, *own) for p, own in zip(groups, observed, strict=True))
    return images if any(images) else None


def media_of(rollouts: Rollouts) -> dict[str, Any]:
    """Return what each completion has beside tokens by the fields of a batch: its prompt's, and of images those that an
    environment showed behind them. None: none has any."""
    held: dict[str, Any] = {"images": images_of(rollouts)}
    for name in KINDS.keys() - held.keys():
        own = tuple(getattr(rollouts.prompts[p], name) for p in rollouts.group.tolist())
        held[name] = own if any(own) else None
    return held


def as_batch(sequences: Sequence[Any], media: Sequence[Sequence[Any]] = ()) -> TrainBatch:
    """Make a batch whose responses are all tokens after each sequence's first, to be scored; `media`: images, as
    `EncodedImage.from_any` takes them, videos or sounds of each sequence, places counted from its first token."""
    held = [by_kind(own) for own in media]
    held = [own | {"images": counted_from(own["images"], 1)} for own in held]
    columns: dict[str, Any] = {name: tuple(own[name] for own in held) for name in KINDS if any(o[name] for o in held)}
    return replace(to_score([row[:1] for row in sequences], [row[1:] for row in sequences]), **columns)


def of_texts(prompts: Sequence[Any], responses: Sequence[Any], masks: Sequence[Any], **fields: Any) -> TrainBatch:
    """Make a batch of rows of token ids that no policy sampled, each a group of its own; masks beside responses.

    Advantages are 1 unless `fields` says otherwise.
    """
    rows = Ragged.from_rows(responses, np.int32)
    tokens = len(rows.values)
    made: dict[str, Any] = {
        "mask": Ragged.from_rows(masks, bool).values,
        "advantages": np.ones(tokens, np.float32),
        "sampler_logprobs": np.full(tokens, np.nan, np.float32),
        "group": np.arange(len(rows), dtype=np.int32),
        "weight_version": np.full(len(rows), NOT_SAMPLED, np.int64),
    }
    return TrainBatch(prompts=Ragged.from_rows(prompts, np.int32), responses=rows, **(made | fields))


def to_score(prompts: Sequence[Any], responses: Sequence[Any], temperature: float = 1.0) -> TrainBatch:
    """Make a batch of rows of token ids, of which the responses are to be scored."""
    rows = Ragged.from_rows(responses, np.int32)
    zeros = np.zeros(len(rows.values), np.float32)
    return TrainBatch(
        prompts=Ragged.from_rows(prompts, np.int32),
        responses=rows,
        mask=np.ones(len(zeros), bool),
        advantages=zeros,
        sampler_logprobs=zeros,
        group=np.zeros(len(rows), np.int32),
        weight_version=np.zeros(len(rows), np.int64),
        temperature=temperature,
    )


PER_TOKEN = ("mask", "advantages", "sampler_logprobs", "old_logprobs", "ref_logprobs")
PER_ROW = ("group", "weight_version", "rewards", "truncated", "preference", "pair", "margin")
NOT_SAMPLED = -1
"""The weight version of what no policy of the session sampled."""

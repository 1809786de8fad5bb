"""From the calls of runs, which form trees, to completions with turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.base.ragged import Ragged
from rlbench.data.prompts.images import EncodedImage, PlacedImage
from rlbench.data.prompts.placing import held_media, media_parts, without_images
from rlbench.data.prompts.prompt import Prompt
from rlbench.data.prompts.sampling import NEUTRAL
from rlbench.data.rollouts.jobs import FINISH_REASONS, GeneratedArrays
from rlbench.data.rollouts.rollouts import Rollouts
from rlbench.data.rollouts.turns import said_facts
from rlbench.data.runs.journal import Call, Choice
from rlbench.errors import DataError

if TYPE_CHECKING:
    from rlbench.data.runs.traces import Run

VERSION_CHANNEL = "weight_version"
Place = tuple[str, int, int]
"""A choice: the server and number of its call, and which of the call's it is."""


@dataclass(eq=False)
class Row:
    """A completion: flat columns beside its tokens, from the first one that was sampled on. `images`: all that its
    calls were shown, places counted from the prompt's first token."""

    run: Run
    prompt: list[int]
    root: Call
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    versions: list[float] = field(default_factory=list)
    finish: str = "abort"
    images: list[PlacedImage] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)

    def observe(self, ids: Sequence[int], turn: int) -> None:
        """Add tokens that were not sampled."""
        count = len(ids)
        self._add(ids, [0.0] * count, [False] * count, turn, [np.nan] * count)

    def sample(self, choice: Choice, turn: int, trained: bool) -> None:
        """Add what was sampled; not `trained` where another row trains on it."""
        ends = [begin for begin, _ in choice.versions[1:]] + [len(choice.ids)]
        spans = zip(choice.versions, ends, strict=True)
        versions = [float(version) for (begin, version), end in spans for _ in range(begin, end)]
        self._add(choice.ids, choice.logprobs, [trained] * len(choice.ids), turn, versions)
        self.finish = choice.finish if choice.finish in FINISH_REASONS else "abort"

    def _add(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        mask: Sequence[bool],
        turn: int,
        versions: Sequence[float],
    ) -> None:
        self.ids.extend(ids)
        self.logprobs.extend(logprobs)
        self.mask.extend(mask)
        self.turns.extend([turn] * len(ids))
        self.versions.extend(versions)


def rollouts_of(runs: Sequence[Run], decode: Callable[[list[int]], str], tokenizer: str) -> Rollouts:
    """Return the completions of runs, by group; see `Traces.rollouts`."""
    groups: dict[Any, list[Row]] = {}
    for run in runs:
        for row in rows_of(run, decode):
            alike = tuple(row.prompt), row.root.media
            groups.setdefault(run.group or alike, []).append(row)
    prompts, shared, keys, begins = [], {}, [], []
    rows: list[Row] = []
    for index, own in enumerate(groups.values()):
        asked, prompt = _opening(own)
        shared[index] = prompt
        prompts.append(asked)
        keys += [(index, number) for number in range(len(own))]
        begins += [len(prompt)] * len(own)
        rows += [_behind(row, len(prompt)) for row in own]
    flat = Ragged.from_rows([row.ids for row in rows], np.int32)
    sampled = [np.asarray(row.versions)[np.asarray(row.mask)] for row in rows]
    arrays = GeneratedArrays(
        keys=np.asarray(keys, np.int32).reshape(-1, 2),
        token_ids=flat.values,
        logprobs=Ragged.from_rows([row.logprobs for row in rows], np.float32).values,
        offsets=flat.offsets,
        finish=np.asarray([FINISH_REASONS.index(row.finish) for row in rows], np.int8),
        versions=np.asarray([versions.min() for versions in sampled], np.int64),  # of its oldest token
        texts=[decode(row.ids) for row in rows],
        prompt_token_ids=shared,
        mask=Ragged.from_rows([row.mask for row in rows], bool).values,
        turns=Ragged.from_rows([row.turns for row in rows], np.int32).values,
        turn_rewards=[[float("nan")] * row.info["turns"] for row in rows],
        infos=[row.info for row in rows],
        observed_images=[
            tuple(PlacedImage.of(image, image.at - begin) for image in row.images if image.at >= begin)
            for row, begin in zip(rows, begins, strict=True)
        ],
    )
    rollouts = Rollouts.merge(prompts, [arrays], _sampling(runs), tokenizer=tokenizer)
    return rollouts.with_channels(**{VERSION_CHANNEL: [row.versions for row in rows]})


def rows_of(run: Run, decode: Callable[[list[int]], str]) -> list[Row]:
    """Return a row for each choice that no call continued, its prompt being that of the first call on the way."""
    calls = {call.key: call for call in run.calls}
    continued: set[Place] = {(call.server, *call.parent) for call in run.calls if call.parent is not None}
    trained: set[Place] = set()
    rows = []
    for call in run.calls:
        for number, choice in enumerate(call.choices):
            if choice.ids and (*call.key, number) not in continued:
                rows.append(_row(run, _way(calls, call, number), trained, decode))
    return rows


def _way(calls: Mapping[tuple[str, int], Call], call: Call, choice: int) -> list[tuple[Call, int]]:
    """Return the calls from the first to this one, each with the choice that was gone on with."""
    way = [(call, choice)]
    while (parent := way[-1][0].parent) is not None:
        way.append((calls[call.server, parent[0]], parent[1]))
    return way[::-1]


def _row(run: Run, way: list[tuple[Call, int]], trained: set[Place], decode: Callable[[list[int]], str]) -> Row:
    root = way[0][0]
    row = Row(run, list(root.prompt), root)
    messages: list[Any] = []
    for turn, (call, number) in enumerate(way):
        row.images += _shown(call, len(row.images))
        if turn:
            _check_heard(call, root)
            row.observe(call.prompt[call.ahead :], turn - 1)
            messages += without_images(call.request.get("messages", ()))
        place = (*call.key, number)
        row.sample(call.choices[number], turn, place not in trained)
        trained.add(place)
    last, number = way[-1]
    messages.append({"role": "assistant", "content": decode(last.choices[number].ids)})
    steps = [{"call": call.number, "differs": dict(call.differs)} if call.differs else {} for call, _ in way]
    said = [decode(call.choices[number].ids) for call, number in way]
    row.info = {"run": run.name, "turns": len(way), "messages": messages, **said_facts(messages, said), "steps": steps}
    return row


def _check_heard(call: Call, root: Call) -> None:
    """Refuse sounds behind those of a run's first call: completions have those of their prompt alone."""
    if len(call.request.get("sounds", ())) > len(root.request.get("sounds", ())):
        raise DataError(
            f"run {call.run!r} was given a sound after its first call, and rollouts hold those of prompts alone: leave "
            "it out by traces.select(…)"
        )


def _shown(call: Call, before: int) -> list[PlacedImage]:
    """Return the images of a call beyond the first so many, at their places in its prompt."""
    digests, places = call.request.get("images", ())[before:], call.request.get("image_places", ())[before:]
    parts = list(media_parts(call.request.get("messages", ())))[-len(digests) :] if digests else []
    images = [EncodedImage.from_any(held_media(part), f"an image of run {call.run!r}") for part in parts]
    if [image.digest for image in images] != list(digests) or len(places) != len(digests):
        raise DataError(f"run {call.run!r} was shown images which its messages do not have: it cannot be trained on")
    return [PlacedImage.of(image, at) for image, at in zip(images, places, strict=True)]


def _behind(row: Row, shared: int) -> Row:
    """Move what a row's prompt has beyond the prompt of its group to the front of its response, untrained."""
    if ahead := row.prompt[shared:]:
        count = len(ahead)
        row.ids = [*ahead, *row.ids]
        row.logprobs = [0.0] * count + row.logprobs
        row.mask = [False] * count + row.mask
        row.turns = [0] * count + row.turns
        row.versions = [float("nan")] * count + row.versions
    return row


def _opening(rows: Sequence[Row]) -> tuple[Prompt, list[int]]:
    """Return what a group was asked, and its token ids: the messages or the text of its first call, where all had the
    same; else what their prompts have in common before the first image."""
    run, request = rows[0].run, rows[0].root.request
    content = request.get("messages") or request.get("prompt")
    common = _common([row.prompt for row in rows])
    shown = [row.root.media for row in rows]
    alike = all(row.prompt == common for row in rows) and shown == shown[:1] * len(rows)
    if not (alike and isinstance(content, str | list)):
        if any(row.root.request.get("sounds") for row in rows):
            said = f"the runs of group {run.group!r} begin differently, and have sounds"
            raise DataError(f"{said}: give each beginning a group of its own")
        content = common = common[: min([image.at for row in rows for image in row.images] + [len(common)])]
    if not common:
        raise DataError(f"the runs of group {run.group!r} begin with different tokens: they have no prompt")
    return Prompt(content or common, run.label), common


def _sampling(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the options that all calls were sampled with, and those that reshape where any has them."""
    options = [call.sampling for run in runs for call in run.calls]
    temperatures = sorted({float(one["temperature"]) for one in options})
    if len(temperatures) > 1:
        raise DataError(
            f"calls were sampled at temperatures {', '.join(f'{t:g}' for t in temperatures)}, and a batch has one: "
            "traces.select(…) those of one, or have the agent ask with one"
        )
    common = {name: value for name, value in options[0].items() if all(one.get(name) == value for one in options)}
    reshaping = {name: value for one in options for name, value in one.items() if name in NEUTRAL}
    return reshaping | {name: value for name, value in common.items() if name != "seed"}


def _common(rows: Sequence[list[int]]) -> list[int]:
    """Return the longest beginning that all have in common."""
    first, last = min(rows), max(rows)  # in lexical order those in between share what these two do
    end = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:end]

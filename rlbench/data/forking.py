"""Completions continued from one of their tokens: new completions of the same prompt that share its beginning.
See `rlbench.data.rollouts.branches` for how they tell of it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from rlbench.data.base.ragged import Ragged
from rlbench.data.base.routing import UNKNOWN, routing_rows
from rlbench.data.joining import ONLY_LENGTH, join
from rlbench.data.prompts.images import PlacedImage
from rlbench.data.prompts.prompt import Prompt, is_token_ids
from rlbench.data.prompts.sampling import DEFAULT_MAX_TOKENS
from rlbench.data.record.origin import made_with, makers
from rlbench.data.rollouts import taking
from rlbench.data.rollouts.branches import births
from rlbench.data.rollouts.contexts import context_before, contexts_of
from rlbench.data.rollouts.jobs import FINISH_REASONS
from rlbench.data.rollouts.rollouts import Rollouts
from rlbench.data.rollouts.scoring import RewardErrors
from rlbench.data.rollouts.turns import own_turns, places_said, said_facts, sampled_mask
from rlbench.errors import DataError, Stopped


class Sampler(Protocol):
    """What rollouts were drawn by, and can be continued by."""

    def continued(
        self, prompts: Sequence[Prompt], n: int, sampling: dict[str, Any], number: int, under: str | None
    ) -> Rollouts:
        """Draw `n` completions behind each prompt's token ids; `number`: what their seeds derive from; `under`: whose
        weights sample, None for the policy's."""

    def encoded(self, text: str) -> list[int]:
        """Return the token ids of a text that stands in the middle of a sequence."""

    def decoded(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""


class Named(Protocol):
    """A snapshot, which is named by its label."""

    @property
    def label(self) -> str: ...


def name_of(under: Named | str | None) -> str | None:
    """Return what names the weights that are to draw."""
    return under if under is None or isinstance(under, str) else under.label


@dataclass(frozen=True, eq=False)
class Place:
    """Where a completion is continued: behind `kept` of its tokens and then `added`; `turn`: in which of its turns;
    `room`: tokens that may follow, None for as many as the model takes; `under`: whose weights sample them."""

    sample: int
    kept: int
    added: tuple[int, ...]
    turn: int
    room: int | None
    under: str | None

    @property
    def birth(self) -> int:
        """Response tokens before those that the continuation samples itself."""
        return self.kept + len(self.added)


def fork(
    rollouts: Rollouts,
    sample: int | Sequence[int],
    at: int | Sequence[int],
    n: int,
    text: str | Sequence[int] | None,
    under: Named | str | None,
    options: dict[str, Any],
    sampler: Sampler,
) -> Rollouts:
    """See `Rollouts.fork`."""
    under = name_of(under)
    if strange := sorted(set(options) - set(ONLY_LENGTH)):
        raise DataError(
            f"fork: {', '.join(strange)} would draw from another distribution than the completions beside it; it takes "
            f"{', '.join(ONLY_LENGTH)}"
        )
    added = () if text is None else tuple(sampler.encoded(text) if isinstance(text, str) else map(int, text))
    if text is not None and not is_token_ids(added):
        raise DataError(f"fork: text={text!r} is nothing to write there")
    sampling = {name: value for name, value in rollouts.sampling.items() if name not in ("n", "seed")} | options
    if "max_tokens" not in sampling and rollouts.lengths.max(initial=0) > DEFAULT_MAX_TOKENS:
        raise DataError("fork: these rollouts were not drawn with one max_tokens: give fork(…, max_tokens=…)")
    numbers, ats = np.atleast_1d(sample), np.atleast_1d(at)
    if {numbers.dtype.kind, ats.dtype.kind} != {"i"} or len({len(numbers), len(ats)} - {1}) > 1:
        raise DataError(f"fork: sample={sample!r:.60}, at={at!r:.60}: wanted whole numbers, as many of both or one")
    pairs = zip(*np.broadcast_arrays(numbers, ats), strict=True)
    places = [_place(rollouts, int(i), int(t), added, under, sampling, "max_tokens" in options) for i, t in pairs]
    rooms = [place.room for place in places if place.room is not None]
    sampling["max_tokens"] = max(rooms) if len(rooms) == len(places) else None
    begins = [_context(rollouts, place) for place in places]
    number = zlib.crc32(np.concatenate([*map(np.asarray, begins), [rollouts.samples]]).astype(np.int64).tobytes())
    try:
        asked = [rollouts.prompts[rollouts.group[p.sample]] for p in places]
        prompts = [
            Prompt(begin, images=(*own.images, *_observed(rollouts, p)), sounds=own.sounds, videos=own.videos)
            for begin, own, p in zip(begins, asked, places, strict=True)
        ]
        drawn = sampler.continued(prompts, n, sampling, number, under)
    except Stopped as stopped:
        drawn = stopped.partial  # None where it was stopped before it began
        stopped.partial = rollouts if drawn is None else _grown(rollouts, places, drawn, sampler)
        raise
    return _grown(rollouts, places, drawn, sampler)


def _place(
    rollouts: Rollouts,
    sample: int,
    at: int,
    added: tuple[int, ...],
    under: str | None,
    sampling: Mapping[str, Any],
    anew: bool,
) -> Place:
    """Check where a completion is to be continued; `anew`: `max_tokens` counts from there."""
    if not -rollouts.samples <= sample < rollouts.samples:
        raise DataError(f"fork: there is no completion {sample}: there are {rollouts.samples}")
    sample %= rollouts.samples
    length = int(rollouts.lengths[sample])
    if not -length <= at <= length:
        raise DataError(f"fork: completion {sample} has {length} tokens; at={at} is not among them")
    kept = at + length if at < 0 else at
    span = slice(*rollouts.responses.offsets[sample : sample + 2].tolist())
    mask = sampled_mask(rollouts)[span].copy()
    birth = births(rollouts)[sample]
    turns = np.zeros(length, np.int32) if rollouts.turns is None else rollouts.turns[span]
    turn = int(turns[min(kept, length - 1)]) if length else 0
    if not added and kept == length and rollouts.finish[sample] == FINISH_REASONS.index("stop"):
        raise DataError(f"fork: completion {sample} ended by itself at {length}: fork before that, or write text=")
    if not added and birth <= kept < length and not mask[kept]:
        raise DataError(
            f"fork: token {kept} of completion {sample} is of an observation, which the policy did not sample: fork at "
            "one that it did, or write text="
        )
    ids, images = rollouts.responses[sample], rollouts.observed_images[sample] if rollouts.observed_images else ()
    if any(image.at < kept < length and (ids[image.at : kept + 1] == ids[image.at]).all() for image in images):
        raise DataError(f"fork: token {kept} of completion {sample} is inside of an image: fork before or behind it")
    limit = sampling.get("max_tokens", DEFAULT_MAX_TOKENS)
    mask[:birth] = True
    spent = int((mask[:kept] & (turns[:kept] == turn)).sum())
    room = limit if limit is None or anew else limit - spent
    if room is not None and room < 1:
        raise DataError(f"fork: max_tokens={limit} leaves none behind token {kept} of completion {sample}: give more")
    return Place(sample, kept, added, turn, room, under)


def _prefix(rollouts: Rollouts, place: Place) -> list[int]:
    return [*rollouts.responses[place.sample][: place.kept].tolist(), *place.added]


def _context(rollouts: Rollouts, place: Place) -> list[int]:
    """Return the token ids that a continuation is sampled behind."""
    begin = context_before(rollouts, place.sample, place.kept)
    if begin is not None:
        return _prefix(rollouts, place)[begin:]
    return [*rollouts.prompt_ids[rollouts.group[place.sample]].tolist(), *_prefix(rollouts, place)]


def _observed(rollouts: Rollouts, place: Place) -> tuple[PlacedImage, ...]:
    """Return the images that an environment had shown before a place."""
    images = rollouts.observed_images[place.sample] if rollouts.observed_images else ()
    return tuple(image for image in images if image.at < place.kept)


def _grown(rollouts: Rollouts, places: Sequence[Place], drawn: Rollouts, sampler: Sampler) -> Rollouts:
    """Put what was drawn beside the completions it continues, scored as they were."""
    if not drawn.samples:
        return rollouts
    fresh = _whole(rollouts, places, drawn, sampler)
    reward = makers(rollouts).get("reward")
    if rollouts.rewards is not None and callable(reward):
        fresh = fresh.score(reward, on_error="keep")
    else:
        unscored = replace(rollouts, rewards=None, components={}, reward_seconds=None, reward_errors=RewardErrors())
        rollouts = made_with(replace(unscored, env_rewards=None), rollouts, reward=None)
    joined = join(rollouts, fresh)
    group = np.concatenate([rollouts.group, rollouts.group[[places[k].sample for k in fresh.group]]])
    rows = np.argsort(group, kind="stable")
    taken = taking.samples(joined, rows)
    whole = replace(
        taken,
        infos=_renumbered(taken.infos, np.argsort(rows)),
        prompts=rollouts.prompts,
        prompt_ids=rollouts.prompt_ids,
        group=group[rows].astype(np.int32),
        sampling=rollouts.sampling,
        number=rollouts.number,
        not_started=rollouts.not_started,
    )
    return made_with(whole, rollouts)


def _renumbered(infos: Sequence[Mapping[str, Any]], moved: np.ndarray) -> tuple[Mapping[str, Any], ...]:
    """Let forks name the completions they are of by the numbers these have now; `moved`: by those they had."""
    renumbered = []
    for info in infos:
        fork = info.get("fork")
        if fork is not None and fork["of"] < len(moved):
            info = {**info, "fork": {**fork, "of": int(moved[fork["of"]])}}
        renumbered.append(info)
    return tuple(renumbered)


def _whole(rollouts: Rollouts, places: Sequence[Place], drawn: Rollouts, sampler: Sampler) -> Rollouts:
    """Return what was drawn as completions of the prompts that were asked."""
    ids, logprobs, mask, turns, finish, infos, texts = [], [], [], [], [], [], []
    for place, own, own_logprobs, end in zip(
        (places[k] for k in drawn.group),
        drawn.responses,
        drawn.responses.with_values(drawn.logprobs),
        drawn.finish,
        strict=True,
    ):
        start = int(rollouts.responses.offsets[place.sample])
        before = slice(start, start + place.kept)
        count = len(own[: place.room])
        ids.append([*_prefix(rollouts, place), *own[:count].tolist()])
        logprobs.append([*rollouts.logprobs[before], *[0.0] * len(place.added), *own_logprobs[:count]])
        mask.append([False] * place.birth + [True] * count)
        earlier = [0] * place.kept if rollouts.turns is None else rollouts.turns[before].tolist()
        turns.append(earlier + [place.turn] * (len(place.added) + count))
        finish.append(FINISH_REASONS.index("length") if count < len(own) else int(end))
        texts.append(sampler.decoded(ids[-1]))
        infos.append(_info(rollouts, place, sampler, ids[-1], turns[-1]))
    observed = tuple(_observed(rollouts, places[k]) for k in drawn.group)
    return replace(
        drawn,
        prompts=tuple(rollouts.prompts[rollouts.group[place.sample]] for place in places),
        prompt_ids=rollouts.prompt_ids.take([int(rollouts.group[place.sample]) for place in places]),
        responses=Ragged.from_rows(ids, np.int32),
        logprobs=Ragged.from_rows(logprobs, np.float32).values,
        mask=Ragged.from_rows(mask, bool).values,
        turns=Ragged.from_rows(turns, np.int32).values,
        turn_rewards=Ragged.from_rows([[np.nan] * info["turns"] for info in infos], np.float64),
        env_rewards=np.full(drawn.samples, np.nan),
        finish=np.array(finish, np.int8),
        infos=tuple(infos),
        observed_images=observed if any(observed) else (),
        texts=tuple(texts),
        tokenizer=rollouts.tokenizer,
        routing=_routing(rollouts, places, drawn, ids),
    )


def _routing(
    rollouts: Rollouts, places: Sequence[Place], drawn: Rollouts, ids: Sequence[Sequence[int]]
) -> Ragged | None:
    """Return the experts of what was drawn; `ids`: of the whole responses."""
    if drawn.routing is None:
        return None
    prompts = [len(rollouts.prompt_ids[rollouts.group[places[k].sample]]) for k in drawn.group]
    rows = []
    for k, length, experts in zip(drawn.group, prompts, drawn.routing, strict=True):
        begin = context_before(rollouts, places[k].sample, places[k].kept)
        ahead = 0 if begin is None else length + begin
        rows.append(np.concatenate([np.full((ahead, *experts.shape[1:]), UNKNOWN, np.int16), experts]))
    return routing_rows(rows, [n + len(row) for n, row in zip(prompts, ids, strict=True)])


def _info(
    rollouts: Rollouts, place: Place, sampler: Sampler, ids: Sequence[int], turns: Sequence[int]
) -> dict[str, Any]:
    written = {"text": sampler.decoded(place.added)} if place.added else {}
    written |= {} if place.under is None else {"under": place.under}
    info: dict[str, Any] = {"turns": place.turn + 1, "fork": {"at": place.birth, "of": place.sample, **written}}
    if contexts := [at for at in contexts_of(rollouts, place.sample) if at < place.kept]:
        info["contexts"] = contexts
    messages = rollouts.infos[place.sample].get("messages") if rollouts.infos else None
    if messages is not None:
        before = rollouts.infos[place.sample]
        said, places = own_turns(before, "")[: place.turn], places_said(before)
        own = sampler.decoded([token for token, turn in zip(ids, turns, strict=True) if turn == place.turn])
        kept = messages[: places[place.turn]] if place.turn < len(places) else []
        info["messages"] = [*kept, {"role": "assistant", "content": own}]
        info |= {"asked": before["asked"]} if "asked" in before else {}
        info |= said_facts(info["messages"], [*said, own])
    return info

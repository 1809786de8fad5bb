"""Rehearsal: the worst case of a run before it starts, so that memory fails now and not at step 120.

First the replicas hold as many longest requests at once as they can. Then the training ranks take a micro-batch of
longest sequences, with gradients there already, as from the second micro-batch of a step on. Two smaller ones come
first: memory grows in a line with the tokens, and where the line says that the whole would not fit, it is refused
unrun. Weights, optimizer, gradients, random states and rollout numbers stay as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data import Ragged, TrainBatch
from rlbench.dispatch.chain import Steps
from rlbench.engines import TrainEngine
from rlbench.errors import CheckFailed, DataError, RemoteError, Suggesting
from rlbench.session.training.loss_check import ship
from rlbench.units import format_bytes, format_percent

if TYPE_CHECKING:
    from rlbench.session.core import SessionCore

RESERVE = 0.05
"""Share of the limit that the largest safe budget leaves free: what a line does not foretell."""
OUT_OF_MEMORY = "OutOfMemoryError"
WARM_UP_TOKENS = 32
SHORTEST = 16


@dataclass(frozen=True)
class EngineRehearsal:
    """The worst of one engine's workers, in bytes. `peak` holds the optimizer's state as it will be."""

    name: str
    what: str
    peak: int
    limit: int
    note: str = ""
    per_worker: tuple[int, ...] = ()

    @property
    def headroom(self) -> int:
        """What is left at the worst moment; negative where it does not fit."""
        return self.limit - self.peak


@dataclass(frozen=True)
class Rehearsal(Suggesting):
    """What a rehearsal found. `safe_budget`: the most tokens of a micro-batch that fit; None where memory does not grow
    enough to tell; `bytes_per_token`: by how much it grows."""

    engines: tuple[EngineRehearsal, ...]
    token_budget: int
    max_length: int
    safe_budget: int | None
    bytes_per_token: float
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True where every engine fits."""
        return all(engine.headroom >= 0 for engine in self.engines)

    def __bool__(self) -> bool:
        return self.passed

    def __getitem__(self, name: str) -> EngineRehearsal:
        return next(engine for engine in self.engines if engine.name == name)

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        most = "" if self.safe_budget is None else f" · largest safe token_budget about {self.safe_budget:,}"
        verdict = "passed" if self.passed else "FAILED"
        return f"rehearsal {verdict} · token_budget {self.token_budget:,}, sequences of {self.max_length:,}{most}"

    def __repr__(self) -> str:
        width = max(len(engine.name) for engine in self.engines)
        lines = [self.headline]
        for e in self.engines:
            numbers = f"peak {format_bytes(e.peak)} of {format_bytes(e.limit)}, head-room {format_bytes(e.headroom)}"
            lines.append(f"  {e.name:<{width}}  {numbers}  {e.what}" + (f"  ({e.note})" if e.note else ""))
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


@dataclass(frozen=True)
class _Line:
    """Bytes as a line of tokens."""

    at_zero: float
    per_token: float

    def at(self, tokens: int) -> int:
        return round(self.at_zero + self.per_token * tokens)

    def tokens(self, nbytes: float) -> int | None:
        """The most tokens within `nbytes`; None where memory does not grow with them."""
        return None if self.per_token <= 0 else max(0, math.floor((nbytes - self.at_zero) / self.per_token))


def through(smaller: tuple[int, int], larger: tuple[int, int]) -> _Line:
    """The line through two measurements (tokens, bytes); flat where the larger did not take more."""
    (few, low), (many, high) = smaller, larger
    slope = max(0.0, (high - low) / (many - few))
    return _Line(high - slope * many, slope)


@dataclass(frozen=True)
class _Trainer:
    """What one training engine is rehearsed with. `missing`: bytes of optimizer state that the first step makes;
    `step`: those that a step takes beside it while it runs, when no activations are there any more."""

    engine: TrainEngine
    facts: list[dict[str, Any]]
    limit: int
    missing: int
    step: int
    loss_blob: bytes | None


def rehearse_steps(
    session: SessionCore,
    max_length: int | None,
    token_budget: int | None,
    loss: Any,
    memory_limit: int | None,
    seconds: float,
) -> Steps:
    """Run the worst case on every engine; returns a `Rehearsal`, raises `CheckFailed` where it does not fit."""
    longest = int(session.inference.info["max_model_len"])
    length = _checked_length(max_length, longest)
    vocabulary = int(session.inference.info["vocab_size"])
    warm_up = worst_batch(WARM_UP_TOKENS, WARM_UP_TOKENS, session.train.world_size, vocabulary)
    facts = yield session.train.call_all("trial_facts", warm_up, {}, what="rehearsal")  # refuses what would be lost
    filled = yield session.inference.call_all("fill_kv", length, float(seconds), what="rehearsal", track=True)
    facts = yield session.train.call_all("trial_facts", warm_up, {}, what="rehearsal")  # with the cache full
    budget = max(token_budget or int(facts[0]["token_budget"]), length)
    shipped = ship(loss, warm_up)
    trainer = _of(session.train, facts, memory_limit, shipped.blob)
    own, line = yield from _train_steps(trainer, budget, length, vocabulary, warm_up)
    engines = [own]
    if session.reference is not None:
        facts = yield session.reference.call_all("trial_facts", warm_up, {}, what="rehearsal")
        frozen = _of(session.reference, facts, memory_limit, None)
        engines.append((yield from _train_steps(frozen, budget, length, vocabulary, warm_up))[0])
    engines.append(_of_replicas(session.inference.name, filled))
    result = Rehearsal(tuple(engines), budget, length, _safe(line, trainer), line.per_token, _notes(facts, filled))
    if not result.passed:  # the training engines passed, or said so themselves
        full = engines[-1]
        raise CheckFailed(
            f"{full.name} at its fullest took {format_bytes(full.peak)} and has {format_bytes(full.limit)}. Lower its "
            "kv_cache_bytes, max_num_seqs or max_model_len",
            result,
        )
    return result


def worst_batch(tokens: int, length: int, ranks: int, vocabulary: int) -> TrainBatch:
    """A batch of random tokens of which every rank gets `tokens`, in rows of `length` at most, nearly all response.

    A response token costs more than a prompt's: its log-prob is computed, and the loss sees it.
    """
    sizes = [length] * (tokens // length)
    rest = tokens - sum(sizes)
    if rest > 1:  # a row has a prompt and a response
        sizes.append(rest)
    lengths = [size for size in sizes for _ in range(ranks)]
    random = np.random.default_rng(0)
    responses = Ragged.from_rows([random.integers(0, vocabulary, n - 1) for n in lengths], np.int32)
    count, likely = len(responses.values), np.float32(-math.log(vocabulary))
    rows = len(lengths)
    sampled = np.full(count, likely, np.float32)
    return TrainBatch(
        prompts=Ragged.from_rows([random.integers(0, vocabulary, 1) for _ in lengths], np.int32),
        responses=responses,
        mask=np.ones(count, bool),
        advantages=np.repeat(np.where(np.arange(rows) % 2 == 0, 1.0, -1.0), responses.lengths).astype(np.float32),
        sampler_logprobs=sampled,
        ref_logprobs=sampled,
        group=np.arange(rows, dtype=np.int32) // 2,
        weight_version=np.zeros(rows, np.int64),
    )


# -- training engines


def _of(engine: TrainEngine, facts: list[dict[str, Any]], memory_limit: int | None, blob: bytes | None) -> _Trainer:
    limit = min(int(f["limit"]) for f in facts) if memory_limit is None else int(memory_limit)
    missing, step = (max(int(f[name]) for f in facts) for name in ("optimizer_missing", "optimizer_step"))
    return _Trainer(engine, facts, limit, missing, step, blob)


def _train_steps(trainer: _Trainer, budget: int, length: int, vocabulary: int, warm_up: TrainBatch) -> Steps:
    """A quarter, a half, and where these say that it fits the whole; returns what was found and the line."""
    name, ranks = trainer.engine.name, trainer.engine.world_size
    points: list[tuple[int, int]] = []
    measured: list[dict[str, Any]] = []
    for tokens in (budget // 4, budget // 2, budget):
        if len(points) == 2:
            line = through(*points)
            expected = line.at(budget) + trainer.missing
            if expected > trainer.limit:
                foretold = EngineRehearsal(name, "foretold by a quarter and a half of it", expected, trainer.limit)
                said = _refusal(foretold, line, trainer, budget, length)
                raise CheckFailed(said, _only(foretold, line, budget, length))
        batch = worst_batch(tokens, min(length, tokens), ranks, vocabulary)
        options = {"token_budget": tokens}
        try:
            measured = yield trainer.engine.call_all(
                "rehearse", warm_up, batch, options, trainer.loss_blob, what="rehearsal", track=True
            )
        except RemoteError as error:
            if OUT_OF_MEMORY not in str(error):
                raise
            raise CheckFailed(_out_of_memory(name, tokens, points)) from error
        points.append((tokens, max(int(m["peak"]) for m in measured)))
    line = through(points[1], points[2])
    peaks = [max(int(m["peak"]), int(m["before"]) + trainer.step) + trainer.missing for m in measured]
    doing = "forward and backward, gradients there" if trainer.loss_blob is not None else "forward"
    found = EngineRehearsal(
        name,
        f"{budget:,} tokens in rows of {length:,} on each of {ranks} ranks: {doing}",
        max(peaks),
        trainer.limit,
        f"~{format_bytes(trainer.missing)} of it optimizer state, which the first step makes"
        if trainer.missing
        else "",
        tuple(peaks),
    )
    if found.headroom < 0:
        raise CheckFailed(_refusal(found, line, trainer, budget, length), _only(found, line, budget, length))
    return found, line


def _safe(line: _Line, trainer: _Trainer) -> int | None:
    """The largest budget that leaves the reserve free; None where memory does not grow, 0 where no token fits."""
    return line.tokens(trainer.limit * (1 - RESERVE) - trainer.missing)


def _only(found: EngineRehearsal, line: _Line, budget: int, length: int) -> Rehearsal:
    """What there is to tell where the first engine does not fit."""
    return Rehearsal((found,), budget, length, None, line.per_token)


def _refusal(found: EngineRehearsal, line: _Line, trainer: _Trainer, budget: int, length: int) -> str:
    """What does not fit, and what to lower."""
    said = f"the worst case of {found.name} needs {format_bytes(found.peak)} and has {format_bytes(found.limit)}."
    most = _safe(line, trainer)
    if not most or most >= budget:  # then it is the optimizer's step that does not fit
        return (
            f"{said} Weights, gradients and optimizer state alone fill it: spread the model over more ranks "
            "(shards), or offload other engines"
        )
    if most < length:
        return (
            f"{said} A sequence of {length:,} tokens does not fit by itself: lower the replica's max_model_len to "
            f"about {most:,}, or spread the model over more ranks"
        )
    return f"{said} Lower token_budget from {budget:,} to {most:,} or less (train_step(…, token_budget={most}))"


def _out_of_memory(name: str, tokens: int, points: list[tuple[int, int]]) -> str:
    """Where the device itself refused; `points` are those that still fitted."""
    fitted = f"{points[-1][0]:,} tokens fitted: lower token_budget to that" if points else "lower max_model_len"
    said = f"{name} ran out of memory on a micro-batch of {tokens:,} tokens"
    return f"{said}; {fitted}, or spread the model over more ranks"


# -- replicas


def _of_replicas(name: str, filled: list[Any]) -> EngineRehearsal:
    worst = min(filled, key=lambda f: f.limit - f.peak)
    share = f", {format_percent(worst.usage)} of the KV cache" if worst.usage else ""
    what = f"{worst.held} of {worst.asked} requests of {worst.length:,} tokens at once{share} ({worst.ended})"
    note = ""
    if worst.preempted or worst.held < worst.asked:
        note = f"{max(worst.preempted, worst.asked - worst.held)} fewer than it claims to hold: they waited"
    elif worst.claimed > worst.asked:
        note = f"the cache would hold {worst.claimed}; max_num_seqs lets {worst.asked} run"
    return EngineRehearsal(name, what, worst.peak, worst.limit, note, tuple(f.peak for f in filled))


def _notes(facts: list[dict[str, Any]], filled: list[Any]) -> tuple[str, ...]:
    """How it was measured."""
    notes = [f"measured by {filled[0].how}; a limit is what the worker uses and what was left beside it"]
    if facts[0]["device"] == "cpu":
        notes.append(
            "all engines share this host's memory: ranks count an equal part of what is left each, and the KV cache "
            "was full while the ranks were measured"
        )
    return tuple(notes)


def _checked_length(max_length: int | None, longest: int) -> int:
    if max_length is None:
        return longest
    if not SHORTEST <= max_length <= longest:
        raise DataError(
            f"max_length={max_length}: prompt and response together, from {SHORTEST} to the replica's max_model_len, "
            f"{longest}"
        )
    return max_length

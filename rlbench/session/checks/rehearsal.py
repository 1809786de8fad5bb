"""Rehearsal: the worst case of a run before it starts, so that memory fails now and not at step 120.

The training ranks take two smaller micro-batches before the whole one: memory grows in a line with the tokens, and
where the line says that the whole would not fit, it is refused unrun.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlbench.data import Ragged, TrainBatch
from rlbench.data.batches.columns import TEACHER, TEACHER_IDS, TEACHER_TOP
from rlbench.dispatch.chain import ChainStep, Steps
from rlbench.engines import TrainEngine
from rlbench.errors import CheckFailed, DataError, LossError, RemoteError, Suggesting
from rlbench.session.core import SessionCore
from rlbench.session.training.loss_check import ship
from rlbench.units import format_bytes, format_percent

RESERVE = 0.05
"""Share of the limit that the largest safe budget leaves free: what a line does not foretell."""
OUT_OF_MEMORY = "OutOfMemoryError"
WARM_UP_TOKENS = 32
SHORTEST = 16
MORE_RANKS = "spread the model over more ranks"


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
class Line:
    """Bytes as a line of tokens."""

    at_zero: float
    per_token: float

    def at(self, tokens: int) -> int:
        return round(self.at_zero + self.per_token * tokens)

    def tokens(self, nbytes: float) -> int | None:
        """Return the most tokens within `nbytes`; None where memory does not grow with them."""
        return None if self.per_token <= 0 else max(0, math.floor((nbytes - self.at_zero) / self.per_token))


def through(smaller: tuple[int, int], larger: tuple[int, int]) -> Line:
    """Return the line through two measurements (tokens, bytes); flat where the larger did not take more."""
    (few, low), (many, high) = smaller, larger
    slope = max(0.0, (high - low) / (many - few))
    return Line(high - slope * many, slope)


@dataclass(frozen=True)
class _Worst:
    """The worst case of training engines: micro-batches of `budget` tokens in rows of `length`."""

    budget: int
    length: int
    vocabulary: int
    warm_up: TrainBatch
    memory_limit: int | None
    top_k: int | None


def rehearse(
    core: SessionCore,
    max_length: int | None = None,
    token_budget: int | None = None,
    *,
    loss: Any = "grpo",
    top_k: int = 0,
    memory_limit: int | None = None,
    seconds: float = 60.0,
) -> Generator[ChainStep, Any, Rehearsal]:
    """Run the worst case of memory once: a full KV cache, and a micro-batch of longest sequences; changes nothing.

    Returns per engine peak, limit and head-room, and the largest safe `token_budget`.

    Args:
        max_length: prompt and response together; default: the replica's max_model_len.
        token_budget: tokens of one micro-batch on one rank; default: the one `train_step` takes.
        loss: as for `train_step`.
        top_k: of a loss that needs a teacher: so many of the teacher's likeliest tokens at each place.
        memory_limit: bytes a training rank may use; default: what its GPU, or its share of the host, has.
        seconds: how long the KV cache is filled at most.

    Raises:
        CheckFailed: it does not fit; says what to lower.
    """
    longest, vocabulary = (int(core.inference.info[name]) for name in ("max_model_len", "vocab_size"))
    length = longest if max_length is None else max_length
    if not SHORTEST <= length <= longest:
        raise DataError(
            f"max_length={length}: prompt and response together, from {SHORTEST} to the replica's max_model_len, "
            f"{longest}"
        )
    from rlbench.rl.losses import resolve
    from rlbench.rl.types import needs_of

    taught = top_k if "teacher" in needs_of(resolve(loss)) else None
    if top_k and taught is None:
        raise LossError(f"top_k={top_k} is of a loss that needs a teacher, and this one does not")
    warm_up = worst_batch(WARM_UP_TOKENS, WARM_UP_TOKENS, core.train.data_ranks, vocabulary, taught)
    shipped = ship(loss, warm_up, widths=core.train.info)
    yield core.train.call_all("trial_facts", warm_up, {}, what="rehearsal")  # refuses what would be lost
    filled = yield core.inference.call_all("fill_kv", length, float(seconds), what="rehearsal", track=True)
    facts = yield core.train.call_all("trial_facts", warm_up, {}, what="rehearsal")  # with the cache full
    budget = max(token_budget or int(facts[0]["token_budget"]), length)
    worst = _Worst(budget, length, vocabulary, warm_up, memory_limit, taught)
    own, per_token, safe = yield from _train_steps(core.train, facts, worst, shipped.blob)
    engines = [own]
    if core.reference is not None:
        of_reference = yield core.reference.call_all("trial_facts", warm_up, {}, what="rehearsal")
        engines.append((yield from _train_steps(core.reference, of_reference, worst, None))[0])
    full = _of_replicas(core.inference.name, filled)
    notes = [f"measured by {filled[0].how}; a limit is what the worker uses and what was left beside it"]
    if facts[0]["device"] == "cpu":
        notes.append(
            "all engines share this host's memory: ranks count an equal part of what is left each, and the KV cache "
            "was full while the ranks were measured"
        )
    result = Rehearsal((*engines, full), budget, length, safe, per_token, tuple(notes))
    if not result.passed:  # the training engines passed, or said so themselves
        raise CheckFailed(
            f"{full.name} at its fullest took {format_bytes(full.peak)} and has {format_bytes(full.limit)}. Lower its "
            "kv_cache_bytes, max_num_seqs or max_model_len",
            result,
        )
    return result


def worst_batch(tokens: int, length: int, ranks: int, vocabulary: int, top_k: int | None = None) -> TrainBatch:
    """Return random tokens of which every rank gets `tokens`, in rows of `length` at most, nearly all response.

    With `top_k` also what a teacher says of each, and of so many others. A response token costs more than a prompt's:
    its log-prob is computed, and the loss sees it.
    """
    sizes = [length] * (tokens // length)
    rest = tokens - sum(sizes)
    if rest > 1:  # a row has a prompt and a response
        sizes.append(rest)
    lengths = [size for size in sizes for _ in range(ranks)]
    random, rows = np.random.default_rng(0), len(lengths)
    responses = Ragged.from_rows([random.integers(0, vocabulary, n - 1) for n in lengths], np.int32)
    sampled = np.full(len(responses.values), -math.log(vocabulary), np.float32)
    columns = {} if top_k is None else {TEACHER: sampled}
    if top_k:
        ids = random.integers(0, vocabulary, (len(sampled), top_k), np.int32)
        columns |= {TEACHER_IDS: ids, TEACHER_TOP: np.repeat(sampled[:, None], top_k, axis=1)}
    return TrainBatch(
        prompts=Ragged.from_rows([random.integers(0, vocabulary, 1) for _ in lengths], np.int32),
        responses=responses,
        mask=np.ones(len(sampled), bool),
        advantages=np.repeat(np.where(np.arange(rows) % 2 == 0, 1.0, -1.0), responses.lengths).astype(np.float32),
        sampler_logprobs=sampled,
        ref_logprobs=sampled,
        group=np.arange(rows, dtype=np.int32) // 2,
        weight_version=np.zeros(rows, np.int64),
        columns=columns,
    )


def _train_steps(engine: TrainEngine, facts: list[dict[str, Any]], worst: _Worst, loss: bytes | None) -> Steps:
    """Run a quarter, a half, and where these say that it fits the whole; returns what was found, bytes per token, and
    the largest budget that leaves the reserve free: None where memory does not grow, 0 where none fits."""
    budget, ranks = worst.budget, engine.data_ranks
    limit = worst.memory_limit or min(int(f["limit"]) for f in facts)
    missing, stepping = (max(int(f[name]) for f in facts) for name in ("optimizer_missing", "optimizer_step"))
    free = limit * (1 - RESERVE) - missing
    points: list[tuple[int, int]] = []
    measured: list[dict[str, Any]] = []
    for tokens in (budget // 4, budget // 2, budget):
        if len(points) == 2:
            line = through(*points)
            what, expected = "foretold by a quarter and a half of it", line.at(budget) + missing
            _need_room(EngineRehearsal(engine.name, what, expected, limit), line, line.tokens(free), worst)
        batch = worst_batch(tokens, min(worst.length, tokens), ranks, worst.vocabulary, worst.top_k)
        try:
            measured = yield engine.call_all(
                "rehearse", worst.warm_up, batch, {"token_budget": tokens}, loss, what="rehearsal", track=True
            )
        except RemoteError as error:
            if OUT_OF_MEMORY not in str(error):
                raise
            fitted = f"{points[-1][0]:,} tokens fitted: lower token_budget to that" if points else "lower max_model_len"
            said = f"{engine.name} ran out of memory on a micro-batch of {tokens:,} tokens; {fitted}"
            raise CheckFailed(f"{said}, or {MORE_RANKS}") from error
        points.append((tokens, max(int(m["peak"]) for m in measured)))
    line = through(points[1], points[2])
    # when an optimizer steps, the activations are gone
    peaks = [max(int(m["peak"]), int(m["before"]) + stepping) + missing for m in measured]
    doing = "forward" if loss is None else "forward and backward, gradients there"
    what = f"{budget:,} tokens in rows of {worst.length:,} on each of {ranks} ranks: {doing}"
    note = f"~{format_bytes(missing)} of it optimizer state, which the first step makes" if missing else ""
    found = EngineRehearsal(engine.name, what, max(peaks), limit, note, tuple(peaks))
    _need_room(found, line, line.tokens(free), worst)
    return found, line.per_token, line.tokens(free)


def _need_room(found: EngineRehearsal, line: Line, most: int | None, worst: _Worst) -> None:
    """Refuse what does not fit, saying what to lower; `most` tokens would."""
    if found.headroom >= 0:
        return
    if not most or most >= worst.budget:  # then it is the optimizer's step that does not fit
        mend = f"Weights, gradients and optimizer state alone fill it: {MORE_RANKS} (shards), or offload other engines"
    elif most < worst.length:
        mend = (
            f"A sequence of {worst.length:,} tokens does not fit by itself: lower the replica's max_model_len to "
            f"about {most:,}, or {MORE_RANKS}"
        )
    else:
        mend = f"Lower token_budget from {worst.budget:,} to {most:,} or less (train_step(…, token_budget={most}))"
    said = f"the worst case of {found.name} needs {format_bytes(found.peak)} and has {format_bytes(found.limit)}."
    raise CheckFailed(f"{said} {mend}", Rehearsal((found,), worst.budget, worst.length, None, line.per_token))


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

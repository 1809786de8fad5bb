"""`session.teacher`: a frozen policy, on the training ranks or behind a URL, that says how likely each token is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from rlbench.data import Rollouts, TrainBatch
from rlbench.data.base.ragged import rows_in_order
from rlbench.data.batches.batch import to_score
from rlbench.data.batches.columns import TEACHER, TEACHER_IDS, TEACHER_TOP
from rlbench.data.record.origin import made_with
from rlbench.data.rollouts.channels import TEACHER_CHANNEL
from rlbench.data.rollouts.contexts import Sequences, sequences
from rlbench.dispatch.chain import Steps
from rlbench.engines import TrainEngine
from rlbench.errors import DataError, SessionError, StateError, Suggesting
from rlbench.session import building
from rlbench.session.core import SessionCore
from rlbench.session.options import model_at
from rlbench.session.planning.check import need_room
from rlbench.session.teachers.server import TeacherServer, is_url
from rlbench.session.teachers.vocabulary import check_same_tokenizer, tokenizer_of
from rlbench.session.verb import run
from rlbench.trainers.update.options import PolicyOptions

S = TypeVar("S", Rollouts, TrainBatch)
RESERVED = ("actor", "train", "inference", "reference", "trainer")


class Source(Protocol):
    """Who is asked."""

    def score_steps(self, batch: TrainBatch, top_k: int, temperature: float | None) -> Steps:
        """Return the columns of `data.batches.columns` for a batch."""


@dataclass(frozen=True, eq=False)
class Teacher(Suggesting):
    """A frozen policy that scores what was sampled; `model` is what it was named by, `where` who computes it."""

    core: SessionCore
    name: str
    model: str
    where: str
    source: Source

    def score(self, given: S, top_k: int = 0, *, temperature: float | None = None, block: bool = True) -> S:
        """Return rollouts, or a batch, with the teacher's log-prob of each response token.

        Rollouts get the channel `teacher_logprob`, and with `top_k` columns, which `rollouts.batch(…)` hands on; a
        batch gets columns, which losses see as `inputs.teacher` (`rb.rl.sampled_kl()`, `rb.rl.gkd()`).

        Args:
            given: rollouts, or a batch of any kind: also `rb.data.demonstrations(…)`.
            top_k: also the teacher's `top_k` likeliest tokens at each place, with their log-probs. The
                vocabulary's size gives the whole distribution.
            temperature: divides the teacher's logits; None: as the tokens were sampled. A server knows 1 alone.
            block: False returns a `PendingVerb` at once.

        A teacher that fails or goes away leaves session and batch as they were.
        """
        options = {"temperature": temperature}
        return cast(S, run(self.core, teacher_score, (self, given, top_k), options, block))

    def close(self) -> None:
        """Give back what the ranks hold of it; the reference and the base stay, and a server too."""
        if self.name in self.core.options.teachers:
            self.core.engines[self.name].close()
            del self.core.engines[self.name]
            _note_teachers(self.core, {n: path for n, path in self.core.options.teachers.items() if n != self.name})

    def __repr__(self) -> str:
        return f"Teacher({self.model!r}, {self.where})"

    def __getstate__(self) -> dict[str, Any]:
        raise SessionError("a teacher stays with its session: give a loss the batch it has scored")


def teacher(
    core: SessionCore,
    model: str,
    name: str = "teacher",
    *,
    served: str | None = None,
    tokenizer: str | None = None,
    token_env: str | None = None,
    timeout_s: float | None = None,
    concurrency: int | None = None,
) -> Teacher:
    """Hold a frozen policy that scores what was sampled: `teacher.score(batch)`, for distillation.

    One with another tokenizer is refused: a token's id must mean the same to both.

    Args:
        model: a folder or hub id, held by the training ranks as a reference is (where it is the reference's model, that
            one; with LoRA the session's own model is the base with its adapters off: neither takes memory). Or the URL
            of an OpenAI-compatible server ("http://localhost:8000/v1") that gives log-probs of a prompt, as vLLM's.
        name: of its engine in the session; running the cell again finds it.
        served: of a server: the model's name there; None: the first it lists.
        tokenizer: of a server that cannot say how it encodes: the folder or hub id of its tokenizer.
        token_env: of a server: the environment variable with the token that is sent along.
        timeout_s, concurrency: of a server: seconds it may be silent (60), requests at a time (4).
    """
    reached = {"token_env": token_env, "timeout_s": timeout_s, "concurrency": concurrency}
    if is_url(model):
        chosen = {key: value for key, value in reached.items() if value is not None}
        server = TeacherServer.found(model, served, tokenizer, core.tokenizer, chosen)
        return Teacher(core, name, model, f"{server.served} at {server.place}", server)
    of_servers = {"served": served, "tokenizer": tokenizer, **reached}
    if given := [key for key, value in of_servers.items() if value is not None]:
        raise SessionError(f"teacher({model!r}): {', '.join(given)} would have no effect: it is of a server's URL")
    return _on_ranks(core, model, name)


def teacher_score(
    core: SessionCore, teacher: Teacher, given: Any, top_k: int = 0, temperature: float | None = None
) -> Steps:
    """Ask a teacher; see `Teacher.score`."""
    if not isinstance(given, Rollouts | TrainBatch):
        raise DataError(f"teacher.score wants rollouts or a TrainBatch, got {type(given).__name__}")
    if not isinstance(top_k, int) or top_k < 0:
        raise DataError(f"teacher.score: top_k={top_k!r}: a number of tokens, 0 for the sampled one alone")
    if isinstance(given, TrainBatch):
        found = yield from teacher.source.score_steps(given, top_k, temperature)
        return given.with_columns(**{TEACHER_IDS: None, TEACHER_TOP: None} | found)
    asked = sequences(given)
    rows = np.flatnonzero(asked.responses.lengths)  # those without a token are asked about nothing
    prompts, responses = asked.prompts.take(rows), asked.responses.take(rows)
    batch = to_score(list(prompts), list(responses), float(given.sampling.get("temperature", 1.0)))
    found = yield from teacher.source.score_steps(batch, top_k, temperature)
    found = {name: _beside(given, asked, values) for name, values in found.items()}
    scored = given.with_channels(**{TEACHER_CHANNEL: found.pop(TEACHER)})
    kept = {name: value for name, value in given.columns.items() if name not in (TEACHER_IDS, TEACHER_TOP)}
    return made_with(replace(scored, columns=kept | found), given)


def _beside(rollouts: Rollouts, asked: Sequences, values: np.ndarray) -> np.ndarray:
    """Return what was found of the tokens that were asked about beside all response tokens; NaN, or -1 of whole
    numbers, beside observed ones that nobody asked about."""
    if isinstance(asked.tokens, slice):
        return values
    unknown = np.nan if values.dtype.kind == "f" else -1
    out = np.full((len(rollouts.logprobs), *values.shape[1:]), unknown, values.dtype)
    out[asked.tokens] = values
    return out


@dataclass(frozen=True)
class OnRanks:
    """A teacher that an engine of the session computes; `adapters` off: the base of the policy itself."""

    core: SessionCore
    engine: str
    adapters: bool = True

    def score_steps(self, batch: TrainBatch, top_k: int, temperature: float | None) -> Steps:
        """Score on all of the engine's ranks."""
        if not len(batch) or not batch.tokens:
            raise DataError("teacher.score: there is no response token to score")
        engine = cast("TrainEngine | None", self.core.engines.get(self.engine))
        if engine is None or not engine.built:
            raise StateError(f"this teacher was closed: session.teacher(…, name={self.engine!r}) holds it again")
        options = PolicyOptions(temperature=temperature, top_k=top_k, adapters=self.adapters)
        rows = yield engine.call_all(
            "policy_forward", batch, options, finish=rows_in_order, what="teacher.score", track=True
        )
        found = {TEACHER: rows["logprobs"].values}
        if top_k:
            ids, top = rows["candidates"].values, rows["candidate_logprobs"].values
            found |= {TEACHER_IDS: ids.astype(np.int32), TEACHER_TOP: top}
        return found


def _on_ranks(core: SessionCore, model: str, name: str) -> Teacher:
    """Find the engine that holds the model, or build one."""
    path, held = model_at(model), core.options.teachers.get(name)
    if path == core.options.path and core.options.train.lora is not None:
        return Teacher(core, name, model, "the policy's base, its adapters off", OnRanks(core, "actor", adapters=False))
    if core.reference is not None and path == core.options.reference:
        return Teacher(core, name, model, "held as the reference", OnRanks(core, "reference"))
    if held is None:
        if name in RESERVED or name in core.engines:
            raise SessionError(f"teacher: the session has an engine {name!r}: give the teacher another name=")
        building.check_models(path)
        check_same_tokenizer(core.tokenizer, tokenizer_of(path), f"the teacher {model!r}")
        options = replace(core.options, teachers={**core.options.teachers, name: path})
        need_room(options)
        core.engines[name] = building.plans(options, core.link)[name]()
        _note_teachers(core, options.teachers)
    elif held != path:
        raise SessionError(f"teacher {name!r} is {held!r} already: close() it first, or give this one another name=")
    return Teacher(core, name, model, f"held as {name!r} on the ranks", OnRanks(core, name))


def _note_teachers(core: SessionCore, teachers: Any) -> None:
    """Let the session know which teachers it has: heal() builds them again, and another kernel finds them."""
    core.options = replace(core.options, teachers=dict(teachers))
    core.link.set(config=core.options.to_json())

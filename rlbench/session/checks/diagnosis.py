"""Measuring until the cause of a disagreement shows: the same tokens on both sides, other options, other prompts.

From what is common to what is rare. What is claimed was measured: options are blamed where samples drawn without them
agree, a temperature or a prompt where the trainer gives the sampler's log-probs with it. `session.checks.causes` has
the rules and the sentences. Nothing measured here leaves a trace in the session.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data import Rollouts, TrainBatch
from rlbench.data.base.ragged import Ragged
from rlbench.data.batches.sequences import as_batch
from rlbench.data.prompts.sampling import reshaping
from rlbench.dispatch.chain import Steps
from rlbench.engines.sync import rows_in_order
from rlbench.session.checks import causes
from rlbench.weights.proof import allowed_gap

if TYPE_CHECKING:
    from rlbench.session.core import SessionCore

SAMPLES = 4
HOTTEST, COLDEST, SEARCHED = 4.0, 0.1, 18
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Drawn:
    """The tokens that are compared; `sampling`: the options they were drawn with, None where nobody knows."""

    batch: TrainBatch
    sampling: dict[str, Any] | None
    contents: Any = None


@dataclass(frozen=True)
class Scored:
    """The trainer's log-probs and entropies of a batch's responses, flat."""

    logprobs: np.ndarray
    entropy: np.ndarray


def tolerance(dtype: str) -> float:
    """What two engines may differ by in `dtype`: as a weight sync allows.

    On the embedded model in float32 vLLM and the trainer differ by 3e-6 to 6e-6 at most over some hundred tokens, at
    temperatures from 0.5 to 1.3; a thousandth of a weight's size more shows as 1e-3 and more.
    """
    return allowed_gap(dtype)


def drawing(session: SessionCore, contents: Any, n: int, options: dict[str, Any]) -> Any:
    """Rollout 0, under way: it does not count, so that no later sample changes."""
    return session.inference.submit_generate(contents, options, n=n, progress=False, number=0)


def as_trained(rollouts: Rollouts) -> TrainBatch:
    """The rollouts as a batch, with advantages of both signs."""
    signs = np.where(np.arange(rollouts.samples) % 2 == 0, 1.0, -1.0)
    return rollouts.score(signs).batch(advantage=lambda rewards, group: rewards)


def score_steps(session: SessionCore, batch: TrainBatch, **options: Any) -> Steps:
    """Score a batch by the trainer; returns `Scored`, leaves nothing behind."""
    merged = yield session.train.call_all("policy_trial", batch, options, finish=rows_in_order, what="preflight")
    return Scored(*(Ragged.from_rows(merged[name], np.float32).values for name in ("logprobs", "entropy")))


def both_sides_steps(session: SessionCore, sequences: list[list[int]]) -> Steps:
    """The same tokens by the trainer and by every replica at temperature 1; the largest difference counts."""
    ours = yield from score_steps(session, as_batch(sequences))
    replicas = yield session.inference.call_all("prompt_logprobs", sequences, what="preflight")
    gap = np.max([np.abs(np.concatenate(rows) - ours.logprobs) for rows in replicas], axis=0)
    return causes.SideBySide(gap, np.concatenate([np.arange(1, len(row)) for row in sequences]))


def cause_steps(session: SessionCore, drawn: Drawn, weights: causes.Weights, scored: Scored, repeat: float) -> Steps:
    """The probable cause of what did not pass, as a sentence."""
    batch = drawn.batch
    fine = tolerance(weights.trainer_dtype)
    sides = yield from both_sides_steps(session, _sequences(batch, int(session.inference.info["max_model_len"])))
    found = causes.of_sides(weights, sides, fine, tolerance(weights.replica_dtype), repeat) or causes.of_data(weights)
    if found:
        return found
    allowed = fine / min(1.0, batch.temperature)
    tokens = _tokens(batch, scored, session.tokenizer)
    if float(np.abs(tokens.gap).max()) <= allowed:
        return causes.of_numbers(weights)
    found = causes.of_tokens(tokens, allowed)
    if found:
        return found
    guilty = yield from _guilty_options(session, drawn, allowed)
    if guilty:
        return causes.of_options(guilty, drawn.sampling or {})
    if drawn.sampling is None and batch.reshaped_by:
        return causes.of_reshaped(batch.reshaped_by)
    other = yield from _temperature(session, batch, allowed)
    if other is not None:
        return causes.of_temperature(other, batch.temperature)
    for said, prompts in _other_prompts(batch, session.tokenizer):
        if (yield from _explains(session, batch, batch.replace(prompts=prompts), allowed)):
            return causes.of_prompt(said)
    return causes.of_pattern(tokens, allowed)


def _sequences(batch: TrainBatch, limit: int) -> list[list[int]]:
    """Prompt and response of each row, as far as the replica can take them."""
    return [[*map(int, p), *map(int, r)][:limit] for p, r in zip(batch.prompts, batch.responses, strict=True)]


def _tokens(batch: TrainBatch, scored: Scored, tokenizer: Any) -> causes.Tokens:
    """The trained tokens with what the patterns look at."""
    index = np.concatenate([np.arange(length) for length in batch.response_lengths])[batch.mask]
    ids = batch.responses.values[batch.mask]
    special = np.isin(ids, list(getattr(tokenizer, "all_special_ids", ())))
    names = sorted({tokenizer.decode([int(i)]) for i in np.unique(ids[special])})
    gap = (scored.logprobs - batch.sampler_logprobs)[batch.mask]
    return causes.Tokens(gap, index, special, scored.entropy[batch.mask], ", ".join(map(repr, names)))


def _guilty_options(session: SessionCore, drawn: Drawn, allowed: float) -> Steps:
    """The sampling options that make the difference: each drawn with alone, and all left out."""
    sampling = drawn.sampling or {}
    suspects = reshaping(sampling)
    if not suspects or drawn.contents is None:
        return suspects
    plain = {name: value for name, value in sampling.items() if name not in suspects}
    if not (yield from _agrees(session, drawn.contents, plain, allowed)):
        return []
    guilty = []
    for name in suspects:
        if not (yield from _agrees(session, drawn.contents, plain | {name: sampling[name]}, allowed)):
            guilty.append(name)
    return guilty or suspects


def _agrees(session: SessionCore, contents: Any, sampling: dict[str, Any], allowed: float) -> Steps:
    """Whether samples drawn with these options have the trainer's log-probs."""
    batch = as_trained((yield drawing(session, contents, SAMPLES, sampling)))
    return (yield from _explains(session, batch, batch, allowed))


def _explains(session: SessionCore, batch: TrainBatch, other: TrainBatch, allowed: float, **options: Any) -> Steps:
    """Whether the trainer, on another version of the batch, gives the log-probs the sampler gave."""
    ours = yield from score_steps(session, other, **options)
    return float(np.abs(ours.logprobs - batch.sampler_logprobs)[batch.mask].max()) <= allowed


def _temperature(session: SessionCore, batch: TrainBatch, allowed: float) -> Steps:
    """The temperature, of two digits, at which the trainer gives the sampler's log-probs; None where there is none."""

    def off(log_temperature: float) -> Steps:
        ours = yield from score_steps(session, batch, temperature=float(np.exp(log_temperature)))
        return float(np.square(ours.logprobs - batch.sampler_logprobs)[batch.mask].mean())

    low, high = float(np.log(COLDEST)), float(np.log(HOTTEST))
    a, b = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_a = yield from off(a)
    at_b = yield from off(b)
    for _ in range(SEARCHED):  # golden section: each pass leaves 0.62 of the interval
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - GOLDEN * (high - low)
            at_a = yield from off(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + GOLDEN * (high - low)
            at_b = yield from off(b)
    found = float(f"{np.exp((low + high) / 2):.2g}")
    own = allowed * min(1.0, batch.temperature) / min(1.0, found)
    if (yield from _explains(session, batch, batch, own, temperature=found)) and found != batch.temperature:
        return found
    return None


def _other_prompts(batch: TrainBatch, tokenizer: Any) -> Iterator[tuple[str, Ragged]]:
    """What is often put before a response, or forgotten: a begin token, the template's generation prompt."""
    rows = [[int(token) for token in row] for row in batch.prompts]
    begin = getattr(tokenizer, "bos_token_id", None)
    marks = {
        "begin token": ([] if begin is None else [int(begin)], True),
        "generation prompt of the chat template": (_generation_prompt(tokenizer), False),
    }
    for name, (mark, before) in marks.items():
        if not mark:
            continue
        size = len(mark)
        text = repr(tokenizer.decode(mark))
        added = [mark + row if before else row + mark for row in rows]
        yield f"lack the {name}, {text}", Ragged.from_rows(added, np.int32)
        has = all((row[:size] if before else row[-size:]) == mark and len(row) > size for row in rows)
        if has:
            cut = [row[size:] if before else row[:-size] for row in rows]
            yield f"have a {name}, {text}, that was not there", Ragged.from_rows(cut, np.int32)


def _generation_prompt(tokenizer: Any) -> list[int]:
    """What the chat template puts between a prompt and its answer."""
    if getattr(tokenizer, "chat_template", None) is None:
        return []
    chat = [{"role": "user", "content": "a"}]
    without, full = (
        tokenizer.apply_chat_template(chat, tokenize=True, add_generation_prompt=add, return_dict=False)
        for add in (False, True)
    )
    return list(map(int, full[len(without) :])) if full[: len(without)] == without else []

"""Why sampler and trainer disagree: the probable cause, measured on the same tokens on both sides.

A cause is named only where the evidence shows it; its sentence ends in what to do. Nothing measured here leaves a trace
in the session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlbench.data import Rollouts, TrainBatch
from rlbench.data.base.ragged import Ragged, rows_in_order
from rlbench.data.batches.batch import as_batch
from rlbench.data.prompts.images import EncodedImage
from rlbench.dispatch.chain import Steps
from rlbench.session.core import SessionCore
from rlbench.weights.probe import Probe
from rlbench.weights.sync import allowed_gap, replica_logprobs

HOTTEST, COLDEST = 4.0, 0.1
FIRST_STEP, CLOSE, PASSES = 0.1, 3e-3, 16
"""Of the search for a temperature, on its logarithm: two digits of it are 0.005 apart at the least."""
FIRST_OVER_REST, LEAST_CUT = 4.0, 8
NOT_FINITE = (
    "log-probs that are not finite: weights with NaN or infinity, on the trainer or the replica. session.undo() or "
    "session.restore(…), then session.sync_weights()"
)
CHANCE = (
    "the trainer does not repeat itself: two passes over the same tokens differ by up to {repeat:.2g}. Dropout or "
    "another source of chance is on: set it to 0 in the model's config, or module.eval() by session.train.run(…)"
)
BEHIND = "the replica holds {held} and the trainer v{version}: their weights differ. session.sync_weights()"
ROUNDING = (
    "rounding: the trainer computes in {trainer} and the replica in {replica}; the differences are small everywhere "
    "(up to {worst:.2g}). Build the session with inference={{'dtype': {trainer!r}}}"
)
POSITIONS = (
    "positions: the first prediction of each sequence, which looks at a single token, agrees, and later ones do not "
    "({where}). Rope, its scaling, a sliding window or the attention differ between trainer and replica: compare the "
    "model's config (rope_parameters, max_position_embeddings, sliding_window) on both"
)
CHANGED = (
    "the weights differ though both sides say v{version}: something changed them outside of a step (a method, "
    "train.run, an engine loaded again); log-probs of the same tokens differ by up to {worst:.2g}. "
    "session.sync_weights()"
)
OFF_POLICY = (
    "these tokens were sampled under {held}, and the weights are v{version} now: they are off policy, which is no "
    "fault. Roll out again to check the current weights"
)
NUMBERS = (
    "the replicas say {held} and the trainer v{version}, though they compute the same: nothing was changed, or nothing "
    "that shows. session.sync_weights()"
)
SPECIAL = (
    "only special tokens disagree ({special}): they were not drawn as the rest was. Were they put in after sampling "
    "(an end token, a template's marks), or is there a stop or a mask on them?"
)
RESHAPED = (
    "the tokens were drawn with {options}: the sampler's probabilities are those of the reshaped distribution, the "
    "trainer's are not. Leave it out, or train with a loss that does not weigh by the sampler's log-probs (most do not)"
)
TEMPERATURE = (
    "the temperature: the tokens were sampled at {found:g} and are scored at {known:g}. "
    "batch.replace(temperature={found:g}), or sample at {known:g}"
)
PROMPTS = (
    "the prompts: those of the batch {what}; with that mended both sides agree. Build batches from "
    "`rollouts.batch(…)`, which keeps the prompts as they were sampled after"
)
CUT = (
    "a cut distribution: the sampler gives every token at least the trainer's probability, and never more than cutting "
    "off its tail does. top_p, top_k or min_p do that: sample without them"
)
FIRST = (
    "the prompt: the first response token is off by {first:.2g} on average, the others by {rest:.2g}. The prompt's "
    "tokens differ from those that were sampled after: the chat template, its generation prompt, a begin token, or "
    "text that was tokenised again"
)
UNKNOWN = (
    "both sides compute the same on these tokens, so the sampler's log-probs are not those of this distribution: "
    "sampling options that the batch does not know, or a prompt or tokens that were changed after sampling"
)


@dataclass(frozen=True)
class SideBySide:
    """The same weights and tokens, both sides at temperature 1: |trainer - replica|, and the number of tokens before
    each in its sequence, 1 for the first that is predicted."""

    gap: np.ndarray
    position: np.ndarray


@dataclass(frozen=True)
class Weights:
    """What both sides hold. `drawn`: versions the tokens were sampled under."""

    trainer_version: int
    replica_versions: tuple[int, ...]
    drawn: tuple[int, ...]
    trainer_dtype: str
    replica_dtype: str

    def others(self, versions: tuple[int, ...]) -> str:
        """Name those of these versions that the trainer does not hold."""
        return " and ".join(f"v{v}" for v in sorted(set(versions) - {self.trainer_version}))


def of_sides(weights: Weights, sides: SideBySide, allowed: float, rounding: float, repeat: float) -> str | None:
    """Return the cause where the two sides compute something else on the same tokens; None where they agree.

    Args:
        allowed: difference that rounding explains.
        rounding: … in the coarser of the two dtypes, where they differ.
        repeat: largest difference between two passes of the trainer over the same tokens; 0 where it is rounding.
    """
    if not np.isfinite(sides.gap).all():
        return NOT_FINITE
    if repeat > 0:
        return CHANCE.format(repeat=repeat)
    worst, version = float(sides.gap.max()), weights.trainer_version
    if worst <= allowed:
        return None
    if held := weights.others(weights.replica_versions):
        return BEHIND.format(held=held, version=version)
    if weights.trainer_dtype != weights.replica_dtype and worst <= rounding:
        return ROUNDING.format(trainer=weights.trainer_dtype, replica=weights.replica_dtype, worst=worst)
    first = sides.gap[sides.position == 1]  # attends to itself alone: other weights show there, positions do not
    if len(first) and (first <= allowed).all():
        middle = float(np.median(sides.position))
        early, late = (sides.gap[pick].mean() for pick in (sides.position <= middle, sides.position > middle))
        where = f"on average {early:.2g} up to position {middle:.0f}, {late:.2g} beyond"
        return POSITIONS.format(where=where)
    return CHANGED.format(version=version, worst=worst)


def of_tokens(gap: np.ndarray, special: np.ndarray, text: str, allowed: float) -> str | None:
    """Return the cause where only the special tokens disagree, which read `text`; `gap`: trainer minus sampler."""
    bad = np.abs(gap) > allowed
    if not bad.any() or not special[bad].all() or special.all():
        return None
    return SPECIAL.format(special=text)


def of_pattern(gap: np.ndarray, index: np.ndarray, entropy: np.ndarray, allowed: float) -> str:
    """Return the cause that the differences (trainer minus sampler) look like, where nothing else explains them.

    `index`: of each token in its response. The most probable token is always kept, and its probability is at least
    exp(-entropy): cutting the tail off raises a token's log-prob by no more than the entropy.
    """
    raised, size = -gap, np.abs(gap)
    if (raised >= -allowed).all() and (raised <= entropy + allowed).all() and (raised > allowed).sum() >= LEAST_CUT:
        return CUT
    first, rest = size[index == 0], size[index > 0]
    if len(rest) and first.mean() > FIRST_OVER_REST * max(float(rest.mean()), allowed / FIRST_OVER_REST):
        return FIRST.format(first=first.mean(), rest=rest.mean())
    return UNKNOWN


# -- measuring


def as_trained(rollouts: Rollouts) -> TrainBatch:
    """Return the rollouts as a batch, with advantages of both signs."""
    signs = np.where(np.arange(rollouts.samples) % 2 == 0, 1.0, -1.0)
    return rollouts.score(signs).batch(advantage=lambda rewards, group: rewards)


def score_steps(core: SessionCore, batch: TrainBatch, column: str = "logprobs", **options: Any) -> Steps:
    """Score a batch by the trainer; returns the responses' log-probs (or `"entropy"`), flat; leaves nothing behind."""
    merged = yield core.train.call_all("policy_trial", batch, options, finish=rows_in_order, what="preflight")
    return np.asarray(merged[column].values)


def both_sides_steps(core: SessionCore, probe: Probe) -> Steps:
    """Score the same tokens by the trainer and by every replica at temperature 1; the largest difference counts."""
    ours = yield from score_steps(core, as_batch(probe.tokens, probe.media))
    replicas = yield from replica_logprobs(core.inference, probe, "preflight")
    gap = np.max([np.abs(np.concatenate(rows) - ours) for rows in replicas], axis=0)
    return SideBySide(gap, np.concatenate([np.arange(1, len(row)) for row in probe.tokens]))


def cause_steps(core: SessionCore, batch: TrainBatch, weights: Weights, logprobs: np.ndarray, repeat: float) -> Steps:
    """Find the probable cause of what did not pass, as a sentence; from what is common to what is rare."""
    version = weights.trainer_version
    fine, coarse = allowed_gap(weights.trainer_dtype), allowed_gap(weights.replica_dtype)
    limit = int(core.inference.info["max_model_len"])
    rows = [[*map(int, p), *map(int, r)][:limit] for p, r in zip(batch.prompts, batch.responses, strict=True)]
    shown = [[one.data if isinstance(one, EncodedImage) else one for one in own] for own in batch.media_rows()]
    sides = yield from both_sides_steps(core, Probe(rows, tuple(map(tuple, shown))))  # of images, those without places
    if cause := of_sides(weights, sides, fine, coarse, repeat):
        return cause
    if held := weights.others(weights.drawn):
        return OFF_POLICY.format(held=held, version=version)
    allowed = fine / min(1.0, batch.temperature)
    gap, ids = (logprobs - batch.sampler_logprobs)[batch.mask], batch.responses.values[batch.mask]
    if float(np.abs(gap).max()) <= allowed:
        held = ", ".join(f"v{v}" for v in weights.replica_versions)
        return NUMBERS.format(held=held, version=version)
    special = np.isin(ids, core.tokenizer.all_special_ids)
    names = sorted({core.tokenizer.decode([int(i)]) for i in np.unique(ids[special])})
    if cause := of_tokens(gap, special, ", ".join(map(repr, names)), allowed):
        return cause
    other = yield from _temperature(core, batch, logprobs, allowed)
    if other is not None:
        return TEMPERATURE.format(found=other, known=batch.temperature)
    for what, prompts in _other_prompts(batch, core.tokenizer):
        ours = yield from score_steps(core, batch.replace(prompts=Ragged.from_rows(prompts, np.int32)))
        if float(np.abs(ours - batch.sampler_logprobs)[batch.mask].max()) <= allowed:
            return PROMPTS.format(what=what)
    if batch.reshaped_by:
        return RESHAPED.format(options=", ".join(batch.reshaped_by))
    entropy = yield from score_steps(core, batch, "entropy")
    index = np.concatenate([np.arange(length) for length in batch.response_lengths])
    return of_pattern(gap, index[batch.mask], entropy[batch.mask], allowed)


def _other_prompts(batch: TrainBatch, tokenizer: Any) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield prompts with what is often put there or forgotten: a begin token, the template's generation prompt."""
    rows = [list(map(int, row)) for row in batch.prompts]
    ending: list[int] = []
    if getattr(tokenizer, "chat_template", None) is not None:
        chat = [{"role": "user", "content": "a"}]
        asked, open_ = (
            list(tokenizer.apply_chat_template(chat, tokenize=True, add_generation_prompt=add, return_dict=False))
            for add in (False, True)
        )
        ending = open_[len(asked) :] if open_[: len(asked)] == asked else []
    begin = [] if tokenizer.bos_token_id is None else [int(tokenizer.bos_token_id)]
    if begin:
        yield f"lack the begin token, {tokenizer.decode(begin)!r}", [begin + row for row in rows]
        if all(row[:1] == begin and len(row) > 1 for row in rows):
            yield f"have a begin token, {tokenizer.decode(begin)!r}, that was not there", [row[1:] for row in rows]
    if ending:
        text = repr(tokenizer.decode(ending))
        yield f"lack the generation prompt of the chat template, {text}", [row + ending for row in rows]
        if all(row[-len(ending) :] == ending and len(row) > len(ending) for row in rows):
            cut = [row[: -len(ending)] for row in rows]
            yield f"have a generation prompt of the chat template, {text}, that was not there", cut


def _temperature(core: SessionCore, batch: TrainBatch, logprobs: np.ndarray, allowed: float) -> Steps:
    """Find the temperature, of two digits, at which the trainer gives the sampler's log-probs; None where none does.

    `logprobs`: the trainer's, at the temperature that the batch knows.
    """

    def gaps(temperature: float) -> Steps:
        ours = yield from score_steps(core, batch, temperature=temperature)
        return (ours - batch.sampler_logprobs)[batch.mask]

    nearest = yield from nearest_temperature(gaps, batch.temperature, (logprobs - batch.sampler_logprobs)[batch.mask])
    found = float(f"{nearest:.2g}")
    if found == batch.temperature:
        return None
    own = allowed * min(1.0, batch.temperature) / min(1.0, found)
    left = yield from gaps(found)
    return found if float(np.abs(left).max()) <= own else None


def nearest_temperature(gaps: Callable[[float], Steps], known: float, at_known: np.ndarray) -> Steps:
    """Find the temperature at which the squares of `gaps` are least, to a hundredth of itself and better.

    Gauss-Newton on the temperature's logarithm, whose derivative is that of the last two passes (a secant). Where a
    step made it worse, the next goes less than half as far, as the least of a straight line between both says.

    Args:
        gaps: takes a temperature; steps that return trainer minus sampler there, of each token that counts (T,).
        known: temperature to begin at.
        at_known: the gaps there.
    """
    low, high = float(np.log(COLDEST)), float(np.log(HOTTEST))
    here, best = float(np.clip(np.log(known), low, high)), np.asarray(at_known, np.float64)
    step = FIRST_STEP if here + FIRST_STEP <= high else -FIRST_STEP
    for _ in range(PASSES):
        there = float(np.clip(here + step, low, high))
        if abs(there - here) < CLOSE:
            return float(np.exp(there))
        other = np.asarray((yield from gaps(float(np.exp(there)))), np.float64)
        slope = (other - best) / (there - here)
        if other @ other < best @ best:
            here, best = there, other
        step = -float(slope @ best) / float(slope @ slope or 1.0)
    return float(np.exp(here))

"""Why sampler and trainer disagree: the probable cause, decided by what was measured.

Pure functions of arrays. A cause is named only where the evidence shows it; its sentence ends in what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

WITHOUT = "Leave it out, or train with a loss that does not weigh by the sampler's log-probs (most do not)"
FIRST_OVER_REST = 4.0
LEAST_CUT = 8


@dataclass(frozen=True)
class SideBySide:
    """The same weights and tokens, both sides at temperature 1: |trainer - replica| and each token's position."""

    gap: np.ndarray
    position: np.ndarray
    """Tokens before it in its sequence, 1 for the first that is predicted."""


@dataclass(frozen=True)
class Weights:
    """What both sides hold. `drawn`: versions the tokens were sampled under."""

    trainer_version: int
    replica_versions: tuple[int, ...]
    drawn: tuple[int, ...]
    trainer_dtype: str
    replica_dtype: str


@dataclass(frozen=True)
class Tokens:
    """Sampled tokens: trainer minus sampler, index in the response, whether special, entropy under the trainer."""

    gap: np.ndarray
    index: np.ndarray
    special: np.ndarray
    entropy: np.ndarray
    special_text: str = ""


def of_sides(weights: Weights, sides: SideBySide, allowed: float, rounding: float, repeat: float) -> str | None:
    """The cause where the two sides compute something else on the same tokens; None where they agree.

    Args:
        allowed: difference that rounding explains.
        rounding: … in the coarser of the two dtypes, where they differ.
        repeat: largest difference between two passes of the trainer over the same tokens; 0 where it is rounding.
    """
    if not np.isfinite(sides.gap).all():
        return (
            "log-probs that are not finite: weights with NaN or infinity, on the trainer or the replica. "
            "session.undo() or session.restore(…), then session.sync_weights()"
        )
    if repeat > 0:
        return (
            f"the trainer does not repeat itself: two passes over the same tokens differ by up to {repeat:.2g}. "
            "Dropout or another source of chance is on: set it to 0 in the model's config, or module.eval() by "
            "session.train.run(…)"
        )
    behind = sorted({v for v in weights.replica_versions if v != weights.trainer_version})
    worst = float(sides.gap.max())
    if behind and not worst <= allowed:
        held = " and ".join(f"v{v}" for v in behind)
        return (
            f"the replica holds {held} and the trainer v{weights.trainer_version}: their weights differ. "
            "session.sync_weights()"
        )
    if worst <= allowed:
        return None
    if weights.trainer_dtype != weights.replica_dtype and worst <= rounding:
        return (
            f"rounding: the trainer computes in {weights.trainer_dtype} and the replica in {weights.replica_dtype}; "
            f"the differences are small everywhere (up to {worst:.2g}). Build the session with inference={{'dtype': "
            f"{weights.trainer_dtype!r}}}"
        )
    if _agree_at_first(sides, allowed):
        return (
            "positions: the first prediction of each sequence, which looks at a single token, agrees, and later ones "
            f"do not ({_by_position(sides)}). Rope, its scaling, a sliding window or the attention differ between "
            "trainer and replica: compare the model's config (rope_parameters, max_position_embeddings, "
            "sliding_window) on both"
        )
    return (
        f"the weights differ though both sides say v{weights.trainer_version}: something changed them outside of a "
        "step (a method, train.run, an engine loaded again); log-probs of the same tokens differ by up to "
        f"{worst:.2g}. session.sync_weights()"
    )


def of_data(weights: Weights) -> str | None:
    """The cause where the tokens were sampled by other weights than those there are now."""
    old = sorted({v for v in weights.drawn if v != weights.trainer_version})
    if not old:
        return None
    versions = " and ".join(f"v{v}" for v in old)
    return (
        f"these tokens were sampled under {versions}, and the weights are v{weights.trainer_version} now: they are off "
        "policy, which is no fault. Roll out again to check the current weights"
    )


def of_tokens(tokens: Tokens, allowed: float) -> str | None:
    """The cause where only the special tokens disagree."""
    bad = np.abs(tokens.gap) > allowed
    if not bad.any() or not tokens.special[bad].all() or tokens.special.all():
        return None
    return (
        f"only special tokens disagree ({tokens.special_text}): they were not drawn as the rest was. Were they put in "
        "after sampling (an end token, a template's marks), or is there a stop or a mask on them?"
    )


def of_pattern(tokens: Tokens, allowed: float) -> str:
    """The cause that the differences look like, where both sides compute the same and nothing else explains them."""
    size = np.abs(tokens.gap)
    if _cut(tokens, allowed):
        return (
            "a cut distribution: the sampler gives every token at least the trainer's probability, and never more than "
            "cutting off its tail does. top_p, top_k or min_p do that: sample without them"
        )
    first, rest = size[tokens.index == 0], size[tokens.index > 0]
    if len(rest) and first.mean() > FIRST_OVER_REST * max(float(rest.mean()), allowed / FIRST_OVER_REST):
        return (
            f"the prompt: the first response token is off by {first.mean():.2g} on average, the others by "
            f"{rest.mean():.2g}. The prompt's tokens differ from those that were sampled after: the chat template, its "
            "generation prompt, a begin token, or text that was tokenised again"
        )
    return (
        "both sides compute the same on these tokens, so the sampler's log-probs are not those of this distribution: "
        "sampling options that the batch does not know, or a prompt or tokens that were changed after sampling"
    )


def of_options(names: Sequence[str], sampling: Mapping[str, Any]) -> str:
    """The cause where sampling options were proven to make the difference."""
    said = ", ".join(f"{name}={sampling[name]!r}" for name in names)
    return (
        f"{said} in the sampling options: the sampler's probabilities are those of the reshaped distribution, the "
        f"trainer's are not; drawn without, both agree. {WITHOUT}"
    )


def of_reshaped(options: Sequence[str]) -> str:
    """The cause where the batch says that its tokens were drawn so, and they cannot be drawn again to prove it."""
    return (
        f"the tokens were drawn with {', '.join(options)}: the sampler's probabilities are those of the reshaped "
        f"distribution, the trainer's are not. {WITHOUT}"
    )


def of_temperature(found: float, known: float) -> str:
    """The cause where another temperature makes both sides agree."""
    return (
        f"the temperature: the tokens were sampled at {found:g} and are scored at {known:g}. "
        f"batch.replace(temperature={found:g}), or sample at {known:g}"
    )


def of_prompt(said: str) -> str:
    """The cause where other prompts make both sides agree."""
    return (
        f"the prompts: those of the batch {said}; with that mended both sides agree. Build batches from "
        "`rollouts.batch(…)`, which keeps the prompts as they were sampled after"
    )


def of_numbers(weights: Weights) -> str:
    """The cause where only the version numbers differ."""
    held = ", ".join(f"v{v}" for v in weights.replica_versions)
    return (
        f"the replicas say {held} and the trainer v{weights.trainer_version}, though they compute the same: nothing "
        "was changed, or nothing that shows. session.sync_weights()"
    )


def _cut(tokens: Tokens, allowed: float) -> bool:
    """Whether all tokens look as if the tail of their distribution was cut off.

    The most probable token is always kept, and its probability is at least exp(-entropy): a token's log-prob rises by
    no more than the entropy.
    """
    raised = -tokens.gap
    bounded = (raised >= -allowed).all() and (raised <= tokens.entropy + allowed).all()
    return bool(bounded and (raised > allowed).sum() >= LEAST_CUT)


def _agree_at_first(sides: SideBySide, allowed: float) -> bool:
    """A single token attends to itself alone, whatever positions and attention are: other weights show there."""
    first = sides.gap[sides.position == 1]
    return bool(len(first) and (first <= allowed).all())


def _by_position(sides: SideBySide) -> str:
    """Mean difference in the first and the second half of the positions."""
    middle = float(np.median(sides.position))
    early, late = (sides.gap[pick].mean() for pick in (sides.position <= middle, sides.position > middle))
    return f"on average {early:.2g} up to position {middle:.0f}, {late:.2g} beyond"

"""The losses by name: what `session.train_step(batch, loss="grpo")` and `rb.rl.presets()` know."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlbench.errors import LossError, nearest
from rlbench.rl.clipped import bnpo, dapo, decoupled_ppo, dr_grpo, grpo, ppo
from rlbench.rl.combined import combined
from rlbench.rl.covariance import clip_cov, kl_cov
from rlbench.rl.distillation import gkd, sampled_kl
from rlbench.rl.policy import PolicyLoss, default_of
from rlbench.rl.preference import PreferenceLoss, dpo, ipo, kto, orpo, simpo
from rlbench.rl.reward import ScoreLoss, bradley_terry, hps, log_exp
from rlbench.rl.sequence import gmpo, gspo, luspo, vespo
from rlbench.rl.types import Loss
from rlbench.rl.weighted import cispo, cpgd, dppo_kl, dppo_tv, dro, gpg, importance_sampling, reinforce, sapo, sft

CLIPPED = (ppo, grpo, dapo, dr_grpo, bnpo, decoupled_ppo)
SEQUENCE = (gspo, luspo, gmpo, vespo)
WEIGHTED = (cispo, sapo, cpgd, reinforce, gpg, importance_sampling, dro, sft)
NAMED: dict[str, type[PolicyLoss]] = {
    kind.__name__: kind for kind in (*CLIPPED, *SEQUENCE, *WEIGHTED, clip_cov, kl_cov, dppo_tv, dppo_kl)
}
DISTILLATION: dict[str, type[PolicyLoss]] = {kind.__name__: kind for kind in (sampled_kl, gkd)}
"""Those of a teacher."""

PREFERENCE: dict[str, type[PreferenceLoss]] = {kind.__name__: kind for kind in (dpo, ipo, simpo, orpo, kto)}
"""Those of pairs and labels."""
REWARD: dict[str, type[ScoreLoss]] = {kind.__name__: kind for kind in (bradley_terry, log_exp, hps)}
"""Those of a reward model."""
KNOWN: dict[str, type[PolicyLoss] | type[PreferenceLoss]] = {**NAMED, **DISTILLATION, **PREFERENCE, **REWARD}


def resolve(loss: str | Loss | Mapping[str, Any]) -> Loss:
    """Return the loss value that a name stands for, with its defaults, or that several by name make; a callable is
    returned as it is."""
    if isinstance(loss, Mapping):
        return combined(loss, resolve)
    if isinstance(loss, str):
        if loss not in KNOWN:
            raise LossError(
                f"unknown loss {loss!r}{nearest(loss, KNOWN)}. Known: {', '.join(KNOWN)}; or pass a function "
                "(LossInputs) -> (per_token, metrics)."
            )
        return KNOWN[loss]()
    if isinstance(loss, type):
        raise LossError(f"the loss is the class {loss.__name__}; call it to get a loss: {loss.__name__}().")
    if not callable(loss):
        raise LossError(f"a loss is a name or (LossInputs) -> (per_token, metrics); got {type(loss).__name__}.")
    return loss


def check_sampled_as_trained(
    loss: Loss, name: str, reshaped_by: Sequence[str], reads_sampler: bool = False, sampled: bool = True
) -> None:
    """Refuse a loss that would weigh by log-probs of another distribution than the one that is trained, or by none.

    `reads_sampler` counts where it has no `needs_sampler`; `reshaped_by` lists the sampling options that did it;
    `sampled`: all trained tokens have a sampler's log-prob.
    """
    needs_sampler = getattr(loss, "needs_sampler", reads_sampler)
    if needs_sampler and not sampled:
        raise LossError(
            f"`{name}` weighs by the sampler's log-probs, and tokens of the batch have none: no policy sampled them. "
            'Take ratios to the trainer\'s own log-probs (anchor="old", mismatch=None), or loss="sft".'
        )
    if reshaped_by and needs_sampler:
        raise LossError(
            f"`{name}` weighs by the sampler's log-probs, and the tokens were drawn with {', '.join(reshaped_by)}: "
            "these are log-probs of the reshaped distribution, not of the policy, so its weights would measure the "
            "options. Sample without them, or take ratios to the trainer's own log-probs, which are exact "
            '(anchor="old", mismatch=None). A function that only looks at them says so: .needs_sampler = False.'
        )


class Preset(NamedTuple):
    """One row of the table; `fields` are those that other losses lack, or have another default for."""

    name: str
    aggregation: str
    paper: str
    fields: str
    what: str


class Presets(tuple[Preset, ...]):
    """The named losses; shows as a table."""

    def __repr__(self) -> str:
        """Aligned text; the one-line description below each row."""
        rows = [Preset(*Preset._fields), *self]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            name, aggregation, paper, *_ = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines += [f"{name}  {aggregation}  {paper}  {row.fields}".rstrip(), f"    {row.what}"]
        return "\n".join(lines)


def presets() -> Presets:
    """Return the named losses as a table: what each is, its paper, its aggregation, and its own fields."""
    shared = {field.name: default_of(field) for field in dataclasses.fields(PolicyLoss)}
    rows = []
    for name, kind in KNOWN.items():
        defaults = {field.name: default_of(field) for field in dataclasses.fields(kind)}
        aggregation = defaults.pop("aggregation", kind.aggregation)
        own = [f"{key}={value!r}" for key, value in defaults.items() if key not in shared or value != shared[key]]
        what = (inspect.getdoc(kind) or "").partition("\n")[0].rstrip(".")
        rows.append(Preset(name, str(aggregation), kind.paper, ", ".join(own), what))
    return Presets(rows)

"""The policy losses by name: what `session.train_step(batch, loss="grpo")` and `rb.rl.losses.presets()` know.

Each name is a frozen dataclass, called with `LossInputs`; the name alone stands for its defaults, the paper's.
"""

from __future__ import annotations

import dataclasses
import html
import inspect
from collections.abc import Sequence
from dataclasses import dataclass

from rlbench.errors import LossError, nearest
from rlbench.rl.clipped import bnpo, dapo, decoupled_ppo, dr_grpo, grpo, ppo
from rlbench.rl.covariance import clip_cov, kl_cov
from rlbench.rl.divergence import dppo_kl, dppo_tv
from rlbench.rl.policy import PolicyLoss, default_of
from rlbench.rl.sequence import gmpo, gspo, luspo, vespo
from rlbench.rl.types import Loss
from rlbench.rl.weighted import cispo, cpgd, dro, gpg, importance_sampling, reinforce, sapo

CLASSES: tuple[type[PolicyLoss], ...] = (
    ppo,
    grpo,
    dapo,
    dr_grpo,
    bnpo,
    decoupled_ppo,
    gspo,
    luspo,
    gmpo,
    vespo,
    cispo,
    sapo,
    cpgd,
    reinforce,
    gpg,
    importance_sampling,
    dro,
    clip_cov,
    kl_cov,
    dppo_tv,
    dppo_kl,
)

NAMED: dict[str, type[PolicyLoss]] = {kind.__name__: kind for kind in CLASSES}


def resolve(loss: str | Loss) -> Loss:
    """Return the loss value that a name stands for, with its defaults; a callable is returned as it is."""
    if isinstance(loss, str):
        if loss not in NAMED:
            raise LossError(
                f"unknown loss {loss!r}{nearest(loss, NAMED)}. Known: {', '.join(NAMED)}; or pass a function "
                "(LossInputs) -> (per_token, metrics)."
            )
        return NAMED[loss]()
    if isinstance(loss, type):
        raise LossError(f"the loss is the class {loss.__name__}; call it to get a loss: {loss.__name__}().")
    if not callable(loss):
        raise LossError(
            f"a loss is a name or a function (LossInputs) -> (per_token, metrics); got {type(loss).__name__}."
        )
    return loss


def check_sampled_as_trained(loss: Loss, name: str, reshaped_by: Sequence[str], reads_sampler: bool = False) -> None:
    """Refuse a loss that would weigh by log-probs of another distribution than the one that is trained.

    `needs_sampler` of the loss says whether it weighs so, `reads_sampler` counts where it does not say; `reshaped_by`
    lists the sampling options that made it another distribution, none: it is the same.
    """
    if reshaped_by and getattr(loss, "needs_sampler", reads_sampler):
        raise LossError(
            f"`{name}` weighs by the sampler's log-probs, and the tokens were drawn with {', '.join(reshaped_by)}: "
            "these are log-probs of the reshaped distribution, not of the policy, so its weights would measure the "
            "options. Sample without them, or take ratios to the trainer's own log-probs, which are exact "
            '(anchor="old", mismatch=None). A function that only looks at them says so: .needs_sampler = False.'
        )


def presets() -> Presets:
    """Return the named losses as a table: what each is, its paper, its aggregation, and its own fields."""
    return Presets(tuple(Preset.of(kind) for kind in CLASSES))


@dataclass(frozen=True)
class Preset:
    """One row of the table; `fields` are those that other losses lack, or have another default for."""

    name: str
    what: str
    paper: str
    aggregation: str
    fields: str

    @classmethod
    def of(cls, kind: type[PolicyLoss]) -> Preset:
        defaults = {field.name: default_of(field) for field in dataclasses.fields(kind)}
        shared = {field.name: default_of(field) for field in dataclasses.fields(PolicyLoss)}
        own = [
            f"{name}={value!r}"
            for name, value in defaults.items()
            if name != "aggregation" and (name not in shared or value != shared[name])
        ]
        what = (inspect.getdoc(kind) or "").partition("\n")[0].rstrip(".")
        return cls(kind.__name__, what, kind.paper, str(defaults["aggregation"]), ", ".join(own))


@dataclass(frozen=True, repr=False)
class Presets:
    """The named losses; shows as a table in a terminal and in a notebook."""

    rows: tuple[Preset, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        """Aligned text; the one-line description below each row."""
        heads = ("name", "aggregation", "paper", "fields")
        cells = [heads, *(tuple(getattr(row, head) for head in heads) for row in self.rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(heads) - 1)]

        def line(values: tuple[str, ...]) -> str:
            padded = [value.ljust(width) for value, width in zip(values, [*widths, 0], strict=True)]
            return "  ".join(padded).rstrip()

        shown = [line(cells[0])]
        for row, values in zip(self.rows, cells[1:], strict=True):
            shown += [line(values), f"    {row.what}"]
        return "\n".join(shown)

    def _repr_html_(self) -> str:
        heads = [field.name for field in dataclasses.fields(Preset)]
        lines = [" ".join(f"<th>{head}</th>" for head in heads)]
        for row in self.rows:
            lines.append(" ".join(f"<td>{html.escape(getattr(row, head))}</td>" for head in heads))
        rows = "\n".join(f"<tr>{line}</tr>" for line in lines)
        return f"<table cellpadding=4>{rows}</table>"

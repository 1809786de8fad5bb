"""The loss lab: several losses on one forward of one batch, compared token by token. Nothing is stepped."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data import TrainBatch
from rlbench.data.base.drawing import needed
from rlbench.data.record.metrics import Metrics
from rlbench.errors import LossError, Suggesting, nearest
from rlbench.session.lab.entry import Bound, LabEntry
from rlbench.session.lab.gradients import ParameterGradients
from rlbench.session.lab.inputs import Scored, flat
from rlbench.session.record.sources import hash_of
from rlbench.session.training.loss_check import one_thread

if TYPE_CHECKING:
    from rlbench.data import Rollouts
    from rlbench.notebook.charts.chart import Chart
    from rlbench.rl.lab import Coefficients
    from rlbench.rl.types import Loss

RATIOS = np.linspace(0.025, 3.0, 120)
"""The grid of the curves: 1 is on it, and the clip ranges in use lie well inside."""


@dataclass(frozen=True, eq=False)
class Curve:
    """`loss` and `coefficient` (2, R) of one token at `ratios` (R,), for an advantage of +1 and of −1."""

    ratios: np.ndarray
    loss: np.ndarray
    coefficient: np.ndarray


@dataclass(frozen=True, eq=False, repr=False)
class LossLab(Suggesting):
    """Losses on one batch. A value: `also` and `sweep` give new labs, without a forward.

    Attributes:
        entries: what was found, by name, in the order given; `lab[name]` is one of them.
        failed: the errors of losses that could not be evaluated, by name.
        cosines: (K, K) float64, of every two coefficient vectors; NaN where one is 0 throughout.
        norm_ratios: (K, K) float64, norm of the row's over that of the column's.
        aggregation: what all were aggregated by, or None: each by its own.
        parameters: how the losses compare by the gradients they give the parameters, where that was asked for.
        tokenizer: whose pieces the view shows; "": numbers.
    """

    scored: Scored
    entries: Mapping[str, LabEntry]
    failed: Mapping[str, LossError]
    cosines: np.ndarray
    norm_ratios: np.ndarray
    aggregation: Any = None
    parameters: ParameterGradients | None = None
    tokenizer: str = ""
    bound: Bound | None = field(default=None, repr=False)

    @property
    def batch(self) -> TrainBatch:
        """The batch all losses were evaluated on, with its old log-probs."""
        return self.scored.batch

    def __getitem__(self, name: str) -> LabEntry:
        if name in self.failed:
            raise self.failed[name]
        if name not in self.entries:
            raise LossError(f"the lab has no loss {name!r}{nearest(name, self.entries)}. It has: {', '.join(self)}.")
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __repr__(self) -> str:
        without = f"; without numbers: {', '.join(self.failed)}" if self.failed else ""
        return f"LossLab({len(self.batch)} sequences: {', '.join(self) or 'no losses'}{without})"

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"bound": None}  # a session stays where it is

    def __str__(self) -> str:
        from rlbench.notebook.lab.view import lab_card

        return lab_card(self).text()

    # -- numbers

    def table(self) -> Any:
        """One row per loss, as a pandas DataFrame.

        Columns: `aggregation`, `value`, `coef_norm`, `clip_fraction`, `share_positive`, `share_negative` (of |coef|, by
        the advantage's sign), `zeros`, `cos`, `norm_ratio` and `signs_differ` to the first loss (shares of the trained
        tokens), `entropy_coef_norm`; where parameter gradients were asked for `grad_norm`, `grad_cos` and
        `grad_norm_ratio` to the first loss; then the losses' own metrics.
        """
        pandas = needed("pandas", "lab.table()")
        rows = {name: self._row(i, entry) for i, (name, entry) in enumerate(self.entries.items())}
        return pandas.DataFrame.from_dict(rows, orient="index")

    def by(self, what: str) -> Any:
        """Where the losses spend their coefficients, as a pandas DataFrame: a bucket a row, a loss a column.

        By "advantage" (its sign), "length" (of the response, in tokens) or "turn"; shares of each loss's sum |coef|,
        and in `trained tokens` of the tokens themselves.
        """
        pandas = needed("pandas", "lab.by()")
        known = self.scored.buckets
        if what not in known:
            raise LossError(f"by({what!r}){nearest(what, known)}: wanted one of {', '.join(map(repr, known))}.")
        columns = {name: entry.shares[what] for name, entry in self.entries.items()}
        return pandas.DataFrame({"trained tokens": known[what].tokens, **columns}, index=list(known[what].labels))

    def signs_differ(self, name: str, other: str | None = None) -> np.ndarray:
        """Tokens that one loss makes more likely and the other (the lab's first) less; flat bool."""
        one, two = self[name].coefficients, self[other or next(iter(self))].coefficients
        return np.sign(one) * np.sign(two) < 0

    def disagreement(self, name: str) -> float:
        """Share of the trained tokens on which the loss and the lab's first pull in opposite directions."""
        return float(self.signs_differ(name)[self.batch.mask].mean())

    def _row(self, i: int, entry: LabEntry) -> dict[str, Any]:
        positive, negative, _ = entry.shares["advantage"]
        on_entropy, found = entry.entropy_coefficients, self.parameters
        row = {
            "aggregation": entry.aggregation,
            "value": entry.value,
            "coef_norm": entry.norm,
            "clip_fraction": entry.clip_fraction,
            "share_positive": positive,
            "share_negative": negative,
            "zeros": entry.zeros,
            "cos": self.cosines[i, 0],
            "norm_ratio": self.norm_ratios[i, 0],
            "signs_differ": self.disagreement(entry.name),
            "entropy_coef_norm": None if on_entropy is None else float(np.linalg.norm(on_entropy)),
        }
        if found is not None and entry.name in found.losses:
            at = found.losses.index(entry.name)
            row["grad_norm"] = float(found.norms[at])
            row["grad_cos"], row["grad_norm_ratio"] = float(found.cosines[at, 0]), float(found.norm_ratios[at, 0])
        return row | {f"metrics/{key}": value for key, value in entry.metrics.items() if key != "clip_fraction"}

    # -- tokens

    def channels(self) -> dict[str, np.ndarray]:
        """Coefficients as channels of the rollout viewer, flat in the batch's order.

        `coef NAME` of every loss, and `differs NAME`: 1 where its sign is not that of the first loss. For rollouts in
        the batch's own order: `rollouts.with_channels(**lab.channels())`; for others `lab.on(rollouts)`.
        """
        found = {f"coef {name}": entry.coefficients for name, entry in self.entries.items()}
        for name in list(self)[1:]:
            found[f"differs {name}"] = self.signs_differ(name).astype(np.float32)
        return found

    def on(self, rollouts: Rollouts) -> Rollouts:
        """The rollouts the batch was made from, with `channels()`, advantage, log-probs, ratio and entropy."""
        tokens = {"logprobs": self.scored.logprobs, "entropy": self.scored.entropy, **self.channels()}
        return rollouts.with_batch(self.batch, Metrics({}, tokens))

    # -- what if

    def curves(self) -> tuple[dict[str, Curve], dict[str, LossError]]:
        """What each loss makes of one token at other ratios new/old, and the errors of those that fail on one token.

        The token stands alone, and has the median old log-prob and entropy of the batch; see
        `rlbench.rl.lab.ratio_curve`. What a loss prints here, once per point of the grid, is dropped.
        """
        import torch

        from rlbench.rl.lab import ratio_curve

        found: dict[str, Curve] = {}
        failed: dict[str, LossError] = {}
        grid = torch.as_tensor(RATIOS.astype(np.float32))
        old, entropy = self.typical_token()
        for name, entry in self.entries.items():
            try:
                with one_thread(), contextlib.redirect_stdout(io.StringIO()):
                    curve = ratio_curve(entry.loss, grid, old_logprob=old, entropy=entropy, name=name)
            except LossError as error:
                failed[name] = error
            else:
                found[name] = Curve(grid.numpy(), curve.loss.numpy(), curve.coefficient.numpy())
        return found, failed

    def typical_token(self) -> tuple[float, float]:
        """Old log-prob and entropy of the token in the curves, in nats: the batch's medians.

        A token whose probability times the highest ratio were above 1 is none: then a less likely one.
        """
        mask, old = self.batch.mask, self.batch.old_logprobs
        assert old is not None  # scored() fills it in
        likely = -float(np.log(RATIOS.max())) - 0.1
        return min(float(np.median(old[mask])), likely), float(np.median(self.scored.entropy[mask]))

    def what_if(self) -> Chart:
        """Draw `curves`: coefficient and loss of one token against its ratio, for A = +1 and A = −1."""
        from rlbench.notebook.lab.view import what_if_chart

        return what_if_chart(self, *self.curves(), losses_too=True)

    # -- other losses on the same forward

    def also(self, losses: Mapping[str, Any]) -> LossLab:
        """A lab with more losses on the same batch and log-probs; one of the same name is replaced."""
        return self.of({name: entry.given for name, entry in self.entries.items()} | dict(losses))

    def sweep(self, name: str, field: str, values: Iterable[Any]) -> LossLab:
        """A lab of one loss of this lab, first as it is, then with `field` at each of `values`.

        `field`: of a loss value (`"clip_high"`), or a parameter of a function. Values it refuses are in `.failed`.
        """
        from rlbench.rl.lab import variants

        made, refused = variants(self[name].loss, field, values)
        return self.of({name: self[name].given, **made}, refused)

    def of(self, losses: Mapping[str, Any], failed: Mapping[str, LossError] | None = None) -> LossLab:
        """A lab of these losses on the same batch and log-probs; `failed` did before."""
        return make_lab(self.scored, losses, self.aggregation, failed, self.bound, self.tokenizer)


# -- making one


def named_losses(losses: Mapping[str, Any] | Iterable[Any]) -> dict[str, Any]:
    """Return losses by name; those of a list, or one alone, are called by their own."""
    if isinstance(losses, Mapping):
        named = dict(losses)
    else:
        given = [losses] if isinstance(losses, str) or callable(losses) else list(losses)
        named = {one if isinstance(one, str) else getattr(one, "__name__", None) or repr(one): one for one in given}
        if len(named) < len(given):
            raise LossError("two losses have the same name; give a dict: {name: loss, …}.")
    if not named:
        raise LossError('no losses to compare; give {name: loss, …}, as in {"grpo": "grpo", "mine": my_loss}.')
    return named


def make_lab(
    scored: Scored,
    losses: Mapping[str, Any],
    aggregation: Any = None,
    failed: Mapping[str, LossError] | None = None,
    bound: Bound | None = None,
    tokenizer: str = "",
) -> LossLab:
    """Evaluate losses, then compare them; `failed` did before, `bound` is where a step can be taken."""
    from rlbench.rl import resolve
    from rlbench.rl.lab import coefficients_of_all, cosines, norm_ratios

    resolved: dict[str, Loss] = {}
    failed = dict(failed or {})
    for name, loss in losses.items():
        try:
            resolved[name] = resolve(loss)
        except LossError as error:
            failed[name] = error
    with one_thread():
        found, wrong = coefficients_of_all(resolved, scored.inputs, aggregation)
        entries = {name: _entry(name, resolved[name], losses[name], one, scored, bound) for name, one in found.items()}
        vectors = [one.logprobs for one in found.values()]
        between, ratios = (
            compared(vectors).numpy() if vectors else np.zeros((0, 0)) for compared in (cosines, norm_ratios)
        )
    return LossLab(scored, entries, failed | wrong, between, ratios, aggregation, tokenizer=tokenizer, bound=bound)


def _entry(name: str, loss: Loss, given: Any, found: Coefficients, scored: Scored, bound: Bound | None) -> LabEntry:
    import torch

    from rlbench.rl.lab import shares

    batch = scored.batch
    coefficient = flat(found.logprobs, batch)
    values, trained = torch.from_numpy(coefficient), torch.from_numpy(batch.mask)
    return LabEntry(
        name=name,
        loss=loss,
        given=given,
        hash=hash_of(loss),
        aggregation=found.aggregation,
        value=found.value,
        coefficients=coefficient,
        entropy_coefficients=None if found.entropy is None else flat(found.entropy, batch),
        per_token=flat(found.per_token, batch),
        metrics=found.metrics,
        shares={
            what: shares(values, torch.from_numpy(one.of_token), trained, len(one.labels)).numpy()
            for what, one in scored.buckets.items()
        },
        zeros=float((coefficient[batch.mask] == 0).mean()),
        leaks=found.leaks,
        bound=bound,
    )

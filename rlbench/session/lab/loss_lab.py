"""The loss lab: several losses on one forward of one batch, compared token by token. Nothing is stepped.

    lab = loss_lab(batch, metrics.tokens, {"grpo": "grpo", "mine": mine})
    lab                                   # value, |coef|, clip, share by sign, cosine; coefficient against ratio
    lab.by("length"), lab.table()
    lab.sweep("mine", "beta", [0.01, 0.1, 1.0])
    lab.on(rollouts)                      # each loss's coefficients as colours of the tokens

It starts where the log-probs of the batch are known: `loss_lab` takes them per token, as `Metrics.tokens` and a forward
of the ranks give them, and needs no engine.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data import TrainBatch
from rlbench.data.base.optional import needed
from rlbench.data.record.metrics import Metrics
from rlbench.errors import LossError, Suggesting, nearest
from rlbench.session.lab.entry import Bound, Curve, LabEntry
from rlbench.session.lab.gradients import ParameterGradients
from rlbench.session.lab.inputs import Buckets, Scored, scored
from rlbench.session.training.one_thread import one_thread

if TYPE_CHECKING:
    from rlbench.data import Rollouts
    from rlbench.notebook.charts.chart import Chart
    from rlbench.rl.lab import Coefficients
    from rlbench.rl.types import Loss

RATIOS = np.linspace(0.025, 3.0, 120)
"""The grid of the curves: 1 is on it, and the clip ranges in use lie well inside."""


@dataclass(frozen=True, eq=False, repr=False)
class LossLab(Suggesting):
    """Losses on one batch; what `loss_lab` gives. A value: `also` and `sweep` give new labs, without a forward.

    Attributes:
        scored: the batch and its log-probs.
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

    def __contains__(self, name: object) -> bool:
        return name in self.entries

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

        Args:
            what: "advantage" (its sign), "length" (of the response, in tokens) or "turn".

        Returns:
            Shares of each loss's sum |coef|; `trained tokens` is the buckets' share of the tokens themselves.
        """
        pandas = needed("pandas", "lab.by()")
        buckets = self._buckets(what)
        columns = {name: entry.shares[what] for name, entry in self.entries.items()}
        return pandas.DataFrame({"trained tokens": buckets.tokens, **columns}, index=list(buckets.labels))

    def signs_differ(self, name: str, other: str | None = None) -> np.ndarray:
        """Tokens that one loss makes more likely and the other (the lab's first) less; flat bool."""
        one, two = self[name].coefficients, self[other or next(iter(self))].coefficients
        return np.sign(one) * np.sign(two) < 0

    def disagreement(self, name: str) -> float:
        """Share of the trained tokens on which the loss and the lab's first pull in opposite directions."""
        return float(self.signs_differ(name)[self.batch.mask].mean())

    def _row(self, i: int, entry: LabEntry) -> dict[str, Any]:
        positive, negative, _ = entry.shares["advantage"]
        on_entropy = entry.entropy_coefficients
        return {
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
            **self._gradient_row(entry.name),
            **{f"metrics/{key}": value for key, value in entry.metrics.items() if key != "clip_fraction"},
        }

    def _gradient_row(self, name: str) -> dict[str, float]:
        found = self.parameters
        if found is None or name not in found.losses:
            return {}
        i = found.of(name)
        return {
            "grad_norm": float(found.norms[i]),
            "grad_cos": float(found.cosines[i, 0]),
            "grad_norm_ratio": float(found.norm_ratios[i, 0]),
        }

    def _buckets(self, what: str) -> Buckets:
        if what not in self.scored.buckets:
            known = list(self.scored.buckets)
            raise LossError(f"by({what!r}){nearest(what, known)}: wanted one of {', '.join(map(repr, known))}.")
        return self.scored.buckets[what]

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
        """The rollouts the batch was made from, with `channels()`, advantage, log-probs, ratio and entropy per token.

        Raises:
            DataError: the batch was made from other rollouts.
        """
        tokens = {"logprobs": self.scored.logprobs, "entropy": self.scored.entropy, **self.channels()}
        return rollouts.with_batch(self.batch, Metrics({}, tokens))

    # -- what if

    def curves(self, ratios: np.ndarray = RATIOS) -> tuple[dict[str, Curve], dict[str, LossError]]:
        """What each loss makes of one token at other ratios new/old, and the errors of those that fail on one token.

        The token stands alone, and has the median old log-prob and entropy of the batch; see
        `rlbench.rl.lab.ratio_curve`. What a loss prints here, once per point of the grid, is dropped.
        """
        import torch

        from rlbench.rl.lab import ratio_curve

        found: dict[str, Curve] = {}
        failed: dict[str, LossError] = {}
        grid = torch.as_tensor(np.asarray(ratios, np.float32))
        old, entropy = self.typical_token(float(np.max(ratios)))
        for name, entry in self.entries.items():
            try:
                with one_thread(), contextlib.redirect_stdout(io.StringIO()):
                    curve = ratio_curve(entry.loss, grid, old_logprob=old, entropy=entropy, name=name)
            except LossError as error:
                failed[name] = error
            else:
                found[name] = Curve(grid.numpy(), curve.loss.numpy(), curve.coefficient.numpy())
        return found, failed

    def typical_token(self, highest_ratio: float) -> tuple[float, float]:
        """Old log-prob and entropy of the token in the curves, in nats: the batch's medians.

        A token whose probability times the highest ratio were above 1 is none: then a less likely one.
        """
        mask, old = self.batch.mask, self.batch.old_logprobs
        assert old is not None  # scored() fills it in
        likely = -float(np.log(max(highest_ratio, 1.0))) - 0.1
        return min(float(np.median(old[mask])), likely), float(np.median(self.scored.entropy[mask]))

    @cached_property
    def shown_curves(self) -> tuple[dict[str, Curve], dict[str, LossError]]:
        """`curves()` on the standard grid."""
        return self.curves()

    def what_if(self, ratios: np.ndarray | None = None) -> Chart:
        """Draw `curves`: coefficient and loss of one token against its ratio, for A = +1 and A = −1."""
        from rlbench.notebook.lab.view import what_if_chart

        grid = RATIOS if ratios is None else np.asarray(ratios, np.float64)
        return what_if_chart(self, *(self.shown_curves if ratios is None else self.curves(grid)), losses_too=True)

    # -- other losses on the same forward

    def also(self, losses: Mapping[str, Any], hashes: Mapping[str, str] | None = None) -> LossLab:
        """A lab with more losses on the same batch and log-probs; one of the same name is replaced."""
        held = {name: entry.as_given for name, entry in self.entries.items()}
        known = {name: entry.hash for name, entry in self.entries.items() if name not in losses}
        return self._derived(held | dict(losses), known | dict(hashes or {}))

    def sweep(self, name: str, field: str, values: Iterable[Any]) -> LossLab:
        """A lab of one loss of this lab, first as it is, then with `field` at each of `values`.

        Args:
            name: the loss.
            field: a field of a loss value (`"clip_high"`), or a parameter of a function.
            values: what it is set to. One that the loss refuses is in `.failed`, with its reason.

        Raises:
            LossError: no such loss, field or parameter.
        """
        from rlbench.rl.lab import variants

        made, refused = variants(self[name].loss, field, values)
        return self._derived({name: self[name].as_given, **made}, {name: self[name].hash}, refused)

    def _derived(
        self, losses: Mapping[str, Any], hashes: Mapping[str, str], refused: Mapping[str, LossError] | None = None
    ) -> LossLab:
        return make_lab(self.scored, losses, self.aggregation, hashes, refused, self.bound, self.tokenizer)


# -- making one


def loss_lab(
    batch: TrainBatch,
    tokens: Mapping[str, np.ndarray],
    losses: Mapping[str, Any] | Iterable[Any],
    *,
    aggregation: Any = None,
    turns: np.ndarray | None = None,
    hashes: Mapping[str, str] | None = None,
) -> LossLab:
    """Compare losses on a batch whose log-probs are known.

    Args:
        batch: the whole batch, as a training step would take it.
        tokens: of one forward, flat in the order of `batch.responses.values`, as `metrics.tokens` has them: `logprobs`,
            `entropy` and, where known, `old_logprobs` (else the batch's, else `logprobs`: the first step on a batch,
            every ratio is 1; give `batch.sampler_logprobs` to measure ratios to the sampler instead) and
            `ref_logprobs` (else the batch's).
        losses: by name: a standard loss's name, a loss value, or a function; or a list of these, called by their own
            names.
        aggregation: one for all; None: each by its own, as a training step does.
        turns: the turn of each token, from 0, flat; None: trained tokens in a row are one turn.
        hashes: what identifies each loss in the records, by name.

    Returns:
        A lab. A loss that raised, or gave no loss, is in `.failed`; the others are there.

    Raises:
        DataError: arrays that are not this batch's, or not finite.
        LossError: no losses at all, or an aggregation that is none.
    """
    from rlbench.rl import Aggregation

    if aggregation is not None:
        Aggregation.of(aggregation)
    named = named_losses(losses)
    return make_lab(scored(batch, tokens, turns), named, aggregation, dict(hashes or {}))


def named_losses(losses: Mapping[str, Any] | Iterable[Any]) -> dict[str, Any]:
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
    aggregation: Any,
    hashes: Mapping[str, str],
    refused: Mapping[str, LossError] | None = None,
    bound: Bound | None = None,
    tokenizer: str = "",
) -> LossLab:
    """Evaluate, then compare; `refused` failed before, `bound` is where a step can be taken."""
    from rlbench.rl import resolve
    from rlbench.rl.lab import coefficients_of_all, cosines, norm_ratios

    resolved: dict[str, Loss] = {}
    failed = dict(refused or {})
    for name, loss in losses.items():
        try:
            resolved[name] = resolve(loss)
        except LossError as error:
            failed[name] = error
    with one_thread():
        found, wrong = coefficients_of_all(resolved, scored.inputs, aggregation)
        entries = {
            name: _entry(name, resolved[name], one, scored, hashes.get(name, ""), losses[name], bound)
            for name, one in found.items()
        }
        vectors = [one.logprobs for one in found.values()]
        none = np.zeros((0, 0))
        between = cosines(vectors).numpy() if vectors else none
        ratios = norm_ratios(vectors).numpy() if vectors else none
    return LossLab(scored, entries, failed | wrong, between, ratios, aggregation, tokenizer=tokenizer, bound=bound)


def _entry(
    name: str, loss: Loss, found: Coefficients, scored: Scored, hash: str, given: Any, bound: Bound | None
) -> LabEntry:
    import torch

    from rlbench.rl.lab import shares

    coefficient, mask = scored.flat(found.logprobs), scored.batch.mask
    flat, trained = torch.from_numpy(coefficient), torch.from_numpy(mask)
    return LabEntry(
        name=name,
        loss=loss,
        hash=hash,
        aggregation=found.aggregation,
        value=found.value,
        coefficients=coefficient,
        entropy_coefficients=None if found.entropy is None else scored.flat(found.entropy),
        per_token=scored.flat(found.per_token),
        metrics=found.metrics,
        shares={
            what: shares(flat, torch.from_numpy(one.of_token), trained, len(one.labels)).numpy()
            for what, one in scored.buckets.items()
        },
        zeros=float((coefficient[mask] == 0).mean()),
        leaks=found.leaks,
        given=given,
        bound=bound,
    )

"""What a loss would do to each token, before any step: its coefficients, and how those of several losses compare.

The gradient of a policy loss L with respect to the weights is a sum over tokens of c ∂log p/∂weights, with c =
∂L/∂logprobs (and, for a loss with an entropy bonus, ∂L/∂entropy beside it). So once the log-probs of a batch are known
no model is needed: a step makes a token with negative c more likely, one with positive c less. Losses are evaluated as
a training step does it: planned over the whole batch, weighted by their aggregation, checked for shape and NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlbench.errors import LossError, nearest
from rlbench.rl.aggregate import Aggregation, BatchTotals
from rlbench.rl.policy import PolicyLoss, masked
from rlbench.rl.types import Loss, LossInputs, TeacherTokens, needs_of
from rlbench.traces import user_error
from rlbench.user_code import name_of, user_code


@dataclass(frozen=True, eq=False)
class Coefficients:
    """What one loss says of a batch; tensors (S, T), exactly 0 where `mask` is False, metrics as means over the tokens.

    `value` is the loss aggregated by `aggregation`, `logprobs` ∂L/∂logprobs, `entropy` ∂L/∂entropy (None: does not
    depend on it), `per_token` not aggregated. `leaks`: untrained tokens get a gradient, so that a step would train on
    tool output; they are 0 in `logprobs` all the same.
    """

    value: float
    logprobs: Tensor
    entropy: Tensor | None
    per_token: Tensor
    metrics: dict[str, float]
    aggregation: str
    leaks: bool


@dataclass(frozen=True, eq=False)
class RatioCurve:
    """One token, alone, at other ratios new/old: what the loss makes of it.

    `ratios` (R,), `advantages` (A,); `loss` and `coefficient` (A, R), not aggregated: the token weighs 1.
    """

    ratios: Tensor
    advantages: tuple[float, ...]
    loss: Tensor
    coefficient: Tensor


def coefficients(
    loss: Loss,
    inputs: LossInputs,
    aggregation: str | Aggregation | None = None,
    *,
    name: str = "",
    totals: BatchTotals | None = None,
) -> Coefficients:
    """Return value and per-token coefficients of `loss`, a value or any function, on a whole batch (S, T).

    `aggregation` None: the loss's own, else "token-mean"; `totals` None: the step is `inputs`.
    """
    called = name or name_of(loss)
    aggregation = Aggregation.of_loss(loss, aggregation)
    size = totals or BatchTotals.of(inputs.mask, inputs.group)
    weights = aggregation.weights(inputs.mask, size, inputs.group).to(inputs.logprobs.dtype)
    x = _leaves(inputs)
    with torch.enable_grad():  # whatever the caller's mode
        per_token, metrics = _called(loss, x, called)
        total = (masked(per_token, x.mask) * weights).sum()
    on_logprobs, on_entropy = _gradients(total, x, called)
    astray = on_logprobs[~x.mask]
    return Coefficients(
        value=float(total.detach()),
        logprobs=masked(on_logprobs, x.mask),
        entropy=None if on_entropy is None else masked(on_entropy, x.mask),
        per_token=masked(per_token.detach(), x.mask),
        metrics=_measured(metrics, x.mask, called),
        aggregation=aggregation.mode,
        leaks=bool(((astray != 0) & astray.isfinite()).any()),
    )


def coefficients_of_all(
    losses: Mapping[str, Loss], inputs: LossInputs, aggregation: str | Aggregation | None = None
) -> tuple[dict[str, Coefficients], dict[str, LossError]]:
    """Return `coefficients` of every loss that could be evaluated, and the errors of the others; both by name."""
    good: dict[str, Coefficients] = {}
    failed: dict[str, LossError] = {}
    for name, loss in losses.items():
        try:
            good[name] = coefficients(loss, inputs, aggregation, name=name)
        except LossError as error:
            failed[name] = error
    return good, failed


def ratio_curve(
    loss: Loss,
    ratios: Tensor,
    advantages: Sequence[float] = (1.0, -1.0),
    *,
    old_logprob: float = -3.0,
    entropy: float = 1.0,
    name: str = "",
) -> RatioCurve:
    """Return what `loss` makes of one token as a function of its ratio new/old: "what if the ratio were r".

    The token is a sequence and a step of its own, of log-prob `old_logprob` (at most -log(max ratio)) and `entropy` in
    nats; sampler and reference agree with the old policy. One curve over `ratios` (R,) for each of `advantages`.
    """
    if needed := needs_of(loss):
        raise LossError(f"`{name or name_of(loss)}` needs {', '.join(needed)}, which one token alone has not.")
    if getattr(loss, "needs_pairs", False):
        raise LossError(f"`{name or name_of(loss)}` compares two responses, and one token is one of one.")
    if not ratios.numel() or not bool((ratios > 0).all()) or not math.isfinite(old_logprob):
        raise LossError(f"old_logprob={old_logprob!r} with {ratios.numel()} ratios: wanted one or more, above 0.")
    if old_logprob + math.log(float(ratios.max())) > 1e-6:
        raise LossError(
            f"old_logprob={old_logprob!r} with ratios from {float(ratios.min()):g} to {float(ratios.max()):g}: wanted "
            "ratios above 0 that leave the token a probability of at most 1."
        )
    called = name or name_of(loss)
    signs = torch.tensor(list(advantages), dtype=ratios.dtype)[:, None, None].expand(-1, len(ratios), 1)
    old = torch.full((len(signs) * len(ratios), 1), old_logprob, dtype=ratios.dtype)
    x = LossInputs(
        logprobs=old + ratios.log().repeat(len(signs))[:, None],
        old_logprobs=old,
        sampler_logprobs=old,
        ref_logprobs=old,
        advantages=signs.reshape(-1, 1),
        mask=torch.ones_like(old, dtype=torch.bool),
        entropy=torch.full_like(old, entropy),
        group=torch.arange(len(old)),
    )
    # Sequences of our losses do not see each other; what a function of the user's does is not known: one by one.
    apart = isinstance(loss, PolicyLoss) and not loss.needs_plan
    parts = [x] if apart else [_row(x, i) for i in range(len(old))]
    found = [coefficients(loss, part, "token-sum", name=called) for part in parts]
    shape = (len(signs), len(ratios))
    return RatioCurve(
        ratios,
        tuple(map(float, advantages)),
        torch.cat([f.per_token for f in found]).reshape(shape),
        torch.cat([f.logprobs for f in found]).reshape(shape),
    )


def variants(loss: Loss, field: str, values: Iterable[Any]) -> tuple[dict[str, Loss], dict[str, LossError]]:
    """Return the loss with `field` (or parameter) set to each of `values`, and the errors of values it refuses."""
    make = _maker(loss, field)
    made: dict[str, Loss] = {}
    failed: dict[str, LossError] = {}
    for value in values:
        name = f"{field}={value!r}"
        if name in made or name in failed:
            raise LossError(f"sweep: {name} is given twice.")
        try:
            with user_code():
                made[name] = make(value)
        except LossError as error:
            failed[name] = error
        except Exception as error:  # what the constructor of a user's loss raises
            failed[name] = user_error(LossError, f"`{name}` raised {type(error).__name__}: {error}", error)
    return made, failed


def cosines(vectors: Sequence[Tensor]) -> Tensor:
    """Return the cosine of every two coefficient vectors, (K, K) float64; NaN where one is 0 throughout."""
    flat = torch.stack([vector.double().flatten() for vector in vectors])
    norms = flat.norm(dim=1)
    return (flat @ flat.T / (norms[:, None] * norms)).clamp(-1.0, 1.0)  # 0/0 is NaN, and stays it


def norm_ratios(vectors: Sequence[Tensor]) -> Tensor:
    """Return |row's vector| / |column's vector|, (K, K) float64; infinite or NaN where the column's is 0."""
    norms = torch.stack([vector.double().norm() for vector in vectors])
    return norms[:, None] / norms


def shares(coefficient: Tensor, labels: Tensor, mask: Tensor, count: int) -> Tensor:
    """Return each label's share of sum |c| over the trained tokens, (count,) float64; zeros if all are 0."""
    weight = coefficient[mask].abs().double()
    found = torch.zeros(count, dtype=torch.float64).index_add_(0, labels[mask].to(torch.int64), weight)
    return found / found.sum() if bool(found.sum() > 0) else found


def turns_of(mask: Tensor) -> Tensor:
    """Return the turn of each trained token, (S, T) int64 from 0: trained tokens in a row are one turn."""
    before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    return ((mask & ~before).cumsum(1) - 1).clamp(min=0)


def _leaves(inputs: LossInputs) -> LossInputs:
    """Copy the inputs, with a gradient on what the model gave alone: a loss that writes into them harms no other."""
    copied: dict[str, Any] = {name: value.detach().clone() for name, value in _tensors(inputs).items()}
    if inputs.teacher is not None:
        said = {name: value.detach().clone() for name, value in _tensors(inputs.teacher).items()}
        copied["teacher"] = dataclasses.replace(inputs.teacher, **said)
    fresh = dataclasses.replace(inputs, channels=dict(inputs.channels), **copied)
    for leaf in sources_of_gradient(fresh):
        leaf.requires_grad_()
    return fresh


def sources_of_gradient(x: LossInputs) -> list[Tensor]:
    """Return what of a loss's inputs comes from the model, and carries the gradient; log-probs and entropy first. Of a
    reward model the scores alone."""
    if x.scores is not None:
        return [x.scores] if x.head_scores is None else [x.scores, x.head_scores]
    of_teacher = None if x.teacher is None else x.teacher.policy_logprobs
    given = (x.logprobs, x.entropy, x.hidden_states, x.logits, of_teacher)
    return [one for one in given if one is not None]


def _tensors(x: LossInputs | TeacherTokens) -> dict[str, Tensor]:
    return {name: value for name, value in vars(x).items() if isinstance(value, Tensor)}


def _called(loss: Loss, x: LossInputs, name: str) -> tuple[Tensor, dict[str, Any]]:
    """Plan and call the loss; check what it returns."""
    try:
        if getattr(loss, "needs_plan", False) and not x.planned:
            x = dataclasses.replace(x, channels={**x.channels, **_planned(loss, x, name)})
        with user_code():
            returned = loss(x)
    except LossError:
        raise
    except Exception as error:  # a user's code
        raise user_error(LossError, f"`{name}` raised {type(error).__name__}: {error}", error) from None
    shape = tuple(x.mask.shape)
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)):
        raise LossError(f"`{name}` gave {_kind(returned)}, wanted (per_token, metrics): a tensor {shape} and a dict.")
    per_token, metrics = returned
    if not isinstance(per_token, Tensor) or tuple(per_token.shape) != shape:
        raise LossError(f"`{name}` gave per-token shape {_kind(per_token)}, wanted {shape}: one value per token.")
    _check_finite(f"`{name}`", per_token, x.mask)
    return per_token, metrics


def _kind(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _check_finite(what: str, values: Tensor, mask: Tensor) -> None:
    bad = int((~torch.isfinite(values) & mask).sum())
    if bad:
        raise LossError(
            f"{what} is not finite on {bad} of {int(mask.sum())} trained tokens; look for log or division of zero, or "
            "exp of a large ratio."
        )


def _planned(loss: Any, x: LossInputs, name: str) -> dict[str, Tensor]:
    """Return the loss's plan of the whole batch, made without gradient as in a training step."""
    with torch.no_grad():
        still = dataclasses.replace(x, logprobs=x.logprobs.detach(), entropy=x.entropy.detach())
        channels = loss.plan(still)
    if not isinstance(channels, dict) or any(_kind(value) != str(tuple(x.mask.shape)) for value in channels.values()):
        raise LossError(f"the plan of `{name}` must be a dict of tensors {tuple(x.mask.shape)}, (sequences, tokens).")
    return channels


def _gradients(total: Tensor, x: LossInputs, name: str) -> tuple[Tensor, Tensor | None]:
    """Return the gradients by log-probs and entropy, checked on the trained tokens."""
    on_logprobs: Tensor | None = None
    on_entropy: Tensor | None = None
    others: list[Tensor | None] = []
    try:
        if total.requires_grad:
            on_logprobs, on_entropy, *others = torch.autograd.grad(total, sources_of_gradient(x), allow_unused=True)
    except RuntimeError as error:  # what autograd refuses, as a tensor that was written over
        raise LossError(f"the gradient of `{name}` cannot be computed: {error}") from error
    if on_logprobs is None and any(other is not None for other in others):
        on_logprobs = torch.zeros_like(x.logprobs)  # the sampled token's alone: of the others, parameters tell
    if on_logprobs is None:
        raise LossError(f"`{name}` gives the log-probs no gradient (did it detach them, or use old_logprobs alone?).")
    _check_finite(f"the gradient of `{name}` with respect to the log-probs", on_logprobs, x.mask)
    if on_entropy is not None:
        _check_finite(f"the gradient of `{name}` with respect to the entropy", on_entropy, x.mask)
    return on_logprobs, on_entropy


def _measured(metrics: Mapping[str, Any], mask: Tensor, name: str) -> dict[str, float]:
    """Return a loss's metrics as numbers."""
    numbers: dict[str, float] = {}
    for key, value in metrics.items():
        if isinstance(value, Tensor) and value.shape == mask.shape:
            numbers[key] = float(value.detach()[mask].double().mean())
        elif isinstance(value, Tensor) and value.shape == (len(mask), 1):
            numbers[key] = float(value.detach()[mask.any(dim=1)].double().nanmean())
        elif isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
            numbers[key] = float(value)
        else:
            raise LossError(
                f"`{name}`: metric {key!r} is {_kind(value)}; wanted one number, {tuple(mask.shape)} or "
                f"{(len(mask), 1)}."
            )
    return numbers


def _row(x: LossInputs, i: int) -> LossInputs:
    """Return one sequence alone."""
    return dataclasses.replace(x, **{name: value[i : i + 1] for name, value in _tensors(x).items()})


def _maker(loss: Loss, field: str) -> Callable[[Any], Loss]:
    """Return a function that makes the loss with another value of `field`."""
    if dataclasses.is_dataclass(loss):
        known = [f.name for f in dataclasses.fields(loss) if f.init]
        if field in known:
            return lambda value: dataclasses.replace(loss, **{field: value})  # type: ignore[type-var]
    else:
        parameters = list(inspect.signature(loss).parameters.values())[1:]
        known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if field in known:
            # keep what a loss may declare (`aggregation`, `needs_plan`, …)
            return lambda value: functools.update_wrapper(functools.partial(loss, **{field: value}), loss)
    have = ", ".join(known) or "none: give the function a parameter, as in def loss(inputs, beta=0.1)"
    raise LossError(f"`{name_of(loss)}` has no {field!r} to sweep over{nearest(field, known)}. It has: {have}.")

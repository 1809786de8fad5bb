"""What a loss would do to each token, before any step: its coefficients, and how those of several losses compare.

The gradient of a policy loss L with respect to the weights is a sum over tokens of c ∂log p/∂weights, with

    c = ∂L/∂logprobs      (and, for a loss with an entropy bonus, ∂L/∂entropy beside it)

So once the log-probs of a batch are known, c says all that a loss does, token by token, and no model is needed to get
it: a step lowers L, a token with negative c becomes more likely, one with positive c less. Losses are evaluated as a
training step does it: planned over the whole batch, weighted by their aggregation, checked for shape and NaN.
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
from rlbench.rl.types import Loss, LossInputs
from rlbench.traces import user_error
from rlbench.user_code import user_code


@dataclass(frozen=True, eq=False)
class Coefficients:
    """What one loss says of a batch; the tensors are (S, T), exactly 0 where `mask` is False.

    Attributes:
        value: the loss, aggregated.
        logprobs: ∂L/∂logprobs.
        entropy: ∂L/∂entropy; None where the loss does not depend on it.
        per_token: the loss per token, not aggregated.
        metrics: the loss's own; a (S, T) one is its mean over the trained tokens.
        aggregation: the mode that `value` and the coefficients were aggregated by.
        leaks: whether untrained tokens get a gradient, which a loss must not give them: a step would train on tool
            output. They are 0 in `logprobs` all the same.
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


# -- one loss


def coefficients(
    loss: Loss,
    inputs: LossInputs,
    aggregation: str | Aggregation | None = None,
    *,
    name: str = "",
    totals: BatchTotals | None = None,
) -> Coefficients:
    """Return value and per-token coefficients of `loss`, a value or any function, on a whole batch (S, T).

    `aggregation` None: the loss's own, else "token-mean"; `totals` None: the step is `inputs`. A loss that fails, or
    returns what a training step would refuse, raises LossError with the line of the user's code.
    """
    called = name or str(getattr(loss, "__name__", "") or repr(loss))
    aggregation = Aggregation.of(aggregation or getattr(loss, "aggregation", None) or "token-mean")
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
    found: dict[str, Coefficients] = {}
    failed: dict[str, LossError] = {}
    for name, loss in losses.items():
        try:
            found[name] = coefficients(loss, inputs, aggregation, name=name)
        except LossError as error:
            failed[name] = error
    return found, failed


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
    nats; sampler and reference agree with the old policy, so that corrections weigh 1 and a KL penalty pulls back to
    ratio 1. One curve over `ratios` (R,) for each of `advantages`.
    """
    _check_ratios(ratios, old_logprob)
    called = name or str(getattr(loss, "__name__", "") or repr(loss))
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
    """Return the loss with `field` set to each of `values`, and the errors of values it refuses; by `field=value`.

    `field` is a dataclass field of a loss value, or a parameter of a loss function.
    """
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


# -- several losses


def cosines(vectors: Sequence[Tensor]) -> Tensor:
    """Return the cosine of every two coefficient vectors, (K, K) float64; NaN where one is 0 throughout."""
    flat = torch.stack([vector.double().flatten() for vector in vectors])
    norms = flat.norm(dim=1)
    return (flat @ flat.T / (norms[:, None] * norms)).clamp(-1.0, 1.0)  # 0/0 is NaN, and stays it


def norm_ratios(vectors: Sequence[Tensor]) -> Tensor:
    """Return |row's vector| / |column's vector|, (K, K) float64; infinite or NaN where the column's is 0."""
    norms = torch.stack([vector.double().norm() for vector in vectors])
    return norms[:, None] / norms


def signs_differ(one: Tensor, other: Tensor) -> Tensor:
    """Mark the tokens that one loss makes more likely and the other less; bool, False where either is 0."""
    return one.sign() * other.sign() < 0


def shares(coefficient: Tensor, labels: Tensor, mask: Tensor, count: int) -> Tensor:
    """Return each label's share of sum |c| over the trained tokens, (count,) float64; zeros if all are 0."""
    weight = coefficient[mask].abs().double()
    found = torch.zeros(count, dtype=torch.float64).index_add_(0, labels[mask].to(torch.int64), weight)
    return found / found.sum() if bool(found.sum() > 0) else found


def turns_of(mask: Tensor) -> Tensor:
    """Return the turn of each trained token, (S, T) int64 from 0: trained tokens in a row are one turn.

    What lies between them (tool output, a user's message) is untrained, and has the number of the turn before it.
    """
    before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    return ((mask & ~before).cumsum(1) - 1).clamp(min=0)


# -- steps of these


def _leaves(inputs: LossInputs) -> LossInputs:
    """Copy the inputs, with a gradient on log-probs and entropy alone: a loss that writes into them harms no other."""
    copied = {
        field.name: value.detach().clone()
        for field in dataclasses.fields(inputs)
        if isinstance(value := getattr(inputs, field.name), Tensor)
    }
    copied["logprobs"].requires_grad_()
    copied["entropy"].requires_grad_()
    return dataclasses.replace(inputs, channels=dict(inputs.channels), **copied)


def _called(loss: Loss, x: LossInputs, name: str) -> tuple[Tensor, dict[str, Any]]:
    """Plan and call the loss; check what it returns."""
    try:
        if getattr(loss, "needs_plan", False) and not x.channels:
            x = dataclasses.replace(x, channels=_planned(loss, x, name))
        with user_code():
            given = loss(x)
    except LossError:
        raise
    except Exception as error:  # a user's code
        raise user_error(LossError, f"`{name}` raised {type(error).__name__}: {error}", error) from None
    shape = tuple(x.mask.shape)
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], dict)):
        raise LossError(
            f"`{name}` gave {type(given).__name__}, wanted (per_token, metrics): a tensor {shape} and a dict."
        )
    per_token, metrics = given
    if not isinstance(per_token, Tensor) or tuple(per_token.shape) != shape:
        seen = tuple(per_token.shape) if isinstance(per_token, Tensor) else type(per_token).__name__
        raise LossError(
            f"`{name}` gave per-token shape {seen}, wanted {shape}, the shape of inputs.logprobs. Return one value "
            "per token; aggregation is done for you."
        )
    bad = int((~torch.isfinite(per_token) & x.mask).sum())
    if bad:
        raise LossError(
            f"`{name}` is not finite on {bad} of {int(x.mask.sum())} trained tokens; look for log or division of "
            "zero, or exp of a large ratio."
        )
    return per_token, metrics


def _planned(loss: Any, x: LossInputs, name: str) -> dict[str, Tensor]:
    """Return the loss's plan of the whole batch, made without gradient as in a training step."""
    with torch.no_grad():
        still = dataclasses.replace(x, logprobs=x.logprobs.detach(), entropy=x.entropy.detach())
        channels = loss.plan(still)
    shape = tuple(x.mask.shape)
    if not isinstance(channels, dict) or any(
        not isinstance(value, Tensor) or tuple(value.shape) != shape for value in channels.values()
    ):
        raise LossError(f"the plan of `{name}` must be a dict of tensors of shape {shape}, (sequences, tokens).")
    return channels


def _gradients(total: Tensor, x: LossInputs, name: str) -> tuple[Tensor, Tensor | None]:
    """Return the gradients by log-probs and entropy, checked on the trained tokens."""
    on_logprobs = on_entropy = None
    try:
        if total.requires_grad:
            on_logprobs, on_entropy = torch.autograd.grad(total, [x.logprobs, x.entropy], allow_unused=True)
    except RuntimeError as error:  # what autograd refuses, as a tensor that was written over
        raise LossError(f"the gradient of `{name}` cannot be computed: {error}") from error
    if on_logprobs is None:
        raise LossError(f"`{name}` gives the log-probs no gradient (did it detach them, or use old_logprobs alone?).")
    for gradient, of in ((on_logprobs, "log-probs"), (on_entropy, "entropy")):
        bad = 0 if gradient is None else int((~torch.isfinite(gradient) & x.mask).sum())
        if bad:
            raise LossError(
                f"the gradient of `{name}` with respect to the {of} is not finite on {bad} of "
                f"{int(x.mask.sum())} trained tokens."
            )
    return on_logprobs, on_entropy


def _measured(metrics: Mapping[str, Any], mask: Tensor, name: str) -> dict[str, float]:
    """Return a loss's metrics as numbers."""
    found: dict[str, float] = {}
    for key, value in metrics.items():
        if isinstance(value, Tensor) and value.shape == mask.shape:
            found[key] = float(value.detach()[mask].double().mean())
        elif isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
            found[key] = float(value)
        else:
            seen = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise LossError(f"`{name}`: metric {key!r} is {seen}; wanted one number, or {tuple(mask.shape)}.")
    return found


def _row(x: LossInputs, i: int) -> LossInputs:
    """Return one sequence alone."""
    picked = {
        field.name: value[i : i + 1]
        for field in dataclasses.fields(x)
        if isinstance(value := getattr(x, field.name), Tensor)
    }
    return dataclasses.replace(x, **picked)


def _check_ratios(ratios: Tensor, old_logprob: float) -> None:
    if ratios.dim() != 1 or not len(ratios) or not bool((torch.isfinite(ratios) & (ratios > 0)).all()):
        raise LossError(f"ratios: wanted positive finite numbers (R,); got {tuple(ratios.shape)}, {ratios}")
    highest = -math.log(float(ratios.max()))
    if not -math.inf < old_logprob <= min(0.0, highest + 1e-6):
        raise LossError(
            f"old_logprob={old_logprob!r}: at a ratio of {float(ratios.max()):g} the token's probability would be "
            f"above 1; give at most {min(0.0, highest):.3g}, or smaller ratios."
        )


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
    called = getattr(loss, "__name__", None) or repr(loss)
    have = ", ".join(known) or "none: give the function a parameter, as in def loss(inputs, beta=0.1)"
    raise LossError(f"`{called}` has no {field!r} to sweep over{nearest(field, known)}. It has: {have}.")

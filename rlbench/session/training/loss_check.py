"""A loss is tried on two sequences in the kernel before it goes to the ranks: the mistake shows where it was typed."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np

from rlbench.data import TrainBatch
from rlbench.dispatch import by_value
from rlbench.dispatch.own_state import Watch, changes_itself
from rlbench.errors import LossError
from rlbench.session.record.sources import source
from rlbench.session.training.one_thread import one_thread
from rlbench.traces import user_error
from rlbench.user_code import user_code

NO_REFERENCE = (
    "this loss has a KL penalty to a reference policy and there is none: rb.Session(…, reference=True) holds the "
    "starting weights as one, or set kl_coef=0"
)


@dataclass(frozen=True)
class ShippedLoss:
    """A loss on its way to the ranks: cloudpickled, with name, hash and text, which tell in the records what it was."""

    name: str
    blob: bytes
    hash: str
    needs_reference: bool
    source: str = ""


def ship(loss: Any, batch: TrainBatch, has_reference: bool = True) -> ShippedLoss:
    """Resolve, try and pickle a loss.

    Args:
        loss: a name (`"grpo"`), a loss value (`rb.rl.grpo(clip_high=.28)`), or any function
            `(LossInputs) -> (per_token, metrics)`.
        batch: the batch it will be used on; two of its sequences serve as the trial.
        has_reference: the session can compute `ref_logprobs`, or the batch has them; else the loss gets None.

    Raises:
        LossError: it raised, gave the wrong shape or type, was not finite, or gives the log-probs no gradient.
    """
    from rlbench.rl.losses import resolve

    resolved = resolve(loss)
    name = loss if isinstance(loss, str) else getattr(resolved, "__name__", None) or repr(resolved)
    if getattr(resolved, "needs_reference", False) and not has_reference:
        raise LossError(NO_REFERENCE)
    blob = by_value.dumps(resolved, "loss", refusal=LossError)
    reads_reference = _try_copy(blob, name, batch, has_reference)
    return ShippedLoss(name, blob, by_value.identity(resolved), reads_reference, source(resolved))


def _try_copy(blob: bytes, name: str, batch: TrainBatch, has_reference: bool) -> bool:
    """Call a copy of a loss, as a rank does, on two sequences of `batch`, and check what it gives.

    What it prints here is dropped: it prints on the ranks.

    Returns:
        Whether it reads the reference's log-probs.

    Raises:
        LossError: as `ship`; also where the call changed the copy, since no rank would know of it.
    """
    from rlbench.rl.losses import check_sampled_as_trained

    loss = cloudpickle.loads(blob)
    watch = Watch(blob, loss)
    with one_thread():
        reads = _tried(loss, name, trial_inputs(batch, has_reference))
    if changed := watch.changed():
        raise LossError(f"`{name}` {changes_itself(changed)} Engines are untouched.")
    check_sampled_as_trained(loss, name, batch.reshaped_by, "sampler_logprobs" in reads)
    declared = getattr(loss, "needs_reference", None)
    return has_reference and ("ref_logprobs" in reads if declared is None else bool(declared))


def _tried(loss: Callable[..., Any], name: str, inputs: Any) -> set[str]:
    """Names of the inputs that the loss read."""
    import torch

    reads = _Reads()
    shape = tuple(inputs.logprobs.shape)
    try:
        with user_code(), contextlib.redirect_stdout(io.StringIO()):
            if getattr(loss, "needs_plan", False):
                inputs = dataclasses.replace(inputs, channels=loss.plan(inputs))  # type: ignore[attr-defined]
            given = loss(reads.watched(inputs))
    except LossError:
        raise
    except Exception as error:
        said = f"`{name}` raised {type(error).__name__}: {error}"
        raise user_error(LossError, said, error, "\n  Engines are untouched.") from None
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], dict)):
        raise LossError(
            f"`{name}` gave {type(given).__name__}, wanted (per_token, metrics): a tensor {shape} and a dict. "
            "Engines are untouched."
        )
    per_token, metrics = given
    if not torch.is_tensor(per_token) or tuple(per_token.shape) != shape:
        seen = tuple(per_token.shape) if torch.is_tensor(per_token) else type(per_token).__name__
        raise LossError(
            f"`{name}` gave per-token shape {seen}, wanted {shape}, the shape of inputs.logprobs.\n"
            "  Engines are untouched. Return one value per token; aggregation is done for you."
        )
    if not torch.isfinite(per_token[inputs.mask]).all():
        raise LossError(f"`{name}` gave NaN or infinity on trained tokens. Engines are untouched.")
    for key, value in metrics.items():
        if not isinstance(key, str) or not (isinstance(value, int | float) or torch.is_tensor(value)):
            raise LossError(f"`{name}`: metric {key!r} is {type(value).__name__}; wanted numbers or tensors by name")
        if torch.is_tensor(value) and value.numel() != 1 and tuple(value.shape) != shape:
            raise LossError(
                f"`{name}`: metric {key!r} has shape {tuple(value.shape)}; wanted one number, or {shape}, one per token"
            )
    _need_gradient(per_token, inputs, name)
    return reads.names


def trusts_old_logprobs(shipped: ShippedLoss, batch: TrainBatch) -> bool:
    """Whether a loss's ratio is to the old log-probs alone: the sampler's change nothing in it."""
    import torch

    loss = cloudpickle.loads(shipped.blob)
    inputs = trial_inputs(batch, has_reference=True)
    inputs = dataclasses.replace(inputs, advantages=torch.ones_like(inputs.advantages) * inputs.mask)

    def value(**fields: Any) -> torch.Tensor:
        with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
            given = dataclasses.replace(inputs, **fields)
            if getattr(loss, "needs_plan", False):
                given = dataclasses.replace(given, channels=loss.plan(given))
            per_token: torch.Tensor = loss(given)[0]
        return per_token[inputs.mask]

    with one_thread():
        first = value()
        by_old, by_sampler = (
            not torch.equal(first, value(**{name: getattr(inputs, name) - 0.02}))
            for name in ("old_logprobs", "sampler_logprobs")
        )
    return by_old and not by_sampler


class _Reads:
    """Which fields of its inputs a loss reads."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def watched(self, inputs: Any) -> Any:
        """The same inputs, of a subclass that notes what is read."""
        names = self.names

        class Watched(type(inputs)):  # type: ignore[misc]
            def __getattribute__(self, name: str) -> Any:
                names.add(name)
                return super().__getattribute__(name)

        Watched.__name__ = type(inputs).__name__  # what an error in the loss calls it
        return Watched(**{field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)})


def trial_inputs(batch: TrainBatch, has_reference: bool = True) -> Any:
    """`LossInputs` of the two shortest sequences; log-probs a little off the sampler's, so that ratios are not 1."""
    import torch

    from rlbench.rl.types import LossInputs

    rows = np.argsort(batch.response_lengths, kind="stable")[:2]
    part = batch.rows(rows)
    width = int(part.response_lengths.max())

    def padded(values: np.ndarray) -> torch.Tensor:
        out = torch.zeros(len(part), width)
        for i, row in enumerate(part.responses.with_values(values)):
            out[i, : len(row)] = torch.as_tensor(np.array(row, np.float32))
        return out

    sampler = padded(part.sampler_logprobs)
    generator = torch.Generator().manual_seed(0)
    logprobs = (sampler + 0.01 * torch.randn(sampler.shape, generator=generator)).requires_grad_()
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=sampler.clone(),
        sampler_logprobs=sampler,
        ref_logprobs=sampler.clone() if has_reference else None,
        advantages=padded(part.advantages),
        mask=padded(part.mask.astype(np.float32)).bool(),
        entropy=torch.rand(sampler.shape, generator=generator).requires_grad_(),
        group=torch.as_tensor(part.group.astype(np.int64)),
    )


def _need_gradient(per_token: Any, inputs: Any, name: str) -> None:
    import torch

    reached = (None,)
    if per_token.requires_grad:
        reached = torch.autograd.grad(per_token[inputs.mask].sum(), [inputs.logprobs], allow_unused=True)
    if reached[0] is None:
        raise LossError(
            f"`{name}` gives the log-probs no gradient (did it detach them, or use old_logprobs alone?). "
            "Engines are untouched."
        )
    if not torch.isfinite(reached[0]).all():
        raise LossError(f"the gradient of `{name}` with respect to the log-probs is not finite. Engines are untouched.")

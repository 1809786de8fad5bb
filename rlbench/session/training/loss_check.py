"""A loss is tried on two sequences in the kernel before it goes to the ranks: the mistake shows where it was typed."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from rlbench.data import TrainBatch
from rlbench.data.batches.columns import TEACHER, TEACHER_TOP
from rlbench.data.batches.pairing import check_pairs, shortest
from rlbench.data.record.origin import makers
from rlbench.data.rollouts.advantage_call import no_advantage
from rlbench.dispatch import by_value
from rlbench.dispatch.by_value import Watch, changes_itself
from rlbench.errors import LossError
from rlbench.session.record.sources import source
from rlbench.traces import user_error
from rlbench.user_code import user_code

if TYPE_CHECKING:
    from torch import Tensor

    from rlbench.rl.types import Loss, LossInputs

NO_REFERENCE = (
    "this loss has a KL penalty to a reference policy and there is none: rb.Session(…, reference=True) holds the "
    "starting weights as one, or set kl_coef=0"
)
NOTHING_TO_COMPARE_WITH = (
    "`{name}` compares with a reference policy and there is none: rb.Session(…, reference=True) holds the starting "
    "weights as one; 'simpo' and 'orpo' need none"
)
OF_A_POLICY = (
    "`{name}` is a policy's loss, of log-probs; a reward model has scores: rb.rl.bradley_terry(), 'log_exp', 'hps', or "
    "a function of inputs.chosen.scores and inputs.rejected.scores"
)
NO_TEACHER = (
    "needs a teacher's log-probs, and the batch has none: session.teacher(model).score(batch) gives a batch with them"
)
UNJUDGED = (
    "reads no inputs.verdicts, and the pairs say of each head which response is better: train an rb.RewardModel of "
    "these heads, or batch.replace(verdicts=None) takes `chosen` for the better one"
)
UNTOUCHED = "Engines are untouched."


@dataclass(frozen=True)
class ShippedLoss:
    """A loss on its way to the ranks: cloudpickled, with name, hash and text, which tell in the records what it was."""

    name: str
    blob: bytes
    hash: str
    needs_reference: bool
    source: str = ""
    needs: tuple[str, ...] = ()
    widths: Mapping[str, Any] = field(default_factory=dict)


def ship(
    loss: Any,
    batch: TrainBatch,
    has_reference: bool = True,
    widths: Mapping[str, Any] = MappingProxyType({}),
    scored: bool = False,
) -> ShippedLoss:
    """Resolve, pickle and try a loss: a copy is called, as a rank does, on two sequences of the batch it is for.

    `has_reference`: the session can compute `ref_logprobs`, or the batch has them; else the loss gets None. `widths`:
    the model's `vocab_size` and `hidden_size`, for a loss that asks for its logits or hidden states. `scored`: it is
    for a reward model, which gives scores in place of log-probs.
    """
    from rlbench.rl.losses import check_sampled_as_trained, resolve
    from rlbench.rl.policy import PolicyLoss
    from rlbench.rl.preference import PreferenceLoss
    from rlbench.rl.reward import ScoreLoss
    from rlbench.rl.types import needs_of
    from rlbench.trainers.update.stateful_loss import has_state

    resolved = resolve(loss)
    name = loss if isinstance(loss, str) else getattr(resolved, "__name__", None) or repr(resolved)
    declared = getattr(resolved, "needs_reference", None)
    of_a_policy = isinstance(resolved, PolicyLoss | PreferenceLoss) and not isinstance(resolved, ScoreLoss)
    if scored and (of_a_policy or needs_of(resolved) or getattr(resolved, "needs_plan", False)):
        raise LossError(OF_A_POLICY.format(name=name))
    if declared and not has_reference:
        of_preferences = isinstance(resolved, PreferenceLoss)
        raise LossError(NOTHING_TO_COMPARE_WITH.format(name=name) if of_preferences else NO_REFERENCE)
    needs = needs_of(resolved)
    if "teacher" in needs and TEACHER not in batch.columns:
        raise LossError(f"`{name}` {NO_TEACHER}. {UNTOUCHED}")
    blob = by_value.dumps(resolved, "loss", refusal=LossError)
    copy = cloudpickle.loads(blob)
    watch = Watch(blob, copy)
    with one_thread():
        inputs = trial_inputs(batch, has_reference, needs, widths, scored)
        read, metrics = _tried(copy, name, inputs)
        _need_advantages(copy, name, batch, inputs)
    if changed := watch.changed():
        raise LossError(f"`{name}` {changes_itself(changed)} {UNTOUCHED}")
    if has_state(copy):
        _try_update(copy, name, metrics)
    if read & {"chosen", "rejected"}:
        check_pairs(batch)
    if batch.verdicts is not None and "verdicts" not in read:
        raise LossError(f"`{name}` {UNJUDGED}. {UNTOUCHED}")
    check_sampled_as_trained(copy, name, batch.reshaped_by, "sampler_logprobs" in read, batch.sampled)
    needs_reference = has_reference and ("ref_logprobs" in read if declared is None else bool(declared))
    return ShippedLoss(name, blob, by_value.identity(resolved), needs_reference, source(resolved), needs, widths)


def _need_advantages(loss: Loss, name: str, batch: TrainBatch, inputs: LossInputs) -> None:
    """Refuse a loss that weighs by advantages, on a batch of rollouts that was made without: all of them are 0."""
    if has_advantages(batch) or batch.advantages.any() or not _weighs_by_advantages(loss, name, inputs):
        return
    said = f"`{name}` weighs tokens by their advantage, and this batch was made without an advantage"
    raise LossError(f"{said}: rollouts.score(reward).batch(advantage=rb.rl.group_normalized())")


def has_advantages(batch: TrainBatch) -> bool:
    """Say whether a batch is of rollouts that an advantage was computed for."""
    return batch.sampled and makers(batch).get("advantage") is not no_advantage


def weighs_by_advantages(shipped: ShippedLoss, batch: TrainBatch) -> bool:
    """Say whether a loss weighs tokens by their advantage."""
    loss, inputs = cloudpickle.loads(shipped.blob), trial_inputs(batch, True, shipped.needs, shipped.widths)
    with one_thread():
        return _weighs_by_advantages(loss, shipped.name, inputs)


def _weighs_by_advantages(loss: Loss, name: str, inputs: LossInputs) -> bool:
    import torch

    try:
        _tried(loss, name, replace(inputs, advantages=torch.full_like(inputs.advantages, torch.nan)))
    except LossError:  # its value is no number
        return True
    return False


def trusts_old_logprobs(shipped: ShippedLoss, batch: TrainBatch) -> bool:
    """Say whether a loss's ratio is to the old log-probs alone: the sampler's change nothing in it."""
    import torch

    loss, inputs = cloudpickle.loads(shipped.blob), trial_inputs(batch, True, shipped.needs, shipped.widths)
    inputs = replace(inputs, advantages=torch.ones_like(inputs.advantages))
    by_old, by_sampler = ({name: getattr(inputs, name) - 0.02} for name in ("old_logprobs", "sampler_logprobs"))
    with one_thread():
        total, old, sampler = (_called(loss, replace(inputs, **moved), set())[0] for moved in ({}, by_old, by_sampler))
    return bool(total != old) and bool(total == sampler)


def trial_inputs(
    batch: TrainBatch,
    has_reference: bool = True,
    needs: Sequence[str] = (),
    widths: Mapping[str, Any] = MappingProxyType({}),
    scored: bool = False,
) -> LossInputs:
    """Return the two shortest sequences as a loss sees them; log-probs a little off the sampler's: ratios are not 1.

    Of pairs the shortest whole one; beside labelled responses one that is judged neither way. Tokens without a sampler
    get a probability of a third. What the loss `needs` has its shape, and random numbers.
    """
    import torch

    from rlbench.rl.lab import sources_of_gradient
    from rlbench.trainers.passes.step_plan import whole_inputs

    part = batch.rows(shortest(batch, 2))
    sampler = np.where(np.isnan(part.sampler_logprobs), np.float32(-1.1), part.sampler_logprobs)
    part = part.replace(sampler_logprobs=sampler, old_logprobs=sampler, ref_logprobs=sampler if has_reference else None)
    rows = part.responses.with_values(sampler)
    channels = {"logprobs": rows, "entropy": rows}
    asked = {name: rows.with_values(values) for name, values in _asked_for(part, needs, widths).items()}
    inputs = whole_inputs(part, [{"rows": np.arange(len(part)), "channels": channels | asked}], "sampler")
    chance = torch.Generator().manual_seed(0)
    noise = 0.01 * torch.randn(inputs.logprobs.shape, generator=chance)
    entropy = torch.rand(inputs.logprobs.shape, generator=chance)
    if scored:
        scores = (50 * noise).requires_grad_()
        if part.verdicts is None:
            return replace(inputs, scores=scores)
        by_head = 0.5 * torch.randn((*noise.shape, len(part.verdicts.heads)), generator=chance)
        return replace(inputs, scores=scores, head_scores=by_head.requires_grad_())
    made = replace(inputs, logprobs=inputs.logprobs + noise, entropy=entropy)
    for one in sources_of_gradient(made):
        one.requires_grad_()
    return made


def _asked_for(batch: TrainBatch, needs: Sequence[str], widths: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return what a pass would give beside log-probs to a loss with these `needs`, of random numbers."""
    random, made = np.random.default_rng(0), {}
    for need, width in (("hidden_states", "hidden_size"), ("logits", "vocab_size")):
        if need in needs:
            if widths.get(width) is None:
                raise LossError(f"the loss needs {need}, and the model does not say which is its output layer")
            made[need] = random.normal(size=(batch.tokens, int(widths[width]))).astype(np.float32)
    if "teacher" in needs and TEACHER_TOP in batch.columns:
        top = batch.columns[TEACHER_TOP]
        made["candidate_logprobs"] = (top + 0.01 * random.normal(size=top.shape)).clip(max=-1e-3).astype(np.float32)
    return made


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread: on small tensors several wait for each other, the more so beside the ranks."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _tried(loss: Loss, name: str, inputs: LossInputs) -> tuple[set[str], dict[str, Any]]:
    """Call a loss and check what it gives; returns the names of the inputs it read, and its metrics."""
    import torch

    from rlbench.rl.lab import sources_of_gradient

    read: set[str] = set()
    shape = tuple(inputs.logprobs.shape)
    try:
        total, metrics = _called(loss, inputs, read, f"`{name}`")
    except LossError:
        raise
    except Exception as error:
        said = f"`{name}` raised {type(error).__name__}: {error}"
        raise user_error(LossError, said, error, f"\n  {UNTOUCHED}") from None
    for key, value in metrics.items():
        if not isinstance(key, str) or not (isinstance(value, int | float) or torch.is_tensor(value)):
            raise LossError(f"`{name}`: metric {key!r} is {type(value).__name__}; wanted numbers or tensors by name")
        if torch.is_tensor(value) and value.numel() != 1 and tuple(value.shape) not in (shape, (shape[0], 1)):
            raise LossError(
                f"`{name}`: metric {key!r} has shape {tuple(value.shape)}; wanted one number, {shape}, one per token, "
                f"or {(shape[0], 1)}, one per sequence"
            )
    sources = [one for one in sources_of_gradient(inputs) if one is not inputs.entropy]
    what = "log-probs" if inputs.scores is None else "scores"
    try:
        found = torch.autograd.grad(total, sources, allow_unused=True)
    except Exception as error:
        said = f"`{name}` raised {type(error).__name__} in its backward: {error}"
        raise user_error(LossError, said, error, f"\n  {UNTOUCHED}") from None
    if all(gradient is None for gradient in found):
        raise LossError(f"`{name}` gives the {what} no gradient: did it use old_logprobs alone? {UNTOUCHED}")
    if not all(gradient is None or torch.isfinite(gradient).all() for gradient in found):
        raise LossError(f"the gradient of `{name}` with respect to the {what} is not finite. {UNTOUCHED}")
    return read, metrics


def _try_update(loss: Loss, name: str, metrics: Mapping[str, Any]) -> None:
    """Call a loss's `update` with the metrics of a trial: its mistakes show here, too."""
    import torch

    from rlbench.trainers.passes.metrics import own_name
    from rlbench.trainers.update.stateful_loss import updated_state

    said = {
        own_name(key): float(torch.as_tensor(value).float().nanmean().nan_to_num()) for key, value in metrics.items()
    }
    standard = dict.fromkeys(("loss", "tokens", "entropy", "kl"), 1.0)
    try:
        updated_state(loss, loss.state, standard | said)  # type: ignore[attr-defined]
    except LossError:
        raise
    except Exception as error:
        text = f"the update of `{name}` raised {type(error).__name__}: {error}"
        raise user_error(LossError, text, error, f"\n  {UNTOUCHED}") from None


def _called(loss: Loss, inputs: LossInputs, read: set[str], name: str = "") -> tuple[Tensor, dict[str, Any]]:
    """Return the loss's sum and metrics; what it prints is dropped here, and what it reads added to `read`."""
    import torch

    from rlbench.trainers.passes.loss_value import evaluate

    with contextlib.redirect_stdout(io.StringIO()):
        if getattr(loss, "needs_plan", False):
            with user_code():
                plan = loss.plan(inputs)  # type: ignore[attr-defined]
                inputs = replace(inputs, channels={**inputs.channels, **plan})
        return evaluate(loss, _watched(inputs, read), torch.ones(inputs.logprobs.shape), name)


def _watched(inputs: LossInputs, read: set[str]) -> LossInputs:
    """Return the same inputs, of a subclass that notes in `read` what is read."""

    class Watched(type(inputs)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    Watched.__name__ = type(inputs).__name__  # what an error in the loss calls it
    return Watched(**{field.name: getattr(inputs, field.name) for field in fields(inputs)})

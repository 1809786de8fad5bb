"""What one micro-batch takes at its highest: the pass itself, run on the meta device, where tensors have sizes alone.

The model's own code, `packed_attention`, the chunked head and autograd run as they do on a rank, so nothing has to be
known of an architecture; FSDP's part (gathered units, gradients on their way to their shards) is counted beside them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlbench.rl.linear import LEAST_TILE, MOST_TILE_GPU, TILES
from rlbench.strategies.fsdp2 import units
from rlbench.strategies.memory.live import LiveMemory
from rlbench.trainers.passes.attention import packed_attention
from rlbench.trainers.passes.chunked_head import Head, UnfitHead, token_bytes
from rlbench.trainers.passes.meta_images import Grids, OnMeta, image_tokens, pictures_shown
from rlbench.trainers.passes.token_stats import token_stats

GATHERED, GRADIENTS, LOGITS = "gathered layers", "gradients on their way", "logits"
IN_FLIGHT = 3
"""Units that several ranks hold gathered at a time: the one that computes, its buffer, and the one fetched ahead."""


@dataclass(frozen=True)
class PassCost:
    """Bytes by owner at the highest moment of a pass. `estimated`: why it could not be run on meta; empty if it was."""

    owners: dict[str, int]
    estimated: str = ""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.owners.values())


@dataclass(frozen=True)
class PassPlan:
    """How a pass runs: rows of `lengths` tokens packed as one, over `shards` ranks, on a GPU or not. `copied`: whether
    FSDP gathers, or casts, parameters that train (True is in it) and frozen ones (False); `reduced`: it reduces their
    gradients. `grids`: the patches of each picture that the rows show. `scalar`: the model gives one number of each
    token, as critics and reward models do, in the place of logits."""

    lengths: tuple[int, ...]
    backward: bool = True
    shards: int = 1
    gpu: bool = False
    reshard_after_forward: bool = True
    copied: frozenset[bool] = frozenset({True, False})
    reduced: bool = True
    grids: Grids = ()
    scalar: bool = False


def pass_cost(module: nn.Module, plan: PassPlan) -> PassCost:
    """Run one micro-batch of `module` on meta, where it lies in the dtype it computes in; what it takes beside the
    module's own weights, gradients and optimizer."""
    tokens = sum(plan.lengths)
    try:
        with packed_attention(module, list(plan.lengths)):
            return PassCost(_run(module, tokens, plan))
    except Exception as error:  # the model's code looks at what tensors hold, or at their device: told in `estimated`
        item = next(module.parameters()).element_size()
        held = {"activations": token_bytes(module, item) * tokens if plan.backward else 0}
        reason = str(error).splitlines()[0].split(". ")[0] if str(error) else type(error).__name__
        return PassCost(held, f"{type(module).__name__} cannot be run without its weights ({reason})")


def _run(module: nn.Module, tokens: int, plan: PassPlan) -> dict[str, int]:
    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    targets = ids[0, 1:]
    predictors = torch.zeros(tokens - 1, dtype=torch.int64, device="meta")

    owner = ["activations"]
    with ExitStack() as within:
        if plan.grids:
            within.enter_context(OnMeta(image_tokens(module, plan.grids)))
        live = within.enter_context(LiveMemory([*module.parameters(), *module.buffers()], lambda: owner[0]))
        within.enter_context(_sharded(module, live, plan))
        within.enter_context(nullcontext() if plan.backward else torch.no_grad())
        shown = within.enter_context(pictures_shown(module, ids, plan.grids))

        # with a mask given, transformers does not look into the positions for sequences
        given = {"attention_mask": ids.bool(), **shown}
        if plan.scalar:
            total = module(input_ids=ids, positions=predictors, **given).sum()
        else:
            chooses = "logits_to_keep" in inspect.signature(module.forward).parameters
            given |= {"use_cache": False} | ({"logits_to_keep": predictors} if chooses else {})
            logits = lambda: module(input_ids=ids, **given).logits  # noqa: E731
            logprobs, entropy = _stats(module, logits, None if chooses else predictors, targets, plan.gpu, owner)
            total = logprobs.sum() + 0.0 * entropy.sum()
        if plan.backward:
            total.backward()
    return {name: nbytes for name, nbytes in live.highest.items() if nbytes > 0}


def _stats(
    module: nn.Module,
    logits: Callable[[], Tensor],
    positions: Tensor | None,
    targets: Tensor,
    gpu: bool,
    owner: list[str],
) -> tuple[Tensor, Tensor]:
    """Log-probs as `PolicyModel` gets them: by the output layer where the model's logits are just its output.
    `positions`: of a model that gives the logits of all tokens, those that are wanted."""
    try:
        head = Head.of(module)  # before `_owned`, whose hooks it would refuse
        with _owned(head.layer, owner):
            found = head.run(logits, positions, targets, 1.0, None, _chunk_rows(module, len(targets), gpu))
            return found.logprobs, found.entropy
    except UnfitHead:
        pass
    with _owned(module.get_output_embeddings(), owner):  # type: ignore[operator]
        whole = logits()
        owner[0] = LOGITS
        try:
            return token_stats(whole[0] if positions is None else whole[0][positions], targets, 1.0)
        finally:
            owner[0] = "activations"


def _chunk_rows(module: nn.Module, count: int, gpu: bool) -> int | None:
    """Rows of logits that make the tile a GPU takes; on a host the pass chooses as it would there."""
    if not gpu:
        return None
    width = int(module.get_output_embeddings().weight.shape[0])  # type: ignore[operator]
    return max(1, min(MOST_TILE_GPU, max(LEAST_TILE, count * width // TILES)) // width)


@contextmanager
def _owned(layer: nn.Module, owner: list[str]) -> Iterator[None]:
    """What the output layer makes, forward and backward, is the logits'; the gradient of its input is not."""

    def begin(*_: Any) -> None:
        owner[0] = LOGITS

    def end(_: nn.Module, __: Any, output: Tensor) -> None:
        owner[0] = "activations"

    hooks = [layer.register_forward_pre_hook(begin), layer.register_forward_hook(end)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class _Unit:
    """What FSDP gathers at once, and reduces at once."""

    gathered: int
    trained: list[nn.Parameter]
    is_root: bool
    here: bool = False
    waiting: set[int] = field(default_factory=set)


@contextmanager
def _sharded(module: nn.Module, live: LiveMemory, plan: PassPlan) -> Iterator[None]:
    """Count what FSDP2 holds beside the shards, when it holds it: units gathered around their forward and their
    backward, their whole gradients until all are there, then the buffer that is reduced, until the next unit's is."""
    hooks: list[Any] = []
    claimed: set[int] = set()
    reducing = [0]
    flying = 1 if plan.shards == 1 else IN_FLIGHT

    def gather(unit: _Unit, *_: Any) -> None:
        if not unit.here:
            unit.here = True
            live.take(GATHERED, unit.gathered)

    def free(unit: _Unit, *_: Any) -> None:
        if unit.here:
            unit.here = False
            live.take(GATHERED, -unit.gathered)

    def reduce(unit: _Unit) -> None:
        if not plan.reduced:  # each gradient becomes its shard's, or is added to it
            for parameter in unit.trained:
                parameter.grad = None
            free(unit)
            return
        whole = sum(4 * parameter.numel() for parameter in unit.trained)  # reduced in float32
        live.take(GRADIENTS, -reducing[0])
        live.take(GRADIENTS, whole)
        for parameter in unit.trained:
            parameter.grad = None
        live.take(GRADIENTS, whole // plan.shards)  # added to the shard that is there, then freed
        live.take(GRADIENTS, -(whole // plan.shards))
        reducing[0] = whole
        free(unit)

    def accumulated(unit: _Unit, parameter: Tensor) -> None:
        unit.waiting.discard(id(parameter))
        if not unit.waiting:
            unit.waiting = {id(p) for p in unit.trained}
            reduce(unit)

    def after(unit: _Unit, _: nn.Module, __: Any, output: Any) -> None:
        if plan.reshard_after_forward or unit.is_root:
            free(unit)
        first = (
            output
            if isinstance(output, Tensor)
            else next(iter(output.values() if hasattr(output, "values") else output))
        )
        if isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(partial(gather, unit))

    for part in [*units(module), module]:
        own = [p for p in part.parameters() if id(p) not in claimed]
        claimed |= {id(p) for p in own}
        trained = [p for p in own if p.requires_grad] if plan.backward else []
        copied = [p for p in own if p.requires_grad in plan.copied]
        several = 1 if part is module else flying
        unit = _Unit(several * sum(p.numel() * p.element_size() for p in copied), trained, part is module)
        unit.waiting = {id(p) for p in trained}
        hooks.append(part.register_forward_pre_hook(partial(gather, unit)))
        hooks.append(part.register_forward_hook(partial(after, unit)))
        hooks += [p.register_post_accumulate_grad_hook(partial(accumulated, unit)) for p in trained]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

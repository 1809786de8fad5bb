"""The smallest change that makes a plan fit: tried in the order of what it costs, each proved by planning again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlbench.session.options import Inference, Train
from rlbench.session.planning.plan import Plan, planned
from rlbench.session.planning.request import Request
from rlbench.session.planning.uses import REPLICA
from rlbench.trainers.models.lora import Lora
from rlbench.units import MIB, format_bytes

SEQUENCES = 8
"""As many longest sequences a smaller KV cache holds at a time."""
LEAST_BUDGET = 512
Changing = Callable[[Request], Request]


@dataclass(frozen=True)
class Change:
    """What to write, and the `plan` that proves that it fits."""

    what: tuple[str, ...]
    plan: Plan

    def __str__(self) -> str:
        return (
            f"it fits with {' and '.join(self.what)}: {format_bytes(self.plan.peak)} of {format_bytes(self.plan.limit)}"
        )


def smallest_change(plan: Plan) -> Change | None:
    """The first change that is enough alone; else as few of them together as are enough, cheap ones first."""
    steps = list(_candidates(plan))
    for what, change in steps:
        if changed := _fitting(change(plan.request)):
            return Change((what,), changed)
    taken: list[tuple[str, Changing]] = []
    for step in steps:
        taken.append(step)
        if together := _with(plan, taken):
            for one in list(taken):  # what the later ones made needless
                rest = [other for other in taken if other is not one]
                if fewer := _with(plan, rest):
                    taken, together = rest, fewer
            return Change(tuple(what for what, _ in taken), together)
    return None


def _with(plan: Plan, changes: list[tuple[str, Changing]]) -> Plan | None:
    request = plan.request
    for _, change in changes:
        request = change(request)
    return _fitting(request)


def _fitting(request: Request) -> Plan | None:
    """Return the plan of a request that fits; None for another, without running its passes where what is held beside
    them is too much already."""
    if not planned(request, passes=False).fits:
        return None
    plan = planned(request)
    return plan if plan.fits else None


def _candidates(plan: Plan) -> Iterator[tuple[str, Changing]]:
    """Changes in the order of what they cost: copies, cache, time, then the method itself."""
    request = plan.request
    gpu = request.devices.gpus > 0
    if request.undo:
        yield "undo=0", lambda r: replace(r, undo=0)
    yield from _smaller_cache(plan, gpu)
    for tokens in _fewer_tokens(plan):
        yield _budget(plan, tokens), partial(replace, token_budget=tokens)
    if "inference" not in request.away:
        yield 'session.offload("inference") before each step', lambda r: replace(r, offload=(*r.offload, "inference"))
    if gpu and "optimizer" not in request.offload:
        trainer = "session.trainer(…, adam_offload=True)"
        what = trainer if request.of_trainer else 'session.offload("train", "optimizer") after each step'
        yield what, lambda r: replace(r, offload=(*r.offload, "optimizer"))
    if not request.train.gradient_checkpointing:
        yield "rb.Train(gradient_checkpointing=True)", lambda r: _train(r, gradient_checkpointing=True)
    if request.train.bf16 is None and not request.train.fp16 and not gpu:
        yield "rb.Train(bf16=True)", lambda r: _train(r, bf16=True)
    if request.ema:
        yield "session.trainer(…, ema=False)", lambda r: replace(r, ema=False, offload=r.away)
    lora = request.train.lora
    if lora is None and not request.ema:
        yield "rb.Train(lora=rb.Lora(rank=32))", lambda r: _train(r, lora=Lora(rank=32))
    if not request.ema and (lora is None or lora.base is None):
        packed = replace(lora or Lora(rank=32), base="nf4")
        yield f'rb.Train(lora=rb.Lora(rank={packed.rank}, base="nf4"))', lambda r: _train(r, lora=packed)
    helps = lora is None or request.critic is not None
    if gpu and not request.train.fsdp_cpu_offload and helps:
        yield "rb.Train(fsdp_cpu_offload=True)", lambda r: _train(r, fsdp_cpu_offload=True)
    if request.critic is not None:
        what = 'session.trainer("grpo", …), which has no critic'
        yield what, lambda r: replace(r, critic=None, offload=r.away)


def _smaller_cache(plan: Plan, gpu: bool) -> Iterator[tuple[str, Changing]]:
    """A KV cache for a few longest sequences; on a GPU given in bytes, so that vLLM takes no share of the whole."""
    from rlbench.session.planning.model import policy_of
    from rlbench.session.planning.uses import kv_bytes, longest

    request = plan.request
    policy = policy_of(request)
    length = request.longest or longest(policy, request)
    wanted = -(-SEQUENCES * kv_bytes(policy, request, length) // (64 * MIB)) * 64
    if wanted * MIB < plan.of(REPLICA, "KV cache"):
        length_said = "" if request.inference.max_model_len else f"max_model_len={length}, "
        what = f"rb.Inference({length_said}kv_cache_bytes={wanted} << 20)"
        yield what, lambda r: _inference(r, kv_cache_bytes=wanted * MIB, max_model_len=length)


def _fewer_tokens(plan: Plan) -> Iterator[int]:
    tokens, least = sum(plan.rows), max(max(plan.rows), LEAST_BUDGET)
    while (tokens := tokens // 2) >= least:
        yield tokens


def _budget(plan: Plan, tokens: int) -> str:
    """What to write for micro-batches of so many tokens."""
    if not plan.request.of_trainer:
        return f"token_budget={tokens}"
    count = max(1, tokens // max(plan.rows))
    return f"micro-batches of {count} sequences (micro_train_batch_size={count}; here token_budget={tokens})"


def _train(request: Request, **options: Any) -> Request:
    return replace(request, train=Train(**{**request.train.overridden(), **options}))


def _inference(request: Request, **options: Any) -> Request:
    return replace(request, inference=Inference(**{**request.inference.overridden(), **options}))

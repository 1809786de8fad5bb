"""Ring attention over ranks gives what one process gives of the whole row, and holds a slice of it alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from rlbench.strategies.memory.live import LiveMemory
from rlbench.strategies.ranks.sequence import ALONE, SequenceGroup
from rlbench.trainers.passes import ring
from rlbench.trainers.passes.attention import NAME, packed_attention
from tests.clock import until
from tests.modules import qwen_on_meta
from tests.ranks import Ranks, ranks

SIZE = 24
HEADS = {2: (3, 1), 3: (4, 2), 4: (6, 2)}
"""Of queries, which the ranks do not divide, and of keys."""
TILE = (16, 8)


@dataclass(frozen=True)
class Case:
    """A row, and how it is attended to."""

    lengths: tuple[int, ...]
    heads: tuple[int, int]
    options: dict[str, Any] = field(default_factory=dict)
    rows: int = 1
    widths: tuple[int, int] = (8, 8)
    dtype: torch.dtype = torch.float32

    def tensors(self, index: int = 0, count: int = 1) -> list[Tensor]:
        """Query, key, value, what the result is multiplied by, of one of so many slices; and sinks."""
        tokens, generator = sum(self.lengths), torch.Generator().manual_seed(len(self.lengths))
        (heads, of_keys), (width, of_values) = self.heads, self.widths
        shapes = [(heads, width), (of_keys, width), (of_keys, of_values), (heads, of_values)]
        whole = [torch.randn(self.rows, many, tokens, wide, generator=generator) for many, wide in shapes]
        own = [one.chunk(count, dim=2)[index].contiguous().to(self.dtype) for one in whole]
        return [*own, torch.randn(heads, generator=generator).to(self.dtype)]


def attending(lengths: tuple[int, ...], group: SequenceGroup) -> Any:
    made: Any = nn.Module()
    made.config = SimpleNamespace(_attn_implementation="sdpa", _attn_implementation_internal="sdpa")
    return packed_attention(made, list(lengths), group)


def attend(given: list[Tensor], options: dict[str, Any]) -> Tensor:
    named = {**options, "s_aux": given[4]} if options.get("s_aux") else options
    found: Tensor = AttentionInterface()[NAME](nn.Module(), *given[:3], None, **named)[0]
    return found


def results(case: Case, group: SequenceGroup) -> list[Tensor]:
    """Output and gradients of query, key, value (and sinks) of this rank's slice."""
    query, key, value, weights, sinks = case.tensors(group.index, group.size)
    given = [one.requires_grad_() for one in (query, key, value)] + [weights, sinks.requires_grad_()]
    with attending(case.lengths, group):
        out = attend(given, case.options)
        (out * weights.transpose(1, 2)).sum().backward()
    leaves = (query, key, value, sinks)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def results_here(cases: list[Case]) -> list[list[Tensor]]:
    ring.QUERIES, ring.KEYS = TILE
    return [results(case, strategy.sequence) for case in cases]  # type: ignore[name-defined]


@pytest.fixture(scope="module", params=[2, 3, 4])
def engine(request: pytest.FixtureRequest, qwen: str) -> Iterator[Ranks]:
    with ranks(request.param, qwen_on_meta(qwen), sequence_parallel=request.param) as made:
        yield made
        made.run(_tiles_as_they_were)


def _tiles_as_they_were() -> None:
    ring.QUERIES, ring.KEYS = TILES


TILES = (ring.QUERIES, ring.KEYS)


def cases_of(count: int) -> dict[str, Case]:
    total, heads = SIZE * count, HEADS[count]
    few, generator = [], torch.Generator().manual_seed(count)
    while sum(few) < total:
        few.append(min(int(torch.randint(1, 6, (), generator=generator)), total - sum(few)))
    whole, cut = (total,), (5, total - 12, 7)
    return {
        "one sequence": Case(whole, heads),
        "ends within slices": Case(cut, heads, {"scaling": 0.5}),
        "many small ones": Case(tuple(few), heads),
        "an end between slices": Case((SIZE, total - SIZE), heads),
        "a window": Case(cut, heads, {"sliding_window": 10}),
        "a window wider than a slice": Case((total - 3, 3), heads, {"sliding_window": SIZE + 5}),
        "capped": Case(cut, heads, {"softcap": 1.5}),
        "sinks": Case(cut, heads, {"s_aux": True}),
        "all of them": Case(cut, heads, {"s_aux": True, "softcap": 2.0, "sliding_window": 29}),
        "no shared keys, wider values, two rows": Case(cut, (heads[0],) * 2, rows=2, widths=(4, 12)),
        "two rows": Case(cut, heads, {"sliding_window": 30}, rows=2),
        "half": Case(cut, heads, {"s_aux": True}, dtype=torch.bfloat16),
    }


def test_ranks_give_what_one_process_gives(engine: Ranks) -> None:
    cases = cases_of(engine.world_size)
    by_rank = engine.run(results_here, list(cases.values()))
    for name, case, *parts in zip(cases, cases.values(), *by_rank, strict=True):
        exact = Case(**{**vars(case), "dtype": torch.float32}) if case.dtype != torch.float32 else case
        expected = results(exact, ALONE)
        by_kind = list(zip(*parts, strict=True))
        joined = [torch.cat(slices, dim=2 if kind else 1) for kind, slices in enumerate(by_kind[:4])]
        joined += [torch.stack(gradients).sum(0) for gradients in by_kind[4:]]  # of the sinks
        tolerance = 1e-5 if case.dtype == torch.float32 else 5e-2
        assert len(joined) == len(expected) == (5 if "s_aux" in case.options else 4), name
        for found, one in zip(joined, expected, strict=True):
            gap = float(((found - one).abs() - tolerance * one.abs()).max())
            assert gap <= tolerance, f"{name}: differs by {gap}"


def twice(case: Case, group: SequenceGroup, recomputed: bool) -> list[Tensor]:
    """Two layers of attention, one over the other's result, as gradients of query, key and value."""
    torch.manual_seed(group.index)
    query, key, value, weights, _ = case.tensors(group.index, group.size)
    given = [one.requires_grad_() for one in (query, key, value)]

    def layer(one: Tensor) -> Tensor:
        return attend([one, key, value], case.options).transpose(1, 2)

    with attending(case.lengths, group):
        one: Any = query
        for _ in range(2):
            one = checkpoint(layer, one, use_reentrant=False) if recomputed else layer(one)
        (one * weights).sum().backward()
    return [leaf.grad for leaf in given if leaf.grad is not None]


def dropped_here(case: Case) -> tuple[list[Tensor], list[Tensor], float, float]:
    """Gradients with and without layers computed again; a result, linear in the values, by its weights, and values by
    their gradients: the sums of both over all ranks are one."""
    ring.QUERIES, ring.KEYS = TILE
    group = strategy.sequence  # type: ignore[name-defined]
    query, key, value, weights, _ = case.tensors(group.index, group.size)
    with attending(case.lengths, group):
        out = attend([query, key, value.requires_grad_()], case.options)
        said = (out * weights.transpose(1, 2)).sum()
        said.backward()
    assert value.grad is not None
    by_value = float((value * value.grad).sum())
    return twice(case, group, False), twice(case, group, True), float(said), by_value


def test_layers_that_are_computed_again_drop_what_they_dropped(engine: Ranks) -> None:
    total, heads = SIZE * engine.world_size, HEADS[engine.world_size]
    case = Case((5, total - 5), heads, {"dropout": 0.3})
    found = engine.run(dropped_here, case)
    for plain, again, _, _ in found:
        assert len(plain) == len(again) == 3
        for one, other in zip(plain, again, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert sum(one[2] for one in found) == pytest.approx(sum(one[3] for one in found), abs=1e-3)
    undropped = [results(Case(case.lengths, heads), ALONE)[0]]
    assert abs(float(undropped[0].sum()) - sum(one[2] for one in found)) > 1e-2


class Largest(TorchDispatchMode):
    """Notes the entries of the largest tensor that is made."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.most = max([self.most, *(one.numel() for one in tree_leaves(made) if isinstance(one, Tensor))])
        return made


LONG, WIDE = 128, 32


def memory_here(heads: tuple[int, int]) -> tuple[int, int, int, int]:
    """Of a slice of LONG tokens: entries of the largest tensor, bytes kept for the backward, and at the highest."""
    ring.QUERIES, ring.KEYS = TILE
    group = strategy.sequence  # type: ignore[name-defined]
    case = Case((LONG * group.size,), heads, widths=(WIDE, WIDE))
    query, key, value, weights, _ = case.tensors(group.index, group.size)
    given = [one.requires_grad_() for one in (query, key, value)]
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one.numel()) or one, lambda one: one)
    with attending(case.lengths, group), LiveMemory([*given, weights]) as live, Largest() as largest:
        with hooks:
            out = attend(given, {})
        most = 4 * LONG * heads[0] * (WIDE + 1)
        until(lambda: sum(live.held.values()) <= most, what=lambda: f"{most} bytes and no more: {live.held}")
        kept = sum(live.held.values())  # a thread of gloo's lets go of what has come a moment after it came
        out.backward(weights.transpose(1, 2))
    return largest.most, kept, max(saved), live.peak


def test_memory_is_that_of_a_slice_however_many_there_are(engine: Ranks) -> None:
    heads = 6 if engine.world_size == 4 else 4 if engine.world_size == 3 else 3
    own = LONG * heads * WIDE
    for largest, kept, saved, peak in engine.run(memory_here, (heads, heads)):
        assert largest == 2 * own  # keys and values of one slice, on their way
        assert saved == own
        assert kept == 4 * (own + LONG * heads)  # the result and its log-sum-exp
        assert peak <= 4 * own * 17

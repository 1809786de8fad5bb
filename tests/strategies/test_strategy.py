"""The strategy's promises: parity with a plain loop, clipping, accumulation, skipped steps, grouping,
agreement."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen2ForCausalLM

from rlbench.errors import BuildError, EngineError
from tests.modules import VOCAB, TrainedQwen, qwen_on_meta
from tests.ranks import Ranks, ranks


def rows(count: int, seed: int = 0) -> list[list[int]]:
    return torch.randint(0, VOCAB, (count, 10), generator=torch.Generator().manual_seed(seed)).tolist()


def train(engine: Ranks, data: list[list[int]], **kwargs: Any) -> list[float]:
    """`train_step` on each rank's share of the rows."""
    share = len(data) // engine.world_size
    args = [("train_step", (data[r * share : (r + 1) * share],), kwargs) for r in range(engine.world_size)]
    return engine.call_each("call_method", args)


def parameters(engine: Ranks) -> dict[str, torch.Tensor]:
    def gather() -> Any:
        return {n: p.full_tensor().detach().clone() for n, p in module.named_parameters()}  # type: ignore[name-defined]

    return engine.run(gather)[0]


def plain_loop(
    path: str, steps: list[list[list[list[int]]]], max_norm: float = 0.0
) -> tuple[dict[str, Any], list[float]]:
    """The same training by hand in one process: each step the mean loss over its micro-batches."""
    model = Qwen2ForCausalLM.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    norms = []
    for micro_batches in steps:
        for data in micro_batches:
            ids = torch.tensor(data)
            logits = model(ids).logits[:, :-1]
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            (loss / len(micro_batches)).backward()
        limit = max_norm or float("inf")
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, norms


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name in expected:
        # keys' biases have next to no gradient (all scores of a query shift alike): AdamW divides rounding by rounding
        atol = 3e-4 if name.endswith("k_proj.bias") else 3e-5
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("max_norm", [0.0, 0.05])
def test_a_users_loop_trains_as_a_plain_loop_does_clipped_or_not(qwen: str, world_size: int, max_norm: float) -> None:
    data = [rows(4, seed) for seed in range(3)]
    expected, norms = plain_loop(qwen, [[step] for step in data], max_norm)
    with ranks(world_size, qwen_on_meta(qwen), max_norm=max_norm) as engine:
        results = []
        for step in data:
            train(engine, step)
            results.append(engine.method("optimizer_step"))
        assert_close(parameters(engine), expected)
    for result, norm in zip(results, norms, strict=True):
        assert all(rank == result[0] for rank in result)
        assert result[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert result[0]["stepped"]


def test_gradients_accumulate_until_the_batch_is_full(qwen: str) -> None:
    data = [rows(4, 5), rows(4, 6)]
    expected, norms = plain_loop(qwen, [data])
    with ranks(2, qwen_on_meta(qwen), micro_train_batch_size=2, train_batch_size=8) as engine:
        train(engine, data[0])
        first = engine.method("optimizer_step")[0]
        train(engine, data[1])
        second = engine.method("optimizer_step")[0]
        assert (first["stepped"], second["stepped"]) == (False, True)
        assert second["grad_norm"] == pytest.approx(norms[0], rel=1e-4)
        assert_close(parameters(engine), expected)


def test_a_batch_size_that_ranks_cannot_share_is_refused(qwen: str) -> None:
    with ranks(2) as engine:
        pass
    with (
        pytest.raises(BuildError, match="train_batch_size"),
        ranks(2, micro_train_batch_size=2, train_batch_size=6) as engine,
    ):
        engine.build(qwen_on_meta(qwen))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_skips_the_step_on_all_ranks_and_says_so(qwen: str, bad: float) -> None:
    with ranks(2, qwen_on_meta(qwen)) as engine:
        before = engine.call("state_checksum")
        args = [("train_step", (rows(2),), {"scale": bad if rank == 1 else 1.0}) for rank in range(2)]
        engine.call_each("call_method", args)
        for result in engine.method("optimizer_step"):
            assert not result["stepped"]
            assert "gradient norm is" in result["skipped"]
        assert engine.call("state_checksum") == before
        train(engine, rows(2))
        assert engine.method("optimizer_step")[0]["stepped"]  # usable, and nothing of the bad gradient is left
        assert engine.call("state_checksum") != before


def test_weight_decay_spares_biases_and_norms(qwen: str) -> None:
    def groups() -> Any:
        optimizer = strategy.create_optimizer(module, lr=1.0, weight_decay=0.5)  # type: ignore[name-defined]
        return [(g["weight_decay"], sorted({p.dim() for p in g["params"]})) for g in optimizer.param_groups]

    with ranks(2, qwen_on_meta(qwen)) as engine:
        assert sorted(engine.run(groups)[0]) == [(0.0, [1]), (0.5, [2])]


def test_ranks_reduce_and_gather_numbers_and_tensors(qwen: str) -> None:
    def exchange() -> Any:
        import torch

        s = strategy  # type: ignore[name-defined]
        return (
            s.all_reduce(float(s.rank), "sum"),
            s.all_reduce(torch.tensor([1.0 + s.rank]), "mean").tolist(),
            s.all_gather(float(s.rank)),
            s.all_gather(torch.full((1, 2), s.rank)).tolist(),
            s.is_rank_0(),
        )

    with ranks(2, qwen_on_meta(qwen)) as engine:
        assert engine.run(exchange) == [
            (1.0, [1.5], [0.0, 1.0], [[0, 0], [1, 1]], True),
            (1.0, [1.5], [0.0, 1.0], [[0, 0], [1, 1]], False),
        ]


def test_replicas_of_shards_train_as_one(qwen: str) -> None:
    data = rows(4, 9)
    expected, _ = plain_loop(qwen, [[data]])
    with ranks(2, qwen_on_meta(qwen), shard_size=1) as engine:
        train(engine, data)
        engine.method("optimizer_step")
        assert_close(parameters(engine), expected)
        assert engine.call("memory")[0]["weights"] == sum(p.numel() * 4 for p in expected.values())


def test_an_evaluation_between_backward_and_step_does_not_leave_stale_weights(qwen: str) -> None:
    class Evaluating(TrainedQwen):
        def logits_of(self, ids: list[list[int]]) -> Any:
            with torch.no_grad():
                return self(torch.tensor(ids)).logits

    with ranks(2, qwen_on_meta(qwen, Evaluating)) as engine:
        train(engine, rows(4))
        before = engine.method("logits_of", rows(1))[0]
        engine.method("optimizer_step")
        after = engine.method("logits_of", rows(1))[0]
        reference = Qwen2ForCausalLM.from_pretrained(qwen)
        reference.load_state_dict(copy.deepcopy(parameters(engine)), strict=False)
        with torch.no_grad():
            torch.testing.assert_close(after, reference(torch.tensor(rows(1))).logits, rtol=0, atol=1e-5)
        assert not torch.allclose(before, after, atol=1e-3)


def test_an_unknown_reduction_and_option_are_refused(qwen: str) -> None:
    def wrong() -> None:
        strategy.backward(None, module, reduction="median")  # type: ignore[name-defined]

    with ranks(1, qwen_on_meta(qwen)) as engine, pytest.raises(EngineError, match="'mean' or 'sum'"):
        engine.run(wrong)

"""What ranks say to each other, and where memory is: reductions, printing, offloading in pairs, moving averages."""

from __future__ import annotations

import re
import socket
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from transformers import Qwen2ForCausalLM

from rlbench.errors import DataError, EngineError, StateError
from rlbench.strategies import FakeStrategy, FSDPV2Strategy, StrategyConfig
from rlbench.strategies.fsdp2 import local_rank
from tests.ranks import Ranks, said_by_fork
from tests.strategies.surface import assert_close, rows, run_steps, said_by, whole


def test_each_rank_gets_its_own_part_of_what_rank_0_holds(engine: Ranks) -> None:
    def scattered() -> Any:
        return strategy.control.scatter([["a"], {"b": 2}] if rank == 0 else None)  # type: ignore[name-defined]

    assert engine.run(scattered) == [["a"], {"b": 2}]
    assert FakeStrategy().control.scatter([7]) == 7


def test_every_rank_gets_what_each_has_however_long(engine: Ranks) -> None:
    def gathered(sizes: tuple[int, int]) -> Any:
        control = strategy.control  # type: ignore[name-defined]
        return [len(own) for own in control.gather("x" * sizes[rank])], control.unanimous(rank == 0)  # type: ignore[name-defined]

    for sizes in ((0, 7), (3, 5000), (6000, 5000)):
        assert engine.run(gathered, sizes) == [(list(sizes), False)] * 2
    assert FakeStrategy().control.gather("own") == ["own"] and FakeStrategy().control.unanimous(True)


def test_a_loader_reads_each_item_once_on_one_rank_and_goes_on_where_it_was(engine: Ranks) -> None:
    """Defect absent: items of the last batches were read twice, and counted twice by an evaluation."""

    def read(options: Any, together: int = 1) -> Any:
        s = FSDPV2Strategy(seed=3, args={"tensor_parallel": together})
        loader = s.setup_dataloader(list(range(11)), 2, collate_fn=list, **options)
        return list(loader), len(loader)

    parts = [part for part, _ in engine.run(read, {})]
    assert [len(part) for part in parts] == [2, 2], "as many on each"
    seen = [item for part in parts for batch in part for item in batch]
    assert len(set(seen)) == len(seen) == 8 and seen != sorted(seen)
    assert engine.run(read, {"consumed_samples": 4})[0][0] == parts[0][1:], "those after the first two of each"
    every = engine.run(read, {"shuffle": False, "drop_last": False})
    assert every == [([[0, 2], [4, 6], [8, 10]], 3), ([[1, 3], [5, 7], [9]], 3)]
    theirs, same = engine.run(read, {}, 2)
    assert theirs == same and theirs[1] == 5, "ranks that compute layers together read the same"
    loader = FakeStrategy().setup_dataloader(list(range(6)), 6, collate_fn=list)
    first = next(iter(loader))
    loader.sampler.set_epoch(1)  # type: ignore[attr-defined]
    assert sorted(first) == list(range(6)) and next(iter(loader)) != first
    with pytest.raises(DataError, match="consumed_samples=12"):
        FakeStrategy().setup_dataloader(list(range(6)), 2, consumed_samples=12)


def test_numbers_tensors_and_dicts_are_reduced_and_left_as_they_were(engine: Ranks) -> None:
    """Defect absent: a mean divided the caller's own tensor in place."""

    def reduced() -> Any:
        s = FSDPV2Strategy()
        mine = torch.tensor([2.0, 4.0]) * (s.rank + 1)
        kept = mine.clone()
        data = {"loss": 1.0 + s.rank, "count": 2**52 + s.rank, "each": mine}
        return (
            {op: s.all_reduce(data["loss"], op) for op in ("mean", "sum", "max", "min")},
            s.all_reduce(data),
            s.all_reduce(data["count"], "max"),
            torch.equal(mine, kept),
            s.all_reduce(torch.tensor([1, 2]) * s.rank, "sum").tolist(),
        )

    numbers, means, most, untouched, whole_numbers = engine.run(reduced)[1]
    assert numbers == {"mean": 1.5, "sum": 3.0, "max": 2.0, "min": 1.0}
    assert means["loss"] == 1.5 and means["each"].tolist() == [3.0, 6.0]
    assert (most, untouched, whole_numbers) == (2**52 + 1, True, [1, 2])
    assert isinstance(most, int)


def test_an_unknown_operation_is_refused(engine: Ranks) -> None:
    def product() -> None:
        FSDPV2Strategy().all_reduce(1.0, "prod")

    with pytest.raises(EngineError, match="all_reduce knows mean, max, sum and min"):
        engine.run(product)


def test_ranks_with_different_numbers_of_rows_are_joined_in_order(engine: Ranks) -> None:
    """Defect absent: unequal counts hung, or came back as padding."""

    def joined() -> Any:
        s = FSDPV2Strategy()
        uneven = torch.full((2 * s.rank + 1, 2), s.rank)
        data = {"rows": uneven, "none": torch.zeros(0, 3) if s.rank else torch.ones(1, 3), "one": torch.tensor(s.rank)}
        return {k: v.tolist() for k, v in s.all_gather(data).items()}, s.all_gather(s.rank), s.all_gather(0.5)

    expected = {"rows": [[0, 0], [1, 1], [1, 1], [1, 1]], "none": [[1.0, 1.0, 1.0]], "one": [0, 1]}
    assert engine.run(joined) == [(expected, [0, 1], [0.5, 0.5])] * 2


def test_rank_0_alone_prints_with_the_time(engine: Ranks) -> None:
    def printed() -> Any:
        s = FSDPV2Strategy()
        return said_by(lambda: s.print("step", 3))[1], s.is_rank_0(), s.get_rank()

    (first, *zero), (second, *one) = engine.run(printed)
    assert re.fullmatch(r"\[StrategyINFO \d\d-\d\d \d\d:\d\d:\d\d\]  step 3\n", first) and second == ""
    assert (zero, one) == ([True, 0], [False, 1])


def test_one_seed_gives_all_ranks_the_same_numbers_and_another_seed_others(engine: Ranks) -> None:
    def drawn() -> Any:
        import random

        import numpy as np

        s = FSDPV2Strategy(seed=5)
        found = []
        for seed in (None, 5, 6):
            s.set_seed(seed)
            found.append((random.random(), float(np.random.rand()), float(torch.rand(1))))
        return found

    first, second = engine.run(drawn)
    assert first == second and first[0] == first[1] != first[2]


def test_the_memory_line_has_the_reference_form_and_names_what_was_measured(engine: Ranks) -> None:
    """Where there is no GPU it must not say DRIVER_USED."""

    def reported() -> Any:
        s = FSDPV2Strategy()
        return said_by(lambda: s.report_memory("after step"))

    (found, line), (_, nothing) = engine.run(reported)
    said = re.fullmatch(r"MEMORY STATUS: after step, HOST_USED=(\d+\.\d\d) GB, RSS=(\d+\.\d\d) GB\n", line)
    assert said is not None and nothing == ""
    assert float(said[2]) == pytest.approx(found["rss"] / 1e9, abs=0.01) and found["rss"] > 5e7
    assert found["rss"] < found["host_used"] < psutil.virtual_memory().total


def test_offload_and_load_come_in_pairs_and_return_the_optimizer(qwen: str, engine: Ranks) -> None:
    """Defects absent: both returned None, and a forgotten load was not noticed."""

    def paired() -> Any:
        s = FSDPV2Strategy(bf16=False, args={"adam_offload": True})
        model = s.prepare_model(nn.Linear(4, 4), True)
        optimizer = s.create_optimizer(model, lr=1e-2)
        other = s.create_optimizer(model, lr=1e-2)
        same = [s.maybe_load_optimizer(optimizer) is optimizer]  # loading first is how a loop begins
        s.backward(model(torch.ones(1, 4)).sum(), model, optimizer)
        s.optimizer_step(optimizer, model, None)
        same += [s.maybe_offload_optimizer(optimizer) is optimizer, s.maybe_offload_optimizer(optimizer) is optimizer]
        s.backward(model(torch.ones(1, 4)).sum(), model, optimizer)
        try:
            s.optimizer_step(optimizer, model, None)
        except StateError as error:
            refusal = str(error)
        s.need_optimizer(other)
        same.append(s.maybe_load_optimizer(optimizer, device="cpu") is optimizer)
        return same, refusal, s.optimizer_step(optimizer, model, None)["stepped"]

    same, refusal, stepped = engine.run(paired)[0]
    assert same == [True] * 4 and stepped
    assert "maybe_load_optimizer" in refusal


def test_without_adam_offload_nothing_is_offloaded(engine: Ranks) -> None:
    def left() -> Any:
        s = FSDPV2Strategy(bf16=False)
        model = s.prepare_model(nn.Linear(4, 4), True)
        optimizer = s.maybe_offload_optimizer(s.create_optimizer(model, lr=1e-2))
        s.backward(model(torch.ones(1, 4)).sum(), model, optimizer)
        return s.optimizer_step(optimizer, model, None)["stepped"]

    assert engine.run(left) == [True, True]


def test_an_offloaded_model_refuses_to_compute_until_it_is_reloaded(qwen: str, engine: Ranks) -> None:
    def one_at_a_time() -> Any:
        s = FSDPV2Strategy(bf16=False)
        models = [s.prepare_model(Qwen2ForCausalLM.from_pretrained(qwen)) for _ in range(2)]
        ids = torch.tensor(rows(1))
        with torch.no_grad():
            before = models[0](ids).logits
        s.offload_model([*models, "a remote reward", None])
        s.offload_model(models[0])
        try:
            models[0](ids)
        except StateError as error:
            refusal = str(error)
        moved = s.reload_model(models[0])
        s.reload_model(models[0])
        with torch.no_grad():
            same = torch.equal(models[0](ids).logits, before)
        try:
            models[1](ids)
        except StateError:
            return refusal, moved, same, True

    refusal, moved, same, other_still_away = engine.run(one_at_a_time)[0]
    assert "is offloaded; call strategy.reload_model(model)" in refusal
    assert (moved, same, other_still_away) == (0, True, True)


@pytest.mark.parametrize("form", ["sharded", "replicated", "whole"])
def test_the_moving_average_of_a_sharded_model_is_the_formula(qwen: str, engine: Ranks, form: str) -> None:
    """Defect absent: there was none under FSDP."""

    def averaged() -> Any:
        s = FSDPV2Strategy(bf16=False)
        model = s.prepare_model(Qwen2ForCausalLM.from_pretrained(qwen), True)
        ema = Qwen2ForCausalLM.from_pretrained(qwen)
        if form != "whole":
            s.prepare_model(ema, shard_size=-1 if form == "sharded" else 1)
        first = whole(dict(model.named_parameters()))
        run_steps(s, model, s.create_optimizer(model, lr=1e-1), [[rows(4)]])
        s.moving_average(model, ema, beta=0.75, device="cpu")
        s.moving_average(model, ema, beta=0.75)
        return first, whole(dict(model.named_parameters())), whole(dict(ema.named_parameters()))

    for first, last, ema in engine.run(averaged):
        assert_close(ema, {n: 0.75 * (0.75 * first[n] + 0.25 * last[n]) + 0.25 * last[n] for n in first}, atol=1e-6)


def test_a_moving_average_that_would_stand_still_and_one_of_another_model_are_refused(engine: Ranks) -> None:
    def refused() -> Any:
        s, said = FSDPV2Strategy(), []
        for ema in (nn.Linear(2, 2, dtype=torch.bfloat16), nn.Linear(2, 2, bias=False)):
            try:
                s.moving_average(nn.Linear(2, 2), ema)
            except EngineError as error:
                said.append(str(error))
        return said

    half, other = engine.run(refused)[0]
    assert "in bfloat16" in half and "prepare_model(model_ema, is_training=True)" in half
    assert "other parameters than the model; first bias" in other


def test_what_is_wrapped_as_module_is_unwrapped(engine: Ranks) -> None:
    def unwrapped() -> Any:
        s = FSDPV2Strategy()
        inner = nn.Linear(2, 2)
        wrapper = nn.Module()
        wrapper.module = inner
        s.sync_and_clear_cache()
        return s.unwrap_model(wrapper) is inner, s.unwrap_model(inner) is inner

    assert engine.run(unwrapped)[0] == (True, True)


def test_ranks_share_a_batch_by_the_rule_with_its_numbers(engine: Ranks) -> None:
    def made(**sizes: int) -> Any:
        try:
            return FSDPV2Strategy(**sizes).accumulation
        except ValueError as error:
            return str(error)

    assert engine.run(lambda: made(micro_train_batch_size=2, train_batch_size=12)) == [3, 3]
    assert engine.run(lambda: made(micro_train_batch_size=4)) == [1, 1]  # the class's default asks for no accumulation
    for text in engine.run(lambda: made(micro_train_batch_size=2, train_batch_size=6)):
        assert "Required: 6 % (2 * 2) == 0" in text


def test_get_strategy_prints_its_options_once_and_obeys_the_batch_rule(engine: Ranks) -> None:
    from rlbench.strategies import get_strategy

    def made(**options: Any) -> Any:
        s, said = said_by(lambda: get_strategy({"fsdp": True, **options}))
        return type(s).__name__, s.accumulation, s.max_norm, s.seed, said

    options = {"seed": 7, "max_norm": 0.5, "micro_train_batch_size": 4, "train_batch_size": 16}
    (*first, summary), (*second, nothing) = engine.run(lambda: made(**options))
    assert first == second == ["FSDPV2Strategy", 2, 0.5, 7]
    assert "train_batch_size: 16 (Overridden)" in summary and nothing == ""
    with pytest.raises(ValueError, match=r"Required: 1 % \(1 \* 2\) == 0"):
        engine.run(lambda: made(train_batch_size=1))


def test_a_script_under_torchrun_joins_the_group_it_describes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
    code = (
        f"import os; os.environ.update({given}); "
        "from rlbench.strategies import get_strategy; import torch.distributed as dist; "
        "s = get_strategy({'fsdp': True, 'train_batch_size': 2}); "
        "print('RANKS', s.world_size, dist.get_backend(), s.all_reduce(3.0, 'sum')); dist.destroy_process_group()"
    )
    assert "RANKS 1 gloo 3.0" in said_by_fork(code)


def test_local_rank_says_which_gpu_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("RANK", "5")
    assert local_rank(StrategyConfig()) == 5
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert local_rank(StrategyConfig()) == 1
    assert local_rank(StrategyConfig(local_rank=3)) == 3

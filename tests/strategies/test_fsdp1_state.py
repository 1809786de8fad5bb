"""What is kept of modules that FSDP1 holds, and goes elsewhere: to FSDP2 and back, to snapshots, files and engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2ForCausalLM

from rlbench.data.base.ragged import rows_in_order
from rlbench.errors import StateError
from tests.modules import qwen_on_meta
from tests.ranks import Ranks, ranks
from tests.strategies.flat_modules import KINDS, STEPS, FlatQwen, ShardedQwen, train, weights
from tests.strategies.surface import assert_close, run_steps, train_by_hand, whole
from tests.trainers.policy_reference import batch as policy_batch

ACCUMULATING = {"micro_train_batch_size": 2, "train_batch_size": 8}


@pytest.fixture(params=[1, 2], ids=["one-rank", "two-ranks"])
def flat(request: Any, qwen: str) -> Iterator[Ranks]:
    with ranks(request.param, qwen_on_meta(qwen, FlatQwen), executor="fsdp1") as made:
        yield made


class Renamed(FlatQwen):
    def postprocess_output_named_parameters(self, name: str, param: Any, full_state_dict: Any) -> Any:
        if name.endswith("up_proj.weight"):
            gate = full_state_dict[name.replace("up_proj", "gate_proj")].full_tensor()
            return name, param.full_tensor() + gate
        return None if name.endswith("k_proj.bias") else (name, param.full_tensor())


@pytest.mark.parametrize("count", [1, 2])
def test_a_hook_is_given_parameters_that_it_can_gather(qwen: str, tmp_path: Path, count: int) -> None:
    with ranks(count, qwen_on_meta(qwen, Renamed), executor="fsdp1") as made:
        made.call("save_weights", str(tmp_path / "out"), "float32")
    found, plain = (
        load_file(tmp_path / "out" / "model.safetensors"),
        Qwen2ForCausalLM.from_pretrained(qwen).state_dict(),
    )
    name, gate = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.gate_proj.weight"
    assert torch.equal(found[name], plain[name] + plain[gate]) and torch.equal(found[gate], plain[gate])
    assert "model.layers.1.self_attn.k_proj.bias" not in found and len(found) == len(plain) - 3  # two biases, and a tie


def test_a_model_without_weights_takes_a_checkpoint_that_has_all_of_them(qwen: str, tmp_path: Path) -> None:
    def work() -> Any:
        s = strategy  # type: ignore[name-defined]
        folder = s.save_ckpt(module, str(tmp_path), "x")  # type: ignore[name-defined]
        with s.init_model_context(meta_init=True):
            plain = Qwen2ForCausalLM(module.config)  # type: ignore[name-defined]
        plain.name_or_path = ""
        model = s.prepare_model(plain, is_training=True)
        empty = s.is_empty(model)
        s.load_ckpt(model, folder)
        return empty, s.is_empty(model), whole({name: p.full_tensor() for name, p in model.named_parameters()})

    with ranks(2, qwen_on_meta(qwen, FlatQwen), executor="fsdp1") as made:
        before, after, found = made.run(work)[0]
    assert (before, after) == (True, False)
    assert_close(found, dict(Qwen2ForCausalLM.from_pretrained(qwen).named_parameters()), atol=0)


ARRANGED = [("fsdp1", 2), ("fsdp2", 1), ("fsdp1", 1), ("fsdp2", 2), ("fsdp1", 2)]


def test_a_run_goes_on_in_the_other_on_any_number_of_ranks(qwen: str, tmp_path: Path) -> None:
    steps, before = [*STEPS, *STEPS[:2]], ""
    expected = train_by_hand(qwen, steps, max_norm=0.5)
    for number, ((kind, count), step) in enumerate(zip(ARRANGED, steps, strict=True)):
        with ranks(count, qwen_on_meta(qwen, KINDS[kind]), executor=kind) as made:
            if before:
                made.call("load_checkpoint", before)
            train(made, [step])
            before = made.call("save_checkpoint", str(tmp_path), f"after-{number}", "{}")[0].path
            found, sums = weights(made), made.call("state_checksum")
            if number == len(steps) - 1:
                snapshot = str(tmp_path / "snapshot")
                made.call("write_snapshot", snapshot)
                kept = made.call("training_checksums")
                train(made, STEPS[:1])
                assert made.call("training_checksums") != kept
                made.call("read_snapshot", snapshot)
                assert made.call("training_checksums") == kept and made.call("state_checksum") == sums
    assert_close(found, expected["parameters"], atol=1e-5)


def test_states_release_and_bring_back(flat: Ranks, qwen: str) -> None:
    expected = train_by_hand(qwen, STEPS, max_norm=0.5)
    train(flat, STEPS[:1])
    for state in ("cpu", "cuda"):
        flat.call("to_state", state)
    train(flat, STEPS[1:])
    assert_close(weights(flat), expected["parameters"], atol=1e-5)
    freed = flat.call("to_state", "meta")
    total = sum(tensor.numel() for tensor in expected["parameters"].values())
    assert sum(one["freed"] for one in freed) >= 3 * 4 * total
    with pytest.raises(StateError, match="meta"):
        flat.method("accumulate", STEPS[0][0], 1)
    flat.call("to_state", "cuda")
    train(flat)
    assert_close(weights(flat), expected["parameters"], atol=1e-5)


def test_a_model_that_a_script_prepares_trains_is_kept_and_averaged(qwen: str, tmp_path: Path) -> None:
    folder, saved = str(tmp_path), str(tmp_path / "hf")

    def work() -> Any:
        s = strategy  # type: ignore[name-defined]
        plain = Qwen2ForCausalLM.from_pretrained(qwen)
        model, optimizer = s.prepare((plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)))
        average = s.prepare_model(Qwen2ForCausalLM.from_pretrained(qwen), is_training=True)
        run_steps(s, model, optimizer, STEPS[:1])
        s.save_ckpt(model, folder, "one", optimizer=optimizer)
        run_steps(s, model, optimizer, STEPS[1:2])
        s.moving_average(model, average, beta=0.75)
        s.save_model(model, None, saved)
        s.load_ckpt(model, folder, optimizer)
        run_steps(s, model, optimizer, STEPS[1:2])
        return whole({name: p.full_tensor() for name, p in (*model.named_parameters(),)}), whole(
            {name: p.full_tensor() for name, p in average.named_parameters()}
        )

    with ranks(2, qwen_on_meta(qwen, FlatQwen), executor="fsdp1", **ACCUMULATING) as made:
        found, average = made.run(work)[0]
    kept, before = (dict(Qwen2ForCausalLM.from_pretrained(path).named_parameters()) for path in (saved, qwen))
    assert_close(kept, found, atol=0)
    assert_close(average, {name: 0.75 * p.detach() + 0.25 * found[name] for name, p in before.items()}, atol=1e-6)


def test_a_snapshots_weights_are_lent_and_staged_ones_taken(qwen: str, tmp_path: Path) -> None:
    snapshot, staging = str(tmp_path / "snapshot"), {"transport": "shm", "prefix": "rlb-test-fsdp1"}
    with ranks(2, qwen_on_meta(qwen, FlatQwen), executor="fsdp1") as made:
        made.call("write_snapshot", snapshot)
        before, scored = made.call("state_checksum"), made.call("policy_forward", policy_batch(), {})
        train(made)
        now = made.call("training_checksums")
        lent = made.call("lend_snapshot", snapshot, staging, policy_batch(), {})
        assert made.call("training_checksums") == now
        both = (rows_in_order(parts)["logprobs"] for parts in (scored, [part for _, part in lent]))
        for row, other in zip(*both, strict=True):
            assert np.array_equal(row, other)
        made.call("load_staged", asdict(lent[0][0]))
        made.call("forget_weights", staging["prefix"])
        assert made.call("state_checksum") == before


@pytest.mark.parametrize(("count", "shards"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_copies_train_alike_and_are_kept_once(qwen: str, tmp_path: Path, count: int, shards: int) -> None:
    with ranks(count, qwen_on_meta(qwen, FlatQwen), executor="fsdp1", shard_size=shards) as made:
        train(made, STEPS[:1])
        saved = made.call("save_checkpoint", str(tmp_path), "x", "{}")[0]
        norms = train(made, STEPS[1:])
        numbers = made.run(lambda: sum(parameter.numel() for parameter in module.parameters()))  # type: ignore[name-defined]
    assert norms == pytest.approx(train_by_hand(qwen, STEPS, max_norm=0.5)["norms"][1:], abs=1e-5)
    assert sum(numbers) == count // shards * sum(p.numel() for p in Qwen2ForCausalLM.from_pretrained(qwen).parameters())
    with ranks(2, qwen_on_meta(qwen, ShardedQwen)) as made:
        made.call("load_checkpoint", saved.path)
        assert train(made, STEPS[1:]) == pytest.approx(norms, abs=1e-5)
        again = made.call("save_checkpoint", str(tmp_path), "y", "{}")[0]
    assert saved.bytes < 1.1 * again.bytes

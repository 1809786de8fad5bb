"""Which weights need not travel: digests that every byte and its place count in, and groups that go as a whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlbench.weights.manifest import Layout, Manifest
from rlbench.weights.unchanged import BLOCK, Record, digests, group_of, whole_groups

LAYOUT = (("a.0.w", torch.float32, (2,)), ("a.0.b", torch.float32, (2,)), ("a.1.w", torch.float32, (2,)))


def digest(tensor: torch.Tensor) -> tuple[int, int, int]:
    return digests({"w": tensor})["w"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.tensor([True, False, True]),
        torch.randn(7, 3, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
        torch.arange(20.0).reshape(4, 5).t(),
        torch.arange(41, dtype=torch.uint8)[1:],  # begins within an element of a sum
        torch.arange(5.0 * BLOCK),  # of several blocks
    ],
    ids=["scalar", "bool", "half", "transposed", "slice", "blocks"],
)
def test_the_same_bytes_have_the_same_digest_wherever_they_lie(tensor: torch.Tensor) -> None:
    assert digest(tensor) == digest(tensor.contiguous().clone()) == digest(tensor.clone())


def test_each_byte_and_its_place_counts() -> None:
    base = torch.arange(50, dtype=torch.uint8)
    changed = {f"rolled by {n}": base.roll(n) for n in range(50)}
    for index in range(50):
        for bit in range(8):
            other = changed[f"bit {bit} of {index}"] = base.clone()
            other[index] ^= 1 << bit
    assert len(set(digests(changed).values())) == len(changed) == 50 + 50 * 8


def test_blocks_that_change_places_change_the_digest_and_so_do_signs_of_zero() -> None:
    values = torch.zeros(4, 2 * BLOCK)  # a row is a block
    values[1] = 1.0
    assert len({digest(values.roll(n, 0)) for n in range(4)}) == 4
    assert digest(torch.zeros(4)) != digest(-torch.zeros(4)) != digest(torch.zeros(5))
    first, second = values.clone(), values.clone()
    first[0, :2], second[0, 2:4] = 1.0, 1.0
    assert digest(first)[1:] != digest(second)[1:]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_signs_that_change_in_pairs_do_not_cancel(dtype: torch.dtype) -> None:
    values = torch.arange(1, 65, dtype=torch.float32).to(dtype)
    changed = {"none": values, "all": -values}
    for first in range(64):
        for second in range(first):
            other = changed[f"{first}, {second}"] = values.clone()
            other[[first, second]] *= -1
    assert len(set(digests(changed).values())) == 2 + 64 * 63 // 2


def test_both_sums_are_taken_of_all_bytes_but_not_alike() -> None:
    _, first, second = digest(torch.arange(100.0))
    assert first != second


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "model.layers.3"),
        ("model.layers.3.mlp.experts.7.up_proj.weight", "model.layers.3"),
        ("visual.blocks.0.attn.qkv.bias", "visual.blocks.0"),
        ("visual.merger.mlp.2.weight", "visual.merger.mlp.2"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("model.visual.pos_embed.weight", "model.visual.pos_embed"),
        ("model.norm.weight", "model"),
        ("visual.merger.gate_proj.weight", "visual.merger"),  # which vLLM fuses with up_proj
        ("visual.merger.up_proj.weight", "visual.merger"),
        ("visual.head.attention.in_proj_weight", "visual.head"),
        ("lm_head.weight", ""),
        ("scale", ""),
    ],
)
def test_what_a_replica_may_fuse_is_one_group(name: str, group: str) -> None:
    assert group_of(name) == group


def test_a_group_in_which_anything_changed_goes_as_a_whole() -> None:
    names = [name for name, _, _ in LAYOUT]
    assert whole_groups(names, ["a.0.b"]) == {"a.1.w"}
    assert whole_groups(names, []) == set(names)
    assert whole_groups(names, names) == set()


def test_unchanged_is_what_was_frozen_before_and_now_with_the_same_digest() -> None:
    before = Record("t", LAYOUT, {"a.0.w": (8, 1, 2), "a.0.b": (8, 3, 4)})
    assert before.differing(before) == {"a.1.w"}
    assert before.differing(replace(before, digests={"a.0.w": (8, 1, 2)})) == {"a.0.b", "a.1.w"}, "trained now"
    assert before.differing(replace(before, digests={"a.1.w": (8, 5, 6)})) == {"a.0.w", "a.0.b", "a.1.w"}, "frozen now"
    assert before.differing(replace(before, digests={"a.0.w": (8, 1, 9)})) == {"a.0.w", "a.0.b", "a.1.w"}
    other = replace(before, layout=(*LAYOUT[:2], ("a.1.w", torch.bfloat16, (2,))))
    assert before.differing(other) == {"a.0.w", "a.0.b", "a.1.w"}, "of another model nothing is known"


def test_a_part_of_a_manifest_and_what_it_leaves_out_are_the_whole_again() -> None:
    tensors = [(f"w{i}", torch.ones(100 if i % 3 else 0)) for i in range(40)]
    buckets = Layout(900, tensors).buckets
    whole = Manifest("shm", tuple(replace(bucket, path=f"/dev/shm/x-{i}") for i, bucket in enumerate(buckets)))
    assert len(buckets) > 10
    part = replace(whole.parted({"w1", "w5", "w38"}), token="new", follows="old")
    assert [entry.name for entry in part.entries] == ["w1", "w5", "w38"] and part.nbytes == 1200
    assert len(list(part.left_out)) == 37 and part.shapes == whole.shapes
    assert part.whole() == whole == whole.whole()


@pytest.mark.gpu
def test_a_gpu_says_the_digests_of_the_host() -> None:
    values = torch.randn(3 * BLOCK + 5, generator=torch.Generator().manual_seed(0))
    tensors = {"w": values, "half": values.to(torch.bfloat16), "odd": values.view(torch.uint8)[1:-2], "one": values[:1]}
    assert digests({name: tensor.cuda() for name, tensor in tensors.items()}) == digests(tensors)

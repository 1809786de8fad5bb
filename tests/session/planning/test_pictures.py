"""A plan of a model that sees: its tower, and the pictures of a step, against a rank that takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

import rlbench as rb
from rlbench.cli import main
from rlbench.data.base.ragged import Ragged
from rlbench.data.batches.batch import TrainBatch
from rlbench.data.prompts.images import EncodedImage
from rlbench.errors import BuildError
from rlbench.session.checks.rehearsal import worst_batch
from rlbench.session.planning.pictures import Pictures
from rlbench.session.planning.uses import RANK, REPLICA
from tests.modules import save_qwen
from tests.session.planning.measuring import LENGTH, TOKENS, assert_as_planned
from tests.trainers.seeing import FAMILIES, save_eyes

SIZE = 112
ONE_QUICK = [FAMILIES[0], *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES[1:])]
WORDS = 256
"""Token ids below the placeholder's."""
FEW = 4 * LENGTH
"""Tokens of a micro-batch where sizes are compared: a tower lays out each picture of it on meta."""


@pytest.fixture(scope="module", params=ONE_QUICK)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_eyes(tmp_path_factory.mktemp(request.param), request.param)


def tokens_of(path: str, pictures: Pictures) -> int:
    merge = AutoConfig.from_pretrained(path).vision_config.spatial_merge_size
    return pictures.count * int(np.prod(pictures.grid(path))) // merge**2


def showing(path: str, pictures: Pictures, ranks: int) -> TrainBatch:
    """Two micro-batches for each rank, of sequences that show different pictures."""
    placeholder, tokens = AutoConfig.from_pretrained(path).image_token_id, tokens_of(path, pictures)
    rows = 2 * TOKENS // LENGTH
    rest = LENGTH - tokens - pictures.count + 1  # of a row: a prompt's token, and the response
    batch = worst_batch(rows * rest, rest, ranks, WORDS)
    shown = [placeholder] * (tokens // pictures.count)
    prompt = [*(token for _ in range(pictures.count) for token in (*shown, 1))]  # a token after each
    prompts = Ragged.from_rows([prompt] * len(batch), np.int32)
    sizes = (len(batch), pictures.count, pictures.height, pictures.width, 3)
    pixels = np.random.default_rng(0).integers(0, 256, sizes, np.uint8)
    return batch.replace(prompts=prompts, images=tuple(tuple(map(EncodedImage.from_any, own)) for own in pixels))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "ranks", "count"),
    [({}, 2, 2), ({"lora": rb.Lora(rank=8)}, 1, 2), ({"gradient_checkpointing": True}, 1, 2)],
    ids=str,
)
def test_a_rank_that_sees_takes_what_was_planned(seeing: str, train: dict[str, Any], ranks: int, count: int) -> None:
    pictures = Pictures(count, SIZE, SIZE)
    assert_as_planned(seeing, train, ranks, showing(seeing, pictures, ranks), str(pictures))


def test_pictures_cost_activations_on_ranks_and_room_in_replicas(seeing: str) -> None:
    how: dict[str, Any] = {"gpus": "0x8GiB", "lengths": LENGTH, "token_budget": FEW}
    blind, one, two = (rb.plan(seeing, images=text, **how) for text in (None, "112x112", "2x112x112"))
    assert blind.of(RANK, "activations") < one.of(RANK, "activations") < two.of(RANK, "activations")
    for owner in ("activations", "encoded pictures"):
        assert blind.of(REPLICA, owner) < one.of(REPLICA, owner) == two.of(REPLICA, owner), "as many tokens at a time"
    assert blind.of(RANK, "weights") == one.of(RANK, "weights") == 4 * one.parameters, "the tower's among them"
    grid, rows = Pictures(1, SIZE, SIZE).grid(seeing), FEW // LENGTH
    vision = AutoConfig.from_pretrained(seeing).vision_config
    patch = 4 * vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    assert one.of(RANK, "pixels") == two.of(RANK, "pixels") / 2 == rows * int(np.prod(grid)) * patch
    assert any("no pictures" in note for note in blind.notes)
    assert any(
        f"{rows} pictures" in note and f"{tokens_of(seeing, Pictures(1, SIZE, SIZE))} tokens" in note
        for note in one.notes
    )
    assert not any("estimate: " in note for note in one.notes), "the pass was run on meta"


def test_on_gpus_pixels_stay_on_the_host_and_a_reference_sees_too(seeing: str) -> None:
    plan = rb.plan(seeing, images="112x112", gpus="1x8GiB", lengths=LENGTH, token_budget=FEW, reference=True)
    assert {use.role for use in plan.host if use.owner == "pixels"} == {RANK, "reference"}
    blind = rb.plan(seeing, gpus="1x8GiB", lengths=LENGTH, token_budget=FEW, reference=True)
    assert plan.of("reference", "activations") > blind.of("reference", "activations")
    assert plan.of(REPLICA, "KV cache") < blind.of(REPLICA, "KV cache"), "of vLLM's share of the GPU"


def test_the_command_line_counts_them_too(seeing: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--lengths", str(LENGTH), "--token-budget", str(FEW)]
    assert main(["plan", seeing, "--images", "112x112", "--gpus", "0x8GiB", *sizes]) == 0
    assert "encoded pictures" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "448", "0x448x448", "448x0", "2x448x448x3", "big", 448])
def test_what_are_no_pictures_is_refused_with_an_example(text: Any) -> None:
    with pytest.raises(BuildError, match="2x1280x800"):
        Pictures.of(text)


def test_pictures_that_no_step_could_have_are_refused(seeing: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="model of text"):
        rb.plan(save_qwen(tmp_path), images="112x112")
    with pytest.raises(BuildError, match="sequence_parallel=1"):
        rb.plan(seeing, train={"sequence_parallel": 2, "shards": 2}, images="112x112", gpus="2x8GiB")
    with pytest.raises(BuildError, match="fewer or smaller"):
        rb.plan(seeing, images="9x112x112", lengths=64, gpus="0x8GiB")
    with pytest.raises(BuildError, match="images=1x30000"):
        rb.plan(seeing, images="1x30000", lengths=64, gpus="0x8GiB")

"""The models beside a policy: over how many ranks a reference is split, what a critic's head is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from rlbench.errors import BuildError
from rlbench.options import OptionError
from rlbench.strategies import FSDPV2Strategy, get_fake_strategy
from rlbench.trainers.models.value_model import make_critic
from rlbench.trainers.options.specs import SessionEngine, TrainerSpec
from rlbench.trainers.ppo.building import _critic, reference_of
from tests.modules import qwen_on_meta
from tests.ranks import ranks
from tests.trainers.making import qwen_of


def test_a_reference_is_split_over_as_many_ranks_as_are_asked_for(qwen: str) -> None:
    def shares() -> list[tuple[float, float]]:
        strategy: Any = FSDPV2Strategy(bf16=False)
        found = []
        for shard_size in (None, 2, 1):
            model = reference_of(strategy, qwen_of(qwen), qwen, True, shard_size)
            weight = model.model.embed_tokens.weight
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            logits = model(torch.arange(5, device=local.device)[None]).logits
            found.append((local.numel() / weight.numel(), float(logits.float().sum())))
        return found

    with ranks(2, qwen_on_meta(qwen)) as engine:
        for found in engine.run(shares):
            assert [share for share, _ in found] == [0.5, 0.5, 1.0]
            assert found[0][1] == pytest.approx(found[2][1], rel=1e-5)


def test_shards_of_a_reference_that_is_not_made_are_refused(qwen: str) -> None:
    strategy: Any = get_fake_strategy({"bf16": False})
    for wanted, why in ((None, "there is none"), (SessionEngine("reference"), "the session holds it")):
        with pytest.raises(OptionError, match=f"reference_shard_size=1 would have no effect on the reference: {why}"):
            reference_of(strategy, qwen_of(qwen), qwen, wanted, 1)


def test_a_critics_head_has_another_name_in_its_checkpoint(qwen: str, tmp_path: Path) -> None:
    strategy: Any = get_fake_strategy({"bf16": False, "critic_pretrain": True})
    strategy.save_model(strategy.prepare_model(make_critic(qwen, seed=5)), None, str(tmp_path))
    [file] = tmp_path.glob("*.safetensors")
    held = load_file(file)
    held["value.weight"] = head = held.pop("score.weight")
    save_file(held, file)
    named, _ = _critic(strategy, TrainerSpec(qwen, critic=str(tmp_path), value_head_prefix="value"))
    torch.testing.assert_close(named.score.weight, head)
    with pytest.raises(BuildError, match=r"unknown \['value.weight'\].* name it: value_head_prefix"):
        _critic(strategy, TrainerSpec(qwen, critic=str(tmp_path)))
    with pytest.raises(OptionError, match="value_head_prefix='value' would have no effect: there is no critic"):
        TrainerSpec(qwen, value_head_prefix="value")

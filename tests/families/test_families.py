"""Model families through the whole path: a replica, a trainer, one step, one sync, and equal log-probs after it, and
after one of what is not frozen.

Three run with the engine tests; `pytest -m long tests/families` runs the others, minutes. docs/models.md has the table.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from rlbench.data.base.ragged import rows_in_order
from rlbench.data.batches.batch import as_batch
from rlbench.trainers.models.policy_spec import PolicySpec
from rlbench.weights.manifest import Handover, Manifest
from rlbench.weights.probe import PROBE_OPTIONS, probe_tokens
from rlbench.weights.sync import largest_gap
from rlbench.weights.unchanged import whole_groups
from rlbench.workers.replica.config import ReplicaConfig
from tests.families.replica import ReplicaProcess
from tests.families.shapes import SMALL, small_config
from tests.ranks import Ranks, ranks
from tests.workers.tiny_checkpoint import byte_tokenizer

pytestmark = pytest.mark.engine
FIRST = ("gemma2", "gpt_oss", "qwen3_moe")
SYNCING = (
    "arcee",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "cwm",
    "ernie4_5",
    "exaone4",
    "exaone_moe",
    "falcon_h1",
    "flex_olmo",
    "gemma",
    "gemma3_text",
    "gemma4_text",
    "glm",
    "glm4",
    "glm4_moe",
    "gpt2",
    "gpt_neox",
    "gptj",
    "granite",
    "granite_swa",
    "granitemoe",
    "granitemoe_swa",
    "granitemoeshared",
    "granitemoehybrid",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hyperclovax",
    "jais2",
    "llama",
    "mamba2",
    "mellum",
    "minicpm3",
    "ministral3",
    "mistral",
    "mixtral",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "opt",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
    "vaultgemma",
)
IN_BFLOAT16 = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""vLLM's CPU build has their kernels in bfloat16 alone, which their checkpoints are in."""
UNLIKE = (
    *("apertus", "bloom", "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "gemma3n_text", "glm4_moe_lite"),
    *("gpt_bigcode", "hrm_text", "lfm2", "lfm2_moe"),
)
"""vLLM on a CPU and transformers do not compute the same from one checkpoint."""
ALLOWED, IN_HALF = 1e-4, 0.06


@pytest.fixture(scope="module")
def replica() -> Iterator[ReplicaProcess]:
    process = ReplicaProcess()
    yield process
    process.end()


@pytest.fixture
def folder(family: str, tmp_path: Path) -> str:
    """A checkpoint of the family: random weights, spread so widely that a wrong one shows."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    dtype = torch.bfloat16 if family in IN_BFLOAT16 else torch.float32
    model = AutoModelForCausalLM.from_config(small_config(family), dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.08)
            elif "bias" in name:
                parameter.normal_(0, 0.05)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.fixture
def pair(folder: str, replica: ReplicaProcess) -> Iterator[Pair]:
    replica.call("new", ReplicaConfig(folder, kv_cache_bytes=64 << 20, max_num_seqs=4, max_model_len=128))
    try:
        replica.call("build")
        with ranks(1) as trainer:
            trainer.build(PolicySpec(folder, lr=1e-2))
            yield Pair(trainer, replica)
        replica.call("close")
    except BaseException:
        replica.end()
        raise


class Pair:
    """A trainer and a replica of one checkpoint."""

    def __init__(self, trainer: Ranks, replica: ReplicaProcess) -> None:
        self.trainer, self.replica = trainer, replica
        self.tokens = probe_tokens(int(SMALL["vocab_size"]))
        self.batch = as_batch(self.tokens)
        self.prefix = f"rlbench-test-{uuid.uuid4().hex[:8]}"

    def gap(self) -> float:
        """Largest difference of log-probs on the same tokens."""
        return largest_gap(self.logprobs(PROBE_OPTIONS), [self.replica.call("prompt_logprobs", self.tokens)])

    def logprobs(self, options: dict[str, Any]) -> list[np.ndarray]:
        return list(rows_in_order(self.trainer.call("policy_forward", self.batch, options))["logprobs"])

    def step(self) -> None:
        """One optimizer step, which moves every weight that has a gradient."""
        self.batch.advantages[:] = 1.0
        self.trainer.call("policy_forward_backward", self.batch, cloudpickle.dumps("reinforce"), PROBE_OPTIONS)
        self.trainer.call("policy_optim_step", {})

    def sync(self, version: int) -> Manifest:
        """Bring the weights to the replica: from the third time on those that are not frozen."""
        held = str(version - 1) if version > 2 else ""
        options = {"transport": "shm", "prefix": self.prefix, "handover": Handover("replica", held, str(version))}
        self.replica.call("check_weights", self.trainer.call("weight_layout")[0])
        manifest: Manifest = self.trainer.call("stage_weights", options)[0]
        if not manifest.token:  # transformers merges experts, so the trainer always sends all
            manifest = replace(part_of(manifest) if held else manifest, follows=held, token=str(version))
        self.replica.call("apply_weights", manifest)
        return manifest


def frozen(name: str) -> bool:
    return ".0." in name or "embed" in name or "wte" in name


def freeze() -> None:
    for name, parameter in module.named_parameters():  # type: ignore[name-defined]
        parameter.requires_grad_(not (".0." in name or "embed" in name or "wte" in name))


def part_of(whole: Manifest) -> Manifest:
    names = {entry.name for entry in whole.entries}
    return whole.parted(names - whole_groups(names, {name for name in names if not frozen(name)}))


@pytest.mark.parametrize(
    "family", [*FIRST, *(pytest.param(name, marks=pytest.mark.long) for name in (*SYNCING, *IN_BFLOAT16))]
)
def test_after_a_step_and_a_sync_the_replica_computes_what_the_trainer_does(family: str, pair: Pair) -> None:
    allowed = IN_HALF if family in IN_BFLOAT16 else ALLOWED
    assert pair.gap() <= allowed
    pair.step()
    assert pair.gap() > 2 * IN_HALF  # else the next lines prove nothing
    pair.sync(1)
    assert pair.gap() <= allowed
    pair.replica.call("commit_version", 1)  # where it can be the next ones go straight to their places
    pair.trainer.run(freeze)
    pair.sync(2)
    assert pair.gap() <= allowed
    pair.replica.call("commit_version", 2)
    pair.step()
    assert pair.gap() > max(1e-2, 2 * allowed)
    assert any(".0." in entry.name for entry in pair.sync(3).left_out)
    assert pair.gap() <= allowed
    if family in FIRST:
        packed = pair.logprobs({"packing": True})
        assert largest_gap(packed, [pair.logprobs(PROBE_OPTIONS)]) <= ALLOWED


@pytest.mark.long
@pytest.mark.parametrize("family", UNLIKE)
def test_what_vllm_computes_otherwise_shows_before_anything_is_synced(family: str, pair: Pair) -> None:
    assert pair.gap() > ALLOWED  # else the family goes to the table of those that sync

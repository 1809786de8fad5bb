"""The experts that a replica says its tokens took are those of transformers, however the tokens were drawn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlbench.data import Ragged
from rlbench.data.rollouts.jobs import GeneratedArrays
from rlbench.errors import BuildError
from rlbench.options import OptionError
from rlbench.trainers.passes.routing import routers_of
from rlbench.workers.replica.config import ReplicaConfig
from rlbench.workers.replica.vllm_setup import check_routing
from tests.families.replica import ReplicaProcess
from tests.trainers.routed_models import own_experts, save_mixture
from tests.workers.tiny_checkpoint import make_checkpoint
from tests.workers.turns import CHAT, Echo, job

pytestmark = pytest.mark.engine
LONG = list(range(1, 200))  # more than a block of the KV cache, which the samples of a prompt share


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def replica(folder: str) -> Iterator[ReplicaProcess]:
    process = ReplicaProcess()
    config = ReplicaConfig(folder, kv_cache_bytes=64 << 20, max_num_seqs=4, return_routed_experts=True)
    process.call("new", config)
    process.call("build")
    yield process
    process.end()


@pytest.fixture(scope="module")
def model(folder: str) -> Any:
    return read(folder)


def read(folder: str) -> Any:
    """The checkpoint as transformers computes it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def check(arrays: GeneratedArrays, model: Any, unknown: int = 1) -> None:
    """Of every sample all but the last `unknown` tokens have the experts that transformers takes."""
    assert arrays.routing is not None and len(arrays.routing) == len(arrays.keys) > 0
    responses = Ragged(arrays.token_ids, arrays.offsets)
    for (prompt, _), response, experts in zip(arrays.keys.tolist(), responses, arrays.routing, strict=True):
        ids = [*arrays.prompt_token_ids[prompt], *response.tolist()]
        assert len(experts) == len(ids) and experts.dtype == np.int16
        assert (experts[-unknown:] == -1).all()
        mixed = experts[:-unknown, sorted(routers_of(model))]
        assert np.array_equal(np.sort(mixed, -1), own_experts(model, ids)[:-unknown])


@pytest.mark.parametrize(
    "sampling",
    [{}, {"first_token_temperature": 3.0}, {"stop": ["a", "e"]}, {"max_tokens": 1}, {"max_tokens": 300, "n": 1}],
    ids=["plain", "first token apart", "stop strings", "one token", "long"],
)
def test_every_token_of_prompts_and_responses_has_its_experts(
    replica: ReplicaProcess, model: Any, sampling: dict[str, Any]
) -> None:
    check(replica.call("generate", job([LONG, [5, 6, 7], "hello"], **{"n": 3, **sampling})), model)


def test_a_turn_keeps_the_experts_of_those_before(replica: ReplicaProcess, model: Any) -> None:
    check(replica.call("generate", job([CHAT, "hello"], Echo("ok"), n=2, max_turns=3)), model)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "changes"),
    [("mixtral", {}), ("olmoe", {}), ("qwen2_moe", {}), ("qwen3_moe", {"mlp_only_layers": [0]})],
    ids=["mixtral", "olmoe", "qwen2_moe", "a dense layer"],
)
def test_other_families_give_theirs_too(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    other, process = save_mixture(tmp_path, family, **changes), ReplicaProcess()
    try:
        process.call("new", ReplicaConfig(other, kv_cache_bytes=64 << 20, max_num_seqs=4, return_routed_experts=True))
        process.call("build")
        check(process.call("generate", job([LONG, [5, 6, 7]], n=2)), read(other))
    finally:
        process.end()


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    config = ReplicaConfig(str(make_checkpoint(tmp_path / "dense")), return_routed_experts=True)
    with pytest.raises(BuildError, match=r"return_routed_experts=True: .* is a 'qwen2' model"):
        check_routing(config)


@pytest.mark.parametrize(("option", "value"), [("tensor_parallel_size", 2), ("adapters", 1)])
def test_what_experts_are_not_recorded_beside_is_refused(option: str, value: int) -> None:
    with pytest.raises(OptionError, match=f"return_routed_experts=True.*{option}={value}"):
        ReplicaConfig("some/folder", return_routed_experts=True, **{option: value})

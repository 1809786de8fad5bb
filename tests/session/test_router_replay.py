"""A session that replays its sampler's experts: from rollouts to steps, after a sync, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlbench as rb
from rlbench.errors import BuildError, DataError
from rlbench.options import OptionError
from rlbench.session.options import REWARD, SessionOptions
from rlbench.session.training.steps import reference_steps
from rlbench.trainers.models.policy_spec import PolicySpec
from rlbench.trainers.passes.routing import check_routed
from rlbench.trainers.update.options import PolicyOptions
from tests.clock import until
from tests.ranks import ranks
from tests.session.looking import state
from tests.trainers.routed_models import save_mixture

pytestmark = pytest.mark.engine
PROMPTS = [list(range(20, 60)), [5, 6, 7], "hello"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def mixed(cluster: Any, folder: str) -> Iterator[Any]:
    train = rb.Train(lr=1e-3, shards=2, router_replay=True)
    inference = rb.Inference(kv_cache_bytes=64 << 20, max_model_len=128)
    with rb.Session(folder, train=train, inference=inference, name="mixed", reference=True) as made:
        yield made


@pytest.fixture
def rollouts(mixed: Any) -> Any:
    return mixed.rollout(PROMPTS, n=4, max_tokens=12, ignore_eos=True).score(np.arange(12) % 4)


def batch_of(rollouts: Any) -> Any:
    return rollouts.batch(advantage=rb.rl.group_normalized())


def shake() -> None:
    """On the ranks: other routers, which choose other experts."""
    import torch

    torch.manual_seed(0)
    for name, parameter in module.named_parameters():
        if name.endswith(".gate.weight"):
            with torch.no_grad():
                parameter.copy_(parameter + 0.05 * torch.randn(1).item() * (1 + rank) * torch.sign(parameter))
                parameter.mul_(-1)


def test_rollouts_bring_experts_and_a_step_takes_them(mixed: Any, rollouts: Any) -> None:
    batch = batch_of(rollouts)
    assert batch.routing.values.shape[1:] == (2, 2) and np.array_equal(batch.routing.lengths, batch.lengths)
    assert mixed.train._config["router_replay"] and "router_replay" not in mixed.reference._config
    kept = mixed.snapshot()
    step = mixed.train_step(batch, rb.rl.grpo(kl_coef=0.1))
    assert step["router/disagreement"] == 0.0 and step.logprob_gap < 1e-4 and step.skipped is None
    assert mixed.sync_weights().gap <= 1e-4
    after = mixed.rollout(PROMPTS, n=2, max_tokens=8)
    again = mixed.forward_backward(batch_of(after.score(range(6))), "grpo")
    assert again["router/disagreement"] == 0.0 and again.logprob_gap < 1e-4
    mixed.zero_grad()
    mixed.restore(kept)
    mixed.sync_weights()


def test_other_routers_are_counted(mixed: Any, rollouts: Any) -> None:
    kept = mixed.snapshot()
    mixed.train.run(shake)
    found = mixed.forward_backward(batch_of(rollouts), "grpo")
    assert 0.2 < found["router/disagreement"] <= 1.0
    mixed.zero_grad()
    mixed.restore(kept)
    mixed.sync_weights()


def test_they_are_counted_without_replay_too(folder: str, rollouts: Any) -> None:
    import cloudpickle

    batch, options = batch_of(rollouts), {"token_budget": 64}
    found = {}
    for replay in (False, True):
        with ranks(2, PolicySpec(folder), router_replay=replay) as trainer:
            trainer.run(shake)
            done = trainer.call("policy_forward_backward", batch, cloudpickle.dumps("grpo"), options)
            found[replay] = done[0]["metrics"]
    assert found[False]["router/disagreement"] > 0.2 and found[True]["router/disagreement"] > 0.2
    assert found[False]["logprob_gap"] > 1e-3 and found[True]["logprob_gap"] != found[False]["logprob_gap"]


def reward(rollout: Any) -> float:
    return float(len(set(rollout.token_ids)))


@pytest.mark.parametrize("old_logprobs", ["recompute", "sampler"])
def test_a_trainers_policy_takes_them_and_its_reference_its_own(mixed: Any, old_logprobs: str) -> None:
    kept = mixed.snapshot()
    options = {"n": 4, "max_tokens": 12, "rollout_batch_size": 4, "train_batch_size": 16, "old_logprobs": old_logprobs}
    trainer = mixed.trainer("grpo", PROMPTS[:2] * 4, reward, reference=True, kl_coef=0.1, **options)
    agreeing = trainer.step()
    assert agreeing["router/disagreement"] == 0.0 and agreeing["mismatch/k3_kl"] < 1e-6
    mixed.train.run(shake)
    shaken = trainer.step()  # its replicas sample with the routers of before, the step comes first
    assert shaken["router/disagreement"] > 0.2
    mixed.restore(kept)
    mixed.sync_weights()


def test_a_mixture_with_adapters_takes_them_and_the_base_its_own(cluster: Any, folder: str) -> None:
    train = rb.Train(lr=1e-2, router_replay=True, lora=rb.Lora(rank=4))
    inference = rb.Inference(kv_cache_bytes=64 << 20, max_model_len=128)
    with rb.Session(folder, train=train, inference=inference, name="adapted-mixture", reference=True) as made:
        for _ in range(2):  # the second samples with adapters that have learnt
            batch = batch_of(made.rollout(PROMPTS, n=4, max_tokens=12, ignore_eos=True).score(np.arange(12) % 4))
            step = made.train_step(batch, rb.rl.grpo(kl_coef=0.1))
            assert step["router/disagreement"] == 0.0 and step.logprob_gap < 1e-4 and step.skipped is None
            assert made.sync_weights().gap <= 1e-4
        values = np.where(batch.routing.values < 0, -1, 1 - batch.routing.values % 2).astype(np.int16)
        other = batch.replace(routing=batch.routing.with_values(values))
        bare = batch.replace(routing=None)
        own, forced = made.logprobs(batch), made.logprobs(other)
        assert np.abs(own - forced).max() > 1e-3, "the policy's routers take what rows bring"
        found = [
            made.core.run("reference", reference_steps(made.core, rows, PolicyOptions())).result().ref_logprobs
            for rows in (bare, other)
        ]
        np.testing.assert_array_equal(*found)


def test_completions_that_a_stop_cut_bring_the_experts_of_what_was_computed(mixed: Any) -> None:
    pending = mixed.rollout(PROMPTS * 16, n=8, max_tokens=80, ignore_eos=True, progress=False, block=False)
    until(lambda: any(told.get("tokens") for call in state(mixed)["running"] for told in call["progress"]))
    assert mixed.core.link.stop_running()
    with pytest.raises(rb.Stopped) as stopped:
        pending.result()
    partial = stopped.value.partial
    assert partial.aborted.any()
    batch = partial.score(np.zeros(partial.samples)).batch(drop_aborted=False)
    check_routed(batch)
    assert all((row[-1] == -1).all() for row in batch.routing)


def test_a_rehearsal_runs_with_experts_that_stand_in(mixed: Any) -> None:
    assert mixed.rehearse(64, 256).passed


def test_completions_that_are_continued_keep_their_experts(rollouts: Any) -> None:
    tree = rollouts.fork(1, at=4, n=2, seed=3)
    batch = batch_of(tree.score(np.arange(tree.samples)))
    new = [i for i, info in enumerate(tree.infos) if "fork" in info]
    assert len(new) == 2 and np.array_equal(batch.routing.lengths, batch.lengths)
    own = tree.prompt_ids.lengths[tree.group] + tree.lengths
    assert all((tree.routing[i][: own[i] - 1] >= 0).all() for i in new)


def test_what_was_sampled_without_experts_is_refused(mixed: Any, rollouts: Any) -> None:
    bare = batch_of(rollouts).replace(routing=None)
    with pytest.raises(DataError, match="router_replay=True: 12 of 12 sequences"):
        mixed.train_step(bare, "grpo")
    texts = rb.data.demonstrations([{"prompt": "a", "completion": "b"}], mixed)
    assert "router/disagreement" not in mixed.forward_backward(texts, "sft")
    mixed.zero_grad()


def test_models_and_options_that_cannot_replay_are_refused_before_anything_starts(qwen: str, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"router_replay=True: .* is a 'qwen2' model"):
        rb.Session(qwen, train=rb.Train(router_replay=True), name="dense")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm4_moe", "architectures": []}))
    with pytest.raises(BuildError, match=r"return_routed_experts=True: .* is a 'glm4_moe' model"):
        rb.Session(str(tmp_path), inference=rb.Inference(return_routed_experts=True), name="other")
    for given, said in (
        ({"sequence_parallel": 2}, "sequence_parallel"),
        ({"tensor_parallel": 2}, "tensor_parallel"),
    ):
        with pytest.raises(OptionError, match=f"router_replay=True and {said}"):
            rb.Train(router_replay=True, **given)
    train = rb.Train(router_replay=True)
    assert SessionOptions("m", "p", train=train).inference.return_routed_experts
    for inference, said in (
        (rb.Inference(executor="sglang"), "executor='sglang'"),
        (rb.Inference(tensor_parallel_size=2), "tensor_parallel_size=2"),
    ):
        with pytest.raises(OptionError, match=said):
            SessionOptions("m", "p", train=train, inference=inference)
    with pytest.raises(OptionError, match="no effect on a reward model"):
        SessionOptions("m", "p", train=train, kind=REWARD)

"""An actor that is held in half precision, and in host memory: said when the session is made, found by its trainer."""

import shutil

import pytest
import torch

import rlbench as rb
from rlbench.strategies import OptionError
from rlbench.tiny import tasks
from tests.session.session_trainers import OPTIONS, prompts

pytestmark = pytest.mark.engine
HELD = {"use_mp_opt": True, "fsdp_cpu_offload": True}
RATE = 1e-6
"""A step of Adam's is as long at first: far less than half of what tells a bfloat16 weight from the next one."""


@pytest.fixture(scope="module")
def held(cluster, tiny_path):
    """Two ranks and a replica, for the tests of this file."""
    made = rb.Session(
        "tiny",
        name="held",
        train={"lr": RATE, "shards": 2, **HELD},
        inference={"kv_cache_bytes": 64 << 20},
        seed=3,
    )
    yield made
    made.close()


def grpo(session, **given):
    return session.trainer("grpo", prompts(), tasks.reward, **{**OPTIONS, **given})


def seen():
    """On a rank: weights and their copies, by name; how the weights are held; where everything is."""
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

    states = [part._get_fsdp_state() for part in module.modules() if isinstance(part, FSDPModule)]
    policies = [group.offload_policy for state in states for group in state._fsdp_param_groups]
    weights, copies, places = {}, {}, set()
    for name, weight in module.named_parameters():
        state = module.optimizer.state.get(weight, {})
        weights[name] = weight.detach().to_local().clone()
        if "master" in state:
            copies[name] = state["master"].to_local().clone()
        places |= {str(weight.to_local().device), *(str(v.device) for v in state.values() if torch.is_tensor(v))}
    whole = all(isinstance(policy, CPUOffloadPolicy) for policy in policies)
    return {
        "weights": weights,
        "copies": copies,
        "offloaded": bool(policies) and whole,
        "places": places,
        "optimizer": type(module.optimizer).__name__,
    }


def test_float32_copies_go_on_where_half_precision_weights_stand_still(held):
    """Two steps of the session's own trainer: the copies have moved by two rates, and are what is rounded."""
    before = held.train.run(seen)
    trainer = grpo(held)
    metrics = [trainer.step() for _ in range(2)]
    assert all(one.actor_grad_norm > 0 and one.train_steps == 1 for one in metrics)
    assert held.inference.weight_versions() == [held.version], "the replica has proved the half-precision weights"
    for was, now in zip(before, held.train.run(seen), strict=True):
        assert now["optimizer"] == "FSDPadaptOptimizer" and not was["copies"]
        assert now["copies"].keys() == now["weights"].keys()
        stood, went = 0, []
        for name, copy in now["copies"].items():
            weight = now["weights"][name]
            assert weight.dtype == torch.bfloat16 and copy.dtype == torch.float32
            assert torch.equal(copy.bfloat16(), weight)
            stood += int((weight == was["weights"][name]).sum())
            went.append((copy - was["weights"][name].float()).abs().flatten())
        moved = torch.cat(went)
        assert stood > 0.9 * len(moved), "half precision alone would have learnt next to nothing"
        assert (moved > 0).float().mean() > 0.9 and RATE < float(moved.max()) < 3 * RATE


def test_the_weights_wait_in_host_memory_by_fsdps_own_policy(held):
    """On a host without a GPU they are there anyway: what shows is the policy, on each unit; numbers are the same."""
    for rank in held.train.run(seen):
        assert rank["offloaded"] and rank["places"] == {"cpu"}


def test_the_sessions_own_step_is_the_same_optimizers_and_undo_brings_the_copies_back(held):
    scored = held.rollout(["sort 5 2 :", "sort 3 1 :"], n=4, max_tokens=6).score(lambda r: float(sum(r.token_ids) % 7))
    batch = scored.select(scored.lengths > 0).batch(advantage=rb.rl.rloo())
    held.train_step(batch, "ppo")
    before = held.train.run(seen)
    held.train_step(batch, "ppo")
    after = held.train.run(seen)
    held.undo()
    for was, then, now in zip(before, after, held.train.run(seen), strict=True):
        assert any(not torch.equal(then["copies"][name], copy) for name, copy in was["copies"].items())
        assert all(torch.equal(now["copies"][name], copy) for name, copy in was["copies"].items())
        assert all(torch.equal(now["weights"][name], weight) for name, weight in was["weights"].items())


def test_a_trainer_finds_its_actor_so_and_holds_its_critic_so_and_its_average_in_float32(held, tmp_path):
    def kinds():
        held_by = {"critic": trainer.critic, "average": trainer.ema_model}
        config = trainer.strategy.config
        return {name: {str(p.dtype) for p in model.parameters()} for name, model in held_by.items()} | {
            "options": (config.use_mp_opt, config.fsdp_cpu_offload),
            "optimizer": type(trainer.critic_optim).__name__,
        }

    given = {**OPTIONS, "kl_coef": 0.0}
    made = held.trainer("ppo", prompts(), tasks.reward, ema=True, critic_lr=1e-3, **given)
    found = held.train.run(kinds)[0]
    assert found == {
        "critic": {"torch.bfloat16"},
        "average": {"torch.float32"},
        "options": (True, True),
        "optimizer": "FSDPadaptOptimizer",
    }
    assert made.step().critic_loss > 0
    made.save(str(tmp_path / "kept"))
    assert made.load(str(tmp_path / "kept"))["iterations"] == 1
    grpo(held, **HELD)  # asked for as it is


@pytest.mark.parametrize("name", HELD)
def test_an_actor_that_is_held_otherwise_is_refused_and_the_trainer_before_stays(held, session, name):
    before = grpo(held)
    with pytest.raises(OptionError, match=rf"made with {name}=True.*rb\.Train\({name}=False\)"):
        grpo(held, **{name: False})
    assert held.last_trainer is before and before.where()["iterations"] == 0
    with pytest.raises(OptionError, match=rf"made with {name}=False.*rb\.Train\({name}=True\)"):
        grpo(session, **{name: True})


def test_models_and_rewards_are_found_from_the_kernels_folder_and_what_is_missing_leaves_the_trainer(
    held, tiny_path, tmp_path, monkeypatch
):
    """The ranks were started in another folder."""
    shutil.copytree(tiny_path, tmp_path / "critics" / "first")
    (tmp_path / "judge.py").write_text("def reward_func(queries):\n    return [float(len(q)) for q in queries]\n")
    monkeypatch.chdir(tmp_path)
    before = grpo(held)
    for missing in ({"critic": "./critics/second"}, {"reference": "./none", "kl_coef": 0.1}):
        with pytest.raises(OptionError, match=rf"there is no folder {tmp_path}/(critics/second|none)"):
            held.trainer("ppo", prompts(), tasks.reward, **{**OPTIONS, **missing})
    with pytest.raises(OptionError, match=rf"there is no file {tmp_path}/judges.py"):
        held.trainer("grpo", prompts(), "judges.py", **OPTIONS)
    assert held.last_trainer is before and before.step().train_steps == 1
    found = held.trainer("ppo", prompts(), "judge.py", critic="critics/first", **{**OPTIONS, "kl_coef": 0.0})
    assert found.make_experience()["reward"] > 1 and found.options["ckpt_path"].startswith(str(tmp_path))
    found.save("kept")
    assert (tmp_path / "kept").is_dir() and found.load("kept")["iterations"] == 0

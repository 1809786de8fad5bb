"""Parameters that the reference system's documents name are there, with the defaults they name."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

SIGNATURES: dict[str, dict[str, Any]] = {
    "rlbench.strategies:FSDPV2Strategy.__init__": {
        "seed": 42,
        "max_norm": 0.0,
        "micro_train_batch_size": 1,
        "train_batch_size": 1,
        "bf16": True,
        "args": None,
    },
    "rlbench.strategies:FSDPV2Strategy.init_model_context": {"meta_init": False},
    "rlbench.strategies:FSDPV2Strategy.optimizer_step": {"name": "model"},
    "rlbench.strategies:FSDPV2Strategy.prepare_model": {
        "is_training": False,
        "shard_size": -1,
        "reshard_after_forward": True,
    },
    "rlbench.strategies:FSDPV2Strategy.load_ckpt": {
        "optimizer": None,
        "scheduler": None,
        "load_module_strict": True,
        "load_optimizer_states": True,
        "load_lr_scheduler_states": True,
    },
    "rlbench.strategies:FSDPV2Strategy.save_ckpt": {
        "tag": None,
        "max_num": 3,
        "max_mem": 1000,
        "client_state": {},
        "save_latest": True,
        "optimizer": None,
        "scheduler": None,
    },
    "rlbench.strategies:get_fake_strategy": {"args": None},
    "rlbench.strategies:FSDPV2Strategy.all_reduce": {"op": "mean"},
    "rlbench.strategies:FSDPV2Strategy.moving_average": {"beta": 0.992},
    "rlbench.strategies:FSDPV2Strategy.report_memory": {"prefix": ""},
    "rlbench.strategies:FSDPV2Strategy.setup_inference_engine": {"args": None, "engine_type": "vllm"},
    "rlbench.strategies:FSDPV2Strategy.gather_and_generate": {
        "all_prompt_token_ids": None,
        "all_prompts": None,
        "all_images": None,
        "sleep_engine": True,
        "images_num": None,
    },
    "rlbench.trainers:SPMDPPOTrainerBase.__init__": {"VLM": False},
    "rlbench.trainers:SPMDPPOTrainerBase.ppo_train": {"global_steps": 0},
    "rlbench.trainers:PPOTrainer.__init__": {
        "critic": None,
        "reward_model": None,
        "initial_model": None,
        "ema_model": None,
        "actor_optim": None,
        "critic_optim": None,
        "actor_scheduler": None,
        "critic_scheduler": None,
        "tokenizer": None,
        "remote_rm_url": None,
        "reward_fn": None,
        "reward_fn_label_map": None,
        "reward_recipe": None,
    },
    "rlbench.trainers:FastExperienceMaker.tokenize_fn": {"padding": True},
    "rlbench.trainers:NaiveReplayBuffer.__init__": {"limit": 0, "packing_samples": False, "cpu_offload": True},
    "rlbench.strategies:GenLenAnalyser.__init__": {
        "plot_every": 2,
        "percentiles": (50, 80),
        "plot_out_dir": None,
    },
}


@pytest.mark.parametrize("place", SIGNATURES)
def test_a_parameter_has_the_documents_default(place: str) -> None:
    module, _, path = place.partition(":")
    function: Any = importlib.import_module(module)
    for part in path.split("."):
        function = getattr(function, part)
    parameters = inspect.signature(function).parameters
    assert {name: parameters[name].default for name in SIGNATURES[place]} == SIGNATURES[place]

"""LightRFT's packages by their own paths: the very modules of rlbench."""

import importlib

import pytest

PATHS = {
    "strategy": ["get_strategy", "FakeStrategy"],
    "strategy.fsdp.fsdpv2": ["FSDPV2Strategy", "FSDPadaptOptimizer"],
    "strategy.strategy_base": ["StrategyBase"],
    "strategy.deepspeed.deepspeed": ["DeepspeedStrategy"],
    "trainer.spmd_ppo_trainer": ["SPMDPPOTrainer", "SPMDPPOTrainerBase", "SPMDPPOTrainerVL"],
    "utils": ["add_arguments"],
}


@pytest.mark.parametrize("path", PATHS)
def test_every_name_is_the_one_of_rlbench_whichever_way_it_came(path):
    by_compat = importlib.import_module(f"rlbench.compat.lightrft.{path}")
    by_rlbench = importlib.import_module(f"rlbench.{path}")
    for name in PATHS[path]:
        assert getattr(by_compat, name) is getattr(by_rlbench, name)


def test_the_vision_language_trainer_is_the_one_trainer():
    from rlbench.compat.lightrft.trainer import SPMDPPOTrainer, SPMDPPOTrainerVL

    assert issubclass(SPMDPPOTrainerVL, SPMDPPOTrainer)

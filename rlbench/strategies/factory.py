"""The strategies that options ask for."""

from __future__ import annotations

from typing import Any

from rlbench.strategies.base import arguments_of
from rlbench.strategies.deepspeed import DeepspeedStrategy
from rlbench.strategies.fake import FakeStrategy
from rlbench.strategies.fsdp2 import FSDPV2Strategy
from rlbench.strategies.options.config import StrategyConfig, accumulation_steps


def get_strategy(args: Any) -> FSDPV2Strategy | DeepspeedStrategy:
    """Make the strategy of this rank, seed the process and print the options; collective.

    Args:
        args: a namespace, a mapping, a `StrategyConfig`, or the path of a YAML file; with `fsdp` it is FSDP2's, without
            DeepSpeed's, as in the reference system.
    """
    config = StrategyConfig.of(args)
    kind = FSDPV2Strategy if config.fsdp else DeepspeedStrategy
    strategy = kind(**arguments_of(config), args=args)
    accumulation_steps(config.train_batch_size, config.micro_train_batch_size, strategy.data_ranks)
    strategy.set_seed()
    if strategy.is_rank_0():
        print(config.summary(), flush=True)
    return strategy


def get_fake_strategy(args: Any = None) -> FakeStrategy:
    """Make a strategy for tests, from the same options as `get_strategy` takes; needs no ranks, joins no group."""
    config = StrategyConfig.of(args)
    strategy = FakeStrategy(**arguments_of(config), args=config if args is None else args)
    strategy.set_seed()
    return strategy

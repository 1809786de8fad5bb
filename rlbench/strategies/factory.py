"""The strategy that options ask for."""

from __future__ import annotations

from typing import Any

from rlbench.errors import BuildError
from rlbench.strategies.fsdp2 import FSDPV2Strategy
from rlbench.strategies.options.config import StrategyConfig, accumulation_steps, need_fsdp


class DeepspeedStrategy:
    """The reference system's strategy over DeepSpeed: a name to import; making one is refused."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise BuildError(
            "DeepspeedStrategy: DeepSpeed is not here yet; FSDPV2Strategy shards as ZeRO 3 does, get_strategy makes it "
            "of options with fsdp=True (--fsdp)."
        )


def get_strategy(args: Any) -> FSDPV2Strategy:
    """Make the strategy of this rank, seed the process and print the options; collective.

    Args:
        args: a namespace, a mapping, a `StrategyConfig`, or the path of a YAML file; `fsdp` must be set.

    Raises:
        OptionError: an option that is unknown, cannot be honoured, or a batch that ranks cannot share. Without `fsdp`
            the reference system takes DeepSpeed, which is not here yet.
        BuildError: this process is no rank.

    Example:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        strategy = get_strategy(parser.parse_args(["--fsdp", "--train_batch_size", "16"]))
    """
    config = StrategyConfig.of(args)
    need_fsdp(config)
    strategy = FSDPV2Strategy(
        seed=config.seed,
        max_norm=config.max_norm,
        micro_train_batch_size=config.micro_train_batch_size,
        train_batch_size=config.train_batch_size,
        bf16=config.bf16,
        args=args,
    )
    accumulation_steps(config.train_batch_size, config.micro_train_batch_size, strategy.world_size)
    strategy.set_seed()
    if strategy.is_rank_0():
        print(config.summary(), flush=True)
    return strategy

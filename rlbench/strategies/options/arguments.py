"""The strategy's options on a command line."""

from __future__ import annotations

import argparse

from rlbench.flags import add_flags
from rlbench.strategies.options.config import StrategyConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every option of `StrategyConfig`, by LightRFT's names and ours, with its default.

    A script may define some of them itself, before or after: its definition counts.

    Example:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        strategy = get_strategy(parser.parse_args())
    """
    add_flags(parser, StrategyConfig, reference=True)
    for container in (parser, parser._optionals):
        container.conflict_handler = "resolve"  # a flag that the script defines later replaces ours

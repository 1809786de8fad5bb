"""The strategy's options on a command line."""

from __future__ import annotations

import argparse

from rlbench.strategies.config import OPTIONS, default, flag_type


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every option of `StrategyConfig`, by its name and with its default.

    A script may define some of them itself, before or after: its definition counts. Switches have a `--no-…` form;
    `--disable_engine_sleep` is that of `--enable_engine_sleep`.

    Args:
        parser: the script's.

    Example:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        strategy = get_strategy(parser.parse_args())
    """
    taken = {flag for action in parser._actions for flag in action.option_strings}
    for container in (parser, parser._optionals):
        container.conflict_handler = "resolve"  # a flag that the script defines later replaces ours
    group = parser.add_argument_group("strategy")
    for name, option in OPTIONS.items():
        flag, held = f"--{name}", default(name)
        if flag in taken:
            continue
        text = f"{option.does} (default: {held})".replace("%", "%%")
        if name == "enable_engine_sleep":
            group.add_argument(flag, action="store_true", default=held, help=text)
            group.add_argument("--disable_engine_sleep", dest=name, action="store_false", help="the opposite")
        elif name == "critic_pretrain":
            group.add_argument(flag, type=str, default=held, help=text)
        elif isinstance(held, bool):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=held, help=option.does)
        elif isinstance(held, tuple):
            group.add_argument(flag, type=flag_type(name), nargs=len(held), default=held, help=text)
        else:
            group.add_argument(flag, type=flag_type(name), default=held, help=text)

"""The options of a run on a command line."""

from __future__ import annotations

import argparse
import types
import typing
from typing import Any

from rlbench.trainers.reference_flags import ALIASES, NEGATED, REFUSED
from rlbench.trainers.run_options import ALL_OPTIONS, defaults, kinds, plain_kind

METAVARS: dict[type, str] = {int: "N", float: "X", str: "TEXT", bool: "TEXT"}


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every option of a run, and for every one of the reference system.

    A flag that is not given leaves no trace, so that a file and the method count. Switches have a `--no-…` form. A flag
    of the reference that cannot be honoured is taken here and refused by `RunConfig.load`, which says why.

    Args:
        parser: with `allow_abbrev=False`, as half a name may be that of another option.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    other = {name: [alias for alias, meant in ALIASES.items() if meant == name] for name in ALL_OPTIONS}
    for name, option in ALL_OPTIONS.items():
        if option.section not in groups:
            groups[option.section] = parser.add_argument_group(option.section)
        held = defaults()[name]
        default = "" if held is None or held == () else f" (default: {held})"
        text = f"{option.does}{default}".replace("%", "%%")
        _add(groups[option.section], name, [f"--{alias}" for alias in other[name]], text)
    for name, meant in NEGATED.items():
        group = groups[ALL_OPTIONS[meant].section]
        group.add_argument(
            f"--{name}", dest=meant, action="store_false", default=argparse.SUPPRESS, help=f"like --no-{meant}"
        )
    for name in REFUSED:
        hidden = argparse.SUPPRESS
        parser.add_argument(f"--{name}", nargs="*", action=_AsYaml, default=hidden, help=hidden)


def _add(group: argparse._ArgumentGroup, name: str, aliases: list[str], text: str) -> None:
    flags = [f"--{name}", *aliases]
    declared = kinds()[name]
    alternatives = typing.get_args(declared) if isinstance(declared, types.UnionType) else (declared,)
    held = defaults()[name]
    said: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text}
    if declared is bool:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **said)
        return
    said["metavar"] = METAVARS[plain_kind(name)]
    if isinstance(held, tuple) and held:
        group.add_argument(*flags, type=plain_kind(name), nargs=len(held), **said)
    elif isinstance(held, tuple):
        group.add_argument(*flags, nargs="+", **said)
    elif bool in alternatives:  # a path, or none: then it is just wanted
        group.add_argument(*flags, nargs="?", const=True, **said)
    elif list[str] in alternatives:
        group.add_argument(*flags, nargs="+", action=_OneOrMany, **said)
    else:
        group.add_argument(*flags, **said)


class _AsYaml(argparse.Action):
    """A flag alone as true, one value as it is, several as a list."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, option: object = None) -> None:
        assert isinstance(values, list)
        setattr(namespace, self.dest, True if not values else values[0] if len(values) == 1 else values)


class _OneOrMany(argparse.Action):
    """One value as it is, several as a list."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, option: object = None) -> None:
        setattr(namespace, self.dest, values[0] if isinstance(values, list) and len(values) == 1 else values)

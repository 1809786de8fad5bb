"""Options on a command line: a flag for each, by its name and its aliases. Any room may import it."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlbench.option_names import ALIASES, LIGHTRFT, SWITCHES
from rlbench.options import (
    Option,
    OptionError,
    as_alias,
    defaults,
    kinds,
    options_in,
    plain_kind,
    typed,
)

METAVARS: Mapping[type, str] = {int: "N", float: "X", str: "TEXT", bool: "TEXT"}


def add_flags(parser: argparse.ArgumentParser, *classes: type, reference: bool = False) -> None:
    """Add a flag for every option, by its name and its aliases; switches have a `--no-…` form.

    A flag that is not given leaves no trace. A value is read as its option's type when the class is made of it.

    Args:
        parser: flags that it has already stay as they are.
        classes: whose options.
        reference: LightRFT's names in the namespace, with defaults and types there, as scripts of it read them.
    """
    taken = {flag for action in parser._actions for flag in action.option_strings}
    groups: dict[str, argparse._ArgumentGroup] = {}
    for cls in classes:
        for name, info in options_in(cls).items():
            group = groups.setdefault(info.section, parser.add_argument_group(info.section))
            for flags, said in _flags_of(cls, name, info, reference):
                if free := [flag for flag in flags if flag not in taken]:
                    group.add_argument(*free, **said)
                    taken.update(free)
        for name, neutral in getattr(cls, "NEUTRAL", {}).items():
            default = neutral if reference else argparse.SUPPRESS
            if f"--{name}" not in taken:
                hidden = argparse.SUPPRESS
                parser.add_argument(f"--{name}", nargs="*", action=_Plain, default=default, help=hidden)
                if neutral is True:
                    parser.add_argument(f"--no-{name}", dest=name, action="store_false", default=default, help=hidden)


def _flags_of(cls: type, name: str, info: Option, reference: bool) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yield the flags of an option with their arguments for argparse: its own with plain aliases, then switches."""
    held = defaults(cls)[name]
    aliases = [alias for alias, meant in ALIASES.items() if meant == name]
    old = next((alias for alias, meant in LIGHTRFT.items() if meant == name), name)
    dest = old if reference and old not in SWITCHES else name
    text = f"{info.help}{'' if held in (None, ()) else f' (default: {held})'}".replace("%", "%%")
    said: dict[str, Any] = {"dest": dest, "help": text, "default": held if reference else argparse.SUPPRESS}
    plain = [f"--{alias}" for alias in aliases if alias not in SWITCHES]
    switch = next((alias for alias in aliases if alias in SWITCHES), None)
    if kinds(cls)[name] == (bool,):
        yield [f"--{name}", *plain], {**said, "action": argparse.BooleanOptionalAction}
        if switch:
            yield [f"--{switch}"], {**said, "action": "store_false", "help": f"like --no-{name}"}
        return
    if reference and switch:  # head, which the reference says by a switch
        action = {"action": argparse.BooleanOptionalAction, "default": as_alias(switch, held), "help": info.help}
        yield [f"--{switch}"], action
        return
    fixed = isinstance(held, tuple) and len(held)
    many: Any = fixed or ("+" if isinstance(held, tuple) or list[str] in kinds(cls)[name] else None)
    alone = bool in kinds(cls)[name]  # a path, or none: then it is just wanted
    more: dict[str, Any] = {"nargs": "?", "const": True} if alone else {"nargs": many} if many else {}
    more |= {"metavar": METAVARS[plain_kind(cls, name)], "cls": cls, "option": name}
    yield [f"--{name}", *plain], {**said, **more, "action": _Typed if reference else _Value}
    if switch:
        const = SWITCHES[switch][True]
        yield [f"--{switch}"], {**said, "action": "store_const", "const": const, "help": f"--{name} {const}"}


class _Value(argparse.Action):
    """One value as it is, several as a list."""

    def __init__(self, *args: Any, cls: type, option: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.read: Callable[[Any], Any] = functools.partial(typed, cls, option)

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: object = None) -> None:
        setattr(namespace, self.dest, values[0] if isinstance(values, list) and len(values) == 1 else values)


class _Typed(_Value):
    """A value as its option's type."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: object = None) -> None:
        super().__call__(parser, namespace, values)
        try:
            setattr(namespace, self.dest, self.read(getattr(namespace, self.dest)))
        except OptionError as error:
            raise argparse.ArgumentError(self, str(error)) from error


class _Plain(argparse.Action):
    """A flag alone as true, a number as one, several values as a list."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: object = None) -> None:
        read = [int(value) if re.fullmatch(r"-?\d+", value) else value for value in values]
        setattr(namespace, self.dest, True if not read else read[0] if len(read) == 1 else read)

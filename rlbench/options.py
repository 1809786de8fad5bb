"""Options: dataclasses whose fields carry default, help, range and needs, and one reader for every way they are given.

Keywords, a mapping (`of`), a YAML file and a command line (`rlbench.flags`) are read alike: names of other libraries
count by `ALIASES`, text that is a number is one, what is unknown or out of range raises `OptionError`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import os
import re
import types
import typing
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self, dataclass_transform

from rlbench.errors import BuildError, nearest
from rlbench.option_names import ALIASES, MAPPINGS, SWITCHES

Function = typing.TypeVar("Function", bound=Callable[..., Any])
_cached: Callable[[Function], Function] = functools.cache  # type: ignore[assignment]  # a class is no Hashable to mypy
EITHER = "it is true or false, and neither changes anything"
WANTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


class OptionError(BuildError, ValueError):
    """An option that does not exist, has no such value, cannot be honoured, or contradicts another one."""


def refuse(*cases: tuple[Any, str]) -> None:
    """Raise OptionError for the first case that is wrong; a case says whether it is, and why."""
    for wrong, why in cases:
        if wrong:
            raise OptionError(f"{why}.")


@dataclass(frozen=True)
class Option:
    """What a field's metadata hold: its section in summaries, its help, its range, and what it has no effect without.

    `needs`: other options, with the value of each that switches it off; `secret`: its value is not printed.
    """

    section: str
    help: str
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    needs: Mapping[str, Any] = field(default_factory=dict)
    secret: bool = False

    def shown(self, value: Any) -> str:
        """Write a value as summaries do."""
        return "(not shown)" if self.secret and isinstance(value, str) else f"{value}"


def option(default: Any, help: str, *, section: str = "", **limits: Any) -> Any:
    """Make a field of an `Options` class; `limits` are `least`, `most`, `choices`, `needs` and `secret` of
    `Option`."""
    held: Any = {"default_factory": dict} if default is dict else {"default": default}
    return field(**held, metadata={"option": Option(section, help, **limits)})


def section(title: str) -> Callable[..., Any]:
    """Return `option` for the fields of one section."""
    return functools.partial(option, section=title)


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Options:
    """What every class of options inherits; a subclass is a frozen dataclass with keywords."""

    NEUTRAL: ClassVar[Mapping[str, Any]] = {}
    """Options of another system that mean nothing here, with the value that asks for nothing: that one is taken."""

    REASONS: ClassVar[Mapping[str, str]] = {}
    """Why one of those cannot be honoured, and what to use instead; those of `IN_ANY_CASE` have none."""

    IN_ANY_CASE: ClassVar[tuple[str, ...]] = ()
    """Those of `NEUTRAL` whose True asks for what is done in any case: both values are taken."""

    WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = ()
    """Those of `NEUTRAL` whose True has no effect in the other system either: it is taken, and warned of."""

    ELSEWHERE: ClassVar[Mapping[str, str]] = {}
    """Names that a reader looks for here, with the option to use."""

    def __init_subclass__(cls, kw_only: bool = True) -> None:
        dataclass(frozen=True, repr=False, kw_only=kw_only)(cls)
        made: Any = cls.__init__

        @functools.wraps(made)
        def __init__(self: Any, *args: Any, **given: Any) -> None:
            named = canonical(given, type(self))
            type(self).check_given(named)
            made(self, *args, **named)

        cls.__init__ = __init__  # type: ignore[method-assign]
        lines = [f"    {name}: {text.help}." for name, text in options_in(cls).items()]
        cls.__doc__ = "\n".join([inspect.getdoc(cls) or "", *(["", "Attributes:"] if lines else []), *lines])

    def __post_init__(self) -> None:
        for name, info in options_in(type(self)).items():
            value = typed(type(self), name, getattr(self, name))
            _check_range(name, value, info)
            object.__setattr__(self, name, value)

    @classmethod
    def check_given(cls, given: Mapping[str, Any]) -> None:
        """Refuse options, by our names, that cannot be given together; a default was not given."""

    @classmethod
    def of(cls, given: Any) -> Self:
        """Read None, options of this class, a mapping, or the path of a YAML file."""
        if given is None:
            return cls()
        if isinstance(given, cls):
            return given
        if isinstance(given, str | Path):
            given = read_yaml(given)
        if not isinstance(given, Mapping):
            raise OptionError(f"{cls.__name__}: got {type(given).__name__}; give {cls.__name__}(…) or a dict.")
        return cls(**given)

    def overridden(self) -> dict[str, Any]:
        """Return the options that do not have their default."""
        held = defaults(type(self))
        return {name: getattr(self, name) for name in held if getattr(self, name) != held[name]}

    def only(self, base: type) -> dict[str, Any]:
        """Return those of `overridden` that a base class has."""
        return {name: value for name, value in self.overridden().items() if name in options_in(base)}

    def keys(self) -> list[str]:
        """Return the names in `overridden`, so that `**options` passes those on."""
        return list(self.overridden())

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __repr__(self) -> str:
        known = options_in(type(self))
        shown = (
            f"{n}={v!r}" if not known[n].secret else f"{n}={known[n].shown(v)}" for n, v in self.overridden().items()
        )
        return f"{type(self).__name__}({', '.join(shown)})"

    if not typing.TYPE_CHECKING:  # a type checker knows the names there are

        def __getattr__(self, name: str) -> Any:
            """Answer to an alias, as ported scripts read them."""
            meant = ALIASES.get(name)
            if meant not in options_in(type(self)):
                raise AttributeError(f"{type(self).__name__} has no option {name!r}", name=name, obj=self)
            return as_alias(name, getattr(self, meant))


@_cached
def options_in(*classes: type) -> Mapping[str, Option]:
    """Return the options of classes by name, in the order of their fields."""
    made = (f for cls in classes for f in dataclasses.fields(cls))
    return {f.name: f.metadata["option"] for f in made if "option" in f.metadata}


@_cached
def defaults(*classes: type) -> Mapping[str, Any]:
    """Return the default of every option of classes."""
    made = (f for cls in classes for f in dataclasses.fields(cls) if "option" in f.metadata)
    return {f.name: {} if f.default is dataclasses.MISSING else f.default for f in made}


@_cached
def kinds(cls: type) -> Mapping[str, tuple[Any, ...]]:
    """Return the declared types of every option, alternatives apart."""
    hints = typing.get_type_hints(cls)
    return {
        name: typing.get_args(hints[name]) if isinstance(hints[name], types.UnionType) else (hints[name],)
        for name in options_in(cls)
    }


def canonical(given: Mapping[str, Any], *classes: type, also: Collection[str] = ()) -> dict[str, Any]:
    """Return options, given by those or by `ALIASES`, by the names of the classes' fields; `also` pass as they are.

    Raises:
        OptionError: a name that does not exist (with the nearest), cannot be honoured, or is given under two names.
    """
    fields = {f.name for cls in classes for f in dataclasses.fields(cls)}
    neutral = {name: value for cls in classes for name, value in getattr(cls, "NEUTRAL", {}).items()}
    in_any_case = {name for cls in classes for name in getattr(cls, "IN_ANY_CASE", ())}
    without_effect = {name for cls in classes for name in getattr(cls, "WITHOUT_EFFECT", ())}
    named: dict[str, Any] = {}
    for written, value in given.items():
        name = written if written in fields or written in also else ALIASES.get(written, written)
        if written in neutral:
            done = written in in_any_case and isinstance(value, bool)
            if not done and not _asks_for_nothing(value, neutral[written]):
                reasons = {name: said for cls in classes for name, said in getattr(cls, "REASONS", {}).items()}
                why = reasons.get(written, EITHER)
                if written in without_effect and value is True:
                    warnings.warn(f"{written} has no effect: {why}.", stacklevel=3)
                    continue
                raise OptionError(f"{written}={value!r} cannot be honoured: {why}. Leave it out.")
            continue
        if name not in fields and name not in also:
            if elsewhere := [said for cls in classes if (said := getattr(cls, "ELSEWHERE", {}).get(written))]:
                raise OptionError(f"{_label(classes)}there is no option {written!r}: {elsewhere[0]}.")
            known = [*fields, *also, *(alias for alias, meant in ALIASES.items() if meant in fields)]
            alike = difflib.get_close_matches(str(written), known, n=3, cutoff=0.5)
            meant = dict.fromkeys(name if name in fields else ALIASES.get(name, name) for name in alike)
            near = f"; nearest: {', '.join(meant)}" if meant else ""
            raise OptionError(f"{_label(classes)}there is no option {written!r}{near}.")
        if name in named:
            other = next(one for one in given if one != written and ALIASES.get(one, one) == name)
            raise OptionError(f"{name} is given twice, as {other} and as {written}. Give it once.")
        if name != written and written in SWITCHES:
            if not isinstance(value, bool):
                raise OptionError(f"{written}={value!r}: it must be true or false.")
            value = SWITCHES[written][value]
        named[name] = value
    return named


def _label(classes: tuple[type, ...]) -> str:
    return f"{classes[0].__name__}: " if len(classes) == 1 else ""


def _asks_for_nothing(value: Any, neutral: Any) -> bool:
    return value == neutral or value is None or (neutral in (None, False) and value in (False, 0, "0", ""))


def as_alias(alias: str, value: Any) -> Any:
    """Return an option's value as its alias says it."""
    return {held: said for said, held in SWITCHES[alias].items()}.get(value, False) if alias in SWITCHES else value


def effectless(names: Collection[str], value: Callable[[str], Any], *classes: type) -> list[str]:
    """Say which of the options of these names have no effect, because what they need is switched off."""
    known = options_in(*classes)
    return [
        f"{name} has no effect without {' or '.join(known[name].needs)}"
        for name in names
        if name in known and known[name].needs and all(value(need) == off for need, off in known[name].needs.items())
    ]


def typed(cls: type, name: str, value: Any) -> Any:
    """Return a value as its option's type: text that is a number as a number (YAML 1.1 reads 1e-5 as text), a text with
    commas as a list.
    """
    alternatives = kinds(cls)[name]
    if value is None and type(None) in alternatives:
        return None
    for one in alternatives:
        if isinstance(one, type) and issubclass(one, Options):
            return one.of(value)
        if typing.get_origin(one) is tuple:
            kind, *rest = typing.get_args(one)
            parts = tuple(_one(name, part, kind) for part in _parts(value))
            if Ellipsis not in rest and len(parts) != 1 + len(rest):
                raise OptionError(f"{name}={value!r}: it must be {1 + len(rest)} values.")
            return parts
    if isinstance(value, list | tuple) and list[str] in alternatives:
        return [_one(name, part, str) for part in value]
    if isinstance(value, list | tuple) and list[dict[str, Any]] in alternatives:
        if strange := next((one for one in value if not isinstance(one, Mapping)), None):
            raise OptionError(f"{name}: {strange!r:.60} is no mapping: it must be a list of these.")
        return [dict(one) for one in value]
    if isinstance(value, dict) and dict[str, Any] in alternatives:
        return dict(value)
    if isinstance(value, bool) and bool in alternatives:
        return value
    return _one(name, value, plain_kind(cls, name))


def plain_kind(cls: type, name: str) -> type:
    """Return what one value of an option is read as: bool, int, float or str; of a tuple what it holds."""
    alternatives = [typing.get_args(one)[0] if typing.get_origin(one) is tuple else one for one in kinds(cls)[name]]
    for kind in (bool, int, float):
        if kind in alternatives and not (kind is bool and str in alternatives):
            return kind
    return str


def _parts(value: Any) -> list[Any]:
    """Return what a list holds, or a text with commas, or a list of such."""
    if isinstance(value, list | tuple):
        return [part for held in value for part in _parts(held)]
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else [value]


def _one(name: str, value: Any, kind: type) -> Any:
    try:
        if kind is bool:
            if isinstance(value, bool):
                return value
        elif kind is str:
            if type(value).__module__ == "torch":  # torch.bfloat16
                return str(value).removeprefix("torch.")
            if isinstance(value, str | os.PathLike):
                return os.fspath(value)
        elif not isinstance(value, bool) and kind(float(value)) == float(value):
            return kind(float(value))
    except (TypeError, ValueError, OverflowError):
        pass
    raise OptionError(f"{name}={value!r}: it must be {WANTED[kind]}.")


def _check_range(name: str, value: Any, info: Option) -> None:
    if value is None:
        return
    if (info.least is not None and value < info.least) or (info.most is not None and value > info.most):
        wanted = f"from {info.least} on" if info.most is None else f"between {info.least} and {info.most}"
        raise OptionError(f"{name}={value!r}: it is a number {wanted}.")
    if info.choices and value not in info.choices:
        raise OptionError(f"{name}={value!r}{nearest(value, info.choices)}; it is one of {', '.join(info.choices)}.")


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read the options in a file, `option: value`, one a line."""
    import yaml  # type: ignore[import-untyped]

    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        read = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise OptionError(f"{path} cannot be read as YAML ({error}).") from error
    if read is None:
        return {}
    if not isinstance(read, dict):
        raise OptionError(f"{path} holds {type(read).__name__}; it must be `option: value`, one a line.")
    for name, value in read.items():
        if isinstance(value, dict) and ALIASES.get(str(name), name) not in MAPPINGS:
            raise OptionError(f"{path}: {name} holds options of its own; they stand in the file itself, one a line.")
    written = re.findall(r"^([A-Za-z_]\w*)\s*:", text, re.MULTILINE)
    if twice := [name for name in dict.fromkeys(written) if written.count(name) > 1]:
        raise OptionError(f"{path}: {twice[0]} stands there twice. Give it once.")
    return {str(name): value for name, value in read.items()}


def summary(title: str, value: Callable[[str], Any], *classes: type, **otherwise: Any) -> str:
    """Write all options by section, each marked "(Overridden)" or "(Default)"; `otherwise`: other defaults."""
    held = {**defaults(*classes), **otherwise}
    sections = dict.fromkeys(info.section for info in options_in(*classes).values())
    lines = ["=" * 60, title]
    for section in sections:
        lines += ["-" * 60, f"{section}:"]
        for name, info in options_in(*classes).items():
            if info.section == section:
                said = "Default" if value(name) == held[name] else "Overridden"
                lines.append(f"  {name}: {info.shown(value(name))} ({said})")
    return "\n".join([*lines, "=" * 60])


def markdown(*classes: type) -> str:
    """Write the options of classes as a table: name, default, what it does, other names."""
    rows = ["| option | default | what it does | other names |", "|---|---|---|---|"]
    held = defaults(*classes)
    for name, info in options_in(*classes).items():
        others = ", ".join(f"`{alias}`" for alias, meant in ALIASES.items() if meant == name)
        text = info.help + (f" ({', '.join(info.choices)})" if info.choices else "")
        rows.append(f"| `{name}` | `{held[name]!r}` | {text.replace('|', chr(92) + '|')} | {others} |")
    return "\n".join(rows)

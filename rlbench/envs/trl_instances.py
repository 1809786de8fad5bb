"""Environments as TRL's factories make them: what one offers, and the instances that live in this process."""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlbench.data.prompts.chat import schema_of
from rlbench.data.prompts.columns import lacking
from rlbench.errors import DataError, nearest
from rlbench.user_code import name_of, user_code

Factory = Callable[[], Any]
RESERVED = ("reset", "get_reward")
"""Public methods that are no tools."""
MOST_POOLS = 4
"""Environments of which a process keeps instances."""


@dataclass(frozen=True)
class Offer:
    """What the instances of one factory offer. `title`: their class's name; `tools`: names of the methods that are
    tools; `schemas`: those in OpenAI's form, behind functions that stand beside them; `needed`: parameters that `reset`
    cannot do without; `scores`: whether it has `get_reward`."""

    title: str
    tools: tuple[str, ...]
    schemas: list[dict[str, Any]]
    needed: tuple[str, ...]
    scores: bool

    @classmethod
    def of(cls, factory: Any, beside: Mapping[str, Callable[..., Any]]) -> Offer:
        """Make an instance and look at its class's methods. Raises DataError for what is no TRL environment."""
        instance = _probe(factory)
        methods = methods_of(instance)
        kind, seen = type(instance).__name__, ", ".join(methods) or "none"
        if "reset" not in methods:
            raise DataError(
                f"from_trl: {kind} has no method reset(self, **columns){nearest('reset', methods)}; its public methods "
                f"are: {seen}. TRL's environments begin each sample with it"
            )
        tools = tuple(name for name in methods if name not in RESERVED)
        if not tools:
            raise DataError(
                f"from_trl: {kind} has no tools for the policy to call; its public methods are: {seen}. Give it a "
                "method beside reset and get_reward, with types and a docstring"
            )
        schemas = [schema_of(name, fn) for name, fn in (*beside.items(), *((name, methods[name]) for name in tools))]
        return cls(kind, tools, schemas, tuple(lacking(methods["reset"], frozenset())), "get_reward" in methods)


def _probe(factory: Any) -> Any:
    """Make an instance to look at."""
    if not callable(factory):
        raise DataError(
            f"from_trl: {type(factory).__name__} is no factory: give the class, or a function without arguments "
            f"that makes an environment, from_trl({type(factory).__name__}), not an instance"
        )
    try:
        with user_code():
            instance = factory()
    except Exception as error:
        raise DataError(
            f"from_trl: {name_of(factory)}() raised {type(error).__name__}: {error}. A factory makes an "
            "environment without arguments, here to see its tools, and on the replicas; functools.partial(…) gives "
            "it some"
        ) from error
    return instance


def methods_of(instance: Any) -> dict[str, Callable[..., Any]]:
    """Return an instance's public methods by name, those that its class defines; no property is evaluated."""
    found = inspect.getmembers(type(instance), predicate=inspect.isfunction)
    return {name: getattr(instance, name) for name, _ in found if not name.startswith("_")}


class Instances:
    """Instances of one factory: made where none is free, and taken again for later samples."""

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._free: list[Any] = []
        self._taken: set[int] = set()
        self._changing = threading.Lock()

    def take(self) -> Any:
        """Return an instance that no other sample has."""
        with self._changing:
            if self._free:
                instance = self._free.pop()
                self._taken.add(id(instance))
                return instance
        with user_code():
            instance = self._factory()
        with self._changing:
            if id(instance) in self._taken:
                raise DataError(
                    f"{name_of(self._factory)}() gave one {type(instance).__name__} twice: samples run side by side, "
                    "each needs an instance of its own"
                )
            self._taken.add(id(instance))
        return instance

    def give_back(self, instance: Any, whole: bool) -> None:
        """Have an instance free again; one that is not `whole`, as its `reset` failed, is forgotten."""
        with self._changing:
            self._taken.discard(id(instance))
            if whole:
                self._free.append(instance)


_pools: OrderedDict[tuple[str, str], Instances] = OrderedDict()
_opening = threading.Lock()


def pool(key: tuple[str, str], factory: Factory) -> Instances:
    """Return this process's instances of an environment, by the key it got when it was made on the driver."""
    with _opening:
        instances = _pools.pop(key, None) or Instances(factory)
        _pools[key] = instances
        while len(_pools) > MOST_POOLS:
            _pools.popitem(last=False)
        return instances


def bound(instance: Any, names: tuple[str, ...]) -> dict[str, Callable[..., Any]]:
    """Return an instance's tools by name."""
    return {name: getattr(instance, name) for name in names}

"""Hot reload of a live module's code: a class or one method, replaced on the ranks while weights and optimizer stay.

@train.method                      # in a cell, again after every edit
def perplexity(self, ids): ...

class Policy(rb.nn.HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM): ...
train.redefine(Policy)             # the class of that name, edited
train.redefine(Block)              # or the class of the modules inside it
"""

from __future__ import annotations

import base64
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rlbench.dispatch import by_value
from rlbench.errors import EngineError
from rlbench.runtime import registry

if TYPE_CHECKING:
    from rlbench.engines.train import TrainEngine

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Redefined:
    """What a redefinition did. `changed`: False where the code in place was the same. `modules`: how many have it now.
    `notes`: what was changed in the text and does not run again."""

    name: str
    hash: str
    changed: bool
    modules: int
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        places = f" in {self.modules} modules" if self.modules > 1 else ""
        lead = f"{self.name} ({self.hash[:4]}){places}: " + ("redefined" if self.changed else "as it was")
        return "\n  ".join([lead, *self.notes])


class Redefining:
    """What `TrainEngine` inherits: redefine, method."""

    def redefine(self, cls: type, replace: str | None = None) -> Redefined:
        """Put a class in the place of the live one of its name, on every rank; weights, optimizer and random states
        are not touched, and no constructor or `on_weights_materialized` runs.

        The class may be that of the module itself (its methods are callable at once) or of modules inside it. It
        survives a `heal()`. Replicas know nothing of it: after a change of `forward` they compute something else.

        Args:
            cls: with everything it uses of the notebook and of local modules, by value.
            replace: name of the class it takes the place of, where that has another one.

        Returns:
            `Redefined`; running an unchanged cell again changes nothing.

        Raises:
            EngineError: no such class in the module; other framework bases; parameters that would not fit; a method
                with the name of one of the engine's verbs. No rank is changed then.
        """
        me = cast("TrainEngine", self)
        if not isinstance(cls, type):
            raise EngineError(f"redefine takes a class, not {cls!r}; for one method: @{me.name}.method")
        name = cls.__qualname__.rpartition("<locals>.")[2]
        return _sent(me, "redefine", f"class {replace or name}", name, cls, replace)

    def method(self, fn: F) -> F:
        """Decorator: add a function to the live module as a method, or replace the method of its name.

        It is callable as `engine.name(…)` at once, keeps being so when the class is redefined without such a method,
        and gives the function back. `super()` without arguments does not work in it.

        Raises:
            EngineError: the name is one of the engine's verbs, or of a method of torch's or transformers'.
        """
        me = cast("TrainEngine", self)
        bare = fn.__func__ if isinstance(fn, staticmethod | classmethod) else fn
        name = getattr(bare, "__name__", "")
        if not name:
            raise EngineError(f"a method is made of a function with a name, not of {fn!r}: def name(self, …): …")
        _sent(me, "add_method", f"method {name}", name, fn)
        return fn

    def define_again(self) -> None:
        """Give the rebuilt ranks what was redefined before their engine died, in the order it was."""
        me = cast("TrainEngine", self)
        for kept in _kept(me):
            blob = base64.b64decode(kept["blob"])
            _adopt(me, me.call_all(kept["verb"], blob, kept["hash"], *kept["more"], verbs(me), what="heal").result()[0])


def forget(engine: TrainEngine) -> None:
    """The engine is closed: the next one of its name starts from its own module."""
    _file(engine).unlink(missing_ok=True)


def verbs(engine: TrainEngine) -> tuple[str, ...]:
    """Names of the engine's own verbs, which no method may take."""
    return tuple(name for name in dir(type(engine)) if not name.startswith("_"))


def _sent(engine: TrainEngine, verb: str, key: str, name: str, value: Any, *more: Any) -> Redefined:
    blob = by_value.dumps(value, "redefine" if verb == "redefine" else "method")
    identity = by_value.identity(value)
    what = f"{engine.name}.{verb}"
    replacing = {"replace": more[0]} if more and more[0] is not None else {}
    with engine.link.noting(engine.name, "redefine" if verb == "redefine" else "method", (value,), replacing):
        done = engine.call_all(verb, blob, identity, *more, verbs(engine), what=what).blocking_result()[0]
    if done["changed"]:
        _adopt(engine, done)
        text = base64.b64encode(blob).decode()
        _keep(engine, {"key": key, "verb": verb, "hash": identity, "more": list(more), "blob": text})
    for note in done["notes"]:
        warnings.warn(note, stacklevel=4)
    return Redefined(name, identity, done["changed"], done["modules"], tuple(done["notes"]))


def _adopt(engine: TrainEngine, done: dict[str, Any]) -> None:
    """Take over the new table of methods, here and at the monitor."""
    engine._make_methods(done["methods"])
    engine.link.engine(engine.name, {"methods": done["methods"]})


# -- what a rebuilt engine is given again


def _file(engine: TrainEngine) -> Path:
    """In the session's folder, which outlives the ranks and the kernel, and ends with the session."""
    return registry.snapshot_folder(engine.link.name) / "redefined" / f"{engine.name}.json"


def _kept(engine: TrainEngine) -> Sequence[dict[str, Any]]:
    return list((registry.read_json(_file(engine)) or {"order": []})["order"])


def _keep(engine: TrainEngine, made: dict[str, Any]) -> None:
    order = [kept for kept in _kept(engine) if kept["key"] != made["key"]]
    _file(engine).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    registry.write_json(_file(engine), {"order": [*order, made]})

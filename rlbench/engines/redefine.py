"""Hot reload of a live module's code: a class or one method, replaced on the ranks while weights and optimizer stay."""

from __future__ import annotations

import base64
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbench.dispatch import by_value
from rlbench.errors import EngineError
from rlbench.runtime import registry
from rlbench.traces import user_stacklevel

if TYPE_CHECKING:
    from rlbench.engines.train import TrainEngine


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


def define_again(engine: TrainEngine, methods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give rebuilt ranks what was redefined before their engine died, in the order it was; return their methods."""
    for entry in _redefined(engine):
        blob, identity, more = base64.b64decode(entry["blob"]), entry["hash"], entry["more"]
        done = engine.call_all(entry["verb"], blob, identity, *more, verbs(engine), what="heal").result()[0]
        methods = done["methods"]
    return methods


def forget(engine: TrainEngine) -> None:
    """Forget what was redefined: the next engine of this name starts from its own module."""
    _file(engine).unlink(missing_ok=True)


def verbs(engine: TrainEngine) -> tuple[str, ...]:
    """Return the names of the engine's own verbs, which no method may take."""
    return tuple(name for name in dir(type(engine)) if not name.startswith("_"))


def redefine(engine: TrainEngine, cls: type, replace: str | None) -> Redefined:
    """Put a class in the place of the live one; see `TrainEngine.redefine`."""
    if not isinstance(cls, type):
        raise EngineError(f"redefine takes a class, not {cls!r}; for one method: @{engine.name}.method")
    name = cls.__qualname__.rpartition("<locals>.")[2]
    return _send(engine, "redefine", f"class {replace or name}", name, cls, replace)


def add_method(engine: TrainEngine, fn: Any) -> None:
    """Give the live module a method; see `TrainEngine.method`."""
    bare = fn.__func__ if isinstance(fn, staticmethod | classmethod) else fn
    name = getattr(bare, "__name__", "")
    if not name:
        raise EngineError(f"a method is made of a function with a name, not of {fn!r}: def name(self, …): …")
    _send(engine, "add_method", f"method {name}", name, fn)


def _send(engine: TrainEngine, verb: str, key: str, name: str, value: Any, *more: Any) -> Redefined:
    """Send a class or function to the ranks, and keep it for those of a rebuilt engine."""
    own_name = "redefine" if verb == "redefine" else "method"
    blob = by_value.dumps(value, own_name)
    identity = by_value.identity(value)
    replacing = {"replace": more[0]} if more and more[0] is not None else {}
    with engine.link.noting(engine.name, own_name, (value,), replacing):
        pending = engine.call_all(verb, blob, identity, *more, verbs(engine), what=f"{engine.name}.{verb}")
        done = pending.blocking_result()[0]
    if done["changed"]:
        engine._make_methods(done["methods"])
        engine.link.engine(engine.name, {"methods": done["methods"]})
        text = base64.b64encode(blob).decode()
        entry = {"key": key, "verb": verb, "hash": identity, "more": list(more), "blob": text}
        _file(engine).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        order = [before for before in _redefined(engine) if before["key"] != key]
        registry.write_json(_file(engine), {"order": [*order, entry]})
    for note in done["notes"]:
        warnings.warn(note, stacklevel=user_stacklevel())
    return Redefined(name, identity, done["changed"], done["modules"], tuple(done["notes"]))


def _file(engine: TrainEngine) -> Path:
    """Return a file in the session's folder, which outlives the ranks and the kernel, and ends with the session."""
    return registry.snapshot_folder(engine.link.name) / "redefined" / f"{engine.name}.json"


def _redefined(engine: TrainEngine) -> Sequence[dict[str, Any]]:
    return list((registry.read_json(_file(engine)) or {"order": []})["order"])

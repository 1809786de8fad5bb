"""The record of a session: one line per verb, in the session's folder (`script/verbs.jsonl`, `script/cells.jsonl`, each
text once in `script/sources`). It outlives the kernel and has the side panel's verbs in it."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
import json
import os
import re
import secrets
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from rlbench.data import Rollouts, TrainBatch
from rlbench.data.record.history import History, is_number
from rlbench.data.record.metrics import Metrics
from rlbench.dispatch.chain import Chain
from rlbench.dispatch.link import Link
from rlbench.dispatch.pending import Pending
from rlbench.runtime import registry
from rlbench.session.record import cells
from rlbench.session.record.sources import described, is_own_code, of_makers
from rlbench.traces import calling_line, place

R = TypeVar("R")

NOT_WRITTEN = ("core", "progress", "on_stop")
CODE = ("loss", "reward", "env")
METRICS = ("loss", "reward", "kl", "entropy", "grad_norm", "lr")
SHOWN = 60
SECRET = re.compile(r"(?i)authorization|api_?key|(?:^|[_-])key$|token(?!iz|s|_ids?)|passw|secret|credential")
ROLES = {"actor": "train", "inference": "inference", "trainer": "last_trainer"}


@dataclass
class Entry:
    """One verb. `args`: how each argument reads; `hashes`: of the code, arrays, rollouts and batches among them;
    `sources`: the keys of that code's text; `cell`: id of the cell that called it; `where`: the line that did."""

    verb: str
    id: str = field(default_factory=lambda: secrets.token_hex(6))
    args: dict[str, str] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    cell: str = ""
    where: str = ""
    time: float = 0.0
    seconds: float = 0.0
    outcome: str = "done"
    said: str = ""
    step: int | None = None
    version: int | None = None
    seed: int | None = None
    number: int | None = None
    digest: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class Recorder:
    """Writes and reads the record of a session; `ended` is called with each verb that ended, and its value."""

    def __init__(self, link: Link, seed: int, ended: Callable[[Entry, Any], None]) -> None:
        self.folder = registry.snapshot_folder(link.name) / "script"
        self.place = ""  # where verbs come from, if not from this process's code
        self._link, self._seed, self._ended = link, seed, ended
        self._lock = threading.RLock()
        self._cells_written: set[str] = set()
        self._warned = False

    # -- reading

    def entries(self) -> list[Entry]:
        """Return all verbs, in the order they began."""
        last = {line["id"]: Entry(**line) for line in self._lines("verbs")}  # one not waited for has two lines
        return sorted(last.values(), key=lambda entry: entry.time)

    def cells(self) -> list[cells.Cell]:
        """Return the cells of all kernels that ended, in order."""
        self.cell_ended()
        ended = {line["id"]: line for line in self._lines("cells")}  # a kernel that attaches again writes them again
        return [cells.Cell(**line | {"text": self.source(line["text"])}) for line in ended.values()]

    def source(self, key: str) -> str:
        """Return a text by its key."""
        return (self.folder / "sources" / f"{key}.py").read_text(encoding="utf-8")

    def code_of(self, record: Mapping[str, Any]) -> str:
        """Return the code a verb used: its cell, then the functions and classes it was given."""
        cell = [self.source(line["text"]) for line in self._lines("cells") if line["id"] == record["cell"]]
        kernel = cells.kernel()
        if not cell and kernel is not None and kernel.running is not None and kernel.running.id == record["cell"]:
            cell = [kernel.running.text]
        return "\n\n".join(dict.fromkeys([*cell, *map(self.source, record["sources"].values())]))

    def _lines(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / f"{name}.jsonl"
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    # -- writing

    def begin(self, verb: str, args: Mapping[str, Any]) -> Entry:
        """Write down what a verb is called with."""
        entry = Entry(verb, time=time.time(), seed=self._seed)
        with self._unharmed(entry):
            kernel = cells.kernel()
            if kernel is not None:
                kernel.listeners.add(self)
                entry.cell = kernel.running.id if kernel.running is not None else ""
            line = calling_line()
            entry.where = self.place or ("" if line is None else f"{place(line.file)}, line {line.line}")
            for name, value in args.items():
                self._argument(entry, name, value)
        return entry

    def during(self, entry: Entry, call: Callable[[], R]) -> R:
        """Run a verb and write down what comes of it: now, or where it is not waited for once it has ended."""
        try:
            value = call()
        except BaseException as error:
            self.end(entry, error=error)
            raise
        if isinstance(value, Pending | Chain):
            with self._unharmed(entry):
                self._append("verbs", asdict(replace(entry, outcome="running")))
            value.then(lambda result, error: self.end(entry, result, error))
        else:
            self.end(entry, value)
        return value

    def end(self, entry: Entry, value: Any = None, error: BaseException | None = None) -> None:
        """Add what came of it, and write the line; nothing where the session's folder went with it."""
        with self._unharmed(entry):
            self._add_outcome(entry, value, error)
        if self._link.closed:
            return
        with self._unharmed(entry):
            self._append("verbs", asdict(entry))
        with self._unharmed(entry):
            self._ended(entry, value)

    @contextlib.contextmanager
    def engine_call(self, engine: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Record what a user does with an engine itself: `session.train.run(…)`, a method of the module."""
        entry = self.begin_engine_call(engine, method, args, kwargs)
        try:
            yield
        except BaseException as error:
            self.end(entry, error=error)
            raise
        self.end(entry)

    def begin_engine_call(self, engine: str, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Entry:
        """Write down a call of an engine's or a trainer's own method; positional arguments are numbered."""
        role = ROLES.get(engine, f"engines[{engine!r}]")
        return self.begin(f"{role}.{method}", {str(i): one for i, one in enumerate(args)} | dict(kwargs))

    def cell_ended(self) -> None:
        """Write down the cells that ended since the last time."""
        kernel = cells.kernel()
        if kernel is None or not self.folder.parent.exists():  # the session is closed
            return
        fresh = list(itertools.takewhile(lambda cell: cell.id not in self._cells_written, reversed(kernel.cells)))
        for cell in reversed(fresh):
            self._cells_written.add(cell.id)
            self._append("cells", asdict(cell) | {"text": self._keep(cell.text)})

    def _argument(self, entry: Entry, name: str, value: Any) -> None:
        entry.args[name] = shown(value, name)
        code: dict[str, Any] = {}
        told: dict[str, dict[str, str]] = {}
        if isinstance(value, TrainBatch):
            entry.hashes[name] = value.key
            told = of_makers(value)
        elif isinstance(value, Rollouts):
            entry.hashes[name] = f"{_digest(value):08x}"
        elif isinstance(value, np.ndarray):
            entry.hashes[name] = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:12]
        elif is_own_code(value) or (name in CODE and callable(value)):
            code = {name: value}
        elif name in CODE and isinstance(value, Mapping):  # a reward of each set, a loss of parts with their weights
            parts = {key: one[0] if isinstance(one, tuple) and one else one for key, one in value.items()}
            code = {f"{name}[{key}]": fn for key, fn in parts.items() if callable(fn)}
        told = told or {part: described(fn) for part, fn in code.items()}
        for part, about in told.items():
            entry.hashes[part] = about["hash"]
            if about["source"]:
                entry.sources[part] = self._keep(about["source"])

    def _add_outcome(self, entry: Entry, value: Any, error: BaseException | None) -> None:
        entry.seconds = time.time() - entry.time
        if error is not None:
            entry.outcome, entry.said = cells.outcome_of(error)
            value = getattr(error, "partial", None)
            entry.outcome = "done" if isinstance(value, Metrics) else entry.outcome  # stopped too late: it was done
        if isinstance(value, Rollouts):
            entry.number, entry.digest = value.number, _digest(value)
            if value.not_started or (value.aborted.any() and not value.env_errors):
                entry.outcome = "stopped"  # also where `on_stop="return"` gave it: it is not to be had again
        if isinstance(value, History) and len(value):  # a trainer's iterations
            value = value[-1]
        evaluated = entry.verb == "evaluate" and value is not None and not isinstance(value, Rollouts)
        values = value.metrics() if evaluated else value if isinstance(value, Mapping) else {}
        if not self._link.closed:
            state = values if {"step", "version"} <= values.keys() else self._link.state("step", "version")
            entry.step, entry.version = state["step"], state["version"]
        told = values if evaluated else METRICS
        entry.metrics = {name: float(values[name]) for name in told if is_number(values.get(name))}
        if values.get("loss_hash"):
            entry.hashes["loss"] = str(values["loss_hash"])

    @contextlib.contextmanager
    def _unharmed(self, entry: Entry) -> Iterator[None]:
        """A record must not end, or change, what it records: what goes wrong in it is told, once."""
        try:
            yield
        except Exception as error:
            if not self._warned:
                self._warned = True
                said = f"{entry.verb} could not be put on record: {type(error).__name__}: {error}"
                warnings.warn(said, stacklevel=5)

    def _append(self, name: str, line: dict[str, Any]) -> None:
        with self._lock:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self.folder / f"{name}.jsonl"
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as file:
                file.write(json.dumps(line, default=str) + "\n")

    def _keep(self, text: str) -> str:
        key = hashlib.sha256(text.encode()).hexdigest()[:12]
        file = self.folder / "sources" / f"{key}.py"
        if not file.exists():
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file.touch(mode=0o600)
            file.write_text(text, encoding="utf-8")
        return key


def arguments(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Return what a verb was called with, by name; further positional arguments are numbered."""
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if name in NOT_WRITTEN:
            continue
        if kind is inspect.Parameter.VAR_POSITIONAL:
            found |= {str(i): one for i, one in enumerate(value, 1)}
        else:
            found |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    return found


def shown(value: Any, name: str = "") -> str:
    """Return how an argument reads in one line; a secret is left out."""
    if SECRET.search(name) and isinstance(value, str):
        return "…"
    known = getattr(value, "__name__", None) if callable(value) else None
    if isinstance(value, np.ndarray):
        known = f"array {value.dtype} {value.shape}"
    elif isinstance(value, list | tuple | dict) and len(value) >= 8:
        known = f"{type(value).__name__} of {len(value)}"
    text = known or repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _digest(rollouts: Rollouts) -> int:
    return zlib.crc32(np.ascontiguousarray(rollouts.responses.values).data)

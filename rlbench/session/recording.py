"""What was done in a session: each verb with its arguments, sources, versions, metrics and time.

The log lies in the session's folder (`script/verbs.jsonl`, one JSON object per line; `script/sources`,
`script/files`), so that it outlives the kernel and has the panel's verbs in it. A verb's statement is written down when
it begins: the code of a loss or a reward is then what runs, whatever becomes of the cell.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
import secrets
import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from rlbench.data import Rollouts, TrainBatch, as_prompts
from rlbench.data.metrics import Metrics
from rlbench.data.origin import Origin, origin, remember
from rlbench.dispatch.chain import Chain
from rlbench.dispatch.pending import Pending
from rlbench.errors import SessionError, Stopped
from rlbench.runtime import registry
from rlbench.session.script_values import SECRET, VARIABLE, Renderer

if TYPE_CHECKING:
    from rlbench.session.session import Session

P = ParamSpec("P")
R = TypeVar("R")

NOT_WRITTEN = ("block", "progress", "on_stop")
"""Arguments that say how a cell waits, not what is done."""
METRICS = ("loss", "reward", "kl", "entropy", "grad_norm", "lr")
SHOWN = 60
STEPS = ("train_step", "optim_step")


@dataclass
class Entry:
    """One verb. `code` is its call, without the variable it is assigned to; `trouble`: why there is none.

    `before`: statements that make its batches. `imports`, `defines` ((name, hash of the text)) and `files`: what both
    need; the first `shared` of `defines` are what `before` needs.
    `number`: of the rollout drawn; `digest`: of its tokens. `snapshot`: the one it made, went back to, or can be undone
    by; `after`: the one the session kept when it was done. `lost`: why what it did cannot be done again.
    """

    verb: str
    id: str = field(default_factory=lambda: secrets.token_hex(6))
    args: dict[str, str] = field(default_factory=dict)
    code: str = ""
    variable: str = ""
    trouble: str = ""
    before: list[str] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)
    defines: list[tuple[str, str]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    shared: int = 0
    time: float = 0.0
    seconds: float = 0.0
    outcome: str = "done"
    said: str = ""
    step: int | None = None
    version: int | None = None
    rollouts: int | None = None
    number: int | None = None
    digest: int | None = None
    lost: str = ""
    snapshot: str | None = None
    after: str | None = None
    partial: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)


class Recorder:
    """Writes and reads the log of session `name`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = registry.snapshot_folder(name) / "script"
        self._lock = threading.RLock()
        self._batches: weakref.WeakKeyDictionary[Origin, str] = weakref.WeakKeyDictionary()
        self._read: tuple[int, list[Entry]] = (0, [])
        self._begun: dict[str, int] = {}
        self._warned = False

    @property
    def key(self) -> str:
        """What tells this session from another of its name: a variable of that one's script is none of this one's."""
        file = self.folder / "key"
        with self._lock:
            if not file.exists():
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                file.write_text(secrets.token_hex(8))
            return file.read_text()

    def entries(self) -> list[Entry]:
        """All verbs, in the order they began."""
        with self._lock:
            file = self.folder / "verbs.jsonl"
            size = file.stat().st_size if file.exists() else 0
            if size != self._read[0]:
                text = file.read_text(encoding="utf-8") if size else ""
                lines = [Entry(**json.loads(line)) for line in text.split("\n")[:-1]]
                last = {entry.id: entry for entry in lines}  # one that was not waited for has a line for its begin, too
                self._read = (size, sorted(last.values(), key=lambda entry: entry.time))
            return list(self._read[1])

    def source(self, hash: str) -> str:
        """The text of a definition."""
        return (self.folder / "sources" / f"{hash}.py").read_text(encoding="utf-8")

    def begin(self, session: Session, verb: str, bound: inspect.BoundArguments) -> Entry:
        """Write down what a verb is called with."""
        entry = Entry(verb, time=time.time())
        with self._lock, self._unharmed(entry):
            entry.variable = self._variable(verb)
            writer = self._writer(entry, session)
            try:
                self._write(entry, writer, bound)
            finally:
                self._kept_of(entry, writer)
        return entry

    def running(self, entry: Entry) -> None:
        """The verb is not waited for: it is on record from here on, also where nobody ever asks for its result."""
        with self._unharmed(entry):
            self._append(replace(entry, outcome="running"))

    @contextlib.contextmanager
    def _unharmed(self, entry: Entry) -> Iterator[None]:
        """A record must not end, or change, what it records: what goes wrong in it is told with the entry, and once."""
        try:
            yield
        except Exception as error:
            entry.trouble = entry.trouble or f"{type(error).__name__}: {error}"
            if not isinstance(error, SessionError) and not self._warned:
                self._warned = True
                warnings.warn(f"{entry.verb} could not be put on record: {entry.trouble}", stacklevel=5)

    def _writer(self, entry: Entry, session: Session | None = None) -> Renderer:
        def bind(made: Origin, kind: str, text: str) -> str:
            name = self._batches[made] = self._variable(kind)
            entry.before.append(f"{name} = {text}")
            entry.shared = len(writer.defines)
            return name

        writer = Renderer(self.folder / "files", self._name_of, session, bind)
        return writer

    def _kept_of(self, entry: Entry, writer: Renderer) -> None:
        entry.imports, entry.files = writer.imports, writer.files
        entry.defines = [(name, self._keep(text)) for name, text in writer.defines]

    def end(self, session: Session, entry: Entry, value: Any = None, error: BaseException | None = None) -> None:
        """Add what came of it, and write the line."""
        with self._unharmed(entry):
            self._ended(session, entry, value, error)
        if session.link.closed:
            return  # the folder went with the session
        with self._unharmed(entry):
            self._append(entry)
        with self._unharmed(entry):
            session.trackers.saw(entry, value)

    def _ended(self, session: Session, entry: Entry, value: Any, error: BaseException | None) -> None:
        entry.seconds = time.time() - entry.time
        if error is not None:
            entry.outcome = "stopped" if isinstance(error, Stopped | KeyboardInterrupt) else "failed"
            entry.said = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            value = getattr(error, "partial", None)
            entry.outcome = "done" if isinstance(value, Metrics) else entry.outcome  # stopped too late: it was done
        if not session.link.closed:
            state = session.link.state("step", "version", "rollouts")
            entry.step, entry.version, entry.rollouts = state["step"], state["version"], state["rollouts"]
            around, session.around_step = session.around_step, (None, None)
            if entry.verb in STEPS:
                entry.snapshot = around[0]
            if entry.outcome == "done":
                entry.after = around[1]
        self._note(entry, value)

    def _append(self, entry: Entry) -> None:
        with self._lock:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            line = json.dumps(entry.__dict__, default=str) + "\n"
            with open(os.open(self.folder / "verbs.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as file:
                file.write(line)

    @contextlib.contextmanager
    def engine_call(
        self, session: Session, engine: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[None]:
        """What a user does with an engine itself: `session.train.run(…)`, a method of the module, a cell on ranks."""
        roles = {"actor": "train", "inference": "inference", "trainer": "last_trainer"}
        role = roles.get(engine, f"engines[{engine!r}]")
        entry = Entry(f"{role}.{method}", time=time.time())
        entry.args = {str(i): _shown(one) for i, one in enumerate(args)} | {k: _shown(v, k) for k, v in kwargs.items()}
        with self._lock, self._unharmed(entry):
            writer = self._writer(entry, session)
            try:
                entry.code = writer.call(f"{role}.{method}", args, kwargs)
            finally:
                self._kept_of(entry, writer)
        try:
            yield
        except BaseException as error:
            self.end(session, entry, error=error)
            raise
        self.end(session, entry)

    def loaded(self, session: Session, path: str, options: dict[str, Any]) -> None:
        """The session began with a checkpoint: the statement that makes it like this again."""
        texts = [repr(path), *(f"{name}={value!r}" for name, value in options.items())]
        entry = Entry("load", args={"path": path}, code=f"load({', '.join(texts)})", time=time.time())
        self.end(session, entry)

    def recall(self, rollouts: Rollouts) -> None:
        """Rollouts of an earlier kernel: the variable that a script has for them."""
        drawn = [one for one in self.entries() if one.number == rollouts.number and one.verb == "rollout"]
        if drawn and origin(rollouts) is None:
            self._is(rollouts, drawn[-1].variable)

    # -- what came of it

    def _note(self, entry: Entry, value: Any) -> None:
        if isinstance(value, Rollouts):
            entry.number = value.number
            entry.digest = zlib.crc32(np.ascontiguousarray(value.responses.values).data)
            self._is(value, entry.variable)
            cut = value.not_started or (value.aborted.any() and not value.env_errors)
            if entry.verb == "rollout" and (entry.outcome == "stopped" or cut):
                entry.outcome = "stopped"  # also where `on_stop="return"` gave it: it is not to be had again
                writer = Renderer(self.folder / "files", lambda made: None)
                entry.partial = writer.whole(value)
                entry.files = [*entry.files, *writer.files]
        elif isinstance(getattr(value, "rollouts", None), Rollouts):  # an evaluation
            self._is(value.rollouts, f"{entry.variable}.rollouts")
        elif hasattr(value, "fresh") and hasattr(value, "id"):
            entry.snapshot = value.id
        elif entry.verb == "heal" and "actor" in getattr(value, "engines", {}):
            entry.snapshot = value.snapshot
            entry.lost = "" if value.snapshot else f"heal() went on without a snapshot: {value.engines['actor']}"
        found = value if hasattr(value, "get") else {}
        for name in METRICS:
            number = found.get(name)
            if isinstance(number, int | float) and not isinstance(number, bool):
                entry.metrics[name] = float(number)
        if entry.verb == "evaluate" and hasattr(value, "reward"):
            entry.metrics["reward"] = float(value.reward)
        if found.get("loss_hash"):
            entry.hashes["loss"] = str(found["loss_hash"])

    def _is(self, value: Any, variable: str) -> None:
        if variable:
            remember(value, Origin(VARIABLE, kwargs={"session": self.key, "name": variable}))

    # -- the statement

    def _write(self, entry: Entry, writer: Renderer, bound: inspect.BoundArguments) -> None:
        args: list[tuple[str, Any]] = []
        kwargs: dict[str, Any] = {}
        for name, parameter in bound.signature.parameters.items():
            if name == "self" or name in NOT_WRITTEN or name not in bound.arguments:
                continue
            value = bound.arguments[name]
            if parameter.kind is parameter.VAR_POSITIONAL:
                args += [(name, one) for one in value]
            elif parameter.kind is parameter.VAR_KEYWORD:
                kwargs |= value
            elif parameter.default is parameter.empty and parameter.kind is not parameter.KEYWORD_ONLY:
                args.append((name, value))
            elif not _same(value, parameter.default):
                kwargs[name] = value
        entry.args = {name: _shown(one, name) for name, one in [*args, *kwargs.items()]}  # until there is a text
        texts = []
        for i, (name, one) in enumerate([*args, *kwargs.items()]):
            text = writer.named(name, one) if SECRET.search(name) else self._argument(entry, writer, name, one)
            texts.append(text if i < len(args) else f"{name}={text}")
            if len(text) <= SHOWN and "saved_" not in text:
                entry.args[name] = text
        entry.code = f"{entry.verb}({', '.join(texts)})"

    def _argument(self, entry: Entry, writer: Renderer, name: str, value: Any) -> str:
        if name == "prompts" and entry.verb in ("rollout", "evaluate"):
            return writer.prompts(as_prompts(value))
        if isinstance(value, TrainBatch):
            return self._batch(entry, writer, value)
        made = getattr(value, "id", None)
        if made is not None and hasattr(value, "fresh"):  # a snapshot
            by = [one.variable for one in self.entries() if one.snapshot == made and one.verb == "snapshot"]
            return by[-1] if by else repr(str(value.label))
        return writer.expression(value)

    def _batch(self, entry: Entry, writer: Renderer, batch: TrainBatch) -> str:
        """The variable of a batch; the statement that makes it, where it is seen for the first time."""
        made = origin(batch)
        if made is not None and self._name_of(made) is not None:
            return str(self._name_of(made))
        name = self._variable("batch")
        entry.before.append(f"{name} = {writer.expression(batch)}")
        entry.shared = len(writer.defines)
        self._batches[made if made is not None else remember_hand_made(batch)] = name
        return name

    def _name_of(self, made: Origin) -> str | None:
        if made.call == VARIABLE:
            return str(made.kwargs["name"]) if made.kwargs["session"] == self.key else None
        return self._batches.get(made)

    def _variable(self, verb: str) -> str:
        """A new variable for what a verb gives; empty where that is nothing to go on with."""
        stem = {
            "rollout": "rollouts",
            "evaluate": "evaluation",
            "snapshot": "snapshot",
            "batch": "batch",
            "loss_lab": "lab",
            "scored": "scored",
            "joined": "joined",
        }.get(verb)
        if stem is None:
            return ""
        if stem not in self._begun:
            self._begun[stem] = _highest(self.entries(), stem)
        self._begun[stem] += 1
        return f"{stem}_{self._begun[stem]}"

    def _keep(self, text: str) -> str:
        key = hashlib.sha256(text.encode()).hexdigest()[:12]
        file = self.folder / "sources" / f"{key}.py"
        if not file.exists():
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        return key


def recorded(method: Callable[P, R]) -> Callable[P, R]:
    """A verb of a session that is written down; also one that is called with `block=False`, once it has ended."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def verb(*args: P.args, **kwargs: P.kwargs) -> R:
        session: Any = args[0]
        bound = signature.bind(*args, **kwargs)  # a TypeError here is the caller's, as without this
        prompts = bound.arguments.get("prompts")
        if hasattr(prompts, "__next__"):  # it can be read once
            bound.arguments["prompts"] = list(prompts or ())
        entry = session.recorder.begin(session, method.__name__, bound)
        try:
            value = method(*bound.args, **bound.kwargs)
        except BaseException as error:
            session.recorder.end(session, entry, error=error)
            raise
        if isinstance(value, Pending | Chain):
            session.recorder.running(entry)
            value.then(lambda found, error: session.recorder.end(session, entry, found, error))
        else:
            session.recorder.end(session, entry, value)
        return value

    return verb


def remember_hand_made(batch: TrainBatch) -> Origin:
    """An origin for a batch that nobody saw being made, so that it is written down once."""
    made = Origin("by hand")
    remember(batch, made)
    return made


def _highest(entries: list[Entry], stem: str) -> int:
    names = [one.variable for one in entries] + [line.partition(" =")[0] for one in entries for line in one.before]
    numbers = [int(name.rpartition("_")[2]) for name in names if name.startswith(f"{stem}_")]
    return max(numbers, default=0)


def _same(value: Any, default: Any) -> bool:
    plain = type(value) is type(default) and isinstance(value, str | int | float)
    return value is default or (plain and value == default)


def _shown(value: Any, called: str = "") -> str:
    if SECRET.search(called) and isinstance(value, str):
        return "…"
    name = getattr(value, "__name__", None) if callable(value) else None
    text = name or (
        repr(value)
        if not isinstance(value, list | tuple | dict) or len(value) < 8
        else f"{type(value).__name__} of {len(value)}"
    )
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"

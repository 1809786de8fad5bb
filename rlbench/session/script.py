"""The way out: what was done in a session as a script that does it again, `session.export_script(path)`.

The script makes the session, then runs the verbs in their order, each after the definitions it uses as they were then.
Steps that were taken back are left out together with the verb that took them back, unless something later needs what
they gave; so are verbs that changed nothing but files or only waited. At its end it puts its metrics beside those
that were seen.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbench._version import __version__
from rlbench.data import files
from rlbench.errors import SessionError
from rlbench.session.recording import Entry

if TYPE_CHECKING:
    from rlbench.session.session import Session

LEFT_OUT = {
    "save": "it would write there again", "export": "it would write there again", "export_script": "it writes this",
    "heal": "this script has no fault to heal from", "pause": "it only waits", "resume": "it only waits",
    "track": "it would log there again", "untrack": "it would log there again",
}  # fmt: skip
GO_BACK = ("restore", "undo")
STEPS = ("train_step", "optim_step")
COMPARED = ("reward", "loss", "kl", "grad_norm")


@dataclass(frozen=True)
class Exported:
    """A script that was written. `left_out`: verbs of the log that are not in it, with the reason."""

    path: Path
    statements: int
    files: tuple[str, ...]
    left_out: tuple[str, ...]

    def __repr__(self) -> str:
        beside = f", {len(self.files)} files in {folder_of(self.path).name}/" if self.files else ""
        out = f", {len(self.left_out)} left out (the script says why)" if self.left_out else ""
        said = f"{self.statements} verbs{out}{beside}; run it with python {self.path.name}"
        return f"Exported({str(self.path)!r}: {said})"


def export_script(session: Session, path: str | Path, undone: bool) -> Exported:
    """Write the script; see `Session.export_script`."""
    target = Path(path).expanduser().resolve()
    if target.suffix != ".py":
        raise SessionError(f"export_script({str(path)!r}): the name of a script ends in .py")
    entries = session.recorder.entries()
    kept = list(range(len(entries))) if undone else what_counts(entries)
    troubles = [f"{entries[i].verb}: {entries[i].trouble}" for i in kept if entries[i].trouble and _acts(entries[i])]
    if troubles:
        raise SessionError(f"{len(troubles)} verbs cannot be written as a script; the first: {troubles[0]}")
    body = _Body(session.recorder.source)
    for i, entry in enumerate(entries):
        body.add(entry, i in set(kept))
    text = _script(session, body, entries, kept)
    compile(text, target.name, "exec")  # a script that is no Python would be our mistake: never write one
    _copy(session.recorder.folder / "files", folder_of(target), body.files)
    files.write_text(target, text)
    return Exported(target, body.statements, tuple(body.files), tuple(body.left_out))


def what_counts(entries: Sequence[Entry]) -> list[int]:
    """Places of the verbs that led to where the session stands.

    Going back to a snapshot takes back what came after it; where something later still needs a value from there (or the
    snapshot cannot be placed), everything stays.
    """
    kept: list[int] = []
    for i, entry in enumerate(entries):
        kept.append(i)
        if entry.verb == "branch" and entry.outcome == "done":
            return list(range(len(entries)))
        if entry.verb in GO_BACK and entry.outcome == "done":
            since = _place(entries, entry.snapshot, i)
            if since is None:
                return list(range(len(entries)))
            kept = [k for k in kept if k < since]
    made_away = {name for i, entry in enumerate(entries) if i not in kept for name in _made(entry)}
    needed = " ".join(" ".join([*entries[i].before, entries[i].code]) for i in kept)
    return list(range(len(entries))) if any(_names(needed, name) for name in made_away) else kept


class _Body:
    """The statements of the script, and what they need."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.lines: list[str] = []
        self.imports: list[str] = []
        self.files: list[str] = []
        self.left_out: list[str] = []
        self.statements = 0
        self._in_force: dict[str, str] = {}
        self._drawn = 0

    def add(self, entry: Entry, counts: bool) -> None:
        """One verb: its definitions, its batches, its statement; or why it is not here."""
        if entry.verb == "load":  # it is how the session is made
            self._drawn = entry.rollouts or 0
            return
        why = _why_not(entry) if counts else "it was taken back"
        if why:
            self.left_out.append(f"{entry.verb}: {why}")
            self.lines.append(f"# {_one_line(entry.code or entry.verb)}: left out, {why}")
            if counts or not entry.before:
                return
        self.imports += [line for line in entry.imports if line not in self.imports]
        self.files += [name for name in entry.files if name not in self.files]
        for name, key in entry.defines[: entry.shared] if why else entry.defines:
            if self._in_force.get(name) != key:
                text = self._source(key)
                self._in_force[name] = key
                self.lines += ["", *text.splitlines(), ""] if "\n" in text else [text]
        self.lines += entry.before
        if not why:
            self.statements += 1
            if not self._decorates(entry):
                self.lines.append(self._statement(entry))

    def _decorates(self, entry: Entry) -> bool:
        """A method that was added by a decorator: its definition is the statement."""
        text = self._source(entry.defines[-1][1]) if entry.verb == "method" and entry.defines else ""
        return text.startswith(("@session.method", "@session.train.method"))

    def _statement(self, entry: Entry) -> str:
        if entry.partial:
            self._drawn = entry.number or self._drawn
            return f"{entry.variable} = {entry.partial}  # drawn until it was stopped"
        code = entry.code
        if entry.verb == "rollout":
            expected, self._drawn = self._drawn + 1, entry.number or self._drawn + 1
            if entry.number != expected:
                code = f"{code[:-1]}, number={entry.number})"
        elif entry.verb in GO_BACK and entry.rollouts is not None:
            self._drawn = entry.rollouts
        called = f"session.{code}"
        if entry.variable:
            called = f"{entry.variable} = {called}"
        if entry.verb in STEPS:
            called = f"report({called})"
        elif entry.verb == "evaluate":
            called += f"\nprint({entry.variable})"
        return called


def _script(session: Session, body: _Body, entries: Sequence[Entry], kept: Sequence[int]) -> str:
    seen = [
        {name: entries[i].metrics[name] for name in COMPARED if name in entries[i].metrics}
        for i in kept if entries[i].verb in STEPS and _acts(entries[i])
    ]  # fmt: skip
    helpers, imports = _helpers(body)
    imports = sorted({*imports, *body.imports} - {"import rlbench"})
    name, day = Path(session.options.model).name, time.strftime("%Y-%m-%d")
    title = f"What was done in session {_one_line(session.name)} on {_one_line(name)}, {day}, by rlbench {__version__}."
    return "\n".join([
        f'"""{title}"""',
        *(["", *imports] if imports else []), "", "import rlbench as rb", *helpers, "",
        f"seen = {_rows(seen)}",
        '"""The metrics of each step, as they were seen then."""', "", "",
        REPORT.strip(), "", "",
        f"session = {_constructor(session)}",
        *body.lines, "", "session.close()", "",
    ])  # fmt: skip


REPORT = '''
def report(metrics):
    """Print a step's metrics beside those that were seen."""
    step = report.steps = getattr(report, "steps", -1) + 1
    pairs = [f"{name} {metrics.get(name)} (seen {value})" for name, value in seen[step].items()]
    print(f"step {step + 1}:", ", ".join(pairs))
    return metrics
'''

HELPERS = {
    "saved_array": ("import numpy", "def saved_array(name):\n    return numpy.load(FILES / name)"),
    "saved_prompts": (
        "import json",
        "def saved_prompts(name):\n    return [rb.Prompt(**json.loads(line)) for line in open(FILES / name)]",
    ),
    "saved_value": (
        "import cloudpickle",
        "def saved_value(name):  # an object whose text was not to be had\n"
        "    return cloudpickle.loads((FILES / name).read_bytes())",
    ),
}  # fmt: skip


def _helpers(body: _Body) -> tuple[list[str], list[str]]:
    """What reads the files beside the script, and the imports of that."""
    if not body.files:
        return [], []
    text = "\n".join(body.lines)
    found = ["", 'FILES = Path(__file__).with_name(Path(__file__).stem + "_files")']
    imports = ["from pathlib import Path"]
    for name, (need, code) in HELPERS.items():
        if f"{name}(" in text:
            found += ["", "", code, ""]
            imports.append(need)
    return found, imports


def _constructor(session: Session) -> str:
    options = session.options.to_json()
    given = {name: options[name] for name in ("train", "inference", "reference", "seed", "undo")}
    plain: dict[str, Any] = {"train": {}, "inference": {}, "reference": None, "seed": 0, "undo": 1}
    kwargs = [f"{name}={value!r}" for name, value in given.items() if value != plain[name]]
    loaded = [entry for entry in session.recorder.entries() if entry.verb == "load"]
    if loaded:
        return f"rb.Session.{loaded[0].code}"
    return f"rb.Session({', '.join([repr(options['model']), *kwargs])})"


def _rows(seen: list[dict[str, float]]) -> str:
    if not seen:
        return "[]"
    return "[\n" + "".join(f"    {json.dumps(row)},\n" for row in seen).replace("NaN", 'float("nan")') + "]"


def _why_not(entry: Entry) -> str:
    if entry.verb in LEFT_OUT:
        return LEFT_OUT[entry.verb]
    if entry.outcome == "failed":
        return f"it failed: {_one_line(entry.said)}"
    if entry.outcome == "stopped" and not entry.partial:
        return f"it was stopped: {_one_line(entry.said)}"
    return ""


def _acts(entry: Entry) -> bool:
    return not _why_not(entry)


def _place(entries: Sequence[Entry], snapshot: str | None, before: int) -> int | None:
    """The place of the first verb that going back to a snapshot takes back."""
    for i in range(before - 1, -1, -1):
        if snapshot is not None and entries[i].snapshot == snapshot:
            if entries[i].verb == "snapshot":
                return i + 1
            if entries[i].verb in STEPS:
                return i
    return None


def _made(entry: Entry) -> list[str]:
    """Variables a verb's statement binds. Batches are made anyway: they need no verb that was taken back."""
    return [entry.variable] if entry.variable else []


def _names(text: str, name: str) -> bool:
    at = text.find(name)
    while at >= 0:
        end = at + len(name)
        if not text[end : end + 1].isalnum() and text[end : end + 1] != "_":
            return True
        at = text.find(name, end)
    return False


def _one_line(text: str) -> str:
    return " ".join(str(text).replace('"""', "'''").replace("\\", "/").split())[:200]


def folder_of(script: Path) -> Path:
    """Where a script's files lie."""
    return script.with_name(script.stem + "_files")


def _copy(source: Path, target: Path, names: Sequence[str]) -> None:
    if names:
        target.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(source / name, target / name)

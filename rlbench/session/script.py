"""The way out: what was done in a session as a script that does it again, `session.export_script(path)`.

The script makes the session, then runs the verbs in the order they began, each after the definitions it uses as they
were then. Steps that were taken back are left out together with the verb that took them back; so are verbs that changed
nothing but files or only waited. It compares each rollout's tokens, each step's metrics and each evaluation with those
that were seen, and fails at its end where they differ.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbench._version import __version__
from rlbench.data import files
from rlbench.errors import SessionError, Suggesting
from rlbench.session.recording import Entry
from rlbench.session.script_course import STEPS, course, needed_lines, why_not

if TYPE_CHECKING:
    from rlbench.session.session import Session

COMPARED = ("reward", "loss", "kl", "grad_norm")


@dataclass(frozen=True)
class Exported(Suggesting):
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
    kept = course(entries, everything=undone)
    acting = [entries[i] for i in sorted(kept) if entries[i].outcome != "failed"]
    troubles = [f"{entry.verb}: {entry.trouble}" for entry in acting if entry.trouble]
    if troubles:
        raise SessionError(f"{len(troubles)} verbs cannot be written as a script; the first: {troubles[0]}")
    lines = needed_lines(entries, kept)
    body = _Body(session.recorder.source)
    for i, entry in enumerate(entries):
        body.add(entry, i in kept, lines[i])
    text = _script(session, body, entries)
    compile(text, target.name, "exec")  # a script that is no Python would be our mistake: never write one
    _copy(session.recorder.folder / "files", folder_of(target), body.files)
    files.write_text(target, text)
    target.chmod(0o600)  # data and code of a private folder
    return Exported(target, body.statements, tuple(body.files), tuple(body.left_out))


class _Body:
    """The statements of the script, and what they need."""

    def __init__(self, source: Callable[[str], str]) -> None:
        self._source = source
        self.lines: list[str] = []
        self.imports: list[str] = []
        self.files: list[str] = []
        self.left_out: list[str] = []
        self.statements = 0
        self._in_force: dict[str, str] = {}
        self._drawn = 0

    def add(self, entry: Entry, counts: bool, before: Sequence[str]) -> None:
        """One verb: its definitions, what makes its values, its statement; or why it is not here.

        Args:
            entry: the verb.
            counts: it led to where the session stands.
            before: those of its `before` lines that the script needs.
        """
        if entry.verb == "load":  # it is how the session is made
            self._drawn = entry.rollouts or 0
            return
        why = why_not(entry) if counts else "it was taken back"
        if why:
            self.left_out.append(f"{entry.verb}: {why}")
            self.lines.append(f"# {one_line(entry.code or entry.verb)}: left out, {why}")
            if not before:
                return
        self.imports += [line for line in entry.imports if line not in self.imports]
        self.files += [name for name in entry.files if name not in self.files]
        for name, key in entry.defines[: entry.shared] if why else entry.defines:
            if self._in_force.get(name) != key:
                text = self._source(key)
                self._in_force[name] = key
                self.lines += ["", *text.split("\n"), ""] if "\n" in text else [text]
        self.lines += before
        if not why:
            self.statements += 1
            if not self._decorates(entry):
                self.lines += self._statement(entry)

    def _decorates(self, entry: Entry) -> bool:
        """A method that was added by a decorator: its definition is the statement."""
        text = self._source(entry.defines[-1][1]) if entry.verb == "train.method" and entry.defines else ""
        return text.startswith(("@session.method", "@session.train.method"))

    def _statement(self, entry: Entry) -> list[str]:
        if entry.partial:
            self._drawn = entry.number or self._drawn
            return [
                f"{entry.variable} = {entry.partial}  # drawn until it was stopped",
                f"session.link.set(rollouts={self._drawn})",
            ]
        called, before = f"session.{entry.code}", list[str]()
        if entry.verb == "rollout":
            expected, self._drawn = self._drawn + 1, entry.number or self._drawn + 1
            if self._drawn != expected:  # one that is not here took a number
                before.append(f"session.link.set(rollouts={self._drawn - 1})")
            called = f"drawn({called}, {entry.digest})"
        elif entry.rollouts is not None and entry.verb in ("restore", "undo"):
            self._drawn = entry.rollouts
        seen = {name: entry.metrics[name] for name in COMPARED if name in entry.metrics}
        if entry.verb in STEPS and seen:
            called = f"stepped({called}, {', '.join(f'{name}={_number(value)}' for name, value in seen.items())})"
        elif entry.verb == "evaluate" and "reward" in seen:
            called = f"evaluated({called}, {_number(seen['reward'])})"
        return [*before, f"{entry.variable} = {called}" if entry.variable else called]


HELPERS = {
    "saved_array": ("import numpy", "def saved_array(name):\n    return numpy.load(FILES / name)"),
    "saved_prompts": (
        "import json",
        "def saved_prompts(name):\n"
        '    return [rb.Prompt(**json.loads(line)) for line in (FILES / name).read_text("utf-8").split("\\n")[:-1]]',
    ),
    "saved_value": (
        "import cloudpickle",
        "def saved_value(name):  # an object whose text was not to be had, or is another one now\n"
        "    return cloudpickle.loads((FILES / name).read_bytes())",
    ),
    "stepped": (
        "",
        "def stepped(metrics, **then):\n"
        '    """A step, and its metrics beside those that were seen."""\n'
        "    for name, value in then.items():\n"
        "        check(f\"step {metrics['step']} {name}\", metrics.get(name), value)\n"
        "    return metrics",
    ),
    "drawn": (
        "import zlib",
        "def drawn(rollouts, then):\n"
        '    """Rollouts, and whether their tokens are those that were seen."""\n'
        '    check(f"tokens of rollout {rollouts.number}", zlib.crc32(rollouts.responses.values.tobytes()), then)\n'
        "    return rollouts",
    ),
    "evaluated": (
        "",
        "def evaluated(evaluation, then):\n"
        '    """An evaluation, and its reward beside the one that was seen."""\n'
        '    check("evaluation", evaluation.reward, then)\n'
        "    return evaluation",
    ),
}
CHECK = '''
differences = []


def check(what, now, then):
    """Print a number beside the one that was seen, and keep count of those that differ."""
    same = now == then or now != now and then != then or now is not None and abs(now - then) <= 1e-6 + 1e-4 * abs(then)
    print(f"{what}: {now} (seen {then})" + ("" if same else "   DIFFERS"))
    if not same:
        differences.append(what)
'''
CHECKED = ("stepped", "drawn", "evaluated")


def _script(session: Session, body: _Body, entries: Sequence[Entry]) -> str:
    text = "\n".join(body.lines)
    used = [name for name in HELPERS if f"{name}(" in text]
    imports = {"import sys", *body.imports, *(HELPERS[name][0] for name in used)} - {"", "import rlbench"}
    found = []
    if body.files:
        imports.add("from pathlib import Path")
        found = ["", 'FILES = Path(__file__).with_name(Path(__file__).stem + "_files")']
    for name in used:
        found += ["", "", HELPERS[name][1]]
    name, day = Path(session.options.model).name, time.strftime("%Y-%m-%d")
    title = f"What was done in session {one_line(session.name)} on {one_line(name)}, {day}, by rlbench {__version__}."
    return "\n".join(
        [
            f'"""{title}"""',
            "",
            *sorted(imports),
            "",
            "import rlbench as rb",
            *found,
            "",
            CHECK,
            "",
            f"session = {_constructor(session, entries)}",
            *body.lines,
            "",
            "session.close()",
            'sys.exit(f"{len(differences)} numbers differ from those seen: {differences[:5]}" if differences else 0)',
            "",
        ]
    )


def _constructor(session: Session, entries: Sequence[Entry]) -> str:
    options = session.options.to_json()
    given = {name: options[name] for name in ("train", "inference", "reference", "seed", "undo")}
    plain: dict[str, Any] = {"train": {}, "inference": {}, "reference": None, "seed": 0, "undo": 1}
    kwargs = [f"{name}={value!r}" for name, value in given.items() if value != plain[name]]
    loaded = [entry for entry in entries if entry.verb == "load"]
    if loaded:
        return f"rb.Session.{loaded[0].code}"
    return f"rb.Session({', '.join([repr(options['model']), *kwargs])})"


def _number(value: float) -> str:
    return json.dumps(value) if math.isfinite(value) else f'float("{value}")'


def one_line(text: str) -> str:
    """A text for a comment."""
    return " ".join(str(text).replace('"""', "'''").replace("\\", "/").split())[:200]


def folder_of(script: Path) -> Path:
    """Where a script's files lie."""
    return script.with_name(script.stem + "_files")


def _copy(source: Path, target: Path, names: Sequence[str]) -> None:
    if names:
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(source / name, target / name)

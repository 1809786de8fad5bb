"""The way out: the cells of a session as a script that does it again and compares its numbers with those seen.

What is no plain Python (magics, `await`) runs in an IPython shell of the script. At its end the script compares seed,
tokens, metrics and evaluations, verb by verb, and fails where they differ.
"""

from __future__ import annotations

import ast
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench._version import __version__
from rlbench.data.base import files
from rlbench.errors import SessionError, Suggesting
from rlbench.runtime import registry
from rlbench.session.record import cells
from rlbench.session.record.recording import Entry

if TYPE_CHECKING:
    from rlbench.session.core import SessionCore
    from rlbench.session.session import Session

ANONYMOUS = "anonymous-"
COMPARED = ("reward", "loss", "kl", "grad_norm")
RELATIVE, ABSOLUTE = 1e-4, 1e-6


@dataclass(frozen=True)
class Exported(Suggesting):
    """A script that was written. `left_out`: what was done in the session and is not in it, with the reason."""

    path: Path
    cells: int
    left_out: tuple[str, ...]

    def __repr__(self) -> str:
        out = f", {len(self.left_out)} left out (the script says why)" if self.left_out else ""
        return f"Exported({str(self.path)!r}: {self.cells} cells{out}; run it with python {self.path.name})"


def write_script(core: SessionCore, path: str | Path) -> Exported:
    """Write the script; SessionError where no cell is known: a plain script is its own."""
    target = Path(path).expanduser().resolve()
    if target.suffix != ".py":
        raise SessionError(f"export_script({str(path)!r}): the name of a script ends in .py")
    entries, kernel = core.recorder.entries(), cells.kernel()
    done = core.recorder.cells()
    if kernel is not None and (running := kernel.running_so_far()) is not None:
        done.append(running)
    if not done:
        where = ", ".join(dict.fromkeys(entry.where for entry in entries if entry.where))
        raise SessionError(
            "export_script writes the cells of a notebook, and this session has none: its verbs were called in "
            f"{where or 'a plain script'}, which is its own script"
        )
    variable = (kernel.holder_of(core) if kernel is not None else None) or "session"
    body, known = _Body(variable), {cell.id for cell in done}
    parts: list[cells.Cell | Entry] = [*done, *(entry for entry in entries if entry.cell not in known)]
    for part in sorted(parts, key=lambda one: one.time):
        if isinstance(part, cells.Cell):
            body.add_cell(part)
        else:
            body.add_verb(part)
    text = _text(core, body, [line for entry in entries if (line := _seen(entry))])
    files.write_text(target, text)
    target.chmod(0o600)  # code of a private folder
    return Exported(target, body.count, tuple(body.left_out))


class _Body:
    """The lines of the script between its head and its check."""

    def __init__(self, variable: str) -> None:
        self.variable, self.lines, self.left_out, self.count = variable, list[str](), list[str](), 0

    def add_cell(self, cell: cells.Cell) -> None:
        """Add a cell, or what stands in it before the statement at which it ended."""
        text = cell.text if cell.outcome == "done" else before_line(cell.text, cell.line)
        rest = "" if cell.outcome == "done" else one_line(f"cell {cell.number} {cell.outcome}: {cell.said}")
        if text.strip():
            self.count += 1
            self.lines += ["", f"# %% In [{cell.number}]", *(text.split("\n") if is_plain(text) else in_shell(text))]
        if rest and cell.outcome != "running":
            self.left_out.append(rest)
            self.lines += ["" if not text.strip() else "# …", f"# left out: {rest}"]

    def add_verb(self, entry: Entry) -> None:
        """Add a verb that no cell called: the call where the side panel made it, else that it is left out."""
        numbered = any(name.isdigit() for name in entry.args)
        given = ", ".join(text if numbered else f"{name}={text}" for name, text in entry.args.items())
        call = f"{self.variable}.{entry.verb}({given})"
        if entry.where == cells.OPERATOR_PLACE and entry.outcome == "done" and is_plain(call):
            self.lines += ["", f"# from {entry.where}", call]
            return
        why = one_line(f"{entry.verb}: called in {entry.where or 'no cell'}, {entry.outcome}")
        self.left_out.append(why)
        self.lines += ["", f"# left out: {why}"]


def before_line(text: str, line: int) -> str:
    """Return the top-level statements of a cell that end before `line`; none of a cell that is no plain Python."""
    if not is_plain(text):
        return ""
    ends = [node.end_lineno or 0 for node in ast.parse(text).body]
    last = max((end for end in ends if end < line), default=0)
    return "\n".join(text.split("\n")[:last])


def is_plain(text: str) -> bool:
    """Say whether a cell is Python that can stand in a script."""
    try:
        tree = ast.parse(text)
        compile(text, "<cell>", "exec")
    except (SyntaxError, ValueError):
        return False
    return not any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)


def in_shell(text: str) -> list[str]:
    """Return the lines that run a cell with magics or `await`."""
    quoted = f"r'''\n{text}\n'''" if "'''" not in text and not text.endswith("\\") else repr(text)
    return [f"_script.run_cell({quoted}, globals())"]


def one_line(text: str) -> str:
    """Return a text for a comment."""
    return " ".join(text.split())[:200]


def _seen(entry: Entry) -> dict[str, Any]:
    """Return the numbers of a verb that a script compares; empty where it has none."""
    if entry.outcome != "done":
        return {}
    numbers: dict[str, Any] = {
        name: value for name, value in entry.metrics.items() if name in COMPARED or name.startswith("eval/")
    }
    if entry.digest is not None:
        numbers |= {"seed": entry.seed, "number": entry.number, "tokens": entry.digest}
    return {"verb": entry.verb, **numbers} if numbers else {}


def _text(core: SessionCore, body: _Body, seen: Sequence[Mapping[str, Any]]) -> str:
    text = "\n".join(body.lines)
    model, name = Path(core.options.model).name, core.name
    title = f"What was done in session {one_line(name)} on {one_line(model)}, {time.strftime('%Y-%m-%d')}"
    display = ["from IPython.display import display"] if "display(" in text else []
    literals = [json.dumps(one).replace("NaN", 'float("nan")').replace("Infinity", 'float("inf")') for one in seen]
    return "\n".join(
        [
            f'"""{title}, by rlbench {__version__}: its cells, in order."""',
            "",
            *display,
            "from rlbench.session.record import script as _script",
            *([] if name.startswith(ANONYMOUS) else ["", f"_script.begin({name!r})"]),
            text,
            "",
            "# %% The numbers seen then beside those of now",
            f"_script.compare(\n    {body.variable},\n    [",
            *(f"        {one}," for one in literals),
            "    ],\n)",
            "",
        ]
    )


# -- what a script calls


def begin(name: str) -> None:
    """Refuse to run while the session that the script was made of still runs: its cells would drive that one."""
    record = registry.read_json(registry.session_file(name))
    if record is not None and registry.monitor_lives(record):
        raise SessionError(f"session {name!r} still runs, and this script would drive it: close it first")


def run_cell(text: str, names: dict[str, Any]) -> None:
    """Run a cell with magics or `await` among a script's names."""
    from IPython.core.interactiveshell import InteractiveShell

    from rlbench import notebook

    shell: Any = InteractiveShell.instance(user_ns=names)
    notebook.install()
    shell.run_cell(text.strip("\n")).raise_error()


def compare(session: Session, seen: Sequence[Mapping[str, Any]]) -> None:
    """Print each number beside the one seen, close the session, and exit with an error where some differ."""
    now = [line for entry in session.core.recorder.entries() if (line := _seen(entry))]
    session.close()
    differences = []
    for what, value, then in _pairs(now, seen):
        floats = isinstance(value, float) and isinstance(then, float)
        same = value == then or (floats and np.isclose(value, then, RELATIVE, ABSOLUTE, equal_nan=True))
        print(f"{what}: {value} (seen {then})" + ("" if same else "   DIFFERS"))
        differences += [] if same else [what]
    sys.exit(f"{len(differences)} numbers differ from those seen: {differences[:5]}" if differences else 0)


def _pairs(now: Sequence[Mapping[str, Any]], seen: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any, Any]]:
    for i in range(max(len(now), len(seen))):
        here, then = (lines[i] if i < len(lines) else {} for lines in (now, seen))
        if here.get("verb") != then.get("verb"):
            yield f"{i + 1} verb", here.get("verb"), then.get("verb")
            continue
        for name in [name for name in then if name != "verb"]:
            yield f"{i + 1} {then['verb']} {name}", here.get(name), then[name]

"""The magics `%%ranks`, a cell on the training ranks in a namespace that stays, and `%ranks`, a script there.

    %%ranks                             # every rank of the one train engine there is
    %%ranks actor                       # of the engine of that name
    %%ranks actor --rank 0              # on one rank alone
    %%ranks actor --session demo        # where several sessions have one
    %%ranks --args "--fsdp --lr 1e-5"   # what a parser in the cell reads
    %ranks train.py --fsdp --lr 1e-5    # a script, beside IPython's %run; an engine and options go before it

What a rank prints is shown as it comes, with the rank before it; so is the value of the last expression. An error
shows once, with the line of the cell. Ctrl-C stops every rank after the same collective.
"""

from __future__ import annotations

import argparse
import re
import shlex
from typing import Any, NoReturn

from rlbench.engines.base import live_engines
from rlbench.engines.train import TrainEngine
from rlbench.errors import EngineError, nearest
from rlbench.notebook.base.markup import visible

OPTIONS = ("--rank", "--session", "--args")
LINE = re.compile(r"^%%ranks\b[^\n]*\n")


class _Parser(argparse.ArgumentParser):
    """Reads the line of a magic: an engine and options, before a script where it is `%ranks`."""

    def __init__(self, magic: str) -> None:
        super().__init__(magic, add_help=False, allow_abbrev=False)
        self.add_argument("engine", nargs="?")
        self.add_argument("--rank", type=int)
        self.add_argument("--session")
        self.add_argument("--args", type=shlex.split, default=[])

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: (-\S+)", message)
        raise EngineError(f"{self.prog}: {message}{nearest(unknown[1], OPTIONS) if unknown else ''}")


def parsed(line: str, magic: str = "%%ranks") -> argparse.Namespace:
    """`engine`, `rank`, `session`, `args`; of `%ranks` also the `script` that ends it, whose command line `args` is."""
    parser = _Parser(magic)
    try:
        words = shlex.split(line)
    except ValueError as error:
        parser.error(f"{line}: {error}")
    if magic == "%%ranks":
        return parser.parse_args(words)
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
    if at is None:
        parser.error("which script? %ranks train.py --its options; a cell begins with %%ranks")
    asked = parser.parse_args(words[:at])
    asked.script, asked.args = words[at], words[at + 1 :]
    return asked


def ranks(line: str, cell: str | None = None) -> None:
    """Run the cell, or the script that the line names, on the ranks; see the top of this file."""
    asked = parsed(line, "%ranks" if cell is None else "%%ranks")
    engine = engine_of(asked.engine, asked.session)
    if cell is None:
        values = [None if v is None else repr(v) for v in engine.run_script(asked.script, asked.args, asked.rank)]
    elif not cell.strip():
        raise EngineError("%%ranks: the cell is empty; what follows the first line runs on the ranks")
    else:
        values = engine.run_cell(cell, asked.rank, asked.args)
    for i, value in enumerate(values):
        if value is not None:
            print("\n".join(f"[rank {i}] {text}" for text in visible(value).splitlines()))


def engine_of(name: str | None, session: str | None) -> TrainEngine:
    """The engine that is meant; EngineError, which says what there is, where none is or several are."""
    there = [engine for engine in live_engines("train") if isinstance(engine, TrainEngine)]
    if not there:
        raise EngineError("%%ranks: this kernel holds no train engine: make a session, or attach to one, first")
    chosen = [e for e in there if name in (None, e.name) and session in (None, e.link.name)]
    if name is None:
        chosen = [e for e in chosen if e.name == "actor"] or chosen
    if len({(e.link.name, e.name) for e in chosen}) > 1:
        known = ", ".join(f"{e.name} --session {e.link.name}" for e in chosen)
        raise EngineError(f"%%ranks: which engine? there are {known}")
    if not chosen:
        names = list(dict.fromkeys(e.name for e in there))
        meant = nearest(str(name), names)
        raise EngineError(f"%%ranks: no train engine {name or session!r}{meant}; there are {', '.join(names)}")
    return chosen[-1]


def install(shell: Any) -> None:
    """Register the magic, and completion in cells that begin with it. Safe to call twice."""
    from IPython.core.completer import SimpleCompletion, context_matcher

    @context_matcher(identifier="rlbench_ranks_names")
    def names_on_rank(context: Any) -> Any:
        """What continues the text on rank 0; nothing where there is no such engine."""
        head = LINE.match(context.full_text)
        if head is None:
            return {"completions": []}
        text = re.search(r"[\w.]*$", context.text_until_cursor)[0]  # type: ignore[index]
        try:
            asked = parsed(head[0].strip().removeprefix("%%ranks"))
            matches = engine_of(asked.engine, asked.session).complete_names(text)
        except Exception:  # a completion is no place for an error: the cell will say it
            matches = []
        token = context.token
        cut = len(text) - len(token) if text.endswith(token) else 0  # IPython puts them in place of its own token
        return {"completions": [SimpleCompletion(text=one[cut:], type="rank") for one in matches], "suppress": True}

    shell.register_magic_function(ranks, "line_cell", "ranks")
    matchers = shell.Completer.custom_matchers
    if not any(getattr(one, "__name__", "") == names_on_rank.__name__ for one in matchers):
        matchers.append(names_on_rank)

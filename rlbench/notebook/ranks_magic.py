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

import re
import shlex
from dataclasses import dataclass, replace
from typing import Any

from rlbench.engines.base import live_engines
from rlbench.engines.train import TrainEngine
from rlbench.errors import EngineError, nearest
from rlbench.notebook.base.inert import visible

OPTIONS = ("--rank", "--session", "--args")
LINE = re.compile(r"^%%ranks\b[^\n]*\n")


@dataclass(frozen=True)
class Line:
    """What the line of a magic says. `args`: the command line of the cell, or of `script`."""

    engine: str | None = None
    rank: int | None = None
    session: str | None = None
    args: tuple[str, ...] = ()
    script: str | None = None


def ranks(line: str, cell: str | None = None) -> None:
    """Run the cell, or the script that the line names, on the ranks; see the top of this file."""
    asked = parsed(line, "%ranks" if cell is None else "%%ranks")
    engine = found(asked.engine, asked.session)
    if asked.script is not None:
        values = [None if v is None else repr(v) for v in engine.run_script(asked.script, asked.args, asked.rank)]
    elif not (cell or "").strip():
        raise EngineError("%%ranks: the cell is empty; what follows the first line runs on the ranks")
    else:
        values = engine.run_cell(str(cell), asked.rank, asked.args)
    for i, value in enumerate(values):
        if value is not None:
            print("\n".join(f"[rank {i}] {text}" for text in visible(value).splitlines()))


def found(name: str | None, session: str | None) -> TrainEngine:
    """The engine that is meant.

    Raises:
        EngineError: none of that name, or several; says which there are.
    """
    there = [engine for engine in live_engines("train") if isinstance(engine, TrainEngine)]
    if not there:
        raise EngineError("%%ranks: this kernel holds no train engine: make a session, or attach to one, first")
    chosen = [e for e in there if name in (None, e.name) and session in (None, e.link.name)]
    if name is None and len(chosen) > 1:
        chosen = [e for e in chosen if e.name == "actor"] or chosen
    if len({(e.link.name, e.name) for e in chosen}) > 1:
        known = ", ".join(f"{e.name} --session {e.link.name}" for e in chosen)
        raise EngineError(f"%%ranks: which engine? there are {known}")
    if not chosen:
        known = ", ".join(dict.fromkeys(e.name for e in there))
        meant = nearest(str(name), known.split(", "))
        raise EngineError(f"%%ranks: no train engine {name or session!r}{meant}; there are {known}")
    return chosen[-1]


def names_on_rank(line: str, text: str) -> list[str]:
    """What continues `text` on rank 0; nothing where there is no such engine."""
    try:
        asked = parsed(line)
        return found(asked.engine, asked.session).complete_names(text)
    except Exception:  # a completion is no place for an error: the cell will say it
        return []


def install(shell: Any) -> None:
    """Register the magic, and completion in cells that begin with it."""
    shell.register_magic_function(ranks, "line_cell", "ranks")
    matchers = shell.Completer.custom_matchers
    if not any(getattr(one, "__name__", "") == "rlbench_ranks_names" for one in matchers):
        matchers.append(_matcher())


def _matcher() -> Any:
    from IPython.core.completer import SimpleCompletion, context_matcher

    @context_matcher(identifier="rlbench_ranks_names")
    def rlbench_ranks_names(context: Any) -> Any:
        head = LINE.match(context.full_text)
        if head is None:
            return {"completions": []}
        asked = re.search(r"[\w.]*$", context.text_until_cursor)
        text = asked[0] if asked else ""
        matches = names_on_rank(head[0].strip().removeprefix("%%ranks"), text)
        token = context.token
        cut = len(text) - len(token) if text.endswith(token) else 0  # IPython puts them in place of its own token
        return {"completions": [SimpleCompletion(text=one[cut:], type="rank") for one in matches], "suppress": True}

    rlbench_ranks_names.__name__ = "rlbench_ranks_names"
    return rlbench_ranks_names


def parsed(line: str, magic: str = "%%ranks") -> Line:
    """The line of a magic; that of `%ranks` ends with a script and its command line.

    Raises:
        EngineError: an option that does not exist or lacks its value, a quote that does not end, no script.
    """
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise EngineError(f"{magic}: {line}: {error}") from None
    asked = Line()
    while words:
        word = words.pop(0)
        if word in OPTIONS:
            if not words:
                raise EngineError(f"{magic}: {word} needs a value")
            asked = replace(asked, **{word.removeprefix("--"): _value(word, words.pop(0), magic)})
        elif word.startswith("-"):
            raise EngineError(f"{magic}: unknown option {word}{nearest(word, OPTIONS)}")
        elif magic == "%ranks" and word.endswith(".py"):
            return replace(asked, script=word, args=tuple(words))
        elif asked.engine is None:
            asked = replace(asked, engine=word)
        else:
            raise EngineError(f"{magic}: two engines, {asked.engine} and {word}: name one")
    if magic == "%ranks":
        raise EngineError("%ranks: which script? %ranks train.py --its options; a cell begins with %%ranks")
    return asked


def _value(option: str, text: str, magic: str) -> Any:
    if option == "--args":
        return tuple(shlex.split(text))
    if option == "--session":
        return text
    if not (text.isascii() and text.isdigit()):
        raise EngineError(f"{magic}: --rank {text}: wanted the number of a rank")
    return int(text)

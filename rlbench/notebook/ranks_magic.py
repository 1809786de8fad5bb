"""The cell magic `%%ranks`: the cell runs on the training ranks, in a namespace that stays.

    %%ranks                         # every rank of the one train engine there is
    %%ranks actor                   # of the engine of that name
    %%ranks actor --rank 0          # on one rank alone
    %%ranks actor --session demo    # where several sessions have one

What a rank prints is shown as it comes, with the rank before it; so is the value of the cell's last expression. An
error shows once, with the line of the cell. Ctrl-C stops every rank after the same collective.
"""

from __future__ import annotations

import re
from typing import Any

from rlbench.engines.base import live_engines
from rlbench.engines.train import TrainEngine
from rlbench.errors import EngineError, nearest
from rlbench.notebook.inert import visible

LINE = re.compile(r"^%%ranks\b[^\n]*\n")


def ranks(line: str, cell: str | None = None) -> None:
    """Run the cell on the ranks; see the top of this file."""
    name, rank, session = _options(line)
    engine = found(name, session)
    if not (cell or "").strip():
        raise EngineError("%%ranks: the cell is empty; what follows the first line runs on the ranks")
    values = engine.run_cell(str(cell), rank)
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
        name, _, session = _options(line)
        return found(name, session).complete_names(text)
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


def _options(line: str) -> tuple[str | None, int | None, str | None]:
    words, name, rank, session = line.split(), None, None, None
    while words:
        word = words.pop(0)
        if word in ("--rank", "--session"):
            if not words:
                raise EngineError(f"%%ranks: {word} needs a value")
            value = words.pop(0)
            if word == "--session":
                session = value
            elif value.isascii() and value.isdigit():
                rank = int(value)
            else:
                raise EngineError(f"%%ranks: --rank {value}: wanted the number of a rank")
        elif word.startswith("-"):
            raise EngineError(f"%%ranks: unknown option {word}{nearest(word, ('--rank', '--session'))}")
        elif name is None:
            name = word
        else:
            raise EngineError(f"%%ranks: two engines, {name} and {word}: name one")
    return name, rank, session

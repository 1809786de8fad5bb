"""Keep the table of names in docs/coming-from.md true: our defaults come from the code, and what options take is bold.

    python scripts/coming_from.py --write     after a default, a name or an alias changed
    python scripts/coming_from.py             exit status 1 if the page is not as the code has it

A row is `| where | here | TRL | verl | OpenRLHF | Tinker |`. A peer's name is bold where `where` takes its last part as
the option of the row, by its own name or as an alias.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlbench import rl
from rlbench.data.prompts.sampling import DEFAULT_MAX_TOKENS
from rlbench.option_names import ALIASES
from rlbench.options import defaults
from rlbench.session.options import Inference, Train
from rlbench.strategies.options.config import StrategyConfig
from rlbench.trainers.models.lora import Lora
from rlbench.trainers.options.ppo_config import PPOConfig
from rlbench.trainers.options.run_options import RunOptions

PAGE = Path(__file__).parent.parent / "docs" / "coming-from.md"
BEGIN, END = "<!-- names -->\n", "<!-- end of names -->\n"
GRPO, GROUP = rl.grpo(), rl.group_normalized()
PLACES: dict[str, Callable[[str], Any]] = {
    "`rb.Train`": lambda name: defaults(Train)[name],
    "`rb.Lora`": lambda name: defaults(Lora)[name],
    "`rb.Inference`": lambda name: defaults(Inference)[name],
    "a trainer": lambda name: defaults(StrategyConfig, PPOConfig)[name],
    "`rlbench train`": lambda name: defaults(RunOptions)[name],
    "`rb.rl.grpo`": lambda name: getattr(GRPO, name),
    "`rb.rl.group_normalized`": lambda name: getattr(GROUP, name),
    "`rollout`": lambda name: {"n": 1, "max_tokens": DEFAULT_MAX_TOKENS, "temperature": 1.0}[name],
    "`evaluate`": lambda name: {"n": 1, "temperature": 0.0}[name],
}
TAKING = ("`rb.Train`", "`rb.Inference`", "a trainer", "`rlbench train`")
"""What takes other systems' names; losses and sampling options do not."""
NAME = re.compile(r"`([\w.]+)`")


def rows(page: str) -> list[list[str]]:
    """The cells of the table of names."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line[1:-1].split(" | ")] for line in lines]


def written(page: str) -> str:
    """The page with its rows as they should be."""
    head, begin, rest = page.partition(BEGIN)
    table, end, tail = rest.partition(END)
    titles = table.splitlines(keepends=True)[:2]
    return head + begin + "".join([*titles, *map(row, rows(page))]) + end + tail


def row(cells: list[str]) -> str:
    """One row, our default written from the code."""
    where, here, *peers = cells
    (ours,) = NAME.findall(here)[:1]
    own = f"`{ours}` = {PLACES[where](ours)!r}"
    return f"| {where} | {own} | {' | '.join(marked(peer, ours, where) for peer in peers)} |\n"


def marked(peer: str, ours: str, where: str) -> str:
    """A peer's cell, its name in bold where it is taken."""
    plain = peer.replace("**", "")
    found = NAME.match(plain)
    if found is None or where not in TAKING:
        return plain
    last = found[1].rpartition(".")[2]
    return plain.replace(found[0], f"**{found[0]}**", 1) if ours in (last, ALIASES.get(last)) else plain


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    if "--write" in sys.argv:
        PAGE.write_text(written(page), encoding="utf-8")
    elif written(page) != page:
        sys.exit("docs/coming-from.md is not as the code has it: python scripts/coming_from.py --write")

"""Forks that a viewer's form asks for: one at a time, on a thread of its own, so that cells run on beside it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlbench.data import Prompt, Rollouts
from rlbench.data.forking import fork
from rlbench.data.record.origin import grown_into, sampler_of
from rlbench.errors import RLBenchError, Stopped
from rlbench.notebook.live.draw import Draw, beside, name_in_cells
from rlbench.notebook.rollouts.rows import said_value

NO_ENGINE = "no engine of this kernel drew these rollouts: roll out again, or take session.last"
NOTHING = "there is no completion to continue"

log = logging.getLogger(__name__)


class Fork(Draw):
    """A draw of continuations, and what is said of their rewards, which nothing can cut."""

    scoring = False
    """Whether all is drawn: what runs then are rewards."""

    def __init__(self, sampler: Any, count: int, tell: Callable[[str], None]) -> None:
        super().__init__(sampler, count, "continuations", tell)
        self._scored = lambda: tell(f"scoring {count} continuations")

    def continued(
        self, prompts: Sequence[Prompt], n: int, sampling: dict[str, Any], number: int, under: str | None
    ) -> Rollouts:
        """See `rlbench.data.forking.Sampler`."""
        drawn = super().continued(prompts, n, sampling, number, under)
        self.scoring = True
        self._scored()
        return drawn


class Continuing:
    """What the form of one viewer can do, and what became of it.

    `state` is what the page draws: `why` nothing can be continued ("" where it can), the `name` that the rollouts have
    in cells, with the forks made so far, what may stand for `under`, whether one is `busy`, what is `said` of the last.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        tell: Callable[[dict[str, Any]], None],
        grow: Callable[[Rollouts, int], None],
        called: str = "rollouts",
    ) -> None:
        """Take `rollouts`; `tell` is given each new state, `grow` the tree and the prompt that has grown. `called`:
        what they are in cells where no variable of the notebook holds them."""
        self._source = self._rollouts = rollouts
        self._sampler, self._publish, self._grow = sampler_of(rollouts), tell, grow
        self._lock, self._called, self._calls = threading.Lock(), called, ""
        self._draw: Fork | None = None
        why = NO_ENGINE if self._sampler is None else "" if rollouts.samples else NOTHING
        self.state: dict[str, Any] = {"why": why, "name": called, "under": None}
        self.state |= {"busy": False, "said": "", "bad": False}

    def hear(self, asked: Mapping[str, Any]) -> None:
        """Do what the form asks for, beside whoever calls: `kind` is "choices", "fork" or "stop"."""
        if asked["kind"] == "stop":
            self._stop()
        elif asked["kind"] == "choices":
            beside(self._choices)
        elif self.state["why"] == "":
            draw = Fork(self._sampler, int(asked["n"]), self._progress)
            with self._lock:
                if self._draw is not None:
                    return
                self._draw = draw
            self._tell(busy=True, said="begins", bad=False)
            beside(self._fork, draw, asked)

    def _tell(self, **changes: Any) -> None:
        self.state = self.state | changes
        self._publish(self.state)

    def _progress(self, said: str) -> None:
        self._tell(said=said)

    def _choices(self) -> None:
        """Look up what the rollouts are called in cells, and which adapters there are."""
        changes: dict[str, Any] = {"name": self._name()}
        try:
            changes["under"] = list(self._sampler.names_under())
        except RLBenchError as error:
            changes |= {"said": str(error), "bad": True}
        self._tell(**changes)

    def _name(self) -> str:
        """Return what stands for the rollouts in a cell: a variable, else a cell's output, with the forks so far."""
        return name_in_cells(self._source, self._called) + self._calls

    def _stop(self) -> None:
        """Stop what is drawn; what is being scored is let go: its rewards run on, and nothing comes of them."""
        with self._lock:
            draw = self._draw
            if draw is not None and draw.scoring:
                self._draw = None
        if draw is None:
            return
        draw.stop()
        if draw.scoring:
            self._tell(busy=False, said="stopped while it was scored: nothing was added")
        else:
            self._tell(said="stopping")

    def _fork(self, draw: Fork, asked: Mapping[str, Any]) -> None:
        """Make a fork and show it; whatever is raised, by a reward too, is said: the view lives on."""
        changes: dict[str, Any]
        try:
            changes = self._made(draw, asked)
        except RLBenchError as error:
            changes = {"said": str(error).removeprefix("fork: "), "bad": True}
        except Exception as error:
            log.exception("rlbench: a fork from a viewer failed")
            changes = {"said": f"{type(error).__name__}: {error}", "bad": True}
        with self._lock:
            if self._draw is not draw:  # let go
                return
            self._draw = None
        self._tell(busy=False, **changes)

    def _made(self, draw: Fork, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Make a fork and show it, where it was not let go meanwhile; returns what is to be told of it."""
        sample, at, n = int(asked["sample"]), int(asked["at"]), int(asked["n"])
        text, under, stopped = asked["text"] or None, asked["under"] or None, ""
        try:
            tree = fork(self._rollouts, sample, at, n, text, under, {}, draw)
        except Stopped as error:
            tree, stopped = error.partial, "stopped: "
        with self._lock:
            if self._draw is not draw:
                return {}
        if tree.samples == self._rollouts.samples:
            return {"said": f"{stopped}nothing was added"}
        self._calls += call_text(sample, at, n, text, under)
        return {"said": stopped + self._take(tree, sample), "name": self._name()}

    def _take(self, tree: Rollouts, sample: int) -> str:
        """Show a tree in place of what it grew from; returns what is to be said of what is new."""
        old, self._rollouts = self._rollouts, tree
        p = int(old.group[sample])
        grown_into(self._source, tree)
        self._grow(tree, p)
        end = int(np.searchsorted(tree.group, p, side="right"))
        added = tree.samples - old.samples
        (branch,) = [one for one in tree.branches if end - 1 in one.samples]
        said = f"{added} continuations · {said_value(tree, branch)}"
        if len(branch.samples) > added:
            said += f" of all {len(branch.samples)} from there"
        if old.rewards is not None and tree.rewards is None:
            said += ": the rewards were no function's, score the tree again"
        return f"{said} · in a cell: {self._name().removesuffix(self._calls)}.tree"


def call_text(sample: int, at: int, n: int, text: str | None, under: str | None) -> str:
    """Return the call that makes such a fork in a cell: `.fork(3, at=17, n=16)`.

    Twice on purpose: the page writes it by itself as its fields are typed in (`callOf` of the widget's `fork.ts`), also
    while the kernel is busy or gone; and this one is of what was made, which no page needs to be believed about.
    """
    options = {"at": at, "n": n} | ({"text": text} if text else {}) | ({"under": under} if under else {})
    return f".fork({sample}, {', '.join(f'{name}={value!r}' for name, value in options.items())})"

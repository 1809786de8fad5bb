"""The rollout viewer: controls are ipywidgets, the drawing a widget of our own that asks for the rows in view.

Only what is seen is sent: a first window with the widget, then what the page asks for while it is scrolled. Colour,
white space and columns change in the page alone; order, filter and search ask the kernel. The form below the list
continues completions from one of their tokens (`continuing.py`); the tree that comes of it is shown in their place.
"""

from __future__ import annotations

from typing import Any

import anywidget
import ipywidgets
import numpy as np
import traitlets
from IPython.display import display

from rlbench.data import Rollouts
from rlbench.errors import DataError
from rlbench.notebook.base.markup import STATIC, box, escape, sheet
from rlbench.notebook.base.palette import css
from rlbench.notebook.live.live_view import Kept, close_tree, display_both, framed, route_by_front_end
from rlbench.notebook.rollouts.continuing import Continuing
from rlbench.notebook.rollouts.order import Order, checked
from rlbench.notebook.rollouts.rows import OPEN_TOKENS, Shown, headline
from rlbench.notebook.rollouts.static import chosen_scale, static_view

FIRST_BYTES = 30_000  # of rows sent with the widget: they may be saved with the notebook
FIRST_HEADS = 24
ROWS_AT_ONCE, HEADS_AT_ONCE = 200, 400
OPEN_AT_FIRST, OPEN_ALL = 12, 48  # rows: so many groups are open that it is reached; all groups of so few
GONE = "these rollouts were let go: show them again in a cell to scroll on"
CONTROLS = dict.fromkeys(("colour", "sort", "filter"), "index")
CONTROLS |= dict.fromkeys(("search", "whitespace", "columns"), "value")
"""Of what of each the drawing hears in the page."""
FORKS = ("choices", "fork", "stop")
"""Kinds of messages that are the form's."""
VIEWERS_KEPT = 16


class RolloutDrawing(anywidget.AnyWidget):
    """The list of prompts and completions, drawn in the page; `extension/src/widgets/viewer.ts` is its other half."""

    _esm = STATIC / "rollout_viewer.js"
    _css = css(".rlbv") + sheet("rollout_viewer")

    facts = traitlets.Dict().tag(sync=True)
    order = traitlets.Dict().tag(sync=True)
    first = traitlets.Dict().tag(sync=True)
    colour = traitlets.Int(0).tag(sync=True)
    sort = traitlets.Int(0).tag(sync=True)
    filter = traitlets.Int(0).tag(sync=True)
    search = traitlets.Unicode("").tag(sync=True)
    whitespace = traitlets.Bool(False).tag(sync=True)
    columns = traitlets.Bool(False).tag(sync=True)
    tree = traitlets.List().tag(sync=True)
    grown = traitlets.Dict().tag(sync=True)
    fork = traitlets.Dict().tag(sync=True)

    def __init__(self, shown: Shown, **settings: Any) -> None:
        self.shown: Shown | None = shown
        self.continuing: Continuing | None = None
        super().__init__(**_window(shown, settings), **settings)
        self.on_msg(self._hear)

    def grow(self, shown: Shown, p: int, **settings: Any) -> None:
        """Show rollouts that have grown by continuations at the end of prompt `p` in place of what they grew from.

        `grown` says which numbers moved: those from `after` on, `by` so many; `key`: the branch; `times`: how often.
        """
        before = self.shown
        if before is None:  # let go
            return
        end = int(np.searchsorted(before.rollouts.group, p, side="right"))
        by = shown.rollouts.samples - before.rollouts.samples
        keys = [branch["key"] for branch in shown.tree if end + by - 1 in branch["samples"]]
        moved = {"after": end, "by": by, "key": keys[0]}
        state = _window(shown, settings | {"search": self.search}, p)
        with self.hold_sync():
            self.shown = shown
            for name, value in (state | settings).items():
                setattr(self, name, value)
            self.grown = moved | {"times": self.grown.get("times", 0) + 1}

    def answer(self, asked: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
        """The answer to one message of the page: content and buffers.

        Beside `id`: `{"kind": "order", "sort", "filter", "search"}` gives the order; `{"kind": "rows",
        "heads": [prompt], "rows": [[completion, start, count or null]]}` lines and tokens; `{"kind": "prompt", "p"}`
        all its messages. `{"kind": "fork", "sample", "at", "n", "text", "under"}`, "stop" and "choices" are heard
        alone: what becomes of them is told by the trait `fork`.
        """
        answer: dict[str, Any] = {"id": asked["id"], "kind": asked["kind"]}
        if self.shown is None:
            return answer | {"error": GONE}, []
        if asked["kind"] in FORKS:
            if self.continuing is not None:
                self.continuing.hear(asked)
            return answer, []
        if asked["kind"] == "order":
            state = _order_state(_ordered(self.shown, asked), asked)
            buffers = [state.pop(name) for name in ("groups", "counts", "samples")]
            return answer | state, buffers
        if asked["kind"] == "prompt":
            return answer | self.shown.whole_prompt(int(asked["p"])), []
        rows, buffers = self.shown.rows(asked["rows"][:ROWS_AT_ONCE])
        heads = [self.shown.head(p) for p in asked["heads"][:HEADS_AT_ONCE]]
        return answer | {"heads": heads, "rows": rows}, buffers

    def _hear(self, _widget: Any, asked: dict[str, Any], _buffers: Any) -> None:
        self.send(*self.answer(asked))


class RolloutViewer(ipywidgets.VBox):
    """Header, controls and drawing; `colour`, `sort`, `filter`, `search` are its controls, `rollouts` what it shows."""

    def __init__(
        self,
        shown: Shown,
        colour: str | None = None,
        sort: str | None = None,
        filter: str = "all",
        called: str = "rollouts",
    ) -> None:
        """Show rollouts; `called`: what they are in cells where no variable holds them."""
        offers = _Offers(shown)
        at = {
            "colour": offers.channels.index(chosen_scale(shown, colour).name),
            "sort": offers.sorts.index(checked("order", offers.sort if sort is None else sort, offers.sorts)),
            "filter": offers.filters.index(checked("filter", filter, offers.filters)),
        }
        self.drawing = RolloutDrawing(shown, **at, search="")
        self.colour = _dropdown("colour", offers.options["colour"], at["colour"], "colour the tokens by")
        about = "order of prompts and their completions"
        self.sort = _dropdown("sort", offers.options["sort"], at["sort"], about)
        self.filter = _dropdown("show", offers.options["filter"], at["filter"], "show these completions alone")
        hint = "show completions that hold this text, or whose prompt does"
        self.search = ipywidgets.Text(placeholder="search", layout={"width": "140px"}, tooltip=hint)
        self.whitespace = _toggle("¶", "show spaces and tabs", "44px")
        self.columns = _toggle("side by side", "show a prompt's completions beside each other", "110px")
        controls = {name: getattr(self, name) for name in CONTROLS}
        self._links = [
            ipywidgets.jslink((control, CONTROLS[name]), (self.drawing, name)) for name, control in controls.items()
        ]
        layout = {"flex_flow": "row wrap", "align_items": "center"}
        self._header = ipywidgets.HTML(_header(shown))
        self._still: Any = None
        self.drawing.continuing = Continuing(shown.rollouts, self._tell, self._grow, called)
        self._tell(self.drawing.continuing.state)
        super().__init__([self._header, ipywidgets.HBox(list(controls.values()), layout=layout), self.drawing])
        route_by_front_end(self)
        _kept.add(self)

    @property
    def rollouts(self) -> Rollouts:
        """What is shown: the rollouts, and beside them what was continued from them here."""
        if self.drawing.shown is None:
            raise DataError(GONE)
        return self.drawing.shown.rollouts

    def _ipython_display_(self) -> None:
        """The viewer, and for a reader without the kernel the static view."""
        if self.drawing.shown is None:
            display({"text/html": box(f"<div class=q>{GONE}</div>"), "text/plain": GONE}, raw=True)
        else:
            self._still = display_both(self, self._static(self.drawing.shown))

    def _static(self, shown: Shown) -> dict[str, str]:
        return {"text/html": static_view(shown, self.colour.value), "text/plain": repr(shown.rollouts)}

    def _tell(self, state: dict[str, Any]) -> None:
        self.drawing.fork = state

    def _grow(self, rollouts: Rollouts, p: int) -> None:
        """Show what rollouts have grown to, with the settings that are chosen, and in the saved notebook."""
        shown = Shown(rollouts)
        offers = _Offers(shown)
        chosen = {"colour": chosen_scale(shown).name, "sort": offers.sort, "filter": "all"}
        chosen |= {name: now for name in chosen if (now := getattr(self, name).value) in offers.names(name)}
        at = {name: offers.names(name).index(value) for name, value in chosen.items()}
        self.drawing.grow(shown, p, **at)
        for name, index in at.items():
            control = getattr(self, name)
            with control.hold_sync():  # its first option, chosen in between, would be another order
                control.options = offers.options[name]
                control.index = index
        self._header.value = _header(shown)
        if self._still is not None and self.drawing.shown is not None:
            self._still.update(framed(self._static(shown)), raw=True)

    def release(self) -> None:
        """Let the rollouts go, and the widgets."""
        self.drawing.shown = self.drawing.continuing = None
        for link in self._links:
            link.close()
        close_tree(self)


class _Offers:
    """What can be chosen of rollouts: names in order, and as a control's options."""

    def __init__(self, shown: Shown) -> None:
        summary = shown.summary
        self.channels, self.sorts, self.filters = list(shown.channels), list(summary.sorts), list(summary.filters)
        self.sort = "prompt" if shown.rollouts.rewards is None else "spread ↓"
        self.options = {
            "colour": [(name.replace("_", " "), name) for name in self.channels],
            "sort": [(name, name) for name in self.sorts],
            "filter": list(zip(summary.labels(), self.filters, strict=True)),
        }

    def names(self, control: str) -> list[str]:
        """The names that a control offers."""
        return [name for _, name in self.options[control]]


def viewer(
    rollouts: Rollouts, colour: str | None = None, sort: str | None = None, filter: str = "all"
) -> RolloutViewer:
    """A viewer of rollouts, as one shows at the end of a cell, with settings of your own.

    Args:
        rollouts: of `session.rollout`, perhaps scored, perhaps `with_batch`.
        colour: channel the tokens are coloured by; None takes the one that tells most.
        sort: "prompt", "reward ↓", "reward ↑", "spread ↓", "length ↓", "length ↑", "mismatch ↓"; None: by spread where
            there are rewards.
        filter: "all", "mixed groups", "zero-variance groups", "right", "wrong", "scoring failed", "truncated",
            "aborted", "clipped tokens", "largest mismatch".
    """
    return RolloutViewer(Shown(rollouts), colour, sort, filter)


_kept = Kept(VIEWERS_KEPT)


def _header(shown: Shown) -> str:
    return box(f"<div>{escape(headline(shown.rollouts))}</div>")


def _window(shown: Shown, settings: dict[str, Any], p: int | None = None) -> dict[str, Any]:
    """All that the page is sent of rollouts before it asks, first of all of prompt `p`."""
    order = _ordered(shown, settings)
    facts = {
        "channels": [scale.to_page() for scale in shown.scales.values()],
        "threshold": shown.summary.threshold,
        "readable": shown.pieces.readable,
        "samples": shown.rollouts.samples,
        "openAtFirst": OPEN_ALL if shown.rollouts.samples <= OPEN_ALL else OPEN_AT_FIRST,
        "openTokens": OPEN_TOKENS,
        "rowsAtOnce": ROWS_AT_ONCE,
    }
    first = _first_window(shown, order, p)
    return {"facts": facts, "order": _order_state(order, settings), "first": first, "tree": shown.tree}


def _ordered(shown: Shown, asked: dict[str, Any]) -> Order:
    s = shown.summary
    return s.order(list(s.sorts)[asked["sort"]], list(s.filters)[asked["filter"]], asked["search"])


def _order_state(order: Order, asked: dict[str, Any]) -> dict[str, Any]:
    arrays = {name: getattr(order, name).tobytes() for name in ("groups", "counts", "samples")}
    return {name: asked[name] for name in ("sort", "filter", "search")} | arrays


def _first_window(shown: Shown, order: Order, p: int | None = None) -> dict[str, Any]:
    """Lines and rows for the top of the list, or of prompt `p`, as an answer to "rows" with its buffers inside."""
    groups = order.groups if p is None else order.groups[order.groups == p]
    samples = order.samples if p is None else order.samples[shown.rollouts.group[order.samples] == p]
    heads: list[dict[str, Any]] = []
    wanted: list[tuple[int, int, None]] = []
    size = 0
    for group in groups[:FIRST_HEADS]:
        head = shown.head(int(group))
        size += len(head["text"]) + sum(len(image["src"]) for image in head["images"]) + 100
        if heads and size > FIRST_BYTES:
            break
        heads.append(head)
    for i in samples[:ROWS_AT_ONCE]:
        row, span = shown.row(int(i))
        size += (
            sum(map(len, row["pieces"]))
            + sum(len(image["src"]) for image in row["images"])
            + (span.stop - span.start) * (7 + 4 * len(shown.channels))
            + 150
        )
        if size > FIRST_BYTES:
            break
        wanted.append((int(i), 0, None))
    rows, (ids, values) = shown.rows(wanted)
    return {"heads": heads, "rows": rows, "ids": ids, "values": values}


def _dropdown(label: str, options: list[tuple[str, str]], index: int, tooltip: str) -> Any:
    look = {"style": {"description_width": "auto"}, "layout": {"width": "auto", "max_width": "230px"}}
    return ipywidgets.Dropdown(options=options, index=index, description=label, tooltip=tooltip, **look)


def _toggle(label: str, tooltip: str, width: str) -> Any:
    return ipywidgets.ToggleButton(value=False, description=label, tooltip=tooltip, layout={"width": width})

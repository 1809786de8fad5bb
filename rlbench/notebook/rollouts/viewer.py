"""The rollout viewer: controls are ipywidgets, the drawing a widget of our own that asks for the rows in view.

Only what is seen is sent: a first window with the widget, then what the page asks for while it is scrolled. Colour,
white space and columns change in the page alone; order, filter and search ask the kernel.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import anywidget
import ipywidgets
import traitlets
from IPython.display import display

from rlbench.data import Rollouts
from rlbench.notebook.base.markup import STATIC, box, escape, sheet
from rlbench.notebook.base.palette import css
from rlbench.notebook.live.live_view import close_tree, display_both, route_by_front_end
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
VIEWERS_KEPT = 16  # older ones are closed: a page shows their static form, and a notebook is saved without them


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

    def __init__(self, shown: Shown, **settings: Any) -> None:
        self.shown: Shown | None = shown
        order = _ordered(shown, settings)
        super().__init__(
            facts={
                "channels": [scale.to_page() for scale in shown.scales.values()],
                "threshold": shown.summary.threshold,
                "readable": shown.pieces.readable,
                "samples": shown.rollouts.samples,
                "openAtFirst": OPEN_ALL if shown.rollouts.samples <= OPEN_ALL else OPEN_AT_FIRST,
                "openTokens": OPEN_TOKENS,
                "rowsAtOnce": ROWS_AT_ONCE,
            },
            order=_order_state(order, settings),
            first=_first_window(shown, order),
            **settings,
        )
        self.on_msg(self._hear)

    def answer(self, asked: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
        """The answer to one message of the page: content and buffers.

        Beside `id`: `{"kind": "order", "sort", "filter", "search"}` gives the order; `{"kind": "rows",
        "heads": [prompt], "rows": [[completion, start, count or null]]}` lines and tokens; `{"kind": "prompt", "p"}`
        all its messages.
        """
        answer: dict[str, Any] = {"id": asked["id"], "kind": asked["kind"]}
        if self.shown is None:
            return answer | {"error": GONE}, []
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
    """Header, controls and drawing; `colour`, `sort`, `filter`, `search` are its controls."""

    def __init__(self, shown: Shown, colour: str | None = None, sort: str | None = None, filter: str = "all") -> None:
        rollouts, summary, names = shown.rollouts, shown.summary, list(shown.channels)
        sort = ("prompt" if rollouts.rewards is None else "spread ↓") if sort is None else sort
        at = {
            "colour": names.index(chosen_scale(shown, colour).name),
            "sort": list(summary.sorts).index(checked("order", sort, summary.sorts)),
            "filter": list(summary.filters).index(checked("filter", filter, summary.filters)),
        }
        self.drawing = RolloutDrawing(shown, **at, search="")
        filters = list(zip(summary.labels(), summary.filters, strict=True))
        channels, sorts = [(n.replace("_", " "), n) for n in names], [(n, n) for n in summary.sorts]
        self.colour = _dropdown("colour", channels, at["colour"], "colour the tokens by")
        self.sort = _dropdown("sort", sorts, at["sort"], "order of prompts and their completions")
        self.filter = _dropdown("show", filters, at["filter"], "show these completions alone")
        hint = "show completions that hold this text, or whose prompt does"
        self.search = ipywidgets.Text(placeholder="search", layout={"width": "140px"}, tooltip=hint)
        self.whitespace = _toggle("¶", "show spaces and tabs", "44px")
        self.columns = _toggle("side by side", "show a prompt's completions beside each other", "110px")
        controls = {name: getattr(self, name) for name in CONTROLS}
        self._links = [
            ipywidgets.jslink((control, CONTROLS[name]), (self.drawing, name)) for name, control in controls.items()
        ]
        layout = {"flex_flow": "row wrap", "align_items": "center"}
        header = ipywidgets.HTML(box(f"<div>{escape(headline(rollouts))}</div>"))
        super().__init__([header, ipywidgets.HBox(list(controls.values()), layout=layout), self.drawing])
        route_by_front_end(self)
        _kept.append(self)  # ipywidgets holds every widget until it is closed
        while len(_kept) > VIEWERS_KEPT:
            _kept.popleft().release()

    def _ipython_display_(self) -> None:
        """The viewer, and for a reader without the kernel the static view."""
        shown = self.drawing.shown
        still = box(f"<div class=q>{GONE}</div>") if shown is None else static_view(shown, self.colour.value)
        text = GONE if shown is None else repr(shown.rollouts)
        if shown is None:
            display({"text/html": still, "text/plain": text}, raw=True)
        else:
            display_both(self, {"text/html": still, "text/plain": text})

    def release(self) -> None:
        """Let the rollouts go, and the widgets."""
        self.drawing.shown = None
        for link in self._links:
            link.close()
        close_tree(self)


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


_kept: deque[RolloutViewer] = deque()


def _ordered(shown: Shown, asked: dict[str, Any]) -> Order:
    s = shown.summary
    return s.order(list(s.sorts)[asked["sort"]], list(s.filters)[asked["filter"]], asked["search"])


def _order_state(order: Order, asked: dict[str, Any]) -> dict[str, Any]:
    arrays = {name: getattr(order, name).tobytes() for name in ("groups", "counts", "samples")}
    return {name: asked[name] for name in ("sort", "filter", "search")} | arrays


def _first_window(shown: Shown, order: Order) -> dict[str, Any]:
    """Lines and rows for the top of the list, as an answer to "rows" with its buffers inside."""
    heads: list[dict[str, Any]] = []
    wanted: list[tuple[int, int, None]] = []
    size = 0
    for p in order.groups[:FIRST_HEADS]:
        head = shown.head(int(p))
        size += len(head["text"]) + sum(len(image["src"]) for image in head["images"]) + 100
        if heads and size > FIRST_BYTES:
            break
        heads.append(head)
    for i in order.samples[:ROWS_AT_ONCE]:
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

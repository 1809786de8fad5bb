"""The rollout viewer: controls are ipywidgets, the drawing a widget of our own that asks for the rows in view.

    rlbench.notebook.viewer(rollouts, colour="difference", sort="spread ↓")

Only what is seen is sent: a first window with the widget, then what the page asks for while it is scrolled. Colour,
white space and columns change in the page alone, so they act whatever the kernel does; order, filter and search ask the
kernel, and the page says so when it takes long.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets

from rlbench.data import Rollouts
from rlbench.errors import DataError, nearest
from rlbench.notebook.base.markup import box, escape
from rlbench.notebook.base.palette import css
from rlbench.notebook.base.routing import route_by_front_end
from rlbench.notebook.live.live_view import display_both
from rlbench.notebook.rollouts.channel_scale import telling
from rlbench.notebook.rollouts.order import Order
from rlbench.notebook.rollouts.rows import OPEN_TOKENS, Shown, headline
from rlbench.notebook.rollouts.static import static_view

STATIC = Path(__file__).parents[1] / "static"
FIRST_BYTES = 30_000  # of rows sent with the widget: they may be saved with the notebook
FIRST_HEADS = 24
ROWS_AT_ONCE, HEADS_AT_ONCE = 200, 400
OPEN_AT_FIRST, OPEN_ALL = 12, 48  # rows: so many groups are open that it is reached; all groups of so few
GONE = "these rollouts were let go: show them again in a cell to scroll on"
VIEWERS_KEPT = 16  # the drawings of older cells let their rollouts go, and say so when asked


class RolloutDrawing(anywidget.AnyWidget):
    """The list of prompts and completions, drawn in the page; `extension/src/widgets/viewer.ts` is its other half."""

    _esm = STATIC / "rollout_viewer.js"
    _css = css(".rlbv") + (STATIC / "rollout_viewer.css").read_text(encoding="utf-8")

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
        self._sorts = shown.summary.sorts()
        self._filters = shown.summary.filters()
        chosen = {name: settings[name] for name in ("sort", "filter", "search")}
        order = self._ordered(shown, chosen)
        super().__init__(
            facts=_facts(shown),
            order=_order_state(order, chosen),
            first=_first_window(shown, order),
            **settings,
        )
        self.on_msg(self._heard)

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
            state = _order_state(self._ordered(self.shown, asked), asked)
            buffers = [state.pop(name) for name in ("groups", "counts", "samples")]
            return answer | state, buffers
        if asked["kind"] == "prompt":
            return answer | self.shown.whole_prompt(int(asked["p"])), []
        rows, buffers = self.shown.rows(asked["rows"][:ROWS_AT_ONCE])
        heads = [self.shown.head(p) for p in asked["heads"][:HEADS_AT_ONCE]]
        return answer | {"heads": heads, "rows": rows}, buffers

    def _heard(self, _widget: Any, asked: dict[str, Any], _buffers: Any) -> None:
        content, buffers = self.answer(asked)
        self.send(content, buffers)

    def _ordered(self, shown: Shown, asked: dict[str, Any]) -> Order:
        sort = self._sorts[asked["sort"]]
        return shown.summary.order(sort, list(self._filters.values())[asked["filter"]], asked["search"])


class RolloutViewer(ipywidgets.VBox):
    """Header, controls and drawing; `colour`, `sort`, `filter`, `search` are its controls."""

    def __init__(self, shown: Shown, colour: str | None = None, sort: str | None = None, filter: str = "all") -> None:
        rollouts = shown.rollouts
        names, sorts, filters = list(shown.channels), shown.summary.sorts(), shown.summary.filters()
        colour = telling(shown.channels, rollouts.responses.offsets) if colour is None else colour
        sort = ("prompt" if rollouts.rewards is None else "spread ↓") if sort is None else sort
        at = {
            "colour": _index("channel", colour, names),
            "sort": _index("order", sort, sorts),
            "filter": _index("filter", filter, list(filters.values())),
        }
        self.drawing = RolloutDrawing(shown, **at, search="")
        labels = [(name.replace("_", " "), name) for name in names]
        self.colour = _dropdown("colour", labels, at["colour"], "colour the tokens by")
        self.sort = _dropdown("sort", [(n, n) for n in sorts], at["sort"], "order of prompts and their completions")
        self.filter = _dropdown("show", list(filters.items()), at["filter"], "show these completions alone")
        self.search = ipywidgets.Text(
            placeholder="search",
            layout={"width": "140px"},
            continuous_update=True,
            tooltip="show completions that hold this text, or whose prompt does",
        )
        self.whitespace = _toggle("¶", "show spaces and tabs", "44px")
        self.columns = _toggle("side by side", "show a prompt's completions beside each other", "110px")
        for control, source, target in (
            (self.colour, "index", "colour"),
            (self.sort, "index", "sort"),
            (self.filter, "index", "filter"),
            (self.search, "value", "search"),
            (self.whitespace, "value", "whitespace"),
            (self.columns, "value", "columns"),
        ):
            ipywidgets.jslink((control, source), (self.drawing, target))
        controls = ipywidgets.HBox(
            [self.colour, self.sort, self.filter, self.search, self.whitespace, self.columns],
            layout={"flex_flow": "row wrap", "align_items": "center"},
        )
        header = ipywidgets.HTML(box(f"<div>{escape(headline(rollouts))}</div>"))
        super().__init__([header, controls, self.drawing])
        route_by_front_end(self)
        _keep(self)

    def _ipython_display_(self) -> None:
        """The viewer, and for a reader without the kernel the static view."""
        shown = self.drawing.shown
        still = box(f"<div class=q>{GONE}</div>") if shown is None else static_view(shown, self.colour.value)
        text = GONE if shown is None else repr(shown.rollouts)
        display_both(self, {"text/html": still, "text/plain": text})

    def release(self) -> None:
        """Let the rollouts go; what was sent stays in the page."""
        self.drawing.shown = None


def viewer(
    rollouts: Rollouts, colour: str | None = None, sort: str | None = None, filter: str = "all"
) -> RolloutViewer:
    """A viewer of rollouts, as one shows at the end of a cell, with settings of your own.

    Args:
        rollouts: of `session.rollout`, perhaps scored, perhaps `with_batch`.
        colour: channel the tokens are coloured by (`data.rollouts.channels.KNOWN`); None takes the one that tells most.
        sort: "prompt", "reward ↓", "reward ↑", "spread ↓", "length ↓", "length ↑", "mismatch ↓"; None: by spread where
            there are rewards.
        filter: "all", "mixed groups", "zero-variance groups", "right", "wrong", "truncated", "aborted",
            "clipped tokens", "largest mismatch".

    Raises:
        DataError: a name these rollouts do not have.
    """
    return RolloutViewer(Shown(rollouts), colour, sort, filter)


_kept: deque[RolloutViewer] = deque()


def _keep(made: RolloutViewer) -> None:
    """ipywidgets holds every widget for the life of the kernel; not so the rollouts of all but the latest."""
    _kept.append(made)
    while len(_kept) > VIEWERS_KEPT:
        _kept.popleft().release()


def _facts(shown: Shown) -> dict[str, Any]:
    return {
        "channels": [scale.to_page() for scale in shown.scales],
        "threshold": shown.summary.threshold,
        "readable": shown.pieces.readable,
        "samples": shown.rollouts.samples,
        "openAtFirst": OPEN_ALL if shown.rollouts.samples <= OPEN_ALL else OPEN_AT_FIRST,
        "openTokens": OPEN_TOKENS,
        "rowsAtOnce": ROWS_AT_ONCE,
    }


def _order_state(order: Order, asked: dict[str, Any]) -> dict[str, Any]:
    return {
        **{name: asked[name] for name in ("sort", "filter", "search")},
        "groups": order.groups.tobytes(),
        "counts": order.counts.tobytes(),
        "samples": order.samples.tobytes(),
    }


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
        size += sum(map(len, row["pieces"])) + (span.stop - span.start) * (7 + 4 * len(shown.channels)) + 150
        if size > FIRST_BYTES:
            break
        wanted.append((int(i), 0, None))
    rows, (ids, values) = shown.rows(wanted)
    return {"heads": heads, "rows": rows, "ids": ids, "values": values}


def _index(what: str, name: str, known: list[str]) -> int:
    if name not in known:
        raise DataError(f"viewer: no {what} {name!r}{nearest(name, known)}; these rollouts have {', '.join(known)}")
    return known.index(name)


def _dropdown(label: str, options: list[tuple[str, str]], index: int, tooltip: str) -> Any:
    return ipywidgets.Dropdown(
        options=options,
        index=index,
        description=label,
        tooltip=tooltip,
        style={"description_width": "auto"},
        layout={"width": "auto", "max_width": "230px"},
    )


def _toggle(label: str, tooltip: str, width: str) -> Any:
    return ipywidgets.ToggleButton(value=False, description=label, tooltip=tooltip, layout={"width": width})

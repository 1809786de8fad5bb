"""`session.dashboard()`: live memory, lengths, metrics and time of a session, and the controls to act on it.

The feed's thread fills its parts, so they move while a cell runs. Presses are caught in the page
(extension/src/widgets/head.ts) and go to the Jupyter server where its extension knows the session, else to this kernel.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping
from typing import Any

import anywidget
import ipywidgets
import traitlets

from rlbench.errors import RLBenchError
from rlbench.monitor import client
from rlbench.monitor.schema import Control, EngineView, english
from rlbench.notebook.base.markup import STATIC, escape, sheet
from rlbench.notebook.base.palette import css
from rlbench.notebook.dashboard import html as dashboard_html
from rlbench.notebook.dashboard.data import DashboardView, view
from rlbench.notebook.dashboard.feed import Feed, Frame
from rlbench.notebook.dashboard.memory import memory
from rlbench.notebook.live.live_view import close_tree, display_both, framed, route_by_front_end, works_while_busy
from rlbench.notebook.live.progress import in_notebook
from rlbench.traces import ipython
from rlbench.units import format_age, format_bytes, format_seconds

BEAT_S, SNAPSHOT_S = 5.0, 10.0
"""The page hears at least so often from the kernel; what a saved notebook shows is renewed at most so often."""
ICONS = {"stop": "stop", "pause": "pause", "resume": "play", "sync": "refresh", "snapshot": "camera"}


class Head(anywidget.AnyWidget):
    """Name, phase and answers; catches presses of the controls around it."""

    _esm = STATIC / "dashboard_head.js"
    _css = css(".rlb-dashboard") + "\n" + sheet("dashboard")

    name = traitlets.Unicode().tag(sync=True)
    head = traitlets.Dict().tag(sync=True)
    controls = traitlets.List().tag(sync=True)
    said = traitlets.Dict().tag(sync=True)
    trouble = traitlets.Dict().tag(sync=True)
    hears_while_busy = traitlets.Bool().tag(sync=True)


class Charts(anywidget.AnyWidget):
    """Memory over time, lengths, metrics and the split of a step. New moments of memory come as messages."""

    _esm = STATIC / "dashboard.js"

    lengths = traitlets.List().tag(sync=True)
    curves = traitlets.List().tag(sync=True)
    split = traitlets.Dict(allow_none=True, default_value=None).tag(sync=True)
    cell = traitlets.Unicode().tag(sync=True)
    memory = traitlets.Any().tag(sync=True, to_json=lambda _, charts: charts.whole_memory())

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        super().__init__()

    def whole_memory(self) -> dict[str, Any]:
        """All that is kept, thinned: made when a page asks for the widget's state, not sent otherwise."""
        frame = self._feed.frame
        return dataclasses.asdict(memory(frame.samples, frame.marks, frame.state))


class Dashboard:
    """The live dashboard of the session of that name, from its monitor: also of one that another kernel drives.

    Display it at the end of a cell. It stays with its last numbers when the session is closed.
    """

    def __init__(self, name: str) -> None:
        self._feed, self._clock = Feed.of(name), CellClock()
        self._head = Head(name=name, hears_while_busy=in_notebook() and works_while_busy())
        self._charts = Charts(self._feed)
        self._buttons = _classed(ipywidgets.HBox(), "rlb-buttons")
        self._rows = _classed(ipywidgets.VBox(), "rlb-engines")
        parts = [self._head, self._buttons, self._rows, self._charts]
        self.widget = _classed(ipywidgets.VBox(parts), "rlb-dashboard")
        self._shape: Any = None
        self._sent: tuple[float, Any] = (0.0, None)
        self._sent_marks: dict[tuple[float, str], float | None] = {}
        self._last_beat = 0.0
        self._pages: set[str] = set()
        self._snapshot: Any = None
        self._snapshot_of: tuple[float, Any] = (0.0, None)
        self._head.on_msg(self._hear)
        self._hear_frame(self._feed.look())

    # -- how it is displayed

    def _ipython_display_(self) -> None:
        """The live view, and the numbers that a saved notebook shows."""
        if not in_notebook():
            print(repr(self))
            return
        self._snapshot = display_both(self.widget, self._bundle())
        self._snapshot_of = (time.monotonic(), self._essence())
        self.follow()

    def follow(self) -> None:
        """Ask the session's monitor from now on, and send what changed. Displaying it does that."""
        self._feed.listen(self._hear_frame)

    def rest(self) -> None:
        """Do not ask any more; what is shown stays as it is."""
        self._feed.leave(self._hear_frame)

    def _repr_html_(self) -> str:
        frame = self._feed.frame
        kept = memory(frame.samples, frame.marks, frame.state, most=dashboard_html.MOMENTS)
        return dashboard_html.snapshot(self._view, kept, frame.asked or time.time())

    def __repr__(self) -> str:
        return dashboard_html.text(self._view)

    def close(self) -> None:
        """Stop following the session and take the live view away; the numbers stay."""
        self.rest()
        self._clock.close()
        self._update_snapshot(force=True)
        close_tree(self.widget)

    # -- what comes from the monitor

    def _hear_frame(self, frame: Frame) -> None:
        """Set what changed; what did not is not sent."""
        self._view = shown = view(frame.state, frame.trouble if frame.ended else "")
        self._show_controls(shown)  # before the head: where that says closed, nothing can be pressed any more
        with self._head.hold_sync():
            self._head.head = _head_json(shown)
            self._head.controls = [_control_json(control) for control in (*shown.buttons, *shown.toggles)]
            since = frame.asked if frame.trouble else 0
            self._head.trouble = {"text": frame.trouble, "since": since, "ended": frame.ended}
        with self._charts.hold_sync():
            self._charts.cell = self._clock.text()
            self._charts.lengths, self._charts.curves, self._charts.split = shown.lengths, shown.curves, shown.split
        self._send_memory(frame)
        if time.monotonic() - self._last_beat > BEAT_S:
            self._last_beat = time.monotonic()
            self._head.send({"beat": frame.asked})
        self._update_snapshot(force=frame.ended)

    def _send_memory(self, frame: Frame) -> None:
        """Send the moments and marks since the last ones, once a number or a mark is another."""
        since, last = self._sent
        fresh = [sample for sample in frame.samples if sample["time"] > since]
        marks = {(mark["time"], mark["label"]): mark["seconds"] for mark in frame.marks}
        changed = [m for m in frame.marks if self._sent_marks.get((m["time"], m["label"]), -1.0) != m["seconds"]]
        if not fresh:
            return
        now = [lane.owners for lane in memory(fresh[-1:], (), frame.state).lanes]
        if now != last or changed:
            self._sent, self._sent_marks = (fresh[-1]["time"], now), marks
            self._charts.send({"memory": dataclasses.asdict(memory(fresh, changed, frame.state))})

    def _show_controls(self, shown: DashboardView) -> None:
        """The rows are made anew where engines or parts came or went, else only changed."""
        shape = (len(shown.buttons), [(row["name"], [part["name"] for part in row["parts"]]) for row in shown.engines])
        if shape != self._shape:
            self._shape = shape
            first = len(shown.buttons)
            self._buttons.children = [_control(ipywidgets.Button(), i) for i in range(first)]
            rows = []
            for row in shown.engines:
                rows.append(_engine_row(row, first))
                first += len(row["parts"])
            self._rows.children = rows
            route_by_front_end(self.widget)
        for button, control in zip(self._buttons.children, shown.buttons, strict=True):
            _set(button, control)
            button.icon = ICONS[control["key"]]
        boxes = [child for row in self._rows.children for child in row.children[1:-1]]
        for toggle, control in zip(boxes, shown.toggles, strict=True):
            _set(toggle, control)
            toggle.value = control["pressed"]
        for box, row in zip(self._rows.children, shown.engines, strict=True):
            name, memory_now = escape(row["name"]), "" if row["bytes"] is None else escape(format_bytes(row["bytes"]))
            kind, said = escape(row["kind"]), escape(english(row["note"]))
            note = f'<span class="rlb-w">⚠ {said}</span>' if row["warns"] else said
            box.children[0].value = f'<span title="{name}"><b>{name}</b> <span class="rlb-q">{kind}</span></span>'
            box.children[-1].value = f'<span title="{said}"><span class="rlb-n">{memory_now}</span> {note}</span>'

    def _update_snapshot(self, force: bool = False) -> None:
        """Renew what a saved notebook will show, where that changed, and not more often than need be."""
        at, of = self._snapshot_of
        essence = self._essence()
        if self._snapshot is None or (essence == of and not force):
            return
        if force or (not self._view.said["phase"]["busy"] and time.monotonic() - at > SNAPSHOT_S):
            self._snapshot_of = (time.monotonic(), essence)
            self._snapshot.update(framed(self._bundle()), raw=True)

    def _essence(self) -> Any:
        shown = self._view
        return shown.step, shown.version, shown.lengths, shown.split, [row["parts"] for row in shown.engines]

    def _bundle(self) -> dict[str, str]:
        return {"text/html": self._repr_html_(), "text/plain": repr(self)}

    # -- what comes from the page

    def _hear(self, _: Any, message: Mapping[str, Any], __: Any) -> None:
        """A page shows the view, or does not any more; or a press that could not go to the Jupyter server."""
        page = str(message.get("page", ""))
        if message.get("here"):
            self._pages.add(page)
            self.follow()
        elif message.get("gone"):
            self._pages.discard(page)
            if not self._pages:
                self.rest()
        elif message.get("do") is not None:
            threading.Thread(target=self._act, args=(str(message["do"]), message.get("id")), daemon=True).start()

    def _act(self, key: str, id_: Any) -> None:
        """Run a control's verb at the monitor and say what became of it."""
        said: dict[str, Any] = {"id": id_, "key": key}
        control = next((one for one in (*self._view.buttons, *self._view.toggles) if one["key"] == key), None)
        try:
            if control is None:
                raise client.Refused(f"{key} is not offered any more", 409)
            said["command"] = client.command(client.find(self._feed.name), control["verb"], control["args"])
        except RLBenchError as error:
            said["error"] = str(error)
        self._head.said = said
        self._feed.hurry()


# -- widgets and what is sent


def _classed(widget: Any, *names: str) -> Any:
    for name in names:
        widget.add_class(name)
    return widget


def _control(widget: Any, i: int) -> Any:
    return _classed(widget, "rlb-control", f"rlb-control-{i}")


def _engine_row(row: EngineView, first: int) -> Any:
    """Make a row of a name, one toggle per part, and memory with version."""
    toggles = [_control(ipywidgets.ToggleButton(), first + i) for i in range(len(row["parts"]))]
    name, note = (_classed(ipywidgets.HTML(), f"rlb-engine-{what}") for what in ("name", "note"))
    return _classed(ipywidgets.HBox([name, *toggles, note]), "rlb-engine")


def _set(widget: Any, control: Control) -> None:
    with widget.hold_sync():
        widget.description, widget.tooltip = english(control["label"]), english(control["title"])
        widget.disabled = not control["enabled"]


def _control_json(control: Control) -> dict[str, Any]:
    """The control with its texts in English."""
    texts = {key: english(control[key]) for key in ("label", "name", "command", "title")}  # type: ignore[literal-required]
    return {**control, **texts}


def _head_json(shown: DashboardView) -> dict[str, Any]:
    phase = shown.said["phase"]
    fraction = None if phase["fraction"] is None else round(phase["fraction"], 3)
    said = {"text": shown.phase, "busy": phase["busy"], "fraction": fraction, "left": english(phase["left"])}
    facts = {name: getattr(shown, name) for name in ("model", "step", "version", "branch", "error")}
    return {**facts, "phase": said}


class CellClock:
    """Follows IPython's cells from the one it is made in; outside IPython it has nothing to say."""

    def __init__(self) -> None:
        self._shell = ipython()
        self._begin: float | None = None
        self._total: float | None = None
        if self._shell is not None:
            self._before()
            self._shell.events.register("pre_run_cell", self._before)
            self._shell.events.register("post_run_cell", self._after)

    def text(self) -> str:
        """`cell 12 s` while it runs, `cell total 41 s` after it; empty where no cell is known."""
        if self._begin is not None:
            return f"cell {format_age(time.monotonic() - self._begin)}"
        return "" if self._total is None else f"cell total {format_seconds(self._total)}"

    def close(self) -> None:
        """Follow the cells no more."""
        if self._shell is not None:
            self._shell.events.unregister("pre_run_cell", self._before)
            self._shell.events.unregister("post_run_cell", self._after)
            self._shell = None

    def _before(self, *_: Any) -> None:
        self._begin = time.monotonic()

    def _after(self, *_: Any) -> None:
        if self._begin is not None:
            self._total, self._begin = time.monotonic() - self._begin, None

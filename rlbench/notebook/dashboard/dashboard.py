"""`session.dashboard()`: live memory, lengths, metrics and time of a session, and the controls to act on it.

Three parts in one frame: the head (what runs, and what became of a press), the controls (ipywidgets) and the charts.
The feed's thread fills them, so they move while a cell runs. Presses are caught in the page
(extension/src/widgets/head.ts) and go to the Jupyter server where its extension knows the session, else to this kernel.
"""

from __future__ import annotations

import dataclasses
import pathlib
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
from rlbench.notebook.base.markup import escape
from rlbench.notebook.base.palette import css
from rlbench.notebook.base.routing import route_by_front_end, works_while_busy
from rlbench.notebook.dashboard import html as dashboard_html
from rlbench.notebook.dashboard.data import View, view
from rlbench.notebook.dashboard.feed import Feed, Frame
from rlbench.notebook.dashboard.memory import memory
from rlbench.notebook.live.cell_clock import CellClock
from rlbench.notebook.live.live_view import display_both, framed
from rlbench.notebook.live.progress_line import in_notebook
from rlbench.units import format_bytes

STATIC = pathlib.Path(__file__).parents[1] / "static"
BEAT_S = 5.0
"""The page hears at least so often from the kernel; it says so when it does not."""
WHOLE_MOMENTS = 300
"""Moments of memory for a page that comes late."""
SNAPSHOT_S = 10.0
ICONS = {"stop": "stop", "pause": "pause", "resume": "play", "sync": "refresh", "snapshot": "camera"}


class Head(anywidget.AnyWidget):
    """Name, phase and answers; catches presses of the controls around it."""

    _esm = STATIC / "dashboard_head.js"
    _css = css(".rlb-dashboard") + "\n" + (STATIC / "dashboard.css").read_text()

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
        return dataclasses.asdict(memory(frame.samples, frame.marks, frame.state, most=WHOLE_MOMENTS))


class Dashboard:
    """The live dashboard of the session of that name, from its monitor: also of one that another kernel drives.

    Display it at the end of a cell. It stays with its last numbers when the session is closed.
    """

    def __init__(self, name: str) -> None:
        self._feed = Feed.of(name)
        self._clock = CellClock()
        self._view = self._view_of(self._feed.look())
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
        self._show(self._feed.frame)

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
        return dashboard_html.snapshot(self._view_with_memory(), self._feed.frame.asked or time.time())

    def __repr__(self) -> str:
        return dashboard_html.text(self._view)

    def close(self) -> None:
        """Stop following the session and take the live view away; the numbers stay."""
        self.rest()
        self._clock.close()
        self._update_snapshot(force=True)
        self.widget.close()

    # -- what comes from the monitor

    def _hear_frame(self, frame: Frame) -> None:
        self._view = self._view_of(frame)
        self._show(frame)
        self._update_snapshot(force=frame.ended)

    def _view_of(self, frame: Frame) -> View:
        """The view of the last moment; the memory of earlier ones is sent bit by bit."""
        return view(frame.state, frame.samples[-1:], gone=frame.trouble if frame.ended else "")

    def _view_with_memory(self) -> View:
        frame = self._feed.frame
        kept = memory(frame.samples, frame.marks, frame.state, most=dashboard_html.MOMENTS)
        return dataclasses.replace(self._view, memory=kept)

    def _show(self, frame: Frame) -> None:
        """Set what changed; what did not is not sent."""
        shown = self._view
        with self._head.hold_sync():
            self._head.head = _head_json(shown)
            self._head.controls = [_control_json(control) for control in (*shown.buttons, *shown.toggles)]
            since = frame.asked if frame.trouble else 0
            self._head.trouble = {"text": frame.trouble, "since": since, "ended": frame.ended}
        with self._charts.hold_sync():
            self._charts.cell = self._clock.text()
            self._charts.lengths = [dataclasses.asdict(lengths) for lengths in shown.lengths]
            self._charts.curves = [dataclasses.asdict(curve) for curve in shown.curves]
            self._charts.split = None if shown.split is None else dataclasses.asdict(shown.split)
        self._show_controls(shown)
        self._send_memory(frame)
        if time.monotonic() - self._last_beat > BEAT_S:
            self._last_beat = time.monotonic()
            self._head.send({"beat": frame.asked})

    def _send_memory(self, frame: Frame) -> None:
        """Send the moments and marks since the last ones, once a number or a mark is another."""
        since, last = self._sent
        fresh = [sample for sample in frame.samples if sample["time"] > since]
        marks = {
            (mark["time"], mark["label"]): mark for mark in frame.marks
        }  # one that ran is told again when it ended
        changed = [mark for key, mark in marks.items() if self._sent_marks.get(key, -1.0) != mark["seconds"]]
        if not fresh:
            return
        now = [lane.owners for lane in memory(fresh[-1:], (), frame.state).lanes]
        if now == last and not changed:
            return
        self._sent = (fresh[-1]["time"], now)
        self._sent_marks = {key: mark["seconds"] for key, mark in marks.items()}
        self._charts.send({"memory": dataclasses.asdict(memory(fresh, changed, frame.state, most=WHOLE_MOMENTS))})

    def _show_controls(self, shown: View) -> None:
        """The rows are made anew where engines or parts came or went, else only changed."""
        buttons, toggles = shown.buttons, shown.toggles
        shape = (len(buttons), [(row["name"], tuple(part["name"] for part in row["parts"])) for row in shown.engines])
        if shape != self._shape:
            self._shape = shape
            first = len(buttons)
            self._buttons.children = [_control(ipywidgets.Button(), i) for i in range(first)]
            rows = []
            for row in shown.engines:
                rows.append(_engine_row(row, first))
                first += len(row["parts"])
            self._rows.children = rows
            route_by_front_end(self.widget)
        for button, control in zip(self._buttons.children, buttons, strict=True):
            _set(button, control)
            button.icon = ICONS[control["key"]]
        boxes = [child for row in self._rows.children for child in row.children[1:-1]]
        for toggle, control in zip(boxes, toggles, strict=True):
            _set(toggle, control)
            toggle.value = control["pressed"]
        for box, row in zip(self._rows.children, shown.engines, strict=True):
            name = escape(row["name"])
            kind = f'<span class="rlb-q">{escape(row["kind"])}</span>'
            box.children[0].value = f'<span title="{name}"><b>{name}</b> {kind}</span>'
            box.children[-1].value = _engine_note(row)

    def _update_snapshot(self, force: bool = False) -> None:
        """Renew what a saved notebook will show, where that changed, and not more often than need be."""
        at, of = self._snapshot_of
        essence = self._essence()
        if self._snapshot is None or (essence == of and not force):
            return
        if force or (not self._view.busy and time.monotonic() - at > SNAPSHOT_S):
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
        page, do = str(message.get("page", "")), message.get("do")
        if message.get("here"):
            self._pages.add(page)
            self.follow()
        elif message.get("gone"):
            self._pages.discard(page)
            if not self._pages:
                self.rest()
        elif do is not None:
            wanted = next((one for one in (*self._view.buttons, *self._view.toggles) if one["key"] == do), None)
            threading.Thread(target=self._act, args=(wanted, str(do), message.get("id")), daemon=True).start()

    def _act(self, control: Control | None, key: str, id_: Any) -> None:
        """Run a control's verb at the monitor and say what became of it."""
        said: dict[str, Any] = {"id": id_, "key": key}
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


def _engine_note(row: EngineView) -> str:
    memory_now = "" if row["bytes"] is None else escape(format_bytes(row["bytes"]))
    said = escape(english(row["note"]))
    note = f'<span class="rlb-w">⚠ {said}</span>' if row["warns"] else said
    return f'<span title="{said}"><span class="rlb-n">{memory_now}</span> {note}</span>'


def _control_json(control: Control) -> dict[str, Any]:
    """The control with its texts in English."""
    texts = {key: english(control[key]) for key in ("label", "name", "command", "title")}  # type: ignore[literal-required]
    return {**control, **texts}


def _head_json(shown: View) -> dict[str, Any]:
    fraction, left = shown.said["phase"]["fraction"], shown.said["phase"]["left"]
    return {
        "model": shown.model,
        "step": shown.step,
        "version": shown.version,
        "branch": shown.branch,
        "phase": {
            "text": shown.phase,
            "busy": shown.busy,
            "fraction": None if fraction is None else round(fraction, 3),
            "left": english(left),
        },
        "error": shown.error,
    }

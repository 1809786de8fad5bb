"""The live view of a chat: say something, watch the answers come side by side, prefer one, continue one from a token.

`extension/src/widgets/chat.ts` draws it. An answer's tokens are a rollout viewer below it, whose form forks them.
"""

from __future__ import annotations

from typing import Any

import anywidget
import ipywidgets
import traitlets
from IPython.display import display

from rlbench.notebook.base.markup import STATIC, box, sheet
from rlbench.notebook.base.palette import css
from rlbench.notebook.chat.talking import Talking
from rlbench.notebook.live.live_view import Kept, close_tree, display_both, framed, route_by_front_end
from rlbench.notebook.rollouts.rows import Shown
from rlbench.notebook.rollouts.viewer import RolloutViewer

GONE = "this chat's view was let go: show the chat again in a cell"
VIEWS_KEPT = 8


class ChatDrawing(anywidget.AnyWidget):
    """The conversation and its form, drawn in the page; what it is asked for is described at `Talking.hear`."""

    _esm = STATIC / "chat.js"
    _css = css(".rlbc") + sheet("chat")

    turns = traitlets.List().tag(sync=True)
    answers = traitlets.List().tag(sync=True)
    chosen = traitlets.Int(allow_none=True, default_value=None).tag(sync=True)
    busy = traitlets.Bool(False).tag(sync=True)
    said = traitlets.Unicode("").tag(sync=True)
    bad = traitlets.Bool(False).tag(sync=True)
    facts = traitlets.Unicode("").tag(sync=True)
    code = traitlets.Unicode("").tag(sync=True)
    opened = traitlets.Int(allow_none=True, default_value=None).tag(sync=True)


class ChatView(ipywidgets.VBox):
    """A chat that is gone on with in the page; `chat` is the value that it has become."""

    def __init__(self, chat: Any) -> None:
        self._talking: Talking | None = Talking(chat, self._tell)
        self._drawing = ChatDrawing(**self._talking.state())
        self._drawing.on_msg(self._hear)
        self._still: Any = None
        super().__init__([self._drawing])
        route_by_front_end(self)
        _kept.add(self)

    @property
    def chat(self) -> Any:
        """The chat as it is now; None where the view was let go."""
        return None if self._talking is None else self._talking.chat

    def _ipython_display_(self) -> None:
        """The live view, and for a reader without the kernel the card."""
        if self._talking is None:
            display({"text/html": box(f"<div class=q>{GONE}</div>"), "text/plain": GONE}, raw=True)
        else:
            self._still = display_both(self, self.chat._repr_mimebundle_())

    def _hear(self, _widget: Any, asked: dict[str, Any], _buffers: Any) -> None:
        if self._talking is None:
            self._drawing.said = GONE
        elif asked["kind"] == "tokens":
            self._open(int(asked["answer"]))
        else:
            if asked["kind"] == "say":
                self._close_tokens()
            self._talking.hear(asked)

    def _tell(self, changes: dict[str, Any]) -> None:
        with self._drawing.hold_sync():
            for name, value in changes.items():
                setattr(self._drawing, name, value)
        if self._still is not None and self._talking is not None and "code" in changes:
            self._still.update(framed(self.chat._repr_mimebundle_()), raw=True)

    def _open(self, answer: int) -> None:
        """Show the tokens of an answer and of those drawn beside it, to be forked; pressed again: close them."""
        again = self._drawing.opened == answer
        self._close_tokens()
        if not again and self._talking is not None and answer < len(self.chat.answers):
            self._drawing.opened = answer
            called = f"{self._talking.name}.answers[{answer}].rollouts"
            rollouts = self.chat.answers[answer].rollouts
            if rollouts.tree is not rollouts:
                rollouts, called = rollouts.tree, f"{called}.tree"
            self.children = [self._drawing, RolloutViewer(Shown(rollouts), called=called)]

    def _close_tokens(self) -> None:
        self._drawing.opened = None
        shown = self.children[1:]
        self.children = self.children[:1]
        for one in shown:
            if isinstance(one, RolloutViewer):
                one.release()

    def release(self) -> None:
        """Let the chat go, and the widgets."""
        self._close_tokens()
        talking, self._talking = self._talking, None
        if talking is not None:
            talking.hear({"kind": "stop"})
        close_tree(self)


def chat_view(chat: Any) -> ChatView:
    """Make the live view of a chat, as one shows at the end of a cell."""
    return ChatView(chat)


_kept = Kept(VIEWS_KEPT)

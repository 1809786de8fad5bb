"""The verbs of a session about what was done in it: the history, the way out as a script, trackers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rlbench.data.history import History
from rlbench.data.verbs import Verbs
from rlbench.results import Names
from rlbench.session.recording import recorded
from rlbench.session.script import Exported, export_script

if TYPE_CHECKING:
    from rlbench.session.session import Session


class HistoryVerbs:
    """What `Session` inherits: history, export_script, track, untrack."""

    @property
    def history(self) -> History:
        """The record of every step, oldest first; `.verbs`: of every verb, with arguments, sources and outcome."""
        me = cast("Session", self)

        def read() -> Verbs:
            return Verbs([dict(entry.__dict__) for entry in me.recorder.entries()], me.recorder.code_of)

        return History(me.link.state()["history"], read)

    def export_script(self, path: str | Path) -> Exported:
        """Write the notebook's cells as a script that does it again and compares its numbers with those seen here.

        Cells stand in order, also those that were undone. Of a cell that failed or was stopped stands what came before
        the statement that did; `Exported.left_out` and the script say so.

        Args:
            path: ends in `.py`; replaced where it is there.

        Raises:
            SessionError: no cell is known: a plain script is its own script.
        """
        return export_script(cast("Session", self), path)

    @recorded
    def track(self, tracker: Any = "tensorboard", run: str | None = None, folder: str = "runs", **options: Any) -> Any:
        """Send each step's metrics, evaluations and rollout lengths to a tracker as well.

        Args:
            tracker: "tensorboard", "wandb", "mlflow", "trackio", "comet_ml", "aim", "clearml", "dvclive", "swanlab" as
                far as installed; or an `accelerate.tracking.GeneralTracker` of your own.
            run: name of the run (of the project, where the tracker has projects); default: the session's name.
            folder: where trackers that write files write them.
            options: of that tracker's start, e.g. `entity=…` of W&B.

        Returns:
            accelerate's tracker; its `.tracker` is the library's own object. A kernel that attaches later goes on with
            it, except with one of your own.

        Raises:
            SessionError: unknown, not installed, or there already.
        """
        return cast("Session", self).trackers.start(tracker, run, folder, options)

    @recorded
    def untrack(self, tracker: str | None = None) -> Names:
        """End a tracker, or all; returns their names. `close()` does it as well."""
        return Names("ended", cast("Session", self).trackers.finish(tracker))

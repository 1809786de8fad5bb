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
            return Verbs([dict(entry.__dict__) for entry in me.recorder.entries()], me.recorder.source)

        return History(me.link.state()["history"], read)

    def export_script(self, path: str | Path, undone: bool = False) -> Exported:
        """Write what was done here as a script that does it again, with the same metrics on the same seed.

        Losses, rewards, advantages, environments and modules are in it as text, as they were when they were used, with
        the helpers they call. What has no text (a closure, data changed by hand) lies in a folder beside the script.

        Args:
            path: ends in `.py`; replaced where it is there.
            undone: also with the steps that were taken back, and their undoing.

        Returns:
            `Exported`: path, number of verbs, files, and what was left out.

        Raises:
            SessionError: a verb cannot be written down; names it and why.
        """
        return export_script(cast("Session", self), path, undone)

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

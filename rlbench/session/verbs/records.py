"""What was done, on its way out: a script of the cells, trackers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlbench.results import Names
from rlbench.session.core import SessionCore
from rlbench.session.record.script import Exported, write_script
from rlbench.session.record.tracking import Tracker


def export_script(core: SessionCore, path: str | Path) -> Exported:
    """Write the notebook's cells as a script that does it again and compares its numbers with those seen here.

    Cells stand in order, also those that were undone. Of a cell that failed or was stopped stands what came before
    the statement that did; `Exported.left_out` and the script say so.

    Args:
        path: ends in `.py`; replaced where it is there.

    Raises:
        SessionError: no cell is known: a plain script is its own script.
    """
    return write_script(core, path)


def track(
    core: SessionCore, tracker: Any = "tensorboard", run: str | None = None, folder: str = "runs", **options: Any
) -> Tracker:
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
    return core.trackers.start(tracker, run, folder, options)


def untrack(core: SessionCore, tracker: str | None = None) -> Names:
    """End a tracker, or all; returns their names. `close()` does it as well."""
    return Names("ended", core.trackers.finish(tracker))

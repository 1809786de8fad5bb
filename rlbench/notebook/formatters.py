"""Registers the views with IPython: `data` and `session` need not know how they are shown."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

from rlbench.dispatch import views as progress_views
from rlbench.errors import RLBenchError, Stopped

HTML = {
    "rlbench.data.rollouts.Rollouts": "rollouts_view",
    "rlbench.data.batch.TrainBatch": "batch_view",
    "rlbench.data.history.History": "history_view",
    "rlbench.data.metrics.Metrics": "metrics_view",
}

# folders whose frames say nothing to the user; a user's own project may well be called rlbench, too
LIBRARIES = tuple(
    os.path.dirname(spec.origin) + os.sep
    for spec in (importlib.util.find_spec(name) for name in ("rlbench", "IPython"))
    if spec is not None and spec.origin is not None
)


def install() -> None:
    """Register progress views, and in IPython the HTML formatters and the display of our errors. Safe to call twice."""
    progress_views.register("generate", "rlbench.notebook.progress:GenerateProgress")
    progress_views.register("prepare", "rlbench.notebook.progress:PrepareProgress")
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    if shell is None:
        return
    formatter = shell.display_formatter.formatters["text/html"]
    for path, view in HTML.items():
        owner, _, name = path.rpartition(".")
        formatter.for_type_by_name(owner, name, _formatter(view))
    shell.set_custom_exc((RLBenchError, Stopped), _show_error)


def _formatter(view: str) -> Any:
    def draw(value: Any) -> str:
        from rlbench.notebook import views

        return str(getattr(views, view)(value))

    return draw


def _show_error(
    shell: Any, kind: type[BaseException], error: BaseException, trace: Any, tb_offset: Any = None
) -> list[str]:
    """Our errors carry what to do: show the message and the user's own lines, not the frames of the library."""
    import traceback

    if isinstance(error, Stopped):
        lines = [
            f"Stopped: {error}" + (" (.partial holds what there was)" if error.partial is not None else "")
        ]
    else:
        frames = [f for f in traceback.extract_tb(trace) if not f.filename.startswith(LIBRARIES)]
        where = [f"  cell line {f.lineno}:   {f.line}" for f in frames[-1:] if f.line]
        lines = [f"{kind.__name__}: {error}", *where]
    text = "\n".join(lines)
    shell._showtraceback(kind, error, [text]) if hasattr(shell, "_showtraceback") else print(
        text, file=sys.stderr
    )
    return lines

"""Registers the views with IPython: `data` and `session` need not know how they are shown."""

from __future__ import annotations

import importlib
import sys
import traceback
from typing import Any

from rlbench.dispatch import views as progress_views
from rlbench.errors import RLBenchError, Stopped
from rlbench.traces import line_of, remember

HTML = {
    "rlbench.data.rollouts.Rollouts": "rollouts_view",
    "rlbench.data.batch.TrainBatch": "batch_view",
    "rlbench.data.history.History": "history_view",
    "rlbench.data.metrics.Metrics": "metrics_view",
    "rlbench.session.preflight.Preflight": "check_views.preflight_view",
    "rlbench.session.rehearsal.Rehearsal": "check_views.rehearsal_view",
}


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
    module, _, name = view.rpartition(".")

    def draw(value: Any) -> str:
        views = importlib.import_module(f"rlbench.notebook.{module or 'views'}")
        return str(getattr(views, name)(value))

    return draw


def _show_error(
    shell: Any, kind: type[BaseException], error: BaseException, trace: Any, tb_offset: Any = None
) -> list[str]:
    """Our errors carry what to do: show the message and the user's own line, once, not the frames of the library."""
    if isinstance(error, Stopped):
        lines = [
            f"Stopped: {error}" + (" (.partial holds what there was)" if error.partial is not None else "")
        ]
    else:
        if not getattr(error, "full_traceback", ""):
            remember("".join(traceback.format_exception(kind, error, trace)))
        line = getattr(error, "user_line", "") or str(line_of(trace) or "")
        lines = [f"{kind.__name__}: {error}"]
        if line and line not in lines[0]:
            lines.append(f"  {line}")
    text = "\n".join(lines)
    shell._showtraceback(kind, error, [text]) if hasattr(shell, "_showtraceback") else print(
        text, file=sys.stderr
    )
    return lines

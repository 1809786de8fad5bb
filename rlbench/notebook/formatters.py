"""Registers the views with IPython: `data` and `session` need not know how they are shown."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from rlbench.data.base import drawing
from rlbench.dispatch import views as progress_views
from rlbench.notebook.cards import errors
from rlbench.runtime.starting import draw_with

HTML = {
    "rlbench.data.rollouts.rollouts.Rollouts": "rollouts.static.rollouts_view",
    "rlbench.session.checks.preflight.Preflight": "cards.check_views.preflight_view",
    "rlbench.session.checks.rehearsal.Rehearsal": "cards.check_views.rehearsal_view",
}
CARDS = {  # a `Card` each, or what has `bundle()`: HTML and text say the same; a list still shows each one's repr
    "rlbench.data.batches.batch.TrainBatch": "cards.views.batch_card",
    "rlbench.data.rollouts.comparing.RewardComparison": "cards.reward_views.comparison_view",
    "rlbench.data.record.gradients.Gradients": "cards.gradient_views.gradients_view",
    "rlbench.data.record.history.History": "cards.views.history_card",
    "rlbench.data.record.metrics.Metrics": "cards.views.metrics_card",
    "rlbench.data.prompts.mixing.Mixture": "cards.data_views.mixture_card",
    "rlbench.data.prompts.set.PromptSet": "cards.data_views.prompt_set_card",
    "rlbench.data.prompts.stream.PromptStream": "cards.data_views.stream_card",
    "rlbench.data.rollouts.scoring.RewardErrors": "cards.reward_views.errors_card",
    "rlbench.data.record.verbs.Verbs": "cards.verbs_views.verbs_card",
    "rlbench.engines.base.Engine": "cards.views.engine_card",
    "rlbench.engines.moved.Moved": "cards.result_views.moved_card",
    "rlbench.engines.redefine.Redefined": "cards.result_views.redefined_card",
    "rlbench.weights.sync.Synced": "cards.result_views.synced_card",
    "rlbench.results.Done": "cards.result_views.done_card",
    "rlbench.results.ExportedModel": "cards.result_views.exported_model_card",
    "rlbench.results.Names": "cards.result_views.names_card",
    "rlbench.results.Saved": "cards.kept_views.saved_card",
    "rlbench.session.training.evaluation.Evaluation": "cards.kept_views.evaluation_card",
    "rlbench.session.state.healing.Healed": "cards.kept_views.healed_card",
    "rlbench.session.facts.Sessions": "cards.views.sessions_card",
    "rlbench.session.lab.loss_lab.LossLab": "lab.view.lab_view",
    "rlbench.session.record.script.Exported": "cards.verbs_views.exported_card",
    "rlbench.session.training.session_trainer.SessionTrainer": "cards.result_views.trainer_card",
    "rlbench.session.training.session_trainer.TrainerPlace": "cards.result_views.place_card",
    "rlbench.session.state.snapshots.Snapshot": "cards.kept_views.snapshot_card",
    "rlbench.session.state.snapshots.Snapshots": "cards.kept_views.snapshots_card",
}
PAINTERS = {  # what `rlbench.data.base.drawing` finds once this room is imported, also in a plain script
    "history_plot": "rlbench.notebook.charts.plots:history_plot",
    "rollouts_page": "rlbench.notebook.rollouts.page:page",
    "column_plot": "rlbench.notebook.charts.plots:column_plot",
    "lengths_picture": "rlbench.notebook.charts.plots:lengths_picture",
}
for _what, _painter in PAINTERS.items():
    drawing.register(_what, _painter)


def install() -> None:
    """Register progress views, how our errors show, and in IPython the HTML formatters. Safe to call twice."""
    for kind in ("generate", "train", "fit", "sync"):
        progress_views.register(kind, f"rlbench.notebook.live.progress:{kind.title()}Progress")
    draw_with("rlbench.notebook.live.progress:StartProgress")
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    errors.install(shell)
    if shell is None:
        return
    from rlbench.notebook import ranks_magic

    html, bundles = shell.display_formatter.formatters["text/html"], shell.display_formatter.mimebundle_formatter
    for formatter, views in ((html, HTML), (bundles, CARDS)):
        for path, view in views.items():
            owner, _, name = path.rpartition(".")
            formatter.for_type_by_name(owner, name, _drawing(view))
    if getattr(shell, "kernel", None) is not None:  # a live viewer needs a front end to talk to
        display = shell.display_formatter.ipython_display_formatter
        display.for_type_by_name("rlbench.data.rollouts.rollouts", "Rollouts", _show_rollouts)
    ranks_magic.install(shell)


def _drawing(path: str) -> Any:
    """Make IPython's formatter of a view that is imported when it is first shown."""
    module, _, name = path.rpartition(".")

    def draw(value: Any, include: Any = None, exclude: Any = None) -> Any:
        drawn = getattr(importlib.import_module(f"rlbench.notebook.{module}"), name)(value)
        return drawn if isinstance(drawn, str) else drawn.bundle()

    return draw


def _show_rollouts(value: Any) -> None:
    importlib.import_module("rlbench.notebook.rollouts.viewer").viewer(value)._ipython_display_()

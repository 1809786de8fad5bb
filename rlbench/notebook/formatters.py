"""Registers the views with IPython: `data` and `session` need not know how they are shown."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from rlbench.data.base import drawing
from rlbench.dispatch import views as progress_views
from rlbench.notebook.cards import errors
from rlbench.runtime.starting import draw_with
from rlbench.traces import ipython

CARDS = {  # what makes the `Card` of each: HTML and text say the same; a list still shows each one's repr
    "rlbench.data.batches.batch.TrainBatch": "cards.data_views:batch_card",
    "rlbench.data.prompts.mixing.Mixture": "cards.data_views:mixture_card",
    "rlbench.data.prompts.set.PromptSet": "cards.data_views:prompt_set_card",
    "rlbench.data.prompts.stream.PromptStream": "cards.data_views:stream_card",
    "rlbench.data.record.gradients.Gradients": "cards.gradient_views:gradients_card",
    "rlbench.data.record.history.History": "cards.record_views:history_card",
    "rlbench.data.record.metrics.Metrics": "cards.record_views:metrics_card",
    "rlbench.data.record.history.Verbs": "cards.record_views:verbs_card",
    "rlbench.data.rollouts.comparing.RewardComparison": "cards.reward_views:comparison_card",
    "rlbench.data.rollouts.scoring.RewardErrors": "cards.reward_views:errors_card",
    "rlbench.engines.base.Engine": "cards.session_views:engine_card",
    "rlbench.engines.moved.Moved": "cards.result_views:moved_card",
    "rlbench.engines.redefine.Redefined": "cards.result_views:redefined_card",
    "rlbench.weights.sync.Synced": "cards.result_views:synced_card",
    "rlbench.results.Done": "cards.result_views:done_card",
    "rlbench.results.ExportedModel": "cards.result_views:exported_model_card",
    "rlbench.results.Names": "cards.result_views:names_card",
    "rlbench.results.Saved": "cards.result_views:saved_card",
    "rlbench.session.checks.preflight.Preflight": "cards.result_views:preflight_card",
    "rlbench.session.checks.rehearsal.Rehearsal": "cards.result_views:rehearsal_card",
    "rlbench.session.planning.plan.Plan": "cards.plan_views:plan_card",
    "rlbench.session.session.Sessions": "cards.session_views:sessions_card",
    "rlbench.session.record.script.Exported": "cards.record_views:exported_card",
    "rlbench.session.state.healing.Healed": "cards.result_views:healed_card",
    "rlbench.session.state.snapshots.Snapshot": "cards.result_views:snapshot_card",
    "rlbench.session.state.snapshots.Snapshots": "cards.result_views:snapshots_card",
    "rlbench.session.training.evaluation.Evaluation": "cards.result_views:evaluation_card",
    "rlbench.session.training.evaluation.Evaluations": "cards.result_views:evaluations_card",
    "rlbench.session.training.evaluation.Compared": "cards.result_views:compared_card",
    "rlbench.session.record.evaluations.PastEvaluations": "cards.result_views:past_evaluations_card",
    "rlbench.session.training.pair_evaluation.PairEvaluation": "cards.result_views:pair_evaluation_card",
    "rlbench.session.training.session_trainer.SessionTrainer": "cards.result_views:trainer_card",
    "rlbench.session.training.session_trainer.TrainerPlace": "cards.result_views:place_card",
    "rlbench.session.lab.loss_lab.LossLab": "lab.view:lab_view",
}
LIVE = {  # what makes the live view of each
    "rlbench.data.rollouts.rollouts.Rollouts": "rollouts.viewer:viewer",
    "rlbench.session.endpoint.chat.Chat": "chat.view:chat_view",
    "rlbench.session.endpoint.endpoint.Endpoint": "cards.following:endpoint_view",
}
PAINTERS = {  # what `rlbench.data.base.drawing` finds once this room is imported, also in a plain script
    "history_plot": "rlbench.notebook.charts.plots:history_plot",
    "rollouts_page": "rlbench.notebook.rollouts.page:page",
    "reliability_plot": "rlbench.notebook.charts.plots:reliability_plot",
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
    shell = ipython()
    errors.install(shell)
    if shell is None:
        return
    from rlbench.notebook import ranks_magic

    formatters = shell.display_formatter
    for path, card in CARDS.items():
        formatters.mimebundle_formatter.for_type_by_name(*path.rsplit(".", 1), _bundle_of(card))
    rollouts = "rlbench.data.rollouts.rollouts", "Rollouts"
    static = "rlbench.notebook.rollouts.static:rollouts_view"
    formatters.formatters["text/html"].for_type_by_name(*rollouts, lambda value: resolve_name(static)(value))
    if getattr(shell, "kernel", None) is not None:  # a live viewer needs a front end to talk to
        show = formatters.ipython_display_formatter
        for path, live in LIVE.items():
            show.for_type_by_name(*path.rsplit(".", 1), _shown_live(live))
    ranks_magic.install(shell)


def _bundle_of(path: str) -> Any:
    """Make IPython's formatter of a card whose module is imported when it is first shown."""

    def draw(value: Any, include: Any = None, exclude: Any = None) -> Any:
        return resolve_name(f"rlbench.notebook.{path}")(value).bundle()

    return draw


def _shown_live(path: str) -> Any:
    """Make what displays a live view whose module is imported when it is first shown."""

    def show(value: Any) -> None:
        resolve_name(f"rlbench.notebook.{path}")(value)._ipython_display_()

    return show

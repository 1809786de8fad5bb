"""All experiments and all figures, in the order of the table."""

from __future__ import annotations

from benchmarks import (
    agents,
    call,
    dashboard,
    hot_reload,
    interrupts,
    linear,
    lora,
    loss_lab,
    many,
    pipeline,
    start,
    step,
    train,
    viewer,
)
from benchmarks.harness import Figure

MODULES = (
    start,
    step,
    lora,
    pipeline,
    train,
    agents,
    call,
    linear,
    hot_reload,
    loss_lab,
    interrupts,
    viewer,
    dashboard,
    many,
)
EXPERIMENTS = tuple(experiment for module in MODULES for experiment in module.EXPERIMENTS)

NOT_YET = (
    Figure("check", "`make check`", unit="s", bar=90.0, better="less", note="timed by hand: `time make check`"),
    Figure("test", "`make test`", unit="s", bar=960.0, better="less", note="timed by hand: `time make test`"),
)
"""What has a bar and nothing that measures it; a row, not a number."""

_MEASURED = (
    *step.FIGURES,
    *lora.FIGURES,
    *pipeline.FIGURES,
    *train.FIGURES,
    *start.FIGURES,
    *linear.FIGURES,
    *call.FIGURES,
    *hot_reload.FIGURES,
    *loss_lab.FIGURES,
    *dashboard.FIGURES,
    *interrupts.FIGURES,
    *viewer.FIGURES,
    *many.FIGURES,
    *agents.FIGURES,
)
FIGURES = (*_MEASURED, *NOT_YET)

"""All experiments and all figures, in the order of the table."""

from __future__ import annotations

from benchmarks import (
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

NOT_BUILT = "not built yet"
NOT_YET = (
    Figure("endpoint", "endpoint / `rollout`, tokens per second, 64 concurrent calls", bar=0.9, note=NOT_BUILT),
    Figure(
        "continuations",
        "16 continuations × 64 tokens from a click, 10 M",
        unit="s",
        bar=1.0,
        better="less",
        note=NOT_BUILT,
    ),
    Figure("check", "`make check`", unit="s", bar=90.0, better="less", note="timed by hand: `time make check`"),
    Figure("test", "`make test`", unit="s", bar=1200.0, better="less", note="timed by hand: `time make test`"),
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
)
FIGURES = (*_MEASURED, *NOT_YET)

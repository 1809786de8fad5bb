"""The verbs that change how a session trains: optimizer, schedule, frozen parameters.

Each takes a function of the user's, or a name, that the ranks run now, and again where the session is healed, loaded,
attached to, or goes back. With the state of what it made it is a part of snapshots and checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Any

from rlbench.dispatch.chain import ChainStep, Steps
from rlbench.errors import SessionError
from rlbench.results import Done, Names
from rlbench.session.core import SessionCore
from rlbench.session.setup_options import OptimizerChoice, ScheduleChoice
from rlbench.session.state import step_copies
from rlbench.session.state.setup import set_up_steps, setup_of
from rlbench.workers.train.config import FROZEN, SCHEDULE

Pattern = str | re.Pattern[str]


def optimizer(
    core: SessionCore, optimizer: str | Callable[..., Any] | None, **options: Any
) -> Generator[ChainStep, Any, Done]:
    """Train with another optimizer from now on, beginning without state.

        session.optimizer("muon", lr=2e-3)                    # Muon for matrices, AdamW for the rest
        session.optimizer(lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))

    `undo`, `restore` and `branch` bring an earlier one back with its state; `heal`, `load` and `attach` make this one
    again. A schedule and a `session.trainer` go with the optimizer that they were made for.

    Args:
        optimizer: "adamw", "sgd" or "muon"; or a function of the policy's module, run on every rank, that returns a
            torch optimizer, or a dict of several over different parameters. None: that of `rb.Train` again.
        options: of the named optimizer (`lr`, by default the session's, `weight_decay`, …), or of the function.
    """
    kept = {name: part for name, part in setup_of(core).items() if name == FROZEN}
    if optimizer is None and options:
        raise SessionError(f"optimizer(None) takes no options, and got {', '.join(options)}")
    train = core.options.train
    choice = train.optimizer if optimizer is None else OptimizerChoice.of(optimizer, **options)
    yield from _changed(core, {**kept, **train.optimizer_part(choice)}, "optimizer")
    return Done(f"{', '.join(core.train.info['optimizer'])} from the next step on", "session.undo() goes back past it")


def schedule(
    core: SessionCore, schedule: str | Callable[..., Any] | None, **options: Any
) -> Generator[ChainStep, Any, Done]:
    """Let the learning rate follow a schedule from the next `train_step` or `optim_step` on.

        session.schedule("cosine", steps=200, warmup=10)
        session.schedule(lambda step: min(1.0, (step + 1) / 20))     # a factor of the rate

    Its place goes back with `undo` and `restore`. A `session.trainer` has `schedule_steps` of its own.

    Args:
        schedule: a name of transformers' schedules ("linear", "cosine", "constant_with_warmup", …) with `steps` and
            `warmup`; a function of the step, from 0 on, that returns a factor; or one of `optimizer` that returns a
            torch scheduler. None: the rate stays what it was without one.
        options: of the named schedule, or of the function.
    """
    setup = {name: part for name, part in setup_of(core).items() if name != SCHEDULE}
    if schedule is None and options:
        raise SessionError(f"schedule(None) takes no options, and got {', '.join(options)}")
    part = {} if schedule is None else ScheduleChoice.of(schedule, **options).part()
    yield from _changed(core, {**setup, **part}, "schedule")
    return Done("no schedule" if schedule is None else "the rate follows the schedule from the next step on")


def freeze(core: SessionCore, *patterns: Pattern) -> Generator[ChainStep, Any, Names]:
    """Train these parameters no more, until `unfreeze`; returns the names of all that are frozen.

        session.freeze("model.embed_tokens", "model.layers.0", "*.bias")

    A part of snapshots and checkpoints, as the optimizer is, which keeps what it knows of them.

    Args:
        patterns: names of parameters or modules, with `*` and `?`, or regular expressions (`re.compile`).
    """
    if not patterns:
        raise SessionError('freeze: which parameters? session.freeze("model.layers.0", "*.bias")')
    return (yield from _refrozen(core, patterns, True))


def unfreeze(core: SessionCore, *patterns: Pattern) -> Generator[ChainStep, Any, Names]:
    """Train parameters again that `freeze` froze, all of them without a pattern; returns the names of those that stay
    frozen."""
    return (yield from _refrozen(core, patterns, False))


def _refrozen(core: SessionCore, patterns: tuple[Pattern, ...], frozen: bool) -> Steps:
    names = yield core.ask_ranks("frozen_by", patterns, frozen, what="freeze" if frozen else "unfreeze")
    others = {name: part for name, part in setup_of(core).items() if name != FROZEN}
    yield from _changed(core, others | ({FROZEN: names} if names else {}), "freeze" if frozen else "unfreeze")
    return Names("frozen", names)


def _changed(core: SessionCore, setup: dict[str, Any], what: str) -> Steps:
    """Train by another setup, and keep the state after it, so that `heal` comes back to it."""
    if setup == setup_of(core):
        return
    yield from set_up_steps(core, setup, what)
    core.train.publish_state()
    yield from step_copies.after_step_steps(core)

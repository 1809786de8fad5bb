"""How a trainer comes to be on a session's ranks."""

from __future__ import annotations

from typing import Any, cast

from rlbench.dispatch import by_value
from rlbench.errors import Stopped, WorkerDied
from rlbench.session.core import SessionCore
from rlbench.session.planning.check import need_trainer_room
from rlbench.session.training.session_trainer import SessionTrainer, TextTrainer, trainer_of
from rlbench.session.training.text_data import text_spec


def text_trainer(
    core: SessionCore,
    method: str,
    reference: str | bool | None,
    *,
    data: Any,
    eval_data: Any,
    loss: Any,
    lr: float | None,
    schedule_steps: int | None,
    **options: Any,
) -> TextTrainer:
    """Make a trainer of a method on texts; arguments as of `session.trainer`."""
    from rlbench.trainers.options.methods import method_options, of_writing

    writing = of_writing(options)
    chosen = method_options(method, {**options, **({} if lr is None else {"lr": lr})})
    spec = text_spec(core, method, data, eval_data, reference, loss, schedule_steps, chosen, writing)
    return cast(TextTrainer, made(core, method, spec, load_checkpoint=bool(chosen.get("load_checkpoint"))))


def made(core: SessionCore, method: str, spec: Any, load_checkpoint: bool) -> SessionTrainer:
    """Have the ranks build a trainer from its description; BuildError where it cannot fit beside the session."""
    need_trainer_room(core.options, spec)
    blob = by_value.dumps(spec, "trainer")
    pending = core.ask_ranks("make_trainer", method, blob, what="trainer", track=True)
    try:
        found = pending.blocking_result()
    except WorkerDied:
        raise
    except (Exception, Stopped):
        # the refused trainer may have loaded a checkpoint: these weights are of another version
        if load_checkpoint and core.train.call_all("take_left_loaded", finish=any, what="trainer").result():
            core.number_weights()
        raise
    if found["unsent"]:  # it went on from a checkpoint, and the replicas have not heard of it
        core.number_weights()
    core.trainer = trainer_of(core, found, blob)
    return core.trainer

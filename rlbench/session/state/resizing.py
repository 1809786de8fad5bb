"""Another number of training ranks or replicas, in a session that goes on.

The ranks are built anew and go on from a snapshot written just before, which ranks of any number read: so a resize
that ends half-way is brought to its end by `heal`, at the size before. Replicas that stay are not touched.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

from rlbench.dispatch.chain import ChainStep, Steps
from rlbench.errors import BuildError, StateError
from rlbench.results import Resized
from rlbench.runtime.starting import starting
from rlbench.session import building
from rlbench.session.core import SessionCore
from rlbench.session.options import SessionOptions
from rlbench.session.state import healing, snapshots
from rlbench.strategies.options.config import need_groups


def resize(
    core: SessionCore, train: int | None = None, inference: int | None = None, drop_trainer: bool = False
) -> Generator[ChainStep, Any, Resized]:
    """Go on with another number of training ranks or replicas: weights, optimizer, step and history stay.

    New replicas receive the trainer's current weights, and the others too. Ranks are built anew from a snapshot, which
    `heal()` goes back to should that fail; where their number changes they draw from random states of their own. One
    that lost a rank goes on as `heal()` would, with as many as are asked for.

    Args:
        train: training ranks. The parameters are split over them; where there are copies (`data_parallel_size`), over
            as many as before, and there are more or fewer copies.
        inference: replicas.
        drop_trainer: end a `session.trainer` that is on the ranks, which is else a reason not to change their number.
    """
    options = _with_sizes(core, train, inference)
    core.need_idle("resized", resize.__name__)
    with starting("resized session"):
        lost = healing.lost_engines(core)
        grows = inference is not None and "inference" not in lost and inference > core.inference.world_size
        if grows:
            _need_ready(core, "actor" in lost)
        before = None
        if train not in (None, core.train.world_size) and "actor" not in lost:
            before = yield from _written(core, drop_trainer)
            lost["actor"] = core.link.state("engines")["engines"]["actor"]
        yield from healing.rebuild_steps(core, building.on_what_is_left(options), lost)
        if inference not in (None, core.inference.world_size if core.samples else None):
            core.inference.resize(inference, **building.replica_config(options))
        if grows:
            yield core.synced()
        core.options = options
        core.link.set(config=options.to_json())
        if before is not None and not core.undo_depth:  # else it is the copy after the last step
            yield from snapshots.free_steps(core, [before])
    replicas = core.inference.world_size if core.samples else 0
    return Resized(core.train.world_size, replicas, core.step, core.version)


def _with_sizes(core: SessionCore, train: int | None, inference: int | None) -> SessionOptions:
    """Return the session's options with other sizes; refuse those that cannot be."""
    options = core.options
    if train is None and inference is None:
        raise StateError("resize: say train=, inference= or both, as whole numbers of ranks and replicas")
    for name, count in (("train", train), ("inference", inference)):
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise StateError(f"resize({name}={count!r}): wanted a whole number from 1 on")
    if train is not None:
        need_groups(options.train, train)
        together, shards, copies = (
            options.train.tensor_parallel,
            options.train.shards or 1,
            options.train.data_parallel_size,
        )
        if copies != 1 and train % (wide := shards * together):
            raise BuildError(f"resize(train={train}): each copy of the parameters is split over {wide} ranks")
        shards, copies = (train // together, 1) if copies == 1 else (shards, train // (shards * together))
        options = replace(options, train=replace(options.train, shards=shards, data_parallel_size=copies))
    if inference is not None:
        _ = core.inference  # a reward model has none
        options = replace(options, inference=replace(options.inference, data_parallel_size=inference))
    building.need_devices(building.on_what_is_left(options))
    return options


def _need_ready(core: SessionCore, ranks_lost: bool) -> None:
    """Refuse new replicas that could not be brought to the weights of the others."""
    if not ranks_lost and not core.can_sync():
        raise StateError(
            "resize: new replicas receive the trainer's weights, and trainer or replicas are offloaded: "
            "session.onload() first"
        )
    if len(core.adapters) > 1:
        raise StateError(
            f"resize: the replicas hold adapters of branches that were left ({', '.join(core.adapters)}), which a new "
            "one would not have: session.drop the snapshots of those branches first"
        )


def _written(core: SessionCore, drop_trainer: bool) -> Steps:
    """Write the snapshot that ranks of another number go on from; refuse what it would not hold."""
    held = yield core.ask_ranks("held_beside", what="resize")
    if held["gradients"]:
        raise StateError(
            "resize: gradients wait for a step, and no file keeps them: session.optim_step() or session.zero_grad() "
            "first"
        )
    if held["trainer"] is not None:
        if not drop_trainer:
            raise StateError(
                "resize: a trainer is on the ranks, made for their number: trainer.save(folder), then "
                "session.resize(…, drop_trainer=True), and afterwards session.trainer(…) and its load(folder)"
            )
        yield core.train.call_all("drop_trainer", what="resize")
    core.trainer = None
    return (yield from snapshots.write_steps(core, f"before resize at step {core.step}", automatic=True))

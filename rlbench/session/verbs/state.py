"""The verbs of a session that keep and bring back its state; see `rlbench.session.state.snapshots`."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from rlbench.dispatch.chain import Step
from rlbench.results import ExportedModel, Names, Saved
from rlbench.runtime.starting import starting
from rlbench.session.core import SessionCore
from rlbench.session.state import checkpoints, healing, snapshots, step_copies
from rlbench.session.state.healing import Healed
from rlbench.session.state.snapshots import Snapshot


def snapshot(core: SessionCore, label: str | None = None, disk: bool = False) -> Generator[Step, Any, Snapshot]:
    """Keep the whole training state: weights, optimizer, schedulers, random states, step, rollout number, history.

    Of a `session.trainer`, too: critic, average, schedules, place in the prompts, what waits to be trained on.

    Args:
        label: to find it by; default: made up of the step.
        disk: on disk in the state folder, instead of host memory. Either is gone when the session closes; for
            what must stay, use `save(path)`.

    Returns:
        A `Snapshot` (or a `Pending`). Tensors that did not change since the last one are kept once.

    Raises:
        CheckpointError: no room. Stopped: nothing is kept. StateError: weights are released.
    """
    return (yield from snapshots.snapshot_steps(core, label, disk))


def restore(core: SessionCore, snapshot: Snapshot | str | int, sync: bool = True) -> Generator[Step, Any, Snapshot]:
    """Go back to a snapshot, bit for bit; the replicas follow (`sync=False`: when `sync_weights()` is called).

    The weights get a new version number, since those in between were other weights. Gradients that wait for a
    step are dropped; later steps leave the history and stay on record. A trainer on the ranks goes back, too; where
    the snapshot is of before it was made, or of another one, the policy alone does, and a warning says so.
    """
    return (yield from snapshots.restore_steps(core, snapshot, sync))


def undo(core: SessionCore, sync: bool = True) -> Generator[Step, Any, Snapshot]:
    """Take the last optimizer step (of a trainer: iteration) back, and call by call those before it; returns the
    snapshot of before it, which stays until the next step."""
    return (yield from step_copies.undo_steps(core, sync))


def drop(core: SessionCore, *which: Snapshot | str | int) -> Generator[Step, Any, Names]:
    """Forget snapshots and free what they hold. A branch that was left at one is forgotten with it."""
    return Names("dropped", (yield from snapshots.drop_steps(core, list(which))))


def branch(core: SessionCore, name: str, sync: bool = True) -> Generator[Step, Any, Snapshot]:
    """Start a branch here, or go on with one that was left: its weights, step and history come back.

    The branch that is left is kept as a snapshot. Every session starts on "main".
    """
    return (yield from snapshots.branch_steps(core, name, sync))


def branches(core: SessionCore) -> dict[str, Snapshot | None]:
    """The branches by name, each with the snapshot of its end; None for the one the session is on."""
    state = core.link.state("branch", "branches")
    kept = snapshots.listed(core)
    left = {name: kept[id_] for name, id_ in state["branches"].items() if name != state["branch"]}
    return {state["branch"]: None} | left


def save(
    core: SessionCore, path: str, max_num: int | None = None, max_mem: float | None = None
) -> Generator[Step, Any, Saved]:
    """Write a checkpoint into folder `path`: weights, optimizer, schedulers, random states, step, history, options.

    It appears whole or not at all. `rb.Session.load(path)` goes on from the newest, on any number of ranks.

    Args:
        path: a folder of checkpoints; on several nodes, one that all see.
        max_num: keep at most so many of rlbench's checkpoints there (None: all); the oldest go first.
        max_mem: … and at most so many gigabytes (10^9 bytes). The newest always stays.

    Returns:
        `Saved`: path, bytes, what was removed (or a `Pending`).

    Raises:
        CheckpointError: no room; earlier checkpoints are as they were.
    """
    return (yield from checkpoints.save_steps(core, path, max_num, max_mem))


def export(core: SessionCore, path: str, dtype: str | None = None) -> Generator[Step, Any, ExportedModel]:
    """Write the trainer's weights as a Hugging Face folder that transformers and vLLM load.

    Args:
        path: must not be there, or be empty.
        dtype: of the weights (`"bfloat16"`, …); None: that of the model's config.

    Returns:
        `ExportedModel`: `path`, `bytes`, `files` (or a `Pending`).
    """
    return (yield from checkpoints.export_steps(core, path, dtype))


def heal(core: SessionCore, prefer: str = "snapshot") -> Generator[Step, Any, Healed]:
    """Rebuild the engines that lost a worker and bring back what they held; says from what.

    Args:
        prefer: `"snapshot"`: the one at which the session stood last: after the last finished step, where `undo` is
            kept, and what was changed on the ranks since is lost; `"weights"`: the weights of the last sync, with
            an optimizer that starts anew.

    Returns:
        `Healed` (or a `Pending`): what each engine goes on from, step and version.
    """
    with starting("healed session"):
        return (yield from healing.heal_steps(core, prefer))

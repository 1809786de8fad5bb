"""The verbs of a session that keep and bring back its state; see `rlbench.session.snapshots`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from rlbench.dispatch.chain import Steps
from rlbench.results import Names
from rlbench.runtime.starting import starting
from rlbench.session import checkpoints, healing, snapshots, step_copies
from rlbench.session.recording import recorded
from rlbench.session.snapshots import Snapshot, Snapshots

if TYPE_CHECKING:
    from rlbench.session.session import Session


class StateVerbs:
    """What `Session` inherits: snapshot, restore, undo, branch, save, export, heal."""

    @recorded
    def snapshot(self, label: str | None = None, disk: bool = False, block: bool = True) -> Any:
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
        me = cast("Session", self)
        return me._run("snapshot", snapshots.snapshot_steps(me, label, disk), block)

    @property
    def snapshots(self) -> Snapshots:
        """The snapshots there are, oldest first; by label or place."""
        return snapshots.listed(cast("Session", self))

    @recorded
    def restore(self, snapshot: Snapshot | str | int, sync: bool = True, block: bool = True) -> Any:
        """Go back to a snapshot, bit for bit; the replicas follow (`sync=False`: when `sync_weights()` is called).

        The weights get a new version number, since those in between were other weights. Gradients that wait for a
        step are dropped; later steps leave the history and stay on record. A trainer on the ranks goes back, too; where
        the snapshot is of before it was made, or of another one, the policy alone does, and a warning says so.
        """
        me = cast("Session", self)
        return me._run("restore", snapshots.restore_steps(me, snapshot, sync), block)

    @recorded
    def undo(self, sync: bool = True, block: bool = True) -> Any:
        """Take the last optimizer step (of a trainer: iteration) back, and call by call those before it; returns the
        snapshot of before it, which stays until the next step."""
        me = cast("Session", self)
        return me._run("undo", step_copies.undo_steps(me, sync), block)

    @recorded
    def drop(self, *which: Snapshot | str | int) -> Names:
        """Forget snapshots and free what they hold. A branch that was left at one is forgotten with it."""
        me = cast("Session", self)
        return Names("dropped", me._run("drop", snapshots.drop_steps(me, list(which)), True))

    @recorded
    def branch(self, name: str, sync: bool = True, block: bool = True) -> Any:
        """Start a branch here, or go on with one that was left: its weights, step and history come back.

        The branch that is left is kept as a snapshot. Every session starts on "main".
        """
        me = cast("Session", self)
        return me._run("branch", snapshots.branch_steps(me, name, sync), block)

    @property
    def branches(self) -> dict[str, Snapshot | None]:
        """The branches by name, each with the snapshot of its end; None for the one the session is on."""
        me = cast("Session", self)
        state = me.link.state("branch", "branches")
        kept = snapshots.listed(me)
        left = {name: kept[id_] for name, id_ in state["branches"].items() if name != state["branch"]}
        return {state["branch"]: None} | left

    @recorded
    def save(self, path: str, max_num: int | None = None, max_mem: float | None = None, block: bool = True) -> Any:
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
        me = cast("Session", self)
        return me._run("save", checkpoints.save_steps(me, path, max_num, max_mem), block)

    @recorded
    def export(self, path: str, dtype: str | None = None, block: bool = True) -> Any:
        """Write the trainer's weights as a Hugging Face folder that transformers and vLLM load.

        Args:
            path: must not be there, or be empty.
            dtype: of the weights (`"bfloat16"`, …); None: that of the model's config.

        Returns:
            `ExportedModel`: `path`, `bytes`, `files` (or a `Pending`).
        """
        me = cast("Session", self)
        return me._run("export", checkpoints.export_steps(me, path, dtype), block)

    @recorded
    def heal(self, prefer: str = "snapshot", block: bool = True) -> Any:
        """Rebuild the engines that lost a worker and bring back what they held; says from what.

        Args:
            prefer: `"snapshot"`: the one at which the session stood last: after the last finished step, where `undo` is
                kept, and what was changed on the ranks since is lost; `"weights"`: the weights of the last sync, with
                an optimizer that starts anew.

        Returns:
            `Healed` (or a `Pending`): what each engine goes on from, step and version.
        """
        me = cast("Session", self)

        def steps() -> Steps:
            with starting("healed session"):
                return (yield from healing.heal_steps(me, prefer))

        return me._run("heal", steps(), block)

    def replicas_can_sync(self) -> bool:
        """Whether both sides hold their weights, so that a sync can be done now."""
        me = cast("Session", self)
        return all(engine.status()["weights"] == "cuda" for engine in (me.train, me.inference))

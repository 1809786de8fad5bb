"""A reference that follows the policy: moved by a verb, or after steps as `rb.Train(reference=…)` says; back with the
session.

Where it was moved to lies as a Hugging Face folder in the session's own, one for each place that a snapshot, or the
session itself, stands at. The monitor has its path as `reference`, None for the model that it was built from.
"""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

from rlbench.dispatch.chain import Steps
from rlbench.engines.sync import average_weights, copy_weights
from rlbench.errors import SessionError, Stopped
from rlbench.runtime import registry
from rlbench.session.core import SessionCore

REFERENCES, BESIDE = "references", "-reference"
"""A folder in the session's, and how those beside checkpoints end."""


def reference_steps(core: SessionCore, wanted: str | None, rebuilt: bool = False) -> Steps:
    """Bring the reference to weights that it was moved to, None: those of its model, where it has others (`rebuilt`:
    it has its model's)."""
    now = None if rebuilt else core.link.state("reference")["reference"]
    if core.reference is not None and wanted != now:
        yield from _loaded_steps(core, wanted)
        core.link.set(reference=wanted)


def moved_steps(core: SessionCore, keep: float) -> Steps:
    """Move the reference to an average of itself (share `keep`) and the policy; returns where its weights lie, for the
    record. Where that ends in the middle, it is where it was."""
    reference = core.reference
    if reference is None:
        raise SessionError(
            "the reference is the policy's own base, with its adapters off, and stays: rb.Session(…, reference=folder) "
            "holds one apart"
            if core.options.base_is_reference
            else "there is no reference: rb.Session(…, reference=True) holds one"
        )
    if keep and not str(reference.info["dtype"]).endswith("float32"):
        raise SessionError(
            f"the reference is held in {reference.info['dtype']}, which rounds away what an average adds: "
            'rb.Train(dtype="float32") holds it in float32; a copy (keep=0, rb.every(…)) is exact as it is'
        )
    root = registry.snapshot_folder(core.name) / REFERENCES
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = str(root / secrets.token_hex(4))
    try:
        yield average_weights(core.train, reference, keep) if keep else copy_weights(core.train, reference)
        yield reference.call_all("save_weights", place, None, what="the reference's move")
    except (Exception, Stopped):
        yield from _loaded_steps(core, core.link.state("reference")["reference"])
        raise
    return place


def followed_steps(core: SessionCore, step: int) -> Steps:
    """Move the reference after optimizer step `step` where the options say so; returns as `moved_steps`, or None."""
    follows = core.options.train.reference
    if follows is None or step % follows.every:
        return None
    return (yield from moved_steps(core, follows.keep))


def forget_moved(core: SessionCore) -> None:
    """Remove the places at which neither the session nor a snapshot stands."""
    state = core.link.state("reference", "snapshots")
    needed = {state["reference"], *(fields["reference"] for fields in state["snapshots"].values())}
    for folder in (registry.snapshot_folder(core.name) / REFERENCES).glob("*"):
        if str(folder) not in needed:
            shutil.rmtree(folder, ignore_errors=True)


def _loaded_steps(core: SessionCore, place: str | None) -> Steps:
    if core.reference is not None:
        yield core.reference.call_all("load_weights", place or core.options.reference, False, what="reference")


def kept_beside(core: SessionCore, path: str) -> Steps:
    """Write the weights of a reference that was moved beside the session's checkpoint; returns where, or None."""
    if core.reference is None or core.link.state("reference")["reference"] is None:
        return None
    place = Path(path).expanduser().resolve() / f"step-{core.step:06d}-v{core.version}{BESIDE}"
    if not place.exists():
        yield core.reference.call_all("save_weights", str(place), None, what="save")
    return str(place)


def forget_beside(path: str) -> None:
    """Remove those of checkpoints that are not there any more."""
    for place in Path(path).expanduser().resolve().glob(f"*{BESIDE}"):
        if not place.with_name(place.name.removesuffix(BESIDE)).exists():
            shutil.rmtree(place, ignore_errors=True)

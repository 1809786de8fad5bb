"""Checkpoints of a session on disk, and the model as a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbench.checkpoint import folder as folders
from rlbench.dispatch.chain import Steps
from rlbench.engines.paths import new_folder
from rlbench.engines.sync import sync_weights
from rlbench.errors import CheckpointError
from rlbench.options import canonical
from rlbench.session.options import Inference, Train
from rlbench.session.state import step_copies

if TYPE_CHECKING:
    from rlbench.session.core import SessionCore

KIND, SESSION = "session", "session.json"  # as rlbench.workers.train.keeping writes them
OPTIONS = {"train": Train, "inference": Inference}


def save_steps(session: SessionCore, root: str, max_num: int | None, max_mem: float | None) -> Steps:
    """Write a checkpoint into `root`; returns `Saved`."""
    for name, value in (("max_num", max_num), ("max_mem", max_mem)):
        if value is not None and value <= 0:
            raise CheckpointError(f"save: {name}={value!r} must be above 0, or None to keep all")
    session.followed.note_place()
    names = ("step", "version", "rollouts", "config", "history", "cursor")
    state = session.link.state(*names)
    values = json.dumps({key: state[key] for key in names})
    name = f"step-{state['step']:06d}-v{state['version']}"
    place = str(Path(root).expanduser().resolve())
    saved = yield session.train.call_all(
        "save_checkpoint", place, name, values, max_num, max_mem, what="save", track=True
    )
    return saved[0]


def options_of(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint that `path` names, and the session's values in it.

    Raises:
        CheckpointError: none there, or its values cannot be read.
    """
    folder = folders.find(Path(path).expanduser().resolve(), KIND)
    try:
        return folder, dict(json.loads((folder / SESSION).read_text()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is damaged: {SESSION} cannot be read ({error})") from error


def load_steps(session: SessionCore, folder: Path, kept: dict[str, Any]) -> Steps:
    """Bring a session just built to a checkpoint: weights, optimizer, step, history, and the replicas' weights."""
    yield session.train.call_all("load_checkpoint", str(folder), what="load", track=True)
    session.link.apply(*({"do": "record", "record": record} for record in kept["history"]))
    place = {"step": kept["step"], "version": kept["version"], "rollouts": kept["rollouts"]}
    session.link.set(**place, cursor=kept.get("cursor"))  # a checkpoint of an earlier rlbench has none
    session.train.publish_state()
    yield sync_weights(session.train, session.inference, kept["version"])
    yield from step_copies.after_step_steps(session)
    return session


def export_steps(session: SessionCore, path: str, dtype: str | None) -> Steps:
    """Write the trainer's weights as a Hugging Face folder; returns `ExportedModel`."""
    place = str(new_folder(path, "export"))
    written = yield session.train.call_all(
        "export_model", place, session.options.path, dtype, what="export", track=True
    )
    return written[0]


def overridden(kept: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Constructor arguments of a session like the saved one; what is given counts before what was saved."""
    config = kept["config"]
    arguments = {name: config[name] for name in ("model", "train", "inference", "seed", "reference", "undo")}
    for name, value in given.items():
        value = canonical(value, OPTIONS[name]) if name in OPTIONS and value is not None else value
        merges = isinstance(value, dict) and isinstance(arguments.get(name), dict)
        arguments[name] = {**arguments[name], **value} if merges else value
    return arguments

"""Checkpoints of a session on disk, and the model as a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

from rlbench.checkpoint import folder as folders
from rlbench.dispatch.chain import ChainStep, Steps
from rlbench.dispatch.pending import Pending
from rlbench.engines.paths import new_folder
from rlbench.errors import CheckpointError, SessionError
from rlbench.options import canonical
from rlbench.results import ExportedModel, Saved
from rlbench.session.core import SessionCore
from rlbench.session.options import Inference, Train
from rlbench.session.state import step_copies
from rlbench.session.state.reference import forget_beside, kept_beside
from rlbench.session.state.setup import set_up_steps
from rlbench.workers.train.config import OPTIMIZER, SCHEDULE

KIND, SESSION = "session", "session.json"  # as rlbench.workers.train.keeping writes them
OPTIONS = {"train": Train, "inference": Inference}
SAVED = ("step", "version", "rollouts", "config", "history", "cursor", "setup")


def save(
    core: SessionCore, path: str, max_num: int | None = None, max_mem: float | None = None
) -> Generator[ChainStep, Any, Saved]:
    """Write a checkpoint into folder `path`: weights, optimizer, schedulers, random states, step, history, options,
    evaluations with the completions of the newest (64 MiB of them).

    It appears whole or not at all. `rb.Session.load(path)` goes on from the newest, on any number of ranks.

    Args:
        path: a folder of checkpoints; on several nodes, one that all see.
        max_num: keep at most so many of rlbench's checkpoints there (None: all); the oldest go first.
        max_mem: … and at most so many gigabytes (10^9 bytes). The newest always stays.
    """
    for name, value in (("max_num", max_num), ("max_mem", max_mem)):
        if value is not None and value <= 0:
            raise CheckpointError(f"save: {name}={value!r} must be above 0, or None to keep all")
    done = yield start_save(core, path, max_num, max_mem, (yield from kept_beside(core, path)))
    forget_beside(path)
    return done


def start_save(
    core: SessionCore,
    path: str,
    max_num: int | None = None,
    max_mem: float | None = None,
    reference: str | None = None,
) -> Pending:
    """Start writing a checkpoint, see `save`; `reference`: where its weights lie, if it was moved."""
    core.followed.note_place()
    told = core.link.state(*SAVED)
    if reference is not None:
        told["config"] = {**told["config"], "reference": reference}
    told["evaluations"], completions = core.evaluations.saved()
    state = json.dumps(told)
    name = f"step-{told['step']:06d}-v{told['version']}"
    place = str(Path(path).expanduser().resolve())
    given = (place, name, state, max_num, max_mem, completions)
    return core.ask_ranks("save_checkpoint", *given, what="save", track=True)


def export(
    core: SessionCore, path: str, dtype: str | None = None, adapter: bool = False
) -> Generator[ChainStep, Any, ExportedModel]:
    """Write the trainer's weights, adapters merged, as a Hugging Face folder that transformers and vLLM load.

    Args:
        path: must not be there, or be empty.
        dtype: of the weights (`"bfloat16"`, …); None: that of the model's config.
        adapter: write the LoRA adapter alone, as a folder of peft's.
    """
    return (yield start_export(core, path, dtype, adapter, core.options.path))


def start_export(core: SessionCore, path: str, dtype: str | None, adapter: bool, base: str) -> Pending:
    """Start an export, see `export`; `base`: what an adapter calls the model it goes with."""
    if adapter and dtype is not None:
        raise CheckpointError("export: an adapter is written as it is; leave dtype= out")
    place = str(new_folder(path, "export"))
    if adapter:
        return core.ask_ranks("export_adapter", place, base, what="export", track=True)
    return core.ask_ranks("export_model", place, core.options.path, dtype, what="export", track=True)


def options_of(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """Return the checkpoint that `path` names, and the session's values in it; CheckpointError where there is none."""
    folder = folders.find(Path(path).expanduser().resolve(), KIND)
    try:
        return folder, dict(json.loads((folder / SESSION).read_text()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is damaged: {SESSION} cannot be read ({error})") from error


def begin_steps(core: SessionCore) -> Steps:
    """Let a session just built train by its options' optimizer and schedule, and give it, and its replicas, the adapter
    it is to go on from (`rb.Lora(path=…)`), if any."""
    yield from set_up_steps(core, core.options.train.first_setup(), "rb.Train")
    if (lora := core.options.train.lora) is not None and lora.path is not None:
        yield core.train.call_all("load_adapter", lora.path, what="load", track=True)
        core.train.publish_state()
        yield core.synced()
        yield from step_copies.after_step_steps(core)


def load_steps(core: SessionCore, folder: Path, kept: dict[str, Any]) -> Steps:
    """Bring a session just built to a checkpoint: weights, optimizer, step, history, and the replicas' weights."""
    yield from set_up_steps(core, kept.get("setup", {}), "load")
    yield core.train.call_all("load_checkpoint", str(folder), what="load", track=True)
    core.link.apply(*({"do": "record", "record": record} for record in kept["history"]))
    core.link.set(**{name: kept.get(name) for name in ("step", "version", "rollouts", "cursor")})
    entries = kept.get("evaluations", [])  # of a checkpoint of before there were any
    core.link.apply({"do": "evaluated", "entries": entries})
    core.evaluations.read(folder, entries)
    core.train.publish_state()
    yield core.synced(kept["version"])
    yield from step_copies.after_step_steps(core)


def overridden(kept: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of a session like the saved one; what is given counts before what was saved."""
    config = kept["config"]
    arguments = {name: config[name] for name in ("model", "train", "inference", "seed", "reference", "undo")}
    if "lora" in arguments["train"]:  # the checkpoint has what became of the adapter it went on from
        lora = {name: value for name, value in arguments["train"]["lora"].items() if name != "path"}
        arguments["train"] = {**arguments["train"], "lora": lora}
    for name, value in given.items():
        value = canonical(value, OPTIONS[name]) if name in OPTIONS and value is not None else value
        if name == "train" and value is not None and (own := sorted({OPTIMIZER, SCHEDULE} & value.keys())):
            raise SessionError(f"load: the checkpoint has its {own[0]}; session.{own[0]}(…) changes it afterwards")
        merges = isinstance(value, dict) and isinstance(arguments.get(name), dict)
        arguments[name] = {**arguments[name], **value} if merges else value
    return arguments

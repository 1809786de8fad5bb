"""Parking: a session goes to disk whole and ends, and is brought back by its name.

parked/NAME/session/    in the state folder; appears whole or not at all, compared with its manifest before it is read
  about.json              what a list says of it
  state.json              what the monitor knew: history, branches, snapshots, trackers, options
  policy/STEP/            a checkpoint, as of `session.save`; `rb.Session.load` goes on from it alone
  snapshots/ID/           those made by hand, and the ends of branches
  script/, anchors/       the record of verbs and cells; the old log-probs of batches trained on
  references/             weights that the reference was moved to
  trainer/, trainer.pkl   of a `session.trainer`: a snapshot with its part, and what it is made again from
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlbench.checkpoint import folder as folders
from rlbench.dispatch.chain import ChainStep, Steps
from rlbench.engines.sync import fixed, sync_weights
from rlbench.errors import CheckpointError, SessionError, StateError
from rlbench.results import Parked
from rlbench.runtime import registry
from rlbench.session.core import SessionCore
from rlbench.session.options import SessionOptions, model_at
from rlbench.session.state import checkpoints, healing, snapshots, step_copies
from rlbench.session.state.reference import REFERENCES, reference_steps
from rlbench.session.state.setup import set_up_steps
from rlbench.tiny.cache import NAMES
from rlbench.units import format_bytes

KIND, STATE, POLICY, TRAINER, SPEC = "parked", "state.json", "policy", "trainer", "trainer.pkl"
PLACE = ("branch", "version", "highest", "step", "rollouts", "tip", "cursor")
KEPT = (
    *PLACE,
    "config",
    "records",
    "snapshots",
    "branches",
    "adapters",
    "lengths",
    "trackers",
    "park",
    "evaluations",
    "logged",
    "setup",
    "reference",
)
BESIDE = ("script", "anchors", REFERENCES)
BUDGET_GB, KEPT_DAYS = 100.0, 30.0
"""How much all parked sessions may take, 10^9 bytes, and how long one is kept; `RLBENCH_PARK_GB`, `RLBENCH_PARK_DAYS`
are counted before them."""


def park(core: SessionCore, drop_gradients: bool = False) -> Generator[ChainStep, Any, Parked]:
    """Write the whole session to disk and end it: devices and memory are free, and `rb.attach(name)` brings it back.

    Kept are weights, optimizer, schedulers, random states, step, version, history, branches, snapshots made by hand,
    the place in the data, options, trackers, the record, and a trainer with what waits in it. Not kept: what `undo()`
    would go back to, what was loaded or redefined on the ranks by hand, and the last rollouts.

    Args:
        drop_gradients: let go of gradients that wait for `optim_step()`; else they are a reason not to park.
    """
    core.need_idle("parked", park.__name__)
    parked = yield from _written(core, drop_gradients)
    core.close()
    return parked


def bring_back(name: str, wanted: Callable[[Mapping[str, Any]], None] = lambda config: None) -> SessionCore:
    """Build a parked session again and bring its state back; where that fails nothing runs, and it stays parked.

    Args:
        name: of the session, see `registry.parked`.
        wanted: is given the session's options before anything is started; it may raise.
    """
    folder = registry.parked_folder(name)
    state = _read(name, folder)
    wanted(state["config"])
    core = SessionCore.start(
        _options(name, folder, state["config"]), name, None, checkpoints.begin_steps, state["park"]
    )
    try:
        core.run("attach", _back_steps(core, folder, state)).blocking_result()
    except BaseException:
        core.close()
        raise
    registry.forget_parked(name)
    return core


# -- to disk


def _written(core: SessionCore, drop_gradients: bool) -> Steps:
    """Write all of it; returns where it is, and what could not be kept."""
    said = [f"{name}: {what}" for name, what in (yield from healing.heal(core)).engines.items()]
    held = yield core.ask_ranks("held_beside", what="park")
    if held["gradients"] and not drop_gradients:
        raise StateError(
            f"session {core.name!r} cannot be parked: gradients wait for a step, and no file keeps them. "
            "session.optim_step() or session.zero_grad() first, or park it with drop_gradients=True "
            f"(`rlbench park {core.name} --drop-gradients`)"
        )
    said += ["gradients that waited for optim_step()"] if held["gradients"] else []
    removed = _made_room(core.name)
    with _aside(core.name) as (aside, final):
        yield checkpoints.start_save(core, str(aside / POLICY))
        policy = _only(aside / POLICY)
        if held["trainer"] is not None:
            (aside / SPEC).touch(mode=0o600)
            (aside / SPEC).write_bytes(held["trainer"].pop("spec"))
            yield core.train.call_all("write_snapshot", str(aside / TRAINER), str(policy), True, what="park")
        state = core.link.state(*KEPT)
        state["records"] = list(state["records"])
        state["snapshots"] = _kept_snapshots(core, aside, state["snapshots"])
        about = _about(core, state, said)
        with folders.writing(aside):
            _copy_beside(core.name, aside)
            registry.write_json(aside / STATE, state | {"made": held["trainer"]})  # its user's alone: trackers' options
            about["bytes"] = size_of(aside)
            registry.write_json(aside / registry.ABOUT, about)
        _need_room(core.name, about["bytes"])
        core.link.apply()  # refused to a driver that was replaced meanwhile
        folders.publish(aside, final, {"kind": KIND, "time": about["time"]}, latest=False)
    return Parked(core.name, str(final), about["bytes"], tuple(said), tuple(removed))


@contextlib.contextmanager
def _aside(name: str) -> Iterator[tuple[Path, Path]]:
    """Give a folder to write into and its later place; nothing is left of it where the block fails."""
    root = registry.parked_root(name)
    aside, final = folders.begin(root, registry.parked_folder(name).name, KIND)
    try:
        yield aside, final
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(OSError):  # an earlier one is still there
            root.rmdir()
        raise


def _kept_snapshots(core: SessionCore, aside: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the snapshots that were made by hand; returns their records. Those around steps are left."""
    kept = {id_: dict(fields) for id_, fields in known.items() if not fields["automatic"]}
    copy = _copier()
    for id_, fields in kept.items():
        source = Path(fields.pop("folder"))
        if not any(source.glob("rank-*")):
            raise CheckpointError(
                f"snapshot {fields['label']!r} is not on this machine: session.drop({id_!r}) it, or "
                "session.save(path) into a folder that all machines see"
            )
        before = size_of(aside / "snapshots")
        with folders.writing(aside):
            shutil.copytree(source, aside / "snapshots" / id_, copy_function=copy)
        fields["fresh"] = size_of(aside / "snapshots") - before
    return kept


def _copier() -> Callable[[str, str], None]:
    """Return what copies files: one that several snapshots share is one again, one on this disk is shared."""
    first: dict[tuple[int, int], str] = {}

    def copy(source: str, target: str) -> None:
        status = os.stat(source)
        known = first.setdefault((status.st_dev, status.st_ino), target)
        try:
            os.link(source if known == target else known, target)
        except OSError:  # on another disk, or in memory
            shutil.copy2(source, target)

    return copy


def _copy_beside(name: str, aside: Path) -> None:
    """Copy what the session keeps beside its snapshots; the record grows, so it is no link."""
    for part in BESIDE:
        if (source := registry.snapshot_folder(name) / part).is_dir():
            shutil.copytree(source, aside / part)


def _about(core: SessionCore, state: Mapping[str, Any], said: list[str]) -> dict[str, Any]:
    place = {key: state[key] for key in ("step", "version", "branch")}
    return {"model": core.options.model, **place, "time": time.time(), "bytes": 0, "lost": said}


def _only(folder: Path) -> Path:
    return folders.find(folder, checkpoints.KIND)


def size_of(folder: Path) -> int:
    """Return the bytes of a folder's files, those under several names once."""
    files = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return sum({(file.st_dev, file.st_ino): file.st_size for file in files}.values())


# -- how much is kept


def budget() -> tuple[float, float]:
    """Return how many bytes all parked sessions may take, and how many seconds one is kept."""
    gigabytes = float(os.environ.get("RLBENCH_PARK_GB", BUDGET_GB))
    return gigabytes * folders.GB, float(os.environ.get("RLBENCH_PARK_DAYS", KEPT_DAYS)) * 86400


def _made_room(name: str) -> list[str]:
    """Remove parked sessions that are past their age; returns their names. Refuse where the others take all room."""
    oldest = time.time() - budget()[1]
    past = [one["name"] for one in registry.parked_sessions() if one.get("time", oldest) < oldest]
    for one in past:
        registry.forget_parked(one)
    _need_room(name, 0)
    return past


def _need_room(name: str, nbytes: int) -> None:
    others = [one for one in registry.parked_sessions() if one["name"] != name]
    taken, most = sum(int(one.get("bytes", 0)) for one in others), budget()[0]
    if taken + nbytes > most:
        needs = f", and this one takes {format_bytes(nbytes)}" if nbytes else ""
        raise CheckpointError(
            f"session {name!r} cannot be parked: {len(others)} parked sessions take {format_bytes(taken)} of "
            f"{format_bytes(int(most))}{needs}. `rlbench park --drop NAME` forgets one, RLBENCH_PARK_GB allows more"
        )


# -- and back


def _read(name: str, folder: Path) -> dict[str, Any]:
    """Return what the monitor knew, of a session whose files are as written; SessionError says which is not."""
    manifest = folders.manifest_of(folder, KIND)
    wrong = f"{folders.MANIFEST} cannot be read" if manifest is None else folders.damage(folder, manifest)
    if wrong:
        raise SessionError(
            f"parked session {name!r} is damaged: {wrong}, in {folder}. It stays parked: put that file back, or go on "
            f"from its weights and optimizer alone, if they are whole, with rb.Session.load({str(folder / POLICY)!r}); "
            f"`rlbench park --drop {name}` forgets it"
        )
    return dict(json.loads((folder / STATE).read_text()))


def _options(name: str, folder: Path, config: Mapping[str, Any]) -> SessionOptions:
    """Return the options of a parked session, its models where they lie now; SessionError where one is gone."""
    options = SessionOptions.from_json(config)
    if options.model in NAMES:  # made again where the cache was emptied
        path = model_at(options.model)
        options = replace(
            options, path=path, reference=path if options.reference == options.path else options.reference
        )
    for place in (options.path, options.reference, *options.teachers.values()):
        if place is not None and Path(place).is_absolute() and not Path(place).is_dir():
            raise SessionError(
                f"parked session {name!r} cannot be brought back: its model is not at {place} any more. It stays "
                f"parked: put the folder back, or rb.Session.load({str(folder / POLICY)!r}, model=…) with its new place"
            )
    return options


def _back_steps(core: SessionCore, folder: Path, state: Mapping[str, Any]) -> Steps:
    """Bring a session just built to where the parked one stood; the replicas follow, proven."""
    start = snapshots.folder_start(core, disk=True)
    there = {i: {**fields, "folder": f"{start}{i}", "disk": True} for i, fields in state["snapshots"].items()}
    own = registry.snapshot_folder(core.name)
    for source in [*folder.glob("snapshots/*"), *(folder / part for part in BESIDE if (folder / part).is_dir())]:
        copy = shutil.copy2 if source.name in BESIDE else _copier()
        shutil.copytree(source, own / source.name, copy_function=copy, dirs_exist_ok=True)
    kept = {key: value for key, value in state.items() if key in KEPT and key not in ("config", "reference", "setup")}
    yield from reference_steps(core, state["reference"])
    core.link.set(**kept | {"snapshots": there})
    core.evaluations.read(_only(folder / POLICY), state["evaluations"])
    yield from _adapters_back(core, there)
    yield from set_up_steps(core, state["setup"], "attach")
    if state["made"] is None:
        yield core.train.call_all("load_checkpoint", str(_only(folder / POLICY)), what="attach", track=True)
    else:
        yield from _trainer_back(core, folder, state["made"])
    core.train.publish_state()
    if core.samples:
        yield core.synced(state["version"])
    yield from step_copies.after_step_steps(core)


def _adapters_back(core: SessionCore, there: Mapping[str, Mapping[str, Any]]) -> Steps:
    """Give replicas that hold adapters those of the branches that were left."""
    if not core.samples or not core.inference.info.get("adapters"):
        return
    left = core.link.state("branches", "branch")
    for branch, number in core.adapters.items():
        end = there.get(left["branches"].get(branch, ""))
        if end is not None and branch != left["branch"]:
            yield core.ask_ranks("read_snapshot", end["folder"], end["setup"], what="attach")
            yield sync_weights(core.train, core.inference, fixed(int(end["version"]), number))


def _trainer_back(core: SessionCore, folder: Path, made: Mapping[str, Any]) -> Steps:
    """Make the trainer again and bring it to where it was, the policy with it."""
    spec = (folder / SPEC).read_bytes()
    yield core.ask_ranks("make_trainer", made["method"], spec, made["id"], what="attach", track=True)
    found = yield core.ask_ranks("read_snapshot", str(folder / TRAINER), what="attach", track=True)
    if found["trainer"]["left"] is not None:
        raise CheckpointError(
            f"the trainer of parked session {core.name!r} cannot be brought back: {found['trainer']['left']}"
        )

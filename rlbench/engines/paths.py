"""Is this a model? Checked on the driver, before a worker is started for it."""

from __future__ import annotations

import re
from pathlib import Path

from rlbench.errors import BuildError, CheckpointError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def check_model_path(path: str) -> str:
    """Return the folder (absolute) or hub id of a model.

    Raises:
        BuildError: no such folder, a folder without config.json, or neither a folder nor a hub id.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise BuildError(
                f"{folder} holds no config.json, so it is not a model: give the folder of save_pretrained()"
            )
        return str(folder.resolve())
    if folder.exists():
        raise BuildError(f"{folder} is a file: give the folder of the model")
    if not HUB_ID.fullmatch(path) or path.startswith((".", "/", "~")):
        raise BuildError(
            f"no model folder {path!r}: check the path, or give a hub id like 'Qwen/Qwen2.5-0.5B-Instruct'"
        )
    return path


def new_folder(path: str | Path, verb: str) -> Path:
    """The absolute path of a folder that `verb` may write; CheckpointError where something is there already."""
    place = Path(path).expanduser().resolve()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise CheckpointError(f"{verb}: {place} is there already and not empty: choose another path, or remove it")
    return place

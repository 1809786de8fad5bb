"""Is this a model? Checked on the driver, before a worker is started for it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from rlbench.errors import BuildError, CheckpointError, nearest

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_LIKE = "a hub id like 'Qwen/Qwen2.5-0.5B-Instruct'"
HUB_LIMIT_S = 10.0
"""How long the hub may take to say whether it has a model."""


def model_name(model: Any, taker: str) -> str:
    """Return the folder, hub id or embedded name that `taker` was given; an object in its place is refused, with what
    would take it as far as that can be told."""
    if isinstance(model, str | os.PathLike) and str(model):
        return str(model)
    kind, mend = type(model).__name__ if str(model) else "an empty text", ""
    if hasattr(model, "named_parameters"):
        mend = f": give {taker} the folder of model.save_pretrained(folder), or rb.TrainEngine the module, made on meta"
    elif hasattr(model, "convert_tokens_to_ids"):
        mend = f": a tokenizer is no model; give what it came from, {str(getattr(model, 'name_or_path', ''))!r}"
    elif hasattr(model, "link") and isinstance(getattr(model, "name", None), str):  # a session's or an engine's handle
        mend = ", which runs already: use it as it is, or rb.attach(name) from another kernel"
    raise BuildError(f"{taker} takes the name of a model, a folder or {HUB_LIKE}; got {kind}{mend}")


def check_model_path(path: str) -> str:
    """Return the folder (absolute) or hub id of a model; refuse what is none, or is not served."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise BuildError(f"{folder} holds no config.json, so it is no model: give that of save_pretrained()")
        return str(folder.resolve())
    if folder.exists():
        raise BuildError(f"{folder} is a file: give the folder of the model")
    if not HUB_ID.fullmatch(path) or path.startswith((".", "/", "~")):
        raise BuildError(f"no model folder {path!r}{_like(folder)}: check the path, or give {HUB_LIKE}")
    _need_served(path, folder)
    return path


def new_folder(path: str | Path, verb: str) -> Path:
    """Return the absolute path of a folder that `verb` may write; CheckpointError where something is there already."""
    place = Path(path).expanduser().resolve()
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise CheckpointError(f"{verb}: {place} is there already and not empty: choose another path, or remove it")
    return place


def _need_served(hub_id: str, folder: Path) -> None:
    """Refuse a hub id of no model now, before workers spend half a minute on it; a mistyped folder looks like one."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(hub_id, "config.json"), str):
        return
    try:
        HfApi().model_info(hub_id, timeout=HUB_LIMIT_S)
    except Exception as error:  # no such model, no access, no network: each has its own class, of several packages
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BuildError(
            f"no model {hub_id!r}: there is no such folder here{_like(folder)}, and neither the hub nor its cache "
            f"serves it ({reason})"
        ) from error


def _like(folder: Path) -> str:
    """Return the names beside a folder that is not there that look like its own."""
    from rlbench.tiny.cache import NAMES

    beside = [each.name for each in folder.parent.iterdir() if each.is_dir()] if folder.parent.is_dir() else []
    return nearest(folder.name, [*beside, *(NAMES if str(folder.parent) == "." else ())])

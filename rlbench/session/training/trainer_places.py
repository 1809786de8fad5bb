"""Where what a trainer's options name lies: found from where the user stands, as the ranks may run in another folder.
What is missing is refused, with the place that was looked for, before a rank hears of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbench.errors import BuildError
from rlbench.options import OptionError
from rlbench.session.core import SessionCore
from rlbench.session.options import model_at
from rlbench.trainers.options.run_config import DEFAULTS

if TYPE_CHECKING:
    from rlbench.trainers.options.specs import TrainerSpec

FOLDERS = ("ckpt_path", "save_path", "log_dir", "use_tensorboard")
"""Options that name a folder to write to."""
SERVICE = ("http://", "https://")


def here(place: str | Path) -> str:
    """Return the absolute path of what is named relative to this process's folder, or to the user's (`~`)."""
    return str(Path(place).expanduser().absolute())


def model_here(option: str, named: str | Path) -> str:
    """Return the folder (absolute) or hub id of the model that an option names."""
    from rlbench.trainers.models.policy_module import config_of

    try:
        found = model_at(str(named))
        if not Path(found).is_dir():
            config_of(found)  # the hub has it, or its cache
    except BuildError as error:
        raise OptionError(f"{option}={str(named)!r}: there is no folder {here(named)} of a model ({error}).") from error
    return found


def scorer_here(option: str, named: Any, models: bool = True) -> Any:
    """Return what scores, one or several: a file `*.py` or (where `models`) a reward model's folder by its absolute
    path, a function or the address of a service as it is."""
    if isinstance(named, list | tuple):
        return [scorer_here(option, one, models) for one in named]
    if not isinstance(named, str | Path) or str(named).startswith(SERVICE):
        return named
    place, is_file = Path(here(named)), str(named).endswith(".py")
    if not is_file and not models:
        return named
    if not (place.is_file() if is_file else place.is_dir()):
        kind = "file" if is_file else "folder"
        raise OptionError(f"{option}={str(named)!r}: there is no {kind} {place}.")
    return str(place) if is_file else model_here(option, named)


def options_here(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a trainer, the folders it writes to (given or not) and the services among them found."""
    return _with_services(folders_here(options, *FOLDERS))


def folders_here(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return options of a trainer, those that name folders (given or not) found."""
    folders = {name: here(place) for name in names if (place := options.get(name, DEFAULTS[name]))}
    return {**options, **folders}


def from_here(spec: TrainerSpec) -> TrainerSpec:
    """Return the description of a trainer as the ranks need it: whatever it names found from here."""
    models: dict[str, Any] = {
        name: model_here(name, given)
        for name in ("critic", "reference")
        if isinstance(given := getattr(spec, name), str | Path)
    }
    return replace(
        spec,
        **models,
        reward=scorer_here("reward", spec.reward),
        options=options_here(spec.options),
        arguments=_with_services(spec.arguments),
    )


def _with_services(given: Mapping[str, Any]) -> dict[str, Any]:
    name = "remote_rm_url"
    return {**given, name: scorer_here(name, given[name], models=False)} if given.get(name) else dict(given)


def reference_here(core: SessionCore, wanted: str | bool, any_model: bool) -> Any:
    """Return the reference policy of a trainer: the session's own, where it is of the model that is `wanted` (True: the
    session's model), or will do whatever it is of."""
    from rlbench.trainers.options.specs import SessionEngine

    if not wanted or core.reference is None or not core.reference.built:
        return wanted
    path = core.options.path if wanted is True else model_here("reference", wanted)
    return SessionEngine("reference") if any_model or path == core.options.reference else wanted

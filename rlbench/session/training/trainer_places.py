"""Where what a trainer's options name lies: found from where the user stands, as the ranks may run in another folder.

Relative names and `~` are the kernel's (of `rlbench train`: the command's, not the config file's). What is missing is
said before a rank hears of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbench.engines.paths import check_model_path
from rlbench.errors import BuildError
from rlbench.options import OptionError
from rlbench.session.options import resolve_model
from rlbench.trainers.options.run_config import DEFAULTS

if TYPE_CHECKING:
    from rlbench.trainers.ppo.building import TrainerSpec

FOLDERS = ("ckpt_path", "save_path", "log_dir", "use_tensorboard")
"""Options that name a folder to write to."""
SERVICE = ("http://", "https://")


def here(place: str | Path) -> str:
    """The absolute path of what is named relative to this process's folder, or to the user's (`~`)."""
    return str(Path(place).expanduser().absolute())


def model_here(option: str, named: str | Path) -> str:
    """The folder (absolute) or hub id of the model that an option names.

    Raises:
        OptionError: there is neither; names the folder that was looked for.
    """
    from rlbench.trainers.models.policy_module import config_of

    folder, asked = Path(here(named)), resolve_model(str(named))
    try:
        found = check_model_path(asked)
        if not Path(found).is_dir():
            config_of(found)  # the hub has it, or its cache
    except BuildError as error:
        raise OptionError(f"{option}={str(named)!r}: there is no folder {folder} of a model ({error}).") from error
    return found


def folder_here(option: str, named: str | Path) -> str:
    """The absolute folder of a reward model.

    Raises:
        OptionError: there is none; names the folder that was looked for.
    """
    if not Path(here(named)).is_dir():
        raise OptionError(f"{option}={str(named)!r}: there is no folder {here(named)}.")
    return model_here(option, named)


def service_here(option: str, named: str) -> str:
    """The address of a service as it is, a file `*.py` by its absolute path.

    Raises:
        OptionError: there is no such file.
    """
    if not named.endswith(".py") or named.startswith(SERVICE):
        return named
    if not Path(here(named)).is_file():
        raise OptionError(f"{option}={named!r}: there is no file {here(named)}.")
    return here(named)


def reward_here(reward: Any) -> Any:
    """What scores, as `session.trainer` takes it, with its folders and files found.

    Raises:
        OptionError: one of them is not there.
    """
    if isinstance(reward, list | tuple):
        return [reward_here(one) for one in reward]
    if isinstance(reward, Path) or (isinstance(reward, str) and not reward.startswith(SERVICE)):
        named = str(reward)
        return service_here("reward", named) if named.endswith(".py") else folder_here("reward", named)
    return reward


def services_here(option: str, named: Any) -> Any:
    """One service or several."""
    if isinstance(named, list | tuple):
        return [service_here(option, one) for one in named]
    return service_here(option, named) if isinstance(named, str) else named


def options_here(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a trainer, the folders it writes to (given or not) and the services among them found."""
    found = dict(options)
    for name in FOLDERS:
        if place := found.get(name, DEFAULTS[name]):
            found[name] = here(place)
    return _with_services(found)


def from_here(spec: TrainerSpec) -> TrainerSpec:
    """The description of a trainer as the ranks need it: whatever it names found from here.

    Raises:
        OptionError: what is named is not there.
    """
    models: dict[str, Any] = {
        name: model_here(name, given)
        for name in ("critic", "reference")
        if isinstance(given := getattr(spec, name), str | Path)
    }
    return replace(
        spec,
        **models,
        reward=reward_here(spec.reward),
        options=options_here(spec.options),
        arguments=_with_services(spec.arguments),
    )


def _with_services(given: Mapping[str, Any]) -> dict[str, Any]:
    name = "remote_rm_url"
    return {**given, name: services_here(name, given[name])} if given.get(name) else dict(given)

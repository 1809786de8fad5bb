"""`use_ms`: the models of a run come from ModelScope, by its own client and into its cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rlbench.errors import BuildError
from rlbench.options import OptionError
from rlbench.tiny.cache import NAMES
from rlbench.trainers.options.run_config import RunConfig


def fetched(config: RunConfig) -> RunConfig:
    """Return the run with, where it has `use_ms`, folders in the place of all models that are named by an id; those
    that ModelScope's cache lacks are fetched.

    Raises:
        OptionError: where its client is not installed.
        BuildError: for a model that it cannot bring.
    """
    if not config.run.use_ms:
        return config
    named: dict[str, Any] = {
        option: value
        for option in ("pretrain", "teacher", "critic_pretrain", "reward_pretrain")
        if isinstance(value := config.value(option), str | tuple)
    }
    folders: dict[str, Any] = {
        option: tuple(map(_folder, value)) if isinstance(value, tuple) else _folder(value)
        for option, value in named.items()
    }
    of_strategy: dict[str, Any] = {option: folders.pop(option) for option in ("critic_pretrain",) if option in folders}
    return replace(
        config,
        run=replace(config.run, **folders),
        strategy=replace(config.strategy, **of_strategy),
        given={**config.given, **{option: to for option, to in (folders | of_strategy).items() if to != named[option]}},
    )


def _folder(model: str) -> str:
    """Return the folder of a model; one that is here, and an embedded one, are returned as they are."""
    if model in NAMES or Path(model).expanduser().exists():
        return model
    try:
        from modelscope import snapshot_download  # type: ignore[import-not-found]
    except ImportError as missing:
        raise OptionError(
            f"use_ms needs ModelScope's client, which is not installed ({missing}): pip install modelscope."
        ) from missing
    try:
        return str(snapshot_download(model))
    except Exception as error:  # no such model, no network: classes of several packages
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BuildError(f"use_ms: ModelScope brings no model {model!r} ({reason})") from error

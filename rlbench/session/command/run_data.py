"""What a run's options name as data and as rewards: prompts, texts, functions."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlbench.data import Mixture, PromptSet, PromptStream, load, mix
from rlbench.engines.paths import check_model_path
from rlbench.session.options import resolve_model
from rlbench.session.training.trainer_places import folder_here
from rlbench.strategies.options.config import OptionError
from rlbench.tiny import tasks
from rlbench.trainers.experience.samples import REFERENCE
from rlbench.trainers.options.run_config import RunConfig

TINY = "tiny"
TINY_PROMPTS = 8192
"""Prompts of the built-in task that a run draws from."""
TINY_SPLITS = {"train": "train", "test": "eval", "eval": "eval"}
"""What its splits may be called."""


def prompts_of(config: RunConfig) -> PromptStream | Mixture:
    """The prompts a run trains on, with their place; several sources are mixed.

    Raises:
        OptionError: none are named. DataError: a source that cannot be read.
    """
    run = config.run
    if not run.sources:
        raise OptionError("prompt_data: which prompts? name a file, a folder, a hub id, or tiny.")
    if len(set(run.sources)) < len(run.sources):
        raise OptionError(f"prompt_data={run.prompt_data!r}: a source stands there twice; name it once.")
    sets = [_read(config, source, run.prompt_split, run.max_samples) for source in run.sources]
    if len(sets) == 1:
        return sets[0].stream(seed=config.strategy.seed)
    return mix(dict(zip(run.sources, sets, strict=True)), run.prompt_data_probs or None, seed=config.strategy.seed)


def eval_prompts_of(config: RunConfig) -> PromptSet | None:
    """The prompts a run is evaluated on; None where none are named."""
    run = config.run
    if run.eval_data is None:
        return None
    return _read(config, run.eval_data, run.eval_split, run.max_eval_samples)


def texts_of(config: RunConfig) -> PromptSet | None:
    """The texts of the language loss (`ptx_coef`), by `input_key`; None where none are named."""
    source = config.strategy.pretrain_data
    if source is None:
        return None
    return load(source, prompt=config.run.input_key, label=None, split=_split_in(source, "train"))


def _read(config: RunConfig, source: str, split: str, limit: int) -> PromptSet:
    run = config.run
    if source == TINY:
        if split not in TINY_SPLITS:
            raise OptionError(f"the built-in task has no split {split!r}: it has {', '.join(TINY_SPLITS)}.")
        count = min(limit, TINY_PROMPTS)
        return PromptSet.of(tasks.prompts(count, split=TINY_SPLITS[split], seed=config.strategy.seed), TINY)
    if run.input_template is not None and "input_key" in config.given and config.strategy.pretrain_data is None:
        raise OptionError(
            "input_key has no effect with input_template, which makes the prompt of a row: give one of them."
        )
    found = load(
        source,
        prompt="prompt" if run.input_template is not None else run.input_key,
        label=run.label_key,
        split=_split_in(source, split),
        system=run.system_prompt,
        template=run.input_template,
        chat=run.apply_chat_template,
        limit=limit,
        max_prompt_tokens=config.ppo.prompt_max_len,
        tokenizer=model_at(config.run.pretrain),
    )
    return _with_references(found, config, source)


def _with_references(prompts: PromptSet, config: RunConfig, source: str) -> PromptSet:
    """The reference answers where `reward_fn` finds them: without them it is given the labels."""
    key = config.run.reference_key
    if key in (REFERENCE, config.run.label_key):
        return prompts
    if not any(key in prompt.meta for prompt in prompts):
        raise OptionError(f"reference_key={key!r}: {source} has no such column.")
    moved = [replace(p, meta={**p.meta, REFERENCE: p.meta[key]}) if key in p.meta else p for p in prompts]
    return replace(prompts, prompts=tuple(moved))


def _split_in(source: str, split: str) -> str | None:
    """Files are one split, and so is one that was saved alone."""
    place = Path(source).expanduser()
    alone = place.is_file() or any(mark in source for mark in "*?[") or (place / "state.json").is_file()
    return None if alone else split


def model_at(named: str) -> str:
    """The folder or hub id of a model, found from here: the ranks may run in another folder.

    Raises:
        BuildError: it can be neither.
    """
    return check_model_path(resolve_model(named))


def reward_of(config: RunConfig) -> Any:
    """What scores: a function, the folders of reward models, or several.

    Raises:
        OptionError: nothing is named, or what is named is not there.
    """
    run = config.run
    found: list[Any] = [folder_here("reward_pretrain", named) for named in run.reward_pretrain]
    if run.reward is not None:
        found.append(_reward(run.reward))
    if not found and not config.strategy.remote_rm_url:
        raise OptionError(
            "reward: what scores a response? module:function, file.py:function, math, or tiny; or reward_pretrain, or "
            "remote_rm_url."
        )
    return found[0] if len(found) == 1 else found or None


def _reward(named: str) -> Any:
    if named == TINY:
        return tasks.reward
    if named == "math":
        from rlbench import rewards

        return rewards.math()
    return imported(named, "reward")


def imported(named: str, option: str) -> Callable[..., Any]:
    """The function that `module:function` or `file.py:function` names.

    Raises:
        OptionError: there is none.
    """
    place, _, name = named.rpartition(":")
    if not place or not name:
        raise OptionError(f"{option}={named!r}: wanted module:function or file.py:function.")
    try:
        module = _file(Path(place).expanduser()) if place.endswith(".py") else importlib.import_module(place)
        found = getattr(module, name)
    except (ImportError, OSError, AttributeError) as error:
        raise OptionError(f"{option}={named!r} is not there ({error}).") from error
    if not callable(found):
        raise OptionError(f"{option}={named!r} is a {type(found).__name__}, no function.")
    return found  # type: ignore[no-any-return]


def _file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise OSError(f"no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # a function of it is sent to the ranks by value, and asks for its module
    spec.loader.exec_module(module)
    return module

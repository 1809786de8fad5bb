"""What a run's options name as data and as rewards: prompts, texts, functions."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlbench import rewards
from rlbench.data import Mixture, PromptSet, PromptStream, TrainBatch, as_prompts, demonstrations, load, mix
from rlbench.data.prompts.sources import open_source
from rlbench.data.texts.demonstrations import is_demonstration
from rlbench.errors import nearest
from rlbench.session.options import model_at
from rlbench.session.training.text_data import as_texts
from rlbench.session.training.trainer_places import scorer_here
from rlbench.strategies.options.config import OptionError
from rlbench.tiny import tasks, vision
from rlbench.trainers.experience.samples import REFERENCE
from rlbench.trainers.options.methods import DISTILL, TEXTS
from rlbench.trainers.options.run_config import RunConfig

TINY, VISION = "tiny", "tiny-vision"
"""The built-in tasks."""
TINY_PROMPTS = 8192
"""Prompts of the built-in task that a run draws from."""
TINY_SPLITS = {"train": "train", "test": "eval", "eval": "eval"}
"""What its splits may be called."""


def prompts_of(config: RunConfig) -> PromptStream | Mixture:
    """Return the prompts a run trains on, with their place; several sources are mixed."""
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
    """Return the prompts a run is evaluated on; None where none are named."""
    run = config.run
    if run.eval_data is None:
        return None
    return _read(config, run.eval_data, run.eval_split, run.max_eval_samples)


def data_of(config: RunConfig) -> TrainBatch:
    """Return the texts that a run trains on."""
    return _texts(config, str(config.run.data), config.run.prompt_split, config.run.max_samples)


def eval_data_of(config: RunConfig) -> TrainBatch | None:
    """Return the texts that a run is evaluated on; None where none are named."""
    run = config.run
    return None if run.eval_data is None else _texts(config, run.eval_data, run.eval_split, run.max_eval_samples)


def _texts(config: RunConfig, source: str, split: str, limit: int) -> TrainBatch:
    run = config.run
    options: dict[str, Any] = {"chat": run.apply_chat_template, "system": run.system_prompt}
    options |= _chat_options(config)
    options |= {"limit": limit, "max_length": run.max_length}
    if source == TINY:
        rows = _tiny_rows(_tiny(config, split, limit), judged=TEXTS[config.method] == "labelled")
        return as_texts(config.method, rows, model_at(run.pretrain), **options)
    place, configuration = _place_of(source)
    options |= {"config": configuration, "split": _split_in(place, split)}
    return as_texts(config.method, place, model_at(run.pretrain), **options)


def _chat_options(config: RunConfig) -> dict[str, Any]:
    return {"chat_template_kwargs": config.ppo.template, "tools": config.ppo.tools}


def _tiny_rows(prompts: list[Any], judged: bool) -> list[dict[str, Any]]:
    """The built-in task with its right answers, and with them read backwards; as rows of their own where `judged`."""
    asked = [(prompt, tasks.answer(prompt)) for prompt in prompts]
    rows = [{"prompt": p, "completion": a, "chosen": a, "rejected": a[::-1]} for p, a in asked if a != a[::-1]]
    if not judged:
        return rows
    answers = [(row["prompt"], row[kind], kind == "chosen") for row in rows for kind in ("chosen", "rejected")]
    return [{"prompt": prompt, "completion": said, "label": good} for prompt, said, good in answers]


def loss_of(config: RunConfig) -> Any:
    """Return the loss that a run names; None: the method's own."""
    named = config.run.loss
    if named is None or ":" not in named:
        return None if named is None else loss_value(named)
    return imported(named, "loss")


def texts_of(config: RunConfig) -> PromptSet | Mixture | TrainBatch | None:
    """Return the texts of the language loss (`ptx_coef`), None where none are named: demonstrations where the rows are
    some, else whole texts, by `input_key`; several sources mixed."""
    if config.strategy.pretrain_data is None:
        return None
    sources = [part.strip() for part in config.strategy.pretrain_data.split(",")]
    read = [_pretraining(config, source, alone=len(sources) == 1) for source in sources]
    if len(read) == 1:
        return read[0]
    shares = config.run.pretrain_data_probs or None
    return mix(dict(zip(sources, read, strict=True)), shares, seed=config.strategy.seed)


def _pretraining(config: RunConfig, source: str, alone: bool) -> Any:
    split = _split_in(source, config.run.pretrain_split)
    if is_demonstration(next(iter(open_source(source, split, None, None)[1]), None)):
        if not alone:
            raise OptionError(
                f"pretrain_data: {source} holds demonstrations, and several sources are mixed where they hold plain "
                "texts (a column of input_key): write them into one file, or name one."
            )
        return demonstrations(source, model_at(config.run.pretrain), split=split)
    return load(source, prompt=config.run.input_key, label=None, split=split)


def _read(config: RunConfig, source: str, split: str, limit: int) -> PromptSet:
    run = config.run
    if source in (TINY, VISION):
        return PromptSet.of(_tiny(config, split, limit, source), source)
    if run.input_template is not None and "input_key" in config.given and config.strategy.pretrain_data is None:
        raise OptionError(
            "input_key has no effect with input_template, which makes the prompt of a row: give one of them."
        )
    place, configuration = _place_of(source)
    found = load(
        place,
        config=configuration,
        prompt="prompt" if run.input_template is not None else run.input_key,
        label=run.label_key,
        images=run.images_key,
        split=_split_in(place, split),
        system=run.system_prompt,
        template=run.input_template,
        chat=run.apply_chat_template,
        **_chat_options(config),
        limit=limit,
        max_prompt_tokens=config.ppo.prompt_max_len,
        tokenizer=model_at(run.pretrain),
    )
    key = run.reference_key
    if key in (REFERENCE, run.label_key):
        return found
    if not any(key in prompt.meta for prompt in found):
        raise OptionError(f"reference_key={key!r}: {source} has no such column.")
    # where `reward_fn` finds them: without them it is given the labels
    moved = [replace(p, meta={**p.meta, REFERENCE: p.meta[key]}) if key in p.meta else p for p in found]
    return replace(found, prompts=tuple(moved))


def _tiny(config: RunConfig, split: str, limit: int, task: str = TINY) -> list[Any]:
    """Prompts of a built-in task."""
    if split not in TINY_SPLITS:
        raise OptionError(f"the built-in task has no split {split!r}: it has {', '.join(TINY_SPLITS)}.")
    if task == VISION:
        most = vision.pictures(TINY_SPLITS[split])
        return as_prompts(vision.vision_prompts(min(limit, most), TINY_SPLITS[split], config.strategy.seed))
    return tasks.prompts(min(limit, TINY_PROMPTS), split=TINY_SPLITS[split], seed=config.strategy.seed)


def _place_of(source: str) -> tuple[str, str | None]:
    """Return a source without the configuration that may stand after a colon, and that."""
    place, _, configuration = source.partition(":")
    return (source, None) if not configuration or Path(source).expanduser().exists() else (place, configuration)


def _split_in(source: str, split: str) -> str | None:
    """Return the split to read; files are one, and so is one that was saved alone."""
    place = Path(source).expanduser()
    alone = place.is_file() or any(mark in source for mark in "*?[") or (place / "state.json").is_file()
    return None if alone else split


def reward_of(config: RunConfig) -> Any:
    """Return what scores: a function, the folders of reward models, or several; None: a service, or a teacher."""
    run = config.run
    found: list[Any] = scorer_here("reward_pretrain", list(run.reward_pretrain))
    if run.reward == TINY:
        found.append(tasks.reward)
    elif run.reward == VISION:
        found.append(vision.vision_reward)
    elif run.reward == "math":
        found.append(rewards.math())
    elif run.reward is not None:
        found.append(imported(run.reward, "reward"))
    if not found and not config.strategy.remote_rm_url and config.method != DISTILL:
        raise OptionError(
            "reward: what scores a response? module:function, file.py:function, math, or tiny; or reward_pretrain, or "
            "remote_rm_url."
        )
    return found[0] if len(found) == 1 else found or None


def loss_value(written: str) -> Any:
    """Return the loss that a text writes down as Python would, with plain values: `grpo`, `dpo(beta=0.2)`."""
    from rlbench.rl.losses import KNOWN

    try:
        call = ast.parse(written, mode="eval").body
        name, given = (call.func, call.keywords) if isinstance(call, ast.Call) and not call.args else (call, [])
        kind = KNOWN[name.id]  # type: ignore[attr-defined]
        return kind(**{str(one.arg): ast.literal_eval(one.value) for one in given})
    except (SyntaxError, AttributeError, KeyError, ValueError, TypeError) as error:
        raise OptionError(
            f"loss={written!r} is none ({error}){nearest(written.partition('(')[0], KNOWN)}: a name with plain values, "
            "dpo(beta=0.2), or module:name or file.py:name of one of your own."
        ) from error


def imported(named: str, option: str) -> Callable[..., Any]:
    """Return the function that `module:function` or `file.py:function` names."""
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

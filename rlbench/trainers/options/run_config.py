"""A whole run from its options: `rlbench train METHOD [FILE.yaml] [--option value …]`; importable without torch.

What counts, from the least: the defaults, the method, the file (flat YAML, one option a line), the command line.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlbench import options
from rlbench.data.prompts.chat import CHAT_OPTIONS
from rlbench.errors import nearest
from rlbench.flags import add_flags
from rlbench.options import OptionError, Options, effectless, options_in, read_yaml, refuse, typed
from rlbench.strategies.options.config import StrategyConfig, accumulation_steps, need_fsdp
from rlbench.trainers.options.methods import DISTILL, METHODS, TEXTS, check_of_method, our_names, with_method
from rlbench.trainers.options.ppo_config import PPOConfig
from rlbench.trainers.options.run_options import RunOptions
from rlbench.trainers.options.text_config import TextConfig
from rlbench.trainers.options.trainer_options import check_together, doubts

CLASSES: tuple[type[Options], ...] = (RunOptions, TextConfig, PPOConfig, StrategyConfig)
HOMES: Mapping[str, type[Options]] = {name: cls for cls in CLASSES for name in options_in(cls)}
"""The class of every option of a run."""
DEFAULTS: Mapping[str, Any] = {**options.defaults(*CLASSES), "fsdp": True}
"""The default of every option of a run; its ranks are a session's, which FSDP2 shards."""
SCORING = ("reward", "reward_pretrain", "remote_rm_url")
"""Options that say what scores a response."""


@dataclass(frozen=True)
class RunConfig:
    """Every option of a run by who reads it; `given`: those that method, file or command line set, by our names."""

    method: str
    run: RunOptions
    ppo: PPOConfig
    strategy: StrategyConfig
    texts: TextConfig
    given: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, method: str, file: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> RunConfig:
        """Read a method, a YAML file, and options that count over both; raises OptionError for what cannot be."""
        from_file = {} if file is None else our_names(read_yaml(file))
        written = {**from_file, **our_names(overrides or {})}
        named = {name: typed(HOMES[name], name, value) for name, value in written.items()}
        given = with_method(method, named, own_loss=named.get("loss") is not None)
        check_of_method(method, named, run=True)
        given |= _implied(method, given)
        made = cls(
            method,
            RunOptions(**_of(given, RunOptions)),
            PPOConfig(**_of(given, PPOConfig)),
            StrategyConfig(**{"fsdp": True, **_of(given, StrategyConfig)}),
            TextConfig(**_of(given, TextConfig)),
            given,
        )
        made._check()
        for text in made.doubts():
            warnings.warn(text, stacklevel=2)
        return made

    @property
    def trainer_options(self) -> dict[str, Any]:
        """What was set of the trainer's and the strategy's options, by name; texts are read before."""
        read = CHAT_OPTIONS if self.on_texts else ()
        held = (item for cls in CLASSES[1:] for item in _of(self.given, cls).items())
        return {name: value for name, value in held if name not in read}

    @property
    def on_texts(self) -> bool:
        """Whether the method trains on texts."""
        return self.method in TEXTS

    def value(self, name: str) -> Any:
        """Return the value of an option."""
        parts = {RunOptions: self.run, TextConfig: self.texts, PPOConfig: self.ppo, StrategyConfig: self.strategy}
        return getattr(parts[HOMES[name]], name)

    def overridden(self) -> list[str]:
        """Return the options that do not have their default."""
        return [name for name, held in DEFAULTS.items() if self.value(name) != held]

    def summary(self) -> str:
        """Write all options by section, each marked "(Overridden)" or "(Default)"."""
        return options.summary(f"RunConfig: {self.method}", self.value, *CLASSES, fsdp=True)

    def check_batches(self, world_size: int) -> None:
        """Refuse batches that so many ranks cannot share; texts are shared out as they come."""
        if self.on_texts:
            return
        accumulation_steps(self.strategy.train_batch_size, self.strategy.micro_train_batch_size, world_size)
        if self.ppo.rollout_batch_size % world_size:
            raise OptionError(
                f"rollout_batch_size={self.ppo.rollout_batch_size} cannot be shared out evenly over {world_size} "
                f"ranks: make it a multiple of {world_size}."
            )

    def doubts(self) -> list[str]:
        """Say which options were given that have no effect, or hardly the one that is meant."""
        critic = bool(self.strategy.critic_pretrain)
        if self.on_texts:
            return effectless(self.given, self.value, RunOptions)
        of_trainer = doubts(self.strategy, self.ppo, self.given, critic, self.run.enable_ema)
        return effectless(self.given, self.value, RunOptions) + of_trainer

    def _check(self) -> None:
        strategy = self.strategy
        need_fsdp(strategy)
        if not self.on_texts:
            check_together(strategy, self.ppo, bool(strategy.critic_pretrain))
        sized = "gpu_memory_utilization" in self.given and self.run.kv_cache_bytes is not None
        warms = self.run.lr_schedule == "constant" and "lr_warmup_ratio" in self.given
        sources, shares = (strategy.pretrain_data or "").split(","), self.run.pretrain_data_probs
        refuse(
            (
                shares and (len(shares) != len(sources) or not all(0 < share < math.inf for share in shares)),
                f"pretrain_data_probs={shares!r}: it is one number above 0 for each of the {len(sources)} sources of "
                "pretrain_data",
            ),
            (warms, "lr_warmup_ratio has no effect with lr_schedule='constant': leave one of them out"),
            (strategy.use_mp_opt and not strategy.bf16, "use_mp_opt has no effect with bf16=False: leave one out"),
            (
                self.ppo.ptx_coef and not strategy.pretrain_data,
                "ptx_coef has no effect without pretrain_data: give both",
            ),
            (sized, "gpu_memory_utilization has no effect with kv_cache_bytes: both size the engine, give one"),
        )
        if self.run.shards:
            self.check_batches(self.run.shards)


def parse(arguments: Sequence[str], prog: str = "rlbench train") -> RunConfig:
    """Read a command line, without the name of the program: the method, perhaps a file, and options."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} METHOD [FILE.yaml] [--option value ...]",
        allow_abbrev=False,
        description="Train a policy in a session of its own, from the first iteration to the last. A method is a set "
        "of options; those of the file count over it, those of the command line over both.",
    )
    parser.add_argument("method", metavar="METHOD", help=f"one of {', '.join(METHODS)}")
    parser.add_argument(
        "file",
        metavar="FILE.yaml",
        nargs="?",
        help="options as YAML, one a line: rollout_batch_size: 64; what they name is found from the folder you are in",
    )
    add_flags(parser, *CLASSES)
    found, rest = parser.parse_known_args(arguments)
    if rest:
        flags = [flag.removeprefix("--") for action in parser._actions for flag in action.option_strings]
        name = rest[0].removeprefix("--").partition("=")[0]
        raise OptionError(f"there is no option {rest[0]!r}{nearest(name, flags)}.")
    options = vars(found)
    return RunConfig.load(options.pop("method"), options.pop("file"), options)


def _implied(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what follows from what was given: the critic of GAE, and the built-in task of the built-in model."""
    found: dict[str, Any] = {}
    if given.get("advantage_estimator") == "gae" and given.get("critic_pretrain") is None:
        found["critic_pretrain"] = True  # the policy's own checkpoint
    scores = any(given.get(name) for name in SCORING) or None
    wanted = {
        "prompt_data": (given.get("prompt_data"), "which prompts?"),
        "reward": (scores, f"one of {', '.join(SCORING)} scores a response"),
    }
    if method in TEXTS:
        wanted = {"data": (given.get("data"), "which texts?")}
    if method == DISTILL:
        wanted["reward"] = (True, "")
        if given.get("teacher") is None:
            raise OptionError("teacher is missing: which policy is learned from?")
    if given.get("eval_steps", 0) > 0:
        wanted["eval_data"] = (given.get("eval_data"), "eval_steps has no effect without it")
    for name, (held, why) in wanted.items():
        if held is None:
            if given.get("pretrain", DEFAULTS["pretrain"]) != "tiny":
                raise OptionError(f"{name} is missing: {why}.")
            found[name] = "tiny"
    return found


def _of(given: Mapping[str, Any], cls: type[Options]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in options_in(cls)}

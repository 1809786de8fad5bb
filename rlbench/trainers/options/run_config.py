"""A whole run from its options: `rlbench train METHOD [FILE.yaml] [--option value …]`.

What counts, from the least: the defaults, the method (`methods.py`), the file, the command line. A file is flat YAML,
one option a line, with the names of `RunOptions`, `PPOConfig` and `StrategyConfig`:

    pretrain: /models/qwen
    prompt_data: prompts.jsonl
    reward: rewards.py:score
    rollout_batch_size: 64
    lr: 1e-6

Importable without torch.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlbench import options
from rlbench.errors import nearest
from rlbench.flags import add_flags
from rlbench.options import OptionError, Options, effectless, options_in, read_yaml, typed
from rlbench.strategies.options.config import StrategyConfig, accumulation_steps, need_fsdp
from rlbench.trainers.options.methods import METHODS, our_names, with_method
from rlbench.trainers.options.ppo_config import PPOConfig
from rlbench.trainers.options.run_options import RunOptions
from rlbench.trainers.options.trainer_options import TrainerOptions, doubts

CLASSES: tuple[type[Options], ...] = (RunOptions, PPOConfig, StrategyConfig)
HOMES: Mapping[str, type[Options]] = {name: cls for cls in CLASSES for name in options_in(cls)}
"""The class of every option of a run."""
DEFAULTS: Mapping[str, Any] = {**options.defaults(*CLASSES), "fsdp": True}
"""The default of every option of a run; its ranks are a session's, which FSDP2 shards."""
COMPARING = ("group_norm", "grpo", "rloo", "reinforce_baseline", "cpgd")
"""Estimators that compare the samples of a prompt."""
SCORING = ("reward", "reward_pretrain", "remote_rm_url")
"""Options that say what scores a response."""


@dataclass(frozen=True)
class RunConfig:
    """Every option of a run.

    Attributes:
        method: its name, one of `METHODS`.
        run, ppo, strategy: the options, by who reads them.
        given: those that the method, the file or the command line set, by our names.
    """

    method: str
    run: RunOptions
    ppo: PPOConfig
    strategy: StrategyConfig
    given: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, method: str, file: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> RunConfig:
        """From a method, a YAML file and what counts over both.

        Args:
            method: one of `METHODS`.
            file: flat YAML.
            overrides: by our names or the reference's.

        Raises:
            OptionError: an unknown method or option (with the nearest name), a value of another kind, options that
                contradict each other or cannot be honoured, a file that cannot be read.
        """
        from_file = {} if file is None else our_names(read_yaml(file))
        written = {**from_file, **our_names(overrides or {})}
        given = with_method(method, {name: typed(HOMES[name], name, value) for name, value in written.items()})
        given |= _filled(given)
        made = cls(
            method,
            RunOptions(**_of(given, RunOptions)),
            PPOConfig(**_of(given, PPOConfig)),
            StrategyConfig(**{"fsdp": True, **_of(given, StrategyConfig)}),
            given,
        )
        made._check()
        for text in made.doubts():
            warnings.warn(text, stacklevel=2)
        return made

    @property
    def trainer_options(self) -> dict[str, Any]:
        """What was set of the trainer's and the strategy's options, by name."""
        return {**_of(self.given, PPOConfig), **_of(self.given, StrategyConfig)}

    def value(self, name: str) -> Any:
        """Return the value of an option."""
        parts = {RunOptions: self.run, PPOConfig: self.ppo, StrategyConfig: self.strategy}
        return getattr(parts[HOMES[name]], name)

    def overridden(self) -> list[str]:
        """Return the options that do not have their default."""
        return [name for name, held in DEFAULTS.items() if self.value(name) != held]

    def summary(self) -> str:
        """Write all options by section, each marked "(Overridden)" or "(Default)"."""
        return options.summary(f"RunConfig: {self.method}", self.value, *CLASSES, fsdp=True)

    def check_batches(self, world_size: int) -> None:
        """Refuse batches that so many ranks cannot share.

        Raises:
            OptionError: with the numbers.
        """
        accumulation_steps(self.strategy.train_batch_size, self.strategy.micro_train_batch_size, world_size)
        if self.ppo.rollout_batch_size % world_size:
            raise OptionError(
                "rollout_batch_size must be divisible by world_size, and is not a multiple:\n"
                f"  rollout_batch_size:  {self.ppo.rollout_batch_size}\n"
                f"  world_size:          {world_size}\n"
                f"  Required: {self.ppo.rollout_batch_size} % {world_size} == 0; change one of them."
            )

    def doubts(self) -> list[str]:
        """Say which options were given that have no effect, or hardly the one that is meant."""
        trainer = TrainerOptions(self.strategy, self.ppo, given=self.given)
        of_trainer = doubts(trainer, bool(self.strategy.critic_pretrain), self.run.enable_ema)
        return effectless(self.given, self.value, RunOptions) + of_trainer

    def _check(self) -> None:
        strategy, estimator = self.strategy, self.strategy.advantage_estimator
        need_fsdp(strategy)
        if self.run.lr_schedule == "constant" and "lr_warmup_ratio" in self.given:
            raise OptionError("lr_warmup_ratio has no effect with lr_schedule='constant': leave one of them out.")
        if estimator in COMPARING and strategy.n < 2:
            raise OptionError(
                f"advantage_estimator={estimator!r} compares the samples of a prompt: n must be "
                f"greater than 1, and is {strategy.n}."
            )
        if strategy.use_mp_opt and not strategy.bf16:
            raise OptionError("use_mp_opt has no effect with bf16=False: a run holds its weights in bfloat16 then.")
        if strategy.use_kl_loss and self.ppo.kl_coef == 0:
            raise OptionError("use_kl_loss has no effect with kl_coef=0: give a weight above 0.")
        if strategy.use_kl_loss and strategy.kl_estimator == "k1":
            raise OptionError(
                "use_kl_loss with kl_estimator='k1': its gradient is zero in the mean, so that it would only add "
                "noise; use k2 or k3."
            )
        if self.ppo.ptx_coef > 0 and strategy.pretrain_data is None:
            raise OptionError(f"ptx_coef={self.ppo.ptx_coef:g} has no effect without pretrain_data; give both.")
        if "gpu_memory_utilization" in self.given and self.run.kv_cache_bytes is not None:
            raise OptionError(
                "gpu_memory_utilization has no effect with kv_cache_bytes: both size the engine; give one."
            )
        if self.run.shards:
            self.check_batches(self.run.shards)


def parse(arguments: Sequence[str], prog: str = "rlbench train") -> RunConfig:
    """A run from a command line: the method, perhaps a file, and options.

    Args:
        arguments: without the name of the program.
        prog: that name, for `--help` and usage.

    Raises:
        OptionError: as of `RunConfig.load`. SystemExit: `--help`, or no method.
    """
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


def _filled(given: Mapping[str, Any]) -> dict[str, Any]:
    """What follows from what was given: the critic of GAE, and the built-in task of the built-in model.

    Raises:
        OptionError: a critic that nothing asks for, or none where one is needed; prompts or rewards are missing.
    """
    estimator, critic = given["advantage_estimator"], given.get("critic_pretrain")
    pretrain = given.get("pretrain", DEFAULTS["pretrain"])
    found: dict[str, Any] = {}
    if estimator != "gae" and critic:
        raise OptionError(
            f"critic_pretrain={critic!r} has no effect with advantage_estimator={estimator!r}, which needs no critic: "
            "leave it out, or use gae."
        )
    if estimator == "gae" and critic is False:
        raise OptionError("critic_pretrain=False cannot be honoured: advantage_estimator='gae' needs a critic.")
    if estimator == "gae":
        found["critic_pretrain"] = critic or True  # True: the policy's own checkpoint
    tiny = "tiny" if pretrain == "tiny" else None
    if given.get("prompt_data") is None:
        found["prompt_data"] = tiny or _missing("prompt_data", "which prompts?")
    if not any(given.get(name) for name in SCORING):
        found["reward"] = tiny or _missing("reward", f"what scores a response? One of {', '.join(SCORING)}.")
    if given.get("eval_steps", 0) > 0 and given.get("eval_data") is None:
        found["eval_data"] = tiny or _missing("eval_data", "eval_steps has no effect without it.")
    return found


def _missing(name: str, why: str) -> Any:
    raise OptionError(f"{name} is missing: {why}")


def _of(given: Mapping[str, Any], cls: type[Options]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in options_in(cls)}

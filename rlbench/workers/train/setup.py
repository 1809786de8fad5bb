"""The component of a rank that trains in another way than it was built: optimizer, schedule and frozen parameters.

A setup is a plain dict: `optimizer` and `schedule` (each with the pickled function that makes it; where one is missing
it is as the rank was built) and `frozen` (names of parameters). The session's monitor has it, each snapshot and
checkpoint keeps it, and ranks that go back to one, or are built again, train by it before they read the state.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import cloudpickle
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rlbench.checkpoint.rank_state import optimizers_of
from rlbench.errors import EngineError, StateError, nearest
from rlbench.strategies.optim.gradients import numbers_of
from rlbench.strategies.optim.optimizer_set import OptimizerSet, parts_of
from rlbench.user_code import user_code
from rlbench.workers.train.config import FROZEN, OPTIMIZER, SCHEDULE
from rlbench.workers.train.optimizers import policy_optimizer
from rlbench.workers.train.parts import RankParts
from rlbench.workers.train.trainer import HeldTrainer

SCHEDULER = "lr_scheduler"
"""Where a policy's schedule is looked for when it steps."""
RATES = ("lr", "initial_lr")
Setup = Mapping[str, Any]


class TrainingSetup:
    """Collective verbs of a built rank; `trainer` holds the session's, which steps the optimizer that it was made
    with."""

    def __init__(self, parts: RankParts, trainer: HeldTrainer) -> None:
        self._parts, self._module, self._trainer = parts, parts.module, trainer
        self._now: Setup = {}
        self._trained = [name for name, parameter in self._module.named_parameters() if parameter.requires_grad]
        self._as_built = {name: vars(self._module).get(name) for name in (OPTIMIZER, SCHEDULER)}

    def set_up(self, setup: Setup) -> dict[str, Any]:
        """Train by `setup` from now on; where it is refused nothing changes. Returns the `optimizer` classes, the
        number of `trainable` parameters, and whether a `trainer` was dropped, whose optimizer this was."""
        if self._parts.policy.waiting:
            raise StateError(
                "gradients wait for a step, of what trains by the setup of now: session.optim_step() or "
                "session.zero_grad() first"
            )
        with self.becoming(setup) as dropped:
            pass
        return {**self.facts(), "trainer": dropped}

    def frozen_by(self, patterns: Sequence[str | re.Pattern[str]], frozen: bool) -> list[str]:
        """Return the names of all frozen parameters once those that `patterns` name are so, or no more."""
        before, wanted = set(self._now.get(FROZEN, ())), set[str]()
        for pattern in patterns:
            hits = {name for name in self._trained if _names(pattern, name)}
            if not hits:
                shown = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
                never = [n for n, _ in self._module.named_parameters() if n not in self._trained and _names(pattern, n)]
                why = (
                    f"the {len(never)} parameters that it names do not train in this session as it was built"
                    if never
                    else f"no parameter is called so{nearest(str(shown), self._trained)}"
                )
                raise EngineError(
                    f"{shown!r}: {why}. Patterns are names, their beginnings, with * and ?, or re.compile"
                )
            wanted |= hits
        after = before | wanted if frozen else before - wanted if patterns else set()
        if after.issuperset(self._trained):
            raise EngineError(f"that would freeze all {len(after)} parameters, and nothing would train.")
        return [name for name in self._trained if name in after]

    @contextmanager
    def becoming(self, setup: Setup | None) -> Iterator[bool]:
        """Train by `setup` inside (None: as now), and afterwards where nothing fails inside; else as before. Gives
        whether the session's trainer goes with the optimizer that it steps."""
        if setup is None or setup == self._now:
            yield False
            return
        self._parts.residency.need("weights", "optimizer", whole=False)
        new_optimizer = setup.get(OPTIMIZER) != self._now.get(OPTIMIZER)
        drops = new_optimizer and self._trainer.held_trainer() is not None
        module, old = self._module, policy_optimizer(self._module)
        held = {name: vars(module).get(name) for name in (OPTIMIZER, SCHEDULER)}
        rates = [(group, {key: group[key] for key in RATES if key in group}) for group in old.param_groups]
        grads = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
        try:
            self._parts.strategy.control.together("the training setup", lambda: self._become(setup, new_optimizer))
            yield drops
        except BaseException:
            _put(module, held)
            for group, kept in rates:
                group.pop("initial_lr", None)
                group.update(kept)
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(grads[name])
            raise
        if drops:
            self._trainer.drop_trainer()
        if new_optimizer:
            for part in parts_of(old):
                part.state.clear()
        self._now = dict(setup)

    def facts(self) -> dict[str, Any]:
        """Return what the engine's card says of it."""
        return {
            "optimizer": [type(one).__name__ for one in optimizers_of(self._module).values()],
            "trainable": numbers_of(p for p in self._module.parameters() if p.requires_grad),
        }

    def _become(self, setup: Setup, new_optimizer: bool) -> None:
        module = self._module
        frozen = set(setup.get(FROZEN, ()))
        if gone := frozen - set(self._trained):
            raise EngineError(f"{len(gone)} parameters that were frozen are none of this model's: {sorted(gone)[0]}")
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in self._trained)  # whatever is frozen by then, an optimizer is made alike
        if new_optimizer:
            by = setup.get(OPTIMIZER)
            made = {OPTIMIZER: self._checked(_called(by, module)), SCHEDULER: None} if by else self._as_built
            _put(module, made)
        if new_optimizer or setup.get(SCHEDULE) != self._now.get(SCHEDULE):
            self._reschedule(setup.get(SCHEDULE))
        for name, parameter in module.named_parameters():
            if name in frozen:
                parameter.requires_grad_(False)

    def _checked(self, made: Any) -> Any:
        """Return what a user's function made, if a step can be taken with it."""
        if self._parts.config.use_mp_opt:
            raise EngineError(
                "use_mp_opt holds half-precision weights whose float32 copies are in its own optimizer: "
                "rb.Train(use_mp_opt=False) takes another one"
            )
        if not isinstance(made, Optimizer | dict):
            raise EngineError(
                f"the function returned {type(made).__name__}, wanted a torch optimizer or a dict of some."
            )
        own = {id(parameter) for parameter in self._module.parameters()}
        stepped = OptimizerSet(made) if isinstance(made, dict) else made
        given = {id(parameter) for group in stepped.param_groups for parameter in group["params"]}
        if not given or given - own:
            raise EngineError(
                f"{len(given - own)} of the {len(given)} tensors that the optimizer was given are no parameters of the "
                "module: make it of module.parameters(), or of module.named_parameters()"
            )
        missed = [n for n, p in self._module.named_parameters() if p.requires_grad and id(p) not in given]
        if missed:
            raise EngineError(
                f"{len(missed)} parameters that train are in no group of the optimizer (first {missed[0]}): give it "
                "all, or session.freeze(…) those first"
            )
        return made

    def _reschedule(self, schedule: Any) -> None:
        """Make the schedule anew on the optimizer there is, from the rates that its groups have without one."""
        module, optimizer = self._module, policy_optimizer(self._module)
        for group in optimizer.param_groups:
            group["lr"] = group.pop("initial_lr", group["lr"])
        if schedule is None:
            _put(module, {SCHEDULER: None})
            return
        names = list(optimizer.parts) if isinstance(optimizer, OptimizerSet) else [""]
        made = {name: _called(schedule, part) for name, part in zip(names, parts_of(optimizer), strict=True)}
        for one in made.values():
            if not isinstance(one, LRScheduler):
                raise EngineError(f"the function returned {type(one).__name__}, wanted a scheduler of torch.")
        _put(module, {SCHEDULER: made if isinstance(optimizer, OptimizerSet) else made[""]})


def _names(pattern: str | re.Pattern[str], name: str) -> bool:
    """Whether a pattern names a parameter, or a module that it is in."""
    if isinstance(pattern, re.Pattern):
        return pattern.search(name) is not None
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern.rstrip('.')}.*")


def _called(part: Mapping[str, str], argument: Any) -> Any:
    """Return what the function in a part of a setup makes of an argument."""
    with user_code():
        function: Callable[[Any], Any] = cloudpickle.loads(b64decode(part["function"]))
        return function(argument)


def _put(module: nn.Module, attributes: Mapping[str, Any]) -> None:
    for name, value in attributes.items():
        if value is None:
            vars(module).pop(name, None)
        else:
            setattr(module, name, value)

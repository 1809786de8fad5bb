"""Rewards that read a TRL environment when its sample is over: TRL's reward functions, and functions of the instance.

TRL: f(prompts, completions, completion_ids, environments, **columns) -> list of numbers or None, here lists of one
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlbench.data.base.ordered import in_order
from rlbench.data.prompts.columns import (
    IMAGES,
    SOUNDS,
    check_columns,
    columns_of,
    lacking,
    parameters_of,
    pictures_of,
    taken,
)
from rlbench.data.prompts.prompt import Message, Prompt, is_chat, message_text
from rlbench.envs.loop import on_loop
from rlbench.envs.protocol import Turn
from rlbench.errors import DataError
from rlbench.user_code import name_of, user_code

OF_THE_SAMPLE = frozenset({"prompts", "completions", "completion_ids", "environments"})
OF_THE_TRAINER = ("trainer_state", "log_extra", "log_metric")
"""Arguments of TRL's trainer, which is not here."""


@dataclass(frozen=True)
class Ended:
    """A sample that is over: the instance it met, its last turn, and its token ids from the first sampled one on."""

    instance: Any
    turn: Turn
    completion: list[int]

    @property
    def arguments(self) -> dict[str, Any]:
        """What TRL gives reward functions of a sample, a list of one each."""
        prompt, messages = self.turn.prompt, self.turn.messages
        count = len(prompt.content) if is_chat(prompt.content) else 0
        behind = next((i for i, m in enumerate(messages) if i >= count and _is_assistant(m)), len(messages))
        return {
            "prompts": [messages[:behind] if count else prompt.content],
            "completions": [messages[behind:] if count else _said(messages)],
            "completion_ids": [list(self.completion)],
            "environments": [self.instance],
        }


@dataclass(frozen=True)
class EndReward:
    """A function called once for each sample; `by_columns`: as TRL calls one, else with the instance alone."""

    fn: Callable[..., Any]
    by_columns: bool

    @classmethod
    def of(cls, fn: Any) -> EndReward:
        """Tell by the parameters what a function is called with. Raises DataError for what can be neither."""
        if not callable(fn) or isinstance(fn, type):
            raise DataError(
                f"from_trl: reward={name_of(fn)[:60]} is no function: wanted one of the environment "
                "(reward=lambda env: env.reward), one of TRL's (def f(environments, **columns)), or a list of them"
            )
        own = parameters_of(fn)
        if "rollout" in own:
            raise DataError(f"from_trl: reward={name_of(fn)} is a function of a rollout: give it to rollouts.score")
        if OF_THE_SAMPLE & own.keys() or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in own.values()):
            if absent := [name for name in lacking(fn, frozenset()) if name in OF_THE_TRAINER]:
                raise DataError(
                    f"from_trl: reward={name_of(fn)} takes {', '.join(absent)} of TRL's trainer, which is not here: "
                    f"give it a default, {absent[0]}=None"
                )
            return cls(fn, by_columns=True)
        if len(lacking(fn, frozenset())) == 1:
            return cls(fn, by_columns=False)
        raise DataError(
            f"from_trl: reward={name_of(fn)} takes ({', '.join(own)}): wanted one parameter, the environment, or TRL's "
            f"({', '.join(sorted(OF_THE_SAMPLE))}, columns of the rows)"
        )

    def check(self, prompt: Prompt) -> None:
        """Refuse a prompt whose row lacks a column that the function needs."""
        if self.by_columns:
            known = columns_of(prompt)
            absent = lacking(self.fn, known.keys() | OF_THE_SAMPLE | IMAGES | SOUNDS)
            check_columns(name_of(self.fn), absent, known)

    def value(self, ended: Ended) -> float | None:
        """Return a sample's reward; None where the function has none for it."""
        if not self.by_columns:
            return scored(lambda: self.fn(ended.instance), name_of(self.fn))
        prompt = ended.turn.prompt
        row = columns_of(prompt) | pictures_of(prompt, self.fn)
        others = {*prompt.meta, "label", *OF_THE_SAMPLE}
        columns = {name: [value] for name, value in row.items() if name != "prompt"}
        given = taken(self.fn, name_of(self.fn), columns | ended.arguments, others)
        return scored(lambda: self.fn(**given), name_of(self.fn), listed=True)


def as_end_rewards(given: Any) -> tuple[EndReward, ...]:
    """Return the functions that an option names: none, one or several."""
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    return () if given is None else tuple(map(EndReward.of, several))


def total(values: Iterable[float | None]) -> float | None:
    """Return the sum of what there is, as TRL adds rewards up; None where there is nothing."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def scored(call: Callable[[], Any], name: str, listed: bool = False) -> float | None:
    """Return what a function gives, a number or None; `listed`: in a list of one. NaN is none, as it is in TRL."""
    with user_code():
        value = on_loop(call())
    if listed:
        (value,) = in_order(value, 1, f"{name} gave")
    try:
        number = None if value is None else float(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor of several raises the last
        raise DataError(f"{name} gave {type(value).__name__} {value!r:.60}: wanted a number, or None") from None
    return None if number is None or math.isnan(number) else number


def _is_assistant(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "assistant"


def _said(messages: Sequence[Message]) -> str:
    """Return what the policy said in all of its turns."""
    return "\n".join(message_text(message) for message in messages if _is_assistant(message))

"""Environments written for TRL's trainers (`GRPOTrainer(environment_factory=…)`), run as they are.

Such an environment is a class with `reset(**columns)` and public methods, which are the policy's tools; an optional
`get_reward()` scores the sample. Read at TRL 1.16.0, which is not needed here.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlbench.data.prompts.columns import IMAGES, check_columns, columns_of, pictures_of, taken
from rlbench.data.prompts.prompt import Prompt
from rlbench.envs.loop import on_loop
from rlbench.envs.protocol import Appended, Step, Turn
from rlbench.envs.tools import Content, Parser, ToolEnv, find_calls, shortened
from rlbench.envs.tools import tools as of_functions
from rlbench.envs.trl_instances import Factory, Instances, Offer, bound, pool
from rlbench.envs.trl_rewards import Ended, EndReward, as_end_rewards, scored, total
from rlbench.errors import DataError, nearest
from rlbench.user_code import user_code

COLUMN = "environment"
"""The column that chooses among several environments; `reset` does not get it."""
ONLY = ""
"""The name of an environment that is the only one."""


def from_trl(
    factory: Factory | Mapping[str, Factory],
    *,
    reward: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    tools: Iterable[Callable[..., Any]] = (),
    parser: Parser | None = None,
    in_thoughts: bool = False,
    role: str | None = "tool",
) -> TrlEnv:
    """Make an environment of one of TRL's, unmodified.

        env = rb.envs.from_trl(WordleEnv, reward=reward_func)  # def reward_func(environments, **kwargs): …
        rollouts = session.rollout(rows, n=8, env=env, max_turns=8, max_tokens=256, max_total_tokens=1024)

    An instance is made here, to see its tools, and on each replica as many as samples run side by side: each sample has
    one of its own while it lasts, and `reset` readies it for the next. `reset` gets the columns of the prompt's row
    that it names, with **kwargs all of them (`prompt`, `label`, those of `meta`); what it returns goes on in the
    prompt's last message. Methods are called with what the model's JSON says, async ones on one event loop; their
    results are told by `str`, lists of parts as they are, and what they raise as `{'error': …}`; errors other than
    ValueError, by which TRL's environments say that a move is refused, are also in `rollouts.env_errors`.

    A sample ends with a turn that calls nothing, or after `max_turns`, whose calls are not executed: TRL's
    `max_tool_calling_iterations` and one more; its `max_completion_length` is `max_total_tokens`.

    Args:
        factory: the class, or what makes an environment without arguments; by name, where each row's column
            `environment` says which it meets, whose tools alone it may call and is told of.
        reward: what a sample is worth when it is over, asked where the instance is: a function of the instance
            (`lambda env: env.reward`), one of TRL's (it may take `environments`), or several, which are added up, with
            `get_reward()` where the environment has that. None: `get_reward()` alone, else rewards are left to
            `rollouts.score`.
        tools: functions beside the methods, as of TRL's trainer.
        parser, in_thoughts, role: as of `rb.envs.tools`.

    Raises DataError for what is no TRL environment, and before a rollout for rows without a column that is needed.
    """
    several = dict(factory) if isinstance(factory, Mapping) else {ONLY: factory}
    wrong = [name for name in several if not isinstance(name, str) or (not name and isinstance(factory, Mapping))]
    if not several or wrong:
        raise DataError(f"from_trl: {wrong or 'nothing'} given: wanted a factory, or factories by name, {{'game': …}}")
    functions = list(tools)
    beside = of_functions(functions).functions if functions else {}
    offers = {name: Offer.of(one, beside) for name, one in several.items()}
    return TrlEnv(
        {},
        parser or find_calls,
        None,
        role,
        in_thoughts,
        factories=several,
        offers=offers,
        beside=beside,
        rewards=as_end_rewards(reward),
    )


@dataclass(eq=False, repr=False, kw_only=True)
class TrlEnv(ToolEnv):
    """See `from_trl`. `functions` are those `beside` the instance that a sample has, and its methods."""

    told_by_name: ClassVar[bool] = True
    factories: dict[str, Factory]
    offers: dict[str, Offer]
    beside: dict[str, Callable[..., Any]]
    rewards: tuple[EndReward, ...]
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    name: str = ONLY
    instances: Instances | None = None
    instance: Any = None
    turn: Turn | None = None
    completion: list[int] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> TrlEnv:
        """Return what a sample begins with: factories are called, not copied."""
        made = copy.copy(self)
        made.completion = []
        return made

    def __repr__(self) -> str:
        several = [f"{name!r}: {offer.title}" if name else offer.title for name, offer in self.offers.items()]
        return f"from_trl({', '.join(several)})"

    def schemas(self) -> list[dict[str, Any]]:
        """Return the tools in OpenAI's form, of several environments all of theirs."""
        listed: list[dict[str, Any]] = []
        for offer in self.offers.values():
            listed += [schema for schema in offer.schemas if schema not in listed]
        return listed

    @property
    def by_prompt(self) -> bool:
        """Whether prompts differ in the tools that they name."""
        return ONLY not in self.offers

    def schemas_of(self, prompt: Prompt) -> list[dict[str, Any]]:
        """Return the tools of the environment that a prompt meets."""
        return self.offers[self._name_of(prompt)].schemas

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Refuse rows that name no environment of these, or lack a column that `reset` or a reward needs."""
        for index, prompt in enumerate(prompts):
            try:
                offer = self.offers[self._name_of(prompt)]
                known = self._row(prompt)
                absent = [name for name in offer.needed if name not in {*known, *IMAGES}]
                check_columns(f"{offer.title}.reset", absent, known)
                for reward in self.rewards:
                    reward.check(prompt)
            except DataError as error:
                raise DataError(f"prompt {index}: {error}") from None

    def reset(self, prompt: Prompt) -> Appended | None:
        """Take an instance and reset it by the prompt's row; what it returns goes on in the prompt."""
        self.name = self._name_of(prompt)
        offer = self.offers[self.name]
        self.instances = pool((self.key, self.name), self.factories[self.name])
        self.instance = self.instances.take()
        begin = self.instance.reset
        row = self._row(prompt) | pictures_of(prompt, begin)
        columns = taken(begin, f"{offer.title}.reset", row, {*prompt.meta, "label", "prompt"})
        with user_code():
            observation = on_loop(begin(**columns))
        if observation is not None and not isinstance(observation, str | list):
            seen = f"{type(observation).__name__} {observation!r:.60}"
            raise DataError(f"{offer.title}.reset() returned {seen}: wanted None, a text, or a list of parts")
        self.functions = self.beside | bound(self.instance, offer.tools)
        return None if observation is None else Appended(observation)

    def step(self, turn: Turn) -> Step:
        """Call the methods that the turn calls; none are called in the last turn there can be."""
        self.completion += [*self._observed(turn), *turn.token_ids]
        self.turn = turn
        return Step(done=not self.calls(turn)) if turn.last else super().step(turn)

    def end_reward(self) -> float | None:
        """Return the sum of what the environment and the functions say the sample is worth; None where none does."""
        assert self.turn is not None
        ended = Ended(self.instance, self.turn, self.completion)
        values = [reward.value(ended) for reward in self.rewards]
        if self.offers[self.name].scores:
            values.append(scored(self.instance.get_reward, f"{self.offers[self.name].title}.get_reward"))
        return total(values)

    def close(self) -> None:
        """Give the instance back for another sample."""
        if self.instances is not None and self.instance is not None:
            self.instances.give_back(self.instance, whole=bool(self.functions))
            self.instance = None

    def result(self, value: Any) -> Any:
        """Return what a method returned; what can be awaited is, on the event loop of all instances."""
        return on_loop(value)

    def content(self, value: Any) -> Content:
        """Return a list of parts with what they hold, anything else as its text."""
        parts = value if isinstance(value, list) else []
        if not parts or not all(isinstance(part, dict) and "type" in part for part in parts):
            return shortened(str(value))
        return [part if "text" not in part else {**part, "text": shortened(str(part["text"]))} for part in parts]

    def refusal(self, said: str) -> str:
        """Return what is wrong with a call, in the form that TRL has for it."""
        return str({"error": said})

    def failure(self, error: Exception, name: str) -> tuple[str, dict[str, Any] | None]:
        """Return what a method raised; a ValueError is the environment's refusal, and no fault for the user to see."""
        _, facts = super().failure(error, name)
        return self.refusal(str(error)), None if isinstance(error, ValueError) else facts

    def _observed(self, turn: Turn) -> list[int]:
        """Return the token ids between two turns; none where the conversation was written anew (`thoughts="strip"`)."""
        before = turn.context[: len(turn.context) - len(turn.token_ids)]
        known = before if self.turn is None else self.turn.context
        return before[len(known) :] if before[: len(known)] == known else []

    def _row(self, prompt: Prompt) -> dict[str, Any]:
        """Return the columns that `reset` may have, without the one that chose the environment."""
        return {name: value for name, value in columns_of(prompt).items() if ONLY in self.offers or name != COLUMN}

    def _name_of(self, prompt: Prompt) -> str:
        """Return which of the environments a prompt's row meets."""
        if ONLY in self.offers:
            return ONLY
        name = prompt.meta.get(COLUMN)
        if name not in self.offers:
            near = nearest(str(name), self.offers)
            raise DataError(
                f"its row's {COLUMN!r} is {name!r}{near}; there are {', '.join(self.offers)}. Each row names the one "
                "that it meets"
            )
        return str(name)

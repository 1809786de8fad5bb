"""What an environment is: what it is asked with a turn, and what it answers.

    class Guess(rb.envs.Env):
        def reset(self, prompt):              # a fresh copy for every sample
            self.secret = prompt.label
        def step(self, turn):
            if turn.text.strip() == self.secret:
                return rb.envs.Step(reward=1.0, done=True)
            return rb.envs.Step("wrong, try again", reward=-0.1)

    rollouts = session.rollout(prompts, n=8, env=Guess(), max_turns=4, max_tokens=32)

`reset` and `step` may be `async def`, for one event loop that they must not block; plain ones run on threads.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import cloudpickle

from rlbench.data.prompts.prompt import Prompt
from rlbench.errors import DataError, nearest
from rlbench.user_code import user_code

Message: TypeAlias = dict[str, Any]
Observation: TypeAlias = str | list[Message] | list[int] | None


@dataclass(frozen=True)
class Turn:
    """What the policy said, and all there was before."""

    number: int  # from 0
    text: str  # of the tokens sampled in it
    token_ids: list[int]  # those tokens, the end token included
    finish_reason: str  # "stop" or "length"
    last: bool  # no turn can follow (`max_turns`)
    prompt: Prompt
    messages: list[Message]  # the conversation so far, those of a chat prompt first, this turn's last
    context: list[int]  # every token id so far that the policy saw: prompt, sampled and observed ones


@dataclass(frozen=True)
class Step:
    """An environment's answer to a turn.

    `observation`: what the policy sees next, never trained on. Text becomes a message of the environment's `role` in a
    chat, and stands right behind the sampled tokens where the prompt is text or token ids or the role is None; messages
    need a chat, and may have images as a prompt's may, as may parts of one message of the environment's role
    (`[{"type": "image", "image": picture}, {"type": "text", "text": "…"}]`); token ids go in as they are; None lets the
    policy go on. `reward`: of this turn. `done`: the sample is
    over; a last observation then only shows in its info. `info`: JSON types, kept per turn (else as their repr); a list
    `errors` in it, made by `error_facts`, is shown among the errors.
    """

    observation: Observation = None
    reward: float | None = None
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Appended:
    """What `reset` may return in the place of a message: a text, or parts as in `Step`, that go on in the last message
    of a chat, or right behind a text."""

    content: str | list[dict[str, Any]]


class Env:
    """Base of environments; anything with a `step` will do."""

    role: str | None = "user"  # of the messages that texts become in a chat; None: they stand inside the assistant's

    def reset(self, prompt: Prompt) -> Any:
        """Begin a sample. What it returns, an observation as in `Step`, is put behind the prompt; an `Appended` goes on
        in it."""
        return None

    def step(self, turn: Turn) -> Any:
        """Answer a turn with a `Step`, or with an awaitable of one."""
        raise NotImplementedError(f"{type(self).__name__} defines no step(turn)")

    def end_reward(self) -> Any:
        """Called once when the sample is over, unless an error or a stop ended it; return a number, which is added to
        the reward of the last turn, or None."""
        return None

    def close(self) -> Any:
        """Called once when the sample is over, however it ended."""
        return None


def resolved(value: Any) -> Any:
    """Return a value, or what it gives where it can be awaited; for threads without an event loop."""

    async def awaited() -> Any:
        return await value

    return asyncio.run(awaited()) if inspect.isawaitable(value) else value


def check_env(env: Any) -> None:
    """Refuse what is no class or function without arguments (called per sample), and no instance (copied for each)."""
    kind = env if isinstance(env, type) else type(env)
    if not callable(getattr(kind, "step", None)) and not (callable(env) and not isinstance(env, type)):
        raise DataError(
            f"env={env!r:.80}: {kind.__name__} has no step(turn){nearest('step', dir(kind))}; give an rb.envs.Env, a "
            "class of one, or a function that makes one"
        )


def unpacked(blob: bytes) -> Callable[[], Any]:
    """Return what makes one environment per sample."""
    try:
        with user_code():
            env = cloudpickle.loads(blob)
    except Exception as error:
        raise DataError(f"env cannot be loaded on the replica: {type(error).__name__}: {error}") from error

    def make() -> Any:
        if not isinstance(env, type) and hasattr(env, "step"):
            return copy.deepcopy(env)
        made = env()
        if not callable(getattr(made, "step", None)):
            raise DataError(f"env() gave {type(made).__name__}, which has no step(turn)")
        return made

    return make

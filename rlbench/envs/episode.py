"""One sample that meets an environment: its tokens turn by turn, what each was, and what the environment said."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlbench.data.prompts.images import EncodedImage, PlacedImage
from rlbench.data.prompts.lengths import continues
from rlbench.data.prompts.placing import without_images
from rlbench.data.prompts.prompt import Prompt, is_chat
from rlbench.data.rollouts.turns import said_facts
from rlbench.envs.bridge import bridged, check_role, opened
from rlbench.envs.protocol import Appended, Env, Message, Observation, Step, Turn
from rlbench.envs.thoughts import StrippedChat, check_messages, check_strippable
from rlbench.errors import DataError
from rlbench.traces import user_line


@dataclass(frozen=True)
class Limits:
    """How far a sample may go, and whether later turns see what was thought in earlier ones."""

    model_len: int  # tokens of prompt and response together
    turns: int
    total: int | None  # response tokens
    vocabulary: int
    thoughts: str = "keep"  # or "strip"


class Pictures(Protocol):
    """The images of one sample, as the engine takes them."""

    def opened(self, ids: Sequence[int], images: Sequence[EncodedImage]) -> tuple[list[int], list[PlacedImage]]:
        """Return the token ids of a whole chat with a run for each image, and where among them `images` stand, which
        come behind the prompt's. `ids`: with one token for each image. Raises DataError for what it does not take."""

    def observed(
        self, ids: Sequence[int], images: Sequence[EncodedImage], context: Sequence[int]
    ) -> tuple[list[int], list[PlacedImage]]:
        """Return the same of token ids that go behind a context, from whose first token places are counted."""


@dataclass(eq=False)
class Episode:
    """A sample under way; `tokens` to `turns` are flat over the response, of sampled tokens and observed ones (0.0).
    `contexts`: where among the tokens the conversation was written anew, and what follows is sampled behind that alone.
    `pictures`: None of an engine that takes no images; `images`: those observed, counted from the first request's first
    token; `asked`: the last message of a chat, where `reset` went on in it."""

    prompt: Prompt
    prompt_ids: list[int]
    limits: Limits
    make: Callable[[], Any]
    tokenizer: Any
    decode: Callable[[list[int]], str]
    pictures: Pictures | None = None
    env: Any = None
    opening: list[int] = field(default_factory=list)  # of the first request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    said: list[str] = field(default_factory=list)  # by the policy, turn by turn
    steps: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    images: list[PlacedImage] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    asked: Message | None = None
    number: int = 0
    finish: str = ""
    _paid: bool = False
    _start: int = 0
    _said: bool = False
    _chat: list[Message] | None = None
    _stripped: StrippedChat | None = None
    _repeated: int = 0  # tokens that are among the others for being written anew

    def begin(self) -> Any:
        """Make the environment and reset it, on any thread; return what `reset` gives."""
        self.env = self.make()
        reset = getattr(self.env, "reset", None)
        return None if reset is None else reset(self.prompt)

    def close(self) -> Any:
        """Close the environment, where it can be; on any thread."""
        close = getattr(self.env, "close", None)
        return None if close is None else close()

    @property
    def context(self) -> list[int]:
        """Every token id that the next one is sampled behind."""
        return self.tokens[self.contexts[-1] :] if self.contexts else [*self.opening, *self.tokens]

    @property
    def room(self) -> int:
        """Tokens that may still be sampled."""
        return self._room(len(self.context), 0)

    def opened(self, observation: Observation | Appended) -> bool:
        """Take what `reset` gave; False where it leaves no room to sample, which ends the sample."""
        self.opening = self.prompt_ids
        opening, said, images, whole, asked = opened(
            self.tokenizer, self.prompt, self.prompt_ids, observation, _role(self.env)
        )
        shown: list[PlacedImage] = []
        if whole and (images or self.prompt.media):
            opening, shown = self._seeing.opened(opening, images)
        if not self._fits(opening, len(opening), len(opening) - len(self.opening), "reset"):
            return False
        self.opening = opening
        self.images += shown
        self.messages += said
        self.asked = asked
        if is_chat(self.prompt.content):
            self._chat = [*self._before, *said]
        if self.limits.thoughts == "strip":
            check_messages(None if isinstance(observation, Appended) else observation)
            check_strippable(self._chat, _role(self.env), bool(images or self.prompt.media))
            self._stripped = StrippedChat(self.tokenizer, list(self._chat or ()))
        return True

    def check_role(self, known: set[str]) -> None:
        """Refuse a role of the environment's that the chat template does not know; `known` has those it does, and gets
        this one."""
        role = _role(self.env)
        if self._chat is None or role is None or role in known or self.limits.turns < 2:
            return
        answered_by = self._chat[:-1] if continues(self._chat) else self._chat
        check_role(self.tokenizer, answered_by, role)
        known.add(role)

    def extend(self, ids: list[int], logprobs: list[float], sampled: bool = True) -> None:
        """Take tokens, sampled ones in the parts they come in."""
        self.tokens += ids
        self.logprobs += logprobs
        self.mask += [sampled] * len(ids)
        self.turns += [self.number] * len(ids)

    def turn(self, finish: str) -> Turn:
        """Close the turn that was sampled: what the environment is asked."""
        ids, text = self._say()
        last = self.number + 1 >= self.limits.turns
        messages = [*self._before, *self.messages]
        return Turn(self.number, text, ids, finish, last, self.prompt, messages, self.context)

    def stepped(self, step: Any, finish: str, ended: bool) -> bool:
        """Take the answer to a turn that ended by `finish`, with an end token or not; whether another one follows."""
        step = _checked(step)
        self.rewards.append(float("nan") if step.reward is None else float(step.reward))
        info = dict(step.info)
        self.errors += [{**facts, "turn": self.number, "ended": False} for facts in plain(info.pop("errors", []))]
        self.steps.append({str(name): plain(value) for name, value in info.items()})
        if step.done or self.number + 1 >= self.limits.turns:
            self.finish = finish
            if not step.done:
                self.notes["max_turns"] = True
            if step.observation is not None:
                self.notes["last_observation"] = plain(without_images(step.observation))
            return False
        ids, said, images, *_ = bridged(
            self.tokenizer, self._chat, step.observation, _role(self.env), ended, self.tokens[-1]
        )
        shown: list[PlacedImage] = []
        if images:
            ids, shown = self._seeing.observed(ids, images, self.context)
        anew = self._anew(step.observation, said, bool(images), ended)
        added = ids if anew is None else anew
        if not self._fits(added, len(added) + (len(self.context) if anew is None else 0), len(ids), "step"):
            return False
        if anew is not None:
            self.contexts.append(len(self.tokens))
            self._repeated += len(anew) - len(ids)
        self.extend(added, [0.0] * len(added), sampled=False)
        self.number += 1
        self.images += shown
        self.messages += said
        self._start, self._said = len(self.tokens), False
        return True

    @property
    def owes_reward(self) -> bool:
        """Whether the environment is still to be asked for its `end_reward`."""
        own = getattr(type(self.env), "end_reward", Env.end_reward) is not Env.end_reward
        return own and bool(self.rewards) and self.finish != "abort" and not self._paid

    def paid(self, reward: Any) -> None:
        """Take what the environment's `end_reward` gave."""
        self._paid = True
        if not _is_finite(reward):
            raise DataError(f"end_reward() gave {reward!r:.60}: wanted a finite number, or None for none")
        if reward is not None:
            said = self.rewards[-1]
            self.rewards[-1] = float(reward) + (0.0 if math.isnan(said) else said)

    def failed(self, where: str, error: BaseException) -> None:
        """Note an error in the environment's code; but for one of `close` it ends the sample."""
        self.errors.append({**error_facts(error, where), "turn": self.number, "ended": where != "close"})
        self.finish = self.finish if where == "close" else "abort"

    def stopped(self) -> None:
        """End the sample for an interrupt: what it has, a turn half said too, stays."""
        self.finish = "abort"
        if not self._said and len(self.tokens) > self._start:
            self._say()

    @property
    def turn_rewards(self) -> list[float]:
        """One per turn that has sampled tokens; NaN where the environment gave none."""
        turns = self.number + (len(self.tokens) > self._start)
        return [*self.rewards, *([float("nan")] * (turns - len(self.rewards)))]

    @property
    def info(self) -> dict[str, Any]:
        """What `rollouts.infos` holds of the sample, as JSON types."""
        facts = {"turns": len(self.turn_rewards), "messages": plain(self.messages), "steps": self.steps, **self.notes}
        facts |= {} if self.asked is None else {"asked": plain(self.asked)}
        facts |= said_facts(facts["messages"], self.said)
        facts |= {"contexts": list(self.contexts)} if self.contexts else {}
        return facts | ({"errors": self.errors} if self.errors else {})

    @property
    def _before(self) -> list[Message]:
        """The messages of a chat prompt, as the policy was asked with them."""
        content = self.prompt.content
        if not is_chat(content):
            return []
        return list(content) if self.asked is None else [*content[:-1], self.asked]

    @property
    def _seeing(self) -> Pictures:
        if self.pictures is None:
            raise DataError("the observation has images, and this engine takes none: describe them in text")
        return self.pictures

    def _say(self) -> tuple[list[int], str]:
        """Put the turn's sampled tokens among the messages; return them and their text."""
        ids = self.tokens[self._start :]
        text = self.decode(ids)
        self.messages.append({"role": "assistant", "content": text})
        self.said.append(text)
        self._said = True
        return ids, text

    def _anew(
        self, observation: Observation, messages: Sequence[Message], images: bool, ended: bool
    ) -> list[int] | None:
        """Return the conversation as the policy is shown it next, where it is no longer what it was shown and said."""
        if self._stripped is None:
            return None
        check_messages(observation)
        check_strippable(self._chat, _role(self.env), images)
        return self._stripped.followed(self.said[-1], messages, ended)

    def _room(self, context: int, more: int) -> int:
        """Return how many tokens may be sampled behind so many, when `more` of the response's own have come."""
        left = self.limits.model_len - context
        if self.limits.total is None:
            return left
        return min(left, self.limits.total - (len(self.tokens) - self._repeated + more))

    def _fits(self, ids: list[int], context: int, observed: int, where: str) -> bool:
        """Whether a token can be sampled behind a context of so many tokens, some of them `observed` just now."""
        wrong = [t for t in ids if not 0 <= t < self.limits.vocabulary]
        if wrong:
            raise DataError(f"observed token id {wrong[0]} is outside of the vocabulary of {self.limits.vocabulary}")
        if self._room(context, observed) > 0:
            return True
        self.finish = "length"
        self.notes["no_room"] = {"after": where, "observation_tokens": observed, "room": max(self.room, 0)}
        return False


def error_facts(error: BaseException, where: str) -> dict[str, Any]:
    """Describe an error raised in `where` (`"reset"`, `"step"`, `"tool NAME"`) by JSON types."""
    line = user_line(error)
    return {
        "where": where,
        "kind": type(error).__name__,
        "message": str(error)[:2000],
        "line": None if line is None else [line.file, line.line, line.function, line.source],
        "traceback": "".join(traceback.format_exception(error))[-20000:],
    }


def plain(value: Any) -> Any:
    """Return the same in JSON types; what JSON has no form for becomes its repr."""
    try:
        return json.loads(json.dumps(value, default=repr))
    except (TypeError, ValueError, RecursionError):  # keys that are no texts, cycles
        return repr(value)


def _role(env: Any) -> str | None:
    role = getattr(env, "role", "user")
    if role is not None and not isinstance(role, str):
        raise DataError(f"the environment's role is {role!r}: wanted 'user', 'tool', … or None")
    return role


def _checked(step: Any) -> Step:
    if not isinstance(step, Step):
        raise DataError(
            f"step() returned {type(step).__name__} {step!r:.60}: wanted rb.envs.Step(observation, reward, done, info)"
        )
    if not isinstance(step.info, Mapping):
        raise DataError(f"step()'s info is {type(step.info).__name__}: wanted a dict")
    if not _is_finite(step.reward):
        raise DataError(f"step() gave the reward {step.reward!r:.60}: wanted a finite number, or None for none")
    return step


def _is_finite(reward: Any) -> bool:
    """Whether it is a number, or None."""
    try:
        return reward is None or math.isfinite(reward)
    except (TypeError, ValueError):
        return False

"""What rollouts hold of environments: which tokens were observed, rewards by turn, and what went wrong.

`Rollouts` of several turns have `mask` (flat bool, False where a token was observed and is never trained on), `turns`
(flat int32, from 0; an observation belongs to the turn it answers), `turn_rewards` (ragged float64, NaN where a turn
had none), `env_rewards` ((N,) float64, their sum, NaN where there was none) and `infos`, one dict of JSON types each:

    {"turns": 2,
     "messages": [{"role": "assistant", "content": "…"}, {"role": "tool", "content": "…"}, …],   # behind the prompt
     "asked": {"role": "user", …},       # the prompt's last message, only where `reset` went on in it
     "said": ["…", …],                   # what the policy said in each turn, only where the messages do not tell it
     "steps": [{…}, {…}],                # what each `Step` said in its info
     "contexts": [42, 97],               # only where the conversation was written anew: see `rollouts.contexts`
     "max_turns": true,                  # only where that ended it
     "no_room": {"after": "step", "observation_tokens": 900, "room": 512},   # only where that ended it
     "last_observation": "…",            # only where nothing followed it
     "errors": [{"where": "step", "kind": "ValueError", "message": "…", "line": […], "turn": 1, "ended": true, …}]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.base.ragged import Ragged
from rlbench.data.prompts.lengths import answered
from rlbench.data.prompts.prompt import Prompt, is_chat, message_text
from rlbench.errors import DataError
from rlbench.traces import UserLine

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollouts import Rollouts


@dataclass(frozen=True)
class EnvError:
    """An error in an environment's code: of which sample and turn, where (`"reset"`, `"step"`, `"end_reward"`,
    `"close"`, `"tool NAME"`), and on which line. `ended`: it ended the sample, which has the finish reason `"abort"`.
    """

    sample: int
    turn: int
    where: str
    kind: str
    message: str
    line: str
    ended: bool
    traceback: str

    def __str__(self) -> str:
        at = f"\n  {self.line}" if self.line else ""
        return f"{self.where} raised {self.kind}: {self.message} (completion {self.sample}, turn {self.turn}){at}"

    __repr__ = __str__


def env_errors(infos: Sequence[Mapping[str, Any]]) -> list[EnvError]:
    """The errors that infos tell of, in the order of the samples."""
    return [
        EnvError(
            sample=i,
            turn=int(error["turn"]),
            where=error["where"],
            kind=error["kind"],
            message=error["message"],
            line=str(UserLine(*error["line"])) if error.get("line") else "",
            ended=bool(error["ended"]),
            traceback=error.get("traceback", ""),
        )
        for i, info in enumerate(infos)
        for error in info.get("errors", [])
    ]


def own_turns(info: Mapping[str, Any], transcript: str) -> tuple[str, ...]:
    """What the policy said in each of its turns; the whole `transcript` where no environment told of any."""
    if "said" in info:
        return tuple(info["said"])
    return _assistant_texts(info["messages"]) if "messages" in info else (transcript,)


def said_facts(messages: Sequence[Mapping[str, Any]], said: Sequence[str]) -> dict[str, list[str]]:
    """What an info holds beside its `messages` so that `own_turns` is `said`: nothing where they tell it."""
    return {} if _assistant_texts(messages) == tuple(said) else {"said": list(said)}


def places_said(info: Mapping[str, Any]) -> list[int]:
    """Where among an info's messages the policy's turns stand; of turns that are not among them none."""
    said = own_turns(info, "")
    places: list[int] = []
    for place, message in enumerate(info["messages"]):
        if len(places) < len(said) and _is_assistant(message) and message_text(message) == said[len(places)]:
            places.append(place)
    return places


def asked_messages(prompt: Prompt, info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A prompt as messages: a chat's own, the last as an environment left it; a text as the user's; of token ids one
    without content."""
    if is_chat(prompt.content):
        return [*prompt.content[:-1], dict(info.get("asked", prompt.content[-1]))]
    return [{"role": "user", "content": prompt.content if isinstance(prompt.content, str) else None}]


def conversation(prompt: Prompt, info: Mapping[str, Any], transcript: str) -> list[dict[str, Any]]:
    """A prompt's messages and those behind it; an answer goes on in the prompt's last where that is its beginning."""
    first, *rest = said_messages(info, transcript)
    asked = asked_messages(prompt, info)
    return [*(answered(asked, first) if _is_assistant(first) else [*asked, first]), *rest]


def said_messages(info: Mapping[str, Any], transcript: str) -> list[dict[str, Any]]:
    """The messages behind a prompt's."""
    return list(info.get("messages") or [{"role": "assistant", "content": transcript}])


def _assistant_texts(messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(message_text(message) for message in messages if _is_assistant(message))


def _is_assistant(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "assistant"


def sampled_mask(rollouts: Rollouts) -> np.ndarray:
    """Flat bool: True where the policy sampled the token."""
    return np.ones(len(rollouts.logprobs), bool) if rollouts.mask is None else rollouts.mask


def env_columns(rollouts: Rollouts) -> dict[str, Ragged]:
    """What an advantage may ask for by name and an environment gave: `turns`, and `token_rewards`, which has each
    turn's reward on the last token sampled in it and 0 elsewhere. Empty without an environment; `turns` alone where it
    gave no reward, or where the rollouts were scored since: the environment's rewards are then not theirs.
    """
    if rollouts.turns is None or rollouts.turn_rewards is None:
        return {}
    found = {"turns": rollouts.responses.with_values(rollouts.turns)}
    scored, said = rollouts.rewards, rollouts.env_rewards
    own = scored is not None and said is not None and np.array_equal(np.asarray(scored), said, equal_nan=True)
    if own and np.isfinite(rollouts.turn_rewards.values).any():
        found["token_rewards"] = rollouts.responses.with_values(_at_turn_ends(rollouts))
    return found


def _at_turn_ends(rollouts: Rollouts) -> np.ndarray:
    assert rollouts.turns is not None and rollouts.turn_rewards is not None
    placed = np.zeros(len(rollouts.turns), np.float32)
    mask = sampled_mask(rollouts)
    for i, rewards in enumerate(rollouts.turn_rewards):
        start, stop = rollouts.responses.offsets[i : i + 2]
        turns = np.where(mask[start:stop], rollouts.turns[start:stop], -1)
        for turn in np.flatnonzero(np.isfinite(rewards)):
            at = np.flatnonzero(turns == turn)
            if not len(at):
                raise DataError(f"completion {i} has a reward for turn {turn}, in which no token was sampled")
            placed[start + at[-1]] = rewards[turn]
    return placed

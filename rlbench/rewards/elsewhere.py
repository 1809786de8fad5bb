"""Reward functions written for other systems, run as they are: TRL's and verl's, recognised by their parameters.

TRL:  f(prompts, completions, **columns) -> list of numbers; a chat's completion is a list of messages, with those of
      tools in their places, a text's is what the policy said; images are Pillow's
verl: compute_score(data_source, solution_str, ground_truth, extra_info=None) -> number, or a mapping with "score";
      the solution is what the policy said in all of its turns
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlbench.data.base.ordered import in_order
from rlbench.data.prompts.columns import IMAGES, LABELS, SOUNDS, parameters_of, taken
from rlbench.data.prompts.prompt import is_chat
from rlbench.data.rollouts.turns import asked_messages, said_messages
from rlbench.errors import DataError
from rlbench.user_code import name_of

if TYPE_CHECKING:
    from rlbench.data.rollouts.rollout import Rollout

TRL, VERL = "completions", frozenset({"solution_str", "ground_truth"})
"""A parameter that only functions of the one have, and those that only functions of the other have."""
ENVIRONMENTS = "environments"
"""A parameter of TRL's functions that nobody has here but the replicas."""


def adapted(fn: Any, is_async: bool) -> Any:
    """Return a function of another system as one of ours, of a rollout or of several; any other as it is."""
    if not callable(fn) or isinstance(fn, _Elsewhere):
        return fn
    names = parameters_of(fn).keys()
    if ENVIRONMENTS in names:
        raise DataError(
            f"{name_of(fn)} takes {ENVIRONMENTS}, TRL's instances, which live on the replicas and end with their "
            f"samples: give it where they are, env=rb.envs.from_trl(…, reward={name_of(fn)}), and no reward here"
        )
    if TRL in names:
        return _AsyncTrl(fn) if is_async else _Trl(fn)
    if names >= VERL:
        return _AsyncVerl(fn) if is_async else _Verl(fn)
    return fn


@dataclass(frozen=True)
class _Elsewhere(ABC):
    fn: Callable[..., Any]

    @property
    def __name__(self) -> str:
        return name_of(self.fn)

    @abstractmethod
    def arguments(self, rollouts: Any) -> dict[str, Any]:
        """Return what the function is called with, for a rollout or a list of them."""

    def result(self, value: Any, rollouts: Any) -> Any:
        """Return what it returned, as ours do."""
        return value

    def __call__(self, rollouts: Any) -> Any:
        return self.result(self.fn(**self.arguments(rollouts)), rollouts)


class _Trl(_Elsewhere):
    def arguments(self, rollouts: Rollout | list[Rollout]) -> dict[str, Any]:
        """Give prompts, completions and every column of the rows that the function takes, a list each."""
        given = rollouts if isinstance(rollouts, list) else [rollouts]
        rows = [dict(rollout.source.meta) for rollout in given]
        columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(n for row in rows for n in row)}
        labels = [rollout.label for rollout in given]
        known = {
            **(dict.fromkeys(LABELS, labels) if any(label is not None for label in labels) else {}),
            **columns,
            "prompts": [_asked(rollout) for rollout in given],
            "completions": [_completion(rollout) for rollout in given],
            "completion_ids": [list(rollout.token_ids) for rollout in given],
        }
        if IMAGES & parameters_of(self.fn).keys():  # by name alone: decoding takes time
            decoded = {image: image.pil() for rollout in given for image in rollout.images}
            known["images"] = [[decoded[image] for image in rollout.images] for rollout in given]
            known["image"] = [own[0] if own else None for own in known["images"]]
        if SOUNDS & parameters_of(self.fn).keys():
            known["audios"] = [[sound.decoded() for sound in rollout.sounds] for rollout in given]
            known["audio"] = [own[0] if own else None for own in known["audios"]]
        return taken(self.fn, self.__name__, known, {*columns, "completion_ids", "label"})

    def result(self, value: Any, rollouts: Any) -> Any:
        """Return a list as it is, of one rollout its number."""
        return value if isinstance(rollouts, list) else in_order(value, 1, f"{self.__name__} gave")[0]


class _Verl(_Elsewhere):
    def arguments(self, rollouts: Rollout | list[Rollout]) -> dict[str, Any]:
        """Give the text, and what the row says it is compared with, as verl's data sets have it."""
        if isinstance(rollouts, list):
            raise DataError(f"{self.__name__} is of one completion: give it as it is, without rb.rewards.batched")
        meta = rollouts.source.meta
        known = {
            "data_source": meta.get("data_source"),
            "solution_str": rollouts.text,
            "ground_truth": dict(meta.get("reward_model") or {}).get("ground_truth", rollouts.label),
            "extra_info": meta.get("extra_info"),
        }
        return taken(self.fn, self.__name__, known, set())

    def result(self, value: Any, rollouts: Any) -> Any:
        """Turn a mapping's "score" into its reward; of the rest numbers stay, as components."""
        if not isinstance(value, Mapping) or "score" not in value:
            return value
        numbers = {str(key): number for key, number in value.items() if isinstance(number, int | float)}
        return {"reward": value["score"], **{key: float(number) for key, number in numbers.items() if key != "score"}}


class _AsyncTrl(_Trl):
    async def __call__(self, rollouts: Any) -> Any:
        return self.result(await self.fn(**self.arguments(rollouts)), rollouts)


class _AsyncVerl(_Verl):
    async def __call__(self, rollouts: Any) -> Any:
        return self.result(await self.fn(**self.arguments(rollouts)), rollouts)


def takes_many(fn: Any) -> bool:
    """Whether a function that was `adapted` is best called for a batch."""
    return isinstance(fn, _Trl)


def _asked(rollout: Rollout) -> Any:
    """The prompt, and in a chat what an environment put behind it before the policy spoke."""
    if not is_chat(rollout.prompt):
        return rollout.prompt
    said = said_messages(rollout.info, rollout.transcript)
    return [*asked_messages(rollout.source, rollout.info), *said[: _opening(said)]]


def _opening(said: list[dict[str, Any]]) -> int:
    """How many messages stand before the first of the assistant."""
    return next((i for i, message in enumerate(said) if message.get("role") == "assistant"), len(said))


def _completion(rollout: Rollout) -> Any:
    if not is_chat(rollout.prompt):
        return rollout.text
    said = said_messages(rollout.info, rollout.transcript)
    return said[_opening(said) :]

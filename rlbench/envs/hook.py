"""RLite's `post_generation_hook` as an environment: written there, used here unchanged.

    def post_generation_hook(generation, input_queue, output_queue):
        if len(generation.outputs) < 2:
            again = generation.inputs[-1] + generation.outputs[-1].outputs[0].text
            input_queue.put(IndexedGenerationHistory(generation.index, generation.inputs + [again], generation.outputs))
        else:
            output_queue.put(generation)

    rollouts = engine.generate(prompts, post_generation_hook=post_generation_hook, max_tokens=64)
    rollouts = session.rollout(prompts, env=rb.envs.from_hook(post_generation_hook), max_turns=4, max_tokens=64)

A history in `input_queue` asks for another turn, one in `output_queue` ends the sample. Two things differ, and are
refused rather than done in silence: the new input must go on from the last one and its answer (what comes behind them
is encoded; they themselves never again), and a hook that uses neither queue is an error, where the original waits for
ever.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlbench.data.prompts.prompt import Prompt
from rlbench.envs.protocol import Env, Step, Turn, awaited
from rlbench.errors import DataError


@dataclass(frozen=True)
class HookCompletion:
    """One completion as a hook sees it; `index` is 0, as every sample is a request of its own."""

    text: str
    token_ids: list[int]
    finish_reason: str
    index: int = 0


@dataclass(frozen=True)
class HookOutput:
    """One answered request as a hook sees it, by vLLM's names; `outputs` has one completion."""

    prompt: Any
    prompt_token_ids: list[int]
    outputs: list[HookCompletion]
    finished: bool = True


@dataclass
class IndexedGenerationHistory:
    """What a hook gets and puts: the sample's inputs and outputs so far, oldest first."""

    index: int
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)


Hook = Callable[[Any, Any, Any], Any]


def from_hook(hook: Hook, timeout_s: float = 30.0) -> HookEnv:
    """Make an environment of a `post_generation_hook(generation, input_queue, output_queue)`, plain or async.

    It may return before it has put anything, where something it started does that within `timeout_s`. A sample ends
    with an error where neither queue was used in time, or the new input does not go on from the last one and its
    answer.
    """
    if not callable(hook):
        raise DataError(f"from_hook: wanted a function (generation, input_queue, output_queue), got {hook!r:.60}")
    return HookEnv(hook, timeout_s)


@dataclass(eq=False, repr=False)
class HookEnv(Env):
    """See `from_hook`."""

    hook: Hook
    timeout_s: float
    history: IndexedGenerationHistory = field(default_factory=lambda: IndexedGenerationHistory(0))
    role = None

    def __repr__(self) -> str:
        return f"from_hook({getattr(self.hook, '__name__', self.hook)})"

    def reset(self, prompt: Prompt) -> None:
        """Begin with the prompt as the first input."""
        self.history = IndexedGenerationHistory(int(prompt.meta.get("index", 0)), [prompt.content], [])

    def step(self, turn: Turn) -> Step:
        """Let the hook decide."""
        said = HookCompletion(turn.text, turn.token_ids, turn.finish_reason)
        before = turn.context[: len(turn.context) - len(turn.token_ids)]
        self.history.outputs = [*self.history.outputs, HookOutput(self.history.inputs[-1], before, [said])]
        again: queue.SimpleQueue[Any] = queue.SimpleQueue()
        over: queue.SimpleQueue[Any] = queue.SimpleQueue()
        called = self.hook(self.history, again, over)
        if inspect.isawaitable(called):
            asyncio.run(awaited(called))
        deadline = time.monotonic() + self.timeout_s
        while again.empty() and over.empty():
            if time.monotonic() > deadline:
                raise DataError(
                    f"the hook put nothing into either queue within {self.timeout_s:g} s: input_queue.put(history) for "
                    "another turn, output_queue.put(history) to end the sample"
                )
            time.sleep(0.01)
        if not over.empty():
            return Step(done=True)
        return Step(self._continued(again.get(), turn))

    def _continued(self, history: Any, turn: Turn) -> Any:
        """What the new input has behind the last one and its answer."""
        inputs = list(getattr(history, "inputs", []))
        if len(inputs) <= len(self.history.inputs):
            raise DataError(
                f"the hook asks for another turn with {len(inputs)} inputs where there were "
                f"{len(self.history.inputs)}: append the next one"
            )
        last, new = self.history.inputs[-1], _content(inputs[-1])
        self.history.inputs = [*self.history.inputs, new]
        if isinstance(new, str) and isinstance(last, str):
            if new.startswith(last + turn.text):
                return new[len(last) + len(turn.text) :] or None
        elif _is_ids(new):
            if list(new[: len(turn.context)]) == turn.context:
                return list(new[len(turn.context) :]) or None
        elif isinstance(new, list) and isinstance(last, list) and new[: len(last)] == last:
            behind = new[len(last) :]
            if behind and behind[0].get("role") == "assistant" and behind[0].get("content") == turn.text:
                return behind[1:] or None
        raise DataError(
            "the hook's new input does not go on from the last one and its answer, and tokens that were sampled are "
            "never encoded again: put inputs[-1] + outputs[-1].outputs[0].text + what follows"
        )


def _content(value: Any) -> Any:
    """An input as vLLM takes it: a text, messages, token ids, or a dict with `prompt` or `prompt_token_ids`."""
    if isinstance(value, dict):
        return value.get("prompt_token_ids", value.get("prompt"))
    return value


def _is_ids(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and bool(value) and isinstance(value[0], int)

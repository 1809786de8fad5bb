"""RLite's `post_generation_hook` as an environment: written there, used here unchanged."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlbench.data.prompts.prompt import Prompt
from rlbench.envs.protocol import Env, Step, Turn, resolved
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

    A history in `input_queue` asks for another turn, whose input goes on from the last one and its answer; one in
    `output_queue` ends the sample. The hook may also return first, and have it put within `timeout_s`.
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
        resolved(self.hook(self.history, again, over))
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
        """Return what the new input has behind the last one and its answer."""
        inputs, before = list(getattr(history, "inputs", [])), self.history.inputs
        if len(inputs) <= len(before):
            raise DataError(
                f"the hook asks for another turn with {len(inputs)} inputs where there were {len(before)}: append the "
                "next one"
            )
        last, new = before[-1], inputs[-1]
        if isinstance(new, dict):  # as vLLM takes one
            new = new.get("prompt_token_ids", new.get("prompt"))
        self.history.inputs = [*before, new]
        ahead: Any = None
        if isinstance(new, str) and isinstance(last, str):
            ahead = last + turn.text
        elif isinstance(new, Sequence) and new and isinstance(new[0], int):
            new, ahead = list(new), turn.context
        elif isinstance(new, list) and isinstance(last, list):
            ahead = [*last, {"role": "assistant", "content": turn.text}]
            if len(new) > len(last) and isinstance(new[len(last)], Mapping):  # with what else the hook noted there
                ahead[-1] = {**new[len(last)], **ahead[-1]}
        if ahead is not None and new[: len(ahead)] == ahead:
            return new[len(ahead) :] or None
        raise DataError(
            "the hook's new input does not go on from the last one and its answer, and tokens that were sampled are "
            "never encoded again: put inputs[-1] + outputs[-1].outputs[0].text + what follows"
        )

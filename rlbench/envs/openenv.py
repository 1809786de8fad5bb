"""Environments of the OpenEnv library (`pip install openenv`), in this process or on a server."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlbench.data.base.drawing import needed
from rlbench.data.prompts.prompt import Prompt
from rlbench.envs.protocol import Env, Observation, Step, Turn
from rlbench.errors import DataError

OWN = ("reward", "done", "metadata")  # fields of an observation that are not for the policy


def from_openenv(
    source: str | Callable[[], Any],
    *,
    action: Callable[[Turn], Any],
    observe: Callable[[Any], Observation] | None = None,
    reset: Callable[[Prompt], Mapping[str, Any]] | None = None,
    role: str | None = "user",
) -> OpenEnvAdapter:
    """Make an environment of one of OpenEnv: `from_openenv("http://…", action=lambda turn: {"message": turn.text})`.

    Args:
        source: a server's address (each sample has a session of its own there), or a class or function that makes an
            `Environment` or an `EnvClient`.
        action: turns a turn into what the environment's `step` takes; for an address, a dict.
        observe: turns an observation (for an address a dict) into what the policy reads; None: its one text field, or
            all its fields as JSON, without reward, done and metadata.
        reset: turns a prompt into keyword arguments of the environment's `reset`; None: no arguments.
        role: of the messages that observations become in a chat.
    """
    if isinstance(source, str):
        needed("openenv", "rb.envs.from_openenv(address)")
    elif not callable(source):
        raise DataError(f"from_openenv: {type(source).__name__} is neither an address nor makes an environment")
    return OpenEnvAdapter(source, action, observe or observed, reset, role)


@dataclass(eq=False, repr=False)
class OpenEnvAdapter(Env):
    """See `from_openenv`."""

    source: str | Callable[[], Any]
    action: Callable[[Turn], Any]
    observe: Callable[[Any], Observation]
    arguments: Callable[[Prompt], Mapping[str, Any]] | None
    role: str | None
    inner: Any = None

    def __repr__(self) -> str:
        name = self.source if isinstance(self.source, str) else getattr(self.source, "__name__", repr(self.source))
        return f"from_openenv({name!r})"

    def reset(self, prompt: Prompt) -> Any:
        """Make the environment, or open a session; return what it observes."""
        arguments = dict(self.arguments(prompt)) if self.arguments else {}
        if isinstance(self.source, str):
            self.inner = needed("openenv", "rb.envs.from_openenv(address)").GenericEnvClient(base_url=self.source)
        else:
            self.inner = self.source()
        return self._called(lambda: self.inner.reset(**arguments), self._observed)

    def step(self, turn: Turn) -> Any:
        """Act, and observe; return a `Step`."""
        action = self.action(turn)
        return self._called(lambda: self.inner.step(action), self._stepped)

    def close(self) -> Any:
        """Close the environment or the session."""
        return None if self.inner is None else self._called(lambda: self.inner.close(), lambda result: None)

    def _called(self, call: Callable[[], Any], then: Callable[[Any], Any]) -> Any:
        """Ask a session from the event loop; an environment in this process computes on the thread it is on."""
        if isinstance(self.source, str):
            return _awaited(call, then)
        value = call()
        return _awaited(lambda: value, then) if inspect.isawaitable(value) else then(value)

    def _observed(self, result: Any) -> Observation:
        """Read what a client gives (a result with an observation in it), or an environment (the observation itself)."""
        within = hasattr(result, "observation") and hasattr(result, "done")
        return self.observe(result.observation if within else result)

    def _stepped(self, result: Any) -> Step:
        reward = None if result.reward is None else float(result.reward)
        return Step(self._observed(result), reward, bool(result.done))


async def _awaited(call: Callable[[], Any], then: Callable[[Any], Any]) -> Any:
    value = call()
    return then(await value if inspect.isawaitable(value) else value)


def observed(observation: Any) -> Observation:
    """Return an observation as text: its one text field, else all fields as JSON; None where there are none."""
    fields = observation
    if not isinstance(observation, Mapping):
        fields = observation.model_dump() if hasattr(observation, "model_dump") else vars(observation)
    shown = {name: value for name, value in fields.items() if name not in OWN}
    if len(shown) == 1 and isinstance(text := next(iter(shown.values())), str):
        return text or None
    return json.dumps(shown, ensure_ascii=False, default=str) if shown else None

"""A policy as a value that can be sent: an environment, or a reward, asks it during an episode.

old = session.policy("old")            # an adapter of this session, or another session's policy

class Duel(rb.envs.Env):
    def step(self, turn):
        return rb.envs.Step(reward=judge(turn.text, old.answer(turn.prompt.content)), done=True)
"""

from __future__ import annotations

import http.client
import json
import secrets
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlbench.errors import EngineError

UNKEPT = "~"
"""What calls say in the place of a run that are not kept among `session.traces()`."""
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Policy:
    """A session's policy, or one of its adapters (`model`), behind its endpoint; `urls` are those of all replicas."""

    session: str
    model: str
    urls: tuple[str, ...] = field(repr=False)
    key: str = field(repr=False)

    def answer(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        max_tokens: int = 64,
        temperature: float = 1.0,
        timeout_s: float = TIMEOUT_S,
        **options: Any,
    ) -> str:
        """Return the text that it samples behind a prompt: text, token ids, or a chat, by the session's template.

        The call shares the engine's steps with rollouts, waits while the weights change, and is not kept as a trace.

        Args:
            options: of OpenAI's request: `seed` (without one each answer is drawn anew), `stop`, `top_p`, ….
        """
        chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        route, name = ("chat/completions", "messages") if chat else ("completions", "prompt")
        given = prompt if isinstance(prompt, str) else list(prompt)
        asked = {"model": self.model, name: given, "max_tokens": max_tokens, "temperature": temperature, **options}
        choice = self._posted(route, asked, timeout_s)["choices"][0]
        return str((choice["message"]["content"] or "") if chat else choice["text"])

    def _posted(self, route: str, body: Mapping[str, Any], timeout_s: float) -> Any:
        request = urllib.request.Request(
            f"{secrets.choice(self.urls)}/v1/{route}",
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json", "X-Rlbench-Run": UNKEPT},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as refused:
            said = refused.read().decode(errors="replace")
            raise EngineError(f"{self!r} refused: {said[:400]}") from refused
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(
                f"{self!r} does not answer ({error}): its session, or its endpoint, has ended. session.policy() of one "
                "that runs gives another"
            ) from error

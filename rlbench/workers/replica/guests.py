"""Requests of an endpoint's clients beside those of calls, in one engine: whose turn it is to step it, and what waits.

While a call generates, its own loop steps the engine for all. Between calls a thread of the endpoint's does. What
changes weights or caches lets the requests that are in the engine come to their end; new ones wait until it is over.
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

LOOK_S = 0.1
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Guest:
    """A client's request. `deliver` takes vLLM's outputs of it, or the exception that ended it, on the stepping thread.

    `adapter`: number of the LoRA adapter, 0 for none; None: the one synced last. `logprobs_by_id`: nobody reads the
    texts of the tokens that its log-probs are of.
    """

    name: str
    prompt: Any
    params: SamplingParams
    adapter: int | None
    deliver: Callable[[Any], None]
    logprobs_by_id: bool = False


class EngineTurn:
    """Who may use the engine: calls of the compute lane first, the endpoint's thread between them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a call may use another verb
        self._free = threading.Event()
        self._free.set()

    @contextmanager
    def of_call(self) -> Iterator[None]:
        """Hold the engine for a call."""
        self._free.clear()
        try:
            with self._lock:
                yield
        finally:
            self._free.set()

    @contextmanager
    def between_calls(self) -> Iterator[None]:
        """Hold the engine when no call has it or waits for it."""
        self._free.wait()
        with self._lock:
            yield


def alone(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Have a method of the compute lane hold the engine (`self.turn`) while it runs."""

    @functools.wraps(method)
    def held(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.turn.of_call():
            return method(self, *args, **kwargs)

    return held


def lora(number: int) -> LoRARequest | None:
    """Return vLLM's name of an adapter that its workers hold, loaded by `finish_adapter`, which lies in no folder."""
    from vllm.lora.request import LoRARequest  # here: a replica sets its environment before anything of vLLM

    return LoRARequest(f"adapter-{number}", number, "in memory") if number else None


def leave_logprobs_undecoded(engine: LLMEngine, name: str) -> None:
    """Have vLLM give a request's log-probs by token id alone. It would decode each token by itself for them, which
    takes a sixth of the tiny model's time, and an option for it there is none."""
    processor = engine.output_processor
    for inside in processor.external_req_ids[name]:  # several where it draws several samples
        told = processor.request_states[inside].logprobs_processor
        assert told is not None  # it samples
        told.tokenizer = None


class Guests:
    """The requests of clients: those that wait and those in the engine. `add` and `drop` may be called on any thread,
    the rest by who holds the engine."""

    def __init__(self) -> None:
        self._waiting: collections.deque[Guest] = collections.deque()
        self._gone: collections.deque[str] = collections.deque()
        self._inside: dict[str, Guest] = {}
        self._something = threading.Event()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._inside)

    @property
    def inside(self) -> int:
        """How many are in the engine."""
        return len(self._inside)

    def naming(self, adapter: int) -> int:
        """How many of those in the engine have named this adapter."""
        return sum(guest.adapter == adapter for guest in self._inside.values())

    def add(self, guest: Guest) -> None:
        """Queue a request."""
        self._waiting.append(guest)
        self._something.set()

    def drop(self, name: str) -> None:
        """Forget a request whose client went away."""
        self._gone.append(name)
        self._something.set()

    def awaited(self) -> bool:
        """Sleep until there is something to do, LOOK_S at most; return whether there is."""
        if self._something.wait(LOOK_S) and not self:
            self._something.clear()
        return bool(self) or bool(self._gone)

    def admit(self, engine: LLMEngine, adapter: int) -> None:
        """Put what waits into the engine; `adapter`: number of the one synced last."""
        self.expel(engine)
        while self._waiting:
            guest = self._waiting.popleft()
            chosen = lora(adapter if guest.adapter is None else guest.adapter)
            try:
                engine.add_request(guest.name, guest.prompt, guest.params, lora_request=chosen)
            except Exception as error:  # whatever vLLM has against it: its client is told
                guest.deliver(error)
            else:
                self._inside[guest.name] = guest
                if guest.logprobs_by_id:
                    leave_logprobs_undecoded(engine, guest.name)

    def expel(self, engine: LLMEngine) -> None:
        """Take those out whose clients went away."""
        while self._gone:
            name = self._gone.popleft()
            if self._inside.pop(name, None) is not None:
                engine.abort_request([name])
            for guest in [one for one in tuple(self._waiting) if one.name == name]:
                self._waiting.remove(guest)

    def takes(self, output: Any) -> bool:
        """Hand on an output of one of them; False where it is another's."""
        guest = self._inside.get(output.request_id)
        if guest is None:
            return False
        if output.finished:
            del self._inside[output.request_id]
        guest.deliver(output)
        return True

    def fail(self, error: Exception) -> None:
        """Tell all that the engine failed."""
        for guest in [*self._inside.values(), *self._waiting]:
            guest.deliver(error)
        self._inside.clear()
        self._waiting.clear()

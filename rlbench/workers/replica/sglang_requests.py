"""Requests to an SGLang server: sampling options by its names, streams of tokens, and scores of given sequences."""

from __future__ import annotations

import json
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlbench.data.prompts.sampling import DEFAULT_MAX_TOKENS, reshaping
from rlbench.errors import DataError, EngineError
from rlbench.units import format_seconds
from rlbench.workers.replica.sglang_server import TOKENS_AT_A_TIME, SglangServer

WAIT_S, ABORT_S = 0.1, 10.0
SAME = (
    "temperature",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
)
RENAMED = {"min_tokens": "min_new_tokens", "include_stop_str_in_output": "no_stop_trim"}
CUTTING = ("top_p", "top_k", "min_p")
"""After these SGLang's log-probs are still those of the whole distribution."""
GRAMMARS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "json": ("json_schema", lambda schema: schema if isinstance(schema, str) else json.dumps(schema)),
    "regex": ("regex", str),
    "grammar": ("ebnf", str),
    "choice": ("regex", lambda choices: "|".join(map(re.escape, choices))),
}


@dataclass
class SglangParams:
    """Sampling options of one request by SGLang's names; what a turn changes has fields of its own."""

    options: dict[str, Any]
    max_tokens: int | None
    min_tokens: int = 0
    seed: int = 0

    def body(self, room: int) -> dict[str, Any]:
        """Return what is sent; `room`: tokens that the model still holds."""
        limits = {"max_new_tokens": min(self.max_tokens or room, room), "min_new_tokens": self.min_tokens}
        return {**self.options, **limits, "sampling_seed": self.seed, "stream_interval": TOKENS_AT_A_TIME}


def sampling_params(sampling: Mapping[str, Any]) -> SglangParams:
    """Return SGLang's parameters for checked sampling options; refuse those it cannot honour as vLLM does."""
    chosen = {name: value for name, value in sampling.items() if value is not None}
    options: dict[str, Any] = {"temperature": 1.0}
    for name in reshaping(chosen):
        if name in CUTTING:
            raise DataError(
                f"{name}={chosen[name]!r} cannot be honoured by SGLang: its log-probs would be those of the "
                'distribution before the cut. Leave it out, or use executor="vllm"'
            )
        if name in ("bad_words", "allowed_token_ids", "first_token_temperature"):
            raise DataError(f'{name} is not among SGLang\'s sampling parameters: use executor="vllm" for it')
    if (bias := chosen.get("logit_bias")) is not None:
        options["logit_bias"] = {str(token): float(value) for token, value in bias.items()}
    for kind, grammar in (chosen.get("structured_outputs") or {}).items():
        if kind not in GRAMMARS:
            raise DataError(f"structured_outputs: SGLang takes {', '.join(GRAMMARS)}, not {kind!r}")
        name, spelled = GRAMMARS[kind]
        options[name] = spelled(grammar)
    options |= {name: chosen[name] for name in SAME if name in chosen}
    options |= {RENAMED[name]: chosen[name] for name in RENAMED if name in chosen and name != "min_tokens"}
    most = sampling.get("max_tokens", DEFAULT_MAX_TOKENS)
    return SglangParams(options, most, int(chosen.get("min_tokens", 0)))


@dataclass
class _Logprobs:
    logprobs: list[float]


@dataclass
class _Part:
    """New tokens of a request, under vLLM's names."""

    token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: str | None = None
    stop_reason: Any = None
    routed_experts: None = None


@dataclass
class _Output:
    """What one event brought."""

    outputs: list[_Part]
    finished: bool
    prompt_token_ids: list[int]
    num_cached_tokens: int | None


@dataclass
class _Event:
    """What a reader's thread puts in the queue: tokens, or the error that ended its stream."""

    request: str
    output: _Output | None = None
    error: BaseException | None = None


@dataclass
class SglangRequests:
    """The requests of one call, each streamed by a thread. What is left of them when the call ends is aborted."""

    server: SglangServer
    serial: str
    max_model_len: int
    running: dict[str, Any] = field(default_factory=dict)
    _events: queue.SimpleQueue[_Event] = field(default_factory=queue.SimpleQueue)
    _count: int = 0

    def __enter__(self) -> SglangRequests:
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.running:
            self.server.post("/abort_request", {"rid": name})
        self.running.clear()

    @property
    def busy(self) -> bool:
        """Whether any of them runs."""
        return bool(self.running)

    def add(self, known_as: Any, prompt: list[int], params: SglangParams, media: None = None) -> None:
        """Send one request; of text alone."""
        self._count += 1
        name = f"{self.serial}-{self._count}"
        body = {
            "rid": name,
            "input_ids": prompt,
            "sampling_params": params.body(self.max_model_len - len(prompt)),
            "return_logprob": True,
        }
        self.running[name] = known_as
        threading.Thread(target=self._read, args=(name, body), daemon=True, name=f"rlbench sglang {name}").start()

    def step(self) -> Iterator[tuple[Any, Any]]:
        """Wait for tokens of any request, at most `WAIT_S`."""
        yield from self._events_until(time.monotonic() + WAIT_S)

    def held_back(self) -> Iterator[tuple[Any, Any]]:
        """Abort what runs, and yield the tokens that SGLang still had of each."""
        for name in self.running:
            self.server.post("/abort_request", {"rid": name})
        deadline = time.monotonic() + ABORT_S
        while self.running:
            if time.monotonic() > deadline:
                waited = format_seconds(ABORT_S)
                raise EngineError(f"SGLang did not end {len(self.running)} aborted requests within {waited}")
            yield from self._events_until(deadline)

    def _events_until(self, deadline: float) -> Iterator[tuple[Any, Any]]:
        """Yield the next event, waiting for it until `deadline`, and those that are there with it."""
        wait: float | None = max(0.0, deadline - time.monotonic())
        while True:
            try:
                event = self._events.get(timeout=wait) if wait else self._events.get_nowait()
            except queue.Empty:
                return
            wait = None
            if event.request not in self.running:
                continue
            if event.error is not None:
                del self.running[event.request]
                raise event.error
            assert event.output is not None
            known_as = self.running[event.request]
            if event.output.finished:
                del self.running[event.request]
            yield known_as, event.output

    def _read(self, name: str, body: dict[str, Any]) -> None:
        """Put what one request streams into the queue; on a thread of its own."""
        try:
            for event in self.server.stream(body):
                part = _part(event)
                cached = event["meta_info"].get("cached_tokens")
                output = _Output([part], part.finish_reason is not None, body["input_ids"], cached)
                self._events.put(_Event(name, output))
                if part.finish_reason is not None:
                    return
            raise EngineError("SGLang's stream ended before its request did: the server may have died")
        except BaseException as error:  # told to whoever waits, on the thread that computes
            self._events.put(_Event(name, error=error))


def _part(event: Mapping[str, Any]) -> _Part:
    """Read one event: new tokens with their log-probs, and how the request ended."""
    about = event["meta_info"]
    tokens = [int(token) for token in event["output_ids"]]
    entries = about["output_token_logprobs"]
    if [int(entry[1]) for entry in entries] != tokens:
        raise EngineError(f"SGLang gave {len(tokens)} tokens, and log-probs of {len(entries)} that are not those")
    reason = about.get("finish_reason") or {}
    return _Part(tokens, _Logprobs([float(entry[0]) for entry in entries]), reason.get("type"), reason.get("matched"))


def score(server: SglangServer, token_ids: Sequence[Sequence[int]], max_model_len: int) -> list[np.ndarray]:
    """Log p(token t | tokens < t) at temperature 1, t >= 1, float32 (len - 1,) for each sequence.

    A sequence that fills the model leaves no room to generate: the last token's is asked for at the generated position.
    """
    scores = []
    for ids in map(list, token_ids):
        full = len(ids) == max_model_len
        body = {
            "input_ids": ids[:-1] if full else ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        if full:
            body["token_ids_logprob"] = [ids[-1]]
        about = server.post("/generate", body)["meta_info"]
        values = [entry[0] for entry in about["input_token_logprobs"][1:]]
        if full:
            values.append(about["output_token_ids_logprobs"][0][0][0])
        scores.append(np.array(values, dtype=np.float32))
    return scores

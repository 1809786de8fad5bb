"""Requests in an in-process vLLM engine: drawing samples and scoring sequences. Whatever ends a call, none of its
requests stays in the engine."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine import FinishReason

from rlbench.data.prompts.sampling import DEFAULT_MAX_TOKENS, NEUTRAL, turn_seed
from rlbench.errors import DataError
from rlbench.workers.replica.guests import Guests, lora
from rlbench.workers.replica.media import PromptMedia
from rlbench.workers.replica.vllm_routing import RecordedRequests

if TYPE_CHECKING:
    from vllm.inputs.engine import MultiModalInput
    from vllm.v1.engine.llm_engine import LLMEngine

TOKENS_AT_A_TIME = 8
"""Of a sample that the engine gives out: an output per token costs a seventh of a small model's rollout."""
FIRST = "first_token_temperature"
OVER_TOKENS = ("stop", "bad_words", "structured_outputs", "presence_penalty", "frequency_penalty")
"""Options that look at all tokens of a response, of which a request for what follows the first has one less."""
AFTER_FIRST = 2**31  # no number of a turn


class Heated(SamplingParams):
    """Parameters without vLLM's bound of 2 on the temperature: of a first token 10 is usual."""

    def _verify_args(self) -> None:
        heat = self.temperature  # type: ignore[has-type]
        self.temperature = min(heat, 2.0)
        super()._verify_args()
        self.temperature = heat


def sampling_params(sampling: dict[str, Any], kind: type[SamplingParams] = SamplingParams) -> SamplingParams:
    """Return vLLM's parameters for checked sampling options; `max_tokens=None` lets a sample fill the model."""
    options = {"max_tokens": DEFAULT_MAX_TOKENS, **sampling}
    options.pop(FIRST, None)
    try:
        if options.get("structured_outputs") is not None:
            options["structured_outputs"] = StructuredOutputsParams(**options["structured_outputs"])
        if options.get("logit_bias") is not None:  # vLLM compares the keys with token ids
            options["logit_bias"] = {int(token): float(bias) for token, bias in options["logit_bias"].items()}
        return kind(
            **options,
            logprobs=0,  # no alternatives: only the sampled token's
            flat_logprobs=True,
            detokenize=bool(options.get("stop")),  # decoding while generating costs a third of the tokens/s
            output_kind=RequestOutputKind.DELTA,
            stream_interval=TOKENS_AT_A_TIME,
        )
    except (VLLMValidationError, ValueError, TypeError) as error:
        raise DataError(f"sampling options {sampling}: {error}") from error


def first_token_params(sampling: dict[str, Any]) -> SamplingParams | None:
    """Return the parameters of a response's first token where it is drawn at a temperature of its own; FIRE sampling,
    arXiv 2410.21236."""
    if (heat := sampling.get(FIRST)) is None:
        return None
    if not (isinstance(heat, int | float) and 0 < heat < math.inf):
        raise DataError(f"{FIRST}={heat!r}: give a number above 0")
    if over := [name for name in OVER_TOKENS if sampling.get(name) not in (*NEUTRAL.get(name, (None,)), [], "")]:
        raise DataError(f"{FIRST} and {over[0]} cannot be honoured together: that looks at the first token again")
    shortest = min(1, sampling.get("min_tokens") or 0)
    return sampling_params({**sampling, "temperature": float(heat), "max_tokens": 1, "min_tokens": shortest}, Heated)


class EngineRequests:
    """The requests of one call, computed with the `adapter` of that number (0: with none). `running` maps the engine's
    request name to what the caller knows it by. `guests`: requests of the endpoint, whose turn comes with each step;
    `admit`: also that of new ones, with the adapter of that number unless they name another. `first`: how the first
    token of each is drawn, where otherwise than the rest: by a request of its own, which the caller does not see.
    `recorded`: outputs that end have `routed_experts` from the workers' records, where vLLM does not give them."""

    def __init__(
        self,
        engine: LLMEngine,
        serial: int,
        adapter: int = 0,
        guests: Guests | None = None,
        admit: int | None = None,
        first: SamplingParams | None = None,
        recorded: bool = False,
    ) -> None:
        self._recorded = RecordedRequests(engine) if recorded else None
        self._adapter = lora(adapter)
        self._guests, self._admit = guests, admit
        self.engine = engine
        self.running: dict[str, Any] = {}
        self._serial = serial
        self._count = 0
        self._first = first
        self._rest: dict[str, tuple[list[int], SamplingParams, MultiModalInput | None]] = {}

    def __enter__(self) -> EngineRequests:
        return self

    def __exit__(self, *_: object) -> None:
        unfinished = list(self.running)
        self.running.clear()
        if unfinished:
            self.engine.abort_request(unfinished)

    def add(
        self, known_as: Any, prompt: list[int], params: SamplingParams, media: MultiModalInput | None = None
    ) -> None:
        """Queue one request; `media`: of the prompt that its token ids begin with."""
        if self._first is None:
            self._queue(known_as, prompt, params, media)
            return
        first = copy.copy(self._first)
        first.seed = params.seed
        self._rest[self._queue(known_as, prompt, first, media)] = prompt, params, media

    def _queue(self, known_as: Any, prompt: list[int], params: SamplingParams, media: MultiModalInput | None) -> str:
        self._count += 1
        name = f"{self._serial}-{self._count}"
        try:
            told = tokens_input(prompt) if media is None else {**media, "prompt_token_ids": prompt}
            inside = self.engine.add_request(name, told, params, lora_request=self._adapter)
        except VLLMValidationError as error:
            raise DataError(f"vLLM refuses this request: {error}") from error
        self.running[name] = known_as
        if self._recorded is not None:
            self._recorded.queued(name, inside, len(prompt))
        return name

    @property
    def busy(self) -> bool:
        """Whether the engine has something to compute, also where it is the endpoint's alone."""
        return bool(self.running) or (self._admit is not None and bool(self._guests))

    def step(self) -> Iterator[tuple[Any, Any]]:
        """One engine step: (what the caller knows the request by, its output); forgets finished ones."""
        if self._guests is not None and self._admit is not None:
            self._guests.admit(self.engine, self._admit)
        outputs = self.engine.step()
        if self._recorded is not None:
            self._recorded.complete(outputs)
        for output in outputs:
            if self._guests is not None and self._guests.takes(output):
                continue
            known_as = self.running[output.request_id]
            if output.finished:
                del self.running[output.request_id]
                if output.request_id in self._rest:
                    self._go_on(known_as, output)
            yield known_as, output

    def _go_on(self, known_as: Any, output: Any) -> None:
        """Queue what follows a first token, unless the sample ends with it."""
        prompt, params, media = self._rest.pop(output.request_id)
        (part,) = output.outputs
        begun = [*prompt, *part.token_ids]
        full = len(begun) >= self.engine.vllm_config.model_config.max_model_len
        if part.finish_reason != "length" or params.max_tokens == 1 or full:
            return
        rest = copy.copy(params)
        rest.seed = turn_seed(params.seed or 0, AFTER_FIRST)
        rest.max_tokens = params.max_tokens and params.max_tokens - 1
        rest.min_tokens = max(0, params.min_tokens - 1)
        self._queue(known_as, begun, rest, media)
        output.finished = False

    def held_back(self) -> Iterator[tuple[Any, Any]]:
        """The tokens of running requests that the engine has drawn and not given out yet, each as an aborted output."""
        processor = self.engine.output_processor
        for name, known_as in self.running.items():
            (state,) = (processor.request_states[own] for own in processor.external_req_ids[name])
            output = state.make_request_output([], None, FinishReason.ABORT, None)
            if self._recorded is not None:
                self._recorded.complete([output])
            yield known_as, output


def score(
    requests: EngineRequests, token_ids: list[list[int]], max_model_len: int, images: PromptMedia
) -> list[np.ndarray]:
    """Log p(token t | tokens < t) at temperature 1, t >= 1, float32 (len - 1,) for each sequence."""
    scores: list[np.ndarray] = [np.zeros(0, np.float32)] * len(token_ids)
    for index in range(len(token_ids)):
        media = images[index]
        ids = token_ids[index]
        # A sequence that fills the model leaves no room to generate, and vLLM always generates: the last
        # token's log-prob is then asked for at the generated position instead.
        full = len(ids) == max_model_len
        params = SamplingParams(
            max_tokens=1,
            prompt_logprobs=0,
            logprob_token_ids=ids[-1:] if full else None,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        requests.add(index, ids[:-1] if full else ids, params, media)
    while requests.running:
        for index, output in requests.step():
            flat = output.prompt_logprobs
            values = [flat.logprobs[start] for start in flat.start_indices[1:]]
            if len(values) < len(token_ids[index]) - 1:
                generated = output.outputs[0].logprobs
                values.append(generated.logprobs[generated.token_ids.index(token_ids[index][-1])])
            scores[index] = np.array(values, dtype=np.float32)
    return scores

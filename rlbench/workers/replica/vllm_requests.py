"""Requests in an in-process vLLM engine: drawing samples and scoring sequences, step by step.

Whatever ends a call, no request of it stays in the engine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sized
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from rlbench.data.prompts.sampling import DEFAULT_MAX_TOKENS
from rlbench.data.rollouts.jobs import GenerateJob
from rlbench.dispatch.context import current
from rlbench.errors import DataError
from rlbench.workers.replica.job import Progress, Sample
from rlbench.workers.replica.pause import Gate

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine


def sampling_params(sampling: dict[str, Any]) -> SamplingParams:
    """vLLM's parameters for checked sampling options; `max_tokens=None` lets a sample fill the model's length.

    Raises:
        DataError: a value vLLM does not accept, in its words.
    """
    options = {"max_tokens": DEFAULT_MAX_TOKENS, **sampling}
    try:
        if options.get("structured_outputs") is not None:
            options["structured_outputs"] = StructuredOutputsParams(**options["structured_outputs"])
        if options.get("logit_bias") is not None:  # vLLM compares the keys with token ids
            options["logit_bias"] = {int(token): float(bias) for token, bias in options["logit_bias"].items()}
        return SamplingParams(
            **options,
            logprobs=0,  # no alternatives: only the sampled token's
            flat_logprobs=True,
            detokenize=bool(options.get("stop")),  # decoding while generating costs a third of the tokens/s
            output_kind=RequestOutputKind.DELTA,
        )
    except (VLLMValidationError, ValueError, TypeError) as error:
        raise DataError(f"sampling options {sampling}: {error}") from error


class EngineRequests:
    """The requests of one call. `running` maps the engine's request name to what the caller knows it by."""

    def __init__(self, engine: LLMEngine, serial: int) -> None:
        self.engine = engine
        self.running: dict[str, Any] = {}
        self._serial = serial
        self._count = 0

    def __enter__(self) -> EngineRequests:
        return self

    def __exit__(self, *_: object) -> None:
        if self.running:
            self.engine.abort_request(list(self.running))

    def add(self, known_as: Any, prompt: list[int], params: SamplingParams) -> None:
        """Queue one request. Raises DataError where vLLM refuses it."""
        self._count += 1
        name = f"{self._serial}-{self._count}"
        try:
            self.engine.add_request(name, tokens_input(prompt), params)
        except VLLMValidationError as error:
            raise DataError(f"vLLM refuses this request: {error}") from error
        self.running[name] = known_as

    def step(self) -> Iterator[tuple[Any, Any]]:
        """One engine step: (what the caller knows the request by, its output); forgets finished ones."""
        for output in self.engine.step():
            known_as = self.running[output.request_id]
            if output.finished:
                del self.running[output.request_id]
            yield known_as, output


def draw(
    requests: EngineRequests,
    job: GenerateJob,
    prompts: list[list[int]],
    params: SamplingParams,
    max_num_seqs: int,
    gate: Gate,
    decode: Callable[[list[int]], str] | None = None,
) -> tuple[list[Sample], dict[str, float]]:
    """Step until every claimed sample is finished, or the call is asked to stop; wait while the gate is closed.

    `decode`: for the first finished texts in the progress.

    Returns:
        The samples that have tokens (running ones end with finish reason `abort` on a stop), and tokens and
        seconds.
    """
    context = current()
    progress = Progress(context, decode)
    samples: list[Sample] = []
    running = requests.running
    claims = feed(job, running, max_num_seqs)
    while gate.passes(context):
        for index in next(claims, ()):
            for number in range(job.n):
                sample = Sample(index, number)
                one = copy.copy(params)
                one.seed = int(job.seeds[index, number]) & 0x7FFF_FFFF_FFFF_FFFF
                requests.add(sample, prompts[index], one)
                samples.append(sample)
        if not running:
            break
        for sample, output in requests.step():
            progress.tokens += extend(sample, output)
            if output.finished:
                progress.finish(sample)
        progress.tick(len(samples) - len(running), len(running), len(samples))
    for sample in running.values():
        sample.finish = "abort"
    kept = [sample for sample in samples if sample.tokens]
    progress.tick(len(kept), 0, len(samples), force=True)
    return kept, progress.stats


def score(requests: EngineRequests, token_ids: list[list[int]], max_model_len: int) -> list[np.ndarray]:
    """Log p(token t | tokens < t) at temperature 1, t >= 1, float32 (len - 1,) for each sequence."""
    found: list[np.ndarray] = [np.zeros(0, np.float32)] * len(token_ids)
    for index, ids in enumerate(token_ids):
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
        requests.add(index, ids[:-1] if full else ids, params)
    while requests.running:
        for index, output in requests.step():
            found[index] = _scores(output, token_ids[index])
    return found


def feed(job: GenerateJob, running: Sized, max_num_seqs: int) -> Iterator[list[int]]:
    """Prompts to start before each step. A job of our own starts whole (vLLM queues it). A shared one is claimed in
    small shares that grow with what runs here (`running`), so that replicas that start together split a small job
    evenly and a large one still fills up within a few steps."""
    if not job.shared:
        yield list(range(len(job.prompts)))
        return
    claim = current().claim
    while True:
        room = (max_num_seqs - len(running)) // job.n
        if room < 1 and running:
            yield []
            continue
        claimed = claim(min(max(room, 1), 1 + len(running) // (4 * job.n)))
        if not claimed:
            return
        yield claimed


def extend(sample: Sample, output: Any) -> int:
    """Append what one step brought to a sample; return the number of new tokens."""
    (part,) = output.outputs
    sample.tokens.extend(part.token_ids)
    if part.logprobs is not None:
        sample.logprobs.extend(part.logprobs.logprobs)
    if part.text:
        sample.text.append(part.text)
    if output.finished:
        sample.finish = part.finish_reason
    return len(part.token_ids)


def _scores(output: Any, ids: list[int]) -> np.ndarray:
    """Log-probs of the tokens 1… of a scored sequence."""
    flat = output.prompt_logprobs
    values = [flat.logprobs[start] for start in flat.start_indices[1:]]
    if len(values) < len(ids) - 1:
        generated = output.outputs[0].logprobs
        values.append(generated.logprobs[generated.token_ids.index(ids[-1])])
    return np.array(values, dtype=np.float32)

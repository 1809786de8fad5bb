"""The samples of one generate call, whatever engine draws them: which prompts begin, what each step brought, a stop."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sized
from typing import Any, Protocol

from rlbench.data.rollouts.jobs import GenerateJob
from rlbench.dispatch.context import current
from rlbench.workers.replica.job import ProgressReporter, Sample
from rlbench.workers.replica.media import PromptMedia
from rlbench.workers.replica.state import Gate


class Requests(Protocol):
    """Requests in an engine. An output has `finished`, `prompt_token_ids`, `num_cached_tokens` and one part in
    `outputs`: new `token_ids`, their log-probs as `logprobs.logprobs`, and at its end `finish_reason`, `stop_reason`
    and `routed_experts`, as in vLLM."""

    running: dict[str, Any]

    @property
    def busy(self) -> bool:
        """Whether the engine has something to compute."""

    def add(self, known_as: Any, prompt: list[int], params: Any, media: Any = None) -> None:
        """Queue one request; `media`: the engine's input of what stands in the prompt its token ids begin with."""

    def step(self) -> Iterator[tuple[Any, Any]]:
        """Wait for what is next: (what the caller knows the request by, its output); forgets finished ones."""

    def held_back(self) -> Iterator[tuple[Any, Any]]:
        """The tokens of running requests that were drawn and not given out yet, each as an aborted output."""


def draw(
    requests: Requests,
    job: GenerateJob,
    prompts: list[list[int]],
    params: Any,
    max_num_seqs: int,
    gate: Gate,
    decode: Callable[[list[int]], str],
    given: PromptMedia | None = None,
) -> tuple[list[Sample], dict[str, float]]:
    """Step until every claimed sample is finished, or the call is asked to stop; return those that have tokens."""
    context = current()
    progress = ProgressReporter(context, decode)
    samples: list[Sample] = []
    running = requests.running
    claims = feed(job, running, max_num_seqs)
    while gate.passes(context):
        for index in next(claims, ()):
            media = None if given is None else given[index]
            for number in range(job.n):
                sample = Sample(index, number)
                one = copy.copy(params)
                one.seed = int(job.seeds[index, number]) & 0x7FFF_FFFF_FFFF_FFFF
                requests.add(sample, prompts[index], one, media)
                samples.append(sample)
        if not running:
            break
        for sample, output in requests.step():
            progress.tokens += extend(sample, output)
            if output.finished:
                progress.answered(output)
                progress.finish(sample)
        told = samples if job.told else ()
        progress.tick(len(samples) - len(running), len(running), len(samples), told=told)
    for sample, output in requests.held_back():
        progress.tokens += extend(sample, output)
    results = [sample for sample in samples if sample.tokens]
    progress.tick(len(results), 0, len(samples), force=True)
    return results, progress.stats


def feed(job: GenerateJob, running: Sized, max_num_seqs: int) -> Iterator[list[int]]:
    """Yield the prompts to start before each step: all of a job of our own (vLLM queues it), small shares of a shared
    one that grow with what runs here, so that replicas split a small job evenly and a large one still fills up. Of a
    job of our own with images, videos or sounds as many as there is room for: all pixels could fill the memory."""
    if not job.shared and not job.media:
        yield list(range(len(job.prompts)))
        return
    own = iter(range(len(job.prompts)))
    claim = current().claim if job.shared else lambda count: list(itertools.islice(own, count))
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
    if output.finished:
        sample.finish = part.finish_reason
        sample.stop = part.stop_reason if isinstance(part.stop_reason, str) else ""
        sample.take_routing(part.routed_experts)
    return len(part.token_ids)

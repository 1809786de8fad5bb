"""Samples of several turns. A turn is a request whose prompt is what the sample has so far; environments answer beside
the thread that waits for the engine, so the others' requests go on."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlbench.data.base.ragged import Ragged
from rlbench.data.base.routing import routing_rows
from rlbench.data.prompts.images import PlacedImage
from rlbench.data.prompts.placing import by_kind
from rlbench.data.prompts.prompt import Prompt
from rlbench.data.prompts.sampling import turn_seed
from rlbench.data.rollouts.contexts import moved
from rlbench.data.rollouts.jobs import GeneratedArrays, GenerateJob
from rlbench.dispatch.context import current
from rlbench.envs.bridge import common
from rlbench.envs.calls import EnvCall, EnvCalls
from rlbench.envs.episode import Episode, Limits
from rlbench.envs.protocol import unpacked
from rlbench.workers.replica.drawing import Requests, extend, feed
from rlbench.workers.replica.job import ProgressReporter, Sample
from rlbench.workers.replica.media import PromptMedia, SampleMedia
from rlbench.workers.replica.state import Gate

WAIT_S = 0.02  # how long the stepping thread sleeps where every sample waits for its environment
CLOSE_WAIT_S, STOPPED_CLOSE_WAIT_S = 10.0, 0.5
"""For the environments' `close` at the end of a call, and of one that was stopped."""


@dataclass(eq=False, kw_only=True)
class TurnSample(Sample):
    """A sample and its episode. `stopped_by_string`: so ended its last turn."""

    own: Episode
    pictures: SampleMedia | None = None
    stopped_by_string: bool = False

    def take_routing(self, given: np.ndarray | None, begin: int = 0) -> None:
        """Take the experts of a request, which begins where the context does that it was sampled behind."""
        contexts = self.own.contexts
        super().take_routing(given, len(self.own.opening) + contexts[-1] if contexts else begin)


class TurnDrawer:
    """The samples of one generate call with an environment; `params` are of every turn, `tokenizers` of each
    prompt, `model` is vLLM's `ModelConfig`."""

    def __init__(
        self,
        requests: Requests,
        job: GenerateJob,
        prompts: list[list[int]],
        params: Any,
        tokenizers: Sequence[Any],
        decode: Callable[[list[int]], str],
        model: Any,
        images: PromptMedia | None = None,
    ) -> None:
        assert job.env is not None
        self._images = images
        self.requests, self.job, self.prompts, self.params = requests, job, prompts, params
        self._tokenizers, self._decode = tokenizers, decode
        self._limits = Limits(
            model.max_model_len,
            job.env.max_turns,
            job.env.max_total_tokens,
            model.get_vocab_size(),
            job.env.thoughts,
        )
        self._make = unpacked(job.env.blob)
        self._calls = EnvCalls(job.env.timeout_s)
        self._active: dict[TurnSample, str] = {}
        self._roles: set[str] = set()  # that the chat template knows
        self.samples: list[TurnSample] = []

    def draw(self, max_num_seqs: int, gate: Gate) -> tuple[list[TurnSample], dict[str, float]]:
        """Step until every claimed sample is over, or the call is asked to stop; return those that have tokens or an
        error."""
        context = current()
        progress = ProgressReporter(context, self._decode)
        claims = feed(self.job, self._active, max_num_seqs)
        try:
            while gate.passes(context):
                self._begin(next(claims, []))
                if not self._active:
                    break
                for call in self._calls.finished(0.0 if self.requests.busy else WAIT_S):
                    self._answered(call, progress)
                if self.requests.busy:
                    self._step(progress)
                progress.tick(len(self.samples) - len(self._active), len(self._active), len(self.samples))
        finally:
            self._end(context.stop_requested())
        results = [s for s in self.samples if s.tokens or s.own.errors or s.finish != "abort"]
        progress.tick(len(results), 0, len(self.samples), force=True)
        return results, progress.stats | {"turns": float(sum(len(s.own.turn_rewards) for s in results))}

    def _begin(self, claimed: Sequence[int]) -> None:
        for index in claimed:
            own: dict[str, Any] = by_kind(self.job.media[index] if self.job.media else ())
            prompt = self.job.asked[index] if self.job.asked else Prompt(self.job.prompts[index], **own)
            seen, tokenizer = self._images, self._tokenizers[index]
            media = seen[index] if seen else None
            for number in range(self.job.n):
                pictures = seen.of_sample(index, media) if seen else None
                episode = Episode(
                    prompt, self.prompts[index], self._limits, self._make, tokenizer, self._decode, pictures
                )
                sample = TurnSample(index, number, own=episode, pictures=pictures)
                self.samples.append(sample)
                self._ask(sample, "reset", episode.begin)

    def _ask(self, sample: TurnSample, what: str, call: Any) -> None:
        self._active[sample] = what
        self._calls.start((sample, what), call, late=sample.own.close)

    def _step(self, progress: ProgressReporter) -> None:
        for sample, output in self.requests.step():
            progress.tokens += _extend(sample, output)
            episode = sample.own
            if not output.finished:
                continue
            progress.answered(output)
            (part,) = output.outputs
            sample.stopped_by_string = isinstance(part.stop_reason, str)
            turn = episode.turn(sample.finish)
            self._ask(sample, "step", lambda episode=episode, turn=turn: episode.env.step(turn))

    def _answered(self, call: EnvCall, progress: ProgressReporter) -> None:
        """What an environment said: the next turn's request, or the sample's end."""
        sample, what = call.key
        if what == "close":
            if call.error is not None:
                sample.own.failed("close", call.error)
            return
        episode = sample.own
        if call.error is not None:  # the user's code, whatever it raised: it ends this sample alone
            episode.failed(what, call.error)
        elif self._goes_on(sample, what, call.value):
            self._request(sample)
            return
        elif episode.owes_reward:
            self._ask(sample, "end_reward", episode.env.end_reward)
            return
        self._settle(sample)
        if sample.tokens:
            progress.finish(sample)
        if not call.given_up:
            self._calls.start((sample, "close"), episode.close)

    def _goes_on(self, sample: TurnSample, what: str, value: Any) -> bool:
        """Take an environment's answer; False where it ends the sample, or is none."""
        episode = sample.own
        try:
            if what == "reset":
                opened = episode.opened(value)
                episode.check_role(self._roles)
                return opened
            if what == "end_reward":
                episode.paid(value)
                return False
            ended = sample.finish == "stop" and not sample.stopped_by_string
            return episode.stepped(value, sample.finish, ended)
        except Exception as error:  # a wrong value of the user's, wherever it shows
            episode.failed(what, error)
            return False

    def _request(self, sample: TurnSample) -> None:
        episode = sample.own
        one = copy.copy(self.params)
        one.seed = turn_seed(int(self.job.seeds[sample.prompt, sample.index]), episode.number)
        one.max_tokens = min(one.max_tokens or episode.room, episode.room)
        one.min_tokens = min(one.min_tokens, one.max_tokens)
        sample.tokens, sample.logprobs, sample.finish = [], [], ""
        self._active[sample] = "request"
        self.requests.add(sample, episode.context, one, sample.pictures and sample.pictures.media)

    def _settle(self, sample: TurnSample) -> None:
        episode = sample.own
        self._active.pop(sample, None)
        sample.tokens, sample.logprobs, sample.stop = episode.tokens, episode.logprobs, ""
        sample.finish = episode.finish

    def _end(self, stopped: bool) -> None:
        """End what still runs (an interrupt), and let the environments close."""
        for sample, output in self.requests.held_back():
            _extend(sample, output)
        running = {key[0] for key in self._calls.give_up(lambda key: key[1] == "close")}
        for sample in list(self._active):
            sample.own.stopped()
            self._settle(sample)
            if sample not in running and sample.own.env is not None:
                self._calls.start((sample, "close"), sample.own.close)
        deadline = time.monotonic() + (STOPPED_CLOSE_WAIT_S if stopped else CLOSE_WAIT_S)
        while self._calls.pending and time.monotonic() < deadline:
            for call in self._calls.finished(WAIT_S):
                if call.key[1] == "close" and call.error is not None:
                    call.key[0].own.failed("close", call.error)
        for sample, _ in self._calls.give_up(lambda key: False):
            sample.own.failed("close", TimeoutError("close() was still running when the call ended"))
        self._calls.close()


def _extend(sample: TurnSample, output: Any) -> int:
    before = len(sample.tokens), len(sample.logprobs)
    count = extend(sample, output)
    sample.own.extend(sample.tokens[before[0] :], sample.logprobs[before[1] :])
    return count


def with_turns(samples: Sequence[TurnSample], arrays: GeneratedArrays) -> GeneratedArrays:
    """Add what an environment adds. What `reset` observed beyond what all samples of a prompt have in common stands,
    untrained, at the front of each response, and so does its first image with all that follows."""
    shared = _shared_openings(samples, arrays.prompt_token_ids)
    rows = [(sample.own, sample.own.opening[len(shared[sample.prompt]) :]) for sample in samples]  # and what is ahead
    flat = Ragged.from_rows([[*ahead, *episode.tokens] for episode, ahead in rows], np.int32)
    logprobs = Ragged.from_rows([[0.0] * len(ahead) + episode.logprobs for episode, ahead in rows], np.float32)
    return replace(
        arrays,
        token_ids=flat.values,
        offsets=flat.offsets,
        logprobs=logprobs.values,
        mask=Ragged.from_rows([[False] * len(ahead) + episode.mask for episode, ahead in rows], bool).values,
        turns=Ragged.from_rows([[0] * len(ahead) + episode.turns for episode, ahead in rows], np.int32).values,
        turn_rewards=[sample.own.turn_rewards for sample in samples],
        infos=[moved(episode.info, len(ahead)) for episode, ahead in rows],
        observed_images=[
            tuple(PlacedImage.of(image, image.at - len(shared[sample.prompt])) for image in sample.own.images)
            for sample in samples
        ],
        prompt_token_ids=shared,
        routing=routing_rows(
            [sample.routing for sample in samples],
            [len(shared[sample.prompt]) + n for sample, n in zip(samples, flat.lengths.tolist(), strict=True)],
        ),
    )


def _shared_openings(samples: Sequence[TurnSample], prompts: dict[int, list[int]]) -> dict[int, list[int]]:
    """By prompt, the longest beginning that the first requests of its samples have in common."""
    openings: dict[int, list[int]] = {}
    for sample in samples:
        if opening := sample.own.opening:
            known = openings.get(sample.prompt, opening)
            first = min((image.at for image in sample.own.images), default=len(opening))
            openings[sample.prompt] = known[: min(common(known, opening), first)]
    return prompts | openings

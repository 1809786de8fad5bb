"""Samples of several turns in an in-process vLLM engine: environments answer beside the thread that steps it.

A turn is a request of its own, whose prompt is what the sample has so far, token by token; the engine's prefix cache
holds all of that but the last observation. While an environment works, the others' requests go on.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from vllm import SamplingParams

from rlbench.data.base.ragged import Ragged
from rlbench.data.prompts.prompt import Prompt
from rlbench.data.rollouts.jobs import EnvJob, GeneratedArrays, GenerateJob
from rlbench.dispatch.context import current
from rlbench.envs.bridge import common
from rlbench.envs.calls import Call, EnvCalls
from rlbench.envs.episode import Episode, Limits
from rlbench.envs.protocol import unpacked
from rlbench.workers.replica.job import Progress, Sample, collect
from rlbench.workers.replica.pause import Gate
from rlbench.workers.replica.vllm_requests import EngineRequests, extend, feed

WAIT_S = 0.02
"""How long the stepping thread sleeps where every sample waits for its environment."""
CLOSE_WAIT_S, STOPPED_CLOSE_WAIT_S = 10.0, 0.5
"""For the environments' `close` at the end of a call, and of one that was stopped."""


@dataclass(eq=False)
class TurnSample(Sample):
    """A sample and its episode. `stopped_by_string`: so ended its last turn."""

    episode: Episode | None = None
    stopped_by_string: bool = False

    @property
    def own(self) -> Episode:
        """Its episode."""
        assert self.episode is not None
        return self.episode


def turn_seed(seed: int, turn: int) -> int:
    """Seed of a sample's turn: its own for the first, so that one turn alone draws what a plain sample draws."""
    if turn == 0:
        return seed & 0x7FFF_FFFF_FFFF_FFFF
    mixed = np.random.SeedSequence([seed % 2**64, turn]).generate_state(1, np.uint64)[0]
    return int(mixed) & 0x7FFF_FFFF_FFFF_FFFF


class TurnDrawer:
    """The samples of one generate call with an environment.

    Args:
        requests: of the call.
        job: with `env`, and `asked` for the prompts' labels.
        prompts: token ids by prompt.
        params: of every turn; `max_tokens` is per turn.
        tokenizer: of the model, or None.
        model: vLLM's `ModelConfig`.
    """

    def __init__(
        self,
        requests: EngineRequests,
        job: GenerateJob,
        prompts: list[list[int]],
        params: SamplingParams,
        tokenizer: Any,
        model: Any,
    ) -> None:
        assert job.env is not None
        self.requests, self.job, self.prompts, self.params = requests, job, prompts, params
        self._env: EnvJob = job.env
        self._tokenizer = tokenizer
        self._limits = Limits(
            model.max_model_len, self._env.max_turns, self._env.max_total_tokens, model.get_vocab_size()
        )
        self._make = unpacked(self._env.blob)
        self._calls = EnvCalls(self._env.timeout_s)
        self._active: dict[TurnSample, str] = {}
        self.samples: list[TurnSample] = []

    def draw(self, max_num_seqs: int, gate: Gate) -> tuple[list[TurnSample], dict[str, float]]:
        """Step until every claimed sample is over, or the call is asked to stop; wait while the gate is closed.

        Returns:
            The samples that have tokens, or an error to tell of; and tokens and seconds.
        """
        context = current()
        progress = Progress(context, self._decode)
        claims = feed(self.job, self._active, max_num_seqs)
        try:
            while gate.passes(context):
                self._begin(next(claims, []))
                if not self._active:
                    break
                for call in self._calls.finished(0.0 if self.requests.running else WAIT_S):
                    self._answered(call, progress)
                if self.requests.running:
                    self._step(progress)
                progress.tick(len(self.samples) - len(self._active), len(self._active), len(self.samples))
        finally:
            self._end(context.stop_requested())
        kept = [s for s in self.samples if s.tokens or s.own.errors or s.finish != "abort"]
        progress.tick(len(kept), 0, len(self.samples), force=True)
        return kept, progress.stats | {"turns": float(sum(len(s.own.turn_rewards) for s in kept))}

    def _begin(self, claimed: Sequence[int]) -> None:
        for index in claimed:
            prompt = self.job.asked[index] if self.job.asked else Prompt(self.job.prompts[index])
            for number in range(self.job.n):
                episode = Episode(prompt, self.prompts[index], self._limits, self._make, self._tokenizer, self._decode)
                sample = TurnSample(index, number, episode=episode)
                self.samples.append(sample)
                self._ask(sample, "reset", episode.begin)

    def _ask(self, sample: TurnSample, what: str, call: Any) -> None:
        self._active[sample] = what
        self._calls.start((sample, what), call, late=sample.own.close)

    def _step(self, progress: Progress) -> None:
        """One engine step; a turn that is complete goes to its environment."""
        for sample, output in self.requests.step():
            before = len(sample.tokens), len(sample.logprobs)
            progress.tokens += extend(sample, output)
            episode = sample.own
            episode.sampled(sample.tokens[before[0] :], sample.logprobs[before[1] :])
            if not output.finished:
                continue
            (part,) = output.outputs
            sample.stopped_by_string = isinstance(part.stop_reason, str)
            turn = episode.turn(sample.finish)
            self._ask(sample, "step", lambda episode=episode, turn=turn: episode.answer(turn))

    def _answered(self, call: Call, progress: Progress) -> None:
        """What an environment said: the next turn's request, or the sample's end."""
        sample, what = call.key
        if what == "close":
            if call.error is not None:
                sample.own.failed_to_close(call.error)
            return
        episode = sample.own
        if call.error is not None:  # the user's code, whatever it raised: it ends this sample alone
            episode.failed(what, call.error)
        elif self._goes_on(sample, what, call.value):
            self._request(sample)
            return
        self._over(sample, progress, close=not call.given_up)

    def _goes_on(self, sample: TurnSample, what: str, value: Any) -> bool:
        """Take an environment's answer; False where it ends the sample, or is none."""
        episode = sample.own
        try:
            if what == "reset":
                return episode.opened(value)
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
        self.requests.add(sample, episode.context, one)

    def _over(self, sample: TurnSample, progress: Progress, close: bool) -> None:
        """The sample is complete: it shows what its episode holds."""
        self._active.pop(sample, None)
        self._settle(sample)
        if sample.tokens:
            progress.finish(sample)
        if close:
            self._calls.start((sample, "close"), sample.own.close)

    def _settle(self, sample: TurnSample) -> None:
        episode = sample.own
        sample.tokens, sample.logprobs, sample.text = episode.tokens, episode.logprobs, []
        sample.finish = episode.finish

    def _end(self, stopped: bool) -> None:
        """End what still runs (an interrupt), and let the environments close."""
        running = {key[0] for key in self._calls.give_up(lambda key: key[1] == "close")}
        for sample in list(self._active):
            sample.own.stopped()
            self._active.pop(sample)
            self._settle(sample)
            if sample not in running and sample.own.env is not None:
                self._calls.start((sample, "close"), sample.own.close)
        for call in _until(self._calls, STOPPED_CLOSE_WAIT_S if stopped else CLOSE_WAIT_S):
            if call.key[1] == "close" and call.error is not None:
                call.key[0].own.failed_to_close(call.error)
        for sample, _ in self._calls.give_up(lambda key: False):
            sample.own.failed_to_close(TimeoutError("close() was still running when the call ended"))
        self._calls.close()

    def _decode(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(ids, skip_special_tokens=self.params.skip_special_tokens))


def collect_turns(
    samples: Sequence[TurnSample],
    texts: list[str],
    prompts: dict[int, list[int]],
    version: int,
    stats: dict[str, float],
) -> GeneratedArrays:
    """`collect`, with what an environment adds.

    Where `reset` gave the samples of one prompt different observations, the prompt's ids are what all have in common,
    and the rest stands, untrained, at the front of each response.
    """
    arrays = collect(samples, texts, prompts, version, stats)
    shared = _shared_openings(samples, arrays.prompt_token_ids)
    rows = [_whole(sample.own, len(shared[sample.prompt])) for sample in samples]
    flat = Ragged.from_rows([row[0] for row in rows], np.int32)
    return replace(
        arrays,
        token_ids=flat.values,
        offsets=flat.offsets,
        logprobs=Ragged.from_rows([row[1] for row in rows], np.float32).values,
        mask=Ragged.from_rows([row[2] for row in rows], bool).values,
        turns=Ragged.from_rows([row[3] for row in rows], np.int32).values,
        turn_rewards=[sample.own.turn_rewards for sample in samples],
        infos=[sample.own.info for sample in samples],
        prompt_token_ids=shared,
    )


def _whole(episode: Episode, shared: int) -> tuple[list[int], list[float], list[bool], list[int]]:
    """Tokens, log-probs, mask and turns of the response, what `reset` said beyond the shared prompt in front."""
    ahead = episode.opening[shared:]
    count = len(ahead)
    return (
        [*ahead, *episode.tokens],
        [0.0] * count + episode.logprobs,
        [False] * count + episode.mask,
        [0] * count + episode.turns,
    )


def _shared_openings(samples: Sequence[TurnSample], prompts: dict[int, list[int]]) -> dict[int, list[int]]:
    """By prompt, the longest beginning that the first requests of its samples have in common."""
    found: dict[int, list[int]] = {}
    for sample in samples:
        opening = sample.own.opening
        if opening:
            known = found.get(sample.prompt)
            found[sample.prompt] = opening if known is None else known[: common(known, opening)]
    return {index: found.get(index, ids) for index, ids in prompts.items()}


def _until(calls: EnvCalls, seconds: float) -> Iterator[Call]:
    """Finished calls until none is pending, for so long at most."""
    deadline = time.monotonic() + seconds
    while calls.pending and time.monotonic() < deadline:
        yield from calls.finished(WAIT_S)

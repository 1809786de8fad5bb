"""What vLLM's serving classes take for their engine: each request goes to the replica's own, and is kept when over."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.output_processor import RequestOutputCollector

from rlbench.data.prompts.placing import SOUND
from rlbench.data.prompts.sampling import NEUTRAL
from rlbench.data.runs.journal import Call, Choice, line_of, read
from rlbench.envs.policy import UNKEPT
from rlbench.workers.replica.guests import Guest, Guests
from rlbench.workers.replica.media import feature_extractor, media_limit, model_kind, moved, place_tokens
from rlbench.workers.replica.serving.media import TakenMedia
from rlbench.workers.replica.serving.runs import Joined, Runs
from rlbench.workers.replica.serving.texts import WholeTexts

KEPT_OF_SAMPLING = ("temperature", "seed", "max_tokens", "stop")
KEPT_OF_REQUEST = ("tools", "tool_choice", "chat_template_kwargs", "prompt")


@dataclass(frozen=True)
class Sender:
    """Who asks: the `run` it names ("" for none), its request's body, and the digests of the images, or
    the sounds, in that."""

    run: str
    body: Mapping[str, Any]
    media: tuple[str, ...] = ()


SENDER: contextvars.ContextVar[Sender] = contextvars.ContextVar("sender")


@dataclass(eq=False)
class Taken:
    """What has come of one choice so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    finish: str = "abort"

    def add(self, part: Any) -> None:
        """Add an output: of what was streamed the new tokens, else all of them."""
        self.ids.extend(part.token_ids)
        if isinstance(part.logprobs, FlatLogprobs):  # of the sampled tokens alone
            self.logprobs.extend(part.logprobs.logprobs)
        else:
            self.logprobs.extend(
                among[token].logprob for token, among in zip(part.token_ids, part.logprobs, strict=True)
            )
        if part.finish_reason is not None:
            self.finish = part.finish_reason
            self.versions = [(span.start, int(span.version)) for span in part.weight_versions or ()]


class EngineClient:
    """The part of vLLM's `EngineClient` that serving classes use. `adapters`: number of each model's adapter by name,
    None for the one synced last; `version_of` says the version of a number's weights."""

    errored = False
    dead_error = RuntimeError("the engine is gone")

    def __init__(
        self, engine: Any, guests: Guests, journal: Path, adapters: Mapping[str, int | None], version_of: Any
    ) -> None:
        from vllm.renderers import renderer_from_config

        self.vllm_config, self.model_config = engine.vllm_config, engine.model_config
        self.input_processor = engine.input_processor
        # a tokenizer of its own: that of the engine is used by the thread that steps it
        self.renderer = renderer_from_config(engine.vllm_config)
        self._texts = WholeTexts(self.renderer.tokenizer)
        self._guests, self._adapters, self._version_of = guests, adapters, version_of
        self._server = journal.stem
        self._runs = Runs(self.renderer.tokenizer, "~" if self._server == "0" else f"~{self._server}.")
        self._numbers = itertools.count()
        kind = model_kind(engine)
        most = media_limit(engine, kind)
        self.taken = TakenMedia(kind, most, feature_extractor(engine) if kind is SOUND and most else None)
        self._places = place_tokens(engine)
        self.counts = {"open": 0, "calls": 0, "tokens": 0}
        if journal.exists():  # a replica that was built again goes on where the one before it was
            self._remember(journal)
        self._journal = journal.open("a", encoding="utf-8")

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Take all: requests wait for their turn."""

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Sample behind a prompt, or behind the tokens of the call that it continues."""
        return self._outputs(prompt, sampling_params, SENDER.get())

    async def _outputs(
        self, prompt: Any, params: SamplingParams, sender: Sender
    ) -> AsyncGenerator[RequestOutput, None]:
        if prompt.get("type") != "token" and not sender.media:
            raise VLLMValidationError("this endpoint takes text, and what its model sees or hears: no embeddings")
        ids = prompt["prompt_token_ids"]
        for kind, token in self._places.items():
            if token in ids and not (kind is self.taken.kind and sender.media):
                raise VLLMValidationError(f"the text holds the model's token for {kind.one}, and there is none")
        unkept = sender.run == UNKEPT
        joined = Joined(list(ids), UNKEPT) if unkept else self._runs.joined(sender.run, ids, sender.media)
        if joined.differs is not None:
            room = self.model_config.max_model_len - len(joined.ids)
            if room < 1:
                raise VLLMValidationError(
                    f"This model's maximum context length is {self.model_config.max_model_len} tokens; the run has "
                    f"{len(joined.ids)} already."
                )
            told = moved(prompt, joined.ids) if sender.media else tokens_input(joined.ids)
            prompt = {**told, "cache_salt": prompt["cache_salt"]} if "cache_salt" in prompt else told
            params.max_tokens = min(params.max_tokens or room, room)
        unasked = params.logprobs is None
        if unasked:
            params.logprobs, params.flat_logprobs = 0, True  # of the sampled token, for us; the client is told none
        if whole := unasked and self._texts.takes(params):
            params.detokenize = False
        number, taken = next(self._numbers), [Taken() for _ in range(params.n)]
        collector = RequestOutputCollector(params.output_kind, f"endpoint-{number}")
        loop = asyncio.get_running_loop()

        def deliver(output: Any) -> None:
            loop.call_soon_threadsafe(collector.put, output)

        adapter = self._adapters.get(str(sender.body.get("model") or ""))
        version = self._version_of(adapter)  # refuses an adapter that is not here
        self.counts["open"] += 1
        self._guests.add(Guest(collector.request_id, prompt, params, adapter, deliver, logprobs_by_id=unasked))
        finished = False
        try:
            while not finished:
                output: Any = await collector.get()
                finished = output.finished
                for part in output.outputs:
                    taken[part.index].add(part)
                    if whole:
                        part.text = self._texts.of(part, joined.ids, params)
                yield output
        finally:
            self.counts["open"] -= 1
            if not finished:
                self._guests.drop(collector.request_id)
            spans = prompt["mm_placeholders"][self.taken.kind.place] if sender.media else ()
            places = [int(span.offset) for span in spans]
            self._keep(number, joined, params, sender, taken, version if adapter is not None else None, places)

    def _keep(
        self,
        number: int,
        joined: Joined,
        params: SamplingParams,
        sender: Sender,
        taken: list[Taken],
        version: int | None,
        places: list[int],
    ) -> None:
        """Write a call that is over, and let later ones continue it; one without a token, or that is not to be kept,
        leaves nothing. `version`: of all tokens, where vLLM does not know it; `places`: where its images
        or sounds begin."""
        if joined.run == UNKEPT or not any(one.ids for one in taken):
            return
        for one in taken:
            if version is not None or not one.versions:  # vLLM's label is of what was synced last, and comes at the end
                one.versions = [(0, self._version_of(None) if version is None else version)]
        messages = sender.body.get("messages") or []
        name = self.taken.kind.name
        held = {f"{name}s": list(sender.media), f"{name}_places": places} if sender.media else {}
        request = {name: sender.body[name] for name in KEPT_OF_REQUEST if sender.body.get(name) is not None}
        call = Call(
            server=self._server,
            number=number,
            run=joined.run,
            time=time.time(),
            model=str(sender.body.get("model") or ""),
            parent=joined.parent,
            ahead=joined.ahead,
            prompt=joined.ids,
            request=request | ({"messages": messages[joined.messages :]} if messages else {}) | held,
            sampling=_kept(params),
            differs=joined.differs,
            choices=[Choice(**vars(one)) for one in taken],
        )
        self._journal.write(line_of(call))
        self._journal.flush()
        self._count(call, len(messages))

    def _count(self, call: Call, messages: int) -> None:
        self._runs.add(call, messages)
        self.counts["calls"] += 1
        self.counts["tokens"] += call.tokens

    def _remember(self, journal: Path) -> None:
        messages: dict[int, int] = {}
        number = -1
        for call in read(journal):
            number = call.number
            before = 0 if call.parent is None else messages[call.parent[0]]
            messages[number] = before + len(call.request.get("messages", ()))
            self._count(call, messages[number])
        self._numbers = itertools.count(number + 1)


def _kept(params: SamplingParams) -> dict[str, Any]:
    """Return what is written of a request's sampling options: those that say how tokens were drawn."""
    kept = {name: getattr(params, name) for name in KEPT_OF_SAMPLING}
    known = {name: getattr(params, name) for name in NEUTRAL if hasattr(params, name)}  # others are rollouts' alone
    reshaping = {name: value for name, value in known.items() if value not in NEUTRAL[name]}
    plain = {name: str(value) if name == "structured_outputs" else value for name, value in reshaping.items()}
    return {name: value for name, value in (kept | plain).items() if value is not None}

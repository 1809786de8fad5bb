"""Generating on the ranks: the inference engine of their session, as a strategy has it.

Every rank calls with its own prompts; they are gathered to rank 0, which asks the replicas for all of them in one call,
and each rank gets the completions of its own: replicas share the prompts of a call between themselves. The engine is a
session's, so its monitor shows what is generated here, and its kernel may use the replicas between two calls.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from torch import nn

from rlbench.data.prompts.placing import IMAGE, VIDEO, MediaKind, listed
from rlbench.data.prompts.prompt import Prompt, as_prompt, as_prompts
from rlbench.data.prompts.sampling import sampling_options
from rlbench.errors import DataError, StateError, Stopped
from rlbench.strategies.generation.length_analysis import GenLenAnalyser
from rlbench.strategies.generation.session_link import session_of_ranks
from rlbench.strategies.options.config import OptionError, StrategyConfig
from rlbench.strategies.ranks.control import ControlGroup, peer_failed

if TYPE_CHECKING:
    from rlbench.strategies.base import StrategyBase

T = TypeVar("T")


class EngineStatus(Enum):
    """Whether the engine can generate now, or has given its memory back."""

    SLEEPED = "sleeped"
    WAKEUP = "wakeup"


@dataclass(frozen=True, eq=False)
class GenerateOutput:
    """One completion. `logprobs`: (tokens,) float32, of each sampled token under the distribution it was drawn from (at
    temperature 0: the model's at temperature 1). `finish_reason`: "stop", "length" or "abort". `weight_version`: of the
    weights it was drawn under. `routing`: the experts that its tokens took, of prompt and response
    (`rlbench.data.base.routing`), where they are known."""

    prompt_token_ids: list[int]
    output_token_ids: list[int]
    logprobs: np.ndarray
    finish_reason: str
    text: str
    weight_version: int
    routing: np.ndarray | None = None


class Replicas(Protocol):
    """The session's replicas, as each rank has them; every method but `awake` is collective."""

    engine: Any

    def awake(self) -> bool: ...

    def wake(self) -> None: ...

    def sleep(self) -> None: ...

    def generate(
        self, mine: list[Prompt], sampling: dict[str, Any], samples: int, number: int
    ) -> list[GenerateOutput]: ...

    def update(self, actor: nn.Module, transport: str | None) -> Mapping[str, Any]: ...


class Generation:
    """The inference engine of a strategy: its sleep, its weights, and generating with it.

    `collects_lengths`: whether `gather_and_generate` writes response lengths to `log_dir`, every `plot_every` calls. A
    trainer on the strategy counts its iterations instead.
    """

    def __init__(self, strategy: StrategyBase) -> None:
        self._strategy = strategy
        self.collects_lengths = self.sleeps = True
        self.replicas: Replicas | None = None
        self._lengths: GenLenAnalyser | None = None

    def setup_inference_engine(self, args: Any = None, engine_type: str = "vllm", actor: Any = None) -> Any:
        """Take the inference engine of the ranks' session, or build one on their devices; collective. It is awake then.

        A script that `torchrun` started takes that of the session named in its environment, `RLBENCH_SESSION`.

        Args:
            args: options as of `StrategyConfig.of`; None: the strategy's own. `engine_tp_size`,
                `gpu_memory_utilization` and, beside them in a script's namespace, `pretrain` (the model's path),
                `prompt_max_len` and `generate_max_len` (their sum: the longest sequence) say how one is built. Of a
                session that has an engine already they must fit it. With `log_dir`, response lengths are written there.
            engine_type: "vllm", or "sglang" where that is installed; "vllm" leaves it to `args`.
            actor: a module whose weights the engine then gets, see `update_engine_weights`; None: it keeps its own.

        Returns:
            The `rlbench.InferenceEngine`.
        """
        strategy = self._strategy
        config = strategy.config if args is None else StrategyConfig.of(args)
        if engine_type != "vllm":
            config = replace(config, engine_type=engine_type)  # refuses what is not here
        if config.engine_tp_size < 1 or strategy.world_size % config.engine_tp_size:
            raise OptionError(
                f"world_size % engine_tp_size must be 0, and engine_tp_size at least 1: {strategy.world_size} ranks "
                f"cannot share engines of {config.engine_tp_size}."
            )
        session = strategy.control.together("setup_inference_engine", session_of_ranks)
        if config.log_dir is not None:
            self._lengths = GenLenAnalyser(plot_every=config.plot_every, plot_out_dir=config.log_dir, strategy=strategy)
        self.replicas = replicas = session.replicas(strategy, config, actor)
        self.sleeps = config.enable_engine_sleep
        replicas.wake()
        if actor is not None:
            replicas.update(actor, None)
        return replicas.engine

    def status(self) -> EngineStatus:
        """Ask the replicas whether they can generate now."""
        return EngineStatus.WAKEUP if self._need("inference_engine_status").awake() else EngineStatus.SLEEPED

    def gather_and_generate(
        self,
        sampling_params: Any,
        all_prompt_token_ids: Any = None,
        all_prompts: Any = None,
        all_images: Any = None,
        sleep_engine: bool = True,
        images_num: Any = None,
        all_videos: Any = None,
        videos_num: Any = None,
    ) -> list[GenerateOutput]:
        """Generate completions of this rank's prompts, together with those of all ranks; collective.

        What is sampled derives from the strategy's seed, `strategy.generate_calls`, the prompt's place among those of
        all ranks (in rank order) and the sample's number: neither from how many ranks share them nor from the replicas.

        Args:
            sampling_params: options by vLLM's names (`temperature`, `top_p`, `max_tokens`, `stop`, …), with `n`
                completions per prompt: a mapping, or an object that has them as attributes; alike on all ranks.
            all_prompt_token_ids: this rank's prompts as token ids, without padding.
            all_prompts: instead: texts, chats or `rlbench.data.Prompt`s. Ranks may have different numbers, also none.
            all_images: images of each of these prompts, a list or one for each (None for none), or flat with
                `images_num`; a text holds the model's own placeholders, a chat `{"type": "image"}` parts.
            images_num: how many of a flat `all_images` belong to each prompt.
            all_videos, videos_num: likewise of videos, whose parts are `{"type": "video"}`.
            sleep_engine: have the engine sleep afterwards, if `enable_engine_sleep` is set. It is woken in any case.

        Returns:
            This rank's completions, prompt by prompt, `n` of each. Errors and `Stopped` come on all ranks, and nothing
            of such a call counts.
        """
        replicas, strategy = self._need("gather_and_generate"), self._strategy
        prompts, sampling, samples = strategy.control.together(
            "gather_and_generate",
            lambda: (
                own_prompts(
                    all_prompts,
                    all_prompt_token_ids,
                    {IMAGE: (all_images, images_num), VIDEO: (all_videos, videos_num)},
                ),
                *sampling_of(sampling_params),
            ),
        )
        outputs = replicas.generate(prompts, sampling, samples, strategy.generate_calls + 1)
        strategy.generate_calls += 1
        if sleep_engine:
            self.maybe_sleep_inference_engine()
        if self._lengths is not None and self.collects_lengths:
            with strategy.control.ended_together("writing response lengths"):
                self._lengths.collect(outputs, strategy.generate_calls - 1)
        return outputs

    def update_engine_weights(self, actor: Any, transport: str | None = None) -> Mapping[str, Any]:
        """Bring an actor's weights to the replicas and prove it by log-probs; collective.

        Of an engine that sleeps the weights are woken, and the proof follows when the rest is: with the next
        generation, or `wakeup_inference_engine`.

        Args:
            actor: a module of the ranks, plain or sharded, with the hooks of `rlbench.nn` or without. If it is the
                session's own, the version is the session's from now on.
            transport: "shm", "ipc" or "broadcast"; None: the best that works (`rlbench.weights.transport.choose`).

        Returns:
            `version` (new in the session), `bytes`, `tensors`, `transport`, and `gap`: the largest log-prob difference,
            None where the proof is still to come. Where that fails, the engine generates no more until an update.
        """
        return self._need("update_engine_weights").update(self._strategy.unwrap_model(actor), transport)

    def maybe_sleep_inference_engine(self) -> None:
        """Have the engine keep its weights in host memory and drop its KV cache, if `enable_engine_sleep` is set; no-op
        where it sleeps. Collective."""
        replicas = self._need("maybe_sleep_inference_engine")
        if self.sleeps:
            replicas.sleep()

    def wakeup_inference_engine(self) -> None:
        """Make the engine able to generate; no-op where it is. Collective."""
        self._need("wakeup_inference_engine").wake()

    def _need(self, name: str) -> Replicas:
        if self.replicas is None:
            raise StateError(f"{name}: there is no inference engine; call strategy.setup_inference_engine(args) first.")
        return self.replicas


def own_prompts(
    all_prompts: Any, all_prompt_token_ids: Any, media: Mapping[MediaKind[Any], tuple[Any, Any]]
) -> list[Prompt]:
    """Return this rank's prompts, of which there may be none; an error names a prompt's place on this rank. `media`: by
    kind, all of them and how many belong to each prompt, as `gather_and_generate` takes them."""
    if (all_prompts is None) == (all_prompt_token_ids is None):
        count = "neither" if all_prompts is None else "both"
        raise DataError(
            f"gather_and_generate wants all_prompts (texts, chats) or all_prompt_token_ids, and was given {count}; a "
            "rank that has no prompts gives an empty list."
        )
    asked: list[Any]
    if all_prompt_token_ids is not None:
        asked = [_token_ids(row, place) for place, row in enumerate(all_prompt_token_ids)]
    elif isinstance(all_prompts, Sequence) and not isinstance(all_prompts, str):
        asked = list(all_prompts)
    else:
        asked = list(as_prompts(all_prompts))
    beside = {kind.field: media_of_each(kind, *given, len(asked)) for kind, given in media.items()}
    return [
        as_prompt(prompt, place, **{name: own[place] for name, own in beside.items()})
        for place, prompt in enumerate(asked)
    ]


def media_of_each(kind: MediaKind[Any], given: Any, numbers: Any, prompts: int) -> list[tuple[Any, ...]]:
    """Return the images or videos of each prompt: of a nested list, or of a flat one with `numbers`."""
    name = kind.field
    if all(one is None for one in given or ()):
        if any(numbers or ()):
            raise DataError(f"gather_and_generate: {name}_num without all_{name}.")
        return [()] * prompts
    flat = numbers is not None and not any(isinstance(own, list | tuple) and not kind.alone(own) for own in given)
    counts = [int(count or 0) for count in numbers] if flat else [1] * len(given)
    if len(counts) != prompts or sum(counts) != len(given):
        raise DataError(
            f"gather_and_generate: {len(given)} {name} of {len(counts)} prompts, by {name}_num {sum(counts)}, for "
            f"{prompts} prompts: give a list for each prompt, or a flat one with {name}_num."
        )
    if not flat:
        return [listed(own, kind) for own in given]
    ends = list(itertools.accumulate(counts))
    return [tuple(given[end - count : end]) for end, count in zip(ends, counts, strict=True)]


def sampling_of(sampling: Any) -> tuple[dict[str, Any], int]:
    """Return sampling options by vLLM's names, and how many samples of each prompt (`n`, default 1)."""
    options = sampling_options(sampling)
    samples = options.pop("n", 1)
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise DataError(f"sampling_params: n={samples!r}; at least one completion per prompt is needed.")
    return options, samples


def _token_ids(row: Any, place: int) -> list[int]:
    values = row.tolist() if hasattr(row, "tolist") else row
    try:
        ids = [operator.index(token) for token in values]
    except TypeError:
        ids = []
    if not ids:
        raise DataError(
            f"all_prompt_token_ids: prompt {place} of this rank is {str(row)[:60]!r}, wanted token ids; texts and "
            "chats go into all_prompts."
        )
    return ids


def led(control: ControlGroup, doing: str, work: Callable[[], T]) -> T:
    """Do `work`, which holds no collective, on rank 0; what it returns (a plain value) all ranks return. Collective.

    Where it fails, rank 0 raises that; the others `Stopped` if it was that, else EngineError.
    """
    value: T | None = None
    failure: Exception | Stopped | None = None
    if control.rank == 0:
        try:
            value = work()
        except (Exception, Stopped) as error:  # whatever it is, the peers must hear of it
            failure = error
    stopped = isinstance(failure, Stopped)
    text = "" if failure is None else str(failure) if stopped else f"{type(failure).__name__}: {failure}"
    result: T
    result, text, stopped = control.gather((value, text, stopped))[0]
    if failure is not None:
        raise failure
    if stopped:
        raise Stopped(text)
    if text:
        raise peer_failed(f"{doing} failed on rank 0 ({text}); this rank stopped with it and stays usable.")
    return result

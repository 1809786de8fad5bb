"""Generating on the ranks: the inference engine of their session, as a strategy has it.

Every rank calls with its own prompts; they are gathered to rank 0, which asks the replicas for all of them in one call,
and each rank gets the completions of its own. One call for all, not one for each group of `engine_tp_size` ranks, since
replicas share the prompts of a call between themselves: none idles while another has work, and fewer replicas than
groups serve all.

The engine is a session's, so what is generated here shows at its monitor, and its kernel may use the same replicas
between two calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from torch import nn

from rlbench.data.prompts.prompt import Prompt
from rlbench.errors import StateError, Stopped
from rlbench.strategies.generation.call import own_prompts, sampling_of
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
    """One completion.

    Attributes:
        prompt_token_ids: of its prompt.
        output_token_ids: sampled.
        logprobs: (tokens,) float32: of each sampled token under the distribution it was drawn from (at temperature 0:
            the model's at temperature 1).
        finish_reason: "stop", "length" or "abort".
        text: the tokens, decoded.
        weight_version: of the weights it was drawn under.
    """

    prompt_token_ids: list[int]
    output_token_ids: list[int]
    logprobs: np.ndarray
    finish_reason: str
    text: str
    weight_version: int


class Replicas(Protocol):
    """The session's replicas, as each rank has them; every method but `awake` is collective."""

    engine: Any

    def awake(self) -> bool:
        """Say whether all replicas can generate now."""

    def wake(self) -> None:
        """Make them able to; no-op where they are."""

    def sleep(self) -> None:
        """Have them give their memory back; no-op where they have."""

    def generate(self, mine: list[Prompt], sampling: dict[str, Any], samples: int, number: int) -> list[GenerateOutput]:
        """Return this rank's completions, prompt by prompt."""

    def update(self, actor: nn.Module, transport: str | None) -> Mapping[str, Any]:
        """Bring a module's weights to the replicas."""


class Generation:
    """The inference engine of a strategy: its sleep, its weights, and generating with it.

    Attributes:
        calls: how many calls of `gather_and_generate` were completed. The next one's seeds derive from it, so a run
            that goes on from a checkpoint sets it to what it was.
        collects_lengths: whether `gather_and_generate` writes response lengths to `log_dir`, every `plot_every` calls.
            A trainer on the strategy counts its iterations instead.
    """

    def __init__(self, strategy: StrategyBase) -> None:
        self._strategy = strategy
        self.calls = 0
        self.collects_lengths = True
        self.sleeps = True
        self.replicas: Replicas | None = None
        self._lengths: GenLenAnalyser | None = None

    def setup_inference_engine(self, args: Any = None, engine_type: str = "vllm", actor: Any = None) -> Any:
        """Take the inference engine of the ranks' session, or build one on their devices; collective. It is awake then.

        A script that `torchrun` started takes that of the session named in its environment, `RLBENCH_SESSION`.

        Args:
            args: options as of `StrategyConfig.of`; None: the strategy's own. `engine_tp_size`,
                `gpu_memory_utilization` and, beside them in a script's namespace, `pretrain` (the model's path),
                `prompt_max_len` and `generate_max_len` (their sum: the longest sequence) say how one is built. Of a
                session that has an engine already they must fit it. `log_dir` and `plot_every`: see `collects_lengths`.
            engine_type: "vllm".
            actor: a module whose weights the engine then gets, see `update_engine_weights`; None: it keeps its own.

        Returns:
            The `rlbench.InferenceEngine`.

        Raises:
            OptionError: ranks that engines cannot share, an option that the session's engine does not fit, or an engine
                must be built and nothing says from which path.
            EngineError: this process is on no session's ranks and no session is named.
            BuildError: the engine could not be built.
        """
        strategy = self._strategy
        config = strategy.config if args is None else StrategyConfig.of(args)
        if engine_type != config.engine_type:
            raise OptionError(f"engine_type={engine_type!r} cannot be honoured: the engine on the ranks is 'vllm'.")
        if config.engine_tp_size < 1 or strategy.world_size % config.engine_tp_size:
            raise OptionError(
                f"world_size % engine_tp_size must be 0, and engine_tp_size at least 1: {strategy.world_size} ranks "
                f"cannot share engines of {config.engine_tp_size}."
            )
        session = strategy.control.together("setup_inference_engine", session_of_ranks)
        if config.log_dir is not None:
            self._lengths = GenLenAnalyser(plot_every=config.plot_every, plot_out_dir=config.log_dir, strategy=strategy)
        self.replicas = made = session.replicas(strategy, config, actor)
        self.sleeps = config.enable_engine_sleep
        made.wake()
        if actor is not None:
            made.update(actor, None)
        return made.engine

    @property
    def inference_engine(self) -> Any:
        """The `rlbench.InferenceEngine` of `setup_inference_engine`; None before."""
        return None if self.replicas is None else self.replicas.engine

    @property
    def inference_engine_status(self) -> EngineStatus:
        """Whether the engine can generate now, asked of the replicas themselves: others may move them as well."""
        awake = self._need("inference_engine_status").awake()
        return EngineStatus.WAKEUP if awake else EngineStatus.SLEEPED

    def gather_and_generate(
        self,
        sampling_params: Any,
        all_prompt_token_ids: Any = None,
        all_prompts: Any = None,
        all_images: Any = None,
        sleep_engine: bool = True,
        images_num: Any = None,
    ) -> list[GenerateOutput]:
        """Generate completions of this rank's prompts, together with those of all ranks; collective.

        What is sampled derives from the strategy's seed, `strategy.generate_calls`, the prompt's place among those of
        all ranks (in rank order) and the sample's number: neither from how many ranks share them nor from the replicas.

        Args:
            sampling_params: options by vLLM's names (`temperature`, `top_p`, `max_tokens`, `stop`, …), with `n`
                completions per prompt: a mapping, or an object that has them as attributes; alike on all ranks.
            all_prompt_token_ids: this rank's prompts as token ids, without padding.
            all_prompts: instead: texts, chats or `rlbench.data.Prompt`s. Ranks may have different numbers, also none.
            all_images, images_num: refused; vision-language models are not here yet.
            sleep_engine: have the engine sleep afterwards, if `enable_engine_sleep` is set. It is woken in any case.

        Returns:
            This rank's completions, prompt by prompt, `n` of each.

        Raises:
            StateError: before `setup_inference_engine`, or the replicas hold no weights.
            DataError: a prompt or an option that cannot be served; on all ranks.
            Stopped: somebody asked to stop; on all ranks, and nothing of the call counts.
        """
        replicas = self._need("gather_and_generate")

        def given() -> tuple[list[Prompt], dict[str, Any], int]:
            return (
                own_prompts(all_prompts, all_prompt_token_ids, all_images, images_num),
                *sampling_of(sampling_params),
            )

        prompts, sampling, samples = self._strategy.control.together("gather_and_generate", given)
        outputs = replicas.generate(prompts, sampling, samples, self.calls + 1)
        self.calls += 1
        if sleep_engine:
            self.maybe_sleep_inference_engine()
        if self._lengths is not None and self.collects_lengths:
            with self._strategy.control.ended_together("writing response lengths"):
                self._lengths.collect(outputs, self.calls - 1)
        return outputs

    def update_engine_weights(self, actor: Any, transport: str | None = None) -> Mapping[str, Any]:
        """Bring an actor's weights to the replicas and prove it by log-probs; collective.

        Of an engine that sleeps the weights are woken, and the proof follows when the rest is: with the next
        generation, or `wakeup_inference_engine`. Until then it is not told which version it holds.

        Args:
            actor: a module of the ranks, plain or sharded, with the hooks of `rlbench.nn` or without. If it is the
                session's own, the version is the session's from now on.
            transport: "shm", "ipc" or "broadcast"; None: the best that works (`rlbench.weights.transport.choose`).

        Returns:
            `version` (one that no weights of the session had before), `bytes`, `tensors`, `transport`, and `gap`: the
            largest log-prob difference found, None where the proof is still to come.

        Raises:
            StateError: before `setup_inference_engine`; the actor is offloaded; both sides compute in different dtypes.
            WeightSyncError: names or shapes differ, the weights did not arrive, or the proof failed: the engine then
                refuses to generate until an update succeeds.
            Stopped: while the weights were gathered; the replicas keep theirs.
        """
        return self._need("update_engine_weights").update(self._strategy.unwrap_model(actor), transport)

    def maybe_sleep_inference_engine(self) -> None:
        """Have the engine give its memory back, if `enable_engine_sleep` is set; no-op where it sleeps. Collective.

        Its weights are kept in host memory; the KV cache is dropped.
        """
        replicas = self._need("maybe_sleep_inference_engine")
        if self.sleeps:
            replicas.sleep()

    def wakeup_inference_engine(self) -> None:
        """Make the engine able to generate; no-op where it is. Collective.

        Raises:
            StateError: its weights were discarded: `update_engine_weights` brings them.
            WeightSyncError: the proof of weights that came while it slept failed.
        """
        self._need("wakeup_inference_engine").wake()

    def _need(self, name: str) -> Replicas:
        if self.replicas is None:
            raise StateError(f"{name}: there is no inference engine; call strategy.setup_inference_engine(args) first.")
        return self.replicas


def led(control: ControlGroup, doing: str, work: Callable[[], T]) -> T:
    """Do `work`, which holds no collective, on rank 0; what it returns (a plain value) all ranks return. Collective.

    Raises:
        Whatever `work` raised on rank 0; `Stopped` on all where it was that; EngineError on the others.
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

"""The session's inference engine as its training ranks use it: woken, put to sleep, asked, given weights.

Rank 0 talks to the replicas while the others wait for what comes of it; while something long runs, all ranks ask each
other several times a second whether one of them was asked to stop.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import nn

from rlbench.data import Rollouts
from rlbench.data.prompts.prompt import Prompt
from rlbench.data.prompts.seeds import request_seeds
from rlbench.data.rollouts.jobs import FINISH_REASONS
from rlbench.dispatch import context
from rlbench.dispatch.pending import Pending
from rlbench.errors import DataError, RLBenchError, StateError, Stopped
from rlbench.strategies.base import StrategyBase
from rlbench.strategies.generation.engine import GenerateOutput, led
from rlbench.strategies.generation.session_link import ASLEEP
from rlbench.strategies.ranks.control import ControlGroup, peer_failed
from rlbench.weights.sync import Synced
from rlbench.workers.replica.job import check_token_ids
from rlbench.workers.session.sync import RankSync

POLL_S = 0.2


class RankReplicas:
    """One rank's hold on the replicas of its session: `rlbench.strategies.generation.engine.Replicas`.

    Args:
        engine: the session's inference engine.
        session: as the rank reaches it.
        strategy: the rank's.
    """

    def __init__(self, engine: Any, session: Any, strategy: StrategyBase) -> None:
        self.engine, self._session = engine, session
        self._strategy, self._control = strategy, strategy.control
        self._sync = RankSync(engine, session, strategy)

    # -- sleep -----------------------------------------------------------------------------------------------

    def awake(self) -> bool:
        """Whether all replicas can generate now."""
        self._session.renew()
        self._session.follow(self.engine, self._session.record(self.engine.name))
        return all(_awake(held) for held in self.engine.control("status"))

    def wake(self) -> None:
        """Make the replicas able to generate; what was synced while they slept is proved first. Collective."""
        self._refresh()
        self._strategy.device.release_cache()  # on a GPU they share, the replicas need what this rank only keeps

        def work() -> None:
            held = self.engine.control("status")
            gone = [state["weights"] for state in held if state["weights"] in ("meta", "empty")]
            if gone:
                raise StateError(
                    "the replicas' weights were discarded: strategy.update_engine_weights(actor) brings the actor's, "
                    "or session.inference.reload() those of the checkpoint"
                )
            if not all(map(_awake, held)):
                self.engine.cuda()
                self._session.link.engine(self.engine.name, {ASLEEP: False})

        led(self._control, "wakeup_inference_engine", work)

    def sleep(self) -> None:
        """Keep the replicas' weights in host memory and drop their KV cache; collective."""
        self._refresh()

        def work() -> None:
            if any(map(_awake, self.engine.control("status"))):
                self._session.link.engine(self.engine.name, {ASLEEP: True})
                self.engine.cpu()

        led(self._control, "maybe_sleep_inference_engine", work)

    # -- generating ------------------------------------------------------------------------------------------

    def generate(self, mine: list[Prompt], sampling: dict[str, Any], samples: int, number: int) -> list[GenerateOutput]:
        """This rank's completions; the seeds derive from `number` and each prompt's place among all. Collective."""
        self._refresh()
        self._control.together("gather_and_generate", lambda: self._check_lengths(mine))
        gathered = self._control.gather((mine, sampling, samples))
        _refuse_unlike([(options, count) for _, options, count in gathered])
        prompts = [prompt for own, _, _ in gathered for prompt in own]
        if not prompts:
            return []
        self.wake()
        seeds = request_seeds(self._strategy.seed, number, len(prompts), samples)
        rollouts: Rollouts | None = watched(
            self._control,
            "gather_and_generate",
            lambda: self.engine.submit_generate(prompts, sampling, n=samples, progress=False, seeds=seeds),
        )

        def shared_out() -> list[list[GenerateOutput]] | None:
            if rollouts is None:
                return None
            outputs = iter(_outputs(rollouts))
            return [list(itertools.islice(outputs, len(own) * samples)) for own, _, _ in gathered]

        parts = self._control.together("gather_and_generate", shared_out)
        outputs: list[GenerateOutput] = self._control.scatter(parts)
        return outputs

    def _check_lengths(self, mine: list[Prompt]) -> None:
        """Refuse token ids that cannot be served where they are given: the replica would only know their place among
        all ranks'."""
        limit, vocabulary = int(self.engine.info["max_model_len"]), int(self.engine.info["vocab_size"])
        for place, prompt in enumerate(mine):
            content = prompt.content
            if isinstance(content, list) and content and isinstance(content[0], int):
                what = f"prompt {place} of rank {self._control.rank}"
                check_token_ids(content, what, limit - 1, limit, vocabulary)

    # -- weights ---------------------------------------------------------------------------------------------

    def update(self, actor: nn.Module, transport: str | None) -> Synced:
        """Bring a module's weights to the replicas; collective. See `RankSync.update`."""
        self._refresh()
        return self._sync.update(actor, transport)

    def _refresh(self) -> None:
        """Hold the workers the engine has now (`session.heal()` builds others), all ranks the same; collective."""
        self._session.refresh(self._control, self.engine)


def watched(control: ControlGroup, doing: str, submit: Callable[[], Pending]) -> Any:
    """Have rank 0 submit a call and return its result, None on the others; a stop or a failure reaches all. Collective.

    Raises:
        Stopped: this call or the one that was submitted was asked to stop; it has ended on all.
    """
    pending: Pending | None = None
    value: Any = None
    failure: Exception | None = None
    while True:
        state = "waits"
        if control.rank == 0:
            try:
                pending = pending or submit()
                value, state = pending.result(timeout=POLL_S), "done"
            except TimeoutError:
                pass
            except Stopped:  # at the monitor, which knows the call, or through another end of the session
                state = "stopped"
            except Exception as error:  # whatever it is, the peers must hear of it
                failure, state = error, f"{type(error).__name__}: {error}"
        votes = control.gather((state, context.current().stop_requested()))
        state = votes[0][0]
        if state == "stopped" or any(asked for _, asked in votes):
            if pending is not None:
                pending.stop()
                with contextlib.suppress(Stopped, RLBenchError):  # why it ends is being raised already
                    pending.result()
            control.gather(None)  # until it does not run any more
            raise Stopped(f"{doing} was stopped; nothing of it counts")
        if failure is not None:
            raise failure if not isinstance(failure, DataError) else _placed(failure, len(votes))
        if state == "done":
            return value
        if state != "waits":
            raise peer_failed(f"{doing} failed on rank 0 ({state}); this rank stopped with it and stays usable.")


def _awake(held: dict[str, Any]) -> bool:
    return held["weights"] not in ("cpu", "meta") and held["kv_cache"] == "cuda"


def _refuse_unlike(given: list[tuple[dict[str, Any], int]]) -> None:
    """All ranks sample alike: one call asks for the prompts of all."""
    for rank, own in enumerate(given):
        if own != given[0]:
            raise DataError(
                f"gather_and_generate: sampling_params differ between ranks: rank 0 gave {given[0][0]} with "
                f"n={given[0][1]}, rank {rank} gave {own[0]} with n={own[1]}; give the same on all."
            )


def _placed(error: DataError, ranks: int) -> DataError:
    """The replica knows a prompt by its place among those of all ranks: say so."""
    if ranks == 1 or not str(error).startswith("prompt "):
        return error
    return DataError(f"{error} (prompts are numbered over all ranks, in rank order)")


def _outputs(rollouts: Rollouts) -> list[GenerateOutput]:
    """All completions, prompt by prompt."""
    prompts = [ids.tolist() for ids in rollouts.prompt_ids]
    bounds = rollouts.responses.offsets
    return [
        GenerateOutput(
            prompts[rollouts.group[i]],
            rollouts.responses.values[begin:end].tolist(),
            np.asarray(rollouts.logprobs[begin:end], np.float32),
            FINISH_REASONS[rollouts.finish[i]],
            rollouts.texts[i],
            int(rollouts.versions[i]),
        )
        for i, (begin, end) in enumerate(itertools.pairwise(bounds))
    ]

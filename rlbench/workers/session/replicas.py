"""The session's other engines as its training ranks use them: replicas that are woken, put to sleep, asked and given
weights; a reference that is asked for log-probs.

Rank 0 talks to them while the others wait for what comes of it; while something long runs, all ranks ask each other
several times a second whether one of them was asked to stop.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import nn

from rlbench.data import Rollouts
from rlbench.data.batches.batch import TrainBatch, to_score
from rlbench.data.prompts.prompt import Prompt
from rlbench.data.prompts.sampling import request_seeds
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
    """One rank's hold on the inference `engine` of its `session`: `rlbench.strategies.generation.engine.Replicas`."""

    def __init__(self, engine: Any, session: Any, strategy: StrategyBase) -> None:
        self.engine, self._session = engine, session
        self._strategy, self._control = strategy, strategy.control
        self._sync = RankSync(engine, session, strategy)

    def awake(self) -> bool:
        """Whether all replicas can generate now."""
        self._session.renew()
        self._session.follow(self.engine, self._session.record(self.engine.name))
        return all(_awake(held) for held in self.engine.control("status"))

    def wake(self) -> None:
        """Make the replicas able to generate; what was synced while they slept is proved first. Collective."""
        self._session.refresh(self._control, self.engine)
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
        self._session.refresh(self._control, self.engine)

        def work() -> None:
            if any(map(_awake, self.engine.control("status"))):
                self._session.link.engine(self.engine.name, {ASLEEP: True})
                self.engine.cpu()

        led(self._control, "maybe_sleep_inference_engine", work)

    def generate(self, mine: list[Prompt], sampling: dict[str, Any], samples: int, number: int) -> list[GenerateOutput]:
        """This rank's completions; the seeds derive from `number` and each prompt's place among all. Collective."""
        self._session.refresh(self._control, self.engine)
        gathered = self._control.gather((mine, sampling, samples))
        for rank, (_, options, count) in enumerate(gathered):  # one call asks for the prompts of all
            if (options, count) != gathered[0][1:]:
                raise DataError(
                    f"gather_and_generate: sampling_params differ between ranks: rank 0 gave {gathered[0][1]} with "
                    f"n={gathered[0][2]}, rank {rank} gave {options} with n={count}; give the same on all."
                )
        prompts = [prompt for own, _, _ in gathered for prompt in own]
        if not prompts:
            return []
        self._control.together("gather_and_generate", lambda: self._check_ids(prompts))
        self.wake()
        seeds = request_seeds(self._strategy.seed, number, len(prompts), samples)
        rollouts: Rollouts | None = watched(
            self._control,
            "gather_and_generate",
            lambda: self.engine.submit_generate(prompts, sampling, n=samples, progress=False, seeds=seeds),
        )

        def shares() -> list[list[GenerateOutput]] | None:
            if rollouts is None:
                return None
            outputs = iter(_outputs(rollouts))
            return [list(itertools.islice(outputs, len(own) * samples)) for own, _, _ in gathered]

        return self._control.scatter(self._control.together("gather_and_generate", shares))

    def _check_ids(self, prompts: list[Prompt]) -> None:
        """Refuse token ids that cannot be served before the replicas are woken for them."""
        limit, vocabulary = int(self.engine.info["max_model_len"]), int(self.engine.info["vocab_size"])
        for place, prompt in enumerate(prompts):
            content = prompt.content
            if isinstance(content, list) and content and isinstance(content[0], int):
                check_token_ids(content, f"prompt {place}", limit - 1, limit, vocabulary)

    def update(self, actor: nn.Module, transport: str | None) -> Synced:
        """Bring a module's weights to the replicas; collective. See `RankSync.update`."""
        self._session.refresh(self._control, self.engine)
        return self._sync.update(actor, transport)


class RankReference:
    """One rank's hold on a frozen policy of its session, whose weights are there once: rank 0 asks that training
    `engine` for the samples of all ranks."""

    def __init__(self, engine: Any, session: Any, strategy: StrategyBase) -> None:
        self.engine, self._session, self._control = engine, session, strategy.control

    def logprobs(self, batch: TrainBatch, packing: bool, head: str, share_prompts: bool = False) -> np.ndarray:
        """Return the log-probs of this rank's response tokens, (tokens,) float32; collective."""
        self._session.refresh(self._control, self.engine)
        gathered = self._control.gather((list(batch.prompts), list(batch.responses)))
        prompts, responses = ([row for parts in gathered for row in parts[i]] for i in range(2))
        if not responses:
            return np.zeros(0, np.float32)

        doing = "the reference's log-probs"

        def submit() -> Any:
            whole = to_score(prompts, responses, batch.temperature)
            options = {"packing": packing, "head": head, "share_prompts": share_prompts}
            return self.engine.call_logprobs(whole, options, doing)

        rows = watched(self._control, doing, submit)
        begins = np.cumsum([0, *(len(parts[1]) for parts in gathered)])
        shares = None if rows is None else [rows[a:b] for a, b in itertools.pairwise(begins)]
        mine = self._control.scatter(shares)
        return np.concatenate(mine).astype(np.float32) if mine else np.zeros(0, np.float32)


def watched(control: ControlGroup, doing: str, submit: Callable[[], Pending]) -> Any:
    """Have rank 0 submit a call; it returns the result, None the others; a stop or failure reaches all. Collective."""
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


def _placed(error: DataError, ranks: int) -> DataError:
    """The replica knows a prompt by its place among those of all ranks: say so."""
    if ranks == 1 or not str(error).startswith("prompt "):
        return error
    return DataError(f"{error} (prompts are numbered over all ranks, in rank order)")


def _outputs(rollouts: Rollouts) -> list[GenerateOutput]:
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
            None if rollouts.routing is None else rollouts.routing[i],
        )
        for i, (begin, end) in enumerate(itertools.pairwise(bounds))
    ]

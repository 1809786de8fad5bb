"""The session's inference engine as its training ranks use it: found or built, woken, put to sleep, asked.

Loaded by name by `strategies.inference_side`. Rank 0 talks to the replicas while the others wait for what comes of it;
while something long runs, all ranks ask each other several times a second whether one of them was asked to stop.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from torch import nn

from rlbench.data import Rollouts
from rlbench.data.jobs import FINISH_REASONS
from rlbench.data.prompts import Prompt
from rlbench.dispatch.pending import Pending
from rlbench.engines.inference import ASLEEP, InferenceEngine
from rlbench.engines.rank_place import GUESTS, RankPlace, led, stop_requested
from rlbench.engines.rank_sync import RankSync, compute_dtype
from rlbench.engines.seeds import request_seeds
from rlbench.engines.sync import Synced
from rlbench.engines.train import TrainEngine
from rlbench.errors import DataError, RLBenchError, StateError, Stopped
from rlbench.runtime import cluster
from rlbench.strategies.base import StrategyBase
from rlbench.strategies.config import OptionError, StrategyConfig, default
from rlbench.strategies.control import peer_failed
from rlbench.strategies.gather_plan import GatherPlan, merge, split
from rlbench.strategies.inference_side import GenerateOutput
from rlbench.workers.replica_job import check_token_ids

NAME = "inference"
POLL_S = 0.2
Record = dict[str, Any]


class RankReplicas:
    """One rank's hold on the replicas of its session; see `strategies.inference_side.Replicas`.

    Args:
        strategy: the rank's.
        config: how an engine is built, or what the one that is there must fit.
        plan: how ranks share engines.
        actor: a module whose path an engine may be built from; None: see `_path`.
    """

    def __init__(self, strategy: StrategyBase, config: StrategyConfig, plan: GatherPlan, actor: Any) -> None:
        self._strategy, self._control = strategy, strategy.control
        self._place = self._control.together("setup_inference_engine", RankPlace.here)

        def find() -> tuple[str, Record]:
            records = self._place.link.state("engines")["engines"]
            found = _inference_of(records)
            if found is None:
                _build(self._place, records, strategy, config, plan, actor)
                return NAME, self._place.link.state("engines")["engines"][NAME]
            _check_fits(config, *found)
            return found

        name, record = led(self._control, "setup_inference_engine", find)
        self.engine = InferenceEngine.attach(self._place.link, name, record, strategy.seed)
        self._pids = record["pids"]
        self._sync = RankSync(self.engine, self._place, strategy)

    # -- sleep -----------------------------------------------------------------------------------------------

    def awake(self) -> bool:
        """Whether all replicas can generate now."""
        self._place.renew()
        self._follow(self._record())
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
                self._place.link.engine(self.engine.name, {ASLEEP: False})

        led(self._control, "wakeup_inference_engine", work)

    def sleep(self) -> None:
        """Keep the replicas' weights in host memory and drop their KV cache; collective."""
        self._refresh()

        def work() -> None:
            if any(map(_awake, self.engine.control("status"))):
                self._place.link.engine(self.engine.name, {ASLEEP: True})
                self.engine.cpu()

        led(self._control, "maybe_sleep_inference_engine", work)

    # -- generating ------------------------------------------------------------------------------------------

    def generate(self, mine: list[Prompt], sampling: dict[str, Any], samples: int, number: int) -> list[GenerateOutput]:
        """This rank's completions; the seeds derive from `number` and each prompt's place among all. Collective."""
        self._refresh()
        self._control.together("gather_and_generate", lambda: self._check_lengths(mine))
        gathered = self._control.gather((mine, sampling, samples))
        _refuse_unlike([(options, count) for _, options, count in gathered])
        prompts, counts = merge([own for own, _, _ in gathered])
        if not prompts:
            return []
        self.wake()
        seeds = request_seeds(self._strategy.seed, number, len(prompts), samples)
        rollouts = self._watched(
            lambda: self.engine.submit_generate(prompts, sampling, n=samples, progress=False, seeds=seeds)
        )

        def shared_out() -> list[list[GenerateOutput]] | None:
            shares = [count * samples for count in counts]
            return None if rollouts is None else split(_outputs(rollouts), shares)

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

    def _watched(self, submit: Callable[[], Pending]) -> Rollouts | None:
        """Rank 0 submits and gets the result, None on the others; a stop or a failure reaches all. Collective."""
        leads = self._control.rank == 0
        pending: Pending | None = None
        found: Rollouts | None = None
        failure: Exception | None = None
        while True:
            state = "waits"
            if leads:
                try:
                    pending = pending or submit()
                    found, state = pending.result(timeout=POLL_S), "done"
                except TimeoutError:
                    pass
                except Stopped:  # at the monitor, which knows the rollout, or through another end of the session
                    state = "stopped"
                except Exception as error:  # whatever it is, the peers must hear of it
                    failure, state = error, f"{type(error).__name__}: {error}"
            votes = self._control.gather((state, stop_requested()))
            told = votes[0][0]
            if told == "stopped" or any(asked for _, asked in votes):
                self._end(pending)
                raise Stopped("gather_and_generate was stopped; nothing of it counts")
            if failure is not None:
                raise failure if not isinstance(failure, DataError) else _placed(failure, len(votes))
            if told == "done":
                return found
            if told != "waits":
                raise peer_failed(
                    f"gather_and_generate failed on rank 0 ({told}); this rank stopped with it and stays usable."
                )

    def _end(self, pending: Pending | None) -> None:
        """Stop what still runs, and wait until it does not; collective."""
        if pending is not None:
            pending.stop()
            with contextlib.suppress(Stopped, RLBenchError):  # why it ends is being raised already
                pending.result()
        self._control.gather(None)

    # -- weights ---------------------------------------------------------------------------------------------

    def update(self, actor: nn.Module, transport: str | None) -> Synced:
        """Bring a module's weights to the replicas; collective. See `RankSync.update`."""
        self._refresh()
        return self._sync.update(actor, transport)

    # -- the engine's workers, which may have been built again since (`session.heal()`)

    def _refresh(self) -> None:
        """Hold the workers the engine has now, all ranks the same; collective."""
        self._place.renew()
        self._follow(led(self._control, "the inference engine", self._record))

    def _record(self) -> Record:
        record: Record | None = self._place.link.state("engines")["engines"].get(self.engine.name)
        if record is None or "info" not in record:
            raise StateError(
                f"the session's inference engine {self.engine.name!r} is gone; call "
                "strategy.setup_inference_engine(args) again, or session.heal() where a worker of it died"
            )
        return {name: record[name] for name in ("actors", "pids", "info")}

    def _follow(self, record: Record) -> None:
        if record["pids"] != self._pids:
            self.engine._adopt(record)
            self._pids = record["pids"]


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


# -- the engine that is there, or one that is built


def _inference_of(records: dict[str, Record]) -> tuple[str, Record] | None:
    """The session's inference engine; None where it has none."""
    found = {name: record for name, record in records.items() if record.get("kind") == "inference"}
    if not found:
        return None
    if len(found) > 1 and NAME not in found:
        raise OptionError(
            f"the session has the inference engines {', '.join(found)}: call the one that ranks generate with {NAME!r}."
        )
    name = NAME if NAME in found else next(iter(found))
    if "info" not in found[name]:
        raise StateError(f"the inference engine {name!r} is not built yet; wait for it, then set it up again.")
    return name, found[name]


def _check_fits(config: StrategyConfig, name: str, record: Record) -> None:
    """Refuse options that would have to act on an engine that is built already."""
    info = record["info"]
    has = int(info.get("tensor_parallel_size", 1))
    if config.engine_tp_size not in (has, default("engine_tp_size")):
        raise OptionError(
            f"engine_tp_size={config.engine_tp_size} cannot be honoured: the session's engine {name!r} is built with "
            f"tensor_parallel_size={has}. Leave it out, or build the session with "
            f"inference={{'tensor_parallel_size': {config.engine_tp_size}}}."
        )
    if config.engine_mem_util != default("engine_mem_util"):
        raise OptionError(
            f"engine_mem_util={config.engine_mem_util} cannot be honoured: the session's engine {name!r} is built "
            "already. Leave it out, or build the session with inference={'gpu_memory_utilization': "
            f"{config.engine_mem_util}}} ('kv_cache_bytes' on a host without a GPU)."
        )
    wanted, limit = _longest(config), int(info["max_model_len"])
    if wanted is not None and wanted > limit:
        raise OptionError(
            f"prompt_max_len + generate_max_len = {wanted} tokens, and the session's engine {name!r} holds {limit}: "
            f"lower them, or build the session with inference={{'max_model_len': {wanted}}}."
        )


def _longest(config: StrategyConfig) -> int | None:
    """Longest sequence in tokens, where the script's options say it."""
    prompt, response = (config.extra_args.get(name) for name in ("prompt_max_len", "generate_max_len"))
    return None if prompt is None or response is None else int(prompt) + int(response)


def _build(
    place: RankPlace,
    records: dict[str, Record],
    strategy: StrategyBase,
    config: StrategyConfig,
    plan: GatherPlan,
    actor: Any,
) -> InferenceEngine:
    """Build the session's engine on the devices of its ranks: on GPUs one replica for each group, else one for all."""
    if place.engine == GUESTS:
        raise StateError(
            f"session {place.session!r} has no inference engine for a script outside of it to use, and none is built "
            "on devices that are not the session's: make one in the session first"
        )
    trainer = records[place.engine]
    options: dict[str, Any] = {
        "dtype": compute_dtype(actor, strategy) if actor is not None else str(trainer["info"]["dtype"])
    }
    if (longest := _longest(config)) is not None:
        options["max_model_len"] = longest
    gpus = cluster.current().gpus
    if gpus:
        options["gpu_memory_utilization"] = config.engine_mem_util
    elif config.engine_mem_util != default("engine_mem_util"):
        options["kv_cache_bytes"] = int(config.engine_mem_util * psutil.virtual_memory().available)
    engine = InferenceEngine(
        _path(config, actor, trainer), config.engine_type, name=NAME, seed=strategy.seed, link=place.link, **options
    )
    return engine.build(
        tensor_parallel_size=plan.tp_size,
        data_parallel_size=plan.engines if gpus else 1,
        colocate_with=TrainEngine.attach(place.link, place.engine, trainer),
    )


def _path(config: StrategyConfig, actor: Any, trainer: Record) -> str:
    """Of the model to generate with: the script's `pretrain`, else the actor's own, else that of the ranks' module."""
    known = [config.extra_args.get("pretrain"), getattr(actor, "name_or_path", None)]
    if hasattr(actor, "materialization_source"):
        known.append(actor.materialization_source())
    for path in known:
        if isinstance(path, str) and path:
            return path
    source = str(trainer["info"].get("source"))  # a folder, or words that say where the weights came from
    if actor is None and Path(source).is_dir():
        return source
    raise OptionError(
        "an inference engine is to be built and nothing says from which model: give args with pretrain=<folder or hub "
        "id>, or actor=<a module that knows its path>."
    )

"""A session as its training ranks reach it: its engines, driven under the epoch of the call that runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rlbench.dispatch import context
from rlbench.dispatch.link import Link
from rlbench.engines.inference import InferenceEngine
from rlbench.engines.train import TrainEngine
from rlbench.errors import EngineError, StateError
from rlbench.runtime import cluster, registry
from rlbench.strategies.base import StrategyBase
from rlbench.strategies.generation.engine import led
from rlbench.strategies.generation.session_link import SESSION
from rlbench.strategies.options.config import OptionError, StrategyConfig, default
from rlbench.strategies.ranks.control import ControlGroup
from rlbench.workers.session.reference import RankReference
from rlbench.workers.session.replicas import RankReplicas
from rlbench.workers.session.sync import compute_dtype

GUESTS = "guests"
INFERENCE = "inference"
Record = dict[str, Any]


@dataclass(frozen=True)
class RankSession:
    """Session `name`, on a rank of its engine `engine`; `GUESTS` in the engine's place: on a rank that `torchrun`
    started, which uses the session's replicas and is none of its ranks."""

    name: str
    engine: str
    link: Link

    @classmethod
    def here(cls) -> RankSession:
        """Reach the session of the call that runs under the call's own epoch, so its driver stays the driver; outside
        of any call the one that the environment names.

        Raises:
            EngineError: it names one that does not run.
        """
        call = context.current()
        if call.worker:
            _, name, engine, _ = call.worker.split("/")
            cluster.join_own_worker(call.cluster)
            return cls(name, engine, Link.operate(name, call.epoch))
        name = os.environ[SESSION]
        if not cluster.is_joined():
            record = registry.read_cluster()
            known = [] if record is None else [one["name"] for one in registry.live_sessions(record.id)]
            if name not in known:
                raise EngineError(
                    f"{SESSION}={name}: no such session runs; there are {', '.join(known) or 'none'}. Make one "
                    f"first, rb.Session(…, name={name!r}), and keep it while the script runs"
                )
        cluster.current()
        guest = cls(name, GUESTS, Link.operate(name, 0))
        guest.renew()
        return guest

    def renew(self) -> None:
        """Drive under the epoch of the call that runs now, a guest under the present one; a driver that came since gave
        out a later one."""
        guest = self.engine == GUESTS
        now = self.link.state("epoch")["epoch"] if guest else context.current().epoch
        self.link.epoch = max(self.link.epoch, int(now))

    def replicas(self, strategy: StrategyBase, config: StrategyConfig, actor: Any) -> RankReplicas:
        """Take the session's inference engine, or build one on the devices of its ranks; collective.

        Args:
            strategy: the rank's.
            config: how an engine is built, or what the one that is there must fit.
            actor: a module whose path an engine may be built from; None: see `_path`.
        """

        def find() -> tuple[str, Record]:
            records = self.link.state("engines")["engines"]
            there = _inference_of(records)
            if there is None:
                _build(self, records, strategy, config, actor)
                return INFERENCE, self.link.state("engines")["engines"][INFERENCE]
            _check_fits(config, *there)
            return there

        name, record = led(strategy.control, "setup_inference_engine", find)
        return RankReplicas(InferenceEngine.attach(self.link, name, record, strategy.seed), self, strategy)

    def reference(self, strategy: StrategyBase, name: str) -> RankReference:
        """Take a frozen policy that the session holds as engine `name`; collective."""
        record = led(strategy.control, f"engine {name!r}", lambda: self.record(name))
        return RankReference(TrainEngine.attach(self.link, name, record), self, strategy)

    def record(self, name: str) -> Record:
        """Return the workers an engine has now and what it said of itself; StateError where it is gone."""
        record: Record | None = self.link.state("engines")["engines"].get(name)
        if record is None or "info" not in record:
            raise StateError(
                f"the session's engine {name!r} is gone; call strategy.setup_inference_engine(args) again, or "
                "session.heal() where a worker of it died"
            )
        return {field: record[field] for field in ("actors", "pids", "info", "methods")}

    def refresh(self, control: ControlGroup, engine: Any) -> None:
        """Hold the workers an engine has now (`session.heal()` builds others), all ranks the same; collective."""
        self.renew()
        self.follow(engine, led(control, f"engine {engine.name!r}", lambda: self.record(engine.name)))

    def follow(self, engine: Any, record: Record) -> None:
        """Hold the workers of a record."""
        if record["pids"] != engine._pids:
            engine._adopt(record)


def _inference_of(records: dict[str, Record]) -> tuple[str, Record] | None:
    """The session's inference engine; None where it has none."""
    found = {name: record for name, record in records.items() if record.get("kind") == "inference"}
    if not found:
        return None
    if len(found) > 1 and INFERENCE not in found:
        raise OptionError(
            f"the session has the inference engines {', '.join(found)}: call the one that ranks generate with "
            f"{INFERENCE!r}."
        )
    name = INFERENCE if INFERENCE in found else next(iter(found))
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
            f"rb.Inference(tensor_parallel_size={config.engine_tp_size})."
        )
    if config.gpu_memory_utilization != default("gpu_memory_utilization"):
        raise OptionError(
            f"gpu_memory_utilization={config.gpu_memory_utilization} cannot be honoured: the session's engine {name!r} "
            "is built already. Leave it out, or build the session with rb.Inference(gpu_memory_utilization="
            f"{config.gpu_memory_utilization}) (kv_cache_bytes on a host without a GPU)."
        )
    wanted, limit = _longest(config), int(info["max_model_len"])
    if wanted is not None and wanted > limit:
        raise OptionError(
            f"prompt_max_len + generate_max_len = {wanted} tokens, and the session's engine {name!r} holds {limit}: "
            f"lower them, or build the session with rb.Inference(max_model_len={wanted})."
        )


def _longest(config: StrategyConfig) -> int | None:
    """Longest sequence in tokens, where the script's options say it."""
    prompt, response = (config.extra_args.get(name) for name in ("prompt_max_len", "generate_max_len"))
    return None if prompt is None or response is None else int(prompt) + int(response)


def _build(
    session: RankSession,
    records: dict[str, Record],
    strategy: StrategyBase,
    config: StrategyConfig,
    actor: Any,
) -> InferenceEngine:
    """Build the session's engine on the devices of its ranks: on GPUs one replica for each group, else one for all."""
    if session.engine == GUESTS:
        raise StateError(
            f"session {session.name!r} has no inference engine for a script outside of it to use, and none is built "
            "on devices that are not the session's: make one in the session first"
        )
    trainer = records[session.engine]
    options: dict[str, Any] = {
        "dtype": compute_dtype(actor, strategy) if actor is not None else str(trainer["info"]["dtype"])
    }
    if (longest := _longest(config)) is not None:
        options["max_model_len"] = longest
    gpus = cluster.current().gpus
    if gpus:
        options["gpu_memory_utilization"] = config.gpu_memory_utilization
    elif config.gpu_memory_utilization != default("gpu_memory_utilization"):
        options["kv_cache_bytes"] = int(config.gpu_memory_utilization * psutil.virtual_memory().available)
    engine = InferenceEngine(
        _path(config, actor, trainer),
        config.engine_type,
        name=INFERENCE,
        seed=strategy.seed,
        link=session.link,
        **options,
    )
    return engine.build(
        tensor_parallel_size=config.engine_tp_size,
        data_parallel_size=strategy.world_size // config.engine_tp_size if gpus else 1,
        colocate_with=TrainEngine.attach(session.link, session.engine, trainer),
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

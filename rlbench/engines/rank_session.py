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
from rlbench.workers.session.replicas import RankReference, RankReplicas
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
        of any call the one that the environment names."""
        call = context.current()
        if call.worker:
            _, name, engine, _ = call.worker.split("/")
            cluster.join_own_worker(call.cluster)
            return cls(name, engine, Link.operate(name, call.epoch))
        name = os.environ[SESSION]
        if not cluster.is_joined():
            record = registry.read_cluster()
            names = [] if record is None else [one["name"] for one in registry.live_sessions(record.id)]
            if name not in names:
                raise EngineError(
                    f"{SESSION}={name}: no such session runs; there are {', '.join(names) or 'none'}. Make it first"
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
        """Take the session's inference engine, which `config` must fit, or build one by it on the devices of the ranks;
        collective."""

        def find() -> tuple[str, Record]:
            records = self.link.state("engines")["engines"]
            built = _inference_of(records)
            if built is None:
                _build(self, records, strategy, config, actor)
                return INFERENCE, self.link.state("engines")["engines"][INFERENCE]
            _check_fits(config, *built)
            return built

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
                f"the session's engine {name!r} is gone: session.heal(), or strategy.setup_inference_engine"
            )
        return {field: record[field] for field in ("actors", "pids", "nodes", "info", "methods")}

    def refresh(self, control: ControlGroup, engine: Any) -> None:
        """Hold the workers an engine has now (`session.heal()` builds others), all ranks the same; collective."""
        self.renew()
        self.follow(engine, led(control, f"engine {engine.name!r}", lambda: self.record(engine.name)))

    def follow(self, engine: Any, record: Record) -> None:
        """Hold the workers of a record."""
        if record["pids"] != engine._pids:
            engine._adopt(record)


def _inference_of(records: dict[str, Record]) -> tuple[str, Record] | None:
    """Return the session's inference engine; None where it has none."""
    engines = {name: record for name, record in records.items() if record.get("kind") == "inference"}
    if not engines:
        return None
    if len(engines) > 1 and INFERENCE not in engines:
        raise OptionError(f"the session has the engines {', '.join(engines)}: call the one for ranks {INFERENCE!r}.")
    name = INFERENCE if INFERENCE in engines else next(iter(engines))
    if "info" not in engines[name]:
        raise StateError(f"the inference engine {name!r} is not built yet; wait for it, then set it up again.")
    return name, engines[name]


def _check_fits(config: StrategyConfig, name: str, record: Record) -> None:
    """Refuse options that would have to act on an engine that is built already."""
    info = record["info"]
    size, limit, longest = int(info.get("tensor_parallel_size", 1)), int(info["max_model_len"]), _longest(config) or 0
    share = config.gpu_memory_utilization
    misfits = {
        f"engine_type={config.engine_type!r}": config.engine_type not in (info.get("executor"), default("engine_type")),
        f"engine_tp_size={config.engine_tp_size}": config.engine_tp_size not in (size, default("engine_tp_size")),
        f"limit_mm_image_per_prompt={config.limit_mm_image_per_prompt}": bool(config.engine_kwargs),
        f"gpu_memory_utilization={share}": share != default("gpu_memory_utilization"),
        f"prompt_max_len + generate_max_len = {longest} tokens": longest > limit,
    }
    for option, misfit in misfits.items():
        if misfit:
            raise OptionError(
                f"{option} cannot be honoured: the session's engine {name!r} is built already, with "
                f"tensor_parallel_size={size} and max_model_len={limit}. Leave it out, or build the session with an "
                "rb.Inference(…) that says so."
            )


def _longest(config: StrategyConfig) -> int | None:
    """Longest sequence in tokens, where the script's options say it."""
    prompt, response = (config.extra_args.get(name) for name in ("prompt_max_len", "generate_max_len"))
    return None if prompt is None or response is None else int(prompt) + int(response)


def _build(
    session: RankSession, records: dict[str, Record], strategy: StrategyBase, config: StrategyConfig, actor: Any
) -> InferenceEngine:
    """Build the session's engine on the devices of its ranks: on GPUs one replica for each group, else one for all."""
    if session.engine == GUESTS:
        raise StateError(f"session {session.name!r} has no inference engine for a script to use: make one in it first")
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
    if config.engine_kwargs:
        options["engine_kwargs"] = config.engine_kwargs
    path, seed = _path(config, actor, trainer), strategy.seed
    engine = InferenceEngine(path, config.engine_type, name=INFERENCE, seed=seed, link=session.link, **options)
    return engine.build(
        tensor_parallel_size=config.engine_tp_size,
        data_parallel_size=strategy.world_size // config.engine_tp_size if gpus else 1,
        colocate_with=TrainEngine.attach(session.link, session.engine, trainer),
    )


def _path(config: StrategyConfig, actor: Any, trainer: Record) -> str:
    """Return where the model to generate with lies: the script's `pretrain`, else the actor's own path, else that of
    the ranks' module."""
    paths = [config.extra_args.get("pretrain"), getattr(actor, "name_or_path", None)]
    if hasattr(actor, "materialization_source"):
        paths.append(actor.materialization_source())
    for path in paths:
        if isinstance(path, str) and path:
            return path
    source = str(trainer["info"].get("source"))  # a folder, or words that say where the weights came from
    if actor is None and Path(source).is_dir():
        return source
    raise OptionError(
        "nothing says from which model to build an inference engine: give args with pretrain=<folder or hub id>, or "
        "actor=<a module that knows its path>."
    )

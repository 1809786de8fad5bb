"""`TrainEngine`: runs the methods of a user's module on one actor per rank."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from rlbench.dispatch import by_value
from rlbench.dispatch.link import Link
from rlbench.dispatch.pending import Pending
from rlbench.engines.base import Call, Engine, checked_config, cores
from rlbench.engines.methods import proxy
from rlbench.engines.parallel import estimated_bytes, split_call
from rlbench.engines.redefine import Redefining, forget, verbs
from rlbench.errors import BuildError, EngineError, MethodError, nearest
from rlbench.runtime import cluster
from rlbench.units import format_bytes

if TYPE_CHECKING:
    from rlbench.engines.inference import InferenceEngine
    from rlbench.engines.sync import Synced

EXECUTORS = ("fsdp2",)
WARN_BYTES = 4 << 20


class TrainEngine(Redefining, Engine):
    """Training ranks around one module.

    Args:
        module: an instance of an `rb.nn` base, created on meta (`accelerate.init_empty_weights`, `rb.device("meta")`),
            or a callable that makes one on the ranks.
        executor: `"fsdp2"`.
        name: its role in the session.
    """

    KIND = "train"
    COLLECTIVE = True
    PARTS = ("weights", "optimizer")

    def __init__(self, module: Any, executor: str = "fsdp2", *, name: str = "actor", link: Link | None = None,
                 **config: Any) -> None:  # fmt: skip
        if executor.lower() not in EXECUTORS:
            raise BuildError(
                f"executor={executor!r}: TrainEngine has {', '.join(EXECUTORS)}{nearest(executor, EXECUTORS)}"
            )
        super().__init__(name, link)
        self._module = module
        self._config = config
        self._methods: dict[str, Any] = {}
        self._staged: dict[str, Any] | None = None
        if hasattr(module, "named_parameters"):
            from rlbench.nn import check_module

            check_module(module)
        elif module is not None and (not callable(module) or hasattr(module, "convert_tokens_to_ids")):
            raise BuildError(
                f"TrainEngine wants a module on meta, or a callable that makes one, got {type(module).__name__}. For a "
                "model by name, rb.Session(name) has a training engine"
            )

    @classmethod
    def attach(cls, link: Link, name: str, record: dict[str, Any]) -> TrainEngine:
        """Hold the ranks of a session that is already there."""
        engine = cls(None, name=name, link=link)
        engine._adopt(record)
        engine._make_methods(record["methods"])
        return engine

    def build(
        self, *, tensor_parallel_size: int = 1, data_parallel_size: int = -1, colocate_with: Engine | None = None,
        not_colocate_with: Engine | None = None,
    ) -> TrainEngine:  # fmt: skip
        """Start the ranks, materialise the module on them and shard it.

        Args:
            tensor_parallel_size: ranks the parameters are sharded over (data is split over them as well).
            data_parallel_size: replicas of that; -1: as many as the devices allow.
            colocate_with: an engine whose devices to share; it may have another size.
            not_colocate_with: an engine whose devices to leave alone.

        Raises:
            BuildError: built already, more ranks than devices, weights that do not fit the module, …
        """
        if self._module is None:
            raise BuildError("TrainEngine has no module to build: TrainEngine(module) takes one on meta")
        total = cluster.current().devices
        replicas = (
            max(1, total // max(1, tensor_parallel_size)) if data_parallel_size == -1 else data_parallel_size
        )
        world = tensor_parallel_size * replicas
        from rlbench.workers.train_config import TrainConfig

        config = checked_config(
            TrainConfig, {"shard_size": tensor_parallel_size} | self._config, "TrainEngine"
        )
        blob = by_value.dumps(self._module, "module", refusal=BuildError)
        threads = str(max(1, cores() // world))
        env = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}
        devices = self._allot(world, colocate_with, not_colocate_with)
        with self._building():
            self._spawn(
                "rlbench.workers.train_rank:TrainRank",
                lambda rank: (rank, world, config),
                devices,
                [env] * world,
            )
            master = self.call("rendezvous", [((), {})] * world, what=f"{self.name}.build").result()[0]
            infos = self.call_all(
                "build", blob, master, what=f"{self.name}.build", observer=self._say_phase
            ).result()
        self._info = {k: v for k, v in infos[0].items() if k != "methods"} | {
            "shard_size": tensor_parallel_size
        }
        self._make_methods(infos[0]["methods"])
        self.link.engine(
            self.name, {"info": self._info, "methods": infos[0]["methods"], "state": self.status()}
        )
        self.define_again()
        return self

    def close(self) -> None:
        """End the ranks and free what they hold; what was redefined is forgotten. Safe to call twice."""
        if self._actors and not self.link.closed:
            forget(self)
        super().close()

    def run(self, fn: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Run `fn(*args, **kwargs)` on every rank; returns one result per rank.

        Its globals on a rank are a namespace that stays: `module`, `strategy`, `rank`, `world_size`, and what earlier
        functions put there. `NeedParallel` arguments are split.
        """
        self._need_built("run")
        blob = by_value.dumps(fn, "run")
        calls: list[Call] = [((blob, a, k), {}) for a, k in split_call(args, kwargs, self.world_size)]
        with self.link.noting(self.name, "run", (fn, *args), kwargs):
            return list(self.call("run", calls, what=f"{self.name}.run").blocking_result())

    def run_cell(self, source: str, rank: int | None = None) -> list[str | None]:
        """Run the text of a cell on every rank, or on one; what `%%ranks` does.

        Names stay on the rank from cell to cell, as with `run`. Ctrl-C stops all ranks after the same collective.

        Args:
            source: the cell.
            rank: of one; it must not ask the others for a collective.

        Returns:
            Per rank the `repr` of the cell's last expression, None where it has none.

        Raises:
            RemoteError: with the line of the cell. Stopped: interrupted. EngineError: no such rank.
        """
        self._need_built("run_cell")
        if rank is not None and not 0 <= rank < self.world_size:
            raise EngineError(f"run_cell: rank={rank}: {self.name} has ranks 0 to {self.world_size - 1}")
        calls: list[Call] = [((source, rank), {})] * self.world_size
        what = f"{self.name} cell" if rank is None else f"{self.name} cell on rank {rank}"
        with self.link.noting(self.name, "run_cell", (source,), {} if rank is None else {"rank": rank}):
            return list(self.call("run_cell", calls, what=what, track=True).blocking_result())

    def complete_names(self, text: str) -> list[str]:
        """Names on rank 0 that continue `text`; answers also while a cell runs."""
        return list(self.control("complete_names", text)[0])

    def p2p_weight_sync(self, to: InferenceEngine | TrainEngine, transport: str | None = None) -> Synced:
        """Send the weights to another engine; ends with equal log-probs on a probe, and replicas with equal versions.

        Args:
            to: replicas; or a training engine without an optimizer, as a reference is, on this host.
            transport: `"shm"` (shared memory of one host), `"ipc"` (CUDA IPC, where every replica's GPU also holds a
                training rank) or `"broadcast"` (NCCL between GPUs, gloo between CPUs); None: the best that works.

        Returns:
            `Synced`: `version` (of replicas), `bytes`, `tensors`, `transport`, and `gap`: the largest log-prob
            difference found.

        Raises:
            EngineError: `to` is no engine that can take them.
            WeightSyncError: names or shapes differ, weights could not be staged, sent or applied, the proof failed, or
                the transport cannot work between these engines.
        """
        from rlbench.engines.copying import copy_weights
        from rlbench.engines.sync import sync_weights

        if not isinstance(to, Engine):
            raise EngineError(f"p2p_weight_sync wants an InferenceEngine or a TrainEngine, got {type(to).__name__}")
        self._need_built("p2p_weight_sync")
        to._need_built("p2p_weight_sync")
        chain = copy_weights(self, to, transport) if isinstance(to, TrainEngine) else sync_weights(
            self, to, transport=transport
        )
        done: Synced = chain.blocking_result()
        return done

    def note_staged(self, version: int, manifest: dict[str, Any]) -> None:
        """Put on record what lies staged in shared memory; the layout only where it changed: it is journalled."""
        fields: dict[str, Any] = {"staged_version": version}
        if manifest != self._staged:
            fields["staged"] = manifest
        self.link.engine(self.name, fields)
        self._staged = manifest

    def methods(self) -> list[str]:
        """Names of the callable methods of the user's module."""
        return list(self._methods)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        methods = self.__dict__.get("_methods", {})
        if name in methods:
            return methods[name]
        if not self.__dict__.get("_actors"):
            raise MethodError(
                f"{name!r}: the engine is not built; call build(…) first, its module's methods come with it"
            )
        raise MethodError(
            f"the module of engine {self.name!r} has no method {name!r}{nearest(name, [*methods, *verbs(self)])}; "
            f"it has {', '.join(methods)}"
        )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._methods})

    def __repr__(self) -> str:
        return f"TrainEngine({self.name!r}, fsdp2, {self.described()})"

    def _make_methods(self, infos: list[dict[str, Any]]) -> None:
        self._methods = {info["name"]: proxy(info, self._caller(info["name"])) for info in infos}

    def _caller(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> list[Any]:
            with self.link.noting(self.name, name, args, kwargs):
                return list(self._user_call(name, args, kwargs).blocking_result())

        return call

    def _user_call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pending:
        weight = estimated_bytes([args, kwargs])
        if weight > WARN_BYTES:
            warnings.warn(
                f"the arguments of {self.name}.{name} weigh about {format_bytes(weight)} and are copied to the ranks: "
                "send a path and read the data in a method of your module, or mark rows with NeedParallel",
                stacklevel=4,
            )
        calls: list[Call] = [((name, a, k), {}) for a, k in split_call(args, kwargs, self.world_size)]
        return self.call("call_method", calls, what=f"{self.name}.{name}")

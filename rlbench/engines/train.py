"""`TrainEngine`: runs the methods of a user's module on one actor per rank."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbench.data import TrainBatch
from rlbench.dispatch import by_value
from rlbench.dispatch.link import Link
from rlbench.dispatch.pending import Pending
from rlbench.engines.base import Call, Engine, cores, executor_of
from rlbench.engines.methods import proxy
from rlbench.engines.parallel import estimated_bytes, split_call
from rlbench.engines.paths import new_folder
from rlbench.engines.placement import network_environment
from rlbench.engines.redefine import Redefining, forget, verbs
from rlbench.errors import BuildError, EngineError, MethodError, nearest
from rlbench.results import ExportedModel
from rlbench.runtime import cluster
from rlbench.traces import user_stacklevel
from rlbench.units import format_bytes
from rlbench.workers.train.namespace import Cell

if TYPE_CHECKING:
    from rlbench.engines.inference import InferenceEngine
    from rlbench.weights.sync import Synced

EXECUTORS = ("fsdp2",)
WARN_BYTES = 4 << 20


class TrainEngine(Redefining, Engine):
    """Training ranks around one module.

    Args:
        module: an instance of an `rb.nn` base, created on meta (`accelerate.init_empty_weights`, `rb.device("meta")`),
            or a callable that makes one on the ranks.
        executor: `"fsdp2"`; RLite's names of it count.
        name: its role in the session.
    """

    KIND = "train"
    COLLECTIVE = True
    PARTS = ("weights", "optimizer")

    def __init__(
        self, module: Any, executor: str = "fsdp2", *, name: str = "actor", link: Link | None = None, **config: Any
    ) -> None:
        executor_of(executor, EXECUTORS, "TrainEngine")
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
        self,
        *,
        tensor_parallel_size: int = 1,
        data_parallel_size: int = -1,
        colocate_with: Engine | None = None,
        not_colocate_with: Engine | None = None,
        allow_colocate: bool = True,
        pipeline_parallel_size: int = 1,
        ignore_rebuild_error: bool = False,
        **config: Any,
    ) -> TrainEngine:
        """Start the ranks, materialise the module on them and shard it.

        Args:
            tensor_parallel_size: ranks the parameters are sharded over (data is split over them as well).
            data_parallel_size: replicas of that; -1: as many as the devices allow.
            colocate_with: an engine whose devices to share; it may have another size.
            not_colocate_with: an engine whose devices to leave alone.
            allow_colocate: False: devices that no engine of the session shares, now or later.
            pipeline_parallel_size: 1, there is no other.
            ignore_rebuild_error: True: where the engine is built already, nothing happens.
            config: fields of `TrainConfig`, in place of the constructor's.

        Raises:
            BuildError: built already, more ranks than devices, weights that do not fit the module, …
        """
        if self._stays_built(pipeline_parallel_size, ignore_rebuild_error):
            return self
        if self._module is None:
            raise BuildError("TrainEngine has no module to build: TrainEngine(module) takes one on meta")
        total = cluster.current().devices
        replicas = max(1, total // max(1, tensor_parallel_size)) if data_parallel_size == -1 else data_parallel_size
        world = tensor_parallel_size * replicas
        from rlbench.workers.train.config import TrainConfig

        options = {"shard_size": tensor_parallel_size, **self._config, **config}
        chosen = TrainConfig(**options)
        blob = by_value.dumps(self._module, "module", refusal=BuildError)
        threads = str(max(1, cores() // world))
        env = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}
        env |= network_environment()
        devices = self._allot(world, colocate_with, not_colocate_with, not allow_colocate)
        with self._building():
            self._spawn(
                "rlbench.workers.train.rank:TrainRank",
                lambda rank: (rank, world, chosen),
                devices,
                [env] * world,
            )
            master = self.call("rendezvous", [((), {})] * world, what=f"{self.name}.build").result()[0]
            infos = self.call_all("build", blob, master, what=f"{self.name}.build", observer=self._say_phase).result()
        self._info = {k: v for k, v in infos[0].items() if k != "methods"} | {"shard_size": tensor_parallel_size}
        self._make_methods(infos[0]["methods"])
        self.link.engine(self.name, {"info": self._info, "methods": infos[0]["methods"], "state": self.status()})
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
        functions put there. `NeedParallel` arguments are split. `fn` may be the path of a script, `run("train.py",
        args=["--lr", "1e-5"])`: see `run_script`.
        """
        if is_script(fn):
            return self.run_script(fn, *args, **kwargs)
        self._need_built("run")
        blob = by_value.dumps(fn, "run")
        calls: list[Call] = [((blob, a, k), {}) for a, k in split_call(args, kwargs, self.world_size)]
        with self.link.noting(self.name, "run", (fn, *args), kwargs):
            return list(self.call("run", calls, what=f"{self.name}.run").blocking_result())

    def run_script(self, path: str | os.PathLike[str], args: Sequence[str] = (), rank: int | None = None) -> list[Any]:
        """Run a Python file on every rank, or on one, as `torchrun` would: what `%ranks train.py …` does.

        It is `__main__` with its own `sys.argv` and `__file__`, can import what lies beside it, and has RANK,
        LOCAL_RANK and WORLD_SIZE in its environment; the ranks' process group is joined already. `module`, `strategy`,
        `rank` and `world_size` are among its names, and what it defines stays for the next cell or function. Ctrl-C
        stops all ranks after the same collective.

        Args:
            path: of the file, on this machine; modules beside it are read on the ranks' own.
            args: its command line.
            rank: of one; it must not ask the others for a collective.

        Returns:
            Per rank the value of its last expression, None where it ends otherwise.

        Raises:
            RemoteError: with the line of the script; also where it exits with another code than 0. Stopped:
                interrupted. EngineError: no such file, or rank.
        """
        file = Path(path).expanduser().resolve()
        if not file.is_file():
            raise EngineError(f"run: there is no script {os.fspath(path)!r} in {Path.cwd()}")
        cell = Cell(file.read_text("utf-8"), tuple(map(str, args)), str(file))
        return self._run_text("run_script", cell, rank, file.name, os.fspath(path))

    def run_cell(self, source: str, rank: int | None = None, args: Sequence[str] = ()) -> list[str | None]:
        """Run the text of a cell on every rank, or on one; what `%%ranks` does.

        Names stay on the rank from cell to cell, as with `run`. Ctrl-C stops all ranks after the same collective.

        Args:
            source: the cell.
            rank: of one; it must not ask the others for a collective.
            args: what `sys.argv` holds behind its first entry.

        Returns:
            Per rank the `repr` of the cell's last expression, None where it has none.

        Raises:
            RemoteError: with the line of the cell. Stopped: interrupted. EngineError: no such rank.
        """
        return self._run_text("run_cell", Cell(source, tuple(map(str, args))), rank, "cell", source)

    def _run_text(self, verb: str, cell: Cell, rank: int | None, what: str, given: str) -> list[Any]:
        """Run a cell or a script; `given` is what the verb was called with, for the record."""
        self._need_built(verb)
        if rank is not None and not 0 <= rank < self.world_size:
            raise EngineError(f"{verb}: rank={rank}: {self.name} has ranks 0 to {self.world_size - 1}")
        calls: list[Call] = [((cell, rank), {})] * self.world_size
        where = f"{self.name} {what}" if rank is None else f"{self.name} {what} on rank {rank}"
        options = ({} if rank is None else {"rank": rank}) | ({"args": list(cell.args)} if cell.args else {})
        with self.link.noting(self.name, verb, (given,), options):
            return list(self.call(verb, calls, what=where, track=True).blocking_result())

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
        chain = (
            copy_weights(self, to, transport)
            if isinstance(to, TrainEngine)
            else sync_weights(self, to, transport=transport)
        )
        done: Synced = chain.blocking_result()
        return done

    def call_logprobs(self, batch: TrainBatch, options: dict[str, Any], what: str) -> Pending:
        """Submit a forward pass over a batch; its result is a row of log-probs for each response.

        Args:
            batch: over all ranks.
            options: of `PolicyOptions`.
            what: for output and errors.
        """
        from rlbench.engines.sync import logprob_rows

        return self.call_all("policy_forward", batch, options, finish=logprob_rows, what=what)

    @property
    def training(self) -> bool:
        """Whether the module is in training mode; `train()` and `eval()` set it."""
        return bool(self.status()["training"])

    def state_dict(self) -> dict[str, Any]:
        """The module's whole state dict, by its own names, as tensors in this kernel's memory."""
        parts = self.call_all("whole_state", what=f"{self.name}.state_dict()").result()
        return dict(parts[0])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Fill the parameters from a dict of whole tensors; the optimizer keeps its state, gradients are dropped.

        Raises:
            BuildError: missing, left over or mis-shaped tensors.
        """
        self._load("load_state_dict", dict(state_dict), own_names=True)

    def save(self, path: str | Path, dtype: str | None = None) -> ExportedModel:
        """Write the weights as safetensors, with config and tokenizer where the module is a transformers model.

        `session.save` writes what a run goes on from: optimizer, step and history too.

        Args:
            path: a folder, new or empty.
            dtype: of the tensors; None: the config's, or what the module is held in.

        Returns:
            `ExportedModel`: `path`, `bytes`, `files`.

        Raises:
            CheckpointError: something is there already, or there is no room.
        """
        place = new_folder(path, f"{self.name}.save")
        what = f"{self.name}.save()"
        written: ExportedModel = self.call_all("save_weights", str(place), dtype, what=what, track=True).result()[0]
        return written

    def load(self, path: str | Path) -> None:
        """Fill the parameters from a checkpoint, a folder or a file, through the module's hooks; else as
        `load_state_dict`."""
        self._load("load", str(Path(path).expanduser().resolve()), own_names=False)

    def _load(self, verb: str, source: Any, own_names: bool) -> None:
        with self.link.noting(self.name, verb, (source,), {}):
            self.call_all("load_weights", source, own_names, what=f"{self.name}.{verb}()", track=True).result()

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
        if hidden := [info["name"] for info in infos if hasattr(type(self), info["name"])]:
            warnings.warn(
                f"{', '.join(hidden)}: {self.name} has attributes of its own of these names, so the module's methods "
                "cannot be called by them; rename them",
                stacklevel=user_stacklevel(),
            )
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


def is_script(given: Any) -> bool:
    """Whether what `run` is given is the path of a Python file; other text is a cell's."""
    return isinstance(given, os.PathLike) or (isinstance(given, str) and given.endswith(".py") and "\n" not in given)

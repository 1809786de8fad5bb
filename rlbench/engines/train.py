"""`TrainEngine`: runs the methods of a user's module on one actor per rank."""

from __future__ import annotations

import inspect
import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from rlbench.data import TrainBatch
from rlbench.data.base.ragged import rows_in_order
from rlbench.dispatch import by_value
from rlbench.dispatch.link import Link
from rlbench.dispatch.pending import Pending
from rlbench.engines import redefine as redefining
from rlbench.engines.base import Engine, Start, cores, executor_of, replicas_for
from rlbench.engines.inference import InferenceEngine
from rlbench.engines.parallel import Arguments, estimated_bytes, split_call
from rlbench.engines.paths import new_folder
from rlbench.engines.placement import Device, addresses, thread_environment
from rlbench.engines.sync import Way, copy_weights, sync_weights
from rlbench.errors import BuildError, EngineError, MethodError, nearest
from rlbench.results import ExportedModel
from rlbench.runtime import cluster
from rlbench.traces import user_stacklevel
from rlbench.units import format_bytes
from rlbench.weights.facts import LOOPBACK
from rlbench.weights.manifest import Manifest
from rlbench.weights.sync import Synced
from rlbench.workers.train.config import EXECUTORS, TrainConfig
from rlbench.workers.train.namespace import Cell

F = TypeVar("F", bound=Callable[..., Any])
WARN_BYTES = 4 << 20


class TrainEngine(Engine):
    """Training ranks around one module.

    Args:
        module: an instance of an `rb.nn` base, created on meta (`accelerate.init_empty_weights`, `rb.device("meta")`),
            or a callable that makes one on the ranks.
        executor: `"fsdp2"` or `"fsdp1"`, RLite's names of them count; None: as the module's base says. A callable that
            makes a module of FSDP1's bases needs `"fsdp1"`.
        name: its role in the session.
    """

    KIND, LABEL = "train", "rank"
    COLLECTIVE = True
    PARTS = ("weights", "optimizer")

    def __init__(
        self,
        module: Any,
        executor: str | None = None,
        *,
        name: str = "actor",
        link: Link | None = None,
        **config: Any,
    ) -> None:
        asked = None if executor is None else executor_of(executor, EXECUTORS, "TrainEngine")
        super().__init__(name, link, config)
        self._module = module
        self._methods: dict[str, Any] = {}
        self._staged: Manifest | None = None
        self.ways: dict[str, Way] = {}  # by the inference engine's name
        self._executor = asked or EXECUTORS[0]
        if hasattr(module, "named_parameters"):
            from rlbench.nn import check_module
            from rlbench.nn.base import executor_for

            check_module(module)
            self._executor = executor_for(type(module), asked)
        elif module is not None and (not callable(module) or hasattr(module, "convert_tokens_to_ids")):
            raise BuildError(
                f"TrainEngine wants a module on meta, or a callable that makes one, got {type(module).__name__}; "
                "rb.Session takes a model by name"
            )

    @classmethod
    def attach(cls, link: Link, name: str, record: dict[str, Any]) -> TrainEngine:
        """Hold the ranks of a session that is already there."""
        engine = cls(None, name=name, link=link)
        engine._executor = record["info"].get("executor", EXECUTORS[0])
        engine._adopt(record)
        engine._make_methods(record["methods"])
        return engine

    def _prepared(
        self, tensor_parallel_size: int, data_parallel_size: int, devices: int, options: dict[str, Any]
    ) -> tuple[int, Start]:
        from rlbench.strategies.options.config import ROW_SHARING, need_groups

        if self._module is None:
            raise BuildError("TrainEngine has no module to build: TrainEngine(module) takes one on meta")
        asked = options.get("executor")
        executor = self._executor if asked is None else executor_of(asked, EXECUTORS, "TrainEngine")
        if hasattr(self._module, "named_parameters"):
            from rlbench.nn.base import executor_for

            executor_for(type(self._module), executor)  # before a worker is started
        config = TrainConfig(**{"shard_size": tensor_parallel_size, **options, "executor": executor})
        self._executor = config.executor  # which build() may be given, too
        wide = tensor_parallel_size * config.tensor_parallel
        world = wide * replicas_for(data_parallel_size, wide, devices)
        need_groups(config, world)
        if hasattr(self._module, "parameters"):
            for parameter in self._module.parameters():  # accelerate notes there how it was made, and unpickling would
                vars(parameter).pop("requires_grad", None)  # thaw with that what was frozen since
        blob = by_value.dumps(self._module, "module", refusal=BuildError)

        def start(devices: list[Device]) -> dict[str, Any]:
            what, nodes = f"{self.name}.build", addresses(devices)
            here = config.local_ranks or max(Counter(nodes).values())
            env = [thread_environment(max(1, cores() // here), node) for node in nodes]
            workers = [(rank, world, _on_node(config, here, node, nodes)) for rank, node in enumerate(nodes)]
            self._spawn("rlbench.workers.train.rank:TrainRank", workers, devices, env)
            master = self.call_all("rendezvous", what=what).result()[0]
            infos = self.call_all("build", blob, master, what=what, observer=self._say_phase).result()
            methods = redefining.define_again(self, infos[0]["methods"])
            self._make_methods(methods)
            groups = {name: getattr(config, name) for name in ROW_SHARING}
            sizes = {"shard_size": tensor_parallel_size, **groups}
            return infos[0] | sizes | {"methods": methods}

        return world, start

    def close(self) -> None:
        """End the ranks and free what they hold; what was redefined is forgotten. Safe to call twice."""
        if not self.link.closed:  # also where a redefinition is what kept it from being built
            redefining.forget(self)
        super().close()

    def run(self, fn: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Run `fn(*args, **kwargs)` on every rank; returns one result per rank.

        Its globals on a rank are a namespace that stays: `module`, `strategy`, `rank`, `world_size`, and what earlier
        functions put there. `NeedParallel` arguments are split. `fn` may be the path of a script, `run("train.py",
        args=["--lr", "1e-5"])`: see `run_script`; or the text of a cell: see `run_cell`.
        """
        if isinstance(fn, os.PathLike) or (isinstance(fn, str) and fn.endswith(".py") and "\n" not in fn):
            return self.run_script(fn, *args, **kwargs)
        if isinstance(fn, str):
            return self.run_cell(fn, *args, **kwargs)
        self._need_built("run")
        blob = by_value.dumps(fn, "run")
        calls = self._split(blob, args, kwargs)
        with self.link.noting(self.name, "run", (fn, *args), kwargs):
            return list(self.call("run", calls, what=f"{self.name}.run").blocking_result())

    def run_script(self, path: str | os.PathLike[str], args: Sequence[str] = (), rank: int | None = None) -> list[Any]:
        """Run a Python file on every rank, or on one, as `torchrun` would: what `%ranks train.py …` does.

        It is `__main__` with its own `sys.argv` and `__file__`, can import what lies beside it, and has the variables
        of `torchrun` in its environment; the process group is joined already. `module`, `strategy`, `rank` and
        `world_size` are among its names, and what it defines stays for the next. Ctrl-C stops all ranks alike.

        Args:
            path: of the file, on this machine; modules beside it are read on the ranks' own.
            args: its command line.
            rank: of one; it must not ask the others for a collective.

        Returns:
            Per rank the value of its last expression, None where it ends otherwise. A script that fails, or exits with
            another code than 0, raises `RemoteError` with its line.
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
            rank, args: as of `run_script`.

        Returns:
            Per rank the `repr` of the cell's last expression, None where it has none.
        """
        return self._run_text("run_cell", Cell(source, tuple(map(str, args))), rank, "cell", source)

    def _run_text(self, verb: str, cell: Cell, rank: int | None, what: str, text: str) -> list[Any]:
        """Run a cell or a script; `text` is what the verb was called with, for the record."""
        self._need_built(verb)
        if rank is not None and not 0 <= rank < self.world_size:
            raise EngineError(f"{verb}: rank={rank}: {self.name} has ranks 0 to {self.world_size - 1}")
        where = f"{self.name} {what}" if rank is None else f"{self.name} {what} on rank {rank}"
        options = ({} if rank is None else {"rank": rank}) | ({"args": list(cell.args)} if cell.args else {})
        with self.link.noting(self.name, verb, (text,), options):
            return list(self.call_all(verb, cell, rank, what=where, track=True).blocking_result())

    def complete_names(self, text: str) -> list[str]:
        """Names on rank 0 that continue `text`; answers also while a cell runs."""
        return list(self.control("complete_names", text)[0])

    def p2p_weight_sync(self, to: InferenceEngine | TrainEngine, transport: str | None = None) -> Synced:
        """Send the weights to another engine; ends with equal log-probs on a probe, and replicas with equal versions.

        Args:
            to: replicas; or a training engine without an optimizer, as a reference is, on this host.
            transport: `"shm"` (shared memory of one host), `"ipc"` (CUDA IPC, where every replica's GPU also holds a
                training rank) or `"broadcast"` (NCCL between GPUs, gloo between CPUs); None: the best that works, of
                replicas with `delta=True` `"broadcast"`.
        """
        if not isinstance(to, InferenceEngine | TrainEngine):
            raise EngineError(f"p2p_weight_sync wants an InferenceEngine or a TrainEngine, got {type(to).__name__}")
        for engine in (self, to):
            engine._need_built("p2p_weight_sync")
        if isinstance(to, TrainEngine):
            return copy_weights(self, to, transport).blocking_result()
        return sync_weights(self, to, transport=transport).blocking_result()

    def call_logprobs(self, batch: TrainBatch, options: dict[str, Any], what: str) -> Pending:
        """Submit a forward pass with `PolicyOptions`; its result is a row of log-probs for each response."""
        return self.call_all(
            "policy_forward", batch, options, finish=lambda parts: list(rows_in_order(parts)["logprobs"]), what=what
        )

    @property
    def data_ranks(self) -> int:
        """Number of ranks that rows are split over: those that compute layers together (`tensor_parallel`) are one."""
        return self.world_size // int(self.info["tensor_parallel"])

    @property
    def training(self) -> bool:
        """Whether the module is in training mode; `train()` and `eval()` set it."""
        return bool(self.status()["training"])

    def state_dict(self) -> dict[str, Any]:
        """The module's whole state dict, by its own names, as tensors in this kernel's memory."""
        return dict(self.call_all("whole_state", what=f"{self.name}.state_dict()").result()[0])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Fill the parameters from a dict of whole tensors; the optimizer keeps its state, gradients are dropped."""
        self._load("load_state_dict", dict(state_dict), own_names=True)

    def save(self, path: str | Path, dtype: str | None = None) -> ExportedModel:
        """Write the weights as safetensors, with config and tokenizer where the module is a transformers model.

        `session.save` writes what a run goes on from: optimizer, step and history too.

        Args:
            path: a folder, new or empty.
            dtype: of the tensors; None: the config's, or what the module is held in.
        """
        place, what = str(new_folder(path, f"{self.name}.save")), f"{self.name}.save()"
        return self.call_all("save_weights", place, dtype, what=what, track=True).result()[0]

    def load(self, path: str | Path) -> None:
        """Fill the parameters from a checkpoint, a folder or a file, through the module's hooks; else as
        `load_state_dict`."""
        self._load("load", str(Path(path).expanduser().resolve()), own_names=False)

    def _load(self, verb: str, source: Any, own_names: bool) -> None:
        with self.link.noting(self.name, verb, (source,), {}):
            self.call_all("load_weights", source, own_names, what=f"{self.name}.{verb}()", track=True).result()

    def redefine(self, cls: type, replace: str | None = None) -> redefining.Redefined:
        """Put a class in the place of the live one of its name, on every rank; weights, optimizer and random states
        are not touched, and no constructor or `on_weights_materialized` runs. An unchanged class changes nothing.

        The class may be that of the module itself (its methods are callable at once) or of modules inside it. It
        survives a `heal()`. Replicas know nothing of it: after a change of `forward` they compute something else. Where
        it would not fit the module it is refused, and no rank is changed.

        Args:
            cls: with everything it uses of the notebook and of local modules, by value.
            replace: name of the class it takes the place of, where that has another one.
        """
        return redefining.redefine(self, cls, replace)

    def method(self, fn: F) -> F:
        """Decorator: add a function to the live module as a method, or replace the method of its name.

        It is callable as `engine.name(…)` at once, keeps being so when the class is redefined without such a method,
        and gives the function back. `super()` without arguments does not work in it.
        """
        redefining.add_method(self, fn)
        return fn

    def staged_fields(self, version: int, manifest: Manifest) -> dict[str, Any]:
        """Return what goes on record of weights that lie staged in shared memory; the layout only where it changed: it
        is journalled."""
        fields: dict[str, Any] = {"staged_version": version}
        if manifest != self._staged:
            fields["staged"] = asdict(manifest)
        self._staged = manifest
        return fields

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
            raise MethodError(f"{name!r}: the engine is not built; its module's methods come with build(…)")
        alike = nearest(name, [*methods, *redefining.verbs(self)])
        raise MethodError(
            f"the module of engine {self.name!r} has no method {name!r}{alike}; it has {', '.join(methods)}"
        )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._methods})

    def __repr__(self) -> str:
        return f"TrainEngine({self.name!r}, {self._executor}, {self.described()})"

    def _make_methods(self, infos: list[dict[str, Any]]) -> None:
        if hidden := [info["name"] for info in infos if hasattr(type(self), info["name"])]:
            warnings.warn(
                f"{', '.join(hidden)}: {self.name} has attributes of its own of these names, so the module's methods "
                "cannot be called by them; rename them",
                stacklevel=user_stacklevel(),
            )
        self._methods = {info["name"]: _proxy(info, self._caller(info["name"])) for info in infos}

    def _split(self, what: str | bytes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Arguments]:
        """Return the arguments with which each rank calls the method, or function, `what`."""
        slices, together = self.info["sequence_parallel"], self.info["tensor_parallel"]
        parts, tokens = split_call(args, kwargs, self.world_size, slices, together)
        return [((what, a, k, tokens), {}) for a, k in parts]

    def _caller(self, name: str) -> Callable[..., list[Any]]:
        def call(*args: Any, **kwargs: Any) -> list[Any]:
            weight = estimated_bytes([args, kwargs])
            if weight > WARN_BYTES:
                warnings.warn(
                    f"the arguments of {self.name}.{name} weigh about {format_bytes(weight)} and are copied to the "
                    "ranks: send a path and read the data in a method of your module, or mark rows with NeedParallel",
                    stacklevel=user_stacklevel(),
                )
            calls = self._split(name, args, kwargs)
            with self.link.noting(self.name, name, args, kwargs):
                return list(self.call("call_method", calls, what=f"{self.name}.{name}").blocking_result())

        return call


def _on_node(config: TrainConfig, local_ranks: int, node: str, nodes: Sequence[str]) -> TrainConfig:
    """Return the options of a rank on `node`: where there are several `nodes`, loopback gives way to its address."""
    if len(set(nodes)) == 1:
        return config
    apart = config.host == LOOPBACK and cluster.network_interface() is None
    return replace(config, local_ranks=local_ranks, host=node if apart else config.host)


def _proxy(info: dict[str, Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that calls the method on the ranks and looks like it to `help()` and completion."""
    signature = _signature(info["signature"])

    def method(*args: Any, **kwargs: Any) -> Any:
        if signature is not None:
            signature.bind(*args, **kwargs)  # a wrong argument is an error here, not on the ranks
        return call(*args, **kwargs)

    method.__name__ = method.__qualname__ = info["name"]
    method.__doc__ = info["doc"] or f"{info['name']}{info['signature']}, on every rank; returns one result per rank."
    if signature is not None:
        method.__signature__ = signature  # type: ignore[attr-defined]
    return method


def _signature(text: str) -> inspect.Signature | None:
    """Parse a signature's text; None where a default cannot be written as source (any call is then let through)."""
    namespace: dict[str, Any] = {}
    try:
        exec(f"from __future__ import annotations\ndef f{text}: ...", namespace)
    except (SyntaxError, NameError):
        return None
    return inspect.signature(namespace["f"])

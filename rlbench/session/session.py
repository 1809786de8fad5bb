"""`rb.Session`: the workbench. Builds a train and an inference engine for one model; one verb per cell drives them.

The session's state (step, versions, history, engine states) is at its monitor; this object holds handles and options.
"""

from __future__ import annotations

import functools
import weakref
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, cast

from rlbench.checkpoint import folder as folders
from rlbench.data.sampling import sampling_options
from rlbench.dispatch.chain import Chain, Steps
from rlbench.dispatch.link import Link
from rlbench.engines import InferenceEngine, TrainEngine
from rlbench.engines.base import Engine
from rlbench.engines.moved import Moved
from rlbench.engines.paths import check_model_path, model_name
from rlbench.engines.sync import sync_weights
from rlbench.errors import SessionError, StateError, Stopped, Suggesting, nearest
from rlbench.notebook.card import WARNING, Card
from rlbench.notebook.views import session_card
from rlbench.results import Names
from rlbench.runtime import cluster, registry
from rlbench.runtime.starting import ATTACH, phase, say, starting
from rlbench.session import building, checkpoints
from rlbench.session.anchors import Anchors
from rlbench.session.check_verbs import CheckVerbs
from rlbench.session.data_verbs import DataVerbs
from rlbench.session.evaluation import evaluate_steps
from rlbench.session.facts import Sessions, card_facts
from rlbench.session.history_verbs import HistoryVerbs
from rlbench.session.lab_verbs import LabVerbs
from rlbench.session.options import SessionOptions, reference_at, resolve_model
from rlbench.session.pause_verbs import PauseVerbs
from rlbench.session.recording import Recorder, recorded
from rlbench.session.state_verbs import StateVerbs
from rlbench.session.tracking import Trackers
from rlbench.session.train_verbs import TrainVerbs
from rlbench.session.trainer_verbs import TrainerVerbs
from rlbench.session.view_verbs import ViewVerbs


class Session(
    TrainVerbs,
    TrainerVerbs,
    DataVerbs,
    StateVerbs,
    HistoryVerbs,
    CheckVerbs,
    LabVerbs,
    PauseVerbs,
    ViewVerbs,
    Suggesting,
):
    """A model with its engines, driven cell by cell.

    Args:
        model: `"tiny"` (made on the spot), a folder, or a hub id.
        name: a name to find it again; default: made up. Where a session of this name runs and is like this one, it is
            attached to: running the cell again changes nothing.
        train: sizes (`tensor_parallel_size`, `data_parallel_size`) and policy options (`lr`, `betas`, `weight_decay`,
            `max_norm`, `dtype`, `use_mp_opt`, `fsdp_cpu_offload`, …: `PolicySpec` and `TrainConfig`).
        inference: sizes and replica options (`kv_cache_bytes`, `max_model_len`, …).
        reference: True keeps the starting weights as a frozen reference policy for KL; or another model.
        seed: of sampling; with the same seed and the same cells a session draws the same samples.
        lease_s: seconds after which the session ends by itself once its driver is gone: a notebook's kernel (default
            8 h) or a script (default 30 s). While that lives, the session does, however long it is left alone.
        undo: how many last steps `undo()` can take back. After each step the weights and the optimizer (and a trainer's
            critic and average) are copied to host memory, which is also what `heal()` goes back to; one copy more than
            `undo` is held. 0 keeps none.

    Raises:
        SessionError, BuildError: naming what is wrong; nothing is left running.
    """

    def __init__(
        self,
        model: str = "tiny",
        name: str | None = None,
        *,
        train: dict[str, Any] | None = None,
        inference: dict[str, Any] | None = None,
        reference: bool | str | None = None,
        seed: int = 0,
        lease_s: float | None = None,
        undo: int = 1,
    ) -> None:
        if not isinstance(undo, int) or undo < 0:
            raise SessionError(f"undo={undo!r}: the number of last steps that can be undone, 0 for none")
        train_options, inference_options = building.check_options(train, inference)
        named = model_name(model, "rb.Session")
        with starting(f"session {named}"):
            path = check_model_path(resolve_model(named))
            reference_path = reference_at(reference, path)
            building.check_models(path, reference_path)
            self._options = SessionOptions(named, path, seed, train_options, inference_options, reference_path, undo)
            cluster.current()
            if name is not None and Link.exists(name):
                self.__dict__.update(self._joined(name, self._options).__dict__)
            else:
                self._start(name, lease_s)

    def _start(self, name: str | None, lease_s: float | None) -> None:
        """Make it from its options; nothing is left running where that fails or is interrupted."""
        with phase("monitor", "starting its monitor"):
            self._link = Link.create(name, lease_s)
        self._last: Any = None
        self._keep_books(self._link.name)
        self._tokenizer: Any = None
        try:
            self._link.set(config=self._options.to_json())
            self._engines = self._build()
        except BaseException:
            self._link.close()
            raise

    @classmethod
    def _joined(cls, name: str, wanted: SessionOptions) -> Session:
        """Attach to the session of that name if it is what is wanted; SessionError naming what differs if not."""
        say(ATTACH, f"attaching to {name!r}, which runs already")
        found, asked = Link.look(name, "config")["config"], wanted.to_json()
        if not found:  # its kernel went away while it was built: attaching says so and closes it
            return cls._attached(Link.attach(name))
        differ = [
            f"{k} is {found.get(k)!r}, not {asked[k]!r}" for k in asked if k != "path" and found.get(k) != asked[k]
        ]
        if differ:
            raise SessionError(
                f"session {name!r} runs already, and {'; '.join(differ)}: rb.attach({name!r}) drives it as it is, "
                "close() it to make another, or choose another name"
            )
        return cls._attached(Link.attach(name))

    @classmethod
    def load(cls, path: str, name: str | None = None, **options: Any) -> Session:
        """A new session that goes on from a checkpoint of `save(path)`, on as many ranks as it is given.

        Args:
            path: a checkpoint, or the folder of several: the newest.
            name: of the new session.
            options: of `rb.Session`, where they differ from the saved ones (`train={"tensor_parallel_size": 1}`).

        Raises:
            CheckpointError: damaged, or of another model; nothing is left running.
        """
        folder, kept = checkpoints.options_of(path)
        folders.verify(folder)  # before minutes are spent on engines
        if name is not None and Link.exists(name):
            raise SessionError(f"session {name!r} runs already: load the checkpoint under another name, or close it")
        session = cls(name=name, **checkpoints.overridden(kept, options))
        try:
            session._run("load", checkpoints.load_steps(session, folder, kept), True)
            entry = session.recorder.begin(session, "load", {"path": str(folder), **options})
            session.recorder.end(session, entry)
        except BaseException:
            session.close()
            raise
        return session

    @classmethod
    def _attached(cls, link: Link) -> Session:
        state = link.state()
        if not state["config"] or any("info" not in record for record in state["engines"].values()):
            link.close()
            raise SessionError(
                f"session {link.name!r} was not finished when its kernel went away; it is closed now: make it again"
            )
        session = cls.__new__(cls)
        session._link = link
        session._options = SessionOptions(**state["config"])
        session._last, session._tokenizer = None, None
        session._keep_books(link.name)
        session._engines = {}
        for name, record in state["engines"].items():
            session._engines[name] = (
                InferenceEngine.attach(link, name, record, session._options.seed)
                if record["kind"] == "inference"
                else TrainEngine.attach(link, name, record)
            )
        return session

    # -- what it is made of

    @property
    def name(self) -> str:
        """The session's name."""
        return self._link.name

    @property
    def link(self) -> Link:
        """This kernel's end of the session."""
        return self._link

    @property
    def options(self) -> SessionOptions:
        """What it was made from."""
        return self._options

    @property
    def engines(self) -> dict[str, Engine]:
        """Its engines by role; `heal` puts rebuilt ones in their place."""
        return self._engines

    @property
    def undo_depth(self) -> int:
        """How many last steps are kept to be undone."""
        return self._options.undo

    @property
    def train(self) -> TrainEngine:
        """The engine of the policy being trained."""
        return cast(TrainEngine, self._engines["actor"])

    @property
    def inference(self) -> InferenceEngine:
        """The engine that generates."""
        return cast(InferenceEngine, self._engines["inference"])

    @property
    def reference(self) -> TrainEngine | None:
        """The frozen reference policy, where there is one."""
        return cast("TrainEngine | None", self._engines.get("reference"))

    @property
    def last(self) -> Any:
        """The last rollouts, whole or stopped; after `rb.attach` those of the earlier kernel. None before the first."""
        if self._last is None:
            self._last = self.inference.last_rollout()
        return self._last

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded on first use."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self._options.path)
        return self._tokenizer

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return int(self._link.state("step")["step"])

    @property
    def version(self) -> int:
        """Version of the trainer's weights: goes up with every optimizer step that was not skipped."""
        return int(self._link.state("version")["version"])

    # -- verbs

    @recorded
    def rollout(
        self,
        prompts: Any,
        n: int | None = None,
        sampling: Any = None,
        *,
        block: bool = True,
        on_stop: str = "raise",
        progress: bool = True,
        env: Any = None,
        **options: Any,
    ) -> Any:
        """Generate `n` completions per prompt (default 1).

        Args:
            prompts: texts, chats, token ids, or rows with `prompt` and `label`.
            sampling: options by vLLM's names (`temperature`, `top_p`, `max_tokens`, …), or its `SamplingParams`; also
                as keywords. `max_tokens` is 16 where not given, as in vLLM; None: up to the model's length.
            block: False returns a `Pending` at once.
            env: an `rb.envs.Env` that each sample meets turn by turn; then also `max_turns`, `max_total_tokens` and
                `env_timeout_s`, and `max_tokens` is per turn.
            on_stop: `"raise"`: an interrupt raises `rb.Stopped`, `.partial` holds what was finished; `"return"`
                returns that instead.

        Returns:
            `Rollouts` (or a `Pending`).
        """
        if on_stop not in ("raise", "return"):
            raise SessionError(f"on_stop={on_stop!r}: wanted 'raise' or 'return'")
        self.note_place()
        pending = self.inference.submit_generate(
            prompts, sampling_options(sampling) | options, n=n, progress=progress, env=env
        )
        pending.then(self._keep_last)
        if not block:
            return pending
        try:
            return pending.blocking_result()
        except Stopped as stopped:
            self._last = stopped.partial
            if on_stop == "raise" or stopped.partial is None:
                raise
        return self._last

    @recorded
    def sync_weights(self, transport: str | None = None, block: bool = True) -> Any:
        """Send the trainer's weights to the replicas and prove it by log-probs.

        Args:
            transport: `"shm"`, `"ipc"` or `"broadcast"` (see `TrainEngine.p2p_weight_sync`); None: the best that works.
            block: False returns a `Pending` at once.

        Returns:
            `Synced`: `version`, `bytes`, `tensors`, `transport` and `gap` (or a `Pending`).
        """
        chain = sync_weights(self.train, self.inference, self.version, transport)
        return chain.blocking_result() if block else chain

    @recorded
    def offload(self, engine: str, *parts: str) -> Moved:
        """Free device memory, `offload("train")` or `offload("inference", "kv_cache")`; returns what was measured."""
        return self._engine(engine).cpu(parts or None)

    @recorded
    def onload(self, engine: str, *parts: str) -> Moved:
        """Make an engine, or parts of it, resident again."""
        return self._engine(engine).cuda(parts or None)

    @recorded
    def evaluate(
        self,
        prompts: Any,
        reward: Any = None,
        n: int = 1,
        *,
        block: bool = True,
        progress: bool = True,
        env: Any = None,
        **sampling: Any,
    ) -> Any:
        """Mean reward of `n` completions per prompt; returns an `Evaluation`. One is greedy and several are sampled at
        temperature 1, unless told otherwise.

        With `env` as in `rollout`; where `reward` is None the environment's rewards count. Completions that the
        environment's errors ended, or a stop cut, do not count; the `Evaluation` says how many.

        A stop raises `Stopped`; its `.partial` are Rollouts: what was drawn, or those that had a reward by then.
        """
        chosen = {"temperature": 0.0 if n == 1 else 1.0} | sampling
        return self._run("evaluate", evaluate_steps(self.inference, prompts, reward, n, chosen, progress, env), block)

    def stop(self) -> Names:
        """Stop what runs, also a call of an earlier kernel or another thread; returns at once what that was."""
        here = [chain for chain in self._chains if chain.what.startswith(("evaluate", "trainer.")) and not chain.done]
        for chain in here:  # a reward runs in this kernel, a fit is between two calls: the monitor stops neither
            chain.stop()
        return Names("stopping", self._link.stop_running() or [chain.what for chain in here])

    def close(self) -> None:
        """End the session: its engines, its memory, its files. Safe to call twice."""
        self.trackers.close()
        self._link.close()

    # -- bookkeeping of the verbs

    def _keep_books(self, name: str) -> None:
        self._chains: weakref.WeakSet[Chain] = weakref.WeakSet()
        self.anchors, self.recorder, self.trackers = Anchors(name), Recorder(name), Trackers(self)
        self._link.noting = functools.partial(self.recorder.engine_call, self)

    def _keep_last(self, rollouts: Any, error: BaseException | None) -> None:
        """A rollout has ended, with these or cut: it is `last`."""
        self._last = rollouts if error is None else getattr(error, "partial", None) or self._last

    def advance(self, stepped: bool) -> tuple[int, int]:
        """One more step (a skipped one leaves the weights as they are); returns step and version."""
        state = self._link.state("step", "version", "highest")
        step, version = int(state["step"]) + 1, int(state["highest"] + 1 if stepped else state["version"])
        self._link.set(step=step, version=version)
        return step, version

    def record(self, values: dict[str, Any]) -> None:
        """Keep a step's record."""
        self._link.apply({"do": "record", "record": values})

    def facts(self) -> dict[str, Any]:
        """What the card shows, as plain values."""
        return card_facts(self._link.state(), self._link.samples())

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return self._card().text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return self._card().bundle()

    def _card(self) -> Card:
        if self._link.closed:
            return Card(f"Session({self.name!r}, closed)")
        try:
            return session_card(self.facts())
        except SessionError as gone:
            return Card(f"Session({self.name!r})", notes=[f"{WARNING}{gone}"])

    def _run(self, what: str, steps: Steps, block: bool) -> Any:
        chain = Chain(what, self._link.held(what, steps))
        self._chains.add(chain)
        return chain.blocking_result() if block else chain

    def _engine(self, name: str) -> Engine:
        known = {"train": "actor"} | {n: n for n in self._engines}
        if name not in known:
            raise StateError(f"no engine {name!r}{nearest(name, known)}; there are {', '.join(known)}")
        return self._engines[known[name]]

    def _build(self) -> dict[str, Engine]:
        """Start all engines at the same time: each spends its first seconds importing."""
        plans = building.plans(self._options, self._link)
        pool = ThreadPoolExecutor(len(plans))
        try:
            futures = {name: pool.submit(plan) for name, plan in plans.items()}
            wait(futures.values(), return_when=FIRST_EXCEPTION)
            engines = {name: future.result() for name, future in futures.items()}
        finally:  # after an interrupt or a failure nobody waits for the others: closing the session ends them
            pool.shutdown(wait=False, cancel_futures=True)
        building.check_agreement(engines)
        return engines


def attach(name: str | None = None, take_over: bool = False) -> Session:
    """Drive a session that runs already, from this kernel: weights, optimizer, step and history are as they were.

    Args:
        name: which (default: the only one there is).
        take_over: also when another live kernel drives it; that one is refused from then on.
    """
    with starting("session"), phase(ATTACH, "attaching"):
        return Session._attached(Link.attach(name, take_over))


def sessions() -> Sessions:
    """The sessions on the cluster, one dict each."""
    joined = cluster.current()
    return Sessions(registry.shown(record) for record in registry.live_sessions(joined.id))

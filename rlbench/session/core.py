"""What the verbs of a session work on: its engines, its link to the workers, its options and its records."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rlbench.data.rollouts.rollouts import Rollouts
from rlbench.defaults import Default, undo_depth
from rlbench.dispatch.chain import Chain, Steps, Waiting
from rlbench.dispatch.link import Link, driver_mode
from rlbench.dispatch.pending import Pending
from rlbench.engines import InferenceEngine, TrainEngine
from rlbench.engines.base import Engine
from rlbench.engines.sync import Target, agreement_steps, sync_weights
from rlbench.engines.under import adapter_numbers
from rlbench.errors import SessionError, StateError, nearest
from rlbench.runtime import cluster
from rlbench.runtime.devices import room_in_memory
from rlbench.runtime.starting import phase
from rlbench.session import building
from rlbench.session.beside import Anchors, Followed
from rlbench.session.options import POLICY, SessionOptions
from rlbench.session.record.evaluations import EvaluationLog
from rlbench.session.record.recording import Recorder
from rlbench.session.record.step_records import StepRecords
from rlbench.session.record.tracking import Trackers

if TYPE_CHECKING:
    from rlbench.session.handle import Handle
    from rlbench.session.training.session_trainer import SessionTrainer

TRAINED_BYTES = 12
"""Of a copy of one trained parameter: a float32 master and AdamW's two moments."""
TOLD_S, LOOK_S = 5.0, 0.02
W = TypeVar("W", bound=Waiting)
HERE = ("evaluate", "pipeline", "trainer.", "teacher")
"""How verbs begin of which parts run in this kernel: rewards, and what lies between two calls."""


ALONE = frozenset(
    "train_step forward_backward optim_step gradients loss_lab preflight rehearse update_reference optimizer schedule "
    "freeze unfreeze snapshot restore undo drop branch heal resize park save load sync_weights "
    "trainer.step trainer.fit trainer.load trainer.save".split()
)
"""Verbs of several calls that read or change one training state: between two of them no other of these may run."""


class SessionCore:
    """A session as its step functions see it: link, options, records, engines by role (`actor`, `inference`,
    `reference`; `heal` puts rebuilt ones in their place), the trainer that was made last in this kernel, and
    what a notebook holds of it."""

    def __init__(self, link: Link, options: SessionOptions) -> None:
        self.link, self.options = link, options
        self.engines: dict[str, Engine] = {}
        self.trainer: SessionTrainer | None = None
        self.handle: Handle | None = None
        self.anchors, self.followed = Anchors(link.name), Followed(link)
        self.steps = StepRecords(link)
        self.evaluations = EvaluationLog(link, self.steps)
        self.recorder = Recorder(link, options.seed, lambda entry, value: self.trackers.log(entry, value))
        self.trackers = Trackers(link, options, self.recorder.entries, lambda ids: str(self.tokenizer.decode(ids)))
        self.stepping = threading.Lock()  # two steps at a time would count as one
        self.undo_depth = 0
        self._begun: weakref.WeakSet[Waiting] = weakref.WeakSet()
        self._beginning, self._claiming = threading.Lock(), threading.Lock()
        self._alone: Waiting | None = None
        self._last: Rollouts | None = None
        self._tokenizer: Any = None
        link.noting = self.recorder.engine_call

    @classmethod
    def start(
        cls,
        options: SessionOptions,
        name: str | None,
        lease_s: float | None,
        begin: Callable[[SessionCore], Steps],
        park: bool | None = None,
    ) -> SessionCore:
        """Start monitor and engines and take the steps to `begin` with; nothing is left running where that fails or is
        interrupted. `park`: at the end of its lease the session goes to disk; None: one that a notebook starts."""
        with phase("monitor", "starting its monitor"):
            core = cls(Link.create(name, lease_s), options)
        try:
            core.link.set(config=options.to_json(), park=driver_mode() == "notebook" if park is None else park)
            core.engines = core._build()
            core._note_defaults()
            if core.samples:
                Chain("comparing the engines", agreement_steps(core.train, core.inference)).result()
            Chain("the first weights", begin(core)).result()
        except BaseException:
            core.link.close()
            raise
        return core

    @classmethod
    def attach(cls, link: Link) -> SessionCore:
        """Take up a session that runs; closes one whose kernel went away before it was finished."""
        state = link.state("config", "engines", "undo_depth")
        if not state["config"] or any("info" not in record for record in state["engines"].values()):
            link.close()
            raise SessionError(
                f"session {link.name!r} was not finished when its kernel went away; it is closed now: make it again"
            )
        core = cls(link, SessionOptions.from_json(state["config"]))
        core.undo_depth = int(state["undo_depth"])
        for name, record in state["engines"].items():
            core.engines[name] = (
                InferenceEngine.attach(link, name, record, core.options.seed)
                if record["kind"] == "inference"
                else TrainEngine.attach(link, name, record)
            )
        return core

    # -- what there is

    @property
    def name(self) -> str:
        """The session's name."""
        return self.link.name

    @property
    def train(self) -> TrainEngine:
        """The engine of the policy being trained."""
        return cast(TrainEngine, self.engines["actor"])

    @property
    def samples(self) -> bool:
        """Whether there are replicas to sample from; a reward model has none."""
        return self.options.kind == POLICY

    @property
    def inference(self) -> InferenceEngine:
        """The engine that generates. StateError where there is none."""
        if not self.samples:
            raise StateError("a reward model has no replicas: nothing is sampled from it, and nothing sent to them")
        return cast(InferenceEngine, self.engines["inference"])

    @property
    def reference(self) -> TrainEngine | None:
        """The frozen reference policy, where there is one."""
        return cast("TrainEngine | None", self.engines.get("reference"))

    @property
    def has_reference(self) -> bool:
        """Whether log-probs of a reference policy can be had: of one apart, or of the base with its adapters off."""
        return self.reference is not None or self.options.base_is_reference

    @property
    def last(self) -> Rollouts | None:
        """The last rollouts, whole or stopped; after `rb.attach` those of the earlier kernel."""
        if self._last is None:
            self._last = self.inference.last_rollout()
        return self._last

    def keep_last(self, rollouts: Rollouts | None, error: BaseException | None = None) -> None:
        """Note what a rollout ended with, or what there was when it was cut."""
        self._last = rollouts if error is None else getattr(error, "partial", None) or self._last

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded on first use."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self.options.path)
        return self._tokenizer

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return int(self.link.state("step")["step"])

    @property
    def version(self) -> int:
        """Version of the trainer's weights: goes up with every optimizer step that was not skipped."""
        return int(self.link.state("version")["version"])

    @property
    def adapters(self) -> dict[str, int]:
        """The number that each branch's adapter has in the replicas, by branch."""
        return adapter_numbers(self.link)

    def synced(self, version: int | None = None, transport: str | None = None) -> Chain:
        """Start a sync of the policy, as `version` (None: its own), into the place its branch has in the replicas."""

        def asking() -> Target:
            asked = self.link.asking("branch", "version", "adapters")

            def target() -> tuple[int, int]:
                state = asked()
                number = state["adapters"].get(state["branch"], 1)
                return int(state["version"]) if version is None else version, number

            return target

        return sync_weights(self.train, self.inference, asking, transport)

    def engine(self, name: str) -> Engine:
        """Return the engine a user calls `name` ("train" is the actor); StateError where there is none."""
        known = {"train": "actor"} | {n: n for n in self.engines}
        if name not in known:
            raise StateError(f"no engine {name!r}{nearest(name, known)}; there are {', '.join(known)}")
        return self.engines[known[name]]

    @property
    def keeps_on_disk(self) -> bool:
        """Whether snapshots go to the state folder, which all nodes see: ranks built again may be elsewhere."""
        return cluster.has_several_nodes()

    # -- what verbs do with it

    def run(self, what: str, steps: Steps) -> Chain:
        """Start the steps of a verb."""
        return cast(Chain, self.begin(what, lambda: steps))

    def begin(self, what: str, start: Callable[[], Steps | Waiting]) -> Waiting:
        """Start a verb: a call, or the steps of several. StateError where one runs that excludes it; one that was
        stopped is waited for."""

        def begun() -> Waiting:
            started = start()
            if isinstance(started, Waiting):
                return self.watched(started)
            return self.watched(Chain(what, self.link.held(what, started)))

        if what not in ALONE:
            return begun()
        with self._claiming:
            while (other := self._alone) is not None and not other.done:
                if not other.stopping:
                    raise StateError(
                        f"{what} cannot begin while {other.what} runs: both work on one training state. Wait for it "
                        "(await it, .result()), or session.stop() it first"
                    )
                time.sleep(LOOK_S)
            self._alone = begun()
            return self._alone

    def watched(self, begun: W) -> W:
        """Count what was begun as under way until it is over, and return it: the monitor hears of calls a bit later."""
        with self._beginning:  # another verb may be looking
            self._begun.add(begun)
        return begun

    def _here(self) -> list[Waiting]:
        """Return what this kernel has begun and is not over."""
        with self._beginning:
            begun = list(self._begun)
        return [one for one in begun if not one.done]

    def ask_ranks(self, name: str, *args: Any, **options: Any) -> Pending:
        """Call all training ranks, which answer alike; the result is the answer of the first."""
        return self.train.call_all(name, *args, finish=itemgetter(0), **options)

    def number_weights(self) -> None:
        """Give the trainer's weights a version of their own: something but a step of the session has changed them."""
        self.link.set(version=int(self.link.state("highest")["highest"]) + 1)

    def stop(self) -> list[str]:
        """Stop what runs; returns at once what that was."""
        here = [verb for verb in self._here() if verb.what.startswith(HERE)]
        alone = [verb for verb in self._here() if verb is self._alone and verb not in here]
        for verb in [*here, *alone]:  # a reward runs in this kernel, others are between two calls: no monitor stops it
            verb.stop()
        return self.link.stop_running() or [verb.what for verb in here]

    def under_way(self) -> list[str]:
        """Return what runs: verbs of this kernel that are not over, and calls, also those of an earlier one."""
        here = [verb.what for verb in self._here()]
        return list(dict.fromkeys([*here, *self.link.state()["running"].values()]))

    def need_idle(self, done: str, but: str) -> None:
        """Refuse to end workers while anything but verb `but` runs; they tell the monitor of a call's end later."""
        deadline = time.monotonic() + TOLD_S
        while running := [what for what in self.under_way() if what != but]:
            if time.monotonic() > deadline:
                raise StateError(
                    f"session {self.name!r} cannot be {done} while {', '.join(running)} runs: wait for it, or stop it "
                    "first"
                )
            time.sleep(0.05)

    def can_sync(self) -> bool:
        """Say whether a sync can be done now; it also mends replicas that were left half-way."""
        if not self.samples or self.train.status()["weights"] != "cuda":
            return False
        return self.inference.status()["weights"] in ("cuda", "torn")

    def trainer_went_back(self, label: str, place: Mapping[str, Any] | None) -> None:
        """Let the trainer know that the policy went back to snapshot `label`; warn where the ranks' trainer did not.

        `place`: what the ranks say of their trainer, see `Snapshots.read_snapshot`; None where they have none.
        """
        if place is None:
            return
        if self.trainer is not None:
            self.trainer.went_back(int(place["optimizer_steps"]))
        if place["left"] is not None:
            warnings.warn(
                f"{label!r}: the policy went back, the trainer did not: {place['left']}. Its critic, average, place in "
                "the prompts and counts are where they were, experience and gradients that waited are gone; "
                "session.trainer(…) makes it anew",
                stacklevel=2,
            )

    def close(self) -> None:
        """End trackers, engines, memory and files."""
        self.trackers.close()
        self.link.close()

    def _note_defaults(self) -> None:
        """Note what was chosen where nobody said, for the session's card; choose how many steps can be undone."""
        engines = [self.engines[role] for role in ("actor", "inference") if role in self.engines]
        noted = [Default(*one) for engine in engines for one in engine.info.get("defaults", [])]
        if self.options.undo is None:
            copy = TRAINED_BYTES * int(self.train.info["trainable"])
            self.undo_depth, default = undo_depth(copy, max(0, room_in_memory() - self._caches_to_come()))
            noted.append(default)
        else:
            self.undo_depth = self.options.undo
        self.link.set(undo_depth=self.undo_depth, defaults=noted)

    def _caches_to_come(self) -> int:
        """Return the bytes of KV caches in host memory, of which replicas take each page when they first use it."""
        replicas = self.engines.get("inference")
        if replicas is None or replicas.info.get("device") != "cpu":
            return 0
        return replicas.world_size * int(replicas.info["kv_cache_bytes"])

    def _build(self) -> dict[str, Engine]:
        """Start all engines at the same time: each spends its first seconds importing."""
        plans = building.plans(self.options, self.link)
        pool = ThreadPoolExecutor(len(plans))
        try:
            futures = {name: pool.submit(plan) for name, plan in plans.items()}
            wait(futures.values(), return_when=FIRST_EXCEPTION)
            engines = {name: future.result() for name, future in futures.items()}
        finally:  # after an interrupt or a failure nobody waits for the others: closing the session ends them
            pool.shutdown(wait=False, cancel_futures=True)
        return engines

"""What the verbs of a session work on: its engines, its link to the workers, its options and its records."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rlbench.data.rollouts.rollouts import Rollouts
from rlbench.dispatch.chain import Chain, Steps
from rlbench.dispatch.link import Link
from rlbench.engines import InferenceEngine, TrainEngine
from rlbench.engines.base import Engine
from rlbench.errors import SessionError, StateError, nearest
from rlbench.runtime.starting import phase
from rlbench.session import building
from rlbench.session.anchors import Anchors
from rlbench.session.facts import card_facts
from rlbench.session.options import SessionOptions
from rlbench.session.record.recording import Recorder
from rlbench.session.record.tracking import Trackers
from rlbench.session.state.following import Followed

if TYPE_CHECKING:
    from rlbench.session.training.session_trainer import SessionTrainer

T = TypeVar("T")


class SessionCore:
    """A session as its step functions see it.

    Attributes:
        link: this kernel's end of the session.
        options: what it was made from.
        engines: by role (`actor`, `inference`, `reference`); `heal` puts rebuilt ones in their place.
        trainer: the one that was made last in this kernel.
    """

    def __init__(self, link: Link, options: SessionOptions) -> None:
        self.link, self.options = link, options
        self.engines: dict[str, Engine] = {}
        self.trainer: SessionTrainer | None = None
        self.anchors, self.followed = Anchors(link.name), Followed(link)
        self.recorder = Recorder(link, options.seed, lambda entry, value: self.trackers.log(entry, value))
        self.trackers = Trackers(link, options, self.recorder.entries)
        self._chains: weakref.WeakSet[Chain] = weakref.WeakSet()
        self._last: Rollouts | None = None
        self._tokenizer: Any = None
        link.noting = self.recorder.engine_call

    @classmethod
    def start(cls, options: SessionOptions, name: str | None, lease_s: float | None) -> SessionCore:
        """Start monitor and engines; nothing is left running where that fails or is interrupted."""
        with phase("monitor", "starting its monitor"):
            core = cls(Link.create(name, lease_s), options)
        try:
            core.link.set(config=options.to_json())
            core.engines = core._build()
        except BaseException:
            core.link.close()
            raise
        return core

    @classmethod
    def attach(cls, link: Link) -> SessionCore:
        """Take up a session that runs; closes one whose kernel went away before it was finished."""
        state = link.state()
        if not state["config"] or any("info" not in record for record in state["engines"].values()):
            link.close()
            raise SessionError(
                f"session {link.name!r} was not finished when its kernel went away; it is closed now: make it again"
            )
        core = cls(link, SessionOptions.from_json(state["config"]))
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
    def undo_depth(self) -> int:
        """How many last steps are kept to be undone."""
        return self.options.undo

    @property
    def train(self) -> TrainEngine:
        """The engine of the policy being trained."""
        return cast(TrainEngine, self.engines["actor"])

    @property
    def inference(self) -> InferenceEngine:
        """The engine that generates."""
        return cast(InferenceEngine, self.engines["inference"])

    @property
    def reference(self) -> TrainEngine | None:
        """The frozen reference policy, where there is one."""
        return cast("TrainEngine | None", self.engines.get("reference"))

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

    def engine(self, name: str) -> Engine:
        """Return the engine a user calls `name` ("train" is the actor); StateError where there is none."""
        known = {"train": "actor"} | {n: n for n in self.engines}
        if name not in known:
            raise StateError(f"no engine {name!r}{nearest(name, known)}; there are {', '.join(known)}")
        return self.engines[known[name]]

    def facts(self) -> dict[str, Any]:
        """Return what the card shows, as plain values."""
        return card_facts(self.link.state(), self.link.samples())

    # -- what verbs do with it

    def run(self, what: str, steps: Steps) -> Chain:
        """Start the steps of a verb."""
        chain = Chain(what, self.link.held(what, steps))
        self._chains.add(chain)
        return chain

    def stop(self) -> list[str]:
        """Stop what runs; returns at once what that was."""
        here = [chain for chain in self._chains if chain.what.startswith(("evaluate", "trainer.")) and not chain.done]
        for chain in here:  # a reward runs in this kernel, a fit is between two calls: the monitor stops neither
            chain.stop()
        return self.link.stop_running() or [chain.what for chain in here]

    def advance(self, stepped: bool) -> tuple[int, int]:
        """Count one more step (a skipped one leaves the weights as they are); returns step and version."""
        state = self.link.state("step", "version", "highest")
        step, version = int(state["step"]) + 1, int(state["highest"] + 1 if stepped else state["version"])
        self.link.set(step=step, version=version)
        return step, version

    def can_sync(self) -> bool:
        """Say whether both sides hold their weights, so that a sync can be done now."""
        return all(engine.status()["weights"] == "cuda" for engine in (self.train, self.inference))

    def trainer_went_back(self, label: str, place: Mapping[str, Any] | None) -> None:
        """Let the trainer know that the policy went back to snapshot `label`; warn where the ranks' trainer did not.

        Args:
            place: what the ranks say of their trainer, see `RankSnapshots.put_back`; None where they have none.
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

    def record(self, values: dict[str, Any]) -> None:
        """Keep a step's record."""
        self.link.apply({"do": "record", "record": values})

    def close(self) -> None:
        """End trackers, engines, memory and files."""
        self.trackers.close()
        self.link.close()

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
        building.check_agreement(engines)
        return engines

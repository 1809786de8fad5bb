"""A trainer on the session's ranks, as the kernel holds it: iterations one by one, each on the session's record."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, overload

from rlbench.data.record.history import History
from rlbench.data.record.metric_names import of_trainer
from rlbench.data.record.metrics import Metrics
from rlbench.dispatch import views
from rlbench.dispatch.chain import Steps
from rlbench.dispatch.pending import Pending
from rlbench.dispatch.views import View
from rlbench.errors import SessionError, Stopped, Suggesting, WorkerDied
from rlbench.results import Result
from rlbench.session.core import SessionCore
from rlbench.session.state import step_copies
from rlbench.session.state.snapshots import Snapshot
from rlbench.session.training.text_data import as_texts
from rlbench.session.training.trainer_places import here
from rlbench.session.verb import PendingVerb
from rlbench.trainers.options.methods import DISTILL
from rlbench.trainers.options.run_config import DEFAULTS

if TYPE_CHECKING:
    from rlbench.session.handle import Handle


class FitView(View, Protocol):
    """Draws the iterations of a `fit`."""

    def iterated(self, values: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class TrainerPlace(Result):
    """How far a trainer's run is. `prompts` and `texts`: the place in its prompts, and in texts it is trained on;
    `maker`: what goes from one experience to the next. What a trainer has not is None."""

    iterations: int
    optimizer_steps: int
    kl_coef: float | None = None
    generate_calls: int | None = None
    prompts: Any = None
    texts: Any = None
    maker: Any = None

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> TrainerPlace:
        """From what the ranks say."""
        return cls(**{field.name: found[field.name] for field in fields(cls) if field.name in found})

    def __repr__(self) -> str:
        return f"TrainerPlace({self.iterations} iterations, {self.optimizer_steps} optimizer steps)"


class SessionTrainer(Suggesting):
    """Made by `session.trainer`, as one of its kinds. On the ranks it is `trainer`, in the namespace of `%%ranks`.

    `spec`: its description by cloudpickle, where this kernel made it. `history`: records of its iterations.
    """

    def __init__(self, core: SessionCore, made: Mapping[str, Any], spec: bytes | None = None) -> None:
        self._core = core
        self.id, self.spec = str(made["id"]), spec
        self.method = str(made["method"])
        self.aggregation = str(made["aggregation"])
        self.options: dict[str, Any] = dict(made["options"])
        self.history = History([])
        self._records: dict[int, dict[str, Any]] = {}  # all of them, by the number of the session's record
        self._known_steps = int(made["optimizer_steps"])

    @overload
    def fit(self, iterations: int, *, block: Literal[True] = True) -> History: ...
    @overload
    def fit(self, iterations: int, *, block: Literal[False]) -> PendingVerb[History]: ...

    def fit(self, iterations: int, *, block: bool = True) -> Any:
        """So many iterations of experience and update, each on record in `session.history`; returns their `History`.

        Ctrl-C stops within the running micro-batch or engine step and raises `rb.Stopped`, whose `.partial` are the
        records so far. `fit` again goes on: with experience that waits, else with the next prompts. Optimizer steps
        that were done by then count: the session has them and a new version, and `undo` takes back the whole iteration.
        """
        return self._fitted(iterations, block)

    @overload
    def step(self, *, block: Literal[True] = True) -> Metrics: ...
    @overload
    def step(self, *, block: Literal[False]) -> PendingVerb[Metrics]: ...

    def step(self, *, block: bool = True) -> Any:
        """One iteration; its `Metrics`."""
        return self._do("step", (), self._trained_steps("iterate", views.make("fit", total=1)), block)

    def save(self, folder: str) -> str:
        """Write actor, critic, optimizers, schedulers and the place in the prompts; `load` goes on from there."""
        return str(self._do("save", (folder,), self._call_steps("save", here(folder))))

    def load(self, folder: str) -> TrainerPlace:
        """Go on from what `save` wrote; the session's weights are those of the checkpoint from then on."""
        return TrainerPlace.of(self._do("load", (folder,), self._loaded_steps(here(folder))))

    def where(self) -> TrainerPlace:
        """How far the run is: `iterations`, `optimizer_steps`, the place in the prompts, …"""
        return TrainerPlace.of(self._core.run("trainer.where", self._call_steps("where")).blocking_result())

    def finish(self) -> None:
        """The run is over: write what the options keep at its end (`save_steps`)."""
        self._do("finish", (), self._call_steps("finish"))

    def went_back(self, optimizer_steps: int) -> None:
        """The session stands elsewhere (`undo`, `restore`, `branch`), and on the ranks the trainer has done so many."""
        self._known_steps = optimizer_steps
        self.history = History([self._records[at] for at in self._core.steps.course() if at in self._records])

    @property
    def session(self) -> Handle | None:
        """Whose ranks it is on: a `Session`, of "reward" an `rb.RewardModel`."""
        return self._core.handle

    @property
    def chosen(self) -> dict[str, Any]:
        """Its options that are not at their defaults."""
        return {name: value for name, value in self.options.items() if name in DEFAULTS and value != DEFAULTS[name]}

    def __repr__(self) -> str:
        done = len(self.history)
        return f"SessionTrainer({self.method!r}, {done} iteration{'' if done == 1 else 's'}; {self.history!r})"

    # -- steps

    def _do(self, verb: str, args: tuple[Any, ...], steps: Steps, block: bool = True) -> Any:
        core = self._core
        if last_trainer(core) is not self:
            steps.close()
            raise SessionError("another trainer has taken the place of this one: session.last_trainer is it")

        def call() -> Any:
            chain = core.run(f"trainer.{verb}", steps)
            return chain.blocking_result() if block else chain

        return core.recorder.during(core.recorder.begin_engine_call("trainer", verb, args, {}), call)

    def _call_steps(
        self, verb: str, *args: Any, kwargs: Mapping[str, Any] | None = None, view: View | None = None
    ) -> Steps:
        """Call the trainer on the ranks; a call that failed leaves the replicas awake, too, if they were."""
        called = self._core.ask_ranks(
            "call_trainer", verb, args, dict(kwargs or {}), what=f"trainer.{verb}", track=True, observer=view
        )
        try:
            return (yield called)
        except (Stopped, WorkerDied):
            raise
        except Exception:
            yield self._core.train.call_all("wake_as_before", what="trainer: waking the replicas")
            raise

    def _fitted(self, iterations: Any, block: bool) -> Any:
        if not isinstance(iterations, int) or iterations < 1:
            raise SessionError(f"fit({iterations!r}): a number of iterations, from 1 on")
        return self._do("fit", (iterations,), self._fit_steps(iterations), block)

    def _ready_steps(self) -> Steps:
        """Bring about what an iteration needs."""
        yield from ()

    def _numbered(self, changed: bool) -> None:
        """Give the session's weights a version of their own, where an iteration has `changed` them."""

    def _fit_steps(self, iterations: int) -> Steps:
        view = cast("FitView | None", views.make("fit", total=iterations))
        done: list[dict[str, Any]] = []
        try:
            for _ in range(iterations):
                metrics = yield from self._trained_steps("iterate", view)
                done.append(dict(metrics))
                if view is not None:
                    view.iterated(metrics)
        except Stopped as stopped:
            raise Stopped(f"fit: {stopped}; {len(done)} of {iterations} iterations are done", History(done)) from None
        finally:
            if view is not None:
                view.close(done)
        return History(done)

    def _trained_steps(self, verb: str, view: View | None) -> Steps:
        """A verb that changes the weights: kept for undo before; on record, and kept, after."""
        core, begin = self._core, time.perf_counter()
        if verb == "iterate":
            yield from self._ready_steps()
        resumed = yield from self._resumed_steps()
        before = None if resumed else (yield from step_copies.before_step_steps(core))
        try:
            found = yield from self._call_steps(verb, view=view)
        except WorkerDied:
            raise
        except (Exception, Stopped):
            yield from self._cut_steps(before, resumed)
            raise
        total = int(found["optimizer_steps"])
        taken, self._known_steps = total - self._known_steps, total
        if taken and not resumed:
            step_copies.can_be_undone(core, before)
        self._note_cut(None)
        self._numbered(bool(taken) and not found.get("skipped"))
        values = self._recorded(found, taken, time.perf_counter() - begin)
        if core.trackers.samples_due:
            core.trackers.trained((yield core.ask_ranks("trained_on", what="trainer: samples")))
        yield from step_copies.after_step_steps(core)
        return Metrics(values)

    @property
    def _cut(self) -> str | None:
        """Id of the snapshot of before an iteration of this trainer that was stopped with steps of it done."""
        cut = self._core.link.state("cut")["cut"]
        return cut["snapshot"] if cut is not None and cut["trainer"] == self.id else None

    def _note_cut(self, snapshot: str | None) -> None:
        if snapshot != self._cut:
            self._core.link.set(cut=None if snapshot is None else {"trainer": self.id, "snapshot": snapshot})

    def _resumed_steps(self) -> Steps:
        """Whether the rest of an iteration comes now whose beginning can be undone: then that undoes all of it."""
        if self._cut is not None and self._core.link.state("undo")["undo"][-1:] == [self._cut]:
            now = yield self._held()
            if now is not None and now["experience"]:
                return True
        self._note_cut(None)
        return False

    def _cut_steps(self, before: Snapshot | None, resumed: bool) -> Steps:
        """An iteration ended early: some of its optimizer steps may be done, and the replicas not have them."""
        now = yield self._held()
        if now is None or not self._caught_up(now):
            return
        if not resumed:
            step_copies.can_be_undone(self._core, before)
            self._note_cut(before.id if before is not None and now["experience"] else None)
        yield from step_copies.after_step_steps(self._core)

    def _caught_up(self, now: Mapping[str, Any]) -> bool:
        """Give the session the steps that the ranks have done, and a version of its own to weights that no replica has;
        returns whether the weights have changed."""
        taken = int(now["optimizer_steps"]) - self._known_steps
        self._known_steps += taken
        state = self._core.link.state("step", "highest")
        own = {"version": int(state["highest"]) + 1} if now["unsent"] else {}
        self._core.link.set(step=int(state["step"]) + taken, **own)
        return taken > 0 or bool(now["unsent"])

    def _loaded_steps(self, folder: str) -> Steps:
        """`load`; what it changed before it failed, the session knows too."""
        try:
            found = yield from self._call_steps("load", folder)
        except WorkerDied:
            raise
        except (Exception, Stopped):
            now = yield self._held()
            if now is not None:
                self._known_steps = int(now["optimizer_steps"])  # the run's, not the session's
                self._caught_up(now)
            raise
        self._known_steps = int(found["optimizer_steps"])
        self._note_cut(None)
        self._numbered(changed=True)
        yield from step_copies.after_step_steps(self._core)
        return found

    def _held(self) -> Pending:
        return self._core.ask_ranks("held_trainer", what="trainer.where")

    def _recorded(self, found: Mapping[str, Any], taken: int, seconds: float) -> dict[str, Any]:
        state = self._core.link.state("step", "version")
        step = int(state["step"]) + taken
        self._core.link.set(step=step)
        parts = {name.split("/")[1].removesuffix("_s"): v for name, v in found.items() if name.startswith("perf/")}
        of_teacher = {"teacher_kl": found["rollout_ref_kl"]} if self.method == DISTILL and taken else {}
        values: dict[str, Any] = {
            **found,
            **of_trainer(found),
            **of_teacher,
            "step": step,
            "version": int(state["version"]),
            "loss_name": self.method,
            "aggregation": self.aggregation,
            "seconds": {**parts, "total": seconds},
        }
        self._core.link.apply({"do": "record", "record": values})
        self._records[int(self._core.link.state("tip")["tip"])] = values
        self.history = History([*self.history.records, values])
        self._core.trackers.iterated(values)
        return values


class ExperienceTrainer(SessionTrainer):
    """A trainer that draws from the session's replicas, scores, and brings them the weights it has trained."""

    def make_experience(self) -> Metrics:
        """Roll out and score the next prompts; the experience waits on the ranks for `ppo_train`."""
        return Metrics(self._do("make_experience", (), self._sampled_steps("make_experience", {})))

    def ppo_train(self) -> Metrics:
        """Train on the experience that waits, then sync the weights; counts as an iteration of the session's record."""
        result: Metrics = self._do("ppo_train", (), self._trained_steps("ppo_train", None))
        return result

    def evaluate(self, prompts: Any = None, n: int = 1, **sampling: Any) -> Metrics:
        """Mean reward on `eval_prompts`, or on these; greedy unless told otherwise."""
        options = {"prompts": prompts, "n": n, **sampling}
        return Metrics(self._do("evaluate", (), self._sampled_steps("evaluate", options)))

    def _sampled_steps(self, verb: str, kwargs: Mapping[str, Any]) -> Steps:
        yield from self._ready_steps()
        return (yield from self._call_steps(verb, kwargs=kwargs))

    def _ready_steps(self) -> Steps:
        """Bring the replicas to the session's weights where they are not: the session went back, or trained, since."""
        if set(self._core.inference.weight_versions()) != {self._core.version}:
            yield from self._call_steps("sync")


class TextTrainer(SessionTrainer):
    """A trainer of demonstrations, pairs or judged responses. The replicas keep their weights until
    `session.sync_weights()`."""

    def __init__(self, core: SessionCore, made: Mapping[str, Any], spec: bytes | None = None) -> None:
        super().__init__(core, made, spec)
        self.texts = int(made["texts"])

    @overload
    def fit(
        self, iterations: int | None = None, *, epochs: float | None = None, block: Literal[True] = True
    ) -> History: ...
    @overload
    def fit(
        self, iterations: int | None = None, *, epochs: float | None = None, block: Literal[False]
    ) -> PendingVerb[History]: ...

    def fit(self, iterations: int | None = None, *, epochs: float | None = None, block: bool = True) -> Any:
        """So many optimizer steps, or passes over the texts, each step on record in `session.history`.

        An epoch has as many iterations as whole batches fit into its texts; what is left over comes first in the next
        one. Ctrl-C stops within the running micro-batch and raises `rb.Stopped`, whose `.partial` are the records so
        far; that iteration's step was not taken, and `fit` again goes on with its texts.
        """
        if (iterations is None) == (epochs is None):
            raise SessionError("fit(iterations) or fit(epochs=…): give one of them")
        if epochs is not None:
            iterations = iterations_of(epochs, self.texts, int(self.options["train_batch_size"]))
        return self._fitted(iterations, block)

    def evaluate(self, data: Any = None) -> Metrics:
        """The loss and its metrics on `eval_data`, or on these texts: `eval/loss`, of pairs `eval/reward_accuracy`."""
        data = None if data is None else as_texts(self.method, data, self._core)
        return Metrics(self._do("evaluate", (), self._call_steps("evaluate", data)))

    def _numbered(self, changed: bool) -> None:
        if changed:
            self._core.number_weights()


def iterations_of(epochs: float, texts: int, batch: int) -> int:
    """Return how many steps of `batch` texts so many passes over all of them are; at least one."""
    if isinstance(epochs, bool) or not isinstance(epochs, int | float) or not epochs > 0:
        raise SessionError(f"epochs={epochs!r}: how many passes over the texts? a number above 0")
    return max(1, int(epochs * texts) // batch)


def trainer_of(core: SessionCore, made: Mapping[str, Any], spec: bytes | None = None) -> SessionTrainer:
    """Return the kernel's end of the trainer that the ranks have `made`."""
    return (ExperienceTrainer if made["samples"] else TextTrainer)(core, made, spec)


def last_trainer(core: SessionCore) -> SessionTrainer:
    """Return the trainer that was made last; after `rb.attach` the one that is on the ranks, as it stands."""
    if core.trainer is None:
        made = core.ask_ranks("held_trainer", what="trainer").result()
        core.trainer = None if made is None else trainer_of(core, made)
    if core.trainer is None:
        raise SessionError("there is no trainer yet: session.trainer(method, prompts, reward) makes one")
    return core.trainer

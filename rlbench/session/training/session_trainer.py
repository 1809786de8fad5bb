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
from rlbench.monitor.state import course
from rlbench.results import Result
from rlbench.session.state import step_copies
from rlbench.session.training.trainer_places import here
from rlbench.session.verb import Pending as VerbPending
from rlbench.trainers.options.run_config import DEFAULTS

if TYPE_CHECKING:
    from rlbench.session.core import SessionCore
    from rlbench.session.state.snapshots import Snapshot


class FitView(View, Protocol):
    """Draws the iterations of a `fit`."""

    def iterated(self, values: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class TrainerPlace(Result):
    """How far a trainer's run is. `prompts` and `texts`: the place in its prompts and in texts it is also trained on;
    `maker`: what goes from one experience to the next."""

    iterations: int
    optimizer_steps: int
    kl_coef: float
    generate_calls: int
    prompts: Any = None
    texts: Any = None
    maker: Any = None

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> TrainerPlace:
        """From what the ranks say."""
        return cls(**{field.name: found[field.name] for field in fields(cls)})

    def __repr__(self) -> str:
        return f"TrainerPlace({self.iterations} iterations, {self.optimizer_steps} optimizer steps)"


class SessionTrainer(Suggesting):
    """Made by `session.trainer`. On the ranks it is `trainer`, in the namespace of `%%ranks`.

    `spec`: the `TrainerSpec` by cloudpickle, where this kernel made it: what `heal` makes it from again.
    `history`: records of its iterations, oldest first; those that were taken back are not in it.
    """

    def __init__(self, session: SessionCore, made: Mapping[str, Any], spec: bytes | None = None) -> None:
        self._session = session
        self.id, self.spec = str(made["id"]), spec
        self.method = str(made["method"])
        self.aggregation = str(made["aggregation"])
        self.options: dict[str, Any] = {**made["ppo"], **made["overridden"]}
        self.history = History([])
        self._records: dict[int, dict[str, Any]] = {}  # all of them, by the number of the session's record
        self._known_steps = int(made["optimizer_steps"])

    @overload
    def fit(self, iterations: int, *, block: Literal[True] = True) -> History: ...
    @overload
    def fit(self, iterations: int, *, block: Literal[False]) -> VerbPending[History]: ...

    def fit(self, iterations: int, *, block: bool = True) -> Any:
        """So many iterations of experience and update, each on record in `session.history`.

        Ctrl-C stops within the running micro-batch or engine step and raises `rb.Stopped`, whose `.partial` are the
        records so far. `fit` again goes on: with experience that waits, else with the next prompts. Optimizer steps
        that were done by then count: the session has them and a new version, and `undo` takes back the whole iteration.

        Returns:
            A `History` of these iterations (or a `Pending`).
        """
        if not isinstance(iterations, int) or iterations < 1:
            raise SessionError(f"fit({iterations!r}): a number of iterations, from 1 on")
        return self._do("fit", (iterations,), self._fit_steps(iterations), block)

    @overload
    def step(self, *, block: Literal[True] = True) -> Metrics: ...
    @overload
    def step(self, *, block: Literal[False]) -> VerbPending[Metrics]: ...

    def step(self, *, block: bool = True) -> Any:
        """One iteration; its `Metrics`."""
        return self._do("step", (), self._iterate_steps(views.make("fit", total=1), 1), block)

    def make_experience(self) -> Metrics:
        """Roll out and score the next prompts; the experience waits on the ranks for `ppo_train`."""
        return Metrics(self._do("make_experience", (), self._sampled_steps("make_experience"), True))

    def ppo_train(self) -> Metrics:
        """Train on the experience that waits, then sync the weights; counts as an iteration of the session's record."""
        result: Metrics = self._do("ppo_train", (), self._trained_steps("ppo_train", None), True)
        return result

    def evaluate(self, prompts: Any = None, n: int = 1, **sampling: Any) -> Metrics:
        """Mean reward on `eval_prompts`, or on these; greedy unless told otherwise."""
        given = {"prompts": prompts, "n": n, **sampling}
        return Metrics(self._do("evaluate", (), self._sampled_steps("evaluate", (), given), True))

    def save(self, folder: str) -> str:
        """Write actor, critic, optimizers, schedulers and the place in the prompts; `load` goes on from there."""
        return str(self._do("save", (folder,), self._call_steps("save", (here(folder),)), True))

    def load(self, folder: str) -> TrainerPlace:
        """Go on from what `save` wrote; the session's weights are those of the checkpoint from then on."""
        return TrainerPlace.of(self._do("load", (folder,), self._loaded_steps(here(folder)), True))

    def where(self) -> TrainerPlace:
        """How far the run is: `iterations`, `optimizer_steps`, the place in the prompts, …"""
        return TrainerPlace.of(self._run("where", self._call_steps("where")))

    def finish(self) -> None:
        """The run is over: write what the options keep at its end (`save_steps`)."""
        self._do("finish", (), self._call_steps("finish"), True)

    def went_back(self, optimizer_steps: int) -> None:
        """The session stands elsewhere (`undo`, `restore`, `branch`), and on the ranks the trainer has done so many."""
        self._known_steps = optimizer_steps
        there = course(self._session.link.state("records", "tip"))
        self.history = History([self._records[at] for at in there if at in self._records])

    @property
    def chosen(self) -> dict[str, Any]:
        """Its options that are not at their defaults."""
        return {name: value for name, value in self.options.items() if name in DEFAULTS and value != DEFAULTS[name]}

    def __repr__(self) -> str:
        done = len(self.history)
        return f"SessionTrainer({self.method!r}, {done} iteration{'' if done == 1 else 's'}; {self.history!r})"

    # -- steps

    def _do(self, verb: str, args: tuple[Any, ...], steps: Steps, block: bool) -> Any:
        session = self._session
        if last_trainer(session) is not self:
            steps.close()
            raise SessionError("another trainer has taken the place of this one: session.last_trainer is it")
        entry = session.recorder.begin_engine_call("trainer", verb, args, {})
        return session.recorder.during(entry, lambda: self._run(verb, steps, block))

    def _run(self, verb: str, steps: Steps, block: bool = True) -> Any:
        chain = self._session.run(f"trainer.{verb}", steps)
        return chain.blocking_result() if block else chain

    def _call_steps(self, verb: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Steps:
        return (
            yield from self._ended_steps(
                self._session.train.call_all(
                    "call_trainer",
                    verb,
                    args,
                    dict(kwargs or {}),
                    finish=lambda found: found[0],
                    what=f"trainer.{verb}",
                    track=True,
                )
            )
        )

    def _ended_steps(self, called: Pending) -> Steps:
        """The result of a verb; one that failed leaves the replicas awake, too, if they were."""
        try:
            return (yield called)
        except (Stopped, WorkerDied):
            raise
        except Exception:
            yield self._session.train.call_all("wake_as_before", what="trainer: waking the replicas")
            raise

    def _sampled_steps(self, verb: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Steps:
        yield from self._synced_steps()
        return (yield from self._call_steps(verb, args, kwargs))

    def _synced_steps(self) -> Steps:
        """Bring the replicas to the session's weights where they are not: the session went back, or trained, since."""
        if set(self._session.inference.weight_versions()) != {self._session.version}:
            yield from self._call_steps("sync")

    def _fit_steps(self, iterations: int) -> Steps:
        view = cast("FitView | None", views.make("fit", total=iterations))
        done: list[dict[str, Any]] = []
        try:
            for number in range(iterations):
                metrics = yield from self._iterate_steps(view, number + 1)
                done.append(dict(metrics))
                if view is not None:
                    view.iterated(metrics)
        except Stopped as stopped:
            raise Stopped(f"fit: {stopped}; {len(done)} of {iterations} iterations are done", History(done)) from None
        finally:
            if view is not None:
                view.close(done)
        return History(done)

    def _iterate_steps(self, view: View | None, number: int) -> Steps:
        if view is not None:
            view.report(number - 1, 0)
        return (yield from self._trained_steps("iterate", view))

    def _trained_steps(self, verb: str, view: View | None) -> Steps:
        """A verb that changes the weights: kept for undo before; on record, and kept, after."""
        session, begin = self._session, time.perf_counter()
        if verb != "ppo_train":
            yield from self._synced_steps()
        resumed = yield from self._resumed_steps()
        before = None if resumed else (yield from step_copies.before_step_steps(session))
        try:
            found = yield from self._ended_steps(
                session.train.call_all(
                    "call_trainer",
                    verb,
                    finish=lambda found: found[0],
                    what=f"trainer.{verb}",
                    track=True,
                    observer=view,
                )
            )
        except WorkerDied:
            raise
        except (Exception, Stopped):
            yield from self._cut_steps(before, resumed)
            raise
        total = int(found["optimizer_steps"])
        taken, self._known_steps = total - self._known_steps, total
        if taken and not resumed:
            step_copies.can_be_undone(session, before)
        self._note_cut(None)
        values = self._recorded(found, taken, time.perf_counter() - begin)
        yield from step_copies.after_step_steps(session)
        return Metrics(values)

    @property
    def _cut(self) -> str | None:
        """Id of the snapshot of before an iteration of this trainer that was stopped with steps of it done."""
        cut = self._session.link.state("cut")["cut"]
        return cut["snapshot"] if cut is not None and cut["trainer"] == self.id else None

    def _note_cut(self, snapshot: str | None) -> None:
        if snapshot != self._cut:
            noted = None if snapshot is None else {"trainer": self.id, "snapshot": snapshot}
            self._session.link.set(cut=noted)

    def _resumed_steps(self) -> Steps:
        """Whether the rest of an iteration comes now whose beginning can be undone: then that undoes all of it."""
        if self._cut is not None and self._session.link.state("undo")["undo"][-1:] == [self._cut]:
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
            step_copies.can_be_undone(self._session, before)
            self._note_cut(before.id if before is not None and now["experience"] else None)
        yield from step_copies.after_step_steps(self._session)

    def _caught_up(self, now: Mapping[str, Any]) -> bool:
        """Give the session the steps that the ranks have done, and a version of its own to weights that no replica has;
        returns whether the weights have changed."""
        taken = int(now["optimizer_steps"]) - self._known_steps
        self._known_steps += taken
        state = self._session.link.state("step", "highest")
        own = {"version": int(state["highest"]) + 1} if now["unsent"] else {}
        self._session.link.set(step=int(state["step"]) + taken, **own)
        return taken > 0 or bool(now["unsent"])

    def _loaded_steps(self, folder: str) -> Steps:
        """`load`; what it changed before it failed, the session knows too."""
        try:
            found = yield from self._call_steps("load", (folder,))
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
        yield from step_copies.after_step_steps(self._session)
        return found

    def _held(self) -> Pending:
        return self._session.train.call_all("held_trainer", finish=lambda found: found[0], what="trainer.where")

    def _recorded(self, found: Mapping[str, float], taken: int, seconds: float) -> dict[str, Any]:
        state = self._session.link.state("step", "version")
        step = int(state["step"]) + taken
        self._session.link.set(step=step)
        parts = {name.split("/")[1].removesuffix("_s"): v for name, v in found.items() if name.startswith("perf/")}
        values: dict[str, Any] = {**found, **of_trainer(found)}
        values |= {
            "step": step,
            "version": int(state["version"]),
            "loss_name": self.method,
            "aggregation": self.aggregation,
            "seconds": {**parts, "total": seconds},
        }
        self._session.record(values)
        self._records[int(self._session.link.state("tip")["tip"])] = values
        self.history = History([*self.history.records, values])
        self._session.trackers.iterated(values)
        return values


def last_trainer(core: SessionCore) -> SessionTrainer:
    """Return the trainer that was made last; after `rb.attach` the one that is on the ranks, as it stands.

    Raises:
        SessionError: there is none.
    """
    if core.trainer is None:
        made = core.train.call_all("held_trainer", what="trainer", finish=lambda found: found[0]).result()
        core.trainer = None if made is None else SessionTrainer(core, made)
    if core.trainer is None:
        raise SessionError("there is no trainer yet: session.trainer(method, prompts, reward) makes one")
    return core.trainer

"""What a notebook holds of a session, whatever it trains: its name and state, its record, how it ends and shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from rlbench.data.record.history import History, Verbs
from rlbench.dispatch.chain import Steps
from rlbench.dispatch.link import Link, await_end
from rlbench.engines import TrainEngine
from rlbench.errors import SessionError, Suggesting
from rlbench.notebook.cards.card import WARNING, Card
from rlbench.notebook.cards.session_views import SHOWN, parked_card, session_card
from rlbench.results import Names
from rlbench.runtime import cluster, registry
from rlbench.runtime.starting import say
from rlbench.session import verbs
from rlbench.session.core import SessionCore
from rlbench.session.options import SessionOptions
from rlbench.session.state import checkpoints, healing, parking, resizing, snapshots, step_copies
from rlbench.session.state.snapshots import Snapshots
from rlbench.session.training import setup, steps
from rlbench.session.training.session_trainer import SessionTrainer, last_trainer
from rlbench.session.verb import direct, verb

if TYPE_CHECKING:
    from rlbench.notebook.dashboard.dashboard import Dashboard


class Handle(Suggesting):
    """Base of `rb.Session` and `rb.RewardModel`: what is trained, and the verbs that do not ask what that is."""

    core: SessionCore
    """Link, options, engines and records: what step functions of your own take."""

    @classmethod
    def _of(cls, core: SessionCore) -> Self:
        handle = cls.__new__(cls)
        handle._hold(core)
        return handle

    def _hold(self, core: SessionCore) -> None:
        self.core, core.handle = core, self

    # -- verbs

    optim_step = verb(steps.optim_step)
    zero_grad = direct(verbs.zero_grad)
    optimizer = verb(setup.optimizer)
    schedule = verb(setup.schedule)
    freeze = verb(setup.freeze)
    unfreeze = verb(setup.unfreeze)
    set_lr = direct(verbs.set_lr)
    offload = direct(verbs.offload)
    onload = direct(verbs.onload)

    snapshot = verb(snapshots.snapshot)
    restore = verb(snapshots.restore)
    undo = verb(step_copies.undo)
    drop = verb(snapshots.drop)
    heal = verb(healing.heal)
    resize = verb(resizing.resize)
    park = verb(parking.park)

    log = direct(verbs.log)
    track = direct(verbs.track)
    untrack = direct(verbs.untrack)

    def stop(self) -> Names:
        """Stop what runs, also a call of an earlier kernel or another thread; returns at once what that was."""
        return Names("stopping", self.core.stop())

    def close(self) -> None:
        """End the session: its engines, its memory, its files. Safe to call twice."""
        self.core.close()

    def dashboard(self) -> Dashboard:
        """A live view at the end of a cell: memory, lengths, metrics, time, and controls that act while a cell runs."""
        from rlbench.notebook.dashboard.dashboard import Dashboard

        return Dashboard(self.name)

    # -- what there is

    @property
    def name(self) -> str:
        """The session's name."""
        return self.core.name

    @property
    def options(self) -> SessionOptions:
        """What it was made from."""
        return self.core.options

    @property
    def train(self) -> TrainEngine:
        """The engine of the model being trained."""
        return self.core.train

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded on first use."""
        return self.core.tokenizer

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.core.step

    @property
    def version(self) -> int:
        """Version of the trainer's weights: goes up with every optimizer step that was not skipped."""
        return self.core.version

    @property
    def lr(self) -> float:
        """The learning rate; set it to change it for the next step."""
        return float(self.train.control("status")[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        self.set_lr(value)

    @property
    def history(self) -> History:
        """The record of every step, oldest first; `.verbs`: of every verb, with arguments, sources and outcome."""
        recorder = self.core.recorder
        records, begin = self.core.evaluations.in_history()
        return History(
            records,
            lambda: Verbs([dict(vars(entry)) for entry in recorder.entries()], recorder.code_of),
            lent=True,
            begin=begin,
        )

    @property
    def last_trainer(self) -> SessionTrainer:
        """The trainer that `trainer` made last; after `rb.attach` the one that is on the ranks, as it stands."""
        return last_trainer(self.core)

    @property
    def snapshots(self) -> Snapshots:
        """The snapshots there are, oldest first; by label or place."""
        return snapshots.listed(self.core)

    # -- how it shows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return self._card().text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return self._card().bundle()

    def _card(self) -> Card:
        what = type(self).__name__
        if registry.parked(self.name) is not None:
            return parked_card(registry.parked(self.name) or {})
        if self.core.link.closed:
            return Card(f"{what}({self.name!r}, closed)")
        try:
            return session_card(self.core.link.state(*SHOWN), self.core.link.samples(last=1))
        except SessionError as gone:
            return Card(f"{what}({self.name!r})", notes=[f"{WARNING}{gone}"])


def opened(
    options: SessionOptions,
    name: str | None,
    lease_s: float | None,
    park: bool | None,
    check: Callable[[SessionOptions], None] = lambda options: None,
    begin: Callable[[SessionCore], Steps] = checkpoints.begin_steps,
) -> SessionCore:
    """Attach to the session of that name, or bring it back, where it is like `options`; else start one, after
    `check`."""
    cluster.current()
    if name is not None and is_parked(name):
        return parking.bring_back(name, partial(_need_alike, name, "is parked", options))
    if name is not None and Link.exists(name):
        return _joined(name, options)
    check(options)
    return SessionCore.start(options, name, lease_s, begin, park)


def check_undo(undo: int | None) -> None:
    """Refuse a number of steps to undo that is none."""
    if undo is not None and (not isinstance(undo, int) or undo < 0):
        raise SessionError(f"undo={undo!r}: the number of last steps that can be undone, 0 for none, None: by memory")


def is_parked(name: str) -> bool:
    """Whether a session of this name is parked, once the monitor it had has ended."""
    if registry.parked(name) is None:
        return False
    cluster.current()
    await_end(name)
    return True


def _joined(name: str, wanted: SessionOptions) -> SessionCore:
    """Attach to the session of that name if it is what is wanted; SessionError naming what differs if not."""
    say("attach", f"attaching to {name!r}, which runs already")
    held = Link.look(name, "config")["config"]
    if held:  # without a config its kernel went away while it was built: attaching says so and closes it
        _need_alike(name, "runs already", wanted, held)
    return SessionCore.attach(Link.attach(name))


def _need_alike(name: str, how: str, wanted: SessionOptions, held: Mapping[str, Any]) -> None:
    there, asked = SessionOptions.from_json(held), wanted
    names = [name for name in vars(wanted) if name not in ("path", "teachers")]  # came of a model's name, and of verbs
    differ = [
        f"{name} is {getattr(there, name)!r}, not {getattr(asked, name)!r}"
        for name in names
        if getattr(there, name) != getattr(asked, name)
    ]
    if differ:
        raise SessionError(
            f"session {name!r} {how}, and {'; '.join(differ)}: rb.attach({name!r}) drives it as it is, "
            "close() it to make another, or choose another name"
        )

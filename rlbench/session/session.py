"""`rb.Session`: the workbench. Builds a train and an inference engine for one model; one verb per cell drives them.

The session's state (step, versions, history, engine states) is at its monitor; this object holds handles and options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlbench.checkpoint import folder as folders
from rlbench.data.record.history import History
from rlbench.data.record.verbs import Verbs
from rlbench.data.rollouts.rollouts import Rollouts
from rlbench.dispatch.link import Link
from rlbench.engines import InferenceEngine, TrainEngine
from rlbench.engines.paths import check_model_path, model_name
from rlbench.errors import SessionError, Suggesting
from rlbench.notebook.cards.card import WARNING, Card
from rlbench.notebook.cards.views import session_card
from rlbench.results import Names
from rlbench.runtime import cluster, registry
from rlbench.runtime.starting import ATTACH, phase, say, starting
from rlbench.session import building
from rlbench.session.core import SessionCore
from rlbench.session.facts import Sessions
from rlbench.session.options import Inference, SessionOptions, Train, reference_at, resolve_model
from rlbench.session.state import checkpoints, snapshots
from rlbench.session.state.snapshots import Snapshot, Snapshots
from rlbench.session.training.session_trainer import SessionTrainer, last_trainer
from rlbench.session.verb import call_verb, direct, verb
from rlbench.session.verbs import checks as checks
from rlbench.session.verbs import generation, placement, trainers
from rlbench.session.verbs import lab as lab
from rlbench.session.verbs import records as records
from rlbench.session.verbs import state as state
from rlbench.session.verbs import update as update

if TYPE_CHECKING:
    from rlbench.notebook.dashboard.dashboard import Dashboard


class Session(Suggesting):
    """A model with its engines, driven cell by cell.

    Args:
        model: `"tiny"` (made on the spot), a folder, or a hub id.
        name: a name to find it again; default: made up. Where a session of this name runs and is like this one, it is
            attached to: running the cell again changes nothing.
        train: `rb.Train(lr=1e-5, shards=2)`, or a dict of the same: how the policy is trained, and on how many ranks.
        inference: `rb.Inference(max_model_len=2048)`, or a dict of the same: how the replicas are built.
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

    core: SessionCore
    """Link, options, engines and records: what step functions of your own take."""

    def __init__(
        self,
        model: str = "tiny",
        name: str | None = None,
        *,
        train: Train | dict[str, Any] | None = None,
        inference: Inference | dict[str, Any] | None = None,
        reference: bool | str | None = None,
        seed: int = 0,
        lease_s: float | None = None,
        undo: int = 1,
    ) -> None:
        if not isinstance(undo, int) or undo < 0:
            raise SessionError(f"undo={undo!r}: the number of last steps that can be undone, 0 for none")
        train_options, inference_options = Train.of(train), Inference.of(inference)
        named = model_name(model, "rb.Session")
        with starting(f"session {named}"):
            path = check_model_path(resolve_model(named))
            reference_path = reference_at(reference, path)
            building.check_models(path, reference_path)
            options = SessionOptions(named, path, seed, train_options, inference_options, reference_path, undo)
            cluster.current()
            if name is not None and Link.exists(name):
                self.core = _joined(name, options)
            else:
                self.core = SessionCore.start(options, name, lease_s)

    @classmethod
    def load(cls, path: str, name: str | None = None, **options: Any) -> Session:
        """A new session that goes on from a checkpoint of `save(path)`, on as many ranks as it is given.

        Args:
            path: a checkpoint, or the folder of several: the newest.
            name: of the new session.
            options: of `rb.Session`, where they differ from the saved ones (`train=rb.Train(shards=1)`).

        Raises:
            CheckpointError: damaged, or of another model; nothing is left running.
        """
        folder, kept = checkpoints.options_of(path)
        folders.verify(folder)  # before minutes are spent on engines
        if name is not None and Link.exists(name):
            raise SessionError(f"session {name!r} runs already: load the checkpoint under another name, or close it")
        session = cls(name=name, **checkpoints.overridden(kept, options))
        core = session.core
        try:
            entry = core.recorder.begin("load", {"path": str(folder), **options})
            core.run("load", checkpoints.load_steps(core, folder, kept)).blocking_result()
            core.recorder.end(entry)
        except BaseException:
            session.close()
            raise
        return session

    @classmethod
    def _of(cls, core: SessionCore) -> Session:
        session = cls.__new__(cls)
        session.core = core
        return session

    # -- verbs

    rollout = call_verb(generation.rollout)
    evaluate = verb(generation.evaluate)
    pause = direct(generation.pause)
    resume = direct(generation.resume)

    train_step = verb(update.train_step)
    forward_backward = verb(update.forward_backward)
    optim_step = verb(update.optim_step)
    zero_grad = direct(update.zero_grad)
    logprobs = verb(update.logprobs)
    set_lr = direct(update.set_lr)
    trainer = direct(trainers.trainer)

    sync_weights = call_verb(placement.sync_weights)
    offload = direct(placement.offload)
    onload = direct(placement.onload)

    snapshot = verb(state.snapshot)
    restore = verb(state.restore)
    undo = verb(state.undo)
    branch = verb(state.branch)
    drop = verb(state.drop)
    heal = verb(state.heal)
    save = verb(state.save)
    export = verb(state.export)

    preflight = verb(checks.preflight)
    rehearse = verb(checks.rehearse)
    gradients = verb(lab.gradients)
    loss_lab = verb(lab.loss_lab)
    redefine = direct(lab.redefine, record=False)  # the engine's own call is on record
    method = direct(lab.method, record=False)

    follow = direct(generation.follow, record=False)
    track = direct(records.track)
    untrack = direct(records.untrack)
    export_script = direct(records.export_script, record=False)

    def stop(self) -> Names:
        """Stop what runs, also a call of an earlier kernel or another thread; returns at once what that was."""
        return Names("stopping", self.core.stop())

    def close(self) -> None:
        """End the session: its engines, its memory, its files. Safe to call twice."""
        self.core.close()

    def dashboard(self) -> Dashboard:
        """A live view at the end of a cell: memory, lengths, metrics, time, and controls that act while a cell runs.

        Several views of one session share one sampler; each stays with its last numbers when the session is closed.
        """
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
        """The engine of the policy being trained."""
        return self.core.train

    @property
    def inference(self) -> InferenceEngine:
        """The engine that generates."""
        return self.core.inference

    @property
    def reference(self) -> TrainEngine | None:
        """The frozen reference policy, where there is one."""
        return self.core.reference

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded on first use."""
        return self.core.tokenizer

    @property
    def last(self) -> Rollouts | None:
        """The last rollouts, whole or stopped; after `rb.attach` those of the earlier kernel. None before the first."""
        return self.core.last

    @property
    def last_trainer(self) -> SessionTrainer:
        """The trainer that `trainer` made last; after `rb.attach` the one that is on the ranks, as it stands.

        Raises:
            SessionError: there is none.
        """
        return last_trainer(self.core)

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
    def paused(self) -> bool:
        """Whether generation is held."""
        return bool(self.core.link.state("paused")["paused"])

    @property
    def history(self) -> History:
        """The record of every step, oldest first; `.verbs`: of every verb, with arguments, sources and outcome."""
        recorder = self.core.recorder

        def read() -> Verbs:
            return Verbs([dict(entry.__dict__) for entry in recorder.entries()], recorder.code_of)

        return History(self.core.link.state()["history"], read)

    @property
    def snapshots(self) -> Snapshots:
        """The snapshots there are, oldest first; by label or place."""
        return snapshots.listed(self.core)

    @property
    def branches(self) -> dict[str, Snapshot | None]:
        """The branches by name, each with the snapshot of its end; None for the one the session is on."""
        return state.branches(self.core)

    # -- how it shows

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return self._card().text()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return self._card().bundle()

    def _card(self) -> Card:
        if self.core.link.closed:
            return Card(f"Session({self.name!r}, closed)")
        try:
            return session_card(self.core.facts())
        except SessionError as gone:
            return Card(f"Session({self.name!r})", notes=[f"{WARNING}{gone}"])


def _joined(name: str, wanted: SessionOptions) -> SessionCore:
    """Attach to the session of that name if it is what is wanted; SessionError naming what differs if not."""
    say(ATTACH, f"attaching to {name!r}, which runs already")
    found, asked = Link.look(name, "config")["config"], wanted.to_json()
    # without a config its kernel went away while it was built: attaching says so and closes it
    differ = [
        f"{k} is {found.get(k)!r}, not {asked[k]!r}"
        for k in asked
        if found and k != "path" and found.get(k) != asked[k]
    ]
    if differ:
        raise SessionError(
            f"session {name!r} runs already, and {'; '.join(differ)}: rb.attach({name!r}) drives it as it is, "
            "close() it to make another, or choose another name"
        )
    return SessionCore.attach(Link.attach(name))


def attach(name: str | None = None, take_over: bool = False) -> Session:
    """Drive a session that runs already, from this kernel: weights, optimizer, step and history are as they were.

    Args:
        name: which (default: the only one there is).
        take_over: also when another live kernel drives it; that one is refused from then on.
    """
    with starting("session"), phase(ATTACH, "attaching"):
        return Session._of(SessionCore.attach(Link.attach(name, take_over)))


def sessions() -> Sessions:
    """The sessions on the cluster, one dict each."""
    joined = cluster.current()
    return Sessions(registry.shown(record) for record in registry.live_sessions(joined.id))

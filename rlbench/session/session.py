"""`rb.Session`: the workbench. Builds a train and an inference engine for one model; one verb per cell drives them.

The session's state (step, versions, history, engine states) is at its monitor; this object holds handles and options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

from rlbench.checkpoint import folder as folders
from rlbench.data.rollouts.rollouts import Rollouts
from rlbench.dispatch.link import Link
from rlbench.engines import InferenceEngine, TrainEngine
from rlbench.engines.paths import model_name
from rlbench.errors import SessionError
from rlbench.notebook.cards.session_views import sessions_card
from rlbench.runtime import cluster, registry
from rlbench.runtime.starting import phase, starting
from rlbench.session import building, verbs
from rlbench.session.checks import preflight, rehearsal
from rlbench.session.core import SessionCore
from rlbench.session.endpoint.chat import chat
from rlbench.session.endpoint.collecting import collect
from rlbench.session.endpoint.endpoint import endpoint, policy, traces
from rlbench.session.handle import Handle, check_undo, is_parked, opened
from rlbench.session.lab.gradients import gradients
from rlbench.session.lab.steps import loss_lab
from rlbench.session.options import POLICY, Inference, SessionOptions, Train, model_at, reference_at
from rlbench.session.planning.check import need_room
from rlbench.session.record.evaluations import PastEvaluations
from rlbench.session.reward_model import RewardModel
from rlbench.session.state import checkpoints, hub, parking, snapshots
from rlbench.session.state.snapshots import Snapshot
from rlbench.session.teachers import teachers
from rlbench.session.trainer import trainer
from rlbench.session.training import steps
from rlbench.session.training.evaluating import Evaluate, evaluate
from rlbench.session.training.pipeline import pipeline
from rlbench.session.training.reference import update_reference
from rlbench.session.verb import call_verb, direct, verb


class Session(Handle):
    """A model with its engines, driven cell by cell.

    Args:
        model: `"tiny"` (made on the spot), a folder, or a hub id.
        name: a name to find it again; default: made up. Where a session of this name runs and is like this one, it is
            attached to: running the cell again changes nothing. One that is parked is brought back.
        train: `rb.Train(lr=1e-5, shards=2)`, or a dict of the same: how the policy is trained, and on how many ranks.
        inference: `rb.Inference(max_model_len=2048)`, or a dict of the same: how the replicas are built.
        reference: True keeps the starting weights as a frozen reference policy for KL (with `lora` no second copy: the
            base with its adapters off); or another model.
        seed: of sampling; with the same seed and the same cells a session draws the same samples.
        lease_s: seconds after which the session is parked or ends once its driver is gone: a notebook's kernel (default
            8 h) or a script (default 30 s). While that lives, the session does, however long it is left alone.
        park: at the end of its lease the session goes to disk whole, and `rb.attach(name)` brings it back; False: it
            is lost. Default: a notebook's is parked, a script's is not. See `park()`.
        undo: how many last steps `undo()` can take back. After each step the weights and the optimizer (and a trainer's
            critic and average) are copied to host memory, which is also what `heal()` goes back to; one copy more than
            `undo` is held. 0 keeps none. Default: up to 4, in half of the host memory that is free then.

    """

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
        park: bool | None = None,
        undo: int | None = None,
    ) -> None:
        check_undo(undo)
        train, inference = Train.of(train), Inference.of(inference)
        named = model_name(model, "rb.Session")
        with starting(f"session {named}"):
            path = model_at(named)
            reference_path = reference_at(reference, path)
            building.check_models(path, reference_path)
            if train.lora is not None and train.lora.path is not None:
                train = replace(train, lora=train.lora.opened(path))
            options = SessionOptions(named, path, seed, train, inference, reference_path, undo)
            building.check_routing(options)
            self._hold(opened(options, name, lease_s, park, need_room))

    @classmethod
    def load(cls, path: str, name: str | None = None, **options: Any) -> Session:
        """A new session that goes on from a checkpoint of `save(path)`, on as many ranks as it is given.

        Args:
            path: a checkpoint, or the folder of several: the newest.
            name: of the new session.
            options: of `rb.Session`, where they differ from the saved ones (`train=rb.Train(shards=1)`).
        """
        folder, kept = checkpoints.options_of(path)
        folders.verify(folder)  # before minutes are spent on engines
        if name is not None and is_parked(name):
            raise SessionError(f"session {name!r} is parked: rb.attach({name!r}) it, or load under another name")
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

    # -- verbs

    rollout = call_verb(verbs.rollout)
    pipeline = direct(pipeline, listed=False)
    evaluate = cast(Evaluate, verb(evaluate))
    pause = direct(verbs.pause)
    resume = direct(verbs.resume)

    endpoint = direct(endpoint)
    collect = direct(collect)
    policy = direct(policy)
    traces = direct(traces, record=False)
    chat = direct(chat, record=False)

    train_step = verb(steps.train_step)
    forward_backward = verb(steps.forward_backward)
    teacher = direct(teachers.teacher)
    logprobs = verb(steps.logprobs)
    trainer = direct(trainer)

    sync_weights = call_verb(verbs.sync_weights)
    update_reference = verb(update_reference)

    branch = verb(snapshots.branch)
    save = verb(checkpoints.save)
    export = verb(checkpoints.export)
    push_to_hub = direct(hub.push_to_hub)

    preflight = verb(preflight.preflight)
    rehearse = verb(rehearsal.rehearse)
    gradients = verb(gradients)
    loss_lab = verb(loss_lab)
    redefine = direct(verbs.redefine, record=False)  # the engine's own call is on record
    method = direct(verbs.method, record=False)
    follow = direct(verbs.follow, record=False)
    export_script = direct(verbs.export_script, record=False)

    _SENT_AS: ClassVar[str] = "session.policy() of it can be sent, and answers there: policy.answer(chat)"
    _ELSEWHERE: ClassVar[Mapping[str, str]] = {
        "generate": "session.rollout(prompts, n=8)",
        "sample": "session.rollout(prompts, n=8)",
        "sync": "session.sync_weights()",
        "eval": "session.evaluate(prompts, reward)",
        "model": "the ranks hold it: session.train.run(lambda: module), session.train.method",
        "params": "the ranks hold them: session.train.run(lambda: module.named_parameters())",
    }

    # -- what there is

    @property
    def inference(self) -> InferenceEngine:
        """The engine that generates."""
        return self.core.inference

    @property
    def reference(self) -> TrainEngine | None:
        """The frozen reference policy, where there is one; with `lora`, the base in `train` stands for it."""
        return self.core.reference

    @property
    def last(self) -> Rollouts | None:
        """The last rollouts, whole or stopped; after `rb.attach` those of the earlier kernel. None before the first."""
        return self.core.last

    @property
    def paused(self) -> bool:
        """Whether generation is held."""
        return bool(self.core.link.state("paused")["paused"])

    @property
    def evaluations(self) -> PastEvaluations:
        """What `evaluate` found, oldest first, each with the weights it is of: `session.evaluations.at(8)`, a version,
        gives the evaluation again, to `compare` with a later one."""
        return self.core.evaluations.listed()

    @property
    def branches(self) -> dict[str, Snapshot | None]:
        """The branches by name, each with the snapshot of its end; None for the one the session is on."""
        return snapshots.branches(self.core)


def attach(name: str | None = None, take_over: bool = False) -> Session:
    """Drive a session that runs already, from this kernel: weights, optimizer, step and history are as they were.

    One that is parked is built again first, and its state brought back, which takes as long as a start. Of a reward
    model it gives the `rb.RewardModel`.

    Args:
        name: which (default: the only one there is).
        take_over: also when another live kernel drives it; that one is refused from then on.
    """
    with starting("session"):
        if name is not None and is_parked(name):
            return handle_of(parking.bring_back(name))
        with phase("attach", "attaching"):
            return handle_of(SessionCore.attach(Link.attach(name, take_over)))


def handle_of(core: SessionCore) -> Session:
    """Return the `Session` of a core; of a reward model the `RewardModel`, whatever a type checker is told."""
    kind: Any = Session if core.options.kind == POLICY else RewardModel
    return cast(Session, kind._of(core))


class Sessions(list[dict[str, Any]]):
    """The sessions on a cluster and those that are parked, one dict each; shown as a table."""

    def __repr__(self) -> str:
        return sessions_card(self).text()


def sessions() -> Sessions:
    """The sessions on the cluster, one dict each, and those that are parked (`"state": "parked"`)."""
    joined = cluster.current()
    live = [registry.shown(record) for record in registry.live_sessions(joined.id)]
    return Sessions([*live, *registry.parked_sessions()])

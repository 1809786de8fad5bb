"""Weight sync from the kernel: the training engine's end of `rlbench.weights.sync`, and whether two engines agree."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from rlbench.data.batches.batch import as_batch
from rlbench.dispatch import views
from rlbench.dispatch.chain import Chain, Steps
from rlbench.dispatch.link import shm_prefix
from rlbench.dispatch.pending import Pending
from rlbench.errors import BuildError, EngineError, StateError, Stopped, WeightSyncError
from rlbench.weights.crossing import per_replica, send_while_applying
from rlbench.weights.manifest import Handover, Manifest, merged
from rlbench.weights.probe import PROBE_OPTIONS, Probe
from rlbench.weights.sync import (
    allowed_gap,
    asked,
    engine_event,
    largest_gap,
    living,
    replica_logprobs,
    sync_steps,
    synced,
)
from rlbench.weights.transport import Choice, Facts, choose

if TYPE_CHECKING:
    from rlbench.engines.inference import InferenceEngine
    from rlbench.engines.train import TrainEngine


SOME = 1
"""Number of an adapter that is staged before its own is known."""
Target = Callable[[], tuple[int | None, int]]
"""Says, perhaps only once it is known, what the weights are to be in the replicas: their version (None: one more than
what is there now), and the number of the adapter, where one is sent alone."""
Asking = Callable[[], Target]
"""Asks for what will be known, without waiting for it."""


def fixed(version: int | None = None, adapter: int = SOME) -> Asking:
    """Return a target that is known."""
    return lambda: lambda: (version, adapter)


def sync_weights(
    train: TrainEngine,
    infer: InferenceEngine,
    asking: Asking | None = None,
    transport: str | None = None,
) -> Chain:
    """Start a sync, whose result is a `Synced`."""

    def steps() -> Steps:
        source = EngineSource(train, infer)
        source.go_ahead(transport)
        try:
            source.aim((asking or fixed())())
            done = yield from sync_steps(source, infer, transport)
        except (Exception, Stopped):
            yield from source.withdraw()
            raise
        source.open_way()
        if source.view is not None:
            source.view.close(done)
        return done

    return Chain("weight sync", train.link.held("weight sync", steps()))


def agreement_steps(train: TrainEngine, infer: InferenceEngine) -> Steps:
    """Refuse, as soon as both engines are built, a model whose weights could never be synced between them: compare
    names and shapes of what would be sent, and both sides' log-probs on the probe. Where the two were asked to compute
    in different dtypes there is nothing to compare, and a sync says so."""
    dtype = str(train.info["dtype"])
    if dtype != infer.info["dtype"]:
        return
    probe = Probe.of(infer.info)
    try:
        layouts = yield train.call_all("weight_layout", what="comparing names")
        yield infer.call_all("check_weights", layouts[0], what="comparing names")
        if train.info.get("quantised"):  # the replicas have the weights as they were before: they get the trainer's
            yield sync_weights(train, infer, fixed(0))
            return
        expected = yield from probe_steps(train, probe, "comparing log-probs")
        got = yield from replica_logprobs(infer, probe, "comparing log-probs")
    except WeightSyncError as error:
        raise BuildError(
            f"the weights of {train.info['architecture']} cannot be brought from the trainer to the replica: {error}"
        ) from error
    gap, allowed = largest_gap(expected, got), allowed_gap(dtype)
    if not gap <= allowed:
        raise BuildError(
            f"{infer.executor} and transformers compute different log-probs from the same checkpoint of "
            f"{train.info['architecture']}: up to {gap:.2g} (allowed in {dtype}: {allowed:g}), so what is rolled out "
            "would not be the trained policy's. docs/models.md lists families that agree"
        )


def probe_steps(train: TrainEngine, probe: Probe, what: str) -> Steps:
    """Return the log-probs of each sequence, from its second token on, under a training engine's weights."""
    return (yield logprobs_call(train, probe, what))


def logprobs_call(train: TrainEngine, probe: Probe, what: str) -> Pending:
    """Submit the forward pass of a probe."""
    return train.call_logprobs(as_batch(probe.tokens, probe.media), PROBE_OPTIONS, what)


class Uncut:
    """A call that is short and whose result others need: a stop lets it end, and reaches the next step of its chain."""

    def __init__(self, call: Pending) -> None:
        self.result = call.result

    def stop(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Way:
    """The way that weights took from ranks to an engine in the last sync that staged them, and is over: replicas read
    what is staged until then."""

    choice: Choice
    ranks: list[Facts]
    actors: list[Any]

    def is_open(self, train: TrainEngine, transport: str | None) -> bool:
        """Whether the same ranks can begin to send by it, where `transport` is asked for."""
        return self.actors == train.workers and transport in (None, self.choice.transport)


@dataclass(frozen=True)
class _Ahead:
    """What was begun before the replicas had answered."""

    way: Way
    staging: Pending
    proving: Uncut


class EngineSource:
    """Training ranks as their kernel calls them: a `WeightSource`."""

    apart = True

    def __init__(self, train: TrainEngine, infer: InferenceEngine) -> None:
        self._train, self._infer = train, infer
        self._target: Target = fixed()()
        self.dtype, self._adapted = str(train.info["dtype"]), bool(train.info.get("adapted"))
        self.view = views.make("sync")
        self._ranks: list[Facts] = []
        self._way: Way | None = None
        self._ahead: _Ahead | None = None

    @property
    def adapter(self) -> int:
        return self._target()[1] if self._adapted else 0

    def aim(self, target: Target) -> None:
        """Send to this target, which is asked once."""
        self._target = functools.cache(target)

    def go_ahead(self, transport: str | None) -> None:
        """Begin to stage an adapter that is sent alone, and the pass that it is proved by, before the replicas are
        asked: neither depends on what they hold, and most often the transport is that of the last sync."""
        way = self._train.ways.pop(self._infer.name, None)
        alone = self._adapted and self._infer.info.get("adapters")
        if alone and way is not None and way.is_open(self._train, transport):
            self._ahead = _Ahead(way, self._staging(way.choice, SOME, None), self._proving())

    def open_way(self) -> None:
        """Let the next sync go ahead as this one went, which is proven."""
        if self._way is not None:
            self._train.ways[self._infer.name] = self._way

    def withdraw(self) -> Steps:
        """See to the end of what was begun ahead: a rank that failed in it is waited for by its peers until then."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.staging.stop()
            for call in (ahead.staging, ahead.proving):
                with contextlib.suppress(Exception, Stopped):  # of which nobody asks for the result any more
                    yield call
            yield from self.release(ahead.way.choice)

    def facts(self) -> list[Facts]:
        if self._ahead is not None:  # whose staging raises where the weights are not here
            self._ranks = self._ahead.way.ranks
            return self._ranks
        with living():
            states, facts = self._train.controls("status", "sync_facts")
        need_weights(self._train.name, states[0])
        self._ranks = list(facts)
        return self._ranks

    def logprobs(self, probe: Probe) -> Steps:
        return (yield self._proving() if self._ahead is None else self._ahead.proving)

    def stage(self, choice: Choice, adapter: int, handover: Handover) -> Steps:
        if self._ahead is not None and self._ahead.way.choice == choice:
            self._way, manifest = self._ahead.way, (yield self._ahead.staging)
            return replace(manifest, adapter=replace(manifest.adapter, number=adapter))
        yield from self.withdraw()
        self._way = Way(choice, self._ranks, list(self._train.workers))
        return (yield self._staging(choice, adapter, handover))

    def _proving(self) -> Uncut:
        return Uncut(logprobs_call(self._train, Probe.of(self._infer.info), "weight sync: proof"))

    def _staging(self, choice: Choice, adapter: int, handover: Handover | None) -> Pending:
        prefix = f"{shm_prefix(self._train.link.name)}{self._train.name}"
        options: dict[str, Any] = {"transport": choice.transport, "prefix": prefix, "ranks": choice.senders}
        options |= {"adapter": adapter, "handover": handover}
        what = "weight sync: staging"
        return self._train.call_all("stage_weights", options, finish=merged, what=what, observer=self.view)

    def announce(self, sender: int, options: dict[str, Any]) -> Steps:
        yield from self.withdraw()
        return (yield self._train.call_all("announce_weights", options, what="weight sync: announcing"))[sender]

    def broadcast(self, manifest: Manifest, workers: list[int]) -> Steps:
        return (yield Crossing(self._train, self._infer, manifest, workers))

    def release(self, choice: Choice) -> Steps:
        if choice.transport == "ipc":
            yield self._train.call_all("release_weights", what="weight sync")

    def new_version(self, held: Sequence[int]) -> int:
        version = self._target()[0]
        return max(held) + 1 if version is None else version

    def events(self, version: int, manifest: Manifest) -> list[dict[str, Any]]:
        # these files outlive the ranks: what a rebuilt trainer may go on from, unless its adapters are merged in them
        if manifest.transport != "shm" or self._adapted:
            return []
        return [engine_event(self._train.name, self._train.staged_fields(version, manifest.whole()))]


class Crossing:
    """`send_weights` on all training ranks and `apply_weights` on every replica at once, as one step of a chain."""

    def __init__(self, train: TrainEngine, infer: InferenceEngine, manifest: Manifest, workers: list[int]) -> None:
        self._train, self._infer = train, infer
        self._sending = train.call_all("send_weights", infer.name, manifest, what="weight sync: sending")
        try:
            self._applying = list(infer.apply_each(per_replica(manifest, workers)))
        except BaseException as error:
            self._give_up(f"the replicas could not be called: {error}")
            raise

    def stop(self) -> None:
        """Ask the sender to stop; it does as long as it has not begun to send."""
        self._sending.stop()

    def result(self) -> int:
        """Wait for both sides; return the bytes that were sent. `Stopped` comes before anything was; after an error,
        replicas that had begun refuse to generate until a sync succeeds."""
        sent: list[int] = []
        error = send_while_applying(
            lambda: sent.extend(self._sending.result()), self._applying, self._give_up, self._infer.name
        )
        if error is not None:
            raise error
        return sum(sent)

    def _give_up(self, reason: str) -> None:
        """Tell the sender, and through it all members; to a dead sender there is nothing to tell."""
        for actor in self._train.workers:
            actor.control.remote("give_up_sync", self._infer.name, reason)


def need_weights(train: str, status: Mapping[str, Any]) -> None:
    """Refuse to read the weights of an engine `train` of this status where they are not whole, or not resident;
    StateError names the remedy."""
    if status["torn"] is not None:
        raise StateError(status["torn"])
    if status["weights"] != "cuda":
        raise StateError(f"the weights of {train} are offloaded: {train}.cuda('weights') first")


def copy_weights(source: TrainEngine, target: TrainEngine, transport: str | None = None) -> Chain:
    """Start a copy through shared memory; see `TrainEngine.p2p_weight_sync`."""
    return Chain("weight copy", source.link.held("weight copy", _copy_steps(source, target, transport)))


def _copy_steps(source: TrainEngine, target: TrainEngine, transport: str | None) -> Steps:
    _need_copyable(source, target, transport)
    probe = Probe.of(source.info)
    expected = yield from probe_steps(source, probe, "weight copy: proof")
    begin = time.perf_counter()
    manifest = yield from _loaded_steps(source, target, 0.0)
    seconds = time.perf_counter() - begin
    got = yield from probe_steps(target, probe, "weight copy: proof")
    gap = largest_gap(expected, [got])
    wider = max((str(engine.info["dtype"]) for engine in (source, target)), key=allowed_gap)
    if not gap <= allowed_gap(wider):
        raise WeightSyncError(
            f"after the copy the log-probs of {target.name} differ from those of {source.name} by up to {gap:.2g} "
            f"(allowed: {allowed_gap(wider):g}): both must be of one architecture and config; build {target.name} again"
        )
    return synced(None, manifest, "shm", gap, wider, seconds)


def average_weights(source: TrainEngine, target: TrainEngine, keep: float) -> Chain:
    """Start giving an engine without an optimizer the average of its weights, of which it keeps the share `keep`, and
    the source's."""

    def steps() -> Steps:
        _need_copyable(source, target, None)
        yield from _loaded_steps(source, target, keep)

    return Chain("weight average", source.link.held("weight average", steps()))


def _loaded_steps(source: TrainEngine, target: TrainEngine, keep: float) -> Steps:
    """Stage weights in shared memory and have the target load them; returns their manifest."""
    prefix = f"{shm_prefix(source.link.name)}{source.name}-copy"  # what replicas are given stays, for heal()
    manifest: Manifest = yield source.call_all(
        "stage_weights", {"transport": "shm", "prefix": prefix}, finish=merged, what="weight copy: staging"
    )
    yield target.call_all("load_staged", asdict(manifest), keep, what="weight copy: loading")
    yield source.call_all("forget_weights", prefix, what="weight copy")
    return manifest


def _need_copyable(source: TrainEngine, target: TrainEngine, transport: str | None) -> None:
    """Refuse what cannot be copied; nothing has moved."""
    if target is source:
        raise EngineError(f"p2p_weight_sync: {source.name} is itself the target; give another engine")
    if target.link is not source.link:
        raise EngineError(f"p2p_weight_sync: {source.name} and {target.name} are in different sessions")
    if target.info["optimizer"]:
        raise EngineError(
            f"p2p_weight_sync: {target.name} trains ({', '.join(target.info['optimizer'])}), and an optimizer's state "
            "belongs to its weights. Copy into an engine without one, as a reference is"
        )
    for engine in (source, target):
        need_weights(engine.name, engine.status())
    if transport not in (None, "shm"):
        raise WeightSyncError(f"transport={transport!r}: between training engines there is 'shm'; leave transport out")
    choose(asked(source, "sync_facts"), asked(target, "sync_facts"), "shm")

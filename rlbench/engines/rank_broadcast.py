"""A broadcast of weights that starts on the ranks: the rank that sends asks the replicas to receive, and watches them.

As in `engines.crossing` each side waits for the other inside its call; here the sender itself looks whether a replica
died, or refused, and gives up for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from rlbench.dispatch.pending import Pending
from rlbench.engines.crossing import cause_of, receiving
from rlbench.engines.inference import InferenceEngine
from rlbench.engines.rank_place import led
from rlbench.engines.sync import Begun, group_options
from rlbench.errors import Stopped
from rlbench.strategies.control import ControlGroup
from rlbench.weights.manifest import Manifest
from rlbench.weights.transport import Facts
from rlbench.workers.train_stage import WeightSender


def announced(
    sender: WeightSender, control: ControlGroup, infer: InferenceEngine, begun: Begun, ranks: Sequence[Facts]
) -> Manifest:
    """What will be sent and where the group meets, accepted by all replicas before anything is; collective."""
    own = sender.announce(**group_options(infer.name, begun.choice, ranks, begun.replicas))
    manifest: Manifest = control.gather(own)[begun.choice.senders[0]]

    def check() -> None:
        infer.call_all("check_weights", replace(manifest, channel=None), what="weight sync").result()

    led(control, "update_engine_weights", check)
    return manifest


def broadcast(
    sender: WeightSender, control: ControlGroup, infer: InferenceEngine, begun: Begun, manifest: Manifest
) -> None:
    """Gather all weights and send them to the replicas, which load them meanwhile; collective.

    Raises:
        Stopped: before anything was sent; the replicas keep their weights.
        WeightSyncError: a side failed or died; replicas that had begun refuse to generate until a sync succeeds.
    """
    calls: list[Pending] = []
    sends = control.rank == begun.choice.senders[0]

    def submit() -> None:
        try:
            for call in receiving(infer, manifest, [facts.workers for facts in begun.replicas]) if sends else ():
                calls.append(call)
        except Exception as error:
            sender.give_up(infer.name, f"the replicas could not be called: {error}")
            raise

    control.together("update_engine_weights", submit)
    pool = ThreadPoolExecutor(max(1, len(calls)), thread_name_prefix="rlbench weight sync")
    try:
        futures = [pool.submit(call.result) for call in calls]
        for future in futures:
            future.add_done_callback(lambda ended: _give_up_for(ended, sender, infer))
        ended: list[BaseException | None] = []
        try:
            sender.send(infer.name, manifest)
        except (Exception, Stopped) as error:  # a hook of the user's too; the peers raise as well, each its own
            ended.append(error)
        ended += [future.exception() for future in futures]
    finally:
        pool.shutdown(wait=False)
    cause = cause_of(ended, infer)
    if any(control.gather(isinstance(cause, Stopped))):
        raise Stopped("weight sync stopped before anything was sent; the replicas keep their weights")
    control.raise_together("sending weights", cause if isinstance(cause, Exception) else None)


def _give_up_for(ended: Future[None], sender: WeightSender, infer: InferenceEngine) -> None:
    """A replica that failed will not come to the next bucket: the others must not wait for it."""
    if (error := ended.exception()) is not None:
        sender.give_up(infer.name, str(error))

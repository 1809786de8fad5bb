"""Weights that are lent to a vLLM replica for one call, while its own are set aside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlbench.dispatch.context import this_engine
from rlbench.errors import WeightSyncError
from rlbench.weights.loan import Loan
from rlbench.weights.sync import largest_gap
from rlbench.workers.replica.state import SYNC

if TYPE_CHECKING:
    from rlbench.workers.replica.vllm import VllmReplica
    from rlbench.workers.replica.weights import WeightReceiver


@contextmanager
def lent(replica: VllmReplica, receiver: WeightReceiver, loan: Loan) -> Iterator[None]:
    """Have a replica, which its caller holds, compute with the weights of a loan, proven by log-probs.

    Afterwards it has its own again, to the bit, and their log-probs are those of before; where they are not it is torn.
    Of whole weights it keeps its own in host memory meanwhile.
    """
    receiver.check(loan.manifest)
    own = replica.prompt_logprobs(loan.probe.tokens, loan.probe.media)
    receiver.set_aside(loan.adapter)
    try:
        try:
            receiver.load(loan.manifest)
            replica.reset_caches()
            _check_lent(replica, loan)
        except WeightSyncError as error:
            receiver.by_reload()
            said = f"{loan.name!r} could not be lent to {this_engine()}, which goes on with its own weights: {error}"
            raise WeightSyncError(said) from error
        yield
    finally:
        try:
            receiver.put_back()
            replica.reset_caches()
            again = replica.prompt_logprobs(loan.probe.tokens, loan.probe.media)
            if not (gap := largest_gap(own, [again])) <= loan.allowed:
                raise WeightSyncError(f"its log-probs differ from those before by up to {gap:.2g}")
        except BaseException as error:
            replica.state.weights = "torn"
            raise WeightSyncError(
                f"{this_engine()} did not get its own weights back after {loan.name!r} was lent to it ({error}), so it "
                f"refuses to generate: {SYNC}"
            ) from error


def _check_lent(replica: VllmReplica, loan: Loan) -> None:
    lent_rows = replica.prompt_logprobs(loan.probe.tokens, loan.probe.media, loan.adapter)
    gap = largest_gap(loan.expected, [lent_rows])
    if not gap <= loan.allowed:
        raise WeightSyncError(
            f"under them its log-probs differ from the trainer's by up to {gap:.2g} (allowed: {loan.allowed:g})"
        )

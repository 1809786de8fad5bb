"""What a driver raises for an exception on a worker: one line of the user's code, and where to find the rest."""

from __future__ import annotations

from collections.abc import Sequence

from rlbench.dispatch.protocol import Failure
from rlbench.errors import RemoteError, RLBenchError
from rlbench.traces import joined, remember


def remote_error(failed: Sequence[tuple[str, Failure]]) -> BaseException:
    """The error of the first failure; our own errors as they are.

    Args:
        failed: of each worker that failed, what it is called (`rank 0`) and its failure.
    """
    first, failure = failed[0]
    line = "" if failure.line is None else str(failure.line)
    whole = remember(joined((label, one.traceback) for label, one in failed))
    error = failure.error
    if error is None:
        where = first + (f" (and {len(failed) - 1} more)" if len(failed) > 1 else "")
        own = f"\n  {line}" if line else ""
        error = RemoteError(
            f"{failure.kind}: {failure.message}{own}\n  raised on {where}; rb.last_traceback() has the rest"
        )
    if isinstance(error, RLBenchError):
        error.user_line, error.full_traceback = line, whole
    return error

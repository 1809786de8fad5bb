"""Plain targets for tests of dispatch: what a worker does is not the point there, how calls reach it is."""

import os
import threading
import time

from rlbench.dispatch.context import current
from rlbench.errors import DataError, StateError, Stopped
from rlbench.strategies.ranks.control import peer_failed


class EchoTarget:
    CONTROL = frozenset({"status", "settlings"})

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.settled = 0
        self.calls: list[str] = []
        self.closed = False

    def status(self) -> dict:
        return {"rank": self.rank, "calls": len(self.calls)}

    def settle(self) -> None:
        self.settled += 1

    def settlings(self) -> int:
        return self.settled

    def echo(self, *args, **kwargs):
        self.calls.append("echo")
        return args, kwargs

    def thread(self) -> int:
        return threading.get_ident()

    def shout(self, text: str) -> str:
        print(text)
        return text.upper()

    def slowly(self, seconds: float) -> int:
        """Sleep in slices until told to stop; a stop carries the number of slices as partial."""
        done = 0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if current().stop_requested():
                raise Stopped("slowly", partial=done)
            current().report(done=done)
            if done == 1:
                print("half way")
            time.sleep(0.05)
            done += 1
        return done

    def fail(self) -> None:
        raise ValueError("this target fails")

    def refuse(self) -> None:
        raise DataError("refused: give something else")

    def fail_on(self, rank: int) -> int:
        if self.rank == rank:
            raise RuntimeError(f"rank {rank} fails alone")
        return self.rank

    def fail_once(self, file: str) -> None:
        """Wait until there is a file, and fail."""
        while not os.path.exists(file):
            time.sleep(0.02)
        raise RuntimeError("connection closed by peer")

    def gives_up_for(self, cause: int) -> None:
        """Fail at once as a peer that heard of the `cause`, which itself is heard of later."""
        if self.rank != cause:
            raise peer_failed(f"it failed on rank {cause}; this rank stopped with it")
        time.sleep(1.0)  # so that it usually is later; where it is not, the same is to be said
        raise StateError("the cause")

    def take(self, chunk: int) -> list[int]:
        mine: list[int] = []
        while claimed := current().claim(chunk):
            mine.extend(claimed)
            time.sleep(0.1)  # long enough for a slower worker to begin
        return mine

    def close(self) -> None:
        self.closed = True


class MeetingTarget(EchoTarget):
    """Counts collectives as a rank does; `meet` waits in one for ever, as a GPU does for a process that is gone."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__(rank)
        self.issued = 0

    def issued_collectives(self) -> int:
        return self.issued

    def meet(self, failing: int) -> None:
        if self.rank == failing:
            raise ValueError("mine alone")
        self.issued += 1
        while True:
            time.sleep(0.05)

    def compute(self, failing: int, file: str) -> str:
        """Hears no stop, as a user's own method may not."""
        if self.rank == failing:
            raise ValueError("mine alone")
        while not os.path.exists(file):
            time.sleep(0.02)
        return "done"


class WaitingTarget(EchoTarget):
    """Has a peer that never says that it has the call."""

    def register(self, epoch: int, seq: int, timeout_s: float, given_up) -> bool:
        while not given_up():
            time.sleep(0.02)
        return False


class DroppingTarget(WaitingTarget):
    """Its second rank hears that the call is dropped, before it hears of a stop."""

    def register(self, epoch: int, seq: int, timeout_s: float, given_up) -> bool:
        return self.rank == 0 and super().register(epoch, seq, timeout_s, given_up)


class TellingTarget(EchoTarget):
    """Tells its memory, but not before it is let; counts how many ask at a time."""

    CONTROL = frozenset({"status", "memory", "let", "asked"})

    def __init__(self, rank: int = 0) -> None:
        super().__init__(rank)
        self.may, self.lock = threading.Event(), threading.Lock()
        self.asking = self.most = self.total = 0

    def memory(self) -> dict:
        with self.lock:
            self.asking, self.total = self.asking + 1, self.total + 1
            self.most = max(self.most, self.asking)
        self.may.wait(600)
        with self.lock:
            self.asking -= 1
        return {"device": "host", "weights": 1 << 20, "gradients": 0, "frees": {"weights": 0}, "rss": 0}

    def let(self) -> None:
        self.may.set()

    def asked(self) -> tuple[int, int]:
        """How often it was asked, and by how many at a time at most."""
        return self.total, self.most

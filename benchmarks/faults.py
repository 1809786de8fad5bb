"""Faults on purpose: interrupts and kills at random points of every verb, and what became of the session.

    python -m benchmarks.faults                      # a table: fault, tries, survived, lost, seconds to usable
    python -m benchmarks.faults --interrupts 10 --kills 2 --seed 1
    python -m benchmarks.faults --only "after"       # those kinds alone whose name has this in it

A fault is survived when the training state (weights, optimizer, random state, on every rank) equals bit for bit that
before or after the verb, and the next rollout, step and sync succeed. Of a verb that had ended before the kill, it has
to be that after it: nothing finished is lost, step and history included. An interrupt is a SIGINT to this process, as
Ctrl-C gives; a kill of a worker is SIGKILL, followed by `session.heal()`; a kill of the kernel is SIGKILL to a process
that drives the session, followed by `rb.attach()` from this one; a loss fails on rank 1 alone. At the end the session
is closed, and no process and no shared-memory file of it may be left.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import rlbench as rb
from rlbench.tiny import tasks


@dataclass
class Tally:
    """What became of one kind of fault."""

    fault: str
    tries: int = 0
    survived: int = 0
    prompt_s: list[float] = field(default_factory=list)
    usable_s: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def row(self) -> str:
        """One line of the table."""
        prompt = f"{max(self.prompt_s):.2f}" if self.prompt_s else "–"
        usable = (
            f"{sorted(self.usable_s)[len(self.usable_s) // 2]:.2f} / {max(self.usable_s):.2f}" if self.usable_s else "–"
        )
        return f"| {self.fault} | {self.tries} | {self.survived} | {len(self.lost)} | {prompt} | {usable} |"


HEAD = (
    "| fault | tries | survived | lost | slowest prompt, s | seconds to usable, median / most |\n"
    "|---|---|---|---|---|---|"
)


TRAINER = {
    "rollout_batch_size": 8,
    "n": 4,
    "train_batch_size": 32,
    "micro_train_batch_size": 8,
    "micro_rollout_batch_size": 16,
    "max_tokens": 8,
    "packing": True,
}
KILLED = (("rollout", "inference"), ("train step", "actor"), ("sync", "actor"), ("sync", "inference"))
KERNEL = """
import pickle, sys
import rlbench as rb
from rlbench.tiny import tasks
session = rb.attach(sys.argv[1], take_over=True)
batch = pickle.load(open(sys.argv[2], "rb"))
print("begins", flush=True)
if sys.argv[3] == "rollout":
    session.rollout(tasks.prompts(16), n=8, max_tokens=96, ignore_eos=True, progress=False)
else:
    session.train_step(batch, token_budget=64)
"""


class Trial:
    """A session, a fixed point to start every try from, and the verbs with their undisturbed outcome."""

    def __init__(self, session: Any, seed: int) -> None:
        self.session = session
        self.random = random.Random(seed)
        rollouts = session.rollout(tasks.prompts(8, seed=3), n=4, max_tokens=12, progress=False)
        self.batch = rollouts.score(tasks.reward).batch(advantage=rb.rl.group_normalized())
        session.train_step(self.batch)
        session.sync_weights()
        self.start = session.snapshot("start of every try")
        self.folder = tempfile.TemporaryDirectory()
        self.verbs: dict[str, Callable[[], Any]] = {
            "rollout": lambda: self.session.rollout(
                tasks.prompts(16), n=8, max_tokens=96, ignore_eos=True, progress=False
            ),
            "score": lambda: rollouts.score(lambda r: time.sleep(0.01) or tasks.reward(r)),  # type: ignore[func-returns-value]
            "train step": lambda: self.session.train_step(self.batch, token_budget=64),
            "sync": lambda: self.session.sync_weights(),
            "snapshot": lambda: self.session.snapshot(),
            "save": lambda: self.session.save(self.folder.name, max_num=2),
            "user function": lambda: self.session.train.run(_in_turns),
        }
        self.after = {name: self._undisturbed(verb) for name, verb in self.verbs.items()}

    def interrupt(self, name: str, tally: Tally) -> None:
        """Interrupt a verb at a random point."""
        self.session.restore(self.start)
        before = self.checksums()
        seconds, after = self.after[name]
        timer = threading.Timer(self.random.uniform(0, seconds), lambda: os.kill(os.getpid(), signal.SIGINT))
        tally.tries += 1
        sent = time.monotonic()
        timer.start()
        try:
            try:
                self.verbs[name]()
                timer.join()
                time.sleep(0.05)  # it came too late: the signal is on its way to this line
            except KeyboardInterrupt:  # Stopped is one
                pass
        except KeyboardInterrupt:
            pass
        sent += timer.interval
        tally.prompt_s.append(max(0.0, time.monotonic() - sent))
        self.judge(tally, sent, [before, after])

    def kill(self, name: str, engine: str, tally: Tally) -> None:
        """Kill a worker of `engine` at a random point of a verb, then heal."""
        self.session.restore(self.start)
        before = self.checksums()
        seconds, after = self.after[name]
        pids = list(self.session.core.link.state("engines")["engines"][engine]["pids"].values())
        victim = self.random.choice(pids)
        timer = threading.Timer(self.random.uniform(0, seconds), lambda: os.kill(victim, signal.SIGKILL))
        tally.tries += 1
        sent = time.monotonic() + timer.interval
        timer.start()
        allowed = [before, after]
        try:
            self.verbs[name]()
            allowed = [after]
        except (rb.errors.RLBenchError, rb.Stopped):
            pass
        timer.join()
        self.heal(tally, sent, allowed)

    def kill_after_steps(self, tally: Tally) -> None:
        """Kill a rank at some moment after a train step has ended, with or without a rollout since."""
        self.session.restore(self.start)
        for _ in range(self.random.randint(1, 2)):
            self.session.train_step(self.batch)
        self.kill_when_idle(tally)

    def kill_after_iterations(self, tally: Tally) -> None:
        """The same after iterations of a trainer."""
        self.session.restore(self.start)
        stream = rb.data.PromptSet.of(tasks.prompts(64, seed=3)).stream(seed=3)
        trainer = self.session.trainer("grpo", stream, tasks.reward, **TRAINER)
        trainer.fit(self.random.randint(1, 2))
        iterations = trainer.where()["iterations"]
        self.kill_when_idle(tally)
        if trainer.where()["iterations"] != iterations:
            tally.lost.append("the trainer is at another iteration")
        self.session.train.call_all("drop_trainer").result()  # the start of every try is without one
        self.session.core.trainer = None

    def kill_when_idle(self, tally: Tally) -> None:
        """Kill a rank while no step runs, then heal: what was finished has to be there."""
        session = self.session
        if self.random.random() < 0.5:
            session.rollout(tasks.prompts(2), n=2, max_tokens=4, progress=False)
        finished = self.checksums(), session.step, len(session.history)
        pids = list(session.core.link.state("engines")["engines"]["actor"]["pids"].values())
        time.sleep(self.random.uniform(0, 0.5))
        tally.tries += 1
        sent = time.monotonic()
        os.kill(self.random.choice(pids), signal.SIGKILL)
        while not session.core.link.state("engines")["engines"]["actor"].get("broken"):
            time.sleep(0.05)
        self.heal(tally, sent, [finished[0]], finished[1:])

    def heal(self, tally: Tally, sent: float, allowed: list[Any], place: tuple[int, int] | None = None) -> None:
        """Heal, and judge where the session stands then; `place`: its step and the length of its history."""
        try:
            healed = self.session.heal()
        except rb.errors.RLBenchError as error:
            tally.lost.append(f"heal: {error}")
            return
        if place not in (None, (self.session.step, len(self.session.history))):
            tally.lost.append(f"step and history were {place}: {healed!r}")
            return
        self.judge(tally, sent, allowed)

    def lose_kernel(self, name: str, tally: Tally) -> None:
        """Kill the process that drives a verb at a random point of it, then attach from here."""
        session = self.session
        session.restore(self.start)
        before, (seconds, after) = self.checksums(), self.after[name]
        kept = Path(self.folder.name) / "batch.pickle"
        kept.write_bytes(pickle.dumps(self.batch))
        kernel = subprocess.Popen(
            [sys.executable, "-c", KERNEL, session.name, str(kept), name], stdout=subprocess.PIPE, text=True
        )
        tally.tries += 1
        assert kernel.stdout is not None and kernel.stdout.readline() == "begins\n"
        time.sleep(self.random.uniform(0, seconds))
        kernel.kill()
        kernel.wait()
        killed = time.monotonic()
        try:
            self.session = rb.attach(session.name)
            tally.prompt_s.append(time.monotonic() - killed)
            self.session.stop()
        except rb.errors.RLBenchError as error:
            tally.lost.append(f"{name}: {type(error).__name__}: {error}")
            self.session = rb.attach(session.name, take_over=True)
            return
        self.judge(tally, killed, [before, after])

    def lose_monitor(self, name: str, tally: Tally) -> None:
        """Kill the process that keeps the session's state at a random point of a verb."""
        self.session.restore(self.start)
        before, (seconds, after) = self.checksums(), self.after[name]
        victim = self.session.core.link.state()["pid"]
        timer = threading.Timer(self.random.uniform(0, seconds), lambda: os.kill(victim, signal.SIGKILL))
        tally.tries += 1
        sent = time.monotonic() + timer.interval
        timer.start()
        try:
            self.verbs[name]()
        except rb.errors.RLBenchError as error:
            tally.lost.append(f"{name}: {type(error).__name__}: {error}")
            return
        finally:
            timer.join()
        self.judge(tally, sent, [before, after])

    def fail_on_one_rank(self, tally: Tally) -> None:
        """A loss that raises on rank 1, in one of its micro-batches."""
        self.session.restore(self.start)
        before = self.checksums()
        fails_at, counter = self.random.randrange(4), f"RLBENCH_FAULT_{self.random.getrandbits(32):x}"

        def loss(inputs: Any) -> Any:
            import os

            import torch.distributed as dist

            calls = int(os.environ.get(counter, "0")) + 1  # not in the loss, which may not change itself
            os.environ[counter] = str(calls)
            if dist.is_initialized() and dist.get_rank() == 1 and calls > fails_at:
                raise ValueError("on rank 1 alone")
            return -inputs.advantages * inputs.logprobs, {}

        tally.tries += 1
        begin = time.monotonic()
        try:
            self.session.train_step(self.batch, loss=loss, token_budget=64)
        except rb.errors.RemoteError:
            tally.prompt_s.append(time.monotonic() - begin)
        else:
            tally.lost.append("the step did not say that the loss failed")
        self.judge(tally, begin, [before])

    def judge(self, tally: Tally, sent: float, allowed: list[Any]) -> None:
        """Is the state one of those allowed, and does the loop go on?"""
        try:
            found = self.checksums()
            tally.usable_s.append(time.monotonic() - sent)
            self.goes_on()
        except (rb.errors.RLBenchError, rb.Stopped) as error:
            tally.lost.append(f"{type(error).__name__}: {error}")
            return
        if found in allowed:
            tally.survived += 1
        else:
            tally.lost.append("the state is neither that before nor that after the verb")

    def goes_on(self) -> None:
        """The next rollout, step and sync."""
        session = self.session
        session.rollout(tasks.prompts(2), n=2, max_tokens=4, progress=False)
        session.train_step(self.batch)
        session.sync_weights()

    def checksums(self) -> Any:
        """Of weights, optimizer and random state, rank by rank."""
        return self.session.train.call_all("training_checksums").result()

    def _undisturbed(self, verb: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds of a verb, and the state it leaves."""
        self.session.restore(self.start)
        begin = time.monotonic()
        verb()
        return time.monotonic() - begin, self.checksums()


def _in_turns() -> float:
    """What a user may run on the ranks: it asks whether to stop."""
    for _ in range(50):
        if module.stop_requested():  # type: ignore[name-defined]
            break
        time.sleep(0.01)
    return 1.0


def left_behind(name: str, pids: list[int], prefix: str) -> list[str]:
    """Processes and shared-memory files of a closed session that are still there."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        alive = [f"pid {pid}" for pid in pids if Path(f"/proc/{pid}").exists()]
        files = [p for p in os.listdir("/dev/shm") if p.startswith(prefix)]
        if not alive + files:
            break
        time.sleep(0.1)
    return alive + files


def schedule(
    trial: Trial, interrupts: int, kills: int, others: int
) -> Iterator[tuple[str, int, Callable[[Tally], None]]]:
    """Every fault with the number of its tries and what does it once."""
    for verb in trial.verbs:
        yield f"Ctrl-C in {verb}", interrupts, partial(trial.interrupt, verb)
    for verb, engine in KILLED if kills else ():
        what = "a rank" if engine == "actor" else "the replica"
        yield f"kill -9 of {what} in {verb}", kills, partial(trial.kill, verb, engine)
    if kills:
        yield "kill -9 of a rank after a train step", kills, trial.kill_after_steps
        yield "kill -9 of a rank after a trainer's iteration", kills, trial.kill_after_iterations
    for verb in ("rollout", "train step"):
        yield f"kill -9 of the kernel in {verb}", others, partial(trial.lose_kernel, verb)
    for verb in ("rollout", "train step", "sync"):
        yield f"kill -9 of the monitor in {verb}", others, partial(trial.lose_monitor, verb)
    yield "a loss that fails on rank 1 alone", others, trial.fail_on_one_rank


def run(interrupts: int, kills: int, others: int, seed: int, name: str = "faults", only: str = "") -> list[Tally]:
    """All faults on a session of its own whose name has `only` in it; one tally each."""
    from rlbench.dispatch.link import shm_prefix

    session = rb.Session("tiny", name=name, train=rb.Train(lr=1e-4, shards=2), seed=seed)
    tallies: list[Tally] = []
    trial: Trial | None = None
    try:
        trial = Trial(session, seed)
        for fault, tries, once in schedule(trial, interrupts, kills, others):
            if only not in fault:
                continue
            tallies.append(tally := Tally(fault))
            for _ in range(tries):
                once(tally)
        session = trial.session
        pids = [p for e in session.core.link.state("engines")["engines"].values() for p in e["pids"].values()]
        prefix = shm_prefix(name)
    finally:
        (trial.session if trial else session).close()
    left = left_behind(name, pids, prefix)
    tallies.append(Tally("closing after all that", 1, int(not left), lost=left))
    return tallies


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interrupts", type=int, default=15, help="of each verb")
    parser.add_argument("--kills", type=int, default=8, help="of each verb and engine")
    parser.add_argument("--others", type=int, default=5, help="of each other fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="faults whose name has this in it")
    given = parser.parse_args()
    with rb.init(devices=2):
        tallies = run(given.interrupts, given.kills, given.others, given.seed, only=given.only)
    print(HEAD)
    for tally in tallies:
        print(tally.row())
    for tally in tallies:
        for reason in tally.lost:
            print(f"{tally.fault}: {reason}")


if __name__ == "__main__":
    main()

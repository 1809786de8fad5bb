"""`session.pipeline`: while a batch is trained on, those after it are drawn and scored.

Weights are synced where only the batch that is given next is left of those drawn before: no sync waits for a rollout or
is waited for by one, and which weights draw which batch follows from the order of the batches alone.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rlbench.data import Rollouts
from rlbench.data.prompts.sampling import sampling_options
from rlbench.data.record.origin import made_with
from rlbench.dispatch.chain import STOP_WAIT_S, Chain, Steps, Waiting
from rlbench.dispatch.pending import sigint_held
from rlbench.errors import SessionError, Stopped, Suggesting
from rlbench.rewards.running import as_scorer
from rlbench.session.core import SessionCore
from rlbench.session.record.recording import Entry
from rlbench.session.training.evaluating import Scoring
from rlbench.session.training.prompt_batches import PromptBatches, batches_of
from rlbench.units import format_number

HOW = "with session.pipeline(…) as steps: for rollouts in steps: …"


def pipeline(
    core: SessionCore,
    prompts: Any = None,
    n: int | None = None,
    sampling: Any = None,
    *,
    lag: int = 1,
    reward: Any = None,
    batch: int | None = None,
    progress: bool = True,
    env: Any = None,
    **options: Any,
) -> Pipeline:
    """Rollouts for the steps of a loop, of which up to `lag` are drawn and scored while its body trains.

        with session.pipeline(prompts, n=8, lag=1, reward=reward, max_tokens=64) as steps:
            for rollouts in steps:
                session.train_step(rollouts.batch(advantage=rb.rl.group_normalized()), rb.rl.decoupled_ppo())

    The loop syncs the weights itself. Whatever runs ahead ends with the block, however that is left, and is kept in
    `steps.unfinished`. `undo`, `restore` and `heal` in the body drop what was drawn ahead: it is drawn anew, from the
    weights of then.

    Args:
        prompts: batches of prompts, one for each step; or a stream or mixture, whose place is behind the last batch
            that was given, whatever was drawn ahead; None: the one that the session follows.
        lag: how many batches may be trained on between the weights that draw a batch and those it trains: with one
            step a batch, its staleness in steps is at most that. 0 draws each from the weights of now.
        reward: scores the rollouts, as in `evaluate`, in a thread beside the body; None: they come without a reward,
            or with that of `env`.
        batch: prompts of a stream that make one batch.
        n, sampling, progress, env, options: as in `rollout`.
    """
    if not isinstance(lag, int) or isinstance(lag, bool) or lag < 0:
        raise SessionError(f"lag={lag!r}: wanted the number of batches that may be drawn ahead, 0 for none")
    if reward is not None:
        as_scorer(reward)  # what is none is refused before anything is drawn
    chosen = sampling_options(sampling) | options

    def roll(asked: Any) -> Waiting:
        return core.inference.submit_generate(asked, chosen, n=n, progress=progress, env=env)

    batches = batches_of(core.followed.data if prompts is None else prompts, batch)
    told = {name: value for name, value in (("n", n), ("env", env)) if value is not None} | chosen
    return Pipeline(core, batches, lag, reward, roll, told)


@dataclass(frozen=True, eq=False)
class Ahead:
    """A batch that was begun: its rollout, what scores that behind it, and its line of the record."""

    rolling: Waiting
    scoring: Chain
    entry: Entry

    def end(self, limit: float | None) -> tuple[Rollouts | None, Exception | None]:
        """Wait for what was asked to stop, `limit` seconds (None: to its end); what it gave, and how it failed.

        Where the reward did not come to its end the rollouts are those without rewards.
        """
        error: Exception | None = None
        try:
            return self.scoring.result(limit), None
        except TimeoutError:  # its engine step cannot be cut: the next call on the replicas waits for that
            return None, None
        except Stopped:
            pass
        except Exception as failed:
            error = failed
        try:
            rollouts: Rollouts | None = self.rolling.result()
        except Stopped as stopped:
            rollouts = stopped.partial
        except Exception:  # the scoring's own error
            return None, error
        return (rollouts if rollouts is not None and rollouts.samples else None), error

    def __str__(self) -> str:
        at = "ready" if self.scoring.done else "being scored" if self.rolling.done else "running"
        return f"{self.rolling.what} {at}"


class Pipeline(Suggesting):
    """Gives scored rollouts, batch by batch, inside of a `with` block. Made by `session.pipeline`.

    `staleness`: of each batch given, how many versions of the trainer lay behind it, mean of its samples.
    `unfinished`: rollouts that nobody was given, whole or as far as they were, scored where the reward had ended.
    """

    def __init__(
        self,
        core: SessionCore,
        prompts: PromptBatches,
        lag: int,
        reward: Any,
        roll: Callable[[Any], Waiting],
        told: dict[str, Any],
    ) -> None:
        self.lag = lag
        self.staleness: list[float] = []
        self.unfinished: list[Rollouts] = []
        self._core, self._prompts, self._reward, self._roll, self._told = core, prompts, reward, roll, told
        self._ahead: deque[Ahead] = deque()
        self._batches: Iterator[Rollouts] | None = None
        self._open = False
        self._raised: BaseException | None = None

    def __enter__(self) -> Self:
        if self._batches is not None:
            raise SessionError("this pipeline has run: session.pipeline(…) makes another one")
        self._batches, self._open = self._given(), True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        self._drop(STOP_WAIT_S if isinstance(error, KeyboardInterrupt) else None)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Rollouts:
        if self._batches is None or not self._open:
            raise SessionError(f"a pipeline gives rollouts inside of its block, which ends what runs ahead: {HOW}")
        return next(self._batches)

    def __repr__(self) -> str:
        given = f"{len(self.staleness)} given"
        if self.staleness:
            mean = sum(self.staleness) / len(self.staleness)
            given += f", staleness {format_number(mean)} (at most {format_number(max(self.staleness))})"
        ahead = [f"ahead: {', '.join(map(str, self._ahead))}"] if self._ahead else []
        kept = [f"{len(self.unfinished)} unfinished"] if self.unfinished else []
        return f"Pipeline({' · '.join([f'lag {self.lag}', given, *ahead, *kept])})"

    # -- parts

    def _given(self) -> Iterator[Rollouts]:
        stands = self._stands()
        self._prompts.rewind()
        while True:
            if self._stands() != stands or self._prompts.moved:
                self._drop(None)
                self._prompts.rewind()
                stands = self._stands()
            if not self._ahead and not self._fill():
                self._sync()  # who evaluates behind the loop meets the weights it ended with
                return
            rollouts = self._next()
            with sigint_held():
                self._give(rollouts)
            yield rollouts

    def _stands(self) -> tuple[int, Any]:
        """What changes where the policy goes back, or the replicas are built again."""
        return self._core.anchors.returns, self._core.inference

    def _next(self) -> Rollouts:
        """Wait for the first batch ahead; once it is drawn, and the last of them, begin those behind it."""
        batch = self._ahead[0]
        self._wait(batch.rolling)
        if self.lag and len(self._ahead) == 1:
            self._fill()
        return self._wait(batch.scoring)

    def _wait(self, call: Waiting) -> Rollouts:
        try:
            rollouts: Rollouts = call.blocking_result()
        except BaseException as error:
            self._raised = error
            self._core.keep_last(None, error)
            raise
        return rollouts

    def _fill(self) -> bool:
        """Begin as many batches as may lie ahead; says whether there was one."""
        count = max(1, self.lag)
        drawn = [prompts for _ in range(count) if (prompts := self._prompts.draw()) is not None]
        if drawn:
            self._sync()
        for prompts in drawn:
            self._begin(prompts)
        return bool(drawn)

    def _sync(self) -> None:
        """Bring the replicas to the trainer's weights where they are not."""
        core = self._core
        if set(core.inference.weight_versions()) == {core.version}:
            return
        entry = core.recorder.begin("sync_weights", {})
        core.recorder.during(entry, core.synced().blocking_result)

    def _begin(self, prompts: Any) -> None:
        recorder = self._core.recorder
        entry = recorder.begin("rollout", {"prompts": prompts, **self._told})
        try:
            with sigint_held():  # nobody would stop a rollout that is not among those ahead
                rolling = self._roll(prompts)
                scoring = self._core.run("pipeline", _scored_steps(rolling, self._reward))
                self._ahead.append(Ahead(rolling, scoring, entry))
        except Exception as error:
            recorder.end(entry, error=error)
            raise

    def _give(self, rollouts: Rollouts) -> None:
        """Count the first batch ahead as drawn: its prompts, its line of the record, and how old it is."""
        core, batch = self._core, self._ahead.popleft()
        self._prompts.give()
        core.followed.note_place()
        core.keep_last(rollouts)
        core.recorder.end(batch.entry, rollouts)
        behind = core.version - rollouts.versions
        self.staleness.append(float(behind.mean()) if len(behind) else 0.0)

    def _drop(self, limit: float | None) -> None:
        """Stop what runs ahead and keep what there is of it; wait `limit` seconds for all of it, None: to its end."""
        dropped, self._ahead = self._ahead, deque()
        deadline = None if limit is None else time.monotonic() + limit
        for batch in dropped:
            batch.scoring.stop()
        for batch in dropped:
            rollouts, error = batch.end(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if rollouts is not None:
                self.unfinished.append(rollouts)
            if error is not None and error is not self._raised:
                warnings.warn(f"{batch.rolling.what}, which nobody was given, failed: {error}", stacklevel=3)
            self._core.recorder.end(batch.entry, error=error or Stopped("nobody was given it", rollouts))


def _scored_steps(rolling: Waiting, reward: Any) -> Steps:
    rollouts = yield rolling
    if reward is None:
        return rollouts
    scored = yield Scoring(rollouts, reward)
    return made_with(scored, rollouts, reward=reward)

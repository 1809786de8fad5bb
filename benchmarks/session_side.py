"""A session as one side of a comparison: started once, then a verb per turn, with the seconds it took.

    python -m benchmarks.session_side '{"model": "tiny", "train": {"lr": 1e-4}}'     # options of rb.Session

A request names a verb of `SessionSide` and its options; `benchmarks.turns` has the protocol.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import threading
import time
import warnings
from collections import Counter
from functools import partial
from typing import Any

from benchmarks.turns import Record, Requests, serve, timed

PROMPTS, SAMPLES, TOKENS = 8, 8, 64
"""Of a step: prompts, completions of each, tokens of each."""
CELL = """
def helper(x):
    return {n} * x

def edited(inputs):
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    return helper(-inputs.advantages * ratio), {{"edit": {n}.0}}
"""
METHOD = """
def probe(self):
    return {n}
"""


class SessionSide:
    """The verbs that are measured, each on one session."""

    def __init__(self, session: Any, keep: bool = False, seed: int = 0) -> None:
        from rlbench.tiny import tasks

        self.session, self.keep = session, keep
        self.prompts = tasks.stream("train", seed)
        self.message = tasks.message
        self.batch: Any = None
        self.edits = 0

    def turn(self, verb: str, **options: Any) -> Record:
        """Do what was asked for."""
        return getattr(self, verb)(**options)

    def close(self) -> None:
        """End the session, unless it is to go on."""
        if not self.keep:
            self.session.close()

    def rollouts(
        self,
        prompts: int = PROMPTS,
        n: int = SAMPLES,
        tokens: int = TOKENS,
        geometric: bool = False,
        behind: int = 0,
    ) -> Any:
        """Sample completions of the next prompts, all of `tokens`, or of geometric lengths up to that; of prompts said
        again and again up to so many letters, that is tokens, where `behind` says so."""
        from benchmarks.handwritten_loop import GEOMETRIC_BIAS

        asked = [self.message(next(self.prompts)) for _ in range(prompts)]
        if behind:
            texts = [f"{one[0]['content']} " * behind for one in asked]
            asked = [[{"role": "user", "content": text[:behind]}] for text in texts]
        lengths: dict[str, Any] = {"ignore_eos": True}
        if geometric:
            lengths = {"logit_bias": {self.session.tokenizer.eos_token_id: GEOMETRIC_BIAS}}
        return self.session.rollout(asked, n=n, max_tokens=tokens, progress=False, **lengths)

    def step(self, **sizes: Any) -> Record:
        """Take a whole step: rollout, train and sync."""
        import rlbench as rb

        clock = [time.perf_counter()]
        rollouts = self.rollouts(**sizes)
        clock.append(time.perf_counter())
        scored = rollouts.score(lambda r: statistics.fmean(t % 2 for t in r.token_ids))
        batch = scored.batch(advantage=rb.rl.group_normalized())
        kernel_s = time.perf_counter() - clock[-1]
        metrics = self.session.train_step(batch)
        clock.append(time.perf_counter())
        synced = self.session.sync_weights()
        clock.append(time.perf_counter())
        return {
            "rollout_s": clock[1] - clock[0],
            "train_s": clock[2] - clock[1],
            "sync_s": clock[3] - clock[2],
            "step_s": clock[3] - clock[0],
            "kernel_s": kernel_s,
            "copies_s": metrics.seconds["copies"],
            "tokens": int(rollouts.lengths.sum()),
            "bytes": synced.bytes,
        }

    def pipeline(self, lag: int, steps: int, score_s: float = 0.0) -> Record:
        """Train for some steps in a pipeline; seconds of a step."""
        import asyncio

        import rlbench as rb

        async def reward(rollout: Any) -> float:
            if score_s:
                await asyncio.sleep(score_s * 32)  # 32 at a time
            return statistics.fmean(token % 2 for token in rollout.token_ids)

        batches = [[self.message(next(self.prompts)) for _ in range(PROMPTS)] for _ in range(steps)]
        options = {"n": SAMPLES, "max_tokens": TOKENS, "ignore_eos": True, "progress": False}

        def work() -> None:
            with self.session.pipeline(batches, lag=lag, reward=reward, **options) as ahead:
                for rollouts in ahead:
                    self.session.train_step(rollouts.batch(advantage=rb.rl.group_normalized()), rb.rl.decoupled_ppo())

        return {"s": timed(work) / steps}

    def sampled(self, calls: int, tokens: int) -> Record:
        """Sample so many completions by a rollout; tokens per second."""
        return {"tps": calls * tokens / timed(lambda: self.rollouts(prompts=calls, n=1, tokens=tokens))}

    def served(self, calls: int, tokens: int) -> Record:
        """Have so many clients of the endpoint ask at once, from this process; tokens per second."""
        import asyncio

        import openai

        endpoint = self.session.endpoint()
        asked = [self.message(next(self.prompts)) for _ in range(calls)]

        async def ask() -> list[Any]:
            async with openai.AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, timeout=600) as client:
                options: dict[str, Any] = {"max_tokens": tokens, "extra_body": {"ignore_eos": True}}
                create = partial(client.chat.completions.create, model="policy", **options)
                return await asyncio.gather(*(create(messages=messages) for messages in asked))

        begin = time.perf_counter()
        answers = asyncio.run(ask())
        seconds = time.perf_counter() - begin
        assert all(answer.usage.completion_tokens == tokens for answer in answers)
        return {"tps": calls * tokens / seconds}

    def continued(self, n: int = 16, tokens: int = TOKENS) -> Record:
        """Continue a completion from its middle."""
        rollouts = self.rollouts(prompts=1, n=1, tokens=tokens)
        begin = time.perf_counter()
        tree = rollouts.fork(0, at=tokens // 2, n=n, max_tokens=tokens)
        seconds = time.perf_counter() - begin
        assert tree.samples == n + 1
        return {"s": seconds}

    def prepare(self, **sizes: Any) -> Record:
        """Make the batch that the verbs below work on."""
        import rlbench as rb

        scored = self.rollouts(**sizes).score(lambda r: statistics.fmean(t % 2 for t in r.token_ids))
        self.batch = scored.batch(advantage=rb.rl.group_normalized())
        return {"tokens": int(self.batch.lengths.sum()), "trained": int(self.batch.tokens)}

    def settle(self) -> Record:
        """Take so many short steps that the memory of all copies for undo is there: to ask for it takes longer than the
        copy."""
        self.prepare(prompts=1, n=2, tokens=4)
        steps = range(self.session.core.undo_depth + 2)
        return {"s": timed(lambda: [self.session.train_step(self.batch, lr=1e-9) for _ in steps])}

    def train(self, packing: bool = True, share_prompts: bool = False) -> Record:
        """Take a train step on the batch; also the share of the computed tokens that were padding, and that of the
        batch's tokens that were not computed."""
        begin = time.perf_counter()
        metrics = self.session.train_step(self.batch, packing=packing, share_prompts=share_prompts)
        return {"s": time.perf_counter() - begin, "padding": metrics.padding, "shared": metrics.shared}

    def logprobs(self) -> Record:
        """Compute the batch's log-probs: one forward."""
        return {"s": timed(lambda: self.session.logprobs(self.batch))}

    def lab(self, gradients: bool = False) -> Record:
        """Run a loss lab of four losses."""
        from benchmarks.loss_lab import LOSSES

        options = {"parameter_gradients": True} if gradients else {}
        return {"s": timed(lambda: self.session.loss_lab(self.batch, LOSSES, **options))}

    def four_backwards(self) -> Record:
        """Do by hand what a loss lab with gradients does."""
        from benchmarks.loss_lab import LOSSES

        def work() -> None:
            for loss in LOSSES.values():
                self.session.forward_backward(self.batch, loss)
                self.session.zero_grad()

        return {"s": timed(work)}

    def edited_step(self) -> Record:
        """Run a cell that defines a loss anew, and a step with it."""
        self.edits += 1
        begin = time.perf_counter()
        self.loss = _cell(CELL, "edited", self.edits)
        metrics = self.session.train_step(self.batch, self.loss)
        assert metrics.edit == self.edits, "the step ran with another loss"
        return {"s": time.perf_counter() - begin, "losses": len(set(self.session.history["loss_hash"]))}

    def same_step(self) -> Record:
        """Take a step with the loss of the last edit."""
        return {"s": timed(lambda: self.session.train_step(self.batch, self.loss))}

    def edited_method(self) -> Record:
        """Run a cell that defines a method anew, and call it on the ranks."""
        self.edits += 1
        begin = time.perf_counter()
        self.session.method(_cell(METHOD, "probe", self.edits))
        assert self.session.train.probe()[0] == self.edits, "the call ran another method"
        return {"s": time.perf_counter() - begin}

    def sync(self) -> Record:
        """Sync the weights, with the proof."""
        begin = time.perf_counter()
        synced = self.session.sync_weights()
        return {"s": time.perf_counter() - begin, "bytes": synced.bytes}

    def trained_sync(self, lr: float, **options: Any) -> Record:
        """Sync, by `options`, the weights of a step at `lr` on the batch; seconds with and without the proof, bytes."""
        self.session.train_step(self.batch, lr=lr)
        begin = time.perf_counter()
        synced = self.session.sync_weights(**options)
        seconds = time.perf_counter() - begin
        return {"s": seconds, "travel_s": synced.seconds, "bytes": synced.bytes, "whole": synced.whole_bytes}

    def back(self) -> Record:
        """Go back, to another branch and to a snapshot, the replicas following by `sync`, which is not counted; seconds
        of each, bytes of the snapshot, and those of the parameters that train."""
        session = self.session
        kept = session.snapshot()
        undo = timed(lambda: session.undo(sync=False))
        branch = timed(lambda: session.branch("idea", sync=False))
        restore = timed(lambda: session.restore(kept, sync=False))
        session.branch("main", sync=False)
        session.drop(kept, session.branches["idea"])
        own = 4 * int(session.train.info["trainable"])
        return {"undo_s": undo, "branch_s": branch, "restore_s": restore, "bytes": kept.bytes, "own": own}

    def undo(self) -> Record:
        """Undo a step, the replicas following."""
        return {"undo_s": timed(lambda: self.session.undo())}

    def highest(self) -> Record:
        """Return GiB at their highest: of all processes together, what they may share once, and of each owner."""
        highest: Counter[str] = Counter()
        for sample in self.session.core.link.samples():
            shared = sum(sample["shared"].values()) - max(sample["shared"].values(), default=0)
            owners = Counter({"all": sum(sample["resident"].values()) - shared})
            for parts in sample["owners"].values():
                owners.update(parts)
            highest |= owners
        return {f"{owner}_gib": nbytes / 2**30 for owner, nbytes in highest.items()}

    def rollout(self, **sizes: Any) -> Record:
        """Sample, nothing else."""
        return {"s": timed(lambda: self.rollouts(**sizes))}

    def where(self) -> Record:
        """Say the session's name."""
        return {"name": self.session.name}


def _cell(source: str, name: str, n: int) -> Any:
    """Run a cell's text, as a notebook does, and return what it defines."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source.format(n=n), f"<cell {n}>", "exec"), space)
    return space[name]


def _look(name: str) -> None:
    """Look at a session as a panel does, so that its workers are asked for their memory by owner."""
    from rlbench.monitor import client

    record = client.find(name)
    with contextlib.suppress(client.MonitorGone):  # the session was closed
        while record is not None:
            client.ask(record, "/samples")
            time.sleep(2.0)


def main() -> None:
    """Start the session of the settings, serve turns, close it (unless `keep`); `watched`: with somebody looking."""
    requests = Requests()
    settings = json.loads(sys.argv[1])
    keep, watched = settings.pop("keep", False), settings.pop("watched", False)
    warnings.simplefilter("ignore")

    def make() -> SessionSide:
        import rlbench as rb

        session = rb.Session(**settings)
        if watched:
            threading.Thread(target=_look, args=(session.name,), daemon=True).start()
        return SessionSide(session, keep)

    serve(requests, make)


if __name__ == "__main__":
    main()

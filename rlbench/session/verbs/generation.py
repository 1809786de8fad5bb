"""Generating: roll out, evaluate, hold generation where it is and let it go on."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from rlbench.data.prompts.sampling import sampling_options
from rlbench.data.rollouts.rollouts import Rollouts
from rlbench.dispatch.chain import Step
from rlbench.results import Done
from rlbench.session.core import SessionCore
from rlbench.session.state.following import D
from rlbench.session.training.evaluation import Evaluation, evaluate_steps
from rlbench.session.verb import Pending


def rollout(
    core: SessionCore,
    prompts: Any,
    n: int | None = None,
    sampling: Any = None,
    *,
    on_stop: str = "raise",
    progress: bool = True,
    env: Any = None,
    **options: Any,
) -> Pending[Rollouts]:
    """Generate `n` completions per prompt (default 1).

    Args:
        prompts: texts, chats, token ids, or rows with `prompt` and `label`.
        sampling: options by vLLM's names (`temperature`, `top_p`, `max_tokens`, …), or its `SamplingParams`; also
            as keywords. `max_tokens` is 16 where not given, as in vLLM; None: up to the model's length.
        env: an `rb.envs.Env` that each sample meets turn by turn; then also `max_turns`, `max_total_tokens` and
            `env_timeout_s`, and `max_tokens` is per turn.
        on_stop: `"raise"`: an interrupt raises `rb.Stopped`, `.partial` holds what was finished; `"return"`
            returns that instead.

    Returns:
        `Rollouts` (or a `Pending`).
    """
    core.followed.note_place()
    pending = core.inference.submit_generate(
        prompts, sampling_options(sampling) | options, n=n, progress=progress, env=env
    )
    pending.then(core.keep_last)
    return pending


def evaluate(
    core: SessionCore,
    prompts: Any,
    reward: Any = None,
    n: int = 1,
    *,
    progress: bool = True,
    env: Any = None,
    **sampling: Any,
) -> Generator[Step, Any, Evaluation]:
    """Mean reward of `n` completions per prompt; returns an `Evaluation`. One is greedy and several are sampled at
    temperature 1, unless told otherwise.

    With `env` as in `rollout`; where `reward` is None the environment's rewards count. Completions that the
    environment's errors ended, or a stop cut, do not count; the `Evaluation` says how many.

    A stop raises `Stopped`; its `.partial` are Rollouts: what was drawn, or those that had a reward by then.
    """
    chosen = {"temperature": 0.0 if n == 1 else 1.0} | sampling
    return (yield from evaluate_steps(core.inference, prompts, reward, n, chosen, progress, env))


def pause(core: SessionCore) -> Done:
    """Hold generation on every replica after its current step: requests and KV cache stay, nothing is computed.

    Of a rollout that runs (`block=False`, another thread, the panel), or of the next one, which then waits.
    `resume()` goes on with the very same tokens; a stop works meanwhile and gives what there is.
    """
    core.link.pause(True)
    return Done("generation is held", "session.resume() goes on")


def resume(core: SessionCore) -> Done:
    """Let generation go on where `pause()` held it."""
    core.link.pause(False)
    return Done("generation goes on")


def follow(core: SessionCore, data: D, fresh: bool = False) -> D:
    """Keep the place of a stream of prompts with the session: in snapshots, in checkpoints, for another kernel.

        prompts = session.follow(mixture)           # from here on
        session.rollout(prompts.take(64), n=8, max_tokens=256)

    Going back (`restore`, `undo`, `branch`) moves it back as well. In a session that was attached to or loaded, it
    first goes to where that session was.

    Args:
        data: of `PromptSet.stream` or `rb.data.mix`; None follows nothing any more and forgets the place.
        fresh: begin with other data: the stream stays where it is, and the place the session was at is forgotten.
            Snapshots taken before hold a place in the data of then, and cannot move this stream to it.

    Returns:
        The same stream.

    Raises:
        SessionError: neither a stream nor a mixture, or `fresh` without one.
        DataError: the session was with other prompts, weights or options.
    """
    return core.followed.follow(data, fresh)

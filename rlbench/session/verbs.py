"""The verbs of a session that are one call: of an engine, the monitor, the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rlbench.data.forking import Named
from rlbench.data.prompts.sampling import sampling_options
from rlbench.data.record.history import is_number
from rlbench.data.record.metric_names import METRICS
from rlbench.data.rollouts.rollouts import Rollouts
from rlbench.engines.moved import Moved
from rlbench.engines.redefine import Redefined
from rlbench.errors import DataError
from rlbench.results import Done, Names
from rlbench.session.beside import D
from rlbench.session.core import SessionCore
from rlbench.session.record.script import Exported, write_script
from rlbench.session.record.tracking import Tracker
from rlbench.session.verb import PendingVerb
from rlbench.weights.sync import Synced

F = TypeVar("F", bound=Callable[..., Any])


def rollout(
    core: SessionCore,
    prompts: Any,
    n: int | None = None,
    sampling: Any = None,
    *,
    on_stop: str = "raise",
    progress: bool = True,
    env: Any = None,
    adapter: Named | str | None = None,
    **options: Any,
) -> PendingVerb[Rollouts]:
    """Generate `n` completions per prompt (default 1); returns `Rollouts` (or a `PendingVerb`).

    Args:
        prompts: texts, chats, token ids, or rows with `prompt` and `label`.
        sampling: options by vLLM's names (`temperature`, `top_p`, `max_tokens`, …), or its `SamplingParams`; also
            as keywords. `max_tokens` is 16 where not given, as in vLLM; None: up to the model's length.
        options: also `template={"enable_thinking": False}` (or `chat_template_kwargs`), options of the chat template,
            and `tools=[…]`, which it names to the model: functions (their signatures and docstrings), or tools in
            OpenAI's form.
        env: an `rb.envs.Env` that each sample meets turn by turn; then also `max_turns`, `max_total_tokens` and
            `env_timeout_s`, `max_tokens` is per turn, and `thoughts="strip"` leaves what the policy thought in earlier
            turns (`<think>…</think>`) out of what later ones see.
        adapter: whose weights sample: `"base"`, or the name of a branch, of a session with `rb.Inference(adapters=2)`;
            or a snapshot (or its label), whose weights the replicas are lent; None: the branch it is on.
        on_stop: `"raise"`: an interrupt raises `rb.Stopped`, `.partial` holds what was finished; `"return"`
            returns that instead.
    """
    core.followed.note_place()
    chosen = sampling_options(sampling) | options
    pending = core.inference.submit_generate(prompts, chosen, n=n, progress=progress, env=env, under=adapter)
    pending.then(core.keep_last)
    return pending


def sync_weights(core: SessionCore, transport: str | None = None) -> PendingVerb[Synced]:
    """Send the trainer's weights to the replicas and prove it by log-probs; returns `Synced` (or a `PendingVerb`).

    What is frozen and as the replicas have it is left out; of replicas with `delta=True` all that did not change is.

    Args:
        transport: `"shm"`, `"ipc"` or `"broadcast"` (see `TrainEngine.p2p_weight_sync`); None: the best that works.
    """
    return core.synced(transport=transport)


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


def zero_grad(core: SessionCore) -> Done:
    """Drop the accumulated gradients."""
    core.train.call_all("policy_zero_grad", what="zero_grad").result()
    return Done("no gradient waits for a step")


def set_lr(core: SessionCore, lr: float) -> Done:
    """Change the learning rate from now on; the same as `session.lr = lr`.

    Groups of the optimizer that have rates of their own keep their ratio to the first one's. A trainer's schedule goes
    on from it in proportion (StateError where that is at 0: before its first step).
    """
    core.train.call_all("set_lr", float(lr), what="lr").result()
    return Done(f"lr {float(lr):g} from the next step on")


def offload(core: SessionCore, engine: str, *parts: str) -> Moved:
    """Free device memory, `offload("train")` or `offload("inference", "kv_cache")`; returns what was measured."""
    return core.engine(engine).cpu(parts or None)


def onload(core: SessionCore, engine: str, *parts: str) -> Moved:
    """Make an engine, or parts of it, resident again."""
    return core.engine(engine).cuda(parts or None)


def redefine(core: SessionCore, cls: type, replace: str | None = None) -> Redefined:
    """Put an edited class in the place of the live one of its name in the policy, or in the modules inside it; weights
    and optimizer stay. See `TrainEngine.redefine`."""
    return core.train.redefine(cls, replace)


def method(core: SessionCore, fn: F) -> F:
    """Decorator: add a function to the live policy as a method, callable as `session.train.name(…)`."""
    return core.train.method(fn)


def follow(core: SessionCore, data: D, fresh: bool = False) -> D:
    """Keep the place of a stream of prompts with the session: in snapshots, in checkpoints, for another kernel.

        prompts = session.follow(mixture)           # from here on
        session.rollout(prompts.take(64), n=8, max_tokens=256)

    Going back (`restore`, `undo`, `branch`) moves it back as well. In a session that was attached to or loaded, it
    first goes to where that session was; DataError where it was with other prompts, weights or options.

    Args:
        data: of `PromptSet.stream` or `rb.data.mix`; None follows nothing any more and forgets the place.
        fresh: begin with other data: the stream stays where it is, and the place the session was at is forgotten.
            Snapshots taken before hold a place in the data of then, and cannot move this stream to it.
    """
    return core.followed.follow(data, fresh)


def track(
    core: SessionCore,
    tracker: Any = "tensorboard",
    run: str | None = None,
    folder: str = "runs",
    samples_every: int | None = None,
    **options: Any,
) -> Tracker:
    """Send each step's metrics, evaluations and rollout lengths to a tracker as well, and tables of samples.

    Args:
        tracker: "tensorboard", "wandb", "mlflow", "trackio", "comet_ml", "aim", "clearml", "dvclive", "swanlab" as
            far as installed; or an `accelerate.tracking.GeneralTracker` of your own.
        run: name of the run (of the project, where the tracker has projects); default: the session's name.
        folder: where trackers that write files write them.
        samples_every: steps from one table of samples to the next: some completions of the step's batch with rewards
            and advantages; those of each evaluation come with it. 0: none. Default: 10 where the tracker has tables or
            text: TensorBoard, W&B, trackio, ClearML, one of your own with accelerate's `log_table`.
        options: of that tracker's start, e.g. `entity=…` of W&B.

    Returns:
        accelerate's tracker; its `.tracker` is the library's own object. A kernel that attaches goes on with it.
    """
    return core.trackers.start(tracker, run, folder, samples_every, options)


def log(core: SessionCore, values: Mapping[str, float] | None = None, **more: float) -> None:
    """Put numbers of your own on record, beside the last step: `session.log(win_rate=0.6)`, `{"my/pass@8": 0.5}`.

    They are in `session.history` (its `plot("win_rate")` too; of before the first step in its `begin`), and trackers
    get them. Where a step has one of that name already the later counts. Going back takes them off with their step.
    """
    numbers = dict(values or {}) | more
    known = {metric.name for metric in METRICS}
    for name, value in numbers.items():
        if not is_number(value):
            raise DataError(f"session.log({name}={value!r}): wanted a number")
        if name in known:
            raise DataError(f"session.log: {name!r} is a metric that steps have themselves; give yours another name")
    core.link.apply({"do": "logged", "metrics": {name: float(value) for name, value in numbers.items()}})
    core.trackers.log_values(numbers)


def untrack(core: SessionCore, tracker: str | None = None) -> Names:
    """End a tracker, or all; returns their names. `close()` does it as well."""
    return Names("ended", core.trackers.finish(tracker))


def export_script(core: SessionCore, path: str | Path) -> Exported:
    """Write the notebook's cells as a script (`.py`) that does it again and compares its numbers with those seen here.

    Cells stand in order, also those that were undone. Of a cell that failed or was stopped stands what came before
    the statement that did; `Exported.left_out` and the script say so.
    """
    return write_script(core, path)

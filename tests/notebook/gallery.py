"""Every rich view once, with long names, two ranks and warnings: for tests of how they look and what they leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from IPython.display import display

from rlbench import notebook, tiny
from rlbench.data.record.gradients import Gradients
from rlbench.data.record.history import History
from rlbench.data.record.metrics import Metrics
from rlbench.notebook.cards.session_views import session_card
from rlbench.notebook.dashboard.dashboard import Dashboard
from rlbench.notebook.live.progress import FitProgress, Line
from tests.data.values import rollouts
from tests.data.written import sorting, stepped
from tests.labs import loss_lab
from tests.notebook import values

LONG = "a-policy-of-a-name-that-nobody-wanted-to-shorten"
SESSION = f"session-{LONG}"


def show(name: str, session: str = SESSION) -> None:
    """Display one of `VIEWS`; the dashboard is that of `session`."""
    notebook.install()
    made = Dashboard(session) if name == "dashboard" else VIEWS[name]()
    if hasattr(made, "bundle"):
        display(made.bundle(), raw=True)
    elif made is not None:
        display(made)


def _session() -> Any:
    died = "replica 1 died: killed for want of memory (OOM), session.heal() builds it again"
    broken = values.INFERENCE | {"broken": died}
    engines = {"actor": values.ACTOR, LONG: values.INFERENCE, "inference": broken}
    held = {name: 5 << 28 for one in engines.values() for name in one["actors"]}
    state = values.state(**engines) | {"name": SESSION, "branch": "warm"}
    return session_card(state, [{"resident": held}])


def _steps(count: int = 60) -> History:
    random = np.random.default_rng(0)
    return History(
        [
            {
                "step": i + 1,
                "reward": i / count + float(random.normal()) / 20,
                "loss": float(random.normal()) / 10,
                "kl": i / 1e4,
                "entropy": 2 - i / count,
                "clip_fraction": 0.02,
                "grad_norm": 1.0,
                "length": 118.0,
                "loss_name": LONG,
            }
            for i in range(count)
        ]
    )


def _metrics() -> Metrics:
    return Metrics(
        {
            "step": 42,
            "version": 42,
            "loss": 0.0132,
            "loss_name": LONG,
            "reward": 0.62,
            "reward_std": 0.4,
            "kl": 0.011,
            "ref_kl": 0.02,
            "entropy": 1.4,
            "clip_fraction": 0.03,
            "logprob_gap": 1e-3,
            "grad_norm": 0.8,
            "lr": 1e-4,
            "sequences": 64,
            "tokens": 7552,
            "tokens_per_s": 12345.6,
            "length": 118,
            "skipped": "the gradient is infinite",
            "seconds": {"total": 1.9, "forward_backward": 1.2, "optimizer": 0.5},
        }
    )


def _lab() -> Any:
    batch = rollouts().score(range(6)).batch(lambda rewards, group: rewards - 2.4)
    old = batch.sampler_logprobs - 1
    noise = np.random.default_rng(0).normal(size=batch.tokens).astype(np.float32)
    tokens = {"old_logprobs": old, "logprobs": old + 0.4 * noise, "entropy": np.abs(noise)}
    losses = {"grpo": "grpo", LONG: lambda x: (x.advantages * x.logprobs, {})}
    return loss_lab(batch, tokens, losses)


def _gradients() -> Gradients:
    names = (f"{LONG}.embed.weight", *(f"layers.{i}.mlp.up_projection.weight" for i in range(8)), "norm.weight")
    count = len(names)
    nonfinite = np.zeros(count)
    nonfinite[-1] = 3
    return Gradients(
        names,
        np.arange(1, count + 1, dtype=float) ** 2,
        largest=np.arange(count) / 10,
        zeros=np.full(count, 5.0),
        nonfinite=nonfinite,
        sizes=np.full(count, 10.0),
        weight_squares=np.full(count, 4.0),
        tokens=(),
    )


def _comparison() -> Any:
    rewards = {"exact": [float(i % 2) for i in range(16)], LONG: [1.0] * 16}
    return stepped(sorting(tiny.ensure())).compare(**rewards)


def _line() -> None:
    Line("sync").end(f"sync v42 · 48.2 MiB · 0.03 s · shm · gap 1e-06 · {LONG}", 0.03)


def _fit() -> None:
    progress = FitProgress(3)
    for reward in (0.1, 0.4, 0.6):
        progress.iterated({"reward": reward, "loss": 0.01})
    progress.close([])


VIEWS: dict[str, Callable[[], Any]] = {
    "session": _session,
    "rollouts": lambda: stepped(sorting(tiny.ensure())),
    "viewer": lambda: notebook.viewer(stepped(sorting(tiny.ensure())), colour="entropy"),
    "dashboard": lambda: None,
    "metrics": _metrics,
    "history": lambda: _steps(),
    "plot": lambda: _steps().plot("reward", "entropy", compare={LONG: _steps(40)}, smooth=8),
    "histogram": lambda: rollouts().lengths.plot(compare={LONG: [1, 1, 2]}),
    "lab": _lab,
    "gradients": _gradients,
    "comparison": _comparison,
    "batch": values.batch,
    "line": _line,
    "fit": _fit,
}
"""By name; each gives what a cell would end in, or shows itself."""

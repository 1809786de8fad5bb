"""rlbench: a Jupyter-first workbench for reinforcement learning of language models.

    import rlbench as rb

    session = rb.Session("tiny")
    rollouts = session.rollout(prompts, n=8, max_tokens=256)
    batch = rollouts.score(reward).batch(advantage=rb.rl.group_normalized())
    session.train_step(batch, loss="grpo")
    session.sync_weights()

Names are resolved on first use: `import rlbench` imports neither torch, ray nor vllm.
"""

from __future__ import annotations

import importlib
import os.path
from typing import TYPE_CHECKING, Any

from rlbench._version import __version__
from rlbench.strategies.generation import session_link

if TYPE_CHECKING:
    from rlbench import data, envs, errors, nn, rewards, rl, tiny
    from rlbench.data import Prompt, PromptGroup, Rollout, Rollouts, TrainBatch
    from rlbench.engines import InferenceEngine, NeedParallel, TrainEngine
    from rlbench.engines.placement import resources
    from rlbench.errors import RLBenchError, Stopped
    from rlbench.nn import device
    from rlbench.rl import LossInputs
    from rlbench.runtime.cluster import init, shutdown
    from rlbench.session import EMA, Inference, Lora, RewardModel, Session, Train, attach, every, sessions
    from rlbench.session.planning.plan import plan
    from rlbench.traces import last_traceback

_HOMES = {
    "rlbench.session": ("Session", "RewardModel", "Train", "Inference", "Lora", "EMA", "every", "attach", "sessions"),
    "rlbench.session.planning.plan": ("plan",),
    "rlbench.engines": ("InferenceEngine", "NeedParallel", "TrainEngine"),
    "rlbench.runtime.cluster": ("init", "shutdown"),
    "rlbench.engines.placement": ("resources",),
    "rlbench.nn": ("device",),
    "rlbench.rl": ("LossInputs",),
    "rlbench.data": ("Prompt", "PromptGroup", "Rollout", "Rollouts", "TrainBatch"),
    "rlbench.errors": ("RLBenchError", "Stopped"),
    "rlbench.traces": ("last_traceback",),
}
_NAMES = {name: home for home, names in _HOMES.items() for name in names}
_ROOMS = ("data", "envs", "errors", "nn", "rewards", "rl", "tiny")

__all__ = ["__version__", *_NAMES, *_ROOMS]

session_link.connect("rlbench.engines.rank_session:RankSession")

__path__.append(os.path.join(__path__[0], "compat", "lightrft"))  # rlbench.strategy, rlbench.trainer, rlbench.utils


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        value: Any = importlib.import_module(f"rlbench.{name}")
    elif name in _NAMES:
        importlib.import_module("rlbench.notebook").install()
        value = getattr(importlib.import_module(_NAMES[name]), name)
    else:
        from rlbench.errors import nearest

        raise AttributeError(f"rlbench has no {name!r}{nearest(name, __all__)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

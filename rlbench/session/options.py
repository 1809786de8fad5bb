"""What a session is asked for, checked before anything is started."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlbench.engines.paths import check_model_path, model_name
from rlbench.options import OptionError, section
from rlbench.runtime.starting import MODEL, phase, say, starting
from rlbench.trainers.models.policy_spec import OptimizerOptions
from rlbench.workers.replica.config import ReplicaOptions
from rlbench.workers.train.config import RankOptions

sizes = section("Sizes")
CONTRADICTIONS = (("use_mp_opt", "bf16"), ("use_mp_opt", "masters"), ("fsdp_cpu_offload", "masters"))
"""Options of the ranks that act on a module held for training, or in half precision, alone."""


class Train(RankOptions, OptimizerOptions):
    """How a session's policy is trained: `rb.Session(model, train=rb.Train(lr=1e-5, shards=2))`."""

    ELSEWHERE: ClassVar[Mapping[str, str]] = {
        "tensor_parallel_size": "the number of ranks that the parameters are split over is `shards`"
    }

    shards: int | None = sizes(
        None, "ranks the parameters are split over; None: one per GPU, without a GPU one", least=1
    )
    data_parallel_size: int = sizes(1, "copies of that; -1: as many as the devices allow")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, other in CONTRADICTIONS:
            if getattr(self, name) and getattr(self, other) is False:
                raise OptionError(f"{name} has no effect with {other}=False; leave one of them out")


class Inference(ReplicaOptions):
    """How a session's replicas are built: `rb.Session(model, inference=rb.Inference(max_model_len=2048))`."""

    data_parallel_size: int = sizes(-1, "replicas; -1: one per GPU, without a GPU one")


@dataclass(frozen=True)
class SessionOptions:
    """A session's settings, as kept by its monitor.

    `reference`: None, or the model of a frozen reference policy. `undo`: how many last steps can be undone.
    """

    model: str
    path: str
    seed: int = 0
    train: Train = field(default_factory=Train)
    inference: Inference = field(default_factory=Inference)
    reference: str | None = None
    undo: int = 1

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> SessionOptions:
        """Read them back from `to_json`."""
        return cls(**{**config, "train": Train.of(config["train"]), "inference": Inference.of(config["inference"])})

    def to_json(self) -> dict[str, Any]:
        """Return plain data for the monitor; of the engines' options those that do not have their default."""
        plain = {name: _plain(getattr(self, name).overridden()) for name in ("train", "inference")}
        return {**vars(self), **plain}


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as JSON has them: lists in the place of tuples."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}


def reference_at(reference: bool | str | None, policy: str) -> str | None:
    """The folder (absolute) or hub id of a session's reference, as of `rb.Session(reference=…)`; True: the policy's.

    Raises:
        BuildError: it can be neither.
    """
    if reference is True:
        return policy
    return check_model_path(resolve_model(model_name(reference, "reference="))) if reference else None


def resolve_model(model: str) -> str:
    """The folder or hub id behind a model's name: the embedded ones are made on the spot (once; cached)."""
    from rlbench.tiny.cache import NAMES, ensure

    if model not in NAMES:
        return str(model)
    with contextlib.ExitStack() as making:
        began = False

        def report(done: int, total: int) -> None:
            nonlocal began
            doing = f"making {model!r}, once: {done}/{total}"
            if not began:  # it is not in the cache
                began = True
                making.enter_context(starting(f"model {model}"))
                making.enter_context(phase(MODEL, doing))
            say(MODEL, doing)

        return str(ensure(model, on_progress=report))

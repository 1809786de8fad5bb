"""What a session is asked for, checked before anything is started."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlbench.engines.paths import check_model_path, model_name
from rlbench.errors import SessionError, nearest
from rlbench.runtime.starting import MODEL, phase, say, starting


@dataclass(frozen=True)
class SessionOptions:
    """A session's settings, as kept by its monitor.

    `train`: `tensor_parallel_size`, `data_parallel_size`, and fields of the policy's options (`lr`, `betas`,
    `weight_decay`, `max_norm`, `dtype`) and of `TrainConfig`. `inference`: sizes, and fields of
    `ReplicaConfig`.
    `reference`: None, or the model of a frozen reference policy. `undo`: how many last steps can be undone.
    """

    model: str
    path: str
    seed: int = 0
    train: dict[str, Any] = field(default_factory=dict)
    inference: dict[str, Any] = field(default_factory=dict)
    reference: str | None = None
    undo: int = 1

    def to_json(self) -> dict[str, Any]:
        """For the monitor."""
        return dataclasses.asdict(self)


def checked(kind: str, given: Mapping[str, Any] | None, known: Mapping[str, Any] | set[str]) -> dict[str, Any]:
    """The options of one engine; raises SessionError for a name nobody reads, with the nearest that is read."""
    options = dict(given or {})
    for name in options:
        if name not in known:
            raise SessionError(
                f"{kind}: unknown option {name!r}{nearest(name, known)}; there are {', '.join(sorted(known))}"
            )
    return options


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

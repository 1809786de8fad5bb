"""Whose weights a draw is by, as `under=` names it: an adapter that the replicas hold, or a kept version; None is the
policy."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlbench.data.forking import Named, name_of
from rlbench.dispatch.link import Link
from rlbench.errors import SessionError, nearest, some

if TYPE_CHECKING:
    from rlbench.engines.inference import InferenceEngine


def adapter_numbers(link: Link) -> dict[str, int]:
    """Return the number that each branch's adapter has in the replicas, by branch."""
    return {"main": 1} | link.state("adapters")["adapters"]


@dataclass(frozen=True, eq=False)
class Whose:
    """Whose weights draw: those of the `adapter` of that number (None: of the one synced last), or of a `snapshot`, as
    it is on record."""

    adapter: int | None = None
    snapshot: Mapping[str, Any] | None = None


def whose(infer: InferenceEngine, under: Named | str | None) -> Whose:
    """Find what `under` names: "base" or a branch where the replicas hold their adapters, else a snapshot by its label.
    SessionError where there is none."""
    if (name := name_of(under)) is None:
        return Whose()
    adapters, kept = _known(infer)
    if name in adapters:
        return Whose(adapters[name])
    if name in kept:
        return Whose(snapshot=kept[name])
    versions = f". Kept versions are {some(list(kept))}" if kept else ""
    raise SessionError(f"{_no_adapter(name, adapters, kept)}{versions}")


def names_under(infer: InferenceEngine) -> tuple[str, ...]:
    """Return what `under` may name, adapters and then snapshots, that at which the session stood last first."""
    adapters, kept = _known(infer)
    return (*adapters, *reversed(kept))


def adapter_number(infer: InferenceEngine, name: str | None) -> int | None:
    """Return the number of an adapter by the name of its branch ("base": 0); SessionError where there is none."""
    if name is None:
        return None
    adapters, _ = _known(infer)
    if name not in adapters:
        raise SessionError(_no_adapter(name, adapters))
    return adapters[name]


def own_adapter(infer: InferenceEngine) -> int:
    """Return the number of the policy's own adapter in the replicas, 0 where they hold none."""
    branch = infer.link.state("branch")["branch"]
    return adapter_numbers(infer.link).get(branch, 1) if infer.info.get("adapters") else 0


def _known(infer: InferenceEngine) -> tuple[dict[str, int], dict[str, Mapping[str, Any]]]:
    """Return the adapters that the replicas hold, and the session's snapshots by label, that at which it stood last as
    the last."""
    state = infer.link.state("adapters", "snapshots")
    adapters = {"base": 0, "main": 1} | state["adapters"] if infer.info.get("adapters") else {}
    return adapters, {str(fields["label"]): fields for fields in state["snapshots"].values()}


def _no_adapter(name: str, adapters: Collection[str], kept: Collection[str] = ()) -> str:
    near = nearest(name, [*adapters, *kept])
    if adapters:
        return f"no adapter {name!r}{near}; there are {', '.join(adapters)}"
    return (
        f"no adapter {name!r}{near}: the replicas hold one set of weights. rb.Session(…, train=rb.Train(lora=…), "
        "inference=rb.Inference(adapters=2)) holds adapters beside each other"
    )

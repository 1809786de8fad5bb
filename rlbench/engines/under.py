"""Whose weights a draw is by, as `under=` names it: an adapter that the replicas hold, or a kept version; None is the
policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlbench.dispatch.link import Link
from rlbench.errors import SessionError, nearest, some

if TYPE_CHECKING:
    from rlbench.engines.inference import InferenceEngine


def adapter_numbers(link: Link) -> dict[str, int]:
    """Return the number that each branch's adapter has in the replicas, by branch."""
    return {"main": 1} | link.state("adapters")["adapters"]


def kept_versions(link: Link) -> dict[str, Mapping[str, Any]]:
    """Return the session's snapshots by label, as they are on record, that at which it stood last as the last."""
    return {str(fields["label"]): fields for fields in link.state("snapshots")["snapshots"].values()}


def names_under(infer: InferenceEngine) -> tuple[str, ...]:
    """Return what `under` may name: "base" and the branches where the replicas hold their adapters, and the labels of
    snapshots, that at which the session stood last first."""
    return (*_adapters(infer), *reversed(kept_versions(infer.link)))


def kept_name(infer: InferenceEngine, under: str | None) -> str | None:
    """Return the label of the snapshot that `under` names, None where it names none: an adapter of that name comes
    first."""
    return under if under is not None and under not in _adapters(infer) and under in kept_versions(infer.link) else None


def check_under(infer: InferenceEngine, under: str | None) -> None:
    """Raise SessionError where `under` names nothing to draw by."""
    if kept_name(infer, under) is None:
        adapter_number(infer, under)


def adapter_number(infer: InferenceEngine, name: str | None) -> int | None:
    """Return the number of an adapter by the name of its branch ("base": 0); SessionError where there is none."""
    if name is None:
        return None
    known, kept = _adapters(infer), list(kept_versions(infer.link))
    if name in known:
        return known[name]
    versions = f". Kept versions are {some(kept)}" if kept else ""
    if not known:
        raise SessionError(
            f"no adapter {name!r}{nearest(name, kept)}: the replicas hold one set of weights. rb.Session(…, "
            f"train=rb.Train(lora=…), inference=rb.Inference(adapters=2)) holds adapters beside each other{versions}"
        )
    raise SessionError(f"no adapter {name!r}{nearest(name, known)}; there are {', '.join(known)}{versions}")


def own_adapter(infer: InferenceEngine) -> int:
    """Return the number of the policy's own adapter in the replicas, 0 where they hold none."""
    branch = infer.link.state("branch")["branch"]
    return adapter_numbers(infer.link).get(branch, 1) if infer.info.get("adapters") else 0


def _adapters(infer: InferenceEngine) -> dict[str, int]:
    return {"base": 0} | adapter_numbers(infer.link) if infer.info.get("adapters") else {}

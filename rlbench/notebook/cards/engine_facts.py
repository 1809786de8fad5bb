"""What there is to say of an engine, read from the monitor's record of it; no worker is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlbench.notebook.base.palette import OWNERS
from rlbench.units import format_bytes, format_count, format_number

PARTS = {"train": ("weights", "optimizer"), "inference": ("weights", "kv_cache")}
WORKERS = {"train": "ranks", "inference": "replicas"}
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True)
class EngineFacts:
    """One engine. `state`: cuda, cpu, meta, … by part; `bytes` resident in host memory, of which `owners` by part.

    `version` is that of its weights, "frozen" for a reference; `note` is what a person has to act on.
    """

    name: str
    role: str
    kind: str
    state: Mapping[str, str]
    bytes: int
    version: str
    note: str
    owners: Mapping[str, int] = field(default_factory=dict)
    about: tuple[tuple[str, str], ...] = ()


def engine_facts(
    name: str, record: Mapping[str, Any], version: int, sample: Mapping[str, Any] | None = None
) -> EngineFacts:
    """The facts of engine `name`.

    Args:
        record: what the monitor keeps of it.
        version: of the trainer's weights.
        sample: the monitor's last memory sample.
    """
    info, state = record.get("info", {}), record.get("state", {})
    role, actors = str(record["kind"]), record.get("actors", [])
    resident = (sample or {}).get("resident", {})
    held = state.get("version") if role == "inference" else version
    parts = {part: str(state[part]) for part in PARTS.get(role, ()) if part in state}
    if "optimizer" in parts and info.get("optimizer") == []:
        parts["optimizer"] = "none"
    return EngineFacts(
        name,
        role,
        f"{info.get('executor', 'fsdp2')} ×{len(actors)}",
        parts,
        sum(resident.get(actor, 0) for actor in actors),
        "frozen" if info.get("trainable") == 0 or name == "reference" else f"v{held}" if held is not None else "",
        str(record.get("broken") or "") or _behind(held, version),
        _owners(actors, sample),
        _about(record),
    )


def _behind(held: int | None, version: int) -> str:
    if held is None or held == version:
        return ""
    count = version - held
    said = NUMBERS[count] if 0 <= count < len(NUMBERS) else str(count)
    return f"{said} version{'' if count == 1 else 's'} behind: session.sync_weights()"


def _owners(actors: list[str], sample: Mapping[str, Any] | None) -> dict[str, int]:
    """Bytes by owner over the engine's workers; empty where nobody asked them lately."""
    told = [found for actor in actors if (found := (sample or {}).get("owners", {}).get(actor))]
    return {owner: total for owner in OWNERS if (total := sum(int(one.get(owner) or 0) for one in told))}


def _about(record: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Names and values of what the engine was built as."""
    info, state = record.get("info", {}), record.get("state", {})
    role, count = str(record["kind"]), len(record.get("actors", []))
    facts: list[tuple[str, str]] = []
    if "parameters" in info:
        trained = info.get("trainable", info["parameters"])
        share = (
            "frozen"
            if not trained
            else "all trained"
            if trained == info["parameters"]
            else (f"{format_count(trained)} trained")
        )
        facts.append(("parameters", f"{format_count(info['parameters'])}, {share}"))
    if "dtype" in info:
        facts.append(("dtype", str(info["dtype"])))
    facts.append(("workers", _workers(role, count, info)))
    if info.get("optimizer"):
        rate = "" if state.get("lr") is None else f", lr {format_number(state['lr'])}"
        facts.append(("optimizer", ", ".join(map(str, info["optimizer"])) + rate))
    if "max_model_len" in info:
        facts.append(("longest", f"{format_number(info['max_model_len'])} tokens"))
    if info.get("kv_cache_bytes"):
        facts.append(("KV cache", format_bytes(info["kv_cache_bytes"])))
    if info.get("path") or info.get("source"):
        facts.append(("model", str(info.get("path") or info["source"])))
    return tuple(facts)


def _workers(role: str, count: int, info: Mapping[str, Any]) -> str:
    """`2 ranks on cpu, sharded over 2`, `1 replica on cuda, 2 devices each`."""
    word = WORKERS.get(role, "workers")
    device = str(info.get("device", "")).partition(":")[0]
    said = f"{count} {word if count != 1 else word[:-1]}" + (f" on {device}" if device else "")
    spread = int(info.get("shard_size" if role == "train" else "tensor_parallel_size") or 1)
    if spread > 1:
        said += f", sharded over {spread}" if role == "train" else f", {spread} devices each"
    return said

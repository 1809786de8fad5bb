"""Dynamic loss scale for float16 gradients: plain numbers in the optimizer's groups, so every checkpoint has it."""

from __future__ import annotations

from typing import Any

INITIAL, LEAST, MOST = 2.0**16, 1.0, 2.0**24
GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0, 0.5, 1000


def start(group: dict[str, Any], dynamic: bool) -> None:
    """Begin with a scale that float16 gradients need (`dynamic`), or with 1, which stays."""
    group.setdefault("loss_scale", INITIAL if dynamic else 1.0)
    group.setdefault("good_steps", 0)
    group.setdefault("dynamic_scale", dynamic)


def update(groups: list[dict[str, Any]], overflow: bool) -> None:
    """Halve the scale after an overflow; double it after 1000 steps without one (Micikevicius et al., 2018, §3.2)."""
    for group in groups:
        if not group["dynamic_scale"]:
            continue
        group["good_steps"] = 0 if overflow else group["good_steps"] + 1
        if overflow:
            group["loss_scale"] = max(LEAST, group["loss_scale"] * BACKOFF)
        elif group["good_steps"] == GROWTH_INTERVAL:
            group["loss_scale"], group["good_steps"] = min(MOST, group["loss_scale"] * GROWTH), 0

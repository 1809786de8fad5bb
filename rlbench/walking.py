"""The modules of a module by their paths, found at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def modules_by_path(module: nn.Module) -> dict[str, nn.Module]:
    """Return what `named_modules` gives, each module once and in that order. A model of a hundred small layers with
    adapters has seven hundred modules, for each of which that goes through a generator of every level."""
    found: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()
    waiting = [("", module)]
    while waiting:
        path, part = waiting.pop()
        if part in seen:
            continue
        seen.add(part)
        found[path] = part
        children = [(f"{path}.{name}" if path else name, child) for name, child in part._modules.items()]
        waiting += [(name, child) for name, child in reversed(children) if child is not None]
    return found

"""All parts of a module, for whoever walks them in each step."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def every_module(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and all in it, each once, in no order: as `Module.modules`, which makes a name of each and hands
    it up through all layers, in a third of the time."""
    seen, waiting = {module}, [module]
    while waiting:
        part = waiting.pop()
        yield part
        for inner in part._modules.values():
            if inner is not None and inner not in seen:
                seen.add(inner)
                waiting.append(inner)

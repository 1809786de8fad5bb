"""Modules without weights: how to make one, and how to see that a module is one.

A module is shipped to the ranks with its parameters on meta (no storage) and its buffers real: a buffer
such as RoPE's frequencies is computed in the constructor, and no checkpoint holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from rlbench.errors import BuildError

MAKE_ON_META = "make it inside `with rlbench.nn.device('meta'):` (the same as accelerate's init_empty_weights())"


def device(tag: str) -> AbstractContextManager[object]:
    """Return a context in which modules are made on `tag`.

    Args:
        tag: "meta" puts parameters on meta and keeps buffers real; anything else is `torch.device(tag)`.
    """
    return _meta() if tag == "meta" else torch.device(tag)


@contextmanager
def _meta() -> Iterator[None]:
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        yield


def making_on_meta() -> bool:
    """True inside `device("meta")` or accelerate's `init_empty_weights()`, which both patch
    `register_parameter`."""
    return "init_on_device" in getattr(nn.Module.register_parameter, "__qualname__", "")


def check_module(module: object) -> None:
    """Refuse what cannot be shipped to the ranks."""
    if not isinstance(module, nn.Module):
        raise BuildError(f"a train engine takes a torch module, and this is {type(module).__name__}.")
    real = [name for name, parameter in module.named_parameters() if not parameter.is_meta]
    if real:
        raise BuildError(
            f"{type(module).__name__} is not on meta: {len(real)} parameters hold memory here (first: "
            f"{real[0]}); {MAKE_ON_META}."
        )
    lost = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if lost:
        raise BuildError(
            f"{type(module).__name__} lost {len(lost)} buffers (first: {lost[0]}): torch.device('meta') "
            f"empties buffers too, and no checkpoint brings them back; {MAKE_ON_META}."
        )

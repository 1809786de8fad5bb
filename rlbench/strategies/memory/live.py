"""The memory of tensors while a block runs, by whose it is, and at its highest: exact, on any device, also on meta,
where nothing is computed. What a kernel takes inside itself, and what an allocator holds in vain, is not seen."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from rlbench.strategies.optim.gradients import local

OTHERS = "activations"


class LiveMemory(TorchDispatchMode):
    """Counts the storages that are made while it is on, and those taken by hand, until they are gone.

    Args:
        known: tensors that were there before, which do not count.
        owner: tells whose it is what operations make now; default: "activations".

    Attributes:
        held: bytes by owner, now.
        highest: bytes by owner when their sum was highest.
    """

    def __init__(self, known: Iterable[Tensor] = (), owner: Callable[[], str] = lambda: OTHERS) -> None:
        super().__init__()
        self.held: Counter[str] = Counter()
        self.highest: Counter[str] = Counter()
        self._known = {local(tensor).untyped_storage()._cdata for tensor in known}
        self._storages: dict[int, tuple[weakref.ref[Any], int, str]] = {}
        self._owner = owner
        self._now = self._peak = 0
        self._resize: Any = None

    @property
    def peak(self) -> int:
        """The highest sum, in bytes."""
        return self._peak

    def take(self, owner: str, nbytes: int) -> None:
        """Count memory that no tensor stands for; negative: it is given back."""
        self.held[owner] += nbytes
        self._now += nbytes
        if self._now > self._peak:
            self._peak, self.highest = self._now, Counter(self.held)

    def __enter__(self) -> LiveMemory:
        resize = self._resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:  # how FSDP frees what it gathered
            result = resize(storage, size)
            self._see(storage)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and see what it made."""
        made = function(*args, **(kwargs or {}))
        for value in tree_iter(made):
            if isinstance(value, Tensor):
                self._see(local(value).untyped_storage())  # a DTensor has a storage of its own without memory
        return made

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        if key in self._storages:
            reference, before, owner = self._storages[key]
            self._storages[key] = reference, size, owner
            self.take(owner, size - before)
            return
        owner = self._owner()
        self._storages[key] = weakref.ref(storage, lambda _: self._gone(key)), size, owner
        self.take(owner, size)

    def _gone(self, key: int) -> None:
        _, size, owner = self._storages.pop(key)
        self.take(owner, -size)

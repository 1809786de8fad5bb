"""Which weights need not travel again: frozen tensors whose bytes are those that the replicas took before.

Why what is left out cannot be wrong in silence:

* Only tensors without a gradient are left out, and only where two 64-bit sums over their bytes, on every rank, are
  those of the sync by which the replicas took them. A change past the optimizer (`.data`, a hook, `restore`) shows.
* Each sync has a random token. A replica says which it holds once that sync's version is committed, so after its proof;
  weights from anywhere else, a sync that failed, a checkpoint or a new process leave it with none, or another.
  The sender has the sums of its last sync to an engine by that token, and sends all where any replica says another.
* A replica refuses a part that does not follow on the token it holds, names that are not, with those left out, all of
  its checkpoint's, and layers of its own of which only some tensors come.
* The proof by log-probs runs over the whole model, whatever was sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

import torch

BLOCK = 1 << 17  # elements that are summed at once
WIDTH = 8  # bytes of one
SEED = 20261127
OF_BLOCKS = (-7046029254386353131, -4417276706812531889)  # odd; by their powers a block counts by its place

Digest = tuple[int, int, int]


@dataclass(frozen=True)
class Record:
    """What one rank knows of a set of weights that was sent, or staged, under a token: names, types and shapes of all
    (`layout`) where any is frozen, and digests of its shards of those that are."""

    token: str = ""
    layout: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...] = ()
    digests: Mapping[str, Digest] = field(default_factory=dict)

    def differing(self, now: Record) -> set[str]:
        """Return the names that are not known to be, in these weights, as they are `now`."""
        names = {name for name, _, _ in now.layout}
        if self.layout != now.layout:
            return names
        same = {name for name, digest in now.digests.items() if self.digests.get(name) == digest}
        return names - same


def group_of(name: str) -> str:
    """Return the part of a checkpoint name up to its first number (`model.layers.3`); of one without, an embedding's
    module, or the module around its own. What a replica fuses (q, k and v; gate and up) lies in one such group."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    if numbers:
        return ".".join(parts[: numbers[0] + 1])
    module = parts[:-1]
    alone = bool(module) and "embed" in module[-1]  # nothing is fused with an embedding
    return ".".join(module if alone else module[:-1])


def whole_groups(names: Iterable[str], changed: Iterable[str]) -> frozenset[str]:
    """Return the names of the groups in which nothing changed."""
    touched = {group_of(name) for name in changed}
    return frozenset(name for name in names if group_of(name) not in touched)


@torch.no_grad()
def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, Digest]:
    """Return number and two independent sums of the bytes of each tensor, by name; every byte counts by its place."""
    sums = [_sums(tensor.detach(), _factors(tensor.device)).cpu() for tensor in tensors.values()]
    pairs = torch.stack(sums).tolist() if sums else []
    return {
        name: (tensor.nbytes, first, second)
        for (name, tensor), (first, second) in zip(tensors.items(), pairs, strict=True)
    }


@cache
def _factors(device: torch.device) -> torch.Tensor:
    """Return two rows of pseudo-random odd factors, by which the elements of a block count."""
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randint(-(1 << 62), 1 << 62, (2, BLOCK), generator=generator)
    return (2 * drawn + 1).to(device)


def _sums(tensor: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    of_blocks = torch.tensor(OF_BLOCKS, device=data.device)
    total = torch.zeros(2, dtype=torch.int64, device=data.device)
    for block in data.split(WIDTH * BLOCK):
        if len(block) % WIDTH or block.data_ptr() % WIDTH or block.storage_offset() % WIDTH:
            padded = torch.zeros(-(-len(block) // WIDTH) * WIDTH, dtype=torch.uint8, device=data.device)
            padded[: len(block)] = block
            block = padded
        halves = block.view(torch.int32)
        # what odd factors make of an element's highest bit, a sign, is the same: turned by a half it is another bit
        turned = torch.cat((halves[1:], halves[:1]))
        total = total * of_blocks + torch.stack([_dot(halves, factors[0]), _dot(turned, factors[1])])
    return total


def _dot(halves: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    elements = halves.view(torch.int64)
    own = factors[: len(elements)]
    return (elements * own).sum() if elements.is_cuda else torch.dot(elements, own)

"""What a rank has sent to which engine and staged where, and by that, what of its weights need not go again."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch

from rlbench.nn.lora import Adapted
from rlbench.nn.quantised import quantised_layers
from rlbench.strategies.optim.gradients import full_shape, is_split, local
from rlbench.strategies.ranks.control import ControlGroup
from rlbench.weights.manifest import Handover, Layout, Manifest
from rlbench.weights.names import unique_parameters
from rlbench.weights.staging import DEFAULT_BUCKET_BYTES
from rlbench.weights.unchanged import Record, digests, whole_groups
from rlbench.workers.train.whole import checkpoint_names, own_hook


@dataclass(frozen=True)
class SyncPart:
    """What goes in one sync: all but the tensors `left_out`, which replicas have that hold the token `follows`."""

    left_out: frozenset[str] = frozenset()
    follows: str = ""
    record: Record | None = None
    places: tuple[Hashable, ...] = ()

    def told_in(self, manifest: Manifest) -> Manifest:
        """Return the manifest of what goes with what does not, and the token of both."""
        if self.record is None:
            return manifest
        if self.left_out and not manifest.unchanged:
            shapes = ((name, dtype, shape) for name, dtype, shape in self.record.layout if name in self.left_out)
            left_out = ((name, torch.empty(shape, dtype=dtype, device="meta")) for name, dtype, shape in shapes)
            manifest = replace(manifest, unchanged=Layout(DEFAULT_BUCKET_BYTES, left_out).buckets)
        return replace(manifest, follows=self.follows, token=self.record.token)


WHOLE = SyncPart()


class Sent:
    """The weights that lie elsewhere as this rank knows them, by their places: an engine's name, a stage's key."""

    def __init__(self, control: ControlGroup) -> None:
        self._control = control
        self._records: dict[Hashable, Record] = {}

    def part(
        self, module: torch.nn.Module, handover: Handover, stage: Hashable | None, everything: bool = False
    ) -> SyncPart:
        """Choose what goes to an engine, by way of a `stage` that keeps what was written; collective. `everything`, on
        any rank: all of it.

        Until `note` the places hold nothing that is known: a sync that fails is followed by one of all weights.
        """
        places = (handover.to, *(() if stage is None else (stage,)))
        known = [self._records.pop(place, Record()) for place in places]
        now: Record | None = self._control.together(
            "comparing weights with those sent before", lambda: record_of(module, handover.token)
        )
        changed: set[str] | None = None
        if now is not None and not everything and handover.held and known[0].token == handover.held:
            changed = set().union(*(record.differing(now) for record in known))
        votes: list[set[str] | None] = self._control.gather(changed)
        together = [vote for vote in votes if vote is not None]
        if now is None or len(together) < len(votes):
            return SyncPart(record=now, places=places)
        left_out = whole_groups((name for name, _, _ in now.layout), set().union(*together))
        return SyncPart(left_out, handover.held if left_out else "", now, places)

    def note(self, part: SyncPart) -> None:
        """The part is complete: on its way, or written."""
        if part.record is not None:
            self._records |= dict.fromkeys(part.places, part.record)

    def forget(self, place: Hashable) -> None:
        """Nothing that is known is there any more."""
        self._records.pop(place, None)


def record_of(module: torch.nn.Module, token: str) -> Record | None:
    """Describe a module's weights as they are on this rank; None where what is sent is more than renamed parameters:
    merged, split, given by the user's own hook, adapted or quantised."""
    if Adapted.of(module) or quantised_layers(module) or own_hook(module) is not None:
        return None
    state = unique_parameters(module)
    frozen = {
        name: local(tensor) for name, tensor in state.items() if not tensor.requires_grad and not is_split(tensor)
    }
    if not frozen:
        return Record(token)
    names = checkpoint_names(module)
    if names is None:
        return None
    layout = tuple((names[name], tensor.dtype, full_shape(tensor)) for name, tensor in state.items())
    return Record(token, layout, {names[name]: digest for name, digest in digests(frozen).items()})

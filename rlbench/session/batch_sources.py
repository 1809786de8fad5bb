"""What a step's record says of how its batch was made: the reward and the advantage, by name, hash and source."""

from __future__ import annotations

from typing import Any

from rlbench.data import TrainBatch
from rlbench.data.origin import Origin, origin
from rlbench.session.sources import described

GIVEN = {"score": ("reward", "fn"), "batch": ("advantage", "advantage")}
"""Of a call: what its first argument is, and that argument's name."""


def batch_sources(batch: TrainBatch) -> dict[str, str]:
    """`reward_name`, `reward_hash`, `reward_source` and the same of the advantage, as far as they are known.

    Not where the rewards or the batch were made by hand. Of a batch that was cut from another, that one's.
    """
    found: dict[str, str] = {}
    made: Any = origin(batch)
    while isinstance(made, Origin):
        if made.call in GIVEN:
            what, name = GIVEN[made.call]
            given = made.args[0] if made.args else made.kwargs.get(name)
            if callable(given) and f"{what}_name" not in found:
                found |= {f"{what}_{key}": str(value) for key, value in described(given).items()}
        made = made.of
    return found

"""What is planned: a session's options, with the lengths it will see, on devices that need not be here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from rlbench.errors import BuildError
from rlbench.session.options import POLICY, Inference, Train
from rlbench.session.planning.devices import Devices
from rlbench.session.planning.pictures import Pictures

T = TypeVar("T")
REFERENCE, TEACHER = "reference", "teacher"
CRITIC, SCORER = "critic", "reward model"
OFFLOADED = ("inference", "optimizer")
OF_THE_POLICY = ("lora", "dtype", "masters", "optimizer", "gradient_checkpointing", "reshard_after_forward")
"""Options of the ranks that a trainer's other models have not."""


@dataclass(frozen=True)
class PlannedReward:
    """A reward model of a trainer: in the dtype of its checkpoint, split over the ranks. Or, where `dtype` is said,
    loaded whole in it by each rank, as `rb.rewards.model` does, to score `rows` completions at a time; `on_host`: in
    host memory, whatever the ranks compute on."""

    path: str
    dtype: str | None = None
    rows: int = 0
    on_host: bool = False

    @property
    def whole(self) -> bool:
        """Whether each rank holds all of it."""
        return self.dtype is not None


@dataclass(frozen=True)
class Request:
    """One plan's question; `path`: a folder or a hub id. `lengths`: of a step's sequences, or of the longest;
    `offload`: what the loop sends to host memory while it is not needed; `teachers`: the models of frozen policies that
    score; `kind`: what trains, as of `SessionOptions`; `images`: what each sequence shows; `critic`, `rewards`: models
    that a trainer makes on the policy's ranks beside it; `ema`: and a moving average of the policy."""

    path: str
    devices: Devices
    train: Train = field(default_factory=Train)
    inference: Inference = field(default_factory=Inference)
    reference: str | None = None
    undo: int = 1
    lengths: int | Sequence[int] | None = None
    token_budget: int | None = None
    offload: tuple[str, ...] = ()
    teachers: tuple[str, ...] = ()
    kind: str = POLICY
    images: Pictures | None = None
    critic: str | None = None
    rewards: tuple[PlannedReward, ...] = ()
    ema: bool = False

    def __post_init__(self) -> None:
        if unknown := [name for name in self.offload if name not in OFFLOADED]:
            raise BuildError(f"offload={unknown[0]!r}: a loop sends {' or '.join(OFFLOADED)} away while it is not used")
        if self.ema and self.train.lora is not None:
            raise BuildError("ema=True averages all weights, and this policy trains adapters alone: leave one out")
        several = [self.lengths] if isinstance(self.lengths, int) else [int(n) for n in self.lengths or [2]]
        if min(several) < 2:
            raise BuildError(f"lengths={min(several)}: a sequence has a prompt and a response, 2 tokens at least")

    @property
    def frozen(self) -> dict[str, str]:
        """The model of each frozen policy that has weights of its own, by role; the base of a LoRA is one without, and
        a teacher of the reference's model is the reference."""
        base = self.path if self.train.lora is not None else None
        reference = {REFERENCE: self.reference} if self.reference not in (None, base) else {}
        known = (base, self.reference)
        apart = [path for path in self.teachers if path not in known]
        return reference | numbered(TEACHER, apart)

    @property
    def of_trainer(self) -> bool:
        """Whether it is a trainer's: critics, reward models and averages on the ranks are."""
        return self.critic is not None or bool(self.rewards) or self.ema

    @property
    def away(self) -> tuple[str, ...]:
        """What is in host memory while it is not needed; a trainer has the replicas sleep once they have sampled."""
        return (*self.offload, "inference") if self.of_trainer else self.offload

    @property
    def beside(self) -> Request:
        """The same as critic and reward models see it, which a trainer splits over all ranks, whatever the policy's
        shards, and has gather each layer anew, without adapters, and without computing activations again."""
        theirs = {name: given for name, given in self.train.overridden().items() if name not in OF_THE_POLICY}
        return replace(self, train=Train(**{**theirs, "shards": self.data_ranks, "data_parallel_size": 1}))

    @property
    def alone(self) -> Request:
        """The same as a reward model sees it that each rank holds whole."""
        return replace(self, train=Train(shards=1))

    @property
    def shards(self) -> int:
        """Ranks the parameters are split over; as a session chooses them."""
        alone = self.train.shards is None and self.train.data_parallel_size == 1
        return max(1, self.devices.gpus // self.train.tensor_parallel) if alone else self.train.shards or 1

    @property
    def ranks(self) -> int:
        """All training ranks."""
        copies, wide = self.train.data_parallel_size, self.shards * self.train.tensor_parallel
        return wide * (copies if copies > 0 else max(1, self.devices.gpus // wide))

    @property
    def data_ranks(self) -> int:
        """Those that rows are split over."""
        return self.ranks // self.train.tensor_parallel

    @property
    def replica_workers(self) -> int:
        """Processes that generate: all replicas', each over so many devices."""
        if self.kind != POLICY:
            return 0
        copies, wide = self.inference.data_parallel_size, self.inference.tensor_parallel_size
        return wide * (copies if copies > 0 else max(1, self.devices.gpus // wide))

    @property
    def longest(self) -> int | None:
        """Tokens of the longest sequence, where that is said."""
        if self.lengths is None:
            return self.inference.max_model_len
        return self.lengths if isinstance(self.lengths, int) else max(int(n) for n in self.lengths)


def numbered(role: str, models: Sequence[T]) -> dict[str, T]:
    """Name each model of a role; from the second on by its number as well."""
    return {f"{role} {i + 1}" if i else role: model for i, model in enumerate(models)}

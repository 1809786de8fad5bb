"""What a session is asked for, checked before anything is started."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from rlbench.engines.paths import check_model_path, model_name
from rlbench.options import OptionError, Options, refuse, section
from rlbench.runtime.starting import phase, say, starting
from rlbench.session.setup_options import EMA, OptimizerChoice, ScheduleChoice
from rlbench.trainers.models.policy_spec import OptimizerOptions
from rlbench.workers.replica.config import ReplicaOptions
from rlbench.workers.train.config import RankOptions

sizes, setup = section("Sizes"), section("Setup")
NODES = "nodes of the Ray cluster; none: as few as can be; `spread`: as many as can be; else their addresses"
POLICY, REWARD = "policy", "reward"
CONTRADICTIONS = (("use_mp_opt", "bf16"), ("use_mp_opt", "masters"), ("fsdp_cpu_offload", "masters"))
"""Options of the ranks that act on a module held for training, or in half precision, alone."""
OF_ADAMW = ("lr", "betas", "eps", "weight_decay")


class Train(RankOptions, OptimizerOptions):
    """How a session's policy is trained: `rb.Session(model, train=rb.Train(lr=1e-5, shards=2))`."""

    ELSEWHERE: ClassVar[Mapping[str, str]] = {
        "tensor_parallel_size": "ranks that parameters are split over are `shards`; those that compute "
        "layers together, `tensor_parallel`",
        "executor": "a session trains with FSDP2; FSDP1 holds modules of rb.nn.FsdpTrainModule in an rb.TrainEngine",
    }

    shards: int | None = sizes(
        None, "ranks the parameters are split over; None: one per GPU, without a GPU one", least=1
    )
    data_parallel_size: int = sizes(1, "copies of that; -1: as many as the devices allow")
    nodes: tuple[str, ...] = sizes((), NODES)
    optimizer: OptimizerChoice | None = setup(
        None,
        "as of `session.optimizer`: a name, `{'name': 'muon', 'momentum': 0.9}`, or a function of the module; None: "
        "AdamW",
    )
    schedule: ScheduleChoice | None = setup(
        None, "as of `session.schedule`: `{'name': 'cosine', 'steps': 200}`, or a function; None: the rate stays"
    )
    reference: EMA | None = setup(
        None, "how the session's reference follows the policy: `rb.EMA(0.99)`, `rb.every(50)`; None: it stays"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, other in CONTRADICTIONS:
            if getattr(self, name) and getattr(self, other) is False:
                raise OptionError(f"{name} has no effect with {other}=False; leave one of them out")
        if self.optimizer is not None:
            idle = [name for name in OF_ADAMW if name in self.overridden() and not self.optimizer.takes(name)]
            refuse((idle, f"{', '.join(idle)} has no effect with optimizer={self.optimizer!r}: give it what it takes"))

    def optimizer_part(self, choice: OptimizerChoice | None) -> dict[str, Any]:
        """Return the part of a setup that makes an optimizer, with what these options say of one; None: none."""
        if choice is None:
            return {}
        said = {name: getattr(self, name) for name in OF_ADAMW if name in self.overridden() and choice.takes(name)}
        return choice.part(**{"lr": self.lr, **said})

    def first_setup(self) -> dict[str, Any]:
        """Return the setup that a session begins with, see `rlbench.session.state.setup`."""
        schedule = {} if self.schedule is None else self.schedule.part()
        return {**self.optimizer_part(self.optimizer), **schedule}


class Inference(ReplicaOptions):
    """How a session's replicas are built: `rb.Session(model, inference=rb.Inference(max_model_len=2048))`."""

    executor: str = sizes("vllm", "what computes: vllm, or sglang where it is installed", choices=("vllm", "sglang"))
    data_parallel_size: int = sizes(-1, "replicas; -1: one per GPU, without a GPU one")
    nodes: tuple[str, ...] = sizes((), NODES)

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(
            (
                self.return_routed_experts and self.executor != "vllm",
                f"return_routed_experts=True, which rb.Train(router_replay=True) asks for too, cannot be honoured by "
                f"executor={self.executor!r}: it gives no experts here. Take vllm",
            ),
            (
                self.delta and self.executor != "vllm",
                f"delta=True cannot be honoured by executor={self.executor!r}, which takes whole weights from shared "
                "memory. Take vllm, or leave delta out",
            ),
        )


@dataclass(frozen=True)
class SessionOptions:
    """A session's settings, as kept by its monitor.

    `reference`: None, or the model of a frozen reference policy. `undo`: how many last steps can be undone; None: as
    many as the memory allows. `kind`: what is trained, a "policy", or a "reward" model, which has no replicas.
    `teachers`: models of the teachers that the ranks hold, by their engine's name. `pooling`, `probing_layer`: what a
    reward model's head reads, see `HeadShape`; None: as the checkpoint says. `heads`: its heads by name, with their
    weights; None: one without a name.
    """

    model: str
    path: str
    seed: int = 0
    train: Train = field(default_factory=Train)
    inference: Inference = field(default_factory=Inference)
    reference: str | None = None
    undo: int | None = None
    kind: str = POLICY
    teachers: Mapping[str, str] = field(default_factory=dict)
    pooling: str | None = None
    probing_layer: int | None = None
    heads: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if self.train.router_replay:  # the replicas have to say which experts the trainer is to take
            object.__setattr__(self, "inference", replace(self.inference, return_routed_experts=True))
        lora, adapters = self.train.lora, self.inference.adapters
        refuse(
            (
                self.kind == REWARD and self.train.router_replay,
                "router_replay=True has no effect on a reward model, whose texts no router of a sampler saw: leave it "
                "out",
            ),
            (adapters and lora is None, f"adapters={adapters} has no effect without rb.Train(lora=rb.Lora(…))"),
            (
                adapters and lora is not None and lora.base is not None,
                f"adapters={adapters} with base={lora and lora.base!r}: vLLM would compute with the weights as they "
                "were before they were quantised. Leave adapters= out, and the policy is sent merged",
            ),
            (
                self.train.reference is not None and (self.reference is None or self.base_is_reference),
                f"train.reference={self.train.reference!r} moves a reference that is held apart: "
                + ("with lora= it is the base, which stays" if lora else "rb.Session(…, reference=True) holds one"),
            ),
        )

    @property
    def of_trainers(self) -> dict[str, Any]:
        """Options that a trainer of the session has unless it is given others."""
        train = self.train
        return {"seed": self.seed, "max_norm": train.max_norm, "sequence_parallel": train.sequence_parallel}

    @property
    def base_is_reference(self) -> bool:
        """Whether the reference is the policy's own base, computed with its adapters off."""
        return self.train.lora is not None and self.reference == self.path

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> SessionOptions:
        """Read them back from `to_json`."""
        return cls(**{**config, "train": Train.of(config["train"]), "inference": Inference.of(config["inference"])})

    def to_json(self) -> dict[str, Any]:
        """Return plain data for the monitor; of the engines' options those that do not have their default."""
        config = dict(vars(self))
        for name in ("train", "inference"):
            chosen = getattr(self, name).overridden()
            config[name] = {key: _plain(value) for key, value in chosen.items()}
        return config


def _plain(value: Any) -> Any:
    """Return an option's value as JSON has it."""
    if isinstance(value, Options):
        return {key: _plain(held) for key, held in value.overridden().items()}
    return list(value) if isinstance(value, tuple) else value


def reference_at(reference: bool | str | None, policy: str) -> str | None:
    """Return the model of a session's reference, as of `rb.Session(reference=…)`; True: the policy's."""
    if reference is True:
        return policy
    return model_at(model_name(reference, "reference=")) if reference else None


def model_at(named: str) -> str:
    """Return the folder (absolute) or hub id of a model, found from here; BuildError where it can be neither."""
    return check_model_path(resolve_model(named))


def resolve_model(model: str) -> str:
    """Return the folder or hub id behind a model's name: the embedded ones are made on the spot (once; cached)."""
    from rlbench.tiny.cache import NAMES, ensure

    if model not in NAMES:
        return str(model)
    with contextlib.ExitStack() as making:  # entered with the first step: one in the cache is there at once

        def report(done: int, total: int) -> None:
            doing = f"making {model!r}, once: {done}/{total}"
            if done <= 1:
                making.enter_context(starting(f"model {model}"))
                making.enter_context(phase("model", doing))
            say("model", doing)

        return str(ensure(model, on_progress=report))

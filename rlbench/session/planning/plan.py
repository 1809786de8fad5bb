"""`rb.plan`: the memory of a session before anything is built, by role, owner and phase, and whether it fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rlbench.engines.paths import model_name
from rlbench.errors import BuildError, Suggesting
from rlbench.rewards import model as RewardModel
from rlbench.session.options import Inference, Train, model_at, reference_at
from rlbench.session.planning.devices import Devices
from rlbench.session.planning.pictures import Pictures
from rlbench.session.planning.request import CRITIC, SCORER, PlannedReward, Request, numbered
from rlbench.session.planning.reward_models import planned_reward
from rlbench.session.planning.uses import (
    RANK,
    REPLICA,
    SYNC,
    Use,
    average_uses,
    critic_uses,
    device_processes,
    frozen_uses,
    in_one_process,
    kv_bytes,
    longest,
    pass_plan,
    phases_of,
    rank_uses,
    replica_uses,
    scorer_uses,
    sequences,
    session_uses,
)
from rlbench.trainers.models.lora import Lora
from rlbench.units import format_bytes, format_count, format_number

MARGIN = 0.15
"""How far what is measured then may be from the plan."""


@dataclass(frozen=True)
class Plan(Suggesting):
    """The memory of a session that is not there yet.

    Attributes:
        request: what was asked.
        parameters: of the policy; `trained` of them have a gradient.
        device: what lies on the fullest device, by role and owner; on a host without a GPU all there is.
        host: what lies in host memory beside GPUs.
        rows: lengths of the sequences in the fullest micro-batch of a rank.
        notes: what the numbers stand on.
        problems: what would fail whatever the memory; empty where nothing would.
    """

    request: Request
    parameters: int
    trained: int
    device: tuple[Use, ...]
    host: tuple[Use, ...]
    rows: tuple[int, ...]
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def phases(self) -> tuple[str, ...]:
        """Those that it has, in their order; a trainer's critic and reward models have some of their own."""
        return phases_of(self.request)

    def total(self, phase: str, host: bool = False) -> int:
        """Bytes that a phase takes on the fullest device, or on the host beside GPUs."""
        return sum(use.phases.get(phase, 0) for use in (self.host if host else self.device))

    @property
    def peak(self) -> int:
        """Bytes of the fullest device in the phase that takes most."""
        return max(self.total(phase) for phase in self.phases)

    @property
    def limit(self) -> int:
        """Bytes that a device has."""
        return self.request.devices.nbytes

    @property
    def fits(self) -> bool:
        """Whether every phase fits; on a machine that is known, its host too."""
        host = self.request.devices.host
        beside = self.request.devices.gpus > 0 and host is not None
        full = beside and max(self.total(phase, host=True) for phase in self.phases) > (host or 0)
        return self.peak <= self.limit and not full and not self.problems

    def __bool__(self) -> bool:
        return self.fits

    @property
    def least(self) -> int:
        """Bytes of the fullest device that the options alone decide: what is there once the engines are built, or what
        a step needs with everything else sent away; no activations, no copies."""
        built = sum(use.most for use in self.device if use.sure and not use.step)
        stepping = sum(use.most for use in self.device if use.sure and use.role in (RANK, CRITIC))
        return max(built, stepping)

    def of(self, role: str, owner: str) -> int:
        """Bytes of one owner, on whichever side, in the phase that takes most."""
        return sum(use.most for use in (*self.device, *self.host) if (use.role, use.owner) == (role, owner))

    @cached_property
    def change(self) -> Any:
        """The smallest change that makes it fit, with the plan that proves it; None where it fits, or none does."""
        from rlbench.session.planning.changes import smallest_change

        return None if self.fits else smallest_change(self)

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        has = f"{format_bytes(self.peak)} of {format_bytes(self.limit)}"
        if self.problems or not self.fits:
            return f"does NOT fit: {has}"
        return f"fits{', barely' if self.peak * (1 + MARGIN) > self.limit else ''}: {has}"

    def __repr__(self) -> str:
        from rlbench.notebook.cards.plan_views import plan_card

        return plan_card(self).text()


def plan(
    model: str,
    *,
    train: Train | dict[str, Any] | None = None,
    inference: Inference | dict[str, Any] | None = None,
    lora: Lora | None = None,
    reference: bool | str | None = None,
    undo: int = 1,
    gpus: str | None = None,
    lengths: int | Sequence[int] | None = None,
    token_budget: int | None = None,
    offload: Sequence[str] = (),
    teachers: Sequence[str] = (),
    images: str | None = None,
    critic: bool | str | None = None,
    rewards: Sequence[str | Path | RewardModel] = (),
    ema: bool = False,
) -> Plan:
    """Say what a session would take, by role, owner and phase, and the smallest change that makes it fit.

        rb.plan("Qwen/Qwen3-4B", lora=rb.Lora(rank=32), gpus="1x24GiB", lengths=2048)

    Reads the model's config, not its weights. What passes take is found by running one on the meta device.

    Args:
        model: as of `rb.Session`, and so `train`, `inference`, `reference` and `undo`.
        lora: `rb.Lora(rank=32)`; default: that of `train`, or full training.
        gpus: `"2x80GiB"`; `"0x24GiB"`: a host without a GPU; default: this machine.
        lengths: tokens of the longest sequence, or of each sequence of a step; default: as long as a replica lets them
            be, and a micro-batch at most.
        token_budget: tokens of one micro-batch on one rank; default: the one `train_step` takes.
        offload: what the loop sends to host memory while it is not needed: "inference" (`session.offload("inference")`
            before a step), "optimizer" (`session.offload("train", "optimizer")` after it).
        teachers: models of `session.teacher`, held at the same time; those behind a URL take nothing here.
        images: what each sequence shows: `"2x1280x800"`, two pictures 1280 pixels wide and 800 high; their tokens are
            among those of `lengths`.
        critic: of a trainer, as of `session.trainer("ppo", critic=…)`: a checkpoint, or True, the policy's.
        rewards: reward models of a trainer, as of `reward=[…]`: folders or hub ids, which its ranks hold split over
            them, and `rb.rewards.model(…)`, which each loads whole unless it reads what was sampled.
        ema: with its moving average of the policy, `ema=True`. With one of the three the plan is a trainer's: replicas
            sleep while ranks score and train.

    Returns:
        A `Plan`: a table when shown, true where it fits.

    Raises:
        BuildError: for a model, a critic or a reward model that can be none, or options that cannot be honoured.
    """
    options, path = Train.of(train), model_at(model_name(model, "rb.plan"))
    options = options if lora is None else replace(options, lora=lora)
    if options.lora is not None and options.lora.path is not None:
        options = replace(options, lora=options.lora.opened(path))
    wanted = lengths if lengths is None or isinstance(lengths, int) else tuple(int(n) for n in lengths)
    return planned(
        Request(
            path,
            Devices.of(gpus),
            options,
            Inference.of(inference),
            reference_at(reference, path),
            undo,
            wanted,
            token_budget,
            tuple(offload),
            tuple(model_at(model_name(one, "teachers=")) for one in teachers),
            images=Pictures.of(images),
            critic=_critic_at(critic, path),
            rewards=_rewards_at(rewards, path),
            ema=ema,
        )
    )


def _critic_at(critic: bool | str | None, policy: str) -> str | None:
    """Return the model of a critic; True: the policy's."""
    if critic is None or critic is False:
        return None
    return policy if critic is True else _found("critic", critic)


def _rewards_at(rewards: Any, policy: str) -> tuple[PlannedReward, ...]:
    """Return how ranks hold each reward model, of which a list is given."""
    if isinstance(rewards, str) or not isinstance(rewards, Iterable):
        raise BuildError(f"rewards={rewards!r}: a list of reward models, as in rewards=[{str(rewards)!r}]")
    return tuple(_reward_at(one, policy) for one in rewards)


def _reward_at(reward: Any, policy: str) -> PlannedReward:
    if not isinstance(reward, RewardModel):
        return PlannedReward(_found("rewards", reward))
    return replace(planned_reward(reward, policy), path=_found("rewards", reward.path))


def _found(option: str, named: Any) -> str:
    """Return the folder or hub id of the model that an option names."""
    name = model_name(named, f"{option}=")
    try:
        return model_at(name)
    except BuildError as error:
        raise BuildError(f"{option}={name!r}: {error}") from error


def planned(request: Request, passes: bool = True) -> Plan:
    """Answer a request; makes the models on meta the first time. Without `passes`: what is held beside them alone."""
    from rlbench.session.planning.model import frozen_of, policy_of
    from rlbench.session.planning.scalars import critic_of, scorers_of

    policy = policy_of(request)
    if request.images is not None:
        _need_sight(request, policy)
    critic, scorers = critic_of(request, policy), scorers_of(request, policy)
    rows = policy.micro_batch(request) if passes else ()
    trained = rank_uses(policy, request, rows)
    trained += critic_uses(critic, request, rows) if critic is not None else []
    trained += average_uses(policy, request) if request.ema else []
    scoring = scorer_uses(scorers, request, rows)
    roles = {
        RANK: in_one_process([*trained, *(use for uses in scoring.values() for use in uses)], request),
        REPLICA: replica_uses(policy, request),
    }
    workers = {RANK: request.ranks, REPLICA: request.replica_workers}
    for role, frozen in frozen_of(request).items():
        roles[role], workers[role] = frozen_uses(role, frozen, request, rows), request.ranks
    there = fullest(workers, request.devices.gpus)
    kept = session_uses(policy, request, workers, critic)
    beside = [use for role, uses in roles.items() for use in times(uses, workers[role]) if use.host]
    device = [use for role, uses in roles.items() for use in times(uses, there[role]) if not use.host]
    if request.devices.gpus:
        device += device_processes(request, sum(there.values()))
        host = [*beside, *kept]
    else:
        device, host = [*device, *beside, *kept], []
    drop = lambda uses: tuple(use for use in uses if use.most)  # noqa: E731
    notes, problems = _remarks(request, policy, rows)
    if request.of_trainer and rows:
        notes = (*_trainer_remarks(request, critic, scorers, rows, roles[RANK]), *notes)
    return Plan(request, policy.parameters, policy.trained, drop(device), drop(host), rows, notes, problems)


def times(uses: Iterable[Use], count: int) -> list[Use]:
    """The same of so many workers."""
    return [replace(use, phases={phase: count * n for phase, n in use.phases.items()}) for use in uses]


def fullest(workers: dict[str, int], gpus: int) -> Counter[str]:
    """Count the workers of each role on the GPU that holds most of them; all of them on a host without one. As sessions
    place them: an engine takes unused devices first, then the least shared."""
    if not gpus:
        return Counter(workers)
    devices = [Counter[str]() for _ in range(gpus)]
    for role, count in workers.items():
        for device in sorted(devices, key=lambda device: sum(device.values()))[:count]:
            device[role] += 1
    return max(devices, key=lambda device: (sum(device.values()), device[RANK]))


def _remarks(request: Request, policy: Any, rows: tuple[int, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the numbers stand on, and what would fail whatever the memory."""
    tokens = format_number(sum(rows))
    notes = []
    if rows:
        longest_row = f"the longest sequence {max(rows):,}; as it stands from the second step on"
        notes.append(f"micro-batches of {tokens} tokens, {longest_row}")
        if why := policy.cost(pass_plan(policy, request, rows, backward=True)).estimated:
            notes.append(f"activations are an estimate: {why}")
    problems = _cache_remarks(request, policy, notes) if request.replica_workers else []
    if policy.sees and rows:
        notes.append(_picture_remark(request, policy, rows))
    notes.append(
        "tensors are exact to a few percent; CUDA contexts, what vLLM computes in, processes and the allocator's slack "
        "are estimates"
    )
    return tuple(notes), tuple(problems)


def _trainer_remarks(
    request: Request, critic: Any, scorers: Mapping[str, Any], rows: tuple[int, ...], uses: Sequence[Use]
) -> tuple[str, ...]:
    """Say which trainer the numbers are of."""
    count = sequences(rows)
    notes = [
        f'a trainer takes no token budget: these are the passes of session.trainer(…, packing=True, head="auto", '
        f"micro_train_batch_size={count}, micro_rollout_batch_size={count}); without packing padding counts as tokens",
        "the replicas sleep while the ranks score and train (enable_engine_sleep)",
    ]
    beside = {CRITIC: critic, **scorers} if critic is not None else scorers
    whole = {role: reward for role, reward in numbered(SCORER, request.rewards).items() if reward.whole}
    for role, model in beside.items():
        split = f", split over {request.data_ranks} ranks" if request.data_ranks > 1 else ""
        if role in whole:
            split = f", whole on each rank in {whole[role].dtype}; {whole[role].rows} completions at a time"
        notes.append(f"the {role} has {format_count(model.parameters)} parameters{split}")
        plan = pass_plan(model, request.alone if role in whole else request.beside, rows, backward=role == CRITIC)
        if why := model.cost(plan).estimated:
            notes.append(f"activations of the {role} are an estimate: {why}")
    if request.devices.gpus and len(scorers.keys() - whole.keys()) > 1:
        notes.append("reward models score one after the other, the others in host memory: the largest counts")
    if not request.devices.gpus:
        passing = next((use.role for use in uses if use.passing), RANK)
        notes.append(f"of the passes of a rank's process the largest counts, of the {passing}: it keeps what they free")
    return tuple(notes)


def _need_sight(request: Request, policy: Any) -> None:
    """Raise BuildError for pictures that no pass could have."""
    if not policy.sees:
        raise BuildError(f"images={request.images}: {request.path!r} is a model of text; plan it without images=")
    if request.train.sequence_parallel > 1:
        raise BuildError(f"images={request.images}: pictures are not split over ranks: rb.Train(sequence_parallel=1)")


def _picture_remark(request: Request, policy: Any, rows: tuple[int, ...]) -> str:
    """Say which pictures the numbers are of."""
    if request.images is None:
        return 'the weights of the tower are counted, and no pictures: images="1x448x448" is one in each sequence'
    shown = policy.grids(request, rows)
    each = policy.image_tokens(shown[:1])
    held = f"{len(shown):,} pictures in such a micro-batch, {each:,} tokens each"
    return f"{held}; what encodes them in a replica is an estimate"


def _cache_remarks(request: Request, policy: Any, notes: list[str]) -> list[str]:
    """Note what a replica's KV cache holds; return what vLLM would refuse."""
    gpu = request.devices.gpus > 0
    cache = sum(use.phases.get(SYNC, 0) for use in replica_uses(policy, request) if use.owner == "KV cache")
    most = longest(policy, request)
    length = request.longest or most
    if one := kv_bytes(policy, request, length):
        held = f"{format_number(cache / one)} sequences of {length:,} tokens"
        notes.append(f"the KV cache of a replica's worker holds {held}, {format_bytes(one)} each")
    problems = []
    if kv_bytes(policy, request, most) > cache:
        shorter = most
        while shorter > 16 and kv_bytes(policy, request, shorter) > cache:
            shorter //= 2
        problems.append(
            f"vLLM refuses a KV cache of {format_bytes(cache)} that cannot hold one sequence of {most:,} tokens: "
            f"inference=rb.Inference(max_model_len={shorter}) or less, or a larger "
            f"{'gpu_memory_utilization' if gpu else 'kv_cache_bytes'}"
        )
    return problems

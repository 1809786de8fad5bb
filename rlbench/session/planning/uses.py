"""Who holds how many bytes, where and in which phase: ranks, critics, reward models, replicas, references, and what a
session keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlbench.data.texts.media_features import MOST_CACHED
from rlbench.defaults import KV_BYTES
from rlbench.session.planning.model import Held, Model
from rlbench.session.planning.request import CRITIC, SCORER, PlannedReward, Request, numbered
from rlbench.session.state.step_copies import SPARE_BYTES
from rlbench.trainers.passes.cost import LOGITS, PassPlan
from rlbench.trainers.passes.images import patch_numbers
from rlbench.units import MIB
from rlbench.weights.staging import DEFAULT_BUCKET_BYTES, file_bytes

PHASES = ROLLOUT, SCORE, STEP, SYNC = ("rollout", "log-probs", "train step", "sync")
FIRST, REWARDS, VALUES, CRITIC_STEP = ("first rollout", "rewards", "values", "critic step")
ALL_PHASES = (FIRST, ROLLOUT, REWARDS, SCORE, VALUES, STEP, CRITIC_STEP, SYNC)
"""In their order; those of a critic and of reward models are of a plan that has such, see `phases_of`."""
RANK, REPLICA, SESSION = "train rank", "replica", "session"
JUDGED, TRAINED = {RANK: SCORE, CRITIC: VALUES}, {RANK: STEP, CRITIC: CRITIC_STEP}
"""When a rank's models are asked without gradients, and when they step: one after the other."""
HOST_RANK, HOST_REPLICA, HOST_SESSION = 250 * MIB, 350 * MIB, 750 * MIB
"""Private memory of processes that hold nothing yet; of a session: kernel, monitor, Ray and the warm process."""
CONTEXT = 500 * MIB
"""What CUDA and its libraries take of a GPU for each process."""
HOST_SLACK = 0.1
"""What workers' allocator (`rlbench.runtime.allocator`) holds beside tensors while a pass makes and frees them, as a
share of them, as measured by `benchmarks/plan.py`; and of what trains once more the largest gradient, a wide
vocabulary's, whose place smaller blocks take meanwhile."""
HOST_FIRST_PASS = 3 * MIB
"""What a first pass leaves there however small it is, as measured by the same."""
MOMENTS = 2
AVERAGE, AVERAGED_ITEM = "moving average", 4
"""Held in float32, whatever the policy is held in."""
BATCHED_TOKENS = 2048
SAMPLED_COPIES = 3
"""Float32 matrices (requests, vocabulary) that vLLM's sampler has at a time."""


@dataclass(frozen=True)
class Use:
    """Bytes of one owner in each phase. `sure`: nothing but the options decides them, so a refusal may count on them;
    `step`: they are there for a step alone, not from the start; `passing`: they come and go with a pass."""

    role: str
    owner: str
    phases: Mapping[str, int]
    host: bool = False
    sure: bool = False
    step: bool = False
    passing: bool = False

    @property
    def most(self) -> int:
        """In the phase that takes most."""
        return max(self.phases.values(), default=0)


def always(nbytes: float) -> dict[str, int]:
    """The same in every phase."""
    return dict.fromkeys(ALL_PHASES, round(nbytes))


def only(nbytes: float, *phases: str) -> dict[str, int]:
    """In some phases alone."""
    return dict.fromkeys(phases, round(nbytes))


def but(nbytes: float, *phases: str) -> dict[str, int]:
    """In all phases except some."""
    return only(nbytes, *(phase for phase in ALL_PHASES if phase not in phases))


def phases_of(request: Request) -> tuple[str, ...]:
    """Return the phases that a plan has, in their order.

    A trainer's reward models are on a GPU from when they are made until they have scored: the first rollout is a phase
    of its own then, in which nothing has stepped yet.
    """
    absent = set() if request.critic is not None else {VALUES, CRITIC_STEP}
    absent |= set() if request.rewards else {REWARDS}
    absent |= set() if request.rewards and request.devices.gpus else {FIRST}
    return tuple(phase for phase in ALL_PHASES if phase not in absent)


def rank_uses(model: Model, request: Request, rows: tuple[int, ...]) -> list[Use]:
    """One training rank, as the policy's."""
    uses = _trained_uses(RANK, model, request, rows)
    if request.devices.gpus:
        uses.append(Use(RANK, "sync buffers", only(_staged(model, request), SYNC)))
    return uses


def critic_uses(model: Model, request: Request, rows: tuple[int, ...]) -> list[Use]:
    """What a trainer's critic adds to such a rank."""
    return _trained_uses(CRITIC, model, request.beside, rows)


def _trained_uses(role: str, model: Model, request: Request, rows: tuple[int, ...]) -> list[Use]:
    """A model that trains. The critic steps after the policy's passes, whose gradients wait for it."""
    gpu, shards = request.devices.gpus > 0, request.shards
    away = gpu and request.train.fsdp_cpu_offload
    mixed = request.train.use_mp_opt
    weights = _bytes(model, shards, lambda held: held.item)
    gradients = _bytes(model, shards, lambda held: held.item * held.trains)
    moment = _bytes(model, shards, lambda held: (4 if mixed else held.item) * held.trains)
    optimizer = moment * (MOMENTS + mixed)
    state = but(optimizer, FIRST)
    sent: list[Use] = []
    if gpu and not away and "optimizer" in request.offload:
        state = only(optimizer, STEP, CRITIC_STEP)
        sent = [Use(role, "optimizer, offloaded", but(optimizer, FIRST, STEP, CRITIC_STEP), host=True)]
    waiting = (TRAINED[role], CRITIC_STEP)
    return [
        Use(role, "weights", always(weights), host=away, sure=True),
        Use(role, "gradients", only(gradients, *waiting), host=away, sure=True, step=True),
        Use(role, "optimizer", state, host=away, sure=True, step=True),
        *sent,
        *_passes(role, model, request, rows, JUDGED[role], TRAINED[role]),
        *_pixels(role, model, request, rows),
    ]


def average_uses(model: Model, request: Request) -> list[Use]:
    """What a trainer's moving average of the policy adds to such a rank: its weights in float32, over all ranks."""
    away = request.devices.gpus > 0 and request.train.fsdp_cpu_offload and not request.train.use_mp_opt
    nbytes = _bytes(model, request.beside.shards, lambda held: AVERAGED_ITEM)
    return [Use(RANK, AVERAGE, always(nbytes), host=away, sure=True)]


def frozen_uses(role: str, model: Model, request: Request, rows: tuple[int, ...]) -> list[Use]:
    """One rank of a frozen policy: the reference, or a teacher."""
    weights = _bytes(model, request.shards, lambda held: held.item)
    passes = _passes(role, model, request, rows, SCORE)
    return [Use(role, "weights", always(weights), sure=True), *passes, *_pixels(role, model, request, rows)]


def scorer_uses(models: Mapping[str, Model], request: Request, rows: tuple[int, ...]) -> dict[str, list[Use]]:
    """What a trainer's reward models add to a rank, by role. On a GPU each goes to host memory once it has scored, and
    then the next is brought in: the one that takes most counts while they score. One that a rank holds whole is loaded
    when it first scores, and stays where it is."""
    gpu, found = request.devices.gpus > 0, {}
    planned = numbered(SCORER, request.rewards)
    split = [role for role in models if not planned[role].whole]
    for role, model in models.items():
        if role not in split:
            found[role] = _whole_scorer(role, planned[role], model, request, rows)
            continue
        weights = _bytes(model, request.beside.shards, lambda held: held.item)
        found[role] = [
            Use(role, "weights", only(weights, FIRST, REWARDS) if gpu else always(weights), sure=True),
            *_scoring(role, model, request.beside, padded(rows)),
        ]
    here = {role: sum(use.phases.get(REWARDS, 0) for use in found[role] if not use.host) for role in split}
    for role in split if gpu else ():
        uses = found[role]
        scoring = role == max(here, key=lambda one: here[one])
        if not scoring:
            uses[:] = [use if use.host else _without(use, REWARDS) for use in uses]
        sent = but(uses[0].most, FIRST, REWARDS) if scoring else but(uses[0].most, FIRST)
        uses.insert(1, Use(role, "weights, offloaded", sent, host=True))
    return found


def _whole_scorer(
    role: str, planned: PlannedReward, model: Model, request: Request, rows: tuple[int, ...]
) -> list[Use]:
    """What `rb.rewards.model` adds to each rank."""
    gpu = request.devices.gpus > 0
    weights = _bytes(model, 1, lambda held: held.item)
    scoring = _scoring(role, model, request.alone, (max(rows),) * planned.rows if rows else ())
    uses = [Use(role, "weights", but(weights, FIRST) if gpu else always(weights), sure=True), *scoring]
    return [replace(use, host=planned.on_host and gpu) for use in uses]


def padded(rows: tuple[int, ...]) -> tuple[int, ...]:
    """Return as many rows as long as the longest as have so many tokens."""
    return (max(rows),) * sequences(rows) if rows else ()


def _scoring(role: str, model: Model, request: Request, rows: tuple[int, ...]) -> list[Use]:
    """What it takes to score rows of one length: padded, under a mask with a byte for each two tokens of a row, which
    transformers makes where lengths differ."""
    if not rows:
        return []
    mask = len(rows) * max(rows) ** 2
    kept = always(mask) if not request.devices.gpus else only(mask, REWARDS)
    uses = _passes(role, model, request, rows, REWARDS)
    return [*uses, Use(role, "attention mask", kept, passing=True), *_pixels(role, model, request, rows)]


def sequences(rows: tuple[int, ...]) -> int:
    """Return how many rows as long as the longest have so many tokens."""
    return max(1, sum(rows) // max(rows))


def _without(use: Use, phase: str) -> Use:
    return replace(use, phases={name: nbytes for name, nbytes in use.phases.items() if name != phase})


def in_one_process(uses: Sequence[Use], request: Request) -> list[Use]:
    """Return the uses of models that a rank's process runs one after the other. On a host what one pass has freed stays
    with the process, and the next takes it: the largest pass alone counts."""
    if request.devices.gpus:
        return list(uses)
    passing = Counter[str]()
    for use in uses:
        passing[use.role] += use.most * use.passing
    (largest, _), *_ = passing.most_common(1)
    return [use for use in uses if not use.passing or use.role == largest]


def replica_uses(model: Model, request: Request) -> list[Use]:
    """One worker of a replica. vLLM takes its share of a GPU whole: what weights and activations leave is KV cache."""
    options, config, gpu = request.inference, model.config, request.devices.gpus > 0
    wide = options.tensor_parallel_size
    dtype = {"float32": 4, "bfloat16": 2, "float16": 2}.get(options.dtype, model.compute_item)
    weights = (model.parameters - model.adapters) * dtype / wide  # adapters come merged, or lie in slots of their own
    slots = options.adapters * dtype * model.adapters / (request.train.lora.rank if request.train.lora else 1)
    slots *= options.adapter_rank / wide
    sure = not options.engine_kwargs  # vLLM may be told there to hold its weights otherwise
    tokens = int(
        options.engine_kwargs.get("max_num_batched_tokens", max(BATCHED_TOKENS, 0 if gpu else longest(model, request)))
    )
    hidden, inner = int(config.hidden_size), int(getattr(config, "intermediate_size", 0) or 4 * config.hidden_size)
    encoded, cache = encoder_bytes(model, request, tokens, dtype)
    states = max(tokens * (4 * hidden + 3 * inner / wide) * dtype, encoded)  # pictures first, then the tokens
    logits = SAMPLED_COPIES * 4 * options.max_num_seqs * int(config.vocab_size)
    kv = float(options.kv_cache_bytes or KV_BYTES)
    if gpu and options.kv_cache_bytes is None:
        kv = max(
            0.0,
            options.gpu_memory_utilization * request.devices.nbytes
            - (weights + slots + states + cache + logits + CONTEXT),
        )
    here = (FIRST, ROLLOUT, SYNC) if "inference" in request.away else ALL_PHASES
    gone = [phase for phase in ALL_PHASES if phase not in here]
    uses = [
        Use(REPLICA, "weights", only(weights, *(here if gpu else ALL_PHASES)), sure=sure),
        Use(REPLICA, "adapters", only(slots, *(here if gpu else ALL_PHASES))),
        Use(REPLICA, "KV cache", only(kv, *here), sure=sure),
        Use(REPLICA, "activations", only(states, *(here if gpu else ALL_PHASES))),
        Use(REPLICA, "encoded pictures", only(cache, *(here if gpu else ALL_PHASES))),
        Use(REPLICA, LOGITS, only(logits, *(here if gpu else ALL_PHASES))),
    ]
    if gpu and gone:
        uses.append(Use(REPLICA, "weights, offloaded", only(weights, *gone), host=True))
    return uses


def encoder_bytes(model: Model, request: Request, tokens: int, item: int) -> tuple[float, float]:
    """Return what a replica's tower takes to encode as many pictures as `tokens` are for, which vLLM schedules at a
    time, one at least, and what it keeps of them: their tokens' inputs, `item` bytes a number."""
    if request.images is None or not model.sees:
        return 0.0, 0.0
    grid = request.images.grid(model.source)
    each = model.image_tokens((grid,))
    most = max(1, min(tokens // each, request.images.count * request.inference.max_num_seqs))
    vision = model.module.config.vision_config
    deep = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    kept = most * each * int(model.config.hidden_size) * (1 + deep) * item
    return float(model.tower_peak((grid,) * most)) * item / model.compute_item, float(kept)


def longest(model: Model, request: Request) -> int:
    """Tokens of the longest sequence a replica has to hold."""
    return request.inference.max_model_len or int(getattr(model.config, "max_position_embeddings", 0) or 0)


def kv_bytes(model: Model, request: Request, tokens: int) -> int:
    """Bytes that one sequence takes of a worker's KV cache, over all layers: those with a window hold that at most,
    those without attention nothing."""
    config, options = model.config, request.inference
    item = {"float32": 4, "bfloat16": 2, "float16": 2}.get(options.dtype, model.compute_item)
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * int(config.num_hidden_layers))
    window = int(getattr(config, "sliding_window", None) or tokens)
    full, windowed = (sum(word in kind for kind in kinds) for word in ("full", "sliding"))
    held = full * tokens + windowed * min(tokens, window)
    if latent := getattr(config, "kv_lora_rank", None):
        return held * (int(latent) + int(getattr(config, "qk_rope_head_dim", 0))) * item
    heads = int(getattr(config, "num_attention_heads", 1))
    width = int(getattr(config, "head_dim", 0) or config.hidden_size // heads)
    kept = int(getattr(config, "num_key_value_heads", None) or heads)
    return 2 * held * width * item * max(1, kept // options.tensor_parallel_size)


def device_processes(request: Request, processes: int) -> list[Use]:
    """What CUDA takes of a GPU for the processes on it."""
    return [Use(SESSION, "CUDA contexts", always(CONTEXT * processes))] if request.devices.gpus else []


def session_uses(model: Model, request: Request, workers: Mapping[str, int], critic: Model | None = None) -> list[Use]:
    """What a session keeps in host memory, once: copies of its steps, weights on their way, and its processes."""
    copy = sum(_copied(one, request) for one in (model, critic) if one is not None)
    copy += _bytes(model, 1, lambda held: AVERAGED_ITEM * request.ema)
    # a spare one that is larger is kept only out of what is free, four times over
    kept = request.undo + 1 + (copy <= SPARE_BYTES) if request.undo else 0
    replicas = workers[REPLICA]
    processes = HOST_SESSION + replicas * HOST_REPLICA + (sum(workers.values()) - replicas) * HOST_RANK
    sizes, delta = _sent(model, request), request.inference.delta and replicas > 0
    ends = 1 + replicas if delta else 0  # the sending rank and all workers: each has copies, on a host a bucket too
    files = 0 if request.devices.gpus or not replicas or delta else _files(sizes)
    if delta and not request.devices.gpus:
        files = ends * round(min(sum(sizes), DEFAULT_BUCKET_BYTES))
    uses = {f"undo, {kept} copies": kept * copy, "sync buffers": files, "processes": processes}
    if delta:
        uses["weights sent last"] = ends * round(sum(sizes))
    return [Use(SESSION, owner, always(nbytes), host=True) for owner, nbytes in uses.items()]


def _copied(model: Model, request: Request) -> int:
    """Bytes of one copy of a model that trains, with its optimizer."""
    mixed = request.train.use_mp_opt
    trained = _bytes(model, 1, lambda held: held.item * (held.trains or not model.adapters))
    return trained + (MOMENTS + mixed) * _bytes(model, 1, lambda held: (4 if mixed else held.item) * held.trains)


def pass_plan(model: Model, request: Request, rows: tuple[int, ...], backward: bool) -> PassPlan:
    """How a rank runs such a micro-batch."""
    gpu, reshard = request.devices.gpus > 0, request.train.reshard_after_forward
    whole = request.shards == 1 and not (gpu and request.train.fsdp_cpu_offload)
    cast = frozenset(held.trains for held in model.held if held.split and held.item != model.compute_item)
    copied = cast if whole else frozenset({True, False})
    grids, scalar = model.grids(request, rows), model.scalar
    return PassPlan(rows, backward, request.shards, gpu, reshard, copied, not whole, grids, scalar)


def _passes(
    role: str, model: Model, request: Request, rows: tuple[int, ...], judged: str, trained: str | None = None
) -> list[Use]:
    """What passes over such rows take at their highest, in the phases in which a model is asked, and trains; on a host
    their memory stays with the process, whose allocator keeps it."""
    if not rows:
        return []
    costs = {judged: model.cost(pass_plan(model, request, rows, backward=False)).owners}
    if trained is not None:
        costs[trained] = model.cost(pass_plan(model, request, rows, backward=True)).owners
    if not request.devices.gpus:
        largest = max(costs.values(), key=lambda owners: sum(owners.values()))
        gradient = max((held.local(1) * held.item for held in model.held if held.trains), default=0)
        slack = {"allocator": HOST_FIRST_PASS + round(HOST_SLACK * sum(largest.values())) + gradient}
        costs = {phase: {**largest, **slack} for phase in ALL_PHASES}
    owners = sorted({owner for found in costs.values() for owner in found})
    phases = {owner: {phase: found.get(owner, 0) for phase, found in costs.items()} for owner in owners}
    return [Use(role, owner, phases[owner], passing=True) for owner in owners]


def _pixels(role: str, model: Model, request: Request, rows: tuple[int, ...]) -> list[Use]:
    """What a rank keeps in host memory of the pictures of its rows, all of them different, for the passes that follow:
    float32 patches."""
    grids = model.grids(request, rows)
    if not grids:
        return []
    nbytes = 4 * patch_numbers(model.module) * sum(frames * high * wide for frames, high, wide in grids)
    return [Use(role, "pixels", always(min(MOST_CACHED, nbytes)), host=request.devices.gpus > 0)]


def _sent(model: Model, request: Request) -> list[float]:
    """Bytes of each tensor of a sync: of the adapters alone where the replicas hold such, else of the whole policy."""
    if model.adapters and request.inference.adapters:
        return [held.local(1) * held.item for held in model.held if held.trains]
    whole = [held.local(1) * held.item for held in model.held if held.split and not (model.adapters and held.trains)]
    return [*whole, *(size * model.compute_item for size in model.quantised)]


def _staged(model: Model, request: Request) -> float:
    """What a GPU holds while its weights are sent: all of them where its rank exports them to a replica beside it,
    until that has applied them; else two buckets."""
    sizes = _sent(model, request)
    gathered = max(sizes) if request.shards > 1 else 0
    beside = not request.inference.delta and request.ranks >= min(request.devices.gpus, request.replica_workers)
    return gathered + (sum(sizes) if beside else min(sum(sizes), 2 * DEFAULT_BUCKET_BYTES))


def _files(sizes: list[float]) -> int:
    """Bytes of the files that `ShmStage` writes tensors of these sizes to."""
    total = size = filled = 0
    for nbytes in map(int, sizes):
        if filled and filled + nbytes > DEFAULT_BUCKET_BYTES:
            total, size, filled = total + size, 0, 0
        filled += nbytes
        if filled > size:
            size = file_bytes(filled, DEFAULT_BUCKET_BYTES)
    return total + size


def _bytes(model: Model, shards: int, item: Any) -> int:
    each: list[Held] = list(model.held)
    return round(sum(held.part(shards) * item(held) for held in each))

"""The engines of a session, from its options: which exist, which options each reads, how they are placed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from rlbench.dispatch.chain import Chain
from rlbench.dispatch.link import Link
from rlbench.engines import InferenceEngine, TrainEngine
from rlbench.engines.base import Engine
from rlbench.engines.sync import agreement_steps
from rlbench.errors import SessionError
from rlbench.runtime import cluster
from rlbench.runtime.starting import say
from rlbench.session.options import SessionOptions, checked
from rlbench.trainers.policy_spec import PolicySpec, check_causal
from rlbench.workers.replica_config import ReplicaConfig
from rlbench.workers.train_config import TrainConfig

SIZES = {"tensor_parallel_size", "data_parallel_size"}
POLICY = {f.name for f in dataclasses.fields(PolicySpec)} - {"path", "trainable", "revision"}
# what the policy verbs read of a rank's options: accumulation and offload options are those of a user's own methods
RANK = {f.name for f in dataclasses.fields(TrainConfig)} - {
    "shard_size",
    "seed",
    "max_norm",
    "micro_train_batch_size",
    "train_batch_size",
    "adam_offload",
}
CONTRADICTIONS = (("use_mp_opt", "bf16"), ("use_mp_opt", "masters"), ("fsdp_cpu_offload", "masters"))
"""Options of the ranks that act on a module held for training, or in half precision, alone."""
REPLICA = {f.name for f in dataclasses.fields(ReplicaConfig)} - {"path", "seed", "tensor_parallel_size"}


def check_options(
    train: Mapping[str, Any] | None, inference: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both engines' options, refused where nobody would read them."""
    found = checked("train", train, SIZES | POLICY | RANK)
    for name, other in CONTRADICTIONS:
        if found.get(name) and found.get(other) is False:
            raise SessionError(f"train: {name} has no effect with {other}=False; leave one of them out")
    return found, checked("inference", inference, SIZES | REPLICA)


def check_models(*paths: str | None) -> None:
    """Refuse folders of what is no causal language model, before anything is started for them. BuildError."""
    for path in paths:
        if path is not None and (config := Path(path) / "config.json").is_file():
            held = json.loads(config.read_text())
            check_causal(path, held.get("architectures") or (), str(held.get("model_type")))


def plans(options: SessionOptions, link: Link) -> dict[str, Callable[[], Engine]]:
    """What builds each engine, by role; they may run at the same time."""
    found: dict[str, Callable[[], Engine]] = {
        "actor": partial(_policy, "actor", options.path, options.train, True, options.seed, link),
        "inference": partial(_inference, options, link),
    }
    if options.reference is not None:
        found["reference"] = partial(_policy, "reference", options.reference, options.train, False, options.seed, link)
    return found


def check_agreement(engines: Mapping[str, Engine]) -> None:
    """Refuse a model that trainer and replica do not compute alike, before anything is done with it.

    Raises:
        BuildError: with what differs.
    """
    train, infer = cast(TrainEngine, engines["actor"]), cast(InferenceEngine, engines["inference"])
    Chain("comparing the engines", agreement_steps(train, infer)).result()


def _policy(role: str, path: str, given: dict[str, Any], trainable: bool, seed: int, link: Link) -> Engine:
    spec = PolicySpec(path, trainable, **{k: v for k, v in given.items() if k in POLICY})
    engine = TrainEngine(spec, name=role, link=link, seed=seed, **{k: v for k, v in given.items() if k in RANK})
    sizes = _train_sizes(given)
    return engine.build(
        tensor_parallel_size=sizes["tensor_parallel_size"], data_parallel_size=sizes["data_parallel_size"]
    )


def _train_sizes(given: dict[str, Any]) -> dict[str, int]:
    """All GPUs, sharded; on a host without, one rank with all cores, which is faster than two with half of them."""
    sizes = {k: v for k, v in given.items() if k in SIZES}
    if not sizes:
        return {"tensor_parallel_size": max(1, cluster.current().gpus), "data_parallel_size": 1}
    return {"tensor_parallel_size": 1, "data_parallel_size": 1} | sizes


def _inference(options: SessionOptions, link: Link) -> Engine:
    say("inference", "reading the model's config")
    given = dict(options.inference)
    sizes = {k: given.pop(k) for k in list(given) if k in SIZES}
    given.setdefault("dtype", _trainer_dtype(options))
    engine = InferenceEngine(options.path, seed=options.seed, link=link, **given)
    return engine.build(**sizes)


def _trainer_dtype(options: SessionOptions) -> str:
    """What the trainer computes in, as far as its options say it; else what a replica chooses by itself, which is the
    same."""
    given = options.train
    if given.get("bf16") is not None:
        return "bfloat16" if given["bf16"] else "float32"
    if given.get("use_mp_opt") or cluster.current().gpus:
        return "bfloat16"
    if given.get("dtype") is not None:
        return "bfloat16" if str(given["dtype"]).endswith("bfloat16") else "float32"
    return "auto"

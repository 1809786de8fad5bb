"""The engines of a session, from its options: which exist, which options each reads, how they are placed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import cast

from rlbench.dispatch.chain import Chain
from rlbench.dispatch.link import Link
from rlbench.engines import InferenceEngine, TrainEngine
from rlbench.engines.base import Engine
from rlbench.engines.sync import agreement_steps
from rlbench.runtime import cluster
from rlbench.runtime.starting import say
from rlbench.session.options import SessionOptions, Train
from rlbench.trainers.models.policy_spec import OptimizerOptions, PolicySpec, check_causal
from rlbench.workers.replica.config import ReplicaOptions
from rlbench.workers.train.config import RankOptions


def check_models(*paths: str | None) -> None:
    """Refuse folders of what is no causal language model, before anything is started for them. BuildError."""
    for path in paths:
        if path is not None and (config := Path(path) / "config.json").is_file():
            held = json.loads(config.read_text())
            check_causal(path, held.get("architectures") or (), str(held.get("model_type")))


def plans(options: SessionOptions, link: Link) -> dict[str, Callable[[], Engine]]:
    """Return what builds each engine, by role; they may run at the same time."""
    roles: dict[str, Callable[[], Engine]] = {
        "actor": partial(_policy, "actor", options.path, options.train, True, options.seed, link),
        "inference": partial(_inference, options, link),
    }
    if options.reference is not None:
        roles["reference"] = partial(_policy, "reference", options.reference, options.train, False, options.seed, link)
    return roles


def check_agreement(engines: Mapping[str, Engine]) -> None:
    """Refuse a model that trainer and replica do not compute alike, before anything is done with it.

    Raises:
        BuildError: with what differs.
    """
    train, infer = cast(TrainEngine, engines["actor"]), cast(InferenceEngine, engines["inference"])
    Chain("comparing the engines", agreement_steps(train, infer)).result()


def _policy(role: str, path: str, train: Train, trainable: bool, seed: int, link: Link) -> Engine:
    spec = PolicySpec(path, trainable, **train.only(OptimizerOptions))
    engine = TrainEngine(spec, name=role, link=link, seed=seed, **train.only(RankOptions))
    return engine.build(tensor_parallel_size=_shards(train), data_parallel_size=train.data_parallel_size)


def _shards(train: Train) -> int:
    """All GPUs; on a host without, one rank with all cores, which is faster than two with half of them."""
    if train.shards is None and train.data_parallel_size == 1:
        return max(1, cluster.current().gpus)
    return train.shards or 1


def _inference(options: SessionOptions, link: Link) -> Engine:
    say("inference", "reading the model's config")
    given = {"dtype": _trainer_dtype(options.train), **options.inference.only(ReplicaOptions)}
    tp_size, chosen = given.pop("tensor_parallel_size", 1), options.inference
    engine = InferenceEngine(options.path, seed=options.seed, link=link, **given)
    return engine.build(tensor_parallel_size=tp_size, data_parallel_size=chosen.data_parallel_size)


def _trainer_dtype(train: Train) -> str:
    """Return what the trainer computes in, as far as its options say it; else what a replica chooses by itself, which
    is the same."""
    if train.bf16 is not None:
        return "bfloat16" if train.bf16 else "float32"
    if train.use_mp_opt or cluster.current().gpus:
        return "bfloat16"
    if train.dtype is not None:
        return "bfloat16" if train.dtype == "bfloat16" else "float32"
    return "auto"

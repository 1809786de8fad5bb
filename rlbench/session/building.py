"""The engines of a session, from its options: which exist, which options each reads, how they are placed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlbench.data.base.routing import check_family
from rlbench.dispatch.link import Link
from rlbench.engines import InferenceEngine, TrainEngine
from rlbench.engines.base import Engine
from rlbench.engines.placement import SPREAD, device_count
from rlbench.errors import BuildError
from rlbench.runtime import cluster
from rlbench.runtime.starting import say
from rlbench.session.options import POLICY, REWARD, SessionOptions, Train
from rlbench.trainers.models.policy_spec import (
    OptimizerOptions,
    PolicySpec,
    RewardSpec,
    check_causal,
    check_unquantised,
)
from rlbench.workers.replica.config import ReplicaOptions
from rlbench.workers.train.config import RankOptions


def check_models(*paths: str | None, classifiers: bool = False) -> None:
    """Refuse folders of what is no causal language model, before anything is started for them; `classifiers`: a
    sequence classifier over one will do as well."""
    for path in paths:
        if path is not None and (config := Path(path) / "config.json").is_file():
            held = json.loads(config.read_text())
            check_causal(path, held.get("architectures") or (), str(held.get("model_type")), classifiers)
            check_unquantised(path, held.get("quantization_config"))


def check_routing(options: SessionOptions) -> None:
    """Refuse a model whose routers cannot be given experts, where that is asked for, before anything is started."""
    config = Path(options.path) / "config.json"
    if options.inference.return_routed_experts and config.is_file():
        option = "router_replay" if options.train.router_replay else "return_routed_experts"
        check_family(option, options.path, str(json.loads(config.read_text()).get("model_type")))


def on_what_is_left(options: SessionOptions) -> SessionOptions:
    """Return the options without the nodes that were named and have left the cluster; where none is left, any will
    do."""
    there = {*cluster.node_devices(), *SPREAD}
    train, inference = (
        tuple(node for node in one.nodes if node in there) for one in (options.train, options.inference)
    )
    return replace(
        options, train=replace(options.train, nodes=train), inference=replace(options.inference, nodes=inference)
    )


def need_devices(options: SessionOptions) -> None:
    """Refuse sizes for which the cluster, or the nodes that are named, have too few devices."""
    train, inference = options.train, options.inference
    ranks = (train.shards or 1) * train.tensor_parallel * train.data_parallel_size  # -1: what there is
    replicas = inference.data_parallel_size
    wanted = {"train": (ranks, train.nodes), "inference": (replicas * inference.tensor_parallel_size, inference.nodes)}
    for name, (count, nodes) in wanted.items():
        if count > (there := device_count(nodes)):
            raise BuildError(
                f"{name} wants {count} devices, and there are {there}: session.resize({name}=…) goes on with fewer; or "
                "add nodes"
            )


def plans(options: SessionOptions, link: Link) -> dict[str, Callable[[], Engine]]:
    """Return what builds each engine, by role; they may run at the same time."""
    roles: dict[str, Callable[[], Engine]] = {"actor": partial(_policy, "actor", options.path, options, link)}
    if options.kind == POLICY:
        roles["inference"] = partial(_inference, options, link)
    if options.reference is not None and not options.base_is_reference:
        roles["reference"] = partial(_policy, "reference", options.reference, options, link)
    return roles | {name: partial(_policy, name, path, options, link) for name, path in options.teachers.items()}


def _policy(role: str, path: str, options: SessionOptions, link: Link) -> Engine:
    train = options.train
    spec = PolicySpec(path, role == "actor", **train.only(OptimizerOptions))
    if options.kind == REWARD:
        read: dict[str, Any] = {"pooling": options.pooling, "probing_layer": options.probing_layer}
        spec = RewardSpec(path, head_seed=options.seed, heads=options.heads, **read, **train.only(OptimizerOptions))
    chosen = train.only(RankOptions)
    if role != "actor":
        chosen.pop("router_replay", None)  # a reference, or a teacher, routes by itself
    engine = TrainEngine(spec, name=role, link=link, seed=options.seed, **chosen)
    shards = train.shards or 1
    if train.shards is None and train.data_parallel_size == 1:  # without a GPU one rank is faster than two
        gpus = device_count(train.nodes) if cluster.current().gpus else 0
        shards = max(1, gpus // train.tensor_parallel)
    return engine.build(tensor_parallel_size=shards, data_parallel_size=train.data_parallel_size, nodes=train.nodes)


def _inference(options: SessionOptions, link: Link) -> Engine:
    say("inference", "reading the model's config")
    engine = InferenceEngine(
        options.path, options.inference.executor, seed=options.seed, link=link, **replica_config(options)
    )
    return engine.build(
        tensor_parallel_size=options.inference.tensor_parallel_size,
        data_parallel_size=options.inference.data_parallel_size,
        nodes=options.inference.nodes,
    )


def replica_config(options: SessionOptions) -> dict[str, Any]:
    """Return fields of `ReplicaConfig` that a session's replicas are built with, but for their sizes."""
    rank = {} if options.train.lora is None else {"adapter_rank": options.train.lora.rank}
    chosen = {"dtype": _trainer_dtype(options.train), **rank, **options.inference.only(ReplicaOptions)}
    return {name: value for name, value in chosen.items() if name != "tensor_parallel_size"}


def _trainer_dtype(train: Train) -> str:
    """Return what the trainer computes in, as far as its options say it; else a replica chooses the same by itself."""
    if train.fp16:
        return "float16"
    if train.bf16 is not None:
        half = train.bf16
    elif train.use_mp_opt:
        half = True
    elif train.dtype is None or cluster.current().gpus:  # of GPUs it knows best which it got
        return "auto"
    else:
        half = train.dtype == "bfloat16"
    return "bfloat16" if half else "float32"

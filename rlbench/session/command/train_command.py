"""`rlbench train METHOD [FILE.yaml] [--option value …]`: a session, its trainer, and iterations until the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from rlbench.data import Mixture, PromptStream, TrainBatch
from rlbench.errors import Stopped
from rlbench.options import OptionError
from rlbench.runtime import cluster
from rlbench.session.command import modelscope, run_data
from rlbench.session.options import Inference, Train
from rlbench.session.reward_model import RewardModel
from rlbench.session.session import Session
from rlbench.session.training import trainer_places
from rlbench.session.training.session_trainer import SessionTrainer, iterations_of
from rlbench.strategies.options.config import ROW_SHARING
from rlbench.trainers.models.lora import Lora
from rlbench.trainers.options.methods import REWARD
from rlbench.trainers.options.run_config import RunConfig, parse
from rlbench.trainers.options.specs import OF_THE_CRITIC

STOPPED = 130
OF_THE_SESSION = (
    *("bf16", "fp16", "fsdp", "gpu_memory_utilization", "engine_tp_size", "lr"),
    "limit_mm_image_per_prompt",
)
"""Options of the strategy that the session is made with."""


def train(arguments: Sequence[str]) -> int:
    """Run to the end, or until it is stopped; returns the exit status."""
    config = parse(arguments)
    print(config.summary(), flush=True)
    config = modelscope.fetched(config)
    try:
        data = run_data.data_of(config) if config.on_texts else run_data.prompts_of(config)
        wanted = iterations(config, data)
        given = trainer_arguments(config, data, wanted)
        wide = (config.run.shards or 1) * config.strategy.tensor_parallel
        with cluster.init(devices=wide if config.run.shards or wide > 1 else None) as joined:
            with _opened(config, session_options(config, on_gpu=joined.gpus > 0)) as session:
                config.check_batches(session.train.world_size)
                tracked(session, config)
                if patterns := frozen(config):
                    session.freeze(*patterns)
                return run(session.trainer(**given), config, wanted)
    except (Stopped, KeyboardInterrupt):
        print("stopped before the first iteration", flush=True)
        return STOPPED


def _opened(config: RunConfig, options: dict[str, Any]) -> Session | RewardModel:
    """Start the session of a run, or the reward model it trains."""
    if config.method != REWARD:
        return Session(**options)
    return RewardModel(**{name: given for name, given in options.items() if name != "inference"})


def tracked(session: Session | RewardModel, config: RunConfig) -> None:
    """Start the trackers of a run."""
    run = config.run
    for name in run.trackers:
        if name != "wandb":
            session.track(name)
            continue
        if isinstance(run.use_wandb, str):
            _log_in(run.use_wandb)
        given = {"entity": run.wandb_org, "group": run.wandb_group, "name": run.wandb_run_name}
        known: dict[str, Any] = {option: value for option, value in given.items() if value is not None}
        session.track(name, run.wandb_project, **known)


def _log_in(key: str) -> None:
    try:
        import wandb  # type: ignore[import-not-found]
    except ImportError as missing:
        raise OptionError(f"use_wandb needs wandb, which is not installed ({missing}).") from missing
    wandb.login(key=key)


def run(trainer: SessionTrainer, config: RunConfig, wanted: int) -> int:
    """Iterate up to `wanted`, counted from the first of the run, each with its line; returns the exit status."""
    from rlbench.trainers.reports.trainer_log import line_of

    at = int(trainer.where()["iterations"])
    if at:
        print(f"going on after iteration {at}", flush=True)
    try:
        while at < wanted:
            metrics = trainer.step()
            at += 1
            if config.run.metrics_file is not None:
                file = Path(trainer_places.here(config.run.metrics_file))
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps({"iteration": at, **metrics}, default=float) + "\n")
            if at % config.ppo.logging_steps == 0:
                print(line_of(metrics, at, config.ppo.print_replay_buffer_stats), flush=True)
        trainer.finish()
    except (Stopped, KeyboardInterrupt):
        print(f"stopped after {at} of {wanted} iterations", flush=True)
        return STOPPED
    return 0


def iterations(config: RunConfig, prompts: PromptStream | Mixture | TrainBatch) -> int:
    """Return how many iterations the run has: `max_steps`, or as many as the episodes have; of both the fewer."""
    run = config.run
    if isinstance(prompts, Mixture):
        if run.max_steps is None or "num_episodes" in config.given:
            raise OptionError("max_steps: how many iterations? a mixture of prompts has no episode.")
        return run.max_steps
    if isinstance(prompts, TrainBatch):
        episodes = iterations_of(run.num_episodes, len(prompts.stream()), config.strategy.train_batch_size)
    else:
        episodes = max(1, run.num_episodes * len(prompts.prompts) // config.ppo.rollout_batch_size)
    if run.max_steps is None:
        return episodes
    return min(run.max_steps, episodes) if "num_episodes" in config.given else run.max_steps


def session_options(config: RunConfig, on_gpu: bool) -> dict[str, Any]:
    """Return the arguments of the run's `Session`; its engine has a share of the GPU's memory, or the host's free."""
    options, run = config.strategy, config.run
    same = ("lr", "betas", "weight_decay", "max_norm", "use_mp_opt", "fsdp_cpu_offload", *ROW_SHARING)
    policy: dict[str, Any] = {"shards": run.shards, **{name: getattr(options, name) for name in same}}
    if run.lora_rank:
        policy["lora"] = Lora(
            rank=run.lora_rank,
            alpha=run.lora_alpha,
            targets=run.lora_targets,
            dropout=run.lora_dropout,
            base=run.lora_base,
        )
    engine: dict[str, Any] = {"tensor_parallel_size": options.engine_tp_size, "data_parallel_size": run.replicas}
    engine |= {"executor": options.engine_type, "engine_kwargs": options.engine_kwargs}
    share = options.gpu_memory_utilization
    if run.kv_cache_bytes is not None:
        engine["kv_cache_bytes"] = run.kv_cache_bytes
    elif "gpu_memory_utilization" in config.given and not on_gpu:
        engine["kv_cache_bytes"] = int(share * psutil.virtual_memory().available / run.replicas)
    elif "gpu_memory_utilization" in config.given:
        engine["gpu_memory_utilization"] = share
    if options.fp16:
        policy["fp16"] = True  # the engine follows
    elif "bf16" in config.given:
        policy["bf16"] = options.bf16
        engine["dtype"] = "bfloat16" if options.bf16 else "float32"
    asked = {"pooling": run.pooling, "probing_layer": run.probing_layer}  # of a reward model alone
    head: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    head |= {"heads": run.heads} if run.heads else {}
    made = {"train": Train(**policy), "inference": Inference(**engine), "seed": options.seed}
    return {"model": run.pretrain, **made, **head}


def frozen(config: RunConfig) -> list[str]:
    """Return the patterns of `session.freeze` that the run begins with."""
    given = config.run.freeze_prefix
    if isinstance(given, bool):
        return ["*visual"] if given else []
    return [f"{one.strip()}*" for one in given.split(",") if one.strip()]


def trainer_arguments(config: RunConfig, prompts: PromptStream | Mixture | TrainBatch, wanted: int) -> dict[str, Any]:
    """Return the arguments of `session.trainer` for a run of `wanted` iterations on prompts, or texts."""
    options, ppo, run = config.strategy, config.ppo, config.run
    falls = run.lr_schedule == "cosine"
    if config.on_texts:
        idle = {*OF_THE_SESSION, *OF_THE_CRITIC, "logging_steps"}
        return {
            "method": config.method,
            "data": prompts,
            "eval_data": run_data.eval_data_of(config),
            "loss": run_data.loss_of(config),
            "schedule_steps": wanted if falls else None,
            **{name: value for name, value in config.trainer_options.items() if name not in idle},
        }
    # without a critic, which has its own, those of the optimizer act on the session's
    elsewhere = (*OF_THE_SESSION, *(OF_THE_CRITIC if options.advantage_estimator != "gae" else ()))
    chosen = {name: value for name, value in config.trainer_options.items() if name not in elsewhere}
    given = trainer_places.options_here(chosen)
    if isinstance(given.get("critic_pretrain"), str):
        given["critic_pretrain"] = trainer_places.model_here("critic_pretrain", given["critic_pretrain"])
    more: dict[str, Any] = {}
    if options.advantage_estimator == "gae" and "value_head_prefix" in config.given:
        more["value_head_prefix"] = run.value_head_prefix
    if run.reference_shard_size is not None:
        more["reference_shard_size"] = run.reference_shard_size
    arguments: dict[str, Any] = {}
    if options.remote_rm_url:
        urls = given.pop("remote_rm_url")
        arguments["remote_rm_url"] = [urls] if isinstance(urls, str) else urls
    if run.reward_fn is not None:
        arguments["reward_fn"] = run_data.imported(run.reward_fn, "reward_fn")
    texts = run_data.texts_of(config)
    if texts is not None:
        arguments["pretrain_prompts"] = texts
    sequences = ppo.rollout_batch_size * options.n * ppo.max_epochs
    steps = max(1, wanted * sequences // options.train_batch_size)
    return {
        "method": config.method,
        "prompts": prompts,
        "reward": run_data.reward_of(config),
        **({} if run.teacher is None else {"teacher": run.teacher}),
        "eval_prompts": run_data.eval_prompts_of(config),
        "ema": run.enable_ema,
        "schedule_steps": steps if falls else None,
        "loss": run_data.loss_of(config),
        "arguments": arguments,
        **more,
        **given,
    }

"""`InferenceEngine`: replicas that generate, and balance the work between themselves."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from rlbench.data import GenerateJob, Prompt, Rollouts, as_prompts
from rlbench.data.prompts.sampling import reshaped_by, reshaped_notes, sampling_options
from rlbench.data.prompts.seeds import request_seeds
from rlbench.data.rollouts.length_stats import length_stats
from rlbench.dispatch import views
from rlbench.dispatch.chain import Chain
from rlbench.dispatch.link import Link
from rlbench.dispatch.pending import Pending
from rlbench.engines.base import Call, Engine, cores, executor_of
from rlbench.engines.moved import Moved
from rlbench.engines.paths import check_model_path, model_name
from rlbench.engines.placement import network_environment, visible_gpus
from rlbench.engines.turns import failed_in_env, hook_env, split_options, tell_env_errors
from rlbench.envs.hook import Hook
from rlbench.errors import DataError, EngineError, Stopped
from rlbench.runtime import cluster
from rlbench.traces import user_stacklevel
from rlbench.weights.manifest import Manifest
from rlbench.weights.sync import commit_steps

BY_CALL = ("n", "seed")
"""Of the sampling options, those that say which samples a call draws, and how many."""
TARGETS = {"vllm": "rlbench.workers.replica.vllm:VllmReplica"}


class InferenceEngine(Engine):
    """Inference replicas of one model.

    Args:
        path: folder or hub id of the model, or an object whose `get_checkpoint_path()` says it.
        executor: `"vllm"`; RLite's names of it count.
        name: its role in the session.
        seed: session seed, from which request seeds derive.
        config: fields of `ReplicaConfig`: dtype, kv_cache_bytes, max_model_len, max_num_seqs, …
    """

    KIND = "inference"
    COLLECTIVE = False
    PARTS = ("weights", "kv_cache")

    def __init__(
        self,
        path: Any,
        executor: str = "vllm",
        *,
        name: str = "inference",
        seed: int = 0,
        link: Link | None = None,
        **config: Any,
    ) -> None:
        super().__init__(name, link)
        own = path.get_checkpoint_path() if hasattr(path, "get_checkpoint_path") else path
        self.path = model_name(own, "InferenceEngine")
        self.executor = executor_of(executor, TARGETS, "InferenceEngine")
        self.seed = seed
        self._config = config
        self._told: set[str] = set()

    @classmethod
    def attach(cls, link: Link, name: str, record: dict[str, Any], seed: int) -> InferenceEngine:
        """Hold the replicas of a session that is already there."""
        engine = cls(record["info"]["path"], record["info"]["executor"], name=name, seed=seed, link=link)
        engine._adopt(record)
        return engine

    def build(
        self,
        *,
        tensor_parallel_size: int = 1,
        data_parallel_size: int = -1,
        colocate_with: Engine | None = None,
        not_colocate_with: Engine | None = None,
        allow_colocate: bool = True,
        pipeline_parallel_size: int = 1,
        ignore_rebuild_error: bool = False,
        **config: Any,
    ) -> InferenceEngine:
        """Start the replicas and load the model.

        Args:
            tensor_parallel_size: devices one replica is spread over.
            data_parallel_size: number of replicas; -1: as many as there are GPUs for, and one on a host without
                (replicas there would share the same cores).
            colocate_with, not_colocate_with: engines whose devices to share, or to leave alone.
            allow_colocate: False: devices that no engine of the session shares, now or later.
            pipeline_parallel_size: 1, there is no other.
            ignore_rebuild_error: True: where the engine is built already, nothing happens.
            config: fields of `ReplicaConfig`, in place of the constructor's.

        Raises:
            BuildError: a wrong path, built already, more devices than there are, vLLM missing, …
        """
        from rlbench.workers.replica.config import ReplicaConfig

        if self._stays_built(pipeline_parallel_size, ignore_rebuild_error):
            return self
        path = check_model_path(self.path)
        joined = cluster.current()
        replicas = data_parallel_size
        if replicas == -1:
            replicas = max(1, joined.gpus // max(1, tensor_parallel_size)) if joined.gpus else 1
        given = {"threads": max(1, cores() // replicas), "seed": self.seed} | self._config | config
        given |= {"path": path, "tensor_parallel_size": tensor_parallel_size}
        chosen = ReplicaConfig(**given)
        count = tensor_parallel_size * replicas
        devices = self._allot(count, colocate_with, not_colocate_with, not allow_colocate)
        with self._building():
            groups = [devices[i : i + tensor_parallel_size] for i in range(0, len(devices), tensor_parallel_size)]
            env = {"OMP_NUM_THREADS": str(chosen.threads), "OMP_WAIT_POLICY": "passive", **network_environment()}
            self._spawn(
                TARGETS[self.executor],
                lambda i: (chosen,),
                [group[0] for group in groups],
                [env | visible_gpus(group) for group in groups],
            )
            infos = self.call_all("build", what=f"{self.name}.build", observer=self._say_phase).result()
        self._info = infos[0] | {
            "path": self.path,
            "tokenizer": str(chosen.engine_kwargs.get("tokenizer") or path),
            "executor": self.executor,
            "tensor_parallel_size": tensor_parallel_size,
        }
        if self.link.state("paused")["paused"]:  # rebuilt in a session that is paused
            self.control("pause")
        self.link.engine(self.name, {"info": self._info, "methods": [], "state": self.status()})
        return self

    @property
    def labels(self) -> list[str]:
        return [f"replica {i}" for i in range(len(self._actors))]

    @property
    def tokenizer(self) -> str:
        """Folder or hub id of the replicas' tokenizer."""
        return str(self._info.get("tokenizer", self.path))

    def generate(
        self,
        prompts: Any,
        sampling: Any = None,
        *,
        n: int | None = None,
        progress: bool = True,
        env: Any = None,
        sampling_params: Any = None,
        post_generation_hook: Hook | None = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> Rollouts:
        """Generate completions; blocks, Ctrl-C raises `rb.Stopped` with the finished part.

        Args:
            prompts: texts, chats or token ids (see `rlbench.data.as_prompts`).
            sampling: sampling options by vLLM's names (`temperature`, `top_p`, `max_tokens`, `stop`, `ignore_eos`, …)
                or vLLM's `SamplingParams`; the same as keywords. `max_tokens` is 16 where not given, as in vLLM; None
                lets a completion fill the model's length. With `seed` a call draws the same samples each time.
            n: completions per prompt (default 1).
            progress, use_tqdm: show a progress bar with tokens/s; False of one of them: none.
            sampling_params: vLLM's and RLite's name of `sampling`.
            post_generation_hook: `rb.envs.from_hook` of it as `env`; it alone ends its samples.
            env: an `rb.envs.Env` that each sample meets turn by turn: a class, an instance (copied for each sample) or
                a function that makes one. Then `max_tokens` is per turn, and there are the options of
                `rlbench.engines.turns.TURN_OPTIONS`: `max_turns`, `max_total_tokens`, `env_timeout_s`.

        Returns:
            `Rollouts`, in prompt order.
        """
        if sampling is not None and sampling_params is not None:
            raise DataError("sampling and sampling_params are one option: give one of them")
        chosen = sampling_options(sampling if sampling_params is None else sampling_params) | options
        if post_generation_hook is not None:
            env, chosen = hook_env(post_generation_hook, env, chosen)
        pending = self.submit_generate(prompts, chosen, n=n, progress=progress and use_tqdm, env=env)
        result: Rollouts = pending.blocking_result()
        return result

    def submit_generate(
        self,
        prompts: Any,
        sampling: dict[str, Any],
        *,
        n: int | None = None,
        progress: bool = True,
        number: int | None = None,
        env: Any = None,
        seeds: np.ndarray | None = None,
    ) -> Pending:
        """Submit a generate call and return its `Pending`.

        `number` is the rollout's, from which its seeds derive where no `seeds` (prompts, n) int64 are given.
        """
        self._need_built("generate")
        asked: list[Prompt] = as_prompts(prompts)
        samples = _samples(n, sampling)
        seed = sampling.get("seed")
        turns, rest = split_options(env, {k: v for k, v in sampling.items() if k not in BY_CALL})
        if number != 0:
            self._tell_reshaped(rest)
        if number is None:
            number = self.link.next_rollout()
        replicas = len(self._actors)
        if seeds is None:
            drawn_by = (self.seed, number) if seed is None else (_whole("seed", seed), 0)
            seeds = request_seeds(*drawn_by, len(asked), samples)
        job = GenerateJob(
            [p.content for p in asked],
            samples,
            rest,
            seeds,
            shared=replicas > 1,
            number=number,
            asked=tuple(asked) if number or turns else (),
            env=turns,
        )
        view = views.make("generate", total=len(asked) * samples) if progress else None

        def finish(parts: list[Any]) -> Rollouts:
            merged = Rollouts.merge(asked, parts, rest, number, self.tokenizer)
            if view is not None:
                view.close(merged)
            if number:
                self.link.tell({"do": "lengths", "entry": length_stats(merged)})
            cut = merged.aborted & ~failed_in_env(merged)
            if merged.samples < len(asked) * samples or cut.any():
                raise Stopped(
                    f"rollout {number} stopped: {merged.samples - int(merged.aborted.sum())} of "
                    f"{len(asked) * samples} completions are finished",
                    merged,
                )
            tell_env_errors(merged)
            return merged

        return self.call_all(
            "generate",
            job,
            finish=finish,
            what=f"rollout {number}",
            observer=view,
            queue_total=len(asked) if replicas > 1 else 0,
            track=True,
        )

    def _tell_reshaped(self, sampling: dict[str, Any]) -> None:
        """Say once of each option that it makes the sampler's log-probs those of another distribution."""
        fresh = [option for option in reshaped_by(sampling) if option not in self._told]
        if fresh and sampling.get("temperature") != 0:
            self._told.update(fresh)
            refused = "Losses that weigh by the sampler's log-probs refuse them"
            warnings.warn(f"{reshaped_notes(tuple(fresh))[0]}. {refused}", UserWarning, stacklevel=user_stacklevel())

    def last_rollout(self) -> Rollouts | None:
        """The last rollout the replicas served, whole or stopped, also of an earlier kernel; None before the first."""
        found = [kept for kept in self.control("last_rollout") if kept is not None]
        if not found:
            return None
        number = max(job.number for job, _ in found)
        job = next(job for job, _ in found if job.number == number)
        parts = [arrays for other, arrays in found if other.number == number]
        return Rollouts.merge(list(job.asked), parts, job.sampling, number, self.tokenizer)

    def logprobs(self, token_ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Log-probs of given tokens: for each sequence a float32 array (length - 1,), of token t given those before."""
        found = self.call_all("prompt_logprobs", [list(map(int, row)) for row in token_ids]).result()
        return list(found[0])

    def p2p_weight_sync(self, to: Any, transport: str | None = None) -> NoReturn:
        """Refuse: replicas hold weights as their kernels want them, which nobody else can read."""
        raise EngineError(
            f"{self.name} is an InferenceEngine: it takes weights and gives none. Sync from the TrainEngine that has "
            f"them, train.p2p_weight_sync({getattr(to, 'name', 'engine')})"
        )

    def reload(self) -> Moved:
        """Load the weights again from the model's path, as version 0."""
        measured = self.call_all("reload").result()
        self.link.engine(self.name, {"state": self.status(), "proof": None})
        return Moved.of(self.name, self.PARTS, measured)

    def _after_state(self) -> None:
        """Once the KV cache is back, prove the weights that were synced without it."""
        record = self.link.state("engines")["engines"][self.name]
        proof = record.get("proof")
        status = self.status()
        if proof is not None and not status["pending"]:
            self.link.engine(self.name, {"proof": None})  # refused, torn, released or reloaded since: nothing to prove
            return
        if proof is None or status["weights"] != "cuda" or status["kv_cache"] != "cuda":
            return
        Chain("weight sync", commit_steps(self, proof)).result()

    def apply_each(self, manifests: Sequence[Manifest]) -> Iterator[Pending]:
        """Submit `apply_weights` to one replica after the other, each a call of its own with a manifest of its own."""
        for actor, label, manifest in zip(self._actors, self.labels, manifests, strict=True):
            calls: list[Call] = [((manifest,), {})]
            what = "weight sync: applying"
            yield self.link.submit(self.name, [label], [actor], "apply_weights", calls, list, what, collective=False)

    def weight_versions(self) -> list[int]:
        """The version each replica holds."""
        return [int(s["version"]) for s in self.control("status")]

    def __repr__(self) -> str:
        return f"InferenceEngine({self.name!r}, {self.executor}, {self.path!r}, {self.described()})"


def _whole(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise DataError(f"{name}={value!r}: wanted a whole number")
    return value


def _samples(n: int | None, sampling: dict[str, Any]) -> int:
    inside = sampling.get("n")
    if n is not None and inside is not None and n != inside:
        raise DataError(f"n={n}, but sampling says n={inside}: give it once")
    samples = n if n is not None else inside if inside is not None else 1
    if not isinstance(samples, int) or isinstance(samples, bool) or samples < 1:
        raise DataError(f"n={samples!r}: at least one completion per prompt is needed")
    return samples

"""`InferenceEngine`: replicas that generate, and balance the work between themselves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from rlbench.data import GenerateJob, Prompt, PromptSet, Rollouts, as_prompts
from rlbench.data.forking import Named
from rlbench.data.prompts.chat import split_chat
from rlbench.data.prompts.placing import media_of_rows
from rlbench.data.prompts.prompt import is_chat
from rlbench.data.prompts.sampling import request_seeds, sampling_options
from rlbench.data.record.origin import drawn_by
from rlbench.data.rollouts.decoding import decoder
from rlbench.data.rollouts.light import LightTokenizer
from rlbench.data.rollouts.merging import length_stats
from rlbench.dispatch import views
from rlbench.dispatch.chain import Chain, Waiting
from rlbench.dispatch.link import Link
from rlbench.dispatch.pending import Pending
from rlbench.engines.base import Engine, Start, cores, executor_of, replicas_for
from rlbench.engines.draws import sample_count, tell_prompts, tell_reshaped, tools_by_prompt, tools_named, whole
from rlbench.engines.lending import drawn_under
from rlbench.engines.moved import Moved
from rlbench.engines.paths import check_model_path, model_name
from rlbench.engines.placement import Device, addresses, device_count, thread_environment, visible_gpus
from rlbench.engines.turns import failed_in_env, split_options, tell_env_errors
from rlbench.engines.under import names_under, whose
from rlbench.envs.hook import Hook, from_hook
from rlbench.envs.tools import ToolEnv
from rlbench.errors import DataError, SessionError, Stopped
from rlbench.results import Done
from rlbench.runtime import cluster
from rlbench.runtime.starting import phase, starting
from rlbench.weights.manifest import Manifest
from rlbench.weights.sync import commit_steps

BY_CALL = ("n", "seed")
"""Of the sampling options, those that say which samples a call draws, and how many."""
TARGETS = {
    "vllm": "rlbench.workers.replica.vllm:VllmReplica",
    "sglang": "rlbench.workers.replica.sglang:SglangReplica",
}


class InferenceEngine(Engine):
    """Inference replicas of one model, which balance the work between themselves.

    Args:
        path: folder or hub id of the model, or an object whose `get_checkpoint_path()` says it.
        executor: `"vllm"`, or `"sglang"` where that is installed; RLite's names of them count.
        name: its role in the session.
        seed: from which request seeds derive.
        config: fields of `ReplicaConfig`: dtype, kv_cache_bytes, max_model_len, max_num_seqs, …
    """

    KIND, LABEL = "inference", "replica"
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
        super().__init__(name, link, config)
        own = path.get_checkpoint_path() if hasattr(path, "get_checkpoint_path") else path
        self.path = model_name(own, "InferenceEngine")
        self.executor = executor_of(executor, TARGETS, "InferenceEngine")
        self.seed = seed
        self._told: set[str] = set()

    @classmethod
    def attach(cls, link: Link, name: str, record: dict[str, Any], seed: int) -> InferenceEngine:
        """Hold the replicas of a session that is already there."""
        engine = cls(record["info"]["path"], record["info"]["executor"], name=name, seed=seed, link=link)
        engine._adopt(record)
        return engine

    def _prepared(
        self, tensor_parallel_size: int, data_parallel_size: int, devices: int, options: dict[str, Any]
    ) -> tuple[int, Start]:
        from rlbench.workers.replica.config import ReplicaConfig

        path = check_model_path(self.path)
        gpus = devices if cluster.current().gpus else 0
        replicas = replicas_for(data_parallel_size, tensor_parallel_size, gpus)
        options = {"threads": max(1, cores() // replicas), "seed": self.seed} | options
        config = ReplicaConfig(**options | {"path": path, "tensor_parallel_size": tensor_parallel_size})

        def start(devices: list[Device]) -> dict[str, Any]:
            first = self.world_size
            groups = [devices[i : i + tensor_parallel_size] for i in range(0, len(devices), tensor_parallel_size)]
            firsts = [group[0] for group in groups]
            environments = [
                thread_environment(config.threads or cores(), node) | visible_gpus(group)
                for group, node in zip(groups, addresses(firsts), strict=True)
            ]
            self._spawn(TARGETS[self.executor], [(config,)] * len(groups), firsts, environments)
            what, fresh = f"{self.name}.build", slice(first, None)
            infos = self.link.submit(
                self.name,
                self.labels[fresh],
                self._actors[fresh],
                "build",
                [((), {})] * len(groups),
                list,
                what,
                self._say_phase,
                collective=False,
            ).result()
            if self.link.state("paused")["paused"]:  # rebuilt in a session that is paused
                self.control("pause")
            return infos[0] | {
                "path": self.path,
                "tokenizer": str(config.engine_kwargs.get("tokenizer") or path),
                "executor": self.executor,
                "tensor_parallel_size": tensor_parallel_size,
            }

        return tensor_parallel_size * replicas, start

    def resize(self, replicas: int, **config: Any) -> Done:
        """Start more replicas, or end the last ones; those that stay go on, with their weights and caches.

        A new one holds the weights of the model's path until the next sync: `session.resize` does that, too.

        Args:
            replicas: how many there are then.
            config: fields of `ReplicaConfig`, in place of the constructor's.
        """
        self._need_built("resize")
        size, have = int(self._info["tensor_parallel_size"]), self.world_size
        wished = tuple(self.link.state("engines")["engines"][self.name]["wished"])
        count, start = self._prepared(size, replicas, device_count(wished), self._config | config)
        replicas = count // size
        if replicas < have:
            self._shrink(replicas, size)
        elif replicas > have:
            devices = self._allot_more(count - have * size, size)
            with starting(f"engine {self.name}"), phase(self.name, "starting"):
                try:
                    start(devices)
                except BaseException:
                    self._shrink(have, size)
                    raise
        return Done(f"{replicas} replicas, of {have}")

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
            prompts: texts, chats or token ids, with images, videos or sounds where the model takes them (see
                `rlbench.data.as_prompts`).
            sampling: sampling options by vLLM's names (`temperature`, `top_p`, `max_tokens`, `stop`, `ignore_eos`, …)
                or vLLM's `SamplingParams`; the same as keywords. `max_tokens` is 16 where not given, as in vLLM; None
                lets a completion fill the model's length. With `seed` a call draws the same samples each time.
            n: completions per prompt (default 1).
            progress, use_tqdm: show a progress bar with tokens/s; False of one of them: none.
            sampling_params: vLLM's and RLite's name of `sampling`.
            post_generation_hook: `rb.envs.from_hook` of it as `env`; it alone ends its samples.
            env: an `rb.envs.Env` that each sample meets turn by turn: a class, an instance (copied for each sample) or
                a function that makes one. Then `max_tokens` is per turn, and there are the options of
                `rlbench.engines.turns.TURN_OPTIONS`: `max_turns`, `max_total_tokens`, `env_timeout_s`, `thoughts`.
            options: also `template={"enable_thinking": False}` (or `chat_template_kwargs`), options of the chat
                template, and `tools=[…]`, which it names to the model: functions (their signatures and docstrings), or
                tools in OpenAI's form.

        Returns:
            `Rollouts`, in prompt order.
        """
        if sampling is not None and sampling_params is not None:
            raise DataError("sampling and sampling_params are one option: give one of them")
        chosen = sampling_options(sampling if sampling_params is None else sampling_params) | options
        if post_generation_hook is not None:
            if env is not None:
                raise DataError("env and post_generation_hook both say what follows a turn: give one of them")
            env, chosen = from_hook(post_generation_hook), {"max_turns": sys.maxsize} | chosen  # it ends its samples
        pending = self.submit_generate(prompts, chosen, n=n, progress=progress and use_tqdm, env=env)
        return pending.blocking_result()

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
        under: Named | str | None = None,
        view: views.View | None = None,
        told: bool = False,
    ) -> Waiting:
        """Submit a generate call; `number` is the rollout's, from which its seeds derive where no `seeds` (prompts, n)
        int64 are given; `under`: whose weights draw, see `rlbench.engines.under`; `told` as of `GenerateJob`; `view`:
        shows the progress, in place of the cell's line."""
        self._need_built("generate")
        asked: list[Prompt] = as_prompts(prompts)
        samples = sample_count(n, sampling)
        chat, rest = split_chat({k: v for k, v in sampling.items() if k not in BY_CALL})
        chats = any(is_chat(prompt.content) for prompt in asked)
        if chat and not chats:
            raise DataError(f"{', '.join(chat)} would have no effect: no prompt is a chat (messages)")
        turns, rest = split_options(env, rest)
        if isinstance(env, ToolEnv):
            env.check_prompts(asked)
        tools: tuple[list[dict[str, Any]], ...] = ()
        if chats and "tools" not in chat:
            names_tools = bool(self._info.get("names_tools"))
            tools = tools_by_prompt(env, asked, names_tools)
            chat |= tools_named(self._told, env, names_tools)
        if number != 0:
            tell_reshaped(self._told, rest)
        drawn = whose(self, under)
        if number is None:
            number = self.link.next_rollout()
        if seeds is None:
            seeds = self.seeds(sampling, number, len(asked), samples)
        tell_prompts(self._told, asked, str(self._info.get("begins", "")), isinstance(prompts, PromptSet))
        contents, kept = [p.content for p in asked], tuple(asked) if number or turns else ()
        shared = len(self._actors) > 1
        job = GenerateJob(
            contents,
            samples,
            rest,
            seeds,
            shared=shared,
            number=number,
            asked=kept,
            env=turns,
            adapter=drawn.adapter,
            chat=chat,
            tools=tools,
            media=tuple(p.media for p in asked) if any(p.media for p in asked) else (),
            told=told,
        )
        if view is None and progress:
            view = views.make("generate", total=len(asked) * samples)

        def finish(parts: list[Any]) -> Rollouts:
            merged = drawn_by(Rollouts.merge(asked, parts, rest, number, self.tokenizer), self)
            if view is not None:
                view.close(merged)
            if number:
                self.link.tell({"do": "lengths", "entry": length_stats(merged)})
            total, cut = len(asked) * samples, merged.aborted & ~failed_in_env(merged)
            if merged.samples < total or cut.any():
                finished = merged.samples - int(merged.aborted.sum())
                raise Stopped(f"rollout {number} stopped: {finished} of {total} completions are finished", merged)
            tell_env_errors(merged)
            return merged

        options: dict[str, Any] = {"finish": finish, "observer": view, "track": True}
        options |= {"what": f"rollout {number}", "queue_total": len(asked) if shared else 0}
        if drawn.snapshot is not None:
            return drawn_under(self, drawn.snapshot, lambda loan: self.call_all("generate_lent", loan, job, **options))
        return self.call_all("generate", job, **options)

    def seeds(self, sampling: dict[str, Any], number: int, prompts: int, samples: int) -> np.ndarray:
        """Return the seeds (prompts, samples) int64 of rollout `number`; where `sampling` has a `seed`, of that one."""
        seed = sampling.get("seed")
        drawn_by = (self.seed, number) if seed is None else (whole("seed", seed), 0)
        return request_seeds(*drawn_by, prompts, samples)

    def last_rollout(self) -> Rollouts | None:
        """The last rollout the replicas served, whole or stopped, also of an earlier kernel; None before the first."""
        served = [entry for entry in self.control("last_rollout") if entry is not None]
        if not served:
            return None
        job = max((job for job, _ in served), key=lambda job: job.number)
        parts = [arrays for other, arrays in served if other.number == job.number]
        return drawn_by(Rollouts.merge(list(job.asked), parts, job.sampling, job.number, self.tokenizer), self)

    def continued(
        self, prompts: Sequence[Prompt], n: int, sampling: dict[str, Any], number: int, under: str | None = None
    ) -> Rollouts:
        """Draw `n` completions behind each prompt, for `Rollouts.fork` and chats: no rollout of its own, so that those
        that follow draw what they would have drawn. `number`: what the seeds derive from; `under`: whose weights, see
        `names_under`."""
        return self.submit_continued(prompts, n, sampling, number, under).blocking_result()

    def submit_continued(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: dict[str, Any],
        number: int,
        under: str | None = None,
        view: views.View | None = None,
        told: bool = False,
    ) -> Waiting:
        """Begin what `continued` waits for, shown by `view`, which hears the texts so far where `told`; SessionError
        where the session is closed."""
        if self.link.closed:
            raise SessionError(f"session {self.link.name!r} is closed: its engine cannot continue these rollouts")
        seeds = self.seeds(sampling, number, len(prompts), n)
        return self.submit_generate(prompts, sampling, n=n, number=0, seeds=seeds, under=under, view=view, told=told)

    def names_under(self) -> tuple[str, ...]:
        """Return what `under` may name, see `rlbench.engines.under`."""
        return names_under(self)

    def encoded(self, text: str) -> list[int]:
        """Return the token ids of a text that stands in the middle of a sequence."""
        if self._light is not None:
            return self._light.encoded(text)
        return [int(token) for token in self._tokens(text, add_special_tokens=False)["input_ids"]]

    def decoded(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, as of a completion."""
        return self._decode(ids)

    @cached_property
    def _decode(self) -> Callable[[Sequence[int]], str]:
        return decoder(self._tokens) if self._light is None else self._light.decoded

    @cached_property
    def _light(self) -> LightTokenizer | None:
        return LightTokenizer.of(self.tokenizer, self._info.get("texts"))

    @cached_property
    def _tokens(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.tokenizer)

    def logprobs(
        self,
        token_ids: Sequence[Sequence[int]],
        images: Sequence[Sequence[Any]] = (),
        sounds: Sequence[Sequence[Any]] = (),
        videos: Sequence[Sequence[Any]] = (),
    ) -> list[np.ndarray]:
        """Log-probs of given tokens: for each sequence a float32 array (length - 1,), of token t given those before.

        `images` and `videos`, or `sounds`: those of each sequence, whose token ids are a rollout's, or have one place
        for each.
        """
        rows = [list(map(int, row)) for row in token_ids]
        media = media_of_rows(len(rows), images=images, videos=videos, sounds=sounds)
        return list(self.call_all("prompt_logprobs", rows, media).result()[0])

    def reload(self) -> Moved:
        """Load the weights again from the model's path, as version 0."""
        measured = self.call_all("reload").result()
        self.link.engine(self.name, {"state": self.status(), "proof": None})
        return Moved.of(self.name, self.PARTS, measured)

    def publish_state(self) -> None:
        """Tell the monitor; once the KV cache is back, prove the weights that were synced without it."""
        super().publish_state()
        record = self.link.state("engines")["engines"][self.name]
        proof, status = record.get("proof"), self.status()
        if proof is not None and not status["pending"]:
            self.link.engine(self.name, {"proof": None})  # refused, torn, released or reloaded since: nothing to prove
        elif proof is not None and status["weights"] == status["kv_cache"] == "cuda":
            Chain("weight sync", commit_steps(self, proof)).result()

    def apply_each(self, manifests: Sequence[Manifest]) -> Iterator[Pending]:
        """Submit `apply_weights` to one replica after the other, each a call of its own with a manifest of its own."""
        name, what = "apply_weights", "weight sync: applying"
        for actor, label, manifest in zip(self._actors, self.labels, manifests, strict=True):
            yield self.link.submit(self.name, [label], [actor], name, [((manifest,), {})], list, what, collective=False)

    def weight_versions(self) -> list[int]:
        """The version each replica holds."""
        return [int(s["version"]) for s in self.control("status")]

    def __repr__(self) -> str:
        return f"InferenceEngine({self.name!r}, {self.executor}, {self.path!r}, {self.described()})"

"""One vLLM replica: an in-process `LLMEngine` that the compute lane's thread steps itself, so an abort takes effect
within one step with every partial token in hand, and weights are applied between steps."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.rollouts.decoding import decoder
from rlbench.data.rollouts.jobs import GeneratedArrays, GenerateJob
from rlbench.dispatch.context import current
from rlbench.errors import BuildError, EngineError, StateError, WeightSyncError
from rlbench.weights import facts
from rlbench.weights.loan import Loan
from rlbench.weights.manifest import Manifest
from rlbench.weights.transport import Facts, PeerFailed
from rlbench.workers.replica import vllm_setup, vllm_states
from rlbench.workers.replica.config import ReplicaConfig, checkpoint_folder, defaults
from rlbench.workers.replica.drawing import draw
from rlbench.workers.replica.endpoint import ReplicaEndpoint
from rlbench.workers.replica.guests import EngineTurn, Guests, alone
from rlbench.workers.replica.job import check_job, check_token_ids, collect, decode_texts, encode_job, told_of
from rlbench.workers.replica.media import PromptMedia, model_kind, probe_row
from rlbench.workers.replica.serving.options import ServeOptions
from rlbench.workers.replica.state import (
    Gate,
    ReplicaState,
    check_tags,
    own_process,
    peak_stats,
    untouched_kv,
    vllm_memory,
)

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    from rlbench.workers.replica.rehearsal import Filled
    from rlbench.workers.replica.verbs import BorrowingVerbs
    from rlbench.workers.replica.vllm_requests import EngineRequests
    from rlbench.workers.replica.weights import WeightReceiver

SMALL_PROOF = 1 << 31
"""Bytes of weights times tokens of a proof up to which one thread leaves the other cores to the ranks: see
`policy_step.SMALL_WORK`."""


class VllmReplica:
    """A copy of the model that generates. Log-probs of sampled tokens are those of the distribution they were drawn
    from, after temperature, penalties, top-k, top-p and min-p; at temperature 0 the model's at temperature 1."""

    CONTROL = frozenset({"status", "memory", "sync_facts", "pause", "resume", "last_rollout", "endpoint"})

    def __init__(self, config: ReplicaConfig) -> None:
        self.config = config
        self.state = ReplicaState()
        self.gate = Gate()
        self._last: tuple[GenerateJob, GeneratedArrays] | None = None
        self._engine: LLMEngine | None = None
        self._tokenizer: Any = None
        self._workers: list[dict[str, Any]] = []
        self._on_cpu = True
        self._running: dict[str, Any] = {}
        self._serial = 0
        self._adapters: dict[int, int] = {}  # version of each adapter held, by number; the base's, which has 0, is 0
        self.adapter = 0  # the one synced last, which samples unless a call says otherwise
        self._receiver: WeightReceiver
        self.turn, self.guests = EngineTurn(), Guests()
        self._endpoint = ReplicaEndpoint(self)

    def build(self) -> dict[str, Any]:
        """Start the engine and load the checkpoint; return what the driver is to know of it."""
        if self._engine is not None:
            raise BuildError("this replica is built already; close the engine before building another one")
        vllm_setup.prepare_environment(self.config)
        current().report(phase="importing vLLM")
        from vllm.platforms import current_platform

        from rlbench.workers.replica.weights import WeightReceiver

        self._threads = vllm_setup.thread_count(self.config)  # vLLM binds this process to cores
        self._on_cpu = current_platform.is_cpu()
        self._engine = vllm_setup.start_engine(self.config)
        self._tokenizer = self._engine.renderer.tokenizer
        self._engine.collective_rpc("init_weight_transfer_engine", args=({},))
        if self.config.return_routed_experts and self._on_cpu:
            self._engine.collective_rpc("record_routing")
        self._engine.set_weight_version("0")
        self._measure()
        self._try_pass()
        model = self._model_config
        tied = getattr(model.hf_config.get_text_config(), "tie_word_embeddings", False)
        self._receiver = WeightReceiver(self._engine.collective_rpc, checkpoint_folder(self.config), tied)
        return {
            "pid": os.getpid(),
            "pids": self._pids,
            "max_model_len": model.max_model_len,
            "vocab_size": model.get_vocab_size(),
            "dtype": str(model.dtype).removeprefix("torch."),
            "kv_cache_bytes": sum(nbytes for _, nbytes in self._workers[0]["kv_ranges"]),
            "device": current_platform.device_type,
            "threads": self._threads,
            "adapters": self.config.adapters,
            "delta": self.config.delta,
            **told_of(self._tokenizer),
            "defaults": defaults(self.config, on_gpu=not self._on_cpu, hybrid=model.is_hybrid),
            "media_tokens": probe_row(self._engine, model.max_model_len),
            "media_kind": model_kind(self._engine).place,
        }

    def _try_pass(self) -> None:
        """Compute two tokens: vLLM starts architectures whose layers have no kernel for this device."""
        try:
            self.prompt_logprobs([[0, 1]])
        except Exception as error:
            raise BuildError(
                f"vLLM loads {self.config.path!r} ({', '.join(self._model_config.architectures)}) but cannot compute "
                f"with it here: {type(error).__name__}: {error}; docs/models.md lists families it serves"
            ) from error
        self.reset_caches()

    @alone
    def generate(self, job: GenerateJob) -> GeneratedArrays:
        """Draw `job.n` samples of every prompt, each with its own seed; of a shared job the prompts claimed as there is
        room. On a stop running samples end with finish reason `abort`; those without a token are left out."""
        self.state.require_ready("generate")
        adapter = self.adapter if job.adapter is None else job.adapter
        return self._generate(job, adapter, self.version_of(adapter), self.adapter)

    @alone
    def generate_lent(self, loan: Loan, job: GenerateJob) -> GeneratedArrays:
        """As `generate`, by weights that are lent for this call; clients of an endpoint wait meanwhile."""
        from rlbench.workers.replica.lending import lent

        self.state.require_ready("generate")
        self._endpoint.end_guests()
        with lent(self, self._receiver, loan):
            return self._generate(job, loan.adapter, loan.version, None)

    def _generate(self, job: GenerateJob, adapter: int, version: int, admit: int | None) -> GeneratedArrays:
        """Draw by an adapter, of which the weights' version is told; `admit` as of `EngineRequests`."""
        from rlbench.workers.replica import vllm_requests

        check_job(job)
        model = self._model_config
        prompts, tokenizers = encode_job(job, self._tokenizer, model.max_model_len, model.get_vocab_size())
        images = PromptMedia(self.built, job.media, prompts, model.max_model_len - 1)
        params, first = vllm_requests.sampling_params(job.sampling), vllm_requests.first_token_params(job.sampling)
        highest: dict[str, float] = {}
        samples: Any
        decode = decoder(self._tokenizer, params.skip_special_tokens)
        measured = peak_stats(highest, self._pids, self._on_cpu, own_process(self._workers))
        with self.requests(adapter, admit, first) as requests, measured:
            if job.env is None:
                most = self.config.max_num_seqs
                samples, stats = draw(requests, job, prompts, params, most, self.gate, decode, images)
            else:
                from rlbench.workers.replica.turns import TurnDrawer, with_turns

                drawer = TurnDrawer(requests, job, prompts, params, tokenizers, decode, model, images)
                samples, stats = drawer.draw(self.config.max_num_seqs, self.gate)
        texts = decode_texts(samples, decode, job.sampling)
        arrays = collect(samples, texts, dict(enumerate(prompts)), version, stats | highest)
        if job.env is not None:
            arrays = with_turns(samples, arrays)
        if job.number:
            self._last = job, arrays
        return arrays

    def last_rollout(self) -> tuple[GenerateJob, GeneratedArrays] | None:
        """The last rollout served, whole or stopped, with what was asked; never blocks."""
        return self._last

    @alone
    def prompt_logprobs(
        self, token_ids: list[list[int]], media: Sequence[Sequence[Any]] = (), adapter: int | None = None
    ) -> list[np.ndarray]:
        """Log p(token t | tokens < t) at temperature 1, t >= 1, float32 (len - 1,) for each sequence; of those with
        `media`, images as `EncodedImage.from_any` takes them or sounds, whose token ids are the expanded ones, too.
        `adapter`: None for the one synced last."""
        from rlbench.workers.replica import vllm_requests

        self.state.require_ready("prompt_logprobs", committed=False)
        limit, vocabulary = self._model_config.max_model_len, self._model_config.get_vocab_size()
        for index, ids in enumerate(token_ids):
            check_token_ids(ids, f"sequence {index}", limit, limit, vocabulary)
        given = PromptMedia(self.built, media, token_ids, limit, "sequence")
        threads = 1 if self._on_cpu and self._is_short_proof(token_ids) else self._threads
        with self.requests(adapter) as requests, vllm_setup.threads_for_now(threads, self._threads):
            return vllm_requests.score(requests, token_ids, limit, given)

    def _is_short_proof(self, token_ids: list[list[int]]) -> bool:
        """Whether this is little work, and proves an adapter that came alone: so fast that the ranks, on this host or
        another, still compute what it is proved by."""
        weights = sum(int(worker["weights"]) for worker in self._workers)
        return self.state.pending and self.adapter > 0 and weights * sum(map(len, token_ids)) <= SMALL_PROOF

    @alone
    def fill_kv(self, length: int, seconds: float) -> Filled:
        """Hold as many requests of `length` tokens as the KV cache says it can; see `rehearsal`."""
        from rlbench.workers.replica.rehearsal import fill

        self.state.require_ready("rehearse")
        self._endpoint.end_guests()
        try:
            with self.requests() as requests:
                filled = fill(requests, length, seconds, self.config.max_num_seqs, self._pids, not self._on_cpu)
                to_come = untouched_kv(self._workers) if self._on_cpu else 0
                return replace(filled, peak=filled.peak + to_come)
        finally:
            self.reset_caches()

    def version_of(self, adapter: int) -> int:
        """Return the version of the weights as an adapter makes them; StateError where it is not here."""
        if adapter and adapter not in self._adapters:
            raise StateError(
                f"adapter {adapter} is not in this replica, which was built after it was synced: session.branch(…) to "
                "its branch brings it"
            )
        return self.state.version if adapter == self.adapter else self._adapters.get(adapter, 0)

    def requests(
        self, adapter: int | None = None, admit: int | None = None, first: SamplingParams | None = None
    ) -> EngineRequests:
        """Begin a call's requests; see `EngineRequests`. `adapter`: None for the one synced last."""
        from rlbench.workers.replica.vllm_requests import EngineRequests

        self._serial += 1
        adapter = self.adapter if adapter is None else adapter
        recorded = self.config.return_routed_experts and self._on_cpu
        requests = EngineRequests(self.built, self._serial, adapter, self.guests, admit, first, recorded)
        self._running = requests.running
        return requests

    def serve(self, options: ServeOptions) -> int:
        """Answer clients over HTTP from now on, between and beside calls; return the port."""
        return self._endpoint.serve(options)

    def balance(self, own: int, urls: Sequence[str]) -> None:
        """Share clients' calls with the replicas at these addresses, of which this one is number `own`."""
        self._endpoint.balance(own, urls)

    def unserve(self) -> None:
        """Answer nobody any more."""
        self._endpoint.close()

    def endpoint(self) -> dict[str, Any] | None:
        """Counts of what is served, None where nothing is. Thread-safe, never waits."""
        return self._endpoint.counts()

    @alone
    def to_state(self, state: str, tags: list[str] | None = None) -> dict[str, Any]:
        """Move weights and KV cache to a device state: `cuda` resident, `cpu` kept in host memory, `meta` discarded. On
        a host `cpu` releases the KV cache alone. `cuda` of all tags reloads discarded weights from the checkpoint
        (version 0); of some it only makes room, for a sync to fill."""
        wanted = check_tags(state, tags)
        self._endpoint.end_guests()
        before = self.memory()
        self.reset_caches()
        if state != "cuda":
            vllm_states.release(self.built.model_executor, self.state, state, wanted, self._on_cpu)
            return self._moved(before)
        vllm_states.wake(self.built.model_executor, self.state, wanted)
        return self._moved(before, reload=tags is None and self.state.weights == "empty")

    @alone
    def release_memory_cache(self, cpu: bool, gpu: bool) -> dict[str, int]:
        """Give back what the allocators of all its processes keep; see `rlbench.weights.memory.release_caches`."""
        parts = self.built.collective_rpc("release_memory_cache", args=(cpu, gpu))
        self._measure()
        return {name: sum(part[name] for part in parts) for name in parts[0]}

    @alone
    def reload(self) -> dict[str, Any]:
        """Load the weights from the checkpoint again: version 0, whatever state they were in."""
        self._endpoint.end_guests()
        before = self.memory()
        vllm_states.wake(self.built.model_executor, self.state, {"weights"})
        return self._moved(before, reload=True)

    def _moved(self, before: dict[str, Any], reload: bool = False) -> dict[str, Any]:
        """Tell what a state change did: states by tag, bytes by owner and bytes freed (negative: taken), measured."""
        if reload:
            self._load_checkpoint()
        self._measure()
        after, source = self.memory(), self.config.path if reload else None
        freed = before["rss"] - after["rss"]
        return {**self.state.places, "memory": after, "freed_bytes": freed, "reloaded_from": source}

    def _load_checkpoint(self) -> None:
        self.state.weights = "torn"
        try:
            self.built.collective_rpc("reload_from_disk")
        except Exception as error:
            raise WeightSyncError(f"the checkpoint {self.config.path!r} could not be loaded again: {error}") from error
        self.state.weights = "cuda"
        self.adapter, self._adapters, self.state.token = 0, {}, ""
        self.reset_caches()
        self.commit_version(0)

    def begin_sync(self) -> tuple[dict[str, Any], Facts]:
        """Refuse a sync that cannot be applied, before the trainer gathers anything; else return `status` and
        `sync_facts`. Changes nothing."""
        self.state.require_room("p2p_weight_sync")
        return self.status(), self.sync_facts()

    def check_weights(self, manifest: Manifest) -> None:
        """Refuse weights that do not fit, before any is sent. Changes nothing."""
        self.state.require_room("p2p_weight_sync")
        self.state.require_base(manifest.follows)
        self._receiver.check(manifest)

    @alone
    def apply_weights(self, manifest: Manifest) -> float:
        """Load staged weights, or receive them: as a whole, or the replica is torn; generating waits for
        `commit_version`. Return the seconds that took."""
        begin = time.perf_counter()
        self.check_weights(manifest)
        self._endpoint.make_way(0 if manifest.adapter is None else manifest.adapter.number)
        if manifest.channel is not None:
            self._receiver.meet(manifest.channel)
        resized = manifest.adapter is None or self.state.weights != "cuda"  # the room for adapters is always there
        if manifest.adapter is not None and self.state.weights != "cuda":
            self._load_checkpoint()  # of which an adapter is a part alone
        if self.state.pending or self.state.weights == "torn":
            self._receiver.by_reload()
        self.state.weights = "torn"
        try:
            self._receiver.load(manifest)
        except WeightSyncError as error:
            if manifest.unchanged and not isinstance(error, PeerFailed):
                self.state.takes_parts = False
            raise
        self.adapter = 0 if manifest.adapter is None else manifest.adapter.number
        self.state.weights, self.state.token = "cuda", manifest.token
        self.state.pending = True
        # from here on the tokens of clients that go on are of these weights, the proof's steps included
        self.built.set_weight_version(str(manifest.version))
        self.reset_caches()
        if resized:
            self._measure()
        return time.perf_counter() - begin

    def sync_facts(self) -> Facts:
        """Where this replica is, for the choice of a transport. Thread-safe, never waits."""
        gpus = tuple(worker["gpu"] for worker in self._workers if worker["gpu"])
        token = self._receiver.channel
        return Facts(facts.node(), facts.address(), gpus, len(self._workers), channels=(("", token),) if token else ())

    @alone
    def commit_version(self, version: int) -> dict[str, Any]:
        """Declare the weights the replica holds to be `version`; it may generate from now on. Return its status."""
        if self.state.weights != "cuda":
            raise StateError(f"commit_version({version}): the replica's weights are {self.state.weights}; sync first")
        self.built.set_weight_version(str(version))
        self.state.version = version
        if self.adapter:
            self._adapters[self.adapter] = version
        self.state.pending = False
        return self.status()

    def reset_caches(self) -> None:
        """Forget everything computed with the weights or kept in the KV cache so far; for clients whose requests are in
        the engine it is computed again."""
        engine = self.built
        if not engine.reset_prefix_cache(reset_running_requests=self.guests.inside > 0):
            raise EngineError("the prefix cache could not be reset: requests are still running in this replica")
        if self._model_config.is_multimodal_model:
            engine.reset_encoder_cache()  # of what the tower made of images, by their digests

    def pause(self) -> None:
        """Hold generation after the step in flight; also of calls still to come. Thread-safe, never waits."""
        self.gate.close()

    def resume(self) -> None:
        """Let generation go on where it was. Thread-safe, never waits."""
        self.gate.open()

    def status(self) -> dict[str, Any]:
        """Device states, version and the number of running samples, clients' among them. Thread-safe, never waits."""
        running = len(self._running) + self.guests.inside
        return {**self.state.status, "running": running, "paused": self.gate.closed}

    def memory(self) -> dict[str, Any]:
        """Resident bytes by owner, see `vllm_memory`. Thread-safe, never waits."""
        return vllm_memory(self._workers, self.state, self._pids, self._on_cpu)

    def close(self) -> None:
        """Stop what would outlive this process, which ends after it: the endpoint, and the engine's worker processes.

        All else goes with the process: vLLM's own shutdown collects garbage three times over all that was imported,
        which takes longer than a tiny model's start.
        """
        self._endpoint.close()
        with self.turn.of_call():
            engine, self._engine = self._engine, None
        self._workers = []
        if engine is not None and self.config.tensor_parallel_size > 1:
            engine.model_executor.shutdown()

    @property
    def _pids(self) -> list[int]:
        """All processes of the replica: this one, and the tensor parallel workers where they are others."""
        return sorted({os.getpid(), *(worker["pid"] for worker in self._workers)})

    def _measure(self) -> None:
        self._workers = self.built.collective_rpc("describe")

    @property
    def built(self) -> LLMEngine:
        """The engine; StateError where there is none."""
        if self._engine is None:
            raise StateError("the replica is not built (or was closed); call build() first")
        return self._engine

    @property
    def _model_config(self) -> Any:
        return self.built.model_config


if TYPE_CHECKING:
    _verbs: type[BorrowingVerbs] = VllmReplica

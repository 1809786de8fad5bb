"""One vLLM replica: an in-process `LLMEngine` that the compute lane's thread steps itself.

So an abort takes effect within one step with every partial token in hand, weights are applied between steps,
and on a CPU host the replica is one process. Weights arrive through vLLM's own weight-transfer interface
(`rlbench.weights`).
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.rollouts.jobs import GeneratedArrays, GenerateJob
from rlbench.dispatch.context import current
from rlbench.errors import BuildError, EngineError, RLBenchError, StateError, WeightSyncError
from rlbench.weights import facts
from rlbench.weights.manifest import Manifest
from rlbench.weights.transport import Facts
from rlbench.workers.replica import vllm_setup
from rlbench.workers.replica.config import ReplicaConfig
from rlbench.workers.replica.job import (
    check_job,
    check_token_ids,
    collect,
    decode_texts,
    encode_prompts,
)
from rlbench.workers.replica.memory import own_process, peak_stats, vllm_memory
from rlbench.workers.replica.pause import Gate
from rlbench.workers.replica.state import ReplicaState, check_tags, moved

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

    from rlbench.workers.replica.rehearsal import Filled
    from rlbench.workers.replica.vllm_requests import EngineRequests
    from rlbench.workers.replica.weights import WeightReceiver

SAMPLING_OPTIONS = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "bad_words",
    "allowed_token_ids",
    "logit_bias",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "structured_outputs",
]


class VllmReplica:
    """A copy of the model that generates.

    Log-probs of sampled tokens are those of the distribution the token was drawn from: after temperature,
    penalties, top-k, top-p and min-p. A trainer that divides its logits by the same temperature computes the
    same numbers as long as nothing else reshapes the distribution. At temperature 0 (greedy) there is no
    distribution: the log-prob is the model's at temperature 1.
    """

    CONTROL = frozenset({"status", "memory", "sync_facts", "pause", "resume", "last_rollout"})

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
        self._receiver: WeightReceiver

    def build(self) -> dict[str, Any]:
        """Start the engine and load the checkpoint.

        Returns:
            pid, pids (all processes of the replica), max_model_len, vocab_size, dtype, kv_cache_bytes,
            device, threads.

        Raises:
            BuildError: built already, or vLLM could not start (its own words follow).
        """
        if self._engine is not None:
            raise BuildError("this replica is built already; close the engine before building another one")
        vllm_setup.prepare_environment(self.config)
        report = current().report
        report(phase="importing vLLM")
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        from rlbench.workers.replica.weights import WeightReceiver

        threads = vllm_setup.thread_count(self.config)
        vllm_setup.use_threads(threads)
        self._on_cpu = current_platform.is_cpu()
        report(phase="building vLLM: weights, KV cache")
        try:
            self._engine = LLMEngine.from_engine_args(EngineArgs(**vllm_setup.engine_args(self.config)))
        except RLBenchError:
            raise
        except Exception as error:
            raise BuildError(f"vLLM could not start on {self.config.path!r}: {error}") from error
        self._tokenizer = self._engine.renderer.tokenizer
        self._engine.collective_rpc("init_weight_transfer_engine", args=({},))
        self._engine.set_weight_version("0")
        self._measure()
        self._try_pass()
        model = self._model_config
        tied = getattr(model.hf_config.get_text_config(), "tie_word_embeddings", False)
        self._receiver = WeightReceiver(
            self._engine.collective_rpc, vllm_setup.checkpoint_folder(self.config), tied, model.architectures
        )
        return {
            "pid": os.getpid(),
            "pids": self._pids,
            "max_model_len": model.max_model_len,
            "vocab_size": model.get_vocab_size(),
            "dtype": str(model.dtype).removeprefix("torch."),
            "kv_cache_bytes": sum(nbytes for _, nbytes in self._workers[0]["kv_ranges"]),
            "device": current_platform.device_type,
            "threads": threads,
        }

    def _try_pass(self) -> None:
        """Compute two tokens: vLLM starts architectures whose layers have no kernel for this device.

        Raises:
            BuildError: in vLLM's words.
        """
        try:
            self.prompt_logprobs([[0, 1]])
        except Exception as error:
            raise BuildError(
                f"vLLM loads {self.config.path!r} ({', '.join(self._model_config.architectures)}) but cannot compute "
                f"with it here: {type(error).__name__}: {error}; docs/models.md lists families it serves"
            ) from error
        self._reset_caches()

    # --- generating ----------------------------------------------------------------------

    def generate(self, job: GenerateJob) -> GeneratedArrays:
        """Draw `job.n` samples of every prompt, each a request of its own with its own seed.

        A shared job is served together with other replicas: prompts are claimed as there is room for them.
        When the call is asked to stop, running samples end with finish reason `abort` and keep their tokens;
        samples without a token are left out.

        Raises:
            StateError: weights or KV cache are not there; the message names the call that mends it.
            DataError: a prompt or a sampling option cannot be served.
        """
        from rlbench.workers.replica import vllm_requests

        self.state.require_ready("generate")
        check_job(job, SAMPLING_OPTIONS)
        model = self._model_config
        prompts = encode_prompts(job.prompts, self._tokenizer, model.max_model_len, model.get_vocab_size())
        params = vllm_requests.sampling_params(job.sampling)
        highest: dict[str, float] = {}
        own = own_process(self._workers)
        samples: Sequence[Any]
        collected: Callable[..., GeneratedArrays] = collect
        with self._requests() as requests, peak_stats(highest, self._pids, self._on_cpu, own):
            if job.env is None:
                samples, stats = vllm_requests.draw(
                    requests, job, prompts, params, self.config.max_num_seqs, self.gate, self._shown
                )
            else:
                from rlbench.workers.replica.turns import TurnDrawer, collect_turns

                drawer = TurnDrawer(requests, job, prompts, params, self._tokenizer, model)
                samples, stats = drawer.draw(self.config.max_num_seqs, self.gate)
                collected = collect_turns
        texts = decode_texts(samples, self._tokenizer, params.skip_special_tokens)
        arrays = collected(samples, texts, dict(enumerate(prompts)), self.state.version, stats | highest)
        if job.number:
            self._last = job, arrays
        return arrays

    def _shown(self, ids: list[int]) -> str:
        """Text of a sample while others still run."""
        return "" if self._tokenizer is None else str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def last_rollout(self) -> tuple[GenerateJob, GeneratedArrays] | None:
        """The last rollout served, whole or stopped, with what was asked; never blocks."""
        return self._last

    def prompt_logprobs(self, token_ids: list[list[int]]) -> list[np.ndarray]:
        """Log p(token t | tokens < t) at temperature 1, t >= 1, float32 (len - 1,) for each sequence."""
        from rlbench.workers.replica import vllm_requests

        self.state.require_ready("prompt_logprobs", committed=False)
        limit, vocabulary = self._model_config.max_model_len, self._model_config.get_vocab_size()
        for index, ids in enumerate(token_ids):
            check_token_ids(ids, f"sequence {index}", limit, limit, vocabulary)
        with self._requests() as requests:
            return vllm_requests.score(requests, token_ids, limit)

    def fill_kv(self, length: int, seconds: float) -> Filled:
        """Hold as many requests of `length` tokens as the KV cache says it can; see `replica_rehearsal`."""
        from rlbench.workers.replica.rehearsal import fill

        self.state.require_ready("rehearse")
        try:
            with self._requests() as requests:
                return fill(requests, length, seconds, self.config.max_num_seqs, self._pids, not self._on_cpu)
        finally:
            self._reset_caches()

    @contextmanager
    def _requests(self) -> Iterator[EngineRequests]:
        """The requests of one call, visible to the control lane while it runs."""
        from rlbench.workers.replica.vllm_requests import EngineRequests

        self._serial += 1
        with EngineRequests(self._built, self._serial) as requests:
            self._running = requests.running
            try:
                yield requests
            finally:
                self._running = {}

    # --- device states -------------------------------------------------------------------

    def to_state(self, state: str, tags: list[str] | None = None) -> dict[str, Any]:
        """Move weights and KV cache to a device state: `cuda` resident, `cpu` kept in host memory, `meta`
        discarded.

        On a host without a GPU the device is host memory: `cpu` releases the KV cache and keeps the weights
        where they are. `cuda` of all tags after the weights were discarded reloads the checkpoint (version 0)
        and says so; `cuda(["weights"])` only makes room, for a sync to fill.

        Returns:
            States, version, memory by owner, `freed_bytes` (measured), and `reloaded_from` where that
            happened.
        """
        wanted = check_tags(state, tags)
        before = self.memory()
        reloaded = None
        self._reset_caches()
        if state != "cuda":
            self._release(state, wanted)
        else:
            self._wake(wanted)
            if tags is None and self.state.weights == "empty":
                self._load_checkpoint()
                reloaded = self.config.path
        self._measure()
        return moved(before, self.memory(), self.state, reloaded_from=reloaded)

    def release_memory_cache(self, cpu: bool, gpu: bool) -> dict[str, int]:
        """Give back what the allocators of all its processes keep; see `rlbench.weights.memory.release_caches`."""
        parts = self._built.collective_rpc("release_memory_cache", args=(cpu, gpu))
        self._measure()
        return {name: sum(part[name] for part in parts) for name in parts[0]}

    def reload(self) -> dict[str, Any]:
        """Load the weights from the checkpoint again: version 0, whatever state they were in."""
        before = self.memory()
        self._wake({"weights"})
        self._load_checkpoint()
        self._measure()
        return moved(before, self.memory(), self.state, reloaded_from=self.config.path)

    def _release(self, state: str, tags: set[str]) -> None:
        executor = self._built.model_executor
        if "weights" in tags and not self._on_cpu:
            if tags != {"weights", "kv_cache"}:
                raise StateError("vLLM on a GPU releases weights only together with the KV cache: leave the tags out")
            if executor.sleeping_tags:  # vLLM ignores a second sleep, also a deeper one
                executor.wake_up(sorted(executor.sleeping_tags))
            executor.sleep(1 if state == "cpu" and self.state.weights != "meta" else 2)
        else:
            drop = ["kv_cache", *(["weights"] if state == "meta" else [])]
            gone = executor.sleeping_tags
            if now := tuple(tag for tag in drop if tag in tags and tag not in gone):
                executor.discard(now)
        if "kv_cache" in tags:
            self.state.kv_cache = "meta"
        if "weights" in tags and (state == "meta" or self.state.weights == "cuda"):
            self.state.weights = state

    def _wake(self, tags: set[str]) -> None:
        executor = self._built.model_executor
        if asleep := sorted(tags & executor.sleeping_tags):
            executor.wake_up(asleep)
        if "kv_cache" in tags:
            self.state.kv_cache = "cuda"
        if "weights" in tags:
            self.state.weights = {"meta": "empty", "cpu": "cuda"}.get(self.state.weights, self.state.weights)

    def _load_checkpoint(self) -> None:
        self.state.weights = "torn"
        try:
            self._built.collective_rpc("reload_from_disk")
        except Exception as error:
            raise WeightSyncError(f"the checkpoint {self.config.path!r} could not be loaded again: {error}") from error
        self.state.weights = "cuda"
        self._reset_caches()
        self.commit_version(0)

    # --- weights -------------------------------------------------------------------------

    def begin_sync(self) -> None:
        """Refuse a sync that cannot be applied, before the trainer gathers anything. Changes nothing."""
        self.state.require_room("p2p_weight_sync")

    def check_weights(self, manifest: Manifest) -> None:
        """Refuse weights that do not fit, before any is sent. Changes nothing. Raises as `apply_weights`."""
        self.state.require_room("p2p_weight_sync")
        self._receiver.check(manifest)

    def apply_weights(self, manifest: Manifest) -> None:
        """Load staged weights, or receive them. Names and shapes are compared first; from then on it happens as a
        whole.

        Afterwards prompt log-probs can be asked for, but generating is refused until `commit_version`.

        Raises:
            WeightSyncError: the names do not match or the sender did not begin (the old weights stay), or loading
                failed (the replica is torn).
            StateError: there is no room for the weights.
        """
        self.check_weights(manifest)
        if manifest.channel is not None:
            self._receiver.meet(manifest.channel)
        self.state.weights = "torn"
        self._receiver.load(manifest)
        self.state.weights = "cuda"
        self.state.pending = True
        self._reset_caches()
        self._measure()

    def sync_facts(self) -> Facts:
        """Where this replica is, for the choice of a transport. Thread-safe, never waits."""
        gpus = tuple(worker["gpu"] for worker in self._workers if worker["gpu"])
        token = self._receiver.channel
        return Facts(facts.node(), facts.address(), gpus, len(self._workers), channels=(("", token),) if token else ())

    def commit_version(self, version: int) -> None:
        """Declare the weights the replica holds to be `version`; it may generate from now on."""
        if self.state.weights != "cuda":
            raise StateError(f"commit_version({version}): the replica's weights are {self.state.weights}; sync first")
        self._built.set_weight_version(str(version))
        self.state.version = version
        self.state.pending = False

    def _reset_caches(self) -> None:
        """Forget everything computed with the weights or kept in the KV cache so far."""
        engine = self._built
        if not engine.reset_prefix_cache():
            raise EngineError("the prefix cache could not be reset: requests are still running in this replica")
        if engine.renderer.mm_processor_cache is not None:
            engine.reset_mm_cache()
            engine.reset_encoder_cache()

    # --- control -------------------------------------------------------------------------

    def pause(self) -> None:
        """Hold generation after the step in flight; also of calls still to come. Thread-safe, never waits."""
        self.gate.close()

    def resume(self) -> None:
        """Let generation go on where it was. Thread-safe, never waits."""
        self.gate.open()

    def status(self) -> dict[str, Any]:
        """Device states, version and the number of running samples. Thread-safe, never waits."""
        state = self.state
        return {
            "weights": state.weights,
            "kv_cache": state.kv_cache,
            "version": state.version,
            "pending": state.pending,
            "running": len(self._running),
            "paused": self.gate.closed,
        }

    def memory(self) -> dict[str, Any]:
        """Resident bytes by owner, as `memory_by_owner` has them. Thread-safe, never waits."""
        return vllm_memory(self._workers, self.state, self._pids, self._on_cpu)

    def close(self) -> None:
        """Stop the engine, its worker processes included, and free everything."""
        engine, self._engine = self._engine, None
        self._workers = []
        if engine is not None:
            from vllm.distributed import cleanup_dist_env_and_memory

            from rlbench.weights.memory import return_free_memory

            engine.engine_core.shutdown()
            del engine
            cleanup_dist_env_and_memory()
            gc.collect()
            return_free_memory()

    @property
    def _pids(self) -> list[int]:
        """All processes of the replica: this one, and the tensor parallel workers where they are others."""
        return sorted({os.getpid(), *(worker["pid"] for worker in self._workers)})

    def _measure(self) -> None:
        self._workers = self._built.collective_rpc("describe")

    @property
    def _built(self) -> LLMEngine:
        if self._engine is None:
            raise StateError("the replica is not built (or was closed); call build() first")
        return self._engine

    @property
    def _model_config(self) -> Any:
        return self._built.model_config

"""A replica that generates with transformers alone: for machines where vLLM cannot be installed.

Same interface and same arrays as `VllmReplica`; slower, since a batch is refilled only when it is empty.
Never chosen silently: `InferenceEngine(path, executor="hf")`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from rlbench.data.jobs import GeneratedArrays, GenerateJob
from rlbench.dispatch.context import current
from rlbench.errors import BuildError, DataError, StateError, WeightSyncError
from rlbench.weights.manifest import Manifest
from rlbench.weights.transport import Facts
from rlbench.workers import vllm_setup
from rlbench.workers.replica_config import ReplicaConfig, compute_dtype
from rlbench.workers.replica_job import (
    LastRollout,
    Progress,
    Sample,
    check_job,
    check_token_ids,
    collect,
    decode_texts,
    encode_prompts,
)
from rlbench.workers.replica_memory import allocator, memory_by_owner, peak_stats
from rlbench.workers.replica_pause import Gate, Pausable
from rlbench.workers.replica_rehearsal import Filled
from rlbench.workers.replica_state import ReplicaState, check_tags, moved

_SCORE_TOKENS = 8192  # padded tokens of one forward pass in prompt_logprobs


class HfReplica(Pausable):
    """A copy of the model that generates, without vLLM. The KV cache lives only while a call runs."""

    CONTROL = frozenset({"status", "memory", "sync_facts", "pause", "resume", "last_rollout"})

    def __init__(self, config: ReplicaConfig) -> None:
        self.config = config
        self.state = ReplicaState()
        self.gate = Gate()
        self._last = LastRollout()
        self._model: Any = None
        self._tokenizer: Any = None
        self._emptied: list[Any] = []
        self._weight_bytes = 0
        self._max_model_len = 0
        self._running = 0
        self._expected: dict[str, tuple[int, ...]] = {}

    def build(self) -> dict[str, Any]:
        """Load the checkpoint and its tokenizer. Raises BuildError: built already, not loadable, or options
        that only vLLM has.
        """
        if self._model is not None:
            raise BuildError("this replica is built already; close the engine before building another one")
        if self.config.tensor_parallel_size > 1 or self.config.engine_kwargs:
            raise BuildError('executor "hf" has no tensor_parallel_size and no engine_kwargs; use executor "vllm"')
        vllm_setup.prepare_threads(self.config)
        current().report(phase="loading the weights")
        import torch
        from transformers import AutoTokenizer

        threads = vllm_setup.thread_count(self.config)
        vllm_setup.use_threads(threads)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self._model = self._from_checkpoint()
            self._tokenizer = AutoTokenizer.from_pretrained(
                self.config.path, trust_remote_code=self.config.trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise BuildError(f"transformers could not load {self.config.path!r}: {error}") from error
        text = self._model.config.get_text_config()
        self._max_model_len = min(
            self.config.max_model_len or text.max_position_embeddings, text.max_position_embeddings
        )
        self._measure()
        return {
            "pid": os.getpid(),
            "pids": [os.getpid()],
            "max_model_len": self._max_model_len,
            "vocab_size": text.vocab_size,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "kv_cache_bytes": 0,
            "device": self._device,
            "threads": threads,
        }

    # --- generating ----------------------------------------------------------------------

    def generate(self, job: GenerateJob) -> GeneratedArrays:
        """Draw `job.n` samples of every prompt; arguments, errors and stopping as `VllmReplica.generate`."""
        from rlbench.workers.replica_sampling import OPTIONS, BatchSampler

        self.state.require_ready("generate")
        check_job(job, OPTIONS)
        vocabulary = self._built.config.get_text_config().vocab_size
        prompts = encode_prompts(job.prompts, self._tokenizer, self._max_model_len, vocabulary)
        options = self._options(job.sampling)
        sampler = BatchSampler(self._built, options, self._max_model_len, self._decode(options.skip_special_tokens))
        context, progress, samples = current(), Progress(current(), self._decode(True)), list[Sample]()
        highest: dict[str, float] = {}
        with peak_stats(highest, [os.getpid()], self._device == "cpu", own=True):
            for batch in self._batches(job):
                if self.gate.closed and not self.gate.passes(context):
                    break
                samples.extend(batch)
                seeds = [int(job.seeds[s.prompt, s.index]) & 0x7FFF_FFFF_FFFF_FFFF for s in batch]
                sampler.start(batch, [prompts[s.prompt] for s in batch], seeds)
                while sampler.rows and self.gate.passes(context):
                    progress.tokens += sampler.step()
                    self._running = len(sampler.rows)
                    batch = _finished(batch, progress)
                    progress.tick(len(samples) - self._running, self._running, len(samples))
                if context.stop_requested():
                    for row in sampler.rows:
                        row.sample.finish = "abort"
                    break
        self._running = 0
        samples = [sample for sample in samples if sample.tokens]
        progress.tick(len(samples), 0, len(samples), force=True)
        texts = decode_texts(samples, self._tokenizer, options.skip_special_tokens)
        arrays = collect(samples, texts, dict(enumerate(prompts)), self.state.version, progress.stats | highest)
        return self._last.keep(job, arrays)

    def last_rollout(self) -> tuple[GenerateJob, GeneratedArrays] | None:
        """The last rollout served, whole or stopped, with what was asked; never blocks."""
        return self._last.get()

    def fill_kv(self, length: int, seconds: float) -> Filled:
        """Hold one request of `length` tokens: transformers keeps no cache of a size of its own to be filled."""
        import torch

        from rlbench.strategies.peak import PeakMemory, room

        vocabulary = self._built.config.get_text_config().vocab_size
        prompt = np.random.default_rng(0).integers(0, vocabulary, max(1, length - 2)).tolist()
        sampling = {"max_tokens": min(2, length - 1), "ignore_eos": True, "temperature": 0.0}
        device = torch.device(self._device)
        with PeakMemory(device) as memory:
            self.generate(GenerateJob([prompt], 1, sampling, np.zeros((1, 1), np.int64)))
        limit = memory.before + room(device)
        return Filled(
            1, 1, 1, 0.0, 0, length, memory.peak, memory.before, limit, memory.how, "one: hf keeps no cache to fill"
        )

    def prompt_logprobs(self, token_ids: list[list[int]]) -> list[np.ndarray]:
        """Log p(token t | tokens < t) at temperature 1 for t >= 1 of each sequence: float32 arrays of length
        len - 1.
        """
        import torch

        self.state.require_ready("prompt_logprobs", committed=False)
        model, limit = self._built, self._max_model_len
        for index, ids in enumerate(token_ids):
            check_token_ids(ids, f"sequence {index}", limit, limit, model.config.get_text_config().vocab_size)
        found: list[np.ndarray] = [np.zeros(0, np.float32)] * len(token_ids)
        for rows in _by_length(token_ids, _SCORE_TOKENS):
            width = len(token_ids[rows[-1]])
            ids = torch.zeros(len(rows), width, dtype=torch.long)
            mask = torch.zeros(len(rows), width, dtype=torch.long)
            for row, index in enumerate(rows):
                ids[row, : len(token_ids[index])] = torch.tensor(token_ids[index])
                mask[row, : len(token_ids[index])] = 1
            with torch.no_grad():
                ids, mask = ids.to(model.device), mask.to(model.device)
                logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
                scores = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].cpu().numpy()
            for row, index in enumerate(rows):
                found[index] = scores[row, : len(token_ids[index]) - 1].copy()
        return found

    def _batches(self, job: GenerateJob) -> Iterator[list[Sample]]:
        """Samples to draw together: up to max_num_seqs, of this job or of what can be claimed of a shared
        one.
        """
        prompts = max(1, self.config.max_num_seqs // job.n)
        claimed = iter(range(len(job.prompts)))
        while True:
            share = current().claim(prompts) if job.shared else list(islice(claimed, prompts))
            samples = [Sample(index, number) for index in share for number in range(job.n)]
            if not samples:
                return
            for start in range(0, len(samples), self.config.max_num_seqs):
                yield samples[start : start + self.config.max_num_seqs]

    def _options(self, sampling: dict[str, Any]) -> Any:
        from rlbench.workers.replica_sampling import SamplingOptions

        options = dict(sampling)
        ends = set(options.pop("stop_token_ids", None) or ())
        if not options.pop("ignore_eos", False):
            eos = self._built.generation_config.eos_token_id
            ends.update(eos if isinstance(eos, list) else [eos] if eos is not None else [])
        stop = options.pop("stop", None) or ()
        made = SamplingOptions(
            **options, stop=(stop,) if isinstance(stop, str) else tuple(stop), stop_token_ids=frozenset(ends)
        )
        if not 0 < made.top_p <= 1 or not 0 <= made.min_p <= 1:
            raise DataError(f"sampling options: top_p={made.top_p} must be in (0, 1], min_p={made.min_p} in [0, 1]")
        return made

    def _decode(self, skip_special_tokens: bool) -> Any:
        return lambda ids: self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    # --- device states -------------------------------------------------------------------

    def to_state(self, state: str, tags: list[str] | None = None) -> dict[str, Any]:
        """Move weights to a device state, as `VllmReplica.to_state`. There is no KV cache between calls, so
        its tag changes only what is shown and allowed.
        """
        wanted = check_tags(state, tags)
        before, reloaded = self.memory(), None
        if "kv_cache" in wanted:
            self.state.kv_cache = "cuda" if state == "cuda" else "meta"
        if "weights" in wanted:
            self._move_weights(state)
            if state == "cuda" and tags is None and self.state.weights == "empty":
                self._load_checkpoint()
                reloaded = self.config.path
        self._measure()
        return moved(before, self.memory(), self.state, reloaded_from=reloaded)

    def reload(self) -> dict[str, Any]:
        """Load the weights from the checkpoint again: version 0, whatever state they were in."""
        before = self.memory()
        self._load_checkpoint()
        self._measure()
        return moved(before, self.memory(), self.state, reloaded_from=self.config.path)

    def _move_weights(self, state: str) -> None:
        from rlbench.weights.memory import empty_parameters, return_free_memory

        held = self.state.weights
        if state == "meta" and held != "meta":
            self._emptied = self._emptied or empty_parameters(self._built)
            self.state.weights = "meta"
            return_free_memory()
        elif state == "cpu" and held == "cuda":
            self._built.to("cpu")
            self.state.weights = "cpu"
        elif state == "cuda" and held in ("cpu", "meta"):
            for emptied in self._emptied:
                emptied.restore()
            self._emptied = []
            self._built.to(self._device)
            self.state.weights = "cuda" if held == "cpu" else "empty"

    def _from_checkpoint(self) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        from rlbench.nn.huggingface import attention_options

        given: dict[str, Any] = {"trust_remote_code": self.config.trust_remote_code}
        model = AutoModelForCausalLM.from_pretrained(
            self.config.path,
            dtype=compute_dtype(self.config, on_gpu=self._device == "cuda"),
            **given,
            **attention_options(AutoConfig.from_pretrained(self.config.path, **given)),
        )
        return model.to(self._device).eval()

    def _load_checkpoint(self) -> None:
        self._replace_model(self._from_checkpoint())
        self.commit_version(0)

    # --- weights -------------------------------------------------------------------------

    def begin_sync(self) -> None:
        """Refuse a sync that cannot be applied, before the trainer gathers anything. Changes nothing."""
        self.state.require_room("p2p_weight_sync")

    def check_weights(self, manifest: Manifest) -> None:
        """Refuse weights that do not fit. Changes nothing. Raises WeightSyncError naming them."""
        from rlbench.weights.names import check_names, checkpoint_shapes

        self.state.require_room("p2p_weight_sync")
        self._expected = self._expected or checkpoint_shapes(vllm_setup.checkpoint_folder(self.config))
        tied = getattr(self._built.config.get_text_config(), "tie_word_embeddings", False)
        check_names(manifest.shapes, self._expected, ("lm_head.weight",) if tied else ())

    def apply_weights(self, manifest: Manifest) -> None:
        """Load staged weights into a new model and exchange the two: as a whole, so a failure leaves the old
        ones.

        Raises:
            WeightSyncError: names do not match, or a transport this executor does not read.
        """
        from rlbench.weights.shm import read_manifest

        if manifest.transport != "shm":
            raise WeightSyncError(f'executor "hf" reads weights by transport "shm", not {manifest.transport!r}')
        self.check_weights(manifest)
        old = self._built
        state = {name: tensor.to(old.dtype, copy=True) for name, tensor in read_manifest(manifest)}
        new = type(old).from_pretrained(None, config=old.config, state_dict=state, dtype=old.dtype)
        new.generation_config = old.generation_config
        self._replace_model(new.to(self._device).eval())
        self.state.pending = True
        self._measure()

    def sync_facts(self) -> Facts:
        """Where this replica is, for the choice of a transport. Thread-safe, never waits."""
        from rlbench.weights import facts

        uuid = facts.gpu_uuid(self._built.device)
        return Facts(facts.node(), facts.address(), (uuid,) if uuid else (), reads=("shm",))

    def commit_version(self, version: int) -> None:
        """Declare the weights the replica holds to be `version`; it may generate from now on."""
        if self.state.weights != "cuda":
            raise StateError(f"commit_version({version}): the replica's weights are {self.state.weights}; sync first")
        self.state.version = version
        self.state.pending = False

    def release_memory_cache(self, cpu: bool, gpu: bool) -> dict[str, int]:
        """Give back what allocators keep; see `rlbench.weights.memory.release_caches`."""
        from rlbench.weights.memory import release_caches

        return release_caches(cpu, gpu)

    def _replace_model(self, model: Any) -> None:
        from rlbench.weights.memory import return_free_memory

        self._model, self._emptied = model, []
        self.state.weights = "cuda"
        gc.collect()
        return_free_memory()

    # --- control -------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Device states, version and the number of running samples. Thread-safe, never waits."""
        state = self.state
        return {
            "weights": state.weights,
            "kv_cache": state.kv_cache,
            "version": state.version,
            "pending": state.pending,
            "running": self._running,
            "paused": self.gate.closed,
        }

    def memory(self) -> dict[str, Any]:
        """Resident bytes by owner, as `memory_by_owner` has them; no KV cache between calls. Thread-safe, never
        waits.
        """
        if self._model is None or self._device == "cpu":
            return memory_by_owner(self._weight_bytes, 0, [os.getpid()])
        weights = 0 if self.state.weights in ("cpu", "meta") else self._weight_bytes
        return memory_by_owner(weights, 0, [os.getpid()], allocator(weights, 0, 0))

    def close(self) -> None:
        """Free everything."""
        self._model, self._emptied, self._weight_bytes = None, [], 0
        gc.collect()

    def _measure(self) -> None:
        self._weight_bytes = sum(
            parameter.untyped_storage().nbytes() for parameter in dict.fromkeys(self._built.parameters())
        )

    @property
    def _built(self) -> Any:
        if self._model is None:
            raise StateError("the replica is not built (or was closed); call build() first")
        return self._model


def _finished(running: list[Sample], progress: Progress) -> list[Sample]:
    """Report the samples that finished with the last step; returns the others."""
    for sample in running:
        if sample.finish:
            progress.finish(sample)
    return [sample for sample in running if not sample.finish]


def _by_length(sequences: list[list[int]], budget: int) -> Iterator[list[int]]:
    """Indices in batches of similar length whose padded size stays within `budget` tokens (at least one
    each).
    """
    batch: list[int] = []
    for index in sorted(range(len(sequences)), key=lambda i: len(sequences[i])):
        if batch and (len(batch) + 1) * len(sequences[index]) > budget:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch

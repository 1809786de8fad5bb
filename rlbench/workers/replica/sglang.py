"""One SGLang replica: a server of SGLang's in a process of its own, driven by its HTTP interface.

Weights come as a folder in shared memory that the server loads (`/update_weights_from_disk`), and prove themselves as
those of a vLLM replica do. No real server of SGLang's has run with this: see docs/sglang.md.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbench.data.rollouts.decoding import decoder
from rlbench.data.rollouts.jobs import GeneratedArrays, GenerateJob
from rlbench.dispatch.context import current
from rlbench.errors import BuildError, DataError, EngineError, RLBenchError, StateError, WeightSyncError
from rlbench.units import GIB
from rlbench.weights import facts
from rlbench.weights.manifest import Manifest
from rlbench.weights.transport import Facts
from rlbench.workers.replica.config import ReplicaConfig, checkpoint_folder, defaults
from rlbench.workers.replica.drawing import draw
from rlbench.workers.replica.job import (
    check_job,
    check_token_ids,
    collect,
    decode_texts,
    encode_job,
    told_of,
)
from rlbench.workers.replica.serving.options import ServeOptions
from rlbench.workers.replica.sglang_requests import SglangRequests, sampling_params, score
from rlbench.workers.replica.sglang_server import SglangServer, check_engine_kwargs
from rlbench.workers.replica.state import Gate, ReplicaState, check_tags, resident

if TYPE_CHECKING:
    from rlbench.workers.replica.verbs import ReplicaVerbs

IDLE_S = 30.0


@dataclass(frozen=True)
class Limits:
    """What a model holds."""

    max_model_len: int
    vocab_size: int

    def get_vocab_size(self) -> int:
        """Return it, under vLLM's name."""
        return self.vocab_size


class SglangReplica:
    """A copy of the model that generates. Log-probs are of the distribution a token was drawn from, after temperature
    and penalties; at temperature 0 the model's at temperature 1."""

    CONTROL = frozenset({"status", "memory", "sync_facts", "pause", "resume", "last_rollout", "endpoint"})

    def __init__(self, config: ReplicaConfig) -> None:
        for name, neutral in (
            ("adapters", 0),
            ("models", {}),
            ("kv_cache_bytes", None),
            ("return_routed_experts", False),
            ("delta", False),
        ):
            if getattr(config, name) != neutral:
                raise BuildError(f'{name} has no meaning for executor="sglang": leave it out, or use "vllm"')
        self.config = config
        self.state = ReplicaState()
        self.gate = Gate()
        self._last: tuple[GenerateJob, GeneratedArrays] | None = None
        self._server: SglangServer | None = None
        self._running: dict[str, Any] = {}
        self._usage = {"weights": 0, "kv_cache": 0}

    def build(self) -> dict[str, Any]:
        """Start the server and load the checkpoint; return what the driver is to know of it."""
        if self._server is not None:
            raise BuildError("this replica is built already; close the engine before building another one")
        from transformers import AutoConfig, AutoTokenizer

        from rlbench.weights.names import checkpoint_shapes

        current().report(phase="building SGLang: server, weights, KV cache")
        server = self._server = SglangServer(self.config)
        info = server.get("/server_info")
        check_engine_kwargs(self.config.engine_kwargs, info)
        trusted = self.config.trust_remote_code
        tokenizer = self.config.engine_kwargs.get("tokenizer_path") or self.config.path
        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=trusted)
        model = AutoConfig.from_pretrained(self.config.path, trust_remote_code=trusted).get_text_config()
        self._folder = checkpoint_folder(self.config)
        self._expected = checkpoint_shapes(self._folder)
        self._tied = ("lm_head.weight",) if getattr(model, "tie_word_embeddings", False) else ()
        self._limits = Limits(int(info["context_length"] or model.max_position_embeddings), int(model.vocab_size))
        self._on_cpu = info["device"] == "cpu"
        self._releases = bool(info["enable_memory_saver"])
        self._measure()
        return {
            "pid": os.getpid(),
            "pids": self._pids,
            "max_model_len": self._limits.max_model_len,
            "vocab_size": self._limits.vocab_size,
            "dtype": str(info["dtype"]),
            "kv_cache_bytes": self._usage["kv_cache"],
            "device": info["device"],
            "threads": self.config.threads,
            "adapters": 0,
            "delta": False,
            **told_of(self._tokenizer),
            "defaults": defaults(self.config, on_gpu=not self._on_cpu),
        }

    def generate(self, job: GenerateJob) -> GeneratedArrays:
        """Draw `job.n` samples of every prompt; see `VllmReplica.generate`."""
        self.state.require_ready("generate")
        check_job(job)
        _need_text(job.media, "prompt")
        if job.adapter:
            raise StateError('adapters are not held by executor="sglang": they come merged into the weights')
        limits = self._limits
        prompts, tokenizers = encode_job(job, self._tokenizer, limits.max_model_len, limits.vocab_size)
        params = sampling_params(job.sampling)
        decode = decoder(self._tokenizer, params.options.get("skip_special_tokens", True))
        most = self.config.max_num_seqs
        samples: Any
        with self._requests() as requests:
            if job.env is None:
                samples, stats = draw(requests, job, prompts, params, most, self.gate, decode)
            else:
                from rlbench.workers.replica.turns import TurnDrawer

                drawer = TurnDrawer(requests, job, prompts, params, tokenizers, decode, limits)
                samples, stats = drawer.draw(most, self.gate)
        texts = decode_texts(samples, decode, job.sampling)
        arrays = collect(samples, texts, dict(enumerate(prompts)), self.state.version, stats)
        if job.env is not None:
            from rlbench.workers.replica.turns import with_turns

            arrays = with_turns(samples, arrays)
        if job.number:
            self._last = job, arrays
        return arrays

    def last_rollout(self) -> tuple[GenerateJob, GeneratedArrays] | None:
        """The last rollout served, whole or stopped, with what was asked; never blocks."""
        return self._last

    def prompt_logprobs(self, token_ids: list[list[int]], media: Sequence[Sequence[Any]] = ()) -> list[np.ndarray]:
        """Log p(token t | tokens < t) at temperature 1, t >= 1, float32 (len - 1,) for each sequence."""
        self.state.require_ready("prompt_logprobs", committed=False)
        _need_text(media, "sequence")
        limit = self._limits.max_model_len
        for index, ids in enumerate(token_ids):
            check_token_ids(ids, f"sequence {index}", limit, limit, self._limits.vocab_size)
        return score(self.server, token_ids, limit)

    def fill_kv(self, length: int, seconds: float) -> Any:
        """Refuse a rehearsal, which counts inside vLLM's cache."""
        raise StateError('a rehearsal fills vLLM\'s KV cache from within: not with executor="sglang"')

    def serve(self, options: ServeOptions) -> int:
        """Refuse the session's endpoint, which is made of vLLM's serving classes."""
        raise StateError(
            "session.endpoint() serves by vLLM's classes, which give every sampled token. SGLang has an interface of "
            f'its own at http://{facts.LOOPBACK}:{self.server.port}/v1, whose calls are not kept; use executor="vllm"'
        )

    def balance(self, own: int, urls: Sequence[str]) -> None:
        """Do nothing: nothing is served."""

    def unserve(self) -> None:
        """Do nothing: nothing is served."""

    def endpoint(self) -> None:
        """Counts of what is served: nothing is."""

    def to_state(self, state: str, tags: list[str] | None = None) -> dict[str, Any]:
        """Move weights and KV cache to a device state, see `VllmReplica.to_state`, by SGLang's memory saver."""
        wanted = check_tags(state, tags)
        if not self._releases:
            raise StateError(
                "this SGLang server keeps its memory: it runs without its memory saver, which needs a GPU "
                "(engine_kwargs={'enable_memory_saver': True})"
            )
        before = self.memory()
        held = {"weights": self.state.weights in ("cuda", "empty", "torn"), "kv_cache": self.state.kv_cache == "cuda"}
        moved = sorted(tag for tag in wanted if held[tag] == (state != "cuda"))
        if moved:
            self._flush()
            verb = "resume" if state == "cuda" else "release"
            self.server.post(f"/{verb}_memory_occupation", {"tags": moved})
        if "kv_cache" in wanted:
            self.state.kv_cache = "cuda" if state == "cuda" else "meta"
        if "weights" in wanted:
            back = {"meta": "empty", "cpu": "cuda"}.get(self.state.weights, self.state.weights)
            self.state.weights = back if state == "cuda" else state
        return self._moved(before, reload=state == "cuda" and tags is None and self.state.weights == "empty")

    def release_memory_cache(self, cpu: bool, gpu: bool) -> dict[str, int]:
        """Give back what SGLang's allocator keeps for later, and the cache of prefixes; bytes freed."""
        before = self.memory()["rss"]
        self._flush()
        return {"cpu": max(0, before - self.memory()["rss"]) if cpu else 0, "gpu": 0}

    def reload(self) -> dict[str, Any]:
        """Load the weights from the checkpoint again: version 0, whatever state they were in."""
        return self._moved(self.memory(), reload=True)

    def _moved(self, before: dict[str, Any], reload: bool = False) -> dict[str, Any]:
        if reload:
            self.state.weights = "torn"
            self._load(self._folder)
            self.state.weights = "cuda"
            self.commit_version(0)
        self._measure()
        after, source = self.memory(), self.config.path if reload else None
        freed = before["rss"] - after["rss"]
        return {**self.state.places, "memory": after, "freed_bytes": freed, "reloaded_from": source}

    def begin_sync(self) -> tuple[dict[str, Any], Facts]:
        """Refuse a sync that cannot be applied, before the trainer gathers anything; else return `status` and
        `sync_facts`. Changes nothing."""
        self.state.require_room("p2p_weight_sync")
        return self.status(), self.sync_facts()

    def check_weights(self, manifest: Manifest) -> None:
        """Refuse weights that do not fit, before any is sent. Changes nothing."""
        from rlbench.weights.names import check_names

        self.state.require_room("p2p_weight_sync")
        if manifest.transport not in ("shm", "layout") or manifest.adapter is not None:
            raise WeightSyncError('executor="sglang" takes whole weights by transport="shm"')
        check_names(manifest.shapes, self._expected, self._tied)

    def apply_weights(self, manifest: Manifest) -> float:
        """Write staged weights as a folder in shared memory and let the server load it; generating waits for
        `commit_version`. Return the seconds that took."""
        self.check_weights(manifest)
        begin = time.perf_counter()
        self.state.weights = "torn"
        with _as_folder(manifest, self._folder) as folder:
            self._load(folder)
        self.state.weights = "cuda"
        self.state.pending = True
        self._measure()
        return time.perf_counter() - begin

    def sync_facts(self) -> Facts:
        """Where this replica is: weights reach it by the host's shared memory alone. Thread-safe, never waits."""
        return Facts(facts.node(), facts.address(), (), self.config.tensor_parallel_size)

    def commit_version(self, version: int) -> dict[str, Any]:
        """Declare the weights the replica holds to be `version`; it may generate from now on. Return its status."""
        if self.state.weights != "cuda":
            raise StateError(f"commit_version({version}): the replica's weights are {self.state.weights}; sync first")
        self.server.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        self.state.version = version
        self.state.pending = False
        return self.status()

    def pause(self) -> None:
        """Hold generation where it is; also of calls still to come."""
        self.gate.close()
        if self._running:
            self.server.post("/pause_generation", {"mode": "in_place"})

    def resume(self) -> None:
        """Let generation go on where it was."""
        if self._server is not None and self.gate.closed:
            self.server.post("/continue_generation", {})
        self.gate.open()

    def status(self) -> dict[str, Any]:
        """Device states, version and the number of running samples. Thread-safe, never waits."""
        return {**self.state.status, "running": len(self._running), "paused": self.gate.closed}

    def memory(self) -> dict[str, Any]:
        """Bytes by owner as SGLang says, and resident memory of its processes. Thread-safe, never waits."""
        pids = self._pids
        rss = sum(map(resident, pids))
        weights = 0 if self.state.weights in ("cpu", "meta") else self._usage["weights"]
        kv_cache = self._usage["kv_cache"] if self.state.kv_cache == "cuda" else 0
        rest = {"other": max(0, rss - weights - kv_cache)} if self._on_cpu else {}
        frees = {"weights": weights, "kv_cache": kv_cache} if self._releases else {"weights": 0, "kv_cache": 0}
        device = "host" if self._on_cpu else "gpu"
        parts = {"device": device, "weights": weights, "kv_cache": kv_cache, **rest}
        return {**parts, "rss": rss, "processes": len(pids), "frees": frees}

    def close(self) -> None:
        """End the server, its worker processes included."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    @property
    def server(self) -> SglangServer:
        """The server; StateError where there is none."""
        if self._server is None:
            raise StateError("the replica is not built (or was closed); call build() first")
        return self._server

    @property
    def _pids(self) -> list[int]:
        return sorted({os.getpid(), *(self._server.pids if self._server is not None else ())})

    @contextmanager
    def _requests(self) -> Iterator[SglangRequests]:
        with SglangRequests(self.server, secrets.token_hex(4), self._limits.max_model_len) as requests:
            self._running = requests.running
            yield requests

    def _load(self, folder: str) -> None:
        """Let the server load a folder's weights, as a whole, and forget what it cached."""
        try:
            self.server.post("/update_weights_from_disk", {"model_path": folder, "flush_cache": True})
        except RLBenchError as error:
            raise WeightSyncError(
                f"SGLang could not load the weights, and may hold a mixture: {error}. Sync again, or reload()"
            ) from error

    def _flush(self) -> None:
        """Empty the cache of prefixes; SGLang refuses while requests run."""
        deadline = time.monotonic() + IDLE_S
        while True:
            try:
                self.server.post("/flush_cache", {})
                return
            except EngineError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def _measure(self) -> None:
        states = self.server.get("/server_info").get("internal_states") or [{}]
        usage = [state.get("memory_usage") or {} for state in states]
        for name, theirs in (("weights", "weight"), ("kv_cache", "kvcache")):
            self._usage[name] = int(sum(float(one.get(theirs) or 0.0) for one in usage) * GIB)


if TYPE_CHECKING:
    _verbs: type[ReplicaVerbs] = SglangReplica


def _need_text(media: Sequence[Sequence[Any]], what: str) -> None:
    if (seen := next((index for index, own in enumerate(media) if own), None)) is not None:
        raise DataError(
            f'{what} {seen} has images, videos or sounds, which executor="sglang" does not take here: use '
            'executor="vllm"'
        )


@contextmanager
def _as_folder(manifest: Manifest, checkpoint: str) -> Iterator[str]:
    """Write staged tensors as a Hugging Face folder in shared memory, with the checkpoint's other files linked."""
    from safetensors.torch import save_file

    from rlbench.weights.staging import SHM_DIR, ShmReader

    reader = ShmReader()
    folder = Path(tempfile.mkdtemp(prefix="rlb-sglang-", dir=SHM_DIR))
    try:
        for path in Path(checkpoint).iterdir():
            if path.suffix in (".json", ".model", ".txt", ".jinja", ".py") and "index" not in path.name:
                (folder / path.name).symlink_to(path.resolve())
        files: dict[str, str] = {}
        for number, bucket in enumerate(manifest.buckets):
            name = f"model-{number:05d}.safetensors"
            save_file(dict(reader.read(bucket)), folder / name, {"format": "pt"})
            files |= {entry.name: name for entry in bucket.entries}
        index = {"metadata": {"total_size": manifest.nbytes}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        yield str(folder)
    except OSError as error:
        raise WeightSyncError(f"the weights do not fit beside the staged ones in {SHM_DIR}: {error}") from error
    finally:
        reader.close()
        shutil.rmtree(folder, ignore_errors=True)

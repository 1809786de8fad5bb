"""The component of a rank that keeps its state and brings it back: checkpoints, weights, exports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlbench.checkpoint import hf_folder, rank_state, writer
from rlbench.checkpoint.rank_state import State
from rlbench.checkpoint.tensor_files import local_part
from rlbench.errors import CheckpointError
from rlbench.nn.lora import NAME, Adapted
from rlbench.results import ExportedModel, Saved
from rlbench.strategies.optim.gradients import gathered
from rlbench.strategies.sharding.materialize import load_adapter, materialize
from rlbench.strategies.sharding.sources import TensorSource, locate
from rlbench.weights.manifest import Manifest
from rlbench.weights.names import check_names
from rlbench.weights.staging import ShmReader
from rlbench.workers.train.parts import RankParts

KIND, POLICY, SESSION = "session", "policy", "session.json"


class Keeping:
    """Collective verbs of a built rank."""

    def __init__(self, parts: RankParts) -> None:
        self._parts = parts
        self._control = parts.strategy.control
        self._built_with = set(State(parts.module).tensors())

    def save_checkpoint(
        self,
        root: str,
        name: str,
        session: str,
        max_num: int | None = None,
        max_gb: float | None = None,
        beside: Mapping[str, bytes] = {},
    ) -> Saved:
        """Write the whole training state, the `session`'s as JSON, and files `beside`, to disk; see `writer.save`."""
        self._parts.residency.need_kept("weights", "optimizer")
        self._control.together("looking at what is to be saved", self._need_model_as_built)
        states = {POLICY: State.of(self._parts.module)}
        files: dict[str, str | bytes] = {SESSION: session, **beside}
        return writer.save(
            self._control, Path(root), name, states, kind=KIND, files=files, max_num=max_num, max_gb=max_gb
        )

    def load_checkpoint(self, path: str) -> dict[str, Any]:
        """Go on from a checkpoint, of any number of ranks; returns `random`: whether the random state came along."""
        self._parts.residency.need("weights", "optimizer")
        state = State.of(self._parts.module)
        opened = writer.open_checkpoint(self._control, Path(path), {POLICY: state})
        part = opened.part(POLICY)
        self._control.together("comparing a checkpoint", lambda: state.check(*part, exact=False))
        with self._replacing_weights():
            self._control.together("loading a checkpoint", lambda: state.load(*part))
        if opened.random is not None:
            rank_state.set_random_state(opened.random)
        return {"random": opened.random is not None}

    def export_model(self, place: str, source: str | None, dtype: str | None = None) -> ExportedModel | None:
        """Write the weights as a Hugging Face folder, in `dtype` (None: the config's); only rank 0 returns."""
        module = self._parts.module
        self._parts.residency.need("weights")
        wanted = getattr(torch, dtype) if dtype else getattr(getattr(module, "config", None), "dtype", None)
        folder = Path(locate(source)) if source else None

        def take(tensors: Iterator[tuple[str, torch.Tensor]]) -> ExportedModel:
            cast = ((n, t.to(wanted) if wanted and t.is_floating_point() else t) for n, t in tensors)
            fill = partial(hf_folder.fill_streamed, module=module, tensors=cast, source=folder)
            return hf_folder.write_folder(Path(place), fill)

        return self._parts.sender.give("exporting the model", take)

    def export_adapter(self, place: str, base: str) -> ExportedModel | None:
        """Write the adapter as a folder of peft's, which names `base` as what it goes with; only rank 0 returns."""
        module: Any = self._parts.module
        self._parts.residency.need("weights")
        self._control.together("exporting the adapter", lambda: _need_adapter(module))

        def take(tensors: Iterator[tuple[str, torch.Tensor]]) -> ExportedModel:
            return hf_folder.write_folder(
                Path(place), lambda folder: hf_folder.fill_adapter(folder, module.peft_config[NAME], base, tensors)
            )

        return self._parts.sender.give("exporting the adapter", take, adapter=True)

    def save_weights(self, place: str, dtype: str | None) -> ExportedModel | None:
        """As `export_model`, with the tokenizer and settings of the folder the module came from, if it was one."""
        source = self._parts.module.materialization_source()
        return self.export_model(place, source if isinstance(source, str) and locate(source).is_dir() else None, dtype)

    def whole_state(self) -> dict[str, torch.Tensor]:
        """Return the whole state dict on rank 0, in host memory; empty on the others."""
        self._parts.residency.need("weights")
        return hf_folder.gather_state(self._parts.module, self._control.rank == 0, gathered)

    def load_weights(self, source: Any, own_names: bool) -> str:
        """Fill the parameters from a `materialization_source`, see `materialize`; gradients are dropped."""
        parts = self._parts
        parts.residency.need("weights")
        with self._replacing_weights():
            load = lambda: materialize(parts.module, source, parts.config.seed, own_names)  # noqa: E731
            return str(self._control.together("loading weights", load))

    def load_adapter(self, folder: str) -> None:
        """Fill the adapter from a folder of peft's; gradients are dropped."""
        module = self._parts.module
        self._parts.residency.need("weights", whole=False)
        with self._replacing_weights():
            self._control.together("loading the adapter", lambda: load_adapter(module, Path(folder)))

    def load_staged(self, staged: dict[str, Any], keep: float = 0.0) -> str:
        """Take the weights that another engine, or an earlier one, staged in shared memory; `staged`: its manifest.
        `keep`: the share of what is held that stays, in an average of both."""
        parts, manifest, reader = self._parts, Manifest.from_json(staged), ShmReader()
        parts.residency.need("weights", whole=False)
        check_names(manifest.shapes, parts.sender.layout().shapes, owner="trainer")

        def load() -> str:
            tensors = {n: t for bucket in manifest.buckets for n, t in reader.read(bucket)}
            source = TensorSource("the staged weights", tuple(tensors), tensors.__getitem__, in_memory=True)
            shards = [local_part(parameter.detach()) for parameter in parts.module.parameters()]
            held = [shard.clone() for shard in shards] if keep else []
            said = materialize(parts.module, source, parts.config.seed)
            for shard, before in zip(shards if keep else [], held, strict=True):
                shard.copy_(torch.lerp(shard.float(), before.float(), keep))
            return said

        try:
            with self._replacing_weights():
                return str(self._control.together("loading staged weights", load))
        finally:
            reader.close()

    def training_checksums(self) -> dict[str, str]:
        """Return sha256 of this rank's weights, optimizer and random state."""
        self._parts.residency.need_kept("weights")
        return rank_state.checksums(self._parts.module)

    @contextmanager
    def _replacing_weights(self) -> Iterator[None]:
        """Drop the gradients that wait, and count what is held afterwards."""
        self._parts.policy.zero_grad()
        try:
            yield
        finally:
            self._parts.residency.measure()

    def _need_model_as_built(self) -> None:
        """Refuse a checkpoint that could not be loaded: loading builds the model from its source, as it was built."""
        differ = sorted(set(State(self._parts.module).tensors()) ^ self._built_with)
        if differ:
            raise CheckpointError(
                f"{len(differ)} tensors of the module are others than it was built with (first {differ[0]}), and a "
                "checkpoint is loaded into the model as it is built: save what was added by itself "
                "(session.train.run), or make it in on_weights_materialized. session.snapshot() keeps all of it here"
            )


def _need_adapter(module: torch.nn.Module) -> None:
    if not Adapted.of(module):
        raise CheckpointError("this policy trains all its weights and has no adapter: export(path) writes them")

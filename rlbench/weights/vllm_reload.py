"""One update of a vLLM model's weights by vLLM's own reload, layer by layer: of any architecture and quantisation."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rlbench.errors import WeightSyncError, some
from rlbench.weights import vllm_gpt_oss

PartlyLoaded = weakref.WeakKeyDictionary[torch.nn.Module, int]


class Reload:
    """An update that is open: `load` for each bucket, then `end`."""

    def __init__(self, model: torch.nn.Module, config: Any, part: bool, padded: PartlyLoaded) -> None:
        """Put the layers into the state in which they take checkpoint tensors.

        Args:
            model: vLLM's.
            config: vLLM's of it.
            part: some of the weights come alone.
            padded: what `partly_loaded` found of the last update by all weights, which this one renews.
        """
        self._model, self._config, self._part, self._padded = model, config, part, padded
        initialize_layerwise_reload(model)

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load tensors by their checkpoint names, in the form in which the model's loader brings all of them into an
        update."""
        if type(self._model).__name__ == vllm_gpt_oss.ARCHITECTURE:
            weights = vllm_gpt_oss.by_loaders(self._model, weights)
        self._model.load_weights(weights)  # type: ignore[operator]

    def loaded(self) -> PartlyLoaded:
        """See `partly_loaded`; before `end`."""
        return partly_loaded(self._model)

    def end(self) -> None:
        """Pack what was loaded so far, whether or not it is all."""
        with layers_left_out() if self._part else contextlib.nullcontext():
            finalize_layerwise_reload(self._model, self._config)

    def need_whole_layers(self, loaded: PartlyLoaded) -> None:
        """Refuse an update by some of the weights that left a layer in part as it was, which a whole set does not."""
        if not self._part:
            self._padded.clear()
            self._padded.update(loaded)
        elif mixed := [layer for layer in loaded if loaded[layer] != self._padded.get(layer)]:
            raise mixed_layers(mixed)


def mixed_layers(layers: Iterable[torch.nn.Module]) -> WeightSyncError:
    """Return what to raise where only some of the tensors of these layers came."""
    return WeightSyncError(
        f"only some of the tensors that {some([type(layer).__name__ for layer in layers])} is made of here were sent, "
        "the frozen others left out as unchanged: freeze all or none of them, and report the architecture"
    )


def partly_loaded(model: torch.nn.Module) -> PartlyLoaded:
    """Return, during an update, how many elements came of each layer of which some came, but not all."""
    found: PartlyLoaded = weakref.WeakKeyDictionary()
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.load_numel_total is not None and 0 < info.load_numel < info.load_numel_total:
            found[layer] = info.load_numel
    return found


@contextlib.contextmanager
def layers_left_out() -> Iterator[None]:
    """Keep vLLM from warning of each layer of which nothing came."""
    logger = logging.getLogger(get_layerwise_info.__module__)

    def other(record: logging.LogRecord) -> bool:
        return "Failed to load weights" not in str(record.msg)

    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


def packed_copies(model: torch.nn.Module) -> weakref.WeakSet[Any]:
    """Return the packed copies (`cpu_linear`) that modules compute with now; not their ids, which new ones may take."""
    return weakref.WeakSet(module.cpu_linear for module in model.modules() if hasattr(module, "cpu_linear"))


def repack_stale(model: torch.nn.Module, packed_before: weakref.WeakSet[Any]) -> None:
    """Pack again what an update left packed from the old weights: the tied lm_head.

    vLLM on CPU renews packed copies of layers that were loaded by name; checksums do not show it. Linear layers keep no
    weight beside the packed one: a module that has both, and still the copy of before, is stale.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        stale = getattr(module, "cpu_linear", None) in packed_before
        if stale and isinstance(weight, torch.Tensor) and weight.numel() > 0:
            module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr,operator]

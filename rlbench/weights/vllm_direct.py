"""Updates of a vLLM model on a host that go straight to where an earlier one went.

vLLM finds the place of each tensor by name, counts what it loads on meta, and takes each layer apart and puts it
together again: at 10 M parameters that is half of an update. What it found stays true: which parameter a tensor goes
to, by which loader of vLLM's and with which arguments (q, k or v). An update by all weights is noted; those after it
that bring the same names, types and shapes call these loaders, and then pack what vLLM packs: straight out of what was
staged where a weight lies there as it is packed (gate and up, say, behind each other), as the second update has seen.

Whether that is done is decided here alone (`Direct.update`). By vLLM's own reload go: the first update, another set of
tensors; models whose loader makes other tensors of those that come, classes that are not
vLLM's own, layers that are not plain (mixtures of experts, quantised ones, convolutions, buffers, attention with
weights of its own); and all updates of a replica of which one was not proven (`WeightReceiver.by_reload`). A GPU's
always do.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from inspect import BoundArguments
from typing import Any, TypeAlias

import torch
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

from rlbench.errors import WeightSyncError, some
from rlbench.weights.vllm_reload import PartlyLoaded, Reload, mixed_layers

PLAIN = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""How layers may compute whose weights go straight to their places."""
Weights: TypeAlias = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Place:
    """Where a tensor goes: a parameter of its layer, by vLLM's `loader` of it; `like` is that parameter on meta, as
    large as it is before it is packed, and `slot` the argument that takes the tensor."""

    parameter: str
    like: torch.Tensor
    loader: Callable[..., Any]
    arguments: BoundArguments
    slot: str

    def fill(self, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        """Load a tensor into the parameter."""
        self.arguments.arguments |= {"param": parameter, self.slot: tensor}
        self.loader(*self.arguments.args, **self.arguments.kwargs)
        self.arguments.arguments |= {"param": self.like, self.slot: self.like}  # holds neither


Places: TypeAlias = dict[torch.nn.Module, dict[str, Place]]


class Noted(list[Any]):
    """What vLLM collects for a layer until it has all of it; `noted` is told of each."""

    def __init__(self, noted: Callable[[str, BoundArguments], None]) -> None:
        super().__init__()
        self._noted = noted

    def append(self, load: tuple[str, BoundArguments]) -> None:
        """Take in one load."""
        self._noted(*load)
        super().append(load)


class Recording(Reload):
    """An update by vLLM's reload, of which is noted where each tensor goes."""

    def __init__(
        self, model: torch.nn.Module, config: Any, padded: PartlyLoaded, keep: Callable[[Places | None], None]
    ) -> None:
        """See `Reload`; `keep` is told what was noted once all has come, None where it is not all that was done."""
        super().__init__(model, config, False, padded)
        self._keep = keep
        self._places: Places = {}
        self._here: dict[int, tuple[str, torch.Tensor]] = {}
        self._names: set[str] = set()
        self._other = False
        for layer in model.modules():
            if (info := get_layerwise_info(layer)).can_load():
                info.loaded_weights = Noted(partial(self._note, layer))

    def load(self, weights: Weights) -> None:
        """As the reload's."""
        super().load(self._named(weights))
        self._here.clear()

    def _named(self, weights: Weights) -> Weights:
        for name, tensor in weights:
            self._here[id(tensor)] = name, tensor
            self._names.add(name)
            yield name, tensor

    def _note(self, layer: torch.nn.Module, parameter: str, load: BoundArguments) -> None:
        came = [(slot, *self._here[id(value)]) for slot, value in load.arguments.items() if id(value) in self._here]
        places = self._places.setdefault(layer, {})
        if len(came) != 1 or "param" not in load.arguments or came[0][1] in places:
            self._other = True
            return
        ((slot, name, _),) = came
        like = load.arguments["param"]
        loader = like.weight_loader
        while loader.__name__ == "online_process_loader":  # which vLLM puts around it during a reload
            loader = loader.__wrapped__
        arguments = BoundArguments(load.signature, load.arguments | {slot: like})  # type: ignore[arg-type]
        places[name] = Place(parameter, like, loader, arguments, slot)

    def need_whole_layers(self, loaded: PartlyLoaded) -> None:
        """As the reload's: all has come."""
        super().need_whole_layers(loaded)
        self._keep(self._places if self._is_all() else None)

    def _is_all(self) -> bool:
        """Whether what was noted, and packing, is all that the update did."""
        noted = [name for places in self._places.values() for name in places]
        attention = [layer for layer in self._model.modules() if is_deferred_attention_layer(layer)]
        return (
            not self._other
            and sorted(noted) == sorted(self._names)
            and type(self._model).__module__.startswith("vllm.")
            and all(is_plain(layer, own.values()) for layer, own in self._places.items())
            and all(type(layer) is Attention and layer not in self._places for layer in attention)
        )


def is_plain(layer: torch.nn.Module, places: Iterable[Place]) -> bool:
    """Whether a layer's weights, outside of an update, lie in these parameters as they are loaded, or, of a matrix, are
    packed and nothing else."""
    method = type(getattr(layer, "quant_method", None))
    for place in places:
        parameter, like = layer._parameters.get(place.parameter), place.like
        packed = parameter is not None and parameter.numel() == 0 and method is not type(None)
        if parameter is None or not (packed or parameter.shape == like.shape):
            return False
        if method is not type(None) and like.ndim > 2:  # of convolutions vLLM packs some, in the parameter's place
            return False
    return method in PLAIN


class Straight:
    """An update by the places that were noted; of some of the weights where it is a `part`."""

    def __init__(self, places: Places, stacked: dict[torch.nn.Module, bool], part: bool) -> None:
        """See above; `stacked`: of layers, where known, whether a weight is its tensors behind each other and is packed
        into a copy."""
        self._places = places
        self._layers = {name: layer for layer, own in places.items() for name in own}
        self._stacked = stacked
        self._waiting: dict[torch.nn.Module, dict[str, torch.Tensor]] = {}
        self._missing = set() if part else set(self._layers)

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Load tensors by their checkpoint names, each layer once all of its own are there."""
        for name, tensor in weights:
            layer = self._layers[name]
            waiting = self._waiting.setdefault(layer, {})
            waiting[name] = tensor
            self._missing.discard(name)
            if len(waiting) == len(self._places[layer]):
                self._fill(layer, self._waiting.pop(layer))

    def _fill(self, layer: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        own, known = dict(layer._parameters), layer in self._stacked
        try:
            for parameter in {place.parameter for place in self._places[layer].values()}:
                places = {name: place for name, place in self._places[layer].items() if place.parameter == parameter}
                self._set(layer, parameter, places, tensors)
            unpacked = layer._parameters.get("weight")
            if (method := getattr(layer, "quant_method", None)) is not None:
                method.process_weights_after_loading(layer)
            if not known and self._stacked.get(layer):
                self._stacked[layer] = unpacked is not None and is_copied(layer, unpacked)
        finally:
            layer._parameters.update(own)

    def _set(
        self, layer: torch.nn.Module, name: str, places: dict[str, Place], tensors: dict[str, torch.Tensor]
    ) -> None:
        """Load the tensors of one parameter; of one that is packed, and kept as that alone, its weight as it was before
        that: where it is what lies there, in one piece, it is not copied."""
        parameter: Any = layer._parameters[name]
        like = next(iter(places.values())).like
        packed = parameter.shape != like.shape
        whole = in_one_piece([tensors[source] for source in places]) if packed else None
        if whole is not None and self._stacked.get(layer):
            layer._parameters[name] = torch.nn.Parameter(whole, requires_grad=False)
            return
        if packed:
            parameter = layer._parameters[name] = materialize_meta_tensor(like)
        for source, place in places.items():
            place.fill(parameter, tensors[source])
        if whole is not None and layer not in self._stacked:
            self._stacked[layer] = whole.dtype == parameter.dtype and torch.equal(whole, parameter)

    def loaded(self) -> PartlyLoaded:
        """Return how many elements came of each layer of which some came, but not all."""
        came = {layer: sum(one.numel() for one in own.values()) for layer, own in self._waiting.items()}
        return weakref.WeakKeyDictionary(came)

    def end(self) -> None:
        """Leave the layers as they were of which not all came."""
        self._waiting.clear()

    def need_whole_layers(self, loaded: PartlyLoaded) -> None:
        """Refuse an end before all has come, or of a part the whole of its layers."""
        if loaded:
            raise mixed_layers(loaded)
        if self._missing:
            raise WeightSyncError(f"not all weights came, as was said: {some(sorted(self._missing))} did not")


def is_copied(layer: torch.nn.Module, unpacked: torch.Tensor) -> bool:
    """Whether what a layer computes with is a copy of the weight that it was packed from, which is lost to find out:
    some of vLLM's kernels go on with that one, and what was staged is written over."""
    linear: Any = getattr(layer, "cpu_linear", None)
    if linear is None:
        return False
    one = torch.ones(1, unpacked.shape[-1], dtype=unpacked.dtype)
    before = linear(one, layer._parameters["weight"], None)
    unpacked.fill_(math.nan)
    return torch.equal(linear(one, layer._parameters["weight"], None), before)


def in_one_piece(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """Return tensors that lie behind each other in memory as one, their rows in that order; None where they do not."""
    first, end = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        alike = (tensor.dtype, tensor.shape[1:]) == (first.dtype, first.shape[1:]) and tensor.is_contiguous()
        if not (same and alike and tensor.data_ptr() == end):
            return None
        end += tensor.nbytes
    return first.as_strided((sum(len(tensor) for tensor in tensors), *first.shape[1:]), first.stride())


class Direct:
    """Opens the updates of a model: by vLLM's reload, or straight."""

    def __init__(self, model: torch.nn.Module, config: Any, padded: PartlyLoaded) -> None:
        self._model, self._config, self._padded = model, config, padded
        self._layout = 0
        self._places: Places | None = None
        self._stacked: dict[torch.nn.Module, bool] = {}

    def update(self, part: bool, layout: int) -> Reload | Straight:
        """Open an update, by some of the weights where it is a `part`; `layout`: a hash of all names, types and shapes
        that are loaded then, those before among them where this is a part; 0: they go by vLLM's reload."""
        if layout and layout == self._layout and self._places is not None:
            return Straight(self._places, self._stacked, part)
        if part or not layout or layout == self._layout:
            return Reload(self._model, self._config, part, self._padded)
        return Recording(self._model, self._config, self._padded, partial(self._keep, layout))

    def _keep(self, layout: int, places: Places | None) -> None:
        """Take in what was noted of a whole update by these tensors, None where it was not all that it did."""
        self._layout, self._places, self._stacked = layout, places, {}

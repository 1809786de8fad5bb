"""LoRA adapters that a worker of vLLM holds: built by vLLM from what comes, and written again in their places where the
same tensors come again, as in all syncs but the first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from rlbench.weights.manifest import AdapterInfo

Named = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class Place:
    """Where the tensors of an adapter lie: in vLLM's model of it, from which vLLM may fill a slot again, and in the
    slot that its layers compute with."""

    info: AdapterInfo
    layout: int  # of its tensors; 0: none that is known
    model: LoRAModel
    slot: int
    tensors: dict[str, Tensor]  # the model's, by the names they come by
    slots: list[Tensor]  # in the same order
    scale: float  # of Bs in both

    def takes(self, info: AdapterInfo, layout: int, manager: Any) -> bool:
        """Whether an adapter of this description goes where this one is, and it is still there."""
        is_here = manager.get_adapter(info.number) is self.model and manager.lora_index_to_id[self.slot] == info.number
        return bool(layout) and (info, layout) == (self.info, self.layout) and is_here

    def write(self, tensors: Named) -> None:
        """Write tensors of the adapter into vLLM's model of it."""
        named = list(tensors)
        torch._foreach_copy_([self.tensors[name] for name, _ in named], [tensor for _, tensor in named])

    def fill_slot(self) -> None:
        """Scale what was written, all of it, as vLLM does, and compute with it from now on."""
        if self.scale != 1:
            torch._foreach_mul_([tensor for name, tensor in self.tensors.items() if _is_up(name)], self.scale)
        torch._foreach_copy_(self.slots, list(self.tensors.values()))


class HeldAdapters:
    """The adapters of a worker whose `runner` was made for some, by their numbers."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._places: dict[int, Place] = {}
        self._place: Place | None = None
        self._coming: dict[str, Tensor] = {}

    def start(self, info: AdapterInfo, layout: int) -> None:
        """Begin to take an adapter, whose tensors are those of a `layout`; until it ends it is not to be served."""
        self._info, self._layout, self._coming = info, layout, {}
        place = self._places.pop(info.number, None)
        self._place = place if place is not None and place.takes(info, layout, self._manager) else None

    def take(self, tensors: Named) -> None:
        """Take some of its tensors; none of them is kept."""
        if self._place is not None:
            self._place.write(tensors)
            return
        for name, tensor in tensors:  # vLLM copies them into its slots
            self._coming[name] = tensor.to("cpu", self._dtype, copy=True)

    def finish(self) -> None:
        """Serve what came by the adapter's number."""
        place, self._place = self._place, None
        if place is not None:
            place.fill_slot()
        else:
            place = self._built()
        if place is not None:
            self._places[self._info.number] = place

    def set_aside(self, number: int) -> Callable[[], None]:
        """Keep what is served by a number, perhaps nothing; return what serves that again."""
        model = self._manager.get_adapter(number)
        self._places.pop(number, None)  # which would be written over
        return lambda: self._serve(number, model)

    def _built(self) -> Place | None:
        """Have vLLM build and serve what came; return where it lies, None where that cannot be told."""
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        info, coming, self._coming = self._info, self._coming, {}
        helper = PEFTHelper.from_dict({"r": info.rank, "lora_alpha": info.alpha, "target_modules": list(info.targets)})
        model = LoRAModel.from_lora_tensors(
            lora_model_id=info.number,
            tensors=coming,
            peft_helper=helper,
            device="cpu",
            dtype=self._dtype,
            weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,  # vLLM stacks layers itself
        )
        self._serve(info.number, model)
        if not self._layout:
            return None
        slot = self._manager.lora_index_to_id.index(info.number)
        slots = _slots(self._manager.modules, model, slot, coming)
        if slots is None:
            return None
        return Place(info, self._layout, model, slot, coming, slots, helper.vllm_lora_scaling_factor)

    def _serve(self, number: int, model: LoRAModel | None) -> None:
        """Have the adapter of a number be this one, None: none."""
        self._manager.remove_adapter(number)
        if model is not None:
            self._manager.add_adapter(model)
            self._manager.activate_adapter(number)

    @property
    def _manager(self) -> Any:
        """vLLM's manager of the adapters of its model."""
        return self._runner.lora_manager._adapter_manager

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._runner.lora_manager.lora_config.lora_dtype
        return dtype


def _slots(modules: dict[str, Any], model: LoRAModel, slot: int, tensors: dict[str, Tensor]) -> list[Tensor] | None:
    """Return where each of the `tensors` that vLLM built a `model` of lies in its layers' slot; None where one lies
    nowhere, or otherwise than as it is: cut for a worker's part of a layer, joined with others, pinned."""
    places: dict[int, Tensor] = {}
    for name, module in modules.items():
        weights = model.get_lora(name)
        if weights is not None:
            places |= {id(tensor): place for tensor, place in _of_layer(weights, module, slot)}
    slots = [places.get(id(tensor)) for tensor in tensors.values()]
    if all(place is not None and torch.equal(place, t) for place, t in zip(slots, tensors.values(), strict=True)):
        return [place for place in slots if place is not None]
    return None


def _of_layer(weights: Any, module: Any, slot: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Give each matrix of a layer with its place in a slot, where the layer has as many as came for it."""
    for held, name in ((weights.lora_a, "lora_a_stacked"), (weights.lora_b, "lora_b_stacked")):
        matrices, buffers = held if isinstance(held, list) else [held], getattr(module, name, ())
        if len(matrices) != len(buffers):  # vLLM splits or repeats some
            continue
        for matrix, buffer in zip(matrices, buffers, strict=True):
            if matrix is not None and matrix.dim() == 2 and buffer.dim() == 4:
                yield matrix, buffer[slot, 0, : matrix.shape[0], : matrix.shape[1]]


def _is_up(name: str) -> bool:
    return ".lora_B." in name

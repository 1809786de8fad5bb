"""What of a micro-batch this rank runs: all of it, or a slice of its tokens where ranks split sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rlbench.errors import DataError
from rlbench.strategies.ranks.control import ControlGroup
from rlbench.strategies.ranks.sequence import SequenceGroup
from rlbench.trainers.passes.attention import packed_attention
from rlbench.trainers.passes.outputs import Request, TokenOutputs
from rlbench.trainers.passes.packing import ModelInputs


@dataclass(frozen=True)
class Share:
    """Of a micro-batch with R response tokens: `inputs`, for the model, as one row where `packed`; with the places and
    targets of the R tokens that it predicts here. `counts`: how many each rank of the group predicts."""

    inputs: ModelInputs
    packed: bool
    ranks: SequenceGroup
    counts: tuple[int, ...]

    def asked(self, request: Request) -> Request:
        """Return what is asked of the tokens here."""
        if self.ranks.size == 1 or request.candidates is None:
            return request
        return replace(request, candidates=request.candidates.split(self.counts)[self.ranks.index])

    def joined(self, own: Tensor) -> Tensor:
        """Return what the pass gives of all R tokens, (R, …), from those here; collective. A loss of it gives each rank
        the gradient of its own tokens."""
        return own if self.ranks.size == 1 else self.ranks.joined(own, self.counts)

    def outputs(self, own: TokenOutputs) -> TokenOutputs:
        """Join all that a pass gave; collective."""
        if self.ranks.size == 1:
            return own
        return TokenOutputs(**{name: self.joined(v) for name, v in vars(own).items() if v is not None})


@contextmanager
def shared(module: nn.Module, inputs: ModelInputs, packed: bool, ranks: SequenceGroup) -> Iterator[Share]:
    """Have the model attend within the sequences of `inputs`; run the backward inside the context.

    Split rows lie one behind the other in any case, padding and all where not `packed`; some tokens of a sequence of
    their own fill up the last slice.
    """
    if ranks.size == 1:
        with packed_attention(module, inputs.lengths, after=inputs.after) if packed else nullcontext():
            yield Share(inputs, packed, ranks, (len(inputs.targets),))
        return
    rows, width = inputs.input_ids.shape
    lengths = list(inputs.lengths) if packed else [width] * rows
    fill = -(rows * width) % ranks.size
    size = (rows * width + fill) // ranks.size
    first = ranks.index * size
    bounds = torch.arange(1, ranks.size, device=inputs.predictors.device) * size
    cuts = torch.searchsorted(inputs.predictors, bounds).tolist()
    counts = tuple(end - begin for begin, end in zip([0, *cuts], [*cuts, len(inputs.predictors)], strict=True))
    own = lambda tensor: pad(tensor.reshape(1, -1), (0, fill))[:, first : first + size]  # noqa: E731
    here = replace(
        inputs,
        input_ids=own(inputs.input_ids),
        position_ids=own(inputs.position_ids),
        attention_mask=None,
        routing=None,
        predictors=inputs.predictors.split(counts)[ranks.index] - first,
        targets=inputs.targets.split(counts)[ranks.index],
    )
    with packed_attention(module, [*lengths, *([fill] if fill else [])], ranks):
        yield Share(here, True, ranks, counts)


@contextmanager
def own_slices(module: nn.Module, tokens: int, ranks: SequenceGroup, control: ControlGroup) -> Iterator[None]:
    """Let each forward of `module` take its token ids (rows, n) as this rank's slice of rows of so many `tokens`; run
    the backward inside the context."""

    def placed(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        ids: Any = given.get("input_ids", args[0] if args else None)
        mask = given.pop("attention_mask", None)

        def check() -> None:
            if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] * ranks.size != tokens:
                seen = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
                raise DataError(f"the module was called with {seen}; wanted a slice, (rows, {tokens // ranks.size}).")
            if mask is not None and not mask.all():
                raise DataError("leave attention_mask out of split sequences: no token sees padding to its right.")

        control.together("a slice of sequences", check)
        places = torch.arange(tokens, device=ids.device).chunk(ranks.size)[ranks.index].expand(len(ids), -1)
        return args, {"use_cache": False, "position_ids": places, **given}

    hook = module.register_forward_pre_hook(placed, with_kwargs=True)
    try:
        with packed_attention(module, [tokens], ranks):
            yield
    finally:
        hook.remove()

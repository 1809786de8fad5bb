"""Attention over a packed row: each sequence attends to itself alone, without ever building a mask.

Where ranks split the row's tokens, each computes some heads of all tokens (Ulysses, arXiv 2309.14509), with two
exchanges per layer; where heads do not divide by ranks, all heads of its own tokens (`ring`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rlbench.errors import EngineError
from rlbench.strategies.internals import attention_of, flash_attention, has_attention, set_attention
from rlbench.strategies.ranks.sequence import ALONE, SequenceGroup
from rlbench.trainers.passes.prefixes import OWN
from rlbench.trainers.passes.ring import ring_attention

NAME = "rlbench_packed"
_lengths: list[int] = []
_after: list[int] = []
_ends: dict[torch.device, tuple[Tensor, Tensor]] = {}
_masks: dict[tuple[int, int, int | None, torch.device], Tensor] = {}
_ranks = [ALONE]
FLASH_SINCE, MOST_WIDTH = (8, 0), 256
"""Compute capability, and width of a head, that the flash kernel needs."""


class NotCausal(EngineError):
    """Rows cannot be packed for a model whose attention is not causal, or masked by itself."""


@contextmanager
def packed_attention(
    module: nn.Module, lengths: list[int], ranks: SequenceGroup = ALONE, after: list[int] | None = None
) -> Iterator[None]:
    """Make a transformers model attend within sequences of these lengths, of which a row is made; keep it on until the
    backward is done.

    `ranks`: that hold a slice each of the row's tokens, all of one length. `after`: for each sequence the number of an
    earlier one, which does so for none, that it continues and sees as a whole (`prefixes.Places`).
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    own = getattr(module, "config", None)  # towers attend within each image or sound by themselves
    towers = {id(getattr(own, name, None)) for name in ("vision_config", "audio_config")}
    configs = {id(m.config): m.config for m in module.modules() if hasattr(m, "config") and id(m.config) not in towers}
    chosen = [(c, attention_of(c)) for c in configs.values() if has_attention(c)]
    _lengths[:], _after[:], _ranks[:] = lengths, after or [OWN] * len(lengths), [ranks]
    try:
        for config, _ in chosen:
            set_attention(config, NAME)
        yield
    finally:
        for config, before in chosen:
            set_attention(config, before)
        for held in (_lengths, _after, _ends, _masks):
            held.clear()
        _ranks[:] = [ALONE]


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention signature; query (rows, heads, tokens, width) → (rows, tokens, heads, width)."""
    causal = options.pop("is_causal", None)
    if not (getattr(module, "is_causal", True) if causal is None else causal) or attention_mask is not None:
        raise NotCausal(f"{type(module).__name__} cannot run packed: it is not causal attention")
    ranks = _ranks[0]
    if query.shape[2] * ranks.size != sum(_lengths):
        seen = query.shape[2] * ranks.size
        raise EngineError(f"packed attention got {seen} positions for {sum(_lengths)}: packing=False.")
    known = ("dropout", "scaling", "sliding_window", "softcap", "s_aux")
    options = {name: value for name, value in options.items() if name in known}
    if ranks.size == 1:
        return _attend_row(query, key, value, **options), None
    if query.shape[1] % ranks.size:
        return ring_attention(query, key, value, _lengths, ranks, **options), None
    copies = ranks.copies(key.shape[1])
    if copies > 1:
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    if options.get("s_aux") is not None:
        options["s_aux"] = ranks.own_heads(options["s_aux"])
    return ranks.to_tokens(_attend_row(*ranks.to_heads(query, key, value), **options)), None


def _attend_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attend over whole rows; query (rows, heads, total, width) → (rows, total, heads, width).

    Neighbouring sequences of one length that continue the same, or none, go through one call.
    """
    if softcap is None and s_aux is None and not dropout and len(query) == 1 and fits_one_kernel(query, value):
        return _in_one_kernel(query, key, value, scaling, sliding_window)
    runs = [(*kind, len(list(run))) for kind, run in groupby(zip(_lengths, _after, strict=True))]
    spans = [count * length for length, _, count in runs]
    # split, not sliced: the gradient of each slice would be as large as the whole row, and summed to the others'
    parts = zip(*(t.split(spans, dim=2) for t in (query, key, value)), strict=True)
    outputs, before = [], _Before(shared=max(_after) != OWN)
    for (length, trunk, count), part in zip(runs, parts, strict=True):
        q, k, v = (t.unflatten(2, (count, length)).transpose(1, 2) for t in part)  # (rows, count, heads, length, width)
        k, v = before.continued(trunk, k, v)
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        mask = _mask(length, k.shape[2], sliding_window, q.device)
        attended = _within(q, k, v, mask, dropout, scaling, softcap, s_aux)
        outputs.append(attended.transpose(1, 2).reshape(len(query), count * length, q.shape[1], v.shape[-1]))
    return torch.cat(outputs, dim=1)


class _Before:
    """Keys and values of sequences that later ones continue, where some do."""

    def __init__(self, shared: bool) -> None:
        self._shared = shared
        self._sequences: list[tuple[Tensor, Tensor]] = []  # (rows, 1, heads, length, width) each

    def continued(self, trunk: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of a run of sequences, (rows, count, heads, length, width), behind those of the one
        that they continue."""
        if trunk != OWN:
            pairs = zip(self._sequences[trunk], (key, value), strict=True)
            key, value = (torch.cat([seen.expand(-1, own.shape[1], -1, -1, -1), own], dim=3) for seen, own in pairs)
        elif self._shared:  # split, as above
            self._sequences += zip(key.split(1, dim=1), value.split(1, dim=1), strict=True)
        return key, value


def _within(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """Attend within sequences of one length; (count, heads, length, width). `mask` None: causal."""
    if softcap is not None or s_aux is not None:
        return _with_scores(q, k, v, mask, dropout, scaling, softcap, s_aux)
    if q.is_meta:  # where torch would take the way that keeps all scores, as no kernel of a device does
        found: Tensor = flash_attention(q, k, v, dropout, mask is None, attn_mask=mask, scale=scaling)[0]
        return found
    shared = {"is_causal": mask is None, "scale": scaling, "enable_gqa": q.shape[1] != k.shape[1]}
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, **shared)


def fits_one_kernel(query: Tensor, value: Tensor) -> bool:
    """Say whether torch's flash kernel takes a row of sequences in one call: half precision, on a GPU that has it."""
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    alike = query.shape[-1] == value.shape[-1] <= MOST_WIDTH
    return alike and torch.cuda.get_device_capability(query.device) >= FLASH_SINCE


def _in_one_kernel(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """Attend in one call, whatever the lengths; (1, heads, total, width) → (1, total, heads, width)."""
    from torch.nn.attention.varlen import varlen_attn

    seen = [length + (0 if trunk == OWN else _lengths[trunk]) for length, trunk in zip(_lengths, _after, strict=True)]
    if query.device not in _ends:  # all layers read the same, which the host waits for once
        ends = torch.tensor([[0, *accumulate(sizes)] for sizes in (_lengths, seen)], dtype=torch.int32)
        _ends[query.device] = ends.to(query.device).unbind()
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if seen != _lengths:
        k, v = (_with_before(tensor) for tensor in (k, v))
    attended = varlen_attn(
        *(tensor.contiguous() for tensor in (q, k, v)),
        *_ends[query.device],
        *(max(_lengths), max(seen)),
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),  # counted from the last key, that of the last query
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return attended[None]  # type: ignore[index]


def _with_before(row: Tensor) -> Tensor:
    """Put before each sequence of (total, heads, width) a copy of the one that it continues."""
    own = row.split(_lengths)
    pieces = ([part] if trunk == OWN else [own[trunk], part] for part, trunk in zip(own, _after, strict=True))
    return torch.cat([piece for both in pieces for piece in both])


def _with_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention that needs its scores: capped by a tanh (Gemma 2), or with a sink per head that takes its share of the
    softmax (gpt-oss)."""
    groups, queries, keys = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.mT * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = mask if mask is not None else torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1).to(scores)], dim=-1)
    shares = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., :keys].to(query.dtype)
    return torch.nn.functional.dropout(shares, dropout) @ value


def _mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """Mask (queries, keys) of the last places of a sequence where it has more keys than they, or a sliding window cuts
    into it; else None (plain causal)."""
    if queries == keys and (window is None or keys <= window):
        return None
    kind = queries, keys, window, device
    if kind not in _masks:
        place = torch.arange(keys, device=device)
        distance = place[keys - queries :, None] - place
        _masks[kind] = (distance >= 0) & (distance < (keys if window is None else window))
    return _masks[kind]

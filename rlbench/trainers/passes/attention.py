"""Attention over a packed row: each sequence attends to itself alone, without ever building a mask.

Registered with transformers under a name of its own and switched on only around packed passes, so that a
user's padded calls keep the implementation they chose.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from rlbench.errors import EngineError

NAME = "rlbench_packed"
_lengths: list[int] = []


@contextmanager
def packed_attention(module: nn.Module, lengths: list[int]) -> Iterator[None]:
    """Make `module` attend within sequences of these lengths; keep it on until the backward is done.

    Args:
        module: a transformers model that reads its attention from `AttentionInterface`.
        lengths: of the sequences in the packed row, in order.
    """
    _register()
    configs = {id(m.config): m.config for m in module.modules() if hasattr(m, "config")}
    chosen = [(c, c._attn_implementation) for c in configs.values() if hasattr(c, "_attn_implementation")]
    _lengths[:] = lengths
    try:
        for config, _ in chosen:
            config._attn_implementation_internal = NAME
        yield
    finally:
        for config, before in chosen:
            config._attn_implementation_internal = before
        _lengths.clear()


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature; query (1, heads, total, width) → (1, total, heads, width).

    Neighbouring sequences of one length go through one call. Raises EngineError for what it does not compute.
    """
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if not causal or attention_mask is not None:
        raise EngineError(f"{type(module).__name__} cannot run packed (it is not causal attention): packing=False.")
    if query.shape[2] != sum(_lengths):
        raise EngineError(
            f"packed attention got {query.shape[2]} positions for sequences of {sum(_lengths)}: packing=False."
        )
    outputs, start = [], 0
    for length, run in groupby(_lengths):
        count = len(list(run))
        span = slice(start, start + count * length)
        q, k, v = (_batched(t[:, :, span], count, length) for t in (query, key, value))
        mask = _window(length, sliding_window, q.device)
        if softcap is not None or s_aux is not None:
            attended = _with_scores(q, k, v, mask, dropout, scaling, softcap, s_aux)
        else:
            attended = scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        outputs.append(attended.transpose(1, 2).reshape(1, count * length, q.shape[1], v.shape[-1]))
        start += count * length
    return torch.cat(outputs, dim=1), None


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
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.mT * (scaling if scaling is not None else query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = mask if mask is not None else torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1).to(scores)], dim=-1)
    shares = torch.softmax(scores, dim=-1, dtype=torch.float32)[..., :length].to(query.dtype)
    return torch.nn.functional.dropout(shares, dropout) @ value


def _batched(tensor: Tensor, count: int, length: int) -> Tensor:
    """(1, heads, count * length, width) → (count, heads, length, width)."""
    heads, width = tensor.shape[1], tensor.shape[3]
    return tensor.reshape(heads, count, length, width).transpose(0, 1)


def _window(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Mask of a sliding window where one cuts into the sequence; else None (plain causal)."""
    if window is None or length <= window:
        return None
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)

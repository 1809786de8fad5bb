"""The policy losses once more: slow loops over floats, written from the formulas; and inputs to try them on."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch

from rlbench.rl.policy import PolicyLoss
from rlbench.rl.types import LossInputs

BOUND = 20.0


def make_inputs(
    seed: int = 0,
    lengths: tuple[int, ...] = (5, 3, 4),
    holes: bool = True,
    spread: float = 0.4,
    dtype: torch.dtype = torch.float64,
    per_token: bool = False,
    ref: bool = True,
    outside: float = float("nan"),
) -> LossInputs:
    """Ragged responses with holes in the mask (tool output), `outside` wherever the mask is False.

    A length of 0 is a row without trained tokens. Advantages are one per row unless `per_token`.
    """
    random = np.random.default_rng(seed)
    rows, width = len(lengths), max(max(lengths), 1)
    mask = np.arange(width)[None] < np.array(lengths)[:, None]
    if holes:
        mask &= random.random((rows, width)) < 0.85
    old = -3 * random.random((rows, width)) - 0.05
    advantages = random.normal(size=(rows, width if per_token else 1)) + np.zeros((rows, width))

    def around(base: np.ndarray, scale: float = spread) -> np.ndarray:
        return base + scale * random.normal(size=base.shape)

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.where(mask, values, outside)).to(dtype)

    return LossInputs(
        logprobs=tensor(around(old)).requires_grad_(),
        old_logprobs=tensor(old),
        sampler_logprobs=tensor(around(old, 0.1)),
        ref_logprobs=tensor(around(old)) if ref else None,
        advantages=tensor(advantages),
        mask=torch.from_numpy(mask),
        entropy=tensor(random.random((rows, width))).requires_grad_(),
        group=torch.arange(rows),
    )


def values(x: LossInputs) -> dict[str, np.ndarray]:
    """The inputs as float64 arrays by short names, 0 where untrained."""
    mask = x.mask.numpy()

    def plain(tensor: torch.Tensor) -> np.ndarray:
        return np.where(mask, tensor.detach().double().numpy(), 0.0)

    return {
        "new": plain(x.logprobs),
        "old": plain(x.old_logprobs),
        "sampler": plain(x.sampler_logprobs),
        "ref": mask * 0.0 if x.ref_logprobs is None else plain(x.ref_logprobs),
        "adv": plain(x.advantages),
        "entropy": plain(x.entropy),
        "mask": mask,
    }


def clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def ratio(new: float, old: float) -> float:
    return math.exp(clamp(new - old, -BOUND, BOUND))


def ppo(new: float, old: float, adv: float, f: PolicyLoss) -> float:
    return _ppo_of_ratio(ratio(new, old), adv, f)


def _ppo_of_ratio(r: float, adv: float, f: PolicyLoss) -> float:
    free = r if f.delta is None else min(r, f.delta)
    loss = max(-adv * free, -adv * clamp(r, 1 - f.clip_low, 1 + f.clip_high))
    if f.dual_clip is not None and adv < 0:
        loss = min(loss, -adv * f.dual_clip)
    return loss


def reinforce(new: float, old: float, adv: float, f: PolicyLoss) -> float:
    return -adv * new


def sft(new: float, old: float, adv: float, f: PolicyLoss) -> float:
    return -new


def importance_sampling(new: float, old: float, adv: float, f: PolicyLoss) -> float:
    return -adv * ratio(new, old)


def cispo(new: float, old: float, adv: float, f: PolicyLoss) -> float:
    return -adv * new * clamp(ratio(new, old), 1 - f.clip_low, 1 + f.clip_high)


def sapo(new: float, old: float, adv: float, f: PolicyLoss) -> float:
    tau = f.tau_pos if adv > 0 else f.tau_neg
    exponent = clamp(-tau * (ratio(new, old) - 1), -700, 700)
    return -adv * 4 / tau / (1 + math.exp(exponent))


def cpgd(new: float, old: float, adv: float, f: PolicyLoss) -> float:
    high, low = old + math.log(1 + f.clip_high), old + math.log(1 - f.clip_low)
    held = min(new, high) if adv > 0 else max(new, low)
    z = clamp(new - old, -BOUND, BOUND)
    return -adv * held + f.drift_coef * (math.exp(z) - 1 - z)


def dro(new: float, old: float, adv: float, f: PolicyLoss) -> float:
    return -(adv * new - f.beta / 2 * (new - old) ** 2)


def dppo_tv(new: float, old: float, adv: float, f: PolicyLoss) -> float:
    moved = math.exp(new) - math.exp(old)
    kept = moved <= f.delta_high if adv > 0 else moved >= -f.delta_low
    return -adv * min(ratio(new, old), f.cap) * new if kept else 0.0


def dppo_kl(new: float, old: float, adv: float, f: PolicyLoss) -> float:
    p, q = math.exp(new), math.exp(old)
    kl = q * (old - new) + (1 - q) * math.log((max(1 - q, 0) + 1e-8) / (max(1 - p, 0) + 1e-8))
    kept = (kl <= f.delta_high or p <= q) if adv > 0 else (kl <= f.delta_low or p >= q)
    return -adv * min(ratio(new, old), f.cap) * new if kept else 0.0


BY_TOKEN = {
    "ppo": ppo,
    "grpo": ppo,
    "dapo": ppo,
    "dr_grpo": ppo,
    "bnpo": ppo,
    "decoupled_ppo": ppo,
    "reinforce": reinforce,
    "gpg": reinforce,
    "sft": sft,
    "importance_sampling": importance_sampling,
    "cispo": cispo,
    "sapo": sapo,
    "cpgd": cpgd,
    "dro": dro,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
}


def gspo(new: list[float], old: list[float], adv: list[float], f: PolicyLoss) -> list[float]:
    mean = sum(a - b for a, b in zip(new, old, strict=True)) / len(new)
    s = math.exp(clamp(mean, -BOUND, BOUND))
    return [_ppo_of_ratio(s, a, f) for a in adv]


def gmpo(new: list[float], old: list[float], adv: list[float], f: PolicyLoss) -> list[float]:
    total = 0.0
    for n, o, a in zip(new, old, adv, strict=True):
        if a > 0:
            total += min(n - o, f.clip_high)
        elif a < 0:
            total += max(n - o, -f.clip_low)
    mean_advantage = sum(adv) / len(adv)
    return [-mean_advantage * math.exp(clamp(total / len(new), -BOUND, BOUND))] * len(new)


def vespo(new: list[float], old: list[float], adv: list[float], f: PolicyLoss) -> list[float]:
    total = sum(clamp(n - o, -BOUND, BOUND) for n, o in zip(new, old, strict=True))
    w = math.exp(clamp(total, math.log(1e-8), 20.0))
    out = []
    for n, a in zip(new, adv, strict=True):
        k, rate = (f.k_pos, f.lambda_pos) if a >= 0 else (f.k_neg, f.lambda_neg)
        out.append(-a * n * math.exp(rate) * w**k * math.exp(-rate * w))
    return out


BY_SEQUENCE = {"gspo": gspo, "luspo": gspo, "gmpo": gmpo, "vespo": vespo}


def covariances(v: dict[str, np.ndarray]) -> np.ndarray:
    mask = v["mask"]
    count = mask.sum()
    mean_a, mean_p = v["adv"][mask].sum() / count, v["new"][mask].sum() / count
    return np.where(mask, (v["adv"] - mean_a) * (v["new"] - mean_p), -np.inf)


def chosen_by_covariance(loss: PolicyLoss, v: dict[str, np.ndarray]) -> tuple[np.ndarray, int]:
    """Which tokens may be chosen, and how many are."""
    cov = covariances(v)
    count = max(1, math.floor(loss.fraction * v["mask"].sum() + 1e-9))
    if loss.name == "kl_cov":
        order = np.argsort(-cov, axis=None)[:count]
        picked = np.zeros(cov.size, bool)
        picked[order] = True
        return picked.reshape(cov.shape) & v["mask"], count
    clipped = np.zeros(cov.shape, bool)
    for place in np.argwhere(v["mask"]):
        i, t = place
        r, a = ratio(v["new"][i, t], v["old"][i, t]), v["adv"][i, t]
        clipped[i, t] = (a > 0 and r > 1 + loss.clip_high) or (a < 0 and r < 1 - loss.clip_low)
    return v["mask"] & ~clipped & (cov > loss.low) & (cov < loss.high), count


def surrogate(loss: PolicyLoss, x: LossInputs) -> np.ndarray:
    """The policy term per token, float64. For clip_cov: PPO's, with nothing dropped yet."""
    v = values(x)
    old = v["sampler"] if loss.anchor == "sampler" else v["old"]
    out = np.zeros(v["mask"].shape)
    if loss.name in BY_SEQUENCE:
        for i, row in enumerate(v["mask"]):
            places = [t for t in range(len(row)) if row[t]]
            if places:
                columns = [[float(c[i, t]) for t in places] for c in (v["new"], old, v["adv"])]
                out[i, places] = BY_SEQUENCE[loss.name](*columns, loss)
        return out
    by_token = {"clip_cov": ppo, "kl_cov": importance_sampling} | BY_TOKEN
    for i, t in np.argwhere(v["mask"]):
        out[i, t] = by_token[loss.name](float(v["new"][i, t]), float(old[i, t]), float(v["adv"][i, t]), loss)
    if loss.name == "kl_cov":
        pulled, _ = chosen_by_covariance(loss, v)
        out += np.where(pulled, loss.coef * np.abs(v["new"] - old), 0.0)
    return out


def per_token(loss: PolicyLoss, x: LossInputs) -> np.ndarray:
    """The whole loss per token without mismatch and token filter, for kl_estimator "k3"."""
    v = values(x)
    out = surrogate(loss, x)
    old = v["sampler"] if loss.anchor == "sampler" else v["old"]
    for i, t in np.argwhere(v["mask"]):
        gap = clamp(v["ref"][i, t] - v["new"][i, t], -BOUND, BOUND)
        kl = math.exp(gap) - gap - 1
        if loss.kl_ratio_correction:
            kl *= ratio(float(v["new"][i, t]), float(old[i, t]))
        out[i, t] += loss.kl_coef * kl - loss.entropy_coef * v["entropy"][i, t]
    return out


def rows_of(x: LossInputs, rows: list[int], width: int | None = None, **changes: object) -> LossInputs:
    """Some sequences of the inputs, channels with them, cut to `width` tokens; logprobs stay attached to `x`."""

    def cut(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[rows][:, :width]

    tensors = {
        field.name: cut(getattr(x, field.name))
        for field in dataclasses.fields(x)
        if field.name not in ("group", "channels")
    }
    channels = {name: channel[rows][:, :width] for name, channel in x.channels.items()}
    group = None if x.group is None else x.group[rows]
    return LossInputs(**(tensors | {"group": group, "channels": channels} | changes))

"""Slow references in plain Python floats, nothing shared with `rlbench.rl`; and the batches to try them on."""

import math
import statistics
from itertools import combinations

import torch
from hypothesis import settings
from hypothesis import strategies as st

Rows = list[list[float]]


EXAMPLES = settings(max_examples=60, derandomize=True)


def near(got: torch.Tensor, wanted, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(
        got.double(), torch.as_tensor(wanted, dtype=torch.float64), rtol=tolerance, atol=tolerance
    )


@st.composite
def batches(draw):
    """Ragged masks, uneven groups, groups of one, rows without trained tokens, equal rewards."""
    rows, width = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    reward = st.one_of(st.sampled_from([0.0, 1.0, 0.7, -1.0, 0.1]), st.floats(-1e3, 1e3, width=32))
    rewards = draw(st.lists(reward, min_size=rows, max_size=rows))
    group = draw(st.lists(st.sampled_from([-3, 0, 2, 10**12]), min_size=rows, max_size=rows))
    mask = draw(st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=rows, max_size=rows))
    return rewards, group, mask


def tensors(batch):
    rewards, group, mask = batch
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(group), torch.tensor(mask)


def peers(group: list[int], i: int) -> list[int]:
    return [j for j, own in enumerate(group) if own == group[i]]


def equal(values: list[float]) -> bool:
    return max(values) - min(values) <= 1e-7 * max(abs(v) for v in values)


def by_group(rewards: list[float], group: list[int], one, singleton: str = "zero") -> list[float]:
    """Apply `one(own reward, rewards of the group, rows of the group)`; the two rules for the rest."""
    out = []
    for i, reward in enumerate(rewards):
        rows = peers(group, i)
        values = [rewards[j] for j in rows]
        if len(rows) == 1:
            out.append(reward if singleton == "raw" else 0.0)
        else:
            out.append(0.0 if equal(values) else one(reward, values, rows))
    return out


def normalized(rewards, group, ddof=1, eps=1e-6, singleton="zero"):
    deviation = statistics.stdev if ddof else statistics.pstdev
    return by_group(rewards, group, lambda r, v, _: (r - statistics.fmean(v)) / (deviation(v) + eps), singleton)


def centred(rewards, group, singleton="zero"):
    return by_group(rewards, group, lambda r, v, _: r - statistics.fmean(v), singleton)


def rloo(rewards, group, singleton="zero"):
    return by_group(rewards, group, lambda r, v, _: r - (sum(v) - r) / (len(v) - 1), singleton)


def opo(rewards, group, lengths, singleton="zero"):
    def one(r, values, rows):
        total = sum(lengths[j] for j in rows)
        if total == 0:
            return r - statistics.fmean(values)
        return r - sum(lengths[j] * rewards[j] for j in rows) / total

    return by_group(rewards, group, one, singleton)


def maxrl(rewards, group, eps=1e-6):
    return by_group(rewards, group, lambda r, v, _: (r - statistics.fmean(v)) / (statistics.fmean(v) + eps))


def cpgd_clip_filter(rewards, group, most=3.0):
    names = set(group)
    learning = [n for n in names if not equal([r for r, g in zip(rewards, group, strict=True) if g == n])]
    weight = min(len(names) / max(len(learning), 1), most)
    return [weight * a for a in centred(rewards, group)]


def gpg(rewards, group, alpha, singleton="zero"):
    if alpha == "signal":
        counted = sum(not equal([rewards[j] for j in peers(group, i)]) for i in range(len(group)))
    else:
        counted = sum(r != 0 for r in rewards)
    return [len(rewards) / max(counted, 1) * a for a in centred(rewards, group, singleton)]


def pass_at_k(rewards, group, k, std="group", eps=1e-6):
    """Over all subsets: what does a response add to the best of those that hold it?"""
    out = []
    for i in range(len(rewards)):
        rows = peers(group, i)
        values = [rewards[j] for j in rows]
        size = len(rows) if k is None else k
        if len(rows) < max(size, 2) or equal(values):
            out.append(0.0)
            continue
        held = [s for s in combinations(rows, size) if i in s]
        gain = [max(rewards[j] for j in s) - max(rewards[j] for j in s if j != i) for s in held]
        out.append(statistics.fmean(gain) / ((statistics.stdev(values) + eps) if std == "group" else 1.0))
    return out


def pass_at_k_normalized(rewards, group, k, eps=1e-6):
    out = []
    for i in range(len(rewards)):
        rows = peers(group, i)
        subsets = list(combinations(rows, k))
        best = [max(rewards[j] for j in s) for s in subsets]
        if len(best) < 2 or max(best) - min(best) <= 1e-7 * max(abs(b) for b in best):
            out.append(0.0)
            continue
        own = [b for b, s in zip(best, subsets, strict=True) if i in s]
        out.append((statistics.fmean(own) - statistics.fmean(best)) / (statistics.pstdev(best) + eps))
    return out


def whitened(rows: Rows, mask, eps=1e-8) -> Rows:
    kept = [v for row, own in zip(rows, mask, strict=True) for v, m in zip(row, own, strict=True) if m]
    if len(kept) < 2 or equal(kept):
        return [[0.0] * len(row) for row in rows]
    mean, variance = statistics.fmean(kept), statistics.variance(kept)
    return [
        [(v - mean) / math.sqrt(variance + eps) if m else 0.0 for v, m in zip(row, own, strict=True)]
        for row, own in zip(rows, mask, strict=True)
    ]


def spread(advantages: list[float], mask) -> Rows:
    return [[a if m else 0.0 for m in row] for a, row in zip(advantages, mask, strict=True)]


def on_last(rewards: list[float], mask) -> Rows:
    out = [[0.0] * len(row) for row in mask]
    for i, row in enumerate(mask):
        trained = [t for t, m in enumerate(row) if m]
        if trained:
            out[i][trained[-1]] = rewards[i]
    return out


def returns(rewards: Rows, mask, gamma: float) -> Rows:
    """Squeeze the untrained tokens out, discount, put the result back."""
    out = [[0.0] * len(row) for row in mask]
    for i, row in enumerate(mask):
        running = 0.0
        for t in reversed([t for t, m in enumerate(row) if m]):
            running = rewards[i][t] + gamma * running
            out[i][t] = running
    return out


def gae(rewards: Rows, values: Rows, mask, gamma, lam, after=None) -> tuple[Rows, Rows]:
    advantages, targets = ([[0.0] * len(row) for row in mask] for _ in range(2))
    for i, row in enumerate(mask):
        own = lam[i] if isinstance(lam, list) else lam
        value, running = (after[i] if after else 0.0), 0.0
        for t in reversed([t for t, m in enumerate(row) if m]):
            delta = rewards[i][t] + gamma * value - values[i][t]
            running = delta + gamma * own * running
            value = values[i][t]
            advantages[i][t], targets[i][t] = running, running + value
    return advantages, targets


def process(token_rewards: Rows, group, mask, turns, std="group", eps=1e-6) -> Rows:
    steps = {}  # (row, turn) -> [sum, last token]
    for i, row in enumerate(mask):
        for t, m in enumerate(row):
            if m:
                step = steps.setdefault((i, turns[i][t]), [0.0, t])
                step[0] += token_rewards[i][t]
                step[1] = t
    keys = list(steps)
    rewards, groups = [steps[key][0] for key in keys], [group[key[0]] for key in keys]
    scores = (normalized if std == "group" else centred)(rewards, groups, **({"eps": eps} if std == "group" else {}))
    return [
        [
            sum(s for s, (row, k) in zip(scores, keys, strict=True) if row == i and steps[row, k][1] >= t) if m else 0.0
            for t, m in enumerate(own)
        ]
        for i, own in enumerate(mask)
    ]


def token_baseline(token_rewards: Rows, group, mask, logprobs: Rows, squared: Rows, weights=None, singleton="zero"):
    to_go = returns(token_rewards, mask, 1.0)
    trained = [[t for t, m in enumerate(row) if m] for row in mask]
    energy = []
    for i, own in enumerate(trained):
        total, row = 0.0, []
        for t in own:
            w = 1.0 if weights is None else weights[i][t]
            total += (1 - 2 * math.exp(logprobs[i][t]) + squared[i][t]) * w * w
            row.append(total)
        energy.append(row)
    out = [[0.0] * len(row) for row in mask]
    for i, own in enumerate(trained):
        for n, t in enumerate(own):
            alive = [j for j in peers(group, i) if len(trained[j]) > n]
            values = [to_go[j][trained[j][n]] for j in alive]
            if len(alive) == 1:
                out[i][t] = to_go[i][t] if singleton == "raw" else 0.0
            elif not equal(values):
                weight = [energy[j][n] for j in alive]
                if sum(weight) > 0:
                    base = sum(w * v for w, v in zip(weight, values, strict=True)) / sum(weight)
                else:
                    base = statistics.fmean(values)
                out[i][t] = to_go[i][t] - base
    return out

"""Numbers of one making of experience, over all samples of all ranks, under the reference system's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rlbench.data.batches.batch import TrainBatch
from rlbench.data.rollouts.rollouts import Rollouts
from rlbench.rl import MismatchMoments
from rlbench.strategies.options.config import StrategyConfig
from rlbench.strategies.ranks.control import ControlGroup
from rlbench.trainers.experience.advantage_stage import Estimated, Samples, Shaped
from rlbench.trainers.experience.over_ranks import Spread, spreads_over_ranks
from rlbench.trainers.experience.samples import counted
from rlbench.trainers.experience.values import Experience

PARTS: Mapping[str, tuple[str, ...]] = {
    "reward": ("",),
    "return": ("",),
    "response_length": ("", "mean", "std"),
    "total_length": ("",),
    "step_reward": ("mean", "std", "max", "min"),
    "advantages": ("mean", "std", "max", "min"),
    "returns": ("mean", "std"),
}


def over_ranks(
    columns: Mapping[str, Any], components: Mapping[str, np.ndarray], mismatch: MismatchMoments, control: ControlGroup
) -> dict[str, float]:
    """Return the metrics of all ranks from this rank's numbers by name; collective.

    `PARTS` says which parts of a spread are told, else the mean; details of components (with a `/`) are left out.
    """
    own = {f"c/{name}": Spread.of(values) for name, values in components.items() if "/" not in name}
    whole = spreads_over_ranks({name: Spread.of(values) for name, values in columns.items()} | own, control)
    numbers: dict[str, float] = {}
    for name, spread in whole.items():
        parts = ("mean", "std") if name.startswith("c/") else PARTS.get(name, ("",))
        numbers |= spread.numbers(name.removeprefix("c/"), parts)
    total = sum(control.gather(mismatch), MismatchMoments())
    return numbers | {f"mismatch/{name}": value for name, value in (total.result() if total.tokens else {}).items()}


def evaluation(scored: Rollouts, control: ControlGroup) -> dict[str, float]:
    """Return metrics over all ranks of samples that are not trained on; what does not count is left out. Collective."""
    rewards, rows = np.asarray(scored.rewards, np.float64), counted(scored)
    columns = {"reward": rewards, "response_length": scored.lengths[rows], "truncated": scored.truncated[rows]}
    numbers = over_ranks(columns, scored.components, MismatchMoments(), control)
    spread = spreads_over_ranks({"reward": Spread.of(rewards)}, control).get("reward", Spread())
    return numbers | spread.numbers("reward", ("std",)) | {"samples": float(spread.moments.count)}


def columns(made: Experience, rollouts: Rollouts, found: Estimated, options: StrategyConfig) -> dict[str, Any]:
    """Return the numbers of this rank's samples that `over_ranks` makes metrics of."""
    mask, rows = made.batch.mask, counted(rollouts)
    info = {name: values[rows] for name, values in made.info.items()}
    assert made.batch.rewards is not None
    numbers: dict[str, Any] = {
        "reward": info["reward"],
        "step_reward": made.batch.rewards[rows],
        "return": info["return"],
        "response_length": info["response_length"],
        "total_length": info["total_length"],
        "advantages": found.advantages[mask],
        "returns": found.returns[mask],
        "truncated": rollouts.truncated[rows],
        "aborted": rollouts.aborted,
    }
    if made.kl is not None:
        numbers |= {"rollout_ref_kl": made.kl[mask], "rollout_ref_kl_per_sequence": info["kl_sum"]}
    if made.entropy is not None:
        numbers["entropy"] = made.entropy[mask]
    if options.overlong_buffer:
        numbers["overlong"] = info["overlong"]
    if options.reward_clip:
        numbers["reward_clip_frac"] = info["reward_clip_frac"]
    if options.advantage_clip:
        numbers["advantage_clip_frac"] = found.clipped[mask]
    return numbers


def of_sequences(
    samples: Samples, found: Estimated, given: Shaped, batch: TrainBatch, entropy: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Return numbers (B,) of each sequence by name; means are over its trained tokens, 0 where it has none."""
    trained = samples.padded(batch.mask)
    tokens = trained.sum(1).clamp(min=1).double()

    def mean(flat: np.ndarray) -> np.ndarray:
        return (torch.where(trained, samples.padded(flat), 0.0).sum(1) / tokens).numpy()

    info = {
        "reward": given.rewards,
        "response_length": batch.response_lengths.astype(np.float64),
        "total_length": batch.lengths.astype(np.float64),
        "return": samples.padded(found.token_rewards).sum(1).numpy(),
        "reward_clip_frac": given.clipped.astype(np.float64),
        "advantage_clip_frac": mean(found.clipped.astype(np.float64)),
        "overlong": given.overlong.astype(np.float64),
    }
    if found.kl is not None:
        info |= {"kl": mean(found.kl), "kl_sum": samples.padded(found.kl).sum(1).numpy()}
    if entropy is not None:
        info |= {"entropy": mean(entropy), "logprob_gap": mean(np.abs(samples.logprobs - batch.sampler_logprobs))}
    return info

"""Every metric by its one name, in a session's steps, a trainer's iterations, views and trackers alike.

What trackers also get under the names that TRL, verl and OpenRLHF log the same number under stands beside it. A name
that means something else there is left out: TRL's and OpenRLHF's `kl` is the one to the reference, here `ref_kl`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Metric:
    """`unit`: "nats", "tokens", "tok/s", "s", "share" (0 to 1), "bytes", "count", or "" for a plain number.

    `trainer`: what a trainer calls it (LightRFT's name); `aliases`: what trackers also call it.
    """

    name: str
    unit: str
    formula: str
    trainer: str = ""
    aliases: tuple[str, ...] = ()


METRICS = (
    Metric("loss", "", "sum of per-token loss × weight; the aggregation gives the weights", "policy_loss", ("actor/pg_loss",)),
    Metric("reward", "", "mean over sequences", "reward", ("critic/rewards/mean",)),
    Metric("reward_std", "", "standard deviation over sequences", "step_reward_std", ("critic/rewards/std",)),
    Metric("kl", "nats", "old policy against current: mean over trained tokens of exp(−x) − 1 + x, x = logprobs − old_logprobs (k3)", "", ("actor/ppo_kl", "policy/approxkl_avg")),
    Metric("ref_kl", "nats", "current policy against the reference: the same of x = logprobs − ref_logprobs; of a loss with kl_coef by its kl_estimator", "", ("actor/kl_loss", "objective/kl")),
    Metric("rollout_ref_kl", "nats", "policy that sampled against the reference, by the trainer's kl_estimator: what the reward's KL penalty weighs"),
    Metric("rollout_ref_kl_per_sequence", "nats", "the same summed over each response, mean over sequences: what an adaptive KL weight follows"),
    Metric("entropy", "nats", "mean over trained tokens of −Σ p log p at the sampling temperature", "", ("actor/entropy", "policy/entropy_avg")),
    Metric("clip_fraction", "share", "trained tokens whose gradient the clipping took away", "", ("actor/pg_clipfrac", "ppo_clip_ratio", "clip_ratio/region_mean")),
    Metric("clip_fraction_low", "share", "those below the lower bound", "", ("actor/pg_clipfrac_lower", "clip_ratio/low_mean")),
    Metric("clip_fraction_high", "share", "those above the upper bound", "", ("clip_ratio/high_mean",)),
    Metric("ratio", "", "mean over trained tokens of exp(logprobs − old_logprobs)", "", ("val/ratio",)),
    Metric("ppo_kl", "nats", "mean over trained tokens of old_logprobs − logprobs (k1), where the loss gives it"),
    Metric("reward_margin", "", "mean over pairs of the reward of the chosen response − that of the rejected: the implicit one, or a reward model's score", "", ("rewards/margins",)),
    Metric("reward_accuracy", "share", "pairs whose chosen response has the larger reward; a reward model's ties aside. Of several heads a mean over those of each pair; `reward_accuracy/HEAD` and the other three are a head's own", "", ("rewards/accuracies",)),
    Metric("reward_chosen", "", "mean reward of the chosen, or good, responses; reward_rejected: of the others", "", ("rewards/chosen",)),
    Metric("teacher_kl", "nats", "mean over trained tokens of logprobs − the teacher's, of a loss of a teacher; on the policy's own samples an estimate of KL(policy, teacher)"),
    Metric("teacher_mass", "share", "mean over trained tokens of the teacher's probability of the tokens it was asked for (gkd)"),
    Metric("logprob_gap", "nats", "mean over trained tokens of abs(logprobs − sampler_logprobs)", "", ("sampling/sampling_logp_difference/mean",)),
    Metric("logprob_gap_max", "nats", "the largest of them", "", ("sampling/sampling_logp_difference/max",)),
    Metric("mismatch/kl", "nats", "sampler against old policy: mean of sampler_logprobs − old_logprobs", "", ("rollout_corr/kl", "vllm_kl")),
    Metric("mismatch/k3_kl", "nats", "the same by k3, never negative", "", ("rollout_corr/k3_kl",)),
    Metric("mismatch/ess", "share", "(Σw)² / (n Σw²), w = exp(old_logprobs − sampler_logprobs): share of the tokens the weighted batch is worth"),
    Metric("router/disagreement", "share", "of the tokens and layers of a mixture of experts whose experts the rollouts bring: where the trainer's router would choose another set of them"),
    Metric("router/balance", "", "of a mixture of experts, with aux_loss_coef: how unevenly its routers spread each sequence's tokens, mean over sequences; as many as a token takes where they are spread evenly, the number of experts where all go to one"),
    Metric("grad_norm", "", "2-norm of the whole gradient, before clipping", "actor_grad_norm", ("actor/grad_norm",)),
    Metric("eval/<set>/reward", "", "mean over completions of an evaluation of the step's weights, of the set of that name; `eval/reward` where it has none"),
    Metric("eval/<set>/pass@k", "share", "of several completions of a prompt: chance that one of k is right, mean over prompts; maj@k: prompts whose most frequent answer is right"),
    Metric("loss_scale", "", "by what the loss was multiplied for a backward in float16; the gradients are not", "actor_loss_scale"),
    Metric("lr", "", "learning rate of the optimizer's first group in this step", "actor_lr", ("actor/lr", "learning_rate")),
    Metric("lr_usual", "", "that rate, where the step had one of its own"),
    Metric("no_signal", "share", "sequences whose advantages are 0 on all trained tokens, of a loss that weighs by them; 1: the step has only the loss's other terms, and the optimizer's moments", "no_signal"),
    Metric("sequences", "count", "of the batch"),
    Metric("tokens", "tokens", "trained tokens"),
    Metric("length", "tokens", "mean response", "response_length", ("response_length/mean", "completions/mean_length")),
    Metric("length_max", "tokens", "longest response", "response_length_max", ("response_length/max", "completions/max_length")),
    Metric("truncated", "share", "responses cut at the length limit", "truncated", ("response_length/clip_ratio", "completions/clipped_ratio")),
    Metric("tokens_per_s", "tok/s", "prompt and response tokens of the batch / seconds of the step", "", ("perf/throughput",)),
    Metric("padding", "share", "computed tokens that belong to no sequence"),
    Metric("shared", "share", "tokens of the sequences that were not computed, as another has the same prompt"),
    Metric("micro_batches", "count", "passes of each rank"),
    Metric("peak_bytes", "bytes", "most device memory of a rank in forward and backward"),
    Metric("seconds/total", "s", "the verb; its parts are the other seconds/…", "", ("timing_s/step", "step_time")),
    Metric("step", "count", "optimizer steps of the session; falls where one is undone"),
    Metric("version", "count", "of the trainer's weights; data_version: of those that sampled"),
    Metric("staleness", "count", "mean over sequences of the trainer's version when it trained − the version that sampled: optimizer steps in between"),
    Metric("staleness_max", "count", "of the oldest sequence"),
    Metric("ptx_loss", "nats", "mean of −log p over pretraining text"),
    Metric("epoch", "", "passes over its texts that a trainer of texts has taken"),
    Metric("eval/loss", "", "the loss on texts that are held out, without a step; eval/…: its other metrics there", "", ("eval_loss",)),
    Metric("critic_loss", "", "½ squared error of the values, weighed as the policy's loss", "critic_loss", ("critic/vf_loss", "loss/value_avg")),
    Metric("value_clip_fraction", "share", "tokens whose clipped value error was the larger", "", ("critic/vf_clipfrac",)),
    Metric("explained_variance", "", "1 − Var(returns − values) / Var(returns)", "", ("critic/vf_explained_var",)),
)  # fmt: skip

BY_NAME = {metric.name: metric for metric in METRICS}


def is_evaluated_reward(name: str) -> bool:
    """Whether it is the mean reward of an evaluation: `eval/reward`, or `eval/<set>/reward`."""
    return name.startswith("eval/") and name.endswith("/reward")


def of_trainer(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a trainer's numbers are called in a session's record."""
    return {one.name: values[one.trainer] for one in METRICS if one.trainer in values}


def with_aliases(values: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers, and those that other systems log too under their names."""
    more = {alias: values[one.name] for one in METRICS if one.name in values for alias in one.aliases}
    return {**more, **values}


def table() -> str:
    """The metrics as a Markdown table; docs/metrics.md has it."""
    rows = ["| metric | unit | what it is | a trainer's name | trackers get it also as |", "|---|---|---|---|---|"]
    for one in METRICS:
        names = [f"`{name}`" for name in (one.trainer, *one.aliases)]
        trainer = names[0] if one.trainer else ""
        rows.append(f"| `{one.name}` | {one.unit} | {one.formula} | {trainer} | {', '.join(names[1:])} |")
    return "\n".join(rows) + "\n"

"""What the session's policy steps are held against: the same step by hand in one padded process; and the verbs of a
rank that take one."""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np
import torch

from rlbench.rl import Aggregation, BatchTotals, LossInputs, grpo, k3, mismatch_diagnostics
from tests.modules import RAGGED, batch_of
from tests.ranks import Ranks

GRPO = grpo(kl_coef=0.1, entropy_coef=0.02, clip_low=0.1, clip_high=0.1, aggregation="token-mean")


def batch(seed: int = 0, lengths: Any = RAGGED, **fields: Any) -> Any:
    rng = np.random.default_rng(seed + 100)
    total = sum(response for _, response in lengths)
    near = (-4.5 + 0.3 * rng.normal(size=(2, total))).astype(np.float32)
    return batch_of(lengths, seed, old_logprobs=near[0], ref_logprobs=near[1], **fields)


def by_hand(model: Any, given: Any, loss: Any, mode: str) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss and metrics of a whole batch in one padded process, log-softmax and all."""
    width = int(given.response_lengths.max())
    shape = (len(given), width)
    fields = {
        n: torch.zeros(shape)
        for n in ("logprobs", "entropy", "old_logprobs", "ref_logprobs", "sampler_logprobs", "advantages")
    }
    mask = torch.zeros(shape, dtype=torch.bool)
    rows: dict[str, list[torch.Tensor]] = {"logprobs": [], "entropy": []}
    for i, (prompt, response) in enumerate(zip(given.prompts, given.responses, strict=True)):
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        logp = torch.log_softmax(model(ids[None]).logits[0, len(prompt) - 1 : -1] / given.temperature, -1)
        pad = (0, width - len(response))
        chosen = logp[torch.arange(len(response)), ids[len(prompt) :]]
        rows["logprobs"].append(torch.nn.functional.pad(chosen, pad))
        rows["entropy"].append(torch.nn.functional.pad(-(logp.exp() * logp).sum(-1), pad))
        at = slice(given.responses.offsets[i], given.responses.offsets[i + 1])
        for name in ("old_logprobs", "ref_logprobs", "sampler_logprobs", "advantages"):
            fields[name][i, : len(response)] = torch.from_numpy(getattr(given, name)[at])
        mask[i, : len(response)] = torch.from_numpy(given.mask[at])
    fields |= {name: torch.stack(values) for name, values in rows.items()}
    group = torch.from_numpy(given.group.astype(np.int64))
    inputs = LossInputs(**fields, mask=mask, group=group)
    per_token, _ = loss(inputs)
    total = (per_token * Aggregation(mode).weights(mask, BatchTotals.of(mask, group), group)).sum()
    with torch.no_grad():
        gap = (inputs.logprobs - inputs.sampler_logprobs).abs()[mask]
        metrics = {
            "loss": float(total.detach()),
            "entropy": float(inputs.entropy[mask].mean()),
            "tokens": float(mask.sum()),
            "kl": float(k3(inputs.logprobs, inputs.old_logprobs)[mask].mean()),
            "ref_kl": float(k3(inputs.logprobs, inputs.ref_logprobs)[mask].mean()),
            "logprob_gap": float(gap.mean()),
            "logprob_gap_max": float(gap.max()),
        }
        diagnostics = mismatch_diagnostics(inputs.old_logprobs, inputs.sampler_logprobs, mask)
        metrics |= {f"mismatch/{name}": value for name, value in diagnostics.items()}
    return total, metrics


def gradients(engine: Ranks) -> dict[str, torch.Tensor]:
    def gather() -> Any:
        found = module.named_parameters()  # type: ignore[name-defined]
        return {name: p.grad.full_tensor().clone() for name, p in found if p.grad is not None}

    return engine.run(gather)[0]


def forward_backward(engine: Ranks, given: Any, loss: Any = GRPO, **options: Any) -> list[dict[str, Any]]:
    return engine.call("policy_forward_backward", given, cloudpickle.dumps(loss), options)


def assert_gradients(engine: Ranks, model: Any, atol: float = 2e-6) -> None:
    found = gradients(engine)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert found.keys() == trained.keys()
    for name, parameter in trained.items():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def run_steps(engine: Ranks, steps: int = 2) -> str:
    """Train, and return the checksum of what came out."""
    for seed in range(steps):
        forward_backward(engine, batch(seed), token_budget=20)
        engine.call("policy_optim_step", {})
    return engine.call("state_checksum")[0]

"""What the updates are held against: experience, and the same step by hand, one sequence at a time, in plain torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Qwen2ForCausalLM

from rlbench.data.prompts.prompt import Prompt
from rlbench.strategies import FakeStrategy
from rlbench.strategies.memory.device import RankDevice
from rlbench.trainers.experience.values import Experience
from tests.modules import batch_of

LENGTHS = [(3, 9), (7, 2), (4, 17), (5, 5), (2, 12), (6, 5), (9, 1), (3, 8)]
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean")
EPS = (0.1, 0.15)


def fake(**own: Any) -> FakeStrategy:
    args = own.pop("args", None)
    return FakeStrategy(**{"bf16": False, "max_norm": 0.0, "device": RankDevice.pick(0, "cpu"), **own}, args=args)


def actor_of(path: str, strategy: Any) -> tuple[Any, Any]:
    actor = strategy.prepare_model(Qwen2ForCausalLM.from_pretrained(path), is_training=True)
    return actor, strategy.create_optimizer(actor, lr=1e-2, weight_decay=0.0)


def experience(seed: int = 0, lengths: Any = LENGTHS, **fields: Any) -> Experience:
    """Sequences of four prompts two each, of a policy not far from the tiny model."""
    rng = np.random.default_rng(seed + 100)
    total = sum(response for _, response in lengths)
    near = (-4.5 + 0.2 * rng.normal(size=(2, total))).astype(np.float32)
    batch = batch_of(lengths, seed, **{"old_logprobs": near[0], "ref_logprobs": near[1], **fields})
    batch = batch.replace(group=(10 * seed + np.arange(len(lengths)) // 2).astype(np.int32))
    numbers = rng.normal(size=(4, total)).astype(np.float32)
    return Experience(
        batch,
        prompts=tuple(Prompt("?", label=i) for i in range(len(lengths))),
        texts=("",) * len(lengths),
        token_rewards=numbers[0],
        kl=np.abs(numbers[1]),
        values=0.3 * numbers[2],
        returns=numbers[3],
    )


def parts_of(given: Experience, size: int) -> list[Experience]:
    return [given.rows(np.arange(i, min(i + size, len(given)))) for i in range(0, len(given), size)]


def token_weights(given: Experience, mode: str) -> list[np.ndarray]:
    """The weight of each token of each sequence, from the definition of the mode."""
    masks = [m.astype(np.float64) for m in given.batch.responses.with_values(given.batch.mask)]
    trained = [mask.sum() for mask in masks]
    sequences = sum(count > 0 for count in trained)
    longest = max(len(mask) for mask in masks)
    by_prompt: dict[int, float] = {}
    for number, count in zip(given.batch.group, trained, strict=True):
        by_prompt[int(number)] = by_prompt.get(int(number), 0.0) + count
    prompts = sum(count > 0 for count in by_prompt.values())
    divisors = {
        "token-mean": [sum(trained)] * len(masks),
        "seq-mean-token-mean": [sequences * max(count, 1) for count in trained],
        "seq-mean-token-sum": [sequences] * len(masks),
        "seq-mean-token-sum-norm": [sequences * longest] * len(masks),
        "prompt-mean": [prompts * max(by_prompt[int(n)], 1) for n in given.batch.group],
    }[mode]
    return [mask / divisor for mask, divisor in zip(masks, divisors, strict=True)]


def policy_by_hand(
    model: nn.Module,
    given: Experience,
    mode: str,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    temperature: float = 1.0,
    kept: list[Tensor] | None = None,
) -> Tensor:
    """PPO's clipped loss with a k3 penalty and an entropy bonus; `kept`: tokens that keep their policy term."""
    batch, total = given.batch, torch.zeros(())
    weights = token_weights(given, mode)
    for i, (prompt, response) in enumerate(zip(batch.prompts, batch.responses, strict=True)):
        at = slice(batch.responses.offsets[i], batch.responses.offsets[i + 1])
        logp, entropy = by_token(model, prompt, response, temperature)
        ratio = (logp - torch.from_numpy(batch.old_logprobs[at])).exp()
        advantage = torch.from_numpy(batch.advantages[at])
        loss = -torch.min(ratio * advantage, ratio.clamp(1 - EPS[0], 1 + EPS[1]) * advantage)
        if kept is not None:
            loss = loss * kept[i]
        behind = torch.from_numpy(batch.ref_logprobs[at]) - logp
        loss = loss + kl_coef * (behind.exp() - behind - 1) - entropy_coef * entropy
        total = total + (loss * torch.from_numpy(weights[i]).float()).sum()
    return total


def by_token(model: nn.Module, prompt: Any, response: Any, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
    logp = torch.log_softmax(model(ids[None]).logits[0, len(prompt) - 1 : -1].float() / temperature, -1)
    return logp[torch.arange(len(response)), ids[len(prompt) :]], -(logp.exp() * logp).sum(-1)


def values_by_hand(backbone: nn.Module, head: Tensor, given: Experience) -> list[Tensor]:
    """The value before each response token, each sequence alone through transformers' own backbone."""
    found = []
    for prompt, response in zip(given.batch.prompts, given.batch.responses, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        states = backbone(ids[None]).last_hidden_state[0]
        found.append((states @ head[0])[len(prompt) - 1 : -1])
    return found


def value_loss_by_hand(values: list[Tensor], given: Experience, mode: str, clip: float | None) -> Tensor:
    total = torch.zeros(())
    weights = token_weights(given, mode)
    for i, value in enumerate(values):
        at = slice(given.batch.responses.offsets[i], given.batch.responses.offsets[i + 1])
        target, old = torch.from_numpy(given.returns[at]), torch.from_numpy(given.values[at])
        loss = (value - target) ** 2
        if clip is not None:
            loss = torch.max(loss, (old + (value - old).clamp(-clip, clip) - target) ** 2)
        total = total + 0.5 * (loss * torch.from_numpy(weights[i]).float()).sum()
    return total


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    found = dict(model.named_parameters())
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in found.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-6) -> None:
    assert set(found) == set(expected) and expected
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}")

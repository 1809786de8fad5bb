"""Weights that are changed, and how far a replica is from them."""

import numpy as np
import torch

from rlbench.weights.probe import probe_tokens


def perturb(scale=0.05):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in module.parameters():
            local = p.to_local() if hasattr(p, "to_local") else p
            local.add_(scale * torch.randn(local.shape, generator=generator))


def freeze(*begin):
    """Freeze what begins so, and nothing else."""
    for name, p in module.named_parameters():
        p.requires_grad_(not name.startswith(begin))


def train_on(scale=0.05):
    """Change what is not frozen, as a step would."""
    with torch.no_grad():
        for p in module.parameters():
            if p.requires_grad:
                p.to_local().add_(scale * torch.randn(p.to_local().shape, generator=torch.Generator().manual_seed(4)))


def change_some(share, seed):
    """Change a share of the elements of what is not frozen, on each rank its own."""
    generator = torch.Generator().manual_seed(seed + 100 * rank)
    with torch.no_grad():
        for p in module.parameters():
            if p.requires_grad:
                local = p.to_local()
                here = torch.rand(local.shape, generator=generator) < share
                local.add_(0.1 * here * torch.randn(local.shape, generator=generator))


def edit(name, on_rank):
    """Change one rank's shard of a frozen parameter past autograd."""
    if rank == on_rank:
        dict(module.named_parameters())[name].to_local().data.mul_(1.5)


def gap(train, infer):
    """Largest difference of log-probs on the same tokens, trainer against replica."""
    from rlbench.data.base.ragged import rows_in_order
    from rlbench.data.batches.batch import as_batch

    tokens = probe_tokens(infer.info["vocab_size"])
    mine = train.call_all("policy_forward", as_batch(tokens), {}, finish=rows_in_order).result()["logprobs"]
    return max(float(np.abs(np.asarray(a) - b).max()) for a, b in zip(mine, infer.logprobs(tokens), strict=True))

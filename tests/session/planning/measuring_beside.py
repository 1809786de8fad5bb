"""What a trainer makes on the policy's ranks beside it, a critic that steps and a reward model that scores, and the
plan of it: bytes by owner of both."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rlbench import rewards
from rlbench.data.prompts.prompt import Prompt
from rlbench.session.checks.rehearsal import worst_batch
from rlbench.session.planning.plan import plan
from rlbench.session.planning.request import CRITIC, SCORER
from rlbench.session.planning.uses import Use, critic_uses, scorer_uses
from rlbench.strategies.memory import owners
from rlbench.strategies.memory.live import LiveMemory
from rlbench.trainers.experience.values import Experience
from rlbench.trainers.models.policy_spec import PolicySpec
from rlbench.trainers.models.reward_heads import make_reward_model, scores_of
from rlbench.trainers.models.value_model import make_critic
from rlbench.trainers.ppo.building import strategy_of
from rlbench.trainers.update.value_update import ValueUpdate
from tests.data.written import written
from tests.ranks import ranks
from tests.session.planning.measuring import HELD, LENGTH

TOKENS = 1024
"""Of a micro-batch: enough that what scoring takes is not mostly the units that two ranks gather."""
OF_POLICIES = ("gradient_checkpointing", "dtype", "lora")


def critic_step(module: Any, strategy: Any, path: str, vocabulary: int, packed: bool) -> dict[str, int]:
    """Runs on a rank: make a critic as `build_trainer` does, and count its second step, of two micro-batches."""
    theirs = strategy_of(module, module.optimizer, {}, strategy.half)
    critic = theirs.prepare_model(make_critic(path), is_training=True)
    optimizer = theirs.create_optimizer(critic, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0)
    update = ValueUpdate(critic, optimizer, None, theirs, 0.2, packed=packed)
    parts = [experience(TOKENS, vocabulary) for _ in range(2)]
    update.step(parts)
    highest = most_taken(critic, lambda: update.accumulate(parts))
    gradients = owners.nbytes(owners.gradient_tensors(critic))
    return {
        "weights": owners.nbytes(owners.weight_tensors(critic)),
        "gradients": gradients,
        "optimizer": owners.nbytes(owners.optimizer_tensors([optimizer])),
        "pass": highest - gradients,
    }


def scoring(module: Any, strategy: Any, path: str, vocabulary: int, lengths: list[int]) -> dict[str, int]:
    """Runs on a rank: make a reward model as `build_trainer` does, and count what scoring one micro-batch takes."""
    theirs = strategy_of(module, module.optimizer, {}, strategy.half)
    scorer = theirs.prepare_model(make_reward_model(path))
    random = np.random.default_rng(0)
    sequences = [random.integers(0, vocabulary, length).tolist() for length in lengths]
    scores_of(scorer, sequences, theirs, len(sequences))
    highest = most_taken(scorer, lambda: scores_of(scorer, sequences, theirs, len(sequences)))
    return {"weights": owners.nbytes(owners.weight_tensors(scorer)), "pass": highest}


def scoring_whole(reward: rewards.model) -> dict[str, int]:
    """Count what a rank's own reward model takes to score as many completions as it does at a time."""
    texts = [["a" * (LENGTH - 1 - i) for i in range(reward.batch_size)]]
    rollouts = written(["?"], texts)
    rollouts.score(reward)
    module = reward._load()[0]
    highest = most_taken(module, lambda: rollouts.score(reward))
    return {"weights": owners.nbytes(owners.weight_tensors(module)), "pass": highest}


def most_taken(module: Any, run: Callable[[], Any]) -> int:
    """Bytes that come beside what is there while it runs, at their highest: as the GPU's allocator has them, on a host
    as they are counted tensor by tensor."""
    gc.collect()
    if next(module.parameters()).is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with LiveMemory([*module.parameters(), *module.buffers()]) as live:
        run()
    return live.peak


def experience(tokens: int, vocabulary: int) -> Experience:
    """A micro-batch of sequences of the longest length, with what a critic is trained on."""
    batch = worst_batch(tokens, LENGTH, 1, vocabulary)
    numbers = np.random.default_rng(0).normal(size=(3, batch.tokens)).astype(np.float32)
    prompts, texts = tuple(Prompt("?") for _ in range(len(batch))), ("",) * len(batch)
    return Experience(batch, prompts, texts, numbers[0], values=numbers[1], returns=numbers[2])


def measured(what: Any, policy: str, train: dict[str, Any], count: int, *given: Any) -> dict[str, int]:
    """Bytes by owner of the first rank that runs `what`, beside a policy."""
    spec = PolicySpec(policy, **{name: value for name, value in train.items() if name in OF_POLICIES})
    with ranks(count, **{name: value for name, value in train.items() if name not in OF_POLICIES}) as engine:
        vocabulary = engine.build(spec)[0]["vocab_size"]
        path, *rest = given

        def on_rank() -> dict[str, int]:
            return what(module, strategy, path, vocabulary, *rest)  # type: ignore[name-defined]

        return dict(engine.run(on_rank)[0])


def planned(policy: str, train: dict[str, Any], count: int, **beside: Any) -> tuple[list[Use], list[Use]]:
    """What the plan of the same trainer has of its critic and of its reward model, on one rank."""
    from rlbench.session.planning.model import policy_of
    from rlbench.session.planning.scalars import critic_of, scorers_of

    options = {**train, "shards": count}
    gpus = f"{count}x100GiB" if train.get("device") == "cuda" else "0x100GiB"
    request = plan(policy, train=options, gpus=gpus, lengths=LENGTH, token_budget=TOKENS, **beside).request
    made = policy_of(request)
    rows, critic = made.micro_batch(request), critic_of(request, made)
    of_critic = [] if critic is None else critic_uses(critic, request, rows)
    return of_critic, scorer_uses(scorers_of(request, made), request, rows).get(SCORER, [])


def by_owner(uses: list[Use]) -> dict[str, int]:
    """Bytes by owner, what a pass takes as one."""
    held = {use.owner: use.most for use in uses if use.owner in HELD}
    passing = sum(use.most for use in uses if use.passing and use.owner != "allocator")
    assert {use.role for use in uses} <= {CRITIC, SCORER}
    return {**held, "pass": passing}

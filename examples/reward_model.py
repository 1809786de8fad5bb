"""A reward model from comparisons, then PPO against it; the true reward is looked at and never trained on.

    python examples/reward_model.py [--rounds 3] [--iterations 6] [--seed 0]

In each round the policy's own answers are compared, right against wrong (beside right answers against spoiled ones),
the reward model learns from the comparisons, and PPO takes so many iterations against it: a policy that goes on for
long against one reward model may find what that gets wrong. Both are judged on numbers that neither was trained on.
"""

import argparse
import random

import torch

import rlbench as rb
from rlbench.tiny import tasks

OPTIONS = {
    "rollout_batch_size": 128,
    "n": 2,
    "max_tokens": 12,
    "train_batch_size": 64,
    "micro_train_batch_size": 64,
    "micro_rollout_batch_size": 128,
    "lr": 5e-5,
    "critic_lr": 1e-3,
}


def spoiled(answer, chance):
    """A wrong answer: two digits swapped, one left out, one doubled, or one exchanged."""
    i = chance.randrange(len(answer))
    other = chance.choice([d for d in "0123456789" if d != answer[i]])
    j = chance.randrange(len(answer))
    swapped = list(answer)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    ways = ["".join(swapped), answer[:i] + answer[i + 1 :], answer[:i] + answer[i:][:1] + answer[i:]]
    wrong = chance.choice([*ways, answer[:i] + other + answer[i + 1 :]])
    return wrong if wrong not in ("", answer) else answer[:i] + other + answer[i + 1 :]


def comparisons(count, split, seed):
    """Rows of a right answer and a spoiled one."""
    chance = random.Random(seed)
    found = []
    for prompt in tasks.prompts(count, split=split, seed=seed):
        right = tasks.answer(prompt)
        found.append({"prompt": prompt, "chosen": right, "rejected": spoiled(right, chance)})
    return found


def learn(judge, session, steps, seed):
    """Compare what the policy says now, and train the reward model on that and on spoiled answers."""
    drawn = session.rollout(tasks.prompts(512, seed=seed), n=8, max_tokens=12, progress=False)
    own = drawn.score(tasks.reward).pairs().replace(rewards=None, truncated=None)
    pairs = own + rb.data.pairs(comparisons(4096, "train", seed), judge)
    chance = random.Random(seed)
    for done in range(steps):
        rows = [row for i in chance.sample(range(len(pairs) // 2), 128) for row in (2 * i, 2 * i + 1)]
        rate = 1e-3 * min(1.0, 1.5 * (1 - done / steps))
        judge.train_step(pairs[rows], loss=rb.rl.bradley_terry(centering=0.01), lr=rate)
    print(f"reward model: {judge.evaluate(rb.data.pairs(comparisons(400, 'eval', seed), judge))}", flush=True)


def squashed(scores, labels, queries, refs, label_map):
    """Train on the reward model alone, between 0 and 1; chart the share of right answers beside it."""
    return torch.sigmoid(scores[0]), {"right": scores[1]}


def train(rounds=3, iterations=6, seed=0):
    """Train both; prints how the reward model judges, and of each iteration its reward and the true one."""
    unseen = tasks.prompts(128, split="eval")
    with rb.init(devices=1), rb.Session("tiny", seed=seed) as session:
        judge = rb.RewardModel("tiny", seed=seed)
        before = session.evaluate(unseen, tasks.reward, max_tokens=12, progress=False).reward
        for number in range(rounds):
            learn(judge, session, 80 if number else 240, seed=10 * seed + number)
            prompts = tasks.prompts(128 * iterations, seed=10 * seed + number)
            rewards, combined = [judge, tasks.reward], {"reward_fn": squashed}
            trainer = session.trainer("ppo", prompts, rewards, seed=seed, **OPTIONS, arguments=combined)
            for _ in range(iterations):
                record = trainer.step()
                said = f"reward {record['reward']:.3f} · right {record['right_mean']:.3f}"
                print(f"iteration {len(session.history)}: {said}", flush=True)
        judge.close()
        after = session.evaluate(unseen, tasks.reward, max_tokens=12, progress=False).reward
    print(f"greedy on unseen prompts: {before:.3f} -> {after:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=6, help="of PPO, in each round")
    parser.add_argument("--seed", type=int, default=0)
    train(**vars(parser.parse_args()))

"""DPO (arXiv 2305.18290) from pairs that rollouts gave: of each prompt's samples the best one against the worst.

    python examples/dpo.py [--iterations 6] [--seed 0] [--beta 0.1] [--model MODEL]

In each iteration the policy samples, a reward scores, `rollouts.pairs()` makes pairs, and a trainer of texts goes over
them once; the reference is the session's, the weights it began with. The task is that of `grpo.py`.
"""

import argparse
import warnings

import rlbench as rb
from rlbench.tiny import tasks

PROMPTS, SAMPLES = 96, 8
DPO = {"train_batch_size": 16, "lr": 1e-4}  # pairs of one optimizer step


def train(model: str = "tiny", iterations: int = 6, seed: int = 0, beta: float = 0.1) -> list[dict]:
    """Train and return the records of all optimizer steps."""
    warnings.filterwarnings("ignore", message=".*equal scores")  # prompts whose answers are all right or all wrong
    with rb.init(devices=1), rb.Session(model, reference=True, seed=seed) as session:
        unseen = tasks.prompts(128, split="eval", seed=1)
        stream = rb.data.PromptSet.of(tasks.prompts(PROMPTS * iterations, seed=seed)).stream(seed=seed)
        before = session.evaluate(unseen, tasks.reward, max_tokens=12, progress=False)
        for number in range(iterations):
            rollouts = session.rollout(stream.take(PROMPTS), n=SAMPLES, max_tokens=12, progress=False)
            scored = rollouts.score(tasks.reward)
            pairs = scored.pairs()
            trainer = session.trainer("dpo", data=pairs, loss=rb.rl.dpo(beta=beta), seed=seed, **DPO)
            last = trainer.fit(epochs=1)[-1]
            session.sync_weights()
            print(
                f"iteration {number + 1}: reward {scored.rewards.mean():.3f} · pairs {len(pairs) // 2} · loss "
                f"{last['loss']:.3f} · margin {last['reward_margin']:.3f} · accuracy {last['reward_accuracy']:.2f}",
                flush=True,
            )
        after = session.evaluate(unseen, tasks.reward, max_tokens=12, progress=False)
        print(f"greedy on unseen prompts: {before.reward:.3f} -> {after.reward:.3f}")
        return list(session.history)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--beta", type=float, default=0.1)
    train(**vars(parser.parse_args()))

"""GSPO (arXiv 2507.18071): one ratio for a whole response and bounds that fit it; several steps on one experience.

python examples/gspo.py [--iterations 15] [--seed 0]
"""

import argparse

import rlbench as rb
from rlbench.tiny import tasks

OPTIONS = {
    "use_gspo": True,  # what the method "gspo" sets: the ratio is the geometric mean over a response
    "clip_low": 3e-4,
    "clip_high": 4e-4,  # its bounds, the paper's: such a mean hardly leaves 1
    "rollout_batch_size": 32,
    "n": 8,
    "max_tokens": 12,
    "train_batch_size": 64,
    "micro_train_batch_size": 64,
    "micro_rollout_batch_size": 128,
    "max_epochs": 1,  # passes over the experience, of four steps: from the second on ratios differ from 1
}


def train(iterations: int = 15, seed: int = 0) -> list[dict]:
    """Train and return the records of the iterations."""
    with rb.init(devices=1), rb.Session("tiny", train=rb.Train(lr=5e-5), seed=seed) as session:
        trainer = session.trainer(
            "gspo",
            tasks.prompts(32 * iterations, seed=seed),
            tasks.reward,
            eval_prompts=tasks.prompts(128, split="eval", seed=1),
            seed=seed,
            **OPTIONS,
        )
        before = trainer.evaluate()
        for number in range(iterations):
            record = trainer.step()
            print(
                f"iteration {number + 1}: reward {record['reward']:.3f} · responses clipped "
                f"{record['clip_fraction']:.2f}",
                flush=True,
            )
        after = trainer.evaluate()
        print(f"greedy on unseen prompts: {before['eval/reward']:.3f} -> {after['eval/reward']:.3f}")
        return list(session.history)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    train(**vars(parser.parse_args()))

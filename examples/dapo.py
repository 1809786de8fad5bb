"""DAPO (arXiv 2503.14476): clip-higher, groups without a signal drawn again, overlong penalty, mean over tokens.

    python examples/dapo.py [--iterations 15] [--seed 0]

The method is a set of options (`rlbench.trainers.options.methods`); the four of them are written out here.
"""

import argparse

import rlbench as rb
from rlbench.tiny import tasks

OPTIONS = {
    "clip_low": 0.2,
    "clip_high": 0.28,  # clip-higher: an unlikely token may gain more than a likely one may lose
    "dynamic_sampling": True,
    "max_num_gen_batches": 8,  # groups whose rewards are all equal teach nothing: others
    "overlong_buffer": True,
    "overlong_buffer_len": 3,
    "overlong_buffer_penalty_factor": 0.5,  # of the 12 tokens
    "aggregation": "token-mean",  # each token counts alike, so that long answers count more
    "rollout_batch_size": 16,
    "n": 8,
    "max_tokens": 12,
    "train_batch_size": 64,
    "micro_train_batch_size": 32,
    "micro_rollout_batch_size": 64,  # two steps an iteration
}


def train(iterations: int = 15, seed: int = 0) -> list[dict]:
    """Train and return the records of the iterations."""
    with rb.init(devices=1), rb.Session("tiny", train=rb.Train(lr=1e-4), seed=seed) as session:
        trainer = session.trainer(
            "dapo",
            tasks.prompts(128 * iterations, seed=seed),
            tasks.reward,  # more prompts than are kept
            eval_prompts=tasks.prompts(128, split="eval", seed=1),
            seed=seed,
            **OPTIONS,
        )
        before = trainer.evaluate()
        for number in range(iterations):
            record = trainer.step()
            print(
                f"iteration {number + 1}: reward {record['reward']:.3f} · groups with a signal "
                f"{record['dynamic_sampling/signal_frac']:.2f} · clipped above {record['clip_fraction_high']:.3f} · "
                f"below {record['clip_fraction_low']:.3f} · overlong {record['overlong']:.2f}",
                flush=True,
            )
        after = trainer.evaluate()
        print(f"prompts taken: {trainer.where()['prompts']['position']} for {16 * iterations} kept groups")
        print(f"greedy on unseen prompts: {before['eval/reward']:.3f} -> {after['eval/reward']:.3f}")
        return list(session.history)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    train(**vars(parser.parse_args()))

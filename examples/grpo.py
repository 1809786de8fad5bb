"""GRPO (arXiv 2402.03300) on the ranks of a session: groups of samples stand in for a critic; no reference model.

    python examples/grpo.py [--iterations 30] [--seed 0] [--lr 1e-4] [--model MODEL]

The trainer is `rlbench.trainers.SPMDPPOTrainer`; `session.trainer` builds it on every rank, around the session's own
policy. The task: "sort 52143", whose one right answer is 12345; reward 1 if the whole answer is right, else 0. With
`--model` and prompts of your own nothing else changes.
"""

import argparse

import rlbench as rb
from rlbench.tiny import tasks

OPTIONS = {
    "rollout_batch_size": 32,  # prompts of one iteration, over all ranks
    "n": 8,  # a sample's advantage: its reward against those of the same prompt, by their deviation
    "max_tokens": 12,  # tokens of an answer at most; the longest right one has 9
    "train_batch_size": 256,  # sequences of one optimizer step: here all of an iteration
    "micro_train_batch_size": 32,  # sequences of one forward and backward: memory, not the result
    "micro_rollout_batch_size": 64,  # sequences of one forward that computes old log-probs: likewise
    "packing": True,  # no padding in forwards: speed, not the result
}


def train(model: str = "tiny", iterations: int = 30, seed: int = 0, lr: float = 1e-4) -> list[dict]:
    """Train and return the records of the iterations."""
    with rb.init(devices=1), rb.Session(model, train=rb.Train(lr=lr, max_norm=1.0), seed=seed) as session:
        trainer = session.trainer(
            "grpo",
            tasks.prompts(32 * iterations, seed=seed),
            tasks.reward,
            eval_prompts=tasks.prompts(128, split="eval", seed=1),
            seed=seed,
            **OPTIONS,
        )
        before = trainer.evaluate()  # greedy, on numbers that are never trained on
        for number in range(iterations):  # or trainer.fit(iterations)
            record = trainer.step()
            print(
                f"iteration {number + 1}: reward {record['reward']:.3f} · length {record['length']:.1f} · gradient "
                f"{record['grad_norm']:.2f}",
                flush=True,
            )
        after = trainer.evaluate()
        print(f"greedy on unseen prompts: {before['eval/reward']:.3f} -> {after['eval/reward']:.3f}")
        return list(session.history)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-4)
    train(**vars(parser.parse_args()))

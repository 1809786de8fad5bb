"""RLOO (arXiv 2402.14740): each sample's baseline is the mean reward of the others; with a trainer of one's own.

    python examples/rloo.py [--iterations 20] [--seed 0]

`Curriculum` overrides `make_experience`, as users of the trainer do: it gives easy prompts first. Its class is written
here and runs on every rank. The prompts of the evaluation are of all lengths.
"""

import argparse

import rlbench as rb
from rlbench.tiny import tasks
from rlbench.trainers import SPMDPPOTrainer

OPTIONS = {
    "rollout_batch_size": 64,
    "n": 4,
    "max_tokens": 12,
    "train_batch_size": 256,
    "micro_train_batch_size": 64,
    "micro_rollout_batch_size": 128,
    "kl_coef": 0.01,
    "use_kl_loss": True,
    "kl_estimator": "k3",  # held near where it began, by a reference model
}
EASY = 5


class Curriculum(SPMDPPOTrainer):
    """Numbers of at most five digits in the first iterations, then of all lengths."""

    def make_experience(self, prompts=None):
        if prompts is None and self.iterations < EASY:
            wanted, easy = self.options.ppo.rollout_batch_size, []
            while len(easy) < wanted:
                easy += [p for p in self.prompts.take(wanted) if len(p.text.split()[-1]) <= 5]
            prompts = easy[:wanted]
        return super().make_experience(prompts)


def train(iterations: int = 20, seed: int = 0) -> list[dict]:
    """Train and return the records of the iterations."""
    with rb.init(devices=1), rb.Session("tiny", train=rb.Train(lr=1e-4), seed=seed) as session:
        trainer = session.trainer(
            "rloo",
            tasks.prompts(4096, seed=seed),
            tasks.reward,
            trainer_class=Curriculum,
            eval_prompts=tasks.prompts(128, split="eval", seed=1),
            seed=seed,
            **OPTIONS,
        )
        before = trainer.evaluate()
        for number in range(iterations):
            record = trainer.step()
            print(
                f"iteration {number + 1}: {'easy' if number < EASY else 'all'} prompts · reward "
                f"{record['reward']:.3f} · KL to the start {record['ref_kl']:.4f}",
                flush=True,
            )
        after = trainer.evaluate()
        print(f"greedy on unseen prompts: {before['eval/reward']:.3f} -> {after['eval/reward']:.3f}")
        return list(session.history)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    train(**vars(parser.parse_args()))

"""PPO (arXiv 1707.06347) with a critic, as a rank sees it: critic, optimizers and trainer are made by hand there.

    python examples/ppo_critic.py [--iterations 30] [--seed 0]

`train.run(fn)` runs a function on the ranks of a session, where `strategy` and `module` are there already; a `%%ranks`
cell is the same. What stays is a name of the ranks' namespace, here `trainer`.
"""

import argparse

import rlbench as rb
from rlbench.tiny import tasks

OPTIONS = {
    "fsdp": True,
    "bf16": False,
    "max_norm": 1.0,  # sharded, computed in float32, gradients clipped to this norm
    "advantage_estimator": "gae",  # the critic's values against what came (arXiv 1506.02438)
    "n": 2,  # a critic needs no groups: more prompts, fewer samples of each
    "train_batch_size": 64,  # sequences of one optimizer step: four steps in an iteration of 128 x 2
    "micro_train_batch_size": 32,
    "micro_rollout_batch_size": 64,  # of one forward: memory, not the result
}


def make(path, prompts, unseen, options):
    """Run on every rank: actor (the session's module), critic, their optimizers, the trainer."""
    from transformers import AutoTokenizer

    from rlbench.strategies import get_strategy
    from rlbench.trainers import SPMDPPOTrainer, make_critic

    global trainer
    strategy = get_strategy(options)
    critic = strategy.prepare_model(make_critic(path), is_training=True)
    strategy.setup_inference_engine(options, engine_type="vllm")
    trainer = SPMDPPOTrainer(
        strategy,
        module,
        critic,
        tasks.reward,
        None,
        None,
        module.optimizer,
        strategy.create_optimizer(critic, lr=1e-3, weight_decay=0.0),
        None,
        None,
        tokenizer=AutoTokenizer.from_pretrained(path),
        prompts=prompts,
        eval_prompts=unseen,
        rollout_batch_size=128,
        max_tokens=12,
        clip_low=0.2,
        value_clip=0.2,  # how far a ratio, and a value, may move from where the iteration began
        gamma=1.0,
        lambd=1.0,  # an advantage is the reward at the end less the critic's value: no bias, more variance
        kl_coef=0.0,
        max_epochs=1,  # no reference (it would stand after the reward above); one pass
    )


def iterate(step):
    """Run on every rank: one iteration."""
    trainer.make_experience()
    return trainer.ppo_train(step)


def evaluate():
    """Run on every rank: greedy reward on unseen prompts."""
    return trainer.evaluate()["eval/reward"]


def train(iterations: int = 30, seed: int = 0) -> list[float]:
    """Train and return the rewards of the iterations."""
    with rb.init(devices=1), rb.Session("tiny", train=rb.Train(lr=5e-5), seed=seed) as session:
        prompts = tasks.prompts(128 * iterations, seed=seed)
        unseen = tasks.prompts(128, split="eval", seed=1)
        session.train.run(make, session.options.path, prompts, unseen, OPTIONS | {"seed": seed})
        before, rewards = session.train.run(evaluate)[0], []
        for step in range(iterations):
            metrics = session.train.run(iterate, step)[0]
            rewards.append(metrics["reward"])
            print(
                f"iteration {step + 1}: reward {metrics['reward']:.3f} · critic loss {metrics['critic_loss']:.3f} · "
                f"explained variance {metrics['explained_variance']:.2f}",
                flush=True,
            )
        print(f"greedy on unseen prompts: {before:.3f} -> {session.train.run(evaluate)[0]:.3f}")
        return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    train(**vars(parser.parse_args()))

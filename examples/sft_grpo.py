"""From demonstrations to RL: SFT on answers that are made on the spot, then GRPO from there.

    python examples/sft_grpo.py [--iterations 10] [--seed 0] [--demonstrations 128] [--model MODEL]

Both trainers run on the same session, one after the other: the second takes the policy and its optimizer as the first
leaves them. The task is that of `grpo.py`; `--demonstrations 0` leaves the warm-up out.
"""

import argparse

import rlbench as rb
from rlbench.tiny import tasks

SFT = {
    "train_batch_size": 32,  # demonstrations of one optimizer step, over all ranks; micro-batches are by tokens
    "lr": 1e-4,
    "eval_steps": 2,
}
GRPO = {
    "rollout_batch_size": 32,
    "n": 8,
    "max_tokens": 12,
    "train_batch_size": 256,
    "micro_train_batch_size": 32,
    "micro_rollout_batch_size": 64,
    "packing": True,
    "lr": 1e-4,
}


def demonstrations(count: int, split: str = "train", seed: int = 0) -> list[dict]:
    """Prompts with their right answers."""
    return [{"prompt": p, "completion": tasks.answer(p)} for p in tasks.prompts(count, split=split, seed=seed)]


def train(model: str = "tiny", iterations: int = 10, seed: int = 0, count: int = 128) -> list[dict]:
    """Train and return the records of all iterations."""
    with rb.init(devices=1), rb.Session(model, seed=seed) as session:
        unseen = tasks.prompts(128, split="eval", seed=1)

        def told(what: str) -> None:
            session.sync_weights()  # a trainer of texts leaves the replicas as they were
            found = session.evaluate(unseen, tasks.reward, max_tokens=12, progress=False)
            print(f"greedy {what}: {found.reward:.3f}", flush=True)

        told("before")
        if count:
            rows, held_out = demonstrations(count, seed=seed), demonstrations(128, "eval", seed=2)
            sft = session.trainer(
                "sft", data=rows, eval_data=held_out, schedule_steps=2 * count // 32, seed=seed, **SFT
            )
            for record in sft.fit(epochs=2):  # or sft.step(), or a loop of session.train_step(…, loss="sft")
                if "eval/loss" in record:
                    print(
                        f"step {record['step']}: loss {record['loss']:.3f} · unseen {record['eval/loss']:.3f}",
                        flush=True,
                    )
            told("after SFT")
        prompts = tasks.prompts(32 * iterations, seed=seed + 1)
        grpo = session.trainer("grpo", prompts, tasks.reward, seed=seed, **GRPO)
        for number in range(iterations):
            print(f"iteration {number + 1}: reward {grpo.step()['reward']:.3f}", flush=True)
        told("after GRPO")
        return list(session.history)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demonstrations", type=int, default=128, dest="count")
    train(**vars(parser.parse_args()))

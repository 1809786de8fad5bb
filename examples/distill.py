"""On-policy distillation: a student learns from a trained policy's log-probs on its own answers, without a reward.

    python examples/distill.py [--iterations 15] [--loss gkd] [--top-k 16] [--seed 0] [--lr 1e-4] [--teacher FOLDER]

Without `--teacher` one is made first: the same tiny model, trained by GRPO on the task ("sort 52143"), then exported;
the student is the model from before. `--loss gkd` compares whole distributions over the teacher's likeliest tokens
(arXiv 2306.13649), `sampled_kl` the sampled tokens alone (arXiv 2306.08543). Rewards are measured, not trained on.
"""

import argparse
import tempfile
from pathlib import Path

import rlbench as rb
from rlbench.tiny import tasks

PROMPTS, SAMPLES, MAX_TOKENS = 32, 4, 12
UNSEEN = tasks.prompts(128, split="eval", seed=1)


def make_teacher(session: rb.Session, steps: int, seed: int, folder: Path) -> Path:
    """Train the session's policy by GRPO, write it to a folder, and bring the session back to where it was."""
    begin = session.snapshot("student")
    for step in range(steps):
        prompts = tasks.prompts(PROMPTS, seed=1000 * seed + step)
        rollouts = session.rollout(prompts, n=8, max_tokens=MAX_TOKENS, progress=False).score(tasks.reward)
        session.train_step(rollouts.batch(advantage=rb.rl.group_normalized()), lr=1e-4)
        session.sync_weights()
    print(f"the teacher's greedy accuracy: {accuracy(session):.3f}")
    session.export(folder)
    session.restore(begin)
    session.sync_weights()
    return folder


def accuracy(session: rb.Session) -> float:
    """Share of right greedy answers on numbers that are never trained on."""
    return session.evaluate(UNSEEN, tasks.reward, max_tokens=MAX_TOKENS, progress=False).reward


def train(
    teacher: str | None = None,
    iterations: int = 15,
    loss: str = "gkd",
    top_k: int = 16,
    seed: int = 0,
    lr: float = 1e-4,
    teacher_steps: int = 20,
) -> list[dict]:
    """Distil, and return the records of the student's steps."""
    with tempfile.TemporaryDirectory() as folder, rb.init(devices=1), rb.Session("tiny", train={"lr": lr}) as session:
        teacher = teacher or str(make_teacher(session, teacher_steps, seed, Path(folder) / "teacher"))
        judge = session.teacher(teacher)
        before, records = accuracy(session), []
        for number in range(iterations):
            prompts = tasks.prompts(PROMPTS, seed=1000 * seed + 500 + number)
            rollouts = session.rollout(prompts, n=SAMPLES, max_tokens=MAX_TOKENS, progress=False).score(tasks.reward)
            batch = judge.score(rollouts.batch(), top_k=top_k if loss == "gkd" else 0)
            records.append(session.train_step(batch, loss=loss))  # rb.rl.gkd(beta=0.5), rb.rl.sampled_kl()
            session.sync_weights()
            print(
                f"iteration {number + 1}: reward {records[-1]['reward']:.3f} · teacher KL "
                f"{records[-1]['teacher_kl']:.3f} · gradient {records[-1]['grad_norm']:.2f}",
                flush=True,
            )
        print(f"greedy on unseen prompts: {before:.3f} -> {accuracy(session):.3f}")
        return [dict(record) for record in records]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--teacher")
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--loss", choices=("gkd", "sampled_kl"), default="gkd")
    parser.add_argument("--top-k", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--teacher-steps", type=int, default=20)
    train(**vars(parser.parse_args()))

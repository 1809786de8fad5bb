"""A calculator as a tool: the tiny model learns to ask it instead of guessing.

The model is shown, by a teacher who mostly guesses, how a tool is called; then GRPO on whole conversations, in which
the tokens that it sampled are trained on and those the calculator answered are not, finds out that asking pays.
Measured with seed 0 on two cores: right answers to 64 unseen questions go from 0.33 to 0.91 in 20 steps.

    python examples/calculator.py [STEPS]
"""

import random
import re
import sys

import numpy as np

import rlbench as rb
from rlbench.data import Ragged, TrainBatch

LESSONS, ASKS = 200, 0.35  # steps of imitation, and how often the teacher asks the calculator


def calculator(expression: str) -> str:
    """The sum of whole numbers, `"37+58"` → `"95"`."""
    if not re.fullmatch(r"\d{1,9}(\+\d{1,9})*", expression):  # what a model writes is data, and never evaluated
        return "error: wanted a sum like 1+2"
    return str(sum(int(part) for part in expression.split("+")))


def right(turn) -> float:
    return float(turn.text == turn.prompt.label)


env = rb.envs.tools({"calculator": calculator}, reward=right)


def questions(count: int, seed: int) -> list[dict]:
    dice = random.Random(seed)
    sums = [f"{dice.randint(10, 99)}+{dice.randint(10, 99)}" for _ in range(count)]
    return [{"prompt": [{"role": "user", "content": text}], "label": calculator(text)} for text in sums]


def lesson(tokenizer, count: int, seed: int) -> TrainBatch:
    """Conversations of the teacher as a batch: what the assistant says is trained on, what the tool says is not."""
    dice, prompts, responses, masks = random.Random(seed), [], [], []
    for question in questions(count, seed):
        text, answer = question["prompt"][0]["content"], question["label"]
        parts = [(f"{dice.randint(20, 198)}<|end|>", True)]
        if dice.random() < ASKS:
            call = f"<tool>calculator({text})</tool><|end|>"
            parts = [(call, True), (f"<|tool|>{answer}<|end|><|assistant|>", False), (f"{answer}<|end|>", True)]
        ids = [(tokenizer(said)["input_ids"], trained) for said, trained in parts]
        prompts.append(tokenizer(f"<|user|>{text}<|end|><|assistant|>")["input_ids"])
        responses.append([token for said, _ in ids for token in said])
        masks.append([trained for said, trained in ids for _ in said])
    rows = Ragged.from_rows(responses, np.int32)
    flat = np.zeros(len(rows.values), np.float32)
    return TrainBatch(
        Ragged.from_rows(prompts, np.int32),
        rows,
        Ragged.from_rows(masks, bool).values,
        flat + 1,
        flat,
        np.arange(count, dtype=np.int32),
        np.zeros(count, np.int64),
    )


def imitate(inputs):
    return -inputs.logprobs, {}


def asked(rollouts: rb.Rollouts) -> float:
    """Share of samples that called the calculator."""
    return float(np.mean([info["turns"] > 1 for info in rollouts.infos]))


def main(steps: int) -> None:
    rb.init(devices=2)
    with rb.Session("tiny", seed=0) as session:
        for step in range(LESSONS):
            batch = lesson(session.tokenizer, 64, seed=step)
            lr = 2e-3 * min(1, (step + 1) / 20, 2 * (1 - step / LESSONS))
            metrics = session.train_step(batch, loss=imitate, lr=lr)
            if step % 25 == 24:
                print(f"lesson {step + 1}: loss {metrics.loss:.3f}", flush=True)
        session.sync_weights()
        test = questions(64, seed=-1)
        limits = {"env": env, "max_turns": 3, "max_tokens": 40}
        print(f"taught: {session.evaluate(test, **limits, temperature=1.0).reward:.2f} right", flush=True)
        for step in range(steps):
            rollouts = session.rollout(questions(16, seed=10_000 + step), n=8, **limits)
            batch = rollouts.batch(advantage=rb.rl.group_normalized())  # the environment's rewards, the mask too
            session.train_step(batch, loss="grpo", lr=1e-4)
            session.sync_weights()
            print(
                f"step {step + 1}: reward {rollouts.rewards.mean():.2f}, asked {asked(rollouts):.2f}, "
                f"{batch.mask.sum()} of {batch.tokens} tokens trained",
                flush=True,
            )
        print(f"trained: {session.evaluate(test, **limits, temperature=1.0).reward:.2f} right")
    rb.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)

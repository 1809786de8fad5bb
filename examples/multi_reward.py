"""Three kinds of reward in one run: a reward model on the ranks, a rule in Python, a service over HTTP.

    python examples/multi_reward.py [--iterations 20] [--seed 0] [--judge 0.4]

The reward model is trained here first, on pairs of a right and a wrong answer (Bradley-Terry); the service is started
here too. `mixed` makes one reward of the three. None of them is what is meant, a right answer: its share is charted
beside them and not trained on. With `--judge 1` the reward model is all there is, and what becomes of that shows.
"""

import argparse
import itertools
import json
import random
import tempfile
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import AutoTokenizer, Qwen2ForSequenceClassification

import rlbench as rb
from rlbench.tiny import tasks

OPTIONS = {
    "rollout_batch_size": 32,
    "n": 8,
    "max_tokens": 12,
    "train_batch_size": 256,
    "micro_train_batch_size": 64,
    "micro_rollout_batch_size": 128,
}


class Service(BaseHTTPRequestHandler):
    """Scores which share of the digits was kept; it is asked for all samples of a rank at once."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        pairs = zip(asked["responses"], asked["labels"], strict=True)
        scores = [sum((Counter(said) & Counter(right)).values()) / max(len(said), len(right)) for said, right in pairs]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"rewards": scores}).encode())

    def log_message(self, *_): ...


def ordered(rollout):
    """A rule: the share of neighbours that are digits in order."""
    pairs = list(itertools.pairwise(rollout.text))
    return sum(a.isdigit() and b.isdigit() and a <= b for a, b in pairs) / max(1, len(pairs))


def mixed(weight):
    """What makes one reward of each source's scores, in the order the sources were given in, and says what to chart."""

    def reward(scores, labels, queries, refs, label_map):
        judge, rule, service = torch.sigmoid(scores[0]), scores[1], scores[2]
        right = torch.tensor([float(text == label) for text, label in zip(queries, labels, strict=True)])
        mean = weight * judge + (1 - weight) * (rule + service) / 2
        return mean, {"judge": judge, "rule": rule, "service": service, "right": right}

    return reward


def spoiled(answer, chance):
    """A wrong answer: its digits shuffled, one left out, one exchanged."""
    i = chance.randrange(len(answer))
    shuffled, shorter = "".join(chance.sample(answer, len(answer))), answer[:i] + answer[i + 1 :]
    return chance.choice((shuffled, shorter, answer[:i] + chance.choice("0123456789") + answer[i + 1 :]))


def reward_model(folder, steps=60):
    """Train a model with a scalar head to score right answers above spoiled ones, and write it to a folder."""
    path, chance, preferred = rb.tiny.ensure(), random.Random(0), []
    torch.manual_seed(0)
    torch.set_num_threads(1)  # so small a model is faster so
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = Qwen2ForSequenceClassification.from_pretrained(path, num_labels=1, pad_token_id=tokenizer.pad_token_id)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        pairs = [(prompt, tasks.answer(prompt)) for prompt in tasks.prompts(32, seed=100 + step)]
        rows = [
            [*prompt, {"role": "assistant", "content": text}]
            for prompt, right in pairs
            for text in (right, spoiled(right, chance))
        ]
        inputs = tokenizer.apply_chat_template(rows, padding=True, return_tensors="pt", return_dict=True)
        scores = model(**inputs).logits[:, 0]
        rb.rl.bradley_terry_loss(scores[0::2], scores[1::2])[0].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        preferred.append(float((scores[0::2] > scores[1::2]).float().mean()))
    print(f"reward model: prefers the right answer in {sum(preferred[-10:]) / 10:.2f} of its last pairs", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train(iterations=20, seed=0, judge=0.4):
    """Train; prints the reward of each iteration and what it was made of."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    prompts = [{"prompt": p, "label": tasks.answer(p)} for p in tasks.prompts(32 * iterations, seed=seed)]
    with tempfile.TemporaryDirectory() as folder:
        reward_model(folder)
        with rb.init(devices=1), rb.Session("tiny", train=rb.Train(lr=1e-4), seed=seed) as session:
            trainer = session.trainer(
                "grpo",
                prompts,
                [folder, ordered],
                seed=seed,
                **OPTIONS,
                arguments={"reward_fn": mixed(judge), "remote_rm_url": f"http://127.0.0.1:{server.server_port}/"},
            )
            for number in range(iterations):
                record = trainer.step()
                parts = (f"{name} {record[f'{name}_mean']:.2f}" for name in ("judge", "rule", "service", "right"))
                print(f"iteration {number + 1}: reward {record['reward']:.3f} · {' · '.join(parts)}", flush=True)
    server.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--judge", type=float, default=0.4, help="share of the reward model in the reward")
    train(**vars(parser.parse_args()))

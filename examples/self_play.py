"""Self-play: a policy learns to beat an earlier one of its own, which answers inside the environment.

    python examples/self_play.py [--iterations 20] [--seed 0]

Both players see a number and say one; the larger first digit wins. One replica holds the base, the player and its
rival as adapters beside each other; every few iterations the rival becomes the player.
"""

import argparse

import rlbench as rb
from rlbench.tiny import tasks

REFRESH = 5
"""Iterations after which the rival is the player of then."""


class Duel(rb.envs.Env):
    """One turn each; the rival, a policy that can be sent, sees the same prompt."""

    def __init__(self, rival):
        self.rival = rival

    def step(self, turn):
        mine, theirs = first_digit(turn.text), first_digit(self.rival.answer(turn.prompt.content, max_tokens=2))
        return rb.envs.Step(reward=0.5 if mine == theirs else float(mine > theirs), done=True)


def first_digit(text):
    """A text that begins with none loses."""
    return int(text[0]) if text[:1].isdigit() else -1


def leave_as(session, name):
    """Leave the policy of now in the replicas under a name, and go on."""
    if name in session.branches:
        session.drop(session.branches[name])
    session.branch(name)
    session.branch("main")
    return session.policy(name)


def win_rate(session, rival, seed):
    """The share of duels that the policy wins, a draw as half of one."""
    rollouts = session.rollout(tasks.prompts(64, "eval", seed), env=Duel(rival), max_tokens=2, progress=False)
    return float(rollouts.rewards.mean())


def play(session, iterations, seed):
    """Train; return the win rate against the model it began as, before and after."""
    base = session.policy("base")
    begun = win_rate(session, base, seed)
    print(f"iteration 0: against the base {begun:.2f}", flush=True)
    for iteration in range(1, iterations + 1):
        if iteration % REFRESH == 1:
            rival = leave_as(session, "rival")
        prompts = tasks.prompts(32, seed=seed + iteration)
        rollouts = session.rollout(prompts, n=4, env=Duel(rival), max_tokens=2, progress=False)
        session.train_step(rollouts.batch(rb.rl.group_normalized()), "grpo")
        session.sync_weights()
        print(f"iteration {iteration}: against the rival {rollouts.rewards.mean():.2f}", flush=True)
    ended = win_rate(session, base, seed)
    print(f"iteration {iterations}: against the base {ended:.2f}", flush=True)
    return begun, ended


def main():
    """Play in a session of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    train, inference = rb.Train(lr=1e-2, lora=rb.Lora(rank=8)), rb.Inference(adapters=2)
    with rb.Session("tiny", train=train, inference=inference, seed=args.seed) as session:
        play(session, args.iterations, args.seed)
    rb.shutdown()


if __name__ == "__main__":
    main()

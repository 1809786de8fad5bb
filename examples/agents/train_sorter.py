"""Train the model behind an agent that knows nothing of rlbench: each run of it is one rollout.

    python examples/agents/train_sorter.py [--agent openai] [--steps 20] [--seed 0] [--lr 3e-4] [--model MODEL]

`session.collect` hands out a base URL for each run, the agent's calls there are kept token by token, and GRPO compares
the runs of one task. Agents: `openai` (`sorter.py`), `pydantic-ai` (`sorter_pydantic_ai.py`), and `verifiers`, a
taskset of that library (`sorter_verifiers.py`) played by the interpreter `--python PATH` of the environment it is in.
"""

import argparse
import ssl

import openai
import sorter

import rlbench as rb
from rlbench.tiny import tasks

PER_STEP = 16


def by_openai():
    """Return a function of a run: the loop on the `openai` package."""
    shared = openai.OpenAI(base_url="http://127.0.0.1", api_key="none")  # connections are kept between runs
    return lambda run: sorter.solve(shared.with_options(base_url=run.url, api_key=run.key), run.task, run.model)


def by_pydantic_ai():
    """Return an async function of a run: the agent of pydantic-ai."""
    import sorter_pydantic_ai

    certificates = ssl.create_default_context()  # reading them takes longer than a run

    async def agent(run):
        http = openai.DefaultAsyncHttpxClient(verify=certificates)
        async with openai.AsyncOpenAI(base_url=run.url, api_key=run.key, http_client=http) as client:
            return await sorter_pydantic_ai.solve(client, run.task, run.model)

    return agent


AGENTS = {"openai": by_openai, "pydantic-ai": by_pydantic_ai}


def train(
    session: rb.Session,
    steps: int,
    seed: int,
    agent: str = "openai",
    python: str | None = None,
    per_step: int = PER_STEP,
) -> list[float]:
    """Train; return the mean reward of each step."""
    if agent == "verifiers":
        options = {"sampling": {"max_tokens": 12}, "concurrency": 8}
        with rb.envs.from_verifiers({"id": "sorter_verifiers", "seed": seed}, python=python, **options) as env:
            return train_on(session, env.tasks(per_step * steps), env.play, steps, timeout_s=600)  # all at once wait
    questions = [messages[0]["content"] for messages in tasks.prompts(per_step * steps, seed=seed)]
    return train_on(session, questions, AGENTS[agent](), steps)


def train_on(session: rb.Session, questions: list, solve, steps: int, timeout_s: float = 60) -> list[float]:
    """Train on runs of an agent; return the mean reward of each step."""
    rewards = []
    per_step = len(questions) // steps
    for step in range(steps):
        with session.collect(questions[per_step * step : per_step * (step + 1)], n=8) as runs:
            traces = runs.each(solve, concurrency=32, timeout_s=timeout_s)
        session.train_step(traces.batch(advantage=rb.rl.group_normalized()), "grpo")
        session.sync_weights()
        rewards.append(float(traces.rollouts.rewards.mean()))
        print(f"step {step + 1}: reward {rewards[-1]:.3f} · {len(traces)} runs", flush=True)
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--agent", default="openai", choices=[*AGENTS, "verifiers"])
    parser.add_argument("--python", help="of the environment that verifiers is installed in")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=3e-4)
    args = parser.parse_args()
    with rb.init(devices=1), rb.Session(args.model, train=rb.Train(lr=args.lr, max_norm=1.0), seed=args.seed) as policy:
        policy.endpoint()
        train(policy, args.steps, args.seed, args.agent, args.python)

"""An agent that knows nothing of rlbench: it asks a model to sort, has a tool check the answer, and lets it try again.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… RLBENCH_TASK="sort 52143" python examples/agents/sorter.py

prints 1.0 where the answer was right, 0.5 where the second was, else 0.0. Any OpenAI-compatible server will do.
"""

import os

import openai

TRIES = 2


def check(task: str, answer: str) -> str:
    """The tool: says whether the digits of a task are in order."""
    return "right" if answer == "".join(sorted(task.removeprefix("sort "))) else "wrong"


def solve(client: openai.OpenAI, task: str, model: str = "policy") -> float:
    """Return 1.0 where the model has it right, 0.5 at the second try, else 0.0."""
    messages = [{"role": "user", "content": task}]
    for number in range(TRIES):
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=12).choices[0].message
        verdict = check(task, answer.content or "")
        if verdict == "right":
            return 1.0 / (number + 1)
        messages.append({"role": "assistant", "content": answer.content})
        messages.append({"role": "user", "content": f"check: {verdict}"})
    return 0.0


if __name__ == "__main__":
    print(solve(openai.OpenAI(), os.environ["RLBENCH_TASK"], os.environ.get("RLBENCH_MODEL", "policy")))

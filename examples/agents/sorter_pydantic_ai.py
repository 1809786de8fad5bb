"""The sorter as an agent of pydantic-ai, which knows nothing of rlbench: what checks the answer has the model retry.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… RLBENCH_TASK="sort 52143" python examples/agents/sorter_pydantic_ai.py

prints 1.0 where the answer was right, 0.5 where the second was, else 0.0. `pip install 'pydantic-ai-slim[openai]'`.
"""

import asyncio
import os

import openai
from pydantic_ai import Agent, ModelRetry, RunContext, UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from sorter import TRIES, check

sorter = Agent(deps_type=str, retries=TRIES - 1, model_settings={"max_tokens": 12})


@sorter.output_validator
def checked(context: RunContext[str], answer: str) -> str:
    """Have the model try again where the tool says that its answer is wrong."""
    if check(context.deps, answer) == "wrong":
        raise ModelRetry("wrong")
    return answer


async def solve(client: openai.AsyncOpenAI, task: str, model: str = "policy") -> float:
    """Return 1.0 where the model has it right, 0.5 at the second try, else 0.0."""
    chat = OpenAIChatModel(model, provider=OpenAIProvider(openai_client=client))
    try:
        result = await sorter.run(task, model=chat, deps=task)
    except UnexpectedModelBehavior:  # its retries are used up
        return 0.0
    return 1.0 / result.usage.requests


if __name__ == "__main__":
    model = os.environ.get("RLBENCH_MODEL", "policy")
    print(asyncio.run(solve(openai.AsyncOpenAI(), os.environ["RLBENCH_TASK"], model)))

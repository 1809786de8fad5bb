"""Plays episodes of the verifiers library (0.4 or later), in an environment of its own that knows nothing of rlbench.

A program: lines of JSON come in (`load`, then `tasks`, `play` and `stop`), lines go out, each with the `id` of what it
answers. Several episodes are played at a time; what verifiers and its tasks print goes to standard error.
"""

import asyncio
import contextlib
import itertools
import json
import os
import sys
import traceback
import zlib
from typing import Any

KEY = "RLBENCH_VERIFIERS_KEY"
RENEWED_AFTER = 64
"""Episodes after which what serves them is made anew, once none is under way: it keeps a client for each URL."""


class Runner:
    """An environment and the episodes under way."""

    def __init__(self, out: Any) -> None:
        self.out = out
        self.env: Any = None
        self.tasks: dict[int, Any] = {}
        self.episodes: dict[int, asyncio.Task[None]] = {}
        self.turn = asyncio.Semaphore()
        self.played = 0

    def say(self, number: int, **answer: Any) -> None:
        self.out.write(json.dumps({"id": number, **answer}, default=str) + "\n")
        self.out.flush()

    async def run(self) -> None:
        """Do what the lines say until they end."""
        lines = asyncio.StreamReader(limit=2**26)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        async with contextlib.AsyncExitStack() as serving:
            while line := await lines.readline():
                asked = json.loads(line)
                number, kind = asked.pop("id"), asked.pop("do")
                if kind == "stop":
                    if episode := self.episodes.get(number):
                        episode.cancel()
                elif kind == "play":
                    await self.renew(serving)
                    self.episodes[number] = asyncio.create_task(self.answer(number, self.play(**asked)))
                else:
                    await self.answer(number, self.load(serving, **asked) if kind == "load" else self.listed(**asked))
            for episode in self.episodes.values():
                episode.cancel()
            await asyncio.gather(*self.episodes.values(), return_exceptions=True)

    async def answer(self, number: int, work: Any) -> None:
        try:
            self.say(number, **await work)
        except (Exception, SystemExit) as error:  # verifiers leaves by SystemExit where something is not set up
            traceback.print_exc()
            self.say(number, error=f"{type(error).__name__}: {error}")
        finally:
            self.episodes.pop(number, None)

    async def load(self, serving: Any, env: dict[str, Any], agent: dict[str, Any], concurrency: int) -> dict[str, Any]:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        seats = sorted(agent_config_fields(resolve_env_config(dict(env))))
        if len(seats) != 1:
            raise ValueError(f"{', '.join(seats)}: several agents play it, and a run is of one, with one reward")
        (seat,) = seats  # most call it "agent"
        self.env = load_environment(resolve_env_config({**env, seat: {**agent, **env.get(seat, {})}}))
        await serving.enter_async_context(self.env.serving())
        self.turn = asyncio.Semaphore(concurrency)
        return {"infinite": not self.env.taskset.bounded}

    async def renew(self, serving: contextlib.AsyncExitStack) -> None:
        """Let go of what the episodes so far have left, where that is much."""
        if self.played >= RENEWED_AFTER and not self.episodes:
            await serving.aclose()
            await serving.enter_async_context(self.env.serving())
            self.played = 0
        self.played += 1

    async def listed(self, count: int | None, seed: int | None) -> dict[str, Any]:
        taskset = self.env.taskset
        if seed is not None:
            taskset = taskset.shuffle(seed)
        found = list(itertools.islice(taskset, count))
        self.tasks |= {task.data.idx: task for task in found}
        shown = [{"idx": task.data.idx, "name": task.data.name, "prompt": prompt_of(task.data)} for task in found]
        return {"tasks": shown}

    async def play(self, idx: int, url: str, key: str, model: str, sampling: dict[str, Any]) -> dict[str, Any]:
        import verifiers.v1 as vf

        variable = f"{KEY}_{zlib.crc32(key.encode()):x}"  # of its own for each session's: it is read later
        os.environ[variable] = key
        headers = {"Connection": "close"}  # the URL is of this episode alone
        client = vf.EvalClientConfig(base_url=url, api_key_var=variable, headers=headers)
        ctx = vf.ModelContext(client=client, model=model, sampling=vf.SamplingConfig(**sampling))
        task = self.tasks.get(idx)
        if task is None:
            raise KeyError(f"no task {idx} was handed out by tasks(…)")
        async with self.turn:
            episode = await self.env.run_episode(task, ctx)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            said = "; ".join(f"{error.type}: {error.message}" for error in errors)
            return {"error": said or "the episode did not end well"}
        return {"reward": sum(trace.reward for trace in episode.traces)}


def prompt_of(data: Any) -> Any:
    """Return a task's opening as JSON: a text, messages, or None where the user opens the conversation later."""
    prompt = data.prompt
    if prompt is None or isinstance(prompt, str):
        return prompt
    return [message.model_dump(mode="json", exclude_none=True) for message in prompt]


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())  # where a notebook's own tasksets are
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no answer
    asyncio.run(Runner(lines).run())

"""What is trained on is what was sampled, behind what it was sampled behind, whatever kinds of clients ask."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from rlbench.session.endpoint.endpoint import Endpoint

pytestmark = pytest.mark.engine

SMALL, LARGE = 120, 10_000  # calls
PER_RUN = 12
LOOK = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"x": {"enum": ["a", "b"]}}}},
}
Sampled = tuple[tuple[int, ...], tuple[int, ...]]  # ids that were sampled behind, and those that were sampled


@pytest.fixture(scope="module")
def endpoint(session: Any) -> Iterator[Endpoint]:
    opened = session.endpoint(tool_parser="hermes")
    yield opened
    opened.close()


class Program:
    """A client that talks in mixed ways, and notes the token ids that vLLM told it of each answer."""

    def __init__(self, client: openai.AsyncOpenAI, seed: int) -> None:
        self.client, self.random = client, random.Random(seed)
        self.told: list[Sampled] = []
        self.calls = 0
        self.kinds: Counter[str] = Counter()
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": f"sort {seed}"}]

    async def run(self) -> None:
        """Make `PER_RUN` calls or a few more."""
        ways = [self.goes_on, self.trims, self.tries_again, self.asks_in_parallel, self.draws_several]
        ways += [self.uses_a_tool, self.streams, self.completes, self.edits]
        while self.calls < PER_RUN:
            way = self.random.choice(ways)
            self.kinds[way.__name__] += 1
            await way()
            if len(self.messages) > 9:  # the next conversation of the run
                del self.messages[1:]

    async def chat(self, messages: Any = None, **options: Any) -> Any:
        """Ask, and note what was sampled behind what."""
        self.calls += 1
        asked = {"max_tokens": 10, "extra_body": {"return_token_ids": True}} | options
        answer = await self.client.chat.completions.create(
            model="policy", messages=list(self.messages) if messages is None else messages, **asked
        )
        for choice in answer.choices:
            self.told.append((tuple(answer.prompt_token_ids), tuple(choice.token_ids)))
        return answer.choices[self.random.randrange(len(answer.choices))].message

    def say(self, content: str) -> None:
        """Append what the model is to have said, and the next question."""
        self.messages.append({"role": "assistant", "content": content})
        self.messages.append({"role": "user", "content": self.random.choice(["again", "  check: wrong\n", "日本 ü"])})

    async def goes_on(self) -> None:
        self.say((await self.chat()).content or "")

    async def trims(self) -> None:
        self.say(f"\n {((await self.chat()).content or '').strip()}  ")

    async def tries_again(self) -> None:
        await self.chat()
        self.say((await self.chat()).content or "")

    async def asks_in_parallel(self) -> None:
        own = [[*self.messages[:-1], {"role": "user", "content": f"part {i}"}] for i in range(3)]
        answers = await asyncio.gather(*(self.chat(messages) for messages in own))
        self.messages = own[1]
        self.say(answers[1].content or "")

    async def draws_several(self) -> None:
        self.say((await self.chat(n=3)).content or "")

    async def uses_a_tool(self) -> None:
        choice = {"type": "function", "function": {"name": "look"}}
        answer = await self.chat(tools=[LOOK], tool_choice=choice, max_tokens=24)
        self.messages.append(answer.model_dump(include={"role", "content", "tool_calls"}))
        for call in answer.tool_calls or ():
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": '{"seen": 1}'})

    async def streams(self) -> None:
        self.calls += 1
        stream = await self.client.chat.completions.create(
            model="policy",
            messages=list(self.messages),
            max_tokens=10,
            stream=True,
            extra_body={"return_token_ids": True},
        )
        text, behind, ids = "", (), []
        async for chunk in stream:
            behind = tuple(getattr(chunk, "prompt_token_ids", None) or behind)
            for choice in chunk.choices:
                text += choice.delta.content or ""
                ids += getattr(choice, "token_ids", None) or []
        self.told.append((behind, tuple(ids)))
        self.say(text)

    async def completes(self) -> None:
        self.calls += 1
        answer = await self.client.completions.create(
            model="policy", prompt=f"ab{self.calls}", max_tokens=5, extra_body={"return_token_ids": True}
        )
        self.told += [(tuple(choice.prompt_token_ids), tuple(choice.token_ids)) for choice in answer.choices]

    async def edits(self) -> None:
        self.say((await self.chat()).content.upper() + "!")


def trained(rollouts: Any) -> dict[str, Counter[Sampled]]:
    """What is trained on, by run: the masked tokens of each turn, behind everything that stands before them."""
    found: dict[str, Counter[Sampled]] = {}
    rows = zip(
        rollouts.infos,
        rollouts.group,
        rollouts.responses,
        rollouts.responses.with_values(rollouts.mask),
        rollouts.responses.with_values(rollouts.turns),
        strict=True,
    )
    for info, group, ids, mask, turns in rows:
        whole, ahead = [*rollouts.prompt_ids[group].tolist(), *ids.tolist()], len(rollouts.prompt_ids[group])
        of_run = found.setdefault(info["run"], Counter())
        for turn in np.unique(turns[mask]):
            (places,) = np.nonzero(mask & (turns == turn))
            assert (np.diff(places) == 1).all(), "what a call sampled stands together"
            begin, end = ahead + places[0], ahead + places[-1] + 1
            of_run[tuple(whole[:begin]), tuple(whole[begin:end])] += 1
    return found


def check(session: Any, endpoint: Endpoint, calls: int, name: str) -> None:
    async def ask() -> list[Program]:
        open_calls = asyncio.Semaphore(48)
        async with openai.AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, timeout=600) as client:

            async def one(number: int) -> Program:
                own = client.with_options(base_url=endpoint.run(f"{name}.{number}"))
                program = Program(own, number)
                async with open_calls:
                    await program.run()
                return program

            return await asyncio.gather(*(one(number) for number in range(-(-calls // PER_RUN))))

    programs = asyncio.run(ask())
    kinds: Counter[str] = sum((program.kinds for program in programs), Counter())
    assert sum(program.calls for program in programs) >= calls and len(kinds) == 9
    traces = session.traces(f"{name}.*")
    rollouts = traces.rollouts
    found = trained(rollouts)
    for number, program in enumerate(programs):
        assert found[f"{name}.{number}"] == Counter(program.told), number
    tokens = sum(len(ids) for program in programs for _, ids in program.told)
    batch = rollouts.score(lambda rollout: float(len(rollout))).batch()
    assert int(np.asarray(batch.mask).sum()) == tokens == sum(run.tokens for run in traces)
    assert any(run.differs for run in traces), "clients trimmed, and the sampled tokens stood"
    assert max(info["turns"] for info in rollouts.infos) > 2
    rows = range(0, rollouts.samples, max(rollouts.samples // 40, 1))
    wholes = [[*rollouts.prompt_ids[rollouts.group[i]].tolist(), *rollouts.responses[i].tolist()] for i in rows]
    for i, scored in zip(rows, session.inference.logprobs(wholes), strict=True):
        mask, told = (rollouts.responses.with_values(v)[i] for v in (rollouts.mask, rollouts.logprobs))
        if not any("tools" in call.request for call in traces[rollouts.infos[i]["run"]].calls):  # no grammar drew it
            own = scored[len(rollouts.prompt_ids[rollouts.group[i]]) - 1 :]
            assert told[mask] == pytest.approx(own[mask], abs=2e-4)


def test_every_trained_token_is_the_one_sampled_behind_the_very_tokens_it_stands_behind(
    session: Any, endpoint: Endpoint
) -> None:
    check(session, endpoint, SMALL, "some")


@pytest.mark.long
def test_every_trained_token_is_the_one_sampled_over_ten_thousand_calls(session: Any, endpoint: Endpoint) -> None:
    check(session, endpoint, LARGE, "many")

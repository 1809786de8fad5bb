"""A policy that thinks, in a real session: later turns do not see it, and what was sampled is trained on as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlbench as rb
from rlbench.envs import Env, Step
from rlbench.envs.thoughts import without_thoughts
from rlbench.errors import DataError
from rlbench.tiny import tasks

pytestmark = pytest.mark.engine

ASKED = tasks.prompts(8, seed=3)
AGAIN = {"role": "user", "content": "again"}


class Again(Env):
    def step(self, turn: Any) -> Any:
        return Step("again", float(turn.number))


@pytest.fixture(scope="module")
def thinking(cluster: Any, tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session whose policy was taught to think before it answers, in first turns now and then."""
    with rb.Session(
        taught(tiny_path, tmp_path_factory.mktemp("taught")), train={"lr": 1e-5, "shards": 2}, undo=1
    ) as made:
        yield made


def taught(base: Path, folder: Path) -> str:
    """The tiny model after 60 steps in this process, for a third of what they cost on ranks."""
    thought, plain = ([{"role": "assistant", "content": text}] for text in ("<think>hm</think>7", "7"))
    rows = [{"messages": [*asked, *one, AGAIN, *thought]} for asked in ASKED for one in (thought, plain)]
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    shown = rb.data.demonstrations(rows, tokenizer)
    ids = torch.zeros(len(shown), int(shown.lengths.max()), dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for i, (prompt, response, mask) in enumerate(
        zip(shown.prompts, shown.responses, shown.responses.with_values(shown.mask), strict=True)
    ):
        whole = torch.tensor([*prompt, *response])
        ids[i, : len(whole)] = whole
        labels[i, len(prompt) : len(whole)] = torch.where(torch.tensor(mask), whole[len(prompt) :], -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()  # what pads a row comes after all that it is trained on
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def rollouts(thinking: Any) -> Any:
    options = {"max_turns": 3, "max_tokens": 20, "temperature": 0.7, "seed": 5}
    return thinking.rollout(ASKED, n=3, env=Again, thoughts="strip", **options)


def test_later_turns_see_answers_alone(rollouts: Any) -> None:
    """Each context is what the chat template makes of the conversation without thoughts."""
    tokenizer = AutoTokenizer.from_pretrained(rollouts.tokenizer)
    several = 0
    for i, info in enumerate(rollouts.infos):
        messages, turns = [*rollouts.prompts[rollouts.group[i]].content], info["messages"]
        ends = np.flatnonzero(np.diff(rollouts.responses.with_values(rollouts.turns)[i]))
        for at in info.get("contexts", ()):
            turn = int(rollouts.responses.with_values(rollouts.turns)[i][at])
            told = turns[: 2 * (turn + 1)]
            seen = [{**m, "content": without_thoughts(m["content"]).lstrip()} for m in told]
            whole = tokenizer.apply_chat_template([*messages, *seen], add_generation_prompt=True, return_dict=False)
            assert rollouts.responses[i][at : at + len(whole)].tolist() == list(whole)
            several += 1
        assert len(ends) == info["turns"] - 1
    assert several >= 12


def test_every_sampled_token_is_trained_behind_what_it_was_sampled_behind(thinking: Any, rollouts: Any) -> None:
    batch = rollouts.batch(advantage=rb.rl.group_normalized())
    assert len(batch) > rollouts.samples and batch.mask.sum() == rollouts.mask.sum()
    gap = np.abs(thinking.logprobs(batch) - batch.sampler_logprobs)[batch.mask]
    assert gap.max() <= 1e-3 and np.median(gap) <= 1e-5
    step = thinking.train_step(batch)
    assert step["logprob_gap_max"] <= 1e-3
    seen = rollouts.with_batch(batch, step)
    assert np.isfinite(seen.channels["trainer_logprob"][rollouts.mask]).all()
    thinking.undo()


def test_a_fork_goes_on_in_the_context_of_its_token(thinking: Any, rollouts: Any) -> None:
    sample = next(i for i, info in enumerate(rollouts.infos) if info.get("contexts"))
    at = int(np.flatnonzero(rollouts.responses.with_values(rollouts.mask)[sample])[-2])
    tree = rollouts.fork(sample, at=at, n=4, max_tokens=6)
    fresh = tree.select([i for i, info in enumerate(tree.infos) if "fork" in info])
    batch = fresh.batch()
    gap = np.abs(thinking.logprobs(batch) - batch.sampler_logprobs)[batch.mask]
    assert fresh.samples == 4 and gap.max() <= 1e-3


def test_a_conversation_is_needed(thinking: Any) -> None:
    with pytest.raises(DataError, match=r"thoughts='drop'.*'keep' or 'strip'"):
        thinking.rollout(ASKED[:1], env=Again, thoughts="drop")
    with pytest.raises(DataError, match="no effect"):
        thinking.rollout(ASKED[:1], thoughts="strip")
    with pytest.raises(DataError, match=r"failed for all.*the prompt is no chat"):
        thinking.rollout(["sort 21"], env=Again, thoughts="strip")

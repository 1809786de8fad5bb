"""Completions continued from one of their tokens: what is drawn, what comes of it, and what trains on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlbench as rb
from rlbench.errors import DataError
from rlbench.tiny import tasks
from tests.clock import interrupt_once
from tests.session.looking import generates

pytestmark = pytest.mark.engine


def reward(rollout: Any) -> float:
    return float(len(set(rollout.token_ids)) + rollout.text.count("1"))


@pytest.fixture(scope="module")
def rollouts(session: Any) -> Any:
    sampling = {"n": 4, "max_tokens": 7, "ignore_eos": True, "seed": 7, "temperature": 2.0}
    return session.rollout(tasks.prompts(3, seed=1), **sampling).score(reward)


def by_hand(tree: Any) -> list[list[float]]:
    """Advantages of each completion's tokens, by recursion over prefixes."""
    rows = [
        (g, r.tolist(), info.get("fork", {}).get("at", 0), float(reward_))
        for g, r, info, reward_ in zip(tree.group, tree.responses, tree.infos, tree.rewards, strict=True)
    ]
    places = {(g, tuple(r[:b])) for g, r, b, _ in rows}

    def ways(row: Any) -> list[tuple[int, ...]]:
        g, r, born, _ = row
        return [tuple(r[:k]) for k in range(born, len(r)) if (g, tuple(r[:k])) in places]

    def behind(row: Any, place: tuple[int, ...]) -> float:
        deeper = [other for other in ways(row) if len(other) > len(place)]
        return value(row[0], deeper[0]) if deeper else row[3]

    def value(group: int, place: tuple[int, ...]) -> float:
        return float(np.mean([behind(row, place) for row in rows if row[0] == group and place in ways(row)]))

    told = []
    for row in rows:
        out = [0.0] * len(row[1])
        for k in range(row[2], len(row[1])):
            place = [one for one in ways(row) if len(one) <= k][-1]
            out[k] = behind(row, place) - value(row[0], place)
        told.append(out)
    return told


def test_continuations_stand_beside_what_they_continue_and_are_the_policys_own(session: Any) -> None:
    rollouts = session.rollout(tasks.prompts(3, seed=1), n=4, max_tokens=10, seed=7).score(reward)
    tree = rollouts.fork(5, at=2, n=6)
    assert tree.samples == rollouts.samples + 6 and len(tree) == len(rollouts)
    (branch,) = tree.branches
    assert branch.group == 1 and branch.at == 2 and branch.samples == tuple(range(8, 14))
    assert branch.value == pytest.approx(np.mean(tree.rewards[8:14]))
    before = rollouts.responses[5][:2].tolist()
    for i in branch.samples:
        ids = tree.responses[i].tolist()
        assert ids[:2] == before and len(ids) <= 10
        assert tree.texts[i] == session.tokenizer.decode(ids, skip_special_tokens=True)
        assert tree.responses.with_values(tree.mask)[i].tolist() == [False] * 2 + [True] * (len(ids) - 2)
        (scored,) = session.inference.logprobs([[*tree.prompt_ids[1].tolist(), *ids]])
        told = tree.responses.with_values(tree.logprobs)[i]
        assert told == pytest.approx(scored[len(tree.prompt_ids[1]) - 1 :], abs=1e-4)
    assert [r.token_ids for r in tree[0].outputs] == [r.token_ids for r in rollouts[0].outputs]


def test_the_same_fork_draws_the_same_and_a_further_one_others(rollouts: Any) -> None:
    tree = rollouts.fork(0, at=1, n=4)
    assert rollouts.fork(0, at=1, n=4).texts == tree.texts
    further = tree.fork(0, at=1, n=4)
    assert set(further.texts[8:12]) - set(tree.texts[4:8]) and further.texts[4:8] == tree.texts[4:8]


def test_advantages_are_what_each_stretch_changed_in_the_value(session: Any, rollouts: Any, put_back: None) -> None:
    tree = rollouts.fork([0, 5, 6], at=[1, 2, 2], n=3)
    tree = tree.fork([tree.branches[0].samples[0], 1], at=[3, 1], n=2)
    tree = tree.fork(0, at=1, n=2, text="1")
    assert sum(len(branch.samples) for branch in tree.branches) == 15 and len(tree.branches) > 3
    batch = tree.batch(advantage=rb.rl.branch_values())
    assert np.asarray(batch.advantages) == pytest.approx(np.concatenate(by_hand(tree)), abs=1e-5)
    assert int(np.asarray(batch.mask).sum()) == int(rollouts.lengths.sum()) + sum(
        int(tree.lengths[i]) - tree.infos[i]["fork"]["at"] for branch in tree.branches for i in branch.samples
    )
    plain = rollouts.batch(advantage=rb.rl.branch_values())
    centred = rollouts.batch(advantage=rb.rl.group_normalized(std="none"))
    assert np.asarray(plain.advantages) == pytest.approx(np.asarray(centred.advantages), abs=1e-5)
    assert session.train_step(batch)["grad_norm"] > 0


def test_the_gradient_of_a_tree_is_the_one_computed_by_hand(
    session: Any, rollouts: Any, tiny_path: Any, put_back: None
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tree = rollouts.fork([0, 5, 0], at=[1, 2, 4], n=3)
    model = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    loss, trained = torch.zeros(()), 0
    rows = zip(tree.group, tree.responses, tree.responses.with_values(tree.mask), by_hand(tree), strict=True)
    for group, ids, mask, advantages in rows:
        whole = torch.tensor([*tree.prompt_ids[group].tolist(), *ids.tolist()])
        logits = model(whole[None]).logits[0, -len(ids) - 1 : -1] / tree.sampling["temperature"]
        logprobs = logits.log_softmax(-1)[torch.arange(len(ids)), whole[-len(ids) :]]
        loss = loss - (torch.tensor(advantages) * logprobs)[torch.tensor(mask)].sum()
        trained += int(mask.sum())
    (loss / trained).backward()
    session.forward_backward(tree.batch(advantage=rb.rl.branch_values()), rb.rl.reinforce())
    (found, *_) = session.train.run(gradients_now)
    session.zero_grad()
    for name, parameter in model.named_parameters():
        assert torch.allclose(found[name], parameter.grad, rtol=1e-3, atol=1e-5), name


def gradients_now() -> dict[str, Any]:
    return {name: parameter.grad.full_tensor() for name, parameter in module.named_parameters()}  # type: ignore[name-defined]


def test_a_written_text_is_not_trained_on_and_gives_no_value_to_what_stands_before_it(rollouts: Any) -> None:
    tree = rollouts.fork(0, at=1, n=3, text="99")
    (branch,) = tree.branches
    assert branch.text == "99" and branch.at == 3
    assert all(tree.responses[i].tolist()[1:3] == [ord("9")] * 2 for i in branch.samples)
    advantages = tree.responses.with_values(np.asarray(tree.batch(advantage=rb.rl.branch_values()).advantages))
    alone = rollouts.responses.with_values(np.asarray(rollouts.batch(rb.rl.branch_values()).advantages))
    assert advantages[0] == pytest.approx(alone[0])
    own = np.asarray(tree.rewards)[list(branch.samples)]
    for i in branch.samples:
        assert advantages[i].tolist()[:3] == [0.0] * 3
        assert advantages[i][3:] == pytest.approx(tree.rewards[i] - own.mean(), abs=1e-5)


def test_a_tree_is_written_and_read_and_later_rollouts_draw_what_they_would_have(
    session: Any, rollouts: Any, tmp_path: Any
) -> None:
    def later() -> Any:
        return session.rollout(["sort 31"], n=2, max_tokens=8)

    number = later().number
    tree = rollouts.fork(0, at=1, n=2)
    assert later().number == number + 1 and session.last is not tree
    read = rb.data.Rollouts.from_parquet(tree.to_parquet(tmp_path / "tree.parquet"))
    assert repr(read.branches) == repr(tree.branches)
    with pytest.raises(DataError, match="no engine"):
        read.fork(0, at=1)
    listed = rollouts.score(list(rollouts.rewards)).fork(0, at=1, n=2)
    assert listed.rewards is None and np.isnan(listed.branches[0].value)


def test_an_interrupt_keeps_what_was_drawn(session: Any) -> None:
    long = session.rollout(["sort 31"], n=2, max_tokens=4, ignore_eos=True)
    interrupt_once(lambda: generates(session))
    with pytest.raises(rb.Stopped) as stopped:
        long.fork(0, at=2, n=512, max_tokens=1500)
    tree = stopped.value.partial
    assert tree.samples > 2 and tree.aborted.any()


@pytest.mark.parametrize(
    ("given", "token"),
    [
        ({"sample": 99, "at": 1}, "no completion 99"),
        ({"sample": 0, "at": 99}, "at=99"),
        ({"sample": 0, "at": 1.5}, "whole numbers"),
        ({"sample": [0, 1, 2], "at": [1, 1]}, "as many"),
        ({"sample": 0, "at": 1, "text": ""}, "nothing to write"),
        ({"sample": 0, "at": 1, "temperature": 0.5}, "temperature"),
        ({"sample": 0, "at": 1, "n": 0}, "n="),
    ],
)
def test_what_cannot_be_continued_is_refused(rollouts: Any, given: dict[str, Any], token: str) -> None:
    with pytest.raises(DataError, match=token):
        rollouts.fork(**given)


def test_the_way_to_a_place_is_computed_once_and_the_kernel_reads_it_without_transformers(session: Any) -> None:
    rollouts = session.rollout(tasks.prompts(1, seed=1), max_tokens=700, ignore_eos=True)
    tree = rollouts.fork(0, at=660, n=16, max_tokens=8, text="é")
    asked, cached = (tree.stats[name] - rollouts.stats[name] for name in ("prompt_tokens", "cached_tokens"))
    assert asked == 16 * (rollouts.prompt_ids.lengths[0] + 660 + len(session.inference.encoded("é")))
    assert cached >= 0.95 * asked
    assert "_tokens" not in vars(session.inference), "whose import takes most of a first fork"


def test_what_ended_by_itself_or_has_no_room_is_refused(session: Any) -> None:
    ended = session.rollout(tasks.prompts(1), max_tokens=16, temperature=0)
    with pytest.raises(DataError, match="ended by itself"):
        ended.fork(0, at=len(ended.responses[0]))
    cut = session.rollout(["sort 31"], max_tokens=3, ignore_eos=True)
    with pytest.raises(DataError, match="leaves none"):
        cut.fork(0, at=3)
    assert cut.fork(0, at=3, n=1, max_tokens=2).lengths.tolist() == [3, 5]

"""Two ranks make the experience that one would make of all prompts, and end together whatever happens to one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rlbench.errors import DataError, EngineError, Stopped
from rlbench.strategies import get_fake_strategy
from tests.modules import qwen_on_meta
from tests.ranks import RankFailure, Ranks, ranks
from tests.trainers.making import asked, joined, last_token, maker_of, qwen_of

FOR_ALL = {
    "advantage_estimator": "reinforce",
    "reward_running_norm": True,
    "reward_running_norm_minus_mean": True,
    "advantages_norm": True,
    "advantage_clip": 1.0,
    "reward_clip": 8.0,
    "packing": True,
}
SHARES = (1, 3)  # prompts of the two ranks: forwards of the first are filled


@pytest.fixture(scope="module")
def engine(qwen: str) -> Iterator[Ranks]:
    with ranks(2, qwen_on_meta(qwen)) as made:
        yield made


def mine(prompts: list[Any], rank: int) -> list[Any]:
    start = sum(SHARES[:rank])
    return prompts[start : start + SHARES[rank]]


def made_on_ranks(engine: Ranks, path: str, options: dict[str, Any], calls: int = 2) -> list[Any]:
    """Each rank's experience, metrics and state after some calls."""

    def make() -> Any:
        from rlbench.strategies import FSDPV2Strategy

        s = FSDPV2Strategy(bf16=False)
        actor, reference = (s.prepare_model(qwen_of(path)) for _ in range(2))
        with_reference = {"initial_model": reference, "config": {"kl_coef": 0.1}}
        maker = maker_of(s, actor, options=options, **with_reference)
        for call in range(calls):
            made = joined(maker.make_experience_list(mine(asked(4, seed=call), s.rank)))
        return made, maker.metrics, maker.state()

    return engine.run(make)


@pytest.fixture(scope="module")
def both(engine: Ranks, qwen: str) -> tuple[list[Any], Any]:
    """The same on two ranks and in one process."""
    found = made_on_ranks(engine, qwen, FOR_ALL)
    strategy = get_fake_strategy({"bf16": False})
    maker = maker_of(strategy, qwen_of(qwen), options=FOR_ALL, initial_model=qwen_of(qwen), config={"kl_coef": 0.1})
    for call in range(2):
        made = joined(maker.make_experience_list(asked(4, seed=call)))
    return found, (made, maker.metrics, maker.state())


def test_whitening_and_the_running_norm_are_over_all_ranks(both: Any) -> None:
    """Defect absent: each rank whitened, and normalised rewards, by its own numbers alone."""
    found, (alone, _, state) = both
    whole = joined([part[0] for part in found])
    assert [len(part[0]) for part in found] == [4, 12]
    assert whole.batch.key == alone.batch.key
    np.testing.assert_allclose(whole.info["reward"], alone.info["reward"], atol=1e-9)
    np.testing.assert_allclose(whole.batch.advantages, alone.batch.advantages, atol=1e-4)
    np.testing.assert_allclose(whole.batch.old_logprobs, alone.batch.old_logprobs, atol=1e-5)
    np.testing.assert_allclose(whole.batch.ref_logprobs, alone.batch.ref_logprobs, atol=1e-5)
    assert whole.batch.group.tolist() == alone.batch.group.tolist()
    for part in found:
        assert part[2]["groups"] == state["groups"]
        assert part[2]["moments"] == pytest.approx(state["moments"])


def test_metrics_are_of_all_samples_and_equal_on_all_ranks(both: Any) -> None:
    found, (_, metrics, _) = both
    assert found[0][1] == found[1][1]
    assert found[0][1] == pytest.approx(metrics, abs=1e-4)
    assert "mismatch/kl" in metrics and "reward_clip_frac" in metrics


def outcomes(engine: Ranks, fn: Any, stopping: tuple[int, ...] = ()) -> list[Any]:
    import cloudpickle

    return engine.outcomes("run", [(cloudpickle.dumps(fn), (), {})] * 2, stopping)


def test_a_reward_that_fails_on_one_rank_ends_the_call_on_both(engine: Ranks, qwen: str) -> None:
    def make() -> Any:
        from rlbench.strategies import FSDPV2Strategy

        s = FSDPV2Strategy(bf16=False)

        def reward(rollout: Any) -> float:
            if s.rank == 1:
                raise ValueError("the judge of rank 1")
            return last_token(rollout)

        maker = maker_of(s, s.prepare_model(qwen_of(qwen)), reward, FOR_ALL)
        maker.make_experience_list(asked(2))

    here, there = outcomes(engine, make)
    assert isinstance(here, RankFailure) and isinstance(here.error, EngineError)
    assert "failed on rank 1" in str(here.error) and "the judge of rank 1" in str(here.error)
    assert isinstance(there, RankFailure) and isinstance(there.error, DataError)
    assert [len(part[0]) for part in made_on_ranks(engine, qwen, FOR_ALL, calls=1)] == [4, 12]


def test_a_prompt_that_one_rank_cannot_use_ends_the_call_on_both(engine: Ranks, qwen: str) -> None:
    def make() -> Any:
        from rlbench.strategies import FSDPV2Strategy

        s = FSDPV2Strategy(bf16=False)
        maker_of(s, s.prepare_model(qwen_of(qwen))).make_experience_list([[1] * (40 if s.rank else 4)])

    here, there = outcomes(engine, make)
    assert isinstance(here.error, EngineError) and "prompt 0 has 40 tokens" in str(here.error)
    assert isinstance(there.error, DataError)


def test_a_stop_asked_of_one_rank_ends_the_call_on_both(engine: Ranks, qwen: str) -> None:
    def make() -> Any:
        from rlbench.strategies import FSDPV2Strategy

        s = FSDPV2Strategy(bf16=False)
        maker_of(s, s.prepare_model(qwen_of(qwen))).make_experience_list(asked(2))

    assert [type(found.error) for found in outcomes(engine, make, stopping=(1,))] == [Stopped, Stopped]
    assert outcomes(engine, make) == [None, None]


def test_ranks_agree_on_what_is_sampled_again_and_share_what_one_has_too_many(engine: Ranks, qwen: str) -> None:
    """The first rank's prompts teach nothing, the second's all do: it gives some away."""

    def make() -> Any:
        from rlbench.strategies import FSDPV2Strategy

        s = FSDPV2Strategy(bf16=False)
        counts: list[int] = []

        dull = {"dull": s.rank == 0}

        def more(count: int) -> list[Any]:
            counts.append(count)
            return asked(count, seed=100 + 10 * len(counts) + s.rank, meta=dull)

        def reward(rollout: Any) -> float:
            return 1.0 if rollout.source.meta["dull"] else last_token(rollout)

        actor = s.prepare_model(qwen_of(qwen))
        maker = maker_of(s, actor, reward, {"dynamic_sampling": True})
        prompts = asked(4, meta=dull)
        made = joined(maker.make_experience_list(prompts[:3] if s.rank == 0 else prompts[3:], more_prompts=more))
        return made, counts, maker.metrics, [p for call in s.gather_and_generate.calls for p in call["prompts"]]

    (one, counts, metrics, _), (two, other, same, drawn) = engine.run(make)
    assert counts == other and counts and metrics == same
    assert (len(one), len(two)) == (12, 4)
    assert one.batch.group.tolist() == np.repeat([0, 1, 2], 4).tolist() and set(two.batch.group.tolist()) == {3}
    for made in (one, two):
        assert all(np.ptp(made.batch.rewards[made.batch.group == g]) > 0 for g in set(made.batch.group.tolist()))
    assert all(prompt in drawn for prompt in one.prompts)  # on the second rank, and trained on by the first
    assert metrics["dynamic_sampling/with_signal"] == len(drawn) >= 4


def test_a_model_on_the_ranks_scores_what_each_rank_has(engine: Ranks, qwen: str) -> None:
    def make(together: int) -> Any:
        from rlbench.strategies import FSDPV2Strategy
        from rlbench.trainers.models.reward_heads import make_reward_model, scores_of

        s = FSDPV2Strategy(bf16=False, args={"tensor_parallel": together})
        reward = s.prepare_model(make_reward_model(qwen, seed=1))
        actor = s.prepare_model(qwen_of(qwen))
        made = joined(maker_of(s, actor, reward).make_experience_list(mine(asked(4), s.rank)))
        s.reload_model(reward)
        pairs = zip(made.batch.prompts, made.batch.responses, strict=True)
        again = scores_of(reward, [[*p.tolist(), *r.tolist()] for p, r in pairs], s, 1)
        return made.batch.rewards, again.numpy()

    alone, shared = (engine.run(make, together) for together in (1, 2))
    for (found, again), (theirs, anew) in zip(alone, shared, strict=True):
        for scores in (again, theirs, anew):
            np.testing.assert_allclose(found, scores, atol=1e-5)
    assert len(found) == 12


def test_the_buffer_whitens_over_all_ranks_also_where_one_has_nothing(engine: Ranks) -> None:
    """Defect absent: unequal ranks whitened by numbers of their own."""

    def whiten() -> Any:
        from rlbench.strategies import FSDPV2Strategy
        from rlbench.trainers.experience.replay_buffer import NaiveReplayBuffer
        from tests.trainers.test_replay_buffer import THREE, experience

        s = FSDPV2Strategy(bf16=False)
        found = []
        for parts in ((1, 3), (0, 2)):
            buffer = NaiveReplayBuffer(1)
            for seed in range(parts[s.rank]):
                buffer.append(experience(THREE, 10 * s.rank + seed))
            before = [part.batch.advantages[part.batch.mask] for part in buffer.items]
            buffer.normalize("advantages", s)
            after = [part.batch.advantages[part.batch.mask] for part in buffer.items]
            found.append([np.concatenate([np.zeros(0), *x]) for x in (before, after)])
        return found

    here, there = engine.run(whiten)
    for one, two in zip(here, there, strict=True):
        before, after = (np.concatenate([a, b]) for a, b in zip(one, two, strict=True))
        expected = (before - before.mean()) / np.sqrt(before.var(ddof=1) + 1e-8)
        np.testing.assert_allclose(after, expected, atol=1e-5)

"""Who gathers to whom and whose outputs are whose, on the plan alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlbench.errors import EngineError
from rlbench.strategies.config import OptionError
from rlbench.strategies.gather_plan import gather_plan, merge, split


def test_eight_ranks_on_engines_of_four_gather_to_0_and_4() -> None:
    """The example of the strategy guide."""
    plan = gather_plan(8, 4)
    assert plan.groups == ((0, 1, 2, 3), (4, 5, 6, 7)) and plan.engines == 2
    assert [plan.leader_of(rank) for rank in range(8)] == [0, 0, 0, 0, 4, 4, 4, 4]
    assert plan.group_of(6) == (4, 5, 6, 7)


def test_uneven_counts_find_their_slices() -> None:
    """Defect absent: equal counts on all ranks were assumed."""
    found = gather_plan(8, 4).slices(5, [2, 0, 3, 1])
    assert found == {4: slice(0, 2), 5: slice(2, 2), 6: slice(2, 5), 7: slice(5, 6)}


@pytest.mark.parametrize(("world", "tp"), [(8, 3), (2, 4), (4, 0)])
def test_ranks_that_cannot_share_engines_are_refused_with_the_numbers(world: int, tp: int) -> None:
    with pytest.raises(OptionError, match=rf"{world} ranks cannot share engines of {tp}"):
        gather_plan(world, tp)


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_every_rank_gets_the_outputs_of_its_own_prompts_in_order(engines: int, tp: int, data: st.DataObject) -> None:
    plan = gather_plan(engines * tp, tp)
    prompts = {r: [(r, i) for i in range(data.draw(st.integers(0, 3)))] for r in range(plan.world_size)}
    for group in plan.groups:
        gathered, counts = merge([prompts[rank] for rank in group])
        outputs = [("out", prompt) for prompt in gathered]
        for rank, own in zip(group, split(outputs, counts), strict=True):
            assert own == [("out", prompt) for prompt in prompts[rank]]
            assert own == outputs[plan.slices(rank, counts)[rank]]


def test_a_lost_output_is_noticed() -> None:
    with pytest.raises(EngineError, match="2 outputs for 3 prompts"):
        split(["a", "b"], [1, 2])
    with pytest.raises(EngineError, match="1 counts for a group of 4"):
        gather_plan(8, 4).slices(0, [1])
    with pytest.raises(EngineError, match="no rank 8"):
        gather_plan(8, 4).leader_of(8)

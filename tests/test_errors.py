"""Attributes that are not there are answered with the nearest that are, or with where to look."""

import copy
import pickle
from dataclasses import dataclass

import pytest

import rlbench as rb
from rlbench.data.record.metrics import Metrics
from rlbench.errors import NoSuchAttribute, Suggesting
from rlbench.notebook.cards.errors import OURS
from rlbench.session.state.snapshots import Snapshots
from tests.data.values import rollouts


@dataclass(frozen=True)
class Found(Suggesting):
    """A value with a property that fails."""

    size: int

    @property
    def broken(self):
        return self.size.length


def missing(value, name):
    with pytest.raises(NoSuchAttribute) as refused:
        getattr(value, name)
    assert isinstance(refused.value, AttributeError) and isinstance(refused.value, OURS)  # one line in a cell
    return str(refused.value)


def test_a_prompts_group_says_where_its_completions_are():
    drawn = rollouts()
    for name in ("token_ids", "text", "logprobs", "finish_reason", "reward"):
        said = missing(next(iter(drawn)), name)
        assert ".outputs" in said and "rollouts.flat" in said
        assert hasattr(next(drawn.flat), name)
    assert ".flat" in missing(drawn, "token_ids") and "outputs" in missing(drawn, "text")
    assert len(drawn) == len(list(drawn)) == len(drawn.prompts)
    assert f"{drawn.samples} rollouts of {len(drawn)} prompts" in repr(drawn)
    group = drawn[0]
    assert len(repr(group)) < 120 and ".outputs" in repr(group) and len(repr(group.outputs[0])) < 160


def test_the_nearest_names():
    drawn = rollouts()
    scored = drawn.score(lambda rollout: float(len(rollout.text)))
    batch = scored.batch(advantage=rb.rl.group_normalized())
    for value, typo, right in [
        (drawn, "lenghts", "lengths"),
        (next(drawn.flat), "reason", "finish_reason"),
        (batch, "advantage", "advantages"),
        (Metrics({"loss": 1.0, "grad_norm": 2.0}), "gradnorm", "grad_norm"),
        (Snapshots([]), "undo_too", "undo_to"),
        (drawn.prompts[0], "lable", "label"),
    ]:
        assert f"nearest: {right}" in missing(value, typo)


def test_what_is_there_is_as_before():
    drawn, found = rollouts(), Found(3)
    for value in (drawn, drawn[0], found):
        assert not hasattr(value, "_repr_png_") and not hasattr(value, "nothing_of_the_kind")
        assert type(copy.copy(value)) is type(pickle.loads(pickle.dumps(value))) is type(value)
    with pytest.raises(AttributeError, match="'int' object has no attribute 'length'"):
        _ = found.broken

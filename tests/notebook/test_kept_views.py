"""The cards of what a session keeps: snapshots, checkpoints, evaluations; and what can be done with each."""

import time

import numpy as np
import pytest

from rlbench.errors import DataError
from rlbench.notebook.cards import result_views
from rlbench.results import Saved
from rlbench.session.record.evaluations import PastEvaluations
from rlbench.session.state.healing import Healed
from rlbench.session.state.snapshots import Snapshots
from rlbench.session.training.evaluation import Evaluation, Evaluations
from tests.data.values import rollouts
from tests.notebook.reading import both
from tests.notebook.values import snapshot


def test_snapshots_show_what_they_cost_and_how_to_go_back():
    before = snapshot("before step 3")
    text = both(result_views.snapshots_card(Snapshots([before, snapshot(disk=True, version=4)], before.id)))
    for part in (
        "2 snapshots 2 MiB in all",
        "before step 3",
        "host memory",
        "disk",
        "3 MiB 1 MiB",
        "v4",
        "90 s ago",
        "session.restore(label)",
        "session.undo() goes back to 'before step 3': step 2",
    ):
        assert part in text, part
    assert "undo" not in both(result_views.snapshots_card(Snapshots([snapshot()])))
    assert "undo" not in both(result_views.snapshots_card(Snapshots([snapshot("before step 3")]))), (
        "a label says nothing"
    )
    assert "session.snapshot()" in both(result_views.snapshots_card(Snapshots([])))


def test_one_snapshot_says_what_restoring_it_does():
    text = both(result_views.snapshot_card(snapshot(time=time.time() - 3 * 86400)))
    assert "session.restore('warm'): back to step 2 and rollout 4" in text and "3 d ago" in text


def test_a_checkpoint_says_where_it_is_and_how_to_go_on_from_it():
    text = both(result_views.saved_card(Saved("/runs/step-3", 5 << 20, ("/runs/step-1",))))
    for part in ("/runs/step-3", "5 MiB", "made way step-1", "rb.Session.load('/runs/step-3')"):
        assert part in text, part
    assert "made way" not in both(result_views.saved_card(Saved("/runs/step-3", 1, ())))


def test_an_evaluation_says_how_sure_it_is():
    text = both(result_views.evaluation_card(Evaluation(0.5, rollouts().score([0, 1, 0, 1, 0, 1]))))
    assert "reward 0.5 · 95 % over prompts: 0.5 to 0.5" in text
    assert "50 % of 6 completions" in text and "3 prompts · v0" in text


def test_what_was_healed_is_listed_by_engine():
    text = both(result_views.healed_card(Healed({"actor": "from snapshot 'warm'"}, 2, 5)))
    assert "healed step 2 · v5" in text and "actor from snapshot 'warm'" in text
    assert "every worker lives" in both(result_views.healed_card(Healed({}, 2, 5)))


def several(**rewards):
    """An evaluation per set, of the same rollouts."""
    return Evaluations(
        {name: Evaluation(float(np.mean(given)), rollouts().score(given), name) for name, given in rewards.items()}
    )


def test_evaluations_of_several_sets_are_one_table():
    text = both(result_views.evaluations_card(several(train=[1, 1, 1, 1, 1, 0], test=[0, 1, 0, 1, 0, 1])))
    assert "set reward 95 % over prompts pass@2 maj@2 prompts completions" in text
    assert "train 0.833" in text and "test 0.5 0.5 to 0.5 1 " in text and "v0" in text


def test_a_comparison_says_how_much_by_chance_or_not_and_on_how_many_prompts():
    found = several(before=[0, 1, 0, 1, 0, 1], after=[1, 1, 0, 1, 0, 0])
    text = both(result_views.compared_card(found["before"].compare(found["after"])))
    for part in ("v0 → v0", "reward 0.5 → 0.5", "p = 1, a paired test", "better 1 prompt", "worse 1 prompt"):
        assert part in text, part


def test_past_evaluations_say_which_weights_are_gone():
    made = {
        "set": "test",
        "step": 3,
        "version": 4,
        "reward": 0.5,
        "low": 0.4,
        "high": 0.6,
        "completions": 64,
        "time": 0.0,
    }
    records = [made | {"state": "undone"}, made | {"step": 2, "version": 2, "state": "now"}]
    text = both(result_views.past_evaluations_card(PastEvaluations(records, {})))
    assert "2 evaluations" in text and "⚠ undone" in text and "0.4 to 0.6" in text
    assert "session.evaluate" in both(result_views.past_evaluations_card(PastEvaluations([], {})))
    with pytest.raises(DataError, match="no evaluation of v3; there are those of v4, v2"):
        PastEvaluations(records, {}).at(3)
    with pytest.raises(DataError, match="not in this kernel any more"):
        PastEvaluations([made | {"id": "a"}], {}).at(4)

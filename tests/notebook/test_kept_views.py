"""The cards of what a session keeps: snapshots, checkpoints, evaluations; and what can be done with each."""

import time

from rlbench.notebook.cards import kept_views
from rlbench.results import Saved
from rlbench.session.state.healing import Healed
from rlbench.session.state.snapshots import Snapshots
from rlbench.session.training.evaluation import Evaluation
from tests.data.values import rollouts
from tests.notebook.reading import both
from tests.notebook.values import snapshot


def test_snapshots_show_what_they_cost_and_how_to_go_back():
    before = snapshot("before step 3")
    text = both(kept_views.snapshots_card(Snapshots([before, snapshot(disk=True, version=4)], before.id)))
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
    assert "undo" not in both(kept_views.snapshots_card(Snapshots([snapshot()])))
    assert "undo" not in both(kept_views.snapshots_card(Snapshots([snapshot("before step 3")]))), "a label says nothing"
    assert "session.snapshot()" in both(kept_views.snapshots_card(Snapshots([])))


def test_one_snapshot_says_what_restoring_it_does():
    text = both(kept_views.snapshot_card(snapshot(time=time.time() - 3 * 86400)))
    assert "session.restore('warm'): back to step 2 and rollout 4" in text and "3 d ago" in text


def test_a_checkpoint_says_where_it_is_and_how_to_go_on_from_it():
    text = both(kept_views.saved_card(Saved("/runs/step-3", 5 << 20, ("/runs/step-1",))))
    for part in ("/runs/step-3", "5 MiB", "made way step-1", "rb.Session.load('/runs/step-3')"):
        assert part in text, part
    assert "made way" not in both(kept_views.saved_card(Saved("/runs/step-3", 1, ())))


def test_an_evaluation_says_how_sure_it_is():
    text = both(kept_views.evaluation_card(Evaluation(0.5, rollouts().score([0, 1, 0, 1, 0, 1]))))
    assert "0.5 ± 0.204 (standard error)" in text and "50 % of 6 completions" in text and "3 prompts · v0" in text


def test_what_was_healed_is_listed_by_engine():
    text = both(kept_views.healed_card(Healed({"actor": "from snapshot 'warm'"}, 2, 5)))
    assert "healed step 2 · v5" in text and "actor from snapshot 'warm'" in text
    assert "every worker lives" in both(kept_views.healed_card(Healed({}, 2, 5)))

"""The cards of a session's verbs and of the script made of them."""

from pathlib import Path

from rlbench.data.record.history import Verbs
from rlbench.notebook.cards import record_views
from rlbench.session.record.recording import Entry
from rlbench.session.record.script import Exported
from tests.notebook.reading import HOSTILE, both


def verb(name, **fields):
    return dict(Entry(name, time=1e9, seconds=0.5, **fields).__dict__)


def test_verbs_show_their_arguments_and_what_came_of_them():
    records = [
        verb("rollout", args={"prompts": "list of 8", "n": "4"}),
        verb("train_step", args={"batch": "batch_1", "loss": "mine"}, metrics={"loss": -0.25, "reward": 0.5}),
        verb("train_step", args={"loss": "broken"}, outcome="failed", said="LossError: no such loss"),
    ]
    text = both(record_views.verbs_card(Verbs(records, lambda record: "")))
    for part in ("3 verbs", "prompts=list of 8, n=4", "loss -0.25 · reward 0.5", "⚠ failed: LossError: no such loss"):
        assert part in text, part
    assert "1 earlier verbs" not in text and "5 earlier verbs" in both(
        record_views.verbs_card(Verbs([verb("rollout")] * 25, lambda record: ""))
    )
    assert "no verbs yet" in both(record_views.verbs_card(Verbs([], lambda record: "")))


def test_hostile_arguments_are_inert():
    for text in HOSTILE:
        card = record_views.verbs_card(Verbs([verb("rollout", args={"prompts": text})], lambda record: ""))
        assert "<script" not in card.html() and "\x1b" not in card.text()


def test_a_script_says_how_to_run_it_and_what_is_not_in_it():
    left_out = tuple(f"cell {i} failed" for i in range(10))
    exported = Exported(Path("/runs/again.py"), 7, left_out)
    text = both(record_views.exported_card(exported))
    for part in ("7 cells", "python again.py", "cell 0 failed", "and 2 more"):
        assert part in text, part
    assert "python again.py" in repr(exported)

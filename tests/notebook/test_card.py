"""Cards: one set of words as HTML and as text, aligned, and inert whatever a model or a user wrote into them."""

import pytest

from rlbench.data.record.history import History
from rlbench.data.record.metrics import Metrics
from rlbench.notebook.cards import data_views, record_views, result_views, session_views
from rlbench.notebook.cards.card import Card, Grid, Pair
from rlbench.notebook.charts.chart import Curves
from rlbench.notebook.rollouts.static import rollouts_view
from rlbench.results import Saved
from rlbench.session.state.healing import Healed
from rlbench.session.state.snapshots import Snapshots
from tests.data.values import generated
from tests.notebook.reading import HOSTILE, both, inert, read
from tests.notebook.values import ACTOR, INFERENCE, Held, batch, snapshot, state


def hostile_rollouts():
    from rlbench.data import Prompt, Rollouts

    part = generated([(0, 0, [1, 2], "stop")])
    part = type(part)(**{**part.__dict__, "texts": [HOSTILE]})
    return Rollouts.merge([Prompt(HOSTILE)], [part], {}).score([1.0])


HOSTILE_CARDS = {
    "session": lambda: session_views.session_card(
        state(**{HOSTILE: INFERENCE | {"broken": HOSTILE, "info": {"executor": HOSTILE}}})
        | {"name": HOSTILE, "config": {"model": HOSTILE, "seed": 0}, "running": {"x": HOSTILE}, "branch": HOSTILE},
        [],
    ),
    "session's state": lambda: session_views.session_card(state(a=ACTOR | {"state": {"weights": HOSTILE}}), []),
    "engine": lambda: session_views.engine_card(
        Held({"actor": INFERENCE | {"info": dict.fromkeys(("path", "dtype"), HOSTILE), "methods": [{"name": HOSTILE}]}})
    ),
    "batch": lambda: data_views.batch_card(batch()),
    "metrics": lambda: record_views.metrics_card(
        Metrics({"step": 1, "skipped": HOSTILE, "loss_name": HOSTILE, "seconds": {HOSTILE: 1.0}, HOSTILE: HOSTILE})
    ),
    "history": lambda: record_views.history_card(History([{"step": 1, "loss": 1.0, "loss_name": HOSTILE}])),
    "snapshot": lambda: result_views.snapshot_card(snapshot(HOSTILE)),
    "snapshots": lambda: result_views.snapshots_card(Snapshots([snapshot(HOSTILE)])),
    "checkpoint": lambda: result_views.saved_card(Saved(HOSTILE, 1, ("x/y",))),
    "healed": lambda: result_views.healed_card(Healed({HOSTILE: HOSTILE}, 1, 1)),
    "sessions": lambda: session_views.sessions_card([{"name": HOSTILE, "pid": 1}]),
}


@pytest.mark.parametrize("make", HOSTILE_CARDS.values(), ids=HOSTILE_CARDS)
def test_hostile_text_in_a_card_is_shown_as_text(make):
    inert(read(make().html()))


@pytest.mark.parametrize(
    "html",
    [
        lambda: rollouts_view(hostile_rollouts()),
        lambda: Curves({HOSTILE: [1.0, 2.0]}, y=HOSTILE, x=HOSTILE).svg,
    ],
    ids=["rollouts", "curves"],
)
def test_hostile_text_is_shown_as_text_wherever_it_comes_in(html):
    reader = read(html())
    assert HOSTILE in reader.text
    inert(reader)


@pytest.mark.parametrize("make", [v for k, v in HOSTILE_CARDS.items() if k != "batch"])
def test_what_is_hostile_is_not_left_out_either(make):
    assert HOSTILE in read(make().html()).text and HOSTILE in make().text()


def test_control_characters_act_neither_in_a_page_nor_in_a_terminal():
    card = Card("a\x1b[31m\u202eb", ("\x07",), [Grid((("x", Pair("y\x1b", "z\u200b")),))], ["one\r\ntwo"])
    for shown in (card.html(), card.text()):
        assert not set("\x1b\x07\u202e\u200b\r") & set(shown)
        assert "␛[31m‹U+202E›b" in shown


def test_a_megabyte_in_one_cell_is_cut():
    card = Card("loss", ("x" * 2**20,), [Grid((("name", "y" * 2**20),))], ["z" * 2**20])
    assert len(card.html()) < 10_000 and len(card.text()) < 3000 and "more" not in card.text()


# -- cards: layout


def test_a_card_is_aligned_as_text_and_names_its_rows_and_columns_for_a_screen_reader():
    grid = Grid((("one", "1"), ("twelve", "12")), ("name", "n"), frozenset({1}), "all")
    card = Card("t", ("a", "", "b"), [grid], ["e"])
    assert card.text().splitlines() == ["t   a · b", "all", "name     n", "one      1", "twelve  12", "e"]
    reader = read(card.html())
    assert [v for k, v in reader.attributes if k == "scope"] == ["col", "col", "row", "row"]
    assert "caption" in reader.tags and both(card)


def test_a_warning_is_a_sign_and_a_word_and_not_a_colour_alone():
    card = Card("t", (), [Grid((("a", "⚠ behind"),))], ["⚠ skipped"])
    assert card.html().count("⚠") == 2 and [v for k, v in read(card.html()).attributes if k == "class"].count("w") == 1
    assert '<span class="w k">⚠ behind</span>' in card.html() and "⚠ behind" in card.text()


def test_a_table_without_names_has_no_head():
    assert "scope=col" not in Grid([["a", "b"]], ("", "")).html()
    assert "<th scope=col align=left>x</th>" in Grid([["a", "b"]], ("x", "")).html()

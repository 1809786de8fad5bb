"""Rewards side by side in a cell: numbers, disagreements, failures; hostile text does nothing; NaN spoils no view."""

import base64
import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell

from rlbench import notebook
from rlbench.notebook.cards.reward_views import DISAGREEMENTS, DRAWN, comparison_card, errors_card
from rlbench.notebook.rollouts.order import Summary
from rlbench.notebook.rollouts.page import page as rollout_page
from rlbench.notebook.rollouts.static import rollouts_view
from tests.clock import HandClock
from tests.data.values import rollouts
from tests.data.written import written
from tests.notebook.reading import HOSTILE, both, inert, read


def failing(rollout):
    if rollout.index == 3:
        raise ValueError("no answer")
    return rollout.index


def lab(**rewards):
    return rollouts().compare(**(rewards or {"old": [0, 1, 2, 3, 0, 5], "new": failing}))


def lines(card):
    return {re.split(r"  +", line)[0]: re.split(r"  +", line) for line in card.text().splitlines()}


# -- the card


def test_a_row_says_how_a_reward_compares_with_the_first():
    shown = both(comparison_card(lab()))
    assert shown.startswith("reward comparison 6 completions · 3 prompts")
    found = lab().agreements["new"]
    row = lines(comparison_card(lab()))["new"]
    assert row[1:5] == [f"{found.mean:.3g}", f"{found.std:.3g}", "1", "66.7 %"]
    assert row[5:9] == [f"{found.correlation:.3g}", "20 %", "0 %", "0 %"]
    assert lines(comparison_card(lab()))["old"][5:9] == ["–"] * 4


def test_disagreements_failures_and_slow_completions_stand_below(monkeypatch):
    shown = both(comparison_card(lab()))
    assert "where new disagrees with old, most first" in shown
    assert re.search(r"3 sort 312 : p1s1 123 3 failed failed\n4 sort 4 : p2s0 4 0 4 4\n", shown)
    assert "the reward raised ValueError: no answer" in shown and 'raise ValueError("no answer")' in shown
    clock = HandClock()
    monkeypatch.setattr("time.perf_counter", clock)
    slow = lab(old=[0] * 6, new=lambda r: clock.pass_by(0.02 * (r.index == 1)) or 1)
    assert re.search(r"slowest.*\n.*\n1 new 0\.02 s p0s1", both(comparison_card(slow)))


def test_of_many_disagreements_the_first_are_shown_and_the_rest_is_counted():
    value = written(["q"], [["a"] * 20]).compare(old=np.zeros(20), new=np.arange(20.0))
    shown = both(comparison_card(value))
    assert f"{19 - DISAGREEMENTS} more: .disagreements(n)" in shown


def test_long_texts_are_cut_and_a_label_that_is_none_is_a_dash():
    value = written(["q" * 500], [["a" * 500 + "\nb"]]).compare(old=[0], new=[1])
    shown = both(comparison_card(value))
    assert "q" * 120 + "… (+380 characters) " + "a" * 120 + "… (+382 characters) – 0 1 1" in shown


def test_a_reward_that_teaches_nothing_and_one_that_agrees_are_said():
    shown = both(comparison_card(lab(a=[0, 1, 0, 1, 0, 1], flat=[1] * 6, same=[0, 1, 0, 1, 0, 1])))
    assert "⚠ flat gives every prompt's completions one reward" in shown
    assert "same agrees with a on all completions" in shown and "where same disagrees" not in shown


def test_the_view_is_the_card_with_the_distributions_below():
    view = comparison_card(lab())
    bundle = view.bundle()
    assert bundle["text/html"].startswith(comparison_card(lab()).html()[:200])
    assert [bars.name for bars in view.chart.panels[0].bars] == ["old", "new"]
    assert "new: 5 values" in bundle["text/plain"]
    many = lab(**{f"r{i}": [i, 0, 0, 0, 0, 1] for i in range(DRAWN + 2)})
    assert len(comparison_card(many).chart.panels[0].bars) == DRAWN
    assert f"distributions of the first {DRAWN} of {DRAWN + 2}" in comparison_card(many).bundle()["text/plain"]


def test_where_every_completion_failed_there_is_still_a_view():
    bundle = comparison_card(lab(old=lambda r: 1 / 0, new=lambda r: 1 / 0)).bundle()
    assert "ZeroDivisionError" in bundle["text/plain"] and "nan" not in bundle["text/plain"]


def test_hostile_prompts_responses_labels_names_and_errors_do_nothing():
    hostile = HOSTILE + "\x1b[31m\u202eevil"

    def broken(rollout):
        if rollout.index:
            raise ValueError(hostile)
        return 1

    value = written([hostile], [[hostile, hostile]])
    made = value.compare(**{hostile: [0, 0], "new" + hostile: broken})
    bundle = comparison_card(made).bundle()
    page = read(bundle["text/html"])
    inert(read(comparison_card(made).html()))
    assert page.tags.count("img") == 1 and "script" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    (address,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', bundle["text/html"])
    assert not list(ElementTree.fromstring(base64.b64decode(address)).iter("{http://www.w3.org/2000/svg}script"))
    for bad in ("\x1b", "\u202e"):
        assert bad not in bundle["text/html"] + bundle["text/plain"]
    errors = errors_card(made.errors("new" + hostile))
    inert(read(errors.html()))
    assert "<script>" in both(errors) and "\x1b" not in errors.text()


# -- errors


def test_reward_errors_show_as_a_table_with_the_line():
    scored = rollouts().score(failing, on_error="keep")
    shown = both(errors_card(scored.reward_errors))
    assert shown.startswith("reward errors 1 failed") and "3 sort 312 :" in shown and "ValueError: no answer" in shown
    assert both(errors_card(rollouts().reward_errors)).startswith("reward errors none")
    many = written(["q"], [["a"] * 60]).score(lambda r: 1 / 0, on_error="keep")
    assert "10 more: rollouts.reward_errors.table()" in both(errors_card(many.reward_errors))


# -- rollouts some of which have no reward


def test_means_spreads_and_filters_leave_failed_completions_out():
    s = Summary(rollouts().score(failing, on_error="keep"))
    assert s.mean.tolist() == [0.5, 2, 4.5] and s.spread.tolist() == [0.5, 0, 0.5] and s.threshold == 2.5
    assert s.right.tolist() == [False, False, False, False, True, True] and s.filters["mixed groups"].tolist() == [
        True,
        True,
        False,
        False,
        True,
        True,
    ]
    named = dict(zip(s.filters, s.labels(), strict=True))
    assert named["wrong"] == "wrong · 3" and named["scoring failed"] == "scoring failed · 1"
    assert "scoring failed" not in Summary(rollouts().score(range(6))).filters
    for sort in s.sorts:
        s.order(sort)


def test_two_rewards_and_failures_are_still_two_rewards():
    scored = rollouts().score(lambda r: 1 / 0 if r.index == 3 else r.index % 2, on_error="keep")
    assert Summary(scored).two_valued and Summary(scored).threshold == 0.5
    nothing = Summary(rollouts().score(lambda r: 1 / 0, on_error="keep"))
    assert nothing.threshold is None and not nothing.two_valued and not nothing.right.any()


@pytest.mark.parametrize("reward", [failing, lambda r: 1 / 0], ids=["one failed", "all failed"])
def test_the_viewers_show_them_without_a_reward(reward):
    scored = rollouts().score(reward, on_error="keep")
    for view in (rollouts_view(scored), rollout_page(scored)):
        text = read(re.sub(r"<script.*?</script>", "", view, flags=re.DOTALL)).text
        assert "without a reward" in text and "nan" not in text.lower().replace("finance", "")
        for data in re.findall(r"<script type=\"application/json\"[^>]*>(.*?)</script>", view, flags=re.DOTALL):
            json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.fixture
def shell():
    InteractiveShell.clear_instance()
    made = InteractiveShell.instance()
    notebook.install()
    yield made
    InteractiveShell.clear_instance()


def test_at_the_end_of_a_cell_they_show_their_views_and_in_a_list_one_line(shell):
    made = lab()
    data, _ = shell.display_formatter.format(made)
    assert data == comparison_card(made).bundle()
    errors = made.errors("new")
    data, _ = shell.display_formatter.format(errors)
    assert data == errors_card(errors).bundle()
    listed, _ = shell.display_formatter.format([made])
    assert listed["text/plain"] == f"[{made!r}]" and "\n" not in repr(made)

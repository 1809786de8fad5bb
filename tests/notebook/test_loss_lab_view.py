"""The loss lab in a cell: a row of numbers per loss, curves below, and nothing in a name or an error acts."""

import base64
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell

from rlbench import notebook, rl
from rlbench.notebook.charts.chart import PLOTLY
from rlbench.notebook.lab.view import DRAWN, lab_card, lab_view, what_if_chart
from rlbench.session.checks.rehearsal import worst_batch
from rlbench.session.lab.loss_lab import RATIOS
from tests.data.values import rollouts
from tests.labs import loss_lab
from tests.notebook.reading import HOSTILE, both, inert, read


def mine(x):
    return x.advantages * x.logprobs, {}


def broken(x):
    raise ValueError(HOSTILE * 20)


def lab_of(losses, spread=0.4, mask=None):  # 6 responses, 21 tokens
    batch = rollouts().score(range(6)).batch(lambda rewards, group: rewards - 2.4)
    batch = batch if mask is None else batch.replace(mask=mask)
    old = batch.sampler_logprobs - 1
    random = np.random.default_rng(0)
    tokens = {
        "old_logprobs": old,
        "logprobs": old + spread * random.normal(size=batch.tokens).astype(np.float32),
        "entropy": random.random(batch.tokens).astype(np.float32),
    }
    return loss_lab(batch, tokens, losses)


def cells(lab, name):
    """The row of a loss as read: its cells."""
    (line,) = [line for line in lab_card(lab).text().splitlines() if line.startswith(name)][:1]
    return re.split(r"  +", line)


def pictured(page):
    (address,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    return ElementTree.fromstring(base64.b64decode(address))


# -- the card


def test_a_row_says_value_size_clip_shares_and_direction():
    lab = lab_of({"grpo": "grpo", "mine": mine})
    shown = both(lab_card(lab))
    assert shown.startswith("loss lab 6 sequences · 21 tokens trained")
    _, value, size, clip, shares, zero, cosine, differ, aggregation = cells(lab, f"mine ({lab['mine'].hash[:4]})")
    entry = lab["mine"]
    assert (value, size, clip, zero) == (f"{entry.value:.3g}", f"{entry.norm:.3g}", "–", "0 %")
    positive, negative = map(int, shares.split(" / "))
    assert positive == round(100 * entry.shares["advantage"][0]) and positive + negative == 100
    assert float(cosine) == pytest.approx(lab.cosines[1, 0], abs=0.005) and float(cosine) < 0
    assert differ == f"{100 * lab.disagreement('mine'):.3g} %" and aggregation == "token-mean"
    first = cells(lab, "grpo")
    assert first[3] == f"{100 * lab['grpo'].clip_fraction:.3g} %" and first[7] == "–"
    assert "cos to grpo" in shown


def test_where_the_losses_spend_their_gradient_is_shown_where_there_is_more_than_one_place():
    lab = lab_of({"grpo": "grpo"})
    shown = both(lab_card(lab))
    assert "by length of the response, tokens" in shown and "by turn" not in shown
    mask = np.arange(21) != 18
    assert "share of |coef| by turn" in both(lab_card(lab_of({"grpo": "grpo"}, mask=mask)))


def test_of_many_turns_the_first_are_shown_and_the_rest_is_said():
    batch = worst_batch(24, 24, 1, 30).replace(mask=np.arange(23) % 2 == 0)
    tokens = {"logprobs": batch.sampler_logprobs, "entropy": np.ones(batch.tokens, np.float32)}
    lab = loss_lab(batch, tokens, {"grpo": "grpo"})
    shown = both(lab_card(lab))
    assert "turn 7" in shown and "turn 8" not in shown and "4 more: lab.by('turn')" in shown
    assert len(lab.by("turn")) == 12


def test_a_batchs_first_step_is_said_as_no_clip_range_acts_there():
    assert "every ratio to the old policy is 1" in both(lab_card(lab_of(["grpo"], spread=0.0)))
    assert "every ratio" not in both(lab_card(lab_of(["grpo"])))


def test_an_entropy_term_is_said_as_it_is_in_none_of_the_columns():
    lab = lab_of({"bonus": rl.grpo(entropy_coef=0.1), "grpo": "grpo"})
    assert "bonus: the entropy term" in both(lab_card(lab))


def test_a_loss_that_trains_on_tool_output_is_warned_of():
    losses = {"leaky": lambda x: (-x.advantages * x.logprobs.sum(1, keepdim=True), {}), "mine": mine}
    shown = both(lab_card(lab_of(losses, mask=np.arange(21) != 18)))
    assert "⚠ leaky: untrained tokens" in shown and "train on them" not in both(lab_card(lab_of({"mine": mine})))


def test_a_direction_that_does_not_exist_is_a_dash():
    lab = lab_of({"grpo": "grpo", "still": lambda x: (x.logprobs * 0.0, {})})
    row = cells(lab, "still")
    assert row[6] == "–" and row[5] == "100 %" and row[4] == "0 / 0"


def test_a_failed_loss_is_a_warning_with_the_users_line_however_long_its_message():
    card = lab_card(lab_of({"grpo": "grpo", "broken": broken}))
    both(card)
    (note,) = [note for note in card.notes if note.startswith("⚠")]
    assert note.startswith("⚠ broken has no numbers: `broken` raised ValueError")
    assert "raise ValueError" in note
    alone = both(lab_card(lab_of({"broken": broken})))
    assert "⚠ broken" in alone and "coef =" not in alone


# -- curves


def test_curves_have_a_panel_for_each_sign_and_a_line_for_each_loss():
    lab = lab_of({"ppo": "ppo", "plain": "reinforce"})
    chart = lab.what_if()
    assert [panel.y for panel in chart.panels] == [
        "coefficient, A = +1",
        "coefficient, A = −1",
        "loss, A = +1",
        "loss, A = −1",
    ]
    assert [[line.name for line in panel.lines] for panel in chart.panels] == [["ppo", "plain"]] * 4
    clipped, plain = chart.panels[0].lines
    np.testing.assert_allclose(clipped.y, np.where(RATIOS > 1.2, 0, -RATIOS), rtol=1e-5)
    assert (plain.y == -1).all() and "of old probability" in chart.caption
    assert re.search(r"coefficient, A = \+1 · ppo +-0\.025 [▁-█]+ 0\n", repr(chart))
    assert set(chart._repr_mimebundle_()) == {"text/html", "text/plain", PLOTLY}


def test_as_many_losses_are_drawn_as_there_are_colours_and_the_rest_is_said():
    lab = lab_of({f"l{i}": "grpo" for i in range(DRAWN + 2)})
    chart = what_if_chart(lab, *lab.curves())
    assert len(chart.panels[0].lines) == DRAWN and f"the first {DRAWN} of {DRAWN + 2} losses" in chart.caption
    assert len(lab_card(lab).grids[0].rows) == DRAWN + 2


def test_without_a_curve_the_chart_says_so():
    lab = lab_of({"broken": broken})
    assert "No curves" in repr(what_if_chart(lab, *lab.curves()))
    lone = lab_of({"lone": lambda x: (x.logprobs / (len(x.mask) - 1), {})})
    assert "lone: no curve of one token" in repr(lone.what_if())


# -- in a cell


def test_the_view_is_the_card_with_the_curves_below_it():
    lab = lab_of({"grpo": "grpo", "mine": mine})
    bundle = lab_view(lab).bundle()
    assert set(bundle) == {"text/html", "text/plain"}
    assert bundle["text/html"].startswith(lab_card(lab).html())
    drawn = pictured(bundle["text/html"])
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}polyline"))) == 4
    assert bundle["text/plain"].startswith(lab_card(lab).text()) and "A = −1 · mine" in bundle["text/plain"]
    assert str(lab) == lab_card(lab).text()


def test_names_and_errors_are_shown_as_they_are_and_do_nothing():
    lab = lab_of({HOSTILE: "grpo", HOSTILE + "2": broken, "mine\x1b[31m": mine})
    bundle = lab_view(lab).bundle()
    page = read(bundle["text/html"])
    assert {tag for tag in page.tags if tag in ("script", "img")} == {"img"} and page.tags.count("img") == 1
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    inert(read(lab_card(lab).html()))
    assert not list(pictured(bundle["text/html"]).iter("{http://www.w3.org/2000/svg}script"))
    assert "<script>" in page.text and "\x1b" not in bundle["text/html"] + bundle["text/plain"]


@pytest.fixture
def shell():
    InteractiveShell.clear_instance()
    made = InteractiveShell.instance()
    notebook.install()
    yield made
    InteractiveShell.clear_instance()


def test_at_the_end_of_a_cell_a_lab_shows_its_view_and_in_a_list_one_line(shell):
    lab = lab_of({"grpo": "grpo"})
    data, _ = shell.display_formatter.format(lab)
    assert data == lab_view(lab).bundle()
    listed, _ = shell.display_formatter.format([lab])
    assert listed["text/plain"] == f"[{lab!r}]" and "\n" not in repr(lab)

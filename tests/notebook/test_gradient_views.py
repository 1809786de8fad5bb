"""Gradients in a cell: a row per layer, what is not finite, and nothing in a name acts."""

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell

from rlbench import notebook
from rlbench.data.record.gradients import Gradients, TokenGradients, layer_of, module_of
from rlbench.errors import DataError
from rlbench.notebook.cards.gradient_views import ROWS, gradients_card, gradients_chart
from rlbench.notebook.charts.chart import PLOTLY
from tests.notebook.reading import HOSTILE, both, inert, read

NAMES = (
    "embed.weight",
    "layers.0.q.weight",
    "layers.0.q.bias",
    "layers.1.q.weight",
    "layers.1.up.weight",
    "norm.weight",
)


def gradients(names=NAMES, broken=(), tokens=True):
    count = len(names)
    squares = np.arange(1, count + 1, dtype=float) ** 2
    squares[list(broken)] = np.nan
    nonfinite = np.zeros(count)
    nonfinite[list(broken)] = 3
    one = TokenGradients(np.float32([1, -2, 3]), np.zeros(3, np.float32), np.float32([2, 4, 6]), np.array([0, 2, 3]))
    return Gradients(
        names,
        squares,
        largest=np.arange(count) / 10,
        zeros=np.full(count, 5.0),
        nonfinite=nonfinite,
        sizes=np.full(count, 10.0),
        weight_squares=np.full(count, 4.0),
        tokens=(one,) if tokens else (),
    )


# -- the value


def test_rows_are_joined_as_the_norms_of_their_parts():
    found = gradients()
    assert found.norm == pytest.approx(np.sqrt((np.arange(1, 7) ** 2).sum()))
    layers = found.by_layer()
    assert layers.names == ("embed", "layers.0", "layers.1", "norm")
    assert layers["layers.1"] == pytest.approx(np.hypot(4, 5)) and layers.norm == pytest.approx(found.norm)
    assert layers.largest.tolist() == [0.0, 0.2, 0.4, 0.5] and layers.zero_share.tolist() == [0.5] * 4
    assert layers.relative[1] == pytest.approx(np.hypot(2, 3) / np.sqrt(8))
    assert found.by_module().names == ("embed", "layers.0.q", "layers.1.q", "layers.1.up", "norm")
    assert found.by_module(1).names == ("embed", "layers", "norm")
    assert list(layers.table().index) == list(layers.names) and layers.table().loc["embed", "norm"] == 1
    with pytest.raises(DataError, match=r"nearest: layers.1, layers.0"):
        layers["layers.O"]
    with pytest.raises(DataError, match="depth of 1 or more"):
        found.by_module(0)


@pytest.mark.parametrize(
    ("name", "layer", "module"),
    [
        ("model.layers.11.mlp.up.weight", "model.layers.11", "model.layers.11.mlp.up"),
        ("weight", "(root)", "(root)"),
        ("model.norm.weight", "model.norm", "model.norm"),
        ("0.weight", "0", "0"),
    ],
)
def test_where_a_parameter_lies_is_read_from_its_name(name, layer, module):
    assert (layer_of(name), module_of(name)) == (layer, module)


def test_weights_of_zero_have_no_relative_norm_and_tokens_are_averaged_by_place():
    found = gradients()
    zero = Gradients(**vars(found) | {"weight_squares": np.zeros(6)})
    assert np.isnan(zero.relative).all() and "–" in both(gradients_card(zero))
    assert found.tokens[0].by_position().tolist() == [4.0, 4.0]
    assert set(found.channels()) == {"coefficient", "hidden_gradient"}
    with pytest.raises(DataError, match="method of the module's own"):
        gradients(tokens=False).channels()


# -- the view


def test_a_row_says_norm_relative_largest_and_zeros():
    shown = both(gradients_card(gradients()))
    assert "gradients norm 9.54 · 60 parameters" in shown
    assert "layers.1 ━━━━━━━━━━━━ 6.4 2.26 0.4 50 %" in shown
    assert "|∂L/∂log-prob| median 2, largest 3 · |∂L/∂hidden| median 4, largest 6" in shown


def test_what_is_not_finite_is_said_first_and_does_not_spoil_the_rest():
    shown = both(gradients_card(gradients(broken=[3])))
    assert "⚠ 3 entries are NaN or infinite, in layers.1.q.weight: a step with them is skipped" in shown
    assert "layers.1 ✕ nan" in shown and "norm ━" in shown
    assert "layers.1.q.weight" not in both(gradients_card(gradients()))


def test_of_many_layers_the_largest_are_shown():
    names = tuple(f"layers.{i}.weight" for i in range(ROWS + 5))
    shown = both(gradients_card(gradients(names)))
    assert f"the {ROWS} largest of {ROWS + 5}" in shown and "layers.4 " not in shown and "layers.20" in shown


def test_the_chart_has_a_bar_per_layer_and_a_line_over_the_places():
    chart = gradients_chart(gradients())
    bars, line = chart.panels
    assert bars.bars[0].heights == pytest.approx([np.hypot(2, 3), np.hypot(4, 5)])
    assert line.lines[0].y.tolist() == [4.0, 4.0] and line.y == "|∂L/∂hidden|"
    assert len(gradients_chart(gradients(tokens=False)).panels) == 1
    assert gradients_chart(gradients(("weight",), tokens=False)).panels == ()


def test_in_a_notebook_it_shows_itself_and_nothing_in_a_name_acts():
    names = (f"layers.0.{HOSTILE}.weight", f"layers.1.{HOSTILE}.weight", f"{HOSTILE}.weight")
    shell = InteractiveShell.instance()
    try:
        notebook.install()
        bundle, _ = shell.display_formatter.format(gradients(names, broken=[2]))
    finally:
        InteractiveShell.clear_instance()
    page = read(bundle["text/html"].replace('<img src="data:image/svg', '<b data="data:image/svg'))
    assert "script" not in page.tags and HOSTILE[:20] in page.text and PLOTLY not in bundle
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "layers.1" in gradients_card(gradients(names)).bundle()["text/plain"]
    inert(read(gradients_card(gradients(names)).html()))

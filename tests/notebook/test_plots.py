"""Charts: what they draw, in all three forms; what they refuse; how large they are in a saved notebook."""

import base64
import json
import re
from xml.etree import ElementTree

import nbformat
import numpy as np
import pytest

from rlbench.data.base.column import Column
from rlbench.data.record.history import History
from rlbench.errors import DataError
from rlbench.notebook.base.palette import HUES
from rlbench.notebook.charts import plots
from rlbench.notebook.charts.chart import PLOTLY, Chart, Line, Panel
from rlbench.notebook.charts.svg import ticks
from tests.data.values import rollouts

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "<script>alert(\"x\")</script><b onclick='y'>\x1b[31m\u202e"


def history(steps=12, seed=0, **more):
    random = np.random.default_rng(seed)
    return History(
        [
            {
                "step": i + 1,
                "reward": i / steps,
                "loss": float(random.normal()),
                "entropy": 2.0 - i / steps,
                "tokens": 100.0,
                "seconds": {"total": 2.0},
                "loss_name": "grpo",
                **more,
            }
            for i in range(steps)
        ]
    )


def lengths(values=(3, 4, 4, 9), cut=None):
    given = np.array(values)
    return Column.of(given, "lengths", "tokens", None if cut is None else given >= cut)


def svg(chart):
    return ElementTree.fromstring(chart.svg)


def pictured(page):
    """The drawing in an image's address."""
    (address,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    return ElementTree.fromstring(base64.b64decode(address))


def texts(chart):
    return [element.text for element in svg(chart).iter(f"{SVG}text")]


def drawn_lines(chart):
    return [line.get("points") for line in svg(chart).iter(f"{SVG}polyline")]


# -- metrics over steps


def test_each_metric_has_a_panel_and_each_run_a_line_in_it_in_all_three_forms():
    chart = history().plot("reward", "loss", compare={"lower lr": history(8, seed=1)})
    assert isinstance(chart, Chart) and [p.y for p in chart.panels] == ["reward", "loss"]
    assert [[line.name for line in p.lines] for p in chart.panels] == [["this", "lower lr"]] * 2
    assert len(drawn_lines(chart)) == 2 * 2
    assert {"reward", "loss", "this", "lower lr", "step"} <= set(texts(chart))
    traces = chart.figure.data
    assert [(t.name, len(t.x)) for t in traces] == [("this", 12), ("lower lr", 8)] * 2
    assert traces[0].y == pytest.approx(history()["reward"], abs=1e-5)
    assert len(re.findall(r"^(reward|loss) · (this|lower lr) +\S+ [▁-█]+ ", repr(chart), re.M)) == 4


def test_runs_differ_in_more_than_their_colour():
    chart = history().plot("reward", compare={"b": history(), "c": history()})
    marks = list(svg(chart).iter(f"{SVG}polyline"))
    assert len({line.get("stroke-dasharray") for line in marks}) == len({line.get("stroke") for line in marks}) == 3
    assert len({(t.line.color, t.line.dash) for t in chart.figure.data}) == 3


def test_without_names_the_telling_metrics_there_are_get_a_panel():
    assert [p.y for p in history().plot().panels] == ["reward", "loss", "entropy, nats"]
    only = History([{"step": 1, "mine": 2.0, "version": 1}])
    assert [p.y for p in only.plot().panels] == ["mine"]


def test_the_axis_may_say_what_was_spent_instead_of_the_step():
    def across(x):
        return history(3).plot("reward", x=x).panels[0].lines[0].x.tolist()

    assert across("step") == [1, 2, 3] and across("tokens") == [100, 200, 300] and across("seconds") == [2, 4, 6]
    with pytest.raises(DataError, match="x='time': wanted 'step', 'tokens', 'seconds'"):
        across("time")
    with pytest.raises(DataError, match="the steps of 'this' do not say 'tokens'; x='step' works"):
        History([{"step": 1, "reward": 1.0}]).plot("reward", x="tokens")


def test_a_history_that_begins_later_keeps_its_steps():
    assert history()[6:].plot("reward").panels[0].lines[0].x.tolist() == [7, 8, 9, 10, 11, 12]


def test_what_a_step_lacks_leaves_a_gap_and_a_run_without_the_metric_has_no_line():
    odd = History([{"step": 1, "reward": None}, {"step": 2, "reward": 0.5}, {"step": 3, "reward": float("inf")}])
    chart = odd.plot("reward", compare={"other": history(4), "without": History([{"step": 1, "loss": 1.0}])})
    assert [(line.name, line.x.tolist()) for line in chart.panels[0].lines] == [("this", [2]), ("other", [1, 2, 3, 4])]
    assert "nan" not in chart.svg and "inf" not in chart.svg


def test_smoothing_draws_the_moving_average_over_faint_values():
    chart = history(40).plot("loss", smooth=9)
    (line,) = chart.panels[0].lines
    assert line.trend.std() < line.y.std() / 2 and len(drawn_lines(chart)) == len(chart.figure.data) == 2
    bundle = chart._repr_mimebundle_()
    assert all("moving average over 9 steps" in bundle[form] for form in ("text/html", "text/plain"))


@pytest.mark.parametrize("adjusted", [2, 9.5])
def test_the_moving_average_is_the_one_people_know(adjusted):
    pandas = pytest.importorskip("pandas")
    values = np.random.default_rng(0).normal(size=50)
    assert plots.moving_average(values, adjusted) == pytest.approx(pandas.Series(values).ewm(span=adjusted).mean())


@pytest.mark.parametrize("smooth", [1, 0, -3, True, "much", float("nan")])
def test_a_span_that_smooths_nothing_is_refused(smooth):
    with pytest.raises(DataError, match=r"smooth=.*a span in steps above 1"):
        history().plot("reward", smooth=smooth)


def test_an_unknown_metric_names_the_nearest():
    with pytest.raises(DataError, match=r"'rewrad'.*nearest: reward"):
        history().plot("rewrad")
    with pytest.raises(DataError, match="'loss_name' is no number"):
        history().plot("loss_name")
    with pytest.raises(DataError, match="no run has a finite 'reward'"):
        History([{"step": 1, "reward": float("inf")}]).plot("reward")


def test_a_run_is_compared_under_a_name_of_its_own():
    with pytest.raises(DataError, match=r"'this' stands for this run already.*name="):
        history().plot("reward", compare={"this": history()})
    chart = history().plot("reward", compare={"this": history()}, name="mine")
    assert list(chart.names) == ["mine", "this"]
    with pytest.raises(DataError, match=r"'b' is list; wanted a history"):
        history().plot("reward", compare={"b": [1.0]})


def test_no_steps_yet_says_how_to_make_one():
    chart = History([]).plot()
    bundle = chart._repr_mimebundle_()
    assert "session.train_step(batch)" in bundle["text/html"] and "session.train_step(batch)" in repr(chart)
    assert PLOTLY not in bundle


@pytest.mark.parametrize("steps", [1, 2])
def test_few_steps_are_drawn_too(steps):
    chart = history(steps).plot("reward", "loss", smooth=3)
    assert len(chart.figure.data) == 4 and svg(chart) is not None
    assert ("circle" in chart.svg) == (steps == 1)
    many = history(steps).plot("reward", compare={f"r{i}": history(steps, i) for i in range(20)})
    marks = list(svg(many).iter(f"{SVG}{'circle' if steps == 1 else 'polyline'}"))
    assert len(many.figure.data) == len(marks) == 21


# -- large ones


@pytest.mark.slow
def test_a_long_history_of_several_runs_stays_small_in_a_saved_notebook():
    runs = {f"run {i}": history(20_000, i) for i in range(3)}
    bundle = history(20_000).plot(smooth=20, compare=runs)._repr_mimebundle_()
    assert len(json.dumps(bundle)) < 140_000  # JupyterLab saves a picture of the figure beside it
    assert "lines of up to 20,000 points show the extremes of" in bundle["text/plain"]


def test_a_line_of_many_points_keeps_its_extremes_and_its_ends():
    spiked = np.random.default_rng(0).normal(size=50_000)
    spiked[12_345], spiked[40_001] = 100.0, -100.0
    chart = History([{"step": i, "loss": float(v)} for i, v in enumerate(spiked)]).plot("loss")
    (line,) = chart.panels[0].lines
    assert len(line.x) <= plots.POINTS and line.y.max() == 100 and line.y.min() == -100
    assert line.x[0] == 0 and line.x[-1] == 49_999 and (np.diff(line.x) > 0).all()
    assert line.x[line.y.argmax()] == 12_345


def test_too_many_lines_are_refused():
    many = {f"{i}": history(2) for i in range(97)}
    with pytest.raises(DataError, match="1 metrics of 98 runs are more than 96 lines"):
        history().plot("reward", compare=many)
    with pytest.raises(DataError, match="98 distributions are more than 96"):
        lengths().plot(compare={f"{i}": lengths() for i in range(97)})


# -- distributions


def test_a_histogram_counts_every_value_once_with_the_truncated_ones_apart():
    chart = lengths((3, 4, 4, 9, 9), cut=9).plot()
    (bars,) = chart.panels[0].bars
    assert dict(zip(bars.edges[:-1] + 0.5, bars.heights, strict=True)) == {3: 1, 4: 2, 5: 0, 6: 0, 7: 0, 8: 0, 9: 2}
    assert bars.cut.tolist() == [0, 0, 0, 0, 0, 0, 2] and chart.truncated
    counted, cut = chart.figure.data
    assert sum(counted.y) == 3 and sum(cut.y) == 2 and cut.name == "truncated" and cut.marker.pattern.shape == "/"
    assert "truncated" in texts(chart) and "40 % truncated" in repr(chart)
    assert len(list(svg(chart).iter(f"{SVG}rect"))) == 2 + 1 + 1  # two bars, the truncated one, the key


def test_compared_distributions_share_their_bins_as_shares_of_their_own_total():
    chart = lengths((1, 2, 2, 3)).plot(compare={"step 1": [3, 3, 5]}, name="now")
    now, before = chart.panels[0].bars
    assert (now.edges == before.edges).all() and now.heights.sum() == before.heights.sum() == 100
    assert now.heights.tolist() == [25, 50, 25, 0, 0] and chart.panels[0].y == "share, %"
    assert {"now", "step 1"} <= set(texts(chart)) and len(drawn_lines(chart)) == 1
    for said in ("now: 4 values, tokens · mean 2 ", "step 1: 3 values, tokens · mean 3.67"):
        assert said in repr(chart) and f'<div class="q">{said}' in chart._repr_mimebundle_()["text/html"]
        assert said in chart.figure.layout.annotations[-1].text
    bar, outline = chart.figure.data
    assert (bar.type, outline.type, outline.mode) == ("bar", "scatter", "lines")
    assert "now: ▄█▄▁▁" in repr(chart).replace("▅", "▄")


@pytest.mark.parametrize(
    ("values", "bins"),
    [
        ((0.0, 1.0, 1.0), None),
        ((2, 2, 2), None),
        ((0.1, 0.1), None),
        (range(10_000), None),
        (range(100), 7),
        (np.random.default_rng(0).normal(size=500), None),
        ((1.5,), 4),
    ],
    ids=["two values", "equal whole", "equal", "many whole", "asked for", "real", "one"],
)
def test_every_value_lies_in_a_bin(values, bins):
    (bars,) = Column.of(np.array(values), "x").plot(bins=bins).panels[0].bars
    assert bars.heights.sum() == len(values) and len(bars.heights) <= plots.BINS
    assert (np.diff(bars.edges) > 0).all()
    if bins and len(values) > 1:
        assert len(bars.heights) <= bins


def test_bins_of_whole_numbers_are_equally_wide_so_that_no_comb_appears():
    (bars,) = Column.of(np.arange(1000), "lengths").plot().panels[0].bars
    assert len(set(bars.heights[:-1])) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bins": 0}, "bins=0: a whole number from 1 to 60"),
        ({"bins": True}, "bins=True"),
        ({"bins": 61}, "bins=61"),
        ({"compare": {"lengths": [1]}}, "'lengths' stands for these values already"),
        ({"compare": {"b": ["x"]}}, "'b' is list; wanted one number per completion"),
        ({"compare": {"b": [[1.0]]}}, "wanted one number"),
        ({"compare": {"b": [float("inf")]}}, "value 0 is not finite"),
    ],
)
def test_what_cannot_be_drawn_is_refused(options, said):
    with pytest.raises(DataError, match=re.escape(said)):
        lengths().plot(**options)


def test_lengths_and_rewards_of_rollouts_draw_themselves():
    value = rollouts().score([0, 1, 1, 1, 0, 0])
    assert value.lengths.plot().truncated and value.rewards.plot().panels[0].bars[0].heights.tolist() == [3, 3]
    chart = value.rewards.plot(compare={"without": rollouts().lengths[:0]})
    assert "without: no values" in repr(chart)


def test_no_values_yet_says_how_to_get_some():
    chart = lengths(()).plot()
    assert "session.rollout(prompts)" in repr(chart) and PLOTLY not in chart._repr_mimebundle_()


# -- forms


def test_a_chart_gives_a_figure_a_drawing_and_text_and_the_drawing_is_labelled_with_the_text():
    chart = history().plot("reward", "entropy")
    bundle = chart._repr_mimebundle_()
    assert set(bundle) == {PLOTLY, "text/html", "text/plain"} and bundle["text/plain"] == repr(chart)
    assert svg(chart).get("aria-label") == "; ".join(repr(chart).splitlines()) and svg(chart).get("role") == "img"
    assert bundle[PLOTLY]["data"][0]["y"] == pytest.approx(history()["reward"], abs=1e-5)
    page = bundle["text/html"]
    assert not any(part in page for part in ("<script", "<svg", "http"))
    assert len(list(pictured(page).iter(f"{SVG}polyline"))) == 2
    assert pictured(page).get("color") == "#808080"  # an image knows nothing of the text around it


def test_nbconvert_shows_the_drawing_where_it_can_show_no_figure():
    exporters = pytest.importorskip("nbconvert.exporters")
    cell = nbformat.v4.new_code_cell("history.plot()")
    cell.outputs = [nbformat.v4.new_output("display_data", history().plot("reward")._repr_mimebundle_())]
    page, _ = exporters.HTMLExporter().from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))
    assert "not able to be represented" not in page and "plotly" not in page.lower()
    assert pictured(page).get("aria-label").startswith("reward over step")


def test_the_figure_has_no_ground_of_its_own_so_that_it_suits_a_dark_theme():
    layout = history().plot("reward").figure.to_plotly_json()["layout"]
    assert layout["paper_bgcolor"] == layout["plot_bgcolor"] == "rgba(0,0,0,0)"
    assert layout["font"]["color"] == "#808080" and "layout" not in layout["template"]


def test_figure_and_drawing_use_the_same_colours_in_the_same_order():
    chart = history().plot("reward", compare={f"r{i}": history() for i in range(9)})
    wanted = [HUES[i % len(HUES)].light for i in range(10)]
    assert [t.line.color for t in chart.figure.data] == wanted
    assert [line.get("stroke") for line in svg(chart).iter(f"{SVG}polyline")] == wanted


def test_the_key_of_many_runs_takes_as_many_rows_as_it_needs():
    names = [f"a longer name {i}" for i in range(20)]
    few, many = (history().plot("reward", compare={n: history() for n in names[:k]}) for k in (1, 20))
    moved = [tuple(map(float, re.findall(r"[\d.]+", g.get("transform")))) for g in svg(many).iter(f"{SVG}g")]
    assert len(moved) == 21 and len({top for _, top in moved}) > 3 and max(left for left, _ in moved) < 680 - 100
    assert float(svg(many).get("height")) > float(svg(few).get("height"))


def test_higher_values_are_drawn_higher_and_all_within_the_drawing():
    chart = Chart("t", (Panel("y", "x", (Line("a", np.array([1.0, 2, 3]), np.array([0.0, 10, 5])),)),), "t")
    (points,) = drawn_lines(chart)
    (x0, y0), (x1, y1), (x2, y2) = [tuple(map(float, p.split(","))) for p in points.split()]
    _, _, width, height = map(float, svg(chart).get("viewBox").split())
    assert 0 < x0 < x1 < x2 < width and 0 < y1 < y2 < y0 < height


def test_hostile_names_are_shown_inert_in_every_form():
    own = History([{"step": 1, "reward": 1.0, HOSTILE: 2.0}] * 2)
    chart = own.plot("reward", HOSTILE, compare={HOSTILE: history()})
    bundle = chart._repr_mimebundle_()
    for shown in (bundle["text/html"], bundle["text/plain"]):
        assert not set("\x1b\u202e") & set(shown) and "␛[31m‹U+202E›" in shown
    assert any("<script>alert" in (text or "") for text in texts(chart))  # read as text, so not as markup
    drawn = ("svg", "g", "text", "line", "polyline", "circle")
    assert {e.tag for e in svg(chart).iter()} <= {f"{SVG}{tag}" for tag in drawn}
    figure = json.dumps(bundle[PLOTLY], ensure_ascii=False)
    assert "<script" not in figure and "<b " not in figure and "‹script›" in figure
    forms = lengths().plot(compare={HOSTILE: [1]})._repr_mimebundle_()
    assert not any("<script" in form for form in (forms["text/html"], json.dumps(forms[PLOTLY])))
    assert not any("\x1b" in forms[form] for form in ("text/html", "text/plain"))


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (-3, 17), (0.15, 0.9), (1e-7, 3e-7), (0, 512), (-1e9, 1e9), (4.999, 5.001), (1, 20_000)]
)
def test_ticks_are_round_numbers_within_the_axis(low, high):
    found = ticks(low, high)
    assert 3 <= len(found) <= 8 and low <= found[0] and found[-1] <= high + 1e-9 * abs(high)
    steps = np.diff(found)
    assert steps == pytest.approx([steps[0]] * len(steps)) and f"{steps[0]:.0e}"[0] in "125"


def test_the_outline_of_a_histogram_stands_on_the_ground_at_both_ends():
    (bars,) = lengths((1, 2, 2)).plot().panels[0].bars
    x, y = bars.outline()
    assert y[0] == y[-1] == 0 and len(x) == len(y) and y.max() == 2 and x[0] == 0.5 and x[-1] == 2.5


def test_evaluations_are_drawn_at_their_steps_and_before_the_first():
    records = [{"step": i, "reward": 0.1 * i, **({"eval/gsm8k/reward": 0.2 * i} if i == 2 else {})} for i in (1, 2, 3)]
    run = History(records, begin={"eval/gsm8k/reward": 0.1})
    chart = run.plot()
    assert [panel.y for panel in chart.panels] == ["reward", "eval/gsm8k/reward"]
    (line,) = chart.panels[1].lines
    assert line.x.tolist() == [0, 2] and line.y.tolist() == [0.1, 0.4]
    assert run[1:].plot("eval/gsm8k/reward").panels[0].lines[0].x.tolist() == [2]

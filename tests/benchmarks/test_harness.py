"""The harness of the figures: sides take turns, rounds become a ratio with its spread, a failure stays a row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import figures, page, scaling
from benchmarks.harness import Experiment, Figure, Measuring, Stage, failure_of, note_of, record_of, rounds_of
from benchmarks.turns import SideError

ABOUT = {"date": "2026-01-01", "versions": {"torch": "2"}, "cores": 2, "load": 0.5}
RATIO = Figure("ratio", "a / b", "two", lambda found: found["a"] / found["b"], bar=0.5)


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.end_sides()


def two_sides(at: Stage) -> Measuring:
    sides = {name: at.side("tests.benchmarks.alternating", str(at.folder / "order"), name) for name in "ab"}
    for side in sides.values():
        side.ready()
    while True:
        yield {name: side.turn()["s"] for name, side in sides.items()}


def test_sides_take_turns_and_end_with_the_experiment(at: Stage) -> None:
    rounds = rounds_of(Experiment("two", two_sides, 3, 1.0), at, say=lambda _: None)
    assert (at.folder / "order").read_text() == "ababab"
    assert rounds == [{"a": 1.0, "b": 2.0}] * 3
    assert record_of(RATIO, rounds, ABOUT)["ratio"] == 0.5


def test_an_error_of_a_side_is_told_in_a_line(at: Stage) -> None:
    side = at.side("tests.benchmarks.alternating", str(at.folder / "order"), "a")
    side.ready()
    with pytest.raises(SideError, match=r"alternating: ValueError: no such turn$"):
        side.turn(fail=True)
    absent = at.side("tests.benchmarks.no_such_module")
    with pytest.raises(SideError, match="No module named"):
        absent.ready()


@pytest.mark.parametrize(
    ("numbers", "better", "bar", "reached", "clear"),
    [
        ([0.8, 1.0, 0.97], "more", 0.95, True, False),
        ([0.96, 1.0, 0.97], "more", 0.95, True, True),
        ([0.8, 0.9, 0.97], "more", 0.95, False, False),
        ([3.0, 2.5], "less", 2.0, False, True),
        ([1.0], "less", None, None, False),
    ],
)
def test_the_median_counts_and_the_spread_is_said(numbers, better, bar, reached, clear) -> None:
    figure = Figure("f", "title", "e", lambda found: found["x"], bar=bar, better=better)
    record = record_of(figure, [{"x": number} for number in numbers], ABOUT)
    assert record["spread"] == [min(numbers), max(numbers)]
    assert (record["reached"], record["clear"]) == (reached, clear)


def test_rounds_beyond_the_least_begin_only_where_there_is_time(at: Stage) -> None:
    def quick(_: Stage) -> Measuring:
        while True:
            yield {"a": 1.0}

    for wanted, minutes, count, expected in [(5, 0.0, None, 2), (1, 0.0, None, 1), (5, 1.0, None, 5), (5, 0.0, 3, 3)]:
        rounds = rounds_of(Experiment("quick", quick, wanted, minutes), at, count, say=lambda _: None)
        assert len(rounds) == expected, (wanted, minutes, count)


def test_a_failing_experiment_is_a_row_and_the_others_go_on(at: Stage) -> None:
    def failing(_: Stage) -> Measuring:
        raise RuntimeError("no engine")
        yield {}

    def fine(_: Stage) -> Measuring:
        while True:
            yield {"a": 1.0, "b": 2.0}

    experiments = [
        Experiment("bad", failing, 2, 0.0),
        Experiment("two", fine, 2, 0.0),
        Experiment("long", fine, 2, 9.0),
    ]
    needs_c = Figure("needs-c", "c", "two", lambda found: found["c_step_s"])
    part = command.Part("figures", experiments, [Figure("broken", "what breaks", "bad"), RATIO, needs_c])
    at.absent["c"] = "c could not be started"
    records, left = command.measured(part, experiments, at, None, minutes=1.0, say=lambda _: None)
    assert [record.get("failed") for record in records] == ["RuntimeError: no engine", None, "c could not be started"]
    assert records[1]["ratio"] == 0.5 and records[1]["date"] and records[1]["load"] >= 0
    assert left == ["long"]


def test_the_table_stands_between_its_markers() -> None:
    rows = [
        record_of(RATIO, [{"a": 1.0, "b": 1.0}], ABOUT),
        failure_of(Figure("f", "fails", "e", bar=1.5, better="less"), "a | b", ABOUT),
        note_of(Figure("n", "later", unit="s", bar=1.0, better="less", note="not built yet")),
    ]
    text = "before\n<!-- t: written by python -m benchmarks -->\nold\n<!-- end of t -->\nafter\n"
    new = page.rewritten(text, "t", page.table(rows))
    assert "| a / b | 1.00× | 1.00× to 1.00× | ≥ 0.5× | yes |" in new
    assert "| fails | failed: a \\| b | – | ≤ 1.5× | – |" in new
    assert "| later | not built yet | – | ≤ 1 s | – |" in new
    assert new.startswith("before\n") and new.endswith("-->\nafter\n") and "old" not in new
    assert page.rewritten(new, "t", page.table(rows)) == new
    with pytest.raises(ValueError, match="once each"):
        page.rewritten("no markers", "t", "")


def test_new_records_take_the_place_of_old_ones_in_order() -> None:
    old = [{"figure": "b", "ratio": 1}, {"figure": "gone", "ratio": 1}]
    assert page.merged(old, [{"figure": "a"}, {"figure": "b", "ratio": 2}], ["a", "b", "c"]) == [
        {"figure": "a"},
        {"figure": "b", "ratio": 2},
    ]


def test_each_figure_belongs_to_an_experiment_and_the_page_has_its_markers() -> None:
    for part in command.PARTS.values():
        names = [figure.name for figure in part.figures]
        experiments = [experiment.name for experiment in part.experiments]
        assert len(set(names)) == len(names) and len(set(experiments)) == len(experiments)
        assert {figure.experiment for figure in part.figures if figure.experiment} == set(experiments)
    for name in (*command.PARTS, "projection"):
        page.rewritten(page.PAGE.read_text(), name, "")
    assert all(figure.note for figure in figures.FIGURES if not figure.experiment)


def test_a_projection_adds_up_and_needs_all_its_parts() -> None:
    parts = dict.fromkeys(
        ("rollout_s", "train_s", "sync_s", "kernel_s", "communication_of_two_s", "further_replica_s"), 0.0
    )
    assert scaling.projected({**parts, "rollout_s": 2.0, "further_rank_s": 0.0}, 64)["step_s"] == 2.0
    one, eight = (scaling.projected({**parts, "kernel_s": 0.5, "further_rank_s": 0.25}, n)["step_s"] for n in (1, 8))
    assert (one, eight) == (0.5, 8 * 0.5 + scaling.CALLS_PER_STEP * 7 * 0.25)
    assert scaling.projection([]) == {}

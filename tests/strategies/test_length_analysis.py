"""Lengths of responses: numbers over all ranks, a line of data, a picture, one histogram a step."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlbench.errors import DataError
from rlbench.strategies import FSDPV2Strategy, get_fake_strategy
from rlbench.strategies.generation.length_analysis import BINS, PAST_STEPS, TAG, GenLenAnalyser, edges_of, lengths_of
from tests.modules import qwen_on_meta, save_qwen
from tests.ranks import Ranks, ranks


class Writer:
    """What a `SummaryWriter` is asked for."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[int], int, list[int]]] = []

    def add_histogram(self, tag: str, values: Any, step: int, *, bins: Any) -> None:
        self.seen.append((tag, list(values), step, list(bins)))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks(2, qwen_on_meta(save_qwen(tmp_path_factory.mktemp("qwen")))) as made:
        yield made


def written(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "gen_len.jsonl").read_text().splitlines()]


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=60))
def test_the_numbers_are_those_of_pythons_own_statistics(lengths: list[int]) -> None:
    found = GenLenAnalyser(plot_every=1, percentiles=[50, 80, 100]).collect(lengths, 3)
    assert found is not None
    assert found["total_samples"] == len(lengths)
    assert (found["min_length"], found["max_length"]) == (min(lengths), max(lengths))
    assert found["mean_length"] == pytest.approx(mean(lengths)) and found["median_length"] == median(lengths)
    ordered = sorted(lengths)
    for p, value in found["percentiles"].items():
        place = p / 100 * (len(ordered) - 1)
        low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
        assert isinstance(value, int) and value == pytest.approx(low + (high - low) * (place % 1), abs=0.500001)


def test_plot_every_says_which_steps_are_collected_and_drawn(tmp_path: Path) -> None:
    every_third = GenLenAnalyser(plot_every=3, plot_out_dir=tmp_path)
    assert [step for step in range(7) if every_third.collect([4, 5], step) is not None] == [0, 3, 6]
    assert [line["step"] for line in written(tmp_path)] == [0, 3, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "gen_len.jsonl",
        "gen_len_step_0.svg",
        "gen_len_step_3.svg",
        "gen_len_step_6.svg",
    ]


@pytest.mark.parametrize("never", [0, -1])
def test_without_plots_the_data_is_still_written(tmp_path: Path, never: int) -> None:
    """Defect absent: plot_every <= 0 with a folder was an AttributeError."""
    writer = Writer()
    analyser = GenLenAnalyser(plot_every=never, plot_out_dir=tmp_path, tensorboard=writer)
    assert [analyser.collect([4, 6], step)["mean_length"] for step in (1, 2)] == [5.0, 5.0]  # type: ignore[index]
    assert [line["step"] for line in written(tmp_path)] == [1, 2] and len(writer.seen) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["gen_len.jsonl"]


def test_the_folder_is_the_one_given_and_without_one_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defect absent: files went to the TensorBoard folder and log_dir was never read."""
    monkeypatch.chdir(tmp_path)
    strategy = get_fake_strategy()
    writer = Writer()
    GenLenAnalyser(plot_every=1, tensorboard=writer, strategy=strategy).collect([1], 0)
    assert len(writer.seen) == 1 and list(tmp_path.iterdir()) == []
    GenLenAnalyser(plot_every=1, plot_out_dir=tmp_path / "deep" / "logs").collect([1], 0)
    assert [path.name for path in tmp_path.iterdir()] == ["deep"] and len(written(tmp_path / "deep" / "logs")) == 1


def test_a_line_of_data_holds_what_was_returned_and_a_histogram_of_all_responses(tmp_path: Path) -> None:
    lengths = [3, 3, 4, 250, 7]
    found = GenLenAnalyser(plot_every=1, plot_out_dir=tmp_path).collect(lengths, 5)
    (line,) = written(tmp_path)
    assert line == {**json.loads(json.dumps(found)), "step": 5, "edges": line["edges"], "counts": line["counts"]}
    for left, right, count in zip(line["edges"], line["edges"][1:], line["counts"], strict=False):
        assert count == sum(left <= length < right for length in lengths)
    assert sum(line["counts"]) == len(lengths)


def test_tensorboard_gets_each_step_once_in_at_most_50_bins() -> None:
    """Defect absent: the histograms of all past steps were written again with each one."""
    writer = Writer()
    analyser = GenLenAnalyser(plot_every=2, tensorboard=writer)
    for step in range(6):
        analyser.collect(range(1, 1000 + step), step)
    assert [(tag, step) for tag, _, step, _ in writer.seen] == [(TAG, 0), (TAG, 2), (TAG, 4)]
    assert all(len(bins) <= BINS + 1 for *_, bins in writer.seen)
    assert writer.seen[1][1] == list(range(1, 1002))


def test_torchs_own_writer_takes_the_histogram(tmp_path: Path) -> None:
    EventAccumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        analyser = GenLenAnalyser(plot_every=0, tensorboard=writer)
        analyser.collect([5, 5], 1)
        analyser.collect(range(7, 900), 2)
    log = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0})
    log.Reload()
    assert [(e.step, e.histogram_value.num) for e in log.Histograms(TAG)] == [(1, 2), (2, 893)]


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_bins_have_one_whole_width_and_hold_every_length(a: int, b: int) -> None:
    low, high = sorted((a, b))
    edges = edges_of(np.array([low, high]))
    assert 2 <= len(edges) <= BINS + 1 and len(set(np.diff(edges))) == 1
    assert edges[0] == low and edges[-2] <= high < edges[-1]


def test_the_last_step_is_drawn_as_bars_over_outlines_of_the_eight_before_it(tmp_path: Path) -> None:
    """Half of the responses at 10 tokens, a quarter each at 15 and 20. Defect absent: all past steps were drawn."""
    analyser = GenLenAnalyser(plot_every=1, plot_out_dir=tmp_path)
    for step in range(PAST_STEPS + 3):
        analyser.collect([10, 10, 15, 20], step)
    root = ElementTree.parse(tmp_path / f"gen_len_step_{PAST_STEPS + 2}.svg").getroot()
    bars = [float(bar.get("height", 0)) for bar in root.findall(".//{*}rect")]
    assert len(bars) == 3 and bars[0] == pytest.approx(2 * bars[1], abs=0.5) and bars[1] == bars[2]
    assert len(list(root.findall(".//{*}polyline"))) == PAST_STEPS


def test_the_picture_names_its_steps_and_numbers(tmp_path: Path) -> None:
    """Defect absent: a legend drawn before there was anything to name."""
    analyser = GenLenAnalyser(plot_every=1, plot_out_dir=tmp_path)
    for step in (1, 2, 3):
        analyser.collect([5, 5, 9], step)
    root = ElementTree.parse(tmp_path / "gen_len_step_3.svg").getroot()
    texts = [text.text or "" for text in root.findall(".//{*}text")]
    assert {"step 1", "step 2", "step 3"} <= set(texts)
    assert any(text.endswith("3 responses · mean 6.333 · p50 5 · p80 7") for text in texts)


def test_drawing_leaves_no_state_in_a_plotting_library(tmp_path: Path) -> None:
    """Defect absent: figures that were never closed; no plotting library is loaded."""
    import subprocess
    import sys

    code = (
        "import sys; from rlbench.strategies.generation.length_analysis import GenLenAnalyser; "
        f"GenLenAnalyser(plot_every=1, plot_out_dir={str(tmp_path)!r}).collect([1, 2], 0); "
        "assert not {'matplotlib', 'plotly', 'torch'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "gen_len_step_0.svg").is_file()


def test_outputs_of_any_kind_have_a_length() -> None:
    request = SimpleNamespace(outputs=[SimpleNamespace(token_ids=(1, 2, 3)), SimpleNamespace(token_ids=())])
    assert lengths_of([4, np.int64(2), SimpleNamespace(output_token_ids=[1]), request]).tolist() == [4, 2, 1, 3, 0]


@pytest.mark.parametrize("bad", ["text", -1, True, 2.5, None, {"tokens": [1]}, SimpleNamespace(outputs="ab")])
def test_what_has_no_length_is_refused(bad: Any) -> None:
    with pytest.raises(DataError, match="output 1 has no length"):
        lengths_of([3, bad])


def test_a_step_without_responses_is_told_and_not_drawn(tmp_path: Path) -> None:
    writer = Writer()
    found = GenLenAnalyser(plot_every=1, plot_out_dir=tmp_path, tensorboard=writer).collect([], 1)
    assert found is not None and found["total_samples"] == 0 and found["mean_length"] is None
    assert found["percentiles"] == {50: None, 80: None} and written(tmp_path)[0]["counts"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["gen_len.jsonl"] and writer.seen == []


@pytest.mark.engine
def test_ranks_with_different_numbers_of_responses_give_one_result_and_rank_0_writes(
    engine: Ranks, tmp_path: Path
) -> None:
    """Defect absent: unequal counts hung the gather."""

    def collected(folder: str) -> Any:
        s = FSDPV2Strategy()
        own = [[3, 4, 5], []][s.rank]
        analyser = GenLenAnalyser(plot_every=2, plot_out_dir=folder, strategy=s)
        return [analyser.collect(own, 4), analyser.collect(own, 5), analyser.collect([s.rank], 6)]

    first, second = engine.run(collected, str(tmp_path))
    assert first == second and first[1] is None
    assert (first[0]["total_samples"], first[0]["mean_length"], first[2]["max_length"]) == (3, 4.0, 1)
    assert [line["step"] for line in written(tmp_path)] == [4, 6]


@pytest.mark.engine
def test_an_output_without_a_length_on_one_rank_raises_on_all(engine: Ranks) -> None:
    def collected() -> None:
        s = FSDPV2Strategy()
        GenLenAnalyser(plot_every=1, strategy=s).collect(["?"] if s.rank else [1], 1)

    outcomes = engine.outcomes("run", [(cloudpickle.dumps(collected), (), {})] * 2)
    assert "has no length" in str(outcomes[1].error) and "rank 1" in str(outcomes[0].error)
    assert engine.run(lambda: FSDPV2Strategy().all_reduce(1, "sum")) == [2, 2]


@pytest.mark.engine
def test_a_group_and_who_writes_may_be_given_instead(engine: Ranks, tmp_path: Path) -> None:
    def collected(folder: str) -> Any:
        import torch.distributed as dist

        rank = dist.get_rank()
        analyser = GenLenAnalyser(dist.group.WORLD, plot_every=1, plot_out_dir=f"{folder}/{rank}")
        return analyser.collect([rank] * (rank + 1), 1, rank == 1)

    first, second = engine.run(collected, str(tmp_path))
    assert first == second and first["total_samples"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_a_group_beside_a_strategy_is_refused() -> None:
    with pytest.raises(DataError, match="engine_dp_group"):
        GenLenAnalyser("group", strategy=get_fake_strategy())

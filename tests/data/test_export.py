"""Rollouts leave and come back the same: tables, Parquet, trajectories; what cannot is refused."""

import json
from dataclasses import replace

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from rlbench.data import Prompt, Rollouts
from rlbench.data.base.plain import MARK, dumps, loads
from rlbench.errors import DataError
from tests.data.comparing import full, same
from tests.data.values import rollouts
from tests.data.written import sorting, stepped, written

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
]


def partly_scored():
    """Components for some, an error for one that holds what no file can hold as text, and known times."""

    def reward(rollout):
        if rollout.index == 3:
            raise ValueError("no \ud800 answer")
        return {"reward": rollout.index, "len": len(rollout)} if rollout.index % 2 else rollout.index

    return replace(rollouts().score(reward, on_error="keep"), reward_seconds=np.arange(6.0))


def through(value, folder):
    return Rollouts.from_parquet(value.to_parquet(folder / "r.parquet"))


# -- parquet


@pytest.mark.parametrize(
    "value",
    [
        lambda: rollouts(),
        lambda: stepped(sorting("some/folder")),
        lambda: rollouts(
            prompts=(CHAT, [1, 2, 3], "text"), labels=(None, {"a": [1, 2.5]}, ("x", 3)), stop=["\n"], top_k=5
        ),
        lambda: replace(rollouts().select(np.arange(6) < 2), not_started=(1, 2), number=7, stats={"seconds": 1.5}),
        lambda: rollouts().select(np.zeros(6, bool)),
        lambda: rollouts()[::-1],
        lambda: written(["\ud800 lone", "p"], [["a", ""], [b"\xff\xfe"]]),
        lambda: partly_scored(),
        lambda: partly_scored()[1:].select(np.arange(4) > 0),
        lambda: rollouts().with_channels(x=[[np.nan, np.inf, -0.0][i % 3] for i in range(21)]),
    ],
    ids=[
        "plain",
        "a step's channels",
        "labels",
        "not started",
        "nothing",
        "other order",
        "hostile",
        "scored",
        "scored and selected",
        "not finite",
    ],
)
def test_a_file_gives_the_same_rollouts_back(value, tmp_path):
    assert same(value(), through(value(), tmp_path))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=4),
    label=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text() | st.integers(), inner),
        max_leaves=8,
    ),
)
def test_any_text_and_any_label_of_plain_types_come_back(texts, label, tmp_path):
    value = written([Prompt(t or " ", label, {"row": label}) for t in texts], [[t] for t in texts])
    assert same(value, through(value, tmp_path))


def test_arrays_and_images_of_a_prompt_come_back(tmp_path):
    image = Image.new("RGB", (3, 2), (10, 20, 30))
    chat = [{"role": "user", "content": [{"type": "image", "image": image}]}]
    value = written([Prompt(chat, np.array([1.5, 2], np.float32), {"n": np.int64(3)})], [["a"]])
    prompt = through(value, tmp_path).prompts[0]
    assert prompt.content[0]["content"] == [{"type": "image"}]
    back = prompt.images[0].pil()
    assert back.size == (3, 2) and back.mode == "RGB" and back.getpixel((1, 1)) == (10, 20, 30)
    assert prompt.label.dtype == np.float32 and prompt.label.tolist() == [1.5, 2]
    assert prompt.meta["n"] == 3 and type(prompt.meta["n"]) is np.int64


def test_images_are_written_once_for_each_prompt(tmp_path):
    images = [np.full((4, 4, 3), i, np.uint8) for i in range(3)]
    prompts = [Prompt("<image_pad> a", images=(images[0],)), Prompt("b"), Prompt("c", images=(images[1], images[2]))]
    value = written(prompts, [["x", "y"], ["z", "w"], ["v", "u"]])
    back = through(value, tmp_path)
    assert [p.images for p in back.prompts] == [p.images for p in prompts]
    assert [[i.data for i in p.images] for p in back.prompts] == [[i.data for i in p.images] for p in prompts]
    column = pandas.read_parquet(value.to_parquet(tmp_path / "r.parquet"))["prompt_images"]
    assert [0 if cell is None else len(cell) for cell in column] == [1, 0, 0, 0, 2, 0]
    rows = [json.loads(line) for line in value.to_json(tmp_path / "r.jsonl").read_text().splitlines()]
    assert [len(row.get("images", ())) for row in rows] == [1, 0, 0, 0, 2, 0]
    assert not any("observed_images" in row for row in rows)


def test_observed_images_come_back_with_their_places(tmp_path):
    value = full()
    back = through(value, tmp_path)
    assert same(value, back)
    assert [[(i.data, i.at) for i in own] for own in back.observed_images] == [
        [(i.data, i.at) for i in own] for own in value.observed_images
    ]
    rows = [json.loads(line) for line in value.to_json(tmp_path / "r.jsonl").read_text().splitlines()]
    assert [row.get("observed_images_at", []) for row in rows] == [[], [1], [2, 3], [], [4], [5, 6]]
    assert rows[1]["observed_images"] == [value.observed_images[1][0].data_url]


def test_other_tools_read_the_file(tmp_path):
    table = pandas.read_parquet(stepped(sorting()).to_parquet(tmp_path / "r.parquet"))
    assert len(table) == 16 and table["reward"].mean() == sorting().rewards.mean()
    assert table["token_ids"][0].tolist() == sorting().responses[0].tolist()
    assert table["prompt"][4] == "sort 53254 :" and len(table["channel.advantage"][0]) == table["length"][0]


def test_a_foreign_a_broken_and_a_missing_file_are_refused(tmp_path):
    other = tmp_path / "other.parquet"
    pandas.DataFrame({"a": [1], "b": [2]}).to_parquet(other)
    with pytest.raises(DataError, match=r"was not written by rollouts.to_parquet\(\): it holds the columns a, b"):
        Rollouts.from_parquet(other)
    (tmp_path / "text").write_text("PAR1 no, not really")
    with pytest.raises(DataError, match="is no Parquet file"):
        Rollouts.from_parquet(tmp_path / "text")
    with pytest.raises(DataError, match="no file"):
        Rollouts.from_parquet(tmp_path / "gone")


def test_a_file_that_was_changed_or_is_of_a_newer_rlbench_says_so(tmp_path):
    path = rollouts().to_parquet(tmp_path / "r.parquet")
    table = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(table.drop_columns(["text"]), path)
    with pytest.raises(DataError, match="was changed since"):
        Rollouts.from_parquet(path)
    pyarrow.parquet.write_table(table.slice(2), path)
    with pytest.raises(DataError, match=r"was changed since .* prompt 0 has no row"):
        Rollouts.from_parquet(path)
    facts = json.loads(table.schema.metadata[b"rlbench.rollouts"]) | {"format": 99}
    pyarrow.parquet.write_table(table.replace_schema_metadata({b"rlbench.rollouts": json.dumps(facts)}), path)
    with pytest.raises(DataError, match="format 99; this rlbench reads up to 1: update"):
        Rollouts.from_parquet(path)


def test_a_label_that_cannot_come_back_is_refused_and_leaves_no_file(tmp_path):
    with pytest.raises(DataError, match="the label of prompt 1 holds a set"):
        rollouts(labels=("a", {1}, "c")).to_parquet(tmp_path / "r.parquet")
    assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = rollouts().to_parquet(tmp_path / "r.parquet")
    monkeypatch.setattr(pyarrow.parquet, "write_table", lambda table, where, **_: (where.write_text("half"), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        stepped(sorting()).to_parquet(path)
    assert same(rollouts(), Rollouts.from_parquet(path)) and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("verb", ["to_parquet", "to_json", "to_html"])
def test_a_folder_that_is_not_there_or_a_path_that_is_one_is_refused(verb, tmp_path):
    with pytest.raises(DataError, match="no folder"):
        getattr(rollouts(), verb)(tmp_path / "gone" / "file")
    with pytest.raises(DataError, match="is a folder"):
        getattr(rollouts(), verb)(tmp_path)


def test_a_lone_surrogate_in_a_completion_is_refused_by_its_number(tmp_path):
    value = replace(rollouts(), texts=("a", "b\udc80", "c", "d", "e", "f"))
    with pytest.raises(DataError, match="completion 1 holds a lone surrogate"):
        value.to_parquet(tmp_path / "r.parquet")


@pytest.mark.parametrize(
    "value", [{MARK: "tuple"}, {MARK: 1, "a": 2}, {1: 2, "1": 3}, (), b"", float("inf"), -0.0, True]
)
def test_plain_values_come_back_as_the_types_they_were(value):
    back = loads(dumps(value, "it"))
    assert back == value and type(back) is type(value) and repr(back) == repr(value)


# -- pandas


def test_a_frame_has_one_row_per_completion():
    frame = stepped(sorting()).to_pandas()
    assert frame["prompt_index"].tolist() == [p for p in range(4) for _ in range(4)]
    assert frame["sample_index"].tolist() == [0, 1, 2, 3] * 4
    assert frame.groupby("prompt_index")["reward"].mean().tolist() == [1.0, 0.5, 0.5, 0.0]
    assert frame["finish_reason"][4] == "length" and frame["weight_version"][0] == 41
    assert (frame["advantage"].map(len) == frame["length"]).all() and frame["text"][0] == "12345"


def test_an_unscored_frame_and_a_channel_called_like_a_column():
    frame = rollouts().with_channels(text=np.zeros(21)).to_pandas()
    assert frame["reward"].isna().all() and frame["text"][0] == "p0s0" and len(frame["channel.text"][5]) == 6


# -- trajectories


def test_a_trajectory_is_a_conversation_with_its_tokens(tmp_path):
    value = (
        rollouts(prompts=(CHAT, "sum", [1, 2]), labels=("a", None, 3)).score(range(6)).with_channels(x=np.arange(21))
    )
    read = json.loads(value.to_json(tmp_path / "t.json").read_text())
    assert read["schema"] == "rlbench.trajectories/1" and read["sampling"] == {"temperature": 1.0}
    first, second, third = (read["trajectories"][i] for i in (1, 2, 4))
    assert [m["role"] for m in first["messages"]] == ["system", "user", "assistant"]
    assert first["messages"][-1]["content"] == "p0s1" and first["sample_index"] == 1 and first["label"] == "a"
    assert second["messages"][0] == {"role": "user", "content": "sum"} and second["token_ids"] == [0, 1, 2]
    assert second["channels"] == {"sampler_logprob": [-0.0, -0.01, -0.02], "x": [3.0, 4.0, 5.0]}
    assert third["messages"][0] == {"role": "user", "content": None} and third["prompt_token_ids"] == [
        12,
        12,
        12,
    ]
    assert third["reward"] == 4.0 and third["finish_reason"] == "stop"


def test_lines_are_one_trajectory_each_and_numbers_json_lacks_are_null(tmp_path):
    value = rollouts().with_channels(x=np.full(21, np.nan))
    lines = value.to_json(tmp_path / "t.jsonl").read_text().splitlines()
    assert (
        len(lines) == 6
        and json.loads(lines[1])["channels"]["x"] == [None, None]
        and json.loads(lines[0])["reward"] is None
    )
    assert (
        json.loads(rollouts().select(np.zeros(6, bool)).to_json(tmp_path / "none.json").read_text())["trajectories"]
        == []
    )

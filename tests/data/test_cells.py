"""What tables put into cells that nobody wrote: nulls, floats, missing labels, names with spaces, halves of letters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest

from rlbench.data import Prompt, as_prompts, demonstrations, load, pairs
from rlbench.errors import DataError
from rlbench.rewards import exact
from rlbench.tiny.tokenizer import build_tokenizer
from tests.data.written import written

CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"city": "Rome"}}}]}
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "hi"}, {**CALL, "content": None}]
FILLED: list[dict[str, Any]] = [
    {"role": "user", "content": "hi", "name": None, "tool_calls": None},
    {
        "role": "assistant",
        "content": None,
        "name": None,
        "tool_calls": [{"function": {"name": "look", "arguments": {"city": "Rome", "unit": None}}}],
    },
]


def through_arrow(messages: list[dict[str, Any]]) -> Any:
    """Return the first of two chats as pandas reads it from Parquet: the other one has all the keys."""
    full = [{"role": "x", "content": "y", "name": "z", "tool_calls": FILLED[1]["tool_calls"]}]
    full[0]["tool_calls"] = [{"function": {"name": "n", "arguments": {"city": "c", "unit": "u"}}}]
    return pa.table({"prompt": [messages, full]}).to_pandas()["prompt"][0]


@pytest.mark.parametrize("make", [lambda: FILLED, lambda: through_arrow(ASKED), lambda: np.array(FILLED, object)])
def test_messages_lose_the_nulls_of_a_table_at_every_depth_by_whichever_door(make: Any) -> None:
    doors = {
        "rollout": as_prompts([make()])[0],
        "rollout of rows": as_prompts([{"prompt": make()}])[0],
        "load": load([{"prompt": make()}])[0],
        "a Prompt": Prompt(list(make())),
    }
    for door, prompt in doors.items():
        assert prompt.content == ASKED, door


def test_a_picture_in_a_message_is_no_table() -> None:
    from PIL import Image

    picture = Image.new("RGB", (2, 2))
    part = {"type": "image", "image": picture, "detail": None}
    (prompt,) = as_prompts([[{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]])
    assert len(prompt.images) == 1 and prompt.content[0]["content"][0] == {"type": "image"}


def test_the_nulls_of_tools_are_no_part_of_a_schema_and_json_is_read() -> None:
    tokenizer = build_tokenizer(512)
    tokenizer.chat_template = "{{ tools | tojson if tools else '' }}" + tokenizer.chat_template
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "enum": None}}}
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for tools in ([tool], json.dumps([tool]), np.array([tool], object)):
        text = tokenizer.decode(demonstrations([{"messages": chat, "tools": tools}], tokenizer).prompts[0])
        assert '"look"' in text and "enum" not in text
    with pytest.raises(DataError, match=r"row 0: .*no column 'tools' but 'tools '"):
        demonstrations([{"messages": chat, "tools ": [tool]}], tokenizer)
    with pytest.raises(DataError, match="row 0: its tools are no JSON"):
        demonstrations([{"messages": chat, "tools": "{"}], tokenizer)


@pytest.mark.parametrize("door", [load, as_prompts])
def test_whole_labels_stay_whole_and_a_missing_one_is_none(door: Any) -> None:
    labels = [prompt.label for prompt in door(pd.DataFrame({"prompt": ["a", "b"], "label": [72, None]}))]
    assert labels == [72, None] and isinstance(labels[0], int)
    halves = [prompt.label for prompt in door(pd.DataFrame({"prompt": ["a", "b"], "label": [0.5, None]}))]
    assert halves == [0.5, None]
    for missing in (float("nan"), np.float32("nan"), pd.NA, pd.NaT, None):
        assert door([{"prompt": "a", "label": missing}])[0].label is None


def test_a_reward_that_needs_a_label_says_so_of_a_missing_one() -> None:
    rollouts = written([Prompt("a", label=float("nan"))], [["72"]])
    with pytest.raises(Exception, match="label"):
        rollouts.score(exact())


@pytest.mark.parametrize(
    "rows", [[{"q": "a"}, {"q": None}], pd.DataFrame({"q": ["a", None]}), [{"q": "a"}, {"q": np.nan}]]
)
def test_a_template_over_a_missing_value_names_row_and_column(rows: Any) -> None:
    with pytest.raises(DataError, match=r"row 1: .*'q'"):
        load(rows, template="Q: {q}")
    with pytest.warns(UserWarning, match="1 of 2 rows"):
        assert [p.content for p in load(rows, template="Q: {q}", on_error="report")] == ["Q: a"]


@pytest.mark.parametrize("name", [" label", "label ", "Label", " images"])
def test_a_column_that_differs_by_spaces_is_not_lost_in_silence(name: str, tmp_path: Path) -> None:
    row = {"prompt": "a", name: "72"}
    path = tmp_path / "rows.csv"
    path.write_text(f"prompt,{name}\na,72\n")
    for source in ([row], pd.DataFrame([row]), str(path)):
        with pytest.raises(DataError, match=f"row 0: .*{name!r}"):
            load(source)
    with pytest.raises(DataError, match=f"prompt 0: .*{name!r}"):
        as_prompts([row])
    if "abel" in name:
        assert load([row], label=name).labels == ["72"] and load([row], label=None).labels == [None]


def test_a_column_twice_is_refused_by_its_name(tmp_path: Path) -> None:
    table = pa.table([["a"], ["1"], ["2"]], names=["prompt", "label", "label"])
    pa.parquet.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "rows.csv").write_text("prompt,label,label\na,1,2\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "label": "1", "label": "2"}\n')
    frame = pd.DataFrame([["a", "1", "2"]], columns=["prompt", "label", "label"])
    for source in (*map(str, sorted(tmp_path.iterdir())), frame):
        with pytest.raises(DataError, match="column 'label' more than once"):
            load(source)
    with pytest.raises(DataError, match="column 'label' more than once"):
        as_prompts(frame)


def test_objects_over_several_lines_are_read_and_what_is_wanted_is_said(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "label": {"x": 1}}, {"prompt": "b", "label": None}]
    path = tmp_path / "rows.json"
    for count in (1, 2):
        path.write_text("\n".join(json.dumps(row, indent=2) for row in rows[:count]))
        assert [p.content for p in load(path)] == ["a", "b"][:count]
    path.write_text(json.dumps(rows[0], indent=2) + "\n{\n")
    with pytest.raises(DataError, match="begins in line 7 is not JSON"):
        load(path)
    lines = tmp_path / "rows.jsonl"
    lines.write_text(json.dumps(rows[0], indent=2))
    with pytest.raises(DataError, match="one object per line"):
        load(lines)


def test_a_lone_surrogate_is_refused_by_its_row_and_the_others_go_on_where_asked(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "good"}\n{"prompt": "bad \\ud83d"}\n')
    with pytest.raises(DataError, match=r"row 1: .*no Unicode"):
        load(path)
    with pytest.warns(UserWarning, match=r"1 of 2 rows cannot be read.*row 1"):
        assert [p.content for p in load(path, on_error="report")] == ["good"]
    with pytest.raises(DataError, match="on_error='skip'"):
        load(path, on_error="skip")  # type: ignore[arg-type]
    chat = [{"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}]
    for given in ("\ud83d", chat, Prompt("\ud83d"), {"prompt": chat}):
        with pytest.raises(DataError, match=r"prompt 1: .*no Unicode"):
            as_prompts(["good", given])
    tokenizer = build_tokenizer(64)
    for maker, row in (
        (demonstrations, {"prompt": "a", "completion": "b \ud83d"}),
        (pairs, {"prompt": "a", "chosen": "b", "rejected": "\udc00"}),
    ):
        good = {name: f"{name} x" for name in row}
        with pytest.raises(DataError, match=r"row 1: .*no Unicode"):
            maker([good, row], tokenizer)
        with pytest.warns(UserWarning, match="1 of 2 rows"):
            assert len(maker([good, row], tokenizer, on_error="report")) == (2 if maker is pairs else 1)

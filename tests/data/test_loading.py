"""Prompts come from whatever holds them: the same rows from every source, each column where it belongs."""

import csv
import json
import subprocess
import sys
import warnings

import numpy as np
import pandas
import pytest

from rlbench.data import Prompt, PromptSet, as_prompts, load
from rlbench.errors import DataError
from tests.data.values import rollouts

ROWS = [
    {"prompt": "2+2, then?", "label": "4", "level": "easy"},
    {"prompt": 'say "a,\nb" {x}', "label": "a,\nb", "level": "quotes"},
    {"prompt": "häh 🙂", "label": "", "level": "text"},
]
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """The datasets library with a cache of its own, and no way to the hub."""
    library = pytest.importorskip("datasets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("hf")))
        patch.setattr(library.config, "HF_HUB_OFFLINE", True)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        library.disable_progress_bars()
        yield library


def write_csv(path, rows=ROWS, delimiter=","):
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_lines(path, rows=ROWS, between="\n"):
    path.write_text(between.join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def write_json(path):
    path.write_text(json.dumps(ROWS, indent=1), encoding="utf-8")
    return path


def write_parquet(path):
    pandas.DataFrame(ROWS).to_parquet(path)
    return path


def with_mark(path):
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    return path


FILES = {
    "csv": lambda f: write_csv(f / "t.csv"),
    "tsv": lambda f: write_csv(f / "t.tsv", delimiter="\t"),
    "jsonl": lambda f: write_lines(f / "t.jsonl"),
    "json list": lambda f: write_json(f / "t.json"),
    "json of lines": lambda f: write_lines(f / "t.json"),
    "blank lines": lambda f: write_lines(f / "t.jsonl", between="\n\n"),
    "byte order mark": lambda f: with_mark(write_csv(f / "t.csv")),
    "parquet": lambda f: write_parquet(f / "t.parquet"),
    "text path": lambda f: str(write_lines(f / "t.jsonl")),
    "frame": lambda f: pandas.DataFrame(ROWS),
    "dicts": lambda f: ROWS,
    "prompts": lambda f: [Prompt(r["prompt"], r["label"], {"level": r["level"]}) for r in ROWS],
    "prompt set": lambda f: load(ROWS),
}


def plain(prompts):
    return [(p.content, p.label, dict(p.meta)) for p in prompts]


WANTED = [(r["prompt"], r["label"], {"level": r["level"]}) for r in ROWS]


@pytest.mark.parametrize("make", FILES.values(), ids=FILES)
def test_every_source_gives_the_same_prompts(make, tmp_path):
    assert plain(load(make(tmp_path))) == WANTED


def test_datasets_of_hugging_face_give_the_same_prompts(datasets, tmp_path):
    whole = datasets.Dataset.from_list(ROWS)
    splits = datasets.DatasetDict({"train": whole, "test": whole.select([0])})
    splits.save_to_disk(tmp_path / "saved")
    whole.save_to_disk(tmp_path / "one")
    (tmp_path / "folder").mkdir()
    write_lines(tmp_path / "folder" / "train.jsonl")
    write_lines(tmp_path / "folder" / "test.jsonl", ROWS[:1])
    assert plain(load(whole)) == WANTED
    assert plain(load(datasets.DatasetDict({"only": whole}))) == WANTED
    assert plain(load(splits, split="train")) == WANTED
    assert plain(load(splits, split="test")) == WANTED[:1]
    assert plain(load(tmp_path / "saved", split="train")) == WANTED
    assert plain(load(str(tmp_path / "one"))) == WANTED
    assert plain(load(tmp_path / "folder", split="train")) == WANTED
    assert plain(load(tmp_path / "folder", split="train[:2]")) == WANTED[:2]
    assert plain(load(whole.to_iterable_dataset(), limit=2)) == WANTED[:2]
    assert plain(load(whole, limit=2)) == WANTED[:2]
    assert plain(load(whole, shuffle_seed=3)) == plain(load(ROWS, shuffle_seed=3))


def test_which_split_is_not_guessed_and_what_cannot_be_found_is_told(datasets, tmp_path):
    splits = datasets.DatasetDict({name: datasets.Dataset.from_list(ROWS) for name in ("train", "test")})
    with pytest.raises(DataError, match="it has the splits train, test: give one, as split='train'"):
        load(splits)
    with pytest.raises(DataError, match="no split 'tset': it has train, test; nearest: test"):
        load(splits, split="tset")
    with pytest.raises(DataError, match="stream without a length: give limit="):
        load(splits["train"].to_iterable_dataset())
    with pytest.raises(DataError, match="cannot read 'nobody/nothing'"):
        load("nobody/nothing")
    (tmp_path / "d").mkdir()
    write_lines(tmp_path / "d" / "train.jsonl")
    with pytest.raises(DataError, match="Unknown split"):
        load(tmp_path / "d", split="tset")


def test_files_of_a_pattern_are_read_in_the_order_of_their_names(tmp_path):
    write_lines(tmp_path / "b.jsonl", ROWS[1:2])
    write_lines(tmp_path / "a.jsonl", ROWS[:1])
    write_csv(tmp_path / "c.csv", ROWS[2:])
    assert plain(load(str(tmp_path / "*.*"))) == WANTED
    with pytest.raises(DataError, match="no file matches"):
        load(str(tmp_path / "*.parquet"))


def test_texts_chats_and_token_ids_in_a_list_or_an_array():
    given = ["a text", CHAT, [1, 2, 3], np.array([4, 5])]
    assert [p.content for p in load(given)] == ["a text", CHAT, [1, 2, 3], [4, 5]]
    assert [p.content for p in load(np.array([[1, 2], [3, 4]]))] == [[1, 2], [3, 4]]
    assert [p.content for p in load((text for text in "ab"), limit=5)] == ["a", "b"]
    assert [p.content for p in load(pandas.Series(["a", "b"]))] == ["a", "b"]


def test_a_set_goes_wherever_prompts_go():
    assert as_prompts(load(ROWS)) == list(load(ROWS)) and isinstance(load(ROWS), PromptSet)


# -- columns


def test_columns_by_name_or_by_function_and_the_rest_as_meta():
    rows = [{"q": "x", "a": 3, "n": 1}, {"q": "y", "a": 4, "n": 2}]
    assert plain(load(rows, prompt="q", label="a")) == [("x", 3, {"n": 1}), ("y", 4, {"n": 2})]
    made = load(rows, prompt=lambda row: row["q"] * 2, label=lambda row: -row["a"])
    assert plain(made) == [("xx", -3, rows[0]), ("yy", -4, rows[1])]
    assert plain(load(rows, prompt="q", meta=["n"])) == [("x", None, {"n": 1}), ("y", None, {"n": 2})]
    with pytest.raises(DataError, match="revision"):
        load(rows, prompt="q", revision="main")
    assert [p.label for p in load([{"prompt": "x", "label": 1}], label=None)] == [None]


def test_a_template_over_the_row_whose_values_are_not_read_as_templates():
    rows = [{"question": "what is {answer}?", "answer": 42}]
    (made,) = load(rows, template="Q: {question}\nA:", label="answer")
    assert (made.content, made.label, made.meta) == ("Q: what is {answer}?\nA:", 42, {"question": rows[0]["question"]})
    (chat,) = load(rows, template=lambda row: [{"role": "user", "content": row["question"]}], label="answer")
    assert chat.content == [{"role": "user", "content": rows[0]["question"]}]
    assert load([{"x": 1.5}], template="{{{x:.2f}}}")[0].content == "{1.50}"


def test_a_system_message_comes_before_and_makes_a_chat_of_a_text():
    system = {"role": "system", "content": "be brief"}
    assert load(["hi"], system="be brief")[0].content == [system, *CHAT]
    assert load([CHAT], system="be brief")[0].content == [system, *CHAT]
    assert load(["hi"], chat=True)[0].content == CHAT
    templated = load([{"n": 7}], template="say {n}", system="be brief")
    assert templated[0].content == [system, {"role": "user", "content": "say 7"}]
    with pytest.raises(DataError, match="row 0: its chat begins with a system message already"):
        load([[system, *CHAT]], system="be long")
    with pytest.raises(DataError, match="row 0: it is token ids"):
        load([[1, 2]], system="be brief")


def test_chats_of_a_table_lose_what_arrow_added_and_get_standard_names(datasets):
    rows = [
        {"messages": [{"role": "user", "content": "a", "tool_calls": None}]},
        {"messages": [{"role": "system", "content": None}, {"role": "user", "content": "b", "tool_calls": ["t"]}]},
    ]
    kept = [p.content for p in load(datasets.Dataset.from_list(rows), prompt="messages")]
    assert kept == [
        [{"role": "user", "content": "a"}],
        [{"role": "system", "content": None}, {"role": "user", "content": "b", "tool_calls": ["t"]}],
    ]
    shared = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}]
    (made,) = load([{"conversations": shared}], prompt="conversations")
    assert made.content == [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    with pytest.raises(DataError, match="row 0: a message is from 'alien'"):
        load([{"c": [{"from": "alien", "value": "q"}]}], prompt="c")


def test_a_chat_that_ends_with_the_answer_is_told():
    answered = [*CHAT, {"role": "assistant", "content": "42"}]
    with pytest.warns(UserWarning, match="1 of 2 chats end with an assistant's message"):
        found = load([{"messages": answered}, {"messages": CHAT}], prompt="messages")
    assert found[0].content == answered


# -- rows chosen


def test_a_limit_and_a_shuffle_choose_rows_of_the_whole_table():
    rows = [{"prompt": f"p{i}"} for i in range(50)]
    assert [p.content for p in load(rows, limit=3)] == ["p0", "p1", "p2"]
    shuffled = [p.content for p in load(rows, shuffle_seed=1)]
    assert sorted(shuffled) == sorted(r["prompt"] for r in rows) and shuffled != [r["prompt"] for r in rows]
    assert [p.content for p in load(rows, shuffle_seed=1, limit=5)] == shuffled[:5]
    assert [p.content for p in load(rows, shuffle_seed=2)] != shuffled


def test_a_stream_is_read_no_further_than_its_limit():
    read = []

    def rows():
        for i in range(10**9):
            read.append(i)
            yield {"prompt": f"p{i}"}

    assert len(load(rows(), limit=4, shuffle_seed=0)) == 4 and len(read) == 4


# -- refusals


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ([{"question": "x"}], {"prompt": "queston"}, "'queston' for prompt=; it has question; nearest: question"),
        ([{"prompt": "x", "anser": 1}], {"label": "answer"}, "row 0 has no column 'answer' for label=.*nearest: anser"),
        ([{"prompt": "x"}, {"text": "y"}], {}, "row 1 has no column 'prompt'"),
        ([{"q": "x"}], {"template": "{p} {q}"}, "no column 'p' for template="),
        ([{"q": "x"}], {"template": "{q"}, "template '{q'"),
        ([{"q": "x"}], {"template": "{q:d}"}, "row 0: template"),
        ([{"prompt": "x"}], {"prompt": lambda row: row["nope"]}, "row 0: prompt= raised KeyError"),
        ([{"prompt": "x"}], {"label": lambda row: 1 / 0}, "row 0: label= raised ZeroDivisionError"),
        ([{"prompt": "x"}, {"prompt": ""}], {}, "row 1: its prompt is an empty text"),
        ([{"prompt": None}], {}, "row 0: its prompt: wanted a text.*NoneType"),
        ([{"prompt": {"a": 1}}], {}, "row 0: its prompt is a dict"),
        ([], {}, "the source has no rows"),
        ([3], {}, "item 0 is a int"),
        ({"prompt": ["a"]}, {}, "one dict is one row"),
        (3, {}, "cannot read a int"),
        (["a"], {"split": "train"}, "a list has no split"),
        (["a"], {"config": "main"}, "a list has no config"),
        (["a"], {"on_long": "cut"}, "on_long='cut'"),
        (["a"], {"limit": 0}, "limit=0"),
        (["a"], {"max_prompt_tokens": 0.5}, "max_prompt_tokens=0.5"),
        (["a"], {"shuffle_seed": -1}, "seed=-1"),
        ([{"a": "b"}], {"prompt": "a", "template": "{a}"}, "not both"),
        ([Prompt("a", meta={"label": 1})], {}, "item 0: the prompt's meta has 'label'"),
        ("tasks.jsonl", {}, "no file .*tasks.jsonl"),
    ],
)
def test_what_cannot_be_read_is_refused_by_what_is_wrong(source, options, said):
    with pytest.raises(DataError, match=said):
        load(source, **options)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.jsonl", '{"prompt": "a"}\n{"prompt": ', "t.jsonl line 2 is not JSON"),
        ("t.jsonl", '{"prompt": "a"}\n["b"]', "row 1 is a list"),
        ("t.json", "[1]", "row 0 is a int"),
        ("t.csv", "prompt,label\na,1\nb\n", "line 3 has not 2 columns"),
        ("t.csv", "prompt,label\na,1,2\n", "line 2 has not 2 columns"),
        ("t.parquet", "PAR1 not", "no Parquet file"),
        ("t.txt", "a", "read by their suffix: .parquet, .jsonl"),
    ],
)
def test_a_broken_file_is_refused_by_its_line(name, text, said, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=said):
        load(tmp_path / name)


def test_other_bytes_than_text_our_own_files_and_a_near_name(tmp_path):
    (tmp_path / "t.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(DataError, match="not UTF-8"):
        load(tmp_path / "t.jsonl")
    with pytest.raises(DataError, match=r"no file .*tt.jsonl; nearest: t.jsonl"):
        load(tmp_path / "tt.jsonl")
    rollouts().to_parquet(tmp_path / "r.parquet")
    with pytest.raises(DataError, match="from_parquet"):
        load(tmp_path / "r.parquet")


def test_a_csv_field_may_be_longer_than_pythons_limit_which_stays(tmp_path):
    before = csv.field_size_limit()
    (tmp_path / "long.csv").write_text("prompt\n" + "x" * 200_000 + "\n")
    assert len(load(tmp_path / "long.csv")[0].content) == 200_000
    assert csv.field_size_limit() == before


def test_nothing_is_warned_of_without_a_reason(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(write_csv(tmp_path / "t.csv"))


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        ("import rlbench.data", {"datasets", "pandas", "pyarrow", "transformers", "torch"}),
        (
            "import rlbench as rb; rb.data.load(r'{path}').stream().take(2)",
            {"datasets", "pandas", "transformers", "torch"},
        ),
    ],
)
def test_only_what_is_asked_for_is_imported(code, unwanted, tmp_path):
    code = code.format(path=write_lines(tmp_path / "t.jsonl"))
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not set(done.stdout.split()) & unwanted


@pytest.mark.parametrize(
    ("row", "label"),
    [
        ({"question": "1+1?", "answer": "so #### 2"}, "so #### 2"),
        ({"problem": "1+1?", "level": "1", "solution": "so \\boxed{2}"}, "so \\boxed{2}"),
        ({"problem": "1+1?", "solution": "so \\boxed{2}", "answer": "2"}, "2"),
    ],
)
def test_problems_in_the_form_of_gsm8k_and_math_are_read_as_they_are(tmp_path, row, label):
    found = load(write_lines(tmp_path / "test.jsonl", [row]))[0]
    assert (found.content, found.label) == ("1+1?", label) and not {"question", "problem"} & set(found.meta)
    named = load([row], prompt=next(iter(row)), label=None)[0]
    assert named.label is None and set(named.meta) == set(row) - {next(iter(row))}
    with pytest.raises(DataError, match="no column 'prompt'"):
        load([row], label=list(row)[-1])

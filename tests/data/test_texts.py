"""Demonstrations, pairs and labelled responses: which tokens are trained, and what is refused, with its row."""

from __future__ import annotations

import inspect
import json
from typing import Any

import numpy as np
import pytest

import rlbench as rb
from rlbench.data.batches.pairing import check_pairs, shortest, whole_pairs
from rlbench.errors import DataError, LossError
from rlbench.tiny.tokenizer import CHAT_TEMPLATE, build_tokenizer

PLAIN = CHAT_TEMPLATE.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
CHATML = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|end|>' + '\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
FORGETFUL = CHATML.replace("m['content']", "(m['content'] if loop.last else m['content'][:1])")
TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "sort 21"},
    {"role": "assistant", "content": "12"},
    {"role": "tool", "content": "right"},
    {"role": "user", "content": "sort 43"},
    {"role": "assistant", "content": "34"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(2048)


def with_template(tokenizer: Any, template: str) -> Any:
    other = build_tokenizer(2048)
    other.chat_template = template
    return other


def trained_texts(batch: Any, tokenizer: Any) -> list[list[str]]:
    """What is trained of each sequence, run by run, as text."""
    found = []
    for tokens, mask in zip(batch.responses, batch.responses.with_values(batch.mask), strict=True):
        cuts = np.flatnonzero(np.diff(mask.astype(int), prepend=0, append=0))
        runs = zip(cuts[::2].tolist(), cuts[1::2].tolist(), strict=True)
        found.append([tokenizer.decode(tokens[a:b].tolist()) for a, b in runs])
    return found


def whole_texts(batch: Any, tokenizer: Any) -> list[str]:
    return [
        tokenizer.decode([*prompt.tolist(), *answer.tolist()])
        for prompt, answer in zip(batch.prompts, batch.responses, strict=True)
    ]


# -- masks


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PLAIN])
def test_the_assistants_turns_alone_are_trained_with_marks_and_without(tokenizer: Any, template: str) -> None:
    batch = rb.data.demonstrations([{"messages": TURNS}, {"messages": TURNS[:3]}], with_template(tokenizer, template))
    assert whole_texts(batch, tokenizer) == [
        "<|system|>be brief<|end|><|user|>sort 21<|end|><|assistant|>12<|end|><|tool|>right<|end|>"
        "<|user|>sort 43<|end|><|assistant|>34<|end|>",
        "<|system|>be brief<|end|><|user|>sort 21<|end|><|assistant|>12<|end|>",
    ]
    assert trained_texts(batch, tokenizer) == [["12<|end|>", "34<|end|>"], ["12<|end|>"]]
    assert tokenizer.decode(batch.prompts[0].tolist()).endswith("<|assistant|>")
    assert batch.group.tolist() == [0, 1] and set(batch.weight_version.tolist()) == {-1} and not batch.sampled
    assert np.all(batch.advantages == 1) and batch.temperature == 1.0


def test_what_a_template_writes_behind_the_end_token_is_not_trained(tokenizer: Any) -> None:
    other = with_template(tokenizer, CHATML)
    batch = rb.data.demonstrations([TURNS], other)
    assert trained_texts(batch, tokenizer) == [["12<|end|>", "34<|end|>"]]
    assert whole_texts(batch, tokenizer)[0].endswith("<|end|>\n")


def test_a_template_of_ones_own_stands_in(tokenizer: Any) -> None:
    batch = rb.data.demonstrations([TURNS], tokenizer, template=CHATML)
    assert "<|im_start|>user" in whole_texts(batch, tokenizer)[0]
    assert trained_texts(batch, tokenizer) == [["12<|end|>", "34<|end|>"]]


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_row(tokenizer: Any) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"messages": TURNS},
    ]
    with pytest.raises(DataError, match=r"row 1: the template writes its first \d messages.*differently.*generation"):
        rb.data.demonstrations(rows, with_template(tokenizer, FORGETFUL))


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, PLAIN])
def test_a_prompt_of_messages_is_not_trained_on(tokenizer: Any, template: str) -> None:
    rows = [
        {"prompt": TURNS[:5], "completion": [TURNS[5]]},
        {"prompt": TURNS[:5], "completion": "34"},
        {"prompt": TURNS[:2], "completion": TURNS[2:]},
    ]
    batch = rb.data.demonstrations(rows, with_template(tokenizer, template))
    assert trained_texts(batch, tokenizer) == [["34<|end|>"], ["34<|end|>"], ["12<|end|>", "34<|end|>"]]
    assert np.array_equal(batch.responses[0], batch.responses[1])


def test_texts_are_encoded_as_a_sampler_would_see_them(tokenizer: Any) -> None:
    batch = rb.data.demonstrations([{"prompt": "1+1=", "completion": "2"}], tokenizer)
    assert batch.prompts[0].tolist() == list(b"1+1=")
    assert batch.responses[0].tolist() == [ord("2"), tokenizer.eos_token_id]
    chat = rb.data.demonstrations([{"prompt": "1+1", "completion": "2"}], tokenizer, chat=True, system="short")
    assert whole_texts(chat, tokenizer) == ["<|system|>short<|end|><|user|>1+1<|end|><|assistant|>2<|end|>"]


def test_rows_come_from_files_datasets_and_sessions(tokenizer: Any, tmp_path: Any) -> None:
    import datasets

    rows = [{"messages": TURNS}, {"messages": [*TURNS[1:3]]}]
    expected = rb.data.demonstrations(rows, tokenizer)
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)))
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "rows.parquet")

    class Holder:
        def __init__(self) -> None:
            self.tokenizer = tokenizer

    sharegpt = [[{"from": "human" if m["role"] == "user" else "gpt", "value": m["content"]} for m in TURNS[1:3]]]
    for source in (lines, tmp_path / "rows.parquet", table, [TURNS, TURNS[1:3]]):
        found = rb.data.demonstrations(source, Holder())
        assert np.array_equal(found.responses.values, expected.responses.values)
        assert np.array_equal(found.mask, expected.mask)
    found = rb.data.demonstrations([{"messages": sharegpt[0]}], tokenizer)
    assert np.array_equal(found.responses.values, expected[1:].responses.values)
    assert len(rb.data.demonstrations(lines, tokenizer, limit=1)) == 1


# -- refusals


USER = {"role": "user", "content": "a"}
GOOD = {"prompt": "a", "completion": "b"}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a"}, "row 1: it has no column 'completion'"),
        ({"completion": "a"}, "row 1: it has no column 'prompt'"),
        ({"mesages": [USER]}, "row 1: it has no column 'messages'.*nearest: mesages"),
        ({"messages": None}, "row 1: it has no column 'messages'"),
        ({"messages": []}, "row 1: its messages is empty"),
        ({"messages": 3}, "row 1: its messages is a int"),
        ({"messages": [USER]}, "row 1: it has no assistant's message"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "row 1: message 1 is an empty answer"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "row 1: message 1 is an empty answer"),
        ({"messages": [{"role": "usr", "content": "a"}]}, "row 1: message 0 has the unknown role 'usr'.*user"),
        ({"messages": [{"content": "a"}]}, "row 1: message 0 has the unknown role None"),
        ({"messages": [{"from": "nobody", "value": "a"}]}, "row 1: a message is from 'nobody'"),
        ({"prompt": "a", "completion": ""}, "row 1: its completion is empty"),
        ({"prompt": "a", "completion": "\n"}, "row 1: its completion is empty"),
        ({"prompt": "", "completion": "a"}, "row 1: its prompt is empty"),
        ({"prompt": "a", "completion": 7}, "row 1: its completion is a int"),
        ({"prompt": [USER], "completion": [USER]}, "row 1: it has no assistant's message"),
        ({"prompt": "a", "completion": "b" * 3000}, r"1 of 2 rows would be cut.*2048.*3002 \(row 1\)"),
    ],
)
def test_what_is_no_demonstration_is_refused_with_its_row(tokenizer: Any, row: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        rb.data.demonstrations([GOOD, row], tokenizer)


def test_options_and_sources_are_checked(tokenizer: Any) -> None:
    for maker in (rb.data.demonstrations, rb.data.pairs, rb.data.labelled):
        with pytest.raises(DataError, match=r"whose tokens.*: \(rows, session\)"):
            maker([{"prompt": "a", "completion": "b"}])
    for maker in (rb.data.demonstrations, rb.data.pairs, rb.data.labelled):
        shown = inspect.signature(maker).parameters
        assert shown["max_length"].default is None and shown["on_long"].default == "raise" and "options" not in shown
    with pytest.raises(DataError, match=r"unknown option 'max_len'.*max_length"):
        rb.data.demonstrations([GOOD], tokenizer, max_len=3)
    with pytest.raises(DataError, match="on_long='cut'"):
        rb.data.demonstrations([GOOD], tokenizer, on_long="cut")
    with pytest.raises(DataError, match="max_length=0"):
        rb.data.demonstrations([GOOD], tokenizer, max_length=0)
    with pytest.raises(DataError, match="no rows"):
        rb.data.demonstrations([], tokenizer)
    with pytest.raises(DataError, match="tokenizer= is a int"):
        rb.data.demonstrations([GOOD], 3)
    bare = build_tokenizer(64)
    bare.chat_template = None
    with pytest.raises(DataError, match="row 0: its messages need a chat template"):
        rb.data.demonstrations([TURNS], bare)


def test_long_rows_are_counted_and_may_be_left_out(tokenizer: Any) -> None:
    rows = [GOOD, {"prompt": "a", "completion": "b" * 9}, {"prompt": "a", "completion": "b" * 7}]
    with pytest.raises(DataError, match=r"2 of 3 rows would be cut.*max_length=8.*longest has 11 \(row 1\)"):
        rb.data.demonstrations(rows, tokenizer, max_length=8)
    with pytest.warns(UserWarning, match="2 of 3 rows"):
        kept = rb.data.demonstrations(rows, tokenizer, max_length=8, on_long="report")
    assert trained_texts(kept, tokenizer) == [["b<|end|>"]]


# -- pairs and labels


def test_pairs_stand_side_by_side(tokenizer: Any) -> None:
    rows = [
        {"prompt": "sort 21", "chosen": "12", "rejected": "21", "margin": 2},
        {"prompt": [USER], "chosen": "x", "rejected": [{"role": "assistant", "content": "y"}], "margin": 0.5},
        {"chosen": [*TURNS[:2], TURNS[2]], "rejected": [*TURNS[:2], TURNS[5]], "margin": 1.0},
    ]
    batch = rb.data.pairs(rows, tokenizer)
    end = "<|end|>"
    assert trained_texts(batch, tokenizer) == [[t + end] for t in ("12", "21", "x", "y", "12", "34")]
    assert batch.pair.tolist() == [0, 0, 1, 1, 2, 2] and batch.preference.tolist() == [1, -1] * 3
    assert batch.margin.tolist() == [2, 2, 0.5, 0.5, 1, 1] and "3 pairs" in repr(batch)
    for i in range(0, 6, 2):
        assert np.array_equal(batch.prompts[i], batch.prompts[i + 1])
    check_pairs(batch[2:])
    assert whole_pairs(batch[1:]).tolist() == [1, 2, 3, 4]
    with pytest.raises(LossError, match="sequence 0 is one of a pair"):
        check_pairs(batch[1:])
    both = batch + batch[:2]
    assert both.pair.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    check_pairs(both)
    assert shortest(batch, 2).tolist() == [2, 3]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "chosen": "b"}, "row 1: it has no column 'rejected'"),
        ({"chosen": "b", "rejected": "c"}, "row 1: it has no column 'prompt'"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "row 1: its chosen and rejected responses are the same"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "row 1: its completion is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}, "row 1: its margin is 'x'"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": float("nan")}, "row 1: its margin is nan"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1.0}, "row 0: it has no margin"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "heads": {"tone": "A"}}, "row 0: it has no heads, and others"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "heads": {"tone": "choosen"}}, "of 'tone'; nearest: chosen"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "heads": {"tone": 2}}, "say 2 of 'tone': wanted"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "heads": {"tone": None}}, "say nothing of any head"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "heads": ["tone"]}, "its heads are a list"),
        ({"chosen": [USER, TURNS[2]], "rejected": [TURNS[1], TURNS[2]]}, "row 1: its prompt is empty"),
        ({"prompt": "a", "chosen": "b" * 3000, "rejected": "c"}, "1 of 2 rows would be cut"),
    ],
)
def test_what_is_no_pair_is_refused_with_its_row(tokenizer: Any, row: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        rb.data.pairs([{"prompt": "a", "chosen": "b", "rejected": "c"}, row], tokenizer)


def test_pairs_say_of_each_head_which_response_is_better(tokenizer: Any, tmp_path: Any) -> None:
    said = [{"tone": "chosen", "length": "rejected"}, {"tone": "C", "facts": -1}, '{"length": "B", "tone": null}']
    rows = [{"prompt": "sort 21", "chosen": f"1{i}", "rejected": "21", "heads": one} for i, one in enumerate(said)]
    batch = rb.data.pairs(rows, tokenizer)
    assert batch.verdicts.heads == ("tone", "length", "facts")
    nan = np.nan
    expected = np.array([[1, -1, nan], [0, nan, -1], [nan, -1, nan]])
    np.testing.assert_array_equal(batch.verdicts.values, expected.repeat(2, axis=0))
    back = type(batch).from_parquet(batch.to_parquet(tmp_path / "pairs.parquet"))
    assert back.verdicts.heads == batch.verdicts.heads
    np.testing.assert_array_equal(back.verdicts.values, batch.verdicts.values)
    joined = rb.data.join(batch[4:], rb.data.pairs([{**rows[0], "heads": {"style": 1}}], tokenizer))
    assert joined.verdicts.heads == ("tone", "length", "facts", "style")
    np.testing.assert_array_equal(joined.verdicts.values[::2], [[nan, -1, nan, nan], [nan, nan, nan, 1]])
    with pytest.raises(DataError, match="only some of the batches judge heads"):
        rb.data.join(batch, rb.data.pairs([{key: rows[0][key] for key in ("prompt", "chosen", "rejected")}], tokenizer))
    assert batch.select(lambda row: "facts" in row.verdicts).pair.tolist() == [1, 1]
    np.testing.assert_allclose(batch.verdicts.weighed().weights, [3 / 2, 3 / 2, 3])
    assert batch.stream().state() != batch.replace(verdicts=batch.rows([2, 3, 0, 1, 4, 5]).verdicts).stream().state()
    with pytest.raises(LossError, match="judge 'length', a head that the reward model lacks; nearest: lengths"):
        batch.verdicts.of_heads(["tone", "lengths", "facts"])


def test_labelled_responses_stand_beside_one_after_another_prompt(tokenizer: Any) -> None:
    rows = [
        {"prompt": "p", "completion": "good", "label": True},
        {"prompt": "p", "completion": "bad", "label": 0},
        {"prompt": "q", "completion": "fine", "label": np.bool_(True)},
    ]
    batch = rb.data.labelled(rows, tokenizer)
    assert batch.preference.tolist() == [1, 0, -1, 0, 1, 0] and batch.group.tolist() == [0, 0, 1, 1, 2, 2]
    assert whole_texts(batch, tokenizer) == [
        f"{t}<|end|>" for t in ("pgood", "qgood", "pbad", "qbad", "qfine", "pfine")
    ]
    assert [bool(m.any()) for m in batch.responses.with_values(batch.mask)] == [True, False] * 3
    assert len(rb.data.labelled(rows, tokenizer, reference_point=False)) == 3
    with pytest.raises(DataError, match="same prompt"):
        rb.data.labelled(rows[:2], tokenizer)
    with pytest.raises(DataError, match="row 0: its label is 'yes'"):
        rb.data.labelled([rows[0] | {"label": "yes"}], tokenizer)
    with pytest.raises(DataError, match="row 0: it has no column 'label'"):
        rb.data.labelled([GOOD], tokenizer)


# -- tokens of one's own


def test_a_datum_is_a_sequence_of_ones_own_tokens() -> None:
    batch = rb.data.datum([5, 6, 7, 8], mask=[0, 0, 1, 1], advantages=[0, 0, 2, -1], logprobs=[0, 0, -1.5, -0.5])
    assert batch.prompts[0].tolist() == [5, 6] and batch.responses[0].tolist() == [7, 8]
    assert batch.advantages.tolist() == [2, -1] and batch.sampler_logprobs.tolist() == [-1.5, -0.5]
    assert batch.sampled and batch.mask.all() and batch.weight_version.tolist() == [-1]
    plain = rb.data.datum([[1, 2, 3], [4, 5]], version=3)
    assert plain.prompts.lengths.tolist() == [1, 1] and plain.responses.values.tolist() == [2, 3, 5]
    assert not plain.sampled and plain.weight_version.tolist() == [3, 3]
    inside = rb.data.datum(np.arange(1, 6), mask=[False, True, False, True, False])
    assert inside.mask.tolist() == [True, False, True, False]
    assert len(rb.data.join(batch, batch)) == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (([],), "no tokens"),
        (([1],), "sequence 0 has fewer than two"),
        (([1, 2], [True, True]), "its first token"),
        (([1, 2], [False, False]), "none of its tokens"),
        (([1, 2, 3], [0, 1]), r"mask has shape \(2,\)"),
        (([1, -2],), "token ids"),
        (([1.5, 2.0],), "token ids"),
        (([1, 2], None, [1.0]), "advantages has shape"),
        (([1, 2], None, 1.0, [0.0, float("nan")]), "logprobs hold numbers that are not finite"),
    ],
)
def test_what_is_no_datum_is_refused(args: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        rb.data.datum(*args)


def test_batches_of_texts_keep_everything_in_a_file(tokenizer: Any, tmp_path: Any) -> None:
    batch = rb.data.pairs([{"prompt": "a", "chosen": "b", "rejected": "cd", "margin": 1}], tokenizer)
    back = rb.TrainBatch.from_parquet(batch.to_parquet(tmp_path / "pairs.parquet"))
    for name in ("pair", "preference", "margin", "mask", "weight_version"):
        assert np.array_equal(getattr(back, name), getattr(batch, name))
    assert np.isnan(back.sampler_logprobs).all() and back.key == batch.key
    seen: list[Any] = []
    assert len(batch.select(lambda row: seen.append((row.pair, row.margin)) or row.preference > 0)) == 1
    assert seen == [(0, 1.0), (0, 1.0)]

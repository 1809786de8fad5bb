"""Rules: what counts as right, what a policy may try instead, and what cannot be a rule."""

import pickle
import re

import numpy as np
import pytest

import rlbench as rb
from rlbench.errors import DataError
from rlbench.rewards import contains, exact, regex, tags
from tests.data.written import written
from tests.rewards.values import answers, one


@pytest.mark.parametrize(
    ("rule", "text", "wanted"),
    [
        (exact(), " 7\n", 1),
        (exact(), "7.0", 0),
        (exact(), "it is 7", 0),
        (exact(), "", 0),
        (exact(inside="answer"), "<answer>3</answer> no: <answer> 7 </answer> bye", 1),
        (exact(inside="answer"), "<answer>7</answer><answer>8</answer>", 0),
        (exact(inside="answer"), "7", 0),
        (exact(inside="answer"), "</answer>7<answer>", 0),
        (exact(lambda r: "A"), "a", 0),
        (exact(lambda r: "A", ignore_case=True), "a", 1),
        (contains(), "it is 7.", 1),
        (contains(), "it is six", 0),
        (contains(inside="b"), "7 <b>8</b>", 0),
        (contains(lambda r: "ß", ignore_case=True), "STRASSE", 1),
        (regex(r"\d"), "x7", 1),
        (regex(r"^\d"), "x7", 0),
        (regex(r"a.b", flags=re.DOTALL), "a\nb", 1),
        (regex(r"#### (-?\d+)", 1), "#### 3 then #### 7", 1),
        (regex(r"#### (-?\d+)", 1), "#### 7 then #### 3", 0),
        (regex(r"#### (?P<n>\d+)", "n"), "####7", 0),
        (regex(r"a(b)?", 1), "a", 0),
    ],
)
def test_a_rule_gives_one_for_what_is_right_and_zero_for_what_is_not(rule, text, wanted):
    assert rule(one(text)) == wanted
    assert answers(text).score(rule).rewards.tolist() == [wanted]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<think>a</think><answer>b</answer>", 1),
        (" <think>\na\n</think>\n\n<answer></answer>\n", 1),
        ("<think>a < b > c</think> <answer><b>x</b></answer>", 1),
        ("<answer>b</answer><think>a</think>", 0),
        ("<think>a</think>", 0),
        ("<think>a</think><answer>b", 0),
        ("<think><answer>b</answer></think>", 0),
        ("<think>a</think><think>a</think><answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer><answer>b</answer>", 0),
        ("<think>a</think> so <answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer> bye", 0),
        ("hm <think>a</think><answer>b</answer>", 0),
        ("<think>a</think ><answer>b</answer>", 0),
        ("", 0),
    ],
)
def test_tags_are_well_formed_once_in_order_and_hold_everything(text, wanted):
    assert tags("think", "answer")(one(text)) == wanted


def test_an_example_of_the_format_in_the_prompt_earns_nothing():
    example = "Answer as <think>…</think><answer>…</answer>"
    assert tags("think", "answer")(one("seven", prompt=example)) == 0


def test_the_prompt_may_have_opened_the_first_tag_and_text_may_stand_outside():
    assert tags("think", "answer", opened=True)(one("a</think><answer>b</answer>")) == 1
    assert tags("think", "answer", opened=True)(one("<think>a</think><answer>b</answer>")) == 0
    assert tags("answer", outside=True)(one("I say <answer>7</answer> and stop")) == 1
    assert tags("answer", outside=True)(one("I say <answer>7 and stop")) == 0


def test_the_label_may_come_from_the_meta_data_or_a_function():
    meta = {"solution": 8}
    assert exact("solution")(one("8", meta=meta)) == 1 and exact(lambda r: len(r.text))(one("1")) == 1
    with pytest.raises(DataError, match="no 'solutoin'; nearest: solution"):
        exact("solutoin")(one("8", meta=meta))
    with pytest.raises(DataError, match="completion 0; the prompt has no label"):
        answers("7", label=None).score(exact())
    with pytest.raises(DataError, match="every completion contains it"):
        contains()(one("7", label=" "))


@pytest.mark.parametrize(
    "make",
    [
        lambda: regex("(", 1),
        lambda: regex("a", 1),
        lambda: regex("(a)", "b"),
        lambda: regex("a", label="x"),
        lambda: tags(),
        lambda: tags("a", "a"),
        lambda: tags("a b"),
        lambda: tags("<a>"),
    ],
)
def test_what_can_be_no_rule_is_refused_when_it_is_made(make):
    with pytest.raises(DataError):
        make()


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (exact(), "exact()"),
        (exact("solution", inside="answer"), "exact(label='solution', inside='answer')"),
        (contains(ignore_case=True), "contains(ignore_case=True)"),
        (regex(r"a(b)", 1), "regex('a(b)', group=1)"),
        (regex("a", flags=re.DOTALL), "regex('a', flags=16)"),
        (tags("a", "b", outside=True), "tags('a', 'b', outside=True)"),
    ],
)
def test_a_rule_is_a_value_that_says_what_it_is(rule, text):
    assert repr(rule) == text and pickle.loads(pickle.dumps(rule)) == rule
    assert eval(text, vars(rb.rewards)) == rule


def test_a_pattern_that_never_ends_is_ended_in_a_process_of_its_own():
    scored = answers("a" * 60 + "b", "aa").score(regex(r"^(a+)+$"), isolate=True, timeout_s=1, on_error="keep")
    assert [e.index for e in scored.reward_errors] == [0] and scored.rewards[1] == 1


@pytest.mark.parametrize("label", [["7", "seven"], ("7", "seven"), np.array(["7", "seven"], object)])
def test_a_list_as_label_is_one_of_right_answers(label):
    assert [exact()(one(text, label=label)) for text in ("7", " seven ", "eight", "['7', 'seven']")] == [1, 1, 0, 0]
    assert [contains()(one(text, label=label)) for text in ("it is seven", "eight")] == [1, 0]
    assert regex(r"is (\w+)", 1)(one("it is seven", label=label)) == 1


def test_a_list_that_parquet_gave_as_label_and_an_empty_one(tmp_path):
    import pandas

    pandas.DataFrame({"prompt": ["q"], "label": [["7", "seven"]]}).to_parquet(tmp_path / "rows.parquet")
    (prompt,) = rb.data.load(str(tmp_path / "rows.parquet"))
    assert written([prompt], [["seven", "eight"]]).score(exact()).rewards.tolist() == [1, 0]
    with pytest.raises(DataError, match="empty list"):
        exact()(one("7", label=[]))


@pytest.mark.parametrize("label", [True, np.True_])
def test_jsons_true_is_met_as_json_and_python_write_it(label):
    assert [exact()(one(text, label=label)) for text in ("true", "True", "false", "1")] == [1, 1, 0, 0]

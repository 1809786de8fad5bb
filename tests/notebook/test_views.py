"""The static views: what they show, that it is well-formed, and that nothing a model or a user wrote becomes markup."""

from html.parser import HTMLParser

import numpy as np
import pytest

from rlbench.data.history import History
from rlbench.data.metrics import Metrics
from rlbench.notebook import views
from rlbench.notebook.curves import Curves
from rlbench.notebook.markup import chip, gib
from rlbench.session.facts import card_facts, text_card
from tests.data.values import generated, rollouts

HOSTILE = "<script>alert(\"x\")</script><img src=x onerror='y'>&\"'"
VOID = {"img", "br", "hr", "meta", "input", "line"}


class Reader(HTMLParser):
    """Tags, attributes and visible text of a piece of HTML, and whether every tag is closed in order."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.text, self.open = [], [], "", []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data


def read(html):
    reader = Reader(html)
    assert not reader.open, f"never closed: {reader.open}"
    return reader


def state(**engines):
    return {
        "name": "sort", "config": {"model": "tiny", "seed": 3}, "step": 42, "version": 42,
        "running": {"id": "rollout 64"}, "engines": engines,
        "driver": {"mode": "notebook"}, "lease_s": 8 * 3600.0,
    }  # fmt: skip


ACTOR = {
    "kind": "train", "actors": ["a/0", "a/1"], "info": {},
    "state": {"weights": "cuda", "optimizer": "cpu", "version": 42},
}  # fmt: skip
INFERENCE = {
    "kind": "inference", "actors": ["i/0"], "info": {"executor": "vllm"},
    "state": {"weights": "cuda", "kv_cache": "meta", "version": 41},
}  # fmt: skip


def hostile_rollouts():
    from rlbench.data import Prompt, Rollouts

    part = generated([(0, 0, [1, 2], "stop")])
    part = type(part)(**{**part.__dict__, "texts": [HOSTILE]})
    return Rollouts.merge([Prompt(HOSTILE)], [part], {}).score([1.0])


@pytest.mark.parametrize(
    "html",
    [
        lambda: views.rollouts_view(hostile_rollouts()),
        lambda: views.session_card(
            card_facts(
                state(**{HOSTILE: INFERENCE | {"broken": HOSTILE, "info": {"executor": HOSTILE}}})
                | {"name": HOSTILE, "config": {"model": HOSTILE, "seed": 0}, "running": {"x": HOSTILE}},
                [],
            )
        ),
        lambda: views.session_card(card_facts(state(a=ACTOR | {"state": {"weights": HOSTILE}}), [])),
        lambda: views.metrics_view(
            Metrics({"step": 1, "skipped": HOSTILE, "loss": 1.0, "seconds": {HOSTILE: 1.0}})
        ),
        lambda: views.history_view(History([{"step": 1, "loss": 1.0, "loss_name": HOSTILE}])),
        lambda: Curves({HOSTILE: [1.0, 2.0]}, y=HOSTILE, x=HOSTILE)._repr_html_(),
    ],
    ids=["rollouts", "card", "card state", "metrics", "history", "curves"],
)
def test_hostile_text_is_shown_as_text_wherever_it_comes_in(html):
    reader = read(html())
    assert HOSTILE in reader.text
    assert not {"script", "img"} & set(reader.tags)
    assert not [name for name, _ in reader.attributes if name.startswith("on")]


# -- rollouts


def test_rollouts_show_prompts_answers_rewards_and_why_they_ended():
    text = read(views.rollouts_view(rollouts().score([0, 1, 0.5, 0.5, -1, 1]))).text
    for part in ("6 rollouts of 3 prompts", "sort 21 :", "p2s0", "+1.00", "-1.00", "6 tok", "length"):
        assert part in text, part


def test_the_prompt_whose_answers_differ_most_comes_first():
    text = read(views.rollouts_view(rollouts().score([1, 1, 0, 1, -5, 5]))).text
    assert text.index("prompt 2") < text.index("prompt 1") < text.index("prompt 0")


def test_unscored_and_empty_rollouts_have_a_view():
    assert "prompt 0" in read(views.rollouts_view(rollouts())).text
    nothing = rollouts().select(np.zeros(6, bool))
    assert "0 rollouts of 3 prompts" in read(views.rollouts_view(nothing)).text


def test_what_is_left_out_is_counted():
    from rlbench.data import Prompt, Rollouts

    samples = [(p, s, [p], "stop") for p in range(7) for s in range(6)]
    value = Rollouts.merge([Prompt(f"q{p}") for p in range(7)], [generated(samples)], {})
    text = read(views.rollouts_view(value)).text
    assert "3 more prompts" in text and text.count("2 more") == 4


def test_a_long_answer_is_cut():
    value = rollouts(prompts=("x" * 9000, "b", "c"))
    assert len(views.rollouts_view(value)) < 9000


# -- the card


def test_the_card_says_where_each_engine_is_in_words():
    facts = card_facts(
        state(actor=ACTOR, inference=INFERENCE), [{"resident": {"a/0": 2**30, "a/1": 2**29, "i/0": 2**28}}]
    )
    text = read(views.session_card(facts)).text
    for part in (
        "sort", "tiny", "step 42", "v42", "seed 3", "rollout 64", "fsdp2 ×2", "vllm ×1", "weights ● resident",
        "optimizer ○ host", "kv cache ◌ released", "1.5 GiB", "256 MiB",
        "v41, 1 version behind: session.sync_weights()",
    ):  # fmt: skip
        assert part in text, part
    plain = text_card(facts)
    assert "step 42" in plain and "v41, 1 version behind" in plain and "kv_cache meta" in plain


@pytest.mark.parametrize(
    ("driver", "lease_s", "text"),
    [
        ({"mode": "notebook"}, 8 * 3600.0, "ends after 8 h idle"),
        ({"mode": "script"}, 30.0, "ends 30 s after its script"),
        (None, 30.0, "ends 30 s after its script"),
    ],
    ids=["notebook", "script", "nobody yet"],
)
def test_the_card_says_when_the_session_ends_by_itself(driver, lease_s, text):
    facts = card_facts(state() | {"driver": driver, "lease_s": lease_s}, [])
    assert text in read(views.session_card(facts)).text and text in text_card(facts)


def test_the_card_of_a_frozen_reference_and_of_a_broken_engine():
    facts = card_facts(state(reference=ACTOR, inference=INFERENCE | {"broken": "replica 0 died"}), [])
    reference, inference = facts["engines"]
    assert reference["version"] == "frozen" and reference["note"] == "" and reference["bytes"] == 0
    assert inference["note"] == "replica 0 died"


def test_the_card_of_a_session_that_is_still_being_built():
    facts = card_facts(state(actor={"kind": "train", "devices": []}), [])
    assert "fsdp2 ×0" in read(views.session_card(facts)).text


# -- metrics, history, batch


def test_metrics_show_their_numbers_and_what_the_time_went_to():
    text = read(
        views.metrics_view(Metrics({"loss": 0.123456, "reward": None, "seconds": {"total": 1.25}}))
    ).text
    assert "0.123" in text and "total 1.25 s" in text and "reward" not in text


def test_history_shows_the_last_steps_and_an_empty_one_says_how_to_begin():
    history = History([{"step": i, "reward": i / 20, "loss": 1.0} for i in range(1, 21)])
    text = read(views.history_view(history)).text
    assert "0.05 ▁" in text and "█ 1" in text and "20" in text
    assert "session.train_step(batch)" in read(views.history_view(History([]))).text


def test_a_batch_shows_its_size():
    batch = rollouts().score(range(6)).batch(lambda rewards, group: np.zeros(6))
    assert "6 sequences" in read(views.batch_view(batch)).text


@pytest.mark.parametrize(
    ("nbytes", "text"), [(2**30, "1 GiB"), (1.5 * 2**31, "3 GiB"), (2**20 * 12.345, "12.3 MiB"), (0, "0 MiB")]
)
def test_bytes_for_a_reader(nbytes, text):
    assert gib(nbytes) == text


def test_a_chip_always_has_the_word():
    assert "weights ● resident" in chip("weights", "cuda") and "kv cache ◌ released" in chip(
        "kv_cache", "meta"
    )
    assert "weights ? lost" in chip("weights", "lost")


def test_a_sparkline_rises_with_its_values_and_ends_in_figures():
    assert views.sparkline([0.0, 0.5, 1.0]) == "0 ▁▅█ 1"
    assert views.sparkline([2.0, 2.0]) == "2 ▁▁ 2"
    assert len(views.sparkline(list(map(float, range(500))))) < 80

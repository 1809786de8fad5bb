"""What the viewer sends, orders and answers; the drawing itself is looked at in tests/browser."""

import base64
import io
import json
from dataclasses import replace
from types import SimpleNamespace

import ipywidgets
import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell
from PIL import Image

from rlbench import notebook
from rlbench.data import Prompt, Rollouts
from rlbench.data.rollouts.pieces import Pieces
from rlbench.errors import DataError
from rlbench.notebook import viewer
from rlbench.notebook.base.markup import cut, visible
from rlbench.notebook.live import live_view
from rlbench.notebook.rollouts import prompt_parts
from rlbench.notebook.rollouts import viewer as rollout_viewer
from rlbench.notebook.rollouts.channel_scale import LEVELS, number, scale_of, telling
from rlbench.notebook.rollouts.order import Summary
from rlbench.notebook.rollouts.rows import OPEN_TOKENS, PREVIEW_TOKENS, Shown, headline
from rlbench.notebook.rollouts.static import rollouts_view, telling_groups, telling_samples
from tests.data.comparing import cut_short
from tests.data.values import generated, rollouts
from tests.data.written import sorting, spelling, stepped, written
from tests.notebook.reading import HOSTILE, read


def asked(**content):
    return {"id": "view.1", **content}


def rows_of(drawing, *wanted, heads=()):
    content, (ids, values) = drawing.answer(asked(kind="rows", heads=list(heads), rows=[list(w) for w in wanted]))
    json.dumps(content)  # what goes to the page is JSON
    ids = np.frombuffer(ids, np.int32)
    return content, ids, np.frombuffer(values, np.float32).reshape(-1, len(ids))


# -- order


def prompts_in(order):
    return order.groups.tolist()


def test_every_order_is_sorted_by_what_it_says():
    value = stepped(sorting(samples=5))
    s = Summary(value)
    by = {"reward": s.mean, "spread": s.spread, "length": s.per_prompt(value.lengths.astype(float))}
    for name in s.sorts:
        order = s.order(name)
        assert sorted(order.samples.tolist()) == list(range(20)) and order.counts.tolist() == [5, 5, 5, 5]
        assert value.group[order.samples].tolist() == np.repeat(order.groups, 5).tolist()
        for word, values in by.items():
            if name.startswith(word):
                shown = values[order.groups]
                assert (np.diff(shown) <= 1e-9).all() if "↓" in name else (np.diff(shown) >= -1e-9).all(), name
    assert prompts_in(s.order("prompt")) == [0, 1, 2, 3] and s.order("prompt").samples.tolist() == list(range(20))
    assert s.order("mismatch ↓").samples[0] == 19  # the last completion's trainer is 0.5 nats off, all others 0.1
    lengths = value.lengths[s.order("length ↓").samples].reshape(4, 5)
    assert (np.diff(lengths) <= 0).all()


def test_orders_and_filters_are_offered_where_there_is_what_they_need():
    unscored = Summary(sorting(scored=False))
    assert list(unscored.sorts) == ["prompt", "length ↓", "length ↑"]
    assert list(unscored.filters) == ["all", "truncated", "aborted"]
    assert len(Summary(stepped(sorting())).sorts) == 7
    with pytest.raises(DataError, match=r"no order 'reward ↓'.*prompt, length"):
        viewer(sorting(scored=False), sort="reward ↓")
    with pytest.raises(DataError, match="no filter 'wrong'"):
        viewer(sorting(scored=False), filter="wrong")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("all", lambda v: np.ones(16, bool)),
        ("right", lambda v: v.rewards == 1),
        ("wrong", lambda v: v.rewards == 0),
        ("mixed groups", lambda v: np.isin(v.group, [1, 2])),
        ("zero-variance groups", lambda v: np.isin(v.group, [0, 3])),
        ("truncated", lambda v: np.arange(16) % 5 == 4),
        ("aborted", lambda v: np.zeros(16, bool)),
        ("clipped tokens", lambda v: np.arange(16) == 15),
        ("largest mismatch", lambda v: np.arange(16) == 15),
    ],
)
def test_a_filter_keeps_what_it_says_and_says_how_many(name, wanted):
    value = stepped(sorting())
    s = Summary(value)
    kept = np.flatnonzero(wanted(value))
    order = s.order(filter=name)
    assert order.samples.tolist() == kept.tolist() and order.counts.sum() == len(kept)
    label = s.labels()[list(s.filters).index(name)]
    assert label.endswith(f"· {len(kept)}") and (name != "right" or "> 0.5" in label)


def test_search_finds_completions_and_prompts_whatever_the_case():
    s = Summary(written(["Needle in prompt", "b", "c"], [["x", "y"], ["a nEEdle", "z"], ["none", "none"]]))
    assert s.order(search=" needle ").samples.tolist() == [0, 1, 2]
    assert len(s.order(search="absent").groups) == 0


def test_prompts_without_completions_are_listed_last_and_vanish_behind_a_filter():
    value = sorting().select(np.arange(16) >= 4)
    s = Summary(value)
    assert prompts_in(s.order("spread ↓"))[-1] == 0 and s.order("spread ↓").counts[-1] == 0
    assert 0 not in prompts_in(s.order(filter="wrong"))
    assert "n" in Shown(value).head(0) and Shown(value).head(0)["n"] == 0


@pytest.mark.parametrize(
    ("rewards", "threshold"), [([0, 1], 0.5), ([-1, 1], 0), ([1, 1], 0), ([0, 0], 0), ([2, 10], 6)]
)
def test_right_is_the_upper_half_of_the_rewards(rewards, threshold):
    assert Summary(written(["a"], [["x", "y"]]).score(rewards)).threshold == threshold


def test_a_mean_over_known_tokens_leaves_out_what_is_not_known():
    value = rollouts().with_channels(difference=[np.nan, *range(1, 21)])
    mismatch = Summary(value).mismatch
    assert np.isnan(mismatch[0]) and mismatch[1:].tolist() == [1.5, 4, 7.5, 12, 17.5]


def test_a_mean_over_an_empty_completion_is_not_its_neighbours():
    samples = [(0, 0, [], "abort"), (0, 1, [5, 6], "stop"), (1, 0, [], "stop"), (1, 1, [7], "stop"), (1, 2, [], "stop")]
    value = Rollouts.merge([Prompt("a"), Prompt("b")], [generated(samples)], {}).with_channels(difference=[1, 2, 4])
    mismatch = Summary(value).mismatch
    assert mismatch[[1, 3]].tolist() == [1.5, 4] and np.isnan(mismatch[[0, 2, 4]]).all()
    assert viewer(value).drawing.first["rows"] and "5 rollouts" in rollouts_view(value)


# -- what is sent


def test_a_window_holds_the_pieces_ids_and_numbers_of_its_rows(tiny_path):
    value = stepped(sorting(tiny_path))
    drawing = viewer(value).drawing
    names = [c["name"] for c in drawing.facts["channels"]]
    content, ids, values = rows_of(drawing, (5, 0, None), (2, 1, 3), heads=[1])
    first, second = content["rows"]
    assert "".join(first["pieces"]) == value.texts[5] + "<|end|>" and first["kinds"] == "t" * 5 + "s"
    assert second["pieces"] == list("234") and second["from"] == 1 and second["n"] == 6
    assert ids.tolist() == value.responses[5].tolist() + value.responses[2][1:4].tolist()
    np.testing.assert_array_equal(
        values[names.index("trainer_logprob")][:6],
        value.responses.with_values(value.channels["trainer_logprob"])[5],
    )
    assert content["heads"][0]["text"] == "sort 53254 :" and content["heads"][0]["right"] == 2


def test_a_long_completion_is_sent_in_parts():
    value = written(["a"], [["x" * 10_000]])
    drawing = viewer(value).drawing
    content, ids, _ = rows_of(drawing, (0, 0, None))
    assert len(content["rows"][0]["pieces"]) == len(ids) <= PREVIEW_TOKENS and content["rows"][0]["n"] == 10_001
    content, ids, _ = rows_of(drawing, (0, 9_999, 1_000_000))
    assert ids.tolist() == [ord("x"), 257]
    content, ids, _ = rows_of(drawing, (0, 0, 1_000_000))
    assert len(ids) == OPEN_TOKENS


def test_without_a_tokenizer_the_text_stands_before_the_numbers():
    content, _, _ = rows_of(viewer(written(["a"], [["hello"]])).drawing, (0, 0, None))
    row = content["rows"][0]
    assert row["text"] == "hello" and row["pieces"][0] == "104" and set(row["kinds"]) == {"i"}


def test_ten_thousand_rollouts_send_little(tiny_path):
    value = sorting(tiny_path, prompts=1250, samples=8)
    made = viewer(value)
    sent = sum(len(v) for v in made.drawing.first.values() if isinstance(v, bytes))
    sent += len(json.dumps([made.drawing.first["heads"], made.drawing.first["rows"]]))
    sent += sum(len(made.drawing.order[name]) for name in ("groups", "counts", "samples"))
    sent += len(made.drawing._esm) + len(made.drawing._css)
    assert sent < 200_000 and len(rollouts_view(value)) < 80_000


def test_the_order_answers_what_the_controls_say():
    drawing = viewer(stepped(sorting())).drawing
    content, buffers = drawing.answer(asked(kind="order", sort=0, filter=4, search="54365"))
    groups, counts, samples = (np.frombuffer(b, np.int32).tolist() for b in buffers)
    assert groups == [2] and counts == [2] and samples == [9, 11]
    assert (content["sort"], content["filter"], content["search"]) == (0, 4, "54365")


def test_a_whole_prompt_has_all_messages():
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "x" * 30_000}]
    drawing = viewer(written([Prompt(chat)], [["a"]])).drawing
    content, _ = drawing.answer(asked(kind="prompt", p=0))
    assert [p["role"] for p in content["parts"]] == ["system", "user"] and content["parts"][0]["text"] == "be brief"
    assert len(content["parts"][1]["text"]) < 21_000 and "characters)" in content["parts"][1]["text"]


def test_settings_are_taken_by_name_and_wrong_ones_refused():
    made = viewer(stepped(sorting()), colour="ratio", sort="length ↓", filter="wrong")
    assert made.colour.value == "ratio" and made.sort.value == "length ↓" and made.filter.value == "wrong"
    assert np.frombuffer(made.drawing.order["samples"], np.int32).size == 8
    for given, said in (
        ({"colour": "ratoi"}, "no channel 'ratoi'.*ratio"),
        ({"sort": "x"}, "no order"),
        ({"filter": "x"}, "no filter"),
    ):
        with pytest.raises(DataError, match=said):
            viewer(stepped(sorting()), **given)


def test_older_viewers_let_their_rollouts_go_and_say_so():
    first = viewer(sorting())
    for _ in range(rollout_viewer.VIEWERS_KEPT):
        viewer(sorting())
    content, _ = first.drawing.answer(asked(kind="rows", heads=[0], rows=[]))
    assert "show them again" in content["error"] and first.drawing.shown is None


def test_a_view_that_was_shown_fifty_times_leaves_a_notebook_small():
    """Defect absent: with widget state saved a notebook held the drawing, its script and its controls 50 times."""
    shown = stepped(sorting())

    def saved_bytes():
        return len(json.dumps(ipywidgets.Widget.get_manager_state(), default=str))

    for _ in range(rollout_viewer.VIEWERS_KEPT):
        viewer(shown)
    before = saved_bytes()
    for _ in range(50 - rollout_viewer.VIEWERS_KEPT):
        viewer(shown)
    assert saved_bytes() <= before * 1.01
    assert before < rollout_viewer.VIEWERS_KEPT * 150_000 and len(rollouts_view(shown)) < 50_000


def test_rollouts_of_nothing_have_a_viewer():
    nothing = rollouts().select(np.zeros(6, bool))
    assert viewer(nothing).drawing.first["rows"] == [] and "0 rollouts" in headline(nothing)
    assert "nothing" not in read(rollouts_view(nothing)).text


def test_what_an_interrupt_left_is_named():
    value = cut_short()
    assert headline(value).endswith(f"{int(value.aborted.sum())} aborted")
    assert headline(replace(value, not_started=(0,))).endswith(" aborted · 1 prompts not started")


# -- routing


def test_clicks_are_routed_by_the_front_end_for_our_widgets_and_their_children_alone():
    class Comm:
        def _reply_subshell_for(self, data, default):
            return "main"

    class OldComm:
        pass

    child, old, other = (SimpleNamespace(comm=c) for c in (Comm(), OldComm(), Comm()))
    parent = SimpleNamespace(comm=Comm(), children=(child, old))
    live_view.route_by_front_end(parent)
    assert parent.comm._reply_subshell_for({}, "asked") == "asked" == child.comm._reply_subshell_for({}, "asked")
    assert other.comm._reply_subshell_for({}, "asked") == "main" and not hasattr(old.comm, "_reply_subshell_for")


# -- scales


def test_a_scale_tells_the_real_ends_and_is_not_paled_by_a_few_far_values():
    values = np.concatenate([np.linspace(-1, 1, 10_000), [-50]]).astype(np.float32)
    scale = scale_of("difference", values)
    assert (scale.low, scale.high) == (-50, 1) and 0.9 < scale.bound < 1.1 and scale.saturated
    assert scale.share(np.array([-50, 0.5, np.nan])).tolist() == pytest.approx([-1, 0.5 / scale.bound, 0])
    even = scale_of("difference", np.linspace(-2, 1, 100).astype(np.float32))
    assert (
        even.bound == 2
        and not even.saturated
        and even.looks(np.array([-2, 0, 1])) == [f"n{LEVELS}", "", f"p{LEVELS // 2}"]
    )


def test_a_ratio_is_coloured_around_one_and_sizes_by_their_distance_from_zero():
    ratio = scale_of("ratio", np.array([0.5, 1, 2, 0], np.float32))
    assert ratio.share(np.array([0.5, 1.0, 2.0, 0.0])).tolist() == pytest.approx([-1, 0, 1, -1])
    logprob = scale_of("sampler_logprob", np.array([-4, 0], np.float32))
    assert logprob.share(np.array([-4.0, -2.0])).tolist() == [1, 0.5]


def test_nothing_known_is_no_colour():
    scale = scale_of("entropy", np.full(3, np.nan, np.float32))
    assert scale.share(np.array([np.nan, 1.0])).tolist() == [0, 1] and (scale.low, scale.high) == (0, 0)


def test_the_channel_that_opens_tells_tokens_apart():
    offsets = np.array([0, 2, 4])
    known = {"sampler_logprob": np.zeros(4), "entropy": np.zeros(4)}
    assert telling(known, offsets) == "entropy"
    assert telling(known | {"advantage": np.array([1, 1, 2, 2])}, offsets) == "entropy"
    assert telling(known | {"advantage": np.array([1, 2, 2, 2])}, offsets) == "advantage"


@pytest.mark.parametrize(
    ("value", "text"),
    [(-0.1234, "−0.123"), (1234567.0, "1,234,567"), (float("nan"), "–"), (None, "–"), (0.0, "0")],
)
def test_numbers_for_a_reader(value, text):
    assert number(value) == text


# -- hostile text and images


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", "␛[31mred"),
        ("a\x00b\x7f", "a␀b␡"),
        ("x\u202ey", "x‹U+202E›y"),
        ("\u200b", "‹U+200B›"),
        ("tab\tand\nline", "tab\tand\nline"),
        ("\ud800", "‹U+D800›"),
        ("漢字 é 🙂", "漢字 é 🙂"),
        ("\x9b", "‹U+009B›"),
    ],
)
def test_what_acts_or_hides_is_made_visible(text, shown):
    assert visible(text) == shown


def test_a_long_text_is_cut_with_what_is_left_out():
    assert cut("x" * 1_000_010, 10) == "x" * 10 + "… (+1,000,000 characters)" and cut("ab", 2) == "ab"


def image_chat(*parts):
    return Prompt([{"role": "user", "content": list(parts)}])


def test_images_of_a_prompt_are_drawn_small_whatever_form_they_came_in():
    pixels = Image.fromarray(np.random.default_rng(0).integers(0, 255, (900, 1200, 3), np.uint8))
    stream = io.BytesIO()
    pixels.save(stream, "PNG")
    url = "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
    prompt = image_chat(
        {"type": "image", "image": pixels},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "input_image", "image_url": url},
        {"type": "image", "image": stream.getvalue()},
        {"type": "text", "text": "so?"},
    )
    found = prompt_parts.prompt_parts(prompt)
    assert [bool(p.image) for p in found] == [True] * 4 + [False]
    assert all(p.text == "image 1200 × 900" and len(p.image) < 200_000 for p in found[:4])
    assert prompt.text == "[image] [image] [image] [image] so?"
    assert len(Shown(written([prompt], [["a"]])).head(0)["images"]) == 4


def test_the_run_of_an_images_tokens_is_a_chip():
    marks = {1: (b"<|image_start|>", True), 2: (b"<|image_pad|>", True), 3: (b"image", False), 4: (b"<|end|>", True)}
    pieces = Pieces(marks.get)
    runs = prompt_parts.image_runs(np.array([4, 1, 2, 2, 2, 4, 3, 3, 3, 3, 3, 1, 2, 4]), pieces, 2)
    assert runs == [3, 1] and prompt_parts.image_runs(np.array([1, 2, 2]), pieces, 3) == []
    prompt = image_chat(*({"type": "image", "image": np.zeros((4, 4, 3), np.uint8)} for _ in range(2)))
    assert [part.chip for part in prompt_parts.prompt_parts(prompt, runs=runs)] == ["image ×3", "image ×1"]
    assert [part.chip for part in prompt_parts.prompt_parts(prompt)] == ["", ""]
    assert prompt_parts.image_runs(np.zeros(0, np.int32), pieces, 1) == []


def test_an_image_whose_pixels_are_broken_is_named_and_the_rest_drawn():
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (300, 300, 3), np.uint8)).save(stream, "JPEG")
    prompt = image_chat({"type": "image", "image": stream.getvalue()[:-5000]}, {"type": "text", "text": "so?"})
    broken, text = prompt_parts.prompt_parts(prompt)
    assert not broken.image and broken.text.startswith("[image, not shown") and text.text == "so?"


# -- the static view


def test_it_shows_prompts_answers_rewards_and_why_they_ended():
    text = read(rollouts_view(rollouts().score([0, 1, 0.5, 0.5, -1, 1]))).text
    for part in (
        "6 rollouts · 3 prompts × 2",
        "sort 21 :",
        "p2s0",
        "✓ +1.00",
        "✗ −1.00",
        "6 tok",
        "✂ length",
        "spread 1.00",
    ):
        assert part in text, part


def test_the_most_telling_prompts_come_first():
    text = read(rollouts_view(rollouts().score([1, 1, 0, 1, -5, 5]))).text
    assert text.index("prompt 2") < text.index("prompt 1") < text.index("prompt 0")
    shown = Shown(stepped(sorting(prompts=12)))
    groups = telling_groups(shown, 5).tolist()
    assert (
        len(groups) == 5 and 11 in groups and 0 not in groups
    )  # the last has the largest mismatch, the first tells nothing
    chosen = telling_samples(Shown(stepped(sorting(samples=20))), 3, 4).tolist()
    assert 79 in chosen and any(i % 5 == 4 for i in chosen) and len(chosen) == 4


def test_what_is_left_out_is_counted():
    samples = [(p, s, [p], "stop") for p in range(7) for s in range(6)]
    value = Rollouts.merge([Prompt(f"q{p}") for p in range(7)], [generated(samples)], {})
    text = read(rollouts_view(value)).text
    assert "2 more prompts" in text and text.count("2 more") == 6


def test_tokens_are_coloured_and_marked_and_stay_readable(tiny_path):
    reader = read(rollouts_view(stepped(sorting(tiny_path))))
    classes = [value for name, value in reader.attributes if name == "class"]
    assert any(c.startswith(("p", "n")) and c[1:].split(" ")[0].isdigit() for c in classes)
    assert any("clip" in c for c in classes) and any("s" in c.split() for c in classes)
    assert "12345<|end|>" in reader.text and "colour: difference (nats), 0.1 to 0.5" in reader.text


@pytest.mark.parametrize("tokenizer", [True, False], ids=["tokenizer", "numbers"])
def test_hostile_text_is_inert_and_a_megabyte_is_cut(tokenizer, tiny_path):
    texts = [HOSTILE, "</script>", "x" * 1_000_000, "\x1b[31m", "\u202e"]
    value = written([HOSTILE, "y" * 1_000_000], [texts, texts], tokenizer=tiny_path if tokenizer else "")
    html = rollouts_view(value)
    reader = read(html)
    assert len(html) < 100_000 and not {"script", "img"} & set(reader.tags)
    assert not [name for name, _ in reader.attributes if name.startswith("on")]
    assert "\x1b" not in html and "\u202e" not in html and (HOSTILE in reader.text)


# -- at the end of a cell


def test_in_a_kernel_rollouts_show_as_the_viewer_with_their_static_form_and_elsewhere_as_html(monkeypatch):
    shell = InteractiveShell.instance()
    try:
        notebook.install()
        data, _ = shell.display_formatter.format(sorting())
        assert set(data) == {"text/plain", "text/html"}  # a terminal, nbconvert: nobody to talk to
        shell.kernel = object()
        notebook.install()
        shown = []
        monkeypatch.setattr(shell.display_pub, "publish", lambda data, **_: shown.append(data))
        assert shell.display_formatter.format(sorting()) == ({}, {})
        live, still = shown
        assert "application/vnd.jupyter.widget-view+json" in live and set(still) == {"text/plain", "text/html"}
        assert still["text/plain"] == repr(sorting()) and rollouts_view(sorting()) in still["text/html"]
        made = viewer(sorting())
        made.release()
        shown.clear()
        made._ipython_display_()
        assert len(shown) == 1 and "were let go" in shown[0]["text/html"]
    finally:
        InteractiveShell.clear_instance()


def test_a_token_that_is_markup_as_a_whole_is_inert_in_view_and_page(tmp_path):
    marks = ["<script>alert(1)</script>", "<img src=x onerror=alert(2)>", "</td></table>"]
    value = written(["p"], [[bytes([0, 1, 2, 3])]], tokenizer=spelling(tmp_path, marks, "<svg onload=alert(3)>"))
    for html in (rollouts_view(value), value.to_html(tmp_path / "page.html").read_text()):
        reader = read(html)
        assert not {"img", "svg"} & set(reader.tags) and "alert" not in str(reader.attributes)
        assert all(mark in reader.text for mark in (*marks, "<svg onload=alert(3)>"))

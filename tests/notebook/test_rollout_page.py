"""The exported page: it needs nothing, reads without its script, and hostile text stays text."""

import base64
import hashlib
import json
import re

import numpy as np
import pytest

from rlbench.errors import DataError
from tests.data.values import rollouts
from tests.data.written import sorting, stepped, written
from tests.notebook.reading import HOSTILE, read


def page(value, folder, **options):
    return value.to_html(folder / "page.html", **options).read_text(encoding="utf-8")


def facts(html):
    found = re.search(r'<script type="application/json" id="facts">(.*?)</script>', html, re.DOTALL)
    return json.loads(found[1])


def test_it_reads_without_its_script(tmp_path, tiny_path):
    text = read(page(stepped(sorting(tiny_path)), tmp_path)).text
    for part in (
        "16 rollouts · 4 prompts × 4 · v41",
        "sort 53254 :",
        "2/4 right",
        "✓ +1.00",
        "12345",
        "<|end|>",
        "✂ length",
    ):
        assert part in text, part
    assert "of 16 completions" not in text


def test_it_asks_nothing_of_anybody(tmp_path):
    html = page(stepped(sorting()), tmp_path)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)[1]
    assert "default-src 'none'" in policy and "connect-src" not in policy and "'unsafe-eval'" not in policy
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy  # its own script and no other
    reader = read(html)
    assert not [v for n, v in reader.attributes if n in ("src", "href") and v] and "link" not in reader.tags
    assert html.index("Content-Security-Policy") < html.index("<style>") < html.index("<script")


def test_its_script_gets_every_channel_of_every_token_shown(tmp_path, tiny_path):
    value = stepped(sorting(tiny_path))
    data = facts(page(value, tmp_path, colour="ratio"))
    names = [c["name"] for c in data["channels"]]
    assert names[data["colour"]] == "ratio" and len(data["rows"]) == 16
    row = data["rows"]["5"]
    values = np.frombuffer(base64.b64decode(row["values"]), "<f4").reshape(len(names), -1)
    assert row["ids"] == value.responses[5].tolist() and not row["right"] == (value.rewards[5] == 0)
    np.testing.assert_array_equal(values[names.index("ratio")], value.responses.with_values(value.channels["ratio"])[5])


def test_of_many_the_most_telling_are_taken_and_the_rest_counted(tmp_path):
    html = page(sorting(prompts=40, samples=4), tmp_path, samples=10)
    assert "10 of 160 completions, the most telling groups first" in html and len(facts(html)["rows"]) == 10
    assert "<b>prompt 0</b>" not in html  # all right: it tells nothing


def test_the_name_of_a_channel_cannot_end_the_script(tmp_path):
    html = page(rollouts().with_channels(**{"</script><script>1": np.zeros(21)}), tmp_path)
    assert html.count("</script>") == 2 and facts(html)["channels"][-1]["name"] == "</script><script>1"


def test_hostile_text_is_inert(tmp_path, tiny_path):
    texts = [HOSTILE, "</script><script>1</script>", "x" * 1_000_000, "\x1b[31m", "\u202e", b"\xff\xe6"]
    html = page(written([HOSTILE, "</title>"], [texts, texts], tokenizer=tiny_path).score(range(12)), tmp_path)
    reader = read(html)
    assert HOSTILE in reader.text and reader.tags.count("script") == 2 and "img" not in reader.tags
    assert html.count("</script>") == 2 and "\x1b" not in html and "\u202e" not in html
    assert not [name for name, _ in reader.attributes if name.startswith("on")]
    assert "980,001 more tokens" in reader.text


@pytest.mark.parametrize(
    ("options", "said"), [({"colour": "ratoi"}, "no channel 'ratoi'"), ({"samples": 0}, "samples=0")]
)
def test_what_cannot_be_meant_is_refused_and_leaves_no_file(options, said, tmp_path):
    with pytest.raises(DataError, match=said):
        page(rollouts(), tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_nothing_and_what_was_never_scored_have_a_page(tmp_path):
    assert "0 rollouts" in page(rollouts().select(np.zeros(6, bool)), tmp_path)
    assert "p2s1" in read(page(rollouts(), tmp_path)).text

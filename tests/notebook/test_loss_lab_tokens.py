"""The losses of a lab on the tokens of a sample: each coloured by its own coefficient, reachable, and nothing acts."""

import re

import numpy as np
import pytest

from rlbench.notebook.lab.tokens import LOSSES, SAMPLES, TOKENS_SHOWN, telling_samples, token_strips
from rlbench.session.lab.inputs import scored
from rlbench.session.lab.loss_lab import make_lab
from tests.data.values import rollouts
from tests.notebook.reading import HOSTILE, inert, read


def up(x):
    return -x.logprobs, {}


def by_sign(x):
    return -x.advantages * x.logprobs, {}


def lab_of(losses, mask=None, **fields):  # 6 responses, 21 tokens
    batch = rollouts().score(range(6)).batch(lambda rewards, group: rewards - 2.4)
    batch = batch.replace(**({} if mask is None else {"mask": mask}))
    random = np.random.default_rng(0)
    entropy = random.random(batch.tokens).astype(np.float32)
    forward = scored(batch, {"logprobs": batch.sampler_logprobs, "entropy": entropy})
    return make_lab(forward, losses, **fields)


def strips(html):
    """Of each strip its tokens: (class, title, text)."""
    sides = re.findall(r"<div class=t>(.*?)</div>", html)
    token = re.compile(r'<i class="(.*?)" title="(.*?)"( tabindex=0)?>(.*?)</i>', re.DOTALL)
    return [token.findall(side) for side in sides]


def test_each_loss_has_its_strip_and_the_first_sample_is_open():
    lab = lab_of({"up": up, "by sign": by_sign})
    html = token_strips(lab)
    page = read(html)
    assert page.tags.count("details") == SAMPLES and html.count("<details class=g open>") == 1
    assert "2 more samples" in page.text
    assert len(strips(html)) == 2 * SAMPLES
    first, second = strips(html)[:2]
    assert len(first) == len(second) == lab.batch.response_lengths[telling_samples(lab)[0]]
    assert all(look.startswith("n") for look, *_ in first)  # every token becomes more likely


def test_tokens_that_the_losses_pull_apart_are_marked_and_numbers_are_said():
    lab = lab_of({"up": up, "by sign": by_sign})
    worst = int(telling_samples(lab)[0])
    begin = int(lab.batch.responses.offsets[worst])
    assert lab.batch.advantages[begin] < 0  # where both agree nothing is to be seen
    first, second = strips(token_strips(lab))[:2]
    assert all("differ" in look for look, *_ in second) and not any("differ" in look for look, *_ in first)
    assert all(look.startswith("p") for look, *_ in second)
    said = first[0][1]
    assert said.startswith(f"token 0 · id {lab.batch.responses.values[begin]} · A −") and "ratio 1 · up −" in said
    assert "by sign 0." in said and first[0][2] and not second[0][2]


def test_samples_are_ordered_by_how_much_the_losses_differ():
    lab = lab_of({"up": up, "by sign": by_sign})
    unit = [lab[name].coefficients / np.linalg.norm(lab[name].coefficients) for name in lab]
    owner = np.repeat(np.arange(6), lab.batch.response_lengths)
    score = np.bincount(owner, weights=np.abs(unit[1] - unit[0]))
    assert telling_samples(lab).tolist() == np.argsort(-score, kind="stable")[:SAMPLES].tolist()
    assert len(telling_samples(lab_of({"up": up}))) == SAMPLES


def test_untrained_tokens_are_struck_and_have_no_colour():
    mask = np.arange(21) % 2 == 0
    looks = [look for strip in strips(token_strips(lab_of({"up": up}, mask))) for look, *_ in strip]
    assert "off" in looks and all(("off" in look) != bool(re.match(r"[np]\d", look)) for look in looks)


def test_with_a_tokenizer_pieces_are_shown_and_without_numbers(tiny_path):
    plain = strips(token_strips(lab_of({"up": up})))[0]
    assert all(text.isdigit() for *_, text in plain)
    pieces = strips(token_strips(lab_of({"up": up}, tokenizer=str(tiny_path))))[0]
    assert len(pieces) == len(plain) and not all(text.isdigit() for *_, text in pieces)


def test_many_losses_and_long_responses_are_cut_and_said():
    lab = lab_of({f"loss {i}": up for i in range(LOSSES + 2)})
    page = read(token_strips(lab))
    assert f"the first {LOSSES} of {LOSSES + 2} losses" in page.text
    assert TOKENS_SHOWN > max(lab.batch.response_lengths)
    assert token_strips(lab_of({"up": "nothing of that name"})) == ""


@pytest.mark.parametrize("name", [HOSTILE, "\u202eevil\x1b[31m"])
def test_nothing_in_a_losss_name_acts(name):
    html = token_strips(lab_of({name: up, "up": up}))
    inert(read(html))
    assert "\u202e" not in html and "\x1b" not in html

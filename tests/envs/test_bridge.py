"""What stands between two turns, against the template itself; templates that cannot be continued are refused."""

import pytest

from rlbench.data import Prompt
from rlbench.envs.bridge import bridged, check_role, opened
from rlbench.errors import DataError
from rlbench.tiny.tokenizer import build_tokenizer

ASK = [{"role": "user", "content": "sort 21"}]


@pytest.fixture
def tokenizer():
    return build_tokenizer(512)


def chat(tokenizer, messages, generate=True):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=generate, return_dict=False)


def after(tokenizer, observation, ended=True, last=None, role="user"):
    last = tokenizer.eos_token_id if last is None else last
    return bridged(tokenizer, ASK, observation, role, ended, last)[:2]


def test_a_conversation_continued_is_what_the_template_renders_whole(tokenizer):
    """Three turns, sampled ids kept as they are, give the ids of the whole conversation rendered at once."""
    ids, messages = chat(tokenizer, ASK), list(ASK)
    for said, answer in (("12", "no"), ("21", "still no"), ("<tool>f(1)</tool>", "é 💡")):
        sampled = [*tokenizer(said)["input_ids"], tokenizer.eos_token_id]
        more, told, *_ = bridged(tokenizer, ASK, answer, "tool", True, sampled[-1])
        ids += sampled + more
        messages += [{"role": "assistant", "content": said}, *told]
    assert ids == chat(tokenizer, messages) and told == [{"role": "tool", "content": "é 💡"}]


def test_an_end_that_was_not_sampled_is_put_there_once(tokenizer):
    cut, _ = after(tokenizer, "no", ended=False, last=65)
    ended, _ = after(tokenizer, "no")
    assert tokenizer.decode(cut) == "<|end|><|user|>no<|end|><|assistant|>" and ended == cut[1:]
    other, _ = after(tokenizer, "no", ended=True, last=tokenizer.pad_token_id)  # another end token: both stay
    assert other == cut


def test_nothing_to_say_opens_the_next_message_only_where_one_ended(tokenizer):
    assert tokenizer.decode(after(tokenizer, None)[0]) == "<|assistant|>"
    assert after(tokenizer, None, ended=False, last=65) == ([], [])


def test_messages_and_text_inside_the_answer(tokenizer):
    two = [{"role": "tool", "content": "1"}, {"role": "user", "content": "2"}]
    assert tokenizer.decode(after(tokenizer, two)[0]) == "<|tool|>1<|end|><|user|>2<|end|><|assistant|>"
    assert tokenizer.decode(after(tokenizer, "=3", role=None)[0]) == "=3"
    assert after(tokenizer, [7, 8])[0] == [7, 8]


@pytest.mark.parametrize(
    ("template", "observation"),
    [
        # the system message moves to the last user message, as Mistral's templates do
        ("{% for m in messages %}{{ 'S' if m.role == 'user' and loop.last }}[{{ m.content }}]{% endfor %}", "no"),
        ("{% for m in messages if m.role != 'assistant' %}[{{ m.content }}]{% endfor %}", "no"),  # no answers at all
        ("{{ messages | length }}{% for m in messages %}[{{ m.content }}]{% endfor %}", "no"),  # counts at the front
    ],
)
def test_a_template_that_rewrites_what_it_wrote_is_refused(tokenizer, template, observation):
    tokenizer.chat_template = template
    with pytest.raises(DataError, match="only appends"):
        after(tokenizer, observation)


def test_a_template_that_drops_thoughts_of_earlier_answers_can_be_continued(tokenizer):
    """As Qwen3's: an answer is rendered with an empty thought while it is the last, and without one later."""
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert tokenizer.decode(after(tokenizer, "no")[0]) == "<|user|>no<|end|><|assistant|>"


def test_what_does_not_fit_is_refused_with_the_mend(tokenizer):
    with pytest.raises(DataError, match="unknown role judge"):
        after(tokenizer, "no", role="judge")
    with pytest.raises(DataError, match="the prompt is no chat"):
        bridged(tokenizer, None, [{"role": "user", "content": "x"}], "user", True, 1)
    with pytest.raises(DataError, match="wanted a text, messages"):
        after(tokenizer, {"role": "user"})
    with pytest.raises(DataError, match="without a tokenizer"):
        bridged(None, None, "x", "user", True, 1)


def test_what_reset_observes_stands_behind_the_prompt(tokenizer):
    ids = chat(tokenizer, ASK)
    asked = Prompt(ASK)
    assert opened(tokenizer, asked, ids, None, "user") == (ids, [], (), False, None)
    more, said, *_ = opened(tokenizer, asked, ids, "board", "user")
    assert more == chat(tokenizer, [*ASK, {"role": "user", "content": "board"}]) and len(said) == 1
    text = opened(tokenizer, Prompt("go:"), [103, 111, 58], " x", "user")
    assert tokenizer.decode(text.ids) == "go: x"


def test_a_text_in_the_middle_gets_no_token_of_a_beginning(tokenizer):
    from tokenizers.processors import TemplateProcessing

    begin = tokenizer.pad_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.pad_token_id)]
    )
    assert tokenizer("x")["input_ids"] == [tokenizer.pad_token_id, ord("x")]
    assert bridged(tokenizer, None, "x", "user", True, 1)[0] == [ord("x")]


def test_a_role_is_known_or_refused_before_there_is_anything_to_say(tokenizer):
    check_role(tokenizer, ASK, "tool")
    with pytest.raises(DataError, match="unknown role judge"):
        check_role(tokenizer, ASK, "judge")

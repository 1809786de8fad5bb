"""A chat with the policy: answers side by side, preferred into pairs, forked, and asked again of later weights."""

from __future__ import annotations

from typing import Any

import pytest

import rlbench as rb
from rlbench.errors import DataError, SessionError, StateError
from rlbench.session.endpoint.chat import Chat

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def chat(session: Any) -> Chat:
    return session.chat(n=3, system="be brief", max_tokens=8, ignore_eos=True, temperature=2.0).say("sort 52143")


def test_answers_are_the_policys_own_and_no_rollout(session: Any, chat: Chat) -> None:
    def later() -> Any:
        return session.rollout(["sort 31"], n=2, max_tokens=8)

    before = later()
    again = session.chat(n=3, system="be brief", max_tokens=8, ignore_eos=True, temperature=2.0).say("sort 52143")
    assert [one.text for one in again.answers] == [one.text for one in chat.answers]
    assert session.last is before and later().number == before.number + 1
    rollouts = chat.answers[0].rollouts
    assert [one.version for one in chat.answers] == [int(v) for v in rollouts.versions]
    asked = session.tokenizer.decode(rollouts.prompt_ids[0])
    assert "be brief" in asked and asked.endswith("<|user|>sort 52143<|end|><|assistant|>")
    assert "1 · policy v" in repr(chat) and "sort 52143" in chat._repr_mimebundle_()["text/html"]


def test_a_turn_follows_the_preferred_answer_and_pairs_train(session: Any, chat: Chat, put_back: None) -> None:
    preferred = chat.prefer(1)
    further = preferred.say("and 871?")
    assert further.messages[-2] == {"role": "assistant", "content": chat.answers[1].text}
    assert chat.say("x", after=2).messages[-2]["content"] == chat.answers[2].text
    assert "✓ 1" in repr(preferred) and further.chosen is None and not chat.pairs
    further = further.prefer(0, over=2)
    assert len(further.pairs) == 3 and further.pairs[-1]["chosen"] == further.answers[0].text
    batch = rb.data.pairs(further.pairs, session.tokenizer)
    assert session.train_step(batch, loss=rb.rl.dpo(beta=0.1))["grad_norm"] > 0
    session.sync_weights()
    both = chat.again()
    assert [one.version for one in both.answers] == [chat.answers[0].version] * 3 + [session.version] * 3


def test_an_answer_is_forked_as_any_completion(chat: Chat) -> None:
    tree = chat.fork(2, at=3, n=4)
    assert tree.samples == 7 and tree.branches[0].at == 3
    assert all(tree.responses[i][:3].tolist() == tree.responses[2][:3].tolist() for i in tree.branches[0].samples)


def test_what_is_no_answer_or_speaker_is_refused(session: Any, chat: Chat) -> None:
    with pytest.raises(DataError, match="no answer 7"):
        chat.prefer(7)
    with pytest.raises(DataError, match="the same"):
        chat.prefer(1, over=1)
    with pytest.raises(DataError, match="there is none yet"):
        session.chat().fork(0, at=1)
    with pytest.raises(StateError, match="nothing was said"):
        session.chat(system="x").again()
    with pytest.raises(SessionError, match="adapters=2"):
        session.chat(["base", None])
    with pytest.raises(DataError, match="nobody"):
        session.chat([])

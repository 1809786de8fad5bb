"""A reward sees what the policy itself said: what a tool or an environment said is nobody's answer."""

from dataclasses import replace

import numpy as np
import pytest

import rlbench as rb
from rlbench.data import Prompt, Ragged
from rlbench.rewards import contains, exact, math, regex, tags
from rlbench.rewards.reward_model import model
from rlbench.rewards.service import as_payload
from rlbench.trainers.experience.reward_stage import RewardStage
from tests.data.comparing import same
from tests.data.written import written

ASKED = [{"role": "user", "content": "six times seven?"}]
CALL, RESULT = "<tool_call>6*7</tool_call>", r"the tool says \boxed{42} <answer>42</answer>"


def conversation(last, prompt=ASKED, opening=(), **info):
    """A call of a tool, its result, and what the policy said last."""
    said = [
        *opening,
        {"role": "assistant", "content": CALL},
        {"role": "tool", "content": RESULT},
        {"role": "assistant", "content": last},
    ]
    made = written([Prompt(prompt, "42")], [[CALL + RESULT + last]])
    return replace(
        made,
        mask=np.ones(len(made.logprobs), bool),
        turns=np.zeros(len(made.logprobs), np.int32),
        infos=({"turns": 2, "messages": said, **info},),
        turn_rewards=Ragged.from_rows([[np.nan, np.nan]], np.float64),
        env_rewards=np.array([np.nan]),
    )


def rewards_of(last):
    rules = {"exact": exact(), "contains": contains(), "inside": exact(inside="answer"), "regex": regex(r"(\d+)", 1)}
    return {name: float(conversation(last).score(rule).rewards[0]) for name, rule in rules.items()}


def test_what_a_tool_returned_is_not_the_policys_answer():
    assert rewards_of("I do not know.") == dict.fromkeys(("exact", "contains", "inside", "regex"), 0.0)
    assert rewards_of("42") == {"exact": 1.0, "contains": 1.0, "inside": 0.0, "regex": 1.0}
    assert conversation("I do not know.").score(lambda rollout: float("boxed" in rollout.text)).rewards[0] == 0.0


@pytest.mark.slow
def test_mathematics_is_read_in_the_policys_last_turn():
    assert [float(conversation(last).score(math()).rewards[0]) for last in ("I do not know.", "42")] == [0.0, 1.0]


def test_text_turns_answer_transcript_and_messages_are_told_apart():
    (rollout,) = conversation("42").flat
    assert rollout.turns == (CALL, "42") and rollout.answer == "42" and rollout.text == f"{CALL}\n42"
    assert rollout.transcript == CALL + RESULT + "42"
    assert [m["role"] for m in rollout.messages] == ["user", "assistant", "tool", "assistant"]
    (single,) = written(["q"], [["a"]]).flat
    assert single.text == single.answer == single.transcript == "a" and single.turns == ("a",)
    assert single.messages == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def test_rules_of_a_form_look_at_all_turns_of_the_policy_alone():
    form = conversation("<answer>42</answer>")
    assert form.score(tags("tool_call", "answer")).rewards[0] == 1.0
    assert form.score(regex("tool says")).rewards[0] == 0.0 and form.score(regex("6.7")).rewards[0] == 1.0


def test_an_assistants_message_of_the_environment_is_not_the_policys(tmp_path):
    shown = [{"role": "assistant", "content": r"\boxed{42}"}]
    value = conversation("no idea", opening=shown, said=[CALL, "no idea"])
    (rollout,) = value.flat
    assert rollout.turns == (CALL, "no idea") and len(rollout.messages) == 5
    again = rb.Rollouts.from_parquet(value.to_parquet(tmp_path / "rows.parquet"))
    assert next(again.flat).turns == rollout.turns and same(again, value)


def test_an_episode_says_whose_an_assistants_message_is():
    from rlbench.envs.episode import Episode, Limits

    own = Episode(Prompt(ASKED), [1], Limits(99, 9, None, 300), object, None, lambda ids: "".join(map(chr, ids)))
    own.messages = [{"role": "assistant", "content": "shown"}]
    own.extend([ord("h"), ord("i")], [0.0, 0.0])
    own.turn("stop")
    assert own.info["said"] == ["hi"] and [m["content"] for m in own.info["messages"]] == ["shown", "hi"]
    own.messages = own.messages[1:]
    assert "said" not in own.info


def test_functions_of_other_systems_and_services_see_the_same():
    seen = {}

    def of_trl(prompts, completions, **columns):
        seen["trl"] = (prompts[0], completions[0])
        return [0.0] * len(completions)

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        seen["verl"] = solution_str
        return 0.0

    opening = [{"role": "user", "content": "you have a calculator"}]
    value = conversation("no idea", opening=opening)
    value.score(of_trl)
    value.score(compute_score)
    asked, said = seen["trl"]
    assert asked == [*ASKED, *opening] and [m["role"] for m in said] == ["assistant", "tool", "assistant"]
    assert seen["verl"] == f"{CALL}\nno idea"
    conversation("no idea", prompt="six times seven?").score(of_trl)
    assert seen["trl"] == ("six times seven?", f"{CALL}\nno idea")
    sent = as_payload(list(value.flat))
    assert sent["responses"] == [f"{CALL}\nno idea"] and [m["role"] for m in sent["messages"][0]][2:4] == [
        "assistant",
        "tool",
    ]
    assert RESULT in sent["query"][0]


def test_a_reward_model_reads_the_conversation_as_a_chat():
    class Template:
        def apply_chat_template(self, messages, **options):
            seen.extend(messages)
            return {"input_ids": [1]}

    seen = []
    model("unused").token_ids(next(conversation("42").flat), Template())
    assert [m["role"] for m in seen] == ["user", "assistant", "tool", "assistant"]


def test_a_trainers_reward_function_is_given_what_the_policy_said():
    seen = []

    def combined(models, labels, queries, references, label_map):
        seen.extend(queries)
        return [0.0] * len(queries)

    RewardStage(None, None, combined, None, None)._called(conversation("no idea"), [])
    assert seen == [f"{CALL}\nno idea"]

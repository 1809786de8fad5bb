"""What is taken as an environment, and that every sample gets one of its own."""

import cloudpickle
import pytest

from rlbench.data import Prompt
from rlbench.envs import Env, Step
from rlbench.envs.episode import Episode, Limits, plain
from rlbench.envs.protocol import check_env, unpacked
from rlbench.errors import DataError


class Keeping(Env):
    def __init__(self, start=0):
        self.seen = [start]

    def step(self, turn):
        return Step()


@pytest.mark.parametrize("env", [Keeping, Keeping(), lambda: Keeping()])
def test_every_sample_gets_an_environment_of_its_own(env):
    check_env(env)
    make = unpacked(cloudpickle.dumps(env))
    one, two = make(), make()
    one.seen.append(1)
    assert two.seen == [0] and one is not two


def test_what_is_no_environment_is_refused_where_it_is_seen():
    class Stepp:
        def stepp(self, turn): ...

    with pytest.raises(DataError, match=r"no step.*nearest: stepp"):
        check_env(Stepp)
    with pytest.raises(DataError, match="no step"):
        check_env("env")
    with pytest.raises(DataError, match=r"env\(\) gave int"):
        unpacked(cloudpickle.dumps(lambda: 3))()
    with pytest.raises(DataError, match="cannot be loaded"):
        unpacked(b"rubbish")


def episode(**limits):
    given = {"model_len": 100, "turns": 3, "total": None, "vocabulary": 50} | limits
    made = Episode(Prompt("p"), [1, 2], Limits(**given), Keeping, None, lambda ids: "".join(map(chr, ids)))
    made.begin()
    made.opened(None)
    return made


def test_what_a_step_says_is_kept_as_json_whatever_it_is():
    one = episode()
    one.extend([3], [-0.5])
    one.turn("stop")
    assert one.stepped(Step([7], info={"n": 1, "obj": {1, 2}, "odd": {(1, 2): 3}}), "stop", True)
    assert one.steps == [{"n": 1, "obj": "{1, 2}", "odd": "{(1, 2): 3}"}]
    assert plain(float("nan")) != plain(float("nan")) and one.info["turns"] == 1


@pytest.mark.parametrize(
    ("step", "match"),
    [
        ("done", "wanted rb.envs.Step"),
        (None, "returned NoneType"),
        (Step(reward=float("nan")), "finite"),
        (Step(reward="x"), "finite"),
        (Step(info=3), "info is int"),
        (Step([60]), "vocabulary of 50"),
        (Step({"role": 1}), "wanted a text"),
    ],
)
def test_a_wrong_answer_is_refused(step, match):
    one = episode()
    one.extend([3], [-0.5])
    one.turn("stop")
    with pytest.raises(DataError, match=match):
        one.stepped(step, "stop", True)


def test_turn_rewards_have_an_entry_for_every_turn_with_tokens():
    one = episode()
    for reward in (1.0, None):
        one.extend([3, 4], [-0.5, -0.5])
        one.turn("stop")
        one.stepped(Step([7], reward), "stop", True)
    assert one.turn_rewards[0] == 1.0 and len(one.turn_rewards) == 2
    one.extend([5], [-0.1])
    one.stopped()
    assert len(one.turn_rewards) == 3 and one.info["messages"][-1]["content"] == chr(5)
    assert one.mask == [True, True, False, True, True, False, True] and one.turns == [0, 0, 0, 1, 1, 1, 2]


class Paying(Keeping):
    gives = 2.0

    def end_reward(self):
        return self.gives


@pytest.mark.parametrize(("gives", "said", "wanted"), [(2.0, 0.5, 2.5), (2.0, None, 2.0), (None, 0.5, 0.5)])
def test_a_reward_at_the_end_is_added_to_that_of_the_last_turn(gives, said, wanted):
    one = episode()
    one.env = Paying()
    assert not one.owes_reward, "no turn yet"
    one.extend([3], [-0.5])
    one.turn("stop")
    assert not one.stepped(Step(reward=said, done=True), "stop", True) and one.owes_reward
    one.paid(gives)
    assert one.turn_rewards == [wanted] and not one.owes_reward
    with pytest.raises(DataError, match=r"end_reward\(\) gave 'x'"):
        one.paid("x")


def test_nothing_is_owed_by_what_has_no_reward_at_the_end_or_was_ended_by_an_error():
    for env, error in ((Keeping(), None), (Paying(), ValueError("out of order"))):
        one = episode()
        one.env = env
        one.extend([3], [-0.5])
        one.turn("stop")
        one.stepped(Step(done=True), "stop", True)
        if error is not None:
            one.failed("step", error)
        assert not one.owes_reward

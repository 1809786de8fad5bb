"""An environment's options at the driver: what they are, and what would have no effect or cannot be."""

import pytest

from rlbench.engines.turns import TURN_OPTIONS, split_options
from rlbench.envs import Env, Step
from rlbench.envs.protocol import unpacked
from rlbench.errors import DataError


class Counting(Env):
    def step(self, turn):
        return Step(done=True)


def test_options_are_told_apart_from_sampling():
    job, rest = split_options(Counting, {"max_turns": 3, "max_tokens": 8, "env_timeout_s": None})
    assert rest == {"max_tokens": 8} and (job.max_turns, job.max_total_tokens, job.timeout_s) == (3, None, None)
    assert unpacked(job.blob)().step(None) == Step(done=True)
    default, _ = split_options(Counting(), {})
    assert (default.max_turns, default.timeout_s) == (TURN_OPTIONS["max_turns"], TURN_OPTIONS["env_timeout_s"])
    assert split_options(None, {"max_tokens": 8}) == (None, {"max_tokens": 8})


@pytest.mark.parametrize(
    ("env", "options", "match"),
    [
        (None, {"max_turns": 2}, "max_turns would have no effect"),
        (Counting, {"max_turns": 0}, "max_turns=0"),
        (Counting, {"max_turns": None}, "max_turns=None"),
        (Counting, {"max_turns": True}, "max_turns=True"),
        (Counting, {"max_total_tokens": 2.5}, r"max_total_tokens=2\.5"),
        (Counting, {"env_timeout_s": -1}, "env_timeout_s=-1"),
        ("env", {}, "no step"),
    ],
)
def test_what_cannot_be_is_refused(env, options, match):
    with pytest.raises(DataError, match=match):
        split_options(env, options)

"""How functions are run: plain, async, in batches, in processes of their own; hangs, deaths, failures, interrupts."""

import asyncio
import functools
import os
import pickle
import sys
import threading
import time

import numpy as np
import pytest

import rlbench as rb
from rlbench.errors import DataError, Stopped
from rlbench.runtime import processes
from tests.clock import HandClock, until
from tests.data.values import rollouts
from tests.rewards.values import answers, interrupting, nothing_left

pytestmark = pytest.mark.slow

# -- what a function may return


@pytest.mark.parametrize(
    "given",
    [
        lambda r: {"reward": r.index, "even": r.index % 2 == 0},
        lambda r: rb.rewards.Reward(r.index, {"even": r.index % 2 == 0}),
        lambda r: {"even": np.float32(r.index % 2 == 0), "reward": np.array(r.index)},
    ],
)
def test_a_reward_may_say_what_it_is_made_of(given):
    scored = rollouts().score(given)
    assert scored.rewards.tolist() == [0, 1, 2, 3, 4, 5]
    assert {k: v.tolist() for k, v in scored.components.items()} == {"even": [1, 0, 1, 0, 1, 0]}
    assert scored.components["even"].dtype == np.float64


def test_a_component_that_only_some_have_is_not_known_for_the_others():
    scored = rollouts().score(lambda r: {"reward": 1, "late": 2} if r.index > 3 else 1)
    np.testing.assert_array_equal(scored.components["late"], [np.nan] * 4 + [2, 2])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("1.5", "str '1.5' on completion 0; wanted one number"),
        (float("nan"), "float 'nan'"),
        (float("inf"), "float 'inf'"),
        (10**400, "int '1000"),
        ({"rewards": 1}, "a mapping without 'reward'; nearest: rewards"),
        ({"reward": None}, "dict"),
        ({"reward": 1, "a": "b"}, "component 'a' as str 'b'"),
        (rb.rewards.Reward(1.0, {"a": float("nan")}), "component 'a'"),
        (rb.rewards.Reward(1.0, [1]), "components that are list"),
    ],
)
def test_what_is_no_finite_number_is_refused_as_it_was_given(given, said):
    with pytest.raises(DataError, match="completion 0") as error:
        rollouts().score(lambda r: given)
    assert said in str(error.value)


def test_scored_anew_nothing_of_the_old_reward_is_left():
    first = rollouts().score(lambda r: {"reward": 1, "a": 1} if r.index else 1 / 0, on_error="keep")
    assert first.reward_errors and first.components
    for second in (first.score([0] * 6), first.score(lambda r: 0)):
        assert not second.reward_errors and not second.components and second.rewards.tolist() == [0] * 6
    assert first.score([0] * 6).reward_seconds is None


# -- options


def plain(rollout):
    return float(rollout.index)


async def later(rollout):
    await asyncio.sleep(0)
    return float(rollout.index)


@pytest.mark.parametrize(
    ("fn", "options", "said"),
    [
        (plain, {"timeout_s": 1}, "isolate=True"),
        (plain, {"concurrency": 2}, "isolate=True"),
        (plain, {"memory_gib": 1}, "add isolate=True"),
        (plain, {"isolate": True, "timeout_s": 0}, "timeout_s: wanted a number above 0"),
        (plain, {"isolate": True, "concurrency": 1.5}, "concurrency: wanted a whole number"),
        (plain, {"isolate": True, "memory_gib": "much"}, "memory_gib: wanted a number"),
        (later, {"isolate": True}, "is async"),
        (later, {"memory_gib": 1}, "add isolate=True"),
        (plain, {"on_error": "kep"}, "nearest: keep"),
        ([0] * 6, {"timeout_s": 1}, "timeout_s would have no effect"),
        ([0] * 6, {"on_error": "keep"}, "on_error would have no effect"),
        (rb.rewards.math(), {"timeout_s": 1}, "timeout_s would have no effect on math()"),
        (rb.rewards.weighted({"a": (plain, 1)}), {"isolate": True}, "rb.rewards.function"),
    ],
)
def test_an_option_without_effect_or_sense_is_refused(fn, options, said):
    with pytest.raises(DataError) as error:
        rollouts().score(fn, **options)
    assert said in str(error.value)


# -- async


def test_async_functions_run_side_by_side_within_a_limit():
    now, most = [], []

    async def reward(rollout):
        now.append(rollout.index)
        most.append(len(now))
        await asyncio.sleep(0.01)
        now.remove(rollout.index)
        return rollout.index

    assert rollouts().score(reward).rewards.tolist() == [0, 1, 2, 3, 4, 5] and max(most) == 6
    most.clear()
    assert rollouts().score(reward, concurrency=2).rewards.tolist() == [0, 1, 2, 3, 4, 5] and max(most) == 2


def test_an_async_reward_works_where_a_loop_is_running_already_as_in_jupyter():
    async def cell():
        return rollouts().score(later)

    with nothing_left():
        assert asyncio.run(cell()).rewards.tolist() == [0, 1, 2, 3, 4, 5]


class Judge:
    async def __call__(self, rollout, scale=1.0):
        return scale * rollout.index


@pytest.mark.parametrize("fn", [Judge(), functools.partial(Judge().__call__, scale=1.0)], ids=["object", "partial"])
def test_what_is_called_to_give_a_coroutine_is_async_too(fn):
    assert rollouts().score(fn).rewards.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_coroutine_that_takes_too_long_is_cancelled_and_the_others_go_on():
    ended = []

    async def reward(rollout):
        try:
            await asyncio.sleep(60 if rollout.index == 2 else 0)
        except asyncio.CancelledError:
            ended.append(rollout.index)
            raise
        return 1.0

    with nothing_left(), pytest.raises(DataError, match=r"took longer than 3 s on completion 2") as error:
        rollouts().score(reward, timeout_s=3)  # far more than the others need
    assert ended == [2] and error.value.partial.rewards.tolist() == [1.0] * 5


def test_a_timeout_of_the_functions_own_is_an_error_like_any():
    async def reward(rollout):
        raise TimeoutError("the judge is asleep")

    with pytest.raises(DataError, match="raised TimeoutError: the judge is asleep"):
        rollouts().score(reward, timeout_s=5)


def test_interrupted_async_scoring_keeps_what_there_is_and_leaves_no_thread():
    cancelled = []

    async def reward(rollout):
        if rollout.index < 3:
            return float(rollout.index)
        if rollout.index == 5:
            await asyncio.sleep(0.05)
            os.kill(os.getpid(), 2)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.3)  # as one that closes its connections: it is waited for
            cancelled.append(rollout.index)
            raise

    with nothing_left(), pytest.raises(Stopped, match="3 of 6") as stopped:
        rollouts().score(reward)
    assert stopped.value.partial.rewards.tolist() == [0, 1, 2] and sorted(cancelled) == [3, 4, 5]
    assert threading.active_count() >= 1 and rollouts().score(later).rewards.tolist() == [0, 1, 2, 3, 4, 5]


# -- batches


def test_a_batched_function_gets_all_completions_or_so_many_at_a_time():
    sizes = []

    def reward(given):
        sizes.append([r.index for r in given])
        return [r.index for r in given]

    assert rollouts().score(rb.rewards.batched(reward)).rewards.tolist() == [0, 1, 2, 3, 4, 5]
    assert rollouts().score(rb.rewards.batched(reward, 4)).rewards.tolist() == [0, 1, 2, 3, 4, 5]
    assert sizes == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3], [4, 5]]


def test_a_batch_may_be_async_and_its_values_may_have_components_or_fail_alone():
    @functools.partial(rb.rewards.batched, size=3)
    async def reward(given):
        return [None if r.index == 4 else {"reward": r.index, "twice": 2 * r.index} for r in given]

    scored = rollouts().score(reward, on_error="keep")
    np.testing.assert_array_equal(scored.rewards, [0, 1, 2, 3, np.nan, 5])
    np.testing.assert_array_equal(scored.components["twice"], [0, 2, 4, 6, np.nan, 10])
    assert [e.index for e in scored.reward_errors] == [4]


@pytest.mark.parametrize(
    ("value", "said"), [([1, 2], "gave 2 values for 6 completions"), (1.0, "wanted a list of 6 numbers")]
)
def test_a_batch_of_another_length_is_refused(value, said):
    with pytest.raises(DataError, match=said):
        rollouts().score(rb.rewards.batched(lambda given: value))


# -- errors


def test_all_are_tried_and_the_first_failure_is_shown_with_the_count_and_the_rest():
    tried = []

    def reward(rollout):
        tried.append(rollout.index)
        return 1 / (rollout.index % 3)

    with pytest.raises(DataError, match="ZeroDivisionError: division by zero on completion 0") as error:
        rollouts().score(reward)
    assert tried == [0, 1, 2, 3, 4, 5] and "1 more of 6 failed" in str(error.value)
    assert error.value.partial.rewards.tolist() == [1, 0.5, 1, 0.5]
    assert "return 1 / (rollout.index % 3)" in error.value.user_line
    assert "ZeroDivisionError" in rb.last_traceback()


def test_where_none_has_a_reward_there_is_no_partial():
    with pytest.raises(DataError) as error:
        rollouts().score(lambda r: sys.exit())
    assert error.value.partial is None and "SystemExit" in str(error.value)


def test_seconds_are_known_for_each_completion(monkeypatch):
    clock = HandClock()
    monkeypatch.setattr("time.perf_counter", clock)
    scored = rollouts().score(lambda r: clock.pass_by(r.index) or 1)
    assert scored.reward_seconds.tolist() == [0, 1, 2, 3, 4, 5]


# -- processes of their own


def test_what_hangs_dies_crashes_or_takes_all_memory_costs_its_own_completion_alone():
    def reward(rollout):
        if rollout.index == 0:
            10**10**10  # in C: no signal handler of Python runs meanwhile
        if rollout.index == 1:
            os._exit(3)
        if rollout.index == 2:
            os.kill(os.getpid(), 11)
        if rollout.index == 3:
            return len(bytearray(8 << 30))
        print("a lot" * 1000, flush=True)
        return {"reward": rollout.index, "a": 1}

    with nothing_left():
        scored = rollouts().score(reward, isolate=True, timeout_s=8, memory_gib=1, on_error="keep")
    np.testing.assert_array_equal(scored.rewards, [np.nan] * 4 + [4, 5])
    said = [e.error for e in scored.reward_errors]
    assert said[0] == "the reward took longer than 8 s" and "exited with code 3" in said[1]
    assert "SIGSEGV" in said[2] and "MemoryError" in said[3]
    assert "return len(bytearray(8 << 30))" in scored.reward_errors[3].line


def test_few_processes_serve_many_completions():
    scored = rollouts().score(lambda r: os.getpid(), isolate=True, concurrency=2)
    assert 1 <= len(set(scored.rewards.tolist())) <= 2 and os.getpid() not in scored.rewards


def test_an_isolated_batch_is_timed_as_one():
    def reward(given):
        time.sleep(60 if given[0].index == 2 else 0)
        return [r.index for r in given]

    scored = rollouts().score(rb.rewards.batched(reward, 2), isolate=True, timeout_s=5, on_error="keep")
    np.testing.assert_array_equal(scored.rewards, [0, 1, np.nan, np.nan, 4, 5])


def gone(pid):
    """Wait until a process that is being killed is gone; whoever inherits it may not have reaped it."""
    until(lambda: processes.start_time(pid) is None)


def test_what_a_function_starts_dies_with_it():
    def reward(rollout):
        import subprocess

        child = subprocess.Popen(["sleep", "600"])
        if rollout.index == 0:
            time.sleep(60)
        return child.pid

    scored = rollouts()[:1].score(reward, isolate=True, timeout_s=5, concurrency=1, on_error="keep")
    assert np.isnan(scored.rewards[0])
    gone(int(scored.rewards[1]))


def test_interrupted_in_processes_the_rewards_there_are_are_kept_and_no_process_is_left():
    with nothing_left(), pytest.raises(Stopped, match=r"[34] of 6") as stopped:
        rollouts().score(interrupting(at=4), isolate=True, concurrency=1)
    assert stopped.value.partial.rewards.tolist() == [1.0] * stopped.value.partial.samples


def test_a_function_that_cannot_travel_says_so_and_starts_nothing():
    lock = threading.Lock()
    with nothing_left(), pytest.raises(DataError, match="cannot be sent to a process of its own"):
        rollouts().score(lambda r: lock.locked(), isolate=True)


def test_a_module_that_is_missing_there_is_one_error_not_one_per_completion():
    class Gone:
        def __reduce__(self):
            return __import__, ("no_such_module_here",)

        def __call__(self, rollout):
            return 1.0

    said = r"cannot be run in a process of its own: .*no_such_module_here"
    with nothing_left(), pytest.raises(DataError, match=said):
        rollouts().score(Gone(), isolate=True)


# -- values


def test_a_function_with_options_is_a_value():
    made = rb.rewards.function(plain, isolate=True, timeout_s=3)
    assert repr(made) == "function(plain, timeout_s=3, isolate=True)"
    assert repr(rb.rewards.batched(plain, 4)) == "batched(plain, size=4)"
    assert made == rb.rewards.function(plain, isolate=True, timeout_s=3)
    assert pickle.loads(pickle.dumps(rb.rewards.function(rb.rewards.exact(), isolate=True))).isolate
    rollout = next(rollouts().flat)
    assert rb.rewards.function(lambda r: {"reward": 2, "a": 1})(rollout) == rb.rewards.Reward(2.0, {"a": 1.0})
    with pytest.raises(DataError, match="ZeroDivisionError"):
        rb.rewards.function(lambda r: 1 / 0)(rollout)


# -- the shape of an answer


@pytest.mark.parametrize("how", ["batched", "numbers"])
def test_a_mapping_by_places_gives_its_values_and_what_has_no_order_is_refused(how):
    def scored(given):
        return answers("a", "b", "c").score(rb.rewards.batched(lambda many: given) if how == "batched" else given)

    if how == "batched":
        assert scored({2: 0.25, 0: 0.5, 1: 0.75}).rewards.tolist() == [0.5, 0.75, 0.25]
    for given, token in (({0.5, 0.75, 1.0}, "set"), ({1: 0.5, 2: 0.75, 3: 1.0}, "keys 1, 2, 3"), ({}, "none")):
        with pytest.raises(DataError, match=token):
            scored(given)
    assert answers("a", "b", "c").score({2: 0.25, 0: 0.5, 1: 0.75}).rewards.tolist() == [0.5, 0.75, 0.25]


def test_a_function_of_trl_for_one_completion_gives_its_value_by_place():
    def of_trl(completions, **columns):
        return {0: 0.5}

    assert answers("a").score(of_trl).rewards.tolist() == [0.5]
    with pytest.raises(DataError, match="set"):
        answers("a").score(lambda completions, **columns: {0.5})

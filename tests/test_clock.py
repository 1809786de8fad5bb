"""The wait of the tests: what it returns, and what its failure names."""

import itertools

import pytest

from tests.clock import until


def test_it_asks_until_the_condition_holds_and_returns_its_value():
    values = itertools.chain([0, None, ""], itertools.repeat("ready"))
    assert until(lambda: next(values)) == "ready"


def test_a_failure_names_what_was_waited_for():
    never = {"open": 0}
    with pytest.raises(AssertionError, match=r"never\[.open.\] == 1"):
        until(lambda: never["open"] == 1, seconds=0.0)
    with pytest.raises(AssertionError, match="the endpoint opens"):
        until(lambda: never["open"], seconds=0.0, what="the endpoint opens")
    with pytest.raises(AssertionError, match="'open': 0"):
        until(lambda: never["open"], seconds=0.0, what=lambda: never)

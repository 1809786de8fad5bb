"""What a user's code raises to end its process is an error like others, under its own name and with its own line."""

import argparse
import pickle
import sys
import threading

import pytest

from rlbench.errors import Stopped
from rlbench.traces import user_line
from rlbench.user_code import UserExit, user_code


def raised(work):
    try:
        with user_code():
            work()
    except BaseException as error:
        return error
    raise AssertionError("it did not raise")


def elsewhere(work):
    """What comes of it in a thread that is not the main one, as everything on a worker."""
    found = []
    thread = threading.Thread(target=lambda: found.append(raised(work)))
    thread.start()
    thread.join()
    return found[0]


def leaves():
    sys.exit(3)  # mine


def throws(error):
    raise error


def test_an_exit_is_an_exception_with_its_name_and_line():
    error = raised(leaves)
    assert isinstance(error, Exception) and type(error).__name__ == "SystemExit" and str(error).startswith("3 (")
    assert user_line(error).source == "sys.exit(3)  # mine"
    assert str(raised(lambda: sys.exit())) == "the code asked to end its process, which goes on"


def test_a_parser_says_what_it_refused():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    assert "2 (argparse: unrecognized arguments: --bad)" in str(
        raised(lambda: parser.parse_args(["--model", "a", "--bad"]))
    )
    assert "required: --model" in str(raised(lambda: parser.parse_args([])))


@pytest.mark.parametrize("kind", [GeneratorExit, type("Odd", (BaseException,), {})])
def test_whatever_is_no_exception_becomes_one(kind):
    error = raised(lambda: throws(kind("why")))
    assert isinstance(error, UserExit) and type(error).__name__ == kind.__name__ and "why" in str(error)


def test_an_interrupt_in_the_main_thread_is_ctrl_c_and_elsewhere_the_codes_own():
    assert type(raised(lambda: throws(KeyboardInterrupt()))) is KeyboardInterrupt
    own = elsewhere(lambda: throws(KeyboardInterrupt()))
    assert isinstance(own, UserExit) and type(own).__name__ == "KeyboardInterrupt"


@pytest.mark.parametrize("error", [Stopped("asked"), ValueError("mine"), StopIteration(4)])
def test_stops_and_exceptions_pass_as_they_are(error):
    assert raised(lambda: throws(error)) is error
    assert elsewhere(lambda: throws(error)) is error


def test_it_travels():
    error = pickle.loads(pickle.dumps(raised(leaves)))
    assert isinstance(error, UserExit) and type(error).__name__ == "SystemExit" and str(error).startswith("3 (")

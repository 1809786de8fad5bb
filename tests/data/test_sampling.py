"""Sampling options as values: which reshape the distribution, and what is said of it."""

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from rlbench.data import join
from rlbench.data.prompts.sampling import notes_of, reshaped_by, sampling_options

from ..modules import batch_of


def test_options_of_vllms_own_object_are_those_that_were_set():
    assert sampling_options(SamplingParams()) == {"max_tokens": 16}
    assert sampling_options(SamplingParams(max_tokens=None)) == {"max_tokens": None}
    given = SamplingParams(
        n=3,
        top_p=0.9,
        max_tokens=5,
        stop=["x"],
        logprobs=1,
        seed=4,
        allowed_token_ids=[1, 2],
        logit_bias={3: 1.0},
        structured_outputs=StructuredOutputsParams(regex="[0-9]"),
    )
    assert sampling_options(given) == {
        "n": 3,
        "top_p": 0.9,
        "max_tokens": 5,
        "stop": ["x"],
        "seed": 4,
        "allowed_token_ids": [1, 2],
        "logit_bias": {3: 1.0},
        "structured_outputs": {"regex": "[0-9]"},
    }
    assert sampling_options(SamplingParams(logprobs=5))["logprobs"] == 5


def test_reshaping_options_are_typed_as_they_were_set():
    assert reshaped_by({"temperature": 0.3, "max_tokens": 9, "top_p": 1.0, "top_k": -1, "stop": ["a"]}) == ()
    assert reshaped_by({"top_p": 0.9, "min_tokens": 2}) == ("top_p=0.9", "min_tokens=2")


@pytest.mark.parametrize(
    ("sampling", "lengths", "notes"),
    [
        ({}, [16, 16], ["2 of 8"]),
        ({}, [5], []),
        ({"max_tokens": 16}, [16], []),
        ({"max_tokens": None}, [99], []),
        ({"top_p": 0.9, "max_tokens": 4}, [], ["top_p=0.9"]),
        ({"top_p": 0.9, "max_tokens": 4, "temperature": 0.0}, [], []),
    ],
)
def test_notes_tell_the_default_length_and_what_reshaped(sampling, lengths, notes):
    told = notes_of(sampling, np.array(lengths, int), 8)
    assert len(told) == len(notes) and all(wanted in note for wanted, note in zip(notes, told, strict=True))


def test_a_joined_batch_was_reshaped_by_what_reshaped_its_parts():
    whole = join(batch_of([(2, 3)]), batch_of([(2, 3)], reshaped_by=("top_p=0.9",)))
    assert whole.reshaped_by == ("top_p=0.9",)

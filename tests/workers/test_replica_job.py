"""What a replica reports while it generates: lengths of what is finished, and the first texts, in a few bytes."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams

from rlbench.data.prompts.sampling import DERIVED
from rlbench.data.rollouts.jobs import GenerateJob
from rlbench.dispatch.context import CallContext
from rlbench.engines.inference import BY_CALL
from rlbench.errors import DataError
from rlbench.workers.replica.drawing import extend
from rlbench.workers.replica.job import (
    SAMPLING_OPTIONS,
    ProgressReporter,
    Sample,
    check_job,
    decode_texts,
    length_histogram,
)


@given(st.lists(st.integers(1, 100_000), max_size=60))
def test_a_histogram_of_lengths_counts_as_numpy_does(lengths):
    told = length_histogram(lengths)
    width = told["width"]
    assert width & (width - 1) == 0 and len(told["counts"]) <= 24
    assert width == 1 or max(lengths) >= width // 2 * 24, "no wider than it must be"
    edges = np.arange(len(told["counts"]) + 1) * width
    assert told["counts"] == (np.histogram(lengths, edges)[0].tolist() if lengths else [])
    assert sum(told["counts"]) == len(lengths)


def test_texts_so_far_are_told_where_they_are_asked_for_and_decoding_them_rests():
    context, decoded = CallContext(), []

    def decode(ids):
        decoded.append(ids)
        return "".join(map(str, ids))

    progress, told = ProgressReporter(context, decode), [Sample(0, 1, [1, 2]), Sample(0, 0, [])]
    progress.tick(0, 2, 2, force=True)
    assert "texts" not in context.progress and not decoded
    progress.tick(0, 2, 2, told=told, force=True)
    assert context.progress["texts"] == [(0, 1, "12"), (0, 0, "")]
    progress._texts_due = float("inf")  # as behind texts that took long
    told[0].tokens.append(3)
    progress.tick(0, 2, 2, told=told, force=True)
    assert context.progress["texts"][0] == (0, 1, "12") and len(decoded) == 2


def test_the_first_finished_texts_are_told_cut_and_the_rest_only_counted():
    context, decoded = CallContext(), []

    def decode(ids):
        decoded.append(ids)
        return "x" * 10_000

    progress = ProgressReporter(context, decode)
    for length in (5, 2000, 7):
        progress.finish(Sample(0, 0, tokens=list(range(length))))
    progress.tick(3, 0, 3, force=True)
    assert [len(ids) for ids in decoded] == [5, 48]
    assert [len(text) for text in context.progress["first"]] == [120, 120]
    assert sum(context.progress["lengths"]["counts"]) == 3
    assert len(json.dumps(context.progress)) < 600


def test_without_a_tokenizer_lengths_are_told_alone():
    context = CallContext()
    progress = ProgressReporter(context)
    progress.finish(Sample(0, 0, tokens=[1, 2]))
    progress.tick(1, 0, 1, force=True)
    assert context.progress["first"] == [] and context.progress["lengths"] == {"width": 1, "counts": [0, 0, 1]}


def test_what_was_told_does_not_change_afterwards():
    context = CallContext()
    progress = ProgressReporter(context, str)
    progress.finish(Sample(0, 0, tokens=[1]))
    progress.tick(1, 1, 2, force=True)
    told = json.dumps(context.progress)
    progress.finish(Sample(0, 1, tokens=[1]))
    assert json.dumps(context.progress) == told


FIELDS = [name for name in SamplingParams().__struct_fields__ if name[0] != "_" and name not in DERIVED]


@pytest.mark.parametrize("name", sorted({*FIELDS} - {*SAMPLING_OPTIONS, *BY_CALL}))
def test_a_field_of_vllms_parameters_that_does_not_act_is_refused(name):
    with pytest.raises(DataError, match=name):
        check_job(GenerateJob([[1]], 1, {name: 1}, np.zeros((1, 1), np.int64)))


def test_what_acts_is_a_field_of_vllms_parameters():
    ours = {"first_token_temperature"}  # two requests of vLLM's
    assert {*SAMPLING_OPTIONS, *BY_CALL} - ours <= {*FIELDS}


@pytest.mark.parametrize(
    ("tokens", "stop", "whole", "wanted"),
    [("2", "2", False, ""), ("12", "2", False, "1"), ("2", "2", True, "2"), ("1.2x", "2", True, "1.2")],
)
def test_a_completion_that_is_its_stop_string_has_no_text(tokens, stop, whole, wanted):
    class Part:
        token_ids, logprobs, text, finish_reason, stop_reason = [ord(c) for c in tokens], None, "", "stop", stop
        routed_experts = None

    class Output:
        outputs, finished = [Part], True

    sample = Sample(0, 0)
    extend(sample, Output)
    decode = lambda ids: "".join(map(chr, ids))  # noqa: E731
    assert decode_texts([sample], decode, {"include_stop_str_in_output": whole}) == [wanted]
    sample.stop = ""
    assert decode_texts([sample], decode, {}) == [tokens]


def test_experts_stand_beside_the_tokens_of_the_context_that_they_are_of():
    """A request brings those of all its tokens but the last; where a context was written anew it counts from there."""
    rows = np.arange(100, dtype=np.int16).reshape(-1, 1, 1)
    sample = Sample(0, 0)
    sample.take_routing(rows[:4])
    sample.take_routing(rows[90:96])  # the next turn of the same context: of its first four tokens these were said
    assert sample.routing.ravel().tolist() == [0, 1, 2, 3, 94, 95]
    sample.take_routing(rows[50:53], begin=8)
    sample.take_routing(rows[60:65], begin=8)
    assert sample.routing.ravel().tolist() == [0, 1, 2, 3, 94, 95, -1, -1, 50, 51, 52, 63, 64]
    sample.take_routing(None, begin=20)
    assert len(sample.routing) == 13

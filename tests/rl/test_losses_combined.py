"""Several losses in one step: what is added, what each says, what all of them need, and what cannot be added."""

from dataclasses import replace

import pytest
import torch

import rlbench.rl as rl
from rlbench.errors import LossError
from rlbench.rl.losses import resolve
from rlbench.rl.types import needs_of
from tests.rl.reference import make_inputs

TOKENS = {"aggregation": "token-mean"}


def gradient(loss, inputs):
    logprobs = inputs.logprobs.detach().requires_grad_()
    per_token, metrics = loss(replace(inputs, logprobs=logprobs))
    (made,) = torch.autograd.grad(per_token[inputs.mask].sum(), logprobs)
    return made[inputs.mask], metrics


def own(inputs):
    return (inputs.logprobs - inputs.old_logprobs) ** 2, {"distance": (inputs.logprobs - inputs.old_logprobs).abs()}


class Average:
    """A part that keeps a state."""

    def __init__(self):
        self.state = {"mean": torch.zeros(())}

    def __call__(self, inputs):
        return inputs.logprobs * (1 - self.state["mean"]), {"seen": self.state["mean"]}

    def update(self, metrics):
        self.state["mean"] = self.state["mean"] + metrics["seen"] + 1


def test_the_gradient_is_the_weighted_sum_and_each_part_says_its_own():
    inputs = make_inputs(seed=3)
    both = resolve({"grpo": rl.grpo(**TOKENS), "sft": ("sft", 0.25), "own": (own, 2)})
    made, metrics = gradient(both, inputs)
    parts = [gradient(loss, inputs) for loss in (rl.grpo(**TOKENS), rl.sft(), own)]
    torch.testing.assert_close(made, parts[0][0] + 0.25 * parts[1][0] + 2 * parts[2][0])
    assert parts[0][1].keys() <= metrics.keys()
    mask = inputs.mask
    torch.testing.assert_close(metrics["own/distance"][mask], parts[2][1]["distance"][mask])
    torch.testing.assert_close(metrics["own/loss"][mask], own(inputs)[0][mask])
    assert repr(both) == f"{{'grpo': {rl.grpo(**TOKENS)!r}, 'sft': ({rl.sft()!r}, 0.25), 'own': ({own!r}, 2.0)}}"


def test_what_one_part_needs_all_of_it_needs():
    def hidden(inputs):
        return inputs.logprobs, {}

    hidden.needs = ("hidden_states",)
    both = resolve({"grpo": rl.grpo(kl_coef=0.1, tokens=rl.high_entropy(0.5), **TOKENS), "hidden": hidden})
    assert needs_of(both) == ("hidden_states",) and both.needs_plan and both.needs_reference
    inputs = make_inputs(seed=1)
    planned = replace(inputs, channels=both.plan(inputs))
    torch.testing.assert_close(
        gradient(both, planned)[0], gradient(both.parts["grpo"][0], planned)[0] + gradient(hidden, planned)[0]
    )
    assert resolve({"sft": "sft"}).needs_reference == rl.sft().needs_reference
    assert resolve({"own": own}).needs_reference is None, "a function is asked by what it reads"


def test_a_parts_state_is_its_own_and_changes_in_update_alone():
    first = Average()
    both = resolve({"sft": "sft", "own": first})
    inputs = make_inputs(seed=2)
    both(inputs)
    assert both.state["own/mean"] == 0 and first.state["mean"] == 0
    both.update({"own/seen": 2.0, "seen": 9.0})
    assert both.state["own/mean"] == 3 and first.state["mean"] == 0
    _, metrics = both(inputs)
    assert metrics["own/seen"] == 3 and both.state_name == "sft+own"


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({}, "one at least"),
        ({"a": "grpo", "b": "sft"}, "seq-mean-token-mean and token-mean"),
        ({"a": ("sft", "much")}, "weight of part 'a'"),
        ({"a": ("sft", True)}, "weight of part 'a'"),
        ({"a/b": "sft"}, "without a slash"),
        ({"a": "sftt"}, "unknown loss 'sftt'; nearest: sft"),
    ],
)
def test_what_cannot_be_added_is_refused(parts, said):
    with pytest.raises(LossError, match=said):
        resolve(parts)


def test_a_part_that_returns_no_metrics_is_named():
    with pytest.raises(LossError, match="'half' returned Tensor"):
        resolve({"half": lambda inputs: inputs.logprobs})(make_inputs(seed=3))

"""A loss that must see the whole step (a quantile, a batch mean) trains as if nothing had been split."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM

from rlbench import rl
from rlbench.data import Ragged
from rlbench.errors import LossError
from rlbench.rl import LossInputs
from rlbench.trainers.passes.step_plan import pad_rows, whole_inputs
from tests.modules import RAGGED, qwen_on_meta
from tests.ranks import ranks
from tests.trainers.policy_reference import assert_gradients, batch, by_hand, forward_backward


@dataclasses.dataclass(frozen=True)
class top_half:
    """Trains the half of all tokens with the highest entropy; weighs them by their distance from the batch's mean."""

    wrong: str = ""
    needs_plan: bool = True
    aggregation: str = "prompt-mean"

    def plan(self, whole: LossInputs) -> dict[str, torch.Tensor]:
        if self.wrong == "raises":
            raise ZeroDivisionError("no plan today")
        if self.wrong == "shape":
            return {"keep": whole.mask[:1]}
        held = whole.entropy[whole.mask]
        centred = whole.advantages - whole.advantages[whole.mask].mean()
        return {"keep": whole.entropy > held.median(), "centred": centred}

    def __call__(self, x: LossInputs) -> tuple[torch.Tensor, dict[str, Any]]:
        known = x.channels or self.plan(x)
        loss = torch.where(known["keep"], -known["centred"] * x.logprobs, 0.0)
        return torch.where(x.mask, loss, 0.0), {"kept": known["keep"].float()}


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(1, {}), (1, {"token_budget": 25}), (2, {"token_budget": 16}), (2, {"packing": False})],
)
def test_the_gradient_is_that_of_the_whole_however_the_step_is_split(
    qwen: str, world_size: int, options: dict[str, Any]
) -> None:
    given = batch().replace(group=np.array([0, 0, 1, 1, 1, 2, 2], np.int32))
    model = Qwen2ForCausalLM.from_pretrained(qwen)
    by_hand(model, given, top_half(), "prompt-mean")[0].backward()
    with ranks(world_size, qwen_on_meta(qwen)) as engine:
        result = forward_backward(engine, given, top_half(), **options)[0]
        assert_gradients(engine, model)
    assert result["aggregation"] == "prompt-mean", "the loss says what it is meant for"
    assert 0.3 < result["metrics"]["kept"] < 0.7


@pytest.mark.parametrize(
    "loss",
    [
        rl.kl_cov(fraction=0.2),
        rl.clip_cov(fraction=0.3, low=0.0, high=50.0),
        rl.grpo(tokens=rl.high_entropy(0.3)),
        rl.dapo(mismatch=rl.token_tis(cap=1.02, normalise=True) + rl.reject(0.05, level="token")),
        rl.gspo(clip_low=0.01, clip_high=0.01),
        rl.vespo(),
        rl.cispo(aggregation="prompt-mean"),
    ],
    ids=repr,
)
def test_standard_losses_train_the_same_in_pieces_and_over_ranks(qwen: str, loss: Any) -> None:
    given = batch().replace(group=np.array([0, 0, 1, 1, 1, 2, 2], np.int32))
    model = Qwen2ForCausalLM.from_pretrained(qwen)
    total, expected = by_hand(model, given, loss, loss.aggregation)
    total.backward()
    with ranks(2, qwen_on_meta(qwen)) as engine:
        result = forward_backward(engine, given, loss, token_budget=16)[0]
        assert_gradients(engine, model)
    assert result["metrics"]["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ("raises", ZeroDivisionError, "no plan today"),
        ("shape", LossError, r"the loss's plan gave \['keep'\]; wanted a dict"),
    ],
)
def test_a_plan_that_fails_ends_the_call_and_the_engine_stays_usable(
    qwen: str, wrong: str, error: type[Exception], said: str
) -> None:
    with ranks(2, qwen_on_meta(qwen)) as engine:
        with pytest.raises(error, match=said):
            forward_backward(engine, batch(), top_half(wrong))
        assert forward_backward(engine, batch(), top_half())[0]["micro_batches"] >= 1


def test_rows_are_padded_with_zeros_behind_each() -> None:
    rows = Ragged.from_rows([[1, 2, 3], [], [4]], np.float32)
    assert pad_rows(rows).tolist() == [[1, 2, 3], [0, 0, 0], [4, 0, 0]]


def test_the_whole_is_put_together_in_the_batchs_order_whoever_computed_a_row() -> None:
    given = batch(lengths=RAGGED[:3]).replace(old_logprobs=None)
    rows = [np.full(n, float(i), np.float32) for i, n in enumerate(given.response_lengths)]
    parts = [
        {"rows": np.array(order), "channels": dict.fromkeys(("logprobs", "entropy"), held)}
        for order in ([2, 1], [0, 1])
        for held in [Ragged.from_rows([rows[i] for i in order], np.float32)]
    ]
    whole = whole_inputs(given, parts, "recompute")
    for i, length in enumerate(given.response_lengths):
        assert (whole.logprobs[i, :length] == i).all() and (whole.logprobs[i, length:] == 0).all()
    assert torch.equal(whole.old_logprobs, whole.logprobs)
    assert not torch.equal(whole_inputs(given, parts, "sampler").old_logprobs, whole.logprobs)
    assert whole.group is not None and whole.group.tolist() == given.group.tolist()

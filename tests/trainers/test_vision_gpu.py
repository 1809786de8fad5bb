"""A pass over sequences with images on a GPU, without Ray or vLLM, against transformers on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from rlbench.data.batches.batch import TrainBatch
from rlbench.dispatch import context
from rlbench.workers.train.config import TrainConfig
from tests.trainers.policy_reference import GRPO, by_hand
from tests.trainers.seeing import FAMILIES, Plain, on_meta, pictures, save_eyes, with_observed, with_pictures

pytestmark = pytest.mark.gpu


def seen(path: str) -> TrainBatch:
    """Sequences whose prompts have images, none, and that are shown some behind a placeholder that was sampled."""
    a, b, c = pictures(3)
    asked = with_pictures(path, [[a], [], [a, b], []])
    return with_observed(path, asked, [[(b, 2)], [(c, 1), (a, 4)], [], []], stray=True)


def passed(
    path: str, given: TrainBatch, bf16: bool, **options: Any
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics and gradients of one pass by a rank of its own on the GPU."""
    from rlbench.workers.train.rank import TrainRank

    context.set_current(context.CallContext())
    try:
        rank = TrainRank(0, 1, TrainConfig(device="cuda", bf16=bf16))
        rank.build(cloudpickle.dumps(on_meta(path)), rank.rendezvous() or ("", 0))
        metrics = rank.policy_forward_backward(given, cloudpickle.dumps(GRPO), options)["metrics"]
        module = rank._built().module
        gradients = {
            name: parameter.grad.full_tensor().float().cpu()
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }
        rank.close()
    finally:
        context.set_current(None)
    return metrics, gradients


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"packing": False, "head": "plain"}, {"token_budget": 60}], ids=str)
@pytest.mark.parametrize("bf16", [False, True])
def test_loss_and_gradients_are_those_of_transformers(
    family: str, options: dict[str, Any], bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # of the convolution that makes patches
    path = save_eyes(tmp_path, family)
    given = seen(path)
    plain = Plain(path, given)
    total, expected = by_hand(plain, given, GRPO, "token-mean")
    total.backward()
    metrics, gradients = passed(path, given, bf16, **options)
    close = 5e-2 if bf16 else 1e-4
    assert metrics["loss"] == pytest.approx(expected["loss"], abs=close)
    assert metrics["entropy"] == pytest.approx(expected["entropy"], rel=close)
    for name, parameter in plain.model.named_parameters():
        assert parameter.grad is not None
        apart = (gradients[name] - parameter.grad).norm() / (parameter.grad.norm() + 1e-6)
        assert apart < (0.3 if bf16 else 1e-3), (name, float(apart))

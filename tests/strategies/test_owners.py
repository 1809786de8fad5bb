"""Bytes that are counted after each call are those of the tensors themselves."""

from __future__ import annotations

import torch
from torch import nn

from rlbench.strategies.memory import owners

HOST = torch.device("cpu")


def test_a_model_is_weighed_as_its_tensors_are_ties_and_released_ones_too() -> None:
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False))
    model[2].weight = model[0].weight
    assert owners.model_nbytes([model], HOST) == (4 * (16 * 8 + 8 * 8 + 8), 0)
    model[1](torch.ones(2, 8)).sum().backward()
    for models in ([model], [model, nn.Linear(3, 3)]):
        weights = [tensor for one in models for tensor in owners.weight_tensors(one)]
        gradients = [tensor for one in models for tensor in owners.gradient_tensors(one)]
        assert owners.model_nbytes(models, HOST) == (owners.nbytes(weights), owners.nbytes(gradients))
    assert owners.model_nbytes([model], torch.device("cuda")) == (0, 0)
    owners.release(owners.weight_tensors(model))
    assert owners.model_nbytes([model], HOST)[0] == 0

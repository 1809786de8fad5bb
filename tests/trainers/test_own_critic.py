"""A critic of the user's own: each shape of values is read for the right token, and what gives none is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from rlbench.errors import EngineError
from rlbench.strategies import FSDPV2Strategy, OptionError, get_fake_strategy
from rlbench.trainers.models.value_model import values_of
from rlbench.trainers.update.value_update import ValueUpdate
from tests.modules import VOCAB, batch_of
from tests.ranks import ranks
from tests.trainers.small_trainer import OPTIONS, first_weight, trainer_of
from tests.trainers.update_reference import (
    LENGTHS,
    assert_same,
    experience,
    gradients,
    parts_of,
    values_by_hand,
)

CPU = torch.device("cpu")
NO_ESTIMATOR = {"advantage_estimator": None}


class Sums(nn.Module):
    """The value after a token: the sum of a number of each token up to it, so that a shift would show."""

    def __init__(self, last: int | None = None) -> None:
        super().__init__()
        self.numbers = nn.Embedding.from_pretrained(torch.linspace(-1, 1, VOCAB)[:, None], freeze=False)
        self.last = last

    def forward(self, input_ids: Tensor) -> Tensor:
        values = self.numbers(input_ids).cumsum(1)
        return values if self.last is None else values.repeat(1, 1, self.last)


class Flat(Sums):
    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids)[..., 0]


class OfSequence(Sums):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return (self.numbers(input_ids)[..., 0] * attention_mask).sum(1)


class OfSequenceBlind(Sums):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.numbers(input_ids)[..., 0].sum(1)


class Pair(Sums):
    def forward(self, input_ids: Tensor) -> Any:
        return super().forward(input_ids), None


def before_each_token(batch: Any) -> list[float]:
    """What `Sums` says of each response token, one by one."""
    numbers, found = torch.linspace(-1, 1, VOCAB).tolist(), []
    for prompt, response in zip(batch.prompts, batch.responses, strict=True):
        total = sum(numbers[int(token)] for token in prompt)
        for token in response:
            found.append(total)
            total += numbers[int(token)]
    return found


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", [Sums, Flat])
def test_a_value_of_each_token_is_that_of_the_token_before(kind: type, packed: bool) -> None:
    batch = batch_of(LENGTHS)
    found = values_of(kind(), batch, CPU, packed)
    np.testing.assert_allclose(found.detach().numpy(), before_each_token(batch), atol=1e-5)
    assert found.requires_grad and found.dtype == torch.float32


def test_one_value_of_a_sequence_is_that_of_its_prompt() -> None:
    batch = batch_of(LENGTHS)
    found = values_of(OfSequence(), batch, CPU, packed=True).detach().numpy()
    first = [before_each_token(batch)[at] for at in batch.responses.offsets[:-1]]
    np.testing.assert_allclose(found, np.repeat(first, batch.response_lengths), atol=1e-5)


def classifier(path: str, labels: int = 1) -> Any:
    torch.manual_seed(4)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=labels)
    assert model.config.pad_token_id is None  # with which transformers refuses to pool
    return model


@pytest.mark.parametrize("packed", [True, False])
def test_a_sequence_classifier_is_read_at_each_token_and_pools_as_before(qwen: str, packed: bool) -> None:
    model, given = classifier(qwen), experience()
    prepared = get_fake_strategy({"bf16": False}).prepare_model(model, is_training=True)
    pooled = prepared(torch.tensor([[5, 6, 7]])).logits
    expected = torch.cat(values_by_hand(model.model, model.score.weight, given)).detach()
    found = values_of(prepared, given.batch, CPU, packed)
    torch.testing.assert_close(found.detach(), expected, rtol=0, atol=1e-5)
    found.square().sum().backward()
    assert all(parameter.grad is not None for parameter in prepared.parameters())
    assert torch.equal(prepared(torch.tensor([[5, 6, 7]])).logits, pooled) and pooled.shape == (1, 1)


def test_ranks_train_a_critic_of_ones_own_as_one_process_does(qwen: str) -> None:
    def gradients_of(kind: str, size: int, rank: int, strategy: Any) -> dict[str, Tensor]:
        made = {"sums": Sums, "sequence": OfSequence}[kind]() if kind != "classifier" else classifier(qwen)
        critic = strategy.prepare_model(made, is_training=True)
        update = ValueUpdate(critic, strategy.create_optimizer(critic, lr=1e-3), None, strategy, packed=True)
        update.accumulate(parts_of(experience(), size)[rank :: strategy.world_size])
        return gradients(critic)

    def on_rank() -> dict[str, dict[str, Tensor]]:
        strategy = FSDPV2Strategy(bf16=False)
        return {kind: gradients_of(kind, 2, strategy.rank, strategy) for kind in ("sums", "sequence", "classifier")}

    alone = get_fake_strategy({"bf16": False})
    with ranks(2) as engine:
        engine.build(_meta(qwen))
        for found in engine.run(on_rank):
            for kind, own in found.items():
                assert_same(own, gradients_of(kind, 8, 0, alone), atol=1e-5)


def _meta(qwen: str) -> Any:
    from tests.modules import qwen_on_meta

    return qwen_on_meta(qwen)


def with_critic(qwen: str, critic: nn.Module, **given: Any) -> Any:
    strategy = get_fake_strategy(OPTIONS)
    prepared = strategy.prepare_model(critic, is_training=True)
    options = {**NO_ESTIMATOR, **given.pop("options", {})}
    optimizer = strategy.create_optimizer(prepared, lr=1e-2)
    return trainer_of(qwen, options=options, critic=prepared, critic_optim=optimizer, **given)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", ["sums", "sequence", "classifier"])
def test_a_trainer_learns_values_with_a_critic_of_ones_own_by_its_default_options(
    qwen: str, kind: str, packed: bool
) -> None:
    made = {"sums": Sums, "sequence": OfSequence}.get(kind, lambda: classifier(qwen))()
    trainer = with_critic(qwen, made, packing_samples=packed)
    assert trainer.options.strategy.advantage_estimator == "gae"
    before = first_weight(trainer.critic)
    trainer.make_experience()
    metrics = trainer.ppo_train()
    assert math.isfinite(metrics["critic_loss"]) and not torch.equal(before, first_weight(trainer.critic))


def test_another_estimator_beside_a_critic_is_refused_and_without_one_groups_are_compared(qwen: str) -> None:
    for where in ({"options": {"advantage_estimator": "group_norm"}}, {"advantage_estimator": "group_norm"}):
        with pytest.raises(OptionError, match="critic=None"):
            with_critic(qwen, Sums(), **where)
    assert trainer_of(qwen, options=NO_ESTIMATOR).options.strategy.advantage_estimator == "group_norm"


@pytest.mark.parametrize(
    ("critic", "said"),
    [
        (lambda _: Sums(last=3), r"\(2, 7, 3\) .* \(2, 7\); wanted \(sequences, tokens\)"),
        (lambda _: Pair(), "returned tuple"),
        (lambda _: OfSequenceBlind(), "attention_mask"),
        (lambda path: classifier(path, labels=2), "num_labels=1"),
    ],
)
def test_what_gives_no_values_is_refused_when_the_trainer_is_made(qwen: str, critic: Any, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        with_critic(qwen, critic(qwen))

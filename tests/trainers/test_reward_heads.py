"""Scores of a reward model on the ranks are transformers' own at each sequence's last token, shared out anyhow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from rlbench.errors import BuildError, DataError, EngineError
from rlbench.strategies import FSDPV2Strategy
from rlbench.trainers.models.reward_heads import RewardModel, make_reward_model, scores_of
from tests.modules import VOCAB, qwen_on_meta, save_qwen
from tests.ranks import Ranks, ranks
from tests.trainers.update_reference import fake

SEQUENCES = [[5, 6, 7], [1] * 9, [3, 0, 9, 0], [2], [0, 0], [8, 9, 10, 11, 12, 0]]


def save_classifier(folder: Path, labels: int = 1) -> str:
    torch.manual_seed(4)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        num_labels=labels,
        pad_token_id=0,
    )
    model = Qwen2ForSequenceClassification(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with ranks(2, qwen_on_meta(save_qwen(tmp_path_factory.mktemp("qwen")))) as made:
        yield made


@pytest.fixture(scope="module")
def expected(classifier: str) -> torch.Tensor:
    """transformers' own number for each sequence alone, at its last token (also where that is the padding token)."""
    model = Qwen2ForSequenceClassification.from_pretrained(classifier)
    model.config.pad_token_id = None
    with torch.no_grad():
        return torch.cat([model(torch.tensor([ids])).logits[0] for ids in SEQUENCES])


@pytest.mark.parametrize("batch_size", [1, 2, 4, 50])
def test_scores_are_those_of_transformers_whatever_the_batch(
    classifier: str, expected: torch.Tensor, batch_size: int
) -> None:
    strategy = fake()
    ours = strategy.prepare_model(make_reward_model(classifier))
    theirs = strategy.prepare_model(Qwen2ForSequenceClassification.from_pretrained(classifier))
    assert isinstance(ours, RewardModel) and not any(p.requires_grad for p in ours.parameters())
    for model in (ours, theirs):
        found = scores_of(model, SEQUENCES, strategy, batch_size)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        assert found.dtype == torch.float32 and not found.requires_grad
    assert theirs.config.pad_token_id == 0  # as it was
    assert float(expected.std()) > 0.05


@pytest.mark.parametrize("shares", [[[0, 1, 2, 3, 4], [5]], [[], [5, 4, 3, 2, 1, 0]]])
def test_sharded_ranks_with_different_numbers_of_sequences_score_their_own(
    classifier: str, expected: torch.Tensor, engine: Ranks, shares: list[list[int]]
) -> None:
    def scored() -> Any:
        strategy = FSDPV2Strategy(bf16=False)
        model = strategy.prepare_model(make_reward_model(classifier))
        return scores_of(model, [SEQUENCES[i] for i in shares[strategy.rank]], strategy, 2)

    for found, own in zip(engine.run(scored), shares, strict=True):
        torch.testing.assert_close(found, expected[own], rtol=0, atol=1e-5)


class Length(nn.Module):
    """A user's own: half a point a token, and trouble on request."""

    def __init__(self, answer: Any = None) -> None:
        super().__init__()
        self.worth = nn.Parameter(torch.tensor(0.5))
        self.answer = answer

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        if self.answer is not None:
            return self.answer(input_ids)
        return self.worth * attention_mask.sum(1)


def test_a_module_of_ones_own_is_scored_too_and_told_what_it_must_give() -> None:
    strategy = fake()
    assert scores_of(Length(), SEQUENCES, strategy, 4).tolist() == [1.5, 4.5, 2.0, 0.5, 1.0, 3.0]
    assert scores_of(Length(), [], strategy).shape == (0,)
    with pytest.raises(EngineError, match=r"Length gave \(2, 3\) for 2 sequences"):
        scores_of(Length(lambda ids: ids[:, :3].float()), [[1, 2, 3], [4, 5, 6]], strategy)
    with pytest.raises(EngineError, match="Length gave str"):
        scores_of(Length(lambda ids: "good"), [[1]], strategy)


def test_sequences_that_cannot_be_scored_are_refused(classifier: str) -> None:
    strategy = fake()
    model = strategy.prepare_model(make_reward_model(classifier))
    for wrong, said in (
        ([[1], []], "without a token"),
        ([[1], [VOCAB]], "reward model"),
        ([[-1]], "from -1 to -1"),
    ):
        with pytest.raises(DataError, match=said):
            scores_of(model, wrong, strategy)
    with pytest.raises(DataError, match="batch_size=0"):
        scores_of(model, SEQUENCES, strategy, 0)


def test_a_checkpoint_without_a_head_is_no_reward_model_unless_one_is_to_be_drawn(
    classifier: str, tmp_path: Path
) -> None:
    plain = save_qwen(tmp_path / "plain")
    with pytest.raises(BuildError, match=r"score.weight"):
        fake().prepare_model(make_reward_model(plain))
    drawn = fake().prepare_model(make_reward_model(plain, seed=1))
    assert 0 < float(drawn.score.weight.std()) < 0.1
    with pytest.raises(BuildError, match=r"score.weight is \(3, 32\), the module wants \(1, 32\)"):
        fake().prepare_model(make_reward_model(save_classifier(tmp_path / "three", labels=3)))

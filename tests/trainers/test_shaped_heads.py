"""A head that reads another layer, or pools by attention, gives the scores and gradients of a plain torch module
written here, packed, padded and on two ranks; what is saved comes back, and scores the same in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen2Model

from rlbench import rewards, rl
from rlbench.errors import BuildError, EngineError
from rlbench.trainers.models.lora import Lora
from rlbench.trainers.models.policy_spec import RewardSpec
from rlbench.trainers.models.reward_heads import make_reward_model, make_trained_reward
from tests.data.written import written
from tests.ranks import Ranks, ranks
from tests.trainers.policy_reference import assert_gradients, forward_backward
from tests.trainers.test_reward_training import pairs_batch, sequences

SHAPES: list[tuple[str, int]] = [("attention", -1), ("last", 1), ("attention", 0)]


class Plain(nn.Module):
    """The same by hand, one sequence at a time."""

    shaped_score: Any

    def __init__(self, qwen: str, state: dict[str, torch.Tensor], layer: int) -> None:
        super().__init__()
        self.model = Qwen2Model.from_pretrained(qwen, dtype=torch.float32, attn_implementation="eager")
        width = self.model.config.hidden_size
        self.shaped_score = nn.Module()
        self.shaped_score.weight = nn.Parameter(torch.zeros(1, width))
        if "shaped_score.query" in state:
            self.shaped_score.query = nn.Parameter(torch.zeros(width))
            self.shaped_score.key = nn.Linear(width, width, bias=False)
            self.shaped_score.value = nn.Linear(width, width, bias=False)
        self.load_state_dict(state)
        self.layer = layer

    def forward(self, ids: list[int]) -> torch.Tensor:
        states = self.model(torch.tensor([ids]), output_hidden_states=True).hidden_states[self.layer][0]
        head, read = self.shaped_score, states[-1]
        if hasattr(head, "query"):
            parts = []
            d = len(head.query) // 4
            for h in range(4):
                mine = slice(h * d, h * d + d)
                keys, values = head.key(states)[:, mine], head.value(states)[:, mine]
                weights = torch.softmax(keys @ head.query[mine] / d**0.5, 0)
                parts.append((weights[:, None] * values).sum(0))
            read = torch.cat(parts)
        return (head.weight @ read)[0]


def at_the_ends(engine: Ranks, batch: Any) -> np.ndarray:
    at = [len(ids) - n - 1 for ids, n in zip(sequences(batch), batch.prompts.lengths, strict=True)]
    found = np.full(len(batch), np.nan)
    for part in engine.call("policy_forward", batch, {}):
        for row, channel in zip(part["rows"], part["channels"]["scores"], strict=True):
            found[row] = channel[at[row]]
    return found


@pytest.mark.parametrize(("pooling", "layer"), SHAPES)
def test_scores_and_gradients_are_the_plain_ones_packed_padded_and_saved(
    qwen: str, tmp_path: Path, pooling: str, layer: int
) -> None:
    batch, saved = pairs_batch(), str(tmp_path / "rm")
    with ranks(2, RewardSpec(qwen, head_seed=3, lr=1e-2, pooling=pooling, probing_layer=layer)) as engine:
        model = Plain(qwen, engine.call("whole_state")[0], layer)
        seen = torch.stack([model(ids) for ids in sequences(batch)])
        assert len(set(seen.tolist())) > 5
        expected = -logsigmoid(seen[0::2] - seen[1::2]).mean()
        expected.backward()
        for parameter in model.parameters():  # nothing reaches the layers above
            parameter.requires_grad_(parameter.grad is not None)
        for options in ({"token_budget": 30}, {"token_budget": 45, "packing": False}):
            found = forward_backward(engine, batch, rl.bradley_terry(), **options)[0]
            assert found["metrics"]["loss"] == pytest.approx(float(expected.detach()), abs=1e-5)
            assert_gradients(engine, model, atol=1e-5)
            engine.call("policy_zero_grad")
        np.testing.assert_allclose(at_the_ends(engine, batch), seen.detach().numpy(), atol=1e-5)
        forward_backward(engine, batch, rl.bradley_terry(), whole_step=True)
        engine.call("policy_optim_step", {"whole_step": True})
        ours, state = at_the_ends(engine, batch), engine.call("whole_state")[0]
        assert np.abs(ours - seen.detach().numpy()).max() > 1e-3
        engine.call("export_model", saved, qwen, None)
    with ranks(1, RewardSpec(saved)) as again:
        assert all(torch.equal(tensor, state[name]) for name, tensor in again.call("whole_state")[0].items())
        np.testing.assert_allclose(at_the_ends(again, batch), ours, atol=1e-5)


def test_one_process_scores_what_was_saved_and_transformers_finds_no_head_of_its_own(
    tiny_path: Path, tmp_path: Path
) -> None:
    saved = str(tmp_path / "rm")
    spec = RewardSpec(str(tiny_path), pooling="attention", probing_layer=-2, lora=Lora(rank=2))
    with ranks(1, spec) as engine:

        def trained() -> Any:
            return [n for n, p in module.named_parameters() if p.requires_grad]  # type: ignore[name-defined]

        whole = [name for name in engine.run(trained)[0] if ".lora_" not in name]
        engine.call("export_model", saved, str(tiny_path), None)
        state = {n: t for n, t in engine.call("whole_state")[0].items() if n.startswith("shaped_score.")}
    assert set(whole) == state.keys() and len(state) == 4
    rollouts = written(["sort 21 :", "312"], [["12", "a longer answer, with more tokens"], ["", "7"]])
    judge = rewards.model(saved, device="cpu", batch_size=3)
    found = rollouts.score(judge).rewards
    backbone = Qwen2Model.from_pretrained(tiny_path, dtype=torch.float32).state_dict()
    model = Plain(str(tiny_path), {f"model.{name}": t for name, t in backbone.items()} | state, -2)
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    wanted = [float(model(judge.token_ids(rollout, tokenizer)).detach()) for rollout in rollouts.flat]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert len(set(np.round(found, 6))) == 4
    _, report = AutoModelForSequenceClassification.from_pretrained(saved, output_loading_info=True)
    assert "score.weight" in report["missing_keys"], "or it would give other scores without a word"
    judges = make_reward_model(saved)  # a trainer's, on its ranks
    assert {n for n, p in judges.named_parameters() if n.startswith("shaped_score.")} == state.keys()
    for asked in ({"pooling": "last"}, {"probing_layer": -1}):
        with pytest.raises(BuildError, match=f"has a head already.*leave {next(iter(asked))} out"):
            make_trained_reward(RewardSpec(saved, **asked))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"pooling": "attn"}, "pooling='attn' is none.*'last' or 'attention'"),
        ({"probing_layer": 3}, "the model has 2 layers. Give 0"),
        ({"probing_layer": -4}, "to -3"),
        ({"probing_layer": True}, "whole number"),
    ],
)
def test_what_no_head_can_read_is_refused(qwen: str, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(BuildError, match=said):
        make_trained_reward(RewardSpec(qwen, **asked))


def test_ranks_that_hold_parts_of_sequences_are_refused_for_pooling_and_compute_a_probed_layer(qwen: str) -> None:
    batch = pairs_batch()
    with ranks(2, RewardSpec(qwen, pooling="attention"), sequence_parallel=2) as engine:
        with pytest.raises(EngineError, match=r"pools whole sequences.*sequence_parallel=1"):
            forward_backward(engine, batch, rl.bradley_terry())
    found = []
    for sharing in ({"sequence_parallel": 2}, {"tensor_parallel": 2}, {}):
        with ranks(2 if sharing else 1, RewardSpec(qwen, probing_layer=1), **sharing) as engine:
            found.append(at_the_ends(engine, batch))
    for shared in found[:2]:
        np.testing.assert_allclose(shared, found[2], atol=1e-5)

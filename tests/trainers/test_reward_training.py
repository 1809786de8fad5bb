"""Training a reward model on ranks is what one process does by hand, however the pairs are split; what is saved is a
classifier of transformers with the same scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, Qwen2ForSequenceClassification

from rlbench import rl
from rlbench.data.batches.batch import TrainBatch
from rlbench.data.texts.preferences import of_pairs
from rlbench.errors import BuildError, LossError
from rlbench.trainers.models.lora import Lora
from rlbench.trainers.models.policy_spec import RewardSpec
from rlbench.trainers.models.reward_heads import make_reward_model
from tests.ranks import Ranks, ranks
from tests.trainers.policy_reference import assert_gradients, forward_backward, gradients
from tests.trainers.test_text_losses import PAIRS, texts

MARGINS = [1.0, 0.0, 2.0, 0.0, 0.5]
SPLITS: list[tuple[int, dict[str, int], dict[str, Any]]] = [
    (1, {}, {}),
    (2, {}, {"token_budget": 30}),
    (2, {}, {"token_budget": 45, "packing": False}),
    (2, {"sequence_parallel": 2}, {}),
    (2, {"tensor_parallel": 2}, {"token_budget": 60}),
]


def pairs_batch(margins: list[float] | None = None) -> TrainBatch:
    prompts, responses, masks = texts(PAIRS)
    return of_pairs([prompts[i - i % 2] for i in range(len(prompts))], responses, masks, margins)


def sequences(batch: TrainBatch) -> list[list[int]]:
    """What is scored: up to the last trained token, as a template may write something behind it."""
    masks = batch.responses.with_values(batch.mask)
    rows = zip(batch.prompts, batch.responses, masks, strict=True)
    return [[*p.tolist(), *r[: int(np.flatnonzero(mask)[-1]) + 1].tolist()] for p, r, mask in rows]


def scores(model: Any, batch: TrainBatch) -> torch.Tensor:
    """transformers' number for each sequence alone, at its last token, (B,)."""
    model.config.pad_token_id = None
    return torch.cat([model(torch.tensor([ids])).logits[:, 0] for ids in sequences(batch)])


def plain(name: str, model: Any, batch: TrainBatch) -> torch.Tensor:
    """The mean over pairs; `bradley_terry` as TRL's RewardTrainer.compute_loss has it, with
    `center_rewards_coefficient=0.01`."""
    rewards = scores(model, batch)
    chosen, rejected = rewards[0::2], rewards[1::2]
    margin = torch.zeros(len(chosen)) if batch.margin is None else torch.from_numpy(batch.margin[0::2])
    if name in ("bradley_terry", "margin"):
        return -logsigmoid(chosen - rejected - margin).mean() + 0.01 * torch.mean((chosen + rejected) ** 2)
    if name == "hps":
        logits = torch.stack([chosen, rejected], 1) * np.exp(0.7)
        return torch.nn.functional.cross_entropy(logits, torch.tensor([[0.8, 0.2]] * len(chosen)))
    losses = torch.log1p(torch.exp(rejected - chosen))
    if name == "ties":  # LightRFT: pairs rated equal have 0.01 |s0 - s1| in its place
        losses = torch.where(margin == 0, 0.01 * (chosen - rejected).abs(), losses)
    return losses.mean()


LOSSES = {
    "bradley_terry": rl.bradley_terry(centering=0.01),
    "margin": rl.bradley_terry(centering=0.01),
    "log_exp": rl.log_exp(),
    "ties": rl.log_exp(ties=0.01),
    "hps": rl.hps(log_scale=0.7, preference=0.8),
}


def with_head(engine: Ranks, qwen: str) -> Any:
    """A classifier of transformers with the ranks' weights."""
    model = Qwen2ForSequenceClassification.from_pretrained(qwen, num_labels=1)
    model.load_state_dict(engine.call("whole_state")[0])
    return model


@pytest.mark.parametrize(("world_size", "sharing", "options"), SPLITS)
def test_losses_and_gradients_are_the_plain_ones_however_the_pairs_are_split(
    qwen: str, world_size: int, sharing: dict[str, int], options: dict[str, Any]
) -> None:
    with ranks(world_size, RewardSpec(qwen, head_seed=3), **sharing) as engine:
        model = with_head(engine, qwen)
        for name, loss in LOSSES.items():
            batch = pairs_batch(MARGINS if name in ("margin", "ties") else None)
            expected = plain(name, model, batch)
            model.zero_grad()
            expected.backward()
            found = forward_backward(engine, batch, loss, **options)[0]
            assert found["metrics"]["loss"] == pytest.approx(float(expected.detach()), abs=1e-5), name
            assert_gradients(engine, model, atol=1e-5)
            engine.call("policy_zero_grad")
        seen = scores(model, batch).detach()
        metrics = found["metrics"]
        assert metrics["reward_chosen"] == pytest.approx(float(seen[0::2].mean()), abs=1e-5)
        assert metrics["reward_accuracy"] == pytest.approx(float((seen[0::2] > seen[1::2]).float().mean()))
        assert not {"kl", "entropy", "logprob_gap"} & metrics.keys(), "a reward model has no distribution over tokens"
        rows = {int(r): c for part in [found] for r, c in zip(part["rows"], part["channels"]["scores"], strict=True)}
        at = [len(ids) - n - 1 for ids, n in zip(sequences(batch), batch.prompts.lengths, strict=True)]
        for row, channel in rows.items():
            assert len(channel) == batch.response_lengths[row]
            assert channel[at[row]] == pytest.approx(float(seen[row]), abs=1e-5)


def test_the_scale_of_hps_is_learned_by_its_own_gradient_beside_the_optimizers_step(qwen: str) -> None:
    batch, loss = pairs_batch([1.0, 0.0, 2.0, 1.0, 0.5]), rl.hps(log_scale=0.7, preference=0.8, scale_lr=0.5, ties=0.01)
    with ranks(2, RewardSpec(qwen, head_seed=3, lr=1e-3)) as engine:
        model, log_scale = with_head(engine, qwen), torch.tensor(0.7, requires_grad=True)
        seen = scores(model, batch).detach()
        pairs = torch.stack([seen[0::2], seen[1::2]], 1) * log_scale.exp()
        losses = torch.nn.functional.cross_entropy(pairs, torch.tensor([[0.8, 0.2]] * 5), reduction="none")
        (losses * torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])).mean().backward()
        first = forward_backward(engine, batch, loss, token_budget=30, whole_step=True)[0]["metrics"]
        engine.call("policy_optim_step", {"whole_step": True})
        assert first["log_scale"] == pytest.approx(0.7)
        assert first["log_scale_slope"] == pytest.approx(float(log_scale.grad), abs=1e-5)
        second = forward_backward(engine, batch, loss, whole_step=True)[0]["metrics"]
        assert second["log_scale"] == pytest.approx(0.7 - 0.5 * float(log_scale.grad), abs=1e-5) != 0.7


@pytest.mark.parametrize("lora", [None, Lora(rank=4)])
def test_a_trained_model_is_saved_as_a_classifier_with_equal_scores(
    qwen: str, tmp_path: Path, lora: Lora | None
) -> None:
    batch = pairs_batch()
    with ranks(2, RewardSpec(qwen, lr=1e-2, lora=lora)) as engine:
        before = {name: tensor.clone() for name, tensor in engine.call("whole_state")[0].items()}
        losses = []
        for _ in range(8):
            losses.append(forward_backward(engine, batch, rl.bradley_terry(), whole_step=True)[0]["metrics"]["loss"])
            engine.call("policy_optim_step", {"whole_step": True})
        assert losses[-1] < 0.5 * losses[0]
        moved = {n for n, t in engine.call("whole_state")[0].items() if not torch.equal(t, before[n])}
        assert "score.weight" in moved
        if lora is not None:
            assert all(name == "score.weight" or ".lora_" in name for name in moved)
        found = engine.call("policy_forward", batch, {})
        engine.call("export_model", str(tmp_path / "rm"), qwen, None)
    at = [len(ids) - n - 1 for ids, n in zip(sequences(batch), batch.prompts.lengths, strict=True)]
    ours = np.zeros(len(batch))
    for part in found:
        for row, channel in zip(part["rows"], part["channels"]["scores"], strict=True):
            ours[row] = channel[at[row]]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    assert type(model).__name__ == "Qwen2ForSequenceClassification" and model.config.num_labels == 1
    with torch.no_grad():
        np.testing.assert_allclose(scores(model, batch).numpy(), ours, atol=1e-5)
    with ranks(1, RewardSpec(str(tmp_path / "rm"))) as again:
        channels = again.call("policy_forward", batch, {})[0]
        one = {int(r): c[at[r]] for r, c in zip(channels["rows"], channels["channels"]["scores"], strict=True)}
        np.testing.assert_allclose([one[i] for i in range(len(batch))], ours, atol=1e-5)
    make_reward_model(str(tmp_path / "rm"))  # and it can be a trainer's reward


def test_a_policys_loss_is_refused_on_the_ranks_and_they_go_on(qwen: str) -> None:
    with ranks(1, RewardSpec(qwen)) as engine:
        for given, loss, said in (
            (pairs_batch(), rl.simpo(), "no gradient"),
            (pairs_batch(MARGINS), rl.log_exp(), "takes no margin"),
            (pairs_batch()[:3], rl.bradley_terry(), "pair"),
        ):
            with pytest.raises(LossError, match=said):
                forward_backward(engine, given, loss)
        assert np.isfinite(forward_backward(engine, pairs_batch(), rl.bradley_terry())[0]["metrics"]["loss"])
        assert "score.weight" in gradients(engine)


def test_a_head_is_drawn_alike_for_a_seed_and_otherwise_for_another(qwen: str) -> None:
    heads = []
    for seed in (1, 1, 2):
        with ranks(1, RewardSpec(qwen, head_seed=seed)) as engine:
            heads.append(engine.call("whole_state")[0]["score.weight"])
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    assert heads[0].abs().max() < 0.2


def test_what_has_no_scalar_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="nowhere"):
        make_reward_model(str(tmp_path / "nowhere"))

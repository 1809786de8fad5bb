"""Several heads on one backbone are trained by what pairs say of each: scores, losses and gradients are those of plain
torch written here, on one rank and on two, packed and padded; what is saved keeps its heads by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, logsigmoid
from transformers import Qwen2Model

from rlbench import rewards, rl
from rlbench.data.batches.batch import TrainBatch
from rlbench.data.batches.verdicts import Verdicts
from rlbench.errors import BuildError, LossError
from rlbench.trainers.experience.model_stage import ModelStage
from rlbench.trainers.models.lora import Lora
from rlbench.trainers.models.policy_spec import RewardSpec
from rlbench.trainers.models.reward_heads import make_reward_model, scores_of
from rlbench.trainers.models.value_model import make_critic
from tests.data.written import written
from tests.ranks import Ranks, ranks
from tests.trainers.policy_reference import assert_gradients, forward_backward, gradients
from tests.trainers.test_reward_training import pairs_batch, sequences
from tests.trainers.update_reference import fake

HEADS = {"quality": 0.75, "style": -0.5, "brevity": 0.25}
SAID: list[dict[str, float]] = [
    {"quality": 1, "style": -1},
    {"quality": -1},
    {"quality": 0, "style": 1},
    {"style": -1},
    {"quality": 1, "style": 0},
]
"""Of five pairs; nothing is said of brevity."""
LOSSES = {
    "bradley_terry": rl.bradley_terry(centering=0.01, ties=0.01),
    "log_exp": rl.log_exp(ties=0.5),
    "hps": rl.hps(log_scale=0.7, preference=0.8, ties=0.01),
}
SPLITS: list[tuple[int, dict[str, int], list[dict[str, Any]]]] = [
    (1, {}, [{}]),
    (2, {"sequence_parallel": 2}, [{}]),
    (2, {}, [{"token_budget": 30}, {"token_budget": 45, "packing": False}]),
]


def judged() -> TrainBatch:
    return pairs_batch().replace(verdicts=Verdicts.of(SAID).of_heads(list(HEADS)))


class Plain(nn.Module):
    """The same by hand, one sequence at a time: a linear head of each name over the last token's state, or over what a
    query of its own pools."""

    def __init__(self, qwen: str, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.model = Qwen2Model.from_pretrained(qwen, dtype=torch.float32, attn_implementation="eager")
        width = self.model.config.hidden_size
        self.shaped_score = nn.Module()
        for name in HEADS:
            head: Any = nn.Module()
            head.weight = nn.Parameter(torch.zeros(1, width))
            if f"shaped_score.{name}_head.query" in state:
                head.query = nn.Parameter(torch.zeros(width))
                head.key, head.value = (nn.Linear(width, width, bias=False) for _ in range(2))
            self.shaped_score.add_module(f"{name}_head", head)
        self.load_state_dict(state)

    def forward(self, ids: list[int]) -> torch.Tensor:
        states = self.model(torch.tensor([ids])).last_hidden_state[0]
        found = []
        for name in HEADS:
            head: Any = self.shaped_score.get_submodule(f"{name}_head")
            read = states[-1]
            if hasattr(head, "query"):
                keys, values, query = (
                    part.unflatten(-1, (4, -1)) for part in (head.key(states), head.value(states), head.query)
                )
                weights = torch.softmax((keys * query).sum(-1) / query.shape[-1] ** 0.5, 0)
                read = (weights[..., None] * values).sum(0).flatten()
            found.append(head.weight[0] @ read)
        return torch.stack(found)


def by_hand(name: str, seen: torch.Tensor) -> torch.Tensor:
    """The sum over heads of the mean over the pairs that say something of it, of scores (B, heads)."""
    total = torch.zeros(())
    for k, head in enumerate(HEADS):
        losses = []
        for i, said in enumerate(SAID):
            if head not in said:
                continue
            one, other = seen[2 * i, k], seen[2 * i + 1, k]
            better, worse = (one, other) if said[head] >= 0 else (other, one)
            tie = said[head] == 0
            if name == "bradley_terry":
                loss = 0.01 * (better - worse).abs() if tie else -logsigmoid(better - worse)
                loss = loss + 0.01 * (better + worse) ** 2
            elif name == "log_exp":
                loss = 0.5 * (better - worse).abs() if tie else torch.log1p(torch.exp(worse - better))
            else:
                scaled = torch.stack([better, worse])[None] * np.exp(0.7)
                loss = 0.01 * (better - worse).abs() if tie else cross_entropy(scaled, torch.tensor([[0.8, 0.2]]))
            losses.append(loss)
        if losses:
            total = total + torch.stack(losses).mean()
    return total


def at_the_ends(engine: Ranks, batch: TrainBatch) -> tuple[np.ndarray, np.ndarray]:
    """Scores (B,) and those of each head (B, heads), by the ranks' forward."""
    at = [len(ids) - n - 1 for ids, n in zip(sequences(batch), batch.prompts.lengths, strict=True)]
    whole, each = np.full(len(batch), np.nan), np.full((len(batch), len(HEADS)), np.nan)
    for part in engine.call("policy_forward", batch, {}):
        for i, row in enumerate(part["rows"]):
            whole[row], each[row] = (part["channels"][name][i][at[row]] for name in ("scores", "head_scores"))
    return whole, each


@pytest.mark.parametrize("pooling", ["last", "attention"])
def test_scores_losses_and_gradients_are_the_plain_ones_and_an_unnamed_head_has_none(
    qwen: str, tmp_path: Path, pooling: str
) -> None:
    batch, saved = judged(), str(tmp_path / "rm")
    spec = RewardSpec(qwen, head_seed=3, lr=1e-2, pooling=pooling, heads=HEADS)
    for world_size, sharing, ways in SPLITS if pooling == "last" else SPLITS[2:]:
        with ranks(world_size, spec, **sharing) as engine:
            model = Plain(qwen, engine.call("whole_state")[0])
            seen = torch.stack([model(ids) for ids in sequences(batch)])
            whole, each = at_the_ends(engine, batch)
            np.testing.assert_allclose(each, seen.detach(), atol=1e-5)
            np.testing.assert_allclose(whole, seen.detach() @ torch.tensor(list(HEADS.values())), atol=1e-5)
            for name, loss in LOSSES.items():
                expected = by_hand(name, seen)
                model.zero_grad()
                (expected + 0 * seen.sum()).backward(retain_graph=True)
                for options in ways:
                    metrics = forward_backward(engine, batch, loss, **options)[0]["metrics"]
                    assert metrics["loss"] == pytest.approx(float(expected.detach()), abs=1e-5), name
                    assert_gradients(engine, model, atol=1e-5)
                    own = {n: g for n, g in gradients(engine).items() if "brevity_head" in n}
                    assert own and all(int(g.count_nonzero()) == 0 for g in own.values())
                    engine.call("policy_zero_grad")
            gap = [float((seen[2 * i, 0] - seen[2 * i + 1, 0]).detach()) * (-1 if i == 1 else 1) for i in (0, 1, 4)]
            assert metrics["reward_accuracy/quality"] == pytest.approx(np.mean([one > 0 for one in gap]))
            assert "reward_accuracy/brevity" not in metrics and 0 <= metrics["reward_accuracy"] <= 1
            if ways == SPLITS[-1][2]:
                forward_backward(engine, batch, LOSSES["log_exp"], whole_step=True)
                engine.call("policy_optim_step", {"whole_step": True})
                whole, each = at_the_ends(engine, batch)
                engine.call("export_model", saved, qwen, None)
    names = sorted(HEADS)  # as the saved config has them
    with ranks(1, RewardSpec(saved)) as again:
        np.testing.assert_allclose(at_the_ends(again, batch)[0], whole, atol=1e-5)
        order = [list(HEADS).index(name) for name in names]
        np.testing.assert_allclose(at_the_ends(again, batch)[1], each[:, order], atol=1e-5)
        with pytest.raises(LossError, match=r"judge the heads quality, style, brevity.* has brevity, quality, style"):
            forward_backward(again, batch, LOSSES["log_exp"])
    assert RewardSpec(saved, heads={"style": 1, "brevity": 0, "quality": 0}).shape().heads["style"] == 1.0
    with pytest.raises(BuildError, match=r"no head 'qality'; nearest: quality; its heads are brevity, quality"):
        RewardSpec(saved, heads=["qality", "style", "brevity"]).shape()
    with pytest.raises(BuildError, match="a head 'brevity' too"):
        RewardSpec(saved, heads=["quality", "style"]).shape()
    with pytest.raises(BuildError, match="a critic gives one value"):
        make_critic(saved)
    strategy = fake()
    judge = strategy.prepare_model(make_reward_model(saved))
    np.testing.assert_allclose(scores_of(judge, sequences(batch), strategy, 3), whole, atol=1e-5)
    total, by_head = ModelStage(strategy, 3, False, None).scores(judge, sequences(batch), "the reward")
    np.testing.assert_allclose(total, whole, atol=1e-5)
    np.testing.assert_allclose(np.stack([by_head[name] for name in HEADS], axis=1), each, atol=1e-5)


def test_calls_of_a_step_are_joined_where_they_judge_alike_and_refused_elsewhere(qwen: str) -> None:
    alike = Verdicts.of([{"quality": 1, "style": -1, "brevity": 1}] * 5).of_heads(list(HEADS))
    batch, loss = pairs_batch().replace(verdicts=alike), rl.log_exp()
    with ranks(2, RewardSpec(qwen, head_seed=3, heads=HEADS)) as engine:
        forward_backward(engine, batch, loss)
        once = gradients(engine)
        engine.call("policy_zero_grad")
        for part in (batch[:4], batch[4:]):
            forward_backward(engine, part, loss)
        for name, gradient in gradients(engine).items():
            torch.testing.assert_close(gradient, once[name], rtol=1e-4, atol=1e-6)
        with pytest.raises(LossError, match="in other shares"):
            forward_backward(engine, judged(), rl.log_exp(ties=0.5))
        engine.call("policy_zero_grad")
        with pytest.raises(LossError, match=r"ties=0\.01"):
            forward_backward(engine, judged(), loss)
        plain = forward_backward(engine, pairs_batch(), loss)[0]["metrics"]["loss"]  # pairs that name none: the sum
        whole, _ = at_the_ends(engine, batch)
        assert plain == pytest.approx(np.log1p(np.exp(whole[1::2] - whole[0::2])).mean(), abs=1e-5)


def test_the_scale_of_hps_goes_down_the_slope_of_all_heads(qwen: str) -> None:
    loss = rl.hps(log_scale=0.7, preference=0.8, scale_lr=0.5, ties=0.01)
    with ranks(2, RewardSpec(qwen, head_seed=3, heads=HEADS)) as engine:
        _, each = at_the_ends(engine, judged())
        log_scale, total = torch.tensor(0.7, requires_grad=True), torch.zeros(())
        for k, head in enumerate(HEADS):
            losses = []
            for i, said in enumerate(SAID):
                if head in said:
                    pair = torch.from_numpy(each[2 * i : 2 * i + 2, k]).float().flip([0] if said[head] < 0 else [])
                    own = cross_entropy(pair[None] * log_scale.exp(), torch.tensor([[0.8, 0.2]]))
                    losses.append(own if said[head] else own * 0)
            total = total + (torch.stack(losses).mean() if losses else 0.0)
        total.backward()
        forward_backward(engine, judged(), loss, whole_step=True)
        engine.call("policy_optim_step", {"whole_step": True})
        after = forward_backward(engine, judged(), loss, whole_step=True)[0]["metrics"]
        assert after["log_scale"] == pytest.approx(0.7 - 0.5 * float(log_scale.grad), abs=1e-5) != 0.7


def test_one_process_scores_what_was_saved_and_shows_each_head(tiny_path: Path, tmp_path: Path) -> None:
    saved = str(tmp_path / "rm")
    with ranks(1, RewardSpec(str(tiny_path), heads=HEADS, lora=Lora(rank=2))) as engine:

        def trained() -> Any:
            return [n for n, p in module.named_parameters() if p.requires_grad]  # type: ignore[name-defined]

        assert {f"shaped_score.{name}_head.weight" for name in HEADS} <= set(engine.run(trained)[0])
        engine.call("export_model", saved, str(tiny_path), None)
        state = {n: t for n, t in engine.call("whole_state")[0].items() if n.startswith("shaped_score.")}
    rollouts = written(["sort 21 :", "312"], [["12", "a longer answer, with more tokens"], ["", "7"]])
    scored = rollouts.score(rewards.model(saved, device="cpu", batch_size=3, as_sampled=True))
    backbone = Qwen2Model.from_pretrained(tiny_path, dtype=torch.float32).state_dict()
    model = Plain(str(tiny_path), {f"model.{name}": t for name, t in backbone.items()} | state)
    rows = [[*one.prompt_token_ids.tolist(), *one.token_ids] for one in rollouts.flat]
    wanted = torch.stack([model(ids) for ids in rows]).detach().numpy()
    for i, name in enumerate(HEADS):
        np.testing.assert_allclose(scored.components[name], wanted[:, i], atol=1e-5)
    np.testing.assert_allclose(scored.rewards, wanted @ list(HEADS.values()), atol=1e-5)

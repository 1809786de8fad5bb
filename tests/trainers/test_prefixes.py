"""Prompts that sequences share are computed once: no number changes, rows go together, budgets and ranks are kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen2ForCausalLM

from rlbench.data.base.ragged import Ragged
from rlbench.data.batches.batch import TrainBatch
from rlbench.errors import EngineError
from rlbench.options import OptionError
from rlbench.trainers.models.score_model import ScoreModel
from rlbench.trainers.passes.forward import PolicyModel
from rlbench.trainers.passes.micro_batches import plan_micro_batches
from rlbench.trainers.passes.packing import model_inputs
from rlbench.trainers.passes.prefixes import OWN, kept_together
from rlbench.trainers.update.options import PolicyOptions
from tests.modules import batch_of, save_qwen
from tests.trainers.test_packing import SMALL, by_hand, capped, with_sinks

CPU = torch.device("cpu")
GROUPS = [(6, 9), (6, 2), (6, 9), (3, 4), (6, 1), (3, 4), (1, 7), (6, 0), (8, 5), (6, 9)]
"""Lengths of prompt and response; those of one prompt's length have one prompt, but for the last, which has its own."""


def sharing(lengths: list[tuple[int, int]] = GROUPS, seed: int = 0, **fields: Any) -> TrainBatch:
    """A batch whose prompts of one length are the same, the last row's apart."""
    made = batch_of(lengths, seed, **fields)
    first = {int(n): row for row, n in reversed(list(enumerate(made.prompts.lengths[:-1])))}
    prompts = [made.prompts[first[int(n)]] for n in made.prompts.lengths[:-1]]
    return made.replace(prompts=Ragged.from_rows([*prompts, made.prompts[len(made) - 1]], np.int32))


def passed(model: Any, given: TrainBatch, share: bool, weights: torch.Tensor) -> tuple[Any, dict[str, torch.Tensor]]:
    """Log-probs and entropies of a pass, its layout, and the gradients of a loss that weighs both."""
    model.zero_grad()
    with PolicyModel(model, CPU, half=False).stats(given, 0.8, True, share_prompts=share) as (found, inputs):
        (weights[0] * found.logprobs + weights[1] * found.entropy).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return (torch.stack([found.logprobs, found.entropy]).detach(), inputs), gradients


def test_a_layout_has_each_prompt_once_and_predicts_first_tokens_from_its_end() -> None:
    given = sharing()
    inputs = model_inputs(given, CPU, True, share_prompts=True)
    ids, places = inputs.input_ids[0].numpy(), inputs.position_ids[0].numpy()
    own = 6 + 3 + (1 + 7) + (8 + 5) + (6 + 9)  # the prompts that are shared, and whole rows of those that are not
    assert len(ids) == sum(inputs.lengths) == own + (9 + 2 + 9 + 4 + 1 + 4)
    assert inputs.after is not None and inputs.after.count(OWN) == 5
    predictors = Ragged(inputs.predictors.numpy(), given.responses.offsets)
    for row, (prompt, response) in enumerate(zip(given.prompts, given.responses, strict=True)):
        for k, at in enumerate(predictors[row]):
            before = np.concatenate([prompt, response[:k]])
            assert ids[at] == before[-1] and places[at] == len(before) - 1, (row, k)
    np.testing.assert_array_equal(inputs.targets.numpy(), given.responses.values)


def test_rows_that_share_nothing_are_laid_out_as_ever() -> None:
    given = batch_of(GROUPS)
    ours, plain = (model_inputs(given, CPU, True, share_prompts=share) for share in (True, False))
    assert ours.after is None and ours.lengths == plain.lengths
    for name in ("input_ids", "position_ids", "predictors", "targets"):
        assert torch.equal(getattr(ours, name), getattr(plain, name)), name


def windowed() -> Any:
    return MistralForCausalLM(MistralConfig(**SMALL))


@pytest.mark.parametrize("make", [None, windowed, capped, with_sinks])
def test_values_and_gradients_are_those_of_packed_rows(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM.from_pretrained(save_qwen(tmp_path)) if make is None else make()
    given, weights = sharing(), torch.randn(2, sum(response for _, response in GROUPS))
    (ours, layout), gradients = passed(model, given, True, weights)
    (plain, whole), expected = passed(model, given, False, weights)
    assert layout.input_ids.numel() < whole.input_ids.numel()
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    given = given.rows(given.responses.lengths > 0)
    with torch.no_grad(), PolicyModel(model, CPU, half=False).stats(given, 1.0, True, share_prompts=True) as (found, _):
        logprobs = found.logprobs.numpy()
    np.testing.assert_allclose(logprobs, by_hand(model.eval(), given), atol=1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_a_plan_keeps_groups_together_within_the_budget_and_gives_every_rank_its_part(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups, n = int(rng.integers(1, 9)), int(rng.integers(1, 9))
    lengths = [(int(p), int(rng.integers(1, 40))) for p in rng.permutation(np.arange(2, 90))[:groups] for _ in range(n)]
    order = rng.permutation(len(lengths))
    given = sharing([*(lengths[i] for i in order), (1, 1)])
    world, budget = int(rng.integers(1, 4)), int(rng.integers(1, 800))
    together, added = kept_together(given, world, budget)
    plan = plan_micro_batches(added, world, budget, together)
    rows = np.concatenate([rows for steps in plan for rows in steps])
    assert sorted(rows.tolist()) == list(range(len(given)))
    longest = int(given.lengths.max())
    for steps in plan:
        for held in steps:
            if len(held):
                tokens = sum(model_inputs(given.rows(held), CPU, True, share_prompts=True).lengths)
                assert tokens <= max(budget, longest)
    if budget >= given.lengths.sum():
        assert all(len(held) for steps in plan for held in steps) or len(given) < world
        assert world > 1 or added.sum() == given.responses.lengths.sum() + sum(set(given.prompts.lengths.tolist()))


def test_a_group_is_split_into_no_more_parts_than_ranks_have_shares_of_it() -> None:
    alone = sharing([(256, 64)] * 8 + [(1, 1)])[:8]
    together, added = kept_together(alone, 2, 10_000)
    assert len(set(together.tolist())) == 2 and added.sum() == 2 * 256 + 8 * 64
    three = sharing([(p, 64) for p in (100, 101, 102) for _ in range(4)] + [(1, 1)])[:12]
    together, _ = kept_together(three, 2, 10_000)
    assert len(set(together.tolist())) == 3


def test_the_two_of_a_pair_share_their_prompt_and_stay_together() -> None:
    lengths = [(5, 4), (5, 7), (5, 2), (5, 3), (4, 6), (4, 1)]
    given = sharing([*lengths, (2, 2)], pair=np.array([3, 3, 0, 0, 7, 7, -1]))
    together, added = kept_together(given, 2, 1000)
    assert together.tolist() == [3, 3, 0, 0, 7, 7, -7]
    assert added.tolist() == [9, 7, 7, 3, 10, 1, 4]


def test_a_model_that_tells_sequences_apart_by_their_places_is_refused(tmp_path: Path) -> None:
    class Restarting(Qwen2ForCausalLM):
        """Counts places from the last 0 on, which is right where every sequence begins with its prompt."""

        def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=None, **kwargs):  # type: ignore[no-untyped-def]
            at = torch.arange(position_ids.shape[1])[None]
            begun = torch.where(position_ids == 0, at, 0).cummax(dim=1).values
            given = {"attention_mask": attention_mask, "position_ids": at - begun, "use_cache": use_cache}
            return super().forward(input_ids, **given, **kwargs)

    model = Restarting.from_pretrained(save_qwen(tmp_path)).eval()
    policy = PolicyModel(model, CPU, half=False)
    policy.prove(sharing(), True, "plain")
    with pytest.raises(EngineError, match=r"behind a prompt that they share.*pass share_prompts=False"):
        policy.prove(sharing(), True, "plain", share_prompts=True)


def test_ranks_that_split_sequences_and_reward_models_share_nothing(tmp_path: Path) -> None:
    model: Any = Qwen2ForCausalLM.from_pretrained(save_qwen(tmp_path))
    split: Any = SimpleNamespace(size=2)
    with pytest.raises(OptionError, match="share_prompts=True and sequence_parallel=2"):
        PolicyModel(model, CPU, half=False, ranks=split).check_shared(sharing())
    with pytest.raises(OptionError, match="share_prompts=True and a reward model"):
        ScoreModel(model, CPU, half=False).check_shared(sharing())


def test_padded_rows_share_nothing() -> None:
    with pytest.raises(OptionError, match="packing=False"):
        PolicyOptions(packing=False, share_prompts=True)

"""Ranks that split the tokens of sequences give what one plain process gives: numbers, losses, gradients; trainers also
where ranks compute layers together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import rlbench.nn
from rlbench.data.base.ragged import rows_in_order
from rlbench.engines.parallel import NeedParallel, split_call
from rlbench.errors import DataError, EngineError
from rlbench.trainers import SPMDPPOTrainer, make_critic
from tests.modules import VOCAB, RunningMeanModel, TrainedQwen, qwen_on_meta
from tests.ranks import Ranks, ranks
from tests.trainers.making import LONGEST, TableEngine, asked, last_token, qwen_of
from tests.trainers.policy_reference import GRPO, assert_gradients, batch, by_hand, forward_backward
from tests.trainers.small_trainer import OPTIONS, Synced

pytestmark = pytest.mark.slow


def save(folder: Path, heads: int, kv_heads: int, **more: Any) -> str:
    """A Qwen2 with these heads; returns its folder."""
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=8 * heads,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=256,
        **more,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("world_size", "size", "heads", "options"),
    [
        (2, 2, (4, 2), {}),
        (2, 2, (4, 1), {"token_budget": 20, "aggregation": "seq-mean-token-mean"}),
        (2, 2, (3, 3), {"packing": False, "head": "plain"}),
        (4, 4, (4, 2), {"token_budget": 30}),
        (3, 3, (4, 2), {"token_budget": 20}),
        (4, 2, (3, 1), {"token_budget": 20}),
    ],
    ids=[
        "heads",
        "one head of keys",
        "slices, padded",
        "four ranks",
        "three ranks, computed again",
        "two groups, slices",
    ],
)
def test_a_step_of_ranks_that_split_sequences_is_that_of_one_plain_process(
    tmp_path: Path, world_size: int, size: int, heads: tuple[int, int], options: dict[str, Any]
) -> None:
    path, given = save(tmp_path, *heads), batch(temperature=0.8)
    model = Qwen2ForCausalLM.from_pretrained(path)
    total, expected = by_hand(model, given, GRPO, options.get("aggregation", "token-mean"))
    total.backward()
    with ranks(world_size, qwen_on_meta(path), sequence_parallel=size) as engine:
        engine.run(note_widths)
        if world_size == 3:
            engine.run(compute_again)
        results = forward_backward(engine, given, **options)
        assert_gradients(engine, model)
        widths = engine.run(noted_widths)
        scored = rows_in_order(engine.call("policy_forward", given, options))
        noted = tokens_of(engine)
    with ranks(1, qwen_on_meta(path)) as engine:
        forward_backward(engine, given, **options)
        alone = tokens_of(engine)
    padded = 0 if options.get("packing", True) else len(given) * int(given.lengths.max()) - int(given.lengths.sum())
    for first in range(0, world_size, size):  # the ranks of a group run slices of one length
        assert len(set(map(tuple, widths[first : first + size]))) == 1
    assert 0 <= sum(map(sum, widths)) - padded - int(given.lengths.sum()) < size * sum(map(len, widths))
    assert all(result["metrics"] == results[0]["metrics"] for result in results)
    for name, value in expected.items():
        assert results[0]["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    trained = rows_in_order(results)
    for name in ("logprobs", "entropy"):
        torch.testing.assert_close(*(torch.from_numpy(found[name].values) for found in (trained, scored)))
    assert set(noted) == set(alone) == {"coefficient", "entropy_coefficient", "hidden_gradient"}
    for name, values in alone.items():
        torch.testing.assert_close(noted[name], values, rtol=1e-4, atol=1e-6)


def note_widths() -> None:
    """Note how many tokens each forward that trains runs through the model here."""
    module.widths = []  # type: ignore[name-defined]
    widths = module.widths  # type: ignore[name-defined]

    def note(_: Any, given: tuple[torch.Tensor]) -> None:
        if torch.is_grad_enabled():
            widths.append(given[0].numel())

    module.get_input_embeddings().register_forward_pre_hook(note)  # type: ignore[name-defined]


def compute_again() -> None:
    """Have each layer's forward computed again in the backward."""
    module.gradient_checkpointing_enable()  # type: ignore[name-defined]
    module.train()  # type: ignore[name-defined]


def noted_widths() -> list[int]:
    return list(module.widths)  # type: ignore[name-defined]


def tokens_of(engine: Ranks) -> dict[str, torch.Tensor]:
    """What the backward gave each token, in the batch's order."""
    parts = [batch for found in engine.call("gradient_facts") for batch in found["batches"]]
    return {name: torch.from_numpy(found.values) for name, found in rows_in_order(parts).items()}


class OwnLoss(TrainedQwen):
    """A step as a user writes it: the labels are split as the tokens are."""

    def labelled_step(self, ids: torch.Tensor, labels: torch.Tensor, **more: Any) -> tuple[int, ...]:
        logits = self(ids, **more).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        self.strategy.backward(loss, self, self.optimizer)
        return tuple(ids.shape)


@pytest.mark.parametrize("heads", [(4, 2), (3, 1)], ids=["heads", "slices"])
def test_a_users_own_step_sees_slices_of_its_rows_and_has_the_gradient_of_the_whole(
    tmp_path: Path, heads: tuple[int, int]
) -> None:
    path, rows = save(tmp_path, *heads), torch.randint(0, VOCAB, (3, 9), generator=torch.Generator().manual_seed(2))
    model = Qwen2ForCausalLM.from_pretrained(path)
    torch.nn.functional.cross_entropy(model(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
    split = tuple(NeedParallel(one, type="seq") for one in (rows[:, :-1], rows[:, 1:]))
    calls, tokens = split_call(split, {}, 2, 2)
    with ranks(2, qwen_on_meta(path, OwnLoss), sequence_parallel=2) as engine:
        given = [("labelled_step", args, more, tokens) for args, more in calls]
        assert engine.call_each("call_method", given) == [(3, 4), (3, 4)]
        assert_gradients(engine, model)
        engine.call("policy_zero_grad")
        masked = torch.tensor([[1, 1, 1, 0]] * 3)
        with pytest.raises(DataError, match="leave attention_mask out"):
            engine.call_each("call_method", [(*one[:2], {"attention_mask": masked}, tokens) for one in given])
        assert engine.call_each("call_method", given) == [(3, 4), (3, 4)]
        assert_gradients(engine, model)


def test_a_model_that_cannot_be_split_is_refused_by_name() -> None:
    weights = RunningMeanModel().state_dict()
    with rlbench.nn.device("meta"):
        module = RunningMeanModel(source=weights)
    with ranks(2, module, sequence_parallel=2) as engine:
        with pytest.raises(EngineError, match="RunningMeanModel cannot run split over ranks"):
            forward_backward(engine, batch())


@pytest.mark.parametrize(
    "own",
    [{"advantage_estimator": "gae", "kl_coef": 0.1}, {"high_entropy_token_ratio": 0.4, "packing": True}],
    ids=["critic and reference", "a plan of the whole step"],
)
def test_a_trainer_takes_the_step_that_it_takes_with_rows_on_each_rank(qwen: str, own: dict[str, Any]) -> None:
    def run(sharing: dict[str, int]) -> Any:
        from rlbench.strategies import FSDPV2Strategy

        s: Any = FSDPV2Strategy(bf16=False, args={**OPTIONS, **sharing})
        s.gather_and_generate, s.update_engine_weights = TableEngine(), Synced()
        actor = s.prepare_model(qwen_of(qwen), is_training=True)
        given: dict[str, Any] = {}
        if "advantage_estimator" in own:
            critic = s.prepare_model(make_critic(qwen), is_training=True)
            given = {"critic_optim": s.create_optimizer(critic, lr=1e-3)}
            models = [actor, critic, last_token, s.prepare_model(qwen_of(qwen)), None]
        else:
            models = [actor, None, last_token, None, None]
        trainer = SPMDPPOTrainer(
            s,
            *models,
            s.create_optimizer(actor, lr=1e-3),
            prompts=asked(40),
            rollout_batch_size=4,
            max_tokens=LONGEST,
            prompt_max_len=16,
            **{"kl_coef": 0.0, **own},
            **given,
        )
        trainer.make_experience()
        metrics = trainer.ppo_train()
        return metrics, [p.full_tensor() for model in models[:2] if model is not None for p in model.parameters()]

    by_layers = {"tensor_parallel": 2, "micro_train_batch_size": 8}  # torch plans each new length of a micro-batch anew
    with ranks(2, qwen_on_meta(qwen)) as engine:
        alone, *shared = (engine.run(run, one)[0] for one in ({}, {"sp_size": 2}, by_layers))
    numbers = {name: value for name, value in alone[0].items() if not name.startswith(("perf/", "timing/"))}
    for metrics, parameters in shared:
        assert {name: metrics[name] for name in numbers} == pytest.approx(numbers, rel=1e-3, abs=1e-5)
        for here, there in zip(parameters, alone[1], strict=True):
            torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-4)  # AdamW: of small gradients, rounding

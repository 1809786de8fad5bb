"""An update on the ranks equals one step by hand, however it is split; what cannot be done ends alike on all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModel, Qwen2ForCausalLM

from rlbench.errors import DataError, EngineError, LossError, StateError, Stopped
from rlbench.rl import LossInputs, clip_cov, explained_variance, high_entropy, ppo, ptx_loss, token_tis
from rlbench.strategies import FSDPV2Strategy
from rlbench.trainers.models.value_model import make_critic
from rlbench.trainers.update.experience_update import PolicyUpdate
from rlbench.trainers.update.value_update import ValueUpdate
from tests.modules import qwen_on_meta
from tests.ranks import RankFailure, Ranks, ranks
from tests.trainers.update_reference import (
    EPS,
    LENGTHS,
    MODES,
    actor_of,
    assert_same,
    by_token,
    experience,
    fake,
    gradients,
    parts_of,
    policy_by_hand,
    value_loss_by_hand,
    values_by_hand,
    weights_of,
)

pytestmark = pytest.mark.slow

PPO = ppo(clip_low=EPS[0], clip_high=EPS[1])
FULL = ppo(clip_low=EPS[0], clip_high=EPS[1], kl_coef=0.1, entropy_coef=0.02)


@pytest.fixture(scope="module")
def engine(qwen: str) -> Any:
    with ranks(2, qwen_on_meta(qwen)) as made:
        yield made


def policy(path: str, loss: Any = FULL, mode: str = "seq-mean-token-mean", **own: Any) -> PolicyUpdate:
    strategy = own.pop("strategy", None) or fake()
    actor, optimizer = actor_of(path, strategy)
    return PolicyUpdate(actor, optimizer, None, strategy, loss, mode, **own)


def value(path: str, clip: float | None = 0.2, mode: str = "seq-mean-token-mean", **own: Any) -> ValueUpdate:
    strategy = own.pop("strategy", None) or fake()
    critic = strategy.prepare_model(make_critic(path, seed=3), is_training=True)
    optimizer = strategy.create_optimizer(critic, lr=1e-2, weight_decay=0.0)
    return ValueUpdate(critic, optimizer, None, strategy, clip, mode, **own)


def expected_gradients(path: str, given: Any, mode: str, **own: Any) -> tuple[float, dict[str, Tensor]]:
    model = Qwen2ForCausalLM.from_pretrained(path)
    loss = policy_by_hand(model, given, mode, **own)
    loss.backward()
    return float(loss.detach()), gradients(model)


# -- the policy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_is_that_of_a_dense_step_for_each_aggregation(qwen: str, mode: str) -> None:
    """Defects absent: loss_agg_mode without effect; a gradient that is a sum over micro-batches; the KL loss without
    gradient under packing."""
    given = experience()
    loss, expected = expected_gradients(qwen, given, mode, kl_coef=0.1, entropy_coef=0.02)
    update = policy(qwen, FULL, mode)
    update.accumulate(parts_of(given, 3))
    assert_same(gradients(update.model), expected, atol=1e-5 if mode == "seq-mean-token-sum" else 1e-6)
    metrics = update.finish()
    assert metrics["policy_loss"] == pytest.approx(loss, rel=1e-4)
    assert 0 < metrics["clip_fraction"] < 1
    assert metrics["kl"] > 0 and metrics["ref_kl"] > 0 and metrics["kl"] != metrics["ref_kl"]


@pytest.mark.parametrize(
    "own",
    [
        {"packed": True, "head": "chunked", "size": 1},
        {"packed": True, "head": "plain", "size": 8},
        {"packed": False, "head": "chunked", "size": 5},
        {"packed": False, "head": "plain", "size": 2},
        {"packed": True, "head": "auto", "size": 3, "tile": 4},
    ],
)
def test_neither_micro_batches_nor_packing_nor_the_head_change_the_gradient(qwen: str, own: dict[str, Any]) -> None:
    given = experience()
    _, expected = expected_gradients(qwen, given, "seq-mean-token-mean", kl_coef=0.1, entropy_coef=0.02)
    size = own.pop("size")
    update = policy(qwen, **own)
    update.accumulate(parts_of(given, size))
    assert_same(gradients(update.model), expected)
    assert update.head_used.startswith("plain" if own["head"] == "plain" else "chunked")


def test_prompts_that_samples_share_are_computed_once_and_the_gradient_is_the_same(qwen: str) -> None:
    given = experience()
    owners = np.arange(len(given)) // 3 * 3
    given = replace(given, batch=given.batch.replace(prompts=given.batch.prompts.take(owners)))
    _, expected = expected_gradients(qwen, given, "seq-mean-token-mean", kl_coef=0.1, entropy_coef=0.02)
    computed = []
    for share in (False, True):
        update = policy(qwen, share_prompts=share)
        tokens: list[int] = []
        update.model.register_forward_pre_hook(
            lambda _, args, kwargs, seen=tokens: seen.append(args[0].numel() if args else kwargs["input_ids"].numel()),
            with_kwargs=True,
        )
        update.accumulate(parts_of(given, 3))
        assert_same(gradients(update.model), expected)
        computed.append(sum(tokens[-len(parts_of(given, 3)) :]))
    assert computed[0] == given.batch.lengths.sum() and computed[1] < computed[0]


def test_the_temperature_of_the_sampler_divides_the_logits(qwen: str) -> None:
    given = experience(temperature=0.7)
    _, expected = expected_gradients(qwen, given, "token-mean", temperature=0.7)
    for own in ({}, {"temperature": 0.7}):
        update = policy(qwen, PPO, "token-mean", **own)
        update.accumulate(parts_of(given, 4))
        assert_same(gradients(update.model), expected)


def test_a_step_moves_the_weights_as_adamw_by_hand_with_the_clipped_gradient(qwen: str) -> None:
    given = experience()
    model = Qwen2ForCausalLM.from_pretrained(qwen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    strategy = fake(max_norm=0.05)
    actor, own = actor_of(qwen, strategy)
    rate = torch.optim.lr_scheduler.LambdaLR(own, lambda step: 1.0 / (1 + step))
    update = PolicyUpdate(actor, own, rate, strategy, PPO, "token-mean")
    for factor in (1.0, 0.5):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * factor
        policy_by_hand(model, given, "token-mean").backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()
        metrics = update.step(parts_of(given, 3))
        assert metrics["actor_grad_norm"] == pytest.approx(norm, rel=1e-3) and norm > 0.05
        assert metrics["actor_lr"] == pytest.approx(1e-2 * factor) and metrics["actor_skipped"] == 0
    assert_same(weights_of(actor), weights_of(model), atol=2e-4)  # AdamW divides by the root of tiny squares


def test_two_epochs_of_ppo_with_a_critic_are_those_written_by_hand(qwen: str) -> None:
    given = experience()
    actor, critic = policy(qwen, PPO, "token-mean"), value(qwen, 0.2, "token-mean")
    model, backbone = Qwen2ForCausalLM.from_pretrained(qwen), AutoModel.from_pretrained(qwen)
    head = critic.critic.score.weight.detach().clone().requires_grad_()
    optimizer = torch.optim.AdamW([*model.parameters(), *backbone.parameters(), head], lr=1e-2, weight_decay=0.0)
    for _ in range(2):
        for rows in ([0, 1, 2, 3], [4, 5, 6, 7]):
            own = given.rows(rows)
            loss = policy_by_hand(model, own, "token-mean")
            its = value_loss_by_hand(values_by_hand(backbone, head, own), own, "token-mean", 0.2)
            (loss + its).backward()
            optimizer.step()
            optimizer.zero_grad()
            found = actor.step(parts_of(own, 3)) | critic.step(parts_of(own, 3))
            assert found["policy_loss"] == pytest.approx(float(loss.detach()), rel=1e-3, abs=1e-4)
            assert found["critic_loss"] == pytest.approx(float(its.detach()), rel=1e-3, abs=1e-4)
    assert_same(weights_of(actor.model), weights_of(model), atol=2e-3)
    expected = {f"model.{name}": weight for name, weight in weights_of(backbone).items()}
    assert_same(weights_of(critic.model), expected | {"score.weight": head.detach()}, atol=2e-3)


def test_max_norm_0_does_not_clip(qwen: str) -> None:
    """Defect absent: max_norm=0, documented as no clipping, set all gradients to 0."""
    update = policy(qwen, strategy=fake(max_norm=0.0))
    before = weights_of(update.model)
    assert update.step(parts_of(experience(), 4))["actor_grad_norm"] > 0
    assert any(not torch.equal(before[name], now) for name, now in weights_of(update.model).items())


def test_a_row_without_trained_tokens_gives_no_nan_and_changes_nothing(qwen: str) -> None:
    """Defect absent: a response whose mask is all False made the loss NaN, and the whole step was lost."""
    given = experience()
    masked = given.batch.mask.copy()
    masked[given.batch.responses.offsets[2] : given.batch.responses.offsets[3]] = False
    given = replace(given, batch=given.batch.replace(mask=masked))
    for mode in MODES:
        loss, expected = expected_gradients(qwen, given, mode)
        update = policy(qwen, PPO, mode)
        update.accumulate([given.rows([2]), *parts_of(given.rows([0, 1, 3, 4, 5, 6, 7]), 3)])
        found = gradients(update.model)
        if mode != "seq-mean-token-sum-norm":  # there the length of the longest response counts, trained or not
            without = policy(qwen, PPO, mode)
            without.accumulate(parts_of(given.rows([0, 1, 3, 4, 5, 6, 7]), 3))
            assert_same(found, gradients(without.model))
        assert_same(found, expected, atol=1e-5 if mode == "seq-mean-token-sum" else 1e-6)
        assert update.finish()["policy_loss"] == pytest.approx(loss, rel=1e-4)


def test_a_step_without_any_trained_token_is_skipped_and_says_so(qwen: str, capsys: Any) -> None:
    given = experience()
    given = replace(given, batch=given.batch.replace(mask=np.zeros_like(given.batch.mask)))
    for update in (policy(qwen), value(qwen)):
        before = weights_of(update.model)
        metrics = update.step(parts_of(given, 3))
        assert metrics[f"{update.name}_skipped"] == 1 and "no trained token" in capsys.readouterr().out
        assert_same(weights_of(update.model), before, atol=0)
        assert not update.waiting and not update.optimizer.state


@pytest.mark.parametrize("no_signal", ["step", "skip"])
def test_a_step_without_a_signal_says_so_and_moves_by_moments_unless_it_is_left_out(qwen: str, no_signal: str) -> None:
    given = experience()
    silent = replace(given, batch=given.batch.replace(advantages=np.zeros_like(given.batch.advantages)))
    update = policy(qwen, no_signal=no_signal)
    assert update.step(parts_of(given, 3))["no_signal"] == 0
    before = weights_of(update.model)
    metrics = update.step(parts_of(silent, 3))
    assert metrics["no_signal"] == 1 and metrics["actor_skipped"] == (no_signal == "skip")
    assert (no_signal == "skip") == all(
        torch.equal(before[name], now) for name, now in weights_of(update.model).items()
    )


def test_a_signal_in_part_of_a_step_is_a_share(qwen: str) -> None:
    given = experience()
    advantages = given.batch.advantages.copy()
    advantages[: given.batch.responses.offsets[2]] = 0
    given = replace(given, batch=given.batch.replace(advantages=advantages))
    update = policy(qwen, no_signal="skip")
    metrics = update.step(parts_of(given, 3))
    assert metrics["no_signal"] == pytest.approx(2 / 8) and metrics["actor_skipped"] == 0


def test_calls_that_accumulate_equal_one_step_on_everything(qwen: str) -> None:
    """Gradients that wait are scaled to the larger normaliser; so are the metrics."""
    first, second = experience(0), experience(1, LENGTHS[2:7])
    for mode in MODES:
        for make in (policy, value):
            apart, whole = make(qwen, mode=mode), make(qwen, mode=mode)
            apart.accumulate(parts_of(first, 3))
            apart.accumulate([])
            apart.accumulate(parts_of(second, 2))
            whole.accumulate(parts_of(first, 4) + parts_of(second, 4))
            assert_same(gradients(apart.model), gradients(whole.model), atol=1e-5 if "sum" in mode else 1e-6)
            found, expected = apart.finish(), whole.finish()
            assert set(found) == set(expected)
            for name, number in expected.items():
                assert found[name] == pytest.approx(number, rel=2e-4, abs=2e-6), (mode, name)


def test_old_log_probs_that_are_not_there_are_the_samplers(qwen: str) -> None:
    given = experience()
    update = policy(qwen, ppo(clip_low=EPS[0], clip_high=EPS[1], anchor="sampler"), "token-mean")
    update.accumulate(parts_of(replace(given, batch=given.batch.replace(old_logprobs=None)), 3))
    sampled = replace(given, batch=given.batch.replace(old_logprobs=given.batch.sampler_logprobs))
    _, expected = expected_gradients(qwen, sampled, "token-mean")
    assert_same(gradients(update.model), expected)
    assert not any(name.startswith("mismatch/") for name in update.finish())


# -- losses with a plan, and text -------------------------------------------------------------------------------------


def test_the_high_entropy_filter_sees_the_whole_step_however_it_is_split(qwen: str) -> None:
    """Defect absent: high_entropy_token_ratio never reached the loss."""
    first, second = experience(0), experience(1)
    model = Qwen2ForCausalLM.from_pretrained(qwen)
    entropies, masks = [], []
    for given in (first, second):
        for i, (prompt, response) in enumerate(zip(given.batch.prompts, given.batch.responses, strict=True)):
            at = slice(given.batch.responses.offsets[i], given.batch.responses.offsets[i + 1])
            entropies.append(by_token(model, prompt, response)[1].detach())
            masks.append(torch.from_numpy(given.batch.mask[at]))
    trained = torch.cat(entropies)[torch.cat(masks)]
    least = trained.sort(descending=True).values[int(0.3 * len(trained)) - 1]
    kept = [(entropy >= least).float() for entropy in entropies]
    both = joined(first, second)
    policy_by_hand(model, both, "token-mean", kl_coef=0.1, kept=kept).backward()
    loss = replace(PPO, kl_coef=0.1, tokens=high_entropy(fraction=0.3))
    for calls in ([parts_of(both, 3)], [parts_of(first, 5), parts_of(second, 1)]):
        update = policy(qwen, loss, "token-mean")
        seen = taken_at_the_step(update)
        for call in calls:
            update.accumulate(call)
        metrics = update.finish()
        assert_same(seen[0], gradients(model))
        assert metrics["tokens_kept"] == pytest.approx(0.3, abs=0.01)


def test_pretraining_text_adds_its_own_mean_whatever_the_policy_is_normalised_by(qwen: str) -> None:
    given = experience()
    texts = [[[1, 2, 3, 4, 5], [7, 8]], [[9, 9, 2, 30, 31, 5, 6]]]
    model = Qwen2ForCausalLM.from_pretrained(qwen)
    policy_by_hand(model, given, "seq-mean-token-sum").backward()
    rows = [row for text in texts for row in text]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for row, own in enumerate(rows):
        ids[row, : len(own)], mask[row, : len(own)] = torch.tensor(own), True
    per_token = ptx_loss(model(ids).logits, ids, mask)
    mean = per_token.sum() / mask[:, 1:].sum()
    (0.3 * mean).backward()
    for calls in ([(given, texts)], [(given.rows([0, 1, 2]), texts[:1]), (given.rows([3, 4, 5, 6, 7]), texts[1:])]):
        update = policy(qwen, PPO, "seq-mean-token-sum", ptx_coef=0.3)
        seen = taken_at_the_step(update)
        for part, text in calls:
            update.accumulate(parts_of(part, 3), text)
        metrics = update.finish()
        assert_same(seen[0], gradients(model), atol=1e-5)
        assert metrics["ptx_loss"] == pytest.approx(float(mean.detach()), rel=1e-4)


def joined(*parts: Any) -> Any:
    from rlbench.trainers.experience.values import Experience

    return Experience.joined(parts)


def taken_at_the_step(update: Any) -> list[dict[str, Tensor]]:
    """The gradients that each optimizer step finds."""
    found: list[dict[str, Tensor]] = []
    update.optimizer.register_step_pre_hook(lambda *_: found.append(gradients(update.model)))
    return found


# -- the critic -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("clip", "packed", "size"), [(0.2, True, 3), (None, False, 8)])
def test_the_critics_gradient_is_that_of_a_dense_step(
    qwen: str, mode: str, clip: float | None, packed: bool, size: int
) -> None:
    given = experience()
    update = value(qwen, clip, mode, packed=packed)
    head = update.critic.score.weight.detach().clone().requires_grad_()
    backbone = AutoModel.from_pretrained(qwen)
    found = values_by_hand(backbone, head, given)
    loss = value_loss_by_hand(found, given, mode, clip)
    loss.backward()
    update.accumulate(parts_of(given, size))
    expected = {f"model.{name}": gradient for name, gradient in gradients(backbone).items()}
    assert_same(gradients(update.model), expected | {"score.weight": head.grad}, atol=5e-6)
    metrics = update.finish()
    mask = torch.from_numpy(given.batch.mask)[None]
    values, returns = torch.cat(found).detach()[None], torch.from_numpy(given.returns)[None]
    assert metrics["critic_loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert metrics["values"] == pytest.approx(float(values[mask].mean()), abs=1e-5)
    assert metrics["returns"] == pytest.approx(float(returns[mask].mean()), abs=1e-5)
    assert metrics["explained_variance"] == pytest.approx(explained_variance(values, returns, mask), abs=1e-5)
    assert (metrics["value_clip_fraction"] > 0) == (clip is not None)


def test_actor_and_critic_clip_their_own_gradients(qwen: str) -> None:
    """Defect absent: the actor's step clipped the gradients of the optimizer that was made last, the critic's."""
    strategy = fake(max_norm=1e-3)
    given = parts_of(experience(), 4)
    actor, critic = policy(qwen, strategy=strategy), value(qwen, strategy=strategy)
    critic.accumulate(given)
    waiting = gradients(critic.model)
    seen = taken_at_the_step(actor)
    assert actor.step(given)["actor_grad_norm"] > 1e-3
    assert_same(gradients(critic.model), waiting, atol=0)
    assert float(torch.cat([g.flatten() for g in seen[0].values()]).norm()) == pytest.approx(1e-3, rel=1e-3)


# -- ranks ----------------------------------------------------------------------------------------------------------


def on_ranks(path: str, given: Any, size: int, shares: list[list[int]], **own: Any) -> dict[str, Any]:
    """A policy and a critic step on each rank's share; everything whole at the end."""
    strategy = FSDPV2Strategy(bf16=False, args=own.pop("args", None))
    mine = shares[strategy.rank]
    found: dict[str, Any] = {}
    texts = [[[1, 2, 3, 4], [5, 6]]] if strategy.rank == 0 else [[[7, 8, 9]], [[4, 4]]]
    for make in (policy, value):
        options = own if make is policy else {"mode": own.get("mode", "seq-mean-token-mean")}
        update = make(path, strategy=strategy, **options)
        seen = taken_at_the_step(update)
        parts = parts_of(given.rows(mine), size) if mine else []
        arguments = (parts, texts) if own.get("ptx_coef") and make is policy else (parts,)
        found[update.name] = (update.step(*arguments), seen, weights_of(update.model))
    return found


@pytest.mark.parametrize(
    "own",
    [
        {"mode": "seq-mean-token-mean", "ptx_coef": 0.2},
        {
            "mode": "token-mean",
            "loss": replace(FULL, tokens=high_entropy(fraction=0.4)),
            "packed": False,
            "head": "plain",
        },
        {"mode": "seq-mean-token-sum-norm", "loss": clip_cov()},
        {"mode": "prompt-mean", "loss": replace(FULL, mismatch=token_tis(normalise=True))},
    ],
)
@pytest.mark.parametrize("shares", [[[0, 1, 2, 3, 4], [5, 6, 7]], [[0, 1, 2, 3, 4, 5, 6, 7], []]])
def test_two_ranks_give_what_one_process_gives_on_all_sequences(
    qwen: str, engine: Ranks, own: dict[str, Any], shares: list[list[int]]
) -> None:
    given = experience()
    results = engine.run(lambda: on_ranks(qwen, given, 3, shares, **own))
    alone = {"policy": policy(qwen, **own), "value": value(qwen, mode=own["mode"])}
    for update in alone.values():
        seen = taken_at_the_step(update)
        with_text = own.get("ptx_coef") and update.name == "actor"
        texts = ([[[1, 2, 3, 4], [5, 6], [7, 8, 9]], [[4, 4]]],) if with_text else ()
        expected = update.step(parts_of(given, 8), *texts)
        for metrics, gradient, weights in (result[update.name] for result in results):
            assert metrics == results[0][update.name][0] and set(metrics) == set(expected)
            for name, number in expected.items():
                assert metrics[name] == pytest.approx(number, rel=2e-4, abs=2e-6), name
            assert_same(gradient[0], seen[0], atol=2e-6)
            assert_same(weights, weights_of(update.model), atol=2e-3)


@pytest.mark.parametrize("args", [{"use_mp_opt": True}, {"adam_offload": True}, {"fsdp_cpu_offload": True}])
def test_the_options_of_the_strategy_hold_for_updates_too(qwen: str, engine: Ranks, args: dict[str, Any]) -> None:
    given = experience()
    found = engine.run(lambda: on_ranks(qwen, given, 3, [[0, 1, 2], [3, 4, 5, 6, 7]], args=args))
    for name, update in {"actor": policy(qwen), "critic": value(qwen)}.items():
        expected = update.step(parts_of(given, 8))
        metrics, _, weights = found[0][name]
        loose = 0.1 if "use_mp_opt" in args else 1e-3
        for key in (f"{name}_grad_norm", "policy_loss" if name == "actor" else "critic_loss"):
            assert metrics[key] == pytest.approx(expected[key], rel=loose, abs=loose), key
        apart = [float((weights[n].float() - w).abs().mean()) for n, w in weights_of(update.model).items()]
        assert max(apart) < (0.02 if "use_mp_opt" in args else 1e-4)


# -- faults ---------------------------------------------------------------------------------------------------------


def failing(fails: str) -> Any:
    """A loss that fails in one way on the micro-batches that hold a large advantage."""

    def loss(x: LossInputs) -> Any:
        torch.rand(3)  # as dropout would
        per_token, metrics = PPO(x)
        if bool((x.advantages > 50).any()):
            if fails == "raises":
                raise ZeroDivisionError("my own mistake")
            per_token = per_token * float("nan")
        return per_token, metrics

    return loss


@pytest.mark.parametrize("fails", ["raises", "nan"])
def test_a_loss_that_fails_on_one_rank_ends_the_step_on_all_with_nothing_half_done(
    qwen: str, engine: Ranks, fails: str
) -> None:
    given = experience()
    spoilt = given.batch.advantages.copy()
    spoilt[-3] = 99.0
    assert given.batch.mask[-3]
    spoilt_too = replace(given, batch=given.batch.replace(advantages=spoilt))
    loss = failing(fails)

    def tried() -> Any:
        strategy = FSDPV2Strategy(bf16=False)
        shares = [[0, 1, 2, 3, 4], [5, 6, 7]]
        update = policy(qwen, loss, strategy=strategy)
        before = weights_of(update.model)
        torch.manual_seed(5)
        try:
            update.step(parts_of(spoilt_too.rows(shares[strategy.rank]), 1))
            said = "it went through"
        except (EngineError, LossError, ZeroDivisionError) as error:
            said = f"{type(error).__name__}: {error}"
        state = (gradients(update.model), update.waiting, len(update.optimizer.state), float(torch.rand(1)))
        same = all(torch.equal(before[n], w) for n, w in weights_of(update.model).items())
        after = update.step(parts_of(given.rows(shares[strategy.rank]), 2))
        return said, state, same, after["policy_loss"]

    torch.manual_seed(5)
    drawn = float(torch.rand(1))
    peer, own = engine.run(tried)
    assert "failed on rank 1" in peer[0]
    assert ("my own mistake" if fails == "raises" else "are not finite") in own[0]
    expected = policy(qwen, PPO).step(parts_of(given, 8))["policy_loss"]
    for _, (left, waiting, state, random), same, after in (peer, own):
        assert (left, waiting, state, same) == ({}, False, 0, True) and random == drawn
        assert after == pytest.approx(expected, rel=1e-4)


def test_a_stop_on_one_rank_ends_the_step_on_all(qwen: str, engine: Ranks) -> None:
    given = experience()

    def tried() -> Any:
        strategy = FSDPV2Strategy(bf16=False)
        asked = [0]

        def stop() -> bool:
            asked[0] += 1
            return strategy.rank == 1 and asked[0] == 2

        update = policy(qwen, strategy=strategy, stop_requested=stop)
        before = weights_of(update.model)
        try:
            update.step(parts_of(given.rows([[0, 1, 2, 3], [4, 5, 6, 7]][strategy.rank]), 1))
        except Stopped as stopped:
            said = str(stopped)
        same = all(torch.equal(before[n], w) for n, w in weights_of(update.model).items())
        return said, gradients(update.model), asked[0], same, len(update.optimizer.state)

    for said, left, asked, same, state in engine.run(tried):
        assert "stopped: gradients were cleared" in said
        assert (left, asked, same, state) == ({}, 2, True, 0)


def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks_without_moving_the_rate(
    qwen: str, engine: Ranks
) -> None:
    """Defect absent: one infinite gradient, and the scheduler went on while the weights did not."""
    given = experience()

    def explodes(x: LossInputs) -> Any:
        # a finite loss whose gradient is not: the root of 0
        away = (x.logprobs - x.logprobs.detach()).abs().sqrt()
        return torch.where(x.advantages > 50, away, PPO(x)[0]), {}

    spoilt = given.batch.advantages.copy()
    spoilt[-3] = 99.0
    spoilt_too = replace(given, batch=given.batch.replace(advantages=spoilt))

    def tried() -> Any:
        strategy = FSDPV2Strategy(bf16=False)
        actor, optimizer = actor_of(qwen, strategy)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        update = PolicyUpdate(actor, optimizer, rate, strategy, explodes, "token-mean")
        before = weights_of(actor)
        metrics = update.step(parts_of(spoilt_too.rows([[0, 1, 2, 3], [4, 5, 6, 7]][strategy.rank]), 2))
        same = all(torch.equal(before[n], w) for n, w in weights_of(actor).items())
        return metrics["actor_skipped"], metrics["actor_grad_norm"], same, rate.last_epoch, len(optimizer.state)

    for skipped, norm, same, steps, state in engine.run(tried):
        assert (skipped, same, steps, state) == (1.0, True, 0, 0) and not np.isfinite(norm)


def test_what_cannot_be_trained_on_is_refused_before_anything_is_computed(qwen: str, engine: Ranks) -> None:
    given = experience()
    bare = replace(given, batch=given.batch.replace(ref_logprobs=None, old_logprobs=None), returns=None)
    reshaped = replace(given, batch=given.batch.replace(reshaped_by=("top_p=0.9",)))
    responses = given.batch.responses
    foreign = replace(given, batch=given.batch.replace(responses=responses.with_values(responses.values + 90)))
    cases = [
        (policy(qwen, FULL), bare, LossError, "initial_model"),
        (policy(qwen, replace(PPO, anchor="sampler")), reshaped, LossError, "top_p"),
        (policy(qwen, replace(PPO, mismatch=token_tis())), bare, LossError, "no old_logprobs"),
        (policy(qwen, PPO), foreign, DataError, "vocabulary has 96"),
        (value(qwen), foreign, DataError, "vocabulary has 96"),
        (value(qwen), bare, DataError, "no returns"),
        (value(qwen), replace(given, values=None), DataError, "needs the values"),
        (policy(qwen, PPO), replace(given, batch=given.batch.replace(temperature=0.0)), DataError, "greedily"),
    ]
    for update, wrong, kind, said in cases:
        update.accumulate([given.rows([0, 1])])
        waiting = gradients(update.model)
        with pytest.raises(kind, match=said):
            update.accumulate([given.rows([2]), wrong])
        assert_same(gradients(update.model), waiting, atol=0)  # what waited goes on waiting
        update.finish()
    with pytest.raises(EngineError, match="call accumulate"):
        policy(qwen).finish()
    with pytest.raises(DataError, match="ptx_coef=0"):
        policy(qwen).step(parts_of(given, 4), [[[1, 2]]])
    with pytest.raises(DataError, match="fewer than two tokens"):
        policy(qwen, ptx_coef=0.1).step(parts_of(given, 4), [[[1]]])

    def on_one() -> None:
        strategy = FSDPV2Strategy(bf16=False)
        policy(qwen, strategy=strategy).step([bare if strategy.rank else given])

    said = [outcome.error for outcome in engine.outcomes("run", [(dumped(on_one), (), {})] * 2)]
    assert all(isinstance(error, RankFailure | Exception) for error in said)
    assert "failed on rank 1" in str(said[0]) and "initial_model" in str(said[1])


def dumped(fn: Any) -> bytes:
    import cloudpickle

    return cloudpickle.dumps(fn)


def test_an_offloaded_optimizer_is_named_before_the_work_and_the_gradients_wait(qwen: str) -> None:
    strategy = fake(args={"adam_offload": True})
    update = policy(qwen, strategy=strategy)
    strategy.maybe_offload_optimizer(update.optimizer)
    with pytest.raises(StateError, match="maybe_load_optimizer"):
        update.step(parts_of(experience(), 4))
    assert not update.waiting
    update.accumulate(parts_of(experience(), 4))
    with pytest.raises(StateError, match="maybe_load_optimizer"):
        update.finish()
    assert update.waiting and gradients(update.model)
    strategy.maybe_load_optimizer(update.optimizer)
    assert update.finish()["actor_skipped"] == 0


def test_returns_that_are_not_finite_end_the_critics_step_with_nothing_half_done(qwen: str) -> None:
    given = experience()
    broken = given.returns.copy()
    broken[np.flatnonzero(given.batch.mask)[4]] = np.inf
    update = value(qwen)
    update.accumulate(parts_of(given, 4))
    with pytest.raises(LossError, match=r"1 of .* trained tokens are not finite"):
        update.accumulate(parts_of(replace(given, returns=broken), 4))
    assert not update.waiting and not gradients(update.model) and not update.optimizer.state


def test_a_prompts_sequences_cannot_be_split_over_calls_where_the_prompt_is_what_counts(qwen: str) -> None:
    given = experience()
    update = policy(qwen, mode="prompt-mean")
    update.accumulate([given.rows([0, 1, 2])])
    with pytest.raises(LossError, match="give all sequences of a prompt to one call"):
        update.accumulate([given.rows([3])])
    assert update.waiting

"""A policy step on ranks equals the same step written by hand in one process, however it is split; and it
can be stopped."""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM

import rlbench.nn
from rlbench.data.base.ragged import Ragged, rows_in_order
from rlbench.errors import DataError, EngineError, LossError, Stopped
from rlbench.options import OptionError
from rlbench.rl import LossInputs, grpo
from tests.modules import RAGGED, RunningMeanModel
from tests.ranks import RankFailure, SameRanks, ranks
from tests.trainers.policy_reference import GRPO, assert_gradients, batch, by_hand, forward_backward, run_steps

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {}),
        (1, {"token_budget": 25, "aggregation": "seq-mean-token-mean"}),
        (2, {"aggregation": "seq-mean-token-sum-norm"}),
        (2, {"token_budget": 16}),
        (2, {"token_budget": 30, "packing": False, "aggregation": "seq-mean-token-mean"}),
        (2, {"token_budget": 40, "aggregation": "token-sum"}),
    ],
)
def test_gradient_and_metrics_are_those_of_one_plain_process_however_the_batch_is_split(
    qwen: str, trained: SameRanks, world_size: int, options: dict[str, Any]
) -> None:
    given = batch(temperature=0.8)
    model = Qwen2ForCausalLM.from_pretrained(qwen)
    total, expected = by_hand(model, given, GRPO, options.get("aggregation", "token-mean"))
    total.backward()
    with trained(world_size) as engine:
        results = forward_backward(engine, given, **options)
        assert_gradients(engine, model, atol=1e-4 if options.get("aggregation") == "token-sum" else 2e-6)
    assert all(result["metrics"] == results[0]["metrics"] for result in results)
    for name, value in expected.items():
        assert results[0]["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert 0 < results[0]["metrics"]["clip_fraction"] < 1
    assert "loss/kl" not in results[0]["metrics"]  # the loss's own KL is `ref_kl`


@pytest.mark.parametrize(("world_size", "budget"), [(1, None), (2, 30), (2, 18)])
def test_gradient_and_metrics_are_the_same_where_prompts_are_shared(
    qwen: str, trained: SameRanks, world_size: int, budget: int | None
) -> None:
    given = batch(lengths=[(9, 6), (5, 4), (9, 3), (9, 6), (5, 2), (4, 8), (5, 7)], temperature=0.8)
    firsts = [0, 1, 0, 0, 1, 5, 1]
    given = given.replace(prompts=given.prompts.take(firsts))
    model = Qwen2ForCausalLM.from_pretrained(qwen)
    total, expected = by_hand(model, given, GRPO, "token-mean")
    total.backward()
    with trained(world_size) as engine:
        results = forward_backward(engine, given, share_prompts=True, token_budget=budget)
        assert_gradients(engine, model)
        computed, shared = (sum(result[name] for result in results) for name in ("computed", "shared"))
        assert shared > 0 and computed + shared == given.lengths.sum()
        for name, value in expected.items():
            assert results[0]["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
        scored, plain = (
            rows_in_order(engine.call("policy_forward", given, {"share_prompts": share, "token_budget": budget}))
            for share in (True, False)
        )
        np.testing.assert_allclose(scored["logprobs"].values, plain["logprobs"].values, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "options", "named"),
    [
        ({}, {"aux_loss_coef": 0.1}, "aux_loss_coef=0.1"),
        ({}, {"packing": False}, "packing=False"),
        ({"routing": Ragged.from_rows([np.zeros((12, 1, 1), np.int16)], np.int16)}, {}, "experts"),
    ],
)
def test_prompts_are_not_shared_where_each_sequence_has_to_be_whole(
    trained: SameRanks, fields: dict[str, Any], options: dict[str, Any], named: str
) -> None:
    with trained(1) as engine, pytest.raises(OptionError, match=f"share_prompts=True and .*{named}"):
        forward_backward(engine, batch(lengths=[(3, 9)], **fields), share_prompts=True, **options)


def test_a_rank_without_rows_takes_part_and_adds_nothing(qwen: str, trained: SameRanks) -> None:
    given = batch(lengths=[(3, 6)])
    model = Qwen2ForCausalLM.from_pretrained(qwen)
    by_hand(model, given, GRPO, "token-mean")[0].backward()
    with trained(2) as engine:
        results = forward_backward(engine, given)
        assert_gradients(engine, model)
    assert sorted(len(result["rows"]) for result in results) == [0, 1]


def test_several_backwards_before_a_step_are_one_normalised_step(qwen: str, trained: SameRanks) -> None:
    parts = [batch(1, RAGGED[:2]), batch(2, RAGGED[2:5]), batch(3, RAGGED[5:])]
    model = Qwen2ForCausalLM.from_pretrained(qwen)
    tokens = sum(int(part.mask.sum()) for part in parts)
    for part in parts:
        total, _ = by_hand(model, part, GRPO, "token-sum")
        (total / tokens).backward()
    with trained(2) as engine:
        for part in parts:
            metrics = forward_backward(engine, part)[0]["metrics"]
            assert metrics["loss"] == pytest.approx(by_hand(model, part, GRPO, "token-mean")[1]["loss"], rel=1e-4)
        assert_gradients(engine, model)
        with pytest.raises(LossError, match="optim_step or zero_grad first"):
            forward_backward(engine, parts[0], aggregation="token-sum")


def test_gradients_of_a_step_whose_other_half_never_came_are_dropped_by_the_next_pass(
    qwen: str, trained: SameRanks
) -> None:
    lost, given = batch(1, RAGGED[:3]), batch(2, RAGGED[3:])
    model = Qwen2ForCausalLM.from_pretrained(qwen)
    total, _ = by_hand(model, given, GRPO, "token-mean")
    total.backward()
    with trained(2) as engine:
        forward_backward(engine, lost, whole_step=True)
        forward_backward(engine, given)
        assert_gradients(engine, model)


def test_gradients_of_half_a_step_are_not_stepped_with_by_hand(trained: SameRanks) -> None:
    given = batch()
    with trained(1) as engine:
        forward_backward(engine, given, whole_step=True)
        with pytest.raises(EngineError, match="no gradient to step with"):
            engine.call("policy_optim_step", {})
        forward_backward(engine, given, whole_step=True)
        assert engine.call("policy_optim_step", {"whole_step": True})[0]["stepped"]
        forward_backward(engine, given)
        assert engine.call("policy_optim_step", {})[0]["stepped"]


def test_the_rows_log_probs_come_back_by_row_and_agree_with_a_pass_without_gradient(trained: SameRanks) -> None:
    given = batch()
    with trained(2) as engine:
        trained = forward_backward(engine, given, token_budget=20)
        scored = engine.call("policy_forward", given, {})
    joined = []
    for parts in (trained, scored):
        rows = {
            int(r): (lp, e)
            for p in parts
            for r, lp, e in zip(p["rows"], p["channels"]["logprobs"], p["channels"]["entropy"], strict=True)
        }
        assert sorted(rows) == list(range(len(given)))
        assert [len(rows[i][0]) for i in range(len(given))] == given.response_lengths.tolist()
        joined.append(np.concatenate([np.stack(rows[i]) for i in range(len(given))], axis=1))
    np.testing.assert_allclose(joined[0], joined[1], atol=2e-6)


def test_what_a_loss_says_per_token_comes_back_in_the_batchs_order(trained: SameRanks) -> None:
    given = batch()

    def loss(inputs: Any) -> Any:
        ratio = (inputs.logprobs - inputs.old_logprobs).exp()
        said = {"ratio": ratio.detach(), "kl": inputs.advantages * 2, "one number": ratio.detach().mean()}
        return -inputs.advantages * ratio, said

    for count in (1, 2):
        with trained(count) as engine:
            found = rows_in_order(forward_backward(engine, given, loss, token_budget=20))
        flat = {name: rows.values for name, rows in found.items()}
        assert sorted(flat) == ["entropy", "logprobs", "loss/kl", "old_logprobs", "ratio", "ref_logprobs"]
        np.testing.assert_array_equal(flat["old_logprobs"], given.old_logprobs)
        np.testing.assert_array_equal(flat["ref_logprobs"], given.ref_logprobs)
        np.testing.assert_allclose(flat["loss/kl"], given.advantages * 2)
        np.testing.assert_allclose(flat["ratio"], np.exp(flat["logprobs"] - given.old_logprobs), rtol=1e-5)


def test_where_the_batch_has_no_old_log_probs_the_ratio_is_one_or_the_samplers(trained: SameRanks) -> None:
    given = batch().replace(old_logprobs=None, ref_logprobs=None)
    with trained(1) as engine:
        assert forward_backward(engine, given, grpo())[0]["metrics"]["ratio"] == pytest.approx(1.0)
        engine.call("policy_zero_grad")
        sampler = forward_backward(engine, given, grpo(), old_logprobs="sampler")[0]["metrics"]["ratio"]
        assert abs(sampler - 1) > 0.01


def test_a_model_of_ones_own_trains_padded(qwen: str) -> None:
    torch.manual_seed(3)
    reference = RunningMeanModel()
    with rlbench.nn.device("meta"):
        module = RunningMeanModel(source={n: t.clone() for n, t in reference.state_dict().items()})
    given = batch()

    class Output:
        def __init__(self, ids: torch.Tensor) -> None:
            self.logits = reference(ids)

    total, _ = by_hand(Output, given, GRPO, "token-mean")
    total.backward()
    with ranks(2, module) as engine:
        with pytest.raises(EngineError, match="packing=False"):
            forward_backward(engine, given, packing=True)
        padded = forward_backward(engine, given, token_budget=30)  # by itself
        assert padded[0]["padding"] > 0 and "RunningMeanModel" in padded[0]["padded_as"]
        assert_gradients(engine, reference)


def test_gradients_that_a_cell_cleared_do_not_weigh_in_the_next_step(qwen: str, trained: SameRanks) -> None:
    cleared, given = batch(1, RAGGED[:3]), batch(2, RAGGED[3:])
    model = Qwen2ForCausalLM.from_pretrained(qwen)
    by_hand(model, given, GRPO, "token-mean")[0].backward()
    with trained(2) as engine:
        forward_backward(engine, cleared)
        engine.run(lambda: module.zero_grad())  # type: ignore[name-defined]
        forward_backward(engine, given)
        assert_gradients(engine, model)


def test_a_forward_of_little_work_takes_the_threads_that_are_asked_for_and_another_half(trained: SameRanks) -> None:
    def watch() -> None:
        torch.set_num_threads(7)
        counts: list[int] = []
        seen = module.register_forward_pre_hook(lambda *_: counts.append(torch.get_num_threads()))  # type: ignore[name-defined]
        module.__dict__["watched"] = counts, seen  # type: ignore[name-defined]

    def allow(small_work: int) -> int:
        from rlbench.trainers.update import policy_step

        before, policy_step.SMALL_WORK = policy_step.SMALL_WORK, small_work
        return before

    def leave() -> tuple[list[int], int]:
        counts, seen = module.__dict__.pop("watched")  # type: ignore[name-defined]
        seen.remove()
        left = torch.get_num_threads()
        torch.set_num_threads(1)
        return counts, left

    with trained(1) as engine:
        engine.run(watch)
        for options in ({"threads": 2}, {}):
            engine.call("policy_forward", batch(), {"packing": False, "head": "plain", **options})
        usual = engine.run(allow, 0)[0]
        engine.call("policy_forward", batch(), {"packing": False, "head": "plain", "threads": 2})
        engine.run(allow, usual)
        assert engine.run(leave) == [([2, 7, 3], 7)]


# -- what ends early -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(trained: SameRanks) -> str:
    """Checksum after two steps of an engine that nothing ever happened to."""
    with trained(2) as engine:
        return run_steps(engine)


def failing_in(row_count_seen: int, what: str) -> Any:
    """A loss that, in its n-th call on the second rank, raises, gives NaN, or asks to stop."""
    calls = [0]

    def loss(inputs: LossInputs) -> Any:
        import torch.distributed as dist

        from rlbench.dispatch import context

        calls[0] += 1
        per_token = -inputs.logprobs * inputs.advantages
        if dist.get_rank() == 1 and calls[0] == row_count_seen:
            if what == "raise":
                raise ZeroDivisionError("in my loss")
            if what == "nan":
                per_token = per_token * float("nan")
            if what == "stop":
                context.current().request_stop()
        return per_token, {}

    return loss


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("what", ["raise", "nan", "stop"])
def test_after_a_failure_or_stop_on_one_rank_training_goes_on_as_if_nothing_had_been(
    trained: SameRanks, undisturbed: str, at: int, what: str
) -> None:
    with trained(2) as engine:
        options = {"token_budget": 20}
        args = [(batch(7), cloudpickle.dumps(failing_in(at, what)), options)] * 2
        first, second = engine.outcomes("policy_forward_backward", args)
        assert isinstance(first, RankFailure)
        assert isinstance(second, RankFailure)
        kinds = {"raise": ZeroDivisionError, "nan": LossError, "stop": Stopped}
        assert isinstance(second.error, kinds[what])
        if what == "stop":
            assert isinstance(first.error, Stopped)
        else:
            assert "rank 1" in str(first.error)
            assert first.error.__dict__["secondary"]
        with pytest.raises(EngineError, match="no gradient"):
            engine.call("policy_optim_step", {})
        assert run_steps(engine) == undisturbed


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda x: (x.logprobs.sum(), {}), r"shape \(\).*one number per token"),
        (lambda x: x.logprobs, r"must return \(per_token, metrics\)"),
        (lambda x: (x.logprobs.detach(), {}), "no gradient"),
        (lambda x: (x.logprobs / 0, {}), "not finite"),
        (lambda x: (-x.logprobs, {"mine": torch.zeros(3)}), "metric 'mine' has shape"),
        ("gpro", "unknown loss 'gpro'; nearest: .*grpo"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_refused_and_the_engine_stays_usable(
    trained: SameRanks, loss: Any, said: str
) -> None:
    with trained(1) as engine:
        with pytest.raises(LossError, match=said):
            forward_backward(engine, batch(), loss)
        assert np.isfinite(forward_backward(engine, batch())[0]["metrics"]["loss"])


def test_a_loss_that_one_rank_sees_change_is_refused_on_all_and_starts_anew(
    trained: SameRanks, undisturbed: str
) -> None:
    baseline = 0.0

    def soft(inputs: LossInputs) -> Any:
        import torch.distributed as dist

        nonlocal baseline
        baseline += dist.get_rank()  # a trial in the kernel cannot see it
        return -inputs.logprobs * (inputs.advantages - baseline), {}

    with trained(2) as engine:
        for _ in range(2):  # the copy that changed is not used again
            args = [(batch(7), cloudpickle.dumps(soft), {})] * 2
            first, second = engine.outcomes("policy_forward_backward", args)
            assert isinstance(second.error, LossError) and "baseline" in str(second.error)
            assert "rank 1" in str(first.error)
        with pytest.raises(EngineError, match="no gradient"):
            engine.call("policy_optim_step", {})
        assert run_steps(engine) == undisturbed


@pytest.mark.parametrize("verb", ["policy_optim_step", "policy_forward", "policy_forward_backward"])
def test_a_stop_of_any_verb_leaves_parameters_and_optimizer_untouched(
    trained: SameRanks, undisturbed: str, verb: str
) -> None:
    args: dict[str, tuple[Any, ...]] = {
        "policy_optim_step": ({},),
        "policy_forward": (batch(), {}),
        "policy_forward_backward": (batch(), cloudpickle.dumps(GRPO), {}),
    }
    with trained(2) as engine:
        forward_backward(engine, batch(5))
        for outcome in engine.outcomes(verb, [args[verb]] * 2, stopping=(1,)):
            assert isinstance(outcome.error, Stopped)
        engine.call("policy_zero_grad")
        assert run_steps(engine) == undisturbed


def test_what_cannot_be_scored_is_refused_before_any_rank_starts(trained: SameRanks) -> None:
    with trained(2) as engine:
        wrong = batch()
        wrong.prompts.values[0] = 10_000
        with pytest.raises(DataError, match="vocabulary has 96"):
            engine.call("policy_forward", wrong, {})
        with pytest.raises(DataError, match="temperature 0"):
            engine.call("policy_forward", batch(temperature=0.0), {})
        with pytest.raises(DataError, match="unknown option 'token_budgt'; nearest: token_budget"):
            engine.call("policy_forward", batch(), {"token_budgt": 3})
        with pytest.raises(EngineError, match="different batches"):
            engine.call_each("policy_forward", [(batch(0), {}), (batch(1), {})])
        with pytest.raises(LossError, match="needs ref_logprobs"):
            forward_backward(engine, batch().replace(ref_logprobs=None))
        assert len(engine.call("policy_forward", batch(), {})) == 2

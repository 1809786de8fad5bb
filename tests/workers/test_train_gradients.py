"""Gradients looked at between backward and step: those of a plain process, on one rank and on two; nothing is moved."""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM

from rlbench.data.record.gradients import Gradients
from rlbench.errors import LossError, StateError, Stopped
from rlbench.rl import grpo
from rlbench.session.lab.gradients import gradients_of
from tests.modules import RAGGED, RunningMeanModel, batch_of, save_qwen
from tests.ranks import RankFailure, Ranks, SameRanks, ranks

pytestmark = pytest.mark.slow

MODES = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_qwen(tmp_path_factory.mktemp("qwen"), tied=False)


def batch(lengths: Any = RAGGED, seed: int = 0) -> Any:
    total = sum(response for _, response in lengths)
    near = (-4.5 + 0.3 * np.random.default_rng(seed + 9).normal(size=(2, total))).astype(np.float32)
    return batch_of(lengths, seed, old_logprobs=near[0], ref_logprobs=near[1])


def plain(x: Any) -> Any:
    return -x.advantages * x.logprobs, {}


def with_entropy(x: Any) -> Any:
    return -x.advantages * x.logprobs - 0.1 * x.entropy, {}


def far(x: Any) -> Any:
    return (x.logprobs - x.ref_logprobs).square(), {}


def no_loss(x: Any) -> Any:
    raise ValueError("my own mistake") if x.advantages.numel() else None


def backward(engine: Ranks, given: Any, loss: Any = plain, **options: Any) -> None:
    engine.call("policy_forward_backward", given, cloudpickle.dumps(loss), options)


def looked_at(engine: Ranks) -> Gradients:
    return gradients_of(engine.call("gradient_facts"))


def by_hand(path: str, given: Any, loss: Any = plain) -> tuple[Any, np.ndarray, np.ndarray]:
    """Gradients of one plain process, token mean; coefficients and norms of the hidden states' gradients."""
    from rlbench.rl import LossInputs

    model = Qwen2ForCausalLM.from_pretrained(path, attn_implementation="eager")
    total, logprobs, hidden, tokens = torch.zeros(()), [], [], int(given.mask.sum())
    for i, (prompt, response) in enumerate(zip(given.prompts, given.responses, strict=True)):
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        states = model.model(ids[None]).last_hidden_state[0, len(prompt) - 1 : -1]
        states.retain_grad()
        logp = torch.log_softmax(model.lm_head(states), -1)
        chosen = logp[torch.arange(len(response)), ids[len(prompt) :]]
        chosen.retain_grad()
        at = slice(given.responses.offsets[i], given.responses.offsets[i + 1])
        fields = {
            n: torch.from_numpy(getattr(given, n)[at])[None]
            for n in ("old_logprobs", "ref_logprobs", "sampler_logprobs", "advantages", "mask")
        }
        inputs = LossInputs(
            logprobs=chosen[None], entropy=-(logp.exp() * logp).sum(-1)[None], group=torch.zeros(1), **fields
        )
        total = total + (loss(inputs)[0] * inputs.mask).sum() / tokens
        logprobs.append(chosen)
        hidden.append(states)
    total.backward()
    coefficients = torch.cat([x.grad for x in logprobs]).numpy()
    return model, coefficients, torch.cat([x.grad.norm(dim=-1) for x in hidden]).numpy()


# -- what the gradients that wait are like

OPTIONS: list[dict[str, Any]] = [
    {},
    {"packing": False},
    {"head": "plain"},
    {"packing": False, "head": "plain"},
    {"token_budget": 24},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("world", [1, 2])
def test_norms_and_tokens_are_those_of_one_plain_process(
    qwen: str, trained: SameRanks, world: int, options: dict[str, Any]
) -> None:
    given = batch()
    model, coefficients, hidden = by_hand(qwen, given)
    with trained(world) as engine:
        backward(engine, given, **options)
        found = looked_at(engine)
        norm = engine.call("policy_optim_step", {})[0]["metrics"]["grad_norm"]
    expected = dict(model.named_parameters())
    assert set(found.names) == set(expected)
    for i, name in enumerate(found.names):
        gradient, weight = expected[name].grad, expected[name].detach()
        assert found.norms[i] == pytest.approx(float(gradient.norm()), rel=2e-4, abs=1e-7), name
        assert found.largest[i] == pytest.approx(float(gradient.abs().max()), rel=2e-4, abs=1e-7), name
        assert found.relative[i] == pytest.approx(float(gradient.norm() / weight.norm()), rel=2e-4, abs=1e-7)
        assert found.sizes[i] == gradient.numel()
    embedding = found.names.index("model.embed_tokens.weight")  # rows of tokens that do not occur
    unused = (expected["model.embed_tokens.weight"].grad == 0).double().mean()
    assert found.zero_share[embedding] == float(unused) > 0
    assert found.norm == pytest.approx(norm, rel=1e-6)
    (tokens,) = found.tokens
    np.testing.assert_allclose(tokens.coefficient, coefficients, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(tokens.hidden, hidden, rtol=1e-3, atol=1e-7)
    assert not tokens.entropy_coefficient.any()


def test_an_entropy_term_has_its_own_coefficient_and_is_in_the_hidden_states(qwen: str, trained: SameRanks) -> None:
    given = batch()
    _, coefficients, hidden = by_hand(qwen, given, with_entropy)
    with trained(2) as engine:
        backward(engine, given, with_entropy)
        (tokens,) = looked_at(engine).tokens
    np.testing.assert_allclose(tokens.coefficient, coefficients, rtol=1e-5, atol=1e-9)
    trained = np.where(given.mask, -0.1 / given.mask.sum(), 0.0)
    np.testing.assert_allclose(tokens.entropy_coefficient, trained, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(tokens.hidden, hidden, rtol=1e-3, atol=1e-7)


def test_of_several_batches_the_tokens_are_those_of_one_large_one(trained: SameRanks) -> None:
    whole = batch()
    parts = [whole.rows([0, 1, 2]), whole.rows([3, 4, 5, 6])]
    with trained(2) as engine:
        backward(engine, whole)
        (expected,) = looked_at(engine).tokens
        engine.call("policy_zero_grad")
        for part in parts:
            backward(engine, part)
        found = looked_at(engine)
        assert len(found.tokens) == 2
        joined = np.concatenate([tokens.coefficient for tokens in found.tokens])
        np.testing.assert_allclose(joined, expected.coefficient, rtol=1e-6, atol=1e-9)
        hidden = np.concatenate([tokens.hidden for tokens in found.tokens])
        np.testing.assert_allclose(hidden, expected.hidden, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("mode", MODES)
def test_several_backwards_are_one_large_batch(trained: SameRanks, mode: str) -> None:
    whole = batch()
    parts = [whole.rows([0, 1]), whole.rows([2]), whole.rows([3, 4, 5, 6])]

    def gradients(engine: Ranks) -> dict[str, torch.Tensor]:
        def gather() -> Any:
            return {n: p.grad.full_tensor() for n, p in module.named_parameters()}  # type: ignore[name-defined]

        return dict(engine.run(gather)[0])

    with trained(2) as engine:
        backward(engine, whole, far, aggregation=mode)
        expected = gradients(engine)
        engine.call("policy_zero_grad")
        for part in parts:
            backward(engine, part, far, aggregation=mode)
        found = gradients(engine)
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        assert float((found[name] - gradient).abs().max()) <= 1e-6 * max(scale, 1.0), name


def test_nothing_is_moved_by_looking(trained: SameRanks) -> None:
    def stepped(engine: Ranks, look: bool) -> Any:
        backward(engine, batch())
        if look:
            looked_at(engine)
        engine.call("policy_optim_step", {})
        return engine.call("training_checksums")

    with trained(2) as engine:
        expected = stepped(engine, look=False)
    with trained(2) as engine:
        assert stepped(engine, look=True) == expected


def test_a_gradient_that_is_not_finite_is_named(trained: SameRanks) -> None:
    def spoil() -> None:
        from torch.distributed.tensor import DTensor

        gradient = module.lm_head.weight.grad  # type: ignore[name-defined]
        if rank == 1:  # type: ignore[name-defined]
            assert isinstance(gradient, DTensor)
            gradient.to_local()[0, 0] = float("nan")

    with trained(2) as engine:
        backward(engine, batch())
        engine.run(spoil)
        found = looked_at(engine)
    assert found.broken == ["lm_head.weight"] and np.isnan(found["lm_head.weight"])
    at = found.names.index("lm_head.weight")
    assert found.nonfinite[at] == 1 and found.largest[at] > 0 and found.by_layer().broken == ["lm_head"]


@pytest.mark.parametrize("after", ["nothing", "zero_grad", "step"])
def test_where_none_waits_the_mend_is_said(trained: SameRanks, after: str) -> None:
    with trained(2) as engine:
        if after != "nothing":
            backward(engine, batch())
            engine.call("policy_zero_grad") if after == "zero_grad" else engine.call("policy_optim_step", {})
        with pytest.raises(StateError, match=r"no gradient waits for a step: session.forward_backward"):
            engine.call("gradient_facts")


def test_a_model_that_does_not_say_its_output_layer_has_no_hidden_norms() -> None:
    source = {n: torch.randn(p.shape) * 0.2 for n, p in RunningMeanModel().named_parameters()}
    import rlbench.nn

    with rlbench.nn.device("meta"):
        made = RunningMeanModel(source=source)
    with ranks(2, made) as engine:
        backward(engine, batch(), packing=False)
        found = looked_at(engine)
        engine.call("policy_zero_grad")
        engine.run(lambda: strategy.backward(module(torch.tensor([[1, 2]])).sum(), module))  # type: ignore[name-defined]
        own = looked_at(engine)
    assert found.tokens[0].hidden is None and found.tokens[0].coefficient.any()
    assert own.tokens == () and own.norm > 0


# -- the gradients of several losses

LOSSES = {"plain": plain, "entropy": with_entropy, "far": far, "grpo": grpo(kl_coef=0.1)}


def compared(engine: Ranks, given: Any, losses: dict[str, Any], **options: Any) -> dict[str, Any]:
    sent = {name: (cloudpickle.dumps(loss), None) for name, loss in losses.items()}
    found = engine.call("gradients_of_losses", given, sent, options)
    assert all(np.array_equal(one["gram"], found[0]["gram"]) for one in found)
    return found[0]


@pytest.mark.parametrize("world", [1, 2])
def test_the_products_are_those_of_the_gradients_a_step_would_have(trained: SameRanks, world: int) -> None:
    given = batch()
    with trained(world) as engine:
        found = compared(engine, given, LOSSES, token_budget=24)
        gradients = []
        for loss in LOSSES.values():
            backward(engine, given, loss)
            gather = lambda: {n: p.grad.full_tensor() for n, p in module.named_parameters()}  # type: ignore[name-defined]  # noqa: E731
            gradients.append(engine.run(gather)[0])
            engine.call("policy_zero_grad")
    assert found["losses"] == tuple(LOSSES) and found["failed"] == {}
    for p, name in enumerate(found["names"]):
        vectors = torch.stack([gradient[name].double().flatten() for gradient in gradients])
        expected = (vectors @ vectors.T).numpy()
        size = np.sqrt(np.outer(np.diagonal(expected), np.diagonal(expected)))
        np.testing.assert_allclose(found["gram"][p], expected, atol=2e-4 * size.max() + 1e-12, err_msg=name)


@pytest.mark.parametrize("stopping", [(), (1,)])
def test_gradients_that_wait_and_random_states_stay_whatever_happens(
    trained: SameRanks, stopping: tuple[int, ...]
) -> None:
    def stepped(engine: Ranks, lab: bool) -> Any:
        backward(engine, batch())
        backward(engine, batch(seed=4), with_entropy)
        if lab:
            sent = {n: (cloudpickle.dumps(loss), None) for n, loss in {**LOSSES, "broken": no_loss}.items()}
            found = engine.outcomes("gradients_of_losses", [(batch(seed=7), sent, {})] * 2, stopping=stopping)
            if stopping:
                assert all(isinstance(one, RankFailure) and isinstance(one.error, Stopped) for one in found)
            else:
                assert "my own mistake" in found[0]["failed"]["broken"]
            assert len(looked_at(engine).tokens) == 2
        backward(engine, batch(seed=5))
        engine.call("policy_optim_step", {})
        return engine.call("training_checksums")

    with trained(2) as engine:
        expected = stepped(engine, lab=False)
    with trained(2) as engine:
        assert stepped(engine, lab=True) == expected


def test_a_loss_that_fails_on_one_rank_alone_leaves_the_others(trained: SameRanks) -> None:
    def fails_once(x: Any) -> Any:
        import torch.distributed as dist

        if dist.get_rank() == 1:
            raise ValueError("only here")
        return -x.logprobs, {}

    with trained(2) as engine:
        found = compared(engine, batch(), {"plain": plain, "once": fails_once, "far": far})
    assert found["losses"] == ("plain", "far") and "rank 1" in found["failed"]["once"]
    assert found["gram"].shape[1:] == (2, 2) and (np.diagonal(found["gram"].sum(0)) > 0).all()


def test_a_lab_alone_leaves_no_gradient(trained: SameRanks) -> None:
    with trained(2) as engine:
        compared(engine, batch(), {"plain": plain})
        with pytest.raises(StateError):
            engine.call("gradient_facts")
        with pytest.raises(LossError):
            backward(engine, batch(), lambda x: (x.advantages, {}))

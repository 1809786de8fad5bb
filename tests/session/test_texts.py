"""From texts to a policy on the tiny model: demonstrations, preferences, and what was sampled as either."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import rlbench as rb
from rlbench.errors import DataError, LossError
from rlbench.notebook.cards.data_views import batch_card
from rlbench.notebook.lab.view import lab_view
from rlbench.tiny import tasks

pytestmark = pytest.mark.engine

RATE = 3e-4


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """The right answer, and the digits in the other order, which the tiny model often gives."""
    found = []
    for prompt in tasks.prompts(count, seed=seed):
        answer = tasks.answer(prompt)
        found.append({"prompt": prompt, "chosen": answer, "rejected": answer[::-1], "completion": answer})
    return [row for row in found if row["chosen"] != row["rejected"]]


@pytest.fixture(scope="module")
def pairs(session: Any) -> Any:
    return rb.data.pairs(rows(64, seed=5), session)


@pytest.fixture(autouse=True)
def clean(session: Any) -> Any:
    yield
    session.zero_grad()


def mean_logprob(session: Any, batch: Any) -> float:
    return float(session.logprobs(batch)[batch.mask].mean())


def margin(session: Any, batch: Any) -> float:
    """Mean over pairs of the summed log-probs' difference."""
    kept = np.where(batch.mask, session.logprobs(batch), 0.0)
    sums = np.add.reduceat(kept, batch.responses.offsets[:-1])
    return float((sums[0::2] - sums[1::2]).mean())


def test_a_few_hundred_demonstrations_raise_the_answers_log_probs_and_undo_brings_them_back(session: Any) -> None:
    batch = rb.data.demonstrations(rows(256, seed=4), session)
    before, kept = mean_logprob(session, batch), session.snapshot("before the demonstrations")
    told = [session.train_step(batch[i : i + 64], loss="sft", lr=RATE) for i in range(0, len(batch), 64)]
    assert told[0].loss == pytest.approx(-mean_logprob_of(told[0], batch[:64]), rel=1e-4)
    after = mean_logprob(session, batch)
    assert after > before + 0.1
    assert "staleness" not in told[0] and told[0].data_version is None and "logprob_gap" not in told[0]
    last = session.undo()
    assert mean_logprob(session, batch) < after and last.version == told[-1].version - 1
    session.restore(kept)
    assert mean_logprob(session, batch) == pytest.approx(before, abs=1e-5)


def mean_logprob_of(metrics: Any, batch: Any) -> float:
    return float(metrics.tokens["logprobs"][batch.mask].mean())


@pytest.mark.parametrize("loss", [rb.rl.dpo(beta=0.1), "simpo"], ids=str)
def test_preferences_raise_the_margin_and_undo_brings_it_back(session: Any, pairs: Any, loss: Any) -> None:
    before = margin(session, pairs)
    metrics = session.train_step(pairs, loss=loss, lr=RATE, token_budget=128)
    assert {"reward_margin", "reward_accuracy", "reward_chosen"} <= set(metrics)
    assert ("ref_logprobs" in metrics.tokens) == (loss != "simpo")
    assert metrics.tokens["reward_margin"].shape == pairs.mask.shape
    assert margin(session, pairs) > before + 0.1
    session.undo()
    assert margin(session, pairs) == pytest.approx(before, abs=1e-5)


def test_judged_responses_train_by_kto(session: Any) -> None:
    given = [
        {"prompt": row["prompt"], "completion": row[kind], "label": kind == "chosen"}
        for row in rows(16, 6)
        for kind in ("chosen", "rejected")
    ]
    batch = rb.data.labelled(given, session)
    before = session.logprobs(batch)
    metrics = session.train_step(batch, loss="kto", lr=RATE)
    assert metrics.point >= 0 and metrics.reward is None and "reward_chosen" in metrics
    assert metrics.sequences == len(batch)
    change = np.add.reduceat(np.where(batch.mask, session.logprobs(batch) - before, 0), batch.responses.offsets[:-1])
    assert change[batch.preference == 1].mean() > change[batch.preference == -1].mean()
    session.undo()


def test_lab_gradients_and_views_work_on_texts(session: Any, pairs: Any) -> None:
    def mine(inputs: Any) -> Any:
        gap = inputs.chosen.mean_logprobs - inputs.rejected.mean_logprobs
        return inputs.of_pairs(torch.relu(1.0 - gap)), {"gap": inputs.of_pairs(gap.detach())[:, :1]}

    lab = session.loss_lab(
        pairs, {"dpo": rb.rl.dpo(), "orpo": "orpo", "mine": mine, "sft": "sft", "is": "importance_sampling"}
    )
    assert list(lab) == ["dpo", "orpo", "mine", "sft"] and "no policy sampled" in str(lab.failed["is"])
    sign = np.repeat(pairs.preference, pairs.response_lengths)
    assert (np.sign(lab["dpo"].coefficients[pairs.mask]) == -sign[pairs.mask]).all()
    assert lab_view(lab) is not None and "orpo" in str(lab)
    metrics = session.forward_backward(pairs, "dpo")
    (tokens,) = session.gradients().tokens
    np.testing.assert_allclose(tokens.coefficient, lab["dpo"].coefficients, rtol=1e-3, atol=1e-8)
    assert metrics["loss"] == pytest.approx(lab["dpo"].value, rel=1e-4)
    shown = batch_card(pairs).text()
    assert "sampled by" in shown and "nobody" in shown and "pairs" in shown


def test_what_was_sampled_becomes_pairs_and_demonstrations(session: Any) -> None:
    session.sync_weights()
    made = session.rollout(tasks.prompts(12, seed=9), n=4, max_tokens=12).score(lambda r: float(len(r)))
    with pytest.warns(UserWarning, match="equal scores"):
        batch = made.score(tasks.reward).pairs()
    metrics = session.train_step(batch, loss="dpo", lr=RATE)
    assert metrics.reward_margin == pytest.approx(0, abs=0.05) and "logprob_gap" in metrics
    session.undo()
    best = made.score(tasks.reward).demonstrations(best_of=4, at_least=1.0)
    before = mean_logprob(session, best)
    session.train_step(best, loss="sft", lr=RATE)
    assert mean_logprob(session, best) > before
    session.undo()
    seen = made.with_batch(best, session.forward_backward(best, "sft"))
    assert np.isfinite(seen.channels["trainer_logprob"]).sum() == best.tokens


def test_tokens_of_ones_own_train_with_any_loss(session: Any) -> None:
    ids = session.tokenizer("sort 21: 12")["input_ids"]
    own = rb.data.datum(ids, advantages=2.0, logprobs=[-1.0] * len(ids), version=session.version)
    assert session.forward_backward(own, "grpo").loss == pytest.approx(-2.0, rel=1e-5)
    session.zero_grad()
    assert session.forward_backward(rb.data.datum(ids), "sft").loss > 0


def test_what_does_not_fit_is_refused_before_a_step(session: Any, pairs: Any) -> None:
    step = session.step
    with pytest.raises(LossError, match="sequence 0 is one of a pair"):
        session.train_step(pairs[1:], loss="dpo")
    texts = rb.data.demonstrations(rows(4, seed=8), session)
    with pytest.raises(LossError, match="the batch has none"):
        session.train_step(texts, loss="dpo")
    with pytest.raises(LossError, match="no policy sampled"):
        session.train_step(texts, loss=rb.rl.grpo(anchor="sampler"))
    with pytest.raises(DataError, match="would be cut"):
        rb.data.demonstrations([{"prompt": "a", "completion": "b" * 5000}], session)
    assert session.step == step

"""A reward model in cells: trained from comparisons, judged, taken back, saved, and used as a reward everywhere."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import rlbench as rb
from rlbench.errors import BuildError, DataError, LossError, SessionError, StateError
from rlbench.notebook.cards.result_views import exported_model_card, pair_evaluation_card
from rlbench.rewards import Board
from rlbench.session.record.sources import of_batch
from rlbench.tiny import tasks

pytestmark = pytest.mark.engine
NAME = "judge"
SURFACE = """
close core dashboard drop evaluate forward_backward freeze frozen heal history last_trainer log lr name offload onload
optim_step optimizer options park resize restore save schedule score_all scores set_lr snapshot snapshots step stop
tokenizer track train train_step trainer undo unfreeze untrack version zero_grad
""".split()


def spoiled(answer: str, chance: random.Random) -> str:
    """A wrong answer: a digit exchanged for another."""
    i = chance.randrange(len(answer))
    return answer[:i] + chance.choice([d for d in "0123456789" if d != answer[i]]) + answer[i + 1 :]


def comparisons(count: int, seed: int, split: str = "train") -> list[dict[str, Any]]:
    chance = random.Random(seed)
    return [
        {"prompt": prompt, "chosen": tasks.answer(prompt), "rejected": spoiled(tasks.answer(prompt), chance)}
        for prompt in tasks.prompts(count, split=split, seed=seed)
    ]


@pytest.fixture(scope="module")
def rm(cluster: Any, tiny_path: Path) -> Any:
    with rb.RewardModel("tiny", name=NAME, train=rb.Train(lr=1e-3, shards=2), undo=1) as made:
        yield made


@pytest.fixture(scope="module")
def pairs(rm: Any) -> Any:
    return rb.data.pairs(comparisons(128, seed=1), rm)


@pytest.fixture(scope="module")
def unseen(rm: Any) -> Any:
    return rb.data.pairs(comparisons(64, seed=2, split="eval"), rm)


@pytest.fixture(scope="module")
def rollouts(session: Any) -> Any:
    return session.rollout(tasks.prompts(6, seed=9), n=2, max_tokens=12, progress=False)


def by_transformers(folder: str | Path, rows: list[list[int]]) -> np.ndarray:
    """All rows at once, padded as transformers pads, (B,)."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = tokenizer.pad({"input_ids": rows}, padding_side="right", return_tensors="pt")
    with torch.no_grad():
        return model(**given).logits[:, 0].numpy()


def tokens_of(rollouts: Any) -> list[list[int]]:
    return [[*r.prompt_token_ids.tolist(), *r.token_ids] for r in rollouts.flat]


def test_steps_on_pairs_teach_it_and_undo_takes_the_last_one_back(rm: Any, pairs: Any, unseen: Any) -> None:
    before = rm.evaluate(unseen)
    told = [rm.train_step(pairs[i : i + 64], loss=rb.rl.bradley_terry(centering=0.01)) for i in (0, 64, 128, 192)]
    after = rm.evaluate(unseen)
    assert after.log_loss < before.log_loss and after.accuracy > before.accuracy
    assert rm.step == rm.version == 4 and [record["step"] for record in rm.history] == [1, 2, 3, 4]
    assert {"loss", "reward_margin", "reward_accuracy", "reward_chosen", "grad_norm", "lr"} <= told[-1].keys()
    assert not {"kl", "entropy", "staleness", "logprob_gap"} & told[-1].keys()
    assert len(told[-1].tokens["scores"]) == pairs[192:256].tokens
    scores = rm.scores(unseen)
    np.testing.assert_allclose(scores[0::2], after.chosen, atol=1e-6)
    rm.train_step(pairs[:64])
    assert not np.array_equal(rm.scores(unseen), scores)
    rm.undo()
    np.testing.assert_array_equal(rm.scores(unseen), scores)
    with pytest.raises(SessionError, match="no step to undo"):
        rm.undo()


def test_an_evaluation_says_how_sure_it_is_and_draws_its_calibration(rm: Any, unseen: Any) -> None:
    found = rm.evaluate(unseen, bins=4)
    chosen, rejected = rm.scores(unseen).reshape(-1, 2).T.astype(float)
    assert found.accuracy == pytest.approx((chosen > rejected).mean()) and found.version == rm.version
    low, high = found.interval
    assert low < found.accuracy < high or found.accuracy == 1.0
    assert sum(b.pairs for b in found.reliability) == 64 and len(found.reliability) <= 4
    confidence, right = 1 / (1 + np.exp(-np.abs(chosen - rejected))), chosen > rejected
    parts = np.digitize(confidence, [0.625, 0.75, 0.875])
    expected = sum(abs((confidence - right)[parts == k].sum()) for k in range(4)) / 64
    assert found.calibration_error == pytest.approx(expected, abs=1e-6)
    bundle = pair_evaluation_card(found).bundle()
    assert "<img" in bundle["text/html"] and f"{found.accuracy:.3f}" in bundle["text/plain"]
    assert found.plot().panels[0].limits == (0.0, 1.0)
    kept = [entry for entry in rm.history.verbs if entry["verb"] == "evaluate"][-1]
    assert kept["metrics"]["eval/reward_accuracy"] == pytest.approx(found.accuracy)


def test_it_is_a_reward_at_once_alone_weighted_and_by_label(rm: Any, session: Any, rollouts: Any) -> None:
    scored = rollouts.score(rm)
    folder = rm.frozen().path
    expected = by_transformers(folder, tokens_of(rollouts))
    np.testing.assert_allclose(scored.rewards, expected, atol=1e-4)
    mixed = rollouts.score(rb.rewards.weighted({"judge": (rm, 0.5), "right": (tasks.reward, 2.0)}))
    np.testing.assert_allclose(mixed.components["judge"], scored.rewards, atol=1e-6)
    np.testing.assert_allclose(mixed.rewards, 0.5 * mixed.components["judge"] + 2 * mixed.components["right"])
    by_kind = rb.rewards.mixture({"a": rm}, by=lambda rollout: "ab"[rollout.group % 2], default=tasks.reward)
    kinds = rollouts.score(by_kind)
    first = rollouts.group % 2 == 0
    np.testing.assert_allclose(kinds.rewards[first], scored.rewards[first], atol=1e-5)
    assert rm(next(iter(rollouts.flat))).value == pytest.approx(scored.rewards[0], abs=1e-4)
    found = session.evaluate(tasks.prompts(2, seed=3), rm, max_tokens=8, progress=False)
    assert np.isfinite(found.reward)
    pairs = rollouts.pairs(by=scored.rewards)
    frozen = Path(folder).parent
    held = sorted(frozen.glob("frozen-*"))
    told = [of_batch(rollouts.score(rm).batch(advantage=rb.rl.group_normalized())) for _ in range(2)]
    assert told[0]["reward_name"] == f"RewardModel({NAME!r})" and told[0]["reward_hash"] == told[1]["reward_hash"] != ""
    assert sorted(frozen.glob("frozen-*")) == held, "a record costs no copy of its weights"
    assert rm.evaluate(pairs).accuracy == 1.0, "what is trained on and what is scored are the same tokens"


def test_where_it_goes_to_another_process_it_goes_as_its_weights(rm: Any, rollouts: Any) -> None:
    sent = pickle.loads(pickle.dumps(rb.rewards.weighted({"judge": (rm, 1.0)})))
    assert isinstance(sent.parts["judge"][0], rb.rewards.model)
    np.testing.assert_allclose(rollouts.score(sent).rewards, rollouts.score(rm).rewards, atol=1e-4)
    assert rm.frozen().path == rm.frozen().path, "written once for a version"


def test_what_is_saved_is_a_classifier_of_transformers_and_goes_on_as_a_reward_model(
    rm: Any, pairs: Any, unseen: Any, rollouts: Any, tmp_path: Path
) -> None:
    done = rm.save(str(tmp_path / "rm"))
    assert "rb.RewardModel load it" in exported_model_card(done).text()
    rows = [[*p.tolist(), *r.tolist()] for p, r in zip(unseen.prompts, unseen.responses, strict=True)]
    np.testing.assert_allclose(by_transformers(done.path, rows), rm.scores(unseen), atol=1e-4)
    reward = rb.rewards.model(done.path, as_sampled=True)
    np.testing.assert_allclose(rollouts.score(reward).rewards, rollouts.score(rm).rewards, atol=1e-4)
    with rb.RewardModel(done.path, train={"lora": {"rank": 4}, "lr": 3e-3}) as other:
        np.testing.assert_allclose(other.scores(unseen), rm.scores(unseen), atol=1e-5)
        head = other.train.state_dict()["score.weight"].clone()
        losses = [other.train_step(pairs[:64], loss="log_exp")["loss"] for _ in range(3)]
        assert losses[-1] < losses[0] and not torch.equal(other.train.state_dict()["score.weight"], head)
        after = other.scores(unseen)
        other.save(str(tmp_path / "merged"))
    np.testing.assert_allclose(by_transformers(tmp_path / "merged", rows), after, atol=1e-4)
    with pytest.raises(BuildError, match="no causal language model"):
        rb.Session(done.path)


def test_texts_of_a_policy_with_another_tokenizer_are_encoded_anew(rm: Any, tiny_path: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    tokenizer.add_tokens(["<|other|>"])
    tokenizer.save_pretrained(tmp_path)
    prompt = tasks.prompts(1, seed=4)[0]
    answer = tasks.answer(prompt)
    row = rb.data.demonstrations([{"prompt": prompt, "completion": answer}], rm)
    fields = {"logprobs": [], "finish_reason": "stop", "group": 0, "index": 0, "weight_version": 0, "reward": None}
    other = rb.Rollout(
        rb.Prompt(prompt),
        token_ids=[5, 6],
        transcript=answer,
        prompt_token_ids=[7, 8],
        tokenizer=str(tmp_path),
        **fields,
    )
    assert rm(other).value == pytest.approx(float(rm.scores(row)[0]), abs=1e-5)


def test_trainers_take_it_as_a_reward_on_their_ranks(rm: Any, session: Any) -> None:
    options = {"rollout_batch_size": 4, "n": 2, "train_batch_size": 8, "max_tokens": 8, "micro_train_batch_size": 2}
    prompts = [{"prompt": p, "label": "judged" if i % 2 else "ruled"} for i, p in enumerate(tasks.prompts(4, seed=6))]
    kept = session.snapshot()
    try:
        session.trainer("grpo", prompts, rm, **options, lr=1e-6)
        kind = session.train.run("type(trainer.reward_model).__name__")[0]
        assert "RewardModel" in kind, "sharded over the ranks"
        metrics = session.last_trainer.step()
        assert np.isfinite(metrics["reward"]) and metrics["reward"] not in (0.0, 1.0)
        recipe = {"judged": [("model", "judge", 1.0)], "ruled": [("rule", "right", 1.0)]}
        by_label = {"reward_recipe": recipe, "reward_fn_label_map": {"judge": 0, "right": 1}}
        session.trainer("grpo", prompts, [rm, right_of_label], arguments=by_label, **options)
        assert {"judge_mean", "right_mean"} <= session.last_trainer.step().keys()
    finally:
        session.train.call_all("drop_trainer").result()
        session.core.trainer = None
        session.restore(kept)


def right_of_label(rollout: Any) -> float:
    return float(len(rollout.text) % 2)


def hinge(inputs: Any) -> Any:
    """A loss as one writes it in a cell."""
    gap = inputs.chosen.scores - inputs.rejected.scores
    return inputs.of_pairs((1 - gap).clamp(min=0)), {"gap": inputs.of_pairs(gap.detach())[:, :1]}


hinge.aggregation = "seq-mean-token-mean"  # type: ignore[attr-defined]


def test_a_loss_of_ones_own_reads_scores_and_a_policys_is_refused_in_the_cell(rm: Any, pairs: Any) -> None:
    metrics = rm.forward_backward(pairs[:8], loss=hinge)
    rm.zero_grad()
    assert metrics["loss"] == pytest.approx(max(0.0, 1 - metrics["gap"]), abs=0.5) and np.isfinite(metrics["gap"])
    for loss in ("grpo", "dpo", rb.rl.simpo(), lambda inputs: (inputs.logprobs, {})):
        with pytest.raises(LossError, match=r"\bscores"):
            rm.train_step(pairs[:8], loss=loss)
    with pytest.raises(LossError, match="margin"):
        rm.train_step(pairs[:8].replace(margin=np.ones(8, np.float32)), loss="log_exp")
    assert rm.train_step(pairs[:8])["loss"] > 0
    rm.undo()


def test_a_policy_has_no_scores_to_compare(session: Any) -> None:
    with pytest.raises(LossError, match="RewardModel"):
        session.train_step(rb.data.pairs(comparisons(4, seed=5), session), loss=rb.rl.bradley_terry())


def test_bad_input_is_said_in_a_sentence_and_the_model_goes_on(rm: Any, pairs: Any, unseen: Any) -> None:
    before = rm.scores(unseen)
    demonstrations = rb.data.demonstrations([{"prompt": "sort 21", "completion": "12"}], rm)
    for what, error, said in (
        (pairs[:0], DataError, "without sequences"),
        (comparisons(2, seed=1), DataError, "got a list"),
        (demonstrations, LossError, "no pairs"),
        (pairs[:3], LossError, "cut a batch of pairs between pairs"),
    ):
        with pytest.raises(error, match=said):
            rm.train_step(what)
        with pytest.raises(error, match=said):
            rm.evaluate(what)
    with pytest.raises(DataError, match="row 0: its chosen and rejected responses are the same"):
        rb.data.pairs([{"prompt": "sort 21", "chosen": "12", "rejected": "12"}], rm)
    with pytest.raises(DataError, match="ties"):
        rm.evaluate(pairs.replace(margin=np.zeros(len(pairs), np.float32)))
    with pytest.raises(DataError, match="bins"):
        rm.evaluate(pairs, bins=0)
    with pytest.raises(LossError, match="not finite"):
        rm.train_step(pairs[:8], loss=rb.rl.bradley_terry(centering=1e39))
    np.testing.assert_array_equal(rm.scores(unseen), before)
    with pytest.raises(BuildError, match="no model folder"):
        rb.RewardModel("nowhere/at/all")
    with pytest.raises(BuildError, match="adapter"):
        rb.RewardModel("tiny", train=rb.Train(lora=rb.Lora(path="x")))


def test_weights_that_are_not_finite_fail_the_scoring_and_undo_mends_them(rm: Any, pairs: Any, rollouts: Any) -> None:
    rm.train_step(pairs[:8])
    rm.train.run("import torch\nwith torch.no_grad(): module.score.weight.fill_(float('nan'))")
    with pytest.raises(DataError, match="gave nan"):
        rollouts.score(rm)
    with pytest.raises(DataError, match="undo"):
        rm.evaluate(pairs)
    rm.undo()
    assert np.isfinite(rollouts.score(rm).rewards).all()


def test_a_stop_ends_the_scoring(rm: Any, rollouts: Any) -> None:
    board = Board()
    board.stop()
    with pytest.raises(rb.Stopped):
        rm.score_all(list(rollouts.flat), board)
    assert np.isfinite(rollouts.score(rm).rewards).all()


def test_it_is_found_again_healed_parked_and_brought_back(rm: Any, unseen: Any, pairs: Any) -> None:
    assert rb.RewardModel("tiny", name=NAME, train=rb.Train(lr=1e-3, shards=2), undo=1).step == rm.step
    again = rb.attach(NAME)
    assert isinstance(again, rb.RewardModel)
    assert [name for name in dir(again) if not name.startswith("_")] == SURFACE
    assert NAME in again.dashboard()._repr_html_()
    assert "reward model" in repr(again) and "inference" not in repr(again)
    with pytest.raises(SessionError, match="kind is 'reward'"):
        rb.Session("tiny", name=NAME, train=rb.Train(lr=1e-3, shards=2), undo=1)
    with pytest.raises(StateError, match="no replicas"):
        _ = again.core.inference
    again.train_step(pairs[:16])
    scores = again.scores(unseen)
    with pytest.raises(rb.RLBenchError):
        again.train.run("import os; os._exit(1)")
    again.heal()
    np.testing.assert_array_equal(again.scores(unseen), scores)
    again.park()
    back = rb.attach(NAME)
    rm.core = back.core
    np.testing.assert_array_equal(back.scores(unseen), scores)
    assert back.step == rm.step

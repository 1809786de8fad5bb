"""A trainer of a reward model: the steps of `train_step` by hand, on record, taken back, resumed; from each door."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlbench as rb
from rlbench.errors import BuildError, DataError, LossError, SessionError
from rlbench.notebook.cards.data_views import batch_card
from rlbench.notebook.cards.result_views import pair_evaluation_card
from rlbench.options import OptionError
from tests.session.session_trainers import checksum
from tests.session.test_reward_model import by_transformers, comparisons, hinge, tokens_of

pytestmark = pytest.mark.engine
SIZE, NAME = 32, "judges"
OPTIONS: dict[str, Any] = {"train_batch_size": SIZE, "seed": 3}


@pytest.fixture(scope="module")
def rm(cluster: Any, tiny_path: Path) -> Iterator[Any]:
    with rb.RewardModel("tiny", name=NAME, train=rb.Train(lr=1e-3, shards=2), undo=1) as made:
        yield made


def curve(records: Any) -> list[tuple[float, ...]]:
    return [tuple(one[name] for name in ("loss", "reward_accuracy", "reward_margin", "grad_norm")) for one in records]


def test_its_curve_is_that_of_train_step_by_hand_bit_for_bit_and_it_goes_back_and_on(rm: Any, tmp_path: Path) -> None:
    pairs, kept = rb.data.pairs(comparisons(96, seed=1), rm), rm.snapshot()
    unseen, loss = comparisons(48, seed=2, split="eval"), rb.rl.hps(log_scale=1.0, scale_lr=0.1, centering=0.01)
    stream = pairs.stream(seed=3)
    by_hand = [rm.train_step(stream.take(SIZE), loss=loss) for _ in range(3)]
    weights = rm.train.run(checksum)
    rm.restore(kept)
    trainer = rm.trainer(data=pairs, eval_data=unseen, eval_steps=2, loss=loss, **OPTIONS)
    assert trainer.session is rm and rm.last_trainer is trainer and trainer.texts == 96
    done = trainer.fit(epochs=1)
    assert done[2]["log_scale"] != done[1]["log_scale"] != done[0]["log_scale"] == 1.0
    assert curve(done) == curve(by_hand) and rm.train.run(checksum) == weights
    assert [record["step"] for record in rm.history] == [1, 2, 3] and trainer.where().iterations == 3
    assert not {"kl", "entropy"} & done[-1].keys() and done[-1]["aggregation"] == "seq-mean-token-mean"
    found, beside = rm.evaluate(rb.data.pairs(unseen, rm)), trainer.evaluate()
    assert beside["eval/reward_accuracy"] == pytest.approx(found.accuracy)
    assert beside["eval/log_scale"] not in (1.0, done[2]["log_scale"]), "that of now"
    assert beside["eval/reward_margin"] == pytest.approx(found.margin, rel=1e-5)
    trainer.save(str(tmp_path / "kept"))
    after = curve([trainer.step()])
    rm.undo()
    assert trainer.where().iterations == 3 and curve([trainer.step()]) == after
    assert trainer.load(str(tmp_path / "kept")).iterations == 3 and curve([trainer.step()]) == after
    rm.restore(kept)
    stream = pairs.stream(seed=3)
    assert curve(rm.trainer(data=stream, loss=loss, **OPTIONS).fit(2)) == curve(by_hand[:2]) and not stream.taken
    rm.restore(kept)
    rm.drop(kept)


def test_what_it_saves_beside_a_checkpoint_is_a_classifier_with_its_scores(
    rm: Any, session: Any, tmp_path: Path
) -> None:
    rollouts = session.rollout(["sort 21:", "sort 312:"], n=2, max_tokens=8, progress=False)
    files = {"ckpt_path": str(tmp_path / "c"), "save_path": str(tmp_path / "m"), "save_hf_ckpt": True, "save_steps": 1}
    scored = rollouts.score([0.0, 1.0, 1.0, 0.0])
    trainer = rm.trainer(data=scored.pairs(), train_batch_size=2, lr=1e-3, **files)
    trainer.step()
    found = by_transformers(tmp_path / "m" / "global_step1_hf", tokens_of(rollouts))
    np.testing.assert_allclose(found, rollouts.score(rm).rewards, atol=1e-4)


def test_a_session_makes_one_of_its_model_and_finds_it_again(session: Any, tmp_path: Path) -> None:
    rows = comparisons(64, seed=1)
    with pytest.raises(DataError, match="no rows"):
        session.trainer("reward", data=[])
    assert f"{session.name}-reward" not in [one["name"] for one in rb.sessions()], "nothing was started"
    heads = {"digits": 0.75, "length": 0.25}
    said = [
        {**row, "heads": {"digits": "chosen", **({"length": "tie"} if i % 2 else {})}} for i, row in enumerate(rows)
    ]
    loss = rb.rl.log_exp(ties=0.01)
    trainer = session.trainer("reward", data=said, loss=loss, lr=1e-3, heads=heads, **OPTIONS)
    with trainer.session as made:
        assert isinstance(made, rb.RewardModel) and made.name == f"{session.name}-reward"
        trainer.fit(2)
        again = session.trainer("reward", data=said, loss=loss, heads=heads, **OPTIONS)
        assert again.session.step == made.step == 2 and again.step()["step"] == 3
        judged = again.evaluate(said[:16])
        found = again.session.evaluate(rb.data.pairs(said[:16], again.session))
        assert judged["eval/reward_accuracy/digits"] == pytest.approx(found.heads["digits"].accuracy)
        several_heads(again.session, said, session, tmp_path)


def several_heads(rm: Any, said: Any, session: Any, folder: Path) -> None:
    """What a reward model of several heads says of pairs, of rollouts, and once it is saved."""
    pairs = rb.data.pairs(said, rm)
    found, digits, length = rm.evaluate(pairs), rm.scores(pairs, head="digits"), rm.scores(pairs, head="length")
    np.testing.assert_allclose(rm.scores(pairs), 0.75 * digits + 0.25 * length, atol=1e-5)
    assert list(found.heads) == ["digits"] and int(found.tied.sum()) == 32, "of length there are ties alone"
    assert found.heads["digits"].accuracy == pytest.approx((digits[::2] > digits[1::2]).mean())
    assert found.metrics()["eval/reward_accuracy/digits"] == found.accuracy and "digits" in repr(found)
    assert "by digits, length" in batch_card(pairs).text() and "digits" in pair_evaluation_card(found).text()
    rollouts = session.rollout(["sort 21:", "sort 312:"], n=2, max_tokens=8, progress=False)
    scored = rollouts.score(rm)
    assert scored.components.keys() == {"digits", "length"}
    np.testing.assert_allclose(
        scored.rewards, 0.75 * scored.components["digits"] + 0.25 * scored.components["length"], atol=1e-5
    )
    mixed = rollouts.score(rb.rewards.weighted({"judge": (rm.frozen(), 2.0)}))
    np.testing.assert_allclose(mixed.components["judge/length"], scored.components["length"], atol=1e-4)
    for asked, error, message in (
        ({"heads": {"digts": "chosen"}}, LossError, "nearest: digits"),
        ({"heads": {"digits": "tie"}}, DataError, "all pairs are ties"),
    ):
        with pytest.raises(error, match=message):
            rm.evaluate(rb.data.pairs([{**said[0], **asked}], rm))
    with pytest.raises(DataError, match="no head 'digit'; nearest: digits"):
        rm.scores(pairs, head="digit")
    with pytest.raises(LossError, match=r"reads no inputs\.verdicts"):
        rm.train_step(pairs[:8], loss=hinge)
    with pytest.raises(LossError, match=r"reads no inputs\.verdicts"):
        session.train_step(rb.data.pairs(said[:4], session), loss="simpo")
    plain = rm.forward_backward(pairs[:8].replace(verdicts=None), loss=hinge)  # of the sum
    rm.zero_grad()
    assert np.isfinite(plain["loss"])
    rm.save(str(folder / "rm"))
    with pytest.raises(BuildError, match="a head 'length' too"):
        rb.RewardModel(str(folder / "rm"), heads=["digits"])


def test_mistakes_are_told_where_they_are_made(rm: Any, session: Any) -> None:
    rows, step = comparisons(8, seed=1), rm.step
    for given, error, said in (
        ({}, SessionError, "which texts"),
        ({"data": rows, "loss": "dpo"}, LossError, "is a policy's loss"),
        ({"data": rows, "head": "plain"}, OptionError, "head has no effect with reward"),
        ({"data": rows, "n": 4}, OptionError, "n has no effect on texts"),
        ({"data": rows, "method": "sft"}, OptionError, "by 'reward', not by 'sft'"),
        ({"data": rb.data.demonstrations([{"prompt": "a", "completion": "b"}], rm)}, LossError, "no pairs"),
    ):
        with pytest.raises(error, match=said):
            rm.trainer(**given)
    with pytest.raises(OptionError, match="prompts has no effect"):
        session.trainer("reward", ["a"], data=rows)
    assert rm.step == step

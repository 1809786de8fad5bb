"""Working on the algorithm in a session: gradients between backward and step, the loss lab, new code for a live
module."""

import pickle

import numpy as np
import pytest
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

import rlbench as rb
from rlbench.engines import TrainEngine
from rlbench.errors import DataError, EngineError, LossError, StateError
from rlbench.notebook.cards.gradient_views import gradients_card
from rlbench.notebook.lab.view import lab_view
from rlbench.tiny import tasks

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def batch(session):
    session.sync_weights()
    rollouts = session.rollout(tasks.prompts(8, seed=21), n=4, max_tokens=12)
    return rollouts.score([i % 2 for i in range(rollouts.samples)]).batch(advantage=rb.rl.group_normalized())


@pytest.fixture(autouse=True)
def clean(session):
    yield
    session.zero_grad()


def checksums(session):
    return session.train.call_all("training_checksums").result()


def mine(x, beta=1.0):
    return beta * -x.advantages * (x.logprobs - x.old_logprobs).exp(), {}


def broken(x):
    raise ValueError("my own mistake")


LOSSES = {"grpo": rb.rl.grpo(kl_coef=0.05), "mine": mine}


# -- between backward and step


def test_gradients_say_what_waits_and_a_step_uses_it_up(session, batch):
    with pytest.raises(StateError, match=r"session.forward_backward\(batch, loss\) makes one"):
        session.gradients()
    metrics = session.forward_backward(batch, mine)
    found = session.gradients()
    (tokens,) = found.tokens
    expected = np.where(batch.mask, -batch.advantages / batch.mask.sum(), 0)
    np.testing.assert_allclose(tokens.coefficient, expected, rtol=1e-4, atol=1e-9)
    assert tokens.hidden.shape == batch.advantages.shape == metrics.tokens["logprobs"].shape
    layers = found.by_layer()
    assert layers.norm == pytest.approx(found.norm) and 1 < len(layers) < len(found)
    shown = gradients_card(found).bundle()
    assert "model.layers.0" in shown["text/plain"] and "<svg" not in shown["text/plain"]
    assert session.optim_step().grad_norm == pytest.approx(found.norm, rel=1e-6)
    with pytest.raises(StateError):
        session.gradients()


# -- the loss lab


def test_a_lab_is_one_forward_whose_numbers_are_those_of_the_step(session, batch):
    before, step = checksums(session), session.step
    lab = session.loss_lab(batch, {**LOSSES, "broken": broken})
    assert checksums(session) == before and session.step == step
    assert list(lab) == ["grpo", "mine"] and "my own mistake" in str(lab.failed["broken"])
    np.testing.assert_allclose(lab.scored.logprobs, session.logprobs(batch), atol=1e-6)
    assert lab.batch.ref_logprobs is not None
    for name, loss in LOSSES.items():
        metrics = session.forward_backward(batch, loss)
        assert lab[name].value == pytest.approx(metrics.loss, rel=1e-4, abs=1e-6)
        assert lab[name].hash == metrics.loss_hash
        np.testing.assert_allclose(lab[name].coefficients, session.gradients().tokens[0].coefficient, atol=1e-6)
        session.zero_grad()
    html = lab_view(lab).bundle()["text/html"]
    assert "<details" in html and "lab[&#x27;grpo&#x27;].step()" in html


def test_parameter_gradients_are_those_of_each_losss_own_backward_and_leave_what_waits(session, batch):
    norms = []
    for loss in LOSSES.values():
        session.forward_backward(batch, loss)
        norms.append(session.gradients().norm)
        session.zero_grad()
    waiting = session.forward_backward(batch, "reinforce").loss
    before = session.gradients()
    lab = session.loss_lab(batch, {**LOSSES, "same": mine}, parameter_gradients=True)
    after = session.gradients()
    assert waiting and np.array_equal(after.squares, before.squares) and len(after.tokens) == 1
    assert lab.parameters.losses == ("grpo", "mine", "same")
    np.testing.assert_allclose(lab.parameters.norms[:2], norms, rtol=1e-4)
    assert lab.parameters.cosines[1, 2] == pytest.approx(1.0, abs=1e-6)
    table = lab.table()
    assert table.loc["mine", "grad_norm_ratio"] == pytest.approx(norms[1] / norms[0], rel=1e-4)
    assert "|grad|" in str(lab) and len(lab.parameters.by_layer()) > 1


def test_a_lab_steps_exactly_as_train_step_does(session, batch):
    lab = session.loss_lab(batch, LOSSES)
    session.snapshot("before lab")
    try:
        by_lab = lab["mine"].step()
        lab_weights = checksums(session)
        with pytest.raises(StateError, match=r"weights have moved since the lab's forward .*step\(anyway=True\)"):
            lab["grpo"].step()
        assert lab["grpo"].step(anyway=True).loss_hash == lab["grpo"].hash
        session.restore("before lab", sync=False)
        by_hand = session.train_step(batch, mine)
        assert checksums(session) == lab_weights and by_lab.loss_hash == by_hand.loss_hash
    finally:
        session.restore("before lab", sync=False)
        session.drop("before lab")


def test_labs_made_of_a_lab_step_too_and_one_that_was_kept_says_how(session, batch):
    lab = session.loss_lab(batch, LOSSES)
    assert lab.sweep("mine", "beta", [0.5])["beta=0.5"].bound is lab.bound is not None
    assert lab.also({"plain": "reinforce"})["plain"].given == "reinforce"
    kept = pickle.loads(pickle.dumps(session.loss_lab(batch, ["reinforce"])))
    with pytest.raises(StateError, match=r"session.loss_lab\(batch, losses\)"):
        kept["reinforce"].step()


def test_a_lab_of_nothing_is_refused_before_the_ranks_are_asked(session, batch):
    with pytest.raises(LossError, match="no losses to compare"):
        session.loss_lab(batch, {})
    with pytest.raises(DataError, match="loss_lab wants a TrainBatch"):
        session.loss_lab([1], LOSSES)
    only = session.loss_lab(batch, {"broken": broken}, parameter_gradients=True)
    assert len(only) == 0 and "broken" in only.failed and "my own mistake" in str(only)


# -- new code for the live module


def test_a_method_comes_and_is_edited_while_weights_stay(session):
    before = checksums(session)

    @session.method
    def count(self):
        return sum(p.numel() for p in self.parameters()), self.rank

    assert [rank for _, rank in session.train.count()] == [0, 1]

    @session.method
    def count(self, times: int = 2):  # noqa: F811
        """Edited."""
        return times

    assert session.train.count(times=3) == [3, 3] and session.train.count.__doc__ == "Edited."
    assert "count" in session.train.methods() and checksums(session) == before
    written = [entry for entry in session.core.recorder.entries() if entry.verb == "train.method"][-1]
    assert written.args == {"0": "count"}
    with pytest.raises(TypeError):
        session.train.count(4, 5)
    attached = TrainEngine.attach(session.core.link, "actor", session.core.link.state("engines")["engines"]["actor"])
    assert attached.count() == [2, 2]


def louder(scale):
    base = Qwen2MLP

    class Qwen2MLP_(base):
        def forward(self, x):
            return scale * super().forward(x)

    Qwen2MLP_.__qualname__ = Qwen2MLP_.__name__ = "Qwen2MLP"
    return Qwen2MLP_


def test_a_part_of_the_policy_is_redefined_and_what_cannot_be_is_not(session, batch):
    before, plain = checksums(session), session.logprobs(batch)
    try:
        done = session.redefine(louder(0.5))
        assert "train.redefine" in [entry.verb for entry in session.core.recorder.entries()]
        assert done.changed and done.modules > 1 and "redefined" in repr(done)
        assert np.abs(session.logprobs(batch) - plain).max() > 1e-3 and checksums(session) == before
        assert not session.redefine(louder(0.5)).changed
    finally:  # others share the session
        session.redefine(louder(1.0))
    np.testing.assert_allclose(session.logprobs(batch), plain, atol=1e-6)
    with pytest.raises(EngineError, match="no part of the live module is a 'Nothing'"):
        session.redefine(type("Nothing", (Qwen2MLP,), {}))
    with pytest.raises(EngineError, match="takes a class"):
        session.redefine(mine)
    with pytest.raises(EngineError, match="lives in this kernel alone"):
        session.method(lambda_of(session))


def lambda_of(session):
    def uses(self):
        return session.step

    return uses

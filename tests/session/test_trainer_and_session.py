"""A session's trainer that is refused, fails or goes elsewhere leaves the session as usable as it was."""

import pytest

import rlbench as rb
from rlbench.errors import DataError, StateError
from rlbench.strategies import OptionError
from rlbench.tiny import tasks
from tests.session.session_trainers import grpo, prompts

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("put_back")]


def rate(session):
    return session.train.run(lambda: module.optimizer.param_groups[0]["lr"])


def test_a_trainer_that_is_refused_leaves_the_learning_rate(session):
    """Its schedule had begun already: near 0."""
    before = rate(session)
    with pytest.raises(OptionError, match="freezing_actor_steps"):
        grpo(session, lr=0.5, schedule_steps=10, freezing_actor_steps=2)
    assert rate(session) == before


def test_steps_are_counted_on_from_a_checkpoint_that_was_loaded(session, tmp_path):
    trainer = grpo(session)
    trainer.save(str(tmp_path))
    for _ in range(2):
        trainer.step()
    trainer.load(str(tmp_path))
    step = session.step
    assert trainer.step().step == step + 1 and session.step == step + 1
    session.undo()


def test_experience_and_update_one_by_one_count_as_iterations(session):
    trainer = grpo(session)
    trainer.make_experience()
    trainer.ppo_train()
    assert trainer.where()["iterations"] == 1


def test_gradients_that_wait_in_the_session_are_not_taken_into_a_trainer_s_step(session):
    trainer = grpo(session)
    scored = session.rollout(["sort 5 2 :"], n=4, max_tokens=6).score(lambda r: float(sum(r.token_ids) % 7))
    batch = scored.select(scored.lengths > 0).batch(advantage=rb.rl.rloo())
    session.forward_backward(batch, "ppo")
    with pytest.raises(StateError, match="zero_grad"):
        trainer.step()
    session.zero_grad()
    trainer.step()


def test_gradients_of_a_trainer_that_is_replaced_while_they_wait_go_with_it(session):
    waits = grpo(session, train_batch_size=64)
    assert waits.step().train_steps == 0
    norm = grpo(session).step().actor_grad_norm
    session.undo()
    assert grpo(session).step().actor_grad_norm == pytest.approx(norm, rel=1e-3)


def test_a_trainer_samples_by_the_seed_of_its_session(session):
    trainer = session.trainer("grpo", prompts(), tasks.reward, train_batch_size=32, micro_train_batch_size=8)
    assert trainer.options["seed"] == session.options.seed and session.train.run(own_seed) == [session.options.seed] * 2


def test_after_a_failure_the_replicas_generate_as_before(session):
    def failing(rollout):
        raise ValueError("the judge is out")

    trainer = session.trainer(
        "grpo",
        prompts(),
        failing,
        train_batch_size=32,
        micro_train_batch_size=8,
        rollout_batch_size=4,
        n=4,
        max_tokens=6,
    )
    with pytest.raises(DataError, match="judge"):
        trainer.step()
    assert session.rollout(["sort 52"], n=1, max_tokens=6).samples == 1


def own_seed():
    return globals()["trainer"].strategy.seed

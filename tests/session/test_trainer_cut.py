"""A trainer's verb that ends in the middle: the session knows what of it was done, and can take all of it back."""

import pytest

import rlbench as rb
from rlbench.errors import StateError, Stopped
from rlbench.tiny import tasks
from rlbench.trainers import SPMDPPOTrainer
from tests.session.session_trainers import checksum, grpo

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("put_back")]

FOUR_STEPS = {"train_batch_size": 8, "micro_train_batch_size": 4}


def stop_after(steps):
    """Somebody asks to stop once so many optimizer steps of the next update are done."""
    from rlbench.dispatch import context

    update, left = trainer.policy_update, [steps]
    accumulate = update.accumulate

    def counted(*args):
        if not left[0]:
            del update.accumulate
            context.current().request_stop()
        left[0] -= 1
        return accumulate(*args)

    update.accumulate = counted


def cut(session, trainer, steps):
    session.train.run(stop_after, steps)
    with pytest.raises(Stopped):
        trainer.fit(1)


def test_steps_of_an_update_that_was_stopped_count_and_make_a_sync_due(session):
    trainer = grpo(session, **FOUR_STEPS)
    trainer.fit(1)
    step, version = session.step, session.version
    assert session.inference.weight_versions() == [version]
    cut(session, trainer, 2)
    assert session.step == step + 2 and session.version > version
    assert session.inference.weight_versions() == [version], "the card says that they are behind"
    trainer.evaluate(tasks.prompts(4, split="eval"))
    assert session.inference.weight_versions() == [session.version]
    resumed = trainer.fit(1)[0]
    assert resumed["step"] == session.step == step + 4 and resumed["train_steps"] == 4


def test_undo_takes_back_the_whole_of_an_iteration_that_was_stopped(session):
    trainer = grpo(session, **FOUR_STEPS)
    trainer.fit(1)
    step, before = session.step, session.train.run(checksum)
    cut(session, trainer, 2)
    kept = session.snapshots.undo_to
    cut(session, trainer, 0)
    cut(session, trainer, 1)
    assert session.step == step + 3 and session.snapshots.undo_to == kept
    trainer.fit(1)
    assert session.train.run(checksum) != before
    session.undo()
    assert session.train.run(checksum) == before and session.step == step and trainer.where()["iterations"] == 1
    cut(session, trainer, 1)
    session.undo()
    assert session.train.run(checksum) == before and session.step == step
    assert trainer.fit(1)[0]["step"] == step + 4
    assert trainer.fit(1)[0]["step"] == step + 8
    session.undo()
    assert session.step == step + 4, "the next iteration has a snapshot of its own again"


def test_what_was_done_of_an_iteration_that_was_stopped_is_kept_and_goes_on_from_there(session):
    trainer = grpo(session, **FOUR_STEPS)
    trainer.fit(1)
    step, before = session.step, session.train.run(checksum)
    cut(session, trainer, 2)
    kept, done = session.snapshots[-1], session.train.run(checksum)
    assert (kept.label, kept.step) == (f"after step {step + 2}", step + 2), "what heal() would go back to"
    cut(session, trainer, 1)
    session.restore(kept)
    assert session.train.run(checksum) == done and session.step == step + 2
    assert trainer.fit(1)[0]["step"] == step + 4, "the rest of the iteration"
    session.undo()
    assert session.train.run(checksum) == before and session.step == step


def test_a_new_kernel_knows_of_an_iteration_that_was_stopped_and_undo_takes_all_of_it_back(session):
    trainer = grpo(session, **FOUR_STEPS)
    trainer.fit(1)
    step, before = session.step, session.train.run(checksum)
    cut(session, trainer, 2)
    session.core.trainer = None  # as a kernel finds it that has just attached
    again = session.last_trainer
    assert again is not trainer and again.id == trainer.id
    assert again.fit(1)[0]["step"] == step + 4, "the rest of the iteration"
    session.undo()
    assert session.train.run(checksum) == before and session.step == step


def test_load_refuses_to_drop_gradients_of_the_session(session, tmp_path):
    trainer = grpo(session)
    trainer.save(str(tmp_path))
    scored = session.rollout(["sort 5 2 :"], n=4, max_tokens=6).score(lambda r: float(sum(r.token_ids) % 7))
    batch = scored.select(scored.lengths > 0).batch(advantage=rb.rl.rloo())
    session.forward_backward(batch)
    with pytest.raises(StateError, match=r"load would drop them: session\.optim_step\(\) or session\.zero_grad"):
        trainer.load(str(tmp_path))
    session.zero_grad()
    assert trainer.load(str(tmp_path))["iterations"] == 0


def test_a_rate_that_is_set_is_what_a_trainers_schedule_goes_on_from(session):
    trainer = grpo(session, lr=1e-3, schedule_steps=12)
    trainer.fit(1)
    before = session.lr
    session.lr = before / 2
    rates = [trainer.step()["actor_lr"], trainer.step()["actor_lr"]]
    assert rates[0] == pytest.approx(before / 2)
    assert rates[1] < rates[0], "the cosine falls on from there"


def test_a_trainer_that_is_stopped_after_its_checkpoint_was_loaded_leaves_a_sync_due(session, tmp_path):
    class Cut(SPMDPPOTrainer):
        def send_weights(self):
            raise Stopped("stopped")

    trainer, kept = grpo(session), session.train.run(checksum)
    trainer.save(str(tmp_path))
    trainer.fit(1)
    with pytest.raises(Stopped):
        grpo(session, trainer_class=Cut, load_checkpoint=True, ckpt_path=str(tmp_path))
    assert session.train.run(checksum) == kept, "the policy is the checkpoint's"
    assert session.inference.weight_versions() < [session.version], "the card says that they are behind"
    assert session.last_trainer is trainer
    trainer.make_experience()
    assert session.inference.weight_versions() == [session.version]

"""Going back and stopping with a trainer on the ranks: a step that was taken back leaves no trace in what follows."""

import threading

import numpy as np
import pytest

import rlbench as rb
from rlbench.errors import StateError, Stopped
from rlbench.monitor import client
from rlbench.strategies import OptionError
from rlbench.tiny import tasks
from tests.clock import LIMIT_S, until
from tests.session.session_trainers import OPTIONS, checksum, grpo, prompts

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("put_back")]

OF_ITS_TIME = {"seconds", "version", "engine_version", "engine_gap", "step"}
SMALL = {**OPTIONS, "n": 2, "train_batch_size": 16}


def ppo(session, **given):
    """Everything that moves beside the policy: critic, average, both schedules, a KL weight that adapts."""
    options = {"kl_coef": 0.05, "kl_target": 0.02, "kl_horizon": 40, "schedule_steps": 12, "lr": 1e-3, **given}
    return session.trainer("ppo", prompts(), tasks.reward, critic_lr=1e-2, ema=True, **{**SMALL, **options})


def numbers(metrics):
    """What an iteration says of itself, but for how long it took and which number its weights have."""
    left = {n: v for n, v in metrics.items() if n not in OF_ITS_TIME and not n.startswith("perf/")}
    return {n: v for n, v in left.items() if isinstance(v, int | float)}


def assert_same(one, other):
    ours, theirs = numbers(one), numbers(other)
    assert ours.keys() == theirs.keys() and len(ours) > 20
    differ = {n: (ours[n], theirs[n]) for n in ours if not np.isclose(ours[n], theirs[n], rtol=1e-6, equal_nan=True)}
    assert not differ


def inside(session):
    """Sums over what the trainer holds beside the policy, on each rank, and where it stands."""
    return session.train.run(held)


def held():
    import torch

    def total(tensors):
        local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
        return float(sum(t.detach().double().abs().sum() for t in local))

    state = [v for s in trainer.critic_optim.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return {
        "critic": total(trainer.critic.parameters()),
        "optimizer": total(state),
        "average": total(trainer.ema_model.parameters()),
        "where": trainer.files.state(),
        "rates": [o.param_groups[0]["lr"] for o in (trainer.actor_optim, trainer.critic_optim)],
        "schedules": [s.last_epoch for s in (trainer.actor_scheduler, trainer.critic_scheduler)],
    }


def test_what_was_taken_back_leaves_no_trace_in_critic_average_schedules_and_prompts(session):
    trainer = ppo(session)
    trainer.fit(1)
    kept, before, policy = session.snapshot(), inside(session), session.train.run(checksum)
    first = trainer.step()
    assert inside(session) != before
    session.undo()
    assert inside(session) == before and session.train.run(checksum) == policy
    onward = [trainer.step(), trainer.step()]
    assert_same(first, onward[0])
    session.restore(kept)
    for one, other in zip(onward, [trainer.step(), trainer.step()], strict=True):
        assert_same(one, other)
    session.drop(kept)


@pytest.fixture
def no_branch_left(session):
    """Other files begin on a session without branches."""
    yield
    session.core.link.set(branch="main", branches={})


@pytest.mark.usefixtures("no_branch_left")
def test_the_history_of_a_trainer_goes_back_and_comes_again_with_a_branch(session):
    trainer, step = grpo(session), session.step
    trainer.fit(2)
    session.undo()
    assert [r["step"] for r in trainer.history] == [step + 1] and trainer.where()["iterations"] == 1
    session.branch("other way")
    trainer.fit(2)
    session.branch("main")
    assert [r["step"] for r in trainer.history] == [step + 1]
    assert trainer.step().step == step + 2 == session.step, "steps that were taken back are not counted"
    session.branch("other way")
    assert [r["step"] for r in trainer.history] == [step + 1, step + 2, step + 3]
    assert trainer.where()["optimizer_steps"] == 3
    session.branch("main")


def test_gradients_that_wait_for_the_rest_of_their_step_wait_again(session):
    trainer = grpo(session, train_batch_size=64)
    assert trainer.step().train_steps == 0
    first = trainer.step()
    assert first.train_steps == 1
    session.undo()
    assert session.train.run(waiting) == [(16, 32)] * 2
    assert_same(first, trainer.step())


def waiting():
    return trainer.sequences_waiting


def test_experience_that_waits_is_there_again(session):
    trainer = ppo(session)
    trainer.make_experience()
    first = trainer.ppo_train()
    session.undo()
    assert session.train.run(sequences) == [8, 8]
    assert_same(first, trainer.ppo_train())
    assert session.train.run(sequences) == [0, 0]


def sequences():
    return len(trainer.replay_buffer)


def test_a_snapshot_of_before_the_trainer_takes_the_policy_back_and_says_so(session):
    kept, policy = session.snapshot("bare"), session.train.run(checksum)
    trainer = grpo(session)
    trainer.fit(1)
    trainer.make_experience()
    with pytest.warns(UserWarning, match="'bare': the policy went back, the trainer did not: .*made before the tr"):
        session.restore(kept)
    assert session.train.run(checksum) == policy
    assert trainer.where()["iterations"] == 1 and len(trainer.history) == 0
    assert session.train.run(sequences) == [0, 0], "what was made with other weights is gone"
    step = session.step
    assert trainer.step().step == step + 1
    session.drop(kept)


def test_a_snapshot_of_another_trainer_takes_the_policy_back_and_says_so(session):
    grpo(session).fit(1)
    kept, policy = session.snapshot("earlier"), session.train.run(checksum)
    trainer = ppo(session)
    trainer.fit(1)
    critic = inside(session)[0]["critic"]
    with pytest.warns(UserWarning, match="'earlier': .* the trainer did not: the snapshot is of another trainer"):
        session.restore(kept)
    assert session.train.run(checksum) == policy and inside(session)[0]["critic"] == critic
    session.drop(kept)


def test_other_prompts_than_then_leave_the_trainer_where_it_is_and_name_why(session):
    trainer = grpo(session)
    trainer.fit(1)
    kept, policy = session.snapshot("those"), session.train.run(checksum)
    session.train.run(other_prompts, prompts(32, seed=9))
    trainer.fit(1)
    with pytest.warns(UserWarning, match="the trainer did not: .*other prompts"):
        session.restore(kept)
    assert session.train.run(checksum) == policy and trainer.where()["iterations"] == 2
    session.drop(kept)


def other_prompts(stream):
    trainer.prompts = stream


def test_the_trainers_part_counts_in_a_snapshot_and_is_shared_where_it_did_not_change(session):
    grpo(session)
    without = session.snapshot()
    ppo(session).fit(1)
    first, second = session.snapshot(), session.snapshot()
    weights = session.train.run(critic_bytes)
    assert first.bytes - without.bytes > 2 * sum(weights), "the critic, its optimizer, the average"
    assert second.bytes == first.bytes and second.fresh == 0
    session.drop(without, first, second)


def critic_bytes():
    return sum(p.to_local().nbytes for p in trainer.critic.parameters())


def test_a_critic_that_is_offloaded_is_kept_and_put_back_where_it_is(session):
    trainer = ppo(session, adam_offload=True)
    trainer.fit(1)
    session.train.run(send_away)
    before = inside(session)
    kept = session.snapshot()
    session.train.run(spoil)
    assert inside(session) != before
    session.restore(kept)
    assert inside(session) == before and session.train.run(offloaded) == [(True, True)] * 2
    session.drop(kept)


def send_away():
    trainer.strategy.offload_model(trainer.critic)


def spoil():
    for parameter in trainer.critic.parameters():
        parameter.data.to_local().zero_()
    trainer.critic_optim.state.clear()


def offloaded():
    own = trainer.strategy
    try:
        own.need_optimizer(trainer.critic_optim)
    except Exception:
        return own.offloaded(trainer.critic), True
    return own.offloaded(trainer.critic), False


# -- whose gradients


def test_verbs_of_the_session_do_not_take_in_gradients_that_wait_in_the_trainer(session):
    trainer = grpo(session, train_batch_size=64)
    trainer.step()
    before = session.train.run(checksum)
    scored = session.rollout(["sort 5 2 :"], n=4, max_tokens=6).score(lambda r: float(sum(r.token_ids) % 7))
    batch = scored.select(scored.lengths > 0).batch(advantage=rb.rl.rloo())
    for verb in (lambda: session.train_step(batch), lambda: session.forward_backward(batch), session.optim_step):
        with pytest.raises(StateError, match=r"trainer wait for their step \(16 of its 32 .*trainer.step.*zero_grad"):
            verb()
    assert session.train.run(checksum) == before and session.train.run(waiting) == [(16, 32)] * 2
    session.zero_grad()
    assert session.train.run(waiting) == [(0, 32)] * 2
    session.train_step(batch)
    session.undo()
    assert session.train.run(waiting) == [(0, 32)] * 2
    assert [trainer.step().train_steps, trainer.step().train_steps] == [0, 1]


# -- stops


def test_a_stop_that_falls_between_two_calls_of_a_fit_ends_it(session, monkeypatch):
    trainer = grpo(session)
    asked, apply = [], session.core.link.apply

    def between(*events):
        apply(*events)
        if not asked and any(event["do"] == "record" for event in events):  # an iteration was done, and no call runs
            asked.append(client.command(client.find(session.name), "stop", limit_s=30.0)["result"]["stopped"])

    monkeypatch.setattr(session.core.link, "apply", between)
    with pytest.raises(Stopped, match=r"1 of 50 iterations are done") as stopped:
        trainer.fit(50)
    assert asked == [["trainer.fit"]] and len(stopped.value.partial) == 1 == len(trainer.history)
    monkeypatch.undo()
    assert session.undo().step == session.step and trainer.where()["iterations"] == 0, "the iteration can be undone"
    assert len(trainer.fit(2)) == 2, "the next one is not stopped"


def test_a_stop_during_the_rollout_leaves_the_iteration_before_to_be_undone(session):
    trainer, raised = grpo(session), []
    trainer.fit(1)
    session.train.run(wait_for_a_stop)

    def run():
        try:
            trainer.fit(1)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    until(session.core.link.stop_running)
    thread.join(LIMIT_S)
    assert isinstance(raised[0], Stopped), raised
    session.undo()
    assert trainer.where()["iterations"] == 0


def wait_for_a_stop():
    from rlbench.dispatch import context

    maker = trainer.experience_maker
    make = maker.make_experience_list

    def held_up(*args, **kwargs):
        until(context.current().stop_requested)
        return make(*args, **kwargs)

    maker.make_experience_list = held_up


# -- a trainer that is refused


def test_a_trainer_that_is_refused_leaves_the_one_before_in_its_place(session):
    trainer = ppo(session, train_batch_size=32)
    trainer.fit(1)  # its gradients wait for the rest of their step
    kept, before = session.snapshot(), inside(session)
    onward = trainer.step()
    session.restore(kept)
    for refused in ({"freezing_actor_steps": 2, "gradient_checkpointing": True}, {"engine_tp_size": 3}):
        with pytest.raises(OptionError, match=next(iter(refused))):
            grpo(session, lr=0.5, schedule_steps=9, **refused)
        assert session.last_trainer is trainer and inside(session) == before
    assert session.train.run(recomputes) == [False, False]
    assert_same(onward, trainer.step())
    session.drop(kept)


def recomputes():
    return module.is_gradient_checkpointing

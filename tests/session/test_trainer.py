"""A trainer on the ranks of a real session: records, undo, stops, resuming, equal numbers from a cell of the ranks."""

import threading

import numpy as np
import pytest

import rlbench as rb
from rlbench.errors import SessionError, StateError, Stopped
from rlbench.strategies import OptionError
from rlbench.tiny import tasks
from tests.clock import LIMIT_S, until
from tests.session.session_trainers import OPTIONS, checksum, grpo, prompts

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("put_back")]


def test_an_iteration_trains_syncs_and_is_on_record_and_undo_takes_it_back(session):
    trainer, step, before = grpo(session, lr=3e-6), session.step, session.train.run(checksum)[0]
    metrics = trainer.step()
    assert metrics.actor_lr == 3e-6
    assert session.step == step + 1 and metrics.step == step + 1 and metrics.train_steps == 1
    assert session.inference.weight_versions() == [session.version] == [metrics.version]
    record = session.history[-1]
    assert {"reward", "loss", "kl", "entropy", "grad_norm", "lr", "length", "policy_loss", "actor_lr"} <= record.keys()
    assert record["kl"] == metrics.kl < 0.1 and "ref_kl" not in record  # without a reference
    assert record["aggregation"] == "seq-mean-token-mean" and "(seq-mean-token-mean)" in repr(metrics)
    assert record["loss_name"] == "grpo" and record["seconds"]["total"] > record["seconds"]["sync"] > 0
    scored = session.rollout(["sort 4312"], n=2, max_tokens=8)  # the replicas are awake, as they were
    assert scored.versions.tolist() == [session.version] * 2
    entries = [one["verb"] for one in session.history.verbs if str(one["verb"]).startswith("last_trainer")]
    assert entries[-1] == "last_trainer.step"
    assert session.train.run(checksum)[0] != before
    session.undo()
    assert session.train.run(checksum)[0] == before


def test_a_cell_on_the_ranks_gives_the_same_curve(session):
    def curve(history):
        return [(round(h["reward"], 9), round(h["actor_grad_norm"], 6), round(h["mismatch/kl"], 6)) for h in history]

    kept = session.snapshot()
    ours = curve(grpo(session, micro_train_batch_size=8).fit(2))  # two micro-batches of a step on each rank
    session.restore(kept)
    session.train.run(make_by_hand, session.options.path, prompts(), OPTIONS)
    theirs = curve([session.train.run(iterate, step)[0] for step in range(2)])
    session.drop(kept)
    assert ours == theirs


def make_by_hand(path, stream, options):
    from transformers import AutoTokenizer

    from rlbench.strategy import get_strategy
    from rlbench.trainer.spmd_ppo_trainer import SPMDPPOTrainer

    global by_hand
    names = (
        "micro_train_batch_size",
        "train_batch_size",
        "micro_rollout_batch_size",
        "n",
        "packing",
        "seed",
    )
    own = get_strategy({"fsdp": True, "bf16": False, **{name: options[name] for name in names}})
    own.setup_inference_engine(own.config, engine_type="vllm")
    by_hand = SPMDPPOTrainer(
        own,
        module,
        None,
        tasks.reward,
        None,
        None,
        module.optimizer,
        None,
        None,
        None,
        tokenizer=AutoTokenizer.from_pretrained(path),
        prompts=stream,
        kl_coef=0.0,
        rollout_batch_size=options["rollout_batch_size"],
        max_new_tokens=options["max_tokens"],
    )


def iterate(step):
    by_hand.make_experience()
    return by_hand.ppo_train(step)


def test_a_step_of_the_sessions_finds_an_optimizer_that_a_cell_left_in_host_memory(session):
    grpo(session, adam_offload=True)
    scored = session.rollout(["sort 5 2 :"], n=4, max_tokens=6).score(lambda r: 1.0)
    batch = scored.select(scored.lengths > 0).batch(advantage=lambda rewards, group: rewards)
    assert session.train.run(iterate_in_a_cell) == [True, True]
    asleep = r"of engine 'inference' (is|are) .*session\.onload\('inference', '"
    with pytest.raises(StateError, match=asleep):
        session.rollout(["sort 52"], n=1, max_tokens=6)
    assert session.train_step(batch).grad_norm > 0
    assert session.train.run(is_away) == [False, False]
    session.train.run(iterate_in_a_cell)
    assert grpo(session).step().actor_grad_norm > 0, "nor does a trainer that does not offload refuse"
    session.offload("train", "optimizer")
    with pytest.raises(StateError, match=r"optimizer of engine 'actor' .*session\.onload\('actor', 'optimizer'\)"):
        session.train_step(batch)
    session.onload("train")
    session.onload("inference")


def iterate_in_a_cell():
    trainer.make_experience()
    trainer.ppo_train()
    return trainer.strategy.optimizer_away(module.optimizer)


def is_away():
    return trainer.strategy.optimizer_away(module.optimizer)


def test_a_stop_ends_a_fit_within_an_iteration_and_fit_goes_on(session):
    trainer, raised = grpo(session), []

    def run():
        try:
            trainer.fit(500)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: len(trainer.history) >= 2)
    session.stop()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert isinstance(raised[0], Stopped) and len(raised[0].partial) >= 2, raised
    done = len(trainer.history)
    assert done < 500
    trainer.fit(1)
    assert len(trainer.history) == done + 1
    assert session.rollout(["sort 52"], n=1, max_tokens=6).samples == 1


def test_save_and_load_go_on_as_if_nothing_had_been(session, tmp_path):
    trainer = grpo(session)
    trainer.step()
    trainer.save(str(tmp_path / "kept"))
    straight = [trainer.step() for _ in range(2)]
    assert trainer.load(str(tmp_path / "kept"))["iterations"] == 1
    again = [trainer.step() for _ in range(2)]
    for one, other in zip(straight, again, strict=True):
        assert one.reward == other.reward and np.isclose(one.actor_grad_norm, other.actor_grad_norm, rtol=1e-4)


def test_ppo_has_a_critic_and_a_reference_whose_kl_is_in_the_reward(session):
    trainer = session.trainer(
        "ppo",
        prompts(),
        tasks.reward,
        critic_lr=1e-3,
        **{**OPTIONS, "kl_coef": 0.05, "n": 2, "train_batch_size": 16},
    )
    first, second = trainer.step(), trainer.step()
    assert first.ref_kl == pytest.approx(0.0, abs=1e-4) and second.ref_kl != first.ref_kl  # it is where it began
    assert {"critic_loss", "values", "critic_lr", "explained_variance", "returns_mean"} <= first.keys()
    assert first.critic_lr == pytest.approx(1e-3)
    assert second["return"] != pytest.approx(second.reward, abs=1e-6), "the KL is in the return, not in the reward"
    held = session.train.run_cell("sum(hasattr(one, 'parameters') for one in vars(trainer).values())")
    assert held == ["2", "2"], "actor and critic: the reference is the session's, whose engine holds it"


def test_dynamic_sampling_draws_again_until_every_group_teaches_something(session):
    trainer = session.trainer(
        "dapo",
        prompts(400),
        tasks.reward,
        eval_prompts=tasks.prompts(16, split="eval"),
        **{**OPTIONS, "max_tokens": 12},
    )
    metrics = trainer.step()
    assert metrics.step_reward_min < metrics.step_reward_max
    assert trainer.where()["prompts"]["position"] > OPTIONS["rollout_batch_size"], "some prompts were replaced"
    assert 0 <= trainer.evaluate()["eval/reward"] <= 1


def test_a_class_of_the_notebook_is_what_runs_and_a_second_trainer_takes_its_place(session):
    from rlbench.trainers import SPMDPPOTrainer

    class Doubled(SPMDPPOTrainer):
        def make_experience(self, prompts=None):
            return super().make_experience(prompts) | {"made": 2.0}

    first = grpo(session, trainer_class=Doubled)
    assert first.make_experience()["made"] == 2.0
    second = grpo(session)
    with pytest.raises(SessionError, match="another trainer has taken the place"):
        first.step()
    assert session.last_trainer is second


def test_mistakes_are_told_where_they_are_made(session):
    with pytest.raises(SessionError, match="which prompts"):
        session.trainer("grpo")
    with pytest.raises(OptionError, match=r"no method 'gpro'; nearest: .*grpo"):
        session.trainer("gpro", prompts(), tasks.reward)
    with pytest.raises(OptionError, match="no option 'rolout_batch_size'"):
        grpo(session, rolout_batch_size=4)
    with pytest.raises(OptionError, match=r"rb.Train.use_mp_opt=True"):
        grpo(session, use_mp_opt=True)
    with pytest.raises(OptionError, match="cannot be shared out evenly over 2 ranks"):
        grpo(session, rollout_batch_size=7).step()
    for said in (
        {"fsdp": False},
        {"fsdp": False, "zero_stage": 3},
        {"bf16": True},
        {"critic_pretrain": True},
        {"lr_warmup_ratio": 0.5},
        {"lr": 1e-5, "actor_learning_rate": 1e-6},
    ):
        with pytest.raises(OptionError, match=r"cannot be honoured|no effect|say the same|given twice"):
            grpo(session, **said)
    assert grpo(session).step().train_steps == 1, "the session is as usable as before"


def test_a_kernel_that_comes_back_finds_the_trainer_where_it_was(session):
    first = grpo(session)
    before = first.step()
    again = rb.attach(session.name, take_over=True)
    try:
        found = again.last_trainer
        assert found.method == "grpo" and found.options["rollout_batch_size"] == OPTIONS["rollout_batch_size"]
        record = found.step()
        assert record.step == before.step + 1 and found.where()["iterations"] == 2
    finally:
        again.core.link.release()
        session.core.link.epoch = rb.attach(session.name, take_over=True).core.link.epoch  # the shared one drives again


def test_a_trainer_that_a_cell_makes_under_the_same_name_leaves_the_sessions_alone(session):
    trainer = grpo(session)
    session.train.run_cell("trainer = 'of the cell'")
    assert trainer.step().train_steps == 1
    grpo(session).where()
    session.train.run_cell("trainer = 'of the cell'")
    session.train.call_all("drop_trainer").result()
    assert session.train.run_cell("trainer") == ["'of the cell'"] * 2


def test_a_row_whose_reward_fails_is_left_out_and_in_the_history(session):
    one_bad = [rb.Prompt(prompt, label="\\bad" if i == 3 else "fine") for i, prompt in enumerate(tasks.prompts(8))]

    def reward(rollout):
        if rollout.label != "fine":
            raise ValueError(f"no number in {rollout.label}")
        return tasks.reward(rollout)

    stream = rb.data.PromptSet.of(one_bad).stream(seed=3)
    trainer = session.trainer("grpo", stream, reward, **OPTIONS, reward_failures=0.2)
    assert trainer.step().train_steps == 1
    record = session.history[-1]
    assert record["reward_failed"] == 4 and record["groups_left_out"] == 1 and np.isfinite(record["reward"])
    assert "no number in \\bad" in record["reward_failed_rows"]

"""Trainers of texts on the ranks of a real session: the curve of a loop by hand, records, undo, stops, healing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlbench as rb
from rlbench.errors import DataError, LossError, SessionError, Stopped, WorkerDied
from rlbench.session.session import Session
from rlbench.strategies import OptionError
from rlbench.tiny import tasks
from tests.clock import LIMIT_S, until
from tests.session.session_trainers import checksum, drop_trainer

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("put_back")]

SIZE, RATE = 16, 1e-4
OPTIONS: dict[str, Any] = {"train_batch_size": SIZE, "lr": RATE, "seed": 3}
METHODS = ("sft", "dpo", "ipo", "simpo", "orpo", "kto")


def rows(count: int = 48, seed: int = 5, judged: bool = False) -> list[dict[str, Any]]:
    asked = [(prompt, tasks.answer(prompt)) for prompt in tasks.prompts(count, seed=seed)]
    made = [{"prompt": p, "completion": a, "chosen": a, "rejected": a[::-1]} for p, a in asked if a != a[::-1]]
    if not judged:
        return made
    return [{**row, "completion": row[k], "label": k == "chosen"} for row in made for k in ("chosen", "rejected")]


def batch_of(method: str, session: Any, **given: Any) -> Any:
    maker = {"sft": rb.data.demonstrations, "kto": rb.data.labelled}.get(method, rb.data.pairs)
    return maker(rows(judged=method == "kto", **given), session)


def curve(records: Any) -> list[tuple[float, ...]]:
    return [tuple(record[name] for name in ("loss", "grad_norm", "entropy", "lr")) for record in records]


def test_the_trainer_of_each_method_gives_the_curve_of_train_step_by_hand_bit_for_bit(session: Any) -> None:
    kept = session.snapshot()
    for method in METHODS:
        batch = batch_of(method, session)
        stream = batch.stream(seed=3)
        by_hand = [session.train_step(stream.take(SIZE), loss=method, lr=RATE) for _ in range(2)]
        weights = session.train.run(checksum)
        session.restore(kept, sync=False)  # replicas draw nothing here
        done = session.trainer(method, data=batch, **OPTIONS).fit(2)
        assert curve(done) == curve(by_hand) and session.train.run(checksum) == weights, method
        if method not in ("sft", "kto"):
            assert done[-1]["reward_accuracy"] == by_hand[-1]["reward_accuracy"], method
        drop_trainer(session)
        session.restore(kept, sync=False)
    session.drop(kept)


def test_an_iteration_is_on_record_with_a_version_of_its_own_and_the_replicas_keep_theirs(session: Any) -> None:
    held, step, version = session.inference.weight_versions(), session.step, session.version
    trainer = session.trainer("sft", data=rows(), eval_data=rows(16, seed=9), eval_steps=2, **OPTIONS)
    done = trainer.fit(epochs=1)
    assert trainer.texts == len(rows()) and len(done) == trainer.texts // SIZE == trainer.where().iterations
    assert session.step == step + len(done) and session.version == version + len(done)
    assert session.inference.weight_versions() == held
    record = session.history[-1]
    assert {"loss", "grad_norm", "lr", "entropy", "tokens", "sequences", "epoch"} <= record.keys()
    assert record["loss_name"] == "sft" and record["aggregation"] == "token-mean" and record["sequences"] == SIZE
    assert ["eval/loss" in one for one in done] == [number % 2 == 0 for number in range(1, len(done) + 1)]
    before = trainer.evaluate()["eval/loss"]
    trainer.fit(4)
    assert trainer.evaluate()["eval/loss"] < before
    some = rows()[:4]
    assert trainer.evaluate(some) == trainer.evaluate(rb.data.demonstrations(some, session)) != trainer.evaluate()
    session.sync_weights()
    assert session.inference.weight_versions() == [session.version]
    assert "TextTrainer" in type(trainer).__name__ and trainer.chosen["train_batch_size"] == SIZE


def test_undo_takes_one_back_with_its_texts_and_rate_and_restore_as_well(session: Any) -> None:
    trainer = session.trainer("dpo", data=rows(), schedule_steps=8, lr_warmup_ratio=0.5, **OPTIONS)
    kept, first = session.snapshot(), trainer.fit(2)
    weights = session.train.run(checksum)
    assert first[0]["lr"] < first[1]["lr"] < RATE
    session.undo()
    assert session.train.run(checksum) != weights and trainer.where().iterations == 1 and len(trainer.history) == 1
    assert curve([trainer.step()]) == curve(first[1:]) and session.train.run(checksum) == weights
    session.restore(kept, sync=False)
    assert curve(trainer.fit(2)) == curve(first)
    session.drop(kept)


def test_save_and_load_go_on_as_if_nothing_had_been(session: Any, tmp_path: Path) -> None:
    trainer = session.trainer("orpo", data=rows(), **OPTIONS)
    trainer.step()
    trainer.save(str(tmp_path / "kept"))
    straight = trainer.fit(2)
    version = session.version
    assert trainer.load(str(tmp_path / "kept")).iterations == 1 and session.version == version + 1
    assert curve(trainer.fit(2)) == curve(straight)
    again = session.trainer("orpo", data=rows(), load_checkpoint=True, ckpt_path=str(tmp_path / "kept"), **OPTIONS)
    assert again.where().iterations == 1 and session.version > version + 3
    assert curve(again.fit(2)) == curve(straight)


def test_a_stop_ends_a_fit_and_fit_goes_on_with_the_texts_it_had(session: Any) -> None:
    kept = session.snapshot()
    trainer = session.trainer("sft", data=rows(), **OPTIONS)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            trainer.fit(5000)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: len(trainer.history) >= 2)
    session.stop()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert isinstance(raised[0], Stopped), raised
    done = trainer.where().iterations
    assert done == len(raised[0].partial) == len(trainer.history) >= 2
    more = trainer.fit(1)
    stopped = curve(trainer.history)
    session.restore(kept, sync=False)
    straight = session.trainer("sft", data=rows(), **OPTIONS).fit(done + 1)
    assert stopped == curve(straight) and more[0]["step"] == kept.step + done + 1
    session.drop(kept)


def test_files_streams_and_losses_of_ones_own_are_taken(session: Any, tmp_path: Path) -> None:
    def mine(inputs: Any) -> Any:
        return -inputs.logprobs, {"seen": 2.0}

    file = tmp_path / "demos.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows(20)))
    one = session.trainer("sft", data=str(file), loss=mine, **OPTIONS)
    metrics = one.step()
    assert one.texts == len(rows(20)) and metrics.seen == 2.0
    session.undo()
    stream = batch_of("sft", session).stream(seed=8)
    expected = session.forward_backward(stream.copy().take(SIZE), loss="sft").loss
    session.zero_grad()
    two = session.trainer("sft", data=stream, **OPTIONS)
    assert two.step().loss == expected
    assert two.where().texts["seed"] == 8
    session.undo()
    apart = session.trainer("dpo", data=rows(), loss=rb.rl.dpo(beta=0.5), **OPTIONS)
    assert apart.step().loss == pytest.approx(np.log(2), abs=1e-3), "policy and reference are one yet"


def test_a_cell_on_the_ranks_gives_the_same_curve(session: Any) -> None:
    batch, kept = batch_of("simpo", session), session.snapshot()
    ours = session.trainer("simpo", data=batch, train_batch_size=SIZE, seed=3).fit(2)
    session.restore(kept, sync=False)
    session.train.run(make_by_hand, batch)
    theirs = [session.train.run(iterate)[0] for _ in range(2)]
    assert curve(ours) == curve(theirs)
    session.drop(kept)


def make_by_hand(batch: Any) -> None:
    from rlbench.strategies import get_strategy
    from rlbench.trainers import SPMDTextTrainer

    global by_hand
    options = {"fsdp": True, "bf16": False, "train_batch_size": SIZE, "seed": 3, "packing": True, "head": "auto"}
    by_hand = SPMDTextTrainer(get_strategy(options), module, module.optimizer, "simpo", batch)  # type: ignore[name-defined]


def iterate() -> Any:
    return by_hand.iterate()


def test_a_reference_may_be_another_folder(session: Any, tmp_path: Path) -> None:
    session.export(tmp_path / "start")
    kept = session.snapshot()
    apart = session.trainer("ipo", data=rows(), reference=str(tmp_path / "start"), **OPTIONS).fit(2)
    session.restore(kept, sync=False)
    shared = session.trainer("ipo", data=rows(), **OPTIONS).fit(2)
    np.testing.assert_allclose(curve(apart), curve(shared), rtol=1e-4)
    session.drop(kept)
    with pytest.raises(OptionError, match=r"reference='no/such': there is no folder"):
        session.trainer("ipo", data=rows(), reference="no/such", **OPTIONS)


def test_a_kernel_that_comes_back_finds_the_trainer_where_it_was(session: Any) -> None:
    session.trainer("simpo", data=rows(), **OPTIONS).fit(2)
    again = rb.attach(session.name, take_over=True)
    try:
        found = again.last_trainer
        assert found.method == "simpo" and found.texts == len(rows()) and found.options["train_batch_size"] == SIZE
        assert found.step().step == again.step and found.where().iterations == 3
    finally:
        again.core.link.release()
        session.core.link.epoch = rb.attach(session.name, take_over=True).core.link.epoch


def test_mistakes_are_told_where_they_are_made(session: Any) -> None:
    step = session.step
    kept = session.trainer("sft", data=rows(), **OPTIONS)
    for method, given, error, said in (
        ("sft", {}, SessionError, "which texts"),
        ("sft", {"data": []}, DataError, "no rows"),
        ("dpo", {"data": [{"prompt": "a", "completion": "b"}]}, DataError, "row 0: it has no column 'chosen'"),
        ("dpo", {"data": batch_of("sft", session)}, LossError, "the batch has none"),
        ("kto", {"data": batch_of("sft", session)}, LossError, "needs labels"),
        ("sft", {"data": rows(), "reference": True}, OptionError, "compares with none"),
        ("dpo", {"data": rows(), "reference": False}, LossError, "reference"),
        ("sft", {"data": rows(), "prompts": ["a"]}, OptionError, "prompts has no effect"),
        ("sft", {"data": rows(), "n": 4}, OptionError, "n has no effect on texts"),
        ("sft", {"data": rows(), "betas": (0.9, 0.99)}, OptionError, "betas has no effect"),
        ("sft", {"data": rows(), "eval_steps": 2}, OptionError, "eval_steps has no effect"),
        ("sft", {"data": rows(), "lr_warmup_ratio": 0.5}, OptionError, "schedule_steps"),
        ("grpo", {"data": rows()}, OptionError, "data and eval_data have no effect"),
        ("grpo", {"prompts": ["a"], "token_budget": 64}, OptionError, "token_budget has no effect"),
    ):
        with pytest.raises(error, match=said):
            session.trainer(method, **given)
    with pytest.raises(SessionError, match="give one of them"):
        kept.fit()
    with pytest.raises(SessionError, match="epochs=0"):
        kept.fit(epochs=0)
    assert session.step == step and kept.step().step == step + 1, "engines and trainer are as usable as before"


def test_demonstrations_are_mixed_into_ppo(session: Any) -> None:
    def trained(**given: Any) -> Any:
        trainer = session.trainer(
            "grpo",
            tasks.prompts(16, seed=1),
            tasks.reward,
            rollout_batch_size=4,
            n=2,
            train_batch_size=8,
            micro_train_batch_size=4,
            max_tokens=8,
            lr=RATE,
            **given,
        )
        return trainer.step()

    kept = session.snapshot()
    found = trained(ptx_coef=0.5, pretrain_data=rows())
    session.restore(kept)
    batch = batch_of("sft", session)
    first = batch.stream(seed=session.options.seed).take(8)
    expected = -float(session.logprobs(first)[first.mask].mean())
    assert found["ptx_loss"] == pytest.approx(expected, rel=1e-3), "the mean over the assistant's tokens alone"
    again = trained(ptx_coef=0.5, pretrain_data=batch)
    assert again["ptx_loss"] == found["ptx_loss"] and again.grad_norm == found.grad_norm
    session.restore(kept)
    with pytest.raises(OptionError, match="belong together"):
        trained(pretrain_data=rows())
    with pytest.raises(OptionError, match="compared or judged"):
        trained(ptx_coef=0.5, pretrain_data=batch_of("dpo", session))
    session.drop(kept)


@pytest.mark.slow
def test_a_killed_rank_is_healed_with_the_trainer_where_it_stood_and_adapters_need_no_reference(cluster: Any) -> None:
    with Session("tiny", train={"lr": RATE, "lora": {"rank": 4}}, undo=1, seed=1) as own:
        trainer = own.trainer("dpo", data=rows(), **OPTIONS)
        first = trainer.fit(2)
        assert abs(first[0]["reward_margin"]) < 1e-6 < abs(first[1]["reward_margin"])
        kept = own.snapshot()
        expected = curve(trainer.fit(1))
        own.restore(kept)
        (pid,) = own.core.link.state("engines")["engines"]["actor"]["pids"].values()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            trainer.step()
        own.heal()
        assert own.last_trainer is trainer and trainer.where().iterations == 2
        assert curve(trainer.fit(1)) == expected


@pytest.mark.curve
def test_the_command_line_gives_the_same_curve_and_goes_on_from_its_checkpoint(session: Any, tmp_path: Path) -> None:
    (tmp_path / "demos.jsonl").write_text("\n".join(json.dumps(row) for row in rows()))
    (tmp_path / "run.yaml").write_text(
        f"data: demos.jsonl\neval_data: demos.jsonl\neval_steps: 2\ntrain_batch_size: {SIZE}\nlr: {RATE}\nseed: 3\n"
        f"betas: {list(session.options.train.betas)}\nlr_schedule: constant\nshards: 2\nkv_cache_bytes: 67108864\n"
        "ckpt_path: kept\nsave_steps: 2\nmetrics_file: m.jsonl\n"
    )

    def run(*line: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "rlbench.cli", "train", "sft", "run.yaml", *line],
            cwd=tmp_path,
            env=os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    first, second = run("--max_steps", "2"), run("--max_steps", "3", "--load_checkpoint")
    assert "iteration 2: loss " in first and "eval/loss" in first and "going on after iteration 2" in second
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2, 3]
    here = session.trainer("sft", data=rows(), eval_data=rows(), eval_steps=2, **OPTIONS).fit(3)
    np.testing.assert_allclose(curve(lines), curve(here), rtol=1e-6)
    assert lines[1]["eval/loss"] == pytest.approx(here[1]["eval/loss"], rel=1e-6)

"""A worker is killed: the cell says which one and why, and `heal` brings the session to where it stood."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

import rlbench as rb
from rlbench.errors import CheckpointError, EngineError, StateError, WorkerDied
from rlbench.session import building
from rlbench.tiny import tasks
from tests.clock import LIMIT_S, until

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def mortal(cluster: Any, tiny_path: Any) -> Iterator[Any]:
    made = rb.Session("tiny", name="mortal", train={"lr": 1e-4, "shards": 2}, reference=True, seed=3, undo=1)
    yield made
    made.close()


@pytest.fixture(scope="module")
def batch(mortal: Any) -> Any:
    rollouts = mortal.rollout(tasks.prompts(8, seed=3), n=4, max_tokens=12)
    return rollouts.score(tasks.reward).batch(advantage=rb.rl.group_normalized())


def pid_of(session: Any, engine: str, worker: int) -> int:
    pids = session.core.link.state("engines")["engines"][engine]["pids"]
    return int(pids[f"rlbench/{session.name}/{engine}/{worker}"])


def kill(session: Any, engine: str, worker: int) -> int:
    pid = pid_of(session, engine, worker)
    os.kill(pid, signal.SIGKILL)
    return pid


def checksums(session: Any) -> Any:
    return session.train.call_all("training_checksums").result()


def goes_on(session: Any, batch: Any) -> None:
    """The whole loop once more."""
    step = session.step
    assert session.train_step(batch).step == step + 1
    session.sync_weights()
    rollouts = session.rollout(tasks.prompts(2), n=2, max_tokens=8, progress=False)
    assert rollouts.samples == 4 and rollouts.weight_version == session.version


def test_a_rank_killed_between_calls_shows_on_the_card_and_healing_goes_back_to_after_the_last_step(
    mortal: Any, batch: Any
) -> None:
    before_both = checksums(mortal)
    mortal.train_step(batch)
    undone = checksums(mortal)
    mortal.train_step(batch)
    before, step, history = checksums(mortal), mortal.step, len(mortal.history)
    drawn = mortal.rollout(tasks.prompts(2), max_tokens=4, progress=False).number
    pid = kill(mortal, "actor", 1)
    until(lambda: "rank 1 died" in repr(mortal))
    with pytest.raises(WorkerDied, match=rf"rank 1 of actor died \(pid {pid}\): .*killed") as died:
        mortal.train_step(batch)
    assert "iB when last seen" in str(died.value) and "session.heal()" in str(died.value)
    healed = mortal.heal()
    assert checksums(mortal) == before != undone != before_both and (mortal.step, healed.step) == (step, step)
    assert len(mortal.history) == history and f"'after step {step}'" in healed.engines["actor"]
    assert "lost" not in healed.engines["actor"] and list(healed.engines) == ["actor"]
    assert mortal.rollout(tasks.prompts(2), max_tokens=4, progress=False).number == drawn + 1, "it was drawn"
    assert mortal.inference.weight_versions() == [mortal.version], "the replica holds the weights gone back to"
    assert "died" not in repr(mortal)
    mortal.undo()
    assert (checksums(mortal), mortal.step) == (undone, step - 1), "what was healed can still be undone"
    kill(mortal, "actor", 0)
    until(lambda: "rank 0 died" in repr(mortal))
    mortal.heal()
    assert (checksums(mortal), mortal.step) == (undone, step - 1), "and is not brought back by a heal"
    goes_on(mortal, batch)


def test_a_rank_killed_in_the_middle_of_a_step_ends_the_step_and_heals(mortal: Any, batch: Any) -> None:
    mortal.train_step(batch)
    before, step = checksums(mortal), mortal.step
    victim = pid_of(mortal, "actor", 0)

    def deadly(inputs: Any) -> Any:
        if inputs.mask.sum() > 40:  # not in the trial in this process
            os.kill(victim, signal.SIGKILL)
        return -inputs.logprobs * inputs.advantages, {}

    with pytest.raises(WorkerDied, match="rank 0 of actor died"):
        mortal.train_step(batch, loss=deadly)
    mortal.heal()
    assert (checksums(mortal), mortal.step) == (before, step), "the step that was finished stays"
    goes_on(mortal, batch)


def test_a_rank_killed_while_the_state_after_a_step_is_kept_costs_that_step_alone(mortal: Any, batch: Any) -> None:
    mortal.train_step(batch)
    before, step, history = checksums(mortal), mortal.step, len(mortal.history)

    def deadly() -> None:
        import os
        import signal

        from rlbench.workers.train import snapshots as train_snapshots

        write, calls = train_snapshots.write_tensors, [0]

        def dies(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if rank == 1 and calls[0] == 2:  # type: ignore[name-defined]
                os.kill(os.getpid(), signal.SIGKILL)
            return write(*args, **kwargs)

        train_snapshots.write_tensors = dies

    mortal.train.run(deadly)
    with pytest.raises(WorkerDied, match="rank 1 of actor died"):
        mortal.train_step(batch)
    assert mortal.step == step, "it failed, and is on nobody's record"
    healed = mortal.heal()
    assert f"'after step {step}'" in healed.engines["actor"]
    assert (checksums(mortal), mortal.step, len(mortal.history)) == (before, step, history)
    goes_on(mortal, batch)


def test_a_rank_that_crashes_inside_the_optimizers_step_says_so_and_costs_that_step(mortal: Any, batch: Any) -> None:
    mortal.train_step(batch)
    before, step = checksums(mortal), mortal.step

    def deadly() -> None:
        if rank == 1:  # type: ignore[name-defined]
            import os

            module.optimizer.step = lambda *a, **k: os.abort()  # type: ignore[name-defined]

    mortal.train.run(deadly)
    with pytest.raises(WorkerDied, match=r"rank 1 of actor died .*crashed: .*SIGABRT") as died:
        mortal.train_step(batch)
    assert "in <lambda>" in died.value.full_traceback, "where Python stood when it crashed"
    mortal.heal()
    assert (checksums(mortal), mortal.step) == (before, step)
    goes_on(mortal, batch)
    assert len(mortal.snapshots) == 2, "what was kept for the step that failed gave way"


def test_what_a_rank_left_that_died_in_the_middle_of_a_snapshot_is_removed(mortal: Any, batch: Any) -> None:
    mortal.train_step(batch)
    before, kept = checksums(mortal), mortal.snapshot("kept")

    def deadly() -> None:
        if rank == 0:  # type: ignore[name-defined]
            import os
            import signal

            import rlbench.checkpoint.writer as writing

            writing.random_state = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)  # after the tensors

    mortal.train.run(deadly)
    with pytest.raises(WorkerDied, match="rank 0 of actor died"):
        mortal.snapshot("never")
    beside = Path(kept.folder).parent
    start = Path(kept.folder).name.removesuffix(kept.id)
    assert any(path.name.endswith(".partial") for path in beside.glob(f"{start}*"))
    mortal.heal()
    assert {str(path) for path in beside.glob(f"{start}*")} == {s.folder for s in mortal.snapshots}
    assert checksums(mortal) == before
    mortal.drop("kept")
    goes_on(mortal, batch)


def test_a_replica_killed_in_the_middle_of_a_rollout_is_rebuilt_with_the_trainers_weights(
    mortal: Any, batch: Any
) -> None:
    mortal.sync_weights()
    greedy = {"temperature": 0.0, "max_tokens": 12, "progress": False}
    said = mortal.rollout(tasks.prompts(8, seed=1), **greedy).texts
    before, version = checksums(mortal), mortal.version
    pending = mortal.rollout(tasks.prompts(64), n=16, max_tokens=1500, ignore_eos=True, progress=False, block=False)
    until(lambda: any("rollout" in what for what in mortal.core.link.state()["running"].values()))
    kill(mortal, "inference", 0)
    with pytest.raises(WorkerDied, match="replica 0 of inference died"):
        pending.result(timeout=LIMIT_S)
    healed = mortal.heal()
    assert healed.engines == {"inference": "built again, with the trainer's weights"}
    assert checksums(mortal) == before and mortal.version == version
    assert mortal.rollout(tasks.prompts(8, seed=1), **greedy).texts == said
    goes_on(mortal, batch)


def test_a_replica_killed_with_open_calls_loses_no_finished_one_and_answers_where_it_was(mortal: Any) -> None:
    endpoint = mortal.endpoint()
    chat: list[Any] = [{"role": "user", "content": "sort 21"}]

    def ask(messages: Any, **options: Any) -> Any:
        with openai.OpenAI(base_url=endpoint.run("a"), api_key=endpoint.key, max_retries=0, timeout=LIMIT_S) as client:
            return client.chat.completions.create(model="policy", messages=messages, extra_body=options)

    answer = ask(chat, max_tokens=8).choices[0].message
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(ask, chat, max_tokens=1500, ignore_eos=True)
        until(lambda: endpoint.counts["open"] == 1)
        kill(mortal, "inference", 0)
        with pytest.raises(openai.APIConnectionError):
            under_way.result(timeout=LIMIT_S)
    mortal.heal()
    assert len(mortal.traces("a")[0].calls) == 1
    again = mortal.endpoint()
    assert (again.url, again.key) == (endpoint.url, endpoint.key)
    ask([*chat, {"role": "assistant", "content": answer.content}, *chat], max_tokens=4)
    first, second = mortal.traces("a")[0].calls
    assert second.parent == (first.number, 0) and second.prompt[: second.ahead] == first.whole(0)
    again.close()


def test_where_asked_the_synced_weights_come_back_and_the_optimizer_starts_anew(mortal: Any, batch: Any) -> None:
    mortal.train_step(batch)
    mortal.sync_weights()
    weights, logprobs, step = mortal.train.call_all("state_checksum").result(), mortal.logprobs(batch), mortal.step
    kill(mortal, "actor", 0)
    kill(mortal, "actor", 1)
    healed = mortal.heal(prefer="weights")
    assert "optimizer starts anew" in healed.engines["actor"] and mortal.step == step
    assert mortal.train.call_all("state_checksum").result() == weights
    assert np.array_equal(mortal.logprobs(batch), logprobs)
    assert mortal.version == mortal.inference.weight_versions()[0]
    goes_on(mortal, batch)


def test_a_reference_is_rebuilt_too_and_a_new_driver_can_heal(mortal: Any, batch: Any) -> None:
    expected = mortal.train_step(batch, loss=rb.rl.grpo(kl_coef=0.1)).ref_kl
    mortal.undo()
    kill(mortal, "reference", 0)
    kill(mortal, "inference", 0)
    until(lambda: "rank 0 died" in repr(mortal) and "replica 0 died" in repr(mortal))
    again = rb.attach("mortal")
    with pytest.raises(WorkerDied, match=r"session\.heal\(\)"):
        again.rollout(tasks.prompts(2), max_tokens=4, progress=False)
    assert set(again.heal().engines) == {"reference", "inference"}
    assert again.train_step(batch, loss=rb.rl.grpo(kl_coef=0.1)).ref_kl == pytest.approx(expected, rel=1e-4)
    goes_on(again, batch)
    mortal.__dict__.update(again.__dict__)  # the fixture's handle drives again


def test_healing_goes_back_to_where_the_session_stood_and_not_to_what_was_kept_last(mortal: Any, batch: Any) -> None:
    mortal.train_step(batch)
    older, before, step = mortal.snapshot("older"), checksums(mortal), mortal.step
    mortal.train_step(batch)
    mortal.restore(older)
    kill(mortal, "actor", 1)
    until(lambda: "rank 1 died" in repr(mortal))
    assert mortal.heal().snapshot == older.id
    assert (checksums(mortal), mortal.step) == (before, step)
    mortal.drop(older.id)
    goes_on(mortal, batch)


def test_a_heal_that_found_its_snapshot_damaged_can_be_repeated_without_it(mortal: Any, batch: Any) -> None:
    mortal.train_step(batch)
    before, kept = checksums(mortal), mortal.snapshots[-1]
    newest = mortal.snapshot("newest")
    for path in Path(newest.folder).rglob("*"):
        if path.is_file():
            path.unlink()  # what has not changed is one file for both
            path.write_bytes(b"torn")
    kill(mortal, "actor", 0)
    until(lambda: "rank 0 died" in repr(mortal))
    with pytest.raises(CheckpointError, match=rf"snapshot 'newest' .*session\.drop\('{newest.id}'\), then heal"):
        mortal.heal()
    for verb in (lambda: mortal.train_step(batch), mortal.sync_weights, mortal.snapshot):
        with pytest.raises(StateError, match="brought"):  # it holds the weights it was first built from
            verb()
    mortal.drop(newest.id)
    healed = mortal.heal()
    assert list(healed.engines) == ["actor"] and healed.snapshot == kept.id
    assert checksums(mortal) == before
    goes_on(mortal, batch)


def test_a_heal_whose_build_failed_can_be_repeated(mortal: Any, batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mortal.train_step(batch)
    kill(mortal, "actor", 1)
    until(lambda: "rank 1 died" in repr(mortal))

    def no_memory() -> Any:
        raise EngineError("no memory for it just now")

    plans = building.plans
    with monkeypatch.context() as patched:
        patched.setattr(building, "plans", lambda *a: {**plans(*a), "actor": no_memory})
        with pytest.raises(EngineError, match="just now"):
            mortal.heal()
    assert list(mortal.heal().engines) == ["actor"]
    assert repr(mortal.heal()).startswith("nothing to heal")
    goes_on(mortal, batch)


def test_where_all_live_nothing_is_done(mortal: Any) -> None:
    pids = [pid_of(mortal, "actor", 0), pid_of(mortal, "inference", 0)]
    assert repr(mortal.heal()) == "nothing to heal: every worker lives"
    assert [pid_of(mortal, "actor", 0), pid_of(mortal, "inference", 0)] == pids
    with pytest.raises(StateError, match="prefer='luck'"):
        mortal.heal(prefer="luck")


def test_killing_while_a_stop_is_under_way_still_ends_the_verb(mortal: Any, batch: Any) -> None:
    pending = mortal.rollout(tasks.prompts(32), n=8, max_tokens=1500, ignore_eos=True, progress=False, block=False)
    until(lambda: mortal.core.link.state()["running"])
    threading.Timer(0.0, pending.stop).start()
    kill(mortal, "inference", 0)
    with pytest.raises((WorkerDied, rb.Stopped)):
        pending.result(timeout=LIMIT_S)
    mortal.heal()
    goes_on(mortal, batch)


def test_a_worker_that_neither_answers_nor_is_dead_is_not_built_over(
    mortal: Any, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlbench.session.state.healing.ANSWER_LIMIT_S", 1.0)
    pid = pid_of(mortal, "actor", 1)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(EngineError, match="rank 1 of actor is not dead, but has not answered"):
            mortal.heal()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert not mortal.heal().engines
    goes_on(mortal, batch)

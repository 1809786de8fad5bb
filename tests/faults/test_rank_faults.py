"""What goes wrong on the ranks while a trainer, a cell or a weight update runs there: two ranks feed two replicas, one
of them fails or dies in the middle, and the session goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlbench as rb
from rlbench.errors import RemoteError, SessionError, WeightSyncError, WorkerDied
from rlbench.tiny import tasks
from tests.clock import LIMIT_S, until
from tests.session.session_trainers import OPTIONS

pytestmark = [pytest.mark.engine, pytest.mark.long]  # each death rebuilds an engine
FEW = {**OPTIONS, "max_tokens": 8}
PROMPTS = ["sort 52143", "sort 9071", "sort 3321", "sort 86420"] * 4
FREE = {"temperature": 1.0, "max_tokens": 8, "n": 2}


@pytest.fixture(scope="module")
def frail(cluster: Any, tiny_path: Any) -> Iterator[Any]:
    made = rb.Session(
        "tiny",
        name="frail",
        train={"lr": 1e-4, "shards": 2},
        inference={"data_parallel_size": 2, "kv_cache_bytes": 64 << 20},
        seed=3,
    )
    yield made
    made.close()


@pytest.fixture(autouse=True)
def whole(frail: Any) -> None:
    """What the test before left broken is not this one's."""
    frail.core.link.pause(False)
    frail.heal()


@pytest.fixture
def fed(frail: Any) -> Any:
    """The session, its replicas fed by the ranks, with weights that they do not have yet."""
    frail.train.run(setup)
    frail.train.run(perturb)
    return frail


def in_background(run: Callable[[], Any]) -> tuple[threading.Thread, list[BaseException]]:
    raised: list[BaseException] = []

    def work() -> None:
        try:
            run()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, raised


def pids(session: Any, engine: str) -> list[int]:
    found = session.core.link.state("engines")["engines"][engine]["pids"]
    return [int(found[name]) for name in sorted(found)]


def checksums(session: Any) -> list[Any]:
    return list(session.train.call_all("training_checksums").result())


# -- what runs on the ranks; `strategy`, `module` and `rank` are names of theirs


def setup() -> None:
    strategy.setup_inference_engine()  # type: ignore[name-defined]


def perturb() -> None:
    import torch

    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in module.parameters():  # type: ignore[name-defined]
            p.to_local().add_(0.01 * torch.randn(p.to_local().shape, generator=generator))


def draw(call: int) -> list[list[int]]:
    strategy.generate_calls = call  # type: ignore[name-defined]
    mine = PROMPTS[rank::2]  # type: ignore[name-defined]
    outputs = strategy.gather_and_generate(FREE, all_prompts=mine, sleep_engine=False)  # type: ignore[name-defined]
    return [o.output_token_ids for o in outputs]


def gap() -> float:
    """Largest difference between the log-probs of what is drawn and those of the module."""
    import torch

    worst = 0.0
    outputs = strategy.gather_and_generate(  # type: ignore[name-defined]
        {"temperature": 0.0, "max_tokens": 5}, all_prompts=PROMPTS, sleep_engine=False
    )
    with torch.no_grad():
        for o in outputs:
            ids = torch.tensor([o.prompt_token_ids + o.output_token_ids])
            drawn = ids[0, len(o.prompt_token_ids) :]
            logprobs = module(ids).logits[0, -len(drawn) - 1 : -1].float().log_softmax(-1)  # type: ignore[name-defined]
            worst = max(worst, float(np.abs(logprobs.gather(-1, drawn[:, None])[:, 0].numpy() - o.logprobs).max()))
    return worst


def update(transport: str | None, gate: str | None = None) -> dict[str, Any]:
    """Bring the module's weights to the replicas; with a gate, wait in the middle of sending until it is gone."""
    from rlbench.nn import BaseTrainModule
    from rlbench.workers.train import stage as train_stage

    train_stage.DEFAULT_BUCKET_BYTES = 100_000
    seen, count = 0, len(list(module.parameters()))  # type: ignore[name-defined]

    def hook(self: Any, name: str, param: Any, full_state_dict: Any) -> Any:
        nonlocal seen
        full, seen = param.full_tensor(), seen + 1
        if gate is not None and seen == count + 4 and rank == 0:  # type: ignore[name-defined]
            Path(gate).touch()
            while Path(gate).exists():
                time.sleep(0.02)
        return name, full

    kind = type(module)  # type: ignore[name-defined]
    kind.postprocess_output_named_parameters = hook
    try:
        return dict(strategy.update_engine_weights(module, transport=transport))  # type: ignore[name-defined]
    finally:
        kind.postprocess_output_named_parameters = BaseTrainModule.postprocess_output_named_parameters


def runs_out(at: int) -> None:
    """The memory of rank 1 runs out in the `at`-th pass through a layer from now on."""
    import torch

    seen = 0
    layer = next(part for name, part in module.named_modules() if name.endswith("layers.1"))  # type: ignore[name-defined]

    def out(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if rank == 1 and seen == at:  # type: ignore[name-defined]
            handle.remove()
            raise torch.OutOfMemoryError("not enough memory")

    handle = layer.mlp.register_forward_pre_hook(out)


# -- several replicas


def test_all_replicas_get_the_weights_of_the_ranks_and_share_their_prompts(fed: Any) -> None:
    for transport in ("shm", "broadcast"):
        fed.train.run(perturb)
        done = fed.train.run(update, transport)
        assert done[0] == done[1] and done[0]["gap"] <= 1e-4
        assert fed.inference.weight_versions() == [done[0]["version"]] * 2 == [fed.version] * 2
        rows = fed.inference.call_all("prompt_logprobs", [[3, 4, 5, 6, 7]]).result()
        assert np.allclose(rows[0][0], rows[1][0], atol=1e-5)
        assert max(fed.train.run(gap)) <= 1e-4
    versions = fed.rollout(PROMPTS, max_tokens=2, progress=False).versions
    assert set(versions.tolist()) == {fed.version}


def test_a_replica_that_dies_while_ranks_generate_is_named_and_healing_draws_the_same(fed: Any) -> None:
    fed.train.run(update, None)
    wanted, ranks = fed.train.run(draw, 7), pids(fed, "actor")
    fed.core.link.pause(True)
    try:
        thread, raised = in_background(lambda: fed.train.run(draw, 7))
        until(lambda: any("rollout" in what for what in fed.core.link.state()["running"].values()))
        os.kill(pids(fed, "inference")[1], signal.SIGKILL)
        thread.join(LIMIT_S)
    finally:
        fed.core.link.pause(False)
    assert not thread.is_alive()
    assert isinstance(raised[0], WorkerDied), raised
    assert "replica 1 of inference died" in str(raised[0]) and "session.heal()" in str(raised[0])
    assert fed.train.run(lambda: rank) == [0, 1] and pids(fed, "actor") == ranks, "no rank died with it"  # type: ignore[name-defined]
    with pytest.raises(WorkerDied, match=r"replica 1 of inference died(?s:.*)session\.heal\(\)"):
        fed.train.run(draw, 7)
    assert fed.heal().engines == {"inference": "built again, with the trainer's weights"}
    assert fed.train.run(draw, 7) == wanted
    assert fed.inference.weight_versions() == [fed.version] * 2


# -- a broadcast that is cut


@pytest.mark.parametrize("victim", ["replica", "the rank that sends", "another rank"])
def test_a_death_in_the_middle_of_a_broadcast_is_named_and_after_healing_the_next_arrives(
    fed: Any, tmp_path: Path, victim: str
) -> None:
    gate = tmp_path / "sending"
    thread, raised = in_background(lambda: fed.train.run(update, "broadcast", str(gate)))
    until(gate.exists)
    number = 0 if victim == "the rank that sends" else 1
    os.kill(pids(fed, "inference" if victim == "replica" else "actor")[number], signal.SIGKILL)
    gate.unlink()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "nobody waits for who will not come"
    name = "replica 1 of inference" if victim == "replica" else f"rank {number} of actor"
    assert isinstance(raised[0], WeightSyncError | WorkerDied) and f"{name} died" in str(raised[0]), raised
    assert "session.heal()" in str(raised[0])
    fed.heal()
    fed.train.run(setup)
    fed.train.run(perturb)
    assert fed.train.run(update, "broadcast")[0]["gap"] <= 1e-4
    assert max(fed.train.run(gap)) <= 1e-4 and fed.inference.weight_versions() == [fed.version] * 2


# -- a trainer


def trainer_of(session: Any) -> Any:
    stream = rb.data.PromptSet.of(tasks.prompts(64, seed=3)).stream(seed=3)
    return session.trainer("grpo", stream, tasks.reward, **FEW)


def curve(history: Any) -> list[tuple[float, float]]:
    return [(round(h["reward"], 9), round(h["actor_grad_norm"], 6)) for h in history]


def test_a_forward_that_fails_on_one_rank_ends_it_and_healing_takes_the_iteration_back(frail: Any) -> None:
    kept = frail.snapshot()
    undisturbed = curve(trainer_of(frail).fit(3))
    frail.restore(kept)
    trainer = trainer_of(frail)
    trainer.fit(1)
    before, at = checksums(frail), frail.step
    frail.train.run(runs_out, 3)  # in the second micro-batch of the update: the peer is in its collectives
    with pytest.raises(WorkerDied, match=r"(?s)OutOfMemoryError.*rank 1.*session\.heal\(\)"):
        trainer.fit(1)
    assert "rank 1 died" in repr(frail)
    frail.heal()
    assert (checksums(frail), frail.step) == (before, at)
    assert curve(trainer.fit(2)) == undisturbed[1:]
    frail.restore(kept)
    frail.drop(kept)


def test_a_rank_killed_during_a_fit_costs_that_iteration_alone(frail: Any) -> None:
    kept = frail.snapshot()
    undisturbed = curve(trainer_of(frail).fit(4))
    frail.restore(kept)
    trainer = trainer_of(frail)
    trainer.fit(2)
    before, at = checksums(frail), frail.step
    os.kill(pids(frail, "actor")[0], signal.SIGKILL)  # after an iteration, and outside of any
    until(lambda: "rank 0 died" in repr(frail))
    healed = frail.heal()
    assert f"'after step {at}'" in healed.engines["trainer"] and frail.step == at
    assert checksums(frail) == before and trainer.where()["iterations"] == 2 == len(trainer.history)
    frail.core.link.pause(True)
    try:
        thread, raised = in_background(lambda: trainer.fit(2))
        until(lambda: any("rollout" in what for what in frail.core.link.state()["running"].values()))
        os.kill(pids(frail, "actor")[1], signal.SIGKILL)
        thread.join(LIMIT_S)
    finally:
        frail.core.link.pause(False)
    assert not thread.is_alive()
    assert isinstance(raised[0], WorkerDied) and "rank 1 of actor died" in str(raised[0])
    healed = frail.heal()
    assert healed.engines["trainer"].startswith("made again, from snapshot") and frail.step == at
    assert checksums(frail) == before and frail.last_trainer is trainer
    assert frail.inference.weight_versions() == [frail.version] * 2
    assert frail.rollout(["sort 12"], max_tokens=2, progress=False).samples == 1, "the replicas are awake"
    assert curve(trainer.fit(2)) == undisturbed[2:]
    assert trainer.where()["iterations"] == 4
    frail.restore(kept)
    frail.drop(kept)


def test_where_asked_the_weights_that_the_ranks_synced_last_come_back(frail: Any) -> None:
    frail.sync_weights()
    trainer_of(frail).fit(1)
    weights, step, version = frail.train.call_all("state_checksum").result(), frail.step, frail.version
    for pid in pids(frail, "actor"):
        os.kill(pid, signal.SIGKILL)
    healed = frail.heal(prefer="weights")
    assert f"(v{version})" in healed.engines["actor"] and frail.step == step
    assert healed.engines["trainer"].startswith("made again, from its beginning")
    assert frail.train.call_all("state_checksum").result() == weights
    assert frail.last_trainer.step().train_steps == 1
    frail.core.trainer = None  # as in a kernel that attached, which has no description of it
    os.kill(pids(frail, "actor")[0], signal.SIGKILL)
    assert frail.heal().engines["trainer"].startswith("lost with its ranks: session.trainer(…) makes one")
    with pytest.raises(SessionError, match="there is no trainer yet"):
        frail.last_trainer  # noqa: B018


# -- cells


def test_an_exception_in_a_cell_on_one_rank_stops_the_others_where_they_are(frail: Any) -> None:
    alive = pids(frail, "actor")
    fails = "import time\n\nif rank == 1:\n    raise ValueError('mine alone')\n"
    with pytest.raises(RemoteError, match=r"(?s)ValueError: mine alone.*line 4.*raised on rank 1"):
        frail.train.run_cell(fails + "while True:\n    time.sleep(0.01)")
    assert pids(frail, "actor") == alive and frail.train.run_cell("rank") == ["0", "1"]


def test_a_rank_that_fails_while_another_waits_for_it_is_ended_and_one_command_mends(frail: Any) -> None:
    fails = "import torch, torch.distributed as dist\nif rank == 1:\n    raise ValueError('mine alone')\n"
    with pytest.raises(WorkerDied, match=r"(?s)ValueError: mine alone.*line 3.*ended to release.*session\.heal\(\)"):
        frail.train.run_cell(fails + "dist.all_reduce(torch.ones(2))")
    assert "actor" in frail.heal().engines
    together = "import torch, torch.distributed as dist\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()"
    assert frail.train.run_cell(together) == ["2.0", "2.0"]


def test_a_rank_whose_step_fails_while_the_others_take_theirs_is_ended_and_healing_takes_the_step_back(
    frail: Any,
) -> None:
    scored = frail.rollout(tasks.prompts(8, seed=3), n=4, max_tokens=8, progress=False).score(tasks.reward)
    batch = scored.batch(advantage=rb.rl.group_normalized())
    frail.train_step(batch)
    before, step = checksums(frail), frail.step

    def fails() -> None:
        def out(*_: Any, **__: Any) -> None:
            raise MemoryError("no room for the moments")

        if rank == 1:  # type: ignore[name-defined]
            module.optimizer.step = out  # type: ignore[name-defined]

    frail.train.run(fails)
    with pytest.raises(WorkerDied, match=r"(?s)failed on rank 1 \(MemoryError.*ended, as it.*session\.heal\(\)"):
        frail.train_step(batch)
    assert "actor" in frail.heal().engines
    assert (checksums(frail), frail.step) == (before, step)
    assert frail.train_step(batch).step == step + 1

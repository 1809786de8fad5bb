"""A tensor parallel replica takes a broadcast on all its workers; one worker's failure is everybody's, and mended."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlbench.errors import StateError, WeightSyncError
from rlbench.weights.channel import Channel, send
from rlbench.weights.delta import Copies, words
from rlbench.weights.facts import LOOPBACK
from rlbench.weights.manifest import Layout, Manifest
from rlbench.weights.names import to_checkpoint_names, unique_parameters
from rlbench.weights.transport import PeerFailed
from rlbench.workers.replica.config import ReplicaConfig
from rlbench.workers.replica.vllm import VllmReplica
from tests.workers.ending import end_here
from tests.workers.tiny_checkpoint import hf_logprobs, make_checkpoint

pytestmark = pytest.mark.engine
ENDS_S = 120.0
SEQUENCE = [(13 * i) % 250 for i in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("wide"), tied=True)


def children() -> set[int]:
    """The processes that this one has started, and those that they have."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.fixture(scope="module")
def others() -> set[int]:
    """Those that other modules of tests left: ranks, say."""
    return children()


@pytest.fixture(scope="module")
def replica(folder: Path, others: set[int]) -> Iterator[VllmReplica]:
    config = ReplicaConfig(
        str(folder), dtype="float32", tensor_parallel_size=2, kv_cache_bytes=64 << 20, max_num_seqs=16
    )
    replica = VllmReplica(config)
    replica.build()
    yield replica
    end_here(replica)


@pytest.fixture
def model(folder: Path) -> PreTrainedModel:
    """The trainer's side, with weights of its own."""
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.03)
    return loaded


def listening_addresses() -> set[str]:
    """Where this process and its children listen."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    found = [c for process in family for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert found
    return {connection.laddr.ip.removeprefix("::ffff:") for connection in found}


def gloo_devices(others: set[int]) -> list[int]:
    """How many each of this process's children has that has any, but for `others`."""
    tasks = [Path(f"/proc/{pid}/task") for pid in children() - others]
    names = [[(task / "comm").read_text().strip() for task in own.iterdir()] for own in tasks]
    return [count for own in names if (count := own.count("gloo_tcp_loop"))]


class Sender:
    """The sending rank, on a thread of this process."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.tensors = dict(to_checkpoint_names(model, unique_parameters(model)))
        self.channel = Channel.listen(LOOPBACK, 3, "gloo", torch.device("cpu"))
        self.manifest = Manifest("broadcast", Layout(100_000, self.tensors.items()).buckets, self.channel.info)
        self.pool = ThreadPoolExecutor(1)
        self.copies: Copies | None = None

    def follow(self, follows: str, token: str) -> None:
        """Send differences from now on, to what was sent under a token."""
        self.copies = self.copies or Copies()
        self.manifest = replace(self.manifest, delta=True, follows=follows, token=token)

    def send(self, tensors: dict[str, torch.Tensor] | None = None) -> Future[int]:
        def sending() -> int:
            self.channel.form()
            self.channel.begin()
            self.channel.release()
            try:
                return send(self.channel, self.manifest, (tensors or self.tensors).items(), self.copies)
            except WeightSyncError as error:
                self.channel.fail(error)
                raise

        return self.pool.submit(sending)

    def close(self) -> None:
        self.channel.close()
        self.pool.shutdown()


@pytest.fixture
def sender(model: PreTrainedModel) -> Iterator[Sender]:
    made = Sender(model)
    yield made
    made.close()


def gap(replica: VllmReplica, model: PreTrainedModel) -> float:
    return float(np.abs(replica.prompt_logprobs([SEQUENCE])[0] - hf_logprobs(model, SEQUENCE)).max())


def assert_nothing_is_left_by_a_kill(pids: set[int]) -> None:
    """Queues, locks and what kernels share have no names any more."""
    mapped = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    shared = re.findall(r"/dev/shm/(?:psm_|sem\.mp-|vllm_dist).*", mapped)
    assert shared and all(path.endswith(" (deleted)") for path in shared)


def test_all_workers_take_their_share_and_keep_the_group(
    others: set[int], replica: VllmReplica, model: PreTrainedModel, sender: Sender
) -> None:
    assert replica.sync_facts().workers == 2
    assert listening_addresses() <= {"127.0.0.1", "::1"}, "its workers meet on this machine alone"
    assert gloo_devices(others) == [1, 1], "all groups of a worker share its device"
    assert_nothing_is_left_by_a_kill(children() - others)
    assert len(sender.manifest.buckets) > 3
    for version in (1, 2):
        sending = sender.send()
        replica.apply_weights(sender.manifest)
        sending.result(ENDS_S)
        assert gap(replica, model) <= 1e-4
        replica.commit_version(version)
        assert replica.sync_facts().channels == (("", sender.channel.info.token),)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)


def test_differences_end_in_the_weights_of_a_whole_sync_to_the_bit(
    replica: VllmReplica, model: PreTrainedModel, sender: Sender
) -> None:
    """What all workers' layers are given is the trainer's, bit for bit, and what they then compute is what a whole sync
    makes of it."""
    replica.built.collective_rpc(record_loaded)
    sizes, held = [], ""
    for step, share in enumerate((1.0, 0.02, 0.3, 0.0, 1.0)):
        change_some(model, share, step)
        sender.follow(held, held := f"token {step}")
        sending = sender.send()
        replica.apply_weights(sender.manifest)
        sizes.append(sending.result(ENDS_S))
        assert_loaded(replica, sender)
        replica.commit_version(step)
        assert replica.status()["holds"] == held
    assert sizes[3] < sizes[1] < sizes[2] / 3 and sizes[2] < 0.5 * sender.manifest.nbytes < sizes[4]
    by_differences = replica.prompt_logprobs([SEQUENCE])[0]
    replica.built.collective_rpc(repair)
    mend(replica, model)
    np.testing.assert_array_equal(replica.prompt_logprobs([SEQUENCE])[0], by_differences)


def test_differences_to_other_weights_are_refused_before_any_is_sent_and_the_replica_keeps_its_own(
    replica: VllmReplica, sender: Sender
) -> None:
    sender.follow("", "first")
    sending = sender.send()
    replica.apply_weights(sender.manifest)
    sending.result(ENDS_S)
    sender.follow("first", "second")
    with pytest.raises(WeightSyncError, match=r"does not hold the weights that these changes are of.*Sync again"):
        replica.check_weights(sender.manifest)  # not proven, so not committed
    replica.commit_version(1)
    before = replica.prompt_logprobs([SEQUENCE])[0]
    replica.check_weights(sender.manifest)
    sender.follow("elsewhere", "third")
    for call in (replica.check_weights, replica.apply_weights):
        with pytest.raises(WeightSyncError, match="which it keeps"):
            call(sender.manifest)
    assert replica.status()["weights"] == "cuda" and replica.status()["holds"] == "first"
    np.testing.assert_array_equal(replica.prompt_logprobs([SEQUENCE])[0], before)


def test_a_worker_whose_copy_is_of_another_sync_takes_no_difference(
    replica: VllmReplica, model: PreTrainedModel, sender: Sender
) -> None:
    sender.follow("", "whole")
    sending = sender.send()
    replica.apply_weights(sender.manifest)
    sending.result(ENDS_S)
    replica.commit_version(1)
    replica.built.collective_rpc(forget_copies)
    sender.follow("whole", "part")
    sending = sender.send()
    with pytest.raises(WeightSyncError, match=r"differences came to the weights of sync 'whole'.*of 'none'"):
        replica.apply_weights(sender.manifest)
    assert replica.status()["holds"] == "", "so that all weights are sent next"
    sender.channel.fail("the replica refused")
    with pytest.raises(PeerFailed):
        sending.result(ENDS_S)
    mend(replica, model)


def change_some(model: PreTrainedModel, share: float, seed: int) -> None:
    """Change a share of all elements."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            here = torch.rand(parameter.shape, generator=generator) < share
            parameter.add_(here * torch.randn(parameter.shape, generator=generator), alpha=0.03)


def record_loaded(worker: Any) -> None:
    """Keep what the model is given to load from now on."""
    engine = worker.weight_transfer_engine
    worker.loaded = {}
    plain = engine.tensors

    def tensors(update: Any) -> Any:
        for name, tensor in plain(update):
            worker.loaded[name] = words(tensor).copy()
            yield name, tensor

    engine.tensors = tensors


def loaded(worker: Any) -> Any:
    found, worker.loaded = dict(worker.loaded), {}
    return found


def assert_loaded(replica: VllmReplica, sender: Sender) -> None:
    """Both workers were given all tensors, to the bit."""
    found = replica.built.collective_rpc(loaded)
    assert len(found) == 2
    for given in found:
        assert given.keys() == sender.tensors.keys()
        for name, tensor in sender.tensors.items():
            np.testing.assert_array_equal(given[name], words(tensor))


def forget_copies(worker: Any) -> None:
    if worker.rank == 1:
        worker.weight_transfer_engine.copies = Copies()


def test_a_sender_that_gives_up_before_it_begins_leaves_the_weights_alone(replica: VllmReplica, sender: Sender) -> None:
    before = replica.prompt_logprobs([SEQUENCE])[0]
    sender.channel.fail("stopped")
    with pytest.raises(PeerFailed, match=r"keeps its weights.*given up elsewhere: stopped"):
        replica.apply_weights(sender.manifest)
    assert replica.status()["weights"] == "cuda"
    assert replica.sync_facts().channels == ()
    np.testing.assert_array_equal(before, replica.prompt_logprobs([SEQUENCE])[0])


def test_a_sender_that_fails_half_way_tears_the_replica_until_another_sync(
    replica: VllmReplica, model: PreTrainedModel, sender: Sender
) -> None:
    short = dict(list(sender.tensors.items())[:-2])
    sending = sender.send(short)
    with pytest.raises(PeerFailed, match=r"mixture.*came with \('nothing'"):
        replica.apply_weights(sender.manifest)
    with pytest.raises(WeightSyncError, match="announced"):
        sending.result(ENDS_S)
    with pytest.raises(StateError, match="half-way"):
        replica.prompt_logprobs([SEQUENCE])
    mend(replica, model)


def test_a_worker_that_cannot_load_ends_the_sender_and_the_other_worker(
    replica: VllmReplica, model: PreTrainedModel, sender: Sender
) -> None:
    replica.built.collective_rpc(spoil)
    sending = sender.send()
    with pytest.raises(WeightSyncError, match=r"mixture: OSError: worker 1 has no room.*Sync again") as error:
        replica.apply_weights(sender.manifest)
    assert not isinstance(error.value, PeerFailed)  # the cause, not its echo in the other worker
    with pytest.raises(PeerFailed, match="worker 1 has no room"):
        sending.result(ENDS_S)
    replica.built.collective_rpc(repair)
    mend(replica, model)


def test_an_update_that_failed_on_one_worker_alone_is_over_on_the_other(
    replica: VllmReplica, model: PreTrainedModel
) -> None:
    """The other worker had taken its bucket when it was told; its open update then refused every later one."""
    replica.built.collective_rpc("transfer", args=("start_weight_update",))
    mend(replica, model)


def test_buckets_that_no_worker_can_read_leave_no_answer_behind_in_vllms_queue(
    replica: VllmReplica, model: PreTrainedModel
) -> None:
    """Both workers fail; the second one's answer must not be taken for that of the next call."""
    made = Sender(model)
    lost = tuple(replace(bucket, path="/dev/shm/rlbench-test-nowhere") for bucket in made.manifest.buckets)
    made.close()
    with pytest.raises(WeightSyncError, match="cannot be read here"):
        replica.apply_weights(Manifest("shm", lost))
    mend(replica, model)


def mend(replica: VllmReplica, model: PreTrainedModel) -> None:
    """The next sync, with a group of its own, makes the replica whole."""
    made = Sender(model)
    sending = made.send()
    replica.apply_weights(made.manifest)
    sending.result(ENDS_S)
    assert gap(replica, model) <= 1e-4
    replica.commit_version(replica.status()["version"] + 1)
    made.close()


def spoil(worker: Any) -> None:
    """On worker 1 the second bucket does not load."""
    engine, count = worker.weight_transfer_engine, 0
    plain = engine.tensors

    def tensors(update: Any) -> Any:
        nonlocal count
        count += 1
        if worker.rank == 1 and count == 2:
            raise OSError("worker 1 has no room")
        return plain(update)

    engine.tensors = tensors


def repair(worker: Any) -> None:
    del worker.weight_transfer_engine.tensors

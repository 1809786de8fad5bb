"""Which transport is chosen, from facts alone: every placement that a trainer and replicas can have."""

from __future__ import annotations

import pytest

from rlbench.errors import WeightSyncError
from rlbench.weights.transport import Choice, Facts, asked_for, choose


def cpu(node: str = "a", **more: object) -> Facts:
    return Facts(node, f"10.0.0.{ord(node)}", **more)  # type: ignore[arg-type]


def gpu(*uuids: str, node: str = "a", **more: object) -> Facts:
    return Facts(node, f"10.0.0.{ord(node)}", tuple(f"{node}{u}" for u in uuids), len(uuids), **more)  # type: ignore[arg-type]


CASES = {
    "cpu, one node": ([cpu(), cpu()], [cpu(), cpu()], Choice("shm")),
    "cpu, two nodes": ([cpu()], [cpu(), cpu("b")], Choice("broadcast", backend="gloo")),
    "one gpu, colocated": ([gpu("0")], [gpu("0")], Choice("ipc")),
    "all colocated, one replica each": ([gpu("0"), gpu("1")], [gpu("1"), gpu("0")], Choice("ipc", (0, 1))),
    "all colocated, tensor parallel": ([gpu("0"), gpu("1")], [gpu("0", "1")], Choice("ipc", (0, 1))),
    "replicas on some of the trainer's gpus": ([gpu("0"), gpu("1"), gpu("2")], [gpu("2")], Choice("ipc", (2,))),
    "two ranks on one gpu export once": ([gpu("0"), gpu("0")], [gpu("0")], Choice("ipc")),
    "two replicas on one gpu": ([gpu("0")], [gpu("0"), gpu("0")], Choice("ipc")),
    "colocated over two nodes": ([gpu("0"), gpu("0", node="b")], [gpu("0"), gpu("0", node="b")], Choice("ipc", (0, 1))),
    "gpus apart": ([gpu("0"), gpu("1")], [gpu("2"), gpu("3")], Choice("broadcast", (0,), "nccl")),
    "gpus of two nodes": ([gpu("0")], [gpu("0", node="b")], Choice("broadcast", (0,), "nccl")),
    "the sender shares no gpu": ([gpu("0"), gpu("1")], [gpu("0"), gpu("2")], Choice("broadcast", (1,), "nccl")),
    "every sender shares a gpu": ([gpu("0")], [gpu("0"), gpu("1")], Choice("shm")),
    "replicas share a gpu apart": ([gpu("0")], [gpu("1"), gpu("1")], Choice("shm")),
    "cpu trainer, gpu replica": ([cpu()], [gpu("0")], Choice("shm")),
    "gpu trainer, cpu replica elsewhere": ([gpu("0")], [cpu("b")], Choice("broadcast", (0,), "gloo")),
}


@pytest.mark.parametrize(("train", "infer", "expected"), CASES.values(), ids=CASES.keys())
def test_the_choice_follows_the_placement(train: list[Facts], infer: list[Facts], expected: Choice) -> None:
    assert choose(train, infer) == expected


@pytest.mark.parametrize(
    ("asked", "train", "infer", "expected"),
    [
        ("broadcast", [cpu()], [cpu()], Choice("broadcast", (0,), "gloo")),
        ("broadcast", [gpu("0"), gpu("1")], [gpu("0")], Choice("broadcast", (1,), "nccl")),
        ("shm", [gpu("0")], [gpu("0")], Choice("shm")),
        ("ipc", [gpu("0"), gpu("1")], [gpu("1")], Choice("ipc", (1,))),
    ],
)
def test_what_is_asked_for_is_taken_where_it_works(
    asked: str, train: list[Facts], infer: list[Facts], expected: Choice
) -> None:
    assert choose(train, infer, asked) == expected


@pytest.mark.parametrize(
    ("asked", "train", "infer", "said"),
    [
        ("shm", [cpu()], [cpu("b")], r'several nodes: use transport="broadcast".*take \'broadcast\''),
        ("ipc", [cpu()], [cpu()], r"needs trainer and replicas on GPUs.*take 'shm'"),
        ("ipc", [gpu("0")], [gpu("1")], r"1 of 1 replica workers.*a1.*colocate_with=.*take 'broadcast'"),
        ("ipc", [gpu("0")], [gpu("0"), gpu("1")], r"1 of 2 replica workers.*take 'shm'"),
        ("broadcast", [gpu("0")], [gpu("0")], r"NCCL takes a GPU once.*not_colocate_with=.*take 'ipc'"),
        ("broadcast", [gpu("0")], [gpu("1"), gpu("1")], r"replicas share one: build fewer"),
        ("brodcast", [cpu()], [cpu()], r"nearest: broadcast; there are shm, ipc, broadcast"),
    ],
)
def test_what_cannot_work_is_refused_naming_what_would(
    asked: str, train: list[Facts], infer: list[Facts], said: str
) -> None:
    with pytest.raises(WeightSyncError, match=said):
        choose(train, infer, asked)


def test_where_nothing_works_each_reason_is_given() -> None:
    with pytest.raises(WeightSyncError, match=r"shm: .*several nodes.*ipc: .*broadcast: .*NCCL takes a GPU once"):
        choose([gpu("0")], [gpu("0"), gpu("0", node="b")])


def test_differences_go_by_broadcast_alone() -> None:
    assert [asked_for(None, True), asked_for("broadcast", True)] == ["broadcast", "broadcast"]
    assert [asked_for(name, False) for name in (None, "shm", "broadcast")] == [None, "shm", "broadcast"]
    with pytest.raises(WeightSyncError, match=r"'shm' has nothing to gain from delta=True.*Leave transport out"):
        asked_for("shm", True)

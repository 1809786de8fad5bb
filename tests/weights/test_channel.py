"""A group for broadcasts over real gloo, its members on threads of this process: what arrives, and how waiting ends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from rlbench.errors import WeightSyncError
from rlbench.weights import channel, facts
from rlbench.weights.channel import Channel
from rlbench.weights.delta import Copies
from rlbench.weights.facts import LOOPBACK
from rlbench.weights.manifest import Layout, Manifest
from rlbench.weights.transport import PeerFailed

CPU = torch.device("cpu")
ENDS_S = 120.0


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "scalar": torch.tensor(3.5 + seed),
        "half": torch.randn(7, 3, dtype=torch.bfloat16),
        "transposed": torch.randn(20, 5).t(),
        "empty": torch.zeros(0, 4),
        "large": torch.randn(40, 50),  # larger than a bucket
        "ids": torch.arange(30),
    }


def announced(named: dict[str, torch.Tensor]) -> Manifest:
    return Manifest("broadcast", Layout(1000, named.items()).buckets)


class Group:
    """A sender and two receivers; `run` gives each member its part at the same time."""

    def __init__(self, address: str = LOOPBACK) -> None:
        self.pool = ThreadPoolExecutor(3)
        self.sender = Channel.listen(address, 3, "gloo", CPU)
        self.receivers = [Channel.join(self.sender.info, rank, CPU, address) for rank in (1, 2)]
        for future in [self.pool.submit(member.form) for member in self.members]:
            future.result(ENDS_S)

    @property
    def members(self) -> list[Channel]:
        return [self.sender, *self.receivers]

    def send(
        self, named: dict[str, torch.Tensor], manifest: Manifest | None = None, copies: Copies | None = None
    ) -> Future[int]:
        def sending() -> int:
            self.sender.begin()
            self.sender.release()
            try:
                return channel.send(self.sender, manifest or announced(named), named.items(), copies)
            except WeightSyncError as error:
                self.sender.fail(error)
                raise

        return self.pool.submit(sending)

    def receive(
        self, manifest: Manifest, copies: Sequence[Copies | None] = (None, None)
    ) -> list[Future[dict[str, torch.Tensor]]]:
        def receiving(member: Channel, held: Copies | None) -> dict[str, torch.Tensor]:
            member.begin()
            return {n: t for bucket in manifest.buckets for n, t in channel.receive(member, bucket, held)}

        return [self.pool.submit(receiving, *each) for each in zip(self.receivers, copies, strict=True)]

    def close(self) -> None:
        for member in self.members:
            member.close()
        self.pool.shutdown(wait=True)


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group()
    yield made
    made.close()


def test_tensors_come_as_they_went_to_all_receivers_and_again(group: Group) -> None:
    for seed in (0, 1):
        named = tensors(seed)
        manifest = announced(named)
        assert len(manifest.buckets) == 3
        sending, receiving = group.send(named), group.receive(manifest)
        sending.result(ENDS_S)
        for future in receiving:
            found = future.result(ENDS_S)
            assert list(found) == list(named)
            assert all(found[n].dtype == t.dtype and torch.equal(found[n], t) for n, t in named.items())


def test_differences_make_of_all_receivers_copies_what_went(group: Group) -> None:
    """Of the tensors of a second sync one in ten elements is another; the third has the first ones' again."""
    mine, theirs = Copies(), (Copies(), Copies())
    first, other = tensors(0), tensors(1)
    part = {n: torch.where(torch.rand(t.shape) < 0.1, other[n], t) for n, t in first.items()}
    sizes = []
    for follows, token, named in (("", "1", first), ("1", "2", part), ("2", "3", first), ("3", "4", first)):
        manifest = replace(announced(named), delta=True, follows=follows, token=token)
        for copies in theirs:
            copies.begin(follows)
        sending, receiving = group.send(named, manifest, mine), group.receive(manifest, theirs)
        sizes.append(sending.result(ENDS_S))
        for future, copies in zip(receiving, theirs, strict=True):
            found = future.result(ENDS_S)
            assert list(found) == list(named)
            assert all(found[n].dtype == t.dtype and torch.equal(found[n], t) for n, t in named.items())
            copies.hold(token)
        assert mine.token == token
    heads = 16 * len(first)
    assert sizes[0] > manifest.nbytes + heads > 2 * sizes[1] and sizes[1] > sizes[3] == heads


def test_a_send_that_breaks_off_leaves_no_copy_that_others_may_follow_on(group: Group) -> None:
    mine, manifest = Copies(), replace(announced(tensors()), delta=True, token="1")
    sending = group.send(tensors() | {"ids": torch.arange(31)}, manifest, mine)
    receiving = group.receive(manifest, (Copies(), Copies()))
    for future in (sending, *receiving):
        with pytest.raises(WeightSyncError, match="announced"):
            future.result(ENDS_S)
    assert mine.token == ""


def test_members_of_several_nodes_meet_on_the_nodes_own_address() -> None:
    group = Group(facts.address())
    named = tensors()
    sending, receiving = group.send(named), group.receive(announced(named))
    sending.result(ENDS_S)
    assert all(torch.equal(future.result(ENDS_S)["large"], named["large"]) for future in receiving)
    group.close()


def test_tensors_that_were_not_announced_end_it_on_all_members(group: Group) -> None:
    manifest = announced(tensors())
    other = tensors() | {"ids": torch.arange(31)}
    sending, receiving = group.send(other, manifest), group.receive(manifest)
    with pytest.raises(WeightSyncError, match=r"announced \('ids', 'int64', \(30,\)\) and came with .*\(31,\)"):
        sending.result(ENDS_S)
    for future in receiving:
        with pytest.raises(PeerFailed, match="given up elsewhere: WeightSyncError: the trainer announced"):
            future.result(ENDS_S)


def test_more_tensors_than_announced_are_refused(group: Group) -> None:
    manifest = announced(tensors())
    sending, receiving = group.send(tensors() | {"more": torch.ones(1)}, manifest), group.receive(manifest)
    with pytest.raises(WeightSyncError, match="'more', which it had not announced"):
        sending.result(ENDS_S)
    for future in receiving:
        with pytest.raises(PeerFailed, match="not announced"):
            future.result(ENDS_S)


def test_whoever_says_that_it_failed_ends_the_wait_of_the_others(group: Group) -> None:
    """The sender waits for two receivers; one waits for it, the other fails on another thread than it works on."""
    sending, waiting = group.send(tensors()), group.pool.submit(group.receivers[0].begin)
    threading.Thread(target=group.receivers[1].fail, args=(ValueError("no room"),)).start()
    for future in (sending, waiting):
        with pytest.raises(PeerFailed, match="given up elsewhere: ValueError: no room") as error:
            future.result(ENDS_S)
        assert error.value.secondary


def test_the_first_reason_counts(group: Group) -> None:
    group.receivers[0].fail("the cause")
    group.sender.fail("the consequence")
    with pytest.raises(PeerFailed, match="the cause"):
        group.receivers[1].begin()


def test_a_sender_that_is_gone_ends_the_wait_of_the_receivers(group: Group) -> None:
    waiting = group.pool.submit(group.receivers[0].begin)
    time.sleep(0.2)  # it usually waits by then; where it does not, the same is to be said
    group.sender.close()
    with pytest.raises(PeerFailed, match="seems gone"):
        waiting.result(ENDS_S)
    group.receivers[0].fail("nobody is there to hear it")  # and that is no error
    with pytest.raises(PeerFailed, match="seems gone"):
        Channel.join(replace(group.sender.info, port=1), 1, CPU, LOOPBACK)


def test_a_member_that_stays_silent_is_waited_for_so_long_and_no_longer(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "PEER_LIMIT_S", 0.5)
    with pytest.raises(PeerFailed, match="said nothing for"):
        group.send(tensors()).result(ENDS_S)


def test_a_closed_end_says_so(group: Group) -> None:
    group.sender.close()
    assert not group.sender.open
    with pytest.raises(PeerFailed, match="sync again"):
        group.sender.begin()
    group.sender.close()


def test_an_address_that_is_not_this_nodes_is_refused() -> None:
    with pytest.raises(WeightSyncError, match=r"cannot listen on 192\.0\.2\.1"):
        Channel.listen("192.0.2.1", 2, "gloo", CPU)


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(WeightSyncError, match="'w' was staged twice"):
        Layout(1000, [("w", torch.ones(1)), ("w", torch.ones(1))])


@pytest.mark.parametrize(
    ("host", "before", "after"),
    [
        (LOOPBACK, None, "lo"),
        (LOOPBACK, "eth7", "eth7"),
        ("192.0.2.9", None, None),
    ],
)
def test_gloo_stays_on_loopback_where_its_group_does(
    host: str, before: str | None, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left alone it listens where the machine's name points, which others may reach."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", before or "")
    if before is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    facts.keep_gloo_on(host)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == after

"""A cell on the ranks: names stay, values and output come back by rank, a stop ends it everywhere at once."""

import threading

import pytest

from rlbench.dispatch import peers, pending
from rlbench.errors import CallDropped, EngineError, RemoteError, Stopped
from tests.clock import LIMIT_S, until

pytestmark = pytest.mark.engine


def stopped_while(engine, source):
    """Run a cell in a thread, stop it once every rank has entered its loop, and return what it raised."""
    raised = []

    def run():
        try:
            engine.run_cell(source)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: "looping" in engine.complete_names("looping"))
    until(engine.link.stop_running)  # the monitor may hear of the call after the ranks do
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    return raised[0]


@pytest.fixture
def train(session):
    yield session.train
    session.train.run_cell("for name in ('looping', 'mine', 'seen', 'total'): globals().pop(name, None)")


def test_names_stay_and_each_rank_has_its_own(train):
    assert train.run_cell("mine = rank * 10\nmine + world_size") == ["2", "12"]
    assert train.run_cell("mine += 1") == [None, None]
    assert train.run(lambda: mine) == [1, 11]  # noqa: F821 - the same namespace
    assert train.run_cell("mine", rank=1) == [None, "11"]
    with pytest.raises(EngineError, match="rank=2: actor has ranks 0 to 1"):
        train.run_cell("mine", rank=2)


def test_output_comes_by_rank_and_errors_with_the_line_of_the_cell(train, capsys):
    train.run_cell("for i in range(2):\n    print('line', i, 'of', rank)")
    lines = [f"[rank {r}] line {i} of {r}" for r in (0, 1) for i in (0, 1)]
    assert sorted(capsys.readouterr().out.splitlines()) == lines
    with pytest.raises(RemoteError, match=r"(?s)ZeroDivisionError.*line 2:   a / 0.*rank 0 \(and 1 more\)"):
        train.run_cell("a = 1\na / 0")
    with pytest.raises(RemoteError, match="SyntaxError"):
        train.run_cell("a = = 1")


def test_what_the_rank_is_made_of_is_there(train):
    values = train.run_cell("total = strategy.all_reduce(float(rank + 1), op='sum')\n(type(module).__name__, total)")
    assert values[0] == values[1] and "3.0" in values[0]


@pytest.mark.parametrize(
    "source",
    [
        "import time\nlooping = True\nwhile True:\n    time.sleep(0.01)",
        "import torch, torch.distributed as dist\nseen = 0\nlooping = True\n"
        "while True:\n    dist.all_reduce(torch.ones(4))\n    seen += 1",
        "import torch, torch.distributed as dist, time\nseen = 0\n"
        "def turn():\n    global seen\n    if rank == 0:\n        time.sleep(0.002)\n    for _ in range(3):\n"
        "        dist.all_reduce(torch.ones(4))\n    seen += 1\nlooping = True\nwhile True:\n    turn()",
    ],
    ids=["sleeping", "collectives", "uneven ranks in a function"],
)
def test_a_stop_ends_all_ranks_at_the_same_place_and_the_engine_goes_on(train, source):
    assert isinstance(stopped_while(train, source), Stopped)
    if "seen" in source:
        assert len(set(train.run_cell("seen"))) == 1
    source = "import torch, torch.distributed as dist\nt = torch.ones(1)\ndist.all_reduce(t)\nt.item()"
    assert train.run_cell(source) == ["2.0", "2.0"]


def test_what_a_cell_left_in_the_store_goes_with_the_next(train):
    def keys():
        import gc

        (group,) = (one for one in gc.get_objects() if type(one).__name__ == "RankGroup")
        return group._words.num_keys()

    def after(cells):
        for _ in range(cells):
            train.run_cell("pass")
        return train.run(keys)[0]

    steady = after(40)  # the marks of calls are kept for a while
    assert after(12) == steady


def test_names_are_completed_from_the_rank(train):
    train.run_cell("looping = {}\nmine = module")
    assert train.complete_names("loop") == ["looping"]
    assert {"looping.items", "looping.keys"} <= set(train.complete_names("x = looping."))
    assert "mine.named_parameters" in train.complete_names("for n, p in mine.named_p")
    assert train.complete_names("no_such_name_anywhere") == []


def test_long_values_are_cut_and_hostile_ones_come_as_text(train):
    assert train.run_cell("'x' * 30_000", rank=0)[0].endswith("(+10,002 characters)")
    assert train.run_cell("class Bad:\n    def __repr__(self): return '<script>'\nBad()", rank=0)[0] == "<script>"


IN_TIME = """
import gc
(group,) = (one for one in gc.get_objects() if type(one).__name__ == "RankGroup")
limits = [60.0, 0.5]  # of the next two calls
def in_time(epoch, seq, timeout_s, given_up):
    limit = limits.pop(0)
    if not limits:
        del group.register
    return type(group).register(group, epoch, seq, limit, given_up)
if rank == 1:
    group.register = in_time
"""
BUSY = """
import pathlib, time
looping = 1
while not pathlib.Path({free!r}).exists():
    time.sleep(0.02)
"""


def test_a_rank_that_refused_a_call_is_not_ended_for_peers_that_are_busy(train, monkeypatch, tmp_path):
    """A rank busy with an earlier call cannot say in time that it has the next one: the others drop it, and live."""
    monkeypatch.setattr(peers, "FAILED_PEER_WAIT_S", 0.5)
    failed, looks = pending._failed, []

    def freed_after_ten_looks(answer):
        """Each of them a fifth of a second after the one before: the wait for peers of a failed rank is over then."""
        if answer.failure is not None and isinstance(answer.failure.error, CallDropped):
            looks.append(answer)
        if len(looks) == 10:
            (tmp_path / "free").touch()
        return failed(answer)

    monkeypatch.setattr(pending, "_failed", freed_after_ten_looks)
    train.run_cell(IN_TIME)
    busy = threading.Thread(target=train.run_cell, args=(BUSY.format(free=str(tmp_path / "free")), 0))
    busy.start()
    until(lambda: "looping" in train.complete_names("looping"))
    try:
        with pytest.raises(CallDropped, match="not all 2 ranks received the call"):
            train.run_cell("world_size")
    finally:
        (tmp_path / "free").touch()
        busy.join()
    assert train.run_cell("world_size") == ["2", "2"], "no rank was lost"

"""Ranks that run one cell stop at the same place, whatever they were doing when they were asked."""

import ast
import random
import threading
import time

import pytest

from rlbench.errors import Stopped
from rlbench.workers.train.cell_cut import GATE, Cut, with_statements
from tests.clock import until


class Store:
    """A board in this process."""

    def __init__(self):
        self.held, self.lock = {}, threading.Lock()

    def set(self, key, value):
        with self.lock:
            self.held[key] = value

    def check(self, keys):
        with self.lock:
            return all(key in self.held for key in keys)

    def get(self, key):
        with self.lock:
            return self.held[key].encode()

    def delete_key(self, key):
        with self.lock:
            return self.held.pop(key, None) is not None


class World:
    """Ranks as threads; `collective` waits for all of them, as one in a process group does."""

    def __init__(self, ranks):
        self.store, self.stop = Store(), [threading.Event() for _ in range(ranks)]
        self.issued, self.barrier = [0] * ranks, threading.Barrier(ranks)
        self.outcomes = [None] * ranks

    def collective(self, rank):
        self.issued[rank] += 1
        self.barrier.wait(timeout=120)

    def run(self, rank, program):
        ranks = list(range(len(self.stop)))
        try:
            with Cut(self.store, rank, ranks, self.stop[rank].is_set, lambda: self.issued[rank]) as cut:
                program(rank, cut.statement)
            self.outcomes[rank] = "done"
        except Stopped:
            self.outcomes[rank] = "stopped"
        except threading.BrokenBarrierError:
            self.outcomes[rank] = "stuck"

    def all(self, program, ask):
        threads = [threading.Thread(target=self.run, args=(rank, program)) for rank in range(len(self.stop))]
        for thread in threads:
            thread.start()
        ask(self)
        for thread in threads:
            thread.join(timeout=120)
        assert not any(thread.is_alive() for thread in threads)
        return self.outcomes


@pytest.mark.parametrize("seed", range(6))
def test_ranks_stop_after_the_same_collective_wherever_each_is_asked(seed):
    chance = random.Random(seed)
    world = World(3)

    def program(rank, statement):
        own = random.Random(seed * 10 + rank)
        for _ in range(10_000):
            statement()
            time.sleep(own.random() / 200)  # ranks are not at one place
            statement()
            for _ in range(1 + own.randrange(1)):
                world.collective(rank)
            if rank == 0:  # what one rank does more than the others
                statement()
                time.sleep(0.001)

    def ask(world):
        until(lambda: world.issued[0] > 2 + seed)
        for stop in chance.sample(world.stop, len(world.stop)):
            stop.set()
            time.sleep(chance.random() / 20)  # the next is asked somewhere else

    assert world.all(program, ask) == ["stopped"] * 3
    assert len(set(world.issued)) == 1


def test_several_collectives_in_one_statement_all_complete():
    world = World(2)

    def program(rank, statement):
        while True:
            statement()
            for _ in range(20):
                time.sleep(0.002 if rank else 0.001)  # one waits for the other
                world.collective(rank)

    def ask(world):
        until(lambda: world.issued[0] > 25)
        world.stop[0].set()
        time.sleep(0.07)  # some collectives later; it may be any number of them
        world.stop[1].set()

    assert world.all(program, ask) == ["stopped"] * 2
    assert world.issued[0] == world.issued[1] and world.issued[0] % 20 == 0


def test_a_rank_that_ended_holds_nobody_up():
    world, turns = World(2), []

    def program(rank, statement):
        statement()
        world.collective(rank)
        while rank == 0:
            statement()
            turns.append(rank)
            time.sleep(0.001)

    def ask(world):
        until(lambda: len(turns) > 2 and world.outcomes[1] == "done")
        for stop in world.stop:
            stop.set()

    assert world.all(program, ask) == ["stopped", "done"]


def test_a_rank_that_ended_with_fewer_collectives_holds_nobody_up():
    world, turns = World(2), []

    def program(rank, statement):
        statement()
        world.collective(rank)
        if rank == 0:
            world.issued[0] += 1  # one of a group that the other is not in
        while rank == 0:
            statement()
            turns.append(rank)
            time.sleep(0.001)

    def ask(world):
        until(lambda: len(turns) > 2 and world.outcomes[1] == "done")
        for stop in world.stop:
            stop.set()

    assert world.all(program, ask) == ["stopped", "done"]


@pytest.mark.parametrize("ahead", [0, 1])
def test_ranks_that_never_meet_are_waited_for_only_so_long(monkeypatch, ahead):
    monkeypatch.setattr("rlbench.workers.train.cell_cut.LOST_S", 0.5)
    world, over = World(2), threading.Event()

    def program(rank, statement):
        world.issued[rank] += rank * ahead
        if rank == 1:
            over.wait(120)  # in one long statement, perhaps in a collective of its own
        while rank == 0:
            statement()
            time.sleep(0.001)

    def ask(world):
        for stop in world.stop:
            stop.set()
        held_on = until(lambda: world.outcomes[0])
        over.set()
        world.held_on = held_on

    assert world.all(program, ask) == ["stopped", "done"] and world.held_on == "stopped"


def test_one_rank_alone_stops_at_its_next_statement():
    with Cut(None, 0, [0], lambda: True, lambda: 0) as cut, pytest.raises(Stopped, match="between two statements"):
        cut.statement()
    cut.statement()  # what runs while it ends is not stopped again


SOURCE = '''
"""A cell."""
from __future__ import annotations
total = 0
def add(n):
    """Says what it does."""
    global total
    for i in range(n):
        total += i
    else:
        total += 100
    return total
async def later(): return 1
class Kept:
    value = 3
    def get(self): return self.value
try:
    add(3)
    raise KeyError("x")
except KeyError as error:
    seen = error
finally:
    ended = True
with open("/dev/null") as file:
    kind = type(file).__name__
match total:
    case 103: matched = "yes"
while total < 110: total += 1
squares = [i * i for i in range(3)]
'''


def test_a_cell_means_the_same_with_statements_told():
    plain, told, count = {"__name__": "cell"}, {"__name__": "cell"}, []
    exec(compile(SOURCE, "plain", "exec"), plain)
    told[GATE] = lambda: count.append(1)
    exec(compile(with_statements(ast.parse(SOURCE)), "told", "exec"), told)
    names = {"total", "ended", "kind", "matched", "squares"}
    assert {n: told[n] for n in names} == {n: plain[n] for n in names} and str(told["seen"]) == str(plain["seen"])
    assert told["add"].__doc__ == "Says what it does." and vars(told["Kept"]).keys() == vars(plain["Kept"]).keys()
    assert len(count) > 25


def test_an_endless_loop_of_any_shape_asks_at_each_turn():
    for source in ("while True: pass", "for _ in iter(int, 1): pass", "def f():\n  while True:\n    pass\nf()"):
        asked = []

        def statement(asked=asked):
            asked.append(1)
            if len(asked) > 50:
                raise Stopped("enough")

        with pytest.raises(Stopped):
            exec(compile(with_statements(ast.parse(source)), "loop", "exec"), {GATE: statement})


def test_errors_keep_their_line():
    tree = with_statements(ast.parse("a = 0\nfor i in (1,):\n    a / 0\n"))
    with pytest.raises(ZeroDivisionError) as raised:
        exec(compile(tree, "cell", "exec"), {GATE: lambda: None})
    assert raised.traceback[-1].lineno + 1 == 3

"""Calls to real Ray actors: order, results, output, stop, errors, death; what a person in a cell relies on."""

import os
import signal
import threading
import time

import numpy as np
import pytest

from rlbench.dispatch import chain as chains
from rlbench.dispatch import peers
from rlbench.dispatch import pending as pending_calls
from rlbench.dispatch.chain import Chain
from rlbench.dispatch.link import Link, spawn_host
from rlbench.errors import DataError, EngineError, RemoteError, SessionError, StateError, Stopped, WorkerDied
from rlbench.runtime import processes
from tests.clock import LIMIT_S, interrupt_once, main_thread_runs, until

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def link(cluster):
    made = Link.create("calls")
    yield made
    made.close()


def spawn(link, engine, target="EchoTarget"):
    """Two workers, on record as an engine: their actors and pids."""
    import ray

    hosts = [spawn_host(link, engine, i, f"tests.targets:{target}", (i,), {}, {"num_cpus": 0}) for i in range(2)]
    pids = ray.get([host.pid.remote() for host in hosts])
    link.engine(engine, {"kind": "train", "actors": [f"rlbench/{link.name}/{engine}/{i}" for i in range(2)]})
    return hosts, pids


def described_classes():
    """What the cluster was told of classes of actors."""
    from ray.experimental.internal_kv import _internal_kv_list

    return [key for key in _internal_kv_list(b"", namespace=b"fun") if key.startswith(b"ActorClass")]


@pytest.fixture(scope="module")
def actors(link):
    return spawn(link, "echo")[0]


@pytest.fixture
def others(link, request):
    """Two workers of a test's own, one of which it may end: their engine, their actors and pids."""
    import ray

    engine = f"others-{abs(hash(request.node.name))}"
    hosts, pids = spawn(link, engine, getattr(request, "param", "EchoTarget"))
    yield engine, hosts, pids
    for host in hosts:
        ray.kill(host)
    link.engine(engine, None)


def submit(link, actors, name, *args, engine="echo", finish=list, **options):
    labels = [f"rank {i}" for i in range(len(actors))]
    return link.submit(engine, labels, actors, name, [(args, {})] * len(actors), finish, **options)


def begun(pending, actors):
    """Whether every rank is in its second slice of this `slowly`."""
    import ray

    polls = [actor.poll.remote(pending._call_id, 0) for actor in actors]
    return all(told.values.get("done", 0) > 0 for told in ray.get(polls))


def test_a_further_worker_is_no_further_class_to_the_cluster(link, actors):
    import ray

    before = described_classes()
    host = spawn_host(link, "one more", 0, "tests.targets:EchoTarget", (0,), {}, {"num_cpus": 0})
    ray.get(host.pid.remote())
    assert before and described_classes() == before
    ray.kill(host)


def test_every_rank_gets_the_call_and_results_come_in_rank_order(link, actors):
    assert submit(link, actors, "status").result() == [{"rank": 0, "calls": 0}, {"rank": 1, "calls": 0}]


def test_arguments_by_position_and_keyword_arrive_and_object_refs_are_resolved(link, actors):
    import ray

    array = np.arange(1000)
    pending = link.submit("echo", ["rank 0"], actors[:1], "echo", [((1, ray.put(array)), {"key": "value"})], list)
    ((args, kwargs),) = pending.result()
    assert args[0] == 1 and (args[1] == array).all() and kwargs == {"key": "value"}


def test_the_compute_lane_is_one_thread_for_the_life_of_the_worker(link, actors):
    threads = {submit(link, actors[:1], "thread").result()[0] for _ in range(5)}
    assert len(threads) == 1


def test_the_control_lane_answers_while_the_compute_lane_is_busy(link, actors):
    import ray

    pending = submit(link, actors, "slowly", 600.0)
    until(lambda: begun(pending, actors))
    settled = ray.get(actors[0].control.remote("settlings"))
    assert ray.get(actors[0].control.remote("status"))["rank"] == 0
    assert not pending.done
    assert ray.get(actors[0].control.remote("settlings")) == settled, "what calls left waits for the end of this one"
    pending.stop()
    with pytest.raises(Stopped):
        pending.result(timeout=LIMIT_S)
    assert ray.get(actors[0].control.remote("settlings")) == settled + 1


def test_print_shows_in_the_calling_cell_once_with_its_rank(link, actors, capsys):
    submit(link, actors, "shout", "hello").result()
    out = capsys.readouterr().out
    assert out.count("[rank 0] hello\n") == 1 and out.count("[rank 1] hello\n") == 1


def test_the_view_of_a_call_that_failed_or_was_stopped_is_closed(link, actors):
    class View:
        def __init__(self):
            self.closed = []

        def __call__(self, progress):
            """Drawn elsewhere."""

        def close(self, result):
            self.closed.append(result)

    failed, stopped, done = View(), View(), View()
    with pytest.raises(RemoteError):
        submit(link, actors, "fail", observer=failed).result()
    pending = submit(link, actors, "slowly", 30.0, observer=stopped)
    pending.stop()
    with pytest.raises(Stopped):
        pending.result(timeout=LIMIT_S)
    submit(link, actors, "status", observer=done).result()
    assert (failed.closed, stopped.closed, done.closed) == ([None], [None], []), "a result is the caller's to show"


def test_output_appears_while_the_call_still_runs(link, actors, capsys):
    pending, printed = submit(link, actors[:1], "slowly", 600.0), []

    def shown():
        with pytest.raises(TimeoutError):
            pending.result(timeout=0.1)
        printed.append(capsys.readouterr().out)
        return "".join(printed)

    assert until(shown) == "[rank 0] half way\n"
    pending.stop()
    with pytest.raises(Stopped):
        pending.result(timeout=LIMIT_S)
    assert capsys.readouterr().out == ""  # not a second time


def test_stop_ends_the_call_with_its_partial_and_leaves_the_worker_usable(link, actors):
    pending = submit(link, actors, "slowly", 600.0)
    until(lambda: begun(pending, actors))
    pending.stop()
    with pytest.raises(Stopped) as stopped:
        pending.result(timeout=LIMIT_S)
    assert all(n > 0 for n in stopped.value.partial)
    assert submit(link, actors, "shout", "a").result() == ["A", "A"]


def test_a_late_stop_hits_nothing(link, actors):
    done = submit(link, actors, "slowly", 0.1)
    done.result()
    done.stop()
    assert submit(link, actors, "slowly", 0.3).result()[0] > 0


def test_stopping_a_queued_call_ends_it_before_it_works(link, actors):
    first = submit(link, actors, "slowly", 1.0)
    second = submit(link, actors, "slowly", 600.0)
    second.stop()
    assert first.result()[0] > 0
    with pytest.raises(Stopped) as stopped:
        second.result(timeout=LIMIT_S)
    assert stopped.value.partial == [0, 0]


def test_keyboard_interrupt_gives_the_prompt_back_with_the_partial(link, actors, monkeypatch):
    monkeypatch.setattr(chains, "STOP_WAIT_S", LIMIT_S)  # the partial is waited for, however busy the machine is
    pending = submit(link, actors, "slowly", 600.0)
    interrupt_once(lambda: begun(pending, actors))
    with pytest.raises(Stopped) as stopped:
        pending.blocking_result()
    assert all(n > 0 for n in stopped.value.partial)


def test_stopped_is_a_keyboard_interrupt_so_that_loops_end():
    assert issubclass(Stopped, KeyboardInterrupt) and not issubclass(Stopped, Exception)


def test_the_users_exception_shows_its_message_rank_and_line(link, actors):
    with pytest.raises(RemoteError, match="ValueError: this target fails") as error:
        submit(link, actors, "fail").result()
    assert "rank 0" in str(error.value) and "targets.py" in str(error.value)


def test_our_own_errors_come_back_as_they_are(link, actors):
    with pytest.raises(DataError, match="give something else"):
        submit(link, actors, "refuse").result()


def test_one_failing_rank_fails_the_call_and_both_stay_usable(link, actors):
    with pytest.raises(RemoteError, match="rank 1 fails alone"):
        submit(link, actors, "fail_on", 1).result()
    assert submit(link, actors, "shout", "b").result() == ["B", "B"]


def test_shared_work_is_handed_out_once_over_all_workers(link, actors):
    parts = submit(link, actors, "take", 3, queue_total=50).result()
    assert sorted(parts[0] + parts[1]) == list(range(50)) and parts[0] and parts[1]


def test_an_older_driver_is_refused_after_a_take_over(cluster, actors, link):
    other = Link.create("epochs")
    host = spawn_host(other, "echo", 0, "tests.targets:EchoTarget", (0,), {}, {"num_cpus": 0})
    other.engine("echo", {"kind": "train", "actors": ["rlbench/epochs/echo/0"]})
    taken = Link.attach("epochs", take_over=True)
    assert taken.epoch > other.epoch
    taken.submit("echo", ["rank 0"], [host], "shout", [(("x",), {})], list).result()
    with pytest.raises(SessionError, match="another notebook"):
        other.submit("echo", ["rank 0"], [host], "shout", [(("x",), {})], list).result()
    with pytest.raises(SessionError, match="another notebook"):
        other.set(step=3)
    taken.close()


def test_a_chain_runs_its_steps_in_order_and_returns_their_value(link, actors):
    def steps():
        first = yield submit(link, actors, "shout", "one")
        second = yield submit(link, actors, "shout", first[0] + "two")
        return second

    assert Chain("two steps", steps()).blocking_result() == ["ONETWO", "ONETWO"]


def test_stopping_a_chain_stops_the_step_in_flight(link, actors):
    import ray

    def steps():
        yield submit(link, actors, "slowly", 600.0)
        raise AssertionError("the next step must not start")

    chain = Chain("slow", steps())
    until(lambda: ray.get(actors[0].running.remote()) == "slowly")
    chain.stop()
    with pytest.raises(Stopped):
        chain.result(timeout=LIMIT_S)


def test_a_call_that_not_all_have_ends_with_the_worker_that_is_dead_or_with_a_stop(cluster):
    """What waited for the others' word waited on: for a minute where one of them was dead."""
    import ray

    made = Link.create("waiting")
    hosts = [spawn_host(made, "wait", i, "tests.targets:WaitingTarget", (i,), {}, {"num_cpus": 0}) for i in range(2)]
    pids = ray.get([host.pid.remote() for host in hosts])
    stopped = submit(made, hosts, "status")
    stopped.stop()
    with pytest.raises(Stopped):
        stopped.result(timeout=LIMIT_S)
    half = [spawn_host(made, "half", i, "tests.targets:DroppingTarget", (i,), {}, {"num_cpus": 0}) for i in range(2)]
    dropped = submit(made, half, "status")
    until(lambda: len(ray.wait(dropped._refs, timeout=0)[0]) == 1)
    dropped.stop()
    with pytest.raises(Stopped):
        dropped.result(timeout=LIMIT_S)
    cut = submit(made, hosts, "status")
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="rank 1 of echo died"):
        cut.result(timeout=LIMIT_S)
    with pytest.raises(WorkerDied, match="rank 1 of echo died"):
        submit(made, hosts, "status").result(timeout=LIMIT_S)
    made.close()


def test_a_killed_worker_ends_the_wait_and_says_which_one(cluster, capfd):
    made = Link.create("death")
    host = spawn_host(made, "echo", 0, "tests.targets:EchoTarget", (0,), {}, {"num_cpus": 0})
    import ray

    pid = ray.get(host.pid.remote())
    pending = made.submit("echo", ["rank 0"], [host], "slowly", [((600.0,), {})], list)
    until(lambda: begun(pending, [host]))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="rank 0 of echo died"):
        pending.result(timeout=LIMIT_S)
    assert made.state()["engines"]["echo"]["broken"] == "rank 0 died"
    made.close()
    time.sleep(1.0)  # Ray's page about it came within that
    printed = "".join(capfd.readouterr())
    assert "worker died" not in printed, "what the cell shows is our error alone"


def test_a_worker_that_was_out_of_reach_and_answers_again_is_not_called_dead(link, actors):
    import ray

    from rlbench.dispatch.failures import final_fate

    lost = ray.exceptions.ActorUnavailableError("the connection broke", actors[0]._actor_id.binary())
    assert final_fate(actors[0], lost) is None
    error = link.died("echo", "rank 0", actors[0], lost)
    assert isinstance(error, EngineError) and not isinstance(error, WorkerDied)
    assert "whether the call was done is not known" in str(error)
    assert not link.state("engines")["engines"].get("echo", {}).get("broken")


def test_of_a_dead_rank_and_a_peer_that_fails_for_it_the_dead_one_is_named(link, others, tmp_path):
    import ray

    engine, hosts, pids = others
    calls = [((str(tmp_path / name),), {}) for name in ("dead", "never")]
    pending = link.submit(engine, ["rank 0", "rank 1"], hosts, "fail_once", calls, list)
    until(lambda: ray.get([h.running.remote() for h in hosts]) == ["fail_once"] * 2)
    os.kill(pids[1], signal.SIGKILL)
    until(lambda: processes.start_time(pids[1]) is None)
    (tmp_path / "dead").touch()
    with pytest.raises(WorkerDied, match=f"rank 1 of {engine} died"):
        pending.result(timeout=LIMIT_S)


def test_a_death_that_is_heard_of_after_a_peer_failed_for_it_is_the_one_named(link, others, tmp_path):
    engine, hosts, pids = others
    (tmp_path / "now").touch()
    calls = [((str(tmp_path / name),), {}) for name in ("now", "never")]
    pending = link.submit(engine, ["rank 0", "rank 1"], hosts, "fail_once", calls, list)

    def kill_once_the_failure_is_known():
        until(lambda: pending._first_failed is not None)
        os.kill(pids[1], signal.SIGKILL)

    killer = threading.Thread(target=kill_once_the_failure_is_known, daemon=True)
    killer.start()
    with pytest.raises(WorkerDied, match=f"rank 1 of {engine} died"):
        pending.result(timeout=LIMIT_S)
    killer.join()
    assert pending._first_failed == [0]


@pytest.mark.parametrize("cause", [0, 1])
def test_a_cause_that_is_heard_of_after_a_peer_gave_up_for_it_is_the_one_raised(link, actors, cause):
    with pytest.raises(StateError, match="the cause"):
        submit(link, actors, "gives_up_for", cause).result(timeout=LIMIT_S)


MEETING = pytest.mark.parametrize("others", ["MeetingTarget"], indirect=True)


@MEETING
def test_a_peer_in_a_collective_of_a_rank_that_failed_is_released_whatever_it_takes(link, others, monkeypatch):
    monkeypatch.setattr(peers, "STUCK_S", 0.3)
    monkeypatch.setattr(peers, "FREED_S", 0.5)
    engine, hosts, _ = others
    with pytest.raises(WorkerDied, match=rf"(?s)ValueError: mine alone.*rank 1 of {engine} died.*ended to"):
        submit(link, hosts, "meet", 1, engine=engine).result(timeout=LIMIT_S)


@MEETING
def test_a_peer_that_computes_is_waited_for_and_the_failure_shows_meanwhile(
    link, others, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(peers, "STUCK_S", 0.3)
    monkeypatch.setattr(peers, "TELL_S", 0.3)
    _, hosts, _ = others
    pending, printed = submit(link, hosts, "compute", 1, str(tmp_path / "done")), []

    def told():
        with pytest.raises(TimeoutError):
            pending.result(timeout=0.1)
        printed.append(capsys.readouterr().out)
        return "[rank 1] ValueError: mine alone\n[rank 1] (it failed;" in "".join(printed)

    until(told, what=lambda: printed)
    (tmp_path / "done").touch()
    with pytest.raises(RemoteError, match="mine alone"):
        pending.result(timeout=LIMIT_S)
    assert submit(link, hosts, "shout", "both live").result() == ["BOTH LIVE"] * 2


@MEETING
def test_after_ctrl_c_a_peer_of_a_rank_that_failed_is_released_without_anybody_waiting(link, others, monkeypatch):
    import ray

    monkeypatch.setattr(chains, "STOP_WAIT_S", 0.3)
    monkeypatch.setattr(peers, "STUCK_S", 600.0)  # not before Ctrl-C
    monkeypatch.setattr(peers, "FREED_S", 0.5)
    engine, hosts, _ = others
    call = submit(link, hosts, "meet", 1, engine=engine)
    interrupt_once(lambda: ray.get(hosts[0].running.remote()) == "meet" and main_thread_runs("blocking_result"))
    with pytest.raises(Stopped, match="still stopping"):
        call.blocking_result()
    with pytest.raises(TimeoutError):
        call.result(timeout=0.0)  # also while another thread sees to it
    monkeypatch.setattr(peers, "STUCK_S", 0.3)
    until(lambda: "broken" in link.state()["engines"][engine], what="the peer waits for ever")
    with pytest.raises(WorkerDied, match=rf"(?s)mine alone.*rank 1 of {engine} died"):
        call.result(timeout=LIMIT_S)


def test_a_rank_out_of_reach_for_a_moment_is_not_ended_for_its_peers(monkeypatch):
    from ray.exceptions import ActorDiedError, ActorUnavailableError

    monkeypatch.setattr(pending_calls, "_answer", lambda ref: ref)
    assert pending_calls._issued(ActorDiedError()) == 0

    class Unreached:
        ended = False

        @property
        def leave(self):
            self.ended = True
            return self

        def remote(self, *args):
            return None

        stop = property(lambda self: self)

    actors = [Unreached(), Unreached()]
    others = peers.Peers(actors, "call")
    others.issued[1] = 1000  # the peer waits for a collective
    level = pending_calls._issued(ActorUnavailableError("the connection broke", b"x" * 16))
    monkeypatch.setattr(peers, "STUCK_S", 0.0)
    for _ in range(5):
        others.go_on([0], level)
        time.sleep(0.02)  # longer than it may be seen stuck
    assert not others.released and not actors[0].ended
    others.go_on([0], 0)
    time.sleep(0.02)
    others.go_on([0], 0)
    assert others.released and actors[0].ended, "one that has died would be"

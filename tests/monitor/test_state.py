"""The session's state is what its events say, and a monitor that restarts stands where it stood."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlbench.monitor import lease, state
from rlbench.monitor.report import lease_report

DRIVER = {"id": "a", "pid": 1, "started": 2.0, "mode": "script"}
VALUES = st.one_of(st.integers(-5, 5), st.text(max_size=5), st.none(), st.floats(allow_nan=False))
EVENTS = st.one_of(
    st.fixed_dictionaries(
        {"do": st.just("set"), "key": st.sampled_from(["step", "rollouts", "config"]), "value": VALUES}
    ),
    st.fixed_dictionaries({"do": st.just("set"), "key": st.just("version"), "value": st.integers(0, 9)}),
    st.fixed_dictionaries(
        {
            "do": st.just("engine"),
            "name": st.sampled_from(["actor", "inference"]),
            "fields": st.none() | st.dictionaries(st.sampled_from(["kind", "state"]), VALUES),
        }
    ),
    st.fixed_dictionaries({"do": st.just("lengths"), "entry": st.fixed_dictionaries({"rollout": st.integers(1, 9)})}),
    st.fixed_dictionaries({"do": st.just("record"), "record": st.dictionaries(st.text(max_size=3), VALUES)}),
    st.fixed_dictionaries({"do": st.just("drive"), "epoch": st.integers(1, 9), "driver": st.just(DRIVER) | st.none()}),
)


def reduced(*events):
    value = state.initial("demo")
    for event in events:
        value = state.reduce(value, event)
    return value


# -- events


def test_a_value_is_set():
    assert reduced({"do": "set", "key": "step", "value": 3})["step"] == 3


def test_an_engines_fields_are_added_to_those_it_has_and_none_drops_it():
    added = reduced(
        {"do": "engine", "name": "actor", "fields": {"kind": "train", "broken": None}},
        {"do": "engine", "name": "actor", "fields": {"broken": "rank 0 died"}},
    )
    assert added["engines"] == {"actor": {"kind": "train", "broken": "rank 0 died"}}
    assert state.reduce(added, {"do": "engine", "name": "actor", "fields": None})["engines"] == {}
    assert state.reduce(added, {"do": "engine", "name": "other", "fields": None}) == added


def test_evaluations_are_shown_with_the_record_whose_weights_they_are_of_while_it_is_on_the_course():
    def evaluated(at, **metrics):
        return {"do": "evaluated", "entries": [{"at": at, "metrics": metrics}]}

    records = [{"do": "record", "record": {"step": i, "reward": 0.5}} for i in (1, 2)]
    events = [evaluated(state.BEGIN, a=0.0), records[0], evaluated(0, a=0.1), evaluated(None, a=9.0), records[1]]
    value = reduced(*events, evaluated(0, a=0.2, reward=9.0), evaluated(1, a=0.3))
    assert state.history(value) == [{"step": 1, "reward": 0.5, "a": 0.2}, {"step": 2, "reward": 0.5, "a": 0.3}]
    back = state.reduce(value, {"do": "set", "key": "tip", "value": 0})
    assert state.history(back) == [{"step": 1, "reward": 0.5, "a": 0.2}] and len(back["evaluations"]) == 5
    assert state.measured_at(value)[state.BEGIN] == {"a": 0.0}


def test_what_a_user_logged_is_shown_with_the_last_step_while_that_is_on_the_course():
    steps = [{"do": "record", "record": {"step": i}} for i in (1, 2)]
    logged = [{"do": "logged", "metrics": {"own": float(i)}} for i in range(3)]
    value = reduced(logged[0], steps[0], logged[1], steps[1], logged[2])
    assert state.measured_at(value)[state.BEGIN] == {"own": 0.0}
    assert state.history(value) == [{"step": 1, "own": 1.0}, {"step": 2, "own": 2.0}]
    assert state.history(state.reduce(value, {"do": "set", "key": "tip", "value": 0})) == [{"step": 1, "own": 1.0}]


def test_records_are_kept_in_order():
    value = reduced(*({"do": "record", "record": {"step": i}} for i in range(3)))
    assert state.history(value) == [{"step": 0}, {"step": 1}, {"step": 2}]


def steps(*numbers):
    return [
        event
        for i in numbers
        for event in (
            {"do": "set", "key": "step", "value": i},
            {"do": "set", "key": "version", "value": i},
            {"do": "record", "record": {"step": i}},
        )
    ]


def test_going_back_leaves_out_what_came_after_and_loses_nothing():
    value = reduced(
        *steps(1, 2),
        {"do": "snapshot", "id": "a", "fields": {"bytes": 7}},
        *steps(3),
        {"do": "restore", "id": "a"},
        *steps(30),
    )
    assert state.history(value) == [{"step": 1}, {"step": 2}, {"step": 30}]
    assert len(value["records"]) == 4
    assert value["snapshots"]["a"] == {
        "step": 2,
        "version": 2,
        "tip": 1,
        "cut": None,
        "setup": {},
        "reference": None,
        "rollouts": 0,
        "cursor": None,
        "bytes": 7,
    }


def test_the_last_records_and_their_number_are_known_without_the_others():
    value = reduced(
        *steps(1, 2),
        {"do": "snapshot", "id": "a", "fields": {}},
        *steps(3, 4),
        {"do": "restore", "id": "a"},
        *steps(30),
    )
    assert state.history(value, 2) == [{"step": 2}, {"step": 30}]
    assert state.history(value, 0) == [] and state.history(value, 9) == state.history(value)
    assert state.history_length(value) == 3 and state.history_length(state.initial("demo")) == 0


def test_a_state_keeps_its_records_whatever_follows_it():
    first = reduced(*steps(1))
    one, other = (state.reduce(first, {"do": "record", "record": {"step": i}}) for i in (2, 3))
    assert [state.history(value) for value in (first, one, other)] == [
        [{"step": 1}],
        [{"step": 1}, {"step": 2}],
        [{"step": 1}, {"step": 3}],
    ]
    assert len(first["records"]) == 1 and one != other and first["records"][-1]["place"] == 0


def test_names_and_texts_of_records_that_came_apart_are_held_once():
    told = [
        json.dumps({"do": "record", "record": {"loss_source": "text of " * 9, "seconds": {"total": i}}}) for i in (1, 2)
    ]
    first, second = state.history(reduced(*map(json.loads, told)))
    assert first["loss_source"] is second["loss_source"]
    assert [a is b for a, b in zip(first, second, strict=True)] == [True, True]
    assert second == json.loads(told[1])["record"]


def test_what_was_gone_back_to_gets_a_version_no_weights_had():
    value = reduced(*steps(1), {"do": "snapshot", "id": "a", "fields": {}}, *steps(2), {"do": "restore", "id": "a"})
    assert (value["step"], value["version"]) == (1, 3), "a replica that holds version 2 is not taken for current"


def test_snapshots_are_in_the_order_in_which_the_session_stood_at_them_last():
    made = [{"do": "snapshot", "id": name, "fields": {}} for name in "abc"]
    assert list(reduced(*made, {"do": "restore", "id": "a"})["snapshots"]) == ["b", "c", "a"]


def test_what_was_drawn_stays_where_a_heal_found_the_session_where_its_snapshot_is():
    drawn = {"do": "set", "key": "rollouts", "value": 5}
    back = {"do": "restore", "id": "a", "stays": True}
    begun = [*steps(1), {"do": "snapshot", "id": "a", "fields": {}}, drawn]
    value = reduced(*begun, back)
    assert (value["step"], value["rollouts"], value["version"]) == (1, 5, 2)
    assert reduced(*begun, back | {"stays": False})["rollouts"] == 0


def test_a_dropped_snapshot_is_no_longer_there_to_undo():
    value = reduced(
        {"do": "snapshot", "id": "a", "fields": {}},
        {"do": "set", "key": "undo", "value": ["a"]},
        {"do": "snapshot", "id": "a", "fields": None},
    )
    assert value["snapshots"] == {} and value["undo"] == []


def test_a_driver_comes_with_its_epoch():
    value = reduced({"do": "drive", "epoch": 4, "driver": DRIVER})
    assert (value["epoch"], value["driver"]) == (4, DRIVER)


def test_the_lengths_of_the_last_rollouts_are_kept_with_the_step_they_belong_to():
    value = reduced(
        {"do": "lengths", "entry": {"rollout": 1}},
        {"do": "set", "key": "step", "value": 7},
        {"do": "snapshot", "id": "a", "fields": {}},
        {"do": "lengths", "entry": {"rollout": 2}},
        {"do": "restore", "id": "a"},
    )
    assert value["lengths"] == [{"rollout": 1, "step": 0}, {"rollout": 2, "step": 7}], "what was sampled stays so"
    many = reduced(*({"do": "lengths", "entry": {"rollout": i}} for i in range(50)))
    assert [entry["rollout"] for entry in many["lengths"]] == list(range(18, 50))


def test_an_unknown_event_is_refused():
    with pytest.raises(ValueError, match="unknown event 'dance'"):
        reduced({"do": "dance"})


@given(st.lists(EVENTS, max_size=8))
def test_the_state_before_an_event_stays_what_it_was(events):
    value = state.initial("demo")
    for event in events:
        before = json.dumps(value, default=list)
        after = state.reduce(value, event)
        assert json.dumps(value, default=list) == before
        value = after


# -- journal


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(events=st.lists(EVENTS, max_size=8), cut=st.integers(0, 40))
def test_a_journal_cut_anywhere_gives_the_state_of_its_whole_lines_and_goes_on(tmp_path, events, cut):
    path = tmp_path / "demo.journal"
    path.unlink(missing_ok=True)
    journal = state.Journal(path)
    for event in events:
        journal.append(event)
    written = path.read_bytes() if events else b""
    if events:
        path.write_bytes(written[: max(0, len(written) - cut)])
        events = events[: path.read_bytes().count(b"\n")]
    last = {"do": "set", "key": "step", "value": 99}
    assert journal.replay(state.initial("demo")) == reduced(*events)
    journal.append(last)
    assert state.Journal(path).replay(state.initial("demo")) == reduced(*events, last)


def test_of_a_long_journal_the_last_events_alone_are_known_by_their_names(tmp_path):
    written = state.Journal(tmp_path / "demo.journal")
    for i in range(state.ONCE_KEPT + 44):
        written.append({"do": "set", "key": "step", "value": i, "id_once": f"event {i}"})
    journal = state.Journal(tmp_path / "demo.journal")
    assert journal.replay(state.initial("demo"))["step"] == state.ONCE_KEPT + 43
    assert list(journal.once) == [f"event {i}" for i in range(44, state.ONCE_KEPT + 44)]


def test_a_session_without_a_journal_begins_at_the_beginning(tmp_path):
    assert state.Journal(tmp_path / "none").replay(state.initial("demo")) == state.initial("demo")
    assert not (tmp_path / "none").exists()


def test_a_journal_is_its_owners_alone_and_goes_with_its_session(tmp_path):
    path = tmp_path / "demo.journal"
    journal = state.Journal(path)
    journal.append({"do": "set", "key": "step", "value": 1})
    assert oct(path.stat().st_mode & 0o777) == "0o600"
    journal.remove()
    journal.remove()
    assert not path.exists()


# -- lease


def driver(mode, **fields):
    return {"mode": mode, **fields}


@pytest.mark.parametrize(
    ("present", "alive", "silent_s", "busy", "over"),
    [
        (None, False, 29.0, False, False),
        (None, False, 31.0, False, True),
        (driver("script"), True, 1e6, False, False),
        (driver("script"), False, 29.0, False, False),
        (driver("script"), False, 31.0, False, True),
        (driver("script"), False, 31.0, True, True),
        (driver("script", lease_s=5.0), False, 6.0, False, True),
        (driver("script", lease_s=60.0), False, 31.0, False, False),
        (driver("notebook"), True, 1e6, False, False),
        (driver("notebook", lease_s=60.0), True, 61.0, False, False),
        (driver("notebook"), False, 7 * 3600.0, False, False),
        (driver("notebook"), False, 9 * 3600.0, False, True),
        (driver("notebook"), False, 9 * 3600.0, True, False),
        (driver("notebook", lease_s=60.0), False, 61.0, False, True),
    ],
)
def test_when_a_session_ends_by_itself(present, alive, silent_s, busy, over):
    assert lease.is_over(present, alive, silent_s, busy) is over
    left = lease_report(present, alive, silent_s, busy)["left_s"]
    assert left == 0 if over else left is None or left > 0, "who shows it says the same"


ENGINE = {"actor": {"info": {}}}


@pytest.mark.parametrize(
    ("changed", "parks"),
    [
        ({"park": True, "config": {"model": "tiny"}, "engines": ENGINE}, True),
        ({"park": False, "config": {"model": "tiny"}, "engines": ENGINE}, False),
        ({"park": True, "config": {}, "engines": ENGINE}, False),
        ({"park": True, "config": {"model": "tiny"}, "engines": ENGINE | {"inference": {}}}, False),
    ],
    ids=["asked for", "not asked for", "engines alone", "one is not built"],
)
def test_what_goes_to_disk_at_the_end_of_its_lease(changed, parks):
    assert lease.parks(state.initial("s") | changed) is parks
    assert not lease.parks(state.initial("s"))

"""What a kernel knows of a session's history: the same as its monitor, told once."""

from hypothesis import given
from hypothesis import strategies as st

from rlbench.monitor import state
from rlbench.session.record.step_records import StepRecords

ACTS = st.lists(st.sampled_from(["step", "keep", "back", "read"]), max_size=40)


class Told:
    """A session's link to a state of its own; counts the records it was asked for."""

    def __init__(self):
        self.state, self.sent = state.initial("demo"), 0

    def apply(self, event):
        self.state = state.reduce(self.state, event)

    def steps(self, known):
        fresh = self.state["records"][known:]
        self.sent += len(fresh)
        return self.state["tip"], fresh


@given(ACTS)
def test_a_kernel_reads_the_history_its_monitor_has_wherever_the_session_went(acts):
    link = Told()
    link.apply({"do": "snapshot", "id": "begin", "fields": {}})
    records = StepRecords(link)
    for number, act in enumerate(acts):
        if act == "step":
            link.apply({"do": "record", "record": {"step": number}})
        elif act == "keep":
            link.apply({"do": "snapshot", "id": f"at {number}", "fields": {}})
        elif act == "back":
            chosen = list(link.state["snapshots"])[number % len(link.state["snapshots"])]
            link.apply({"do": "restore", "id": chosen})
        else:
            assert records.history() == state.history(link.state)
    assert records.history() == state.history(link.state)
    assert [link.state["records"][at]["record"] for at in records.course()] == state.history(link.state)
    assert link.sent == len(link.state["records"])


def test_each_record_is_asked_for_once_however_often_the_history_is_read():
    link = Told()
    records = StepRecords(link)
    for step in range(300):
        link.apply({"do": "record", "record": {"step": step}})
        assert records.history()[-1] == {"step": step}
    assert link.sent == 300


def test_a_history_that_was_read_does_not_grow():
    link = Told()
    records = StepRecords(link)
    link.apply({"do": "record", "record": {"step": 1}})
    read = records.history()
    link.apply({"do": "record", "record": {"step": 2}})
    assert records.history() == [{"step": 1}, {"step": 2}] and read == [{"step": 1}]

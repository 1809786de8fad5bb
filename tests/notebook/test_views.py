"""The cards of a session, its engines, a batch, a step's metrics and the history: what they say."""

import numpy as np
import pytest

from rlbench.data.record.history import History
from rlbench.data.record.metrics import Metrics
from rlbench.errors import SessionError
from rlbench.notebook.base.figures import blocks, sparkline, with_unit
from rlbench.notebook.cards import data_views, record_views, session_views
from rlbench.session.session import Sessions
from rlbench.units import format_age, format_bytes, format_count
from tests.notebook.reading import both
from tests.notebook.values import ACTOR, INFERENCE, SAMPLE, Held, batch, state

# -- the session


def test_the_card_says_where_each_engine_is_in_words():
    facts = (state(inference=INFERENCE, actor=ACTOR), [{"resident": {}}, SAMPLE])
    text = both(session_views.session_card(*facts))
    for part in (
        "sort",
        "tiny",
        "step 42",
        "v42",
        "seed 3",
        "rollout 64",
        "fsdp2 ×2",
        "vllm ×1",
        "weights ● resident",
        "optimizer ○ host",
        "kv cache ◌ released",
        "1.5 GiB",
        "256 MiB",
        "v41 ⚠ one version behind: session.sync_weights()",
    ):
        assert part in text, part
    assert text.index("actor") < text.index("inference")


def test_the_card_says_how_long_nothing_ran_and_which_branch_this_is():
    idle = state() | {"running": {}, "idle_s": 200.0}
    assert "idle 3 min" in both(session_views.session_card(*(idle, [])))
    assert "idle" not in both(session_views.session_card(*(idle | {"running": {"x": "train_step"}}, [])))[:60]
    assert "branch warm" in both(session_views.session_card(*(idle | {"branch": "warm"}, [])))
    assert "branch" not in both(session_views.session_card(*(idle | {"branch": "main"}, [])))
    chosen = [["undo", "4", "a copy takes 384 KiB"]]
    said = both(session_views.session_card(*(idle | {"defaults": chosen}, [])))
    assert "by default: undo=4 (a copy takes 384 KiB)" in said
    assert "paused" in both(session_views.session_card(*(idle | {"paused": True}, [])))


@pytest.mark.parametrize(
    ("driver", "lease_s", "text"),
    [
        ({"mode": "notebook"}, 8 * 3600.0, "ends 8 h after its kernel"),
        ({"mode": "script"}, 30.0, "ends 30 s after its script"),
        (None, 30.0, "ends 30 s after its script"),
    ],
    ids=["notebook", "script", "nobody yet"],
)
def test_the_card_says_when_the_session_ends_by_itself(driver, lease_s, text):
    facts = (state() | {"driver": driver, "lease_s": lease_s}, [])
    assert text in both(session_views.session_card(*facts))


def test_the_card_says_when_the_session_is_parked_by_itself():
    facts = (state() | {"driver": {"mode": "notebook"}, "lease_s": 8 * 3600.0, "park": True}, [])
    assert "parked 8 h after its kernel" in both(session_views.session_card(*facts))


PARKED = {
    "name": "older",
    "state": "parked",
    "model": "tiny",
    "step": 30,
    "version": 31,
    "time": 0.0,
    "bytes": 12 << 20,
}
PARKED |= {"lost": ["gradients"], "path": "/state/parked/older/session"}


def test_a_parked_session_is_shown_with_its_size_and_how_it_comes_back():
    text = both(session_views.parked_card(PARKED))
    for shown in ("older", "tiny", "step 30", "v31", "12 MiB", "parked", "gradients", "rb.attach('older')"):
        assert shown in text
    text = both(session_views.sessions_card([{"name": "live", "pid": 7}, PARKED]))
    for shown in ("1 session", "1 parked, 12 MiB", "rb.attach('live')", "rb.attach('older')"):
        assert shown in text
    damaged = {"name": "older", "state": "parked", "path": "/state/parked/older/session"}
    assert "rb.attach('older')" in both(session_views.parked_card(damaged))
    assert "older" in both(session_views.sessions_card([damaged]))


def test_the_card_of_a_frozen_reference_and_of_a_broken_engine():
    facts = (state(reference=ACTOR, inference=INFERENCE | {"broken": "replica 0 died"}), [])
    lines = both(session_views.session_card(*facts)).splitlines()
    assert lines[1].startswith("inference") and lines[1].endswith("v41 ⚠ replica 0 died")
    assert lines[2].startswith("reference") and lines[2].endswith("optimizer ○ host frozen")


def test_the_card_of_a_session_that_is_still_being_built():
    facts = (state(actor={"kind": "train", "devices": []}), [])
    assert "fsdp2 ×0" in both(session_views.session_card(*facts))


def test_how_far_replicas_are_behind_is_said_in_words():
    def note(held, version):
        engines = {"inference": INFERENCE | {"state": {"version": held}}}
        return both(session_views.session_card(state(**engines) | {"version": version}, []))

    assert "one version behind" in note(4, 5) and "3 versions behind" in note(0, 3)
    assert "behind" not in note(5, 5) + note(None, 5)


def test_the_sessions_of_a_cluster_are_a_list_that_shows_how_to_drive_each():
    listed = Sessions([{"name": "sort", "pid": 12}])
    assert listed == [{"name": "sort", "pid": 12}] and "rb.attach('sort')" in repr(listed)
    assert "rb.attach('sort')" in both(session_views.sessions_card(listed)) and "rb.Session(" in both(
        session_views.sessions_card([])
    )


# -- an engine


BUILT = ACTOR | {
    "info": {
        "parameters": 329600,
        "trainable": 1000,
        "dtype": "float32",
        "device": "cuda:0",
        "optimizer": ["AdamW"],
        "shard_size": 2,
        "source": "/models/tiny",
    },
    "state": {"weights": "cuda", "optimizer": "cpu", "lr": 1e-6},
    "methods": [{"name": "scores"}],
}


def test_the_card_of_an_engine_says_what_it_is_made_of_and_where_it_is():
    text = both(session_views.engine_card(Held({"actor": BUILT})))
    for part in (
        "actor train · fsdp2 ×2 · v42",
        "weights ● resident · optimizer ○ host",
        "1.5 GiB resident: weights 1 MiB",
        "330k, 1k trained",
        "dtype float32",
        "2 ranks on cuda, sharded over 2",
        "AdamW, lr 1e-06",
        "/models/tiny",
        "methods scores",
    ):
        assert part in text, part


def test_the_card_of_replicas_says_their_limits_and_that_they_are_behind():
    info = {
        "executor": "vllm",
        "max_model_len": 2048,
        "kv_cache_bytes": 2**30,
        "tensor_parallel_size": 2,
        "device": "cuda",
        "path": "/models/tiny",
    }
    held = Held({"actor": INFERENCE | {"info": info}})
    text = both(session_views.engine_card(held))
    for part in (
        "1 replica on cuda, 2 devices each",
        "2,048 tokens",
        "KV cache 1 GiB",
        "kv cache ◌ released",
        "⚠ one version behind: session.sync_weights()",
    ):
        assert part in text, part


def test_an_engine_that_trains_nothing_has_no_optimizer_whatever_its_state_says():
    record = BUILT | {"info": BUILT["info"] | {"trainable": 0, "optimizer": []}}
    text = both(session_views.engine_card(Held({"actor": record})))
    assert "optimizer – none" in text and "frozen" in text and "AdamW" not in text


def test_an_engine_that_is_not_there_says_so_instead_of_raising():
    unbuilt = Held({})
    unbuilt.built = False
    assert "not built" in both(session_views.engine_card(unbuilt)) and "build(…)" in both(
        session_views.engine_card(unbuilt)
    )
    assert "no engine 'actor' any more" in both(session_views.engine_card(Held({})))
    assert "⚠ session 'x' is gone" in both(session_views.engine_card(Held({}, SessionError("session 'x' is gone"))))


# -- metrics, history, batch


def test_metrics_are_grouped_by_what_they_are_about_with_their_units():
    metrics = Metrics(
        {
            "step": 3,
            "version": 2,
            "loss": 0.123456,
            "reward": None,
            "kl": 0.00012345,
            "clip_fraction": 0.03125,
            "grad_norm": 1.5,
            "tokens_per_s": 12345.6,
            "mine": 7.0,
            "loss_name": "grpo",
            "mismatch/chi2_seq": 1.0,
        }
    )
    text = both(record_views.metrics_card(metrics))
    lines = {line.split(" ")[0]: line for line in text.splitlines()}
    assert text.startswith("metrics step 3 · v2 · grpo") and lines["result"] == "result loss 0.123"
    assert lines["policy"] == "policy kl 0.000123 nats clip_fraction 3.12 %"
    assert lines["gradient"] == "gradient grad_norm 1.5" and lines["size"] == "size tokens_per_s 12.3k tok/s"
    assert lines["others"] == "others mine 7"


def test_every_metric_is_shown_by_the_name_it_is_called_by():
    values = {f"metric_{i}": i / 3 for i in range(11)}
    text = both(record_views.metrics_card(Metrics(values)))
    assert all(f"{name} " in text for name in values) and len(text.splitlines()) == 4


def test_the_time_of_a_step_is_split_with_the_longest_part_first():
    seconds = {"check": 0.001, "forward_backward": 1.0, "optimizer": 0.2, "total": 1.25}
    assert record_views.time_split(seconds) == "1.25 s = forward_backward 1 · optimizer 0.2 · check 0.001"
    assert record_views.time_split({"total": 2.0}) == "2 s" and record_views.time_split({"step": 0.5}) == "step 0.5 s"
    assert "1.25 s = forward_backward 1" in both(record_views.metrics_card(Metrics({"loss": 1.0, "seconds": seconds})))


def test_a_skipped_step_says_why():
    text = both(record_views.metrics_card(Metrics({"skipped": "gradient not finite"})))
    assert "⚠ step skipped: gradient not finite" in text


def test_history_shows_the_last_steps_and_an_empty_one_says_how_to_begin():
    history = History([{"step": i, "reward": i / 20, "loss": 1.0, "clip_fraction": 0.5} for i in range(1, 21)])
    text = both(record_views.history_card(history))
    assert text.startswith("history 20 steps") and "0.05 ▁" in text and "█ 1" in text and "the last 12" in text
    assert text.count("50 %") == 12 and "history.plot()" in text
    assert "session.train_step(batch)" in both(record_views.history_card(History([])))
    assert "the last" not in both(record_views.history_card(history[:5]))


def test_a_history_with_holes_shows_nothing_where_nothing_is():
    text = both(record_views.history_card(History([{"step": 1, "reward": None}, {"step": 2, "reward": 0.5}])))
    assert "None" not in text and "nan" not in text


def test_a_batch_shows_what_a_step_would_learn_from():
    text = both(data_views.batch_card(batch(advantage=lambda rewards, group: rewards - 2)))
    for part in (
        "6 sequences · 21 response tokens · 21 trained (100 %)",
        "min 1 · p50 4 · p90 6 · max 6 tokens",
        "16.7 % truncated",
        "mean 2.5 ± 1.71 · from 0 to 5",
        "from -2 to 3",
        "v0, temperature 1",
        "1 of 6 sequences have advantage 0 throughout",
    ):
        assert part in text, part
    assert "advantage 0 throughout" not in both(data_views.batch_card(batch(advantage=lambda r, group: r + 1)))


def test_masked_tokens_and_empty_batches_have_a_card():
    value = batch(advantage=lambda rewards, group: rewards + 1)
    masked = value.replace(mask=np.zeros(21, bool))
    text = both(data_views.batch_card(masked))
    assert "0 trained (0 %)" in text and "no trained token" in text and "6 of 6 sequences have advantage 0" in text
    assert "nothing to train on" in both(data_views.batch_card(value[:0]))
    known = value.replace(old_logprobs=value.sampler_logprobs, rewards=None)
    assert "sampler, old" in both(data_views.batch_card(known)) and "reward" not in both(data_views.batch_card(known))


# -- numbers


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(2**30, "1 GiB"), (1.5 * 2**31, "3 GiB"), (2**20 * 12.345, "12.3 MiB"), (0, "0 B"), (12 * 2**10, "12 KiB")],
)
def test_bytes_for_a_reader(nbytes, text):
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (format_age(3.2), "3 s"),
        (format_age(600), "10 min"),
        (format_age(9000), "2.5 h"),
        (format_age(3 * 86400), "3 d"),
        (format_count(329600), "330k"),
        (format_count(7.6e9), "7.6B"),
        (format_count(12), "12"),
        (with_unit("entropy", 1.25), "1.25 nats"),
        (with_unit("truncated", 0.0625), "6.25 %"),
        (with_unit("seconds/total", 2.0), "2 s"),
        (with_unit("loss", 0.5), "0.5"),
    ],
)
def test_numbers_carry_their_unit(made, text):
    assert made == text


def test_a_chip_always_has_the_word():
    states = {"weights": "cuda", "kv_cache": "meta", "optimizer": "lost"}
    assert session_views.chip_texts(states) == ["weights ● resident", "kv cache ◌ released", "optimizer ? lost"]


def test_a_sparkline_rises_with_its_values_and_ends_in_figures():
    assert sparkline([0.0, 0.5, 1.0]) == "0 ▁▅█ 1"
    assert sparkline([2.0, 2.0]) == "2 ▁▁ 2"
    assert blocks([3, 3, 0], floor=0) == "██▁" and blocks([3, 3]) == "▁▁" and blocks([0, 0], floor=0) == "▁▁"
    assert len(sparkline(list(map(float, range(500))))) < 80

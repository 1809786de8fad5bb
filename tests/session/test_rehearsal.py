"""Rehearsal on real engines: what it measures, that it changes nothing, and what it refuses at once."""

import psutil
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

import rlbench as rb
from rlbench import notebook
from rlbench.errors import CheckFailed, DataError, StateError
from rlbench.session.checks.rehearsal import through, worst_batch
from rlbench.tiny import tasks
from rlbench.trainers.passes.micro_batches import plan_micro_batches

pytestmark = pytest.mark.engine
LENGTH = 256


@pytest.fixture(scope="module", autouse=True)
def in_step(session):
    session.sync_weights()


@pytest.fixture(scope="module")
def small(session):
    return session.rehearse(LENGTH, 1024)


@pytest.fixture(scope="module")
def large(session):
    return session.rehearse(LENGTH, 8192)


def checksums(session):
    return session.train.call_all("training_checksums").result()


# -- the batch


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("tokens", "length"), [(1024, 256), (1000, 256), (256, 256), (70, 32), (64, 16)])
def test_every_rank_gets_the_whole_budget_in_one_micro_batch(tokens, length, ranks):
    batch = worst_batch(tokens, length, ranks, 262)
    plan = plan_micro_batches(batch.lengths, ranks, tokens)
    assert [len(steps) for steps in plan] == [1] * ranks
    assert [int(batch.lengths[steps[0]].sum()) for steps in plan] == [tokens] * ranks
    assert batch.lengths.max() == length and (batch.prompts.lengths == 1).all()
    assert batch.responses.values.min() >= 0 and batch.responses.values.max() < 262


# -- what it measures


def test_the_numbers_are_those_of_processes_on_this_host(small, large):
    host = psutil.virtual_memory().total
    for result in (small, large):
        assert result.passed and [e.name for e in result.engines] == ["actor", "reference", "inference"]
        for engine in result.engines:
            assert 100 << 20 < engine.peak < engine.limit <= host
            assert engine.headroom == engine.limit - engine.peak > 0
            assert engine.peak == max(engine.per_worker)
    assert len(large["actor"].per_worker) == 2 and len(large["inference"].per_worker) == 1


def test_the_peak_grows_with_the_budget_and_by_what_the_line_says(small, large):
    grown = large["actor"].peak - small["actor"].peak
    assert grown > 64 << 20, "7168 tokens more, with two layers of activations each"
    assert 0.5 < grown / (7168 * large.bytes_per_token) < 2
    assert large["reference"].peak < large["actor"].peak, "no backward, no gradients"


def test_as_many_requests_as_the_replica_runs_are_in_its_cache_at_once(session, large):
    seats = session.options.inference.max_num_seqs
    assert f"{seats} of {seats} requests of {LENGTH} tokens at once" in large["inference"].what
    assert "max_num_seqs lets" in large["inference"].note


def test_the_cache_is_filled_to_its_end_where_that_is_the_limit(cluster, tiny_path):
    from rlbench.engines import InferenceEngine

    engine = InferenceEngine(str(tiny_path), name="brim", dtype="float32", kv_cache_bytes=8 << 20)
    engine.build(data_parallel_size=1)
    try:
        (filled,) = engine.call_all("fill_kv", 512, 60.0).result()
        assert filled.claimed == filled.asked < 128 and filled.usage > 0.9
        assert filled.asked - 1 <= filled.held <= filled.asked, "vLLM keeps a block for itself, and counts it"
        assert not filled.preempted and filled.ended == "all drew a token"
        (cut,) = engine.call_all("fill_kv", 512, 0.0).result()
        assert cut.ended == "0 s were over" and engine.status()["running"] == 0
        assert engine.generate([[1, 2, 3]], max_tokens=2).samples == 1, "it generates as before"
    finally:
        engine.close()


def test_the_optimizer_counts_before_it_is_there(cluster, tiny_path):
    with rb.Session("tiny", name="fresh", undo=0) as fresh:
        result = fresh.rehearse(64, 512)
        assert "optimizer state, which the first step makes" in result["actor"].note
        (facts,) = fresh.train.call_all("trial_facts", worst_batch(32, 32, 1, 262), {}).result()
        assert facts["optimizer"] == 0 < facts["optimizer_missing"]
        rollouts = fresh.rollout(tasks.prompts(2), n=2, max_tokens=4, progress=False)
        fresh.train_step(rollouts.score([1.0, 0.0, 1.0, 0.0]).batch(advantage=rb.rl.group_normalized()))
        (held,) = fresh.train.memory()
        assert held["optimizer"] == pytest.approx(facts["optimizer_missing"], rel=0.01)
        assert fresh.rehearse(64, 512)["actor"].note == ""


# -- what it leaves


def test_nothing_is_changed(session):
    before, number, step = checksums(session), session.core.link.state("rollouts")["rollouts"], session.step
    session.rehearse(64, 256)
    with pytest.raises(CheckFailed):
        session.rehearse(64, 256, memory_limit=1 << 20)
    assert checksums(session) == before and session.step == step
    assert session.core.link.state("rollouts")["rollouts"] == number
    assert not any(m["gradients"] for m in session.train.memory()) and session.preflight().passed


def test_gradients_that_wait_for_a_step_are_not_dropped(session):
    rollouts = session.rollout(tasks.prompts(4), n=2, max_tokens=6, progress=False)
    batch = rollouts.score(range(8)).batch(advantage=rb.rl.group_normalized())
    session.forward_backward(batch)
    with pytest.raises(StateError, match="gradients wait for a step"):
        session.rehearse(64, 256)
    assert any(m["gradients"] for m in session.train.memory())
    session.zero_grad()


# -- what it refuses


def test_a_budget_that_cannot_fit_is_refused_unrun_with_one_that_does(session, small):
    limit = small["actor"].peak + (96 << 20)
    with pytest.raises(CheckFailed, match="Lower token_budget from 16,384 to") as error:
        session.rehearse(LENGTH, 16384, memory_limit=limit)
    (foretold,) = error.value.result.engines
    assert foretold.headroom < 0 and "foretold" in foretold.what and not error.value.result.passed
    safe = int(str(error.value).rpartition("token_budget=")[2].rstrip(")"))
    assert LENGTH <= safe < 16384
    assert session.rehearse(LENGTH, safe, memory_limit=limit).passed


def test_the_limit_decides_what_to_lower(session, small):
    with pytest.raises(CheckFailed, match="shards"):
        session.rehearse(LENGTH, 1024, memory_limit=100 << 20)
    assert session.rehearse(LENGTH, 1024, memory_limit=64 << 30).safe_budget > small.safe_budget


def test_running_out_of_memory_on_the_ranks_says_what_fitted(session):
    def greedy(inputs):
        if inputs.logprobs.numel() > 200:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return -inputs.logprobs * inputs.advantages, {}

    with pytest.raises(CheckFailed, match="ran out of memory on a micro-batch of 256 tokens; 128 tokens fitted"):
        session.rehearse(64, 512, loss=greedy)
    assert session.rehearse(64, 256).passed


@pytest.mark.parametrize("length", [0, 15, 1 << 20])
def test_a_length_the_replica_cannot_have_is_refused(session, length):
    with pytest.raises(DataError, match="max_model_len"):
        session.rehearse(length, 256)


def test_memory_that_does_not_grow_has_no_largest_budget():
    assert through((100, 5000), (200, 7000)).tokens(9000) == 300
    assert through((100, 5000), (200, 7000)).at(400) == 11000
    assert through((100, 5000), (200, 4000)).tokens(9000) is None
    assert through((100, 5000), (200, 7000)).tokens(1000) == 0


# -- how it looks


def test_it_reads_as_text_and_as_html(large):
    text = repr(large)
    assert text.startswith("rehearsal passed · token_budget 8,192, sequences of 256 · largest safe token_budget about")
    assert "head-room" in text and "high-water mark" in text and "share this host's memory" in text
    shell = InteractiveShell.instance()
    try:
        notebook.install()
        html = shell.display_formatter.format(large)[0]["text/html"]
    finally:
        InteractiveShell.clear_instance()
    assert '<div class="rlb ' in html and ">actor</span>" in html and "head-room" in html

"""The ranks of a session generate with its replicas and bring weights to them: real ranks, a real vLLM replica."""

import threading

import numpy as np
import pytest

import rlbench as rb
from rlbench.data.prompts.sampling import request_seeds
from rlbench.dispatch import by_value
from rlbench.errors import DataError, RemoteError, StateError, Stopped, WeightSyncError
from rlbench.strategies import OptionError
from rlbench.strategies.generation.engine import EngineStatus
from rlbench.trainers.models.policy_spec import PolicySpec
from tests.clock import LIMIT_S, until

pytestmark = pytest.mark.engine
PROMPTS = ["sort 52143", "sort 9071", "sort 3321", "sort 86420"]
GREEDY = {"temperature": 0.0, "max_tokens": 6}
FREE = {"temperature": 1.0, "max_tokens": 8, "n": 3}


# -- what runs on the ranks; `strategy`, `module` and `rank` are names of theirs


def setup(**options):
    strategy.setup_inference_engine(options or None)


def draw(shares, sampling, call=None, **given):
    """This rank's completions of its part of the prompts, `shares[rank]` of them, as plain values."""
    if call is not None:
        strategy.generate_calls = call
    begin = sum(shares[:rank])
    mine = PROMPTS[begin : begin + shares[rank]]
    outputs = strategy.gather_and_generate(sampling, all_prompts=mine, sleep_engine=False, **given)
    return [
        (o.prompt_token_ids, o.output_token_ids, o.logprobs, o.finish_reason, o.text, o.weight_version) for o in outputs
    ]


def scored(shares, sampling, name="module"):
    """Largest difference between the log-probs of this rank's completions and those of a model on the rank."""
    import torch

    model = globals()[name]
    outputs = strategy.gather_and_generate(
        sampling,
        all_prompts=PROMPTS[sum(shares[:rank]) :][: shares[rank]],
        sleep_engine=False,
    )
    gaps = []
    with torch.no_grad():
        for o in outputs:
            ids = torch.tensor([o.prompt_token_ids + o.output_token_ids])
            drawn = ids[0, len(o.prompt_token_ids) :]
            logprobs = model(ids).logits[0, -len(drawn) - 1 : -1].float().log_softmax(-1)
            gaps.append(float(np.abs(logprobs.gather(-1, drawn[:, None])[:, 0].numpy() - o.logprobs).max()))
    return max(gaps)


def perturb(scale, seed=5):
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.to_local().add_(scale * torch.randn(p.to_local().shape, generator=generator))


def foreign(path):
    """A model of transformers without our hooks, with weights of its own, prepared by the strategy."""
    import torch
    from transformers import AutoModelForCausalLM

    global other  # a name of the rank's namespace
    torch.manual_seed(3)
    other = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.05 * torch.randn_like(p))
    other = strategy.prepare_model(other, is_training=True)
    return strategy.update_engine_weights(other)


# -- fixtures


@pytest.fixture(scope="module", autouse=True)
def set_up(session):
    session.train.run(setup)
    yield
    session.train.run_cell("strategy.wakeup_inference_engine()\nglobals().pop('other', None)")


@pytest.fixture
def train(session):
    return session.train


def ranks(train, fn, *args, **kwargs):
    return train.run(fn, *args, **kwargs)


def tokens(parts):
    return [row[1] for part in parts for row in part]


def logprobs(parts):
    """Those of each row's first token: the rows may differ from there on."""
    return [float(row[2][0]) for part in parts for row in part]


# -- generating


def test_what_is_sampled_depends_on_no_grouping_and_is_what_its_seeds_say(session, train):
    reference = session.inference.submit_generate(
        PROMPTS,
        {k: v for k, v in FREE.items() if k != "n"},
        n=3,
        progress=False,
        seeds=request_seeds(7, 11, 4, 3),
    ).result()
    wanted = [row.tolist() for row in reference.responses]
    for shares in ([4, 0], [0, 4], [1, 3], [2, 2]):
        parts = ranks(train, draw, shares, FREE, call=10)
        assert [len(part) for part in parts] == [3 * share for share in shares]
        assert tokens(parts) == wanted, shares
        assert [row[4] for part in parts for row in part] == list(reference.texts)
        got = np.concatenate([row[2] for part in parts for row in part])
        assert np.abs(got - reference.logprobs).max() < 1e-4 and got.dtype == np.float32
    # other tests may have trained the policy until it nearly always says the same
    hot = {"temperature": 2.0, "max_tokens": 32, "n": 8}
    drawn = tokens(ranks(train, draw, [2, 2], hot, call=10))
    assert tokens(ranks(train, draw, [2, 2], hot)) != drawn  # call 11: other seeds
    assert train.run_cell("strategy.generate_calls") == ["12", "12"]


def test_one_rank_of_another_engine_draws_the_same(session, train, tiny_path):
    wanted = tokens(ranks(train, draw, [1, 3], FREE, call=4))
    solo = rb.TrainEngine(PolicySpec(str(tiny_path)), name="solo", link=session.core.link, seed=7)
    solo.build(tensor_parallel_size=1, data_parallel_size=1)
    try:
        solo.run(setup)
        assert tokens(solo.run(draw, [4], FREE, call=4)) == wanted
    finally:
        solo.close()


def test_prompts_are_token_ids_too_and_outputs_say_what_ended_them(train):
    (texts, _) = ranks(train, draw, [4, 0], GREEDY)

    def by_ids(rows):
        outputs = strategy.gather_and_generate(GREEDY, rows if rank else [], sleep_engine=False)
        return [(o.prompt_token_ids, o.output_token_ids, o.finish_reason, o.weight_version) for o in outputs]

    rows = [row[0] for row in texts]
    assert ranks(train, by_ids, rows) == [[], [(p, t, f, v) for p, t, _, f, _, v in texts]]
    assert {f for _, _, _, f, _, _ in texts} == {"length"}
    stop = texts[0][1][-1]
    ended = ranks(train, draw, [1, 0], GREEDY | {"stop_token_ids": [stop]})[0][0]
    assert ended[3] == "stop" and ended[1][-1] == stop and len(ended[2]) == len(ended[1])


def test_no_prompts_anywhere_is_no_call(session, train):
    before = session.core.link.state("rollouts")
    assert ranks(train, draw, [0, 0], GREEDY) == [[], []]
    assert session.core.link.state("rollouts") == before


def test_it_shows_at_the_monitor_as_a_rollout(session, train):
    before = session.core.link.state("rollouts")["rollouts"]
    ranks(train, draw, [3, 1], GREEDY)
    state = session.core.link.state("rollouts", "lengths")
    assert state["rollouts"] == before + 1
    assert state["lengths"][-1]["rollout"] == before + 1
    assert session.inference.last_rollout().number == before + 1


def test_what_cannot_be_served_fails_on_all_ranks_and_says_whose_it_is(session, train):
    def long(length):
        strategy.gather_and_generate(GREEDY, [[1] * length] if rank else [[1]], sleep_engine=False)

    limit = session.inference.info["max_model_len"]
    with pytest.raises(DataError, match=f"prompt 1 has {limit} tokens"):
        ranks(train, long, limit)

    def wordy(text):
        strategy.gather_and_generate(GREEDY, all_prompts=["sort 1", text][rank:][:1], sleep_engine=False)

    with pytest.raises(DataError, match=r"prompt 1 has \d+ tokens.*numbered over all ranks"):
        ranks(train, wordy, "9" * (4 * limit))
    with pytest.raises(DataError, match=r"unknown sampling option 'temprature'; nearest: temperature"):
        ranks(train, draw, [1, 1], {"temprature": 1.0})

    def unlike():
        strategy.gather_and_generate({"max_tokens": 2 + rank}, [[1]], sleep_engine=False)

    with pytest.raises(DataError, match="sampling_params differ between ranks"):
        ranks(train, unlike)
    assert len(tokens(ranks(train, draw, [1, 1], GREEDY))) == 2


# -- options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine_mem_util": 0.9}, "gpu_memory_utilization=0.9 cannot be honoured"),
        ({"engine_tp_size": 2}, "engine_tp_size=2 cannot"),
    ],
)
def test_options_that_the_sessions_engine_does_not_fit_are_refused(train, options, said):
    with pytest.raises((OptionError, RemoteError), match=said):
        ranks(train, setup, **options)


def test_a_script_that_wants_longer_sequences_than_the_engine_holds_is_refused(train):
    def longer():
        from argparse import Namespace

        strategy.setup_inference_engine(Namespace(prompt_max_len=1 << 20, generate_max_len=8))

    with pytest.raises(OptionError, match=r"prompt_max_len \+ generate_max_len = 1048584 tokens"):
        ranks(train, longer)


# -- sleep


def test_sleep_frees_the_cache_and_waking_restores_the_same_tokens(session, train):
    before = ranks(train, draw, [2, 2], FREE, call=20)
    held = session.inference.memory()[0]["kv_cache"]
    train.run_cell("strategy.maybe_sleep_inference_engine()\nstrategy.maybe_sleep_inference_engine()")
    assert session.inference.status()["weights"] == "cpu" and session.inference.memory()[0]["kv_cache"] == 0 < held
    assert train.run(lambda: strategy.inference_engine_status) == [EngineStatus.SLEEPED] * 2
    with pytest.raises(StateError, match=r"cuda\('"):
        session.rollout(PROMPTS, max_tokens=2)
    assert tokens(ranks(train, draw, [2, 2], FREE, call=20)) == tokens(before)  # woken by the call itself
    assert train.run(lambda: strategy.inference_engine_status) == [EngineStatus.WAKEUP] * 2
    assert session.rollout(PROMPTS, max_tokens=2).samples == 4


def test_a_strategy_of_the_users_own_that_never_sleeps(session, train):
    def own():
        from rlbench.strategies import FSDPV2Strategy

        mine = FSDPV2Strategy(bf16=False, args={"enable_engine_sleep": False})
        mine.setup_inference_engine()
        mine.gather_and_generate(GREEDY, all_prompts=["sort 1"])
        mine.maybe_sleep_inference_engine()
        return mine.inference_engine_status

    assert ranks(train, own) == [EngineStatus.WAKEUP] * 2
    assert ranks(train, lambda: strategy.gather_and_generate(GREEDY, [[1]]) and None) == [None] * 2
    assert session.inference.status()["kv_cache"] == "meta"  # the other one does
    train.run_cell("strategy.wakeup_inference_engine()")


def test_discarded_weights_are_not_replaced_by_the_checkpoint_in_silence(session, train):
    version = train.run(lambda: strategy.update_engine_weights(module))[0]["version"]
    session.inference.meta()
    with pytest.raises(StateError, match=r"discarded: strategy\.update_engine_weights\(actor\)"):
        ranks(train, draw, [1, 1], GREEDY)
    done = train.run(lambda: strategy.update_engine_weights(module))
    assert done[0]["gap"] is None and done[0]["version"] == version + 1
    assert {row[5] for part in ranks(train, draw, [1, 1], GREEDY) for row in part} == {version + 1}


# -- weights


def test_new_weights_change_what_is_drawn_to_what_the_trainer_computes(session, train):
    ranks(train, lambda: strategy.update_engine_weights(module))
    before = ranks(train, draw, [2, 2], GREEDY)
    train.run(perturb, 0.05)
    assert max(train.run(scored, [2, 2], GREEDY)) > 1e-2  # else the next lines prove nothing
    highest = session.core.link.state("highest")["highest"]
    done = ranks(train, lambda: strategy.update_engine_weights(module))
    assert done[0] == done[1] and done[0]["gap"] <= 1e-4 and done[0]["transport"] == "shm"
    assert done[0]["version"] == highest + 1 == session.version
    after = ranks(train, draw, [2, 2], GREEDY)
    assert {row[5] for part in after for row in part} == {highest + 1}
    assert logprobs(after) != pytest.approx(logprobs(before), abs=1e-2)
    assert max(train.run(scored, [2, 2], GREEDY)) <= 1e-4
    assert max(train.run(scored, [2, 2], {"temperature": 1.0, "max_tokens": 8})) <= 1e-4
    assert session.sync_weights()["version"] == highest + 1 == session.rollout(PROMPTS, max_tokens=2).weight_version


def test_frozen_layers_travel_once_unless_the_kernel_sent_weights_in_between(session, train):
    def freeze(frozen):
        for name, p in module.named_parameters():
            p.requires_grad_(not (frozen and name.startswith("model.layers.0.")))

    def update():
        return strategy.update_engine_weights(module)

    ranks(train, freeze, True)
    ranks(train, update)
    train.run_cell("module.model.norm.weight.data.mul_(1.2)")
    done = ranks(train, update)
    assert done[0]["unchanged"] > 5 and done[0]["gap"] <= 1e-4 and done[0] == done[1]
    assert max(train.run(scored, [2, 2], GREEDY)) <= 1e-4
    record = session.core.link.state("engines")["engines"]["actor"]
    assert record["rank_staged_version"] == done[0]["version"]
    staged = [entry["name"] for bucket in record["rank_staged"]["buckets"] for entry in bucket["entries"]]
    assert len(staged) == done[0]["tensors"] + done[0]["unchanged"]
    assert session.sync_weights().unchanged == ranks(train, update)[0]["unchanged"] == 0
    ranks(train, freeze, False)


def test_weights_that_come_while_the_engine_sleeps_are_proved_when_it_wakes(session, train):
    train.run_cell("strategy.maybe_sleep_inference_engine()")
    train.run(perturb, 0.02, seed=6)
    done = ranks(train, lambda: strategy.update_engine_weights(module))
    assert done[0]["gap"] is None and session.inference.status()["pending"]
    assert session.inference.status()["kv_cache"] == "meta"  # its memory is the ranks' until it generates
    assert max(train.run(scored, [2, 2], GREEDY)) <= 1e-4
    assert session.inference.weight_versions() == [done[0]["version"]] == [session.version]


def test_a_plain_model_of_transformers_gets_a_version_that_no_weights_had(session, train, tiny_path):
    ranks(train, lambda: strategy.update_engine_weights(module))
    mine, highest = session.version, session.core.link.state("highest")["highest"]
    done = train.run(foreign, str(tiny_path))
    assert done[0]["version"] == highest + 1 and done[0]["gap"] <= 1e-4
    assert session.version == mine and session.core.link.state("highest")["highest"] == highest + 1
    assert max(train.run(scored, [2, 2], GREEDY, "other")) <= 1e-4
    assert max(train.run(scored, [2, 2], GREEDY)) > 1e-2
    session.sync_weights()
    assert session.inference.weight_versions() == [mine] and max(train.run(scored, [2, 2], GREEDY)) <= 1e-4
    assert ranks(train, lambda: strategy.update_engine_weights(module))[0]["version"] == highest + 2


def test_a_hook_that_misnames_is_refused_and_the_engine_serves_on(session, train, tiny_path):
    train.run(foreign, str(tiny_path))
    before = ranks(train, draw, [2, 2], GREEDY)

    def misnamed():
        other.postprocess_output_named_parameters = lambda name, p, _: ("wrong." + name, p.full_tensor())
        strategy.update_engine_weights(other)

    with pytest.raises(WeightSyncError, match=r"does not know wrong\."):
        ranks(train, misnamed)
    assert tokens(ranks(train, draw, [2, 2], GREEDY)) == tokens(before)


def test_wrong_weights_fail_the_proof_and_the_engine_refuses_until_an_update_succeeds(session, train, tiny_path):
    train.run(foreign, str(tiny_path))

    def scaled():
        other.postprocess_output_named_parameters = lambda name, p, _: (name, 1.3 * p.full_tensor())
        strategy.update_engine_weights(other)

    with pytest.raises(WeightSyncError, match="log-probs differ from the trainer's by up to"):
        ranks(train, scaled)
    with pytest.raises(StateError, match="the sync did not end"):
        ranks(train, draw, [1, 1], GREEDY)
    done = ranks(train, lambda: strategy.update_engine_weights(module))
    assert done[0]["gap"] <= 1e-4 and len(tokens(ranks(train, draw, [1, 1], GREEDY))) == 2


def test_both_sides_must_compute_in_one_dtype_and_transports_that_exist(train, tiny_path):
    def halved(path):
        from transformers import AutoModelForCausalLM

        from rlbench.strategies import FSDPV2Strategy

        mine = FSDPV2Strategy()  # bf16
        mine.setup_inference_engine()
        mine.update_engine_weights(mine.prepare_model(AutoModelForCausalLM.from_pretrained(path)))

    with pytest.raises(StateError, match="trainer computes in bfloat16 and the replica in float32"):
        ranks(train, halved, str(tiny_path))
    with pytest.raises(WeightSyncError, match="there are shm, ipc, broadcast"):
        ranks(train, lambda: strategy.update_engine_weights(module, transport="nvlink"))


def test_weights_come_by_broadcast_too_and_a_hook_that_fails_midway_ends_it_for_all(session, train, tiny_path):
    train.run(foreign, str(tiny_path))

    def sent():
        vars(other).pop("postprocess_output_named_parameters", None)
        return strategy.update_engine_weights(other, transport="broadcast")

    done = ranks(train, sent)
    assert done[0] == done[1] and done[0]["transport"] == "broadcast" and done[0]["gap"] <= 1e-4
    assert max(train.run(scored, [2, 2], GREEDY, "other")) <= 1e-4
    assert ranks(train, sent)[0]["version"] == done[0]["version"] + 1  # over the same group

    def fails_when_it_is_sent():
        import time

        passes = dict.fromkeys(("announced", "sent"), 0)

        def hook(name, p, _):
            whole = p.full_tensor()
            passes["sent" if passes["announced"] == len(list(other.parameters())) else "announced"] += 1
            if rank == 1 and passes["sent"] == 3:
                while strategy.inference_engine.status()["weights"] != "torn":  # the replica receives: midway
                    time.sleep(0.05)
                raise ValueError("no third weight")
            return name, whole

        other.postprocess_output_named_parameters = hook
        strategy.update_engine_weights(other, transport="broadcast")

    with pytest.raises((RemoteError, WeightSyncError), match="no third weight"):
        ranks(train, fails_when_it_is_sent)
    with pytest.raises(StateError, match="a weight sync failed half-way"):
        ranks(train, draw, [1, 1], GREEDY)
    assert ranks(train, sent)[0]["gap"] <= 1e-4 and len(tokens(ranks(train, draw, [1, 1], GREEDY))) == 2


# -- stops


def stopped_midway(session, run, stop):
    """Hold all generation, start one on the ranks, stop it, and return what its caller saw."""
    raised = []

    def call():
        try:
            run()
        except BaseException as error:
            raised.append(error)

    session.core.link.pause(True)
    try:
        thread = threading.Thread(target=call)
        thread.start()
        until(lambda: any("rollout" in what for what in session.core.link.state()["running"].values()) or raised)
        assert not raised
        stop()
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    finally:
        session.core.link.pause(False)
    (error,) = raised
    return error


@pytest.mark.parametrize("by", ["the monitor, a function", "the monitor, a cell", "the call itself"])
def test_a_stop_midway_ends_it_on_all_ranks_and_leaves_all_usable(session, train, by):
    train.run_cell("strategy.generate_calls = 30")
    wanted = tokens(ranks(train, draw, [2, 2], FREE, call=30))
    train.run_cell("strategy.generate_calls = 30")
    if by.endswith("cell"):
        cell = "strategy.gather_and_generate({'max_tokens': 8}, all_prompts=['sort 1'])\n'done'"
        error = stopped_midway(session, lambda: train.run_cell(cell), session.stop)
    else:
        calls = [((by_value.dumps(draw), ([2, 2], FREE), {}), {})] * 2
        pending = []

        def run():  # once generation is held: else it may be over before that
            pending.append(train.call("run", calls))
            pending[0].result()

        stop = (lambda: pending[0].stop()) if by.endswith("itself") else session.stop
        error = stopped_midway(session, run, stop)
    assert isinstance(error, Stopped), error
    assert train.run_cell("strategy.generate_calls") == ["30", "30"]
    assert tokens(ranks(train, draw, [2, 2], FREE)) == wanted  # nothing of the stopped call counted
    assert session.rollout(PROMPTS, max_tokens=2).samples == 4


# -- an engine of their own


def test_ranks_without_an_engine_build_one_on_their_devices(cluster, tiny_path):
    def build():
        from argparse import Namespace

        script = Namespace(prompt_max_len=16, generate_max_len=24, engine_mem_util=0.01, bf16=False)
        engine = strategy.setup_inference_engine(script, actor=module)
        outputs = strategy.gather_and_generate(GREEDY, all_prompts=["sort 52143"] * rank)
        return engine.info, [o.output_token_ids for o in outputs], strategy.inference_engine_status

    alone = rb.TrainEngine(PolicySpec(str(tiny_path)), name="alone", seed=7)
    alone.build(tensor_parallel_size=2, data_parallel_size=1)
    try:
        (info, none, status), (_, (drawn,), _) = alone.run(build)
        assert none == [] and len(drawn) == 6 and status is EngineStatus.SLEEPED
        assert (info["max_model_len"], info["dtype"]) == (40, "float32") and info["kv_cache_bytes"] < 1 << 30
        record = alone.link.state("engines")["engines"]["inference"]
        rb.InferenceEngine.attach(alone.link, "inference", record, 7).close()
        with pytest.raises(StateError, match="setup_inference_engine"):
            alone.run(draw, [1, 3], GREEDY)
        again = rb.InferenceEngine(str(tiny_path), link=alone.link, dtype="float32", kv_cache_bytes=64 << 20)
        again.build(colocate_with=alone)  # as session.heal() does: the strategy finds the new workers
        assert [len(part) for part in alone.run(draw, [1, 3], GREEDY)] == [1, 3]
    finally:
        for name, record in alone.link.state("engines")["engines"].items():
            if name == "inference" and "info" in record:
                rb.InferenceEngine.attach(alone.link, name, record, 7).close()
        alone.close()

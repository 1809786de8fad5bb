"""A session on the tiny model, two training ranks, a reference and one vLLM replica: what each verb promises."""

import asyncio
import os
import re
import time
import warnings

import numpy as np
import pytest
import torch

import rlbench as rb
from rlbench.engines.base import Engine
from rlbench.errors import BuildError, DataError, EngineError, LossError, SessionError, StateError
from rlbench.notebook.cards.record_views import metrics_card
from rlbench.notebook.cards.session_views import engine_card
from rlbench.tiny import tasks
from tests.clock import LIMIT_S, interrupt_once
from tests.session.looking import generates

pytestmark = pytest.mark.engine
WITH_OPTIONS = ("rollout", "evaluate", "optimizer")


@pytest.fixture(scope="module")
def scored(session):
    return session.rollout(tasks.prompts(12, seed=5), n=4, max_tokens=12).score(tasks.reward)


@pytest.fixture
def batch(scored):
    return scored.batch(advantage=rb.rl.group_normalized())


def checksum(session):
    return session.train.call_all("state_checksum").result()[0]


def my_loss(inputs):
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    return -ratio * inputs.advantages, {"ratio": ratio.detach()}


def test_a_train_step_is_one_optimizer_step_and_says_what_happened(session, batch):
    step, version, before = session.step, session.version, checksum(session)
    metrics = session.train_step(batch)
    assert (session.step, session.version) == (step + 1, version + 1) and checksum(session) != before
    for name in ("loss", "grad_norm", "kl", "entropy", "clip_fraction", "reward", "length", "tokens_per_s"):
        assert np.isfinite(metrics[name]), name
    assert metrics.grad_norm > 0 and metrics.entropy > 0 and set(metrics.seconds) >= {"forward_backward", "total"}
    assert metrics.tokens["logprobs"].shape == batch.sampler_logprobs.shape


def test_sampler_and_trainer_agree_on_the_sampled_tokens(session, tiny_path):
    session.sync_weights()
    rollouts = session.rollout(tasks.prompts(6, seed=9), n=2, max_tokens=12).score(tasks.reward)
    batch = rollouts.batch(advantage=rb.rl.group_normalized())
    assert np.abs(session.logprobs(batch) - batch.sampler_logprobs).max() <= 1e-4


def test_forward_backward_then_optim_step_equals_train_step(session, batch):
    first = session.forward_backward(batch, loss=my_loss)
    session.zero_grad()
    with pytest.raises(EngineError, match="forward_backward"):
        session.optim_step()
    again = session.forward_backward(batch, loss=my_loss)
    assert first.loss == pytest.approx(again.loss, abs=1e-6)
    assert session.optim_step().grad_norm > 0


def test_prompts_that_samples_share_are_computed_once_where_asked_for(session, batch):
    plain = session.forward_backward(batch, loss=my_loss)
    session.zero_grad()
    shared = session.forward_backward(batch, loss=my_loss, share_prompts=True)
    session.zero_grad()
    prompts = {tuple(row): len(row) for row in batch.prompts}
    once = sum(prompts.values()) + batch.tokens
    assert plain.shared == 0 and 0 < shared.shared <= 1 - once / batch.lengths.sum() + 1e-9
    assert shared.loss == pytest.approx(plain.loss, abs=1e-5)
    np.testing.assert_allclose(shared.tokens["logprobs"], plain.tokens["logprobs"], atol=1e-4)
    assert session.loss_lab(batch, ["grpo"], share_prompts=True)["grpo"].step().shared == shared.shared


def test_a_second_step_on_a_batch_has_ratios_against_the_first(session, batch):
    fresh = batch.replace(sampler_logprobs=batch.sampler_logprobs - 1e-3)  # other tokens' identity: never seen
    first = session.train_step(fresh, loss=my_loss, lr=1e-3)
    second = session.train_step(fresh, loss=my_loss, lr=1e-5)
    assert first.ratio == pytest.approx(1.0, abs=1e-5)
    assert abs(second.kl) > 1e-7 and abs(second.ratio - 1.0) > 1e-6


def test_an_edited_loss_has_another_hash_in_the_record(session, batch):
    def loss(inputs):
        return -inputs.logprobs * inputs.advantages, {}

    session.train_step(batch, loss=loss)

    def loss(inputs):
        return -2 * inputs.logprobs * inputs.advantages, {"factor": 2.0}

    metrics = session.train_step(batch, loss=loss)
    a, b = session.history[-2:].records
    assert a["loss_name"] == b["loss_name"] == "loss" and a["loss_hash"] != b["loss_hash"]
    assert metrics.factor == 2.0


def test_several_losses_in_one_step_are_each_in_the_record_and_equal_their_sum_by_hand(session, batch):
    def drift(inputs):
        return (inputs.logprobs - inputs.sampler_logprobs) ** 2, {"drift": 1.0}

    def summed(inputs):
        policy, metrics = rb.rl.grpo(aggregation="token-mean")(inputs)
        return policy + 0.1 * rb.rl.sft()(inputs)[0] + 0.5 * drift(inputs)[0], metrics

    parts = {"grpo": rb.rl.grpo(aggregation="token-mean"), "sft": ("sft", 0.1), "own": (drift, 0.5)}
    session.train_step(batch, loss=summed)
    wanted = session.train.call_all("training_checksums").result()
    session.undo()
    metrics = session.train_step(batch, loss=parts)
    assert session.train.call_all("training_checksums").result() == wanted
    assert metrics["own/drift"] == 1.0 and {"grpo/loss", "sft/loss", "own/loss", "clip_fraction"} <= metrics.keys()
    assert {"loss[grpo]", "loss[own]"} <= session.history.verbs[-1]["hashes"].keys()
    session.undo()


def test_a_loss_prints_into_the_calling_cell_with_its_rank(session, batch, capsys):
    def talks(inputs):
        print("loss sees", inputs.logprobs.shape[0])
        return -inputs.logprobs * inputs.advantages, {}

    session.forward_backward(batch, loss=talks)
    session.zero_grad()
    out = capsys.readouterr().out
    assert "[rank 0] loss sees" in out and "[rank 1] loss sees" in out


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (lambda i: (-i.advantages * i.logprobs).sum(-1), "\\(per_token, metrics\\)"),
        (lambda i: ((-i.advantages * i.logprobs).sum(-1), {}), "one number per token"),
        (lambda i: (i.logprobs * float("nan"), {}), "not finite"),
        (lambda i: (-i.advantages * i.old_logprobs, {}), "no gradient"),
        (lambda i: i.no_such_field, "no_such_field"),
        (lambda i: (i.logprobs.sqrt() * 0 + i.logprobs, {}), "NaN|finite"),
        ("grop", "grpo"),
        (3, "name"),
    ],
    ids=["no-tuple", "shape", "nan", "no-gradient", "raises", "nan-gradient", "typo", "no-function"],
)
def test_a_bad_loss_is_refused_before_it_is_shipped(session, batch, loss, match):
    before = checksum(session)
    with pytest.raises(LossError, match=match):
        session.train_step(batch, loss=loss)
    assert checksum(session) == before


def test_a_loss_that_fails_on_the_ranks_only_leaves_the_weights_alone(session, batch):
    def fails_later(inputs):
        if inputs.logprobs.shape[0] > 2:  # the trial in the kernel has two sequences
            raise ValueError("too many sequences for me")
        return -inputs.logprobs * inputs.advantages, {}

    before = checksum(session)
    with pytest.raises((LossError, EngineError), match="too many sequences for me"):
        session.train_step(batch, loss=fails_later)
    assert checksum(session) == before
    assert session.train_step(batch, loss=my_loss).grad_norm > 0


def test_kl_to_the_reference_is_zero_at_the_start_and_grows(session, batch, tiny_path):
    metrics = session.train_step(batch, loss=rb.rl.grpo(kl_coef=0.1))
    assert metrics.ref_kl >= 0 and session.reference is not None
    assert checksum(session) != session.reference.call_all("state_checksum").result()[0]


def test_the_learning_rate_changes_live(session, batch):
    session.lr = 0.0
    before = checksum(session)
    session.train_step(batch, loss=my_loss)
    assert checksum(session) == before and session.lr == 0.0
    session.lr = 1e-5
    session.train_step(batch, loss=my_loss)
    assert checksum(session) != before


def test_a_learning_rate_given_to_a_step_is_of_that_step_alone(session, batch):
    usual = session.lr
    metrics = session.train_step(batch, loss=my_loss, lr=usual / 10)
    assert metrics.lr == pytest.approx(usual / 10) and "usually" in repr(metrics)
    assert session.lr == usual and "usually" not in repr(session.train_step(batch, loss=my_loss))


def test_sequences_of_older_weights_are_told_where_the_loss_does_not_see_them(session, batch):
    stale = batch.replace(sampler_logprobs=batch.sampler_logprobs - 2e-3)  # other tokens' identity: never seen
    assert stale.weight_version.max() < session.version
    with pytest.warns(UserWarning, match="older weights"):
        session.forward_backward(stale, loss="grpo")
    unseen = batch.replace(sampler_logprobs=batch.sampler_logprobs - 3e-3)
    fresh = unseen.replace(weight_version=np.full(len(batch), session.version))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.zero_grad()
        session.forward_backward(unseen, loss=rb.rl.grpo(anchor="sampler"))
        session.zero_grad()
        session.forward_backward(fresh, loss="grpo")
    session.zero_grad()


def test_several_completions_of_a_prompt_are_evaluated_by_sampling(session):
    prompts = tasks.prompts(4, seed=5)
    with pytest.raises(DataError, match="greedy"):
        session.evaluate(prompts, tasks.reward, n=4, temperature=0.0, max_tokens=8)
    several = session.evaluate(prompts, tasks.reward, n=8, max_tokens=8, progress=False)
    assert several.rollouts.samples == 32 and len(set(several.rollouts.texts)) > 4
    assert session.evaluate(prompts, tasks.reward, max_tokens=8, progress=False).rollouts.sampling["temperature"] == 0


def test_verbs_that_do_not_block_return_a_pending(session, batch):
    pending = session.train_step(batch, block=False)
    assert pending.result(timeout=LIMIT_S).grad_norm >= 0 and pending.done
    rollouts = session.rollout(["sort 12"], block=False, max_tokens=3)
    assert rollouts.result(timeout=LIMIT_S).samples == 1 and session.last is rollouts.result()


def test_every_verb_can_be_awaited(session, batch, tmp_path):
    """But `park`, `resize` and `rehearse`, which end what others use or are long: one decorator makes them all."""
    calls = {
        "rollout": (["sort 12"], {"max_tokens": 3}),
        "evaluate": (["sort 12"], tasks.reward, {"max_tokens": 3}),
        "snapshot": ("awaited",),
        "train_step": (batch,),
        "forward_backward": (batch,),
        "gradients": (),
        "optim_step": (),
        "sync_weights": (),
        "update_reference": (),
        "logprobs": (batch,),
        "loss_lab": (batch, {"grpo": "grpo", "mine": my_loss}),
        "preflight": (["sort 12"], 2),
        "optimizer": ("sgd", {"lr": 0.1}),
        "schedule": (lambda step: 0.5,),
        "freeze": ("model.layers.0",),
        "unfreeze": (),
        "undo": (),
        "restore": ("awaited",),
        "branch": ("aside",),
        "drop": ("awaited",),
        "heal": (),
        "save": (str(tmp_path / "saved"),),
        "export": (str(tmp_path / "exported"),),
    }
    left = {name for name in dir(rb.Session) if "block" in getattr(getattr(rb.Session, name), "__annotations__", ())}
    assert left == {*calls, "park", "rehearse", "resize"}

    async def all_of_them():
        for name, args in calls.items():
            options = args[-1] if args and isinstance(args[-1], dict) and name in WITH_OPTIONS else {}
            given = args[: len(args) - bool(options)]
            assert await getattr(session, name)(*given, **options, block=False) is not None, name
        await session.branch("main", block=False)

    asyncio.run(all_of_them())
    session.drop(session.branches["aside"])


def test_verbs_that_exclude_each_other_say_so_and_one_that_was_stopped_is_waited_for(session, batch):
    step = session.step
    running = session.train_step(batch, block=False)
    for verb in (session.undo, session.sync_weights, lambda: session.train_step(batch)):
        with pytest.raises(StateError, match="cannot begin while train_step runs"):
            verb()
    beside = session.rollout(["sort 12"], max_tokens=3)
    assert running.result().step == session.step == step + 1 and beside.samples == 1
    running = session.train_step(batch, block=False)
    session.stop()
    session.undo()
    assert running.done and session.step == step


def test_interrupting_a_rollout_keeps_what_was_generated(session):
    interrupt_once(lambda: generates(session))
    with pytest.raises(rb.Stopped) as stopped:
        session.rollout(tasks.prompts(64), n=32, max_tokens=1500, ignore_eos=True)
    partial = stopped.value.partial
    assert partial.aborted.any() and int(partial.lengths.sum()) > 0
    assert session.last is partial
    assert session.rollout(["sort 12"], max_tokens=3).samples == 1


def test_on_stop_return_gives_the_partial_instead_of_raising(session):
    interrupt_once(lambda: generates(session))
    partial = session.rollout(tasks.prompts(64), n=32, max_tokens=1500, ignore_eos=True, on_stop="return")
    assert partial.aborted.any()
    with pytest.raises(DataError, match="no finished"):
        partial.score(lambda r: 1.0).batch(advantage=rb.rl.group_normalized())


def test_interrupting_a_train_step_leaves_weights_and_optimizer_untouched(session, scored, tmp_path):
    batch = scored.batch(advantage=rb.rl.group_normalized())
    here, begun = os.getpid(), tmp_path / "begun"

    def slow(inputs):
        if os.getpid() != here:  # not in the trial in this process
            begun.touch()
            time.sleep(0.2)  # a micro-batch; all of them together outlast the interrupt
        return -inputs.logprobs * inputs.advantages, {}

    before, step = checksum(session), session.step
    interrupt_once(begun.exists)
    with pytest.raises(rb.Stopped):
        session.forward_backward(batch, loss=slow, token_budget=8)
    assert checksum(session) == before and session.step == step
    assert session.train_step(batch, loss=my_loss).grad_norm > 0


def test_options_of_a_chat_template_are_refused_where_it_does_not_read_them(session):
    with pytest.raises(DataError, match="does not read tools"):
        session.rollout(tasks.prompts(1), tools=[{"name": "look"}])
    with pytest.raises(DataError, match="does not read enable_thinking"):
        session.evaluate(tasks.prompts(1), lambda r: 1.0, template={"enable_thinking": False})
    with pytest.raises(DataError, match="no prompt is a chat"):
        session.rollout(["sort 12"], template={"enable_thinking": False})
    assert session.rollout(["sort 12"], max_tokens=3).samples == 1


def test_what_is_said_of_prompts_and_tools_is_said_by_rollout_too(session):
    asked = [{"role": "user", "content": "sort 12"}]
    begun = [*asked, {"role": "assistant", "content": "1"}]
    session.inference._told.discard("open")
    with pytest.warns(UserWarning, match="1 of 2 chats end with an assistant's message"):
        rollouts = session.rollout([begun, asked], max_tokens=2)
    plain = rollouts.prompt_ids[1].tolist()
    assert rollouts.prompt_ids[0].tolist() == [*plain, ord("1")]
    with pytest.raises(DataError, match=r"prompt 1: .*no Unicode"):
        session.rollout(["sort 12", "\ud83d"], max_tokens=2)
    session.inference._told.discard("tools")
    with pytest.warns(UserWarning, match="names no tools"):
        session.rollout([asked], env=rb.envs.tools([len]), max_turns=1, max_tokens=2)


def test_evaluation_does_not_change_later_samples(session):
    session.core.link.set(rollouts=1000)
    first = session.rollout(["sort 4321"], n=4, max_tokens=8)
    session.core.link.set(rollouts=1000)
    session.evaluate(tasks.prompts(4, "eval"), tasks.reward, max_tokens=8)
    second = session.rollout(["sort 4321"], n=4, max_tokens=8)
    assert [r.token_ids for r in first.flat] == [r.token_ids for r in second.flat]


def test_training_while_offloaded_is_refused_with_the_mend(session, batch):
    session.offload("train", "optimizer")
    measured = session.offload("inference", "kv_cache")
    assert measured["kv_cache"] != "cuda"
    with pytest.raises(StateError, match="kv_cache"):
        session.rollout(["sort 1"])
    session.onload("inference")
    session.onload("train")
    session.train_step(batch)
    with pytest.raises(StateError, match="inference"):
        session.offload("inferense")


def test_the_card_says_how_far_the_replica_is_behind(session, batch):
    session.sync_weights()
    session.train_step(batch)
    assert "one version behind: session.sync_weights()" in repr(session)
    assert "one version behind: session.sync_weights()" in session._repr_mimebundle_()["text/html"]
    assert "one version behind" in engine_card(session.inference).text()
    done = session.sync_weights()
    assert done["gap"] <= 1e-4 and "behind" not in repr(session) and done["version"] == session.version


def test_an_engine_says_where_it_is_without_asking_its_workers(session, monkeypatch):
    def asked(self, *args):
        raise AssertionError("a worker was asked, which may be busy or dead")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "control", asked)
        assert repr(session.train) == "TrainEngine('actor', fsdp2, 2 ranks, cuda)"
        assert re.fullmatch(r"InferenceEngine\('inference', \w+, '.*', 1 replica, cuda\)", repr(session.inference))
        card = engine_card(session.train).text()
    assert "weights ● resident" in card and "2 ranks on" in card and "all trained" in card and "iB resident" in card
    session.offload("inference", "kv_cache")
    assert "weights cuda, kv_cache meta" in repr(session.inference)
    session.onload("inference")


def test_what_a_session_says_of_itself_are_cards(session, batch):
    assert "rb.attach('shared')" in repr(rb.sessions()) and rb.sessions()[0]["pid"] > 0
    metrics = session.train_step(batch)
    card = metrics_card(metrics).text()
    assert f"step {session.step}" in card and "forward_backward" in card and "nats" in card
    assert session.history.plot("loss", "seconds/total", x="tokens").panels[1].lines[0].x[-1] > 0


def test_history_has_one_record_per_step(session, batch):
    before = len(session.history)
    session.train_step(batch)
    assert len(session.history) == before + 1
    assert session.history["step"][-1] == session.step
    assert list(session.history.to_pandas()["reward"])[-1] == pytest.approx(batch.rewards.mean())


def test_numbers_of_ones_own_stand_beside_the_last_step_and_leave_with_it(session, batch):
    session.train_step(batch)
    session.log({"own/win_rate": 0.5}, other=2)
    session.train_step(batch)
    assert session.history[-2]["own/win_rate"] == 0.5 and session.history["other"][-2:] == [2.0, None]
    session.log(other=3)
    session.undo()
    assert session.history["other"][-1] == 2.0, "what was logged beside an undone step is off the record"
    for wrong in ({"reward": 1.0}, {"own": "text"}, {"own": float("nan")}):
        with pytest.raises(DataError, match=r"session\.log"):
            session.log(wrong)


def test_names_of_other_libraries_say_where_it_is(session):
    with pytest.raises(AttributeError, match=r"session\.rollout"):
        session.generate  # noqa: B018


def test_the_tokenizer_is_the_models(session):
    assert session.tokenizer.decode(session.tokenizer.encode("sort 12", add_special_tokens=False)) == "sort 12"


def test_training_wants_a_batch_and_says_how_to_get_one(session, scored):
    with pytest.raises(DataError, match=r"\.batch\("):
        session.train_step(scored)


def test_an_unknown_option_names_the_nearest(cluster):
    with pytest.raises(BuildError, match="weight_decay"):
        rb.Session("tiny", train={"weight_decya": 0.1})
    with pytest.raises(BuildError, match="kv_cache_bytes"):
        rb.Session("tiny", inference={"kv_cache_byte": 1})


def test_a_name_that_runs_is_no_second_session_and_one_that_differs_is_refused(session):
    pids = session.core.link.state("engines")["engines"]["actor"]["pids"]
    with pytest.raises(SessionError, match=r"seed is 7, not 0.*rb.attach\('shared'\)"):
        rb.Session("tiny", name="shared")
    again = rb.Session("tiny", name="shared", train={"lr": 1e-5, "shards": 2}, reference=True, seed=7, undo=1)
    assert again.core.link.state("engines")["engines"]["actor"]["pids"] == pids and again.step == session.step
    session.__dict__.update(again.__dict__)  # the fixture's handle drives again
    with pytest.raises(SessionError, match="letters"):
        rb.Session("tiny", name="a/b")


def test_a_loss_written_as_in_the_field_trains_like_the_named_one(session, batch):
    named = session.forward_backward(batch, loss="bnpo")  # GRPO's clipped loss with the token mean of a plain function
    session.zero_grad()

    def written(inputs):
        ratio = torch.exp(inputs.logprobs - inputs.old_logprobs)
        a = inputs.advantages
        return -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a), {}

    mine = session.forward_backward(batch, loss=written)
    session.zero_grad()
    assert mine.loss == pytest.approx(named.loss, abs=1e-6)

"""From prompts to experience in one process: nothing is lost, changed or reordered on the way; numbers are right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlbench.data.prompts.chat import split_chat
from rlbench.data.prompts.prompt import Prompt
from rlbench.dispatch import context
from rlbench.errors import DataError, EngineError, Stopped
from rlbench.rl import FixedKL, group_normalized, mismatch_diagnostics
from rlbench.strategies import get_fake_strategy
from rlbench.strategies.options.config import OptionError
from rlbench.tiny.tokenizer import build_tokenizer
from rlbench.trainers.experience.samples import encoded, rollouts_of, sampling_of
from rlbench.trainers.experience.values import Experience
from rlbench.trainers.options.ppo_config import PPOConfig
from rlbench.workers.replica.job import encode_prompts
from tests.trainers.making import LONGEST, TableEngine, asked, joined, last_token, maker_of, qwen_of, rows_of
from tests.watching import video

Fake = Any


@pytest.fixture
def fake() -> Fake:
    return get_fake_strategy({"bf16": False})


@pytest.fixture(scope="module")
def actor(qwen: str) -> Any:
    return qwen_of(qwen)


def moved(path: str) -> Any:
    """A reference that is not the actor."""
    model = qwen_of(path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    return model


def logprobs_by_hand(model: Any, made: Experience, temperature: float) -> np.ndarray:
    """Of each response token, sequence by sequence, log-softmax and all."""
    found = []
    for prompt, response in zip(made.batch.prompts, made.batch.responses, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        with torch.no_grad():
            logp = torch.log_softmax(model(ids[None]).logits[0, len(prompt) - 1 : -1] / temperature, -1)
        found.append(logp[torch.arange(len(response)), ids[len(prompt) :]].numpy())
    return np.concatenate(found)


# -- samples --------------------------------------------------------------------------------------------------------


def test_each_prompt_has_its_samples_in_order_token_for_token(fake: Fake, actor: Any) -> None:
    maker, prompts = maker_of(fake, actor), asked(3)
    made = joined(maker.make_experience_list(prompts))
    drawn = TableEngine()({"n": 4, "max_tokens": LONGEST}, prompts)
    assert [row.tolist() for row in made.batch.responses] == [output.output_token_ids for output in drawn]
    assert [row.tolist() for row in made.batch.prompts] == [output.prompt_token_ids for output in drawn]
    np.testing.assert_array_equal(made.batch.sampler_logprobs, np.concatenate([o.logprobs for o in drawn]))
    assert made.prompts == tuple(p for p in prompts for _ in range(4))
    assert made.batch.group.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert made.batch.rewards.tolist() == [o.output_token_ids[-1] % 10 for o in drawn]
    assert made.batch.mask.all() and (made.batch.weight_version == 7).all()


def test_a_truncated_response_keeps_its_last_token(fake: Fake, actor: Any) -> None:
    """Defect absent: the last token of a truncated response was overwritten with the end of sequence."""
    made = joined(maker_of(fake, actor, config={"max_tokens": 2}).make_experience_list(asked(4)))
    cut = np.flatnonzero(made.batch.truncated)
    assert 0 < len(cut) < len(made)
    drawn = TableEngine()({"n": 4, "max_tokens": 2}, asked(4))
    assert [made.batch.responses[i].tolist() for i in cut] == [drawn[i].output_token_ids for i in cut]


def test_experience_comes_in_parts_of_so_many_sequences_and_groups_are_never_numbered_twice(
    fake: Fake, actor: Any
) -> None:
    maker = maker_of(fake, actor, options={"micro_rollout_batch_size": 5})
    first, second = maker.make_experience_list(asked(3)), maker.make_experience_list(asked(2, seed=1))
    assert [len(part) for part in first] == [5, 5, 2]
    assert joined(second).batch.group.tolist() == [3] * 4 + [4] * 4


def test_a_prompt_that_is_too_long_is_named(fake: Fake, actor: Any) -> None:
    """Defect absent: the maker returned None, and the caller crashed."""
    with pytest.raises(DataError, match="prompt 1 has 17 tokens, prompt_max_len is 16"):
        maker_of(fake, actor).make_experience_list([[1, 2], [3] * 17])
    assert fake.gather_and_generate.calls == []


def test_prompts_are_encoded_as_a_sessions_replicas_encode_them(tiny_path: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    contents = ["2+3=", [{"role": "user", "content": "What is 2+3?"}], [5, 6, 7]]
    found = encoded([Prompt(content) for content in contents], tokenizer, 64)
    assert found == encode_prompts(contents, tokenizer, 128, 10**6)


@pytest.mark.parametrize(
    ("prompts", "said"),
    [([], "has no prompts"), ([[]], "wanted a text"), (["text"], "there is no tokenizer"), ([3.5], "wanted a text")],
)
def test_what_is_no_prompt_is_refused(fake: Fake, actor: Any, prompts: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        maker_of(fake, actor).make_experience_list(prompts)


def test_an_engine_with_another_tokenizer_is_found_out(fake: Fake, actor: Any) -> None:
    class Other(TableEngine):
        def _drawn(self, prompt: Prompt, sample: int, most: int) -> Any:
            return super()._drawn(Prompt([1, *prompt.content]), sample, most)

    fake.gather_and_generate = Other()
    with pytest.raises(EngineError, match="tokenizer"):
        maker_of(fake, actor).make_experience_list(asked(1))


def test_options_of_sampling_reach_the_engine_under_its_names(fake: Fake, actor: Any) -> None:
    maker = maker_of(
        fake, actor, config={"temperature": 0.7, "top_p": 0.9, "top_k": 5, "kl_coef": 0.0, "use_fire": True}
    )
    maker.make_experience_list(asked(1), max_new_tokens=3, min_new_tokens=1, stop=["x"])
    call = fake.gather_and_generate.calls[0]
    assert call["sampling"] == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "first_token_temperature": 10.0,
        "max_tokens": 3,
        "min_tokens": 1,
        "stop": ["x"],
        "n": 4,
    }
    assert call["sleep"] is True
    with pytest.raises(OptionError, match="are one option"):
        maker.make_experience_list(asked(1), max_new_tokens=3, max_tokens=4)


def test_options_of_the_chat_template_reach_the_engine_and_the_tokens(fake: Fake, actor: Any) -> None:
    tokenizer = build_tokenizer(256)
    tokenizer.chat_template = "{{ mood }}{{ tools | length if tools else '' }}" + tokenizer.chat_template
    chat = {"template": {"mood": "!"}, "tools": [{"type": "function", "function": {"name": "look"}}]}
    sampling = sampling_of(PPOConfig(**chat), 1, {})
    assert {name: sampling[name] for name in chat} == chat and "template" not in sampling_of(PPOConfig(), 1, {})
    assert PPOConfig(chat_template_kwargs={"mood": "!"}).template == {"mood": "!"}
    (ids,) = encoded([Prompt([{"role": "user", "content": "a"}])], tokenizer, 64, split_chat(sampling)[0])
    assert tokenizer.decode(ids) == "!1<|user|>a<|end|><|assistant|>"
    maker = maker_of(fake, actor, config={"kl_coef": 0.0})
    made = maker.make_experience_list(asked(1), template={})
    assert fake.gather_and_generate.calls[0]["sampling"]["template"] == {} and made


def test_an_engine_that_is_to_stay_awake_is_left_awake(fake: Fake, actor: Any) -> None:
    maker_of(fake, actor, options={"enable_engine_sleep": False}).make_experience_list(asked(1))
    assert fake.gather_and_generate.calls[0]["sleep"] is False


def test_responses_that_were_all_cut_by_an_interrupt_train_nothing(fake: Fake, actor: Any) -> None:
    fake.gather_and_generate = TableEngine(lambda call: "abort")
    maker = maker_of(fake, actor, options={"advantages_norm": True, "reward_running_norm": True})
    made = joined(maker.make_experience_list(asked(2)))
    assert not made.batch.mask.any() and not made.batch.advantages.any() and not made.trained.any()
    assert np.isnan(made.batch.rewards).all() and np.isnan(made.info["reward"]).all()
    for values in (*(v for name, v in made.info.items() if name != "reward"), made.token_rewards):
        assert np.isfinite(values).all()
    assert "reward" not in maker.metrics and maker.metrics["aborted"] == 1.0
    assert maker.state()["moments"] == [0, 0.0, 0.0]


# -- log-probs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("fused", [{}, {"head": "chunked", "chunk_size": 3}])
def test_old_and_reference_logprobs_are_the_models_own_at_the_samplers_temperature(
    fake: Fake, actor: Any, qwen: str, packed: bool, fused: dict[str, Any]
) -> None:
    reference = moved(qwen)
    maker = maker_of(
        fake,
        actor,
        initial_model=reference,
        packing_samples=packed,
        options=fused,
        config={"kl_coef": 0.1, "temperature": 0.8},
    )
    made = joined(maker.make_experience_list(asked(3)))
    np.testing.assert_allclose(made.batch.old_logprobs, logprobs_by_hand(actor, made, 0.8), atol=1e-5)
    np.testing.assert_allclose(made.batch.ref_logprobs, logprobs_by_hand(reference, made, 0.8), atol=1e-5)
    d = made.batch.old_logprobs.astype(np.float64) - made.batch.ref_logprobs
    np.testing.assert_allclose(made.kl, np.exp(-d) - 1 + d, atol=1e-5)
    assert np.abs(d).max() > 1e-3 and made.entropy is not None and (made.entropy > 0).all()


def test_packed_and_padded_forwards_give_the_same_experience(fake: Fake, qwen: str) -> None:
    """Defect absent: packing changed the loss, and crashed GAE, whitening and dynamic sampling."""
    model, rows = qwen_of(qwen), []
    watch = lambda _, args, kwargs: rows.append(len(kwargs["input_ids"]))  # noqa: E731
    model.model.register_forward_pre_hook(watch, with_kwargs=True)
    made = []
    for packed in (True, False):
        rows.clear()
        made.append(joined(maker_of(fake, model, options={"packing": packed}).make_experience_list(asked(3))))
        assert set(rows[2:]) == ({1} if packed else {3})  # sequences of one forward; the first two prove the packing
    np.testing.assert_allclose(made[0].batch.old_logprobs, made[1].batch.old_logprobs, atol=1e-5)
    np.testing.assert_array_equal(made[0].batch.advantages, made[1].batch.advantages)


def test_prompts_that_samples_share_are_computed_once_and_the_experience_is_the_same(fake: Fake, qwen: str) -> None:
    model, tokens = qwen_of(qwen), []
    watch = lambda _, args, kwargs: tokens.append(kwargs["input_ids"].numel())  # noqa: E731
    model.model.register_forward_pre_hook(watch, with_kwargs=True)
    made, computed = [], []
    for share in (False, True):
        tokens.clear()
        options = {"packing": True, "share_prompts": share, "micro_rollout_batch_size": 4, "n": 4}
        maker = maker_of(fake, model, options=options, initial_model=model, config={"kl_coef": 0.1})
        made.append(joined(maker.make_experience_list(asked(3))))
        computed.append(sum(tokens[-6:]))  # three micro-batches of both models, behind the proofs
    plain, shared = (one.batch for one in made)
    assert computed[0] == 2 * plain.lengths.sum()
    assert computed[1] == 2 * (plain.tokens + sum(map(len, {tuple(row) for row in plain.prompts})))
    for name in ("old_logprobs", "ref_logprobs", "advantages"):
        np.testing.assert_allclose(getattr(shared, name), getattr(plain, name), atol=1e-5, err_msg=name)


def test_chunk_size_bounds_the_logits_held_at_once(fake: Fake, actor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect absent: fused_linear_logprob and chunk_size had no implementation."""
    from rlbench.rl import linear

    seen: list[int] = []
    kept = linear._Tiles.of

    def watched(hidden: Any, weight: Any, tile: Any) -> Any:
        tiles = kept(hidden, weight, tile)
        seen.append(tiles.rows * tiles.columns)
        return tiles

    monkeypatch.setattr(linear._Tiles, "of", watched)
    plain = maker_of(fake, actor)
    plain.make_experience_list(asked(2))
    assert seen == []
    maker_of(fake, actor, options={"head": "chunked", "chunk_size": 2}).make_experience_list(asked(2))
    assert seen and max(seen[2:]) <= 2 * actor.config.vocab_size


def test_dropout_is_off_while_experience_is_made_and_on_again_afterwards(fake: Fake, qwen: str) -> None:
    model = qwen_of(qwen)
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    first, second = (joined(maker_of(fake, model).make_experience_list(asked(2))) for _ in range(2))
    np.testing.assert_array_equal(first.batch.old_logprobs, second.batch.old_logprobs)
    assert model.training and model.model.layers[0].training


def test_the_gap_between_sampler_and_trainer_is_reported(fake: Fake, actor: Any) -> None:
    """Defect absent: the engine's log-probs were thrown away."""
    maker = maker_of(fake, actor)
    made = joined(maker.make_experience_list(asked(3)))
    expected = mismatch_diagnostics(
        made.padded(made.batch.old_logprobs), made.padded(made.batch.sampler_logprobs), made.padded(made.batch.mask) > 0
    )
    found = {k.removeprefix("mismatch/"): v for k, v in maker.metrics.items() if k.startswith("mismatch/")}
    assert found == pytest.approx(expected)
    gap = [np.abs(row).mean() for row in rows_of(made, made.batch.old_logprobs - made.batch.sampler_logprobs)]
    np.testing.assert_allclose(made.info["logprob_gap"], gap, atol=1e-5)


def test_with_the_samplers_logprobs_the_actor_looks_at_one_micro_batch_alone(
    fake: Fake, actor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = maker_of(fake, actor, config={"old_logprobs": "sampler"})
    seen: list[int] = []
    kept = maker._models.policy_stats
    monkeypatch.setattr(maker._models, "policy_stats", lambda m, b, *a: seen.append(len(b)) or kept(m, b, *a))
    made = joined(maker.make_experience_list(asked(3)))
    assert seen == [3]
    assert made.batch.old_logprobs is None and made.entropy is None
    some = made.rows([0, 1, 2])
    own = logprobs_by_hand(actor, some, 1.0)
    x = own.astype(np.float64) - some.batch.sampler_logprobs
    assert maker.metrics["mismatch/kl"] == pytest.approx(float(-x.mean()), abs=1e-5)


def test_without_a_kl_the_reference_is_not_asked(fake: Fake, actor: Any, qwen: str) -> None:
    reference = moved(qwen)
    reference.register_forward_pre_hook(lambda *_: pytest.fail("the reference was asked"))
    made = joined(maker_of(fake, actor, initial_model=reference).make_experience_list(asked(2)))
    assert made.kl is None and made.batch.ref_logprobs is None


def test_the_weight_of_the_kl_is_the_controllers_of_that_moment(fake: Fake, actor: Any, qwen: str) -> None:
    maker = maker_of(
        fake, actor, initial_model=moved(qwen), kl_ctl=FixedKL(0.5), options={"advantage_estimator": "reinforce"}
    )
    one = joined(maker.make_experience_list(asked(2)))
    maker.kl_ctl = FixedKL(0.0)
    free = joined(maker.make_experience_list(asked(2)))
    sums = np.add.reduceat(one.kl, one.batch.responses.offsets[:-1])
    np.testing.assert_allclose(one.info["return"], free.info["return"] - 0.5 * sums, atol=1e-5)
    assert free.kl is None


def test_a_reference_and_a_critic_that_were_offloaded_are_brought_in_and_sent_back(
    fake: Fake, actor: Any, qwen: str
) -> None:
    reference = moved(qwen)
    fake.offload_model(reference)
    maker = maker_of(fake, actor, initial_model=reference, config={"kl_coef": 0.1})
    assert joined(maker.make_experience_list(asked(2))).kl is not None
    assert fake.offloaded(reference) and not fake.offloaded(actor)


def test_gae_takes_the_values_of_the_critic(fake: Fake, actor: Any, qwen: str) -> None:
    from rlbench.trainers.models.value_model import make_critic, values_of

    critic = fake.prepare_model(make_critic(qwen))
    maker = maker_of(
        fake, actor, critic=critic, options={"advantage_estimator": "gae"}, config={"gamma": 0.9, "lambd": 0.8}
    )
    made = joined(maker.make_experience_list(asked(3)))
    with torch.no_grad():
        values = values_of(critic, made.batch, torch.device("cpu"), False).numpy()
    np.testing.assert_allclose(made.values, values, atol=1e-5)
    pairs = zip(rows_of(made, made.token_rewards), rows_of(made, made.values), strict=True)
    for row, (rewards, own) in enumerate(pairs):
        after, total, expected = 0.0, 0.0, []
        for r, v in zip(rewards[::-1], own[::-1], strict=True):
            total = r + 0.9 * after - v + 0.9 * 0.8 * total
            after = v
            expected.append(total)
        np.testing.assert_allclose(rows_of(made, made.batch.advantages)[row], expected[::-1], atol=1e-5)
        np.testing.assert_allclose(rows_of(made, made.returns)[row], np.array(expected[::-1]) + own, atol=1e-5)
    with pytest.raises(DataError, match="videos, and critics watch none"):
        maker.make_experience_list(["a <|video_pad|>"], all_videos=[[video(2)]])
    shown = made.batch.replace(videos=((video(2),), *[()] * (len(made.batch) - 1)))
    with pytest.raises(DataError, match="videos, and critics watch none"):
        values_of(critic, shown, torch.device("cpu"), False)


# -- responses that were cut by an interrupt --------------------------------------------------------------------------

CUT = (1, 2, 5, 8, 9, 10)
"""Of three prompts with four samples each: two, one and three were cut; the last group has one that counts."""


class Interrupted(TableEngine):
    """Some of its samples were cut."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        drawn = super().__call__(*args, **kwargs)
        return [replace(one, finish_reason="abort") if i in CUT else one for i, one in enumerate(drawn)]


def of_a_finished_one(rollout: Any) -> float:
    assert rollout.finish_reason != "abort", "a reward was asked about a response that was cut"
    return last_token(rollout)


def compared_by_hand(name: str, rewards: list[float]) -> list[float]:
    """Advantages of a group's finished samples, before whitening."""
    found, n = [], len(rewards)
    mean = sum(rewards) / n
    squares = sum((r - mean) ** 2 for r in rewards)
    for r in rewards:
        if name in ("reinforce", "reinforce++"):
            found.append(r)
        elif n == 1:
            found.append(0.0)
        elif name == "rloo":
            found.append(r - (sum(rewards) - r) / (n - 1))
        elif name == "group_norm":
            found.append((r - mean) / ((squares / (n - 1)) ** 0.5 + 1e-9))
        elif name == "cpgd":
            found.append((r - mean) / ((squares / n) ** 0.5 + 1e-6))
        else:
            found.append(r - mean)
    return found


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", ["reinforce", "rloo", "group_norm", "cpgd", "reinforce_baseline", "reinforce++"])
def test_a_response_that_was_cut_is_compared_with_none(fake: Fake, actor: Any, name: str, norm: bool) -> None:
    """It would count in the mean and the deviation of its group, with whatever reward its beginning had."""
    fake.gather_and_generate = Interrupted()
    maker = maker_of(fake, actor, of_a_finished_one, {"advantage_estimator": name, "advantages_norm": norm})
    made = joined(maker.make_experience_list(asked(3)))
    counts = np.array([i not in CUT for i in range(12)])
    scores = [float(o.output_token_ids[-1] % 10) for o in TableEngine()({"n": 4, "max_tokens": LONGEST}, asked(3))]
    expected = np.zeros(12)
    for group in range(3):
        own = [i for i in range(4 * group, 4 * group + 4) if counts[i]]
        expected[own] = compared_by_hand(name, [scores[i] for i in own])
    lengths = made.batch.response_lengths
    tokens = np.repeat(expected, lengths)[np.repeat(counts, lengths)]
    if norm or name in ("reinforce_baseline", "reinforce++"):
        tokens = (tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(made.batch.advantages[made.batch.mask], tokens, atol=2e-5)
    assert not made.batch.advantages[~made.batch.mask].any() and made.trained.tolist() == counts.tolist()
    assert np.abs(tokens).max() > 0.5


def test_advantages_beside_responses_that_were_cut_are_those_of_the_kernels_own_way(fake: Fake, actor: Any) -> None:
    fake.gather_and_generate = Interrupted()
    made = joined(maker_of(fake, actor, of_a_finished_one).make_experience_list(asked(3)))
    sampling = {"n": 4, "max_tokens": LONGEST, "temperature": 1.0}
    drawn = rollouts_of(asked(3), [list(p.content) for p in asked(3)], Interrupted()(sampling, asked(3)), sampling)
    kernels = drawn.score(last_token).batch(group_normalized(eps=1e-9))
    np.testing.assert_allclose(made.batch.advantages[made.batch.mask], kernels.advantages[kernels.mask], atol=1e-6)
    assert len(kernels) == made.trained.sum() == 6


def test_metrics_and_moments_are_of_the_responses_that_were_not_cut(fake: Fake, actor: Any, qwen: str) -> None:
    fake.gather_and_generate = Interrupted()
    options = {
        "reward_running_norm": True,
        "reward_clip": 5.0,
        "overlong_buffer": True,
        "overlong_buffer_len": 6,
        "advantage_estimator": "reinforce",
    }
    reward = lambda r: {"reward": of_a_finished_one(r), "format": float(len(r))}  # noqa: E731
    maker = maker_of(fake, actor, reward, options, {"kl_coef": 0.1}, initial_model=moved(qwen))
    made = joined(maker.make_experience_list(asked(3)))
    rows, m = made.trained, maker.metrics
    scores, lengths = made.batch.rewards[rows], made.batch.response_lengths[rows]
    penalised = scores - np.clip(lengths - (LONGEST - 6), 0, 6) / 6
    clipped = np.clip(penalised, -5, 5)
    sums = np.add.reduceat(made.kl, made.batch.responses.offsets[:-1])[rows]
    expected = {
        "step_reward_mean": scores.mean(),
        "step_reward_std": scores.std(ddof=1),
        "step_reward_max": scores.max(),
        "reward": (clipped / clipped.std(ddof=1)).mean(),
        "response_length": lengths.mean(),
        "total_length": made.batch.lengths[rows].mean(),
        "truncated": made.batch.truncated[rows].mean(),
        "overlong": (lengths > LONGEST - 6).mean(),
        "reward_clip_frac": (np.abs(penalised) > 5).mean(),
        "format_mean": lengths.mean(),
        "rollout_ref_kl_per_sequence": sums.mean(),
        "return": made.info["return"][rows].mean(),
        "aborted": 0.5,
    }
    assert {name: m[name] for name in expected} == pytest.approx(expected, abs=1e-5)
    count, mean, _ = maker.state()["moments"]
    assert (count, mean) == (6, pytest.approx(clipped.mean())) and np.isnan(made.batch.rewards[~rows]).all()


def test_an_evaluation_is_of_the_responses_that_were_not_cut(fake: Fake, actor: Any) -> None:
    fake.gather_and_generate = Interrupted()
    found = maker_of(fake, actor, of_a_finished_one).evaluate(asked(3), n=4)
    drawn = TableEngine()({"n": 4, "max_tokens": LONGEST}, asked(3))
    finished = [o for i, o in enumerate(drawn) if i not in CUT]
    assert found["samples"] == 6
    assert found["reward"] == pytest.approx(np.mean([o.output_token_ids[-1] % 10 for o in finished]))
    assert found["response_length"] == pytest.approx(np.mean([len(o.output_token_ids) for o in finished]))


# -- shaping --------------------------------------------------------------------------------------------------------


def test_scores_are_shaped_in_one_order_and_clips_counted_before_clamping(fake: Fake, actor: Any) -> None:
    """Defect absent: the running norm came after the comparison within groups."""
    options = {
        "overlong_buffer": True,
        "overlong_buffer_len": 6,
        "overlong_buffer_penalty_factor": 3.0,
        "reward_clip": 4.0,
        "reward_running_norm": True,
        "reward_running_norm_minus_mean": True,
        "advantage_estimator": "reinforce",
    }
    maker = maker_of(fake, actor, options=options)
    first, second = (joined(maker.make_experience_list(asked(3, seed=seed))) for seed in (0, 1))
    seen: list[float] = []
    for made in (first, second):
        scores, lengths = made.batch.rewards, made.batch.response_lengths
        penalised = scores - 3.0 * np.clip(lengths - (LONGEST - 6), 0, 6) / 6
        clipped = np.clip(penalised, -4, 4)
        seen += clipped.tolist()
        expected = (clipped - np.mean(seen)) / np.std(seen, ddof=1)
        np.testing.assert_allclose(made.info["reward"], expected, atol=1e-9)
        np.testing.assert_array_equal(made.info["reward_clip_frac"], np.abs(penalised) > 4)
        assert 0 < made.info["reward_clip_frac"].mean() < 1
    assert maker.metrics["step_reward_mean"] == pytest.approx(second.batch.rewards.mean())
    assert maker.metrics["reward"] == pytest.approx(second.info["reward"].mean())
    assert maker.metrics["reward_clip_frac"] == pytest.approx(second.info["reward_clip_frac"].mean())
    assert maker.metrics["overlong"] == pytest.approx((second.batch.response_lengths > LONGEST - 6).mean())


def test_the_running_norm_of_one_or_of_equal_rewards_leaves_them_finite(fake: Fake, actor: Any) -> None:
    """Defect absent: one reward gave infinity, equal ones were divided by 1e-12."""
    options = {"reward_running_norm": True, "advantage_estimator": "reinforce", "n": 1}
    for count in (1, 3):
        made = joined(maker_of(fake, actor, lambda r: 0.7, options).make_experience_list(asked(count)))
        np.testing.assert_allclose(made.info["reward"], 0.7)


def test_the_running_norm_goes_on_from_a_saved_state(fake: Fake, actor: Any) -> None:
    options = {"reward_running_norm": True, "advantage_estimator": "reinforce"}
    maker, other = (maker_of(fake, actor, options=options) for _ in range(2))
    maker.make_experience_list(asked(2))
    state = maker.state()
    other.restore(state)
    one, two = (joined(m.make_experience_list(asked(2, seed=1))) for m in (maker, other))
    np.testing.assert_array_equal(one.info["reward"], two.info["reward"])
    assert one.batch.group.tolist() == two.batch.group.tolist()


def test_evaluating_moves_no_running_moment(fake: Fake, actor: Any) -> None:
    """Defect absent: evaluation polluted the running norm."""
    maker = maker_of(fake, actor, options={"reward_running_norm": True, "reward_clip": 0.5})
    maker.make_experience_list(asked(2))
    before, metrics = maker.state(), dict(maker.metrics)
    found = maker.evaluate(asked(3, seed=2), n=2, temperature=0.0)
    assert (maker.state(), maker.metrics) == (before, metrics)
    drawn = TableEngine()({"n": 2, "max_tokens": LONGEST}, asked(3, seed=2))
    scores = [o.output_token_ids[-1] % 10 for o in drawn]
    assert found["reward"] == pytest.approx(np.mean(scores))
    assert found["reward_std"] == pytest.approx(np.std(scores, ddof=1)) and found["samples"] == 6
    assert maker.evaluate([])["samples"] == 0


# -- metrics --------------------------------------------------------------------------------------------------------


def test_metrics_are_those_of_all_samples(fake: Fake, actor: Any, qwen: str) -> None:
    maker = maker_of(
        fake,
        actor,
        initial_model=moved(qwen),
        reward=lambda r: {"reward": last_token(r), "format": float(len(r) > 3), "a/detail": 1.0},
        options={"advantages_norm": True, "advantage_clip": 0.8},
        config={"kl_coef": 0.1},
    )
    made = joined(maker.make_experience_list(asked(4)))
    m, batch = maker.metrics, made.batch
    lengths, kept = batch.response_lengths, batch.advantages[batch.mask]
    sums = np.add.reduceat(made.kl, batch.responses.offsets[:-1])
    expected = {
        "reward": batch.rewards.mean(),
        "return": made.info["return"].mean(),
        "response_length": lengths.mean(),
        "response_length_mean": lengths.mean(),
        "response_length_std": lengths.std(ddof=1),
        "total_length": batch.lengths.mean(),
        "step_reward_mean": batch.rewards.mean(),
        "step_reward_std": batch.rewards.std(ddof=1),
        "step_reward_max": batch.rewards.max(),
        "step_reward_min": batch.rewards.min(),
        "advantages_mean": kept.mean(),
        "advantages_std": kept.std(ddof=1),
        "advantages_max": kept.max(),
        "advantages_min": kept.min(),
        "rollout_ref_kl": made.kl.mean(),
        "rollout_ref_kl_per_sequence": sums.mean(),
        "entropy": made.entropy.mean(),
        "truncated": batch.truncated.mean(),
        "rule_reward_mean": batch.rewards.mean(),
        "format_mean": (lengths > 3).mean(),
        "format_std": (lengths > 3).astype(float).std(ddof=1),
        "aborted": 0.0,
    }
    assert {name: m[name] for name in expected} == pytest.approx(expected, abs=1e-5)
    assert 0 < m["advantage_clip_frac"] < 1 and "a/detail_mean" not in m
    assert {"returns_mean", "returns_std", "mismatch/kl"} <= set(m)


# -- what ends a call -----------------------------------------------------------------------------------------------


def test_a_reward_that_fails_leaves_the_maker_as_it_was(fake: Fake, actor: Any) -> None:
    def fails(rollout: Any) -> float:
        raise ValueError("no judge today")

    maker = maker_of(fake, actor, fails, {"reward_running_norm": True})
    before = maker.state()
    with pytest.raises(DataError, match="no judge today"):
        maker.make_experience_list(asked(2))
    assert maker.state() == before and maker.metrics == {}


@pytest.mark.parametrize("stage", ["generation", "reward", "model"])
def test_a_stop_ends_between_the_stages(fake: Fake, qwen: str, stage: str) -> None:
    model, call = qwen_of(qwen), context.CallContext()
    seen: list[str] = []

    def at(name: str) -> None:
        seen.append(name)
        if name == stage:
            call.request_stop()

    class Engine(TableEngine):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            at("generation")
            return super().__call__(*args, **kwargs)

    def reward(rollout: Any) -> float:
        at("reward")
        return last_token(rollout)

    model.register_forward_pre_hook(lambda *_: at("model"))
    fake.gather_and_generate = Engine()
    maker = maker_of(fake, model, reward)
    context.set_current(call)
    try:
        with pytest.raises(Stopped, match="no experience was made"):
            maker.make_experience_list(asked(2))
    finally:
        context.set_current(None)
    assert seen[-1] == stage and maker.state()["groups"] == 0
    assert stage == "reward" or seen.count(stage) == 1  # and not the next forward
    made = maker_of(fake, model).make_experience_list(asked(2))  # and everything works as before
    assert len(made) == 3


def test_a_stop_reaches_a_reward_that_is_running(fake: Fake, actor: Any) -> None:
    import time

    call, scored = context.CallContext(), []

    def slow(rollout: Any) -> float:
        call.request_stop()
        time.sleep(0.1)
        scored.append(rollout.index)
        return 1.0

    maker = maker_of(fake, actor, slow, {"n": 200})
    context.set_current(call)
    try:
        with pytest.raises(Stopped):
            maker.make_experience_list(asked(1))
    finally:
        context.set_current(None)
    assert 0 < len(scored) < 200


def test_a_model_that_gives_no_numbers_ends_the_call_and_says_so(fake: Fake, qwen: str) -> None:
    model = qwen_of(qwen)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    maker = maker_of(fake, model)
    with pytest.raises(EngineError, match=r"the actor's log-probs: .* not finite, the first in sequence 0"):
        maker.make_experience_list(asked(2))
    assert maker.state()["groups"] == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"logprobs": np.zeros(1, np.float32)}, "log-probs"),
        ({"logprobs": np.full(1, np.nan, np.float32), "output_token_ids": [3]}, "not finite"),
        ({"finish_reason": "tired"}, "ended for 'tired'"),
    ],
)
def test_what_an_engine_must_not_give_is_refused(fake: Fake, actor: Any, change: Any, said: str) -> None:
    class Broken(TableEngine):
        def _drawn(self, *args: Any) -> Any:
            return replace(super()._drawn(*args), **change)

    fake.gather_and_generate = Broken()
    with pytest.raises(EngineError, match=said):
        maker_of(fake, actor).make_experience_list(asked(3))
    fake.gather_and_generate = lambda *args, **kwargs: []
    with pytest.raises(EngineError, match="gave 0 outputs for 3 prompts of 4 samples"):
        maker_of(fake, actor).make_experience_list(asked(3))


# -- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "config", "said"),
    [
        ({"reward_running_norm_minus_mean": True}, {}, "no effect without reward_running_norm"),
        ({"reward_clip": -1.0}, {}, "reward_clip=-1"),
        ({"overlong_buffer": True, "overlong_buffer_len": 100}, {}, "overlong_buffer_len=100"),
        ({"micro_rollout_batch_size": 0}, {}, "micro_rollout_batch_size=0"),
        ({"dynamic_sampling": True, "n": 1, "advantage_estimator": "reinforce"}, {}, "2 or more"),
        ({}, {"kl_coef": 0.1}, "needs a reference"),
        ({"use_kl_loss": True}, {"kl_coef": 0.1}, "needs a reference"),
        ({"advantage_estimator": "groupnorm"}, {}, "nearest: group_norm"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    fake: Fake, actor: Any, options: Any, config: Any, said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        maker_of(fake, actor, options=options, config=config)


def test_what_of_images_cannot_be_honoured_is_refused(fake: Fake, actor: Any) -> None:
    maker = maker_of(fake, actor)
    with pytest.raises(DataError, match="prompt 0: video 0 is a object: wanted a path"):
        maker.make_experience_list(asked(1), all_videos=[object()])
    with pytest.raises(DataError, match="wanted a PIL image"):
        maker.make_experience_list(asked(1), all_images=[object()])
    with pytest.raises(DataError, match="2 images for 1 prompts"):
        maker.make_experience_list(asked(1), all_images=[None, None])
    maker.make_experience_list(asked(1), all_images=[None])


# -- rewards that failed -----------------------------------------------------------------------------------------------


def fails_on(labels: set[str]) -> Any:
    def reward(rollout: Any) -> float:
        if rollout.label in labels:
            raise ValueError(f"no number in {rollout.label}")
        return last_token(rollout)

    return reward


def test_a_group_whose_reward_failed_is_left_out_counted_and_told_with_its_row(
    fake: Fake, actor: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [replace(one, label=f"l{i}") for i, one in enumerate(asked(4))]
    maker = maker_of(fake, actor, fails_on({"l1"}), config={"reward_failures": 0.25})
    made = joined(maker.make_experience_list(prompts))
    left = np.arange(16) // 4 != 1
    assert made.trained.tolist() == left.tolist() and np.isnan(made.batch.rewards[~left]).all()
    assert not made.batch.advantages[~made.batch.mask].any()
    assert maker.metrics["reward_failed"] == 4 and maker.metrics["groups_left_out"] == 1
    assert "no number in l1" in capsys.readouterr().out and "no number in l1" in maker.metrics["reward_failed_rows"]
    alone = maker_of(fake, actor, config={"reward_failures": 0.25})
    others = joined(alone.make_experience_list([one for one in prompts if one.label != "l1"]))
    mask = others.batch.mask
    np.testing.assert_allclose(made.batch.advantages[made.batch.mask], others.batch.advantages[mask], atol=1e-6)
    assert "reward_failed" not in alone.metrics
    assert maker.evaluate(prompts, n=2)["reward_failed"] == 2
    assert "reward_failed" not in maker.evaluate([prompts[0]]), "those of a call are told once"


def test_more_failures_than_are_allowed_end_the_iteration(fake: Fake, actor: Any) -> None:
    prompts = [replace(one, label=f"l{i}") for i, one in enumerate(asked(4))]
    for labels, allowed in (({"l0", "l1"}, {}), ({"l1"}, {"reward_failures": 0.0}), ({"l1"}, {})):
        maker = maker_of(fake, actor, fails_on(labels), config=allowed)
        with pytest.raises(DataError, match="no number in l"):
            maker.make_experience_list(prompts)


def test_a_reward_function_is_not_asked_about_a_group_that_is_left_out(fake: Fake, actor: Any) -> None:
    prompts = [replace(one, label=f"l{i}") for i, one in enumerate(asked(4))]
    seen: list[str] = []

    def combined(scores: Any, labels: Any, *rest: Any) -> Any:
        seen.extend(labels)
        return scores[0] + 1, {"one": scores[0]}

    config = {"reward_failures": 0.25}
    maker = maker_of(fake, actor, fails_on({"l2"}), config=config, reward_fn=combined)
    made = joined(maker.make_experience_list(prompts))
    assert set(seen) == {"l0", "l1", "l3"} and np.isfinite(made.batch.rewards).sum() == 12
    assert np.isnan(made.components["one"]).tolist() == [i // 4 == 2 for i in range(16)]

"""Trajectories of a step: which samples are kept, what is said of each, and that all ranks take part."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rlbench.data import Prompt, Ragged
from rlbench.data.batches.batch import TrainBatch
from rlbench.data.prompts.images import EncodedImage
from rlbench.errors import DataError
from rlbench.strategies import FSDPV2Strategy, get_fake_strategy
from rlbench.tiny.tokenizer import build_tokenizer
from rlbench.trainers.experience.values import Experience
from rlbench.trainers.reports.telling import Traits, most_telling, reflection_counts, repeat_score
from rlbench.trainers.reports.trajectory_saver import TrajectorySaver, high_entropy, token_texts
from tests.modules import qwen_on_meta, save_qwen
from tests.ranks import Ranks, ranks


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tiny model's, from a folder, as an actor has it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(256).save_pretrained(folder)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks(2, qwen_on_meta(save_qwen(tmp_path_factory.mktemp("qwen")))) as made:
        yield made


def experience(tokenizer: Any, answers: list[str], rewards: list[float], **other: Any) -> Experience:
    """One sequence per answer, two of a group; numbers that differ by token."""
    responses = Ragged.from_rows([[*tokenizer.encode(text), tokenizer.eos_token_id] for text in answers], np.int32)
    count = len(responses.values)
    first = other.pop("first_group", 0)
    noise = np.random.default_rng(first)
    batch = TrainBatch(
        prompts=Ragged.from_rows([tokenizer.encode("sort 312 :")] * len(answers), np.int32),
        responses=responses,
        mask=np.ones(count, bool),
        advantages=np.repeat(np.asarray(rewards, np.float32), responses.lengths),
        sampler_logprobs=noise.normal(-1, 0.1, count).astype(np.float32),
        rewards=np.asarray(rewards, float),
        group=(first + np.arange(len(answers)) // 2).astype(np.int32),
        weight_version=np.zeros(len(answers), np.int64),
        truncated=np.zeros(len(answers), bool),
    )
    made = Experience(
        batch=batch,
        prompts=tuple(Prompt("sort 312 :", label="123") for _ in answers),
        texts=tuple(answers),
        token_rewards=np.zeros(count, np.float32),
        returns=np.arange(count, dtype=np.float32),
        entropy=noise.uniform(0, 2, count).astype(np.float32),
        info={"reward": np.asarray(rewards, float), "response_length": responses.lengths.astype(float)},
        components={"format": np.asarray(rewards, float)},
    )
    return replace(made, **other)


KEYS = {
    "full_sequence",
    "generated_text",
    "pure_generated_text",
    "label",
    "reference",
    "repeat_score",
    "reflection_pattern_score",
    "policy_entropy",
    "response_token_count",
    "advantages",
    "return",
    "action_log_probs",
    "values",
    "info",
    "global_step",
    "experience_index",
    "sample_in_exp",
}


def read(path: Path | None) -> list[dict[str, Any]]:
    assert path is not None
    found = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert isinstance(found, list)
    return found


def by_brute_force(text: str) -> float:
    """The definition: sort all suffixes, compare neighbours letter by letter."""
    suffixes = sorted(text[i:] for i in range(len(text)))
    shared = 0
    for one, other in itertools.pairwise(suffixes):
        shared += sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    return 2 * shared / (len(text) * (len(text) + 1)) if text else 0.0


@given(st.text(alphabet="ab", max_size=40) | st.text(max_size=30))
def test_the_repeat_score_is_its_definition_by_brute_force(text: str) -> None:
    assert repeat_score(text) == pytest.approx(by_brute_force(text), abs=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 100])
def test_one_letter_n_times_scores_n_less_one_over_n_and_one(n: int) -> None:
    assert repeat_score("a" * n) == pytest.approx((n - 1) / (n + 1))


def test_going_round_in_circles_scores_above_02_and_prose_near_0() -> None:
    prose = Path(__file__).read_text()
    assert repeat_score("and so on, " * 50) > 0.2 > repeat_score(prose) * 10
    assert repeat_score("") == repeat_score("abcdefg") == 0.0 and repeat_score("\ud800x\ud800x") > 0


def test_second_thoughts_are_counted_as_whole_words_in_any_case() -> None:
    counts = reflection_counts("Wait, wait. I await a waiter. However: let me  check. Let me check!")
    assert counts == {"wait": 2, "however": 1, "let me check": 1}
    assert reflection_counts("It is 3.") == {}


def traits(**given: Any) -> Traits:
    count = len(next(iter(given.values())))
    plain = {
        "group": np.arange(count),
        "reward": np.zeros(count),
        "advantage": np.zeros(count),
        "length": np.ones(count, int),
        "truncated": np.zeros(count, bool),
        "entropy": np.full(count, np.nan),
    }
    return {name: np.asarray(value) for name, value in {**plain, **given}.items()}


def test_extremes_come_first_each_for_its_reason() -> None:
    given = traits(
        reward=[0.5, 1.0, 0.0, 0.5, 0.5, 0.5, 0.5, 0.5],
        advantage=[0, 0, 0, 3, -3, 0, 0, 0],
        length=[1, 2, 2, 2, 2, 9, 4, 2],
        truncated=[0, 0, 0, 0, 0, 0, 1, 0],
        entropy=[1, 1, 1, 1, 1, 1, 1, 2.0],
    )
    assert most_telling(given, 7) == [
        (1, "highest reward"),
        (2, "lowest reward"),
        (3, "highest advantage"),
        (4, "lowest advantage"),
        (5, "longest"),
        (6, "truncated"),
        (7, "highest entropy"),
    ]
    assert most_telling(given, 2) == [(1, "highest reward"), (2, "lowest reward")]


def test_every_prompt_has_its_say_before_any_has_two() -> None:
    """Defect absent: the first n samples, which are those of the first prompts."""
    group = np.repeat(np.arange(6), 4)
    chosen = most_telling(traits(group=group, reward=np.where(group == 0, 1.0, 0.0)), 8)
    assert sorted(group[i] for i, _ in chosen[:6]) == [0, 1, 2, 3, 4, 5]
    assert len({i for i, _ in chosen}) == 8


@given(st.integers(0, 30), st.integers(0, 40), st.randoms())
def test_as_many_as_there_are_each_once_and_unknown_numbers_choose_nothing(count: int, size: int, random: Any) -> None:
    unknown = [random.choice([0.0, 1.0, float("nan")]) for _ in range(size)]
    given = traits(group=[random.randrange(5) for _ in range(size)], reward=unknown, entropy=unknown)
    chosen = most_telling(given, count)
    assert len({i for i, _ in chosen}) == len(chosen) == min(count, size)
    assert not any(np.isnan(unknown[i]) for i, reason in chosen if "reward" in reason or "entropy" in reason)


@settings(max_examples=30)
@given(st.integers(1, 12), st.data())
def test_the_choice_does_not_depend_on_how_groups_lie_on_ranks(count: int, data: st.DataObject) -> None:
    reward = np.array(data.draw(st.lists(st.integers(0, 2), min_size=12, max_size=12)), float)
    group = np.repeat(np.arange(4), 3)
    dealt = np.concatenate([np.flatnonzero(group == g) for g in data.draw(st.permutations(range(4)))])
    plain = most_telling(traits(group=group, reward=reward, advantage=-reward), count)
    other = most_telling(traits(group=group[dealt], reward=reward[dealt], advantage=-reward[dealt]), count)
    assert [(int(dealt[i]), reason) for i, reason in other] == plain


def test_a_file_holds_the_references_keys_and_the_samples_numbers(tokenizer: Any, tmp_path: Path) -> None:
    one = experience(tokenizer, ["123", "wait 11111111"], [1.0, 0.0])
    one.batch.mask[-1] = False
    path = TrajectorySaver(tmp_path / "run").save([one], 4, get_fake_strategy(), tokenizer)
    assert path == tmp_path / "run" / "trajectories" / "trajectories_step_4.json"
    best, worst = read(path)
    assert set(best) >= KEYS
    assert (best["chosen_for"], worst["chosen_for"]) == ("highest reward", "lowest reward")
    assert best["pure_generated_text"] == "123" and best["generated_text"] == "123" + tokenizer.eos_token
    assert best["full_sequence"] == "sort 312 :123" + tokenizer.eos_token
    assert best["label"] == best["reference"] == "123"
    assert worst["repeat_score"] == pytest.approx(by_brute_force("wait 11111111"))
    assert (worst["reflection_pattern_score"], worst["reflection_pattern_details"]) == (1, {"wait": 1})
    assert "generated_tokens" not in best
    first = len(one.batch.responses[0])
    entropy, logprobs = one.entropy, one.batch.sampler_logprobs
    assert entropy is not None and one.returns is not None
    assert worst["policy_entropy"] == pytest.approx(float(entropy[first:-1].mean()), rel=1e-6)
    assert worst["return"] == pytest.approx(float(one.returns[first:-1].mean()))
    assert worst["advantages"] == 0.0 and best["advantages"] == 1.0
    assert np.array_equal(np.array(worst["action_log_probs"], np.float32), logprobs[first:])
    assert best["response_token_count"] == first and best["values"] is None
    assert best["info"] == {"reward": 1.0, "response_length": float(first), "reward_metrics": {"format": 1.0}}


def test_a_prompts_pictures_lie_beside_the_file_once_and_small(tokenizer: Any, tmp_path: Path) -> None:
    wide = EncodedImage.from_any(np.full((300, 1200, 3), 40, np.uint8))
    broken = EncodedImage(wide.data[:200], "0" * 64, 4, 4)
    one = experience(tokenizer, ["123", "321"], [1.0, 0.0])
    seen = replace(one, prompts=(Prompt("?", images=(wide,)), Prompt("?", images=(wide, broken))))
    path = TrajectorySaver(tmp_path).save([seen], 0, get_fake_strategy(), tokenizer)
    first, second = read(path)
    assert (first["has_images"], first["num_images"], second["num_images"]) == (True, 1, 2)
    assert first["image_paths"] == second["image_paths"][:1] and second["image_paths"][1] is None
    [file] = (tmp_path / "trajectories" / "images").iterdir()
    assert str(file.relative_to(tmp_path / "trajectories")) == first["image_paths"][0]
    with Image.open(file) as image:
        assert image.size == (512, 128) and image.getpixel((3, 3)) == (40, 40, 40)
    plain = read(TrajectorySaver(tmp_path / "plain").save([one], 0, get_fake_strategy(), tokenizer))[0]
    assert (plain["has_images"], plain["image_paths"]) == (False, [])
    assert not (tmp_path / "plain" / "trajectories" / "images").exists()


def test_log_probs_are_the_actors_own_where_it_computed_them_and_values_the_critics(
    tokenizer: Any, tmp_path: Path
) -> None:
    one = experience(tokenizer, ["12"], [1.0])
    old = np.full(one.batch.tokens, -0.25, np.float32)
    critic = np.arange(one.batch.tokens, dtype=np.float32)
    one = replace(one, batch=one.batch.replace(old_logprobs=old), values=critic, entropy=None)
    (found,) = read(TrajectorySaver(tmp_path).save([one], 0, get_fake_strategy(), tokenizer))
    assert found["action_log_probs"] == old.tolist() and found["values"] == critic.tolist()
    assert (found["policy_entropy"], found["policy_entropy_is"]) == (0.25, "mean negative log-prob")


def test_a_reference_answer_beside_a_label_is_told_apart(tokenizer: Any, tmp_path: Path) -> None:
    prompt = Prompt("sort 312 :", label="gsm8k_rule", meta={"reference": ["123", 4]})
    one = replace(experience(tokenizer, ["12"], [1.0]), prompts=(prompt,))
    (found,) = read(TrajectorySaver(tmp_path).save([one], 0, get_fake_strategy(), tokenizer))
    assert (found["label"], found["reference"]) == ("gsm8k_rule", ["123", 4])


def test_marked_tokens_join_to_the_text_and_the_highest_entropies_are_marked(tokenizer: Any, tmp_path: Path) -> None:
    one = experience(tokenizer, ["sort 123 ä"], [1.0])
    saver = TrajectorySaver(tmp_path, mark_high_entropy_tokens=True, high_entropy_token_ratio=0.3)
    (found,) = read(saver.save([one], 0, get_fake_strategy(), tokenizer))
    assert one.entropy is not None
    tokens = found["generated_tokens"]
    assert "".join(token["text"] for token in tokens) == found["generated_text"]
    assert "".join(token["text"] for token in found["pure_generated_tokens"]) == found["pure_generated_text"]
    marked = [token["entropy_score"] for token in tokens if token["high_entropy"]]
    assert marked and min(marked) > max(t["entropy_score"] for t in tokens if not t["high_entropy"])
    assert len(marked) == max(1, int(len(tokens) * 0.3))
    one = replace(one, entropy=None)
    with pytest.raises(DataError, match="mark_high_entropy_tokens"):
        saver.save([one], 0, get_fake_strategy(), tokenizer)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=30), st.sampled_from([0.01, 0.2, 0.29, 0.5, 1.0]))
def test_marked_are_those_the_losses_filter_keeps(tokens: list[tuple[int, bool]], ratio: float) -> None:
    from rlbench import rl

    entropy = np.array([value for value, _ in tokens], np.float32)
    trained = np.array([is_trained for _, is_trained in tokens], bool)
    rows = torch.from_numpy(entropy)[None], torch.from_numpy(trained)[None]
    keep = rl.high_entropy(ratio, level="sequence")._highest(*rows)
    expected = keep[0].numpy() if trained.any() else np.zeros(len(tokens), bool)
    assert np.array_equal(high_entropy(entropy, trained, ratio), expected)


def test_a_tokenizer_without_a_file_gives_its_tokens_one_by_one(tokenizer: Any) -> None:
    class Plain:
        all_special_ids = tokenizer.all_special_ids

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    ids = np.array([*tokenizer.encode("1 2"), tokenizer.eos_token_id])
    assert token_texts(ids, Plain()) == token_texts(ids, tokenizer)
    assert token_texts(ids, Plain())[-1] == (tokenizer.eos_token, True)


def test_numbers_that_are_not_finite_are_null_and_strange_text_survives(tokenizer: Any, tmp_path: Path) -> None:
    one = experience(tokenizer, ['<b>"\\é', "1"], [float("nan"), 1.0])
    one.batch.sampler_logprobs[0] = -np.inf
    found = read(TrajectorySaver(tmp_path).save([one], 0, get_fake_strategy(), tokenizer))
    strange = found[1]
    assert strange["info"]["reward"] is None and strange["action_log_probs"][0] is None
    assert strange["pure_generated_text"] == tokenizer.decode(tokenizer.encode('<b>"\\é'), skip_special_tokens=True)


def test_nothing_to_save_writes_nothing_and_a_failed_write_leaves_the_old_file(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = experience(tokenizer, ["1"], [1.0])
    assert TrajectorySaver(tmp_path, 0).save([one], 0, get_fake_strategy(), tokenizer) is None
    assert TrajectorySaver(tmp_path).save([], 0, get_fake_strategy(), tokenizer) is None
    assert list(tmp_path.iterdir()) == []
    path = TrajectorySaver(tmp_path).save([one], 0, get_fake_strategy(), tokenizer)
    before = read(path)
    monkeypatch.setattr(Path, "write_text", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        TrajectorySaver(tmp_path).save([experience(tokenizer, ["2"], [0.0])], 0, get_fake_strategy(), tokenizer)
    assert read(path) == before and len(list((tmp_path / "trajectories").iterdir())) == 1


@pytest.mark.parametrize(
    "bad", [{"num_trajectories_to_save": -1}, {"high_entropy_token_ratio": 0.0}, {"high_entropy_token_ratio": 1.5}]
)
def test_senseless_arguments_are_refused(bad: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=next(iter(bad))):
        TrajectorySaver(tmp_path, **bad)


ANSWERS = [["123", "1", "22", "3"], ["1" * 30, "12"]]
REWARDS = [[1.0, 0.5, 0.5, 0.25], [0.75, -1.0]]


@pytest.mark.engine
def test_samples_of_all_ranks_are_chosen_as_one_process_would(engine: Ranks, tokenizer: Any, tmp_path: Path) -> None:
    """Defect absent: the samples of rank 0 alone, and of those the first."""

    def saved(folder: str, count: int) -> Any:
        s = FSDPV2Strategy()
        own = experience(tokenizer, ANSWERS[s.rank], REWARDS[s.rank], first_group=2 * s.rank)
        return TrajectorySaver(folder, count).save([own], 7, s, tokenizer)

    paths = engine.run(saved, str(tmp_path / "ranks"), 4)
    assert paths[1] is None
    found = read(paths[0])
    parts = [experience(tokenizer, ANSWERS[r], REWARDS[r], first_group=2 * r) for r in (0, 1)]
    alone = read(TrajectorySaver(tmp_path / "alone", 4).save(parts, 7, get_fake_strategy(), tokenizer))
    placed = ("rank", "experience_index")
    assert [{k: v for k, v in one.items() if k not in placed} for one in found] == [
        {k: v for k, v in one.items() if k not in placed} for one in alone
    ]
    assert [(one["rank"], one["pure_generated_text"]) for one in found] == [(0, "123"), (1, "12"), (0, "22"), (0, "3")]


@pytest.mark.engine
def test_a_rank_without_samples_and_one_that_fails(engine: Ranks, tokenizer: Any, tmp_path: Path) -> None:
    def saved(folder: str, mark: bool) -> Any:
        s = FSDPV2Strategy()
        own = [] if s.rank == 0 else [replace(experience(tokenizer, ["12"], [1.0]), entropy=None)]
        try:
            return TrajectorySaver(folder, mark_high_entropy_tokens=mark).save(own, 7, s, tokenizer)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    assert len(read(engine.run(saved, str(tmp_path), False)[0])) == 1
    first, second = engine.run(saved, str(tmp_path), True)
    assert first.startswith("EngineError: reading samples failed on rank 1")
    assert second.startswith("DataError: mark_high")

"""Joined values hold each part untouched, one after another; what does not go together is refused."""

from collections.abc import Mapping
from dataclasses import fields, replace

import numpy as np
import pytest

from rlbench.data import Prompt, PromptSet, Ragged, Rollouts, join, load
from rlbench.errors import DataError
from tests.data.comparing import batch, centred, equal, full, same
from tests.data.values import rollouts
from tests.data.written import sorting, stepped


def test_the_rollouts_here_leave_no_field_at_its_default():
    made, bare = full(), rollouts()
    for field in fields(Rollouts):
        if field.name in (
            "prompts",
            "prompt_ids",
            "responses",
            "logprobs",
            "group",
            "finish",
            "versions",
            "texts",
            "sampling",
            "not_started",
        ):
            continue
        assert str(getattr(made, field.name)) != str(getattr(bare, field.name)), f"{field.name}: give it to full()"


# -- rollouts


@pytest.mark.parametrize("how", [lambda a, b: join(a, b), lambda a, b: a + b, lambda a, b: join([a, b])])
def test_each_part_is_in_the_whole_as_it_was(how):
    a, b = full(), full(rollouts(prompts=("x", "y", [1, 2]), labels=(1, None, "l")))
    whole = how(a, b)
    assert len(whole) == 6 and whole.samples == 12 and whole.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert (whole.number, whole.stats, whole.tokenizer) == (
        7,
        {"tokens": 42.0, "seconds": 4.0, "peak_bytes": 5.0},
        "some/folder",
    )
    for part, rows in ((a, slice(0, 3)), (b, slice(3, 6))):
        same(replace(whole[rows], stats=part.stats), part)
    assert [e.index for e in whole.reward_errors] == [1, 7]


def test_a_part_that_lacks_a_field_has_what_it_means_to_lack_it():
    a, b = full(), rollouts(prompts=("x", "y", "z")).score(range(6))
    for whole, lacking in ((join(a, b), slice(3, 6)), (join(b, a), slice(0, 3))):
        part = whole[lacking]
        assert part.mask.all() and not part.turns.any() and part.mask.dtype == bool and part.turns.dtype == np.int32
        assert part.turn_rewards.lengths.tolist() == [1] * 6 and np.isnan(part.turn_rewards.values).all()
        assert np.isnan(part.env_rewards).all() and np.isnan(part.reward_seconds).all() and part.infos == ({},) * 6
        assert np.isnan(part.channels["entropy"]).all() and part.channels["entropy"].dtype == np.float32
        assert (part.routing.values == -1).all() and (whole.routing.lengths == whole.batch(centred).lengths).all()
        assert np.isnan(part.components["format"]).all() and not part.reward_errors
        assert part.rewards.tolist() == list(range(6)) and whole.tokenizer == "" and whole.number == 0
    assert join(b, b).mask is None and join(b, b).infos == () and join(b, b).turn_rewards is None


def test_joined_rollouts_can_be_saved_scored_and_trained_on(tmp_path):
    whole = join(full(), rollouts(prompts=("x", "y", "z")).score(range(6)))
    again = Rollouts.from_parquet(whole.to_parquet(tmp_path / "r.parquet"))
    assert again.group.tolist() == whole.group.tolist() and again.texts == whole.texts
    rescored = whole.score(lambda r: len(r))
    assert rescored.rewards.tolist() == whole.lengths.tolist()
    assert whole.batch(centred).group.tolist() == whole.group.tolist()


def test_rewards_that_only_some_have_are_refused():
    a, b = full(), rollouts()
    with pytest.raises(DataError, match="rewards"):
        a + b
    assert join(b, b).rewards is None


def test_equal_prompts_stay_apart_and_those_nobody_started_stay_known():
    a = rollouts()
    some = replace(a.select(a.group < 1), not_started=(1, 2), prompt_ids=Ragged.from_rows([[10], [], []], np.int32))
    assert len(a + a) == 6 and (a + some).not_started == (4, 5) and (some + some).not_started == (1, 2, 4, 5)


def test_rollouts_of_different_distributions_or_tokenizers_are_refused():
    a = rollouts()
    with pytest.raises(DataError, match="temperature"):
        a + rollouts(temperature=0.7)
    with pytest.raises(DataError, match="top_k"):
        a + rollouts(top_k=5)
    with pytest.raises(DataError, match="tokenizers"):
        replace(a, tokenizer="x") + replace(a, tokenizer="y")
    whole = rollouts(max_tokens=3, top_p=1.0) + rollouts(max_tokens=4)
    assert whole.sampling == {"temperature": 1.0, "top_p": 1.0}


def test_channels_of_a_step_go_along():
    whole = stepped(sorting()) + sorting(prompts=2)
    assert np.isfinite(whole[:4].channels["advantage"]).all() and np.isnan(whole[4:].channels["advantage"]).all()


# -- batches


def test_batches_keep_their_rows_and_their_groups_stay_apart():
    a, b = batch(), batch(stepped(sorting()))[::-1]
    b = b.replace(group=b.group * 2)  # 0 and 2 are groups of the other one too
    for whole in (a + b, join(a, b)):
        assert len(whole) == len(a) + len(b)
        assert equal(whole[: len(a)], a)
        assert equal(whole[len(a) :].replace(group=b.group), b)
        groups = whole.group[len(a) :]
        assert groups.min() == 3 and groups.dtype == np.int32
        assert len(np.unique(whole.group)) == 3 + len(np.unique(b.group))
        assert (groups[:, None] == groups[None]).tolist() == (b.group[:, None] == b.group[None]).tolist()


def test_columns_that_only_some_batches_have_are_named():
    a = batch()
    b = a.replace(old_logprobs=a.sampler_logprobs, rewards=None)
    with pytest.raises(DataError, match="old_logprobs"):
        a + b
    assert (b + b).old_logprobs.tolist() == a.sampler_logprobs.tolist() * 2


def test_batches_of_two_temperatures_are_refused():
    with pytest.raises(DataError, match=r"temperatures 0\.7, 1\.0"):
        batch() + batch().replace(temperature=0.7)


def test_a_batch_is_selected_by_a_mask():
    made = batch()
    assert equal(made.select(made.rewards > 2), made.rows([3, 4, 5]))
    with pytest.raises(DataError, match="wanted 6 booleans"):
        made.select(np.ones(5, bool))


# -- prompt sets


def test_prompt_sets_follow_each_other():
    a = load([[1], [2, 2, 2]], max_prompt_tokens=2, on_long="keep", name="a")
    b = load([[3]], max_prompt_tokens=2, name="b")
    whole = a + b
    assert [p.content for p in whole] == [[1], [2, 2, 2], [3]] and whole.lengths.tolist() == [1, 3, 1]
    assert whole.too_long == a.too_long and whole.max_prompt_tokens == 2 and whole.name == ""
    assert (a + a).name == "a" and (a + load(["x"])).lengths is None and len(join(a, b, b)) == 4


# -- refusals


@pytest.mark.parametrize(
    ("values", "seen"),
    [([], "nothing"), ([rollouts(), 3], "int"), ([rollouts(), PromptSet((Prompt("a"),))], "Rollouts, PromptSet")],
)
def test_what_cannot_be_joined_is_refused(values, seen):
    with pytest.raises(DataError, match=seen):
        join(values)


def test_plus_refuses_other_kinds():
    for value in (rollouts(), batch(), PromptSet((Prompt("a"),))):
        with pytest.raises(TypeError):
            value + 3
    assert isinstance(rollouts().channels, Mapping)


def test_equal_prompts_stay_apart_or_become_one_group():
    a = rollouts().score(range(6))
    b = rollouts(prompts=("sort 312 :", "new :", "sort 21 :"), labels=("123", "n", "12")).score(range(10, 16))
    b = replace(b, prompt_ids=a.prompt_ids.take([1, 2, 0]))
    assert len(a + b) == 6
    whole = join(a, b, same_prompts=True)
    assert [p.text for p in whole.prompts] == ["sort 21 :", "sort 312 :", "sort 4 :", "new :"]
    by_prompt = {g.prompt: [r.reward for r in g.outputs] for g in whole}
    assert by_prompt == {
        "sort 21 :": [0, 1, 14, 15],
        "sort 312 :": [2, 3, 10, 11],
        "sort 4 :": [4, 5],
        "new :": [12, 13],
    }
    assert [row.tolist() for row in whole.prompt_ids] == [a.prompt_ids[i].tolist() for i in (0, 1, 2, 2)]
    both = join(full(), full(), same_prompts=True)
    assert [e.index for e in both.reward_errors] == [1, 3] and [i["turns"] for i in both.infos][:4] == [0, 1, 0, 1]


def test_prompts_that_differ_in_label_or_meta_are_not_the_same():
    a = rollouts()
    other = replace(a, prompts=(Prompt("sort 21 :", "21"), *a.prompts[1:]))
    marked = replace(a, prompts=(Prompt("sort 21 :", "12", {"source": "x"}), *a.prompts[1:]))
    assert len(join(a, other, same_prompts=True)) == 4 and len(join(a, marked, same_prompts=True)) == 4
    tokens = replace(a, prompt_ids=a.prompt_ids.with_values(a.prompt_ids.values + 1))
    with pytest.raises(DataError, match="'sort 21 :' has other token ids"):
        join(a, tokens, same_prompts=True)


def test_a_batch_is_selected_by_a_function_of_its_rows():
    made = batch().replace(ref_logprobs=batch().sampler_logprobs * 2)
    seen = []
    kept = made.select(lambda row: seen.append(row) or row.reward >= 4 or len(row.response) == 1)
    assert kept.rewards.tolist() == [0, 4, 5] and equal(kept, made.rows([0, 4, 5]))
    assert equal(made.select(made.rewards > 2), made.rows([3, 4, 5]))
    row = seen[3]
    assert (row.index, row.group, row.reward, row.truncated, row.weight_version) == (3, 1, 3.0, False, 0)
    assert row.response.tolist() == made.responses[3].tolist() and row.prompt.tolist() == made.prompts[3].tolist()
    for name in ("mask", "advantages", "sampler_logprobs", "ref_logprobs"):
        wanted = made.responses.with_values(getattr(made, name))[3]
        assert getattr(row, name).tolist() == wanted.tolist()
    assert row.old_logprobs is None
    with pytest.raises(DataError, match="wanted 6 booleans"):
        made.select(np.ones(5, bool))


def test_prompts_nobody_started_in_one_of_them_are_known_by_the_other():
    a = rollouts()
    some = replace(a[:0], prompts=a.prompts, prompt_ids=a.prompt_ids.take([0, 0, 0]), not_started=(0, 1, 2))
    assert join(some, some, same_prompts=True).not_started == (0, 1, 2)

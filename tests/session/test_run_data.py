"""What a run's options make of files: prompts, labels, reference answers, texts, rewards."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlbench.data import Mixture, PromptStream, TrainBatch
from rlbench.engines import paths
from rlbench.errors import BuildError, DataError
from rlbench.session import options
from rlbench.session.command import run_data
from rlbench.strategies.options.config import OptionError
from rlbench.tiny import tasks
from rlbench.trainers.experience.samples import reference_of
from rlbench.trainers.options.run_config import RunConfig

ROWS = [{"input": f"{i} + {i}", "label": str(2 * i), "kind": "sum", "task": f"twice {i}"} for i in range(6)]
REWARDS = """
def score(rollout):
    return float(rollout.text == "1")

def both(model_rewards, labels, queries, refs, label_map):
    return sum(model_rewards)

NUMBER = 3
"""


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return written(tmp_path / "rows.jsonl")


@pytest.fixture
def rewards(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "my_rewards.py"
    path.write_text(REWARDS)
    yield path
    sys.modules.pop(path.stem, None)


def written(path: Path, rows: Any = ROWS) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def config(**given: Any) -> RunConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return RunConfig.load("grpo", None, given)


def read(source: str, **given: Any) -> list[Any]:
    """The prompts of a run, in the order of the file."""
    found = run_data.prompts_of(config(prompt_data=source, **given))
    assert isinstance(found, PromptStream)
    return list(found.prompts)


def test_a_file_gives_prompts_with_labels_and_their_other_columns(rows: str) -> None:
    first, *_ = found = read(rows)
    assert len(found) == 6 and (first.content, first.label) == ("0 + 0", "0")
    assert first.meta == {"kind": "sum", "task": "twice 0"}


def test_columns_go_by_the_names_they_are_given(rows: str) -> None:
    first = read(rows, input_key="task", label_key="kind")[1]
    assert (first.content, first.label) == ("twice 1", "sum") and first.meta["label"] == "2"
    with pytest.raises(DataError, match=r"no column 'taks'.*nearest.*task"):
        read(rows, input_key="taks")
    with pytest.raises(DataError, match="no column 'lable'"):
        read(rows, label_key="lable")


def test_a_reference_answer_stands_beside_a_label_that_says_the_kind_of_task(rows: str) -> None:
    """What `reward_fn` is given as `refs`."""
    plain, keyed = read(rows)[1], read(rows, label_key="kind", reference_key="label")[1]
    assert reference_of(plain) == "2" and (keyed.label, reference_of(keyed)) == ("sum", "2")
    with pytest.raises(OptionError, match=r"reference_key='answr': .*rows.jsonl has no such column"):
        read(rows, reference_key="answr")


def test_a_template_makes_the_prompt_of_a_rows_columns(rows: str) -> None:
    assert read(rows, input_template="Q: {task}, a {kind}")[1].content == "Q: twice 1, a sum"
    with pytest.raises(OptionError, match="input_key has no effect with input_template"):
        read(rows, input_template="{task}", input_key="task")


def test_texts_become_chats_where_the_template_or_a_system_prompt_asks_for_it(rows: str) -> None:
    user = {"role": "user", "content": "1 + 1"}
    assert read(rows)[1].content == "1 + 1"
    assert read(rows, apply_chat_template=True)[1].content == [user]
    system = {"role": "system", "content": "Be brief."}
    assert read(rows, system_prompt="Be brief.")[1].content == [system, user]


def test_options_of_the_chat_template_count_where_prompts_and_texts_are_read(rows: str, tmp_path: Path) -> None:
    """The built-in template reads none, and says so."""
    given = {"template": '{"mood": "!"}', "apply_chat_template": True}
    with pytest.raises(DataError, match="does not read mood"):
        read(rows, **given)
    with pytest.raises(DataError, match="no chats"):
        read(rows, template='{"mood": "!"}')
    with pytest.raises(DataError, match="does not read tools"):
        read(rows, tools=[{"name": "look"}], apply_chat_template=True)
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"prompt": "a", "completion": "b"}))
    made = RunConfig.load("sft", None, {"pretrain": "tiny", "data": str(texts), **given})
    assert made.ppo.template == {"mood": "!"} and "template" not in made.trainer_options
    with pytest.raises(DataError, match="does not read mood"):
        run_data.data_of(made)
    kept = tmp_path / "tools.json"
    kept.write_text('[{"name": "look"}]')
    assert config(tools=str(kept)).ppo.tools == [{"name": "look"}]
    for wrong in ("{", "[1]", str(tmp_path / "none.json")):
        with pytest.raises(OptionError, match="template="):
            config(template=wrong)


def test_no_more_prompts_are_read_than_asked_for(rows: str) -> None:
    assert len(read(rows, max_samples=4)) == 4 and len(read("tiny", max_samples=50)) == 50
    given = config(prompt_data=rows, eval_data=rows, max_eval_samples=2)
    assert len(run_data.eval_prompts_of(given) or ()) == 2


def test_prompts_longer_than_the_limit_are_left_out_and_told(tmp_path: Path) -> None:
    long = written(tmp_path / "long.jsonl", [*ROWS, {"input": "9" * 60, "label": "", "kind": "", "task": ""}])
    with pytest.warns(UserWarning, match="1 of 7"):
        found = run_data.prompts_of(config(prompt_data=long, prompt_max_len=40))
    assert isinstance(found, PromptStream) and len(found.prompts) == 6


def test_a_folder_has_splits_and_a_file_is_one(tmp_path: Path, rows: str) -> None:
    pytest.importorskip("datasets")
    folder = tmp_path / "both"
    folder.mkdir()
    for name, part in (("train", ROWS[:4]), ("test", ROWS[4:])):
        written(folder / f"{name}.jsonl", part)
    assert len(read(str(folder))) == 4 and len(read(str(folder), prompt_split="test")) == 2
    evaluated = [config(prompt_data=rows, eval_data=str(folder), **own) for own in ({}, {"eval_split": "train"})]
    assert [len(run_data.eval_prompts_of(one) or ()) for one in evaluated] == [2, 4]
    assert len(read(rows, prompt_split="test")) == len(read(str(tmp_path / "*.jsonl"))) == 6


def test_the_built_in_tasks_splits_do_not_mix() -> None:
    def splits(found: Any) -> set[str]:
        return {tasks.split_of(prompt.content[0]["content"].removeprefix("sort ")) for prompt in found}

    assert splits(read("tiny", max_samples=64)) == {"train"}
    assert splits(read("tiny", max_samples=64, prompt_split="test")) == {"eval"}
    evaluated = config(prompt_data="tiny", eval_data="tiny", prompt_split="test", eval_split="train")
    assert splits(run_data.eval_prompts_of(evaluated)) == {"train"}
    assert len(run_data.eval_prompts_of(config(eval_data="tiny")) or ()) == 500
    with pytest.raises(OptionError, match="no split 'valid'"):
        read("tiny", prompt_split="valid")


def test_several_sources_are_mixed_in_the_shares_asked_for(rows: str) -> None:
    def counts(**given: Any) -> dict[str, int]:
        found = run_data.prompts_of(config(prompt_data=f"{rows}, tiny", max_samples=18, **given))
        assert isinstance(found, Mixture)
        found.take(40)
        return found.counts

    assert counts(prompt_data_probs=(0.75, 0.25)) == {rows: 30, "tiny": 10}
    assert counts() == {rows: 10, "tiny": 30}, "in proportion to 6 and 18 prompts"
    with pytest.raises(OptionError, match="stands there twice"):
        run_data.prompts_of(config(prompt_data=f"{rows},{rows}"))


def test_the_seed_gives_the_order_of_the_prompts(rows: str) -> None:
    def order(seed: int) -> list[Any]:
        return [prompt.content for prompt in run_data.prompts_of(config(prompt_data=rows, seed=seed)).take(6)]

    assert order(1) == order(1) != order(2) and sorted(order(1)) == sorted(order(2))


def test_texts_of_the_language_loss_are_read_by_the_same_key(rows: str, tmp_path: Path) -> None:
    given = {"ptx_coef": 0.1, "pretrain_data": written(tmp_path / "texts.jsonl"), "prompt_data": rows}
    found = run_data.texts_of(config(**given, input_key="task"))
    assert found is not None and [text.content for text in found][:2] == ["twice 0", "twice 1"]
    assert run_data.texts_of(config()) is None


def test_texts_of_several_sources_are_mixed_and_a_folders_split_is_chosen(rows: str, tmp_path: Path) -> None:
    def texts(**given: Any) -> Any:
        return run_data.texts_of(config(ptx_coef=0.1, prompt_data=rows, **given))

    few = [written(tmp_path / f"{name}.jsonl", [{"input": f"{name} {i}"} for i in range(8)]) for name in "ab"]
    mixture = texts(pretrain_data=",".join(few), pretrain_data_probs=(0.75, 0.25))
    assert isinstance(mixture, Mixture)
    assert sorted(prompt.content[0] for prompt in mixture.take(8)) == list("aaaaaabb")
    folder = tmp_path / "splits"
    folder.mkdir()
    for split in ("train", "test"):
        written(folder / f"{split}.jsonl", [{"input": split}])
    assert [one.content for one in texts(pretrain_data=str(folder))] == ["train"]
    assert [one.content for one in texts(pretrain_data=str(folder), pretrain_split="test")] == ["test"]
    told = written(tmp_path / "told.jsonl", [{"prompt": "a", "completion": "b"}])
    with pytest.raises(OptionError, match=r"told\.jsonl holds demonstrations, and several sources"):
        texts(pretrain_data=f"{few[0]},{told}")


def test_pictures_stand_in_the_column_that_is_named(tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (4, 4), "red").save(tmp_path / "red.png")
    seen = [{"input": "what?", "look": str(tmp_path / "red.png"), "images": str(tmp_path / "none.png")}]
    place = written(tmp_path / "seen.jsonl", seen)
    given = {"pretrain": "tiny-vision", "prompt_data": place, "apply_chat_template": True, "reward": "math"}
    [prompt] = run_data.prompts_of(config(**given, images_key="look")).take(1)
    assert len(prompt.images) == 1 and prompt.images[0].digest
    with pytest.raises(DataError, match=r"none\.png"):
        run_data.prompts_of(config(**given))


def test_rewards_are_functions_of_files_and_modules_the_built_in_one_and_checked_mathematics(rewards: Path) -> None:
    answered = SimpleNamespace(text="1", prompt=tasks.message("1"))
    assert run_data.reward_of(config(reward=f"{rewards}:score"))(answered) == 1.0
    assert run_data.reward_of(config(reward="rlbench.tiny.tasks:reward")) is tasks.reward
    assert run_data.reward_of(config()) is tasks.reward
    assert callable(run_data.reward_of(config(reward="math")))
    assert run_data.reward_of(config(remote_rm_url="http://reward.example")) is None
    assert run_data.imported(f"{rewards}:both", "reward_fn")([1, 2], *[None] * 4) == 3


def test_several_rewards_are_a_list_with_the_folders_of_models_first(
    rewards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    found = run_data.reward_of(config(reward_pretrain=["judge"], reward=f"{rewards}:score"))
    assert found[0] == str((tmp_path / "judge").resolve()), "the ranks run in another folder"
    assert found[1].__name__ == "score" and len(found) == 2
    with pytest.raises(OptionError, match=f"reward_pretrain='juge': there is no folder {tmp_path}/juge"):
        run_data.reward_of(config(reward_pretrain=["juge"]))


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("score", "wanted module:function"),
        (":score", "wanted module:function"),
        ("no.such.module:f", "is not there"),
        ("none.py:f", "is not there .*no file"),
        ("rlbench.tiny.tasks:rewad", "is not there"),
        ("rlbench.tiny.tasks:SPLITS", "is a tuple, no function"),
    ],
)
def test_a_function_that_is_not_there_is_named_with_its_option(named: str, said: str) -> None:
    with pytest.raises(OptionError, match=rf"^reward_fn='{named}'.*{said}"):
        run_data.imported(named, "reward_fn")


def test_models_are_folders_hub_ids_or_the_embedded_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert options.model_at("model") == str((tmp_path / "model").resolve())
    asked: list[str] = []
    monkeypatch.setattr(paths, "_need_served", lambda hub_id, folder: asked.append(hub_id))  # in the place of the hub
    assert options.model_at("an-org/a-model") == "an-org/a-model" and asked == ["an-org/a-model"]
    assert (Path(options.model_at("tiny")) / "config.json").is_file()
    with pytest.raises(BuildError, match="no model folder"):
        options.model_at("./nowhere")


def test_one_configuration_of_a_folder_is_read(tmp_path: Path) -> None:
    for name, count in (("main", 4), ("other", 2)):
        written(tmp_path / f"{name}.jsonl", ROWS[:count])
    listed = [f"- config_name: {name}\n  data_files: {name}.jsonl" for name in ("main", "other")]
    (tmp_path / "README.md").write_text("\n".join(["---", "configs:", *listed, "---"]))
    assert len(run_data.prompts_of(config(prompt_data=f"{tmp_path}:other")).prompts) == 2
    with pytest.raises(DataError, match="another"):
        run_data.prompts_of(config(prompt_data=f"{tmp_path}:another"))


# -- texts


def on_texts(method: str, **given: Any) -> RunConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return RunConfig.load(method, None, given)


JUDGED = [
    {"prompt": f"sort {i}{i + 1}", "completion": "1", "chosen": str(i), "rejected": "0", "label": i % 2 == 0}
    for i in range(1, 6)
]


def test_a_file_of_texts_is_read_as_the_method_wants_it(tmp_path: Path) -> None:
    place = written(tmp_path / "texts.jsonl", JUDGED)
    for method, sequences in (("sft", 5), ("simpo", 10), ("kto", 10)):
        batch = run_data.data_of(on_texts(method, data=place))
        assert len(batch) == sequences and len(batch.stream()) == 5
    assert len(run_data.data_of(on_texts("sft", data=place, max_samples=3))) == 3
    held_out = run_data.eval_data_of(on_texts("sft", data=place, eval_data=place, max_eval_samples=2))
    assert held_out is not None and len(held_out) == 2 and run_data.eval_data_of(on_texts("sft", data=place)) is None
    with pytest.raises(DataError, match="5 of 5 rows would be cut: they have more than max_length=4"):
        run_data.data_of(on_texts("sft", data=place, max_length=4))
    chats = run_data.data_of(on_texts("sft", data=place, system_prompt="be brief"))
    assert chats.prompts.lengths.min() > run_data.data_of(on_texts("sft", data=place)).prompts.lengths.max()
    with pytest.raises(DataError, match="row 0: it has no column 'messages'"):
        run_data.data_of(on_texts("sft", data=written(tmp_path / "p.jsonl", ROWS)))


def test_the_built_in_task_has_texts_for_every_method() -> None:
    for method in ("sft", "dpo", "kto"):
        batch = run_data.data_of(on_texts(method, max_samples=20, seed=3))
        assert len(batch.stream()) >= 10
    judged = run_data.data_of(on_texts("kto", max_samples=20))
    assert {1, -1, 0} == set(judged.preference.tolist())


def test_a_loss_is_written_as_python_would_or_found_in_a_file(tmp_path: Path) -> None:
    from rlbench.rl import dapo, dpo

    def loss(named: str | None) -> Any:
        return run_data.loss_of(on_texts("dpo", loss=named))

    assert loss(None) is None
    assert loss("dpo(beta=0.2, label_smoothing=0.1)") == dpo(beta=0.2, label_smoothing=0.1)
    assert run_data.loss_of(config(loss="dapo")) == dapo()
    (tmp_path / "my_loss.py").write_text("from rlbench import rl\nmine = rl.dpo(beta=0.3)\n")
    assert loss(f"{tmp_path}/my_loss.py:mine") == dpo(beta=0.3)
    sys.modules.pop("my_loss", None)
    for wrong in ("dpoo", "dpo(0.2)", "dpo(gamma=1)", "dpo(beta=open('x'))", "__import__('os')"):
        with pytest.raises(OptionError, match="a name with plain values"):
            loss(wrong)


def test_texts_beside_a_reward_are_demonstrations_where_the_rows_are_some(tmp_path: Path) -> None:
    def texts(rows: Any) -> Any:
        place = written(tmp_path / "t.jsonl", rows)
        return run_data.texts_of(config(pretrain_data=place, ptx_coef=0.1))

    batch = texts(JUDGED)
    assert isinstance(batch, TrainBatch) and len(batch) == 5
    assert [prompt.text for prompt in texts([{"input": "some text"}])] == ["some text"]

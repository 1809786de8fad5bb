"""What a trainer's options name is found from where the user stands; what is missing is said before ranks hear it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rlbench.engines import paths
from rlbench.errors import BuildError
from rlbench.session.options import reference_at
from rlbench.session.training import trainer_places
from rlbench.strategies.options.config import OptionError
from rlbench.trainers.models import policy_module
from rlbench.trainers.options.specs import TrainerSpec

MODELS = ("critic", "reference")


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, with the folder of a model and a file of a reward; home is beside it, with the same."""
    for place in (tmp_path / "project", tmp_path / "home"):
        (place / "model").mkdir(parents=True)
        (place / "model" / "config.json").write_text("{}")
        (place / "judge.py").write_text("def reward_func(queries):\n    return [1.0 for _ in queries]\n")
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def spec(**given: Any) -> TrainerSpec:
    return trainer_places.from_here(TrainerSpec("/the/policy", **given))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_found_relative_to_here_and_to_home(at: Path, name: str) -> None:
    home = at / "home" / "model"
    folders = {"model": at / "project" / "model", "~/model": home, "../home/model": home}
    for written, folder in folders.items():
        assert getattr(spec(**{name: written}), name) == str(folder)
        assert getattr(spec(**{name: Path(written)}), name) == str(folder)
    for held in (True, False, None):
        assert getattr(spec(**{name: held}), name) is held


def test_the_embedded_model_is_one_by_its_name(tiny_path: Path) -> None:
    assert spec(critic="tiny").critic == str(tiny_path) == reference_at("tiny", "/p")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("written", ["./none", "~/none", "/none/at/all", "judge.py"])
def test_a_model_that_is_not_there_is_said_with_the_folder_that_was_looked_for(
    at: Path, name: str, written: str
) -> None:
    with pytest.raises(OptionError) as refused:
        spec(**{name: written})
    assert str(refused.value).startswith(f"{name}={written!r}: ")
    assert os.path.abspath(os.path.expanduser(written)) in str(refused.value)


def test_a_name_that_may_be_the_hubs_is_asked_for_there(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def config_of(path: str) -> Any:
        asked.append(path)
        if path != "an-org/critic":
            raise BuildError("the hub has no such model")

    monkeypatch.setattr(policy_module, "config_of", config_of)
    monkeypatch.setattr(paths, "_need_served", lambda hub_id, folder: None)
    assert spec(critic="an-org/critic").critic == "an-org/critic"
    with pytest.raises(OptionError, match=rf"critic='critics/first'.*{at}/project/critics/first.*the hub has no such"):
        spec(critic="critics/first")
    assert asked == ["an-org/critic", "critics/first"]


def test_rewards_are_found_one_or_several_and_functions_and_addresses_stay(at: Path) -> None:
    score = len
    given = ["model", Path("~/model"), "judge.py", "http://judge.example/x.py", score]
    project, home = at / "project", at / "home"
    wanted = [f"{project}/model", f"{home}/model", f"{project}/judge.py", "http://judge.example/x.py", score]
    assert spec(reward=given).reward == wanted
    assert [spec(reward=one).reward for one in given] == wanted and spec(reward=None).reward is None


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("models", "no folder .*/project/models"),
        ("~/judges.py", "no file .*/home/judges.py"),
        (["judge.py", "./models"], "no folder .*/project/models"),
    ],
)
def test_a_reward_that_is_not_there_is_said_with_its_place(at: Path, reward: Any, said: str) -> None:
    with pytest.raises(OptionError, match=rf"^reward=.*{said}"):
        spec(reward=reward)


def test_a_folder_that_holds_no_model_is_no_reward(at: Path) -> None:
    (at / "project" / "empty").mkdir()
    with pytest.raises(OptionError, match=r"reward='empty'.*holds no config.json"):
        spec(reward="empty")


def test_services_are_found_among_the_options_and_the_arguments(at: Path) -> None:
    found = spec(options={"remote_rm_url": "~/judge.py"}, arguments={"remote_rm_url": ["judge.py", "http://a.example"]})
    assert found.options["remote_rm_url"] == f"{at}/home/judge.py"
    assert found.arguments == {"remote_rm_url": [f"{at}/project/judge.py", "http://a.example"]}
    with pytest.raises(OptionError, match=rf"remote_rm_url='none.py': there is no file {at}/project/none.py"):
        spec(options={"remote_rm_url": ["none.py"]})


def test_folders_to_write_to_are_here_whether_given_or_not(at: Path) -> None:
    found = spec(options={"ckpt_path": "kept", "log_dir": "~/lengths", "eps_clip": 0.1}).options
    assert found == {
        "ckpt_path": f"{at}/project/kept",
        "save_path": f"{at}/project/ckpt",
        "log_dir": f"{at}/home/lengths",
        "eps_clip": 0.1,
    }


def test_a_sessions_reference_is_found_likewise(at: Path) -> None:
    assert reference_at("model", "/p") == f"{at}/project/model" and reference_at("~/model", "/p") == f"{at}/home/model"
    assert (reference_at(True, "/p"), reference_at(None, "/p"), reference_at(False, "/p")) == ("/p", None, None)
    with pytest.raises(BuildError, match=r"no model folder '\./none'"):
        reference_at("./none", "/p")

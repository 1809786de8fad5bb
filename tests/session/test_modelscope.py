"""`use_ms`: which models of a run are asked of ModelScope's client, and what is said where it cannot bring one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlbench.errors import BuildError
from rlbench.options import OptionError
from rlbench.session.command import modelscope
from rlbench.trainers.options.run_config import RunConfig


def run(**options: Any) -> RunConfig:
    return RunConfig.load("ppo", None, {"use_ms": True, "prompt_data": "tiny", "reward": "tiny", **options})


def client(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    """Put a client in the place of ModelScope's."""
    module = ModuleType("modelscope")
    module.snapshot_download = answer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "modelscope", module)


def test_models_named_by_an_id_are_fetched_and_folders_and_embedded_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def snapshot_download(model_id: str) -> str:
        asked.append(model_id)
        return f"/cache/{model_id}"

    client(monkeypatch, snapshot_download)
    config = modelscope.fetched(
        run(pretrain="Qwen/Qwen3", critic_pretrain="Qwen/critic", reward_pretrain=("org/judge", str(tmp_path)))
    )
    assert asked == ["Qwen/Qwen3", "Qwen/critic", "org/judge"]
    assert config.run.pretrain == "/cache/Qwen/Qwen3" and config.given["pretrain"] == "/cache/Qwen/Qwen3"
    assert config.strategy.critic_pretrain == config.trainer_options["critic_pretrain"] == "/cache/Qwen/critic"
    assert config.run.reward_pretrain == ("/cache/org/judge", str(tmp_path))
    same = run(pretrain="tiny")
    assert modelscope.fetched(same) == same and len(asked) == 3


def test_a_model_that_cannot_be_fetched_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(OptionError, match=r"use_ms .* pip install modelscope"):
        modelscope.fetched(run(pretrain="Qwen/Qwen3"))

    def none(model_id: str) -> str:
        raise OSError("no such model\nand more")

    client(monkeypatch, none)
    with pytest.raises(BuildError, match=r"no model 'Qwen/Qwen3' \(no such model\)"):
        modelscope.fetched(run(pretrain="Qwen/Qwen3"))

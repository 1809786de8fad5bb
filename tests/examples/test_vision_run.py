"""`rlbench train` of a model that sees, on the task of pictures: it learns, and equal seeds give equal curves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.curve]

TASK = ["--pretrain", "tiny-vision", "--prompt_data", "tiny-vision", "--reward", "tiny-vision", "--max_tokens", "8"]
SIZES = ["--rollout_batch_size", "32", "--n_samples_per_prompt", "8", "--train_batch_size", "256", "--packing"]
MICRO = ["--micro_train_batch_size", "64", "--micro_rollout_batch_size", "32"]
RATE = ["--lr", "2e-4", "--lr_schedule", "constant"]
EVALUATED = ["--eval_data", "tiny-vision", "--eval_split", "eval", "--max_eval_samples", "200", "--eval_steps", "10"]
STEPS, AGAIN = 40, 4


def trained(file: Path, steps: int, *options: str) -> list[dict[str, Any]]:
    """The metrics of each iteration."""
    command = [str(Path(sys.executable).parent / "rlbench"), "train", "grpo", *TASK, *SIZES, *MICRO, *RATE, *options]
    subprocess.run([*command, "--max_steps", str(steps), "--metrics_file", str(file)], check=True)
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_run_from_the_command_line_learns_what_pictures_show_the_same_way_twice(tmp_path: Path) -> None:
    curve = trained(tmp_path / "metrics.jsonl", STEPS, *EVALUATED)
    right = [one["eval/reward"] for one in curve if "eval/reward" in one]
    assert len(curve) == STEPS and curve[0]["reward"] < 0.7 and max(right) >= 0.9, right
    again = trained(tmp_path / "again.jsonl", AGAIN)
    for name in ("reward", "policy_loss", "entropy", "actor_grad_norm"):
        assert [one[name] for one in again] == [one[name] for one in curve[:AGAIN]], name

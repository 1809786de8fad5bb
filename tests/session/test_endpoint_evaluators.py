"""Evaluators of others ask the endpoint, unmodified, and find what `session.evaluate` finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlbench.session.endpoint.endpoint import Endpoint
from rlbench.tiny import tasks

pytestmark = [pytest.mark.engine, pytest.mark.long]

COUNT = 64
LM_EVAL = """
task: sort
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["#"], max_gen_toks: 12, temperature: 0.0}
metric_list: [{metric: exact_match}]
"""
INSPECT = """
import json
from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import includes
from inspect_ai.solver import generate


@task
def sort():
    rows = [json.loads(line) for line in Path("QUESTIONS").read_text().splitlines()]
    samples = [Sample(input=row["question"], target=row["answer"]) for row in rows]
    return Task(samples, solver=generate(), scorer=includes(), config=GenerateConfig(temperature=0.0, max_tokens=12))
"""


@pytest.fixture(scope="module")
def endpoint(session: Any) -> Iterator[Endpoint]:
    opened = session.endpoint()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def prompts() -> list[Any]:
    return tasks.prompts(COUNT, split="eval", seed=3)


@pytest.fixture(scope="module")
def questions(prompts: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("questions") / "sort.jsonl"
    rows = [{"question": prompt[0]["content"], "answer": tasks.answer(prompt)} for prompt in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def environment(folder: Path, *requirements: str) -> Path:
    """The programs of packages in an environment of their own, which may want other versions than ours."""
    made = subprocess.run([sys.executable, "-m", "venv", str(folder)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    pip = [str(folder / "bin" / "pip"), "install", "-q", "--disable-pip-version-check", *requirements]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=500)
    if "NewConnectionError" in done.stderr:
        pytest.skip(f"{requirements[0]} cannot be installed: no package index is reached")
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / "bin"


def run(command: list[str], endpoint: Endpoint, name: str, folder: Path) -> None:
    own = {"OPENAI_API_KEY": endpoint.key, "RLBENCH_API_KEY": endpoint.key, "RLBENCH_BASE_URL": endpoint.run(name)}
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, env=plain | own, cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def test_lm_eval_finds_what_evaluate_finds(
    session: Any, endpoint: Endpoint, prompts: list[Any], questions: Path, tmp_path: Path
) -> None:
    (tmp_path / "sort.yaml").write_text(LM_EVAL.replace("QUESTIONS", str(questions)))
    programs = environment(tmp_path / "venv", "lm_eval[api]==0.4.13")
    url = f"{endpoint.run('lm-eval')}/chat/completions"
    command = [str(programs / "lm_eval"), "run", "--model", "local-chat-completions", "--tasks", "sort"]
    command += ["--model_args", f"model=policy,base_url={url},num_concurrent=8,max_retries=1"]
    command += ["--include_path", str(tmp_path), "--apply_chat_template", "--output_path", str(tmp_path / "out")]
    run(command, endpoint, "lm-eval", tmp_path)
    (found,) = (tmp_path / "out").rglob("results*.json")
    score = json.loads(found.read_text())["results"]["sort"]["exact_match,none"]
    own = session.evaluate(prompts, lambda r: float(r.text == tasks.answer(r.prompt)), max_tokens=12).reward
    assert score == pytest.approx(own) and 0 < own < 1
    assert len(session.traces("lm-eval")[0].calls) == COUNT


def test_inspect_finds_what_evaluate_finds(
    session: Any, endpoint: Endpoint, prompts: list[Any], questions: Path, tmp_path: Path
) -> None:
    (tmp_path / "sort.py").write_text(INSPECT.replace("QUESTIONS", str(questions)))
    programs = environment(tmp_path / "venv", "inspect_ai==0.3.285", "openai==3.52.0")
    command = [
        str(programs / "inspect"),
        "eval",
        "sort.py",
        "--model",
        "openai-api/rlbench/policy",
        "--log-format",
        "json",
    ]
    run([*command, "--log-dir", "logs", "--display", "plain"], endpoint, "inspect", tmp_path)
    (found,) = (tmp_path / "logs").glob("*.json")
    (scored,) = json.loads(found.read_text())["results"]["scores"]
    own = session.evaluate(prompts, lambda r: float(tasks.answer(r.prompt) in r.text), max_tokens=12).reward
    assert scored["metrics"]["accuracy"]["value"] == pytest.approx(own) and 0 < own < 1
    assert len(session.traces("inspect")[0].calls) == COUNT

"""A session of text imports nothing for images in any of its processes, beyond what vLLM and transformers do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.curve]  # three processes import torch: it takes 30 s

IMAGES = """
def images():
    import sys
    packages = ("PIL", "torchvision", "cv2")
    parts = ("image_processing", "video_processing", "rlbench.tiny.vision_model")
    return [m for m in list(sys.modules) if m.split(".")[0] in packages or any(part in m for part in parts)]
"""

PLAIN_KERNEL = """
import json
from transformers import AutoTokenizer
AutoTokenizer.from_pretrained({path!r})
print(json.dumps({{"plain": images()}}))
"""

PLAIN_WORKER = """
import json
import numpy as np
import vllm.v1.engine.llm_engine
plain = images()
from rlbench.data import EncodedImage
EncodedImage.from_any(np.zeros((56, 56, 3), np.uint8)).pil()
seen = images()
import transformers.models.qwen2_vl.image_processing_qwen2_vl
print(json.dumps({"plain": plain, "decoded": seen, "processor": images()}))
"""

SESSION = """
import json
import rlbench as rb
from rlbench.tiny import tasks

def watch():
    import cProfile, sys
    sys.profile_of_test = cProfile.Profile()
    sys.profile_of_test.enable()

def calls():
    import pstats, sys
    sys.profile_of_test.disable()
    names = "images image_pixels image_tokens image_columns media_features seeing"
    reader = tuple(f"/{name}.py" for name in names.split())
    paths = {path for path, *_ in pstats.Stats(sys.profile_of_test).stats if "/rlbench/" in path}
    steps = any(path.endswith("passes/forward.py") for path in paths)
    return {"reading": [path for path in paths if path.endswith(reader)], "steps": steps}

class Looks(rb.envs.Env):
    def step(self, turn):
        return rb.envs.Step(None, 1.0, done=True, info={"images": images()})

with rb.Session("tiny", name="text-alone", train=rb.Train(shards=2), undo=1) as session:
    rollouts = session.rollout(tasks.prompts(4), n=2, max_tokens=6, progress=False).score(lambda r: float(len(r.text)))
    batch = rollouts.batch(rb.rl.group_normalized())
    session.preflight(batch)
    session.train.run(watch)
    session.train_step(batch)
    session.sync_weights()
    called = session.train.run(calls)
    session.undo()
    stream = rb.data.PromptSet.of(rb.data.as_prompts(tasks.prompts(8))).stream(seed=3)
    sizes = {"rollout_batch_size": 4, "n": 2, "train_batch_size": 8, "max_tokens": 6}
    session.trainer("ppo", stream, tasks.reward, critic=True, **sizes).fit(1)
    rollouts.to_html("rollouts.html")
    looked = session.rollout(tasks.prompts(2), n=1, max_tokens=4, env=Looks, progress=False)
    replica = [step["images"] for rollout in looked.flat for step in rollout.info["steps"]]
    print(json.dumps({"kernel": images(), "ranks": session.train.run(images), "replica": replica, "called": called}))
"""


@pytest.fixture(scope="module")
def processes(cluster: Any, tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """What a plain kernel, a plain worker and a session of text say, each in processes of its own, at the same time."""
    folder = tmp_path_factory.mktemp("alone")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    codes = (PLAIN_KERNEL.format(path=str(tiny_path)), PLAIN_WORKER, SESSION)
    started = [
        subprocess.Popen([sys.executable, "-c", IMAGES + code], cwd=folder, env=kept, stdout=subprocess.PIPE, text=True)
        for code in codes
    ]
    try:
        yield [(process, process.communicate()[0]) for process in started]
    finally:
        for process in started:
            process.kill()


@pytest.fixture(scope="module")
def said(processes: list[Any]) -> tuple[dict[str, Any], ...]:
    assert [process.returncode for process, _ in processes] == [0, 0, 0]
    return tuple(json.loads(output.splitlines()[-1]) for _, output in processes)


def test_its_kernel_imports_what_a_tokenizer_of_transformers_does(said: Any) -> None:
    kernel, _, session = said
    assert set(session["kernel"]) <= set(kernel["plain"])


def test_its_ranks_and_replica_import_what_vllm_does(said: Any) -> None:
    _, worker, session = said
    assert len(session["ranks"]) == 2 and session["replica"]
    for process in (*session["ranks"], *session["replica"]):
        assert set(process) <= set(worker["plain"])


def test_a_step_and_a_sync_of_its_ranks_call_no_code_for_images(said: Any) -> None:
    _, _, session = said
    assert session["called"] == [{"reading": [], "steps": True}] * 2


def test_decoding_a_picture_and_a_processor_of_images_would_show(said: Any) -> None:
    _, worker, _ = said
    assert set(worker["plain"]) < set(worker["decoded"]) < set(worker["processor"])

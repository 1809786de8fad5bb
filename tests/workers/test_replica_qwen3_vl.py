"""A vLLM replica of a Qwen3-VL, whose tower's features go into a layer of the language model too, by transformers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlbench import tiny
from rlbench.data import Prompt, as_prompts
from rlbench.errors import DataError
from rlbench.workers.replica.config import ReplicaConfig
from rlbench.workers.replica.vllm import VllmReplica
from tests.trainers.seeing import save_eyes
from tests.watching import video
from tests.workers.ending import end_here

from .test_replica_images import HELLO, PLACE, expected, job
from .turns import Rows

pytestmark = pytest.mark.engine


def test_log_probs_and_token_ids_are_those_of_transformers_in_a_mixed_batch(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = save_eyes(tmp_path, "qwen3_vl")
    asked = as_prompts(tiny.vision_prompts(2, seed=1))
    both = tuple(prompt.images[0] for prompt in asked)
    asked += [Prompt(HELLO), Prompt([{"role": "user", "content": [PLACE, PLACE]}], images=both)]
    limit = {"limit_mm_per_prompt": {"image": 2}}
    replica = VllmReplica(
        ReplicaConfig(folder, dtype="float32", kv_cache_bytes=64 << 20, max_num_seqs=8, engine_kwargs=limit)
    )
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute") as lane:
        lane.submit(replica.build).result()
        try:
            arrays = lane.submit(replica.generate, job(asked, n=2, temperature=1.0)).result()
            with pytest.raises(DataError, match=r"takes text and images: leave the videos out, .*\(qwen2_5_vl\)"):
                lane.submit(replica.prompt_logprobs, [[5, 6]], [(video(2),)]).result()
        finally:
            lane.submit(end_here, replica).result()
    reference = AutoModelForImageTextToText.from_pretrained(folder).eval(), AutoProcessor.from_pretrained(folder)
    rows = Rows(arrays)
    assert len(rows.keys) == 8
    for key in rows.keys:
        ids, logprobs = expected(reference, asked[key[0]], rows.of("token_ids", key))
        assert arrays.prompt_token_ids[key[0]] == ids
        assert rows.of("logprobs", key) == pytest.approx(logprobs.tolist(), abs=1e-4)

"""What is pushed to the hub is the trainer's model or adapter, whole; what the hub refuses is told in one sentence.

The hub is tests/session/fake_hub.py on loopback, its client huggingface_hub's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants, snapshot_download

import rlbench as rb
from rlbench.errors import CheckpointError
from rlbench.runtime import registry
from rlbench.tiny import tasks
from tests.engines.syncing import gap
from tests.session.fake_hub import READER, TOKEN, FakeHub, serving

pytestmark = pytest.mark.engine
LOADED = """
import json, sys
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

pushed, prompt, response = json.loads(sys.argv[1])
for repo, base in pushed:
    if base:
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), repo)
    else:
        model = AutoModelForCausalLM.from_pretrained(repo)
        AutoTokenizer.from_pretrained(repo)
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
    print(json.dumps(logprobs.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()))
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """The hub this process asks, with a token that may write; temporary folders lie in `tmp_path / "aside"`."""
    (tmp_path / "aside").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "aside"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serving(tmp_path / "store") as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)  # as HF_ENDPOINT does where the client is imported anew
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", served.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield served
    assert not list((tmp_path / "aside").iterdir()), "what was exported for a push"


@pytest.fixture(scope="module")
def adapted(cluster: Any, tiny_path: Path) -> Iterator[Any]:
    with rb.Session("tiny", train=rb.Train(lr=1e-2, lora=rb.Lora(rank=8)), seed=3) as made:
        yield made


@pytest.fixture(scope="module")
def row(adapted: Any) -> Any:
    """One sequence, after a step on more."""
    rollouts = adapted.rollout(tasks.prompts(8, seed=3), n=4, max_tokens=12, progress=False)
    batch = rollouts.score([i % 2 for i in range(rollouts.samples)]).batch(advantage=rb.rl.group_normalized())
    adapted.train_step(batch)
    return batch.rows([0])


def loaded(hub: FakeHub, home: Path, pushed: list[tuple[str, str | None]], row: Any) -> list[list[float]]:
    """Log-probs of each repository, by a process that knows its name (and an adapter's base) alone."""
    asked = json.dumps([pushed, list(map(int, row.prompts.values)), list(map(int, row.responses.values))])
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": READER}
    done = subprocess.run([sys.executable, "-c", LOADED, asked], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_was_pushed_gives_its_loader_the_trainers_logprobs(
    hub: FakeHub, adapted: Any, row: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By xet, as large files, and in one commit: one process loads what came of all three."""
    pushed: list[tuple[str, str | None]] = []
    for way in ("xet", "large-files", "one-commit"):
        objects, stored = len(hub.objects), len(list(hub.store.rglob("*")))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", way == "large-files")  # as of a client without hf_xet
        hub.large = way != "one-commit"
        merged = adapted.push_to_hub(f"someone/{way}", private=True)
        alone = adapted.push_to_hub(f"{way}-adapter", adapter=True, commit_message="as said")
        names = f"someone/{way}", f"someone/{way}-adapter"
        assert (merged.path, alone.path) == tuple(f"{hub.url}/{name}" for name in names)
        assert [hub.private[name] for name in names] == [True, False]
        assert hub.commits[len(pushed) :] == [f"step 1 of rlbench session {adapted.name}", "as said"]
        assert set(hub.repos[names[1]]) == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
        assert set(merged.files) == set(hub.repos[names[0]]) > {"config.json", "tokenizer.json"}
        assert alone.bytes < merged.bytes / 4
        assert (len(hub.objects) > objects) == (way == "large-files")
        assert (len(list(hub.store.rglob("*"))) > stored) == (way == "xet")
        pushed += [(names[0], None), (names[1], adapted.options.path)]
    assert len(hub.repos) == len(pushed) == 6
    found = loaded(hub, tmp_path / "home", pushed, row)
    np.testing.assert_allclose(found, [adapted.logprobs(row)] * 6, atol=1e-4)


def test_sessions_go_on_from_what_was_pushed(hub: FakeHub, adapted: Any, row: Any, tmp_path: Path) -> None:
    """The model as a whole, and the adapter in a trainer and in vLLM's own kernels."""
    adapted.push_to_hub("someone/merged")
    adapted.push_to_hub("someone/adapter", adapter=True)
    whole, alone = (snapshot_download(f"someone/{name}", local_dir=tmp_path / name) for name in ("merged", "adapter"))
    with rb.Session(whole) as other:  # refuses a model of which replica and trainer think differently
        np.testing.assert_allclose(other.logprobs(row), adapted.logprobs(row), atol=1e-4)
    with rb.Session("tiny", train=rb.Train(lora=rb.Lora(path=alone)), inference=rb.Inference(adapters=1)) as other:
        np.testing.assert_allclose(other.logprobs(row), adapted.logprobs(row), atol=1e-4)
        assert gap(other.train, other.inference) <= 1e-4


def test_a_later_push_replaces_the_weights_and_leaves_the_card(hub: FakeHub, adapted: Any, row: Any) -> None:
    adapted.push_to_hub("someone/model")
    held = hub.repos["someone/model"]
    card = held["README.md"].decode()
    held |= {"README.md": b"my own words", "notes.txt": b"kept", "model-00001-of-00002.safetensors": b"old"}
    adapted.push_to_hub("someone/model", adapter=True)
    left = hub.repos["someone/model"]
    assert {n for n in left if "model" in n} == {"adapter_model.safetensors"}
    assert (left["README.md"], left["notes.txt"]) == (b"my own words", b"kept")
    for said in (f"rlbench {rb.__version__}", "rank 8", "optimizer steps | 1", "grpo", "library_name: transformers"):
        assert said in card
    base = Path(adapted.options.path)
    assert base.name in card and "base_model" not in card, "a folder of this machine is no model of the hub"
    told = card + left["adapter_config.json"].decode()
    assert str(base.parent) not in told


@pytest.mark.parametrize(
    ("repo", "token", "said"),
    [
        ("someone/model", None, "hf auth login"),
        ("someone/model", "hf_unknown", "hf auth login"),
        ("someone/model", READER, "may not write to 'someone/model'"),
        ("others/model", TOKEN, "may not write to 'others/model'"),
        ("not/a/name", TOKEN, "'user/name'"),
    ],
)
def test_what_the_hub_refuses_is_told_and_leaves_nothing(
    repo: str, token: str | None, said: str, hub: FakeHub, adapted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(CheckpointError, match=said) as refused:
        adapted.push_to_hub(repo, token=token)
    assert "\n" not in str(refused.value) and not hub.repos


def test_a_hub_that_cannot_be_reached_is_told_before_anything_is_exported(
    hub: FakeHub, adapted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.down = True
    with pytest.raises(CheckpointError, match=r"session\.export"):
        adapted.push_to_hub("someone/model")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match="cannot be reached"):
        adapted.push_to_hub("someone/model")
    assert all("whoami" in one for one in hub.asked)


def test_no_token_is_written_down(hub: FakeHub, adapted: Any) -> None:
    adapted.push_to_hub("someone/model", token=TOKEN)
    written = [path.read_text() for path in registry.state_dir().rglob("*.jsonl")]
    assert any("someone/model" in text for text in written)
    assert all(TOKEN not in text for text in [*written, repr(adapted.history.verbs)])


def test_a_policy_without_an_adapter_has_none_to_push(session: Any, hub: FakeHub) -> None:
    with pytest.raises(CheckpointError, match="no adapter"):
        session.push_to_hub("someone/model", adapter=True)
    assert not hub.asked

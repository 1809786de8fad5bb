"""A trained model as a repository of the Hugging Face hub: exported aside, then uploaded in one commit."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

from rlbench._version import __version__
from rlbench.errors import CheckpointError
from rlbench.results import ExportedModel
from rlbench.session.core import SessionCore
from rlbench.session.state.checkpoints import start_export

STALE = ("model*.safetensors*", "pytorch_model*.bin*", "adapter_model*", "adapter_config.json")
"""What of an earlier push would be loaded beside, or instead of, this one's weights."""
CARD = "README.md"


def push_to_hub(
    core: SessionCore,
    repo_id: str,
    adapter: bool = False,
    *,
    private: bool | None = None,
    token: str | None = None,
    commit_message: str | None = None,
) -> ExportedModel:
    """Upload the trainer's weights, adapters merged, to the Hugging Face hub, with a model card unless there is one.

    Args:
        repo_id: "user/name", made where there is none; without a user, of your own account. Weights of an earlier push
            are replaced.
        adapter: upload the LoRA adapter alone, as peft loads it.
        private: of a repository that is made; None: as your account has it.
        token: None: that of `hf auth login`, or of the environment (`HF_TOKEN`).
        commit_message: None: one that names the step.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.utils import validate_repo_id

    if adapter and core.options.train.lora is None:
        raise CheckpointError("this policy trains all its weights and has no adapter: push_to_hub(repo_id) uploads it")
    api, step = HfApi(token=token, library_name="rlbench", library_version=__version__), core.step
    with _told(repo_id):
        validate_repo_id(repo_id)
        api.whoami()  # is there a hub, and does it know the token? Before the export, which may take a while
    with tempfile.TemporaryDirectory(prefix="rlbench-hub-") as place:
        started = start_export(core, f"{place}/model", None, adapter, _base_name(core))
        exported: ExportedModel = started.blocking_result()
        folder = Path(exported.path)
        if not folder.is_dir():
            raise CheckpointError(
                "push_to_hub: the training ranks write on another machine than this one: session.export(path) into a "
                f"folder that both see, then `hf upload {repo_id} <path>`"
            )
        with _told(repo_id):
            made = api.create_repo(repo_id, private=private, exist_ok=True)
            there = set(api.list_repo_files(made.repo_id))
            (folder / CARD).unlink(missing_ok=True)  # the base's
            if CARD not in there:
                (folder / CARD).write_text(_card(core, made.repo_id, adapter))
            files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
            stale = [name for name in there - set(files) if any(fnmatch(name, one) for one in STALE)]
            api.create_commit(  # one: whoever loads it meanwhile gets the old or the new
                made.repo_id,
                [
                    *(CommitOperationAdd(name, path) for name, path in files.items()),
                    *(CommitOperationDelete(name) for name in stale),
                ],
                commit_message=commit_message or f"step {step} of rlbench session {core.name}",
            )
        return replace(exported, path=str(made), files=tuple(files))


def _base_name(core: SessionCore) -> str:
    """Return what the base is called where others read it: a hub id, or of a folder its name alone."""
    path = Path(core.options.path)
    return path.name if path.is_dir() else core.options.path


def _card(core: SessionCore, repo_id: str, adapter: bool) -> str:
    """Return a model card: the base, the method, the step, how it is loaded."""
    from huggingface_hub import ModelCardData

    base, lora = _base_name(core), core.options.train.lora
    on_hub = base == core.options.path
    data = ModelCardData(
        base_model=base if on_hub else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["rlbench", "reinforcement-learning", *(["lora"] if lora else [])],
    )
    losses = dict.fromkeys(str(record["loss_name"]) for record in core.link.state()["history"] if "loss_name" in record)
    facts = {
        "base": f"[{base}](https://huggingface.co/{base})" if on_hub else base,
        "method": ", ".join(losses) or "not trained yet",
        "optimizer steps": core.step,
        "trained": "all weights",
    }
    load = [
        "from transformers import AutoModelForCausalLM",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{repo_id}")',
    ]
    if lora is not None:
        kept = "alone" if adapter else "merged into the weights"
        facts["trained"] = f"LoRA, rank {lora.rank}, alpha {lora.scale:g}, {', '.join(lora.targets)}; here {kept}"
    if adapter:
        load[1:] = [
            "from peft import PeftModel",
            "",
            f'base = AutoModelForCausalLM.from_pretrained("{base}")',
            f'model = PeftModel.from_pretrained(base, "{repo_id}")',
        ]
    lines = ["---", data.to_yaml(), "---", "", f"# {repo_id.rpartition('/')[2]}", ""]
    lines += [f"Trained by reinforcement learning with rlbench {__version__}.", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {fact} |" for name, fact in facts.items()]
    return "\n".join([*lines, "", "```python", *load, "```", ""])


@contextmanager
def _told(repo_id: str) -> Iterator[None]:
    """Turn what goes wrong between here and the hub into one sentence with the mend."""
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError

    try:
        yield
    except Exception as error:  # the client, its HTTP library and the system raise many kinds
        status = getattr(getattr(error, "response", None), "status_code", None)
        said = getattr(error, "server_message", None) or str(error).strip() or type(error).__name__
        said = said.splitlines()[0].rstrip(".")
        if isinstance(error, HFValidationError):
            why = f"{repo_id!r} is no name of a repository, as 'user/name' is ({said})"
        elif isinstance(error, LocalTokenNotFoundError) or status == 401:
            why = f"the hub needs a token that it knows ({said}): `hf auth login`, or token="
        elif status == 403:
            why = f"your token may not write to {repo_id!r} ({said}): take one that may, or a name of your own"
        else:
            why = (
                f"the hub {f'answered {status}' if status else 'cannot be reached or broke off'} ({said}): call it "
                f"again, or session.export(path) and, later, `hf upload {repo_id} <path>`"
            )
        raise CheckpointError(f"push_to_hub: {why}") from error

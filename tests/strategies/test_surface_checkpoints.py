"""save_ckpt, load_ckpt and save_model on two ranks and on none: every argument, any ranks, nothing half done."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, get_scheduler

from rlbench.errors import CheckpointError
from rlbench.strategies import FSDPV2Strategy, get_fake_strategy
from tests.modules import TrainedQwen
from tests.ranks import Ranks
from tests.strategies.surface import (
    assert_close,
    language_loss,
    rows,
    run_steps,
    said_by,
    share,
    state_of,
    whole,
)

pytestmark = pytest.mark.slow


def solo(**options: Any) -> Any:
    return get_fake_strategy({"bf16": False, "train_batch_size": 1, "max_norm": 0.0, **options})


def parts(s: Any, path: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any]:
    model = s.prepare_model(Qwen2ForCausalLM.from_pretrained(path, dtype=dtype), is_training=True)
    optimizer = s.create_optimizer(model, lr=1e-2, weight_decay=0.1)
    scheduler = get_scheduler(
        "cosine_with_min_lr",
        optimizer,
        num_warmup_steps=2,
        num_training_steps=10,
        scheduler_specific_kwargs={"min_lr": 0.0},
    )
    return model, optimizer, scheduler


def everything(model: Any, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {
        "parameters": whole(dict(model.named_parameters())),
        "state": state_of(model, optimizer),
        "lr": optimizer.param_groups[0]["lr"],
        "scheduler": scheduler.state_dict()["last_epoch"],
    }


def train_and_save(s: Any, path: str, folder: str, **more: Any) -> dict[str, Any]:
    """Two steps, a checkpoint, one more step; what there was at the checkpoint and at the end."""
    model, optimizer, scheduler = parts(s, path)
    run_steps(s, model, optimizer, [[rows(4, 0)], [rows(4, 1)]], scheduler)
    at = everything(model, optimizer, scheduler)
    written = s.save_ckpt(model, folder, optimizer=optimizer, scheduler=scheduler, **more)
    drawn = float(torch.rand(1))
    run_steps(s, model, optimizer, [[rows(4, 2)]], scheduler)
    return {"at": at, "end": everything(model, optimizer, scheduler), "drawn": drawn, "written": written}


def load_and_train(s: Any, path: str, folder: str) -> dict[str, Any]:
    model, optimizer, scheduler = parts(s, path)
    run_steps(s, model, optimizer, [[rows(4, 9)]], scheduler)  # another state, to be replaced
    language_loss(model, share(rows(4, 8), s)).backward()  # gradients that must not be stepped with
    found, client = s.load_ckpt(model, folder, optimizer, scheduler)
    at = everything(model, optimizer, scheduler)
    drawn = float(torch.rand(1))
    run_steps(s, model, optimizer, [[rows(4, 2)]], scheduler)
    return {"at": at, "end": everything(model, optimizer, scheduler), "drawn": drawn, "found": found, "client": client}


def assert_same(found: dict[str, Any], expected: dict[str, Any], atol: float) -> None:
    for when in ("at", "end"):
        assert_close(found[when]["parameters"], expected[when]["parameters"], atol if when == "end" else 0.0)
        assert_close(found[when]["state"], expected[when]["state"], atol if when == "end" else 0.0)
        assert found[when]["lr"] == expected[when]["lr"]
        assert found[when]["scheduler"] == expected[when]["scheduler"]


def test_training_goes_on_bit_for_bit_and_so_does_chance(qwen: str, engine: Ranks, tmp_path: Path) -> None:
    """Defects absent: optimizer and random state lost; resume from zero."""
    client = {"consumed_samples": 96, "note": ["a", {"b": 1.5}], "mean": torch.tensor([1.0, 2.0])}

    def there_and_back() -> Any:
        s = FSDPV2Strategy(bf16=False)
        torch.manual_seed(s.rank)
        saved = train_and_save(s, qwen, str(tmp_path), tag="step_7", client_state=client)
        return saved, load_and_train(s, qwen, str(tmp_path))

    for saved, loaded in engine.run(there_and_back):
        assert_same(loaded, saved, atol=0.0)
        assert loaded["drawn"] == saved["drawn"]
        assert loaded["found"] == saved["written"] == str(tmp_path / "step_7")
        assert loaded["client"]["consumed_samples"] == 96 and loaded["client"]["note"] == ["a", {"b": 1.5}]
        assert loaded["client"]["mean"].tolist() == [1.0, 2.0]


def test_saved_on_two_ranks_loaded_on_one_and_the_other_way_round(qwen: str, engine: Ranks, tmp_path: Path) -> None:
    saved = engine.run(lambda: train_and_save(FSDPV2Strategy(bf16=False), qwen, str(tmp_path / "two")))[0]
    assert_same(load_and_train(solo(), qwen, str(tmp_path / "two")), saved, atol=3e-5)
    saved = train_and_save(solo(), qwen, str(tmp_path / "one"))
    loaded = engine.run(lambda: load_and_train(FSDPV2Strategy(bf16=False), qwen, str(tmp_path / "one")))[0]
    assert_same(loaded, saved, atol=3e-5)


def test_the_copies_of_the_mixed_precision_optimizer_travel_to_any_number_of_ranks(
    qwen: str, engine: Ranks, tmp_path: Path
) -> None:
    """Defect absent: one file per rank, loadable by as many ranks alone."""

    def save() -> Any:
        return train_and_save(FSDPV2Strategy(args={"use_mp_opt": True}), qwen, str(tmp_path))["at"]

    at = engine.run(save)[0]
    s = solo(use_mp_opt=True, bf16=True)
    model, optimizer, scheduler = parts(s, qwen)
    s.load_ckpt(model, str(tmp_path), optimizer, scheduler)
    assert_close(state_of(model, optimizer), at["state"], atol=0.0)
    assert any(name.endswith("/master") for name in at["state"])
    plain = solo()
    model, optimizer, _ = parts(plain, qwen)
    with pytest.raises(CheckpointError, match="FSDPadaptOptimizer"):
        plain.load_ckpt(model, str(tmp_path), optimizer)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Any, Any, Path]:
    """A solo strategy, a small model, and a folder."""
    torch.manual_seed(0)
    return solo(), nn.Linear(3, 3), tmp_path / "checkpoints"


def tags(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


def test_rotation_keeps_the_newest_and_touches_nothing_else(saved: Any) -> None:
    """Defects absent: any subfolder counted and was deleted, oldest first; and before the new one was written."""
    s, model, folder = saved
    (folder / "my_results").mkdir(parents=True)
    (folder / "my_results" / "table.csv").write_text("1")
    os.utime(folder / "my_results", (1, 1))
    said = ""
    for step in range(4):
        _, text = said_by(lambda step=step: s.save_ckpt(model, str(folder), tag=f"step_{step}", max_num=2))
        said += text
    assert tags(folder) == {"my_results", "step_2", "step_3"}
    assert (folder / "my_results" / "table.csv").read_text() == "1"
    assert "removed" in said and "step_1" in said
    s.save_ckpt(model, str(folder), tag="step_4", max_num=None)
    assert tags(folder) == {"my_results", "step_2", "step_3", "step_4"}


def test_max_mem_is_obeyed_in_gigabytes(saved: Any) -> None:
    """Defect absent: ignored under FSDP."""
    s, model, folder = saved
    s.save_ckpt(model, str(folder), tag="a", max_num=10)
    one = sum(p.stat().st_size for p in (folder / "a").rglob("*") if p.is_file()) / 1e9
    for tag in "bcd":
        s.save_ckpt(model, str(folder), tag=tag, max_num=10, max_mem=2.5 * one)
    assert tags(folder) == {"c", "d"}
    s.save_ckpt(model, str(folder), tag="e", max_num=10, max_mem=0)
    assert tags(folder) == {"e"}  # the new one always stays


def test_a_save_that_fails_removes_nothing_and_leaves_nothing(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    s, model, folder = saved
    for tag in "ab":
        s.save_ckpt(model, str(folder), tag=tag, max_num=2)
    for broken in ("tensor_files.bytes_of", "folder._write_whole"):
        with monkeypatch.context() as patch:

            def fail(*_: Any, **__: Any) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr(f"rlbench.checkpoint.{broken}", fail)
            with pytest.raises(CheckpointError, match="No space left"):
                s.save_ckpt(model, str(folder), tag="c", max_num=2)
        assert {path.name for path in folder.iterdir()} == {"a", "b", "latest"}
    assert (folder / "latest").read_text() == "b"


def test_save_latest_says_which_one_a_folder_means(saved: Any) -> None:
    """Defect absent: the argument was not used; the greatest number won."""
    s, model, folder = saved
    s.save_ckpt(model, str(folder), tag="global_step9")
    s.save_ckpt(model, str(folder), tag="global_step10", save_latest=False)
    assert s.load_ckpt(model, str(folder))[0] == str(folder / "global_step9")
    assert s.load_ckpt(model, str(folder / "global_step10"))[0] == str(folder / "global_step10")
    s.save_ckpt(model, str(folder), tag="x", max_num=2, save_latest=False)  # rotates the one `latest` names away
    assert s.load_ckpt(model, str(folder))[0] == str(folder / "x")


def test_without_a_tag_steps_are_counted_and_a_tag_again_replaces(saved: Any) -> None:
    """Defect absent: no tag was a TypeError."""
    s, model, folder = saved
    assert [Path(s.save_ckpt(model, str(folder))).name for _ in range(2)] == ["global_step1", "global_step2"]
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    s.save_ckpt(model, str(folder), tag="global_step1")
    assert tags(folder) == {"global_step1", "global_step2"} and (folder / "latest").read_text() == "global_step1"
    with torch.no_grad():
        model.weight.zero_()
    s.load_ckpt(model, str(folder))
    assert torch.equal(model.weight, before + 1.0)
    (folder / "mine").mkdir()
    with pytest.raises(CheckpointError, match="tag="):
        s.save_ckpt(model, str(folder), tag="mine")
    for bad in ("../out", "", ".hidden", "a/b"):
        with pytest.raises(CheckpointError, match="cannot name a folder"):
            s.save_ckpt(model, str(folder), tag=bad)
    with pytest.raises(CheckpointError, match="max_num=0"):
        s.save_ckpt(model, str(folder), max_num=0)


def test_strict_loading_refuses_other_names_and_loose_loading_says_them(saved: Any) -> None:
    """Defect absent: the flag was not used."""
    s, model, folder = saved
    s.save_ckpt(model, str(folder))
    other = nn.Linear(3, 3, bias=False)
    other.register_parameter("scale", nn.Parameter(torch.full((3,), 7.0)))
    kept = other.weight.detach().clone()
    with pytest.raises(CheckpointError, match="load_module_strict"):
        s.load_ckpt(other, str(folder))
    assert torch.equal(other.weight, kept)
    _, said = said_by(lambda: s.load_ckpt(other, str(folder), load_module_strict=False))
    assert torch.equal(other.weight, model.weight) and other.scale.tolist() == [7.0] * 3
    assert "in part" in said and "scale" in said and "bias" in said
    with pytest.raises(CheckpointError, match="weight"):
        s.load_ckpt(nn.Linear(3, 2), str(folder), load_module_strict=False)


def test_optimizer_and_scheduler_are_left_as_they_are_by_their_flags(saved: Any) -> None:
    s, model, folder = saved
    optimizer = s.create_optimizer(model, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def step() -> None:
        s.backward(model(torch.ones(1, 3)).sum() * (1 + scheduler.last_epoch), model, optimizer)
        s.optimizer_step(optimizer, model, scheduler)

    def held() -> tuple[float, int]:
        return float(optimizer.state[model.weight]["exp_avg"].sum()), scheduler.last_epoch

    step()
    at = held()
    s.save_ckpt(model, str(folder), optimizer=optimizer, scheduler=scheduler)
    step()
    later = held()
    assert at[0] != later[0] and at[1] != later[1]
    s.load_ckpt(model, str(folder), optimizer, scheduler, load_optimizer_states=False)
    assert held() == (later[0], at[1])
    step()
    later = held()
    s.load_ckpt(model, str(folder), optimizer, scheduler, load_lr_scheduler_states=False)
    assert held() == (at[0], later[1])


def test_what_accumulated_before_a_load_is_dropped_and_counted_anew(tmp_path: Path) -> None:
    s = solo(train_batch_size=2)
    model = s.prepare_model(nn.Linear(3, 3), True)
    optimizer = s.create_optimizer(model, lr=1e-2)
    s.save_ckpt(model, str(tmp_path))
    stepped = []
    for load in (True, False, False):
        s.backward(model(torch.ones(1, 3)).sum(), model, optimizer)
        stepped.append(s.optimizer_step(optimizer, model, None)["stepped"])
        if load:
            s.load_ckpt(model, str(tmp_path))
            assert model.weight.grad is None
    assert stepped == [False, False, True]


def test_what_was_never_saved_cannot_be_asked_for(saved: Any) -> None:
    """Defect absent: a missing optimizer or scheduler was a warning, and training went on without."""
    s, model, folder = saved
    optimizer = s.create_optimizer(model, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    s.save_ckpt(model, str(folder))
    for given, part in (((optimizer,), "optimizer"), ((None, scheduler), "scheduler")):
        with pytest.raises(CheckpointError, match=part):
            s.load_ckpt(model, str(folder), *given)
    assert s.load_ckpt(model, str(folder), optimizer, scheduler, True, False, False)[1] == {}


def test_a_missing_or_damaged_checkpoint_is_an_error_and_changes_nothing(saved: Any) -> None:
    """Defect absent: None for a folder that is not there."""
    s, model, folder = saved
    with pytest.raises(CheckpointError, match="does not exist"):
        s.load_ckpt(model, str(folder))
    s.save_ckpt(model, str(folder), tag="a")
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    victim = max((folder / "a").rglob("*.bin"), key=lambda p: p.stat().st_size)
    raw = bytearray(victim.read_bytes())
    raw[-1] ^= 1
    victim.write_bytes(raw)
    with pytest.raises(CheckpointError, match="does not have the content"):
        s.load_ckpt(model, str(folder))
    assert torch.equal(model.weight, before + 1.0)


def test_what_only_code_could_read_again_is_refused_when_it_is_saved(saved: Any) -> None:
    s, model, folder = saved
    with pytest.raises(CheckpointError, match=r"client_state\['fn'\]"):
        s.save_ckpt(model, str(folder), client_state={"ok": 1, "fn": Path})
    assert not any(folder.iterdir())


def test_a_model_without_memory_is_filled_from_a_checkpoint(qwen: str, engine: Ranks, tmp_path: Path) -> None:
    saved = engine.run(lambda: train_and_save(FSDPV2Strategy(bf16=False), qwen, str(tmp_path)))[0]

    def fill() -> Any:
        s = FSDPV2Strategy(bf16=False)
        with s.init_model_context(meta_init=True):
            model = Qwen2ForCausalLM(Qwen2Config.from_pretrained(qwen))
        model.name_or_path = ""
        s.load_ckpt(s.prepare_model(model, True), str(tmp_path))
        return whole(dict(model.named_parameters()))

    assert_close(engine.run(fill)[0], saved["at"]["parameters"], atol=0.0)


def test_a_model_is_saved_as_transformers_loads_it_and_an_older_save_leaves_nothing_behind(
    qwen: str, engine: Ranks, tmp_path: Path, tiny_path: Path
) -> None:
    """Defect absent: "not implemented" under FSDP."""
    place = tmp_path / "model"
    place.mkdir()
    (place / "notes.txt").write_text("mine")
    (place / "model-00001-of-00002.safetensors").write_text("of an earlier, larger one")

    def save() -> Any:
        from transformers import AutoTokenizer

        s = FSDPV2Strategy(bf16=False)
        model = s.prepare_model(TrainedQwen.from_pretrained(qwen), True)
        run_steps(s, model, s.create_optimizer(model, lr=1e-2), [[rows(4)]])
        s.save_model(model, AutoTokenizer.from_pretrained(tiny_path), str(place))
        wrapper = nn.Module()
        wrapper.model = model
        s.save_model(wrapper, None, str(tmp_path / "shards"), max_shard_size="50KB")
        return whole(dict(model.named_parameters()))

    expected = engine.run(save)[0]
    loaded = AutoModelForCausalLM.from_pretrained(place)
    assert type(loaded) is Qwen2ForCausalLM and loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_close(whole(dict(loaded.named_parameters())), expected, atol=0.0)
    names = {path.name for path in place.iterdir()}
    assert {"notes.txt", "config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not any(name.startswith("model-0") for name in names)
    assert json.loads((place / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    several = {path.name for path in (tmp_path / "shards").iterdir()}
    assert "model.safetensors.index.json" in several and "tokenizer.json" not in several
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "shards")
    assert_close(whole(dict(again.named_parameters())), expected, atol=0.0)


def test_of_a_peft_model_the_adapter_is_saved(qwen: str, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    s = solo()
    adapted = get_peft_model(Qwen2ForCausalLM.from_pretrained(qwen), LoraConfig(r=2, target_modules=["q_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.5)
    s.save_model(s.prepare_model(adapted, True), None, str(tmp_path / "adapter"))
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {p.name for p in (tmp_path / "adapter").iterdir()}
    loaded = PeftModel.from_pretrained(Qwen2ForCausalLM.from_pretrained(qwen), str(tmp_path / "adapter"))
    ids = torch.tensor(rows(1))
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, adapted.eval()(ids).logits)


def test_what_is_no_transformers_model_cannot_be_saved_as_one(saved: Any) -> None:
    s, model, folder = saved
    with pytest.raises(CheckpointError, match="Linear is no transformers model"):
        s.save_model(model, None, str(folder))


def test_checkpoints_of_a_session_beside_ours_are_neither_loaded_nor_removed(saved: Any) -> None:
    from rlbench.checkpoint import folder as folders

    s, model, folder = saved
    aside, final = folders.begin(folder, "step-1")
    (aside / "x").write_text("x")
    folders.publish(aside, final, {"step": 1, "time": time.time(), "ranks": 1})
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        s.load_ckpt(model, str(folder))
    for tag in "ab":
        s.save_ckpt(model, str(folder), tag=tag, max_num=1)
    assert tags(folder) == {"step-1", "b"}

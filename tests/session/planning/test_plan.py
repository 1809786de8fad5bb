"""What a plan says: devices, verdicts, changes that are proved, and the session that is refused before it starts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rlbench as rb
from rlbench.cli import main
from rlbench.errors import BuildError
from rlbench.session.planning.changes import smallest_change
from rlbench.session.planning.devices import Devices
from rlbench.session.planning.plan import fullest
from rlbench.session.planning.request import REFERENCE, TEACHER
from rlbench.session.planning.uses import HOST_FIRST_PASS, HOST_SLACK, PHASES, RANK, REPLICA
from rlbench.units import GIB


def config_of(folder: Path, **sizes: Any) -> str:
    """A model without weights: a plan reads the config alone."""
    held = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        **sizes,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(held))
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return config_of(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def whole(model):
    return rb.plan(model, gpus="1x24GiB", lengths=512, reference=True)


@pytest.mark.parametrize(
    ("text", "count", "nbytes"), [("2x80GiB", 2, 80), ("24GiB", 1, 24), ("0x16GiB", 0, 16), (" 8 x 141 gb", 8, 141)]
)
def test_devices_are_read_from_a_text(text, count, nbytes):
    assert Devices.of(text) == Devices(count, nbytes * GIB)


@pytest.mark.parametrize("text", ["two", "2x", "1x0GiB", "3", ""])
def test_what_is_no_device_is_refused_with_an_example(text):
    with pytest.raises(BuildError, match="2x80GiB"):
        Devices.of(text)


def test_without_devices_it_is_this_machine():
    assert Devices.of(None).nbytes > GIB


def test_masters_gradients_and_adamw_take_sixteen_bytes_a_parameter(whole):
    count = whole.parameters
    held = [whole.of(RANK, owner) for owner in ("weights", "gradients", "optimizer")]
    assert held == [4 * count, 4 * count, 8 * count]
    assert whole.of(REPLICA, "weights") == whole.of(REFERENCE, "weights") == 2 * count


def test_two_ranks_halve_what_each_holds_and_gather_what_they_compute_with(model, whole):
    two = rb.plan(model, gpus="2x24GiB", lengths=512)
    assert two.of(RANK, "optimizer") == pytest.approx(whole.of(RANK, "optimizer") / 2, rel=0.01)
    assert two.of(RANK, "gathered layers") > whole.of(RANK, "gathered layers")


def test_vllm_takes_its_share_of_a_gpu_whole(whole):
    taken = sum(use.most for use in whole.device if use.role == REPLICA)
    assert taken <= 0.5 * 24 * GIB < taken + GIB


def test_half_the_tokens_take_about_half_the_activations(model):
    many, few = (rb.plan(model, gpus="24GiB", lengths=256, token_budget=n) for n in (4096, 2048))
    assert many.of(RANK, "activations") == pytest.approx(2 * few.of(RANK, "activations"), rel=0.1)


def test_micro_batches_grow_with_a_gpu_of_more_than_32_gib(tmp_path):
    wide = config_of(tmp_path / "wide", hidden_size=2048, intermediate_size=8192, num_hidden_layers=16)
    tokens = {size: sum(rb.plan(wide, gpus=f"{size}GiB", lengths=256).rows) for size in (24, 32, 80)}
    assert tokens[24] == tokens[32] and tokens[80] == pytest.approx(2.5 * tokens[32], rel=0.01)


def test_checkpointing_takes_less_and_the_same_weights(model, whole):
    less = rb.plan(model, train={"gradient_checkpointing": True}, gpus="1x24GiB", lengths=512)
    assert less.of(RANK, "activations") < whole.of(RANK, "activations") / 2
    assert less.of(RANK, "weights") == whole.of(RANK, "weights")


def test_lengths_of_a_step_are_packed_as_the_ranks_pack_them(model):
    plan = rb.plan(model, gpus="24GiB", lengths=[100, 200, 300, 400], token_budget=600)
    assert sum(plan.rows) <= 600 and max(plan.rows) == 400


def test_adapters_train_and_the_base_stays_as_it_is(model, whole):
    adapted = rb.plan(model, lora=rb.Lora(rank=8), gpus="1x24GiB", lengths=512)
    layers, hidden, inner, narrow = 4, 256, 512, 128
    linear = [(hidden, hidden), (hidden, narrow), (hidden, narrow), (hidden, hidden)]
    linear += [(hidden, inner), (hidden, inner), (inner, hidden)]
    assert adapted.trained == layers * sum(8 * (a + b) for a, b in linear)
    assert adapted.parameters == whole.parameters + adapted.trained
    assert adapted.of(RANK, "optimizer") == 8 * adapted.trained
    assert adapted.of(RANK, "weights") == 2 * whole.parameters + 4 * adapted.trained
    quantised = rb.plan(model, lora=rb.Lora(rank=8, base="nf4"), gpus="1x24GiB", lengths=512)
    packed = layers * sum(a * b for a, b in linear)  # half a byte each, and four bytes for a block of 64
    saved = adapted.of(RANK, "weights") - quantised.of(RANK, "weights")
    assert saved == packed * 2 - packed // 2 - 4 * packed // 64
    assert quantised.parameters == adapted.parameters
    named = rb.plan(model, lora=rb.Lora(rank=8, targets=("q_proj", "v_proj")), gpus="1x24GiB", lengths=512)
    assert named.trained < adapted.trained


def test_with_a_lora_the_reference_is_the_base_and_copies_are_of_adapters(model, whole):
    adapted = rb.plan(model, lora=rb.Lora(rank=8), gpus="1x24GiB", lengths=512, reference=True)
    assert adapted.of(REFERENCE, "weights") == 0 < whole.of(REFERENCE, "weights")
    copies = next(use for use in adapted.host if use.owner.startswith("undo"))
    assert copies.most == 3 * 12 * adapted.trained


def test_teachers_are_held_as_a_reference_is_but_those_that_are_there_already(model, whole, tmp_path):
    other, third = config_of(tmp_path / "a"), config_of(tmp_path / "b", num_hidden_layers=2)
    told = rb.plan(model, gpus="1x24GiB", lengths=512, reference=True, teachers=[other, third, model])
    assert told.of(TEACHER, "weights") == whole.of(REFERENCE, "weights") == told.of(REFERENCE, "weights")
    assert 0 < told.of(f"{TEACHER} 2", "weights") < told.of(TEACHER, "weights")
    assert sum(use.role.startswith(TEACHER) and use.owner == "weights" for use in told.device) == 2
    assert told.least == whole.least + told.of(TEACHER, "weights") + told.of(f"{TEACHER} 2", "weights")


def test_replicas_that_hold_adapters_get_them_alone(model):
    merged = rb.plan(model, lora=rb.Lora(rank=8), gpus="0x24GiB", lengths=512)
    beside = rb.plan(model, lora=rb.Lora(rank=8), inference={"adapters": 2}, gpus="0x24GiB", lengths=512)
    assert beside.of("session", "sync buffers") < merged.of("session", "sync buffers")
    assert beside.of(REPLICA, "adapters") == 2 * 4 * 2 * beside.trained  # 2 slots of rank 32, in bfloat16
    assert merged.of(REPLICA, "adapters") == 0


def test_weights_that_travel_as_differences_have_copies_at_both_ends(model):
    options = {"data_parallel_size": 2, "delta": True}
    told = rb.plan(model, inference=options, gpus="0x24GiB", lengths=512)
    copies = told.of("session", "weights sent last")
    assert copies == 3 * 4 * told.parameters, "the sending rank's and two replicas', in float32"
    without = rb.plan(model, inference=options | {"delta": False}, gpus="0x24GiB", lengths=512)
    assert without.of("session", "weights sent last") == 0 < without.of("session", "sync buffers")


def test_a_lora_that_names_no_layer_is_told_which_there_are(model):
    with pytest.raises(BuildError, match="q_proj"):
        rb.plan(model, lora=rb.Lora(rank=8, targets=("query",)), gpus="24GiB")


def test_what_a_loop_sends_away_is_on_the_host_meanwhile(model):
    plan = rb.plan(model, gpus="24GiB", lengths=512, offload=["inference", "optimizer"])
    held = {(use.role, use.owner): use.phases for use in plan.device}
    assert "train step" not in held[REPLICA, "KV cache"] and "rollout" not in held[RANK, "optimizer"]
    assert {use.owner for use in plan.host} >= {"optimizer, offloaded", "weights, offloaded"}


def test_workers_are_counted_on_the_gpu_that_holds_most():
    assert fullest({RANK: 1, REPLICA: 1, REFERENCE: 0}, 2) == {RANK: 1}
    assert fullest({RANK: 2, REPLICA: 2, REFERENCE: 2}, 2) == {RANK: 1, REPLICA: 1, REFERENCE: 1}
    assert fullest({RANK: 2, REPLICA: 1, REFERENCE: 0}, 0) == {RANK: 2, REPLICA: 1, REFERENCE: 0}


def test_the_smallest_change_is_proved_by_another_plan(model):
    full = rb.plan(model, gpus="0x24GiB", lengths=512, token_budget=16384)
    tight = rb.plan(model, gpus=f"0x{full.peak * 0.9 / GIB:.3f}GiB", lengths=512, token_budget=16384)
    assert not tight.fits and tight.change.plan.fits
    assert tight.change.plan.peak <= tight.limit and tight.change.what[0] in repr(tight)
    assert smallest_change(rb.plan(model, gpus="0x0.1GiB", lengths=512)) is None


def test_passes_of_changes_that_cannot_fit_are_not_run(model, monkeypatch):
    hopeless = rb.plan(model, gpus="1x0.1GiB", lengths=512)  # CUDA contexts take more
    monkeypatch.setattr("rlbench.session.planning.model.pass_cost", lambda *_: pytest.fail("a pass was run"))
    assert hopeless.change is None


@pytest.mark.parametrize(("lora", "largest"), [(None, 4096 * 256), (rb.Lora(rank=8), 512 * 8)])
def test_the_allocator_of_a_host_holds_a_share_of_a_pass_and_the_largest_gradient_beside_it(model, lora, largest):
    plan = rb.plan(model, train={"lora": lora}, gpus="0x24GiB", lengths=512)
    passing = sum(plan.of(RANK, owner) for owner in ("activations", "gathered layers", "logits"))
    assert plan.of(RANK, "allocator") == pytest.approx(HOST_FIRST_PASS + HOST_SLACK * passing + 4 * largest, rel=1e-3)


def test_a_cache_too_small_for_one_sequence_is_a_problem_whatever_the_memory(model):
    plan = rb.plan(model, inference={"kv_cache_bytes": 1 << 20}, gpus="1x24GiB", lengths=512)
    assert not plan and "max_model_len" in plan.problems[0]


def test_text_and_html_hold_owners_phases_and_the_verdict(whole):
    from rlbench.notebook.cards.plan_views import plan_card

    for shown in (repr(whole), plan_card(whole).html()):
        assert all(word in shown for word in (*PHASES, "optimizer", "KV cache", "undo", "CUDA contexts", "fits"))


def test_the_command_line_says_the_same_and_fails_where_it_does_not_fit(model, capsys):
    assert main(["plan", model, "--gpus", "1x24GiB", "--lengths", "512", "--train", "shards=1"]) == 0
    assert "fits" in capsys.readouterr().out
    assert main(["plan", model, "--gpus", "1x1GiB", "--lengths", "512", "--inference", "max_model_len=512"]) == 1
    assert main(["plan", model, "--train", "shards"]) == 1


def test_planning_is_imported_where_it_is_asked_for_alone():
    code = "import rlbench as rb; rb.Session; import sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.engine
def test_a_session_that_cannot_fit_is_refused_with_the_plan_and_nothing_is_left(cluster, tmp_path):
    sizes = {"hidden_size": 32768, "intermediate_size": 131072, "num_hidden_layers": 16, "vocab_size": 65536}
    giant = config_of(tmp_path / "giant", **sizes, num_attention_heads=256, num_key_value_heads=8)
    before = [found["name"] for found in rb.sessions()]
    with pytest.raises(BuildError, match="cannot fit") as refused:
        rb.Session(giant, name="giant")
    assert all(word in str(refused.value) for word in ("train rank", "optimizer", "replica"))
    with pytest.raises(BuildError, match="cannot fit") as refused:
        rb.RewardModel(giant, name="giant")
    assert "optimizer" in str(refused.value) and "replica" not in str(refused.value)
    assert [found["name"] for found in rb.sessions()] == before

"""What is leaned on and not promised by torch and transformers is there, and means what it meant."""

from __future__ import annotations

import gc
import re
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import Qwen2Config

from rlbench.strategies import internals

OF_GROUPS = (
    "fsdp_params offload_policy gradient_divide_factor force_sum_reduction_for_comms _reduce_scatter_process_group "
    "_training_state _all_gather_result _all_reduce_hook _reduce_dtype _orig_dtype reduce_grads modules mesh_info "
    "reshard_after_backward post_backward wait_for_unshard reshard"
)
OF_PARAMETERS = (
    "sharded_param _sharded_param_data device param_dtype offload_to_cpu _unsharded_dtensor_spec _orig_size "
    "_contiguous_orig_stride to_unsharded to_sharded_dtensor unsharded_accumulated_grad reset_sharded_param"
)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    internals.forget_shardings()


def test_fsdp2_tells_its_groups_its_dtype_and_where_passes_begin(alone: None) -> None:
    mesh, policy = init_device_mesh("cpu", (1,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16))
    fully_shard(model[0], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)
    model(torch.ones(1, 4)).sum().backward()
    outer, inner = internals.fsdp_groups(model)
    assert [len(group.fsdp_params) for group in (outer, inner)] == [2, 2]
    assert [name for name in OF_GROUPS.split() if not hasattr(outer, name)] == []
    assert [name for name in OF_PARAMETERS.split() if not hasattr(outer.fsdp_params[0], name)] == []
    assert outer.mesh_info.shard_mesh_size == 1
    assert (internals.fsdp_dtype(model), internals.fsdp_dtype(model[0])) == (None, torch.bfloat16)
    assert internals.is_fsdp_root(model) and not internals.is_fsdp_root(model[0])


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_fsdp1_leaves_a_pass_that_broke_off(alone: None, where: str) -> None:
    options = {"device_id": torch.device("cpu"), "use_orig_params": True}
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parameters = list(plain.parameters())
    with warnings.catch_warnings(action="ignore"):
        model = FullyShardedDataParallel(plain, sharding_strategy=ShardingStrategy.NO_SHARD, **options)
    internals.leave_fsdp1_pass(model)
    broken = plain[1].register_forward_hook if where == "forward" else plain[1].register_full_backward_hook
    hook = broken(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1, 4)).sum().backward()
    hook.remove()
    internals.leave_fsdp1_pass(model)
    model.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    gradients = [parameter.grad for parameter in parameters]
    assert all(gradient is not None for gradient in gradients)
    internals.leave_fsdp1_pass(model)
    assert all(one is other for one, other in zip(plain.parameters(), parameters, strict=True))
    assert all(p.grad is gradient for p, gradient in zip(parameters, gradients, strict=True))


def test_collectives_are_counted_by_group(alone: None) -> None:
    second = dist.new_group([0], backend="gloo")
    assert set(internals.process_groups()) == {dist.group.WORLD, second}
    before = internals.issued_in(internals.process_groups())
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), group=second)
    assert internals.issued_in(internals.process_groups()) == before + 2
    assert internals.issued_in([second]) == 1


def test_the_attention_of_a_config_is_replaced_without_a_check_of_its_name() -> None:
    config = Qwen2Config()
    assert internals.has_attention(config) and not internals.has_attention(object())
    internals.set_attention(config, "nobody registered this")
    assert internals.attention_of(config) == "nobody registered this"


def test_the_kernel_on_a_cpu_is_attention_and_gives_the_log_sum_exp() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8, generator=torch.Generator().manual_seed(0)).unbind()
    out, lse = internals.flash_attention(q, k, v, 0.0, True, attn_mask=None, scale=0.5)
    scores = (0.5 * q @ k.transpose(-1, -2)).masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf)
    torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5))
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_nothing_else_of_the_package_reaches_for_them(repository: Path) -> None:
    private = re.compile(
        r"_get_fsdp_state|_attn_implementation|\._world\b|_get_backend|_get_sequence_number|_flash_attention_for_cpu"
        r"|_clear_sharding_prop_cache|_post_backward_final_callback|HandleTrainingState"
    )
    paths = [path for path in sorted((repository / "rlbench").rglob("*.py")) if path.name != "internals.py"]
    assert [str(path) for path in paths if private.search(path.read_text())] == []


def test_a_mesh_that_was_redistributed_over_goes_with_its_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    distribute_tensor(torch.ones(4), mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
    gone = weakref.ref(mesh)
    del mesh
    dist.destroy_process_group()
    internals.forget_shardings()
    gc.collect()
    assert gone() is None, "it would keep a thread that polls"

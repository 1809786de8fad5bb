"""Log-probs and entropies from hidden states equal those of the whole logits, gradients too, and stay small."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlbench.errors import LossError
from rlbench.rl.linear import linear_token_stats, linear_top_ids


def plain(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.t()
    logp = torch.log_softmax((logits if bias is None else logits + bias) / temperature, dim=-1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def made(
    rows: int, width: int, size: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, targets, bias."""
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    hidden, weight, bias = normal(rows, width) * scale, normal(size, width), normal(size)
    parts = [part.to(dtype).requires_grad_() for part in (hidden, weight, bias)]
    targets = torch.randint(size, (rows,), generator=source)
    return parts[0], parts[1], targets, parts[2]


def gradients(outputs: tuple[Tensor, Tensor], into: list[Tensor], seed: int = 5) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    weights = [torch.randn(o.shape, generator=source, dtype=torch.float64).to(o.dtype) for o in outputs]
    return list(torch.autograd.grad(outputs, into, weights))


def test_a_row_worked_out_by_hand() -> None:
    # logits (log 1, log 2, log 5) at temperature 1: p = 1/8, 2/8, 5/8
    weight = torch.tensor([[1.0], [2.0], [5.0]], dtype=torch.float64).log()
    hidden = torch.ones(1, 1, dtype=torch.float64)
    logprob, entropy = linear_token_stats(hidden, weight, torch.tensor([1]))
    assert float(logprob) == pytest.approx(np.log(0.25), abs=1e-14)
    assert float(entropy) == pytest.approx(-sum(p * np.log(p) for p in (0.125, 0.25, 0.625)), abs=1e-14)
    # at temperature 0.5 the weights are squared: 1, 4, 25 of 30
    logprob, entropy = linear_token_stats(hidden, weight, torch.tensor([2]), temperature=0.5)
    assert float(logprob) == pytest.approx(np.log(25 / 30), abs=1e-14)
    assert float(entropy) == pytest.approx(-sum(p / 30 * np.log(p / 30) for p in (1, 4, 25)), abs=1e-14)


def test_both_outputs_equal_slow_loops_in_numpy() -> None:
    hidden, weight, targets, bias = made(4, 3, 11)
    h, w, b = (part.detach().numpy() for part in (hidden, weight, bias))
    found = linear_token_stats(hidden, weight, targets, 0.6, bias, tile=5)
    for row in range(4):
        z = [(sum(h[row, d] * w[v, d] for d in range(3)) + b[v]) / 0.6 for v in range(11)]
        p = [np.exp(one - max(z)) for one in z]
        p = [one / sum(p) for one in p]
        assert float(found[0][row].detach()) == pytest.approx(np.log(p[int(targets[row])]), abs=1e-12)
        assert float(found[1][row].detach()) == pytest.approx(-sum(one * np.log(one) for one in p), abs=1e-12)


@settings(derandomize=True, max_examples=40)
@given(
    rows=st.integers(1, 9),
    width=st.integers(1, 6),
    size=st.integers(1, 40),
    tile=st.none() | st.integers(1, 90),
    temperature=st.floats(0.2, 3.0),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    with_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_equal_the_plain_ones_however_the_logits_are_cut(
    rows: int,
    width: int,
    size: int,
    tile: int | None,
    temperature: float,
    scale: float,
    with_bias: bool,
    seed: int,
) -> None:
    hidden, weight, targets, bias = made(rows, width, size, seed, scale)
    used = bias if with_bias else None
    into = [hidden, weight] + ([bias] if with_bias else [])
    found = linear_token_stats(hidden, weight, targets, temperature, used, tile)
    wanted = plain(hidden, weight, targets, temperature, used)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(gradients(found, into), gradients(wanted, into), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tile", [None, 1, 7, 10_000])
@pytest.mark.parametrize("output", [0, 1, None])
def test_gradients_pass_gradcheck(tile: int | None, output: int | None) -> None:
    hidden, weight, targets, bias = made(4, 3, 9)

    def run(h: Tensor, w: Tensor, b: Tensor) -> Any:
        found = linear_token_stats(h, w, targets, 0.7, b, tile)
        return found if output is None else found[output]

    assert torch.autograd.gradcheck(run, (hidden, weight, bias))


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_needs_no_gradient_gets_none_and_the_others_theirs(frozen: int) -> None:
    hidden, weight, targets, bias = made(5, 4, 12)
    parts = [hidden, weight, bias]
    wanted = gradients(plain(hidden, weight, targets, 1.0, bias), parts)
    parts[frozen].requires_grad_(False)
    found = linear_token_stats(hidden, weight, targets, 1.0, bias, tile=8)
    sum(out.sum() for out in found).backward()  # type: ignore[union-attr]
    assert parts[frozen].grad is None
    parts[frozen].requires_grad_(True)
    kept = [i for i in range(3) if i != frozen]
    again = gradients(linear_token_stats(hidden, weight, targets, 1.0, bias, 8), [parts[i] for i in kept])
    for i, mine in zip(kept, again, strict=True):
        torch.testing.assert_close(mine, wanted[i])


def test_logits_far_from_zero_overflow_nowhere() -> None:
    hidden, weight, targets, bias = made(6, 4, 50, scale=1.0, dtype=torch.float32)
    hidden = (hidden.detach() * 400).requires_grad_()
    found = linear_token_stats(hidden, weight, targets, 1.0, bias, tile=60)
    wide = [part.detach().double().requires_grad_() for part in (hidden, weight, bias)]
    wanted = plain(wide[0], wide[1], targets, 1.0, wide[2])
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-3)
    for part in gradients(found, [hidden, weight, bias]):
        assert torch.isfinite(part).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_is_computed_with_float32_logits(dtype: torch.dtype) -> None:
    hidden, weight, targets, bias = made(20, 16, 300, dtype=dtype)
    into = [hidden, weight, bias]
    found = linear_token_stats(hidden, weight, targets, 0.9, bias, tile=700)
    assert [out.dtype for out in found] == [torch.float32] * 2
    wide = [part.detach().double().requires_grad_() for part in into]
    wanted = plain(wide[0], wide[1], targets, 0.9, wide[2])
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)
    error = 1e-5 if dtype is torch.float32 else 1e-2
    for mine, theirs, part in zip(gradients(found, into), gradients(wanted, wide), into, strict=True):
        assert mine.dtype == part.dtype
        torch.testing.assert_close(mine.double(), theirs, rtol=error, atol=error / 10)


def test_rows_do_not_look_at_each_other() -> None:
    hidden, weight, targets, _ = made(8, 4, 30)
    order = torch.randperm(8)
    whole = linear_token_stats(hidden, weight, targets, tile=16)
    moved = linear_token_stats(hidden[order], weight, targets[order], tile=100)
    torch.testing.assert_close(tuple(out[order] for out in whole), moved)


def test_autocast_changes_nothing() -> None:
    hidden, weight, targets, _ = made(8, 4, 30, dtype=torch.float32)
    wanted = linear_token_stats(hidden, weight, targets)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_token_stats(hidden, weight, targets)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden": torch.ones(2, 3, 4)}, r"hidden: .*\(2, 3, 4\)"),
        ({"hidden": torch.ones(0, 4)}, r"hidden: .*\(0, 4\)"),
        ({"weight": torch.ones(9, 5)}, r"weight: .*\(9, 5\)"),
        ({"weight": torch.ones(0, 4)}, r"weight: .*\(0, 4\)"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, r"targets: .*\(3,\)"),
        ({"targets": torch.zeros(5)}, "targets: torch.float32"),
        ({"targets": torch.full((5,), 9)}, "targets: 9"),
        ({"targets": torch.full((5,), -100)}, "targets: -100"),
        ({"bias": torch.ones(8)}, r"bias: .*\(8,\)"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"tile": 0}, "tile=0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changed: dict[str, Any], message: str) -> None:
    fitting = {
        "hidden": torch.ones(5, 4),
        "weight": torch.ones(9, 4),
        "targets": torch.zeros(5, dtype=torch.int64),
    }
    with pytest.raises(LossError, match=message):
        linear_token_stats(**(fitting | changed))  # type: ignore[arg-type]


MEMORY = """
import torch
from rlbench.rl.linear import linear_token_stats, linear_top_ids
torch.set_num_threads(1)
R, V, D = 2048, 50_000, 32
weight = torch.randn(V, D, requires_grad=True)

def run(rows):
    hidden = torch.randn(rows, D, requires_grad=True)
    logprobs, entropy = linear_token_stats(hidden, weight, torch.randint(V, (rows,)), 0.8)
    torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight))

def status(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))

run(8)  # threads and libraries are there from here on
held = status("VmRSS")
run(R)
print((status("VmHWM") - held - 4 * D * (V + 2 * R)) / (4 * R * V))
"""


class Widths(TorchDispatchMode):
    """Of the matrix products that make logits, the columns."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.seen = rows, list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.mm and len(args[0]) == self.rows:
            self.seen.append(args[1].shape[1])
        return func(*args, **(kwargs or {}))


def test_tiles_are_as_wide_as_fast_kernels_want_them() -> None:
    """Products whose rows begin at odd places take others, on a GPU two to three times as slow."""
    hidden, weight, targets, _ = made(40, 8, 1000)
    with Widths(40) as widths:
        linear_token_stats(hidden, weight, targets, tile=40 * 100)
    assert widths.seen == [64] * 15 + [40]


def test_the_logits_are_never_held() -> None:
    """Peak memory of forward and backward, in a process of its own, against that of the float32 logits."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},  # freed memory goes back, and hides no peak
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= 0.12


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_values_gradients_and_memory_are_the_same(dtype: torch.dtype) -> None:
    parts = [part.detach().cuda() for part in made(2048, 256, 50_000, scale=0.1, dtype=dtype)]
    targets, into = parts[2], [parts[at].requires_grad_() for at in (0, 1, 3)]
    hidden, weight, bias = into
    warm = linear_token_stats(hidden[:8], weight, targets[:8], 0.9, bias)  # cuBLAS takes its workspace, once
    gradients(tuple(out.cpu() for out in warm), into)  # type: ignore[arg-type]
    del warm
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = linear_token_stats(hidden, weight, targets, 0.9, bias)
    mine = gradients(tuple(out.cpu() for out in found), into)  # type: ignore[arg-type]
    own = sum(part.numel() * part.element_size() for part in into)
    extra = torch.cuda.max_memory_allocated() - before - own
    assert extra <= 0.12 * 4 * 2048 * 50_000
    wide = [part.detach().double().requires_grad_() for part in into]
    wanted = plain(wide[0], wide[1], targets, 0.9, wide[2])
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
    theirs = gradients(tuple(out.cpu() for out in wanted), wide)  # type: ignore[arg-type]
    for a, b in zip(mine, theirs, strict=True):
        assert float((a.double() - b).norm() / b.norm()) < (1e-3 if dtype is torch.float32 else 2e-2)


# -- several tokens a row, and the likeliest ones


@pytest.mark.parametrize("tile", [None, 1, 7, 40])
def test_several_targets_of_a_row_are_each_as_one_alone(tile: int | None) -> None:
    hidden, weight, _, bias = made(6, 4, 13)
    targets = torch.randint(13, (6, 5), generator=torch.Generator().manual_seed(2))
    targets[0] = targets[0, 0]  # the same token twice counts twice
    logp = torch.log_softmax((hidden @ weight.t() + bias) / 0.8, -1)
    plainly = logp.gather(1, targets), -(logp.exp() * logp).sum(-1)
    found = linear_token_stats(hidden, weight, targets, 0.8, bias, tile)
    for mine, theirs in zip(found, plainly, strict=True):
        torch.testing.assert_close(mine, theirs)
    into = [hidden, weight, bias]
    for mine, theirs in zip(gradients(found, into), gradients(plainly, into), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("tile", [None, 1, 7, 40])
@pytest.mark.parametrize("count", [1, 4, 13])
def test_the_likeliest_tokens_are_those_of_the_whole_logits(tile: int | None, count: int) -> None:
    hidden, weight, _, bias = made(6, 4, 13)
    wanted = (hidden @ weight.t() + bias).topk(count).indices
    assert torch.equal(linear_top_ids(hidden, weight, count, bias, tile), wanted)
    with pytest.raises(LossError, match="count=14"):
        linear_top_ids(hidden, weight, 14, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_several_targets_and_the_likeliest_are_the_plain_ones(dtype: torch.dtype) -> None:
    hidden, weight, _, _ = (part.detach().to("cuda", part.dtype) for part in made(64, 32, 500, scale=0.1))
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    logp = torch.log_softmax(hidden.double() @ weight.double().t(), -1)
    ids = linear_top_ids(hidden, weight, 8)
    assert float((ids == logp.topk(8).indices).double().mean()) > 0.95
    found, _ = linear_token_stats(hidden, weight, ids)
    torch.testing.assert_close(found.double(), logp.gather(1, ids), rtol=1e-3, atol=1e-3)

"""What the strategy tests run on each rank, and the same by hand in one process."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Qwen2ForCausalLM

from rlbench.strategies import FSDPV2Strategy
from tests.modules import VOCAB

Rows = list[list[int]]


def rows(count: int, seed: int = 0) -> Rows:
    return torch.randint(0, VOCAB, (count, 10), generator=torch.Generator().manual_seed(seed)).tolist()


def language_loss(model: nn.Module, data: Rows) -> Tensor:
    ids = torch.tensor(data)
    logits = model(ids).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def share(data: Rows, s: Any) -> Rows:
    own = len(data) // s.world_size
    return data[s.rank * own : (s.rank + 1) * own]


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for name, t in tensors.items()}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors by parameter name and key, whole."""
    return whole(
        {
            f"{name}/{key}": value
            for name, parameter in model.named_parameters()
            for key, value in optimizer.state.get(parameter, {}).items()
        }
    )


def said_by(work: Any) -> tuple[Any, str]:
    """What `work` returns, and what it printed on this rank."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        value = work()
    return value, out.getvalue()


def run_steps(s: Any, model: nn.Module, optimizer: Any, steps: list[list[Rows]], scheduler: Any = None) -> list[Any]:
    """Each step is a list of micro-batches over all ranks."""
    results = []
    for micro_batches in steps:
        for data in micro_batches:
            s.backward(language_loss(model, share(data, s)), model, optimizer)
            results.append(s.optimizer_step(optimizer, model, scheduler, name="actor"))
    return results


def train_on_ranks(path: str, steps: list[list[Rows]], options: dict[str, Any], **own: Any) -> dict[str, Any]:
    """Train a Qwen2 with a strategy of its own; everything whole at the end."""
    s = FSDPV2Strategy(**{"bf16": False, **own}, args=options)
    model = s.prepare_model(Qwen2ForCausalLM.from_pretrained(path), is_training=True)
    optimizer = s.create_optimizer(model, lr=1e-2, weight_decay=0.1)
    results = run_steps(s, model, optimizer, steps)
    return {
        "parameters": whole(dict(model.named_parameters())),
        "state": state_of(model, optimizer),
        "results": results,
        "groups": [(g["weight_decay"], len(g["params"])) for g in optimizer.param_groups],
    }


def train_by_hand(path: str, steps: list[list[Rows]], max_norm: float = 0.0) -> dict[str, Any]:
    """The same in one process with torch alone."""
    model = Qwen2ForCausalLM.from_pretrained(path)
    plain = [p for n, p in model.named_parameters() if "bias" in n or "norm" in n]
    decayed = [p for n, p in model.named_parameters() if not ("bias" in n or "norm" in n)]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=1e-2
    )
    norms = []
    for micro_batches in steps:
        for data in micro_batches:
            (language_loss(model, data) / len(micro_batches)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    return {
        "parameters": whole(dict(model.named_parameters())),
        "state": state_of(model, optimizer),
        "norms": norms,
        "groups": [(0.1, len(decayed)), (0.0, len(plain))],
    }


@contextlib.contextmanager
def failing_as(row: str) -> Iterator[None]:
    """Name the row of a walk in whatever fails in the block."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the row {row}")
        raise


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 3e-5) -> None:
    assert set(found) == set(expected)
    for name in expected:
        torch.testing.assert_close(
            found[name].float(), expected[name].float(), rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )

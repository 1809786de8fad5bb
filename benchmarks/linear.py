"""Log-probs and entropies from hidden states in tiles (`rlbench.rl.linear`) against the whole logits: time and memory.

The sides run in one process, in turns. Time: forward and backward of log-probs and entropy. Memory: the peak of a
process of its own less what it held before, less the gradients, as a share of the float32 logits. "autograd" is
log_softmax as a user writes it; "token_stats" is our own plain path, which keeps one (T, V) matrix.

    python -m benchmarks.linear                  # T=2048, V=50 000, D=256, two threads
    python -m benchmarks.linear --width 64 128 256 --rounds 5
    python -m benchmarks.linear --log-probs      # the gradient of log-probs alone
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.harness import Experiment, Figure, Measuring, Stage, main_of
from benchmarks.turns import Record, Requests, serve, timed

if TYPE_CHECKING:
    from torch import Tensor

TOKENS, VOCAB, TEMPERATURE, WIDTH, THREADS = 2048, 50_000, 0.8, 256, 2
Side = Callable[["Tensor", "Tensor", "Tensor"], "tuple[Tensor, Tensor]"]


def autograd(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """As a user writes it."""
    import torch

    logp = torch.log_softmax(hidden @ weight.t() / TEMPERATURE, dim=-1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The train engine's path where the logits are needed."""
    from rlbench.trainers.passes.token_stats import token_stats

    return token_stats(hidden @ weight.t(), targets, TEMPERATURE)


def tiled(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The train engine's default."""
    from rlbench.rl.linear import linear_token_stats

    return linear_token_stats(hidden, weight, targets, TEMPERATURE)


SIDES: dict[str, Side] = {"autograd": autograd, "token_stats": plain, "tiled": tiled}


def head(at: Stage, width: int = WIDTH, by_entropy: bool = True, threads: int = THREADS) -> Measuring:
    """Yield seconds of each side, and the share of the logits' memory that each takes."""
    request = {"width": width, "by_entropy": by_entropy, "threads": threads}
    side = at.side("benchmarks.linear", "--serve", json.dumps(request))
    side.ready()
    memory = {f"{name}_memory": _peak_elsewhere(at, name, width, threads) for name in SIDES}
    while True:
        yield {**side.turn(), **memory}


def work(side: Side, hidden: Tensor, weight: Tensor, targets: Tensor, by_entropy: bool) -> None:
    """One forward and backward."""
    import torch

    logprobs, entropy = side(hidden, weight, targets)
    total = logprobs.sum() + 0.01 * entropy.sum() if by_entropy else logprobs.sum()
    torch.autograd.grad(total, (hidden, weight))


def made(width: int, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight, targets."""
    import torch

    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = (torch.randn(VOCAB, width) * 0.1).requires_grad_()
    return hidden, weight, torch.randint(VOCAB, (tokens,))


def peak(side: Side, width: int) -> float:
    """Extra memory of one forward and backward of both outputs, in this process, as a share of the logits."""
    hidden, weight, targets = inputs = made(width)
    few = hidden.detach()[:8].requires_grad_()
    # threads and libraries are there from here on; a weight of its own would count, as the mark is of all there was
    work(side, few, weight, targets[:8], True)
    held = status("VmRSS")
    work(side, *inputs, True)
    gradients = 4 * width * (TOKENS + VOCAB)
    return (status("VmHWM") - held - gradients) / (4 * TOKENS * VOCAB)


def status(name: str) -> int:
    """Bytes, from what Linux says of this process; its high-water mark starts at exec, unlike getrusage's."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def _peak_elsewhere(at: Stage, name: str, width: int, threads: int) -> float:
    arguments = (name, str(width), "--threads", str(threads))
    # what is freed goes back, and does not hide a peak
    side = at.side("benchmarks.linear", "--peak", *arguments, MALLOC_MMAP_THRESHOLD_="65536")
    return float(side.ready()["share"])


class Heads:
    """The side that computes, one forward and backward of each way per turn."""

    def __init__(self, width: int, by_entropy: bool, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.inputs, self.by_entropy = made(width), by_entropy
        self.turn()

    def turn(self) -> Record:
        """Time each."""
        return {f"{name}_s": timed(partial(work, side, *self.inputs, self.by_entropy)) for name, side in SIDES.items()}


EXPERIMENTS = (Experiment("linear", head, 3, 0.5),)
FIGURES = (
    Figure(
        "linear-memory",
        "chunked linear log-prob: memory / that of the logits (T=2048, V=50k, D=256)",
        "linear",
        lambda found: found["tiled_memory"],
        bar=0.12,
        better="less",
    ),
    Figure(
        "linear-time",
        "… time / over the logits, our own plain path",
        "linear",
        lambda found: found["tiled_s"] / found["token_stats_s"],
        bar=1.5,
        better="less",
    ),
    Figure(
        "linear-autograd",
        "… time / autograd over `log_softmax`",
        "linear",
        lambda found: found["tiled_s"] / found["autograd_s"],
        bar=1.5,
        better="less",
    ),
)


def main() -> None:
    """Print the figures of each width."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, nargs="*", default=[WIDTH], help="D, the hidden size")
    parser.add_argument("--rounds", type=int, help="how often each side works, in turns")
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--log-probs", action="store_true", help="without the entropy's gradient")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        return serve(Requests(), partial(Heads, **given.serve))
    if given.peak:
        requests = Requests()
        import torch

        torch.set_num_threads(given.threads)
        requests.answer({"share": peak(SIDES[given.peak[0]], int(given.peak[1]))})
        return None
    for width in given.width:
        print(f"D={width}")
        measure = partial(head, width=width, by_entropy=not given.log_probs, threads=given.threads)
        main_of(Experiment("linear", measure, 4, 2.0), FIGURES, given.rounds)
    return None


if __name__ == "__main__":
    main()

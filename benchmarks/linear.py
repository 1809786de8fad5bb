"""Log-probs and entropies from hidden states in tiles (`rlbench.rl.linear`) against the whole logits: time and memory.

Both sides run in this one invocation, in turns. Time: forward and backward, the least of all rounds. Memory: the peak
of a process of its own less what it held before, less the gradients, as a share of the float32 logits. "autograd" is
log_softmax as a user writes it; "token_stats" is our own plain path, which keeps one (T, V) matrix.

    python benchmarks/linear.py                  # T=2048, V=50 000, D=64, 128, 256, two threads
    python benchmarks/linear.py --width 256 --rounds 5
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from rlbench.rl.linear import linear_token_stats
from rlbench.trainers.passes.token_stats import token_stats

TOKENS, VOCAB, TEMPERATURE = 2048, 50_000, 0.8
Side = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def autograd(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """As a user writes it."""
    logp = torch.log_softmax(hidden @ weight.t() / TEMPERATURE, dim=-1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The train engine's path where the logits are needed."""
    return token_stats(hidden @ weight.t(), targets, TEMPERATURE)


def tiled(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The train engine's default."""
    return linear_token_stats(hidden, weight, targets, TEMPERATURE)


SIDES: dict[str, Side] = {"autograd": autograd, "token_stats": plain, "tiled": tiled}


def main() -> None:
    """Print a line for each width and each kind of loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, nargs="*", default=[64, 128, 256], help="D, the hidden size")
    parser.add_argument("--rounds", type=int, default=3, help="how often each side runs, in turns")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.peak:
        print(peak(SIDES[given.peak[0]], int(given.peak[1])))
        return
    for width in given.width:
        shares = {name: _peak_elsewhere(name, width, given.threads) for name in SIDES}
        print(f"D={width:<4} extra memory / logits: " + said(shares), flush=True)
        for by_entropy in (False, True):
            seconds = times(width, by_entropy, given.rounds)
            ratios = {name: seconds["tiled"] / seconds[name] for name in ("autograd", "token_stats")}
            loss = "log-probs and entropy" if by_entropy else "log-probs"
            print(f"D={width:<4} gradient of {loss}: seconds " + said(seconds), flush=True)
            print(f"D={width:<4}     tiled / " + said(ratios), flush=True)


def times(width: int, by_entropy: bool, rounds: int) -> dict[str, float]:
    """Least seconds of a forward and backward, by side; the first round warms up."""
    inputs = made(width)
    least = dict.fromkeys(SIDES, float("inf"))
    for turn in range(rounds + 1):
        for name, side in SIDES.items():
            begin = time.perf_counter()
            work(side, *inputs, by_entropy)
            least[name] = min(least[name], time.perf_counter() - begin) if turn else least[name]
    return least


def work(side: Side, hidden: Tensor, weight: Tensor, targets: Tensor, by_entropy: bool) -> None:
    """One forward and backward."""
    logprobs, entropy = side(hidden, weight, targets)
    total = logprobs.sum() + 0.01 * entropy.sum() if by_entropy else logprobs.sum()
    torch.autograd.grad(total, (hidden, weight))


def made(width: int, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight, targets."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = (torch.randn(VOCAB, width) * 0.1).requires_grad_()
    return hidden, weight, torch.randint(VOCAB, (tokens,))


def peak(side: Side, width: int) -> float:
    """Extra memory of one forward and backward of both outputs, in this process, as a share of the logits."""
    inputs = made(width)
    work(side, *made(width, 8), True)  # threads and libraries are there from here on
    held = status("VmRSS")
    work(side, *inputs, True)
    gradients = 4 * width * (TOKENS + VOCAB)
    return (status("VmHWM") - held - gradients) / (4 * TOKENS * VOCAB)


def status(name: str) -> int:
    """Bytes, from what Linux says of this process; its high-water mark starts at exec, unlike getrusage's."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def _peak_elsewhere(name: str, width: int, threads: int) -> float:
    done = subprocess.run(
        [sys.executable, __file__, "--peak", name, str(width), "--threads", str(threads)],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},  # what is freed goes back, and does not hide a peak
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def said(values: dict[str, float]) -> str:
    return "   ".join(f"{name} {value:.2f}" for name, value in values.items())


if __name__ == "__main__":
    main()

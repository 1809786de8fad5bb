"""What a trainer tells while it runs: a line per iteration, TensorBoard, lengths, trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlbench.data.record.metrics import NO_SIGNAL, shown_metric
from rlbench.errors import DataError
from rlbench.strategies.base import StrategyBase
from rlbench.strategies.generation.length_analysis import GenLenAnalyser
from rlbench.trainers.experience.values import Experience
from rlbench.trainers.options.trainer_options import TrainerOptions
from rlbench.trainers.reports.trajectory_saver import MARKED, TrajectorySaver

SHOWN = (
    *("reward", "policy_loss", "critic_loss", "kl", "ref_kl", "teacher_kl", "response_length", "actor_grad_norm"),
    "eval/reward",
)
OF_TEXTS = ("loss", "reward_accuracy", "reward_margin", "lr", "grad_norm", "eval/loss", "eval/reward_accuracy")
ROLLOUT = ("reward", "return", "response_length", "advantages", "returns", "step_reward", "rollout")


class TrainerLog:
    """Of one trainer; rank 0 alone writes."""

    def __init__(self, options: TrainerOptions, strategy: StrategyBase, tokenizer: Any) -> None:
        self._options, self._strategy, self._tokenizer = options, strategy, tokenizer
        config, ppo = options.strategy, options.ppo
        folder = config.use_tensorboard if strategy.is_rank_0() else None
        self._board = strategy.control.together("opening TensorBoard", lambda: _board(folder) if folder else None)
        self._lengths = None
        strategy.generation.collects_lengths = False  # by the trainer's iterations, not by the engine's calls
        if config.log_dir is not None or config.use_tensorboard:  # alike on all ranks: collecting is collective
            self._lengths = GenLenAnalyser(
                plot_every=config.plot_every, plot_out_dir=config.log_dir, strategy=strategy, tensorboard=self._board
            )
        self._saver = None
        if ppo.save_trajectories:
            count, marks = ppo.num_trajectories_to_save, ppo.mark_high_entropy_tokens
            self._saver = TrajectorySaver(ppo.save_path, count, marks, ppo.high_entropy_token_ratio or MARKED)

    def made(self, experiences: Sequence[Experience], iteration: int) -> None:
        """Write the lengths of experience that was made."""
        if self._lengths is not None:
            lengths = [int(n) for made in experiences for n in made.batch.response_lengths[made.trained]]
            with self._strategy.control.ended_together("writing response lengths"):
                self._lengths.collect(lengths, iteration)

    def trained(self, experiences: Sequence[Experience], iteration: int) -> dict[str, float]:
        """Write the most telling samples of experience that was trained on; returns what is told of them."""
        if self._saver is None:
            return {}
        self._saver.save(experiences, iteration, self._strategy, self._tokenizer)
        return self._saver.means if self._options.ppo.trajectory_analysis else {}

    def iterated(self, metrics: Mapping[str, Any], iteration: int) -> None:
        """Write an iteration's metrics by namespace."""
        if not self._options.strategy.use_tensorboard or iteration % self._options.ppo.logging_steps:
            return
        with self._strategy.control.ended_together("writing to TensorBoard"):
            if self._board is not None:
                for name, value in metrics.items():
                    if not isinstance(value, str):
                        self._board.add_scalar(namespaced(name), value, iteration)
                self._board.flush()

    def say(self, metrics: Mapping[str, Any], iteration: int) -> None:
        """Print the line of an iteration, on rank 0."""
        if iteration % self._options.ppo.logging_steps == 0:
            self._strategy.print(line_of(metrics, iteration, self._options.ppo.print_replay_buffer_stats))

    def close(self) -> None:
        """Write what is left."""
        if self._board is not None:
            self._board.flush()


def line_of(metrics: Mapping[str, Any], iteration: int, spreads: bool = False) -> str:
    """An iteration for a reader; with `spreads` followed by lines of the numbers that have a mean and a deviation."""
    shown = SHOWN if "policy_loss" in metrics or "loss" not in metrics else OF_TEXTS
    parts = [shown_metric(name, metrics) for name in shown if name in metrics]
    line = f"iteration {iteration}: " + " · ".join([*parts, *([NO_SIGNAL] if metrics.get("no_signal") == 1 else [])])
    return "\n".join([line, *_spreads(metrics)]) if spreads else line


def _spreads(metrics: Mapping[str, Any]) -> list[str]:
    lines = []
    for name in (key.removesuffix("_std") for key in metrics if key.endswith("_std")):
        if f"{name}_mean" in metrics:
            least, most = (metrics.get(f"{name}_{end}") for end in ("min", "max"))
            ends = "" if least is None or most is None else f", {least:.4g} to {most:.4g}"
            lines.append(f"  {name}: {metrics[f'{name}_mean']:.4g} ± {metrics[f'{name}_std']:.4g}{ends}")
    return lines


def namespaced(name: str) -> str:
    """The metric under rollout/, train/, eval/ or perf/."""
    if "/" in name and name.split("/")[0] in ("eval", "perf", "rollout", "train"):
        return name
    return f"rollout/{name}" if name.startswith(ROLLOUT) else f"train/{name}"


def _board(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as missing:
        raise DataError(f"use_tensorboard needs tensorboard, which is not installed ({missing})") from missing
    Path(folder).mkdir(parents=True, exist_ok=True)
    return SummaryWriter(folder)  # type: ignore[no-untyped-call]

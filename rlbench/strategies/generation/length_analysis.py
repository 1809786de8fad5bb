"""How long responses are, step by step: numbers, a line of data, a picture, a TensorBoard histogram.

Into a folder go `gen_len.jsonl`, one object per collected step (what `collect` returns, with `step` and a histogram:
`counts[i]` responses of `edges[i]` to below `edges[i + 1]` tokens; where a run was resumed and a step comes twice, its
last line counts), and `gen_len_step_<N>.svg`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlbench.data.base import drawing
from rlbench.data.base.files import written_aside
from rlbench.errors import DataError

BINS = 50
TAG = "VLLM GenerateOutputLength Distribution"
PAST_STEPS = 8


class GenLenAnalyser:
    """Collects the lengths of generated responses over all ranks.

    Args:
        engine_dp_group: a torch process group over whose ranks lengths are put together, in the place of all ranks
            of `strategy`: for outputs that several ranks hold alike. Not both.
        plot_every: steps between two collections; from 1 on each collected step is drawn too. 0 or less: every step
            is collected, and no picture is drawn.
        percentiles: those in the result and in the picture, 0 to 100.
        plot_out_dir: folder of data and pictures, made when first written to; None: neither is kept.
        strategy: whose ranks take part (`StrategyBase`); None, and no group: this process alone.
        tensorboard: what has `add_histogram(tag, values, step, bins=…)`, such as torch's `SummaryWriter`; of the rank
            that writes.
    """

    def __init__(
        self,
        engine_dp_group: Any = None,
        plot_every: int = 2,
        percentiles: Sequence[float] = (50, 80),
        plot_out_dir: str | Path | None = None,
        *,
        strategy: Any = None,
        tensorboard: Any = None,
    ) -> None:
        if engine_dp_group is not None and strategy is not None:
            raise DataError("engine_dp_group and strategy both say whose lengths are put together: give one")
        self._group = engine_dp_group
        self.plot_every = plot_every
        self.percentiles = list(percentiles)
        self.folder = None if plot_out_dir is None else Path(plot_out_dir).expanduser()
        self.tensorboard = tensorboard
        self._strategy = strategy
        self._drawn: deque[tuple[int, np.ndarray]] = deque(maxlen=PAST_STEPS + 1)

    def collect(
        self, outputs_or_lengths: Iterable[Any], step: int, is_rank_0: bool | None = None
    ) -> dict[str, Any] | None:
        """Put the lengths of all ranks together and write them down; collective.

        Args:
            outputs_or_lengths: this rank's, as many as it has: token counts, `GenerateOutput`s, or vLLM's request
                outputs (each of their completions counts).
            step: of the run; the same on all ranks.
            is_rank_0: whether this rank writes; None: the first one does.

        Returns:
            On every rank `total_samples`, `min_length`, `max_length`, `mean_length`, `median_length` (tokens; None
            without a response) and `percentiles` {p: whole tokens}; None where this step is not one of `plot_every`.
        """
        if self.plot_every > 0 and step % self.plot_every:
            return None
        first = True
        if self._strategy is not None:
            control, first = self._strategy.control, self._strategy.is_rank_0()
            own = control.together("counting response lengths", lambda: lengths_of(outputs_or_lengths))
            gathered = control.gather(own)
        elif self._group is not None:
            first, gathered = self._over_group(outputs_or_lengths)
        else:
            gathered = [lengths_of(outputs_or_lengths)]
        lengths = np.concatenate(gathered)
        stats = self._stats(lengths)
        if first if is_rank_0 is None else is_rank_0:
            self._write(step, lengths, stats)
        return stats

    def _over_group(self, outputs: Iterable[Any]) -> tuple[bool, list[np.ndarray]]:
        """Return whether this is the group's first rank, and the lengths of each; a failure of one is all ranks'."""
        import torch.distributed as dist

        try:
            own: Any = lengths_of(outputs)
        except DataError as error:  # the peers must hear of it: they wait in the gather
            own = error
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, own, group=self._group)
        if failures := [one for one in gathered if isinstance(one, DataError)]:
            raise failures[0]
        return dist.get_rank(self._group) == 0, gathered

    def _stats(self, lengths: np.ndarray) -> dict[str, Any]:
        none = len(lengths) == 0
        return {
            "total_samples": len(lengths),
            "min_length": None if none else int(lengths.min()),
            "max_length": None if none else int(lengths.max()),
            "mean_length": None if none else float(lengths.mean()),
            "median_length": None if none else float(np.median(lengths)),
            "percentiles": {p: None if none else round(float(np.percentile(lengths, p))) for p in self.percentiles},
        }

    def _write(self, step: int, lengths: np.ndarray, stats: Mapping[str, Any]) -> None:
        edges = edges_of(lengths) if len(lengths) else np.zeros(0, np.int64)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            counts = np.histogram(lengths, edges)[0].tolist() if len(lengths) else []
            line = json.dumps({"step": step, **stats, "edges": edges.tolist(), "counts": counts})
            with open(self.folder / "gen_len.jsonl", "a", encoding="ascii") as file:
                file.write(line + "\n")
        if not len(lengths):
            return
        if self.tensorboard is not None:
            self.tensorboard.add_histogram(TAG, lengths, step, bins=edges)
        if self.folder is not None and self.plot_every > 0:
            self._drawn.append((step, lengths))
            self._draw(self.folder / f"gen_len_step_{step}.svg", stats)

    def _draw(self, path: Path, stats: Mapping[str, Any]) -> None:
        """Draw the last step as bars, those before it as outlines."""
        steps = dict(self._drawn)
        numbers = {"mean": stats["mean_length"], **{f"p{p:g}": tokens for p, tokens in stats["percentiles"].items()}}
        texts = [f"{stats['total_samples']} responses", *(f"{name} {n:.4g}" for name, n in numbers.items())]
        edges = edges_of(np.concatenate(list(steps.values())))
        picture = drawing.drawn("lengths_picture", steps, edges, " · ".join(texts))
        with written_aside(path) as aside:
            aside.write_text(picture, encoding="utf-8")


def edges_of(lengths: np.ndarray) -> np.ndarray:
    """Return the edges of at most 50 bins of one whole width that hold these token counts, int64."""
    shortest, longest = int(lengths.min()), int(lengths.max())
    width = -(-(longest - shortest + 1) // BINS)
    return np.arange(shortest, longest + 1 + width, width)


def lengths_of(outputs: Iterable[Any]) -> np.ndarray:
    """Return the number of tokens of each response, (n,) int64."""
    return np.asarray([length for i, one in enumerate(outputs) for length in _counted(one, i)], np.int64)


def _counted(one: Any, place: int) -> list[int]:
    if isinstance(one, int | np.integer) and not isinstance(one, bool) and one >= 0:
        return [int(one)]
    if isinstance(one, Mapping) and "output_token_ids" in one:
        return [len(one["output_token_ids"])]
    if hasattr(one, "output_token_ids"):
        return [len(one.output_token_ids)]
    completions = getattr(one, "outputs", None)
    if isinstance(completions, list) and all(hasattr(completion, "token_ids") for completion in completions):
        return [len(completion.token_ids) for completion in completions]
    raise DataError(f"output {place} has no length: {type(one).__name__} {str(one)[:60]!r}; give token counts")

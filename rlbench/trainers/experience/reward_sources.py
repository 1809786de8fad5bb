"""What scores the samples of a rank: models on the ranks, services, Python rewards, each under a name."""

from __future__ import annotations

import importlib.util
import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from rlbench import rewards
from rlbench.data.rollouts import scoring
from rlbench.data.rollouts.rollout import Rollout
from rlbench.data.rollouts.rollouts import Rollouts
from rlbench.dispatch import context
from rlbench.errors import DataError, nearest
from rlbench.rewards.reward_model import model as ClassifierReward
from rlbench.rewards.service import as_payload, remote
from rlbench.strategies.options.config import OptionError
from rlbench.strategies.ranks.control import ControlGroup
from rlbench.trainers.experience.model_stage import ModelStage
from rlbench.trainers.experience.over_ranks import agreed
from rlbench.trainers.experience.samples import reference_of
from rlbench.user_code import user_code

POLL_S = 0.2
MODEL, RULE = "model", "rule"
FILE_FUNCTION = "reward_func"
FILE_TAKES = ("queries", "prompts", "labels", "references")


@dataclass(frozen=True)
class Source:
    """One reward. `kind`: "model" (on the ranks, or a service) or "rule" (code); `reward`: a module with a scalar head,
    or what `Rollouts.score` takes.
    """

    name: str
    kind: str
    reward: Any

    def scored(
        self, rollouts: Rollouts, models: ModelStage, tokenizer: Any, control: ControlGroup
    ) -> tuple[np.ndarray, Mapping[str, np.ndarray]]:
        """Return scores (N,) float64 of this rank's samples, and what they are made of by name; collective."""
        doing = f"the reward {self.name!r}"
        if isinstance(self.reward, nn.Module):
            sequences = agreed(control, doing, lambda: _sequences(self.reward, rollouts, tokenizer))
            found = models.scores(self.reward, sequences, doing)
            agreed(control, doing, lambda: _check_finite(self.name, found))
            return found, {}
        if not any(control.gather(rollouts.samples)):
            return np.zeros(0), {}
        scored = agreed(control, doing, lambda: _scored(self.reward, rollouts))
        return np.asarray(scored.rewards, np.float64), scored.components


def sources_of(reward_model: Any, remote_rm_url: str | Sequence[str] | None) -> list[Source]:
    """Return all rewards in order: of `reward_model`, one or several, then of `remote_rm_url`."""
    given = list(reward_model) if isinstance(reward_model, list | tuple) else [reward_model]
    urls = [remote_rm_url] if isinstance(remote_rm_url, str) else list(remote_rm_url or [])
    found = [one for one in (*given, *urls) if one is not None]
    return [_source(one, i) for i, one in enumerate(found)]


def _source(given: Any, index: int) -> Source:
    if isinstance(given, nn.Module):
        return Source(f"{MODEL}_{index}", MODEL, given)
    if isinstance(given, str) and given.endswith(".py"):
        return Source(f"{RULE}_{index}", RULE, from_file(given))
    if isinstance(given, str) and given.startswith(("http://", "https://")):
        return Source(f"{MODEL}_{index}", MODEL, rewards.remote(given, payload=with_references))
    if isinstance(given, remote | ClassifierReward):
        return Source(f"{MODEL}_{index}", MODEL, given)
    if callable(given):
        return Source(f"{RULE}_{index}", RULE, given)
    raise OptionError(
        "a reward is a module with a scalar head, a function of a Rollout, one of rb.rewards, the address of a "
        f"service or a file *.py; got {type(given).__name__} {str(given)[:40]!r}."
    )


def from_file(path: str) -> rewards.Scorer:
    """Return the `reward_func` of a Python file, which is given all samples of a call at once.

    It takes by name what it wants of `queries` (the completions' texts), `prompts`, `labels` and `references`, one
    entry per sample, and returns one number each.
    """
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = None if spec is None else importlib.util.module_from_spec(spec)
    try:
        assert spec is not None and spec.loader is not None and module is not None
        with user_code():
            spec.loader.exec_module(module)
    except Exception as error:  # a user's code
        raise OptionError(f"{path} cannot be run ({type(error).__name__}: {error}).") from error
    fn = getattr(module, FILE_FUNCTION, None)
    if not callable(fn):
        raise OptionError(f"{path} has no function {FILE_FUNCTION}(queries, prompts, labels).")
    wanted = list(inspect.signature(fn).parameters)
    for name in wanted:
        if name not in FILE_TAKES:
            raise OptionError(
                f"{path}: {FILE_FUNCTION} wants {name!r}{nearest(name, FILE_TAKES)}; there are {', '.join(FILE_TAKES)}."
            )

    def called(rollouts: Sequence[Rollout]) -> Any:
        given = {
            "queries": [r.text for r in rollouts],
            "prompts": [r.source.text for r in rollouts],
            "labels": [r.label for r in rollouts],
            "references": [reference_of(r.source) for r in rollouts],
        }
        answer = fn(**{name: given[name] for name in wanted})
        if isinstance(answer, Mapping):  # {"rewards": [...]}, as a service answers
            answer = answer.get("rewards")
        return answer.tolist() if hasattr(answer, "tolist") else answer

    called.__name__ = FILE_FUNCTION
    return rewards.batched(called)


def with_references(rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
    """Return what a service is sent: as of `rb.rewards.remote`, and `references`."""
    return {**as_payload(rollouts), "references": [reference_of(r.source) for r in rollouts]}


def _scored(reward: Any, rollouts: Rollouts) -> Rollouts:
    if not rollouts.samples:
        return replace(rollouts, rewards=np.zeros(0))
    board = rewards.Board()
    with _stopping(board):
        return scoring.score(rollouts, reward, board=board)


@contextmanager
def _stopping(board: rewards.Board) -> Iterator[None]:
    """Pass a stop of the call this rank executes on to the scoring, while it lasts."""
    call, ended = context.current(), threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_S):
            if call.stop_requested():
                board.stop()

    thread = threading.Thread(target=watch, name="rlbench-reward-stop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _sequences(model: nn.Module, rollouts: Rollouts, tokenizer: Any) -> list[list[int]]:
    """Return what a model on the ranks reads of each sample: the tokens, or the texts in a tokenizer of its own."""
    own = getattr(model, "tokenizer", None)
    if own is None or own is tokenizer:
        return [
            [*rollouts.prompt_ids[int(group)].tolist(), *response.tolist()]
            for group, response in zip(rollouts.group, rollouts.responses, strict=True)
        ]
    reader = ClassifierReward("", chat=None)
    return [reader.token_ids(rollout, own) for rollout in rollouts.flat]


def _check_finite(name: str, scores: np.ndarray) -> None:
    wrong = np.flatnonzero(~np.isfinite(scores))
    if len(wrong):
        raise DataError(
            f"the reward {name!r} gave {scores[wrong[0]]} for sample {wrong[0]} ({len(wrong)} of {len(scores)} are no "
            "finite numbers): mend the model, or leave it out"
        )

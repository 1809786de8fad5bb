"""From samples to one score each: models on the ranks, services and Python rewards, made into one by a function or a
recipe by label."""

from __future__ import annotations

import importlib.util
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rlbench import rewards
from rlbench.data.rollouts import scoring
from rlbench.data.rollouts.rollout import Rollout
from rlbench.data.rollouts.rollouts import Rollouts
from rlbench.dispatch import context
from rlbench.errors import DataError, RLBenchError, nearest
from rlbench.options import OptionError, refuse
from rlbench.rewards.reward_model import model as ClassifierReward
from rlbench.rewards.service import as_payload, remote
from rlbench.strategies.ranks.control import ControlGroup
from rlbench.traces import user_error
from rlbench.trainers.experience.model_stage import ModelStage
from rlbench.trainers.experience.over_ranks import agreed
from rlbench.trainers.experience.reading import sequences_of
from rlbench.trainers.experience.reward_failures import RewardFailures
from rlbench.trainers.experience.samples import counted, reference_of
from rlbench.user_code import user_code

RewardFn = Callable[..., Any]
Recipe = Mapping[Any, Sequence[tuple[str, str | None, float]]]
POLL_S = 0.2
MODEL, RULE = "model", "rule"
FILE_FUNCTION = "reward_func"
FILE_TAKES = ("queries", "prompts", "labels", "references")


class RewardStage:
    """Scores the samples of a rank where they are.

    What comes of it are the rollouts' `rewards`, and as `components` what they were made of: those of the rewards
    themselves, `model_reward` and `rule_reward` (the mean of the sources of that kind), the sources by name where there
    are several, and what `reward_fn` returned as metrics.

    Args:
        reward_model: a module with a scalar head on the ranks, anything `Rollouts.score` takes, or a list of such.
        remote_rm_url: the address of a service, a file `*.py` with a `reward_func`, or a list of such.
        reward_fn: `(model_reward_list, labels, queries, refs, label_map)` -> rewards (B,), or (rewards, metrics). The
            list holds a (B,) tensor for each source; queries are what the policy said, in all of its turns.
        reward_recipe: {label: [(type, key, weight)]}: a sample's reward is the weighted sum over its label's entries.
            type is "model" or "rule"; key names a source by `label_map`; ("rule", None, weight) is `reward_fn`.
            A source scores those samples alone whose recipe names it.
        label_map: {key: number of the source}, models first, then remote ones.
        allowed: share of a source's samples, over all ranks, whose reward may fail; their groups have no reward then,
            and `failures` tells of them. More raises the first failure.
    """

    def __init__(
        self,
        reward_model: Any,
        remote_rm_url: str | Sequence[str] | None,
        reward_fn: RewardFn | None,
        reward_recipe: Recipe | None,
        label_map: Mapping[str, int] | None,
        allowed: float = 0.0,
    ) -> None:
        self.failures = RewardFailures(allowed)
        self._fn, self._label_map = reward_fn, dict(label_map or {})
        names = {number: key for key, number in self._label_map.items()}
        found = sources_of(reward_model, remote_rm_url)
        self.sources = [replace(source, name=names.get(i, source.name)) for i, source in enumerate(found)]
        self._check(reward_recipe is not None)
        self._recipe = None if reward_recipe is None else self._weights(reward_recipe)

    def score(self, rollouts: Rollouts, models: ModelStage, tokenizer: Any, control: ControlGroup) -> Rollouts:
        """Give each sample of this rank its reward, NaN where it does not count and is shown to none, and in a group of
        which one failed; collective."""
        rows = counted(rollouts)
        if rows.all():
            return self._scored(rollouts, models, tokenizer, control)
        found = self._scored(rollouts.select(rows), models, tokenizer, control)
        components = {name: _spread(values, rows) for name, values in found.components.items()}
        return replace(rollouts, rewards=_spread(np.asarray(found.rewards), rows), components=components)

    def _scored(self, rollouts: Rollouts, models: ModelStage, tokenizer: Any, control: ControlGroup) -> Rollouts:
        """`score` of samples that count."""
        columns: dict[str, np.ndarray] = {}
        scores: list[np.ndarray] = []
        failed = np.zeros(rollouts.samples, bool)
        weights = agreed(control, "the reward recipe", lambda: self._weights_of(rollouts))
        for i, source in enumerate(self.sources):
            rows = weights[:, i] != 0
            part = rollouts if rows.all() else rollouts.select(rows)
            found, components = source.scored(part, models, tokenizer, control, self.failures)
            failed[rows] |= np.isnan(found)
            scores.append(_spread(found, rows))
            for name, values in components.items():  # under the source's name too where another source has one
                own = f"{source.name}_{name}" if name in columns else name
                columns[own] = _spread(np.asarray(values, np.float64), rows)
        whole = ~np.isin(rollouts.group, rollouts.group[failed])  # of a group that lacks none
        values, metrics = agreed(
            control, "the reward function", lambda: self._combined_among(rollouts, scores, weights, whole)
        )
        self.failures.groups += len(np.unique(rollouts.group[~whole]))
        several = {source.name: score for source, score in zip(self.sources, scores, strict=True)}
        kinds = {f"{kind}_reward": self._mean_of(kind, scores) for kind in (MODEL, RULE)}
        if not self.sources:
            kinds[f"{RULE}_reward"] = values
        components = {
            **columns,
            **(several if len(self.sources) > 1 else {}),
            **{name: mean for name, mean in kinds.items() if mean is not None},
            **metrics,
        }
        if not whole.all():
            components = {name: np.where(whole, numbers, np.nan) for name, numbers in components.items()}
        return replace(rollouts, rewards=values, components=components)

    def _combined_among(
        self, rollouts: Rollouts, scores: list[np.ndarray], weights: np.ndarray, whole: np.ndarray
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """`_combined` of the samples that `whole` (N,) tells, as if there were no others; NaN for those."""
        if whole.all():
            return self._combined(rollouts, scores, weights)
        values, metrics = self._combined(rollouts.select(whole), [score[whole] for score in scores], weights[whole])
        return _spread(values, whole), {name: _spread(numbers, whole) for name, numbers in metrics.items()}

    def _weights_of(self, rollouts: Rollouts) -> np.ndarray:
        """The weight of each source in each sample's reward, and last of `reward_fn`, (N, sources + 1)."""
        if self._recipe is None:
            return np.ones((rollouts.samples, len(self.sources) + 1))
        for number, prompt in enumerate(rollouts.prompts):
            if prompt.label not in self._recipe:
                known = [str(one) for one in self._recipe]
                raise DataError(
                    f"prompt {number} has the label {prompt.label!r}, which reward_recipe does not have"
                    f"{nearest(str(prompt.label), known)}; it has {', '.join(known)}"
                )
        own = [self._recipe[rollouts.prompts[int(group)].label] for group in rollouts.group]
        return np.reshape(own, (rollouts.samples, len(self.sources) + 1))

    def _combined(
        self, rollouts: Rollouts, scores: list[np.ndarray], weights: np.ndarray
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return one reward for each sample, and what `reward_fn` said of them."""
        made, metrics = (None, {}) if self._fn is None else self._called(rollouts, scores)
        if self._recipe is None:
            return (scores[0] if made is None else made), metrics
        columns = np.stack([*scores, np.zeros(rollouts.samples) if made is None else made])
        rewards = np.where(weights.T != 0, columns * weights.T, 0.0).sum(0)
        return rewards, metrics if made is None else {RULE + "_reward": made, **metrics}

    def _called(self, rollouts: Rollouts, scores: list[np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return what `reward_fn` makes of the sources' scores."""
        assert self._fn is not None
        if not rollouts.samples:
            return np.zeros(0), {}
        prompts = [rollouts.prompts[int(group)] for group in rollouts.group]
        models = [torch.from_numpy(score.astype(np.float32)) for score in scores]
        try:
            with user_code():
                given = self._fn(
                    models,
                    [p.label for p in prompts],
                    [rollout.text for rollout in rollouts.flat],
                    [reference_of(p) for p in prompts],
                    self._label_map or None,
                )
        except RLBenchError:
            raise
        except Exception as error:  # a user's code: its own line is what to show
            raise user_error(DataError, f"reward_fn raised {type(error).__name__}: {error}", error) from error
        made, metrics = given if isinstance(given, tuple) else (given, {})
        count = rollouts.samples
        return _numbers("rewards", made, count), {
            str(name): _numbers(f"the metric {name!r}", values, count) for name, values in dict(metrics or {}).items()
        }

    def _mean_of(self, kind: str, scores: list[np.ndarray]) -> np.ndarray | None:
        """Mean score of the sources of a kind, NaN where none of them scored; None without such a source."""
        found = [score for source, score in zip(self.sources, scores, strict=True) if source.kind == kind]
        if not found:
            return None
        known = np.isfinite(np.stack(found))
        return np.where(known.any(0), np.where(known, found, 0.0).sum(0) / np.maximum(known.sum(0), 1), np.nan)

    def _check(self, recipe: bool) -> None:
        count, keys, combines = len(self.sources), self._label_map, recipe or self._fn is not None
        outside = [f"{key!r} is source {number}" for key, number in keys.items() if not 0 <= number < count]
        refuse(
            (
                not count and self._fn is None,
                "nothing scores the samples: reward_model, remote_rm_url or reward_fn does",
            ),
            (outside, f"reward_fn_label_map: {', '.join(outside)}, and there are {count}, from 0 on"),
            (count > 1 and not combines, f"{count} rewards: reward_fn or reward_recipe say what one is made of"),
            (keys and not combines, "reward_fn_label_map has no effect without reward_fn or reward_recipe"),
        )

    def _weights(self, recipe: Recipe) -> dict[Any, np.ndarray]:
        """The weight of each source by label; last, of `reward_fn`."""
        count, found = len(self.sources), {}
        used: set[int] = set()
        for label, entries in recipe.items():
            found[label] = np.zeros(count + 1)
            for kind, key, weight in entries:
                place = self._label_map.get(key) if key else count
                of = self.sources[place].kind if key and place is not None else kind
                for wrong, why in (
                    (kind not in (MODEL, RULE), f"{kind!r} is neither 'model' nor 'rule'"),
                    (not key and (kind == MODEL or self._fn is None), f"a {kind!r} without a key needs reward_fn"),
                    (place is None, f"{key!r} is not in reward_fn_label_map{nearest(key or '', self._label_map)}"),
                    (of != kind, f"{key!r} is a {of!r}, not a {kind!r}"),
                ):
                    if wrong:
                        raise OptionError(f"reward_recipe[{label!r}]: {why}.")
                assert place is not None
                found[label][place] += weight
                used.add(place)
        names = [*(source.name for source in self.sources), *(["reward_fn"] if self._fn is not None else [])]
        for place, name in enumerate(names):
            if place not in used:
                raise OptionError(f"{name} would have no effect: reward_recipe does not name it.")
        return found


def _spread(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return values of the chosen samples among all, NaN in the others."""
    whole = np.full(len(rows), np.nan)
    whole[rows] = values
    return whole


def _numbers(what: str, given: Any, count: int) -> np.ndarray:
    try:
        values = np.asarray(given.detach().cpu() if torch.is_tensor(given) else given, np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"reward_fn: {what} are no numbers ({error}); wanted ({count},)") from None
    if what != "rewards" and values.shape == ():  # one number for all
        values = np.full(count, values)
    if values.shape != (count,):
        raise DataError(f"reward_fn: {what} have shape {values.shape}; wanted ({count},), one per sample")
    if what == "rewards" and not np.isfinite(values).all():
        raise DataError(f"reward_fn: the reward of sample {int(np.flatnonzero(~np.isfinite(values))[0])} is not finite")
    return np.array(values)


@dataclass(frozen=True)
class Source:
    """One reward. `kind`: "model" (on the ranks, or a service) or "rule" (code); `reward`: a module with a scalar head,
    or what `Rollouts.score` takes.
    """

    name: str
    kind: str
    reward: Any

    def scored(
        self, rollouts: Rollouts, models: ModelStage, tokenizer: Any, control: ControlGroup, failures: RewardFailures
    ) -> tuple[np.ndarray, Mapping[str, np.ndarray]]:
        """Return scores (N,) float64 of this rank's samples, and what they are made of by name; collective.

        NaN where the reward failed, and `failures` allows for so many.
        """
        doing = f"the reward {self.name!r}"
        if isinstance(self.reward, nn.Module):
            sequences, media = agreed(control, doing, lambda: sequences_of(self.reward, rollouts, tokenizer))
            found, by_head = models.scores(self.reward, sequences, doing, media)
            agreed(control, doing, lambda: _check_finite(doing, found))
            return found, by_head
        if not any(control.gather(rollouts.samples)):
            return np.zeros(0), {}
        scored, error = agreed(control, doing, lambda: _scored(self.reward, rollouts))
        failures.take(scored, error, doing, control)
        return np.asarray(scored.rewards, np.float64), scored.components


def sources_of(reward_model: Any, remote_rm_url: str | Sequence[str] | None) -> list[Source]:
    """Return all rewards in order: of `reward_model`, one or several, then of `remote_rm_url`."""
    given = list(reward_model) if isinstance(reward_model, list | tuple) else [reward_model]
    urls = [remote_rm_url] if isinstance(remote_rm_url, str) else list(remote_rm_url or [])
    found = [one for one in (*given, *urls) if one is not None]
    return [_source(one, i) for i, one in enumerate(found)]


def _source(given: Any, index: int) -> Source:
    if isinstance(given, str) and given.endswith(".py"):
        return Source(f"{RULE}_{index}", RULE, from_file(given))
    if isinstance(given, str) and given.startswith(("http://", "https://")):
        given = rewards.remote(given, payload=with_references)
    kind = MODEL if isinstance(given, nn.Module | remote | ClassifierReward) else RULE
    if kind == MODEL or callable(given):
        return Source(f"{kind}_{index}", kind, given)
    raise OptionError(
        "a reward is a module with a scalar head, a function of a Rollout, one of rb.rewards, the address of a "
        f"service or a file *.py; got {type(given).__name__} {str(given)[:40]!r}."
    )


def from_file(path: str) -> rewards.Scorer:
    """Return the `reward_func` of a Python file, which is given all samples of a call at once.

    It takes by name what it wants of `FILE_TAKES` (queries are what the policy said), and returns a number each.
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
    if strange := [name for name in wanted if name not in FILE_TAKES]:
        raise OptionError(f"{path}: {FILE_FUNCTION} wants {strange[0]!r}; there are {', '.join(FILE_TAKES)}.")

    def called(rollouts: Sequence[Rollout]) -> Any:
        given = {
            "queries": [r.text for r in rollouts],
            "prompts": [r.source.text for r in rollouts],
            "labels": [r.label for r in rollouts],
            "references": [reference_of(r.source) for r in rollouts],
        }
        answer = fn(**{name: given[name] for name in wanted})
        if isinstance(answer, Mapping) and "rewards" in answer:  # as a service answers
            answer = answer["rewards"]
        return answer.tolist() if hasattr(answer, "tolist") else answer

    called.__name__ = FILE_FUNCTION
    return rewards.batched(called)


def with_references(rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
    """Return what a service is sent: as of `rb.rewards.remote`, and `references`."""
    return {**as_payload(rollouts), "references": [reference_of(r.source) for r in rollouts]}


def _scored(reward: Any, rollouts: Rollouts) -> tuple[Rollouts, RLBenchError | None]:
    """Return scored samples, and what to raise for those that failed, if any did."""
    if not rollouts.samples:
        return replace(rollouts, rewards=np.zeros(0)), None
    board = rewards.Board()
    with _stopping(board):
        scored = scoring.score(rollouts, reward, "keep", board)
    return scored, scoring.error_of(rollouts, board) if board.failures else None


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


def _check_finite(doing: str, scores: np.ndarray) -> None:
    wrong = np.flatnonzero(~np.isfinite(scores))
    if len(wrong):
        raise DataError(f"{doing} is {scores[wrong[0]]} for sample {wrong[0]} (and {len(wrong) - 1} more): not finite")

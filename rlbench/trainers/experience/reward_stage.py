"""From samples to one score each: one reward as it is, or several made into one by a function or a recipe by label."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rlbench.data.rollouts.rollouts import Rollouts
from rlbench.errors import DataError, RLBenchError, nearest
from rlbench.strategies.options.config import OptionError
from rlbench.strategies.ranks.control import ControlGroup
from rlbench.traces import user_error
from rlbench.trainers.experience.model_stage import ModelStage
from rlbench.trainers.experience.over_ranks import agreed
from rlbench.trainers.experience.reward_sources import MODEL, RULE, sources_of
from rlbench.trainers.experience.samples import counted, reference_of
from rlbench.user_code import user_code

RewardFn = Callable[..., Any]
Recipe = Mapping[Any, Sequence[tuple[str, str | None, float]]]


class RewardStage:
    """Scores the samples of a rank where they are.

    What comes of it are the rollouts' `rewards`, and as `components` what they were made of: those of the rewards
    themselves, `model_reward` and `rule_reward` (the mean of the sources of that kind), the sources by name where there
    are several, and what `reward_fn` returned as metrics.

    Args:
        reward_model: a module with a scalar head on the ranks, anything `Rollouts.score` takes, or a list of such.
        remote_rm_url: the address of a service, a file `*.py` with a `reward_func`, or a list of such.
        reward_fn: `(model_reward_list, labels, queries, refs, label_map)` -> rewards (B,), or (rewards, metrics). The
            list holds a (B,) tensor for each source; queries are the completions' texts, without their prompts.
        reward_recipe: {label: [(type, key, weight)]}: a sample's reward is the weighted sum over its label's entries.
            type is "model" or "rule"; key names a source by `label_map`; ("rule", None, weight) is `reward_fn`.
            A source scores those samples alone whose recipe names it.
        label_map: {key: number of the source}, models first, then remote ones.
    """

    def __init__(
        self,
        reward_model: Any,
        remote_rm_url: str | Sequence[str] | None,
        reward_fn: RewardFn | None,
        reward_recipe: Recipe | None,
        label_map: Mapping[str, int] | None,
    ) -> None:
        self._fn, self._recipe, self._label_map = reward_fn, reward_recipe, dict(label_map or {})
        names = {number: key for key, number in self._label_map.items()}
        found = sources_of(reward_model, remote_rm_url)
        self.sources = [replace(source, name=names.get(i, source.name)) for i, source in enumerate(found)]
        self._check()

    def score(self, rollouts: Rollouts, models: ModelStage, tokenizer: Any, control: ControlGroup) -> Rollouts:
        """Give each sample of this rank, which may have none, its reward; collective.

        What does not count (`samples.counted`) is shown to no reward: its reward and components are NaN.
        """
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
        for i, source in enumerate(self.sources):
            rows = agreed(control, "the reward recipe", lambda i=i: self._rows_of(i, rollouts))  # type: ignore[misc]
            part = rollouts if rows.all() else rollouts.select(rows)
            found, components = source.scored(part, models, tokenizer, control)
            scores.append(_spread(found, rows))
            for name, values in components.items():  # under the source's name too where another source has one
                own = f"{source.name}_{name}" if name in columns else name
                columns[own] = _spread(np.asarray(values, np.float64), rows)
        values, metrics = agreed(control, "the reward function", lambda: self._combined(rollouts, scores))
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
        return replace(rollouts, rewards=values, components=components)

    def _rows_of(self, number: int, rollouts: Rollouts) -> np.ndarray:
        """Tell which samples a source scores, (N,) bool."""
        if self._recipe is None:
            return np.ones(rollouts.samples, bool)
        used = {label: self._weights(entries)[number] != 0 for label, entries in self._recipe.items()}
        return np.array([used[self._label(rollouts, int(group))] for group in rollouts.group], bool)

    def _label(self, rollouts: Rollouts, group: int) -> Any:
        label = rollouts.prompts[group].label
        assert self._recipe is not None
        if label not in self._recipe:
            known = [str(one) for one in self._recipe]
            raise DataError(
                f"prompt {group} has the label {label!r}, which reward_recipe does not have"
                f"{nearest(str(label), known)}; it has {', '.join(known)}"
            )
        return label

    def _weights(self, entries: Sequence[tuple[str, str | None, float]]) -> np.ndarray:
        """Return the weight of each source; last, of `reward_fn`."""
        weights = np.zeros(len(self.sources) + 1)
        for _, key, weight in entries:
            weights[len(self.sources) if key is None else self._label_map[key]] += weight
        return weights

    def _combined(self, rollouts: Rollouts, scores: list[np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return one reward for each sample, and what `reward_fn` said of them."""
        if self._fn is None and self._recipe is None:
            return scores[0], {}
        made, metrics = (None, {}) if self._fn is None else self._called(rollouts, scores)
        if self._recipe is None:
            assert made is not None
            return made, metrics
        columns = np.stack([*scores, np.zeros(rollouts.samples) if made is None else made])
        weights = {label: self._weights(entries) for label, entries in self._recipe.items()}
        own = np.array([weights[self._label(rollouts, int(group))] for group in rollouts.group])
        terms = np.where(own.T != 0, columns * own.T, 0.0) if rollouts.samples else columns
        return terms.sum(0), {RULE + "_reward": made, **metrics} if made is not None else metrics

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
                    list(rollouts.texts),
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

    def _check(self) -> None:
        if not self.sources and self._fn is None:
            raise OptionError("nothing scores the samples: give reward_model, remote_rm_url or reward_fn.")
        for key, number in self._label_map.items():
            if not 0 <= number < len(self.sources):
                raise OptionError(
                    f"reward_fn_label_map: {key!r} is source {number}, and there are {len(self.sources)}, from 0 on."
                )
        if self._recipe is None:
            if len(self.sources) > 1 and self._fn is None:
                raise OptionError(
                    f"{len(self.sources)} rewards: say what one reward is made of by reward_fn, or by reward_recipe "
                    "with reward_fn_label_map."
                )
            if self._label_map and self._fn is None:
                raise OptionError("reward_fn_label_map has no effect without reward_fn or reward_recipe.")
        else:
            self._check_recipe(self._recipe)

    def _check_recipe(self, recipe: Recipe) -> None:
        used: set[int] = set()
        for label, entries in recipe.items():
            for kind, key, _ in entries:
                if kind not in (MODEL, RULE):
                    raise OptionError(f"reward_recipe[{label!r}]: {kind!r} is neither 'model' nor 'rule'.")
                if not key and (kind == MODEL or self._fn is None):
                    raise OptionError(f"reward_recipe[{label!r}]: a {kind!r} without a key needs reward_fn.")
                if key and key not in self._label_map:
                    raise OptionError(
                        f"reward_recipe[{label!r}] names {key!r}, which reward_fn_label_map does not have"
                        f"{nearest(key, self._label_map)}."
                    )
                if key and self.sources[self._label_map[key]].kind != kind:
                    raise OptionError(
                        f"reward_recipe[{label!r}]: {key!r} is a {self.sources[self._label_map[key]].kind!r}, not a "
                        f"{kind!r}."
                    )
                used.add(self._label_map[key] if key else len(self.sources))
        self._recipe = {label: [(t, k or None, w) for t, k, w in entries] for label, entries in recipe.items()}
        spare = [source.name for i, source in enumerate(self.sources) if i not in used]
        if self._fn is not None and len(self.sources) not in used:
            spare.append("reward_fn")
        if spare:
            raise OptionError(f"{spare[0]} would have no effect: reward_recipe does not name it.")


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

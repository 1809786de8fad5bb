"""Several losses in one step: their weighted sum per token, each by name in the record.

    session.train_step(batch, loss={"grpo": rb.rl.grpo(), "sft": ("sft", 0.1), "own": (my_loss, 0.5)})

L = sum over parts k of w_k * L_k, added per token, so that one aggregation makes all of it one number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from rlbench.errors import LossError
from rlbench.rl.aggregate import Aggregation
from rlbench.rl.types import Loss, LossInputs, needs_of

Metrics = dict[str, Tensor | float]
Resolve = Callable[[Any], Loss]


class combined:
    """The weighted sum of several losses, by name: a loss, its name, or either with its weight.

    Metrics of the first part keep their names, those of the others begin with the part's; `<part>/loss` is the mean
    over trained tokens of each, before its weight. What any part needs (a reference, a teacher, hidden states, a plan
    of the step, a state) all of it has.
    """

    def __init__(self, parts: Mapping[str, Any], resolve: Resolve) -> None:
        if not parts:
            raise LossError("a loss of several parts needs one at least: {'grpo': 'grpo', 'aux': (my_loss, 0.1)}")
        self.parts = {name: _part(name, value, resolve) for name, value in parts.items()}
        losses = [loss for loss, _ in self.parts.values()]
        self.needs = tuple(dict.fromkeys(need for loss in losses for need in needs_of(loss)))
        self.needs_plan = any(getattr(loss, "needs_plan", False) for loss in losses)
        declared = [getattr(loss, "needs_reference", None) for loss in losses]
        self.needs_reference = True if any(declared) else None if None in declared else False
        told = [getattr(loss, "needs_sampler", None) for loss in losses]
        if None not in told or any(told):
            self.needs_sampler = any(told)
        self.aggregation = self._aggregation(losses)
        if states := {f"{name}/{key}": value for name, loss in self._stateful() for key, value in loss.state.items()}:
            self.state, self.update, self.state_name = states, self._update, "+".join(self.parts)

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        """Return the weighted sum per token, and the metrics of all parts."""
        total: Any = 0.0
        metrics: Metrics = {}
        for name, loss in self._lent():
            made: Any = loss(inputs)
            if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], dict)):
                raise LossError(
                    f"part {name!r} returned {type(made).__name__}; wanted (loss per token, {{}}), with metrics by name"
                )
            per_token, own = made
            total = total + self.parts[name][1] * per_token
            first = not metrics
            metrics |= {key if first else f"{name}/{key}": value for key, value in own.items()}
            metrics[f"{name}/loss"] = per_token.detach()
        return total, metrics

    def plan(self, whole: LossInputs) -> dict[str, Tensor]:
        """Return what the parts must know of the whole optimizer step."""
        channels: dict[str, Tensor] = {}
        for name, (loss, _) in self.parts.items():
            if getattr(loss, "needs_plan", False):
                planned: dict[str, Tensor] = loss.plan(whole)  # type: ignore[attr-defined]
                if twice := channels.keys() & planned.keys():
                    raise LossError(f"{name!r} and an earlier part both look at the whole step as {min(twice)!r}")
                channels |= planned
        return channels

    def __repr__(self) -> str:
        """As it is typed."""
        return repr({name: loss if weight == 1 else (loss, weight) for name, (loss, weight) in self.parts.items()})

    def _aggregation(self, losses: list[Loss]) -> str:
        """Return the one that all parts are meant for; of functions, which do not say, token-mean."""
        meant = {Aggregation.of_loss(loss).mode for loss in losses}
        if len(meant) > 1:
            raise LossError(
                f"the parts are meant for {' and '.join(sorted(meant))}, and are added per token, before one "
                "aggregation: give parts of one kind, as rb.rl.grpo(aggregation='token-mean')"
            )
        return meant.pop()

    def _stateful(self) -> Iterator[tuple[str, Any]]:
        """Give the parts that keep a state."""
        for name, (loss, _) in self.parts.items():
            if isinstance(getattr(loss, "state", None), dict) and callable(getattr(loss, "update", None)):
                yield name, loss

    def _lent(self) -> Iterator[tuple[str, Loss]]:
        """Give each part, with its part of the state."""
        stateful = {name for name, _ in self._stateful()}
        for name, (loss, _) in self.parts.items():
            if name not in stateful:
                yield name, loss
                continue
            held = loss.state  # type: ignore[attr-defined]
            object.__setattr__(loss, "state", _under(name, self.state))
            try:
                yield name, loss
            finally:
                object.__setattr__(loss, "state", held)

    def _update(self, metrics: Mapping[str, float]) -> None:
        """Put a new state in the place of each part's, from its own metrics."""
        made: dict[str, Tensor] = {}
        stateful = {name for name, _ in self._stateful()}
        for number, (name, loss) in enumerate(self._lent()):
            if name in stateful:
                loss.update({**metrics, **({} if number == 0 else _under(name, metrics))})  # type: ignore[attr-defined]
                made |= {f"{name}/{key}": value for key, value in loss.state.items()}  # type: ignore[attr-defined]
        self.state = made


def _part(name: str, value: Any, resolve: Resolve) -> tuple[Loss, float]:
    loss, weight = value if isinstance(value, tuple) and len(value) == 2 else (value, 1.0)
    if not isinstance(name, str) or not name or "/" in name:
        raise LossError(f"a part of a loss is called {name!r}; wanted a name without a slash")
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise LossError(f"the weight of part {name!r} is {weight!r}; wanted a number: {{'aux': (my_loss, 0.1)}}")
    return resolve(loss), float(weight)


def _under(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of one part by its own names."""
    return {key.removeprefix(f"{name}/"): value for key, value in values.items() if key.startswith(f"{name}/")}

"""The options of a trainer mean one loss, each of them changes it, and those that contradict each other raise."""

from __future__ import annotations

from typing import Any

import pytest

from rlbench.rl import Aggregation, cpgd, gspo, high_entropy, icepop, ppo, sequence_tis, token_tis
from rlbench.strategies.options.config import OptionError, StrategyConfig
from rlbench.trainers.options.ppo_config import PPOConfig
from rlbench.trainers.options.trainer_options import check_together
from rlbench.trainers.update.loss_choice import loss_of

MODE = "seq-mean-token-mean"


def chosen(options: dict[str, Any] | None = None, mode: str = MODE, use_gspo: bool = False, **config: Any) -> Any:
    strategy, own = StrategyConfig(**options or {}), PPOConfig(aggregation=mode, use_gspo=use_gspo, **config)
    check_together(strategy, own, critic=strategy.advantage_estimator == "gae")
    return loss_of(strategy, own)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ppo(aggregation=MODE)),
        ({"eps_clip": 0.1}, ppo(clip_low=0.1, clip_high=0.1, aggregation=MODE)),
        ({"eps_clip_high": 0.28}, ppo(clip_high=0.28, aggregation=MODE)),
        ({"mode": "token-mean"}, ppo(aggregation="token-mean")),
        ({"use_cpg_loss": True, "eps_clip": 0.3}, cpgd(clip_low=0.3, clip_high=0.3, aggregation=MODE)),
        ({"entropy_coef": 0.01}, ppo(entropy_coef=0.01, aggregation=MODE)),
        ({"high_entropy_token_ratio": 0.2}, ppo(tokens=high_entropy(fraction=0.2), aggregation=MODE)),
        ({"high_entropy_token_ratio": 1.0}, ppo(aggregation=MODE)),
        ({"options": {"use_kl_loss": True}}, ppo(kl_coef=0.001, kl_estimator="k3", aggregation=MODE)),
        (
            {"options": {"use_kl_loss": True, "kl_estimator": "k2"}, "kl_coef": 0.05},
            ppo(kl_coef=0.05, kl_estimator="k2", aggregation=MODE),
        ),
        ({"kl_coef": 0.05}, ppo(aggregation=MODE)),  # in the reward, then
        ({"old_logprobs": "sampler"}, ppo(anchor="sampler", aggregation=MODE)),
        ({"mismatch": "token_tis"}, ppo(mismatch=token_tis(), aggregation=MODE)),
        ({"mismatch": "sequence_tis"}, ppo(mismatch=sequence_tis(), aggregation=MODE)),
        ({"mismatch": "icepop"}, ppo(mismatch=icepop(), aggregation=MODE)),
        ({"use_gspo": True}, gspo()),
        ({"use_gspo": True, "eps_clip": 0.01}, gspo(clip_low=0.01, clip_high=0.01)),
        ({"use_gspo": True, "eps_clip_high": 0.001}, gspo(clip_high=0.001)),
    ],
)
def test_the_options_mean_this_loss(given: dict[str, Any], expected: Any) -> None:
    """Defects absent: use_gspo, loss_agg_mode and high_entropy_token_ratio without effect."""
    loss, aggregation = chosen(**given)
    assert loss == expected and type(loss) is type(expected)
    assert aggregation == Aggregation(given.get("mode", MODE)) and loss.aggregation == aggregation.mode


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mode": "token_mean"}, "nearest: token-mean"),
        ({"use_gspo": True, "mode": "token-mean"}, "seq-mean-token-mean"),
        ({"use_gspo": True, "mode": "seq-mean-token-sum"}, "seq-mean-token-mean"),
        ({"use_gspo": True, "use_cpg_loss": True}, "two losses"),
        ({"use_gspo": True, "high_entropy_token_ratio": 0.2}, "high_entropy_token_ratio"),
        ({"options": {"use_kl_loss": True}, "kl_coef": 0.0}, "kl_coef=0"),
        ({"options": {"use_kl_loss": True, "kl_estimator": "k1"}}, "only add noise"),
        ({"options": {"use_kl_loss": True, "kl_estimator": "k4"}}, "k4"),
        ({"old_logprobs": "sampler", "mismatch": "icepop"}, "nothing to correct"),
        ({"old_logprobs": "sampler", "top_p": 0.9}, "top_p"),
        ({"mismatch": "icepop", "top_k": 20}, "top_k"),
        ({"mismatch": "icepop", "use_fire": True}, "first_token_temperature"),
        ({"use_fire": True, "first_token_temperature": 0.0}, "above 0"),
        ({"mismatch": "tis"}, "one of token_tis, sequence_tis, icepop"),
        ({"eps_clip": 1.5}, r"clip_low=1.5 must lie in \[0, 1\]"),
        ({"use_cpg_loss": True, "eps_clip": 1.0}, "must be < 1"),
    ],
)
def test_options_that_contradict_each_other_or_could_not_act_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        chosen(**given)

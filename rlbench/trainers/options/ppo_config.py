"""Options of the trainers beside those of the strategy.

Defaults are the reference system's; where its documents, its class and its command line disagree, the class counts.
Importable without torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from rlbench.data.prompts.sampling import reshaped_by
from rlbench.options import OptionError, refuse, section
from rlbench.trainers.options.loop_options import LoopOptions

rollout, loss, kl, critic, files = map(
    section, ("Rollout", "Policy loss", "KL to the reference", "Critic and returns", "Files")
)
AGGREGATION = "seq-mean-token-mean"
"""Of the options' own loss where nobody says, the reference system's default; methods by name say it."""
NO_CRITIC = {"critic_pretrain": False}
NO_TRAJECTORIES = {"save_trajectories": False}


def from_json(name: str, value: Any, kind: type) -> Any:
    """Return what an option holds that a command line writes as JSON, or as the file of it."""
    if not isinstance(value, str):
        return value
    try:
        path = Path(value).expanduser()
        read = json.loads(path.read_text(encoding="utf-8") if path.suffix == ".json" else value)
    except (OSError, ValueError) as error:
        raise OptionError(f"{name}={value!r} cannot be read as JSON ({error}).") from error
    if not isinstance(read, kind):
        raise OptionError(f"{name}={value!r}: wanted {'an object' if kind is dict else 'a list'} as JSON.")
    return read


class PPOConfig(LoopOptions):
    """How experience is made and trained on."""

    NEUTRAL: ClassVar[Mapping[str, Any]] = {
        "buffer_cpu_offload": True,
        "normalize_advantages": True,
        "use_sequence_rewards": True,
    }
    REASONS: ClassVar[Mapping[str, str]] = {
        "buffer_cpu_offload": "experience lies in host memory in any case",
        "normalize_advantages": "it has no effect in LightRFT; how advantages compare is said by advantage_estimator "
        "(group_norm divides by the group's deviation, rloo does not) and advantages_norm",
        "use_sequence_rewards": "it has no effect in LightRFT; with use_gspo a response has one ratio and advantage",
    }

    rollout_batch_size: int = rollout(32, "prompts of one iteration, over all ranks", least=1)
    prompt_max_len: int = rollout(128, "tokens of a prompt at most; longer ones are refused", least=1)
    max_tokens: int = rollout(1024, "tokens of a response at most", least=1)
    temperature: float = rollout(1.0, "of sampling")
    top_p: float = rollout(1.0, "sample from the likeliest tokens that make up this share", least=0, most=1)
    top_k: int = rollout(-1, "sample from so many likeliest tokens; -1: all")
    use_fire: bool = rollout(False, "draw a response's first token at a temperature of its own (arXiv 2410.21236)")
    first_token_temperature: float = rollout(10.0, "that temperature", needs={"use_fire": False})
    reward_failures: float = rollout(
        0.1,
        "share of an iteration's samples whose reward may fail: their groups are left out, and counted; more end the "
        "iteration; 0: any does",
        least=0,
        most=1,
    )
    template: dict[str, Any] | str | None = rollout(
        None, 'options of the chat template, in a command line as JSON: {"enable_thinking": false}'
    )
    tools: list[dict[str, Any]] | str | None = rollout(
        None, "tools that chats name to the model, in OpenAI's form; in a command line as JSON, or its file"
    )
    buffer_limit: int = rollout(0, "newest sequences the replay buffer keeps; 0: all", least=0)
    no_signal: str = loss(
        "step", "what a step does whose advantages are all 0: it is taken, or left out", choices=("step", "skip")
    )
    max_epochs: int = loss(1, "passes over the experience of an iteration", least=1)
    aggregation: str | None = loss(
        None,
        "how the losses of tokens become one, see rlbench.rl.Aggregation; None: as a loss of your own says, or "
        f"{AGGREGATION}",
    )
    clip_low: float = loss(0.2, "the ratio is clipped to [1 - clip_low, 1 + clip_high]", least=0)
    clip_high: float | None = loss(None, "upper clip of the ratio; None: clip_low")
    use_gspo: bool = loss(False, "ratios of whole responses (GSPO) instead of tokens")
    use_cpg_loss: bool = loss(False, "CPGD's loss in the place of PPO's")
    entropy_coef: float = loss(0.0, "weight of an entropy bonus")
    high_entropy_token_ratio: float = loss(
        0.0, "share of tokens, those of the highest entropy, that keep their loss; 0: all", least=0, most=1
    )
    old_logprobs: str = loss(
        "recompute",
        "what the ratio is against: the actor's before the first update, or the engine's",
        choices=("recompute", "sampler"),
    )
    mismatch: str | None = loss(
        None, "correction for the sampler's other log-probs", choices=("token_tis", "sequence_tis", "icepop")
    )
    ptx_coef: float = loss(0.0, "weight of a language loss on pretrain_data; 0: none", least=0)
    pretrain_max_len: int | None = loss(
        None,
        "tokens of a text of pretrain_data that are trained on (of demonstrations longer ones are refused); None: "
        "prompt_max_len + max_tokens (of demonstrations any)",
        least=2,
        needs={"ptx_coef": 0.0},
    )
    kl_coef: float = kl(0.001, "weight, in the reward or with use_kl_loss in the loss; 0: no reference", least=0)
    kl_target: float | None = kl(None, "the weight adapts to this KL", needs={"kl_coef": 0.0})
    kl_horizon: int = kl(10000, "over so many sequences", needs={"kl_target": None})
    value_clip: float = critic(0.2, "bound on the change of a value; 0: none", least=0, needs=NO_CRITIC)
    gamma: float = critic(1.0, "discount", least=0, most=1)
    lambd: float = critic(0.95, "lambda of GAE", least=0, most=1, needs=NO_CRITIC)
    freezing_actor_steps: int = critic(-1, "first iterations in which the critic alone trains; -1: none")
    ema_beta: float = critic(
        0.992, "share of the old in each update of the moving average", least=0, most=1, needs={"enable_ema": False}
    )
    logging_steps: int = files(1, "iterations between printed lines", least=1)
    save_trajectories: bool = files(False, "write samples of each iteration as JSON")
    num_trajectories_to_save: int = files(10, "how many", least=0, needs=NO_TRAJECTORIES)
    trajectory_analysis: bool = files(
        False, "means over those samples as metrics: repetition, words of reflection, entropy", needs=NO_TRAJECTORIES
    )
    print_replay_buffer_stats: bool = files(
        False, "an iteration's line is followed by the spread of rewards, advantages, returns and lengths"
    )
    save_value_network: bool = files(
        False, "at the end of a run the critic is saved beside save_path, as …_critic", needs=NO_CRITIC
    )
    mark_high_entropy_tokens: bool = files(False, "mark their tokens of high entropy", needs=NO_TRAJECTORIES)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in (("template", dict), ("tools", list)):
            object.__setattr__(self, name, from_json(name, getattr(self, name), kind))
        sampler, mismatch, ratio = self.old_logprobs == "sampler", self.mismatch, self.high_entropy_token_ratio
        by_response = (self.aggregation or AGGREGATION) == AGGREGATION
        heat = self.first_token_temperature if self.use_fire else None
        options = {"top_p": self.top_p, "top_k": self.top_k, "first_token_temperature": heat}
        reshaped = " and ".join(reshaped_by(options))
        weighs = "old_logprobs='sampler'" if sampler else mismatch and f"mismatch={mismatch!r}"
        refuse(
            (
                self.first_token_temperature <= 0,
                f"first_token_temperature={self.first_token_temperature!r}: it lies above 0",
            ),
            (self.temperature <= 0, f"temperature={self.temperature!r}: a policy is sampled at a temperature above 0"),
            (
                self.mark_high_entropy_tokens and sampler,
                "mark_high_entropy_tokens needs the actor's entropies: leave old_logprobs='sampler' out",
            ),  # see rlbench.rl.losses.check_sampled_as_trained
            (reshaped and weighs, f"{weighs} weighs by the sampler's log-probs, which {reshaped} changes: use one"),
            (sampler and mismatch, f"mismatch={mismatch!r} with old_logprobs='sampler': there is nothing to correct"),
            (self.use_gspo and self.use_cpg_loss, "use_gspo and use_cpg_loss name two losses: choose one"),
            (self.use_gspo and not by_response, "use_gspo averages over responses: aggregation='seq-mean-token-mean'"),
            (self.use_gspo and 0 < ratio < 1, "use_gspo has one ratio for a response: no high_entropy_token_ratio"),
        )

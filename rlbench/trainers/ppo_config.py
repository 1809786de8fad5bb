"""Options of the trainers beside those of the strategy: one dataclass, names and defaults of the reference system.

Where the reference's documents, its class and its command line disagree, the class counts. What a trainer cannot honour
raises, so that no option is without effect. Importable without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from rlbench.data.sampling import reshaped_by
from rlbench.strategies.config import OptionError

OLD_LOGPROBS = ("recompute", "sampler")


@dataclass(frozen=True)
class PPOConfig:
    """How experience is made and trained on.

    Attributes:
        rollout_batch_size: prompts of one `make_experience`, over all ranks.
        prompt_max_len: tokens; longer prompts are refused.
        generate_max_len: most tokens of a response.
        temperature, top_p, top_k: of sampling.
        max_epochs: passes over the experience in one `ppo_train`.
        eps_clip: the ratio is clipped to [1 - eps_clip, 1 + eps_clip_high].
        eps_clip_high: upper bound where it differs (DAPO's clip-higher); None: eps_clip.
        value_clip: bound on the change of the critic's value; 0: none.
        gamma, lambd: discount and lambda of GAE and of returns.
        init_kl_coef: weight of the KL to the reference, in the reward or, with use_kl_loss, in the loss; 0 needs none.
        kl_target, kl_horizon: with a target the weight adapts to it over so many sequences.
        ema_beta: share of the old average in each update of the EMA model.
        ptx_coef: weight of a language loss on pretrain_data beside the policy's; 0: none.
        entropy_coef: weight of an entropy bonus in the policy loss.
        high_entropy_token_ratio: share of tokens, those of the highest entropy, that keep their policy loss; 0: all.
        use_cpg_loss: CPGD's loss (clipped policy gradient with drift) in the place of PPO's.
        old_logprobs: "recompute": by the actor, before the first update; "sampler": those of the inference engine,
            which the ratio is then taken against, so that nothing is left to correct.
        mismatch: with recomputed ones, the correction of the loss for a sampler that computes other probabilities:
            None, "token_tis", "sequence_tis", "icepop".
        freezing_actor_steps: `ppo_train` calls in which the critic alone trains; -1: none.
        buffer_limit: newest sequences the replay buffer keeps; 0: all.
        buffer_cpu_offload: keep experience on the host; False is refused, as it is never on the device here.
        gradient_checkpointing: recompute activations of actor and critic in the backward.
        reward_fn_label_map, save_* and the like are arguments of the trainer.
        save_path, save_steps, ckpt_path, max_ckpt_num, max_ckpt_mem, load_checkpoint, save_hf_ckpt: of `fit`; -1 saves
            at the end alone, 0 never.
        eval_steps: iterations between evaluations in `fit`; -1: none.
        logging_steps: iterations between printed lines in `fit`.
        save_trajectories, num_trajectories_to_save, mark_high_entropy_tokens: the most telling samples as JSON.
    """

    rollout_batch_size: int = 32
    prompt_max_len: int = 128
    generate_max_len: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_epochs: int = 1
    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    value_clip: float = 0.2
    gamma: float = 1.0
    lambd: float = 0.95
    init_kl_coef: float = 0.001
    kl_target: float | None = None
    kl_horizon: int = 10000
    ema_beta: float = 0.992
    ptx_coef: float = 0.0
    entropy_coef: float = 0.0
    high_entropy_token_ratio: float = 0.0
    use_cpg_loss: bool = False
    old_logprobs: str = "recompute"
    mismatch: str | None = None
    freezing_actor_steps: int = -1
    buffer_limit: int = 0
    buffer_cpu_offload: bool = True
    gradient_checkpointing: bool = False
    save_path: str = "./ckpt"
    save_steps: int = 0
    ckpt_path: str = "./ckpt/checkpoints_ppo"
    max_ckpt_num: int = 3
    max_ckpt_mem: float = 1000.0
    load_checkpoint: bool = False
    save_hf_ckpt: bool = False
    eval_steps: int = -1
    logging_steps: int = 1
    save_trajectories: bool = False
    num_trajectories_to_save: int = 10
    mark_high_entropy_tokens: bool = False

    def __post_init__(self) -> None:
        for name in (
            "rollout_batch_size",
            "prompt_max_len",
            "generate_max_len",
            "max_epochs",
            "logging_steps",
        ):
            _at_least(name, getattr(self, name), 1)
        for name in (
            "eps_clip",
            "value_clip",
            "init_kl_coef",
            "ptx_coef",
            "buffer_limit",
            "num_trajectories_to_save",
        ):
            _at_least(name, getattr(self, name), 0)
        for name in ("gamma", "lambd", "ema_beta", "high_entropy_token_ratio", "top_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise OptionError(f"{name}={getattr(self, name)!r}: it lies between 0 and 1.")
        if self.temperature <= 0:
            raise OptionError(f"temperature={self.temperature!r}: a policy is sampled at a temperature above 0.")
        if self.old_logprobs not in OLD_LOGPROBS:
            raise OptionError(f"old_logprobs={self.old_logprobs!r}: it is one of {', '.join(OLD_LOGPROBS)}.")
        if self.mark_high_entropy_tokens and self.old_logprobs == "sampler":
            raise OptionError(
                "mark_high_entropy_tokens needs the actor's entropies, which old_logprobs='sampler' does not compute: "
                "leave one of them out."
            )
        if reshaped := reshaped_by({"top_p": self.top_p, "top_k": self.top_k}):
            self._refuse_sampler_weights(", ".join(reshaped))
        if not self.buffer_cpu_offload:
            raise OptionError("buffer_cpu_offload=False cannot be honoured: experience lies on the host. Leave it out.")

    def _refuse_sampler_weights(self, reshaped: str) -> None:
        """Refuse to weigh by log-probs that are not the policy's; see `rlbench.rl.losses.check_sampled_as_trained`."""
        weighs = "old_logprobs='sampler'" if self.old_logprobs == "sampler" else f"mismatch={self.mismatch!r}"
        if self.old_logprobs == "sampler" or self.mismatch is not None:
            raise OptionError(
                f"{weighs} weighs by the sampler's log-probs, which {reshaped} makes those of another distribution: "
                "leave one of them out."
            )

    @property
    def clip_high(self) -> float:
        """The upper clip of the ratio."""
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high


def _at_least(name: str, value: Any, least: float) -> None:
    if value < least:
        raise OptionError(f"{name}={value!r}: it is a number from {least} on.")


def names() -> list[str]:
    """The names of all options of the trainer."""
    return [f.name for f in fields(PPOConfig)]

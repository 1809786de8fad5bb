"""The reference system's command line, flag by flag: other names of options, and what is refused with its reason.

A flag that is neither in these tables nor an option of ours does not exist there either; a test holds the list.
"""

from __future__ import annotations

ALIASES = {"actor_lr": "actor_learning_rate", "critic_lr": "critic_learning_rate", "max_new_tokens": "generate_max_len"}
"""Other names that mean the same."""
NEGATED = {"disable_engine_sleep": "enable_engine_sleep"}
"""Switches that mean the opposite."""

_VISION = "vision-language models are not here yet"
_REENTRANT = "activations are recomputed, but never re-entrantly, which FSDP2's hooks do not allow"
_LORA = "adapters are not here yet: all weights of the policy are trained"
_TRACKING = "runs are told to other trackers by session.track(…) in a notebook; here there is use_tensorboard"

REFUSED: dict[str, str] = {
    "text_only": "every run is text only",
    "limit_mm_image_per_prompt": _VISION,
    "images_key": _VISION,
    "freeze_prefix": _VISION,
    "no_shard_vit": _VISION,
    "disable_ds_ckpt": "there are no DeepSpeed checkpoints; save_steps=0 writes none at all",
    "trajectory_analysis": "repetition and reflection are scored in every trajectory that save_trajectories writes",
    "print_replay_buffer_stats": "what it printed of rewards, advantages and lengths is in every iteration's metrics",
    "max_len": "a sequence has at most prompt_max_len + generate_max_len tokens; set those",
    "normalize_advantages": "it had no effect there; advantages_norm whitens advantages",
    "use_sequence_rewards": "it had no effect there; a reward belongs to a whole response",
    "normalize_reward_for_critic": "it had no effect there; reward_running_norm normalises rewards",
    "normalize_reward": "it had no effect there; reward_running_norm normalises rewards",
    "use_fire": "FIRE draws first tokens from another distribution than the policy's; nothing corrects that here yet",
    "first_token_temperature": "it belongs to use_fire, which is not here yet",
    "save_value_network": "checkpoints under ckpt_path hold the critic; there is no export of it yet",
    "use_reentrant": _REENTRANT,
    "gradient_checkpointing_use_reentrant": _REENTRANT,
    "flash_attn": "attention is chosen by what the device has",
    "disable_logprobs_flashattn": "it had to do with flash-attn's kernel, which is not used; see fused_linear_logprob",
    "aux_loss_coef": "the balancing loss of mixtures of experts is not here yet",
    "disable_fast_tokenizer": "tokens are read by the fast tokenizer alone",
    "meta_init": "models of a run are always made without memory and filled shard by shard",
    "initial_model_shard_size": "the reference is sharded as the policy is; prepare_model(shard_size=n) on the ranks",
    "load_in_4bit": "quantised weights cannot be trained here",
    "lora_rank": _LORA,
    "lora_alpha": _LORA,
    "lora_dropout": _LORA,
    "target_modules": _LORA,
    "value_head_prefix": "the head of a critic or reward model is called score",
    "pretrain_data_probs": "pretrain_data is one source",
    "pretrain_split": "of pretrain_data the split train is read; a file is one split",
    "use_wandb": _TRACKING,
    "wandb_org": _TRACKING,
    "wandb_group": _TRACKING,
    "wandb_project": _TRACKING,
    "wandb_run_name": _TRACKING,
    "use_ms": "models are read from folders or the Hugging Face hub; download with modelscope first",
}
"""Flags of the reference that cannot be honoured, and why; one that asks for something raises."""
AS_ASKED = {"text_only": True, "value_head_prefix": "score", "meta_init": True, "disable_ds_ckpt": True}
"""Of those, what happens anyway, and may be asked for."""


def asks_for_nothing(name: str, value: object) -> bool:
    """Whether this value of a refused flag is what happens anyway: it is switched off, or `AS_ASKED`."""
    if name in AS_ASKED:
        return value == AS_ASKED[name]
    return value is None or value is False or value in (0, "0", "")

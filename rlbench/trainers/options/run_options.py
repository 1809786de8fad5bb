"""Options of a whole run beside those of strategy and trainer. Importable without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from rlbench.options import OptionError, Options, section

models, source, run = map(section, ("Models", "Data", "Run"))
NO_EVALUATION = {"eval_data": None}
NO_LORA = {"lora_rank": 0}
LIGHTRFT_ALONE = """
limit_mm_image_per_prompt images_key no_shard_vit trajectory_analysis print_replay_buffer_stats max_len
normalize_advantages use_sequence_rewards normalize_reward_for_critic normalize_reward
save_value_network use_reentrant gradient_checkpointing_use_reentrant flash_attn disable_logprobs_flashattn
aux_loss_coef disable_fast_tokenizer initial_model_shard_size load_in_4bit
pretrain_data_probs pretrain_split use_wandb wandb_org wandb_group wandb_project wandb_run_name use_ms
"""
"""Flags of LightRFT's command line that nothing here answers to: taken where they ask for nothing."""


class RunOptions(Options):
    """What a run needs to know that neither strategy nor trainer does."""

    NEUTRAL: ClassVar[Mapping[str, Any]] = dict.fromkeys(LIGHTRFT_ALONE.split()) | {
        "text_only": True,
        "value_head_prefix": "score",
        "meta_init": True,
        "disable_ds_ckpt": True,
    }
    IN_ANY_CASE: ClassVar[tuple[str, ...]] = ("text_only",)  # a model that sees is one like others

    pretrain: str = models("tiny", "the policy: a folder, a hub id, tiny or tiny-vision")
    freeze_prefix: str | bool = models(
        False, "parameters whose names begin so (several with commas) do not train; alone: those of a vision tower"
    )
    lora_rank: int = models(0, "train LoRA adapters of that rank in place of the weights; 0: all weights", least=0)
    lora_alpha: float | None = models(
        None, "what computes is W + lora_alpha / lora_rank · B A; None: 2 · lora_rank", needs=NO_LORA
    )
    lora_targets: tuple[str, ...] = models(("all-linear",), "layers that get adapters", needs=NO_LORA)
    lora_dropout: float = models(0.0, "of what an adapter takes in", least=0, most=0.99, needs=NO_LORA)
    reward_pretrain: tuple[str, ...] = models((), "folders of reward models with a scalar head")
    reward: str | None = models(
        None,
        "what scores a response: module:function, file.py:function, math, or tiny or tiny-vision for a built-in task",
    )
    reward_fn: str | None = models(None, "module:function that makes one reward of several models'")
    teacher: str | None = models(None, "of distill: the frozen policy that is learned from, a folder or a hub id")
    enable_ema: bool = models(False, "keep a moving average of the policy")
    data: str | None = source(
        None, "what a method on texts trains on: a file, a folder, a hub id of demonstrations, pairs or judged answers"
    )
    max_length: int | None = source(
        None, "tokens of such a text at most; longer ones are refused; None: those of the model's context", least=1
    )
    prompt_data: str | None = source(
        None,
        "sources of prompts, with commas between: files, folders, hub ids (openai/gsm8k:main: one of its "
        "configurations), tiny or tiny-vision; a column images, or image, is that of their pictures",
    )
    prompt_data_probs: tuple[float, ...] = source((), "share of each source; without it in proportion to their sizes")
    prompt_split: str = source("train", "which split of them, or of data; a file is one")
    eval_data: str | None = source(None, "source of the prompts, or texts, of an evaluation")
    eval_split: str = source("test", "which split of it", needs=NO_EVALUATION)
    max_eval_samples: int = source(500, "its prompts or texts at most", least=1, needs=NO_EVALUATION)
    input_key: str = source("input", "column of the prompt, and of a text of pretrain_data")
    label_key: str = source("label", "column of the label, where the data has one")
    reference_key: str = source(
        "reference", "column of the reference answer where the label says what kind of task it is"
    )
    input_template: str | None = source(None, 'makes the prompt from a row\'s columns: "{question}\\nAnswer:"')
    apply_chat_template: bool = source(False, "texts become a user message, put through the model's chat template")
    system_prompt: str | None = source(None, "a system message before each prompt")
    max_samples: int = source(1_000_000, "prompts or texts read at most", least=1)
    num_episodes: int = run(1, "passes over the prompts or texts", least=1)
    max_steps: int | None = run(
        None, "iterations; without it as many as the episodes have, with num_episodes the fewer of both", least=1
    )
    loss: str | None = run(
        None, "loss in the place of the method's: dpo(beta=0.2), module:name or file.py:name of one of your own"
    )
    lr_schedule: str = run(
        "cosine",
        "cosine: the rates warm up and fall to a tenth over the run; constant: they stay",
        choices=("cosine", "constant"),
    )
    shards: int | None = run(None, "ranks the parameters are split over; None: one per GPU, without a GPU one", least=1)
    replicas: int = run(1, "inference engines", least=1)
    kv_cache_bytes: int | None = run(None, "memory of an engine's KV cache", least=1)
    metrics_file: str | None = run(None, "file that gets all metrics of each iteration, a line of JSON each")

    def __post_init__(self) -> None:
        super().__post_init__()
        shares = self.prompt_data_probs
        if shares and (len(shares) != len(self.sources) or not all(0 < share < math.inf for share in shares)):
            raise OptionError(
                f"prompt_data_probs={shares!r}: it is one number above 0 for each of the {len(self.sources)} sources "
                "of prompt_data."
            )

    @property
    def sources(self) -> list[str]:
        """The sources of `prompt_data`, in their order."""
        return [] if self.prompt_data is None else [part.strip() for part in self.prompt_data.split(",")]

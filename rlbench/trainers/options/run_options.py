"""Options of a whole run beside those of strategy and trainer. Importable without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from rlbench.options import OptionError, Options, section
from rlbench.trainers.options.ppo_config import NO_CRITIC

models, source, run = map(section, ("Models", "Data", "Run"))
NO_EVALUATION = {"eval_data": None}
NO_LORA = {"lora_rank": 0}
NO_PRETRAINING = {"pretrain_data": None}
NO_WANDB = {"use_wandb": False, "track": ()}
NO_NORM = (
    "its mean is 0 and its deviation 1 in LightRFT, so it has no effect there; reward_running_norm=True divides by the "
    "running deviation what a critic learns to predict"
)


class RunOptions(Options):
    """What a run needs to know that neither strategy nor trainer does."""

    NEUTRAL: ClassVar[Mapping[str, Any]] = {
        "text_only": True,
        "meta_init": True,
        "flash_attn": False,
        "disable_logprobs_flashattn": False,
        **dict.fromkeys(("no_shard_vit", "normalize_reward_for_critic", "normalize_reward")),
        "disable_fast_tokenizer": None,
    }
    REASONS: ClassVar[Mapping[str, str]] = {
        "meta_init": "a model is made without memory in any case, and each rank reads its own part",
        "no_shard_vit": "LightRFT's own code does nothing with it; a tower's layers are gathered one at a time, for "
        "their own pass; freeze_prefix keeps it without gradients and optimizer",
        "normalize_reward_for_critic": NO_NORM,
        "normalize_reward": NO_NORM,
        "disable_fast_tokenizer": "transformers 5 has one tokenizer for each model, the fast one, and takes the flag "
        "without effect",
    }
    WITHOUT_EFFECT: ClassVar[tuple[str, ...]] = (
        *("no_shard_vit", "normalize_reward_for_critic", "normalize_reward", "disable_fast_tokenizer"),
    )
    IN_ANY_CASE: ClassVar[tuple[str, ...]] = (
        "text_only",  # a model that sees is one like others
        "flash_attn",  # torch's own flash kernels compute where device, dtype and layout have one
        "disable_logprobs_flashattn",  # log-probs are torch's, or straight from the output layer: head="chunked"
    )

    pretrain: str = models("tiny", "the policy: a folder, a hub id, tiny or tiny-vision")
    use_ms: bool = models(
        False, "models that are named by an id are ModelScope's, brought by its client (pip install modelscope)"
    )
    freeze_prefix: str | bool = models(
        False, "parameters whose names begin so (several with commas) do not train; alone: those of a vision tower"
    )
    lora_rank: int = models(0, "train LoRA adapters of that rank in place of the weights; 0: all weights", least=0)
    lora_alpha: float | None = models(
        None, "what computes is W + lora_alpha / lora_rank · B A; None: 2 · lora_rank", needs=NO_LORA
    )
    lora_targets: tuple[str, ...] = models(("all-linear",), "layers that get adapters", needs=NO_LORA)
    lora_dropout: float = models(0.0, "of what an adapter takes in", least=0, most=0.99, needs=NO_LORA)
    lora_base: str | None = models(
        None,
        "hold the frozen weights of linear layers quantised, by bitsandbytes (load_in_4bit: nf4)",
        choices=("nf4", "int8"),
    )
    value_head_prefix: str = models("score", "what the critic's head is called in its checkpoint", needs=NO_CRITIC)
    pooling: str | None = models(
        None,
        "of reward: what the head reads, the last token or all up to it, pooled by a learned query; None: as the "
        "model's head does, else last",
        choices=("last", "attention"),
    )
    probing_layer: int | None = models(
        None, "of reward: the layer that the head reads, 0 the embedding, -1 the last; None: as the model's head does"
    )
    heads: tuple[str, ...] = models(
        (),
        "of reward: several heads on one backbone, by name; quality=0.7 style=0.3 weighs them in the score, names "
        "alone equally; none: as the model has, else one",
    )
    reference_shard_size: int | None = models(
        None, "ranks over which the reference's parameters are split, a divisor of them; None: all", least=1
    )
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
        "configurations), tiny or tiny-vision; a column images, or image, is that of their pictures, "
        "audios or audio of their sounds",
    )
    prompt_data_probs: tuple[float, ...] = source((), "share of each source; without it in proportion to their sizes")
    prompt_split: str = source("train", "which split of them, or of data; a file is one")
    eval_data: str | None = source(None, "source of the prompts, or texts, of an evaluation")
    eval_split: str = source("test", "which split of it", needs=NO_EVALUATION)
    max_eval_samples: int = source(500, "its prompts or texts at most", least=1, needs=NO_EVALUATION)
    input_key: str = source("input", "column of the prompt, and of a text of pretrain_data")
    images_key: str = source("images", "column of a prompt's pictures; images: also image")
    pretrain_data_probs: tuple[float, ...] = source(
        (),
        "share of each source of pretrain_data (with commas between, of plain texts); without it in proportion to "
        "their sizes",
        needs=NO_PRETRAINING,
    )
    pretrain_split: str = source("train", "which split of them; a file is one", needs=NO_PRETRAINING)
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
    track: tuple[str, ...] = run(
        (), "trackers that get each iteration, as session.track names them: tensorboard, wandb, trackio, mlflow"
    )
    use_wandb: str | bool = run(False, "like track wandb; a text is the key to log in with", secret=True)
    wandb_project: str | None = run(None, "its project; None: the session's name", needs=NO_WANDB)
    wandb_org: str | None = run(None, "the user or team it is of", needs=NO_WANDB)
    wandb_group: str | None = run(None, "its group of runs", needs=NO_WANDB)
    wandb_run_name: str | None = run(None, "its name there; None: one of W&B's", needs=NO_WANDB)
    metrics_file: str | None = run(None, "file that gets all metrics of each iteration, a line of JSON each")

    def __post_init__(self) -> None:
        super().__post_init__()
        shares = self.prompt_data_probs
        if shares and (len(shares) != len(self.sources) or not all(0 < share < math.inf for share in shares)):
            raise OptionError(
                f"prompt_data_probs={shares!r}: it is one number above 0 for each of the {len(self.sources)} sources "
                "of prompt_data."
            )
        if self.lora_base and not self.lora_rank:
            raise OptionError(
                f"lora_base={self.lora_base!r} (load_in_4bit) without lora_rank: quantised weights take no step; train "
                "adapters beside them (lora_rank=32), or leave it out."
            )

    @property
    def trackers(self) -> list[str]:
        """The trackers of the run, each once."""
        return list(dict.fromkeys([*self.track, *(["wandb"] if self.use_wandb else [])]))

    @property
    def sources(self) -> list[str]:
        """The sources of `prompt_data`, in their order."""
        return [] if self.prompt_data is None else [part.strip() for part in self.prompt_data.split(",")]

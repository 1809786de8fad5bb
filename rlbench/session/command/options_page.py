"""docs/options.md: every option, written from the classes; `rlbench options` prints it."""

from __future__ import annotations

from rlbench.options import markdown
from rlbench.session.options import Inference, Train
from rlbench.session.setup_options import EMA
from rlbench.strategies.options.config import StrategyConfig
from rlbench.trainers.models.lora import Lora
from rlbench.trainers.options.ppo_config import PPOConfig
from rlbench.trainers.options.run_options import RunOptions
from rlbench.trainers.options.text_config import TextConfig

INTRODUCTION = """# Options

`rlbench options` writes this page from the classes; each option has one name, default and text, beside its field.
Other names (LightRFT's, TRL's, verl's) are taken wherever options are, and a dict in the place of a class.

In a session `shards` is the number of ranks that the parameters are split over (FSDP2). `tensor_parallel_size` means
that in `TrainEngine.build` alone, as in RLite; of an inference engine it is vLLM's.
"""
PARTS = (
    ("`rb.Train`", "`rb.Session(model, train=rb.Train(lr=1e-5, shards=2))`", Train),
    ("`rb.Lora`", "`rb.Session(model, train=rb.Train(lora=rb.Lora(rank=32)))`", Lora),
    ("`rb.EMA`", "`rb.Train(reference=rb.EMA(0.99))`; `rb.every(50)` is `rb.EMA(0.0, every=50)`", EMA),
    ("`rb.Inference`", "`rb.Session(model, inference=rb.Inference(max_model_len=2048))`", Inference),
    (
        "Strategies and trainers",
        "`get_strategy(…)`, `session.trainer(method, …, n=8)`, `rlbench train`. The defaults are LightRFT's.",
        StrategyConfig,
    ),
    ("Trainers", "`session.trainer(method, …, clip_low=0.2)`, a trainer's keywords, `rlbench train`.", PPOConfig),
    (
        "Trainers of texts",
        '`session.trainer("sft", data=…, token_budget=4096)`, `rlbench train sft`. Beside it those above of files, '
        "memory and evaluation, and of strategies train_batch_size (texts, or pairs), max_norm, seed, packing, "
        "share_prompts, head, lr, lr_warmup_ratio and adam_offload; the others are refused.",
        TextConfig,
    ),
    ("Runs", "`rlbench train METHOD [FILE.yaml] [--option value …]` alone.", RunOptions),
)


def page() -> str:
    """Return the page as Markdown."""
    parts = (f"## {title}\n\n{where}\n\n{markdown(cls)}\n" for title, where, cls in PARTS)
    return "\n".join([INTRODUCTION, *parts])

"""Write `trl.json`: what TRL's own trainers compute as loss and gradients on the model and rows of `small.py`.

Each trainer collates its one batch itself; the tokens it made are written down beside the numbers, so that ours take
the same. It runs in an environment of TRL's, which imports nothing of rlbench:

    $(python -m benchmarks.trl_environment) -m tests.parity.trl_values [FILE]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
import trl  # type: ignore[import-not-found]
from datasets import Dataset
from trl.experimental.cpo import CPOConfig, CPOTrainer  # type: ignore[import-not-found]
from trl.experimental.gkd import GKDConfig, GKDTrainer  # type: ignore[import-not-found]
from trl.experimental.orpo import ORPOConfig, ORPOTrainer  # type: ignore[import-not-found]

from tests.parity.small import MARGINS, PAIRS, language_model, reward_model, tokenizer

REFERENCE, TEACHER = 1.3, 2.1
"""Phases of the reference's and the teacher's weights."""
DIGITS = 8
LEFT_OUT = ("byte_offsets", "prompts", "prompt_attention_mask", "prompt_input_ids")
Trainer = Any


def main() -> None:
    cases = {name: values(case()) for name, case in CASES.items()}
    phases = {"reference": REFERENCE, "teacher": TEACHER}
    made = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    text = json.dumps({"made_with": made, "phases": phases, "cases": cases}, separators=(",", ":"))
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "trl.json"
    file.write_text(text.replace('},"', '},\n"') + "\n")


def values(trainer: Trainer) -> dict[str, Any]:
    """The batch a trainer makes of its rows, its loss on it, and the gradient of each parameter, flat."""
    batch = next(iter(trainer.get_train_dataloader()))
    tensors = {name: one for name, one in batch.items() if isinstance(one, torch.Tensor) and name not in LEFT_OUT}
    written = {name: one.tolist() for name, one in tensors.items()}
    model = trainer.model.train()
    model.zero_grad()
    loss = trainer.compute_loss(model, batch)
    loss.backward()
    gradients = {name: rounded(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": float(loss.detach()), "batch": written, "gradients": gradients}


def rounded(gradient: torch.Tensor) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in gradient.flatten().tolist()]


def trainer_of(
    made: Callable[..., Trainer], config: Callable[..., Any], rows: Any, options: Mapping[str, Any] = {}, **given: Any
) -> Trainer:
    """A trainer on all rows as one batch; options that are not named keep TRL's defaults."""
    args = config(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=len(rows),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        **options,
    )
    given = {"model": language_model(), "processing_class": tokenizer()} | given
    return made(args=args, train_dataset=Dataset.from_list(list(rows)), **given)


def demonstrations() -> list[dict[str, str]]:
    return [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]


def judged() -> list[dict[str, Any]]:
    sides = [("chosen", True), ("rejected", False), ("chosen", True), ("chosen", True)]
    pairs = zip(PAIRS, sides, strict=True)
    return [{"prompt": row["prompt"], "completion": row[side], "label": label} for row, (side, label) in pairs]


def compared(margins: bool) -> list[dict[str, Any]]:
    rows = [{"chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + row["rejected"]} for row in PAIRS]
    return [row | ({"margin": margin} if margins else {}) for row, margin in zip(rows, MARGINS, strict=True)]


def told() -> list[dict[str, Any]]:
    """GKD takes chats; the prompt is the user's message."""
    return [
        {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["chosen"]}]}
        for row in PAIRS
    ]


def with_template() -> Any:
    made = tokenizer()
    made.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %} <eos>{% endif %}{% endfor %}"
    )
    return made


def preference(loss_type: str, **own: Any) -> Trainer:
    options = {"loss_type": loss_type, **own}
    return trainer_of(trl.DPOTrainer, trl.DPOConfig, PAIRS, options=options, ref_model=language_model(REFERENCE))


def distilled(beta: float) -> Trainer:
    options = {"beta": beta, "lmbda": 0.0, "max_length": 32}
    given = {"teacher_model": language_model(TEACHER), "processing_class": with_template()}
    return trainer_of(GKDTrainer, GKDConfig, told(), options=options, **given)


def reward(margins: bool, **own: Any) -> Trainer:
    return trainer_of(trl.RewardTrainer, trl.RewardConfig, compared(margins), options=own, model=reward_model())


CASES: dict[str, Callable[[], Trainer]] = {
    "sft": lambda: trainer_of(trl.SFTTrainer, trl.SFTConfig, demonstrations()),
    "dpo": lambda: preference("sigmoid"),
    "dpo_robust": lambda: preference("robust", label_smoothing=0.1),
    "ipo": lambda: preference("ipo"),
    "kto": lambda: trainer_of(
        trl.KTOTrainer,
        trl.KTOConfig,
        judged(),
        options={"undesirable_weight": 1.5},
        ref_model=language_model(REFERENCE),
    ),
    "orpo": lambda: trainer_of(ORPOTrainer, ORPOConfig, PAIRS),
    "simpo": lambda: trainer_of(
        CPOTrainer, CPOConfig, PAIRS, options={"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0}
    ),
    "reward": lambda: reward(False),
    "reward_margin_centred": lambda: reward(True, center_rewards_coefficient=0.01),
    "gkd_forward": lambda: distilled(0.0),
    "gkd_jsd": lambda: distilled(0.3),
    "gkd_reverse": lambda: distilled(1.0),
}


if __name__ == "__main__":
    main()

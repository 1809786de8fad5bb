"""TRL's `GRPOTrainer` as one side of a step's comparison: it runs in an environment of its own (`trl_environment`).

The same model folder in float32, the same prompts in the same order, the same number of completions and tokens, and
the same reward (the share of odd token ids) as the other sides. Settings, so that TRL does no more work than they do:

- `use_cpu=True`, `bf16=False`, HF generate (its vLLM mode does not run on a CPU), threads = the cores;
- `per_device_train_batch_size` = prompts x completions, one optimizer step per generation (`num_iterations=1`,
  `gradient_accumulation_steps=1`), so that no old log-probs are recomputed; `beta=0`: no reference model;
- `gradient_checkpointing=False` (TRL's default is True, which would cost it a second forward);
- AdamW fused, betas (0.9, 0.95), no weight decay, gradient norm 1.0, temperature 1.0, `loss_type="bnpo"` (token mean);
- no evaluation, no saving, no reports, no logging; prompts are not shuffled;
- lengths "fixed": `min_new_tokens` = `max_new_tokens`; "geometric": a bias on the end token (`sequence_bias`), see
  `handwritten_loop.GEOMETRIC_BIAS`. What has ended is padded until the longest of the batch has, as TRL does it.

A step counts from `on_step_begin` to `on_step_end`: generation, rewards, loss, backward, optimizer. Imports nothing
of rlbench.

    <its python> -m benchmarks.trl_loop SETTINGS.json     # prompts and sizes; turns are asked for on stdin
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.turns import Requests


def main() -> None:
    """Read the settings, build the trainer, and take one optimizer step per turn."""
    requests = Requests()
    settings = json.loads(Path(sys.argv[1]).read_text())
    os.environ["OMP_NUM_THREADS"] = str(settings["threads"])
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers
    import trl  # type: ignore[import-not-found]
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=share_of_odd,
        args=trl.GRPOConfig(**options(settings)),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in settings["prompts"]]),
        processing_class=tokenizer,
        callbacks=[turns(requests, {"trl": trl.__version__, "transformers": transformers.__version__})],
    )
    trainer.train()
    while requests.next() is not None:
        requests.answer({"error": "no prompts are left: give more steps"})


def options(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `GRPOConfig`; the module's text says why."""
    generation: dict[str, Any] = {"min_new_tokens": settings["max_tokens"]}
    if settings["lengths"] == "geometric":
        generation = {"sequence_bias": [[[settings["end"]], settings["bias"]]]}
    rows = settings["rows"]
    return {
        "output_dir": settings["output"],
        "use_cpu": settings["device"] == "cpu",
        "bf16": settings["device"] != "cpu",
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": 1,
        "num_generations": settings["n"],
        "num_iterations": 1,
        "max_completion_length": settings["max_tokens"],
        "temperature": 1.0,
        "generation_kwargs": generation,
        "beta": 0.0,
        "loss_type": "bnpo",
        "learning_rate": settings["lr"],
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "gradient_checkpointing": False,
        "max_steps": len(settings["prompts"]) * settings["n"] // rows,
        "shuffle_dataset": False,
        "eval_strategy": "no",
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
    }


def share_of_odd(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward something that varies: a random model solves nothing."""
    return [sum(token % 2 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def turns(requests: Requests, about: dict[str, str]) -> Any:
    """Return a callback that waits for its turn before each step, and answers with its seconds."""
    from transformers import TrainerCallback

    class Turns(TrainerCallback):  # type: ignore[misc]
        begin = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            requests.answer({"ready": True, **about})

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if requests.next() is None:
                raise SystemExit(0)
            self.begin = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            requests.answer({"step": time.perf_counter() - self.begin})

    return Turns()


if __name__ == "__main__":
    main()

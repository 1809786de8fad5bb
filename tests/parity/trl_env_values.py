"""Write `trl_env.json`: what TRL's `GRPOTrainer` makes of the samples of `SAMPLES`, whose policy says given texts.

The trainer is TRL's own, its loop of tools and its environments untouched; only what the model would have sampled is
given. It runs in an environment of TRL's, which imports nothing of rlbench:

    $(python -m benchmarks.trl_environment) -m tests.parity.trl_env_values [FILE]
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.envs.trl_guess import ASKED, GuessEnv, call

ITERATIONS = 3
"""Of TRL's `max_tool_calling_iterations`: one turn fewer than there can be."""
LOOK = "I look. "
SAMPLES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "two guesses": (
        {"secret": 7, "level": 1},
        [LOOK + call("guess", number=3), call("guess", number=7), "it is 7"],
    ),
    "two calls in a turn": ({"secret": 7}, [call("guess", number=8) + "\n" + call("guess", number=7), "seven"]),
    "a call that awaits": ({"secret": 4}, [call("hint"), call("hint", kind="size"), call("guess", number=4), "four"]),
    "what methods raise": (
        {"secret": 2},
        [call("guess", number=2), call("guess", number=2), call("hint", kind="x"), "2"],
    ),
    "nothing to add": ({"secret": 2, "quiet": True}, ["I do not know"]),
    "a thought": ({"secret": 2}, [f"<think>\n{LOOK}\n</think>\n\n" + call("guess", number=2), "2"]),
    "more calls than there may be": ({"secret": 9}, [call("guess", number=number) for number in range(4)]),
}
"""By name: the columns of a row, and what the policy says turn by turn."""


class ScoringEnv(GuessEnv):
    """The same, which says itself what a sample is worth."""

    async def get_reward(self) -> float:
        return 10.0 * len(self.guesses)


def main() -> None:
    import transformers
    import trl  # type: ignore[import-not-found]

    made = {"trl": trl.__version__, "transformers": transformers.__version__}
    cases = {name: played(row, said) for name, (row, said) in SAMPLES.items()}
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "trl_env.json"
    file.write_text(json.dumps({"made_with": made, "cases": cases}, indent=1) + "\n")


def played(row: dict[str, Any], said: list[str]) -> dict[str, Any]:
    """What TRL says of one sample: the prompt's last message, the results of tools, the guesses, the reward."""
    import torch
    from datasets import Dataset
    from transformers import Qwen2ForCausalLM
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_chat_template  # type: ignore[import-not-found]

    from tests.workers.tiny_checkpoint import byte_tokenizer, tiny_config

    tokenizer, seen = byte_tokenizer(), {}
    tokenizer.chat_template = qwen3_chat_template

    def reward(prompts: Any, completions: Any, environments: Any, **columns: Any) -> list[float]:
        tools = [message for message in completions[0] if message["role"] == "tool"]
        seen.update(asked=prompts[0][len(ASKED) - 1], tools=tools, guesses=environments[0].guesses)
        seen["columns"] = environments[0].columns
        return [env.reward for env in environments]

    config = tiny_config(tied=True)
    config.max_position_embeddings = 8192
    rows = [{"prompt": ASKED, **row}] * 2
    options = {"num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 4096}
    options |= {"max_tool_calling_iterations": ITERATIONS, "output_dir": tempfile.mkdtemp(), "report_to": []}
    trainer = GRPOTrainer(
        Qwen2ForCausalLM(config),
        reward_funcs=reward,
        args=GRPOConfig(use_cpu=True, bf16=False, **options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        environment_factory=ScoringEnv,
    )
    turns = iter(said)

    def sampled(prompt_ids: list[Any], *args: Any, **kwargs: Any) -> tuple[list[list[int]], None]:
        text = next(turns) + "<|im_end|>"
        return [tokenizer(text)["input_ids"] for _ in prompt_ids], None

    trainer._generate_single_turn = sampled
    rewards: list[Any] = []
    calculate = trainer._calculate_rewards
    trainer._calculate_rewards = lambda *args: rewards.append(calculate(*args)) or rewards[-1]
    with torch.no_grad():
        trainer._generate_and_score_completions(rows)
    seen["reward"] = float(rewards[0][0].sum())
    return seen


if __name__ == "__main__":
    main()

"""The reference for the cost of a step: GRPO as a careful person writes it by hand, in one process, no framework.

vLLM runs inside the process, the trainer is a plain transformers model with AdamW, weights go from one to the other
in memory. Nothing is imported from rlbench but the tiny model and its task, so that its numbers are independent.

    python -m benchmarks.handwritten_loop                                 # 10 M parameters, 8 x 8 completions of 64
    python -m benchmarks.handwritten_loop --lengths skewed --max-tokens 512
    python -m benchmarks.handwritten_loop --model tiny --lengths natural --prompts 32 --max-tokens 12 --lr 5e-5 \\
        --steps 40 --eval-every 5                                         # learns the task

With `--turns` it is one side of a comparison: it takes a step whenever it is asked to (`benchmarks.turns`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

LENGTHS = ("fixed", "skewed", "geometric", "natural")
GEOMETRIC_MEAN = 32
GEOMETRIC_BIAS = math.log(261 / (GEOMETRIC_MEAN - 1))
"""Added to the end token's logit. A random model finds all 262 tokens about equally likely; with this it ends a
completion with probability 1/32 after each token, so that lengths are geometric with mean 32. Every engine has such an
option (vLLM's `logit_bias`, transformers' `sequence_bias`), so no side is patched, and each pads, batches and stops as
it does for a model that ends its completions itself. Each side draws its own lengths."""


@dataclass(frozen=True)
class Settings:
    """One run.

    Attributes:
        model: folder of a model, or the name of a tiny one ("tiny", "bench-10m").
        prompts: prompts of a step.
        n: completions of each.
        max_tokens: longest completion.
        lengths: "fixed" (all of `max_tokens`), "skewed" (log-normal, the longest 8 times the median), "geometric"
            (mean 32, for a model with random weights, see `GEOMETRIC_BIAS`) or "natural" (the model ends them).
        steps: optimizer steps.
        lr: learning rate.
        grad_clip: bound on the gradient norm.
        token_budget: padded tokens of a micro-batch.
        seed: of everything.
        shuffle: shuffle the advantages over the batch: a control that must not learn.
        eval_every: greedy accuracy on 256 unseen prompts after every so many steps; 0 for never.
        threads: of vLLM and of the trainer, which take turns.
        lora_rank: train adapters of that rank by peft, on all linear layers, and hand vLLM merged weights; 0: none.
        device: "cpu", float32; or "cuda", both engines on one GPU, computing in bfloat16 with float32 weights.
    """

    model: str = "bench-10m"
    prompts: int = 8
    n: int = 8
    max_tokens: int = 64
    lengths: str = "fixed"
    steps: int = 10
    lr: float = 1e-4
    grad_clip: float = 1.0
    token_budget: int = 8192
    seed: int = 0
    shuffle: bool = False
    eval_every: int = 0
    threads: int = len(os.sched_getaffinity(0))
    lora_rank: int = 0
    device: str = "cpu"


@dataclass(frozen=True)
class Sample:
    """One completion: tokens of its prompt and of the answer, and the number of its prompt."""

    prompt: list[int]
    answer: list[int]
    group: int


class Loop:
    """Engine, trainer, and the four things one does with them: roll out, train, sync, evaluate."""

    def __init__(self, settings: Settings) -> None:
        """Start vLLM in this process and load the trainer's copy of the model."""
        self.settings = settings
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # engine core and worker in this process
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the trainer shares the cores
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
        os.environ["TORCH_COMPILE_DISABLE"] = "1"  # compiling the sampler's helpers takes 20 s and gains nothing here
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from vllm import LLM

        from rlbench import tiny

        self.torch = torch
        path = settings.model
        if not os.path.isdir(path):
            path = str(tiny.ensure(path))
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.llm = LLM(
            model=path,
            dtype="float32" if settings.device == "cpu" else "bfloat16",
            enforce_eager=True,
            kv_cache_memory_bytes=1 << 30,
            max_num_seqs=256,
            seed=settings.seed,
            disable_log_stats=True,
        )
        torch._C.set_num_threads(settings.threads)  # vLLM replaces torch.set_num_threads by one that only warns
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(settings.device)
        if settings.lora_rank:
            import peft

            rank = settings.lora_rank
            config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
            self.model = peft.get_peft_model(self.model, config)
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.random = random.Random(settings.seed)

    def rollout(self, prompts: list[list[int]]) -> list[Sample]:
        """Return `n` sampled completions of each prompt, prompt by prompt."""
        s = self.settings
        groups = [group for group in range(len(prompts)) for _ in range(s.n)]
        lengths = [s.max_tokens] * len(groups)
        if s.lengths == "skewed":
            lengths = skewed_lengths(len(groups), s.max_tokens, self.random)
        requests = [{"prompt_token_ids": prompts[group]} for group in groups]
        ends = s.lengths in ("geometric", "natural")
        params = [self._params(1.0, length, not ends, s.lengths == "geometric") for length in lengths]
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        return [
            Sample(prompts[group], list(output.outputs[0].token_ids), group)
            for group, output in zip(groups, outputs, strict=True)
        ]

    def train(self, samples: list[Sample], advantages: list[float]) -> float:
        """Take one optimizer step of the clipped policy gradient, token mean; return the gradient norm."""
        tokens = sum(len(sample.answer) for sample in samples)
        for rows in micro_batches(samples, self.settings.token_budget):
            self._loss([samples[row] for row in rows], [advantages[row] for row in rows], tokens).backward()
        norm = self.torch.nn.utils.clip_grad_norm_(self.trained, self.settings.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def sync(self) -> None:
        """Hand the trainer's weights to vLLM."""
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        engine_config = self.llm.llm_engine.vllm_config.model_config
        weights = list(self.weights())

        def load(model: Any) -> None:
            initialize_layerwise_reload(model)
            model.load_weights(weights)
            finalize_layerwise_reload(model, engine_config)
            # vLLM on CPU computes with packed copies of the weights, and does not renew that of a tied lm_head.
            for module in model.modules():
                weight = getattr(module, "weight", None)
                if hasattr(module, "cpu_linear") and weight is not None and weight.numel() > 0:
                    module.quant_method.process_weights_after_loading(module)

        self.llm.apply_model(load)
        self.llm.reset_prefix_cache()

    def weights(self) -> Iterator[tuple[str, Any]]:
        """Give the weights that vLLM is to hold, adapters merged; a tied head once, as the embedding."""
        for name, parameter in self.model.named_parameters():
            if ".lora_" in name:
                continue
            weight, owner = parameter.detach(), name.rpartition(".base_layer.weight")[0]
            if owner:
                weight = weight + self.model.get_submodule(owner).get_delta_weight("default").detach()
            yield name.removeprefix("base_model.model.").replace(".base_layer", ""), weight

    def evaluate(self) -> float:
        """Return the share of 256 unseen prompts answered right by greedy decoding."""
        from rlbench import tiny

        asked = tiny.tasks.prompts(256, "eval", seed=0)
        requests = [{"prompt_token_ids": self.encode(prompt)} for prompt in asked]
        outputs = self.llm.generate(requests, self._params(0.0, self.settings.max_tokens, False), use_tqdm=False)
        right = [
            output.outputs[0].text == tiny.tasks.answer(prompt) for prompt, output in zip(asked, outputs, strict=True)
        ]
        return statistics.mean(right)

    def encode(self, prompt: Any) -> list[int]:
        """Return the tokens of a chat prompt."""
        return self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)

    def _params(self, temperature: float, max_tokens: int, ignore_eos: bool, geometric: bool = False) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            logit_bias={self.tokenizer.eos_token_id: GEOMETRIC_BIAS} if geometric else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _loss(self, samples: list[Sample], advantages: list[float], tokens: int) -> Any:
        """Return this micro-batch's share of the step's loss."""
        torch = self.torch
        width = max(len(sample.prompt) + len(sample.answer) for sample in samples)
        device = self.settings.device
        input_ids = torch.full((len(samples), width), self.tokenizer.pad_token_id)
        weight = torch.zeros(len(samples), width)
        for row, sample in enumerate(samples):
            start, end = len(sample.prompt), len(sample.prompt) + len(sample.answer)
            input_ids[row, :end] = torch.tensor(sample.prompt + sample.answer)
            weight[row, start:end] = advantages[row] / tokens
        input_ids, weight = input_ids.to(device), weight.to(device)
        # Padding is on the right, so causal attention needs no mask; and no logits where no answer is.
        first = min(len(sample.prompt) for sample in samples)
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            logits = self.model(input_ids=input_ids, use_cache=False, logits_to_keep=width - first + 1).logits.float()
        logprobs = torch.log_softmax(logits[:, :-1], dim=-1).gather(-1, input_ids[:, first:, None])[..., 0]
        # One step per batch: the ratio is 1 and never clipped, its gradient is that of the log-probability.
        ratio = (logprobs - logprobs.detach()).exp()
        return -(ratio * weight[:, first:]).sum()


def micro_batches(samples: list[Sample], budget: int) -> list[list[int]]:
    """Return rows sorted by length and cut so that rows times the longest stays within the budget."""
    lengths = [len(sample.prompt) + len(sample.answer) for sample in samples]
    batches: list[list[int]] = []
    for row in sorted(range(len(samples)), key=lengths.__getitem__):
        if not batches or lengths[row] * (len(batches[-1]) + 1) > budget:
            batches.append([])
        batches[-1].append(row)
    return batches


def skewed_lengths(count: int, longest: int, source: random.Random) -> list[int]:
    """Return log-normal lengths in random order; the longest is `longest`, 8 times the median."""
    normal = statistics.NormalDist()
    quantiles = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]
    sigma = math.log(8) / quantiles[-1] if quantiles[-1] > 0 else 0.0
    lengths = [max(1, round(longest / 8 * math.exp(sigma * z))) for z in quantiles]
    source.shuffle(lengths)
    return lengths


def advantages_of(rewards: list[float], n: int) -> list[float]:
    """Return group-normalised advantages; a group of equal rewards gets 0."""
    advantages: list[float] = []
    for start in range(0, len(rewards), n):
        group = rewards[start : start + n]
        spread = statistics.stdev(group) if n > 1 else 0.0
        mean = statistics.fmean(group)
        advantages += [(reward - mean) / (spread + 1e-6) if spread > 0 else 0.0 for reward in group]
    return advantages


def take_step(loop: Loop, source: Iterator[str]) -> dict[str, Any]:
    """Take one step on the next prompts; return seconds by phase, tokens, reward and gradient norm."""
    from rlbench import tiny

    settings = loop.settings
    asked = [tiny.tasks.message(next(source)) for _ in range(settings.prompts)]
    clock = [time.perf_counter()]
    samples = loop.rollout([loop.encode(prompt) for prompt in asked])
    clock.append(time.perf_counter())
    if settings.lengths == "natural":
        texts = loop.tokenizer.batch_decode([s.answer for s in samples], skip_special_tokens=True)
        rewards = [float(text == tiny.tasks.answer(asked[s.group])) for s, text in zip(samples, texts, strict=True)]
    else:  # a random model solves nothing: reward something that varies
        rewards = [statistics.fmean(token % 2 for token in s.answer) for s in samples]
    advantages = advantages_of(rewards, settings.n)
    if settings.shuffle:
        loop.random.shuffle(advantages)
    norm = loop.train(samples, advantages)
    clock.append(time.perf_counter())
    loop.sync()
    clock.append(time.perf_counter())
    return {
        "rollout_s": clock[1] - clock[0],
        "train_s": clock[2] - clock[1],
        "sync_s": clock[3] - clock[2],
        "step_s": clock[3] - clock[0],
        "tokens": sum(len(s.answer) for s in samples),
        "reward": statistics.fmean(rewards),
        "grad_norm": norm,
    }


def run(settings: Settings) -> list[dict[str, Any]]:
    """Run the loop; return one record per step, with its accuracy where that was asked for."""
    from rlbench import tiny

    loop = Loop(settings)
    source = tiny.tasks.stream("train", settings.seed)
    if settings.eval_every:
        print(f"before: greedy accuracy {loop.evaluate():.3f}", flush=True)
    records = []
    for step in range(1, settings.steps + 1):
        record = {"step": step, **take_step(loop, source)}
        if settings.eval_every and step % settings.eval_every == 0:
            record["accuracy"] = loop.evaluate()
        print(
            "  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in record.items()),
            flush=True,
        )
        records.append(record)
    return records


class Turns:
    """The loop as one side of a comparison: it takes a step per turn."""

    def __init__(self, settings: Settings) -> None:
        """Start the loop."""
        from rlbench import tiny

        self.settings, self.loop = settings, Loop(settings)
        self.source = tiny.tasks.stream("train", settings.seed)

    def turn(self, **changes: Any) -> dict[str, Any]:
        """Take a step, with some of the settings changed."""
        self.loop.settings = replace(self.settings, **changes)
        return take_step(self.loop, self.source)


def main() -> None:
    """Read the command line, run, print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Settings):
        flag = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            parser.add_argument(flag, action="store_true")
        else:
            choices = LENGTHS if field.name == "lengths" else None
            parser.add_argument(flag, type=type(field.default), default=field.default, choices=choices)
    parser.add_argument("--json", metavar="FILE", help="write settings and records there")
    parser.add_argument("--turns", action="store_true", help="take steps as asked for on stdin")
    arguments = vars(parser.parse_args())
    target, in_turns = arguments.pop("json"), arguments.pop("turns")
    settings = Settings(**arguments)
    if in_turns:
        from benchmarks.turns import Requests, serve

        return serve(Requests(), partial(Turns, settings))  # the first thing that happens: vLLM prints
    records = run(settings)
    later = records[1:] or records  # the first step warms up
    medians = {key: statistics.median(r[key] for r in later) for key in ("rollout_s", "train_s", "sync_s", "step_s")}
    print("median without the first step:  " + "  ".join(f"{key} {value:.3f}" for key, value in medians.items()))
    if target:
        with open(target, "w") as file:
            json.dump({"settings": asdict(settings), "median": medians, "records": records}, file, indent=1)


if __name__ == "__main__":
    main()

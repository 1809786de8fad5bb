"""From prompts to token ids, and from what the inference engine drew to the rollouts of this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from rlbench.data.base.ragged import Ragged
from rlbench.data.base.routing import routing_rows
from rlbench.data.prompts import lengths as prompt_lengths
from rlbench.data.prompts.chat import Templated
from rlbench.data.prompts.placing import MediaKind, listed
from rlbench.data.prompts.prompt import Prompt, as_prompt
from rlbench.data.rollouts.jobs import FINISH_REASONS
from rlbench.data.rollouts.rollouts import Rollouts
from rlbench.errors import DataError, EngineError
from rlbench.strategies.options.config import OptionError
from rlbench.trainers.options.ppo_config import PPOConfig

REFERENCE = "reference"
"""The key of `Prompt.meta` that holds a reference answer where the label says what kind of task it is."""
ENGINE_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
HEAD = 60


def tokenizer_of(tokenizer: Any, processor: Any) -> Any:
    """Return the tokenizer, where none is given that of the processor."""
    return getattr(processor, "tokenizer", processor) if tokenizer is None else tokenizer


def prompts_of(
    given: Sequence[Any],
    labels: Sequence[Any] | None,
    references: Sequence[Any] | None,
    media: Mapping[MediaKind[Any], Sequence[Any] | None] = MappingProxyType({}),
) -> list[Prompt]:
    """Return what a rank was asked; a label replaces the prompt's own, a reference is kept as `meta["reference"]`, and
    `media`, images or what else of a kind, are placed in the prompts."""
    beside = {kind: values for kind, values in media.items() if values is not None}
    told = [("labels", labels), ("references", references), *((kind.field, values) for kind, values in beside.items())]
    for name, values in told:
        if values is not None and len(values) != len(given):
            raise DataError(f"{len(values)} {name} for {len(given)} prompts: give one each")
    prompts = [as_prompt(one, i) for i, one in enumerate(given)]
    for kind, values in beside.items():
        held = [listed(one, kind) for one in values]
        prompts = [_with_more(prompt, i, own, kind) for i, (prompt, own) in enumerate(zip(prompts, held, strict=True))]
    if labels is not None:
        prompts = [replace(prompt, label=label) for prompt, label in zip(prompts, labels, strict=True)]
    if references is not None:
        pairs = zip(prompts, references, strict=True)
        prompts = [replace(prompt, meta={**prompt.meta, REFERENCE: answer}) for prompt, answer in pairs]
    return prompts


def _with_more(prompt: Prompt, index: int, media: tuple[Any, ...], kind: MediaKind[Any]) -> Prompt:
    return as_prompt(prompt, index, **{kind.field: (*getattr(prompt, kind.field), *media)}) if media else prompt


def counted(rollouts: Rollouts) -> np.ndarray:
    """Tell which samples are scored and trained on, (N,) bool: those with a token that no interrupt cut; once they are
    scored, those of groups whose reward did not fail."""
    whole = np.asarray(~rollouts.aborted & (np.asarray(rollouts.lengths) > 0))
    return whole if rollouts.rewards is None else whole & ~np.isnan(np.asarray(rollouts.rewards, np.float64))


def reference_of(prompt: Prompt) -> Any:
    """Return the reference answer: `meta["reference"]`, else the label."""
    return prompt.meta.get(REFERENCE, prompt.label)


def encoded(
    prompts: Sequence[Prompt], tokenizer: Any, limit: int, chat: Mapping[str, Any] | None = None
) -> list[list[int]]:
    """Return the token ids of each prompt, as replicas encode it; refuse empty ones and those over `limit`. `chat`:
    what the chat template is called with besides messages."""
    if chat:
        tokenizer = Templated(tokenizer, chat)
    found = prompt_lengths.encoded([prompt.content for prompt in prompts], tokenizer)
    for i, (prompt, ids) in enumerate(zip(prompts, found, strict=True)):
        if not ids:
            raise DataError(f"prompt {i} is empty: give at least one token")
        if len(ids) > limit:
            seen = f"prompt {i} has {len(ids)} tokens, prompt_max_len is {limit}: {prompt.text[:HEAD]!r}"
            raise DataError(f"{seen}. Leave it out (rb.data.load(…, max_prompt_tokens=…)), or raise prompt_max_len")
    return found


def sampling_of(config: PPOConfig, n: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of the engine: the trainer's, those given for this call, and `n`, samples of each prompt."""
    sampling: dict[str, Any] = {name: getattr(config, name) for name in ("temperature", "top_p", "max_tokens")}
    sampling |= {name: value for name in ("template", "tools") if (value := getattr(config, name)) is not None}
    if config.top_k != -1:
        sampling["top_k"] = config.top_k
    if config.use_fire:
        sampling["first_token_temperature"] = config.first_token_temperature
    for written, value in given.items():
        name = ENGINE_NAMES.get(written, written)
        if name != written and name in given:
            raise OptionError(f"{written} and {name} are one option: give one of them.")
        sampling[name] = value
    return {**sampling, "n": n}


def rollouts_of(
    prompts: Sequence[Prompt], ids: list[list[int]], outputs: Sequence[Any], sampling: Mapping[str, Any]
) -> Rollouts:
    """Return what was drawn for this rank's prompts, of tokens `ids`; `outputs` are the engine's, prompt-major, whose
    tokens those of a prompt with images, videos or sounds become: a run of them stands for each."""
    n = int(sampling["n"])
    if len(outputs) != len(prompts) * n:
        raise EngineError(f"the engine gave {len(outputs)} outputs for {len(prompts)} prompts of {n} samples each.")
    for i, output in enumerate(outputs):
        tokens, logprobs, prompt = output.output_token_ids, output.logprobs, ids[i // n]
        drawn = list(output.prompt_token_ids)
        if prompts[i // n].media:
            prompt = ids[i // n] = drawn
        for wrong, why in (
            (len(logprobs) != len(tokens), f"has {len(tokens)} tokens and {len(logprobs)} log-probs"),
            (not np.isfinite(logprobs).all(), "has log-probs that are not finite; look at the engine's weights"),
            (drawn != prompt, "is of another tokenizer than the trainer's"),
            (output.finish_reason not in FINISH_REASONS, f"ended for {output.finish_reason!r}"),
        ):
            if wrong:
                raise EngineError(f"the engine's output {i} {why}.")
    lengths = [len(output.prompt_token_ids) + len(output.output_token_ids) for output in outputs]
    return Rollouts(
        prompts=tuple(prompts),
        prompt_ids=Ragged.from_rows(ids, np.int32),
        responses=Ragged.from_rows([output.output_token_ids for output in outputs], np.int32),
        logprobs=Ragged.from_rows([output.logprobs for output in outputs], np.float32).values,
        group=np.repeat(np.arange(len(prompts), dtype=np.int32), n),
        finish=np.array([FINISH_REASONS.index(output.finish_reason) for output in outputs], np.int8),
        versions=np.array([output.weight_version for output in outputs], np.int64),
        texts=tuple(output.text for output in outputs),
        sampling={name: value for name, value in sampling.items() if name != "n"},
        routing=routing_rows([output.routing for output in outputs], lengths),
    )

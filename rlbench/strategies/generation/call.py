"""What a call of `gather_and_generate` is given, as plain values: this rank's prompts and the sampling options."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from rlbench.data.prompts.prompt import Prompt, as_prompt, as_prompts
from rlbench.data.prompts.sampling import sampling_options
from rlbench.errors import DataError, EngineError


class NotHereYet(EngineError, NotImplementedError):
    """A part of the reference's surface that nobody has built yet."""


def own_prompts(all_prompts: Any, all_prompt_token_ids: Any, all_images: Any, images_num: Any) -> list[Prompt]:
    """This rank's prompts; there may be none.

    Raises:
        NotHereYet: images were given.
        DataError: both or neither kind of prompt was given, or what was given is none, naming its place on this rank.
    """
    if any(image is not None for image in all_images or ()) or any(images_num or ()):
        raise NotHereYet(
            "gather_and_generate: vision-language models are not here yet; leave all_images and images_num out."
        )
    if (all_prompts is None) == (all_prompt_token_ids is None):
        given = "neither" if all_prompts is None else "both"
        raise DataError(
            f"gather_and_generate wants all_prompts (texts, chats) or all_prompt_token_ids, and was given {given}; a "
            "rank that has no prompts gives an empty list."
        )
    if all_prompt_token_ids is not None:
        return [Prompt(_token_ids(row, place)) for place, row in enumerate(all_prompt_token_ids)]
    if isinstance(all_prompts, Sequence) and not isinstance(all_prompts, str):
        return [as_prompt(prompt, place) for place, prompt in enumerate(all_prompts)]
    return as_prompts(all_prompts)


def sampling_of(given: Any) -> tuple[dict[str, Any], int]:
    """Sampling options by vLLM's names, and how many samples of each prompt (`n`, default 1).

    Args:
        given: what `rlbench.data.prompts.sampling.sampling_options` takes.

    Raises:
        DataError: `n` is no number from 1 on.
    """
    options = sampling_options(given)
    samples = options.pop("n", 1)
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise DataError(f"sampling_params: n={samples!r}; at least one completion per prompt is needed.")
    return options, samples


def _token_ids(row: Any, place: int) -> list[int]:
    values = row.tolist() if hasattr(row, "tolist") else row
    try:
        ids = [operator.index(token) for token in values]
    except TypeError:
        raise DataError(
            f"all_prompt_token_ids: prompt {place} of this rank is no list of token ids: {str(row)[:60]!r}; texts and "
            "chats go into all_prompts."
        ) from None
    if not ids:
        raise DataError(f"all_prompt_token_ids: prompt {place} of this rank is empty; give at least one token.")
    return ids

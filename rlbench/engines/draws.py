"""What a draw is asked for, before it goes to the replicas: how many of each prompt, and what is said of it once.

`told`: what an engine has said already.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from rlbench.data import Prompt
from rlbench.data.prompts.lengths import begun_note, open_note
from rlbench.data.prompts.sampling import reshaped_by, reshaped_notes
from rlbench.envs.tools import ToolEnv
from rlbench.errors import DataError
from rlbench.traces import user_stacklevel


def sample_count(n: int | None, sampling: Mapping[str, Any]) -> int:
    """Return how many completions of each prompt are drawn."""
    counts = {count for count in (n, sampling.get("n")) if count is not None}
    if len(counts) > 1:
        raise DataError(f"n={n}, but sampling says n={sampling['n']}: give it once")
    samples = whole("n", counts.pop() if counts else 1)
    if samples < 1:
        raise DataError(f"n={samples}: at least one completion per prompt is needed")
    return samples


def whole(name: str, value: Any) -> int:
    """Refuse an option that is no whole number."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise DataError(f"{name}={value!r}: wanted a whole number")
    return value


def tell_prompts(told: set[str], asked: Sequence[Prompt], begins: str, as_loaded: bool) -> None:
    """Say how prompts are read that are begun already, by the text that begins them, or whose answer is; `as_loaded`:
    that was said when they were loaded."""
    notes = [begun_note([prompt.content for prompt in asked], begins)]
    if not as_loaded and "open" not in told and (note := open_note(asked, "prompts")):
        told.add("open")
        notes.append(f"{note}. Leave it out where it is the answer")
    for note in filter(None, notes):
        warnings.warn(note, stacklevel=user_stacklevel())


def tools_named(told: set[str], env: Any, names_tools: bool) -> dict[str, Any]:
    """Return the tools of an environment of such as a chat template names them; say once that it cannot."""
    if not isinstance(env, ToolEnv):
        return {}
    if names_tools:
        return {} if env.by_prompt else {"tools": env.schemas()}
    if "tools" not in told:
        told.add("tools")
        said = "the model's chat template names no tools: the model knows of them by what the prompts say"
        warnings.warn(f"{env!r}: {said}", stacklevel=user_stacklevel())
    return {}


def tools_by_prompt(env: Any, asked: Sequence[Prompt], names_tools: bool) -> tuple[list[dict[str, Any]], ...]:
    """Return each prompt's tools, where those of an environment differ by prompt; else none."""
    return tuple(map(env.schemas_of, asked)) if names_tools and isinstance(env, ToolEnv) and env.by_prompt else ()


def tell_reshaped(told: set[str], sampling: Mapping[str, Any]) -> None:
    """Say once of each option that it makes the sampler's log-probs those of another distribution."""
    fresh = [option for option in reshaped_by(sampling) if option not in told]
    if fresh and sampling.get("temperature") != 0:
        told.update(fresh)
        refused = "Losses that weigh by the sampler's log-probs refuse them"
        warnings.warn(f"{reshaped_notes(tuple(fresh))[0]}. {refused}", stacklevel=user_stacklevel())

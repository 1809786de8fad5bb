"""Some samples of a step as JSON for a reader: text, scores, and what the policy knew of each token.

`<save_path>/trajectories/trajectories_step_<N>.json` is a list of objects, the most telling sample first, with the
reference system's keys, so that its viewer opens them. `advantages`, `return` and `policy_entropy` are means over
trained tokens; `action_log_probs`, `values` and `token_advantages` hold one number per response token; a number that is
not finite is null. `image_paths` are those of the prompt's pictures beside the file, as PNG of at most 512 pixels a
side; null of one that cannot be decoded. Where the actor's entropies were not computed, `policy_entropy` is the mean
negative log-prob of the sampled tokens, an unbiased estimate of it, as `policy_entropy_is` says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlbench.data.base.files import written_aside
from rlbench.data.base.plain import to_plain
from rlbench.data.prompts.images import EncodedImage
from rlbench.data.rollouts.pieces import PART, SPECIAL, pieces_of
from rlbench.errors import DataError
from rlbench.trainers.experience.samples import reference_of
from rlbench.trainers.experience.values import Experience
from rlbench.trainers.reports.telling import Traits, most_telling, reflection_counts, repeat_score

MARKED = 0.2
"""Share of a response's tokens that is marked where nothing else is said."""
WIDEST = 512
"""Pixels of a picture beside the file, a side."""
ANALYSED = ("repeat_score", "reflection_pattern_score", "policy_entropy", "response_token_count")


class TrajectorySaver:
    """Writes the most telling samples of a step.

    Args:
        save_path: its folder `trajectories` takes the files; made when first written to.
        num_trajectories_to_save: samples of one file, of all ranks together; 0: no file.
        mark_high_entropy_tokens: write each token's text and entropy (`generated_tokens`, without special ones
            `pure_generated_tokens`), and mark the highest.
        high_entropy_token_ratio: share of a response's trained tokens that is marked, in (0, 1].
    """

    def __init__(
        self,
        save_path: str | Path,
        num_trajectories_to_save: int = 10,
        mark_high_entropy_tokens: bool = False,
        high_entropy_token_ratio: float = MARKED,
    ) -> None:
        if num_trajectories_to_save < 0:
            raise DataError(f"num_trajectories_to_save={num_trajectories_to_save}: it is a number from 0 on")
        if not 0 < high_entropy_token_ratio <= 1:
            raise DataError(f"high_entropy_token_ratio={high_entropy_token_ratio!r}: it lies in (0, 1]")
        self.folder = Path(save_path).expanduser() / "trajectories"
        self.count = num_trajectories_to_save
        self.mark = mark_high_entropy_tokens
        self.ratio = high_entropy_token_ratio
        self.means: dict[str, float] = {}
        """Of what `ANALYSED` names, over the samples that were written last; on all ranks."""

    def save(self, experiences: Sequence[Experience], step: int, strategy: Any, tokenizer: Any) -> Path | None:
        """Choose among the samples of all ranks, and write them on rank 0; collective.

        `experiences` are this rank's, with their final advantages. Returns the file, on rank 0, where one was written.
        """
        control = strategy.control
        own = control.together("reading samples", lambda: self._traits(experiences))
        everybody: list[Traits] = control.gather(own)
        chosen = most_telling({name: np.concatenate([one[name] for one in everybody]) for name in own}, self.count)
        first = sum(len(one["group"]) for one in everybody[: strategy.rank])
        places = [(which, row) for which, experience in enumerate(experiences) for row in range(len(experience))]

        def described() -> dict[int, dict[str, Any]]:
            return {
                i: self._trajectory(experiences, places[i - first], tokenizer)
                | {"global_step": step, "rank": strategy.rank, "chosen_for": reason}
                for i, reason in chosen
                if first <= i < first + len(places)
            }

        found: dict[int, dict[str, Any]] = {}
        for part in control.gather(control.together("describing samples", described)):
            found |= part
        self.means = _means(list(found.values()))
        path = self.folder / f"trajectories_step_{step}.json"

        def write() -> None:
            if strategy.rank or not chosen:
                return
            self.folder.mkdir(parents=True, exist_ok=True)
            for one in found.values():
                one["image_paths"] = [_picture(self.folder, image) for image in one["image_paths"]]
            lines = [json.dumps(found[i], allow_nan=False) for i, _ in chosen]
            with written_aside(path) as aside:
                aside.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="ascii", newline="\n")

        control.together("writing trajectories", write)
        return path if strategy.rank == 0 and chosen else None

    def _traits(self, experiences: Sequence[Experience]) -> Traits:
        """What this rank's samples are chosen by."""
        if self.mark and self.count and any(experience.entropy is None for experience in experiences):
            raise DataError("mark_high_entropy_tokens needs the entropies of the actor, and the experience has none")
        kinds = {"group": np.int64, "length": np.int64, "truncated": bool}
        names = ("group", "reward", "advantage", "length", "truncated", "entropy")
        columns: dict[str, list[np.ndarray]] = {name: [np.zeros(0, kinds.get(name, float))] for name in names}
        for experience in experiences:
            batch, unknown = experience.batch, np.full(len(experience), np.nan)
            own = {
                "group": batch.group.astype(np.int64),
                "reward": unknown if batch.rewards is None else batch.rewards.astype(float),
                "advantage": _row_means(experience, batch.advantages),
                "length": batch.response_lengths,
                "truncated": np.zeros(len(batch), bool) if batch.truncated is None else batch.truncated,
                "entropy": unknown if experience.entropy is None else _row_means(experience, experience.entropy),
            }
            for name, values in own.items():
                columns[name].append(values)
        return {name: np.concatenate(parts) for name, parts in columns.items()}

    def _trajectory(self, experiences: Sequence[Experience], place: tuple[int, int], tokenizer: Any) -> dict[str, Any]:
        which, row = place
        one = experiences[which].rows([row])
        batch, prompt, response = one.batch, one.prompts[0], one.batch.responses.values
        pure = tokenizer.decode(response.tolist(), skip_special_tokens=True)
        reflections = reflection_counts(pure)
        logprobs = batch.sampler_logprobs if batch.old_logprobs is None else batch.old_logprobs
        return {
            "experience_index": which,
            "sample_in_exp": row,
            "full_sequence": _decoded(tokenizer, [*batch.prompts.values.tolist(), *response.tolist()]),
            "generated_text": _decoded(tokenizer, response.tolist()),
            "pure_generated_text": pure,
            "label": to_plain(prompt.label, "the label of a prompt"),
            "reference": to_plain(reference_of(prompt), "the reference answer of a prompt"),
            "repeat_score": repeat_score(pure),
            "reflection_pattern_score": sum(reflections.values()),
            "reflection_pattern_details": reflections,
            "policy_entropy": _number(_row_means(one, -logprobs if one.entropy is None else one.entropy)[0]),
            "has_images": bool(prompt.images),
            "num_images": len(prompt.images),
            "image_paths": list(prompt.images),
            "policy_entropy_is": "mean negative log-prob" if one.entropy is None else "entropy",
            "response_token_count": len(response),
            "truncated": None if batch.truncated is None else bool(batch.truncated[0]),
            "group": int(batch.group[0]),
            "advantages": _number(_row_means(one, batch.advantages)[0]),
            "return": None if one.returns is None else _number(_row_means(one, one.returns)[0]),
            "action_log_probs": _numbers(logprobs),
            "values": None if one.values is None else _numbers(one.values),
            "token_advantages": _numbers(batch.advantages),
            "info": {**_row(one.info), "reward_metrics": _row(one.components)},
            **(self._tokens(one, tokenizer) if self.mark else {}),
        }

    def _tokens(self, one: Experience, tokenizer: Any) -> dict[str, Any]:
        """Each response token as text, with its entropy."""
        assert one.entropy is not None
        marked = high_entropy(one.entropy, one.batch.mask, self.ratio)
        texts = token_texts(one.batch.responses.values, tokenizer)
        tokens = [
            {"text": text, "high_entropy": bool(high), "entropy_score": _number(score)}
            for (text, _), high, score in zip(texts, marked, one.entropy, strict=True)
        ]
        pure = [token for token, (_, special) in zip(tokens, texts, strict=True) if not special]
        return {"generated_tokens": tokens, "pure_generated_tokens": pure}


def _picture(folder: Path, image: EncodedImage) -> str | None:
    """Write a picture once under `folder`, and return its path from there; None where its pixels are broken."""
    place = Path("images") / f"{image.digest[:16]}.png"
    (folder / "images").mkdir(exist_ok=True)
    if not (folder / place).exists():
        try:
            small = image.pil()
        except DataError:
            return None
        small.thumbnail((WIDEST, WIDEST))
        with written_aside(folder / place) as aside:
            small.save(aside, "PNG")
    return str(place)


def _means(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    known = {name: [float(one[name]) for one in samples if one[name] is not None] for name in ANALYSED}
    return {f"trajectory/{name}_mean": float(np.mean(values)) for name, values in known.items() if values}


def _row_means(experience: Experience, flat: np.ndarray) -> np.ndarray:
    """The mean of each response over its trained tokens; NaN where there is none."""
    responses = experience.batch.responses
    rows = zip(responses.with_values(flat), responses.with_values(experience.batch.mask), strict=True)
    return np.array([row[mask].astype(float).mean() if mask.any() else np.nan for row, mask in rows], float)


def high_entropy(entropy: np.ndarray, trained: np.ndarray, ratio: float) -> np.ndarray:
    """Which tokens of one response are among the share `ratio` of its trained tokens with the highest entropy; at least
    one, and all that tie with the last of them (`rlbench.rl.high_entropy`, level "sequence")."""
    among = entropy[trained]
    if not len(among):
        return np.zeros(len(entropy), bool)
    count = max(1, int(len(among) * ratio + 1e-9))
    return (entropy >= np.sort(among)[-count]) & trained


def token_texts(ids: np.ndarray, tokenizer: Any) -> list[tuple[str, bool]]:
    """The text of each token, and whether it is a special one; a character over several tokens stands with the last."""
    special = set(tokenizer.all_special_ids)
    pieces = pieces_of(str(getattr(tokenizer, "name_or_path", "") or ""))
    if not pieces.readable:
        return [(_decoded(tokenizer, [token]), token in special) for token in ids.tolist()]
    return [
        ("" if piece.kind == PART else piece.shown, piece.kind == SPECIAL or token in special)
        for piece, token in zip(pieces(ids), ids.tolist(), strict=True)
    ]


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def _row(columns: Mapping[str, np.ndarray]) -> dict[str, float | None]:
    return {name: _number(values[0]) for name, values in columns.items()}


def _numbers(values: np.ndarray) -> list[float | None]:
    return [_number(value) for value in values]


def _number(value: Any) -> float | None:
    """A float that reads back as the same number of its precision; None where JSON has no form for it."""
    return float(str(value)) if np.isfinite(value) else None

"""What a viewer is sent of the rows it shows: prompts as small dicts, tokens as pieces, channels as arrays."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from rlbench.data import FINISH_REASONS, Rollouts
from rlbench.data.files.export import sample_index
from rlbench.data.prompts.images import PlacedImage
from rlbench.data.rollouts.branches import Branch, births, branches, origin
from rlbench.data.rollouts.channels import all_channels
from rlbench.data.rollouts.pieces import Pieces, pieces_of
from rlbench.data.rollouts.scoring import described
from rlbench.notebook.base.markup import cut, visible
from rlbench.notebook.rollouts.channel_scale import Scale, number, scale_of
from rlbench.notebook.rollouts.order import Summary
from rlbench.notebook.rollouts.prompt_parts import EDGE, PromptPart, image_part, image_runs, images, prompt_parts
from rlbench.units import format_percent

PREVIEW_TOKENS, PREVIEW_CHARACTERS = 256, 480  # of a completion that is not opened: three lines
OPEN_TOKENS = 2000  # of an opened one, and with each "more"
PIECE_CHARACTERS = 300  # of one token: a piece may be a line of a megabyte in hostile text
PROMPT_CHARACTERS, WHOLE_PROMPT_CHARACTERS, TEXT_CHARACTERS = 240, 20_000, 2000
IMAGES_OF_A_PROMPT, THUMBNAIL = 4, 160  # in a prompt's line; pixels of the longer side
KIND_CODES = {"text": "t", "special": "s", "part": "b", "id": "i"}


@dataclass(frozen=True, eq=False)
class Shown:
    """Rollouts with everything needed to show them."""

    rollouts: Rollouts

    @cached_property
    def summary(self) -> Summary:
        """Numbers per completion and prompt."""
        return Summary(self.rollouts)

    @cached_property
    def channels(self) -> Mapping[str, np.ndarray]:
        """All channels, in the order they are offered."""
        return all_channels(self.rollouts)

    @cached_property
    def scales(self) -> dict[str, Scale]:
        """How each channel is coloured."""
        return {name: scale_of(name, values) for name, values in self.channels.items()}

    @cached_property
    def pieces(self) -> Pieces:
        """Tokens as text."""
        return pieces_of(self.rollouts.tokenizer)

    @cached_property
    def places(self) -> np.ndarray:
        """Which of its prompt's completions each one is."""
        return sample_index(self.rollouts)

    @cached_property
    def births(self) -> list[int]:
        """Tokens that each completion has from the one it was forked from."""
        return births(self.rollouts)

    @cached_property
    def tree(self) -> list[dict[str, Any]]:
        """What came of each fork, as the page groups it."""
        return [page_branch(self.rollouts, branch) for branch in branches(self.rollouts)]

    def head(self, p: int) -> dict[str, Any]:
        """The line of a prompt."""
        r, s = self.rollouts, self.summary
        prompt = r.prompts[p]
        begin, end = np.searchsorted(r.group, [p, p + 1])
        own = begin + np.flatnonzero(s.own[begin:end])
        lengths = s.lengths[own]
        head: dict[str, Any] = {
            "p": p,
            "text": visible(cut(prompt.text, PROMPT_CHARACTERS)),
            "more": len(prompt.text) > PROMPT_CHARACTERS or not isinstance(prompt.content, str),
            "n": len(lengths),
            "continuations": int(end - begin) - len(own),
            "lengths": [int(lengths.min()), int(lengths.max())] if len(lengths) else None,
            "images": [{"src": i.image, "alt": i.text, "tokens": i.tokens} for i in self.thumbnails(p)],
        }
        if r.rewards is not None and not s.failed[own].all():
            head |= {"right": int(s.right[own].sum()), "two": s.two_valued}
            head |= {"mean": float(s.mean[p]), "spread": float(s.spread[p])}
        return head

    def thumbnails(self, p: int, most: int = IMAGES_OF_A_PROMPT, edge: int = THUMBNAIL) -> list[PromptPart]:
        """The first images of a prompt, `edge` pixels on the longer side."""
        return images(self.rollouts.prompts[p], edge, self.runs(p))[:most]

    def runs(self, p: int) -> list[int]:
        """How many tokens of a prompt stand for each of its images."""
        held = self.rollouts.prompts[p].images
        return image_runs(self.rollouts.prompt_ids[p], self.pieces, len(held)) if held else []

    def whole_prompt(self, p: int) -> dict[str, Any]:
        """All messages of a prompt, in order."""
        left, parts = WHOLE_PROMPT_CHARACTERS, []
        for part in prompt_parts(self.rollouts.prompts[p], runs=self.runs(p), played=True):
            text = visible(cut(part.text, max(0, left)))
            told = {"role": visible(part.role), "text": text, "image": part.image, "tokens": part.tokens}
            parts.append(told | ({"sound": part.sound} if part.sound else {}))
            left -= len(part.text)
        return {"p": p, "parts": parts}

    def observed(self, i: int) -> list[tuple[int, int, PlacedImage]]:
        """The images that a completion was shown: the token at which each begins, how many stand for it, and it."""
        ids, runs = self.rollouts.responses[i], []
        for image in self.rollouts.observed_images[i] if self.rollouts.observed_images else ():
            others = np.flatnonzero(ids[image.at :] != ids[image.at])
            runs.append((image.at, int(others[0]) if len(others) else len(ids) - image.at, image))
        return runs

    def row(
        self, i: int, start: int = 0, count: int = PREVIEW_TOKENS, preview: bool = True, edge: int = THUMBNAIL
    ) -> tuple[dict[str, Any], slice]:
        """A completion's facts and pieces, for a `preview` three lines of text (behind what a continuation has from
        another), and their place in the arrays."""
        r, born = self.rollouts, self.births[i]
        begin, end = int(r.responses.offsets[i]), int(r.responses.offsets[i + 1])
        first, runs = min(begin + start, end), self.observed(i)
        count += born + sum(n for at, n, _ in runs if at < count + born) if preview else 0
        pieces = self.pieces(r.responses.values[first : min(first + count, end)])
        texts = [piece.shown for piece in pieces]
        for at, n, _ in runs:  # the first token of an image's says how many there are
            texts[max(0, at - start) : max(0, at + n - start)] = [
                "" if t > at else f"image ×{n}" for t in range(max(at, start), min(at + n, start + len(texts)))
            ]
        if preview:
            begins = np.cumsum([0, *map(len, texts)])
            texts = texts[: int(np.searchsorted(begins, begins[min(born, len(texts))] + PREVIEW_CHARACTERS))]
        shown = [(at, n, image_part(image, edge)) for at, n, image in runs if start <= at < start + len(texts)]
        row = {
            "i": i,
            "k": int(self.places[i]),
            "p": int(r.group[i]),
            "n": end - begin,
            "born": born,
            "from": start,
            "reward": None if r.rewards is None or self.summary.failed[i] else float(r.rewards[i]),
            "right": bool(self.summary.right[i]),
            "finish": FINISH_REASONS[r.finish[i]],
            "version": int(r.versions[i]),
            "pieces": [visible(cut(text, PIECE_CHARACTERS)) for text in texts],
            "kinds": "".join(KIND_CODES[piece.kind] for piece in pieces[: len(texts)]),
            "images": [{"t": at, "tokens": n, "src": part.image, "alt": part.text} for at, n, part in shown],
            "small": preview and bool(shown),
        }
        if not self.pieces.readable and not start:
            row["text"] = visible(cut(r.texts[i], TEXT_CHARACTERS))
        return row, slice(first, first + len(texts))

    def rows(self, wanted: Iterable[Sequence[Any]]) -> tuple[list[dict[str, Any]], list[bytes]]:
        """Rows `(completion, start, count or None for a preview)`, at most OPEN_TOKENS of each, and their numbers.

        These are two buffers: token ids, int32, flat over the rows; values, float32, (channels, tokens).
        """
        made = [
            self.row(i, start) if count is None else self.row(i, start, min(count, OPEN_TOKENS), False, EDGE)
            for i, start, count in wanted
        ]
        arrays = (self.rollouts.responses.values, *self.channels.values())
        ids, *values = (np.concatenate([a[:0], *(a[span] for _, span in made)]) for a in arrays)
        flat = b"".join(value.astype(np.float32).tobytes() for value in values)
        return [row for row, _ in made], [ids.astype(np.int32).tobytes(), flat]


def page_branch(rollouts: Rollouts, branch: Branch) -> dict[str, Any]:
    """What the page is told of a branch: `key` names it also where numbers move, `said` is its value in words."""
    of, kept = origin(rollouts, branch)
    begin = rollouts.responses[branch.samples[0]][: branch.at].tobytes()
    return {
        "key": f"{branch.group}.{zlib.crc32(begin + branch.under.encode()):x}",
        "p": branch.group,
        "of": of,
        "kept": kept,
        "text": visible(cut(branch.text, PIECE_CHARACTERS)),
        "under": visible(branch.under),
        "samples": list(branch.samples),
        "said": said_value(rollouts, branch),
    }


def said_value(rollouts: Rollouts, branch: Branch) -> str:
    """`value 0.31 ± 0.12`, by the rewards of what continues; why there is none."""
    if rollouts.rewards is None:
        return "not scored"
    missing = int(np.isnan(rollouts.rewards[list(branch.samples)]).sum())
    if missing:
        return f"no value: scoring failed for {missing} of {len(branch.samples)}"
    error = "" if np.isnan(branch.error) else f" ± {number(branch.error)}"
    return f"value {number(branch.value)}{error}"


def headline(rollouts: Rollouts) -> str:
    """`64 rollouts · 8 prompts × 8 · v41 · reward 0.42 ± 0.49 · 6 % truncated`."""
    if (forked := Summary(rollouts).forked).any() and not forked.all():
        said = headline(replace(rollouts.select(~forked), not_started=rollouts.not_started))
        return f"{said} · {int(forked.sum()):,} continuations"
    counts = np.bincount(rollouts.group, minlength=len(rollouts))
    each = np.unique(counts[counts > 0])
    times = f" × {each[0]}" if len(each) == 1 else ""
    parts = [f"{rollouts.samples:,} rollouts", f"{len(rollouts):,} prompts{times}"]
    if rollouts.samples:
        parts.append("v" + "/".join(str(v) for v in np.unique(rollouts.versions)[:4]))
        if rollouts.rewards is not None:
            parts.append(described(rollouts.rewards).replace("-", "−"))
        parts.append(f"{format_percent(float(rollouts.truncated.mean()))} truncated")
    if rollouts.aborted.any():
        parts.append(f"{int(rollouts.aborted.sum()):,} aborted")
    if rollouts.not_started:
        parts.append(f"{len(rollouts.not_started):,} prompts not started")
    return " · ".join([*parts, *(f"⚠ {note}" for note in rollouts.notes)])

"""A picture of response lengths, drawn by Pillow alone: a rank has it, and there is no figure to forget to close."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlbench.data.files import written_aside
from rlbench.errors import DataError

BINS = 50
WIDTH, HEIGHT, FINER = 1000, 600, 2  # pixels of the file; drawn finer, then made smaller, which smooths
LEFT, RIGHT, TOP, BOTTOM = 84, 28, 62, 72
LEAST_SPAN = 10  # tokens of the axis, so that equal lengths are a bar and no wall
BLUE, GREY, INK, GRID, PAPER = (128, 170, 224), (110, 110, 110), (40, 40, 40), (226, 226, 226), (255, 255, 255)
MARKS = ((196, 84, 30), (126, 63, 152), (28, 128, 96), (150, 110, 20))


class Lengths(NamedTuple):
    """The response lengths of one step, in tokens."""

    step: int
    values: np.ndarray


def edges_of(shortest: int, longest: int) -> np.ndarray:
    """Edges of at most 50 bins of one whole width that hold `shortest` to `longest` tokens, int64."""
    width = -(-(longest - shortest + 1) // BINS)
    return np.arange(shortest, longest + 1 + width, width)


def check_pillow() -> None:
    """Raises DataError where pictures cannot be drawn, saying what to install."""
    try:
        import PIL.ImageFont  # noqa: F401
    except ModuleNotFoundError as missing:
        raise DataError(
            "plots of response lengths are drawn with Pillow: pip install pillow, or set plot_every=0, which keeps the "
            "data alone"
        ) from missing


def draw(path: Path, now: Lengths, past: Sequence[Lengths], marks: Mapping[str, float]) -> None:
    """Write a PNG of 1000 x 600 pixels: the lengths of `now` as bars, those of `past` as pale outlines behind them.

    Args:
        path: of the file, which appears whole or not at all.
        now: at least one length.
        past: earlier steps, the oldest first; each with at least one length.
        marks: upright lines, by the name that the legend gives them: name -> tokens.
    """
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (WIDTH * FINER, HEIGHT * FINER), PAPER)
    frame = _Frame(ImageDraw.Draw(picture), now, past)
    frame.axes(now.step)
    for age, earlier in enumerate(past):
        frame.outline(earlier, _pale(len(past) - age, len(past)))
    frame.bars(now)
    for mark, colour in zip(marks.values(), _colours(len(marks)), strict=True):
        frame.mark(mark, colour)
    frame.legend(_entries(now, past, marks))
    small = picture.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)
    with written_aside(path) as aside:
        small.save(aside, format="PNG")


class _Entry(NamedTuple):
    """A line of the legend; `shape`: "box", "line" or "dashes"."""

    text: str
    colour: tuple[int, int, int]
    shape: str


def _entries(now: Lengths, past: Sequence[Lengths], marks: Mapping[str, float]) -> list[_Entry]:
    entries = [_Entry(f"step {now.step}: {len(now.values)} responses", BLUE, "box")]
    if past:
        steps = f"steps {past[0].step} to {past[-1].step}" if len(past) > 1 else f"step {past[0].step}"
        entries.append(_Entry(steps, _pale(1, 1), "line"))
    for (name, value), colour in zip(marks.items(), _colours(len(marks)), strict=True):
        entries.append(_Entry(f"{name} = {value:.4g}", colour, "dashes"))
    return entries


def _colours(count: int) -> list[tuple[int, int, int]]:
    return [MARKS[i % len(MARKS)] for i in range(count)]


def _pale(age: int, oldest: int) -> tuple[int, int, int]:
    """Grey, the paler the older; `age` counts from 1."""
    light = 150 + round(70 * (age - 1) / max(1, oldest - 1)) if oldest > 1 else 150
    return (light, light, light)


class _Frame:
    """The axes of one picture and what is drawn between them; positions in the file's pixels."""

    def __init__(self, canvas: Any, now: Lengths, past: Sequence[Lengths]) -> None:
        self.canvas = canvas
        every = [now, *past]
        low, high = min(int(e.values.min()) for e in every), max(int(e.values.max()) for e in every)
        self.edges = edges_of(low, high)
        wanting = max(0, LEAST_SPAN - int(self.edges[-1] - low))
        self.low = max(0, low - wanting // 2)
        self.high = max(int(self.edges[-1]), self.low + LEAST_SPAN)
        highest = np.max([self.shares(e) for e in every], axis=0)
        self.top = float(highest.max()) * 1.08
        self.left_is_free = _within(highest, 0.0, 0.35) < _within(highest, 0.65, 1.0)

    def shares(self, lengths: Lengths) -> np.ndarray:
        """Of each bin, of all responses, in percent."""
        return np.histogram(lengths.values, self.edges)[0] / len(lengths.values) * 100

    def x(self, tokens: float) -> float:
        """A length stands in the middle of its bin of one token, so bins begin half a token before their edge."""
        return LEFT + (tokens + 0.5 - self.low) / (self.high - self.low) * (WIDTH - LEFT - RIGHT)

    def y(self, share: float) -> float:
        return HEIGHT - BOTTOM - share / self.top * (HEIGHT - TOP - BOTTOM)

    def axes(self, step: int) -> None:
        """Title, grid, numbers and names of the axes."""
        width = int(self.edges[1] - self.edges[0])
        for value in ticks(0, self.top):
            self._line([(LEFT, self.y(value)), (WIDTH - RIGHT, self.y(value))], GRID, 1)
            self._text((LEFT - 8, self.y(value)), f"{value:g} %", 13, "rm")
        for value in ticks(self.low, self.high - 1, whole=True):
            self._line([(self.x(value), HEIGHT - BOTTOM), (self.x(value), HEIGHT - BOTTOM + 5)], INK, 1)
            self._text((self.x(value), HEIGHT - BOTTOM + 9), f"{value:g}", 13, "mt")
        self._line([(LEFT, HEIGHT - BOTTOM), (WIDTH - RIGHT, HEIGHT - BOTTOM)], INK, 1)
        bins = "1 token" if width == 1 else f"{width} tokens"
        self._text((LEFT, 18), f"Response lengths at step {step}", 19, "lt")
        self._text((LEFT, 42), f"share of responses, bins of {bins}", 13, "lt", GREY)
        self._text(((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 24), "tokens of a response", 14, "mm")

    def bars(self, lengths: Lengths) -> None:
        for left, right, share in zip(self.edges, self.edges[1:], self.shares(lengths), strict=False):
            if share:
                corners = (self.x(left - 0.5) + 0.5, self.y(share), self.x(right - 0.5) - 0.5, HEIGHT - BOTTOM)
                self.canvas.rectangle([c * FINER for c in corners], fill=BLUE)

    def outline(self, lengths: Lengths, colour: tuple[int, int, int]) -> None:
        points = [(self.x(self.edges[0] - 0.5), self.y(0))]
        for left, right, share in zip(self.edges, self.edges[1:], self.shares(lengths), strict=False):
            points += [(self.x(left - 0.5), self.y(share)), (self.x(right - 0.5), self.y(share))]
        self._line([*points, (self.x(self.edges[-1] - 0.5), self.y(0))], colour, 1.5)

    def mark(self, tokens: float, colour: tuple[int, int, int]) -> None:
        """An upright dashed line."""
        for start in range(TOP, HEIGHT - BOTTOM, 10):
            self._line([(self.x(tokens), start), (self.x(tokens), min(start + 6, HEIGHT - BOTTOM))], colour, 2)

    def legend(self, entries: Sequence[_Entry]) -> None:
        """What is what, on the side where the bars are lower, over everything drawn before."""
        width = 46 + max(self._wide(entry.text, 13) for entry in entries)
        height = 14 + 20 * len(entries)
        left, top = LEFT + 6 if self.left_is_free else WIDTH - RIGHT - width - 6, TOP + 2
        box = [c * FINER for c in (left, top, left + width, top + height)]
        self.canvas.rectangle(box, fill=PAPER, outline=GRID, width=FINER)
        for i, entry in enumerate(entries):
            middle = top + 17 + 20 * i
            if entry.shape == "box":
                swatch = (left + 10, middle - 6, left + 32, middle + 6)
                self.canvas.rectangle([c * FINER for c in swatch], fill=entry.colour)
            else:
                parts = [(10, 32)] if entry.shape == "line" else [(10, 16), (18, 24), (26, 32)]
                for a, b in parts:
                    self._line([(left + a, middle), (left + b, middle)], entry.colour, 2)
            self._text((left + 38, middle), entry.text, 13, "lm")

    def _line(self, points: Sequence[tuple[float, float]], colour: tuple[int, int, int], width: float) -> None:
        self.canvas.line([(x * FINER, y * FINER) for x, y in points], fill=colour, width=round(width * FINER))

    def _text(
        self, at: tuple[float, float], text: str, size: int, anchor: str, colour: tuple[int, int, int] = INK
    ) -> None:
        self.canvas.text((at[0] * FINER, at[1] * FINER), text, fill=colour, font=_font(size), anchor=anchor)

    def _wide(self, text: str, size: int) -> float:
        return float(self.canvas.textlength(text, font=_font(size))) / FINER


def _within(shares: np.ndarray, start: float, stop: float) -> float:
    """The highest of the bins between two places of the axis, each 0 to 1."""
    chosen = shares[int(start * len(shares)) : math.ceil(stop * len(shares))]
    return float(chosen.max())


def _font(size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size * FINER)


def ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Round numbers from `low` to `high`, some six of them."""
    rough = (high - low) / 6
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * 0.999)
    if whole:
        step = max(1.0, step if step == int(step) else math.ceil(step))
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]

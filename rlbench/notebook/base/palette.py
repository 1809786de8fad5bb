"""The colours of every view: Okabe–Ito hues that colour-blind readers tell apart, once for light and once for dark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Hue(NamedTuple):
    """One colour in the light and in the dark theme, as `#rrggbb`."""

    light: str
    dark: str


BLUE, VERMILLION = Hue("#0072B2", "#4BA3DC"), Hue("#D55E00", "#EE6A2C")
ORANGE, GREEN = Hue("#E69F00", "#F5BE4B"), Hue("#009E73", "#3FC9A0")
PURPLE, SKY = Hue("#CC79A7", "#E5A5C8"), Hue("#56B4E9", "#8ED0F5")
YELLOW, GREY = Hue("#C9BC1F", "#F0E442"), Hue("#8C8C8C", "#9A9A9A")

HUES: tuple[Hue, ...] = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, GREY, YELLOW)
"""For categories without a colour of their own, in this order; `rlb-hue-0` to `rlb-hue-7` in CSS."""

OWNERS: Mapping[str, Hue] = {
    "weights": BLUE,
    "gradients": VERMILLION,
    "optimizer": ORANGE,
    "kv_cache": GREEN,
    "activations": PURPLE,
    "other": GREY,
}
"""Owners of memory, stacked from below in this order; `rlb-weights` … `rlb-other` in CSS, with `-` for `_`."""

PHASES: Mapping[str, Hue] = {
    "rollout": SKY,
    "score": YELLOW,
    "train": PURPLE,
    "sync": GREEN,
    "other": GREY,
    "idle": Hue("#E3E3E3", "#4A4A4A"),
}
"""What a step's time goes to; `rlb-phase-rollout` … in CSS."""

NEGATIVE, ZERO, POSITIVE = ORANGE, Hue("#FFFFFF", "#111111"), BLUE
"""Ends and middle of the diverging scale of signed values (advantage, log-prob difference)."""
MAGNITUDE = PURPLE
"""The one hue of values without a sign (entropy, KL, share of the loss)."""
STRONGEST = 0.62
"""Opacity at the ends of both scales: the text on top stays legible."""


def hue_of(i: int) -> str:
    """The colour of category `i`, legible on both."""
    return HUES[i % len(HUES)].light


DARK = (
    'body[data-jp-theme-light="false"] {0}, body.vscode-dark {0}, body.vscode-high-contrast {0}, html[theme="dark"] {0}'
)


def css(selector: str = ".rlb") -> str:
    """CSS rules that give `selector` every colour as a variable, light by default, dark in Jupyter's dark themes."""
    named = {f"rlb-{name.replace('_', '-')}": hue for name, hue in OWNERS.items()}
    named |= {f"rlb-phase-{name}": hue for name, hue in PHASES.items()}
    named |= {f"rlb-hue-{i}": hue for i, hue in enumerate(HUES)}
    named |= {"rlb-negative": NEGATIVE, "rlb-zero": ZERO, "rlb-positive": POSITIVE, "rlb-magnitude": MAGNITUDE}
    light = "".join(f"--{name}:{hue.light};" for name, hue in named.items())
    dark = "".join(f"--{name}:{hue.dark};" for name, hue in named.items())
    return f"{selector}{{{light}}}\n{DARK.format(selector)}{{{dark}}}"

"""The frame of every view, style sheets, escaping, and model output made visible: what would act on a page or a
terminal, or hide itself, is drawn as what it is (ANSI codes, marks that turn the direction of writing, no width).
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

STATIC = Path(__file__).parents[1] / "static"

_PICTURES = {code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)} | {0x7F: 0x2421}
"""Control characters of ASCII as their pictures (␛); tab and line feed are white space."""
_INVISIBLE = re.compile(
    "[\u0080-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
"""C1 controls, soft hyphen, direction marks and isolates, zero width, tags, lone surrogates."""


def sheet(name: str) -> str:
    """A style sheet of the package."""
    return (STATIC / f"{name}.css").read_text(encoding="utf-8")


STYLE = f"<style>\n{sheet('card')}</style>"


def escape(value: Any) -> str:
    """Text for HTML: everything a model or a user wrote goes through here."""
    return html.escape(str(value))


AS_WRITTEN = "mathjax_ignore tex2jax_ignore"
"""Class of what MathJax leaves alone, by 3's and 2's names: else the dollars of a completion become a formula."""


def box(*parts: str) -> str:
    """The frame of every view; each part begins a line, also for who takes the tags out."""
    return STYLE + f'<div class="rlb {AS_WRITTEN}">' + "\n".join(parts) + "</div>"


def visible(text: str) -> str:
    """`text` with controls as pictures and invisible characters as their code points (‹U+202E›)."""
    if text.isprintable():  # none of these is; most pieces are
        return text
    return _INVISIBLE.sub(lambda m: f"‹U+{ord(m[0]):04X}›", text.translate(_PICTURES))


def one_line(value: object, most: int) -> str:
    """Make a visible text of one line and at most `most` characters."""
    return cut(visible(" ".join(str(value).split("\n"))), most)


def cut(text: str, most: int) -> str:
    """The first `most` characters, and how many are left out."""
    return text if len(text) <= most else f"{text[:most]}… (+{len(text) - most:,} characters)"

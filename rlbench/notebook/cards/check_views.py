"""What a preflight and a rehearsal found, as tables. Token text comes from a model: it is escaped."""

from __future__ import annotations

from typing import Any

from rlbench.notebook.base.markup import box, escape, table
from rlbench.units import format_bytes


def preflight_view(result: Any) -> str:
    """Verdict, checks, and where it did not pass the probable cause and the tokens that differ most."""
    parts = [f"<div><b>{escape(result.headline)}</b></div>"]
    rows = [
        [_verdict(check.passed), escape(check.name), escape(check.seen), escape(check.allowed)]
        for check in result.checks
    ]
    parts.append(table(["", "", "seen", "allowed"], rows, numeric=[2, 3]))
    if result.cause:
        parts.append(f"<div class=w>⚠ {escape(result.cause)}</div>")
    if not result.passed:
        parts.append(
            table(
                ["prompt", "sequence", "token", "", "sampler", "trainer", "difference"],
                [
                    [
                        str(t.prompt),
                        str(t.sequence),
                        str(t.position),
                        f"<code>{escape(repr(t.text))}</code>",
                        f"{t.sampler:.4f}",
                        f"{t.trainer:.4f}",
                        f"{t.gap:+.2g}",
                    ]
                    for t in result.worst
                ],
                numeric=[0, 1, 2, 4, 5, 6],
            )
        )
    return box(*parts)


def rehearsal_view(result: Any) -> str:
    """One row per engine: highest memory, what there is, what is left."""
    rows = [
        [
            f"<b>{escape(e.name)}</b>",
            escape(e.what),
            format_bytes(e.peak),
            format_bytes(e.limit),
            _room(e.headroom),
            escape(e.note),
        ]
        for e in result.engines
    ]
    parts = [
        f"<div><b>{escape(result.headline)}</b></div>",
        table(["", "", "peak", "limit", "head-room", ""], rows, numeric=[2, 3, 4]),
        *(f"<div class=q>{escape(note)}</div>" for note in result.notes),
    ]
    return box(*parts)


def _verdict(passed: bool) -> str:
    return "✓ ok" if passed else "<span class=w>✕ failed</span>"


def _room(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes >= 0 else f"<span class=w>−{format_bytes(-nbytes)}</span>"

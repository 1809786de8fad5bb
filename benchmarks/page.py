"""The results on paper: benchmarks/results.json, and the table of docs/performance.md that is written from it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.turns import ROOT

RESULTS, PAGE = ROOT / "benchmarks" / "results.json", ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- {name}: written by python -m benchmarks -->", "<!-- end of {name} -->"
HEAD = "| figure | measured | spread | bar | reached |\n|---|---|---|---|---|\n"
Records = Sequence[Mapping[str, Any]]


def load(path: Path) -> dict[str, Any]:
    """Return the results that were written there last."""
    return json.loads(path.read_text()) if path.exists() else {}


def merged(known: Records, records: Records, order: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the known records with these in the place of those of the same figures, in the order of the figures."""
    by_name = {record["figure"]: record for record in [*known, *records]}
    return [by_name[name] for name in order if name in by_name]


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Write the results."""
    path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def table(records: Records) -> str:
    """Return the table of all figures, and a line that says where and when they were measured."""
    measured = [record for record in records if "ratio" in record]
    return HEAD + "\n".join(map(row, records)) + "\n\n" + conditions(measured)


def row(record: Mapping[str, Any]) -> str:
    """Return a figure's row."""
    if "ratio" not in record:
        said = record.get("note") or f"failed: {record['failed']}"
        return f"| {record['title']} | {_cell(said)} | – | {bar_text(record)} | – |"
    unit = record["unit"]
    least, most = (number_text(number, unit) for number in record["spread"])
    middle = number_text(record["ratio"], unit)
    return f"| {record['title']} | {middle} | {least} to {most} | {bar_text(record)} | {reached_text(record)} |"


def number_text(number: float, unit: str) -> str:
    """Return a number with its unit: three digits that count."""
    digits = 0 if abs(number) >= 100 else 1 if abs(number) >= 10 else 2 if abs(number) >= 0.1 else 3
    return f"{number:.{digits}f}{'×' if unit == 'x' else f' {unit}'}"


def bar_text(record: Mapping[str, Any]) -> str:
    """Return the bar with its direction."""
    if record["bar"] is None:
        return "–"
    unit = "×" if record["unit"] == "x" else f" {record['unit']}"
    return f"{'≥' if record['better'] == 'more' else '≤'} {record['bar']:g}{unit}"


def reached_text(record: Mapping[str, Any]) -> str:
    """Say whether the bar is reached, and whether in each round."""
    if record["reached"] is None:
        return "–"
    return ("yes" if record["reached"] else "no") + ("" if record["clear"] else ", not in each round")


def conditions(records: Records) -> str:
    """Say when, with what and beside how much other work the figures were measured."""
    if not records:
        return "Nothing has been measured yet."
    days = sorted({record["date"] for record in records})
    loads = [record["load"] for record in records]
    versions = {name: found for record in records for name, found in record["versions"].items()}
    cores = sorted({record["cores"] for record in records})
    return (
        f"{' to '.join(dict.fromkeys((days[0], days[-1])))}, {', '.join(map(str, cores))} cores, load average before "
        f"each {min(loads):g} to {max(loads):g}; {', '.join(map(' '.join, versions.items()))}."
    )


def rewritten(text: str, name: str, content: str) -> str:
    """Return the page with what stands between a part's markers replaced; ValueError where they are not there."""
    begin, end = BEGIN.format(name=name), END.format(name=name)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the page needs the line {begin!r} and below it {end!r}, once each")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{content.strip()}\n{end}{rest.split(end)[1]}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")

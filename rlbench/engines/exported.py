"""What writing a model as a folder gives back."""

from __future__ import annotations

from dataclasses import dataclass

from rlbench.results import Result
from rlbench.units import format_bytes


@dataclass(frozen=True)
class ExportedModel(Result):
    """A model written as a Hugging Face folder: where, its size, its files."""

    path: str
    bytes: int
    files: tuple[str, ...]

    def __repr__(self) -> str:
        return f"ExportedModel({self.path!r}, {format_bytes(self.bytes)}, {len(self.files)} files)"

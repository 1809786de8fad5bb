"""The records of a session's steps, oldest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

from rlbench.errors import DataError, nearest


class History(Sequence[dict[str, Any]]):
    """A list of step records; `history["reward"]` is one metric over the steps, None where a step lacks it."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self.records = list(records)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.records)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> History: ...  # type: ignore[overload-overlap]
    @overload
    def __getitem__(self, index: str) -> list[Any]: ...  # type: ignore[overload-overlap]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            if self.records and not any(index in r for r in self.records):
                known = dict.fromkeys(name for r in self.records for name in r)
                raise DataError(
                    f"no step has a metric {index!r}{nearest(index, known)}; there are {', '.join(known)}"
                )
            return [r.get(index) for r in self.records]
        if isinstance(index, slice):
            return History(self.records[index])
        return self.records[index]

    def table(self) -> Any:
        """The records as a pandas DataFrame."""
        import pandas

        return pandas.DataFrame(self.records)

    def __repr__(self) -> str:
        if not self.records:
            return "History(no steps yet)"
        last = self.records[-1]
        shown = ", ".join(f"{k} {last[k]:.3g}" for k in ("reward", "loss", "kl") if last.get(k) is not None)
        return f"History({len(self.records)} steps; last: {shown})"

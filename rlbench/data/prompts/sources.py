"""Where rows come from: datasets of Hugging Face, Parquet, JSON lines, JSON, CSV, data frames and plain lists.

Each reader gives a `Rows`: rows as dicts, that can be counted and picked where the source allows it. Files are read by
their suffix; what a CSV holds stays text.
"""

from __future__ import annotations

import csv
import glob
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rlbench.data.base.arrow import read_table
from rlbench.data.base.optional import needed
from rlbench.data.prompts.prompt import Prompt, is_chat_or_tokens
from rlbench.errors import DataError, nearest

Row = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one source called `name` (or ""). `table`: the rows; an iterator where not `counted`."""

    name: str
    table: Any
    counted: bool = True

    def __len__(self) -> int:
        if not self.counted:
            what = self.name or "this"
            raise DataError(f"{what} is a stream without a length: give limit=, the number of rows to read")
        return len(self.table)

    def picked(self, indices: Sequence[int] | None) -> Iterator[Row]:
        """The rows of these indices, in this order; all of them for None."""
        if indices is None:
            return iter(self.table)
        if hasattr(self.table, "select"):  # a Dataset: one pass over Arrow instead of a read per row
            return iter(self.table.select(indices))
        return (self.table[i] for i in indices)

    def first(self, count: int) -> Iterator[Row]:
        """The first rows, also of a stream."""
        return islice(iter(self.table), count)


def open_source(source: Any, split: str | None, config: str | None, revision: str | None) -> Rows:
    """Find out what `source` is and open it; the arguments are those of `rlbench.data.load`."""
    if isinstance(source, str | Path):
        return _of_path(source, split, config, revision)
    _refuse(f"a {type(source).__name__}", config=config, revision=revision)
    if _is_a("DatasetDict", source) or _is_a("IterableDatasetDict", source):
        return _of_dataset(_chosen_split(source, split), "")
    if _is_a("Dataset", source) or _is_a("IterableDataset", source):
        if split is not None and str(getattr(source, "split", None)) != split:
            raise DataError(f"this dataset is the split {source.split}: leave out split={split!r}")
        return _of_dataset(source, "")
    _refuse(f"a {type(source).__name__}", split=split)
    if hasattr(source, "columns") and hasattr(source, "to_dict"):
        return Rows("", source.to_dict("records"))
    if hasattr(source, "tolist"):
        source = source.tolist()  # an array, or a data frame's column
    if isinstance(source, Mapping):
        raise DataError("load: one dict is one row: give a list of them, [{'prompt': …}, …]")
    if isinstance(source, Sequence):
        return Rows("", [_list_row(item, i) for i, item in enumerate(source)])
    if isinstance(source, Iterable):
        return Rows("", (_list_row(item, i) for i, item in enumerate(source)), counted=False)
    raise DataError(
        f"load: cannot read a {type(source).__name__}: give a dataset, a hub id, a path, a data frame or a list"
    )


def _of_path(source: str | Path, split: str | None, config: str | None, revision: str | None) -> Rows:
    path = Path(source).expanduser()
    text = str(path)
    if path.is_dir():
        return _of_folder(path, split, config, revision)
    if path.is_file():
        _refuse(f"the file {path.name}", split=split, config=config, revision=revision)
        return Rows(path.stem, _read(path))
    if any(c in text for c in "*?["):
        _refuse(f"the files {source}", split=split, config=config, revision=revision)
        paths = sorted(Path(p) for p in glob.glob(text, recursive=True) if Path(p).is_file())
        if not paths:
            raise DataError(f"no file matches {text}")
        return Rows(path.parent.name or "files", [row for one in paths for row in _read(one)])
    if isinstance(source, Path) or path.suffix in READERS or text.startswith(("/", ".")):
        if not path.parent.is_dir():
            raise DataError(f"no file {path}: there is no folder {path.parent}")
        raise DataError(f"no file {path}{nearest(path.name, (p.name for p in path.parent.iterdir()))}")
    return _of_hub(str(source), split, config, revision)


def _of_folder(folder: Path, split: str | None, config: str | None, revision: str | None) -> Rows:
    datasets = needed("datasets", f"load({folder.name!r})")
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():  # of save_to_disk
        _refuse(f"the saved dataset {folder.name}", config=config, revision=revision)
        found = _hf(f"{folder}", datasets.load_from_disk, str(folder))
        if _is_a("Dataset", found):
            _refuse(f"the saved dataset {folder.name}, which is one split,", split=split)
        return _of_dataset(_chosen_split(found, split) if isinstance(found, Mapping) else found, folder.name)
    _refuse(f"the folder {folder.name}", revision=revision)
    return _of_hub(str(folder), split, config, None)


def _of_hub(source: str, split: str | None, config: str | None, revision: str | None) -> Rows:
    datasets = needed("datasets", f"load({source!r})")
    found = _hf(source, datasets.load_dataset, source, config, split=split, revision=revision)
    name = source.rstrip("/").rpartition("/")[2]
    return _of_dataset(_chosen_split(found, None) if isinstance(found, Mapping) else found, name)


def _of_dataset(dataset: Any, name: str) -> Rows:
    return Rows(name, dataset, counted=hasattr(dataset, "__len__"))


def _hf(source: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return call(*args, **options)
    except Exception as error:
        said = str(error).strip().split("\n")[0]
        raise DataError(f"load: the datasets library cannot read {source!r}: {type(error).__name__}: {said}") from error


def _chosen_split(splits: Mapping[str, Any], split: str | None) -> Any:
    names = ", ".join(splits)
    if split is not None:
        if split not in splits:
            raise DataError(f"no split {split!r}: it has {names}{nearest(split, splits)}")
        return splits[split]
    if len(splits) != 1:
        raise DataError(f"it has the splits {names}: give one, as split={next(iter(splits), 'train')!r}")
    return next(iter(splits.values()))


def _list_row(item: Any, index: int) -> Row:
    """A list's item as a row: a dict is one; a text, chat, list of token ids or Prompt is a prompt."""
    if isinstance(item, Prompt):
        taken = sorted({"prompt", "label"} & set(item.meta))
        if taken:
            raise DataError(f"item {index}: the prompt's meta has {taken[0]!r}, which is its own field: rename it")
        return {**item.meta, "prompt": item.content, "label": item.label}
    if isinstance(item, Mapping):
        return item
    if isinstance(item, str) or is_chat_or_tokens(item):
        return {"prompt": item}
    raise DataError(f"item {index} is a {type(item).__name__}: wanted a text, a chat, token ids, a dict or a Prompt")


# -- files


def _read(path: Path) -> list[Row]:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path.name}: files are read by their suffix: {', '.join(READERS)}")
    try:
        return reader(path)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from None


def _read_parquet(path: Path) -> list[Row]:
    table = read_table(path, f"load({path.name!r})")
    for key, kind in OWN_FILES.items():
        if key in (table.schema.metadata or {}):
            raise DataError(f"{path} holds {kind}, not a table of prompts: {kind}.from_parquet(path) reads it")
    return list(table.to_pylist())


OWN_FILES = {b"rlbench.rollouts": "Rollouts", b"rlbench.batch": "TrainBatch"}


def _read_lines(path: Path) -> list[Row]:
    rows: list[Row] = []
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                rows.append(_object(_parsed(line, f"{path} line {number}"), f"{path} line {number}"))
    return rows


def _read_json(path: Path) -> list[Row]:
    """A list of objects, or one object per line under the wrong suffix, which is common."""
    text = path.read_text(encoding="utf-8-sig")
    if not text.lstrip().startswith("["):
        return _read_lines(path)
    return [_object(item, f"{path} item {i}") for i, item in enumerate(_parsed(text, str(path)))]


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON: {error}") from None


def _object(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{where} is a {type(value).__name__}; wanted an object, {{'prompt': …}}")
    return value


def _read_csv(path: Path, delimiter: str = ",") -> list[Row]:
    """Rows by the names in the first line; every value is text, as the file has it."""
    before = csv.field_size_limit(sys.maxsize)  # a long prompt is no error; the limit is the process's, so put it back
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter=delimiter, strict=True)
            rows: list[Row] = []
            for row in reader:
                if None in row or None in row.values():
                    count = len(reader.fieldnames or ())
                    raise DataError(f"{path}: the row that ends in line {reader.line_num} has not {count} columns")
                rows.append(row)
    except csv.Error as error:
        raise DataError(f"{path} is not CSV: {error}") from None
    finally:
        csv.field_size_limit(before)
    return rows


READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": partial(_read_csv, delimiter="\t"),
}


def _refuse(what: str, **options: str | None) -> None:
    for name, value in options.items():
        if value is not None:
            raise DataError(f"load: {what} has no {name}: leave out {name}={value!r}")


def _is_a(name: str, value: Any) -> bool:
    """Whether `value` is of that class of the datasets library, without importing it."""
    return any(c.__name__ == name and c.__module__.split(".")[0] == "datasets" for c in type(value).__mro__)

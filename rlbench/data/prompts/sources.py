"""Where rows come from: datasets of Hugging Face, Parquet, JSON lines, JSON, CSV, data frames and plain lists.

Files are read by their suffix; what a CSV holds stays text.
"""

from __future__ import annotations

import csv
import glob
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlbench.data.base.arrow import OWN_KEYS, read_table
from rlbench.data.base.drawing import needed
from rlbench.data.prompts.cells import check_once, frame_rows, is_frame
from rlbench.data.prompts.placing import KINDS
from rlbench.data.prompts.prompt import Prompt, is_chat_or_tokens
from rlbench.errors import DataError, nearest

Row = Mapping[str, Any]
WANTED = "Wanted one object per line; a .json file may also be a list of objects, [{…}, …]"


def open_source(source: Any, split: str | None, config: str | None, revision: str | None) -> tuple[str, Any]:
    """The name of a source (or "") and its rows, an iterable of dicts; the arguments are those of `load`."""
    if isinstance(source, str | Path):
        return _of_path(source, split, config, revision)
    what = f"a {type(source).__name__}"
    _refuse(what, config=config, revision=revision)
    if type(source).__module__.split(".")[0] == "datasets":
        if isinstance(source, Mapping):
            return "", _chosen_split(source, split)
        if hasattr(source, "split"):  # else one column of a dataset
            if split is not None and str(source.split) != split:
                raise DataError(f"this dataset is the split {source.split}: leave out split={split!r}")
            return "", source
    _refuse(what, split=split)
    if is_frame(source):
        return "", frame_rows(source)
    if hasattr(source, "tolist"):
        source = source.tolist()  # an array, or a data frame's column
    if isinstance(source, Mapping):
        raise DataError("load: one dict is one row: give a list of them, [{'prompt': …}, …]")
    if not isinstance(source, Iterable):
        raise DataError(f"load: cannot read {what}: give a dataset, a hub id, a path, a data frame or a list")
    rows = (_list_row(item, i) for i, item in enumerate(source))
    return "", list(rows) if isinstance(source, Sequence) else rows


def as_encoded(table: Any, columns: Iterable[Any]) -> Any:
    """Return a table whose columns of these names give the bytes of images, videos and sounds, where `datasets` would
    decode them."""
    features = getattr(table, "features", None) or {}
    for name in columns:
        kind: Any = features.get(name) if isinstance(name, str) else None
        many = type(kind).__name__ in ("List", "Sequence")
        if (what := type(kind.feature if many else kind).__name__) in ("Image", "Video", "Audio"):
            encoded = getattr(needed("datasets", "images, videos or sounds of a dataset"), what)(decode=False)
            table = table.cast_column(name, type(kind)(encoded) if many else encoded)
    return table


def _of_path(source: str | Path, split: str | None, config: str | None, revision: str | None) -> tuple[str, Any]:
    text = str(Path(source).expanduser())
    path = Path(text)
    if path.exists():
        _refuse(f"the path {path.name}", revision=revision)
    if path.is_dir() and any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        _refuse(f"the saved dataset {path.name}", config=config)
        saved = _by_datasets("load_from_disk", text)
        if isinstance(saved, Mapping):
            return path.name, _chosen_split(saved, split)
        _refuse(f"the saved dataset {path.name}, which is one split,", split=split)
        return path.name, saved
    if path.is_file():
        _refuse(f"the file {path.name}", split=split, config=config)
        return path.stem, _read(path)
    if any(c in text for c in "*?["):
        _refuse(f"the files {source}", split=split, config=config, revision=revision)
        paths = sorted(Path(p) for p in glob.glob(text, recursive=True) if Path(p).is_file())
        if not paths:
            raise DataError(f"no file matches {text}")
        return path.parent.name or "files", [row for one in paths for row in _read(one)]
    if not path.is_dir() and (isinstance(source, Path) or path.suffix in READERS or text.startswith(("/", "."))):
        near = nearest(path.name, (p.name for p in path.parent.iterdir())) if path.parent.is_dir() else ""
        raise DataError(f"no file {path}{near}")
    place = text if path.is_dir() else str(source)
    loaded = _by_datasets("load_dataset", place, config, split=split, revision=revision)
    return path.name, _chosen_split(loaded, None) if isinstance(loaded, Mapping) else loaded


def _by_datasets(function: str, source: str, *args: Any, **options: Any) -> Any:
    """What a function of the datasets library, which raises anything, makes of a folder or a hub id."""
    datasets = needed("datasets", f"load({source!r})")
    try:
        return getattr(datasets, function)(source, *args, **options)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise DataError(f"load: datasets cannot read {source!r}: {type(error).__name__}: {reason}") from error


def _chosen_split(splits: Mapping[str, Any], split: str | None) -> Any:
    names = ", ".join(splits)
    if split is None and len(splits) != 1:
        raise DataError(f"it has the splits {names}: give one, as split={next(iter(splits), 'train')!r}")
    chosen = next(iter(splits)) if split is None else split
    if chosen not in splits:
        raise DataError(f"no split {chosen!r}: it has {names}{nearest(chosen, splits)}")
    return splits[chosen]


def _list_row(item: Any, index: int) -> Row:
    """A list's item as a row: a dict is one; a text, chat, list of token ids or Prompt is a prompt."""
    if isinstance(item, Prompt):
        own = {"prompt": item.content, "label": item.label}
        own |= {kind.columns[0]: held for name, kind in KINDS.items() if (held := getattr(item, name))}
        for name in own.keys() & set(item.meta):
            raise DataError(f"item {index}: the prompt's meta has {name!r}, which is its own field: rename it")
        return {**item.meta, **own}
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
    if any(key in (table.schema.metadata or {}) for key in OWN_KEYS.values()):
        raise DataError(f"{path} holds rollouts or a batch, not prompts: read it with its class's from_parquet(path)")
    return list(table.to_pylist())


def _read_lines(path: Path) -> list[Row]:
    with open(path, encoding="utf-8-sig") as file:
        return [_parsed(line, f"{path} line {number}") for number, line in enumerate(file, start=1) if line.strip()]


def _read_json(path: Path) -> list[Row]:
    """A list of objects; else one object per line under the wrong suffix, which is common, or objects over several
    lines, one after the other."""
    text = path.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        return list(_parsed(text, str(path)))
    first = text.lstrip().partition("\n")[0].rstrip()
    return _read_objects(text, path) if first.startswith("{") and not first.endswith("}") else _read_lines(path)


def _read_objects(text: str, path: Path) -> list[Row]:
    decoder, at, rows = json.JSONDecoder(object_pairs_hook=_object), 0, []
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        where = f"{path}: the object that begins in line {text.count(chr(10), 0, at) + 1}"
        try:
            row, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise DataError(f"{where} is not JSON: {error}. {WANTED}") from None
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        rows.append(row)
    return rows


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON: {error}. {WANTED}") from None
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object; of a key that is there twice one value would be lost."""
    made = dict(pairs)
    if len(made) < len(pairs):
        check_once([name for name, _ in pairs], "an object")
    return made


def _read_csv(path: Path) -> list[Row]:
    """Rows by the names in the first line; every value is text, as the file has it."""
    limit = csv.field_size_limit(sys.maxsize)  # a long prompt is no error; the limit is the whole process's
    rows: list[Row] = []
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
            check_once(reader.fieldnames or (), str(path))
            for row in reader:
                if None in row or None in row.values():
                    count = len(reader.fieldnames or ())
                    raise DataError(f"{path}: the row that ends in line {reader.line_num} has not {count} columns")
                rows.append(row)
    except csv.Error as error:
        raise DataError(f"{path} is not CSV: {error}") from None
    finally:
        csv.field_size_limit(limit)
    return rows


READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
}


def _refuse(what: str, **options: str | None) -> None:
    for name, value in options.items():
        if value is not None:
            raise DataError(f"load: {what} has no {name}: leave out {name}={value!r}")

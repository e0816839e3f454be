"""Read the rows of a dataset: local files, a directory of them, or a dataset of the Hub.

This module reads JSONL, CSV and TSV itself, so that an error names the line or row, and text stays text ("007"). The
library `datasets` reads all other formats.
"""

from __future__ import annotations

import csv
import glob
import importlib.util
import io
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import constants

from slipstream.config.schema import ConfigError
from slipstream.config.suggestions import suggest
from slipstream.environments.text_limits import is_encodable
from slipstream.model.paths import hub_answers

BUILDERS = {".parquet": "parquet", ".json": "json", ".arrow": "arrow"}  # of `datasets`
READERS = (".jsonl", ".csv", ".tsv")
BATCH_ROWS = 256  # with images, read at once
SPLITS = ("train", "test", "validation")
KNOWN = (*READERS, *BUILDERS)
FORMATS = ", ".join(KNOWN)
Numbered = tuple[int, Any]  # number of a line or row, and its content: a mapping of columns, or a `ValueError`


class Part(NamedTuple):
    """The rows of one file, or of one split of a dataset."""

    where: str
    unit: str  # "line" or "row"
    rows: Sequence[Numbered]
    folder: Path  # of relative paths of images


Read = Callable[[str], list[Part]]  # reads one split, with the images of the column of this name, if any


def find_splits(dataset: str, subset: str = "") -> dict[str, Read]:
    """A function for each split of a dataset, by name, that reads it. Raises `ConfigError` without such a dataset.

    The split of a local file is the first of `SPLITS` that is a word of its name, else "train".
    """
    path = Path(dataset).expanduser()
    if subset and (path.exists() or glob.glob(str(path))):  # noqa: PTH207
        raise ConfigError(f"environment.subset = {subset!r} is for datasets of the Hub; {dataset!r} is local")
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():  # written by `save_to_disk`
        return _datasets_splits(dataset, lambda library: library.load_from_disk(str(path)))
    if files := _files(path):
        splits: dict[str, list[Path]] = {}
        for file in files:
            words = re.split("[^a-z]+", file.stem.lower())
            splits.setdefault(next((name for name in SPLITS if name in words), "train"), []).append(file)
        folder = path if path.is_dir() else None
        return {name: partial(_read_files, files, folder) for name, files in splits.items()}
    if path.suffix in KNOWN or dataset.count("/") > 1 or dataset.startswith((".", "/", "~")):
        near = suggest(path.name, [file.name for file in path.parent.glob("*")])
        raise ConfigError(f"dataset {dataset!r}: there is no such file or directory{near}, and no such name on the Hub")
    if not constants.HF_HUB_OFFLINE and not hub_answers():
        raise ConfigError(
            f"dataset {dataset!r}: there is no such file or directory, and {constants.ENDPOINT} can't be reached; "
            "give a local file, or set HF_HUB_OFFLINE=1 if the dataset is in the cache"
        )
    return _datasets_splits(dataset, lambda library: library.load_dataset(dataset, subset or None))


def _files(path: Path) -> list[Path]:
    """The file, all files of a known format in the directory, or all files that match the pattern (maybe none).

    Raises `ConfigError` for a file of another format, and for a directory without a file of a known one.
    """
    if not path.is_dir():
        found = glob.glob(str(path), recursive=True)  # noqa: PTH207, since a pattern may be absolute
        files = [path] if path.is_file() else sorted(file for file in map(Path, found) if file.is_file())
        if unknown := next((str(file) for file in files if file.suffix not in KNOWN), ""):
            raise ConfigError(f"dataset {unknown!r}: its format is not known by its suffix; it is one of {FORMATS}")
        return files
    files = sorted(file for file in path.rglob("*") if file.suffix in KNOWN)
    if not files:
        raise ConfigError(f"dataset {str(path)!r}: the directory has no file of the formats {FORMATS}")
    return files


def _read_files(files: Sequence[Path], folder: Path | None, images: str) -> list[Part]:
    """The rows of the files. Paths of images are relative to the folder, by default to that of each file."""
    parts = []
    for file in files:
        if file.suffix in BUILDERS:
            found = _load(str(file), partial(_load_file, file))
            parts += _read_split(str(file), found, folder or file.parent, images)
        else:
            unit = "line" if file.suffix == ".jsonl" else "row"
            rows = read_lines(file) if unit == "line" else _read_csv(file)
            parts.append(Part(str(file), unit, rows, folder or file.parent))
    return parts


def _load_file(file: Path, library: Any) -> Any:
    return library.load_dataset(BUILDERS[file.suffix], data_files=glob.escape(str(file)), split="train")


def _datasets_splits(dataset: str, load: Callable[[Any], Any]) -> dict[str, Read]:
    found = _load(dataset, load)
    named = found if isinstance(found, dict) else {"train": found}
    folder = Path(dataset)
    return {name: partial(_read_split, f"{dataset}, split {name}", each, folder) for name, each in named.items()}


def _read_split(where: str, split: Any, folder: Path, images: str) -> list[Part]:
    """The rows of a split. Drops columns of images, sound and the like, except the column `images`.

    Images in this column, and in columns of tables such as messages, stay encoded: mappings with "bytes" and "path".
    Raises `ConfigError` without the column `images`.
    """
    if images and not {images, images.partition(".")[0]} & {*split.features}:  # rows lack the columns that are dropped
        raise ConfigError(f"environment.images: {where}: {_no_column(images, split.column_names)}")
    encoded = [n for n, f in split.features.items() if _has_images(f) and (n == images or not _is_media(_element(f)))]
    dropped = [n for n, f in split.features.items() if n not in encoded and _is_media(_element(f))]
    decoded = split.remove_columns([*encoded, *dropped])
    rows = [*decoded] if decoded.column_names else [{} for _ in range(len(split))]
    if encoded:
        batches = split.select_columns(encoded).with_format("arrow").iter(BATCH_ROWS)
        found = [row for batch in batches for row in batch.to_pylist()]
        rows = [row | more for row, more in zip(rows, found, strict=True)]
    return [Part(where, "row", [*enumerate(rows, 1)], folder)]


def _is_media(feature: Any) -> bool:
    """Whether a feature of `datasets` is an image, a sound or the like, which takes long to decode."""
    return hasattr(type(feature), "decode_example") and type(feature).__name__ != "Json"


def _element(feature: Any) -> Any:
    """The feature of the elements of a list, or of lists of lists; other features unchanged."""
    if isinstance(feature, list):
        return _element(feature[0])
    return _element(feature.feature) if hasattr(feature, "feature") else feature


def _has_images(feature: Any) -> bool:
    """Whether a feature is an image, or a list or table with one."""
    feature = _element(feature)
    if isinstance(feature, Mapping):
        return any(map(_has_images, feature.values()))
    return type(feature).__name__ == "Image"


def _load(dataset: str, load: Callable[[Any], Any]) -> Any:
    """What `load` returns, given the module `datasets`. Raises `ConfigError` with the first cause of any failure."""
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(f"dataset {dataset!r} needs the library datasets: pip install 'slipstream-rl[data]'")
    import datasets

    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # it logs what it raises, too
    if Path(dataset).exists():
        datasets.disable_progress_bars()
    try:
        return load(datasets)
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__:
            cause = cause.__cause__
        reason = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        raise ConfigError(f"dataset {dataset!r} can't be loaded: {reason:.300}") from None


def column_value(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of "a.b" in column "a". Raises `ValueError` if there is none."""
    value: Any = row
    for key in [name] if name in row else name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(_no_column(name, [*value] if isinstance(value, Mapping) else []))
        value = value[key]
    return value


def _no_column(name: str, columns: Sequence[str]) -> str:
    return f"it has no column {name!r}{suggest(name, columns)}; there are {', '.join(columns) or 'none'}"


def _read_csv(path: Path) -> list[Numbered]:
    """Rows after the header, numbered from 1, all values as text; one with too many or too few is a `ValueError`.

    The delimiter of a .tsv is a tab, that of a .csv the most frequent one in the header. Raises `ConfigError` for a
    file that is not CSV, or has two columns of one name.
    """
    text = _read_text(path)
    header = text[: text.find("\n")]
    csv.field_size_limit(sys.maxsize)
    delimiter = "\t" if path.suffix == ".tsv" else max(",;\t|", key=header.count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        if twice := [name for name, count in Counter(reader.fieldnames or ()).items() if count > 1]:
            raise ConfigError(f"{path}, line 1: more than one column is named {twice[0]!r}; rename them")
        return [(number, _row_or_fault(row)) for number, row in enumerate(reader, 1)]
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: not CSV: {error}; correct it") from None


def _row_or_fault(row: dict[Any, Any]) -> Any:
    """The row of a CSV file, or a `ValueError` if it has another number of values than the header."""
    more, less = len(row.get(None, ())), sum(value is None for value in row.values())
    columns = len(row) - (None in row)
    if more or less:
        return ValueError(f"it has {columns + more - less} values for {columns} columns")
    return row


def _read_text(path: Path) -> str:
    """The text of a file in UTF-8. Raises `ConfigError`."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a file that can be read") from None


def read_lines(path: Path) -> list[Numbered]:
    """Line number and JSON of a file's lines; a `ValueError` in the place of invalid JSON. Blank lines are skipped."""
    lines = _read_text(path).split("\n")  # splitlines also splits at U+2028, which JSON allows
    return [(number, _parsed(line)) for number, line in enumerate(lines, 1) if line.strip()]


def _parsed(line: str) -> Any:
    try:
        value = json.loads(line)
        if "\\u" in line and not is_encodable(json.dumps(value, ensure_ascii=False)):
            return ValueError("it holds half of a surrogate pair")
        return value
    except json.JSONDecodeError as error:
        return ValueError(f"not JSON ({error.msg} at column {error.colno})")
    except (ValueError, RecursionError):
        return ValueError("not JSON (a number or a nesting is too long)")

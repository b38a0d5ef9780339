"""Rows with named fields, streamed from JSON Lines, Parquet and saved Hugging Face datasets.

Memory stays bounded: a line, a batch of rows, or the dataset's own memory map at a time. Of columnar files only the
wanted columns are read. `datasets` is needed for its own format alone, so it is imported when that is met.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.errors import UserError
from tightfit.train.data.source_files import decode, open_bytes
from tightfit.train.data.sources import Source

ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class Row:
    """The fields of one row, where it stands, and its share of the source's bytes (for progress)."""

    fields: Mapping[str, Any]
    where: str
    source_bytes: float


def read_rows(source: Source, wanted: Sequence[str]) -> Iterator[Row]:
    """The rows of `source` in order. Columnar files give the `wanted` fields they have and must have one of them."""
    match source.kind:
        case "jsonl":
            rows = _json_lines(source.path)
        case "parquet":
            rows = _parquet(source.path, wanted)
        case "saved":
            rows = _saved_dataset(source.path, wanted)
        case _:
            raise AssertionError(f"{source.kind} has no rows")
    row = None
    for row in rows:
        yield row
    if row is None:
        raise UserError(f"{source.path} has no rows; remove it from the data or fill it")


def missing_fields(where: str, wanted: Sequence[str], present: Sequence[str]) -> UserError:
    """The error of a row or file without any of the `wanted` fields."""
    has = f"it has {', '.join(map(repr, present))}" if present else "it has none at all"
    if len(wanted) == 1:
        return UserError(f"{where} has no field {wanted[0]!r} ({has}); name the field that holds the text")
    return UserError(f"{where} has none of the fields {', '.join(map(repr, wanted))} ({has}); rename its fields")


def _json_lines(path: Path) -> Iterator[Row]:
    with open_bytes(path) as file:
        offset = file.tell()
        for number, line in enumerate(file, start=1):
            text = decode(line, path, offset)
            offset += len(line)
            if text.strip():
                where = f"{path} line {number}"
                yield Row(_object(text, where), where, len(line))


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where} is not valid JSON ({error.msg} at column {error.colno}); correct that line"
        ) from error
    except RecursionError as error:
        raise UserError(f"{where} is nested too deeply to be read as JSON; flatten or remove that line") from error
    if not isinstance(value, dict):
        raise UserError(f"{where} holds a JSON {type(value).__name__}; each line must be an object with named fields")
    return value


def _parquet(path: Path, wanted: Sequence[str]) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path} needs the package pyarrow to be read; run: pip install pyarrow") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = _columns(path, wanted, file.schema_arrow.names)
            share = path.stat().st_size / max(file.metadata.num_rows, 1)
            batches = (batch.to_pylist() for batch in file.iter_batches(ROWS_AT_ONCE, columns=columns))
            yield from _numbered(path, batches, share)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as Parquet ({_first_line(error)}); write or fetch it again") from error


def _saved_dataset(path: Path, wanted: Sequence[str]) -> Iterator[Row]:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{path} is a saved Hugging Face dataset, which needs a package to be read; run: pip install datasets"
        ) from error
    if not any(path.rglob("*.arrow")):
        return  # `datasets` itself fails to load a dataset it saved without rows
    try:
        loaded = datasets.load_from_disk(str(path))
        dataset = _train_split(loaded, path) if isinstance(loaded, datasets.DatasetDict) else loaded
        dataset = dataset.select_columns(_columns(path, wanted, dataset.column_names))
        share = sum(size for _, size, _ in Source(path, "saved").stamps()) / max(len(dataset), 1)
        yield from _numbered(path, (_transposed(batch) for batch in dataset.iter(ROWS_AT_ONCE)), share)
    except UserError:
        raise
    except Exception as error:  # whatever a damaged dataset makes of its many readers
        raise UserError(f"{path} cannot be read as a saved dataset ({_first_line(error)}); save it again") from error


def _train_split(splits: Mapping[str, Any], path: Path) -> Any:
    if "train" not in splits:
        names = ", ".join(map(repr, splits))
        raise UserError(f"{path} has the splits {names} and no 'train'; name the directory of one split instead")
    return splits["train"]


def _columns(path: Path, wanted: Sequence[str], present: Sequence[str]) -> list[str]:
    columns = [name for name in wanted if name in present]
    if not columns:
        raise missing_fields(str(path), wanted, present)
    return columns


def _numbered(path: Path, batches: Iterator[list[dict[str, Any]]], share: float) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for fields in batch:
            number += 1
            yield Row(fields, f"{path} row {number}", share)


def _transposed(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")

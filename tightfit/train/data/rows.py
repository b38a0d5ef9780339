"""Rows with named fields, streamed from JSON, comma-separated values, Parquet and saved Hugging Face datasets.

Memory stays bounded whatever the file: the length of a line is limited, and of columnar files few rows are decoded at
once, fewer where a single value could be large (a few kB of Parquet can hold gigabytes of equal strings). Only the
wanted columns are read. `datasets` is needed for its own format alone, so it is imported only for that.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightfit.bounded_files import require_regular
from tightfit.errors import UserError
from tightfit.train.data.compressed import USUAL_EXPANSION, is_compressed
from tightfit.train.data.row_text import TextRow, json_document, json_lines, separated_values
from tightfit.train.data.sources import Source

ROWS_AT_ONCE = 16
"""More would be no faster: reading takes 10 µs a row at this size, tokenizing a short row some 100."""
BATCH_BYTES = 2**29
"""Bytes of the rows decoded at once, in the worst case: every row as large as its column of a whole row group."""


@dataclass(frozen=True)
class Row:
    """The fields of one row, its place in the source, and its share of the source's bytes (for progress)."""

    fields: Mapping[str, Any]
    where: str
    source_bytes: float


def read_rows(source: Source, wanted: Sequence[str]) -> Iterator[Row]:
    """The rows of `source` in order. Of columnar files only the `wanted` fields are read; at least one must exist."""
    match source.kind:
        case "jsonl":
            rows = _text_rows(source, json_lines(source.path))
        case "json":
            rows = _text_rows(source, json_document(source.path))
        case "csv" | "tsv":
            rows = _text_rows(source, separated_values(source.path, "," if source.kind == "csv" else "\t"))
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


def _text_rows(source: Source, rows: Iterator[TextRow]) -> Iterator[Row]:
    expansion = USUAL_EXPANSION if is_compressed(source.path) else 1
    return (Row(fields, where, row_bytes / expansion) for fields, where, row_bytes in rows)


CONVERSATIONS = (
    ("messages",),
    ("conversations",),
    ("instruction", "output"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
)
"""Fields by which conversations are recognised; the first match counts."""


def missing_fields(where: str, wanted: Sequence[str], present: Sequence[str]) -> UserError:
    """The error of a row or file without any of the `wanted` fields."""
    has = f"it has {', '.join(map(repr, present))}" if present else "it has none at all"
    if len(wanted) == 1 and any(set(fields) <= set(present) for fields in CONVERSATIONS):
        return UserError(
            f"{where} has no field {wanted[0]!r} but a conversation ({has}); train on it with objective: sft, evaluate "
            "on it with --chat, give other commands plain text, or name the field that holds text"
        )
    if len(wanted) == 1:
        return UserError(f"{where} has no field {wanted[0]!r} ({has}); name the field that holds the text")
    return UserError(f"{where} has none of the fields {', '.join(map(repr, wanted))} ({has}); rename its fields")


def _parquet(path: Path, wanted: Sequence[str]) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path} needs the package pyarrow to be read; run: pip install pyarrow") from error
    try:
        size = require_regular(path)
        with pyarrow.parquet.ParquetFile(path, buffer_size=2**20) as file:
            columns = _columns(path, wanted, file.schema_arrow.names)
            share = size / max(file.metadata.num_rows, 1)
            rows = _rows_at_once(file.metadata, columns)
            batches = (batch.to_pylist() for batch in file.iter_batches(rows, columns=columns, use_threads=False))
            yield from _numbered(path, batches, share)
    except UserError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise UserError(f"{path} cannot be read as Parquet ({_first_line(error)}); write or fetch it again") from error


def _rows_at_once(metadata: Any, columns: Sequence[str]) -> int:
    """How many rows to decode together: a value is at most as large as its column of a row group, uncompressed."""
    largest = 1
    for group in (metadata.row_group(index) for index in range(metadata.num_row_groups)):
        for column in (group.column(index) for index in range(group.num_columns)):
            if column.path_in_schema.split(".")[0] in columns:
                largest = max(largest, column.total_uncompressed_size)
    return max(1, min(ROWS_AT_ONCE, BATCH_BYTES // largest))


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
        for file in sorted(path.rglob("*.arrow")):
            _check_arrow(file)
        loaded = datasets.load_from_disk(str(path))
        dataset = _train_split(loaded, path) if isinstance(loaded, datasets.DatasetDict) else loaded
        dataset = dataset.select_columns(_columns(path, wanted, dataset.column_names))
        share = sum(size for _, size, _ in Source(path, "saved").stamps()) / max(len(dataset), 1)
        yield from _numbered(path, (_transposed(batch) for batch in dataset.iter(ROWS_AT_ONCE)), share)
    except UserError:
        raise
    except Exception as error:  # the readers of a damaged dataset may raise anything
        raise UserError(f"{path} cannot be read as a saved dataset ({_first_line(error)}); save it again") from error


def _check_arrow(path: Path) -> None:
    """Read the file once without mapping it: reading past the end of a truncated mapped file kills the process.

    That takes a second per GB, where tokenizing takes minutes.
    """
    import pyarrow

    require_regular(path)
    with pyarrow.OSFile(str(path)) as file, pyarrow.ipc.open_stream(file) as reader:
        for batch in reader:
            batch.validate(full=True)


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

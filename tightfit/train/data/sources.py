"""The names a user gives as data, turned into an ordered list of files.

A name is a file, a pattern of names (`notes/**/*.jsonl.gz`), a directory (searched recursively, in the order of its
paths), a dataset saved by Hugging Face `datasets`, or `stdlib`: the prose of `pydoc_data` and the source of Python's
own standard library, text that every machine has. (A file called stdlib is named ./stdlib.) Files may be compressed
(.gz, .zst). In a directory, hidden and empty files and those of no supported suffix are skipped, as are runs (one may
write below its own data), and links to directories are not followed; .json, .csv and .tsv are skipped as well, which
are more often settings and tables than documents: they must be named, or matched by a pattern. A file that is named
must be usable. Beside the marks of saved datasets and runs nothing is read here.
"""

import importlib.util
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Literal

from tightfit.bounded_files import user_path
from tightfit.errors import UserError
from tightfit.jobs.paths import JOB_FILE, is_run_file
from tightfit.printable import printable
from tightfit.train.data.compressed import inner_name, is_compressed

Kind = Literal["text", "topics", "jsonl", "json", "csv", "tsv", "parquet", "saved"]
ROW_SUFFIXES: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".parquet": "parquet",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
}
SEARCHED: tuple[Kind, ...] = ("text", "jsonl", "parquet")
"""The kinds of files that a directory is searched for."""
PROSE_SUFFIXES = frozenset({".txt", ".text", ".md", ".markdown", ".rst", ".tex"})
CODE_SUFFIXES = frozenset(
    {".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".java", ".js", ".ts", ".go", ".rs", ".rb"}
    | {".sh", ".sql", ".r", ".jl", ".lua", ".php", ".kt", ".swift", ".scala", ".cs"}
)
TEXT_SUFFIXES = PROSE_SUFFIXES | CODE_SUFFIXES
STANDARD_LIBRARY = "stdlib"
NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "lib-dynload", "__pycache__", "test", "tests", "idle_test"}
    | {"encodings", "msilib", "pydoc_data"}  # tables of codes, not language; the topics' text is read from the module
)


@dataclass(frozen=True)
class Source:
    """One file, or one saved dataset, and how to read it."""

    path: Path
    kind: Kind

    @property
    def has_rows(self) -> bool:
        """Whether the source consists of rows with named fields."""
        return self.kind not in ("text", "topics")

    def stamps(self) -> Iterator[tuple[str, int, int]]:
        """Path, size and time of change (ns) of every file, by which a change of the source is noticed."""
        for path in sorted(self.path.rglob("*")) if self.kind == "saved" else [self.path]:
            if path.is_file():
                stat = path.stat()
                yield printable(str(path.resolve())), stat.st_size, stat.st_mtime_ns


def find_sources(names: Sequence[str], *, rows_only: bool = False) -> list[Source]:
    """The sources behind `names`, in order; `rows_only` refuses plain text if named, and skips it in directories."""
    if not names:
        raise UserError("no data is named; give at least one file, directory, saved dataset or 'stdlib'")
    return [source for name in names for source in _find(name, rows_only)]


def _find(name: str, rows_only: bool) -> list[Source]:
    if name == STANDARD_LIBRARY:
        found = list(_standard_library())
    elif matches := matching(name):
        found = [source for match in matches for source in _find(match, rows_only)]
    elif (path := user_path(name, "data")).is_dir():
        found = [source for source in _in_directory(path) if source.has_rows or not rows_only]
        if not found:
            raise UserError(f"{path} is a directory without usable files; supported are {_supported(rows_only)}")
    else:
        found = [_named_file(path, rows_only)]
    if rows_only and not found[0].has_rows:
        raise UserError(f"{name} is plain text, but chats are rows with roles; give {_supported(rows_only)}")
    return found


def matching(name: str) -> list[str]:
    """The files that match the pattern `name`, sorted; empty where it is no pattern or a file of that very name."""
    if not has_magic(name) or user_path(name, "data").exists():
        return []
    found = sorted(path for path in glob(os.path.expanduser(name), recursive=True) if not Path(path).is_dir())
    if not found:
        raise UserError(f"no file matches {name!r:.200}; check the pattern and the directory it begins in")
    return found


def _named_file(path: Path, rows_only: bool) -> Source:
    if not path.exists():
        raise UserError(f"{path} does not exist; name a file, a directory, a saved dataset or 'stdlib'")
    kind = _kind_of(path)
    if kind is None:
        raise UserError(f"{path} has the unsupported suffix {path.suffix!r}; supported are {_supported(rows_only)}")
    if not path.is_file():
        raise UserError(f"{path} is not a regular file; copy its contents to a file and name that")
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty; remove it from the data or fill it")
    return Source(path, kind)


def _kind_of(path: Path) -> Kind | None:
    suffix = inner_name(path).suffix.lower()
    kind = "text" if suffix in TEXT_SUFFIXES else ROW_SUFFIXES.get(suffix)
    return None if kind == "parquet" and is_compressed(path) else kind


def _supported(rows_only: bool) -> str:
    rows = f"{', '.join(ROW_SUFFIXES)}, datasets saved with save_to_disk"
    return rows if rows_only else f"{rows} and plain text ({', '.join(sorted(TEXT_SUFFIXES))})"


def _in_directory(directory: Path) -> Iterator[Source]:
    if _is_saved_dataset(directory):
        yield Source(directory, "saved")
        return
    if is_run_file(directory / JOB_FILE):
        return
    try:
        entries = sorted(directory.iterdir())
    except OSError as error:
        raise UserError(f"{directory} cannot be listed ({error.strerror}); check its permissions") from error
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir() and not entry.is_symlink():
            yield from _in_directory(entry)
        elif (kind := _kind_of(entry)) in SEARCHED and entry.is_file() and entry.stat().st_size > 0:
            yield Source(entry, kind)


def _is_saved_dataset(directory: Path) -> bool:
    """Whether Hugging Face `datasets` saved the directory: one dataset, or a dictionary of splits."""
    one = (directory / "state.json").is_file() and (directory / "dataset_info.json").is_file()
    return one or (directory / "dataset_dict.json").is_file()


def _standard_library() -> Iterator[Source]:
    """The topics of `help()`, then every source file but tests and files that describe this machine."""
    try:
        spec = importlib.util.find_spec("pydoc_data.topics")
    except ImportError:
        spec = None
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(_library_files(root))
    if spec is None or spec.origin is None or not files:
        missing = "the sources (.py)" if spec is not None else "pydoc_data"
        raise UserError(f"data 'stdlib' needs {missing} of Python, which {root} lacks; name other data")
    yield Source(Path(spec.origin), "topics")
    yield from (Source(path, "text") for path in files)


def _library_files(root: Path) -> Iterator[Path]:
    for directory, folders, names in os.walk(root):
        folders[:] = [folder for folder in folders if folder not in NOT_LIBRARY and not folder.startswith("config-")]
        for path in (Path(directory, name) for name in names if name.endswith(".py")):
            if not path.name.startswith("_sysconfigdata") and path.stat().st_size > 0:
                yield path

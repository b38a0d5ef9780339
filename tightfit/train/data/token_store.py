"""TokenStore: a tokenised corpus in memory-mapped files, read by position or by document.

    store/
        manifest.json            the recipe it was made from, and names and sizes of its files
        tokens-00000.bin …       token ids, little-endian uint16 or uint32, every shard but the last equally long
        mask-00000.bin …         chats only: one byte per token, 1 where the assistant speaks
        document_starts.npy      int64 [documents + 1], the last entry being the number of tokens

Opening checks every file's size against the manifest, so a truncated or missing file is found before training starts;
bytes changed in place are not detected, as that would mean reading everything.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

FORMAT = 1
MANIFEST, DOCUMENT_STARTS = "manifest.json", "document_starts.npy"


class DamagedStoreError(Exception):
    """The files of a store are not those its manifest describes."""


class Recipe(BaseModel):
    """All inputs that determine a store's tokens; equal recipes share one store."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    format: int = FORMAT
    kind: Literal["text", "chats"]
    field: str | None
    tokenizer: str
    eos_id: int | None
    dtype: Literal["uint16", "uint32"]
    sources: tuple[tuple[str, int, int], ...]
    """Path, size and time of change (ns) of every file."""

    @property
    def key(self) -> str:
        """The name of this recipe's directory in the cache."""
        return f"{self.kind}-{hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:32]}"


class Manifest(BaseModel):
    """Recipe, sizes and digest of a store."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    recipe: Recipe
    tokens_total: int
    documents: int
    tokens_per_shard: int
    files: dict[str, int]
    """Size in bytes of every other file."""
    largest_id: int
    largest_id_where: str
    content_sha256: str


@dataclass(frozen=True, eq=False)
class TokenStore:
    """The tokens of all documents one after another, and the start of each document (plus the end of the last)."""

    manifest: Manifest
    document_starts: np.ndarray
    shards: tuple[np.ndarray, ...]
    masks: tuple[np.ndarray, ...]

    @property
    def tokens_total(self) -> int:
        """Tokens of all documents."""
        return self.manifest.tokens_total

    @property
    def documents(self) -> int:
        """How many documents (or conversations) there are."""
        return self.manifest.documents

    @property
    def fingerprint(self) -> str:
        """The same for the same tokens, wherever the files lie."""
        return self.manifest.content_sha256

    @property
    def has_masks(self) -> bool:
        """Whether the store holds conversations, whose tokens have a mask of those to learn."""
        return self.manifest.recipe.kind == "chats"

    def document(self, index: int) -> np.ndarray:
        """Tokens of document `index`."""
        return self.slice(*self._bounds(index))

    def mask(self, index: int) -> np.ndarray:
        """For each token of conversation `index`, whether the assistant says it."""
        assert self.has_masks, "plain text has no masks"
        return self._read(self.masks, *self._bounds(index)).astype(bool)

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Tokens start … stop − 1 of the whole stream; a view where they lie in one shard."""
        return self._read(self.shards, start, stop)

    def _bounds(self, index: int) -> tuple[int, int]:
        assert 0 <= index < self.documents, f"document {index} of {self.documents}"
        return int(self.document_starts[index]), int(self.document_starts[index + 1])

    def _read(self, files: tuple[np.ndarray, ...], start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self.tokens_total, f"tokens {start} to {stop} of {self.tokens_total}"
        size = self.manifest.tokens_per_shard
        first, last = start // size, max(start, stop - 1) // size
        if first == last:
            return files[min(first, len(files) - 1)][start - first * size : stop - first * size]
        parts = [files[i][max(start - i * size, 0) : stop - i * size] for i in range(first, last + 1)]
        return np.concatenate(parts)


def open_store(directory: Path) -> TokenStore:
    """The store in `directory`; DamagedStoreError where it is not whole, FileNotFoundError where there is none."""
    if not directory.is_dir():
        raise FileNotFoundError(directory)
    try:
        manifest = Manifest.model_validate_json((directory / MANIFEST).read_bytes())
        for name, size in manifest.files.items():
            if (found := (directory / name).stat().st_size) != size:
                raise DamagedStoreError(f"{directory / name} has {found} bytes instead of {size}")
        starts = np.load(directory / DOCUMENT_STARTS, mmap_mode="r", allow_pickle=False)
        _check_starts(starts, manifest)
        shards = _map_files(directory, manifest, "tokens", np.dtype(manifest.recipe.dtype).newbyteorder("<"))
        masks = _map_files(directory, manifest, "mask", np.dtype(np.uint8)) if manifest.recipe.kind == "chats" else ()
    except (OSError, ValueError, SyntaxError, TokenError) as error:  # the last two from numpy's .npy header
        raise DamagedStoreError(str(error)) from error
    return TokenStore(manifest, np.asarray(starts), shards, masks)


def shard_name(stem: str, index: int) -> str:
    """The name of shard `index`."""
    return f"{stem}-{index:05d}.bin"


def _map_files(directory: Path, manifest: Manifest, stem: str, dtype: np.dtype) -> tuple[np.ndarray, ...]:
    total, size = manifest.tokens_total, manifest.tokens_per_shard
    names = [shard_name(stem, index) for index in range(-(-total // size))]
    mapped = tuple(np.asarray(np.memmap(directory / name, dtype=dtype, mode="r")) for name in names)
    if sum(map(len, mapped)) != total or any(len(part) != size for part in mapped[:-1]):
        raise DamagedStoreError(f"{directory} does not hold {total} tokens")
    return mapped


def _check_starts(starts: np.ndarray, manifest: Manifest) -> None:
    whole = starts.dtype == np.int64 and starts.shape == (manifest.documents + 1,)
    if not whole or starts[0] != 0 or starts[-1] != manifest.tokens_total or (np.diff(starts) <= 0).any():
        raise DamagedStoreError("the document starts do not fit the manifest")

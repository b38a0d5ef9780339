"""ShardWriter: writes the files of a TokenStore in one pass, with memory that does not grow with the tokens."""

import hashlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tightfit.train.data.token_store import DOCUMENT_STARTS, MANIFEST, Manifest, Recipe, shard_name

TOKENS_PER_SHARD = 2**27
"""256 or 512 MiB a file: few files for a large corpus, and any file system takes them."""


class ShardWriter:
    """Takes tokens piece by piece and document by document; `finish` leaves a complete store in `directory`."""

    def __init__(self, directory: Path, recipe: Recipe, tokens_per_shard: int = TOKENS_PER_SHARD) -> None:
        self.directory, self.recipe, self.tokens_per_shard = directory, recipe, tokens_per_shard
        self.tokens_total = 0
        self.largest_id, self.largest_id_where = -1, ""
        self._starts = array("q", [0])
        self._content = hashlib.sha256()
        self._tokens = _Shards(directory, "tokens", tokens_per_shard)
        self._masks = _Shards(directory, "mask", tokens_per_shard) if recipe.kind == "chats" else None

    @property
    def documents(self) -> int:
        """Documents ended so far."""
        return len(self._starts) - 1

    def add(self, ids: Sequence[int], where: str, mask: Sequence[bool] | None = None) -> None:
        """Append `ids`, from `where` in the source, to the open document."""
        assert (mask is None) == (self._masks is None), "conversations need masks, and only they have them"
        if not ids:
            return
        wide = np.asarray(ids, dtype=np.int64)
        if (largest := int(wide.max())) > self.largest_id:
            self.largest_id, self.largest_id_where = largest, where
        self._append(self._tokens, wide.astype(np.dtype(self.recipe.dtype).newbyteorder("<")))
        if self._masks is not None:
            self._append(self._masks, np.asarray(mask, dtype=np.uint8))
        self.tokens_total += len(ids)

    def end_document(self, where: str = "", eos_id: int | None = None) -> None:
        """End the open document, with `eos_id` if there is one; a document without tokens is not recorded."""
        if self.tokens_total == self._starts[-1]:
            return
        if eos_id is not None:
            self.add([eos_id], where)
        self._starts.append(self.tokens_total)

    def finish(self) -> None:
        """Close the shards, and write document starts and manifest."""
        self.close()
        starts = np.frombuffer(self._starts, dtype=np.int64)
        np.save(self.directory / DOCUMENT_STARTS, starts, allow_pickle=False)
        self._content.update(starts.astype("<i8").tobytes())
        manifest = Manifest(
            recipe=self.recipe,
            tokens_total=self.tokens_total,
            documents=self.documents,
            tokens_per_shard=self.tokens_per_shard,
            files={path.name: path.stat().st_size for path in sorted(self.directory.iterdir())},
            largest_id=self.largest_id,
            largest_id_where=self.largest_id_where,
            content_sha256=self._content.hexdigest(),
        )
        (self.directory / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")

    def close(self) -> None:
        """Close the open files."""
        self._tokens.close()
        if self._masks is not None:
            self._masks.close()

    def _append(self, shards: "_Shards", values: np.ndarray) -> None:
        shards.append(values)
        self._content.update(values.tobytes())


class _Shards:
    """Files of `size` values each, filled one after another."""

    def __init__(self, directory: Path, stem: str, size: int) -> None:
        self.directory, self.stem, self.size = directory, stem, size
        self.written = 0
        self.file: BinaryIO | None = None

    def append(self, values: np.ndarray) -> None:
        while len(values):
            room = self.size - self.written % self.size
            if room == self.size:
                self.close()
                self.file = (self.directory / shard_name(self.stem, self.written // self.size)).open("wb")
            assert self.file is not None
            self.file.write(values[:room].tobytes())
            self.written += min(room, len(values))
            values = values[room:]

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

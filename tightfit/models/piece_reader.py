"""Reading a checkpoint in pieces without running anything that is in it.

The index of torch.distributed.checkpoint (`.metadata`) is a pickle, which torch (2.11 to 2.13) reads as it is: a pickle
can name any function and have it called. And what the index calls bytes rather than a tensor, torch unpickles freely as
well. `PieceReader` reads the index with the few plain types in it that describe tensors and nothing else, so whatever
another file names is refused before it is looked up, and bytes are among it; pieces must lie beside the index. Tensors
themselves torch reads with `weights_only`.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

INDEX = ".metadata"
DESCRIBED = "torch.distributed.checkpoint.metadata"
PLAIN_TYPES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *((DESCRIBED, name) for name in ("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta")),
    *((DESCRIBED, name) for name in ("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
}
"""All that an index of tensors is made of. BytesStorageMetadata is not among them: torch unpickles what it names."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Called for every name in a pickle; anything but a description of tensors ends the reading."""
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if not is_dtype and (module, name) not in PLAIN_TYPES:
            raise pickle.UnpicklingError(f"its index names {module}.{name}, which does not describe a tensor")
        return super().find_class(module, name)


class PieceReader(FileSystemReader):
    """Torch's reader of a folder of pieces, with an index that cannot run code."""

    def read_metadata(self, *arguments: Any, **options: Any) -> Metadata:
        """The index, whoever wrote it; ValueError where it is not one of tensors."""
        try:
            with (Path(self.path) / INDEX).open("rb") as file:
                found = _IndexUnpickler(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, TypeError) as error:
            raise ValueError(str(error)) from None
        _require_tensors(found)
        if found.storage_meta is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


def _require_tensors(found: Any) -> None:
    """An index that is what its type says, of pieces that are beside it."""
    if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
        raise ValueError("its index is not one of tensors")
    if not all(isinstance(entry, TensorStorageMetadata) for entry in found.state_dict_metadata.values()):
        raise ValueError("its index has something else than tensors")
    for stored in found.storage_data.values():
        if (name := str(stored.relative_path)) != Path(name).name:
            raise ValueError(f"its index names the file {name}, which is not beside it")

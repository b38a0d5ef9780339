"""Reading a checkpoint in pieces without running anything that is in it.

The index of torch.distributed.checkpoint (`.metadata`) is a pickle, which torch (2.11 to 2.13) reads as it is: a pickle
can name any function and have it called. Entries that the index declares as bytes, not tensors, torch unpickles freely,
too. `PieceReader` has the index read by `piece_index.py`, which knows tensors and nothing else and checks that pieces
lie beside it. Tensors themselves torch reads with `weights_only`.
"""

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from tightfit.models.files.piece_index import read_index

INDEX = ".metadata"


class PieceReader(FileSystemReader):
    """Torch's reader of a folder of pieces, with an index that cannot run code, which is read once.

    ValueError where the index is not one of tensors, whoever wrote it; OSError where there is none.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.index = read_index(folder / INDEX)

    def read_metadata(self, *arguments: Any, **options: Any) -> Metadata:
        """Called by torch."""
        assert self.index.storage_meta is not None
        self.index.storage_meta.load_id = self.load_id
        return self.index

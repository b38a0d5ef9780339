"""An index of pieces cannot run code: what another one would do with the same file, ours refuses in a sentence."""

import os
import pickle
import random
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorProperties
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tests.speed import within_turns
from tightfit.errors import UserError
from tightfit.models.files.piece_reader import INDEX
from tightfit.models.files.sharded_weights import FOLDER, read_pieces, stored_tensors

NAME = "weights/norm.weight"
SAVED = {
    NAME: torch.arange(6.0).view(2, 3),
    **{f"of {dtype}": torch.ones(5).to(dtype) for dtype in (torch.bfloat16, torch.float16, torch.uint8, torch.int64)},
    "no dimension": torch.tensor(3.0),
}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "step-00000001"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(dict(SAVED), checkpoint_id=folder / FOLDER, no_dist=True)
    return folder


class Hostile:
    """Makes a directory when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.mark,)


def change_index(checkpoint: Path, change: Callable[[Any], Any]) -> None:
    path = checkpoint / FOLDER / INDEX
    index = pickle.loads(path.read_bytes())  # of our own test
    path.write_bytes(pickle.dumps(change(index)))


def read_with_torch(checkpoint: Path) -> None:
    load({NAME: torch.zeros(2, 3)}, storage_reader=FileSystemReader(checkpoint / FOLDER), no_dist=True)


def test_tensors_come_back_to_the_bit(checkpoint: Path) -> None:
    found = {name: torch.zeros_like(tensor) for name, tensor in SAVED.items()}
    read_pieces(found, checkpoint)
    assert all(found[name].equal(tensor) for name, tensor in SAVED.items())
    assert stored_tensors(checkpoint) == {name: (tensor.dtype, tensor.shape) for name, tensor in SAVED.items()}


@pytest.mark.parametrize("more", [(), ((3, 1),), (None,)], ids=["torch 2.11", "torch 2.15", "no strides"])
def test_an_index_of_any_torch_is_read(
    more: tuple[Any, ...], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer ones write strides besides."""
    written = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*written(self)[:5], *more))
    change_index(checkpoint, lambda index: index)
    monkeypatch.undo()
    found = {NAME: torch.zeros(2, 3)}
    read_pieces(found, checkpoint)
    assert found[NAME].equal(SAVED[NAME])


def test_a_hostile_index_is_not_run(checkpoint: Path, tmp_path: Path) -> None:
    change_index(checkpoint, lambda index: Hostile(tmp_path / "run by ours"))
    for read in (lambda: read_pieces({NAME: torch.zeros(2, 3)}, checkpoint), lambda: stored_tensors(checkpoint)):
        with pytest.raises(UserError, match=r"names (posix|os)\.mkdir, which does not describe a tensor"):
            read()
    assert not (tmp_path / "run by ours").exists()
    (checkpoint / FOLDER / INDEX).write_bytes(pickle.dumps(Hostile(tmp_path / "run by torch")))
    with pytest.raises(CheckpointException):
        read_with_torch(checkpoint)
    assert (tmp_path / "run by torch").is_dir(), "the file does run code where it is read as it is"


def test_bytes_in_a_tensor_s_place_are_not_run(checkpoint: Path, tmp_path: Path) -> None:
    """Torch unpickles what an index calls bytes: here, the whole of a piece."""

    def as_bytes(index: Any) -> Any:
        (key,) = (key for key in index.storage_data if key.fqn == NAME)
        stored = index.storage_data.pop(key)
        stored.relative_path, stored.offset = "hostile", 0
        torch.save(Hostile(tmp_path / "run"), checkpoint / FOLDER / "hostile")
        stored.length = (checkpoint / FOLDER / "hostile").stat().st_size
        index.storage_data[type(key)(NAME)] = stored
        index.state_dict_metadata[NAME] = BytesStorageMetadata()
        return index

    change_index(checkpoint, as_bytes)
    with pytest.raises(UserError, match=r"names torch\.\S+\.BytesStorageMetadata"):
        read_pieces({NAME: torch.zeros(2, 3)}, checkpoint)
    assert not (tmp_path / "run").exists()
    read_with_torch(checkpoint)
    assert (tmp_path / "run").is_dir(), "torch runs it"


@pytest.mark.parametrize("path", ["../elsewhere", "/etc/passwd"])
def test_pieces_are_beside_their_index(checkpoint: Path, path: str) -> None:
    def astray(index: Any) -> Any:
        next(iter(index.storage_data.values())).relative_path = path
        return index

    change_index(checkpoint, astray)
    with pytest.raises(UserError, match="which is not beside it"):
        read_pieces({NAME: torch.zeros(2, 3)}, checkpoint)


@pytest.mark.parametrize(
    "content", [b"", b"no pickle", pickle.dumps({"a": 1}), pickle.dumps(torch.Size([3]))[:-3], b"\x80\x04\x95\x01"]
)
def test_what_is_no_index_gets_a_sentence(checkpoint: Path, content: bytes) -> None:
    (checkpoint / FOLDER / INDEX).write_bytes(content)
    with pytest.raises(UserError, match="is damaged or of another model"):
        read_pieces({NAME: torch.zeros(2, 3)}, checkpoint)
    with pytest.raises(UserError, match="is damaged or of another model"):
        stored_tensors(checkpoint)


CRAFTED = {
    "an attribute of a class": b"cpathlib\nPosixPath\n(N}S'name'\nS'x'\nstb0.",
    "an attribute of a class, as unicode": b"cpathlib\nPosixPath\n}(X\x04\0\0\0nameX\x01\0\0\0xub.",
    "an attribute of a description": b"ctorch.distributed.checkpoint.metadata\nMetadata\n}(X\x01\0\0\0aK\x01ub.",
    "a class made with arguments": b"cpathlib\nPosixPath\n(X\x01\0\0\0at\x81.",
    "a persistent id": b"Pfile\n.",
    "an extension": b"\x82\x01.",
    "a byte array of 4 GB": b"\x96\0\0\0\0\x01\0\0\0.",
    "a memo of 4 GB": b"Nr\xff\xff\xff\x1f.",
    "bytes of 4 GB": b"\x8e\0\0\0\0\x01\0\0\0.",
    "text of 4 GB": b"X\xff\xff\xff\xffa.",
    "a frame of 4 GB": b"\x80\x04\x95\0\0\0\0\x01\0\0\0N.",
    "a key of tuples of tuples": b"}(" + b"(lt" + b"\x94h\x00h\x00\x86" * 200 + b"Nu.",
    "a size that is negative": b"ctorch\nSize\n(J\xff\xff\xff\xfftt R.".replace(b" ", b"\x85"),
    "nothing on the stack": b"R.",
    "an unknown instruction": b"\xfe.",
}


@pytest.mark.parametrize("content", CRAFTED.values(), ids=CRAFTED)
def test_crafted_pickles_change_nothing_and_take_no_memory(checkpoint: Path, content: bytes) -> None:
    (checkpoint / FOLDER / INDEX).write_bytes(content)
    before = {name: dict(vars(kind)) for name, kind in (("path", PosixPath), ("index", Metadata))}
    with within_turns(80):
        tracemalloc.start()
        with pytest.raises(UserError, match="is damaged or of another model"):
            stored_tensors(checkpoint)
        most_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most_bytes < 2**24
    assert {name: dict(vars(kind)) for name, kind in (("path", PosixPath), ("index", Metadata))} == before


def test_a_link_to_elsewhere_is_not_followed(checkpoint: Path, tmp_path: Path) -> None:
    (piece,) = (checkpoint / FOLDER).glob("*.distcp")
    piece.rename(tmp_path / "elsewhere.distcp")
    piece.symlink_to(tmp_path / "elsewhere.distcp")
    with pytest.raises(UserError, match="which is not beside it"):
        read_pieces({NAME: torch.zeros(2, 3)}, checkpoint)


def altered(index: Any, what: str) -> Any:
    """The index with one thing in it that cannot be."""
    tensor, stored = index.state_dict_metadata[NAME], next(iter(index.storage_data.values()))
    match what:
        case "beyond the end":
            stored.length = 10**12
        case "not make up the whole":
            tensor.chunks[0].sizes = torch.Size([1, 3])
        case "outside its tensor":
            tensor.chunks[0].offsets = torch.Size([1, 0])
        case "is missing":
            stored.relative_path = "absent.distcp"
        case "transformed":
            stored.transform_descriptors = ["zstd"]
        case "something else than tensors":
            tensor.chunks = None
    return index


@pytest.mark.parametrize(
    "what",
    [
        "beyond the end",
        "not make up the whole",
        "outside its tensor",
        "is missing",
        "transformed",
        "something else than tensors",
    ],
)
def test_an_index_that_cannot_be_true(checkpoint: Path, what: str) -> None:
    change_index(checkpoint, lambda index: altered(index, what))
    with pytest.raises(UserError, match=what):
        stored_tensors(checkpoint)


def test_every_byte_of_an_index_may_be_wrong(checkpoint: Path) -> None:
    path = checkpoint / FOLDER / INDEX
    content = path.read_bytes()
    chance = random.Random(3)
    refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        path.write_bytes(damaged)
        try:
            stored_tensors(checkpoint)
        except UserError:
            refused += 1
    assert refused > 100


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    with pytest.raises(UserError, match=r"sharded is damaged or of another model .*weights/absent"):
        read_pieces({"weights/absent": torch.zeros(2, 3)}, checkpoint)

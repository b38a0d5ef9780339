"""The index of a checkpoint in pieces, read so that it can do nothing but describe tensors.

Torch (2.11 to 2.15) keeps the index as a pickle, which is a program: it names functions to call, sets attributes of
whatever it can reach, and one instruction of nine bytes can ask for gigabytes. So a pickle is read here by Python's own
interpreter of pickles with most of its instructions taken out. What remains makes numbers, strings, tuples, lists,
dicts and the few types of torch that describe a tensor; attributes are set only on fresh objects of these types, and
only those that the type has; memory stays in proportion to the file. Then every field is checked: its type, that pieces
lie in files beside the index (links followed), within these files, and that they make up the whole of every tensor.

It costs 0.13 ms a piece on one slow core (1 s for an 8 B model of 8 ranks), much less than reading the pieces.
"""

import io
import math
import pickle
import struct
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tightfit.bounded_files import read_bounded

MOST_BYTES = 256 * 2**20
"""The largest index that is read: about a million pieces."""
DESCRIBED = "torch.distributed.checkpoint.metadata"
RECORDS: dict[tuple[str, str], type] = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    **{(DESCRIBED, kind.__name__): kind for kind in (ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta)},
    **{(DESCRIBED, kind.__name__): kind for kind in (TensorProperties, TensorStorageMetadata)},
}
"""The types an index is made of. BytesStorageMetadata is not among them: torch unpickles the bytes it names."""
FIELDS = {kind: frozenset(field.name for field in fields(kind)) for kind in RECORDS.values()}
FIELDS_OF_A_TENSOR = 5
WORDS = """
    PROTO FRAME STOP MARK POP MEMOIZE BINGET LONG_BINGET GET BINPUT LONG_BINPUT PUT
    NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 UNICODE BINUNICODE SHORT_BINUNICODE
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS
    GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD
"""
INSTRUCTIONS = frozenset(getattr(pickle, word)[0] for word in WORDS.split())
"""All that an index needs of pickle's instructions."""
_Interpreter: Any = pickle._Unpickler


DAMAGED = (
    *(EOFError, LookupError, TypeError, ValueError, AttributeError, RecursionError, MemoryError, OverflowError),
    struct.error,  # of an index that was cut within a number
)


def read_index(path: Path) -> Metadata:
    """The index at `path`; ValueError where it is not one of tensors in files beside it, OSError where unreadable."""
    content = read_bounded(path, MOST_BYTES, "an index of tensors")
    try:
        found = _Reader(content).load()
    except pickle.UnpicklingError as error:
        raise ValueError(str(error)) from None
    except DAMAGED as error:
        raise ValueError(f"its index is no list of tensors ({type(error).__name__})") from None
    _check(found, path.parent)
    return found


def _size(*arguments: Any) -> torch.Size:
    ((*numbers,),) = arguments
    if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
        raise pickle.UnpicklingError("its index has a size that is none")
    return torch.Size(numbers)


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise pickle.UnpicklingError("its index has a tensor that is not strided")
    return torch.strided


def _path(*parts: str) -> str:
    return "/".join(parts)


MAKERS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _layout,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): _path,
    ("pathlib", "PurePosixPath"): _path,
    (DESCRIBED, "_MEM_FORMAT_ENCODING"): _MEM_FORMAT_ENCODING,
}
"""The functions that an index calls, and those that are called instead."""


class _Reader(_Interpreter):
    """Python's pickle interpreter with INSTRUCTIONS alone, which act on plain values and RECORDS alone."""

    def __init__(self, content: bytes) -> None:
        self.content = io.BytesIO(content)
        super().__init__(self.content)

    def load(self) -> Any:
        """The object that the pickle makes, read straight from its bytes: frames only help with files."""
        self.read, self.readline = self.content.read, self.content.readline
        self.metastack: list[Any] = []
        self.stack: list[Any] = []
        self.proto = 0
        self.append = self.stack.append
        try:
            while code := self.read(1):
                self.dispatch[code[0]](self)
        except pickle._Stop as stop:  # type: ignore[attr-defined]
            return stop.value
        raise EOFError

    def skip_frame(self) -> None:
        self.read(8)

    def find_class(self, module: str, name: str) -> Any:
        """Called for every name in a pickle; anything but a description of tensors ends the reading."""
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        found = RECORDS.get((module, name)) or MAKERS.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"its index names {module}.{name}, which does not describe a tensor")
        return found

    def call(self) -> None:
        arguments = self.stack.pop()
        function = self.stack[-1]
        if not any(function is known for known in MAKERS.values()):
            raise pickle.UnpicklingError("its index calls something that makes no part of a tensor's description")
        self.stack[-1] = function(*arguments)

    def make(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if arguments != () or not any(kind is known for known in RECORDS.values()):
            raise pickle.UnpicklingError("its index makes an object that describes no tensor")
        self.stack.append(object.__new__(kind))

    def set_fields(self) -> None:
        state = self.stack.pop()
        record = self.stack[-1]
        if type(record) not in FIELDS or vars(record):
            raise pickle.UnpicklingError("its index changes an object that is not a fresh description of a tensor")
        for name, value in _state(record, state).items():
            object.__setattr__(record, name, value)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._put(key, value)

    def set_items(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._put(key, value)

    def make_dict(self) -> None:
        items = self.pop_mark()
        self.stack.append({})
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._put(key, value)

    def _put(self, key: Any, value: Any) -> None:
        """Set a dict's item; keys are strings or MetadataIndex only, as a deeply nested tuple takes forever to hash."""
        if type(self.stack[-1]) is not dict or type(key) not in (str, MetadataIndex):
            raise pickle.UnpicklingError("its index has a dict of something else than names")
        self.stack[-1][key] = value

    dispatch = {code: do for code, do in _Interpreter.dispatch.items() if code in INSTRUCTIONS}  # noqa: RUF012
    dispatch |= {pickle.REDUCE[0]: call, pickle.NEWOBJ[0]: make, pickle.BUILD[0]: set_fields}
    dispatch |= {pickle.SETITEM[0]: set_item, pickle.SETITEMS[0]: set_items, pickle.DICT[0]: make_dict}
    dispatch |= {pickle.FRAME[0]: skip_frame}


def _state(record: Any, state: Any) -> dict[str, Any]:
    """The attributes that `state` gives to `record`."""
    if isinstance(record, TensorProperties):
        dtype, layout, gradient, _, pinned = state[:FIELDS_OF_A_TENSOR]  # torch 2.15 has strides besides
        state = {"dtype": dtype, "layout": layout, "requires_grad": gradient, "pin_memory": pinned}
        state["memory_format"] = torch.contiguous_format
    if type(state) is not dict or not state.keys() <= FIELDS[type(record)]:
        raise pickle.UnpicklingError("its index gives a description fields that it does not have")
    if isinstance(record, MetadataIndex):  # a key: what it hashes must be plain
        _require(type(state.get("fqn")) is str and isinstance(state.get("offset"), torch.Size | None))
    return state


def _require(is_so: bool, what: str = "something else than tensors") -> None:
    if not is_so:
        raise ValueError(f"its index has {what}")


def _check(found: Any, folder: Path) -> None:
    """Refuse an index with a field of the wrong type, or pieces where there is no data; drop what is not needed."""
    _require(type(found) is Metadata)
    stored: Any = vars(found).get("storage_data")
    tensors: Any = vars(found).get("state_dict_metadata")
    _require(type(stored) is dict and type(tensors) is dict)
    for name, tensor in tensors.items():
        _check_tensor(name, tensor)
    sizes: dict[str, int] = {}
    for key, piece in stored.items():
        _require(type(key) is MetadataIndex and type(piece) is _StorageInfo)
        _check_piece(vars(piece), folder, sizes)
    found.planner_data = None  # nothing that reads tensors by name asks for it
    found.storage_meta, found.version = StorageMeta(), None


def _check_tensor(name: Any, tensor: Any) -> None:
    _require(type(name) is str and type(tensor) is TensorStorageMetadata)
    properties, size, chunks = (vars(tensor).get(part) for part in ("properties", "size", "chunks"))
    _require(type(properties) is TensorProperties and isinstance(vars(properties).get("dtype"), torch.dtype))
    _require(isinstance(size, torch.Size) and type(chunks) is list and bool(chunks))
    assert isinstance(size, torch.Size)
    assert isinstance(chunks, list)
    total = sum(math.prod(extent) for extent in _extents(size, chunks))
    _require(total == math.prod(size), f"pieces that do not make up the whole of {name}")


def _extents(size: torch.Size, chunks: list[Any]) -> Iterator[torch.Size]:
    for chunk in chunks:
        _require(type(chunk) is ChunkStorageMetadata)
        offsets, sizes = vars(chunk).get("offsets"), vars(chunk).get("sizes")
        _require(isinstance(offsets, torch.Size) and isinstance(sizes, torch.Size))
        assert isinstance(offsets, torch.Size)
        assert isinstance(sizes, torch.Size)
        inside = len(offsets) == len(sizes) == len(size)
        inside = inside and all(at + extent <= whole for at, extent, whole in zip(offsets, sizes, size, strict=True))
        _require(inside, "a piece that lies outside its tensor")
        yield sizes


def _check_piece(piece: dict[str, Any], folder: Path, sizes: dict[str, int]) -> None:
    """Refuse a piece that is no range of a file beside the index; `sizes` caches the sizes of files."""
    name: Any = piece.get("relative_path")
    offset: Any = piece.get("offset")
    length: Any = piece.get("length")
    _require(type(name) is str and type(offset) is int and type(length) is int)
    _require(not piece.get("transform_descriptors"), "pieces that are transformed")
    if name not in sizes:
        path = folder / name
        if "\0" in name or name in ("", ".", "..") or "/" in name or path.resolve().parent != folder.resolve():
            raise ValueError(f"its index names the file {name}, which is not beside it")
        _require(path.is_file(), f"a piece in {name}, which is missing")
        sizes[name] = path.stat().st_size
    _require(offset >= 0 and length >= 0 and offset + length <= sizes[name], f"a piece beyond the end of {name}")

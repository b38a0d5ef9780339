"""Weights in and out in Hugging Face's layout: safetensors files with their names, whole or in shards.

Files are untrusted: names, shapes and dtypes are checked against the model before a byte is copied, an index may only
name files beside it, and nothing is ever unpickled. Both directions go tensor by tensor: loading never holds a second
copy of the model, saving holds one file. A tied output projection is not written.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tightfit.collectives.shards import copy_whole
from tightfit.errors import UserError
from tightfit.models.blank import whole_state
from tightfit.models.decoder import Decoder
from tightfit.models.files.tensor_file import save_tensors
from tightfit.models.huggingface.families import FAMILIES
from tightfit.models.huggingface.mxfp4 import HALF_BLOCK, packed_names, unpacked, unpacked_shape
from tightfit.models.huggingface.weight_names import HEAD_MODULE, TensorMap, tensor_maps
from tightfit.models.resolve import read_config
from tightfit.models.spec import ModelSpec

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
READABLE_DTYPES = ("F64", "F32", "F16", "BF16")
HEAD = f"{HEAD_MODULE}.weight"
COMPARED_ROWS = 8192


def to_hf_state(model: Decoder | Mapping[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    """The tensors under Hugging Face's names: views of the decoder's where only the name differs."""
    state = model.state_dict() if isinstance(model, Decoder) else model
    return {mapping.theirs: _assemble(mapping, state) for mapping in _tensor_maps(spec, state)}


def load_weights(model: Decoder, directory: Path) -> None:
    """Fill `model` from the safetensors in `directory`, cast to the model's dtype."""
    state = whole_state(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("the model is on the meta device; call to_empty() on it before loading weights")
    files = _files(directory)
    where = {name: path for path, names in files.items() for name in names}
    packed = packed_names(where)
    stored_as = {part: where.pop(part) for parts in packed.values() for part in parts}
    where |= {name: stored_as[blocks] for name, (blocks, _) in packed.items()}
    found = _match(where, state, model.spec, str(directory))
    by_file: dict[Path, list[tuple[TensorMap, str]]] = {path: [] for path in files}
    for mapping, name in found:
        by_file[where[name]].append((mapping, name))
    for path, wanted in by_file.items():
        with _reading(path) as tensors:
            for mapping, name in wanted:
                if name in packed:
                    _check_packed(tensors, stored_as, packed[name], mapping, state, path)
                    continue
                stored = tensors.get_slice(name)
                _check_dtype(stored.get_dtype(), name, path)
                _check_shape(stored.get_shape(), mapping, name, state, str(path))
    if not state["embed.weight"].is_meta:
        require_tied(where, found, model.spec)
    for path, wanted in by_file.items():
        with _reading(path) as tensors, torch.no_grad():
            for mapping, name in wanted:
                if not all(state[ours].is_meta for ours in mapping.ours):
                    stored = _unpacked(tensors, stored_as, packed[name]) if name in packed else tensors.get_tensor(name)
                    _place(mapping, stored, state)


def _check_packed(
    tensors: Any,
    stored_as: Mapping[str, Path],
    names: tuple[str, str],
    mapping: TensorMap,
    state: Mapping[str, Tensor],
    path: Path,
) -> None:
    """The shapes and dtypes of MXFP4 blocks and their scales, which may be in another file."""
    blocks = tensors.get_slice(names[0])
    with _reading(stored_as[names[1]]) as others:
        scales = others.get_slice(names[1])
        kinds, groups = {blocks.get_dtype(), scales.get_dtype()}, list(scales.get_shape())
    if kinds != {"U8"} or list(blocks.get_shape()) != [*groups, HALF_BLOCK]:
        raise UserError(f"{names[0]} in {path} is not MXFP4 with its {names[1]}; download the model again")
    _check_shape(unpacked_shape(blocks.get_shape()), mapping, names[0], state, str(path))


def _unpacked(tensors: Any, stored_as: Mapping[str, Path], names: tuple[str, str]) -> Tensor:
    with _reading(stored_as[names[1]]) as others:
        return unpacked(tensors.get_tensor(names[0]), others.get_tensor(names[1]))


def save_weights(
    model: Decoder, directory: Path, *, dtype: torch.dtype | None = None, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Write the weights into `directory`, cast to `dtype` if given, in files of at most `max_shard_bytes`."""
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    shards = _split(_tensor_maps(model.spec, state), state, dtype, max_shard_bytes)
    directory.mkdir(parents=True, exist_ok=True)
    for name, shard in shards.items():
        tensors = {mapping.theirs: _assemble(mapping, state, dtype) for mapping in shard}
        save_tensors(tensors, directory / name, metadata={"format": "pt"})
    index = directory / INDEX_FILE
    if len(shards) > 1:
        index.write_text(_index(shards, state, dtype), encoding="utf-8")
    else:
        index.unlink(missing_ok=True)
    for path in directory.glob("model*.safetensors"):  # left by an earlier save, which a reader could take for this one
        if path.name not in shards:
            path.unlink()


def _tensor_maps(spec: ModelSpec, state: Mapping[str, Tensor]) -> list[TensorMap]:
    names = [name for name in state if not (spec.tied and name == "head.weight")]
    return tensor_maps(FAMILIES[spec.family].weights, names, spec.layers, spec.experts.count if spec.experts else 0)


def _match(
    names: Iterable[str], state: Mapping[str, Tensor], spec: ModelSpec, source: str
) -> list[tuple[TensorMap, str]]:
    """Every map of the model with its tensor's name in `names`; nothing may be missing, double or left over."""
    family, wanted = FAMILIES[spec.family], {mapping.theirs: mapping for mapping in _tensor_maps(spec, state)}
    found: dict[str, str] = {}
    spare: list[str] = []
    for name in names:
        canonical = _canonical(name, spec)
        if canonical in found:
            raise UserError(f"{source} has {canonical} twice, also as {name}; remove one of them")
        if canonical in wanted:
            found[canonical] = name
        elif not re.search(family.ignored, name) and not (spec.tied and canonical == HEAD):
            spare.append(name)
    missing = [name for name in wanted if name not in found]
    if missing or spare:
        told = [f"misses {_some(missing)}"] if missing else []
        told += [f"has {_some(spare)} that a {spec.family} model of this shape does not"] if spare else []
        raise UserError(f"{source} {' and '.join(told)}; config.json and weights must belong to the same model")
    return [(mapping, found[name]) for name, mapping in wanted.items()]


def _canonical(name: str, spec: ModelSpec) -> str:
    """The family's own name of a tensor, which some files give another prefix."""
    prefix, instead = next(((a, b) for a, b in FAMILIES[spec.family].prefixes if name.startswith(a)), ("", ""))
    return instead + name.removeprefix(prefix)


def require_tied(where: Mapping[str, Path], found: Iterable[tuple[TensorMap, str]], spec: ModelSpec) -> None:
    """Refuse a tied output projection that is stored all the same, and is not the embedding: it would be ignored."""
    if not spec.tied:
        return
    embedding = next(name for mapping, name in found if mapping.ours == ("embed.weight",))
    for head in [name for name in where if _canonical(name, spec) == HEAD]:
        with _reading(where[embedding]) as ours, _reading(where[head]) as theirs:
            pair = ours.get_slice(embedding), theirs.get_slice(head)
            shapes = [part.get_shape() for part in pair]
            equal = shapes[0] == shapes[1] and all(
                torch.equal(*(part[row : row + COMPARED_ROWS].float() for part in pair))
                for row in range(0, shapes[0][0], COMPARED_ROWS)
            )
        if not equal:
            raise UserError(
                f"{head} in {where[head]} is not {embedding}, to which config.json ties it; set tie_word_embeddings "
                "to false there, or remove it"
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _shape(mapping: TensorMap, state: Mapping[str, Tensor]) -> tuple[int, ...]:
    """The shape that the Hugging Face tensor must have."""
    shapes = [state[name].shape[mapping.expert is not None :] for name in mapping.ours]
    whole = list(shapes[0])
    whole[mapping.stacked] = sum(shape[mapping.stacked] for shape in shapes)
    if mapping.transposed:
        whole[-2:] = whole[-2:][::-1]
    return tuple(whole)


def _assemble(mapping: TensorMap, state: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """The Hugging Face tensor, cast to `dtype` if given; a view unless it is concatenated, transposed or cast."""
    parts = [state[name] if mapping.expert is None else state[name][mapping.expert] for name in mapping.ours]
    if len(parts) > 1:  # outputs of experts alternate, others follow each other
        parts = [torch.stack(parts, dim=2).flatten(1, 2) if mapping.stacked else torch.cat(parts)]
    whole = parts[0].mT if mapping.transposed and parts[0].ndim > 1 else parts[0]
    return whole.to(stored_dtype(mapping.ours[0], dtype) or whole.dtype).contiguous()


def stored_dtype(name: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype in which the decoder's parameter `name` is stored, where others are in `dtype`.

    The biases that correct the choice of experts stay float32: 16 bits would lose the steps in which they move.
    """
    return torch.float32 if dtype is not None and name.endswith(".correction") else dtype


def _pieces(mapping: TensorMap, tensor: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """The Hugging Face tensor split into the decoder's."""
    whole = tensor.mT if mapping.transposed and tensor.ndim > 1 else tensor
    if mapping.stacked:
        return whole.unflatten(1, (-1, len(mapping.ours))).unbind(2)
    return whole.split([state[name].shape[mapping.expert is not None] for name in mapping.ours])


def _place(mapping: TensorMap, tensor: Tensor, state: Mapping[str, Tensor]) -> None:
    for name, part in zip(mapping.ours, _pieces(mapping, tensor, state), strict=True):
        copy_whole(state[name], part, mapping.expert)


def _check_shape(shape: Iterable[int], mapping: TensorMap, name: str, state: Mapping[str, Tensor], source: str) -> None:
    wanted = _shape(mapping, state)
    if tuple(shape) != wanted:
        raise UserError(
            f"{name} in {source} has shape {tuple(shape)} where the model has {wanted}; "
            "config.json and weights must belong to the same model"
        )


def _check_dtype(dtype: str, name: str, path: Path) -> None:
    if dtype not in READABLE_DTYPES:
        raise UserError(
            f"{name} in {path} is stored as {dtype}, not as plain floating point; load the model that was quantized, "
            "not the quantized one"
        )


def _files(directory: Path) -> dict[Path, list[str]]:
    """The safetensors files of the checkpoint in `directory`, and the names of the tensors in each."""
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.is_file():
        with _reading(single) as tensors:
            return {single: list(tensors.keys())}
    if index.is_file():
        return _indexed(index)
    pickled = any(directory.glob("*.bin")) or any(directory.glob("*.pt*"))
    why = "; pickled weights are not loaded as they can run code: convert them to safetensors" if pickled else ""
    raise UserError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}{why or '; give a directory with weights'}")


def _indexed(index: Path) -> dict[Path, list[str]]:
    """The files an index names. They must lie beside it: an index is data, and may not reach elsewhere."""
    content = read_config(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        raise UserError(f"weight_map in {index} is not an object of tensor names and files; download the index again")
    files: dict[Path, list[str]] = {}
    for name, file in names.items():
        if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file) or file.startswith("."):
            raise UserError(
                f"{index} says {name} is in {file!r:.80}; that must be a .safetensors file beside the index"
            )
        files.setdefault(index.parent / file, []).append(name)
    for path, wanted in files.items():
        with _reading(path) as tensors:
            absent = sorted(set(wanted) - set(tensors.keys()))
        if absent:
            raise UserError(f"{path} misses {_some(absent)}, which {index.name} says it has; download both again")
    return files


@contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """The open safetensors file `path`."""
    try:
        with safe_open(path, framework="pt") as tensors:
            yield tensors
    except FileNotFoundError:  # safetensors says so of files that may not be read, too
        if path.exists():
            raise UserError(f"{path} may not be read by this user; see who may read it") from None
        raise UserError(f"{path} does not exist; download the model again") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error!s:.200}); it may be cut short, download it again") from None


def _split(
    all_maps: list[TensorMap], state: Mapping[str, Tensor], dtype: torch.dtype | None, most: int
) -> dict[str, list[TensorMap]]:
    """File names and what goes into each: as many whole tensors as fit, in order."""
    shards: list[list[TensorMap]] = [[]]
    held = 0
    for mapping in all_maps:
        size = _bytes(mapping, state, dtype)
        if shards[-1] and held + size > most:
            shards.append([])
            held = 0
        shards[-1].append(mapping)
        held += size
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _bytes(mapping: TensorMap, state: Mapping[str, Tensor], dtype: torch.dtype | None) -> int:
    stored = stored_dtype(mapping.ours[0], dtype) or state[mapping.ours[0]].dtype
    return math.prod(_shape(mapping, state)) * stored.itemsize


def _index(shards: dict[str, list[TensorMap]], state: Mapping[str, Tensor], dtype: torch.dtype | None) -> str:
    total = sum(_bytes(mapping, state, dtype) for shard in shards.values() for mapping in shard)
    names = {mapping.theirs: file for file, shard in shards.items() for mapping in shard}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}, indent=2) + "\n"

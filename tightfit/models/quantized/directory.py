"""Directories of quantized weights: a decoder from one, its weights one by one, and the tensors to write.

The names in the files are matched against the model as those of any other directory: a quantized module stands for the
weight it replaces, and nothing may be missing or left over.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from tightfit.collectives.shards import copy_whole
from tightfit.errors import UserError
from tightfit.models.blank import blank_decoder, whole_state
from tightfit.models.decoder import Decoder
from tightfit.models.huggingface import weights as plain_files
from tightfit.models.huggingface.families import FAMILIES
from tightfit.models.huggingface.weight_names import TensorMap, tensor_maps
from tightfit.models.quantized.coded_weight import CodedWeight, require_stacking, stack_rows
from tightfit.models.quantized.experts import QuantizedStack
from tightfit.models.quantized.formats.format import FileFormat
from tightfit.models.quantized.formats.registry import format_of
from tightfit.models.quantized.held_weights import refuse_tied_codes
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.quantized.scheme import Scheme
from tightfit.models.resolve import read_config
from tightfit.models.spec import ModelSpec


def is_quantized(directory: Path) -> bool:
    """Whether the config.json in `directory` says that weights are quantized, in a layout that can be loaded packed.

    MXFP4 (gpt-oss) cannot: it is dequantized to 16 bits on reading (huggingface/mxfp4.py).
    """
    config = read_config(directory / "config.json")
    described = config.get("quantization_config") if isinstance(config, dict) else None
    return isinstance(described, dict) and described.get("quant_method") != "mxfp4"


class QuantizedDirectory:
    """The quantized model in a directory: which modules are coded and how, and each of its tensors."""

    def __init__(self, directory: Path, spec: ModelSpec) -> None:
        self.path, self.spec = directory, spec
        self.config = read_config(directory / "config.json")["quantization_config"]
        self.format = format_of(self.config, str(directory))
        self._file_of = {name: path for path, names in plain_files._files(directory).items() for name in names}
        ends = tuple(f".{mark}" for mark in self.format.marks)
        self.modules = {_without(name, ends) for name in self._file_of if name.endswith(ends)}
        self.shapes = shapes_of(spec)
        self.tensor_maps = plain_files._match(self._collapsed(), self.shapes, spec, str(directory))
        if any(plain_files._canonical(f"{module}.weight", spec) == plain_files.HEAD for module in self.modules):
            refuse_tied_codes(spec, directory)
        plain_files.require_tied(self._file_of, self.tensor_maps, spec)

    def _collapsed(self) -> list[str]:
        """The names that an unquantized model of the same modules would have."""
        ends = tuple(f".{suffix}" for suffix in self.format.suffixes)
        own = {name for name in self._file_of if name.endswith(ends) and _without(name, ends) in self.modules}
        return [name for name in self._file_of if name not in own] + [f"{module}.weight" for module in self.modules]

    def scheme(self, module: str) -> Scheme:
        """The scheme of a quantized module."""
        return self.format.scheme(self.config, module)

    def is_coded(self, name: str) -> bool:
        """Whether the weight of this name is quantized."""
        return name.removesuffix(".weight") in self.modules and name.endswith(".weight")

    def coded(self, link: TensorMap, name: str) -> CodedWeight:
        """The quantized weight `name`, checked to have the model's shape."""
        module = name.removesuffix(".weight")
        tensors = {
            suffix: self._read(f"{module}.{suffix}")
            for suffix in self.format.suffixes
            if f"{module}.{suffix}" in self._file_of
        }
        scheme = self.scheme(module)
        weight = self.format.read(tensors, scheme, module)
        wide = plain_files._shape(link, self.shapes)
        wanted = wide[::-1] if link.transposed else wide
        scales = (weight.shape[0], scheme.groups(weight.shape[1])) if scheme.group >= 0 else (1, 1)
        if weight.shape != wanted or tuple(weight.scale.shape) not in (
            scales,
            (wanted[0], 1) if scheme.group < 0 else scales,
        ):
            raise UserError(
                f"{module} in {self.path} holds {list(weight.shape)} codes and {list(weight.scale.shape)} scales where "
                f"the model has {list(wanted)}; config.json and weights must belong to the same model"
            )
        return weight

    def plain(self, link: TensorMap, name: str) -> Tensor:
        """The unquantized tensor `name`, checked to have the model's shape."""
        path = self._file_of[name]
        with plain_files._reading(path) as tensors:
            stored = tensors.get_slice(name)
            plain_files._check_dtype(stored.get_dtype(), name, path)
            plain_files._check_shape(stored.get_shape(), link, name, self.shapes, str(path))
        return self._read(name)

    def _read(self, name: str) -> Tensor:
        with plain_files._reading(self._file_of[name]) as tensors:
            tensor: Tensor = tensors.get_tensor(name)
            return tensor

    def rows_of(self, link: TensorMap, weight: CodedWeight) -> Iterator[tuple[str, CodedWeight]]:
        """The decoder's parameters in a coded weight, several where the family stacks them."""
        start = 0
        for ours in link.ours:
            count = self.shapes[ours].shape[-2]
            yield ours, weight if len(link.ours) == 1 else weight.rows(start, start + count)
            start += count


def load_quantized(directory: Path, spec: ModelSpec, device: str | torch.device, dtype: torch.dtype) -> Decoder:
    """The decoder in `directory` with its quantized layers packed and everything else in `dtype`."""
    files = QuantizedDirectory(directory, spec)
    model = blank_decoder(spec, "meta", dtype)
    coded = {ours for link, name in files.tensor_maps if files.is_coded(name) for ours in link.ours}
    for ours in coded:
        replace_module(model, ours, nn.Identity())
    model.to_empty(device=device)
    if spec.tied:
        model.head.weight = model.embed.weight
    _put_coded(model, files, device, dtype)
    state = model.state_dict()
    with torch.no_grad():
        for link, name in files.tensor_maps:
            if not files.is_coded(name):
                plain_files._place(link, files.plain(link, name), state)
    return model


def _put_coded(model: Decoder, files: QuantizedDirectory, device: str | torch.device, dtype: torch.dtype) -> None:
    """Put quantized layers, their biases still empty, and stacks of quantized experts into `model`."""
    stacks: dict[str, list[CodedWeight]] = {}
    for link, name in files.tensor_maps:
        if not files.is_coded(name):
            continue
        for ours, weight in files.rows_of(link, files.coded(link, name)):
            if link.expert is not None:
                stacks.setdefault(ours, []).append(weight.to(device))
                continue
            shape = files.shapes.get(f"{ours.removesuffix('.weight')}.bias")
            bias = None if shape is None else torch.empty(shape.shape, device=device, dtype=dtype)
            replace_module(model, ours, QuantizedLinear(weight.to(device), bias))
    for ours, weights in stacks.items():
        replace_module(model, ours, QuantizedStack(weights, dtype))


def fill_dequantized(model: Decoder, directory: Path) -> None:
    """Copy the dequantized weights of `directory` into an ordinary decoder, to train it or write it elsewhere."""
    files = QuantizedDirectory(directory, model.spec)
    state = whole_state(model)
    with torch.no_grad():
        for link, name in files.tensor_maps:
            if all(state[ours].is_meta for ours in link.ours):
                continue
            if not files.is_coded(name):
                plain_files._place(link, files.plain(link, name), state)
                continue
            for ours, weight in files.rows_of(link, files.coded(link, name)):
                copy_whole(state[ours], weight.dequantize(), link.expert)


def tensors_to_write(
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    coded: Mapping[str, CodedWeight | list[CodedWeight]],
    form: FileFormat,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Some of the model's parameters under Hugging Face's names: `state` in `dtype`, `coded` in the layout `form`."""
    written: dict[str, Tensor] = {}
    for link in written_links(spec, [*state, *coded]):
        parts = [coded.get(ours) for ours in link.ours]
        if all(part is None for part in parts):
            written[link.theirs] = plain_files._assemble(link, state, dtype)
            continue
        module = link.theirs.removesuffix(".weight")
        weights = [part[link.expert or 0] if isinstance(part, list) else part for part in parts if part is not None]
        require_stacking([None if part is None else weights[0].scheme for part in parts], module)
        tensors = form.encode(stack_rows(weights, module))
        written |= {f"{module}.{suffix}": tensor.contiguous().cpu() for suffix, tensor in tensors.items()}
    return written


def written_links(spec: ModelSpec, names: Iterable[str]) -> list[TensorMap]:
    """Maps of the Hugging Face tensors in which the decoder's parameters `names` are written."""
    kept = [name for name in names if not (spec.tied and name == "head.weight")]
    return tensor_maps(FAMILIES[spec.family].weights, kept, spec.layers, spec.experts.count if spec.experts else 0)


def shapes_of(spec: ModelSpec) -> dict[str, Tensor]:
    """The state dict of a decoder of this shape, without memory."""
    return blank_decoder(spec, "meta", torch.float32).state_dict()


def module_schemes(spec: ModelSpec, schemes: Mapping[str, Scheme]) -> tuple[dict[str, Scheme], list[str]]:
    """Schemes by Hugging Face's module names, and the linear modules of layers that stay plain; refused where parts of
    one module cannot be coded as one."""
    by_module: dict[str, Scheme] = {}
    plain: list[str] = []
    shapes = shapes_of(spec)
    for link in written_links(spec, shapes):
        module = link.theirs.removesuffix(".weight")
        parts = [name.removesuffix(".weight") for name in link.ours]
        ours = parts[0]
        if any(part in schemes for part in parts):
            require_stacking([schemes.get(part) for part in parts], module)
            by_module[module] = schemes[ours]
        elif link.theirs.endswith(".weight") and ours.startswith("layers.") and len(shapes[link.ours[0]].shape) > 1:
            plain.append(module)
    return by_module, plain


def module_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of every matrix of the layers and of the output projection, by Hugging Face's module names."""
    shapes, by_module = shapes_of(spec), {}
    for link in written_links(spec, [name for name in shapes if name.startswith(("layers.", "head."))]):
        shape = plain_files._shape(link, shapes)
        if len(shape) == 2:
            by_module[link.theirs.removesuffix(".weight")] = shape[::-1] if link.transposed else shape
    return by_module


def transformers_limit(form: FileFormat, spec: ModelSpec, schemes: Mapping[str, Scheme], plain: Iterable[str]) -> str:
    """Why transformers does not load a model of this shape from the layout `form`, given the schemes of its coded
    modules and its plain ones by Hugging Face's names; empty where nothing is known against it."""
    if form.name != "gptq" and any(link.transposed for link in written_links(spec, shapes_of(spec))):
        told = f"it has no linear layers in {spec.family} models, and leaves their codes out"
        return f"{told}; use --format gptq, in one width"
    return form.transformers_limit(schemes, plain)


def _without(name: str, ends: tuple[str, ...]) -> str:
    """`name` without the longest of these endings."""
    return name.removesuffix(max((end for end in ends if name.endswith(end)), key=len))


def replace_module(model: Decoder, ours: str, module: nn.Module) -> None:
    """Put a module where the layer with the weight `ours`, or the stacked parameter `ours`, is."""
    parent, _, name = ours.removesuffix(".weight").rpartition(".")
    holder = model.get_submodule(parent)
    holder._parameters.pop(name, None)
    setattr(holder, name, module)

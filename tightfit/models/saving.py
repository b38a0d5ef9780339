"""Export of models to other programs: a Hugging Face directory or a GGUF file, written whole or not at all."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tightfit.durable import durable_directory, require_new
from tightfit.errors import UserError
from tightfit.models.base_model import is_adapted
from tightfit.models.decoder import Decoder
from tightfit.models.files.checksums import list_beside, write_checksums, write_file_checksum
from tightfit.models.huggingface.adapter import WEIGHTS_FILE
from tightfit.models.huggingface.adapter_config import CONFIG_FILE
from tightfit.models.huggingface.config import config_from_spec
from tightfit.models.huggingface.weights import save_weights
from tightfit.models.loading import load_model, verify_weights, weights_path
from tightfit.models.spec import ModelSpec
from tightfit.models.text.tokenizer import Tokenizer
from tightfit.writer_lock import locked_beside

ExportDtype = Literal["fp32", "bf16", "fp16", "q8_0"]
WIDER = "choose --dtype bf16 or fp32"
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Export:
    """What was written where."""

    path: Path
    params: int
    bytes: int
    transformers_limit: str = ""
    """Why transformers does not load it, where that is known."""


def write_model(folder: Path, model: Decoder, tokenizer: Tokenizer | None, dtype: torch.dtype | None = None) -> None:
    """Write config.json, weights and tokenizer in Hugging Face layout into an existing directory."""
    write_config(folder, model.spec, tokenizer, dtype or model.embed.weight.dtype)
    save_weights(model, folder, dtype=dtype)
    if tokenizer is not None:
        tokenizer.save(folder)


def write_config(folder: Path, spec: ModelSpec, tokenizer: Tokenizer | None, dtype: torch.dtype) -> None:
    """Write config.json alone."""
    special = {} if tokenizer is None else {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    config = config_from_spec(spec, dtype=str(dtype).removeprefix("torch."), extra=special)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def export_model(
    source: str, target: Path, *, form: Literal["hf", "gguf"], dtype: ExportDtype, verified: bool = True
) -> Export:
    """Load the model at `source` and write it to `target`, which must not exist."""
    require_new(target)
    if form == "hf" and dtype == "q8_0":
        raise UserError("dtype q8_0 is a GGUF format; add --format gguf or choose fp32, bf16 or fp16")
    loaded = load_model(source, packed=False, verified=verified)
    if dtype in ("fp16", "q8_0"):
        require_float16(loaded.model, source, WIDER)
    with writing_new(target):
        if form == "hf":
            with durable_directory(target) as folder:
                write_model(folder, loaded.model, loaded.tokenizer, TORCH_DTYPES[dtype])
                write_checksums(folder)
        else:
            from tightfit.models.gguf.model import write_gguf

            list_beside(target).unlink(missing_ok=True)  # the list of an earlier file of this name
            write_gguf(loaded.model, loaded.tokenizer, target, dtype)
            write_file_checksum(target)
    files = [target] if target.is_file() else [path for path in target.rglob("*") if path.is_file()]
    return Export(target, loaded.model.spec.params(), sum(path.stat().st_size for path in files))


def require_float16(model: Decoder, source: str, remedy: str) -> None:
    """Refuse weights that float16 cannot hold, in which they or the scales of their codes are to be written."""
    for name, tensor in model.state_dict().items():
        require_float16_tensor(name, tensor, source, remedy)


def require_float16_tensor(name: str, tensor: Tensor, source: str, remedy: str) -> None:
    """Refuse one tensor that float16 cannot hold."""
    for end in torch.aminmax(tensor):  # both are NaN where anything is
        if not end.abs() <= torch.finfo(torch.float16).max:
            raise UserError(f"{name} of {source} has a weight of {float(end):g}, which no float16 can be; {remedy}")


def export_adapter(source: str, target: Path, *, verified: bool = True) -> Export:
    """Write the adapter of the run or checkpoint `source` to `target` as PEFT has it, without its model."""
    require_new(target)
    path = weights_path(source)
    if not is_adapted(path):
        raise UserError(f"{source} is a model and no adapter; leave --format peft out, or name a run of adapters")
    if verified:
        verify_weights(path)
    with writing_new(target), durable_directory(target) as folder:
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            shutil.copyfile(path / name, folder / name)
        write_checksums(folder)
    with safe_open(target / WEIGHTS_FILE, framework="pt") as tensors:
        shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118 (it is no dict)
    size = sum(file.stat().st_size for file in target.iterdir())
    return Export(target, sum(rows * columns for rows, columns in shapes), size)


@contextmanager
def writing_new(target: Path) -> Iterator[None]:
    """Lock `target` while the body creates it; turn errors of a full or unwritable disk into a UserError."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked_beside(target):
            require_new(target)  # another process may have made it meanwhile
            yield
    except (OSError, SafetensorError) as error:
        reason: object = error
        if isinstance(error, OSError):  # numpy's for a full disk has no strerror
            reason = error.strerror or f"the disk took only a part of it ({error})"
        raise UserError(f"cannot write {target}: {reason}; choose a place that is writable and has room") from error

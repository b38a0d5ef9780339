"""Directories that other packages have made, loaded by us: the logits are theirs.

The packages are not installed with the tests; where they are, these run. Each makes its directory from the same tiny
model with its own functions, and its own reader computes what is compared with.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.compress.conftest import SPEC, random_model
from tests.compress.test_compression import TOKENS
from tightfit.models.loading import load_model
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.saving import write_model
from tightfit.models.text.tokenizer import Tokenizer


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(TOKENS).logits.float()
    return found


def by_bitsandbytes(tiny: Path, folder: Path) -> Tensor:
    pytest.importorskip("bitsandbytes")
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny, quantization_config=config, dtype=torch.float32, device_map="cpu"
    )
    model.save_pretrained(folder)
    return logits_of(model)


def by_plain_bitsandbytes(tiny: Path, folder: Path) -> Tensor:
    """Scales in float32, not coded themselves."""
    pytest.importorskip("bitsandbytes")
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny, quantization_config=config, dtype=torch.float32, device_map="cpu"
    )
    model.save_pretrained(folder)
    return logits_of(model)


def by_llm_compressor(tiny: Path, folder: Path, scheme: str = "", **weights: Any) -> Tensor:
    """Rounded to nearest: with weights as described, or by a scheme of its own with a name."""
    pytest.importorskip("llmcompressor")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    if scheme:
        modifier = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
    else:
        described = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=4, **weights))
        modifier = QuantizationModifier(config_groups={"all": described}, ignore=["lm_head"])
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    oneshot(model=model, recipe=modifier)
    wanted = logits_of(model)
    model.save_pretrained(folder, save_compressed=True)
    return wanted


def by_gptqmodel(tiny: Path, folder: Path, **more: Any) -> Tensor:
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it asks for two on every machine
    pytest.importorskip("gptqmodel")
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    config = QuantizeConfig(bits=4, group_size=32, desc_act=False, sym=True, **more)
    model = GPTQModel.load(str(tiny), config, device="cpu", dtype=torch.float32)
    rows = [torch.randint(0, 250, (64,), generator=torch.Generator().manual_seed(i)) for i in range(8)]
    model.quantize([{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows], batch_size=1)
    model.save(str(folder))
    read = GPTQModel.load(str(folder), device="cpu", backend=BACKEND.TORCH, dtype=torch.float16)  # it has no float32
    return logits_of(read.model)


MAKERS: dict[str, Callable[[Path, Path], Tensor]] = {
    "bitsandbytes": by_bitsandbytes,
    "bitsandbytes, plain scales": by_plain_bitsandbytes,
    "llm-compressor": partial(by_llm_compressor, strategy="group", group_size=32, symmetric=True),
    "llm-compressor asymmetric": partial(by_llm_compressor, strategy="group", group_size=32, symmetric=False),
    "llm-compressor w8a8": partial(by_llm_compressor, scheme="W8A8"),
    "llm-compressor fp8": partial(by_llm_compressor, scheme="FP8_DYNAMIC"),
    "gptqmodel": by_gptqmodel,
    "gptqmodel head": partial(by_gptqmodel, lm_head=True),
}


COMPUTED_IN_FLOAT16 = ("gptqmodel", "gptqmodel head")
ROUNDED_INPUTS = ("llm-compressor w8a8", "llm-compressor fp8")
"""By a scale per token: where a sum differs in its last bit, a number may go to the next code."""


@pytest.mark.parametrize("name", MAKERS)
def test_their_directories_are_read(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    has_head = name.endswith("head")
    write_model(tmp_path / "model", random_model(replace(SPEC, tied=not has_head)), tokenizer)
    theirs = MAKERS[name](tmp_path / "model", tmp_path / "theirs")
    model = load_model(str(tmp_path / "theirs")).model
    coded = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert len(coded) == 7 * SPEC.layers + has_head
    ours = logits_of(model)
    near = 1e-2 if name in (*COMPUTED_IN_FLOAT16, *ROUNDED_INPUTS) else 2e-3
    assert float((ours - theirs).abs().max()) < near * float(theirs.abs().max())

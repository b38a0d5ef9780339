"""Other packages' methods that work on a whole Hugging Face model: their own order of layers, their own pipeline.

They get the same model in float32 and the same calibration rows; what they make of the weights and norms goes back into
our decoder, which is judged like every other. llm-compressor's SmoothQuant moves the scales, and both sides are then
rounded as ours are. Of LLM.int8 the layers themselves stand in our decoder, as they round what goes into them.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tightfit.compress.recipe import Step
from tightfit.models.decoder import Decoder
from tightfit.models.quantized.linear import quantize_linear
from tightfit.models.quantized.matrices import matrices
from tightfit.models.quantized.ranges import fit_grid
from tightfit.models.quantized.scheme import Scheme
from tightfit.models.saving import write_model
from tightfit.models.text.tokenizer import Tokenizer

NAMES = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
"""Modules of a Llama layer, ours and transformers'."""

Made = Callable[[nn.Module], Tensor]


def scheme_of(step: Step) -> Scheme:
    """How a step that codes codes."""
    scheme = step.scheme()
    assert scheme is not None
    return scheme


@torch.no_grad()
def returned(original: Decoder, made: nn.Module, weight_of: Made) -> Decoder:
    """A copy of `original` with the weights and norms of the Hugging Face model `made`."""
    model = deepcopy(original)
    for index, layer in enumerate(model.layers):
        for ours, theirs in NAMES.items():
            module = made.get_submodule(f"model.layers.{index}.{theirs}")
            wanted: Any = module.weight if ours.endswith("norm") else weight_of(module)
            layer.get_submodule(ours).weight.copy_(wanted)  # type: ignore[operator]
    return model


@contextmanager
def huggingface(model: Decoder, tokenizer: Tokenizer) -> Iterator[tuple[Any, Any]]:
    """The same model and tokenizer as transformers' own, whose files are there meanwhile."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), model, tokenizer)
        made = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        yield made.to(model.embed.weight.device), AutoTokenizer.from_pretrained(folder)


def auto_round(model: Decoder, tokenizer: Tokenizer, tokens: Tensor, step: Step) -> Decoder:
    """AutoRound: roundings and ranges of a layer trained by signed gradients, in 200 steps by default."""
    from auto_round import AutoRound

    scheme, device = scheme_of(step), str(model.embed.weight.device)
    with huggingface(model, tokenizer) as (made, words):
        rounder = AutoRound(
            made,
            tokenizer=words,
            bits=scheme.bits,
            group_size=scheme.group,
            sym=scheme.symmetric,
            dataset=_rows(tokens, 8),
            iters=step.steps,
            seqlen=tokens.shape[1],
            nsamples=len(tokens),
            device_map=device,
            enable_torch_compile=False,
            low_gpu_mem_usage=False,
        )
        tuned, _ = rounder.quantize()
    return returned(model, tuned.to(device), lambda module: module.weight)  # type: ignore[arg-type, return-value]


def awq(model: Decoder, tokenizer: Tokenizer, tokens: Tensor, step: Step) -> Decoder:
    """llm-compressor's AWQ, then its rounding in ranges of least squared error."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    scheme = scheme_of(step)
    args = QuantizationArgs(num_bits=scheme.bits, symmetric=scheme.symmetric, strategy="group", group_size=scheme.group)
    rounding = QuantizationModifier(
        config_groups={"all": QuantizationScheme(targets=["Linear"], weights=args)}, ignore=["lm_head"]
    )
    made = _oneshot(model, tokenizer, tokens, [AWQModifier(), rounding])

    def rounded(module: Any) -> Tensor:
        made: Tensor = fake_quantize(module.weight, module.weight_scale, module.weight_zero_point, args)
        return made

    return returned(model, made, rounded)


def smoothquant(model: Decoder, tokenizer: Tokenizer, tokens: Tensor, step: Step) -> Decoder:
    """llm-compressor's SmoothQuant at the strength of its examples (0.8); our int8 weights and activations."""
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    made = _oneshot(model, tokenizer, tokens, [SmoothQuantModifier(smoothing_strength=0.8)])
    smoothed = returned(model, made, lambda module: module.weight)  # type: ignore[arg-type, return-value]
    scheme = scheme_of(step)
    for name in matrices(smoothed.spec):
        parent, _, own = name.rpartition(".")
        module = smoothed.get_submodule(name)
        coded = fit_grid(module.weight.detach().float(), scheme).code(module.weight.detach().float())  # type: ignore
        setattr(smoothed.get_submodule(parent), own, quantize_linear(module, coded))  # type: ignore[arg-type]
    return smoothed


def llm_int8(model: Decoder, tokenizer: Tokenizer, tokens: Tensor, step: Step) -> Decoder:
    """bitsandbytes' LLM.int8: inputs above 6 are multiplied in 16 bits; it has no tokens to look at."""
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    made = deepcopy(model)
    for name in matrices(made.spec):
        parent, _, own = name.rpartition(".")
        weight = made.get_parameter(f"{name}.weight").detach()
        layer = Linear8bitLt(weight.shape[1], weight.shape[0], bias=False, has_fp16_weights=False, threshold=6.0)
        layer.weight = Int8Params(weight.to(torch.float16), requires_grad=False, has_fp16_weights=False)
        setattr(made.get_submodule(parent), own, layer.to(weight.device))
    return made


def _oneshot(model: Decoder, tokenizer: Tokenizer, tokens: Tensor, recipe: list[Any]) -> nn.Module:
    from llmcompressor import oneshot

    with huggingface(model, tokenizer) as (made, words):
        done: nn.Module = oneshot(
            model=made,
            tokenizer=words,
            dataset=_rows(tokens, 1),
            recipe=recipe,
            num_calibration_samples=len(tokens),
            max_seq_length=tokens.shape[1],
        )
    return done.to(model.embed.weight.device)


def _rows(tokens: Tensor, batch: int) -> DataLoader[dict[str, Tensor]]:
    """The calibration rows as transformers' models take them."""
    made: Any = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in tokens]
    return DataLoader(made, batch_size=batch)


PIPELINES = {
    ("auto-round", "auto-round"): auto_round,
    ("bitsandbytes", "llm.int8"): llm_int8,
    ("llm-compressor", "awq"): awq,
    ("llm-compressor", "smoothquant"): smoothquant,
}
"""By package and method."""

"""Packed weights on a GPU: bf16 and real shapes, many rows and few, and a whole quantized decoder against the CPU's."""

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from tests.compress.conftest import SPEC, random_model
from tests.kernels.test_quantized_linear import weights
from tests.kernels.truth import assert_no_worse
from tightfit.compress.layer_compression import compress_layer
from tightfit.compress.recipe import recipe_of
from tightfit.kernels.quantized.quantized_linear import quantized_linear, quantized_linear_eager
from tightfit.kernels.quantized.rounded_linear import CODES, rounded_linear, rounded_linear_eager, rounded_values
from tightfit.models.quantized.directory import replace_module
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.quantized.ranges import fit_grid
from tightfit.models.quantized.scheme import Scheme

GPU = torch.device("cuda")


@pytest.mark.parametrize("rows", [1, 2, 4, 7, 8, 33, 300])
@pytest.mark.parametrize(("bits", "group", "zeros"), [(4, 128, True), (4, 32, False), (8, 0, False), (2, 64, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_real_shapes(rows: int, bits: int, group: int, zeros: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    for inputs, outputs in ((4096, 1024), (1536, 4096 + 16)):
        given = weights(inputs, outputs, bits, group, zeros)
        x = torch.randn(rows, inputs, device=GPU, dtype=dtype)
        truth = quantized_linear_eager(x.double(), *given, bits, group)
        eager = quantized_linear_eager(x, *given, bits, group)
        assert_no_worse([quantized_linear(x, *given, bits, group)], [eager], [truth])


@pytest.mark.parametrize("rows", [1, 17, 256])
def test_int8(rows: int) -> None:
    x = torch.randn(rows, 4096, device=GPU, dtype=torch.bfloat16)
    codes = torch.randint(-128, 128, (1024, 4096), device=GPU, dtype=torch.int8)
    scale = torch.rand(1024, 1, device=GPU) + 0.1
    torch.testing.assert_close(
        rounded_linear(x, codes, scale), rounded_linear_eager(x, codes, scale), rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize("rows", [1, 17, 256])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_static_inputs(kind: Literal["int8", "fp8"], rows: int) -> None:
    """No further from float64 on what x is rounded to than a product in bf16 of the same."""
    scheme = Scheme(kind="int" if kind == "int8" else "fp8", bits=8, group=0, activations=kind, static=True)
    weight = torch.randn(1024, 4096, device=GPU) * 0.02
    scale = torch.tensor([0.02 if kind == "int8" else 0.005], device=GPU)
    layer = QuantizedLinear(replace(fit_grid(weight, scheme).code(weight), input_scale=scale))
    x = torch.randn(rows, 4096, device=GPU, dtype=torch.bfloat16)
    inside, matrix = rounded_values(x.float(), CODES[kind], scale), layer.dequantize(torch.float32)
    eager = torch.nn.functional.linear(inside.bfloat16(), matrix.bfloat16())
    assert_no_worse([layer(x)], [eager], [inside.double() @ matrix.double().T])


METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    **{method: (method, {}) for method in ("nf4", "smoothquant", "fp8", "spqr")},
    "gptq": ("gptq", {"bits": 4, "group": 32}),
    "smoothquant static": ("smoothquant", {"static": "mse"}),
    "fp8 static": ("fp8", {"activations": "fp8", "static": "minmax"}),
}


ROUND_INPUTS = ("smoothquant", "smoothquant static", "fp8 static")


@pytest.mark.parametrize("name", METHODS)
def test_a_quantized_decoder(name: str) -> None:
    """Coded on the CPU, the model gives the same logits on the GPU. Where inputs are rounded too, an input's last bit
    decides whether it goes up or down: both are then at most half as far from one another as from the model's own."""
    model = random_model(SPEC)
    tokens = torch.arange(40)[None] % 250
    method, options = METHODS[name]
    recipe = recipe_of(method, **options)
    with torch.no_grad():
        own = model(tokens).logits
        stream = [model.embed_tokens(tokens, model.token_positions(tokens, None, None))]
        for index in range(SPEC.layers):
            result = compress_layer(model, index, recipe, stream)
            stream = result.outputs
            for module, weight in result.coded.items():
                replace_module(model, f"layers.{index}.{module}.weight", QuantizedLinear(weight))  # type: ignore[arg-type]
        here = model(tokens).logits
        there = model.to(GPU)(tokens.to(GPU)).logits.cpu()
    if name in ROUND_INPUTS:
        apart, lost = float((there - here).norm()), float((here - own).norm())
        assert apart < 0.5 * lost, (apart, lost)
    else:
        torch.testing.assert_close(there, here, rtol=5e-3, atol=5e-3)

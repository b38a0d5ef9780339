"""Packed weights on a GPU: bf16 and real shapes, many rows and few, and a whole quantized decoder against the CPU's."""

import pytest
import torch

from tests.compress.conftest import SPEC, random_model
from tests.kernels.test_quantized_linear import weights
from tests.kernels.truth import assert_no_worse
from tightfit.compress.layer_compression import compress_layer
from tightfit.compress.recipe import recipe_of
from tightfit.kernels.int8_linear import int8_linear, int8_linear_eager
from tightfit.kernels.quantized_linear import quantized_linear, quantized_linear_eager
from tightfit.models.quantized.directory import replace_module
from tightfit.models.quantized.linear import QuantizedLinear

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
    torch.testing.assert_close(int8_linear(x, codes, scale), int8_linear_eager(x, codes, scale), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("method", ["gptq", "nf4", "smoothquant", "fp8", "spqr"])
def test_a_quantized_decoder(method: str) -> None:
    """Coded on the CPU, the model gives the same logits on the GPU."""
    model = random_model(SPEC)
    tokens = torch.arange(40)[None] % 250
    recipe = recipe_of(method, **({"bits": 4, "group": 32} if method == "gptq" else {}))
    with torch.no_grad():
        stream = [model.embed_tokens(tokens, model.token_positions(tokens, None, None))]
        for index in range(SPEC.layers):
            result = compress_layer(model, index, recipe, stream)
            stream = result.outputs
            for name, weight in result.coded.items():
                replace_module(model, f"layers.{index}.{name}.weight", QuantizedLinear(weight))  # type: ignore[arg-type]
        here = model(tokens).logits
        there = model.to(GPU)(tokens.to(GPU)).logits.cpu()
    torch.testing.assert_close(there, here, rtol=5e-3, atol=5e-3)

"""SpQR's layers as they are held: the numbers of the files to the bit, in as many bytes, multiplied by the kernels."""

import pytest
import torch
import torch.nn.functional as F

from tests.compress.test_coding import matrix, moment
from tests.covering import sampled
from tests.kernels.truth import DEVICE, assert_no_worse
from tightfit.compress.rounding.spqr import SpqrOptions, spqr
from tightfit.models.quantized.coded_weight import CodedWeight
from tightfit.models.quantized.formats.own import Own
from tightfit.models.quantized.held_spqr import arranged
from tightfit.models.quantized.linear import QuantizedLinear
from tightfit.models.quantized.scheme import Scheme


def coded(outputs: int, inputs: int, bits: int = 3) -> CodedWeight:
    scheme = Scheme(bits=bits, group=16, symmetric=False, outliers=True)
    return spqr(matrix(outputs, inputs), moment(inputs), scheme, SpqrOptions(outlier_share=0.02))


def held_bytes(layer: QuantizedLinear) -> int:
    return sum(buffer.nbytes for buffer in layer.buffers())


SHAPES = [(32, 256, 3), (64, 256, 2), (32, 512, 4), (40, 256, 3), (32, 128, 3), (32, 256, 5)]
"""Outputs, inputs and bits: three that the kernels take, and too few rows, inputs and another width."""


@sampled(3)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_held_as_in_files(shape: tuple[int, int, int]) -> None:
    weight = coded(*shape)
    layer = QuantizedLinear(weight)
    assert (arranged(weight) is not None) == (shape in SHAPES[:3])
    assert torch.equal(layer.dequantize(torch.float32), weight.dequantize())
    assert torch.equal(layer.expand(torch.float32), weight.dequantize())
    stored, again = Own().encode(weight), Own().encode(layer.coded())
    assert stored.keys() == again.keys()
    assert all(torch.equal(stored[name], again[name]) for name in stored)
    assert held_bytes(layer) == sum(tensor.nbytes for name, tensor in stored.items() if name != "weight_shape")


@sampled(6)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 20])
def test_products_are_those_of_the_matrix(shape: tuple[int, int, int], rows: int) -> None:
    weight = coded(*shape).to(DEVICE)
    bias, x = torch.randn(shape[0], device=DEVICE), torch.randn(rows, shape[1], device=DEVICE)
    whole = weight.dequantize().double()
    truth = F.linear(x.half().double(), whole, bias.half().double())
    eager = F.linear(x.half(), whole.half()) + bias.half()
    made = QuantizedLinear(weight, bias.half(), "triton")(x.half())
    assert_no_worse([made], [eager], [truth], rounding=2.0**-12)
    plain = QuantizedLinear(weight, bias, "torch")(x)
    torch.testing.assert_close(plain, F.linear(x, weight.dequantize(), bias))

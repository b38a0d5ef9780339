"""SpQR's product: the kernels against expanding and multiplying, in every width, with rows of few and many outliers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.covering import sampled
from tests.kernels.truth import DEVICE, DTYPES, assert_no_worse
from tightfit.kernels.quantized.spqr_layout import (
    BITS,
    SpqrTensors,
    arrange_codes,
    arrange_ranges,
    arrange_statistics,
    can_be_arranged,
    codes_of,
    ranges_of,
    scales_of,
    statistics_of,
)
from tightfit.kernels.quantized.spqr_linear import expanded_spqr, expanded_spqr_eager, spqr_linear, spqr_linear_eager

SHAPES = [(1, 256, 32), (3, 512, 64), (16, 768, 32), (17, 256, 32)]
"""Rows, inputs, outputs: an odd number of tiles and of programs among them; the last is expanded first."""
ADDED = 1024 * 2.0**-24
"""How much float32 rounds a sum of float16 codes by, as in test_quantized_linear.py."""


def numbers(inputs: int, outputs: int, bits: int) -> dict[str, Tensor]:
    """Codes of weights, scales and zero points, and the ranges of the latter, as files have them."""
    generator = torch.Generator().manual_seed(inputs + outputs + bits)
    groups, blocks = inputs // 16, outputs // 16
    steps = torch.rand(groups, blocks, 4, generator=generator) + torch.tensor([0.05, 0.5, 0.1, 0.0])
    steps *= torch.tensor([2.0**-bits / 8, 2.0**-bits, 2.0 ** (bits - 3), 1.0])
    return {
        "codes": torch.randint(0, 2**bits, (outputs, inputs), generator=generator).to(torch.uint8),
        "scale": torch.randint(0, 8, (outputs, groups), generator=generator).to(torch.uint8),
        "zero": torch.randint(0, 8, (outputs, groups), generator=generator).to(torch.uint8),
        "scale_range": steps[..., :2].half(),
        "zero_range": steps[..., 2:].half(),
    }


def dense(given: dict[str, Tensor]) -> Tensor:
    """What the codes say, in float64, one formula after the other."""
    outputs, inputs = given["codes"].shape
    rows, columns = torch.arange(outputs)[:, None], torch.arange(inputs)[None, :]
    group, block = columns // 16, rows // 16

    def read(name: str) -> Tensor:
        step, start = given[f"{name}_range"].double()[group, block].unbind(-1)
        return given[name][rows, group].double() * step + start

    return (given["codes"].double() - read("zero")) * read("scale")


def weights(inputs: int, outputs: int, bits: int, share: float = 0.02) -> tuple[SpqrTensors, Tensor]:
    """A weight whose second row is all outliers and whose third has none, and the matrix that it is in float64."""
    given = numbers(inputs, outputs, bits)
    matrix = dense(given)
    is_outlier = torch.rand(matrix.shape, generator=torch.Generator().manual_seed(1)) < share
    is_outlier[1], is_outlier[2] = True, False
    values = (
        matrix[is_outlier] + torch.randn(int(is_outlier.sum()), generator=torch.Generator().manual_seed(2))
    ).half()
    starts = torch.zeros(outputs + 1, dtype=torch.int32)
    starts[1:] = is_outlier.sum(1).cumsum(0)
    tensors = SpqrTensors(
        words=arrange_codes(given["codes"], bits),
        statistics=arrange_statistics(given["scale"], given["zero"]),
        ranges=arrange_ranges(given["scale_range"], given["zero_range"]),
        starts=starts,
        columns=is_outlier.nonzero()[:, 1].to(torch.uint16),
        values=values,
        changes=(values.double() - matrix[is_outlier]).half(),
    )
    matrix[is_outlier] = values.double()
    return SpqrTensors(*(tensor.to(DEVICE) for tensor in tensors)), matrix.to(DEVICE)


@pytest.mark.parametrize("bits", BITS)
def test_layout_and_back(bits: int) -> None:
    given = numbers(768, 64, bits)
    words = arrange_codes(given["codes"], bits)
    assert words.nbytes == 768 * 64 * bits // 8
    assert torch.equal(codes_of(words), given["codes"])
    statistics = arrange_statistics(given["scale"], given["zero"])
    assert statistics.nbytes == 2 * 64 * 48 * 3 // 8
    assert all(map(torch.equal, statistics_of(statistics), (given["scale"], given["zero"])))
    ranges = arrange_ranges(given["scale_range"], given["zero_range"])
    assert all(map(torch.equal, ranges_of(ranges), (given["scale_range"], given["zero_range"])))


def test_what_has_no_such_order() -> None:
    assert can_be_arranged(4096, 14336, 3)
    for rows, inputs, bits in ((4096, 4096, 5), (4080, 4096, 3), (4096, 4096 + 128, 3), (32, 2**16 + 256, 3)):
        assert not can_be_arranged(rows, inputs, bits)


@pytest.mark.parametrize("bits", BITS)
def test_eager_is_the_formula(bits: int) -> None:
    weight, matrix = weights(512, 32, bits)
    torch.testing.assert_close(expanded_spqr_eager(weight, torch.float64), matrix, rtol=1e-6, atol=1e-6)


@sampled(4)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_expanding(bits: int, dtype: torch.dtype) -> None:
    for rows, inputs, outputs in SHAPES:
        weight, matrix = weights(inputs, outputs, bits)
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(DEVICE, dtype)
        truth = x.double() @ matrix.T
        eager = spqr_linear_eager(x, weight)
        made = spqr_linear(x, weight, impl="triton")
        assert_no_worse([made], [eager], [truth], rounding=ADDED)
        off, most = (made.double() - truth).abs(), x.double().abs() @ matrix.abs().T  # of every weight's own rounding
        assert bool((off <= 2.0**-10 * most)[:, 1:3].all())  # full of outliers, and without


@sampled(3)
@pytest.mark.parametrize("bits", BITS)
def test_expanded_by_the_kernel(bits: int) -> None:
    weight, matrix = weights(512, 96, bits)
    made = expanded_spqr(weight, torch.float16, impl="triton")
    assert_no_worse([made], [matrix.half()], [matrix])


def test_without_outliers() -> None:
    weight, _ = weights(256, 32, 3)
    none: dict[str, Any] = {name: getattr(weight, name)[:0] for name in ("columns", "values", "changes")}
    weight = weight._replace(starts=torch.zeros_like(weight.starts), **none)
    x = torch.randn(2, 256, device=DEVICE, dtype=torch.float16)
    truth = spqr_linear_eager(x.double(), weight)
    assert_no_worse([spqr_linear(x, weight, impl="triton")], [spqr_linear_eager(x, weight)], [truth], rounding=ADDED)


def test_leading_dimensions() -> None:
    weight, _ = weights(256, 32, 4)
    x = torch.randn(2, 3, 256, device=DEVICE, dtype=torch.float16)
    torch.testing.assert_close(spqr_linear(x, weight)[1], spqr_linear(x[1], weight))


def test_scales_are_those_of_their_codes() -> None:
    given = numbers(256, 32, 3)
    weight, _ = weights(256, 32, 3)
    step, start = given["scale_range"].float()[5, 1]
    scale, _ = scales_of(weight)
    assert scale[20, 5].item() == (given["scale"][20, 5].float() * step + start).item()

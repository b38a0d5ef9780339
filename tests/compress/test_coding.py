"""Coding: grids, ranges and methods against what their formulas say, computed another way."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.covering import sampled
from tightfit.compress.calibration.inputs import InputStatistics, output_error
from tightfit.compress.layer_compression import code_weight
from tightfit.compress.recipe import Step
from tightfit.compress.rounding.gptq import GptqOptions, gptq
from tightfit.compress.rounding.spqr import SpqrOptions, spqr
from tightfit.errors import UserError
from tightfit.models.quantized.codebooks import E2M1, NF4, nearest
from tightfit.models.quantized.formats.bitsandbytes import code_scales, nested_scales
from tightfit.models.quantized.ranges import RULES, fit_grid
from tightfit.models.quantized.scheme import Scheme

SCHEMES = [
    Scheme(bits=8, group=0),
    Scheme(bits=6, group=32),
    Scheme(bits=5, group=32),
    Scheme(bits=4, group=32, symmetric=False),
    Scheme(bits=3, group=64, symmetric=False),
    Scheme(bits=2, group=16, symmetric=False),
    Scheme(bits=4, group=-1),
    Scheme(kind="binary", bits=1, group=32),
    Scheme(kind="nf4", bits=4, group=64),
    Scheme(kind="mxfp4", bits=4, group=32),
    Scheme(kind="nvfp4", bits=4, group=16),
    Scheme(kind="fp8", bits=8, group=0),
]


def matrix(outputs: int = 32, inputs: int = 128, seed: int = 0) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * 0.05


def moment(inputs: int = 128) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(inputs, inputs, generator=generator) * torch.logspace(0, -2, inputs)
    x = torch.randn(512, inputs, generator=generator) @ mixing.T
    return x.T @ x / len(x)


@pytest.mark.parametrize("scheme", SCHEMES, ids=Scheme.describe)
def test_every_weight_gets_the_nearest_number(scheme: Scheme) -> None:
    """Moving any weight to a neighbouring code never brings it closer."""
    weight = matrix()
    coded = fit_grid(weight, scheme).code(weight)
    made = coded.dequantize()
    if scheme.kind == "fp8":
        step = made.abs() * 2**-4 + coded.scale * 2**-10
        assert bool(((made - weight).abs() <= step + 1e-7).all())
        return
    scale = coded.scale
    if scheme.kind == "nf4":  # bitsandbytes chooses codes for the scales before those are coded themselves
        scale = weight.view(len(weight), -1, scheme.group).abs().amax(-1)
        made = type(coded)(scheme, coded.codes, scale, None).dequantize()
    for code in range(scheme.levels):
        other = type(coded)(scheme, torch.full_like(coded.codes, code), scale, coded.zero).dequantize()
        assert bool(((made - weight).abs() <= (other - weight).abs() + 1e-6).all())


@sampled(3)
@pytest.mark.parametrize("scheme", SCHEMES, ids=Scheme.describe)
def test_the_best_range_is_no_worse_than_the_whole(scheme: Scheme) -> None:
    weight, importance = matrix(), moment().diagonal()
    weight[:, 5] *= 6

    def error(rule: str) -> float:
        change = fit_grid(weight, scheme, rule, importance).code(weight).dequantize() - weight  # type: ignore[arg-type]
        return float((change.square() * importance).sum())

    assert error("mse") <= error("minmax") * 1.02  # scales that are coded together may round a little worse
    assert all(error(rule) < float((weight.square() * importance).sum()) for rule in RULES)


@pytest.mark.parametrize("symmetric", [True, False], ids=["signed", "unsigned"])
def test_ranges_by_their_definitions(symmetric: bool) -> None:
    """The whole range saturates nothing, the middle 99.9 % does; of an outlier, less of the range is taken."""
    weight = torch.randn(4, 4096, generator=torch.Generator().manual_seed(0)) + (0 if symmetric else 1)
    scheme = Scheme(bits=8, group=0, symmetric=symmetric)
    low, high = (torch.from_numpy(np.quantile(weight.numpy(), q, axis=1)).float() for q in (0.001, 0.999))
    step = torch.maximum(-low, high) / 127.5 if symmetric else (high - low) / 255
    clipped = fit_grid(weight, scheme, "percentile")
    torch.testing.assert_close(clipped.scale[:, 0], step)
    whole = fit_grid(weight, scheme)
    lost = (whole.code(weight).dequantize() - weight).abs().amax(1)
    assert (lost <= whole.scale[:, 0] * (1 if not symmetric else 0.51)).all()  # a zero point is rounded too
    assert ((clipped.code(weight).dequantize() - weight).abs().amax(1) > 2 * clipped.scale[:, 0]).all()  # saturated
    weight[0, 0] = 40.0
    few = replace(scheme, bits=4, group=-1 if symmetric else 0)
    assert fit_grid(weight, few, "kl").scale.amax() < fit_grid(weight, few).scale.amax()


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False], ids=["signed", "unsigned"])
def test_codes_are_round_n_over_s_plus_z(bits: int, symmetric: bool) -> None:
    """In float64, cut off at the ends; signed numbers are kept with 2^(bits−1) added. No code wraps around."""
    scheme = Scheme(bits=bits, group=64, symmetric=symmetric)
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(bits)) + 0.3 * (not symmetric)
    grid, ends = fit_grid(weight, scheme), (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)
    scale = grid.scale.double().repeat_interleave(64, 1)
    zero = torch.zeros_like(scale) if grid.zero is None else grid.zero.double().repeat_interleave(64, 1)
    for times in (1, 3):  # within the range that was fitted, and beyond it
        coded, quotient = grid.code(times * weight), times * weight.double() / scale
        made, wanted = coded.codes.double() - 2 ** (bits - 1) * symmetric, quotient.round() + zero
        differs = made != wanted.clamp(*ends)
        halfway = (quotient - quotient.floor() - 0.5).abs() < 1e-4
        assert not bool((differs & ~halfway).any()), "halves go either way"
        assert bool(((wanted < ends[0] - 1) | (wanted > ends[1] + 1)).any()) == (times == 3)
        torch.testing.assert_close(coded.dequantize().double(), (made - zero) * scale, rtol=1e-6, atol=1e-9)


def test_asymmetric_codes_keep_zero_exact() -> None:
    weight = matrix().abs() + 0.3
    weight[:, 0] = 0
    coded = fit_grid(weight, Scheme(bits=4, group=32, symmetric=False)).code(weight)
    assert bool((coded.dequantize()[:, 0] == 0).all())


def test_gptq_of_one_row_and_two_columns_by_hand() -> None:
    """w = (0.6, 0.2), H = [[2, 1], [1, 2]], codes on whole numbers: the second column makes up for the first."""
    weight, hessian = torch.tensor([[0.6, 0.2, 3.5, -3.5]]), torch.eye(4)
    hessian[:2, :2] = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    scheme = Scheme(bits=3, group=0)
    coded = gptq(weight, hessian, scheme, GptqOptions(act_order="none", damping=1e-9, ranges="minmax", refit=False))
    assert float(coded.scale) == pytest.approx(1.0)
    # 0.6 → 1 leaves +0.4; the best second weight is 0.2 + (−0.4) · H₁₂ / H₂₂ = 0.0, which rounds to 0
    assert coded.dequantize()[0, :2].tolist() == [1.0, 0.0]
    moved = torch.tensor([[0.4, 0.4, 3.5, -3.5]])
    coded = gptq(moved, hessian, scheme, GptqOptions(act_order="none", damping=1e-9, ranges="minmax", refit=False))
    assert coded.dequantize()[0, :2].tolist() == [0.0, 1.0]  # 0.4 + 0.4 · 1 / 2 = 0.6, which rounds to 1


def by_elimination(weight: Tensor, hessian: Tensor, scheme: Scheme, act_order: str) -> Tensor:
    """GPTQ as the formula says: after each column, H⁻¹ is computed anew of those that are left."""
    left, made = weight.clone(), torch.zeros_like(weight)
    hessian = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian))
    order = list(range(len(hessian))) if act_order == "none" else hessian.diagonal().argsort(descending=True).tolist()
    group = scheme.group or len(order)
    columns = sorted(order) if act_order == "static" else order
    groups = [columns[i : i + group] for i in range(0, len(order), group)]
    grids = {i: fit_grid(left[:, own], scheme) for i, own in enumerate(groups) if act_order == "static"}
    for place, column in enumerate(order):
        here = next(i for i, own in enumerate(groups) if column in own)
        if here not in grids:
            grids[here] = fit_grid(left[:, groups[here]], scheme)
        scale, zero = grids[here].scale[:, 0], grids[here].zero
        middle = scheme.middle if zero is None else zero[:, 0]
        codes = (left[:, column] / scale + middle).round().clamp(0, scheme.levels - 1)
        made[:, column] = (codes - middle) * scale
        rest = order[place:]
        inverse = torch.linalg.inv(hessian[rest][:, rest])
        left[:, rest] -= ((left[:, column] - made[:, column]) / inverse[0, 0])[:, None] * inverse[0]
    return made


@sampled(3)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits_and_group", [(4, 16), (2, 8), (3, 0)], ids=str)
@pytest.mark.parametrize("act_order", ["none", "static", "groups"])
def test_gptq_is_what_eliminating_columns_gives(
    act_order: str, bits_and_group: tuple[int, int], symmetric: bool
) -> None:
    """Groups in and out of order, blocks that end inside them, in float64."""
    bits, group = bits_and_group
    scheme, weight, hessian = Scheme(bits=bits, group=group, symmetric=symmetric), matrix(8, 48), moment(48)
    options = GptqOptions(act_order=act_order, ranges="minmax", refit=False, block=24)  # type: ignore[arg-type]
    made = gptq(weight.double(), hessian.double(), scheme, options).dequantize()
    wanted = by_elimination(weight.double(), hessian.double(), scheme, act_order)
    torch.testing.assert_close(made.double(), wanted.double(), rtol=1e-6, atol=1e-9)


@sampled(4)
@pytest.mark.parametrize("scheme", SCHEMES, ids=Scheme.describe)
@pytest.mark.parametrize("act_order", ["none", "static", "groups"])
def test_gptq_leaves_less_error_than_rounding(scheme: Scheme, act_order: str) -> None:
    weight, hessian = matrix(), moment()
    plain = fit_grid(weight, scheme, "mse", hessian.diagonal()).code(weight).dequantize() - weight
    coded = gptq(weight, hessian, scheme, GptqOptions(act_order=act_order))  # type: ignore[arg-type]
    assert output_error(coded.dequantize() - weight, hessian) < 0.9 * output_error(plain, hessian)


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "act_order"),
    [(4, 32, False, "static"), (3, 32, True, "groups"), (2, 16, False, "none"), (4, 0, True, "static")],
)
def test_scales_fitted_to_the_codes_leave_no_row_worse(bits: int, group: int, symmetric: bool, act_order: str) -> None:
    weight, hessian = matrix(), moment()
    scheme = Scheme(bits=bits, group=group, symmetric=symmetric)
    plain, refitted = (
        gptq(weight, hessian, scheme, GptqOptions(act_order=act_order, refit=refit))  # type: ignore[arg-type]
        for refit in (False, True)
    )
    assert torch.equal(plain.codes, refitted.codes)
    before, after = (
        ((c.dequantize() - weight).double() @ hessian.double() * (c.dequantize() - weight)).sum(1)
        for c in (plain, refitted)
    )
    assert bool((after <= before * (1 + 1e-4)).all())
    assert float(after.sum()) < 0.98 * float(before.sum())
    if group:
        assert torch.equal(refitted.scale, refitted.scale.to(torch.float16).float())


@pytest.mark.parametrize(("bits", "group", "symmetric"), [(2, 16, False), (3, 32, False), (3, 0, True)])
def test_rounding_to_few_bits_fits_its_scales_by_least_squares(bits: int, group: int, symmetric: bool) -> None:
    """Codes are those of the formula that others use, round(w / S) + Z in the range of a group; scales are numpy's."""
    weight = matrix()
    scheme = Scheme(bits=bits, group=group, symmetric=symmetric)
    step = Step(method="rtn", bits=bits, group=group, symmetric=symmetric)
    coded = code_weight("mlp.up", weight, None, step)
    plain = fit_grid(weight, scheme).code(weight)
    assert torch.equal(coded.codes, plain.codes)
    size = group or weight.shape[1]
    zero = plain.zero if plain.zero is not None else torch.full_like(plain.scale, scheme.middle)
    values = plain.codes.float().view(len(weight), -1, size) - zero[..., None]
    for row, blocks in enumerate(weight.view(len(weight), -1, size)):
        for number, block in enumerate(blocks):
            best = np.linalg.lstsq(values[row, number].double()[:, None].numpy(), block.double().numpy(), rcond=None)[0]
            assert float(coded.scale[row, number]) == pytest.approx(best.item(), rel=6e-4)  # half a step of float16
    before, after = ((c.dequantize() - weight).double().square().sum() for c in (plain, coded))
    assert float(after) < 0.98 * float(before)
    more = code_weight("mlp.up", weight, None, Step(method="rtn", bits=4, group=32))
    assert torch.equal(more.scale, fit_grid(weight, more.scheme).scale)


def test_groups_of_zeros_keep_their_scales() -> None:
    weight = matrix()
    weight[:, :32] = 0
    coded = code_weight("mlp.up", weight, None, Step(method="rtn", bits=3, group=32))
    assert bool(coded.scale.isfinite().all())
    assert bool((coded.dequantize()[:, :32] == 0).all())


def test_gptq_with_inputs_that_are_always_zero() -> None:
    hessian = moment()
    hessian[:, 7] = hessian[7] = 0
    coded = gptq(matrix(), hessian, Scheme(bits=4, group=32))
    assert bool((coded.dequantize()[:, 7] == 0).all())


def test_spqr_keeps_the_share_of_outliers_and_beats_plain_groups() -> None:
    weight, hessian = matrix(64, 256), moment(256)
    weight[torch.rand(weight.shape, generator=torch.Generator().manual_seed(2)) < 0.005] *= 12
    coded = spqr(
        weight, hessian, Scheme(bits=3, group=16, symmetric=False, outliers=True), SpqrOptions(outlier_share=0.01)
    )
    assert coded.outliers is not None
    assert 0.004 < len(coded.outliers.values) / weight.numel() < 0.02
    made = coded.dequantize()
    plain = gptq(weight, hessian, Scheme(bits=3, group=64, symmetric=False))
    assert output_error(made - weight, hessian) < 0.5 * output_error(plain.dequantize() - weight, hessian)


def test_spqr_rounds_with_the_best_of_its_coded_scales() -> None:
    """Of all scales and zero points that 3 bits can say, no other pair rounds a row's first group better."""
    scheme = Scheme(bits=3, group=16, symmetric=False, outliers=True)
    weight = matrix(16, 16)
    coded = spqr(weight, torch.eye(16), scheme, SpqrOptions(outlier_share=0.0))
    scales, zeros = (coded.coded_scales[f"weight_{name}_range"].float()[0, 0] for name in ("scale", "zero"))
    error = (coded.dequantize() - weight).square().sum(1)
    for scale in (float(scales[1] + scales[0] * i) for i in range(8)):
        for zero in (float(zeros[1] + zeros[0] * i) for i in range(8)):
            other = ((weight / scale + zero).round().clamp(0, 7) - zero) * scale
            assert bool((error <= (other - weight).square().sum(1) * 1.0001).all())


def test_spqr_survives_a_group_of_zeros_beside_large_ones() -> None:
    """Its scale is next to nothing, and a neighbour's that is rounded to it must not divide by it."""
    scheme = Scheme(bits=4, group=16, symmetric=False, outliers=True)
    weight = torch.full((16, 16), -0.5)
    weight[0], weight[1] = 0, -0.03
    assert bool(spqr(weight, torch.eye(16), scheme).dequantize().isfinite().all())


def test_tables() -> None:
    assert len(set(NF4)) == 16
    assert nearest(torch.tensor([0.0, 5.1, -0.8, 4.9, -6.5]), "mxfp4").tolist() == [0, 7, E2M1.index(-1.0), 6, 15]


def test_doubly_coded_scales() -> None:
    scale = torch.rand(40, 20) + 0.5
    back = nested_scales(code_scales(scale)).view(40, 20)
    assert float((back - scale).abs().max()) < 0.01


def test_statistics_are_means_over_all_tokens() -> None:
    seen, batches = InputStatistics(8, torch.device("cpu")), [torch.randn(2, 5, 8), torch.randn(1, 7, 8)]
    for batch in batches:
        seen.add(batch)
    rows = torch.cat([batch.reshape(-1, 8) for batch in batches])
    torch.testing.assert_close(seen.hessian, rows.T @ rows / 17)
    torch.testing.assert_close(seen.mean_magnitude, rows.abs().mean(0))
    assert torch.equal(seen.largest, rows.abs().amax(0))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bits": 9}, "2 to 8"),
        ({"kind": "nf4", "bits": 8, "group": 64}, "nf4 numbers have 4"),
        ({"kind": "mxfp4", "group": 64}, "groups of 32"),
        ({"kind": "fp8", "bits": 8, "group": 64}, "one scale a row"),
        ({"kind": "nf4", "group": 64, "symmetric": False}, "symmetric"),
        ({"bits": 4, "activations": "int8"}, "activations are int8, beside weights of bits 4.*only those of bits 8"),
        ({"kind": "fp8", "bits": 8, "group": 0, "activations": "int8"}, "of their own kind, not fp8"),
        ({"bits": 8, "group": 0, "activations": "fp8"}, "of their own kind, not int"),
    ],
)
def test_schemes_that_cannot_be(fields: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Scheme(**fields)


def test_a_matrix_without_whole_groups() -> None:
    with pytest.raises(UserError, match="576 inputs, which are no whole groups of 128; use a group of 64"):
        Scheme(bits=4, group=128).check(8, 576, "layers.0.attention.q")
    with pytest.raises(UserError, match="72 inputs, which are no whole groups of 16; use int numbers with one scale"):
        Scheme(bits=3, group=16, symmetric=False, outliers=True).check(8, 72, "layers.0.mlp.down")  # SpQR's group is 16

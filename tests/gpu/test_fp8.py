"""fp8 on Hopper and later: codes and products against the plain path, layers and a run against the CPU's."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.train.models import TINY, ragged_batch, tiny_model
from tightfit.errors import UserError
from tightfit.jobs.job import Optimizer
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.kernels.fp8.fp8_codes import E4M3, E5M2, SharedInput, WeightCodes
from tightfit.kernels.fp8.fp8_linear import fp8_linear
from tightfit.kernels.fp8.fp8_matmul import fp8_matmul
from tightfit.kernels.fp8.fp8_mlp import fp8_gated_mlp
from tightfit.kernels.fp8.fp8_quantize import quantize, quantize_columns, quantize_rows
from tightfit.kernels.mlp.gated_mlp import gated_mlp_eager
from tightfit.train.assembly import assemble
from tightfit.train.precision import LossScale
from tightfit.train.step import train_step

GPU = torch.device("cuda")
SHAPES = [(1, 16), (37, 48), (300, 1040), (4096, 4096)]
SCALINGS: list[Any] = ["tensor", "row"]


def numbers(*shape: int) -> Tensor:
    """bf16 over some orders of magnitude."""
    return (torch.randn(shape, device=GPU) * torch.exp(torch.randn(shape, device=GPU))).bfloat16()


def same_codes(ours: Tensor, theirs: Tensor) -> None:
    """But for numbers halfway between two codes, and there the next one."""
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    distance = (ours.view(torch.int8).int() - theirs.view(torch.int8).int()).abs()
    assert distance.max() <= 1
    assert (distance > 0).float().mean() < 1e-3 or ours.numel() < 2000


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_codes_with_a_scale_per_tensor(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide = numbers(shape[0], shape[1] + 16)
    for x in (wide[:, : shape[1]].contiguous(), wide[:, : shape[1]]):
        ours, theirs = quantize(x, dtype, impl="triton"), quantize(x, dtype, impl="torch")
        assert torch.allclose(ours[2], theirs[2], rtol=1e-6)
        same_codes(ours[0], theirs[0])
        assert torch.equal(ours[1][:, : shape[0]].float(), ours[0].t().float())
        assert not ours[1][:, shape[0] :].float().any()
        again = quantize(x, dtype, plain=False, amax=x.abs().amax().float(), impl="triton")
        assert again[0].numel() == 0
        assert torch.equal(again[1].float(), ours[1].float())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_with_scales_per_row_and_column(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = numbers(*shape)
    for way in (quantize_rows, quantize_columns):
        ours, theirs = way(x, impl="triton"), way(x, impl="torch")
        assert torch.allclose(ours[1], theirs[1], rtol=1e-6)
        same_codes(ours[0], theirs[0])


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("size", [(37, 48, 64), (512, 1024, 2048)], ids=str)
def test_products(size: tuple[int, int, int], fast: bool) -> None:
    torch.manual_seed(0)
    M, N, K = size
    a, b = numbers(M, K), numbers(N, K)
    for (a_codes, a_scale), (b_codes, b_scale) in (
        (quantize(a, E5M2)[::2], quantize(b)[::2]),
        (quantize_rows(a), quantize_rows(b)),
    ):
        found = fp8_matmul(a_codes, b_codes, a_scale, b_scale, fast=fast)
        truth = (a_codes.float() * a_scale) @ (b_codes.float() * b_scale).t()
        assert found.dtype == torch.bfloat16
        assert (found.float() - truth).norm() < 5e-3 * truth.norm()


def everything(outcome: Tensor, given: Tensor, *wanted: Tensor) -> list[Tensor]:
    return [outcome.detach(), *torch.autograd.grad(outcome, wanted, given)]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("rows", [37, 512])
def test_a_linear_layer_is_the_cpus(scaling: Any, rows: int) -> None:
    torch.manual_seed(0)
    x, weight, bias, given = numbers(1, rows, 256), numbers(384, 256) / 16, numbers(384), numbers(1, rows, 384)
    found = []
    for device, dtype in ((GPU, torch.bfloat16), (torch.device("cpu"), torch.float32)):
        leaves = [tensor.to(device, dtype).requires_grad_() for tensor in (x, weight, bias)]
        codes, shared = WeightCodes(scaling, keep=True), SharedInput(scaling, 1)
        y = fp8_linear(leaves[0], leaves[1], leaves[2], codes, shared)
        found.append(everything(y, given.to(device, dtype), *leaves))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.cpu().float() - theirs).norm() < 0.01 * theirs.norm()


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gated_mlp_is_the_cpus(scaling: Any, activation: Any) -> None:
    torch.manual_seed(0)
    x, given = numbers(2, 150, 256), numbers(2, 150, 256)
    weights = [(torch.randn(shape, device=GPU) / 16).bfloat16() for shape in ((640, 256), (640, 256), (256, 640))]
    found = []
    for device, dtype in ((GPU, torch.bfloat16), (torch.device("cpu"), torch.float32)):
        leaves = [tensor.to(device, dtype).requires_grad_() for tensor in (x, *weights)]
        codes = tuple(WeightCodes(scaling, keep=False) for _ in range(3))
        y = fp8_gated_mlp(leaves[0], leaves[1], leaves[2], leaves[3], activation, codes)  # type: ignore[arg-type]
        found.append(everything(y, given.to(device, dtype), *leaves))
    exact = [tensor.float().cpu().requires_grad_() for tensor in (x, *weights)]
    truth = everything(gated_mlp_eager(exact[0], exact[1], exact[2], exact[3], activation), given.float().cpu(), *exact)
    for ours, theirs, wanted in zip(*found, truth, strict=True):
        errors = [float((made.cpu().float() - wanted).norm() / wanted.norm()) for made in (ours, theirs)]
        assert 1e-3 < errors[0] < 1.1 * errors[1] + 0.005  # what is coded here has been rounded to bf16 before


@pytest.mark.parametrize("matmul", ["fp8-tensor", "fp8-row"])
@pytest.mark.parametrize("tiles", [1, 3])
def test_training_follows_the_cpu(matmul: Any, tiles: int) -> None:
    losses = []
    spec, levers = replace(TINY, head_dim=16, mlp_size=96), Levers(matmul=matmul, tiles=tiles)
    for device in (torch.device("cpu"), GPU):
        model = tiny_model(spec).to(device)
        precision: Any = "fp32" if device.type == "cpu" else "bf16"
        settings = Optimizer(lr=3e-3)
        module, optimizer = assemble(model, None, Layout(), levers, precision, settings, device, lambda decoder: None)
        batches = [ragged_batch(4, seed=step % 2) for step in range(12)]
        losses.append([train_step(module, optimizer, [b], device, 3e-3, LossScale()).loss for b in batches])
    assert losses[1] == pytest.approx(losses[0], abs=0.05)  # nats, of 5.3 down to 0.9
    assert losses[1][-1] < losses[1][0] - 0.5


def test_other_dtypes_are_refused() -> None:
    x = torch.randn(16, 16, device=GPU)
    with pytest.raises(UserError, match=r"computes in bf16, but activations are torch\.float32"):
        fp8_linear(x, x, None, WeightCodes("row", keep=False), SharedInput("row", 1))

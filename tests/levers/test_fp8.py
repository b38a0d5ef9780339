"""fp8 matmuls: products of codes are what quantized factors multiplied in float32 give, gradients included."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.covering import sampled
from tests.distributed.training import GEMMA, GPT2, Case, run
from tests.train.models import TINY, TINY_ROUTED, ragged_batch, tiny_model
from tightfit.errors import UserError
from tightfit.jobs.levers import Levers
from tightfit.kernels.fp8.fp8_codes import E4M3, E5M2
from tightfit.levers.checkpointing import checkpoint_layers
from tightfit.levers.fp8 import SCALINGS, use_fp8
from tightfit.levers.tiling import tile_layers
from tightfit.models.decoder import Decoder
from tightfit.models.spec import ModelSpec
from tightfit.train.step import accumulate

CPU = torch.device("cpu")
MATMULS = list(SCALINGS)
WIDE: Any = replace(TINY, head_dim=16, mlp_size=96)


def made(spec: ModelSpec, matmul: Any, tiles: int = 1) -> Decoder:
    model = tiny_model(spec)
    use_fp8(model, matmul, keep_codes=True)
    tile_layers(model, Levers(tiles=tiles))
    return model


def rounded(x: Tensor, dtype: torch.dtype, dim: int | None) -> Tensor:
    """x on the grid of an 8-bit format whose largest number is that of the tensor, or of every slice along `dim`."""
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = largest / torch.finfo(dtype).max
    return (x / scale).to(dtype).float() * scale


class Emulated(torch.autograd.Function):
    """A linear layer whose factors are rounded, with the plainest arithmetic there is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by_row: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by_row = by_row
        dim = 1 if by_row else None
        return rounded(x, E4M3, dim) @ rounded(weight, E4M3, dim).t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        if ctx.by_row:
            return rounded(dy, E4M3, 1) @ rounded(weight, E4M3, 0), dy.t() @ x, None
        dy = rounded(dy, E5M2, None)
        return dy @ rounded(weight, E4M3, None), dy.t() @ rounded(x, E4M3, None), None


def emulated_mlp(x: Tensor, mlp: Any, by_row: bool) -> Tensor:
    gate, up = Emulated.apply(x, mlp.gate.weight, by_row), Emulated.apply(x, mlp.up.weight, by_row)
    return Emulated.apply(F.silu(gate) * up, mlp.down.weight, by_row)


def gradients(outcome: Tensor, given: Tensor, *wanted: Tensor) -> list[Tensor]:
    return [outcome.detach(), *torch.autograd.grad(outcome, wanted, given)]


def near(found: list[Tensor], truth: list[Tensor]) -> None:
    for ours, theirs in zip(found, truth, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize("matmul", MATMULS)
@pytest.mark.parametrize("rows", [1, 37, 48])
def test_a_linear_layer_multiplies_rounded_factors(matmul: Any, rows: int) -> None:
    attention: Any = made(WIDE, matmul).layers[0].attention
    x = torch.randn(1, rows, 32, requires_grad=True)
    for linear in (attention.q, attention.k, attention.v):
        given = torch.randn(1, rows, linear.out_features)
        found = gradients(linear(x), given, x, linear.weight)
        truth = gradients(Emulated.apply(x[0], linear.weight, matmul == "fp8-row")[None], given, x, linear.weight)
        near(found, truth)
        exact = gradients(F.linear(x, linear.weight), given, x, linear.weight)
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
        assert max(errors) < 0.1
        assert errors[0] > 1e-3  # it is lossy, so it was in 8 bits


@pytest.mark.parametrize("matmul", MATMULS)
def test_a_gated_mlp_multiplies_rounded_factors(matmul: Any) -> None:
    mlp: Any = made(WIDE, matmul).layers[0].mlp
    x = torch.randn(2, 20, 32, requires_grad=True)
    given, weights = torch.randn(2, 20, 32), (mlp.gate.weight, mlp.up.weight, mlp.down.weight)
    found = gradients(mlp(x)[0], given, x, *weights)
    truth = emulated_mlp(x.flatten(0, 1), mlp, matmul == "fp8-row").view(2, 20, 32)
    for ours, theirs in zip(found, gradients(truth, given, x, *weights), strict=True):
        assert (ours - theirs).norm() <= 0.01 * theirs.norm()  # a last bit of the product may change its code


def test_three_projections_share_the_codes_of_their_input(monkeypatch: pytest.MonkeyPatch) -> None:
    from tightfit.kernels.fp8 import fp8_codes

    sizes: list[int] = []
    original = fp8_codes.quantized
    monkeypatch.setattr(fp8_codes, "quantized", lambda x, *a, **k: (sizes.append(x.numel()), original(x, *a, **k))[1])
    attention: Any = made(WIDE, "fp8-tensor").layers[0].attention
    for _ in range(2):
        x = torch.randn(1, 16, 32, requires_grad=True)
        attention.q(x), attention.k(x), attention.v(x)
    weights = [attention.q.weight.numel(), attention.k.weight.numel(), attention.v.weight.numel()]
    assert sorted(sizes) == sorted([x.numel()] * 2 + weights)  # the weights' once, as no backward has used them


@pytest.mark.parametrize("matmul", MATMULS)
def test_codes_of_weights_are_kept_for_backward_alone(matmul: Any) -> None:
    model = made(WIDE, matmul)
    linear: Any = model.layers[0].attention.q
    x = torch.randn(1, 16, 32, requires_grad=True)
    before = linear(x)
    codes = linear.forward.codes
    assert codes._kept is not None
    before.sum().backward()
    assert codes._kept is None
    with torch.no_grad():
        assert torch.equal(linear(x), before)
        assert codes._kept is None
        linear.weight.mul_(2)
    assert torch.allclose(linear(x), 2 * before, rtol=1e-6)


@sampled(3)
@pytest.mark.parametrize("levers", [{}, {"optimizer_states": "8bit"}, {"update_in_backward": True}], ids=str)
def test_training_with_kept_codes_is_training_without(levers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever updates the weights, products see the new ones."""
    from tightfit.kernels.fp8.fp8_codes import WeightCodes

    case = Case(spec=WIDE, steps=4, levers=Levers(matmul="fp8-tensor", **levers))
    kept = run(case)
    monkeypatch.setattr(WeightCodes, "keep", property(lambda self: False, lambda self, value: None), raising=False)
    fresh = run(case)
    assert [r.loss for r in kept.results] == [r.loss for r in fresh.results]
    assert len({r.loss for r in kept.results}) == 4


@pytest.mark.parametrize("matmul", MATMULS)
@pytest.mark.parametrize(
    "spec", [WIDE, replace(GEMMA, head_dim=16), replace(GPT2, head_dim=16)], ids=lambda s: s.family
)
def test_models_lose_little(spec: ModelSpec, matmul: Any) -> None:
    batch = ragged_batch(4)
    plain, lossy = tiny_model(spec), made(spec, matmul)
    losses = [accumulate(model, [batch], CPU)[0].item() for model in (plain, lossy)]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    exact, found = (torch.cat([p.grad.flatten() for p in model.parameters()]) for model in (plain, lossy))
    assert (exact - found).norm() < 0.2 * exact.norm()


@pytest.mark.parametrize("matmul", MATMULS)
def test_checkpointed_layers_have_the_same_gradients(matmul: Any) -> None:
    plain, checkpointed = made(WIDE, matmul), made(WIDE, matmul)
    checkpoint_layers(checkpointed, Levers(checkpoint_every=1))
    losses = [accumulate(model, [ragged_batch(4)], CPU)[0].item() for model in (plain, checkpointed)]
    assert losses[0] == losses[1]
    for a, b in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


def test_tiles_do_not_mind() -> None:
    whole, tiled = made(WIDE, "fp8-row"), made(WIDE, "fp8-row", tiles=3)
    losses = [accumulate(model, [ragged_batch(4)], CPU)[0].item() for model in (whole, tiled)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)  # rows have their own scales, in tiles or not
    for a, b in zip(whole.parameters(), tiled.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert (a.grad - b.grad).norm() < 0.05 * a.grad.norm()


def test_what_is_left_alone() -> None:
    model = made(replace(TINY_ROUTED, head_dim=16), "fp8-tensor")
    changed = {name for name, module in model.named_modules() if "forward" in vars(module)}
    assert changed == {f"layers.{i}.attention.{which}" for i in range(2) for which in "qkvo"}
    native = tiny_model()
    use_fp8(native, "native", keep_codes=True)
    assert not any("forward" in vars(module) for module in native.modules())


def test_refusals() -> None:
    with pytest.raises(UserError, match="multiples of 16, but a linear layer is 36 × 24"):
        use_fp8(tiny_model(replace(TINY, hidden_size=36, head_dim=6)), "fp8-row", keep_codes=True)
    model = tiny_model(WIDE)
    q: Any = model.layers[0].attention.q
    q.weight = nn.Parameter(q.weight[: len(q.weight) // 2].detach())  # as a tensor rank has it
    with pytest.raises(UserError, match=r"which layout\.tensor does not split yet"):
        use_fp8(model, "fp8-tensor", keep_codes=True)


def test_a_gated_mlp_with_biases_goes_layer_by_layer() -> None:
    model = made(replace(WIDE, mlp_bias=True), "fp8-tensor")
    assert {name for name, m in model.layers[0].mlp.named_children() if "forward" in vars(m)} == {"gate", "up", "down"}
    assert isinstance(model.layers[0].mlp.up, nn.Linear)
    loss, _ = accumulate(model, [ragged_batch(2)], CPU)
    assert torch.isfinite(loss)

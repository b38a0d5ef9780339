"""Sequence tiling: the same loss and gradients as whole layers, less kept, and nothing computed three times."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.covering import sampled
from tests.distributed.training import GEMMA, GPT2, UNEVEN
from tests.train.models import TINY, TINY_ROUTED, ragged_batch, tiny_model
from tightfit.errors import UserError
from tightfit.jobs.levers import Levers
from tightfit.kernels.triton_support import Impl
from tightfit.levers.checkpointing import checkpoint_layers
from tightfit.levers.policy.tiles import head_groups
from tightfit.levers.tiled_function import in_tiles, tile_slices
from tightfit.levers.tiling import tile_layers
from tightfit.models.decoder import Decoder, Implementations
from tightfit.models.initialisation import init_weights
from tightfit.models.spec import ModelSpec
from tightfit.train.step import accumulate

CPU, aten = torch.device("cpu"), torch.ops.aten
assert TINY_ROUTED.experts is not None
SOME_ROUTED = replace(TINY_ROUTED.experts, dense_layers=(0, 2))
SPECS = {
    "llama": TINY,
    "gemma": GEMMA,
    "learned positions": GPT2,
    "uneven": UNEVEN,
    "biases": replace(TINY, mlp_bias=True, output_bias=True, qkv_bias=True),
    "some routed": replace(TINY_ROUTED, layers=3, experts=SOME_ROUTED),
}


def made(spec: ModelSpec, tiles: int, every: int = 0, glu: Impl = "auto") -> Decoder:
    """Weights are the same whatever is asked for."""
    torch.manual_seed(0)
    model = Decoder(spec, Implementations(glu=glu))
    init_weights(model)
    tile_layers(model, Levers(tiles=tiles))
    checkpoint_layers(model, Levers(checkpoint_every=every))
    return model


@sampled(5)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("tiles", "every"), [(2, 0), (3, 1), (64, 2)])
def test_loss_and_gradients_are_those_of_whole_layers(name: str, tiles: int, every: int) -> None:
    spec, batches = SPECS[name], [ragged_batch(3, seed=seed) for seed in (0, 1)]
    plain, tiled = made(spec, 1), made(spec, tiles, every)
    losses = [accumulate(model, batches, CPU)[0] for model in (plain, tiled)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for (name, a), b in zip(plain.named_parameters(), tiled.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert a.grad is not None
        assert b.grad is not None
        assert (a.grad - b.grad).norm() <= 1e-5 * a.grad.norm() + 1e-8, name


def test_every_dense_layer_is_tiled() -> None:
    lengths: list[int] = []
    model = made(replace(TINY, layers=2), 3)
    for layer in model.layers:
        layer.mlp.up.register_forward_hook(lambda module, given, out: lengths.append(given[0].shape[1]))
    with torch.no_grad():
        model(ragged_batch(2)["tokens"])
    assert lengths == [6, 6, 4] * 2


def kept_bytes(model: Decoder) -> int:
    """Bytes autograd holds between forward and backward beside weights."""
    weights, held = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}
    batch = ragged_batch(4, 48)

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(batch["tokens"], batch["labels"])
    return sum(held.values())


def test_a_layer_keeps_its_input_and_what_attention_needs() -> None:
    """Float32 bytes of x, q, k, v and the output; of two depths, as embedding and loss keep more."""
    plain, tiled = (
        kept_bytes(made(replace(TINY, layers=3), tiles)) - kept_bytes(made(replace(TINY, layers=1), tiles))
        for tiles in (1, 4)
    )
    tokens, streams = 4 * 48, 3 * 32 + 2 * 16  # x, q and the output; k and v
    statistics = 4 * tokens * TINY.heads  # SDPA's log-sum-exp
    assert tiled <= 2 * (4 * tokens * streams + statistics)
    assert plain > 2 * tiled


class CountedProducts(TorchDispatchMode):
    """Counts matrix products by the sizes of their weights."""

    def __init__(self, widths: set[int]) -> None:
        super().__init__()
        self.widths, self.rows = widths, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.mm.default, aten.addmm.default, aten.addmm_.default):
            left, right = args[-2:]
            if {left.shape[1], right.shape[1]} == self.widths:
                self.rows += left.shape[0]
        return func(*args, **(kwargs or {}))


def test_checkpointing_does_not_run_the_second_half_once_more() -> None:
    """Rows through gate, up and down: forward 3 N, 3 N again by the tiles, 3 N for the gradients of their inputs."""
    batch, spec = ragged_batch(2, 24), replace(TINY, mlp_size=80, layers=1)
    rows = []
    for tiles, every in ((4, 0), (4, 1)):
        with CountedProducts({32, 80}) as counted:
            accumulate(made(spec, tiles, every), [batch], CPU)
        rows.append(counted.rows)
    assert rows == [3 * 3 * 48] * 2


def test_a_gated_mlp_that_is_one_operation_leaves_its_last_product_out() -> None:
    """Rows through gate, up and down: forward 3 N, 2 N again by the tiles, 3 N for the gradients of their inputs."""
    batch, spec = ragged_batch(2, 24), replace(TINY, mlp_size=80, layers=1)
    plain, tiled = made(spec, 1, glu="triton"), made(spec, 4, 1, glu="triton")
    accumulate(plain, [batch], CPU)
    with CountedProducts({32, 80}) as counted:
        accumulate(tiled, [batch], CPU)
    assert counted.rows == 8 * 48
    for a, b in zip(plain.parameters(), tiled.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert (a.grad - b.grad).norm() <= 1e-5 * a.grad.norm() + 1e-8


def test_gradients_of_narrow_weights_are_summed_wide() -> None:
    """256 tiles of equal gradients: a half-precision sum of ones stops short of what float32 finds."""
    linear = nn.Linear(1, 1, bias=False).to(torch.float16)
    x = torch.full((1, 256, 1), 17.0, dtype=torch.float16, requires_grad=True)
    (y,) = in_tiles(lambda part, x: (linear(x),), [x], [linear], 256)
    y.backward(torch.full_like(y, 1.0009765625))
    assert linear.weight.grad is not None
    assert linear.weight.grad.item() == torch.tensor(256 * 17.0 * 1.0009765625).half().item()


def test_second_uses_and_inputs_without_gradients() -> None:
    linear = nn.Linear(4, 4)
    x = torch.randn(2, 5, 4)
    (y,) = in_tiles(lambda part, x: (linear(x),), [x], [linear], 2)
    y.sum().backward(retain_graph=True)
    assert linear.weight.grad is not None
    first = linear.weight.grad.clone()
    y.sum().backward()
    assert torch.allclose(linear.weight.grad, 2 * first)
    assert torch.allclose(first, x.sum((0, 1)).expand(4, 4), atol=1e-6)
    with torch.no_grad():
        assert not in_tiles(lambda part, x: (linear(x),), [x], [linear], 2)[0].requires_grad


def test_tiles_and_groups() -> None:
    assert [(s.start, s.stop) for s in tile_slices(10, 4)] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert [(s.start, s.stop) for s in tile_slices(2, 4)] == [(0, 1), (1, 2)]
    assert [head_groups(8, tiles) for tiles in (2, 3, 7, 100)] == [2, 2, 4, 8]
    assert head_groups(3, 2) == 1


def test_routed_models_are_refused() -> None:
    with pytest.raises(UserError, match=r"levers\.tiles is 2, but all MLPs of mixtral are routed"):
        tile_layers(tiny_model(TINY_ROUTED), Levers(tiles=2))

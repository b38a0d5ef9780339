"""MasterAdamW against torch's own AdamW, its decay groups, its buckets and its saved state."""

import pytest
import torch

from tests.train.models import assert_trained_alike, ragged_batch, tiny_model
from tightfit.compress.structure.pruning import Sparsity, magnitude
from tightfit.errors import UserError
from tightfit.jobs.job import Optimizer
from tightfit.jobs.levers import Levers
from tightfit.models.decoder import Decoder
from tightfit.models.resolve import resolve_spec
from tightfit.train.optimizer import adamw as optimizer_module
from tightfit.train.optimizer.adamw import MasterAdamW, decays, global_norm
from tightfit.train.precision import LossScale
from tightfit.train.step import accumulate, train_step

CPU = torch.device("cpu")
SETTINGS = Optimizer(lr=1e-2, weight_decay=0.1, clip_norm=0.0)


def test_float32_equals_torch_adamw() -> None:
    ours, theirs = tiny_model(), tiny_model()
    optimizer = MasterAdamW(ours, SETTINGS)
    groups = [
        {"params": [p for p in theirs.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=SETTINGS.betas, eps=SETTINGS.eps)
    for step in range(5):
        batch = ragged_batch(4, seed=step)
        train_step(ours, optimizer, [batch], CPU, 1e-2, LossScale())
        accumulate(theirs, [batch], CPU)
        reference.step()
        reference.zero_grad()
    assert_trained_alike(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_follow_float32_adamw_fed_with_the_same_gradients(dtype: torch.dtype) -> None:
    model = tiny_model()
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = MasterAdamW(model, SETTINGS, dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    references = {name: torch.nn.Parameter(value) for name, value in initial.items()}
    groups = [
        {"params": [p for n, p in references.items() if decays(n, p) is decay], "weight_decay": 0.1 * decay}
        for decay in (True, False)
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=SETTINGS.betas, eps=SETTINGS.eps)
    for step in range(3):
        accumulate(model, [ragged_batch(4, seed=step)], CPU)
        for name, p in model.named_parameters():
            assert p.grad is not None
            references[name].grad = p.grad.float()
        adamw.step()
        optimizer.step(1e-2)
    for name, p in model.named_parameters():
        master = optimizer.state()[f"master/{name}"]
        assert torch.allclose(master, references[name], rtol=1e-4, atol=1e-6), name
        assert torch.equal(p, master.to(dtype)), name
        assert p.grad is None


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_l1_is_a_proximal_step_after_the_update(dtype: torch.dtype | None) -> None:
    """w ← sign(w) · max(|w| − lr · l1, 0) of matrices, and of their float32 masters; others only decay."""
    plain, shrunk = tiny_model(), tiny_model()
    lr, l1 = 1e-2, 0.3
    before, after = (
        MasterAdamW(model, SETTINGS.model_copy(update={"l1": by}), dtype) for model, by in ((plain, 0.0), (shrunk, l1))
    )
    for model, optimizer in ((plain, before), (shrunk, after)):
        accumulate(model, [ragged_batch(4, seed=0)], CPU)
        optimizer.step(lr)
    updated = dict(plain.named_parameters()) if dtype is None else before.state()
    for name, weight in shrunk.named_parameters():
        master = weight if dtype is None else after.state()[f"master/{name}"]
        start = updated[name if dtype is None else f"master/{name}"].double()
        expected = start.sign() * (start.abs() - lr * l1).clamp(min=0) if decays(name, weight) else start
        torch.testing.assert_close(master.double(), expected, rtol=1e-6, atol=1e-9)
        assert torch.equal(weight, master.to(weight.dtype))
        assert bool((master == 0).any()) is decays(name, weight)


@pytest.mark.parametrize(
    ("dtype", "levers"),
    [
        (None, Levers()),
        (torch.bfloat16, Levers()),
        (None, Levers(update_in_backward=True)),
        (None, Levers(optimizer_states="8bit")),
    ],
    ids=["float32", "masters", "in backward", "8 bits"],
)
def test_zeros_of_a_pruned_model_stay(dtype: torch.dtype | None, levers: Levers) -> None:
    """Exactly the pruned ones, step after step, while the others learn; norms that are zero may leave it."""
    model, batch = tiny_model(), ragged_batch(4, seed=0)
    matrices = {name: p for name, p in model.named_parameters() if decays(name, p)}
    with torch.no_grad():
        for matrix in matrices.values():
            matrix.copy_(magnitude(matrix, Sparsity(share=0.5)))
        norm = next(p for p in model.parameters() if p.ndim == 1)
        norm[0] = 0.0
    pruned = {name: matrix == 0 for name, matrix in matrices.items()}
    before = float(accumulate(model, [batch], CPU)[0])
    model.zero_grad()
    optimizer = MasterAdamW(model, Optimizer(lr=1e-2, keep_zeros=True), dtype, levers)
    for _ in range(8):
        train_step(model, optimizer, [batch], CPU, 1e-2, LossScale())
    for name, matrix in matrices.items():
        assert torch.equal(matrix == 0, pruned[name]), name
    assert float(norm[0].detach()) != 0
    assert float(accumulate(model, [batch], CPU)[0]) < 0.9 * before


def test_half_of_what_was_trained_with_l1_can_go() -> None:
    """The loss of one batch after half of every matrix was pruned by magnitude."""
    batch, pruned_losses = ragged_batch(4, seed=0), {}
    for l1 in (0.0, 0.2):
        model = tiny_model()
        optimizer = MasterAdamW(model, Optimizer(lr=1e-2, weight_decay=0.0, clip_norm=0.0, l1=l1))
        for _ in range(60):
            train_step(model, optimizer, [batch], CPU, 1e-2, LossScale())
        with torch.no_grad():
            for matrix in (p for p in model.parameters() if p.ndim >= 2):
                matrix.copy_(magnitude(matrix, Sparsity(share=0.5)))
        pruned_losses[l1] = float(accumulate(model, [batch], CPU)[0])
    assert pruned_losses[0.2] < 0.6 * pruned_losses[0.0]


def test_master_weights_keep_updates_that_bf16_alone_would_lose() -> None:
    model = tiny_model()
    optimizer = MasterAdamW(model, SETTINGS, torch.bfloat16)
    with torch.no_grad():
        optimizer.state()["master/norm.weight"].fill_(1.0)
    for step in range(20):
        accumulate(model, [ragged_batch(4, seed=step)], CPU)
        optimizer.step(1e-5)
    moved = (optimizer.state()["master/norm.weight"] - 1.0).abs().max()
    assert 0 < float(moved) < 2**-8


def test_buckets_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tiny_model()
    first = MasterAdamW(whole, SETTINGS, torch.bfloat16)
    monkeypatch.setattr(optimizer_module, "BUCKET_BYTES", 8192)
    cut = tiny_model()
    second = MasterAdamW(cut, SETTINGS, torch.bfloat16)
    assert len(second.buckets) > len(first.buckets)
    for step in range(3):
        batch = ragged_batch(4, seed=step)
        for model, optimizer in ((whole, first), (cut, second)):
            train_step(model, optimizer, [batch], CPU, 1e-2, LossScale())
    for a, b in zip(whole.parameters(), cut.parameters(), strict=True):
        assert torch.equal(a, b)


def test_only_matrices_decay() -> None:
    matrix, vector = torch.zeros(2, 2), torch.zeros(2)
    assert decays("layers.0.attention.q.weight", matrix)
    assert decays("embed.weight", matrix)
    assert not decays("positions.weight", matrix)
    assert not decays("layers.0.attention.q.bias", vector)
    assert not decays("norm.weight", vector)


def test_stacked_biases_of_experts_do_not_decay() -> None:
    with torch.device("meta"):
        model = Decoder(resolve_spec("tiny-gpt-oss"))
    biases = {name for name, parameter in model.named_parameters() if name.endswith("bias")}
    assert {"layers.0.mlp.experts.gate_bias", "layers.0.mlp.experts.down_bias"} <= biases
    assert not {name for name, parameter in model.named_parameters() if decays(name, parameter)} & biases


def test_global_norm_is_float32_for_half_gradients() -> None:
    parts = [torch.full((1000,), 0.01, dtype=torch.bfloat16), torch.full((7, 3), 2.0, dtype=torch.bfloat16)]
    truth = torch.cat([part.double().flatten() for part in parts]).norm()
    assert float(global_norm(parts)) == pytest.approx(float(truth), rel=1e-5)


def test_state_round_trip_and_refusals() -> None:
    model = tiny_model()
    optimizer = MasterAdamW(model, SETTINGS, torch.bfloat16)
    train_step(model, optimizer, [ragged_batch(4)], CPU, 1e-2, LossScale())
    saved = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    other = MasterAdamW(tiny_model(seed=1), SETTINGS, torch.bfloat16)
    other.load_state(saved, "a file")
    assert all(torch.equal(other.state()[name], saved[name]) for name in saved)
    with pytest.raises(UserError, match=r"master/norm\.weight"):
        other.load_state({n: t for n, t in saved.items() if n != "master/norm.weight"}, "a file")
    with pytest.raises(UserError, match=r"exp_avg/norm\.weight"):
        other.load_state({**saved, "exp_avg/norm.weight": torch.zeros(3)}, "a file")

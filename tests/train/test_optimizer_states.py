"""Every format of Adam's moments: its bytes, its arithmetic, accumulation, clipping, loss scaling and resuming."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.covering import sampled
from tests.train.models import TINY, TINY_ROUTED, ragged_batch, tiny_model
from tightfit.errors import UserError
from tightfit.jobs.job import Optimizer
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.jobs.workload import Workload
from tightfit.kernels.optimizer.adamw8bit import dequantized
from tightfit.models.decoder import Decoder
from tightfit.prove.rehearsal import rehearse
from tightfit.train.assembly import assemble
from tightfit.train.optimizer.adamw import MasterAdamW
from tightfit.train.precision import LossScale
from tightfit.train.step import train_step

CPU = torch.device("cpu")
SETTINGS = Optimizer(lr=1e-2, weight_decay=0.1, clip_norm=0.0)
FORMATS = ("fp32", "bf16", "8bit", "factored")
PRECISIONS = ("fp32", "bf16", "fp16", "pure-bf16")


def assembled(
    precision: Any, settings: Optimizer = SETTINGS, seed: int = 0, **levers: Any
) -> tuple[Decoder, MasterAdamW]:
    model = tiny_model()
    _, optimizer = assemble(
        model, None, Layout(), Levers(**levers), precision, settings, CPU, lambda decoder: None, seed
    )
    return model, optimizer


def trained(precision: Any, steps: int = 3, settings: Optimizer = SETTINGS, parts: int = 1, **levers: Any) -> Decoder:
    model, optimizer = assembled(precision, settings, **levers)
    for step in range(steps):
        batch = ragged_batch(4, seed=step)
        micro = [
            dict(zip(batch, rows, strict=True)) for rows in zip(*(t.chunk(parts) for t in batch.values()), strict=True)
        ]
        train_step(model, optimizer, micro, CPU, settings.lr, LossScale.for_precision(precision))
    return model


def moment_bytes(form: str, weight: Tensor) -> int:
    """By counting, from the table in levers/optimizer_states.py."""
    count, width = weight.numel(), weight.shape[-1]
    if form in ("fp32", "bf16") or weight.ndim < 2:
        return count * (4 if form == "bf16" else 8)
    rows = count // width
    if form == "8bit":
        return 2 * count + 2 * 4 * rows * -(-width // 256)
    matrices = rows // weight.shape[-2]
    return 2 * count + 4 * rows + 4 * matrices * width


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_states_have_the_bytes_that_are_promised(precision: str, form: str) -> None:
    model, optimizer = assembled(precision, optimizer_states=form)
    held = {name: t for name, t in optimizer.state().items() if not name.startswith("step/")}
    masters = sum(t.nbytes for name, t in held.items() if name.startswith("master/"))
    assert masters == (4 * sum(p.numel() for p in model.parameters()) if precision in ("bf16", "fp16") else 0)
    moments = sum(t.nbytes for t in held.values()) - masters
    assert moments == sum(moment_bytes(form, p) for p in model.parameters())


@sampled(4)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("precision", ["bf16", "pure-bf16"])
def test_the_simulation_sees_those_bytes(precision: Any, form: str) -> None:
    """On shapes whose states fill whole blocks of the allocator, which is what it counts."""
    spec = replace(TINY, hidden_size=128, head_dim=32, mlp_size=512, vocab_size=1024)
    workload = Workload(spec=spec, sequence_length=32, global_batch=1, precision=precision)
    ledger = rehearse(workload, Layout(micro_batch=1), Levers.model_validate({"optimizer_states": form}))
    found = sum(x.bytes for x in ledger.lines if x.component == "optimizer states" and x.phase == "optimizer")
    assert found == sum(moment_bytes(form, p) for p in Decoder(spec).parameters())


def test_stacked_experts_are_factored_one_by_one() -> None:
    model = tiny_model(TINY_ROUTED)
    optimizer = MasterAdamW(model, SETTINGS, None, Levers(optimizer_states="factored"))
    stacked = {n: p for n, p in model.named_parameters() if p.ndim == 3}
    assert stacked
    for name, p in stacked.items():
        assert optimizer.state()[f"exp_avg_sq_row/{name}"].shape == p.shape[:2]
        assert optimizer.state()[f"exp_avg_sq_column/{name}"].shape == (p.shape[0], p.shape[2])
    before = {n: p.detach().clone() for n, p in stacked.items()}
    train_step(model, optimizer, [ragged_batch(4)], CPU, 1e-2, LossScale())
    assert all(not torch.equal(p, before[n]) for n, p in stacked.items())


@pytest.mark.parametrize(("precision", "form"), [("bf16", "fp32"), ("fp32", "fp32"), ("pure-bf16", "bf16")])
def test_auto_and_its_own_name_are_the_same(precision: str, form: str) -> None:
    """And so is our kernel, up to the last bit, where it does what torch's does."""
    auto, named = trained(precision), trained(precision, optimizer_states=form)
    for a, b in zip(auto.parameters(), named.parameters(), strict=True):
        assert torch.equal(a, b)


@sampled(2)
@pytest.mark.parametrize(
    ("precision", "form", "near"),
    [
        ("fp32", "bf16", 0.004),
        ("fp32", "8bit", 0.02),
        ("bf16", "bf16", 0.004),
        ("bf16", "8bit", 0.02),
        ("fp16", "8bit", 0.02),
    ],
)
def test_updates_are_near_those_with_float32_moments(precision: str, form: str, near: float) -> None:
    """‖found − truth‖ relative to how far the weights have moved; a moment that is dropped or mixed up is 0.3 off."""
    start = dict(tiny_model().named_parameters())
    truth, found = trained(precision), trained(precision, optimizer_states=form)
    for (name, a), b in zip(found.named_parameters(), truth.parameters(), strict=True):
        if a.ndim < 2:
            continue
        moved = (b - start[name]).float().norm()
        noise = 2**-9 * a.float().norm() * (precision != "fp32")  # of weights rounded to 16 bits
        assert (a.float() - b.float()).norm() <= near * moved + 3 * noise, name


def test_narrow_weights_with_float32_moments_are_float32_adam_rounded_once() -> None:
    layer = torch.nn.Linear(6, 5, bias=False, dtype=torch.bfloat16)
    ours = MasterAdamW(layer, SETTINGS, None, Levers(optimizer_states="fp32"))
    theirs = torch.nn.Parameter(layer.weight.detach().float())
    adam = torch.optim.AdamW([theirs], lr=1e-2, betas=SETTINGS.betas, eps=SETTINGS.eps, weight_decay=0.1)
    for _ in range(5):
        layer.weight.grad = torch.randn(5, 6).bfloat16()
        theirs.grad = layer.weight.grad.float()
        ours.step(1e-2)
        adam.step()
        assert torch.allclose(layer.weight.float(), theirs.detach(), rtol=2**-8, atol=0)
        theirs.data = layer.weight.detach().float()
    assert torch.allclose(ours.state()["exp_avg_sq/weight"], adam.state[theirs]["exp_avg_sq"], rtol=1e-5)


def test_factored_is_adam_where_squares_have_rank_one() -> None:
    torch.manual_seed(1)
    layer = torch.nn.Linear(6, 5, bias=False)
    start, row, column = layer.weight.detach().clone(), torch.rand(5) + 0.1, torch.rand(6) + 0.1
    theirs = torch.nn.Parameter(start.clone())
    adam = torch.optim.AdamW([theirs], lr=1e-2, betas=SETTINGS.betas, eps=1e-8, weight_decay=0.1)
    ours = MasterAdamW(layer, SETTINGS, None, Levers(optimizer_states="factored"))
    for _ in range(4):
        signs = torch.randn(5, 6).sign()
        layer.weight.grad, theirs.grad = (torch.outer(row, column) * signs for _ in range(2))
        ours.step(1e-2)
        adam.step()
    assert (layer.weight - theirs).abs().max() < 0.005 * (theirs - start).abs().max()  # the first moment is bf16


def test_factored_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained("fp32", optimizer_states="factored")
    monkeypatch.setattr("tightfit.levers.optimizer_states.FACTORED_CHUNK_ELEMENTS", 7 * TINY.hidden_size)
    cut = trained("fp32", optimizer_states="factored")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), cut.parameters(), strict=True))


@sampled(2)
@pytest.mark.parametrize("form", FORMATS)
def test_accumulation_and_clipping(form: str) -> None:
    clipped = SETTINGS.model_copy(update={"clip_norm": 0.05})
    start, whole = tiny_model(), trained("fp32", settings=clipped, optimizer_states=form)
    parts, free = (trained("fp32", settings=s, parts=2, optimizer_states=form) for s in (clipped, SETTINGS))
    different = False
    for a, b, c, before in zip(*(m.parameters() for m in (whole, parts, free, start)), strict=True):
        assert (a - b).norm() <= 5e-3 * (a - before).norm()
        different |= bool((b - c).norm() > 1e-2 * (a - before).norm())
    assert different, "clipping changed nothing"


def as_numbers(states: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every state in float32, 8-bit codes as the numbers that they stand for."""
    scales = {name.replace("/", "_scale/", 1): name for name, tensor in states.items() if tensor.itemsize == 1}
    wide = {name: tensor.float() for name, tensor in states.items() if name not in scales}
    return wide | {codes: dequantized(states[codes], states[scale]) for scale, codes in scales.items()}


@pytest.mark.parametrize("form", FORMATS)
def test_loss_scaling_cancels_and_overflow_leaves_states_alone(form: str) -> None:
    """Scales are powers of two: fp16 gradients differ by the rounding of subnormal numbers alone, whichever CPU it is.

    That puts single numbers of a narrow format on the other side of an edge, so tensors are compared as wholes: within
    2⁻⁶, sixteen spacings of fp16. Moments of one scale taken for the other's are off by a factor of 64, or of 4096.
    """
    start = {name: p.detach().float() for name, p in tiny_model().named_parameters()}
    models = []
    for scale in (2.0**4, 2.0**10):
        model, optimizer = assembled("fp16", optimizer_states=form)
        train_step(model, optimizer, [ragged_batch(4)], CPU, 1e-2, LossScale(value=scale, dynamic=True))
        models.append({n: t.clone() for n, t in optimizer.state().items()})
    small, large = (as_numbers(states) for states in models)
    for name, tensor in small.items():
        kind, _, parameter = name.partition("/")
        size = (tensor - start[parameter]).norm() if kind == "master" else tensor.norm()
        assert (tensor - large[name]).norm() <= 2**-6 * size, name
    before = {n: t.clone() for n, t in optimizer.state().items()}
    skipped = train_step(model, optimizer, [ragged_batch(4)], CPU, 1e-2, LossScale(value=2.0**40, dynamic=True))
    assert skipped.skipped
    assert all(torch.equal(t, before[n]) for n, t in optimizer.state().items())


@sampled(3)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_saved_states_go_on_to_the_same_bits(form: str, rounding: str) -> None:
    """Three steps, or two and one with everything carried over by name."""
    levers: dict[str, Any] = {"optimizer_states": form, "rounding": rounding}
    model, optimizer = assembled("pure-bf16", **levers)
    for step in range(3):
        if step == 2:
            weights = {n: t.clone() for n, t in model.state_dict().items()}
            saved = {n: t.clone() for n, t in optimizer.state().items()}
        train_step(model, optimizer, [ragged_batch(2, 8, seed=step)], CPU, 1e-2, LossScale())
    other, resumed = assembled("pure-bf16", **levers)
    other.load_state_dict(weights)
    resumed.load_state(saved, "a file")
    train_step(other, resumed, [ragged_batch(2, 8, seed=2)], CPU, 1e-2, LossScale())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(t, resumed.state()[n]) for n, t in optimizer.state().items())


def test_states_of_another_format_are_refused() -> None:
    _, wide = assembled("bf16", optimizer_states="fp32")
    _, eight = assembled("bf16", optimizer_states="8bit")
    _, narrow = assembled("bf16", optimizer_states="bf16")
    with pytest.raises(UserError, match="exp_avg_s"):
        eight.load_state(wide.state(), "a file")
    with pytest.raises(UserError, match=r"needs torch\.bfloat16"):
        narrow.load_state(wide.state(), "a file")


def test_stochastic_rounding_keeps_updates_that_nearest_loses() -> None:
    """Updates of 1/4000 of a weight, which is a sixteenth of bf16's spacing: lost, or right on average."""
    moved = {}
    for rounding in ("nearest", "stochastic"):
        layer = torch.nn.Linear(100, 100, bias=False, dtype=torch.bfloat16)
        torch.nn.init.ones_(layer.weight)
        settings = Optimizer(lr=1, weight_decay=0.0, clip_norm=0.0)
        optimizer = MasterAdamW(layer, settings, None, Levers(rounding=rounding, optimizer_states="fp32"))
        for _ in range(40):
            layer.weight.grad = torch.full_like(layer.weight, -1.0)
            optimizer.step(2.0**-12)
        moved[rounding] = float(layer.weight.detach().float().mean()) - 1
    assert moved["nearest"] == 0
    assert moved["stochastic"] == pytest.approx(40 * 2.0**-12, rel=0.03)


def test_seeds_round_differently_and_the_same_one_alike() -> None:
    models = []
    for seed in (0, 0, 1):
        model, optimizer = assembled("pure-bf16", seed=seed, rounding="stochastic")
        train_step(model, optimizer, [ragged_batch(4)], CPU, 1e-3, LossScale())
        models.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])

"""Choices of experts: groups, corrections, scales; and a bias that balances their load."""

from typing import Any

import pytest
import torch

from tests.train.models import TINY_ROUTED, ragged_batch, tiny_model
from tightfit.errors import UserError
from tightfit.jobs.experts import ExpertTraining
from tightfit.jobs.job import Optimizer
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.layers.routing import choose, scored, z_loss
from tightfit.models.presets import preset
from tightfit.models.spec import Experts
from tightfit.parallel.ranks import ALONE
from tightfit.train.expert_load import CORRECTION_RATE, ExpertMeter, correct_choices
from tightfit.train.optimizer.adamw import MasterAdamW
from tightfit.train.precision import LossScale
from tightfit.train.step import train_step

GROUPED = Experts(count=8, per_token=3, mlp_size=4, groups=4, chosen_groups=2, normalise=False, scale=2.0)


def test_experts_are_of_the_chosen_groups() -> None:
    scores = scored(torch.randn(50, 8), "softmax")
    weights, chosen = choose(scores, GROUPED)
    for row in range(50):
        best = scores[row].view(4, 2).amax(-1).topk(2).indices
        allowed = {2 * int(group) + offset for group in best for offset in (0, 1)}
        wanted = sorted(allowed, key=lambda expert: -float(scores[row, expert]))[:3]
        assert chosen[row].tolist() == wanted
    assert torch.equal(weights, 2 * scores.gather(1, chosen))


def test_the_z_loss_is_st_moes() -> None:
    """(1/N) Σ_t (log Σ_e e^x)², and its gradient 2/N · z · softmax(x), in float64 by hand."""
    logits = torch.randn(7, 5, requires_grad=True)
    z_loss(logits).backward()
    exact = logits.detach().double()
    z = exact.exp().sum(-1).log()
    assert logits.grad is not None
    torch.testing.assert_close(z_loss(logits).item(), float((z**2).mean()), rtol=1e-6, atol=0)
    torch.testing.assert_close(logits.grad.double(), 2 / 7 * z[:, None] * exact.softmax(-1), rtol=1e-5, atol=1e-7)


def test_training_adds_the_z_loss_and_tells_what_was_dropped() -> None:
    spec = ExpertTraining(z_loss=0.5, capacity_factor=0.5).applied(TINY_ROUTED)
    assert spec.experts is not None
    model, plain = tiny_model(spec), tiny_model(TINY_ROUTED)
    batch = ragged_batch(2)
    mlp: Any = model.layers[0].mlp
    x = torch.randn(2, 8, spec.hidden_size)
    logits = mlp.router(x.flatten(0, 1))
    without: Any = plain.layers[0].mlp
    wanted = without(x)[1] + 0.5 * z_loss(logits)
    torch.testing.assert_close(mlp(x)[1], wanted)
    with torch.no_grad():  # nothing is dropped where nothing is trained
        torch.testing.assert_close(model(batch["tokens"]).logits, plain(batch["tokens"]).logits)
    meter = ExpertMeter(model, ALONE)
    meter.take()
    train_step(model, MasterAdamW(model, Optimizer(lr=1e-3)), [batch], torch.device("cpu"), 1e-3, LossScale())
    told = meter.take()
    assert 0.5 <= told["experts_dropped"] < 1
    assert "experts_dropped" not in ExpertMeter(plain, ALONE).take()


def test_a_dense_model_has_no_capacity() -> None:
    with pytest.raises(UserError, match=r"experts.capacity_factor is 1.25, but llama has no experts; drop it"):
        ExpertTraining(capacity_factor=1.25).applied(preset("tiny-llama"))


def test_a_bias_says_who_is_chosen_and_not_how_much() -> None:
    experts = Experts(count=8, per_token=2, mlp_size=4, score="sigmoid", corrected=True)
    scores = scored(torch.randn(20, 8), "sigmoid")
    bias = torch.zeros(8)
    bias[5] = 10.0
    weights, chosen = choose(scores, experts, bias)
    assert bool((chosen == 5).any(1).all())
    expected = scores.gather(1, chosen)
    torch.testing.assert_close(weights, expected / expected.sum(-1, keepdim=True))


def test_biases_move_against_the_load_of_each_step() -> None:
    torch.manual_seed(0)
    spec = preset("tiny-deepseek-v3")
    model = Decoder(spec)
    init_weights(model)
    optimizer = MasterAdamW(model, Optimizer(lr=1e-3))
    mlp: Any = model.layers[1].mlp
    for step in range(2):
        before, counted = mlp.correction.clone(), 0 if mlp.load is None else mlp.load.clone()
        train_step(model, optimizer, [ragged_batch(2, seed=step)] * 2, torch.device("cpu"), 1e-3, LossScale())
        load = (mlp.load - counted).float()
        assert load.sum() == 2 * 2 * 16 * 2  # micro-batches × rows × tokens × experts a token
        wanted = before + CORRECTION_RATE * torch.sign(load.mean() - load)
        torch.testing.assert_close(mlp.correction.data, wanted)
    meter = ExpertMeter(model, ALONE)
    assert meter.take()["expert_load_max"] >= 1
    assert not mlp.load.any()
    before = mlp.correction.clone()
    correct_choices(model, ALONE)  # nothing has run since
    assert torch.equal(mlp.correction, before)


def test_a_hot_expert_cools_down() -> None:
    """Tokens all alike, which one expert would get, are spread by the bias alone."""
    experts = Experts(count=4, per_token=1, mlp_size=4, score="sigmoid", corrected=True)
    torch.manual_seed(0)
    scores = scored(torch.randn(400, 4) * 0.01 + torch.tensor([0.1, 0.0, 0.0, 0.0]), "sigmoid")
    bias = torch.zeros(4)
    loads = []
    for _ in range(60):
        _, chosen = choose(scores, experts, bias)
        loads.append(torch.bincount(chosen.flatten(), minlength=4).float())
        bias += CORRECTION_RATE * torch.sign(loads[-1].mean() - loads[-1])
    assert loads[0].max() > 380
    assert loads[-1].max() < 200

"""Optimizers of others in the place of ours: torch's own AdamW that way is what our plain updater makes of it."""

import pytest
import torch
from torch import Tensor, nn

from benchmarks.peers.updaters import PeerUpdater, use_peer
from tightfit.errors import UserError
from tightfit.jobs.job import Optimizer
from tightfit.train.optimizer.adamw import MasterAdamW, decays

SETTINGS = Optimizer(lr=1e-2)


def trained(*, peer: bool) -> tuple[list[Tensor], MasterAdamW]:
    """Five steps with given gradients, halved, on masters of a bf16 model; vectors are not decayed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 4))
    optimizer = MasterAdamW(model, SETTINGS, torch.bfloat16)
    if peer:
        for bucket in optimizer.buckets:
            decay = SETTINGS.weight_decay if decays(bucket.names[0], bucket.parameters[0]) else 0.0
            bucket.updater = PeerUpdater(bucket.masters, torch.optim.AdamW, SETTINGS, decay)
    generator = torch.Generator().manual_seed(1)
    for step in range(5):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
        optimizer.step(1e-2 / (step + 1), torch.tensor(0.5))
    return [*model.parameters()], optimizer


def test_updates_are_those_of_the_plain_updater() -> None:
    (theirs, peer), (ours, plain) = trained(peer=True), trained(peer=False)
    for there, here in zip(theirs, ours, strict=True):
        assert there.grad is None
        assert torch.equal(there, here)
    held, wanted = peer.state(), plain.state()
    assert held.keys() == wanted.keys()
    for name, tensor in held.items():
        assert torch.allclose(tensor, wanted[name], rtol=1e-5, atol=1e-7), name


def test_who_is_not_installed_gets_a_sentence() -> None:
    _, optimizer = trained(peer=False)
    with pytest.raises(UserError, match=r"'nobody' is not installed; install one of torchao, bitsandbytes"):
        use_peer(optimizer, "nobody")

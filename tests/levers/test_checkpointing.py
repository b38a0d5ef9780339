"""Activation checkpointing changes memory, not numbers."""

import pytest
import torch

from tests.train.models import TINY, TINY_ROUTED, ragged_batch, tiny_model
from tightfit.jobs.levers import Levers
from tightfit.levers.checkpointing import checkpoint_layers
from tightfit.models.spec import ModelSpec
from tightfit.train.step import accumulate

CPU = torch.device("cpu")


def saved_bytes(every: int) -> int:
    """Bytes autograd holds between forward and backward."""
    model = tiny_model()
    checkpoint_layers(model, Levers(checkpoint_every=every))
    batch = ragged_batch(4)
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(batch["tokens"], batch["labels"], documents=batch["documents"])
    return sum(held.values())


@pytest.mark.parametrize("spec", [TINY, TINY_ROUTED], ids=["dense", "routed"])
@pytest.mark.parametrize("every", [1, 2])
def test_loss_and_gradients_are_bit_identical(spec: ModelSpec, every: int) -> None:
    plain, checkpointed = tiny_model(spec), tiny_model(spec)
    checkpoint_layers(checkpointed, Levers(checkpoint_every=every))
    losses = [accumulate(model, [ragged_batch(4)], CPU)[0] for model in (plain, checkpointed)]
    assert torch.equal(*losses)
    for (name, a), b in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad), name


def test_it_saves_memory_in_order() -> None:
    none, second, all_layers = saved_bytes(0), saved_bytes(2), saved_bytes(1)
    assert all_layers < second < none

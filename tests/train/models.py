"""A model small enough to train in milliseconds, shared by the tests of this folder."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.spec import Experts, ModelSpec

TINY = ModelSpec(
    family="llama",
    vocab_size=96,
    hidden_size=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_size=64,
    max_positions=64,
)
TINY_ROUTED = ModelSpec(
    family="mixtral",
    vocab_size=96,
    hidden_size=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_size=64,
    max_positions=64,
    experts=Experts(count=4, per_token=2, mlp_size=32, balance_weight=0.01),
)


def tiny_model(spec: ModelSpec = TINY, seed: int = 0) -> Decoder:
    """A seeded decoder."""
    torch.manual_seed(seed)
    model = Decoder(spec)
    init_weights(model)
    return model


def assert_trained_alike(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], near: float = 1e-4) -> None:
    """Weights of two runs of `tiny_model()` in float32 differ by little of the way that they have gone.

    As wholes: a gradient that is nearly zero is rounding noise, which differs between CPUs, and Adam makes as long a
    step of it as of any other. What a wrong decay, moment or clipping changes is a hundred times `near` at least.
    """
    start = tiny_model().state_dict()
    for name, weight in wanted.items():
        assert (found[name] - weight).norm() <= near * (weight - start[name]).norm(), name


def ragged_batch(rows: int, length: int = 16, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random rows whose labels are masked unevenly, one of them wholly, and which hold two documents each."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 96, (rows, length), generator=generator)
    labels = torch.randint(0, 96, (rows, length), generator=generator)
    kept = torch.randint(0, length + 1, (rows,), generator=generator)
    kept[0] = 0
    labels[torch.arange(length)[None] >= kept[:, None]] = -100
    documents = (torch.arange(length)[None] >= length // 3).int().expand(rows, -1).contiguous()
    return {"tokens": tokens, "labels": labels, "documents": documents}

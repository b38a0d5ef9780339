"""Chooses the loss: fused with the output projection, a chunk of logits at a time, or computed from all logits."""

from dataclasses import replace

from tightfit.jobs.levers import Levers
from tightfit.models.decoder import Decoder


def choose_loss(model: Decoder, levers: Levers) -> None:
    """Make `model` compute its loss as `levers` say; a fused loss keeps the implementation it had."""
    impl = "eager" if levers.loss == "plain" else model.impl.linear_cross_entropy
    model.impl = replace(model.impl, linear_cross_entropy=impl, loss_chunk_bytes=levers.loss_chunk_bytes)

"""Activation checkpointing: keep only a layer's input, run the layer again in backward (Chen et al. 2016).

Applied from outside by giving chosen layers a `forward` that checkpoints; names and weights stay as they are.
"""

from functools import partial

from torch.utils.checkpoint import checkpoint

from tightfit.models.decoder import Decoder


def checkpoint_layers(model: Decoder, every: int) -> None:
    """Recompute every `every`-th layer in backward; 1 means all of them, 0 none."""
    if every == 0:
        return
    for index, layer in enumerate(model.layers):
        if index % every == 0:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

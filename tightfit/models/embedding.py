"""Embeddings of texts: the mean over positions of the decoder's last normed states, scaled to length one.

A decoder trained to continue texts is no trained embedding model; its states are good enough to find similar texts.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tightfit.models.decoder import Decoder


@torch.inference_mode()
def embed(model: Decoder, texts: Sequence[Sequence[int]]) -> Tensor:
    """One row per text, float32 [texts, H]."""
    return torch.stack([_embedded(model, tokens) for tokens in texts])


def _embedded(model: Decoder, tokens: Sequence[int]) -> Tensor:
    return F.normalize(last_states(model, tokens).float().mean(0), dim=0).cpu()


def last_states(model: Decoder, tokens: Sequence[int]) -> Tensor:
    """The last normed states of a text, [tokens, H]."""
    ids = torch.tensor([list(tokens)], device=model.embed.weight.device)
    positions = model.token_positions(ids, None, None)
    x = model.embed_tokens(ids, positions)
    shared = model.forward_context(x, positions, None, None)
    for layer in model.layers:
        x, _ = layer(x, shared)
    states: Tensor = model.norm(x)[0]
    return states

"""The script that times blocks of keys: what it tries, and that it computes attention."""

import torch

from benchmarks.decode_attention import SHAPES, TINY_LOADS, TINY_SHAPES, Layers, cuts
from tightfit.kernels.decoding.paged_attention import KeyBlocks, key_blocks


def test_what_is_in_use_is_tried_first() -> None:
    for shape in SHAPES:
        tried = list(cuts(shape, tiny=False))
        assert tried[0] == key_blocks(shape.head, 2, 2)
        assert len(set(tried)) > 10


def test_layers_attend_like_the_reference() -> None:
    layers = Layers(TINY_SHAPES[0], TINY_LOADS[0], torch.device("cpu"))
    assert layers.error(KeyBlocks(keys=16, warps=2, stages=2)) < 1e-5

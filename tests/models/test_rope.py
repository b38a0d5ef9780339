"""Rotary positions: frequencies of real models against transformers' own functions, and what a rotation is."""

import math

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tightfit.kernels.attention.rope import rotate
from tightfit.models.huggingface.config import config_from_spec
from tightfit.models.layers.rope import frequencies, tables
from tightfit.models.presets import preset
from tightfit.models.spec import Rope


def positions(length: int) -> torch.Tensor:
    return torch.arange(length)[None]


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("llama-3.1-8b", 100),
        ("llama-3.2-1b", 100_000),
        ("phi-3-mini-128k", 4096),
        ("phi-3-mini-128k", 4097),
        ("phi-4-mini", 10),
        ("phi-4-mini", 100_000),
    ],
)
def test_frequencies_of_published_models(name: str, length: int) -> None:
    spec = preset(name)
    assert spec.rope is not None
    config = transformers.AutoConfig.for_model(**config_from_spec(spec, dtype="float32"))
    wanted, wanted_scale = ROPE_INIT_FUNCTIONS[spec.rope.scaling](config, torch.device("cpu"), seq_len=length)
    found, scale = frequencies(spec.rope, spec.head_dim, spec.max_positions, positions(length))
    assert torch.allclose(found, wanted, rtol=1e-6, atol=0)
    assert scale == pytest.approx(wanted_scale)


def test_gemma3_stretches_only_its_global_layers() -> None:
    spec = preset("gemma-3-4b")
    global_rope, local_rope = spec.rope_of(5), spec.rope_of(0)
    assert global_rope is not None
    assert local_rope is not None
    far, _ = frequencies(global_rope, spec.head_dim, spec.max_positions, positions(9))
    near, _ = frequencies(local_rope, spec.head_dim, spec.max_positions, positions(9))
    assert far[0] == pytest.approx(1 / 8)
    assert near[0] == 1
    assert near[-1] == pytest.approx(10_000 ** (-254 / 256), rel=1e-6)


def test_dynamic_scaling_starts_beyond_the_trained_length() -> None:
    rope = Rope(scaling="dynamic", factors=(("factor", 4.0),))
    plain = frequencies(Rope(), 16, 32, positions(8))[0]
    assert torch.equal(frequencies(rope, 16, 32, positions(32))[0], plain)
    assert (frequencies(rope, 16, 32, positions(33))[0][1:] < plain[1:]).all()


def test_scores_depend_on_distance_alone() -> None:
    rope = Rope(theta=100.0)
    torch.manual_seed(0)
    query, key = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def score(at: int, back: int) -> float:
        turned = [
            rotate(x, *tables(rope, 16, 64, torch.tensor([[p]]), torch.float32)) for x, p in ((query, at), (key, back))
        ]
        return (turned[0] * turned[1]).sum().item()

    assert score(5, 2) == pytest.approx(score(905, 902), abs=1e-3)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-3)


def test_what_is_not_rotated_is_left_alone_and_lengths_are_kept() -> None:
    x = torch.randn(2, 3, 5, 16)
    turned = rotate(x, *tables(Rope(rotated_share=0.5), 16, 64, positions(5), torch.float32))
    assert torch.equal(turned[..., 8:], x[..., 8:])
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-5)
    assert torch.equal(turned[:, :, 0], x[:, :, 0])


def test_angles_are_exact_far_out_in_bf16() -> None:
    cos, _ = tables(Rope(), 16, 64, torch.tensor([[100_001]]), torch.bfloat16)
    assert cos[0, 0, 0, 0].item() == pytest.approx(math.cos(100_001), abs=4e-3)

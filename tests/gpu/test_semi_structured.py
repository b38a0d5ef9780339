"""2:4 weights through torch's semi-structured products: the same numbers as the dense weights, in fewer bytes."""

from typing import Any

import pytest
import torch

from tightfit.compress.structure.pruning import Sparsity, magnitude
from tightfit.compress.structure.semi_structured import is_two_of_four, use_sparse_products
from tightfit.models.decoder import Decoder
from tightfit.models.spec import ModelSpec

SPEC = ModelSpec(
    family="llama",
    vocab_size=512,
    hidden_size=256,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=64,
    mlp_size=512,
    max_positions=128,
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sparse_products_are_the_dense_ones(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Decoder(SPEC).cuda().to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("layers.") and parameter.ndim == 2:
                parameter.copy_(magnitude(parameter, Sparsity(kept=2, group=4)))
        tokens = torch.arange(128, device="cuda")[None]
        exact = Decoder(SPEC).cuda().eval()
        exact.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
        truth, dense = exact(tokens).logits, model(tokens).logits
        before = model.get_parameter("layers.0.mlp.up.weight").nbytes
        assert is_two_of_four(model.get_parameter("layers.0.mlp.up.weight"))
        assert use_sparse_products(model) == 7 * SPEC.layers
        assert truth is not None
        assert dense is not None
        made = model(tokens).logits
        assert made is not None
        own_error = float((dense.float() - truth).abs().max())
        assert float((made.float() - truth).abs().max()) <= 2 * own_error + 1e-3
    weight: Any = model.get_parameter("layers.0.mlp.up.weight")
    held = sum(getattr(weight, part).nbytes for part in weight.__tensor_flatten__()[0])
    assert held <= before * 9 / 16 + 1024

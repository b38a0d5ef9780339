"""A tiny model with outliers in its weights, its tokenizer and its text, written once."""

from pathlib import Path

import pytest
import torch

from tests.models.test_tokenizer import CORPUS
from tightfit.models.decoder import Decoder
from tightfit.models.initialisation import init_weights
from tightfit.models.saving import write_model
from tightfit.models.spec import ModelSpec
from tightfit.models.text.tokenizer import Tokenizer, train_tokenizer

SPEC = ModelSpec(
    family="llama",
    vocab_size=272,
    hidden_size=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    mlp_size=128,
    max_positions=128,
    tied=True,
)


def random_model(spec: ModelSpec) -> Decoder:
    """Layers that add to the residual stream without drowning it, norms that are not one, an outlier channel."""
    torch.manual_seed(0)
    model = Decoder(spec)
    init_weights(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
                parameter[3] += 2
            elif parameter.ndim > 1:
                parameter.mul_(0.7 if "layers" in name else 4)
    return model.eval()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer(CORPUS, 265)


@pytest.fixture(scope="session")
def tiny(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny Llama."""
    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder, random_model(SPEC), tokenizer)
    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of text."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(CORPUS) * 2, encoding="utf-8")
    return path
